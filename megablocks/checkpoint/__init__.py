"""Checkpoints that are either complete or ignored, and where each format keeps a model's tensors. No Megatron."""
