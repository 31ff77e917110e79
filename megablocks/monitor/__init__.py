"""Reports and guards of a training run: FLOPs, MFU, expert load, heartbeat, environment, plots. No Megatron here."""
