"""Raise an error where the host waits for the GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def no_sync() -> Iterator[None]:
    """Raise RuntimeError, by torch's guard, where code under `with` synchronizes the host with CUDA."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
