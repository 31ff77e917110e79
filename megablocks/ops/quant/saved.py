"""Tensors kept for backward, quantised: what `save_for_backward` takes in their place, and the way back.

An op calls `pack` in its setup_context, so that the tensor itself is never saved, and `unpack` in its backward. There
the values live as long as one product needs them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megablocks.ops.library import unknown_to_autograd
from megablocks.ops.quant.quant import dequantize_op, quantize_op

OFF = -1
"""The number of bits that means: as it is."""


class Packed(NamedTuple):
    """How a tensor was packed; not a tensor itself, so an op keeps it on its ctx."""

    num_bits: int
    shape: torch.Size
    dtype: torch.dtype


def pack(t: Tensor | None, num_bits: int) -> tuple[Packed | None, Tensor | None, Tensor | None]:
    """t (..., H) → (how, what to save, what else to save). None, `OFF` and an empty tensor are saved as they are."""
    if t is None or num_bits == OFF or t.numel() == 0:
        return None, t, None
    return Packed(num_bits, t.shape, t.dtype), *quantize_op(t.detach().reshape(-1, t.shape[-1]), num_bits)


def unpack(how: Packed | None, saved: Tensor | None, scales: Tensor | None) -> Tensor | None:
    """What `pack` was given, as near as its bits allow.

    It is a function of what was packed, which autograd does not see: a second derivative through it raises.
    """
    if how is None:
        return saved
    assert saved is not None and scales is not None
    t = dequantize_op(saved, scales, how.num_bits, how.shape[-1], how.dtype).view(how.shape)
    return unknown_to_autograd(t, "what is kept quantised")
