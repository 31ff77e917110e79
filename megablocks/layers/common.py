"""Dtypes of layers that are built from `Arguments`, by the names of megablocks 0.10."""

from __future__ import annotations

import torch
from torch import Tensor

from megablocks.layers.arguments import Arguments
from megablocks.ops.library import under_autocast


def dtype(args: Arguments) -> torch.dtype | None:
    """Parameters' dtype: float16, bfloat16, or None for torch's default."""
    return args.dtype


def cast_if_autocast_enabled(tensor: Tensor) -> Tensor:
    """`tensor`, of any shape, in autocast's dtype where autocast is on for its device; float64 is left alone."""
    return under_autocast(tensor)[0]
