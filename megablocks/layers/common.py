"""Dtypes of layers that are built from `Arguments`, under the names of megablocks 0.10."""

from __future__ import annotations

import torch
from torch import Tensor

from megablocks.layers.arguments import Arguments
from megablocks.ops.library import under_autocast


def dtype(args: Arguments) -> torch.dtype | None:
    """Parameters' dtype: float16, bfloat16, or None for torch's default."""
    return args.dtype


def cast_if_autocast_enabled(tensor: Tensor) -> Tensor:
    """Return `tensor`, of any shape, in autocast's dtype if autocast is on for its device; float64 is not cast."""
    return under_autocast(tensor)[0]
