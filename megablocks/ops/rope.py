"""Rotary embedding: pairs of a head's entries are rotated by angles that depend on the position.

    y₁ = scale · (x₁ · cos φ₁ − x₂ · sin φ₁)        y₂ = scale · (x₂ · cos φ₂ + x₁ · sin φ₂)

    The two entries of a pair are R/2 apart, or neighbors if interleaved. Entries beyond R do not change.
    Backward multiplies by the transposed matrix of each pair.

Legend: S positions, B sequences, N heads, D entries of a head, R <= D rotated ones, φ (S, R) angles. φ₁ = φ₂ makes it a
rotation. Everything is float32 inside (float64 for float64) and rounded once. Source: RoFormer (arXiv 2104.09864).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megablocks.ops.library import custom_op


def _pairs(t: Tensor, interleaved: bool) -> tuple[Tensor, ...]:
    return (t[..., 0::2], t[..., 1::2]) if interleaved else t.chunk(2, -1)


def rope_ref(x: Tensor, angles: Tensor, interleaved: bool, scale: float, transposed: bool) -> Tensor:
    """x (S, B, N, D), angles (S, R) → y (S, B, N, D). transposed: multiply by the transposed matrices."""
    rotated = angles.shape[1]
    wide = torch.promote_types(x.dtype, torch.float32)
    x1, x2 = _pairs(x[..., :rotated].to(wide), interleaved)
    angles = angles.to(wide)[:, None, None]
    cos1, cos2 = _pairs(angles.cos() * scale, interleaved)
    sin1, sin2 = _pairs(angles.sin() * scale, interleaved)
    if transposed:
        sin1, sin2 = -sin2, -sin1
    y1, y2 = x1 * cos1 - x2 * sin1, x2 * cos2 + x1 * sin2
    y = torch.stack((y1, y2), -1).flatten(-2) if interleaved else torch.cat((y1, y2), -1)
    return torch.cat((y.to(x.dtype), x[..., rotated:]), -1)


rope_op = custom_op(
    "megablocks::rope", fake=lambda a: a.x.new_empty(a.x.shape), kernel="megablocks.ops.rope_triton:rope_launch"
)(rope_ref)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, angles, *ctx.options = inputs
    ctx.save_for_backward(angles)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    interleaved, scale, transposed = ctx.options
    return rope_op(dy, *ctx.saved_tensors, interleaved, scale, not transposed), None, None, None, None


rope_op.register_autograd(_backward, setup_context=_setup_context)


def rope(x: Tensor, angles: Tensor, *, interleaved: bool = False, scale: float = 1.0) -> Tensor:
    """Rotary embedding of heads.

    Args:
        x: (S, B, N, D) floating. If the last stride is not 1, x is copied.
        angles: (S, R) floating, in radians, R even and at most D; without a gradient.
        interleaved: a pair is two neighbors; otherwise its entries are R/2 apart.
        scale: multiplies the rotated entries.

    Returns:
        (S, B, N, D), contiguous, of x's dtype.

    Raises:
        ValueError: shapes that do not fit, or angles that require a gradient.
    """
    if x.dim() != 4:
        raise ValueError(f"x is {tuple(x.shape)}: must be (positions, sequences, heads, entries of a head)")
    if angles.dim() != 2 or angles.shape[0] != x.shape[0] or angles.shape[1] % 2 or angles.shape[1] > x.shape[3]:
        allowed = f"({x.shape[0]}, an even number up to {x.shape[3]})"
        raise ValueError(f"angles is {tuple(angles.shape)}: must be {allowed} for x {tuple(x.shape)}")
    if angles.requires_grad:
        raise ValueError("angles requires a gradient: detach it")
    return rope_op(x, angles, interleaved, scale, False)
