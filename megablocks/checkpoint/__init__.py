"""Checkpoints that are either complete or ignored: manifests with hashes. Needs neither torch nor Megatron."""
