"""Checkpoints that are complete or ignored, and where each format stores a model's tensors. It needs no Megatron."""
