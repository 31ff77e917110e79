"""Activation and down-projection that save only the pre-activation for backward.

    y[p] = act(pre[p], gate[p]) · w2[e] + bias[e]      for offsets[e] <= p < offsets[e+1]

Legend: R rows, E experts, I expert width, H hidden. As separate ops, the product saves its input act(pre, gate), which
is (R, I), for dW2. Here backward computes it again from pre and gate, which the activation saves anyway. Unused rows
are as in `grouped_mm`.
Source: megablocks 0.10's memory-optimized MLP; SonicMoE (arXiv 2512.14080), section 3.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from megablocks.ops.activation import activation_backward_op, activation_op, check_activation
from megablocks.ops.activation_table import Activation
from megablocks.ops.grouped.bias import expert_sum_op
from megablocks.ops.grouped.grouped_mm import check_grouped, grouped_mm_op, is_transposed, weight_gradient
from megablocks.ops.library import custom_op, under_autocast
from megablocks.ops.quant.quant import OFF, pack, unpack


@custom_op("megablocks::activate_and_project", fake=lambda a: a.pre.new_empty(a.pre.shape[0], a.w2.shape[2]))
def activate_and_project_op(
    pre: Tensor, gate: Tensor | None, w2: Tensor, bias: Tensor | None, offsets: Tensor, activation: Activation,
    num_bits: int = OFF,
) -> Tensor:  # fmt: skip
    """pre, gate (R, I), w2 (E, I, H), bias (E, H), offsets (E+1,) → (R, H). The ops that it calls have the kernels."""
    return grouped_mm_op(activation_op(pre, gate, activation), w2, offsets, bias)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    pre, gate, w2, _, offsets, ctx.activation, num_bits = inputs
    need_pre, need_gate, need_w2 = ctx.needs_input_grad[:3]
    ctx.transposed = is_transposed(w2)
    ctx.packed_pre, *kept_pre = pack(pre, num_bits)
    ctx.packed_gate, *kept_gate = pack(gate, num_bits)
    ctx.save_for_backward(*kept_pre, *kept_gate, w2 if need_pre or need_gate else None, offsets)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    pre, pre_scales, gate, gate_scales, w2, offsets = ctx.saved_tensors
    pre, gate = unpack(ctx.packed_pre, pre, pre_scales), unpack(ctx.packed_gate, gate, gate_scales)
    need_pre, need_gate, need_w2, need_bias = ctx.needs_input_grad[:4]
    d_pre = d_gate = dw2 = None
    if need_pre or need_gate:
        d_act = grouped_mm_op(dy, w2.transpose(1, 2), offsets)
        d_pre, d_gate = activation_backward_op(d_act, pre, gate, ctx.activation)
        d_gate = None if gate is None else d_gate
    if need_w2:
        dw2 = weight_gradient(activation_op(pre, gate, ctx.activation), dy, offsets, ctx.transposed)
    return d_pre, d_gate, dw2, expert_sum_op(dy, offsets) if need_bias else None, None, None, None


activate_and_project_op.register_autograd(_backward, setup_context=_setup_context)


def activate_and_project(
    pre: Tensor, gate: Tensor | None, w2: Tensor, offsets: Tensor, activation: Activation, *,
    bias: Tensor | None = None, num_bits: int = OFF,
) -> Tensor:  # fmt: skip
    """`grouped_mm(activate(pre, gate, activation), w2, offsets, bias)`, without saving the activation for backward.

    Args:
        pre, gate, activation: as in `activate`, (R, I).
        w2, offsets, bias: as in `grouped_mm`, w2 (E, I, H).
        num_bits: 4 or 8 save pre and gate quantized (`ops.quant`); -1 saves them as they are.

    Returns:
        (R, H) in pre's dtype; rows >= offsets[E] are unspecified.
    """
    pre, gate, w2 = under_autocast(pre, gate, w2)
    check_activation(pre, gate, activation)
    check_grouped(pre, w2, offsets, bias)
    return activate_and_project_op(pre, gate, w2, bias, offsets, activation, num_bits)
