"""The clamped gate of gpt-oss and of the models that followed it, from both halves of an up-projection.

    y = (clamp(b, -limit, limit) + offset) · z · σ(alpha · z)       z = min(a, limit)

a is the argument of the activation and b its factor: the halves of h (R, 2·I), or its alternating columns. gpt-oss has
limit 7, alpha 1.702 and offset 1; DeepSeek-V4 clamps SwiGLU: alpha 1, offset 0. With torch operations each step would
read, write and save (R, I) values. Here only h is saved; float32 inside (float64 for float64), rounded once.
Source: the models' `_apply_gate` in transformers 5.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from megablocks.ops.library import custom_op, runs_triton, save_inputs


class Clamp(NamedTuple):
    """The constants of a clamped gate; interleaved: a and b are alternating columns, not halves."""

    limit: float
    alpha: float = 1.0
    offset: float = 0.0
    interleaved: bool = False


def _factors(h: Tensor, clamp: Clamp) -> tuple[Tensor, Tensor]:
    """a and b (R, I), views of h (R, 2·I)."""
    return (h[:, ::2], h[:, 1::2]) if clamp.interleaved else h.chunk(2, dim=1)  # type: ignore[return-value]


def clamped_gate_ref(h: Tensor, clamp: Clamp) -> Tensor:
    """h (R, 2·I) → (R, I), contiguous."""
    a, b = _factors(h.to(torch.promote_types(h.dtype, torch.float32)), clamp)
    z = a.clamp(max=clamp.limit)
    y = (b.clamp(-clamp.limit, clamp.limit) + clamp.offset) * (z * torch.sigmoid(clamp.alpha * z))
    return y.to(h.dtype).contiguous()


def clamped_gate_backward_ref(grad: Tensor, h: Tensor, clamp: Clamp) -> Tensor:
    """grad (R, I), h (R, 2·I) → the gradient of h. Values beyond the limit get none (in torch 2.15, at it too)."""
    a, b = _factors(h.to(torch.promote_types(h.dtype, torch.float32)), clamp)
    limit, alpha, offset, _ = clamp
    z = a.clamp(max=limit)
    sigma = torch.sigmoid(alpha * z)
    slope = (b.clamp(-limit, limit) + offset) * sigma * (1 + alpha * z * (1 - sigma))
    d_h = h.new_empty(h.shape)
    d_a, d_b = _factors(d_h, clamp)
    d_a.copy_(torch.where(a > limit, 0, grad * slope))
    d_b.copy_(torch.where(b.abs() > limit, 0, grad * z * sigma))
    return d_h


clamped_gate_op = custom_op(
    "megablocks::clamped_gate",
    fake=lambda a: a.h.new_empty(a.h.shape[0], a.h.shape[1] // 2),
    kernel="megablocks.ops.activation_triton:clamped_gate_launch",
)(clamped_gate_ref)
clamped_gate_backward_op = custom_op(
    "megablocks::clamped_gate_backward",
    fake=lambda a: a.h.new_empty(a.h.shape),
    kernel="megablocks.ops.activation_triton:clamped_gate_backward_launch",
    takes=lambda grad, h, clamp: runs_triton(h),
)(clamped_gate_backward_ref)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return clamped_gate_backward_op(grad, *ctx.saved_tensors, ctx.option), None


clamped_gate_op.register_autograd(_backward, setup_context=save_inputs)


def clamped_gate(h: Tensor, clamp: Clamp) -> Tensor:
    """The gate of an up-projection's result.

    Args:
        h: (R, 2·I) floating.
        clamp: the gate's constants; limit >= 0.

    Returns:
        (R, I) in h's dtype.

    Raises:
        ValueError: h without two equal halves, or a negative limit.
    """
    if h.dim() != 2 or h.shape[1] % 2:
        raise ValueError(f"h is {tuple(h.shape)}: must be (R, 2·I)")
    if not clamp.limit >= 0:
        raise ValueError(f"limit={clamp.limit!r}: must be >= 0")
    return clamped_gate_op(h, clamp)
