"""A bias and an activation without a gate in one pass, and their gradients.

    y = f(x + bias)      dx = dY · f'(x + bias)      dbias = Σ dx over the rows      f, f': activation_table.py

Shapes: x and y (…, I), bias (I,). Everything is float32 inside (float64 for float64) and rounded once, so dbias sums
unrounded values. The sum has a fixed order, so reruns are bit-identical. Only x and bias are saved for backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megablocks.ops.activation import check_activation
from megablocks.ops.activation_table import UNARY, Activation
from megablocks.ops.library import custom_op, runs_triton, save_inputs


def _biased(x: Tensor, bias: Tensor) -> Tensor:
    """x + bias in float32, or in float64 for float64."""
    wide = x.contiguous().to(torch.promote_types(x.dtype, torch.float32))
    return wide + bias.to(wide.dtype)


def biased_activation_ref(x: Tensor, bias: Tensor, activation: Activation) -> Tensor:
    """x (…, I), bias (I,) → (…, I), contiguous."""
    return UNARY[activation.unary].value(_biased(x, bias), activation.approximate).to(x.dtype)


def biased_activation_backward_ref(
    dy: Tensor, x: Tensor, bias: Tensor, sums: bool, activation: Activation
) -> tuple[Tensor, Tensor | None]:
    """dy, x (…, I), bias (I,) → dx (…, I), and dbias (I,) in float32 (float64 for float64); None unless `sums`."""
    z = _biased(x, bias)
    dx = UNARY[activation.unary].backward(dy.contiguous().to(z.dtype), z, activation.approximate)
    return dx.to(x.dtype), dx.reshape(dx.shape[:-1].numel(), len(bias)).sum(0) if sums else None


def _fake_backward(a: Any) -> tuple[Tensor | None, ...]:
    wide = torch.promote_types(a.x.dtype, torch.float32)
    return a.x.new_empty(a.x.shape), a.x.new_empty(a.x.shape[-1], dtype=wide) if a.sums else None


biased_activation_op = custom_op(
    "megablocks::biased_activation",
    fake=lambda a: a.x.new_empty(a.x.shape),
    kernel="megablocks.ops.biased_activation_triton:biased_activation_launch",
)(biased_activation_ref)
biased_activation_backward_op = custom_op(
    "megablocks::biased_activation_backward",
    fake=_fake_backward,
    kernel="megablocks.ops.biased_activation_triton:biased_activation_backward_launch",
    takes=lambda dy, x, *_: runs_triton(x),
)(biased_activation_backward_ref)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    need_x, need_bias = ctx.needs_input_grad[:2]
    dx, d_bias = biased_activation_backward_op(dy, *ctx.saved_tensors, need_bias, ctx.option)
    return dx if need_x else None, d_bias if need_bias else None, None


biased_activation_op.register_autograd(_backward, setup_context=save_inputs)


def activate_biased(x: Tensor, bias: Tensor, activation: Activation) -> Tensor:
    """Add a bias and apply an activation.

    Args:
        x: (…, I) floating.
        bias: (I,) floating, of any dtype.
        activation: one without a gate, and the form of gelu.

    Returns:
        (…, I) in x's dtype.

    Raises:
        ValueError: an unknown or gated activation, or a bias of another shape.
    """
    check_activation(x, None, activation)
    if bias.dim() != 1 or bias.shape != x.shape[-1:]:
        raise ValueError(f"bias is {tuple(bias.shape)}: must be (I,) for x (…, I), which is {tuple(x.shape)}")
    return biased_activation_op(x, bias, activation)
