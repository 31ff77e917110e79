"""The dtype in which an op computes."""

from __future__ import annotations

import torch


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32 for every floating dtype but float64, which stays what it is so that references can run in it."""
    return torch.float64 if dtype == torch.float64 else torch.float32
