"""What a run tells about itself: FLOPs, MFU, expert load, guards, heartbeat, environment, pictures. No Megatron."""
