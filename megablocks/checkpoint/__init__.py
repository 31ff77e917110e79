"""Checkpoints that are whole or not there: markers, hashes, the newest complete one. No torch, no Megatron."""
