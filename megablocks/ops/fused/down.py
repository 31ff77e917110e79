"""Activation and down-projection that keep only the pre-activation for backward.

    y[p] = act(z[p], g[p]) · w[e]      for offsets[e] <= p < offsets[e+1]

Legend: R rows, E experts, I expert width, H hidden. Apart, the product keeps its input act(z, g), (R, I), for dW; here
backward computes it again from z and g, which the activation keeps anyway. Unused rows are as in `grouped_mm`.
Source: megablocks 0.10's memory-optimised MLP; SonicMoE (arXiv 2512.14080), section 3.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from megablocks.ops.activation import activation_backward_op, activation_op, activation_ref, check_activation
from megablocks.ops.grouped.grouped_mm import (
    check_grouped,
    grouped_mm_op,
    grouped_mm_ref,
    is_transposed,
    under_autocast,
    weight_gradient,
)
from megablocks.ops.library import custom_op
from megablocks.ops.quant.saved import OFF, pack, unpack


def activate_and_project_ref(
    pre: Tensor, gate_pre: Tensor | None, w: Tensor, offsets: Tensor, name: str, approximate: str
) -> Tensor:
    """pre, gate_pre (R, I), w (E, I, H), offsets (E+1,) → (R, H)."""
    return grouped_mm_ref(activation_ref(pre, gate_pre, name, approximate), w, offsets)


@custom_op("megablocks::activate_and_project", mutates_args=())
def activate_and_project_op(
    pre: Tensor, gate_pre: Tensor | None, w: Tensor, offsets: Tensor, name: str, approximate: str,
    num_bits: int = OFF,
) -> Tensor:  # fmt: skip
    return grouped_mm_op(activation_op(pre, gate_pre, name, approximate), w, offsets)


@activate_and_project_op.register_fake
def _(
    pre: Tensor, gate_pre: Tensor | None, w: Tensor, offsets: Tensor, name: str, approximate: str,
    num_bits: int = OFF,
) -> Tensor:  # fmt: skip
    return pre.new_empty(pre.shape[0], w.shape[2])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    pre, gate_pre, w, offsets, ctx.name, ctx.approximate, num_bits = inputs
    need_pre, need_gate, need_w = ctx.needs_input_grad[:3]
    ctx.transposed = is_transposed(w)
    ctx.packed_pre, *kept_pre = pack(pre, num_bits)
    ctx.packed_gate, *kept_gate = pack(gate_pre, num_bits)
    ctx.save_for_backward(*kept_pre, *kept_gate, w if need_pre or need_gate else None, offsets)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    pre, pre_scales, gate_pre, gate_scales, w, offsets = ctx.saved_tensors
    pre, gate_pre = unpack(ctx.packed_pre, pre, pre_scales), unpack(ctx.packed_gate, gate_pre, gate_scales)
    d_pre = d_gate = dw = None
    if ctx.needs_input_grad[0] or ctx.needs_input_grad[1]:
        d_act = grouped_mm_op(dy, w.transpose(1, 2), offsets)
        d_pre, d_gate = activation_backward_op(d_act, pre, gate_pre, ctx.name, ctx.approximate)
        d_gate = None if gate_pre is None else d_gate
    if ctx.needs_input_grad[2]:
        act = activation_op(pre, gate_pre, ctx.name, ctx.approximate)
        dw = weight_gradient(act, dy, offsets, ctx.transposed)
    return d_pre, d_gate, dw, None, None, None, None


activate_and_project_op.register_autograd(_backward, setup_context=_setup_context)


def activate_and_project(
    pre: Tensor, gate_pre: Tensor | None, w: Tensor, offsets: Tensor, name: str, approximate: str = "tanh",
    *, num_bits: int = OFF,
) -> Tensor:  # fmt: skip
    """`grouped_mm(activate(pre, gate_pre, name, approximate), w, offsets)`, keeping the activation only in forward.

    Args:
        pre, gate_pre, name, approximate: as in `activate`, (R, I).
        w, offsets: as in `grouped_mm`, w (E, I, H).
        num_bits: 4 or 8 keep pre and gate_pre quantised (`ops.quant`); -1 as they are.

    Returns:
        (R, H) in pre's dtype; rows >= offsets[E] are unspecified.

    Raises:
        ValueError: as `activate` and `grouped_mm`.
    """
    pre, w = under_autocast(pre, w)
    if gate_pre is not None:
        (gate_pre,) = under_autocast(gate_pre)
    check_activation(pre, gate_pre, name, approximate)
    check_grouped(pre, w, offsets)
    return activate_and_project_op(pre, gate_pre, w, offsets, name, approximate, num_bits)
