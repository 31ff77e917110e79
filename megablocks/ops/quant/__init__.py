"""Quantised copies of tensors that backward needs."""
