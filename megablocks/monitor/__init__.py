"""What a run tells about itself: FLOPs and MFU, expert load, guards, heartbeat, environment, pictures. No Megatron here."""
