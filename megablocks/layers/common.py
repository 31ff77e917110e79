"""Dtypes of layers that are built from `Arguments`, by the names of megablocks 0.10."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

from megablocks.layers.arguments import Arguments


def dtype(args: Arguments) -> torch.dtype | None:
    """Parameters' dtype: float16, bfloat16, or None for torch's default."""
    return args.dtype


def cast_if_autocast_enabled(tensor: Tensor) -> Tensor:
    """`tensor` in autocast's dtype where autocast is on for its device; float64 is left alone, as torch does."""
    kind = tensor.device.type
    if not torch.is_autocast_enabled(kind) or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(torch.get_autocast_dtype(kind))


def without_autocast(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    """A block in which autocast is off for the tensor's device; nothing where it is off already, which is cheaper."""
    kind = tensor.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else contextlib.nullcontext()
