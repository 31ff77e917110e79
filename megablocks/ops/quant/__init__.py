"""Quantized copies of tensors that backward needs."""
