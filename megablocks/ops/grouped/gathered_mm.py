"""Gather and product in one: each expert multiplies its tokens in place, without a copy of their rows.

    pre[p] = x[gather[p]] · w[e] + bias[e]       for offsets[e] <= p < offsets[e+1]; if gated also gate[p], with v
    dX[t] = Σ over the rows p of token t of d_pre[p] · w[e]ᵀ + d_gate[p] · v[e]ᵀ
    dW[e] = Σ over the rows p of e of x[gather[p]]ᵀ · d_pre[p], exactly 0 for an expert without rows; dV likewise

Legend: T tokens, H hidden, R rows, V <= R valid ones, E experts, N outer size. Rows p >= V are never read, and those
rows of a result are unspecified. x (T, H) is saved for backward. Backward's only (R, H) tensor holds the rows whose
sums over a token are dX. They are summed in the order of the token's pairs, so reruns are bit-identical.
Source: ScatterMoE (arXiv 2403.08245) and SonicMoE (arXiv 2512.14080) fuse the gather in the same way.

Two weights share a call because their gradients do: one product over 2·N computes dX, where two products would write,
read and add (R, H) each. In forward they stay two products, since one for both was no faster. `grouped_mm` chooses the
kernels; torch's kernels get rows that were gathered before.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megablocks.ops.grouped.bias import expert_sum_op
from megablocks.ops.grouped.grouped_mm import (
    check_grouped,
    grouped_mm_dw_op,
    grouped_mm_dw_ref,
    grouped_mm_op,
    grouped_mm_ref,
    hopper_ragged_k,
    hopper_ragged_m,
    ragged_k_kernels,
    ragged_m_kernels,
)
from megablocks.ops.library import custom_op, under_autocast
from megablocks.ops.permute.rows import combine_op, gather_op
from megablocks.ops.quant.quant import OFF, check_bits, pack, unpack
from megablocks.ops.routing.dispatch import Dispatch


def grouped_mm_sum_ref(x: Tensor, w: Tensor, x2: Tensor, v: Tensor, offsets: Tensor) -> Tensor:
    """x (R, K), w (E, K, N), x2 (R, L), v (E, L, N) → x·w + x2·v (R, N), rounded once."""
    acc = torch.promote_types(x.dtype, torch.float32)
    total = grouped_mm_ref(x.to(acc), w.to(acc), offsets) + grouped_mm_ref(x2.to(acc), v.to(acc), offsets)
    return total.to(x.dtype)


@custom_op("megablocks::grouped_mm_sum", fake=lambda a: a.x.new_empty(a.x.shape[0], a.w.shape[2]))
def grouped_mm_sum_op(x: Tensor, w: Tensor, x2: Tensor, v: Tensor, offsets: Tensor) -> Tensor:
    if not x.is_cuda:
        return grouped_mm_sum_ref(x, w, x2, v, offsets)
    if (hopper := hopper_ragged_m(x)) and hopper.supports_sum(x, w, x2, v, offsets):
        return hopper.ragged_m(x, w, offsets, x2=x2, v=v)
    return grouped_mm_op(x, w, offsets) + grouped_mm_op(x2, v, offsets)


@custom_op(
    "megablocks::gathered_mm_dw",
    fake=lambda a: a.x.new_empty(a.dispatch.num_experts, a.dy.shape[1], a.x.shape[1]),
)
def gathered_mm_dw_op(dy: Tensor, x: Tensor, dispatch: Dispatch) -> Tensor:
    """dy (R, N), x (T, H) → dWᵀ (E, N, H), in the layout of a Linear's weight."""
    d, offsets = dispatch, dispatch.expert_offsets
    if d.num_rows > 0 and (kernels := ragged_k_kernels(dy, x, offsets)):
        return kernels.ragged_k(dy, x, offsets, d.gather)
    return grouped_mm_dw_op(dy, gather_op(x, d), offsets)


@custom_op(
    "megablocks::gathered_mm_dw_halves",
    fake=lambda a: a.x.new_empty(a.dispatch.num_experts, 2 * a.dy.shape[1], a.x.shape[1]),
)
def gathered_mm_dw_halves_op(dy: Tensor, dy2: Tensor, x: Tensor, dispatch: Dispatch) -> Tensor:
    """gathered_mm_dw_op of dy and, below it, of dy2 (R, N) → (E, 2·N, H), for a parameter that holds both matrices."""
    d, offsets = dispatch, dispatch.expert_offsets
    hopper = hopper_ragged_k(x) if d.num_rows > 0 else None
    if hopper is None or not all(hopper.supports_k(one, x, offsets) for one in (dy, dy2)):
        return torch.cat([gathered_mm_dw_op(one, x, d) for one in (dy, dy2)], dim=1)
    whole = x.new_empty(d.num_experts, 2 * dy.shape[1], x.shape[1])
    for one, half in zip((dy, dy2), whole.chunk(2, dim=1), strict=True):
        hopper.ragged_k(one, x, offsets, d.gather, out=half)
    return whole


@custom_op("megablocks::gathered_mm_dw_add", mutates_args=("total",), fake=lambda *_: None)
def gathered_mm_dw_add_op(total: Tensor, dy: Tensor, x: Tensor, dispatch: Dispatch) -> None:
    """Add gathered_mm_dw_op's sum, before it is rounded, to total (E, N, H), float32 and contiguous."""
    d, offsets = dispatch, dispatch.expert_offsets
    if d.num_rows == 0:
        return
    if kernels := ragged_k_kernels(dy, x, offsets, add=True):
        kernels.ragged_k(dy, x, offsets, d.gather, add_to=total)
    else:
        total += grouped_mm_dw_ref(dy.to(total.dtype), gather_op(x, d).to(total.dtype), offsets)


@custom_op(
    "megablocks::gathered_mm",
    fake=lambda a: tuple(None if w is None else a.x.new_empty(a.dispatch.num_rows, w.shape[2]) for w in (a.w, a.v)),
)
def gathered_mm_op(
    x: Tensor, w: Tensor, v: Tensor | None, bias: Tensor | None, gate_bias: Tensor | None, dispatch: Dispatch,
    num_bits: int = OFF,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The product (R, N) with w and that with v, which is empty without v."""
    d, offsets = dispatch, dispatch.expert_offsets
    factors = [(w, bias)] if v is None else [(w, bias), (v, gate_bias)]
    if kernels := ragged_m_kernels(x, offsets, d.pair.shape[0], *(t for t, _ in factors)):
        products = [kernels.ragged_m(x, t, offsets, d.gather, bias=b) for t, b in factors]
    else:
        rows = gather_op.implementation(x, d) if x.is_cuda else x.index_select(0, d.gather)
        products = [grouped_mm_op.implementation(rows, t, offsets, b) for t, b in factors]
    return products[0], None if v is None else products[1]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, w, v, _, _, dispatch, num_bits = inputs
    need_x, need_w, need_v = ctx.needs_input_grad[:3]
    x = x if need_w or need_v else None
    ctx.packed, *kept = (None, x, None) if num_bits == OFF else pack(x, num_bits)
    ctx.save_for_backward(*kept, *((w, v) if need_x else (None, None)), *dispatch[:5])


def _backward(ctx: Any, d_pre: Tensor, d_gate: Tensor) -> tuple[Tensor | None, ...]:
    codes, scales, w, v, *indices = ctx.saved_tensors
    dispatch = Dispatch(*indices)
    need_x, need_w, need_v, *need_biases = ctx.needs_input_grad[:5]  # read again, as a caller may want one of them
    dx = dw = dv = None
    if need_x:
        if v is None:
            d_rows = grouped_mm_op(d_pre, w.transpose(1, 2), dispatch.expert_offsets)
        else:
            d_rows = grouped_mm_sum_op(d_pre, w.transpose(1, 2), d_gate, v.transpose(1, 2), dispatch.expert_offsets)
        dx = combine_op(d_rows, None, dispatch)
    x = unpack(ctx.packed, codes, scales) if need_w or need_v else None
    if need_w:
        dw = gathered_mm_dw_op(d_pre, x, dispatch).transpose(1, 2)
    if need_v:
        dv = gathered_mm_dw_op(d_gate, x, dispatch).transpose(1, 2)
    needed = zip((d_pre, d_gate), need_biases, strict=True)
    d_biases = [expert_sum_op(d, dispatch.expert_offsets) if need else None for d, need in needed]
    return dx, dw, dv, *d_biases, None, None


gathered_mm_op.register_autograd(_backward, setup_context=_setup_context)


def _check(x: Tensor, w: Tensor, bias: Tensor | None, dispatch: Dispatch, num_bits: int) -> None:
    num_tokens = dispatch.token_offsets.shape[0] - 1
    if x.dim() != 2 or x.shape[0] != num_tokens:
        raise ValueError(f"x is {tuple(x.shape)}: must be (T, H) with T={num_tokens}, as in the dispatch")
    check_grouped(x, w, dispatch.expert_offsets, bias)
    if num_bits != OFF:
        check_bits(num_bits, "4, 8, or -1 for off")


def gathered_mm(
    x: Tensor, w: Tensor, dispatch: Dispatch, *, bias: Tensor | None = None, num_bits: int = OFF
) -> Tensor:
    """`grouped_mm(gather(x, dispatch), w, dispatch.expert_offsets, bias)`, without writing or saving the gathered rows.

    Args:
        x: (T, H) floating.
        w: (E, H, N), same dtype, of any stride. A view `w1.transpose(1, 2)` of (E, N, H) is best: dw gets its strides.
        dispatch: of T tokens and R pairs.
        bias: (E, N) floating, or None.
        num_bits: 4 or 8 save x quantized (`ops.quant`) for dW; -1 saves it as it is.

    Returns:
        (R, N) in x's dtype; rows >= V are unspecified. Differentiable in x, w and bias.

    Raises:
        ValueError: shapes or dtypes that do not fit, or num_bits other than 4, 8 and -1.
    """
    x, w = under_autocast(x, w)
    _check(x, w, bias, dispatch, num_bits)
    return gathered_mm_op(x, w, None, bias, None, dispatch, num_bits)[0]


def gathered_mm_gated(
    x: Tensor, w1: Tensor, v1: Tensor, dispatch: Dispatch, *, bias: Tensor | None = None,
    gate_bias: Tensor | None = None, num_bits: int = OFF,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`gathered_mm` for both up-projections of a gated MLP. One product computes the gradient of x.

    Args:
        x, dispatch, num_bits: as in `gathered_mm`.
        w1, v1: (E, H, N) of equal shape.
        bias, gate_bias: (E, N) floating, or None.

    Returns:
        pre and gate, x·w1 + bias and x·v1 + gate_bias, (R, N) each; rows >= V are unspecified. Differentiable in x, the
        matrices and the biases.

    Raises:
        ValueError: as for `gathered_mm`, or w1 and v1 differ in shape or dtype.
    """
    x, w1, v1 = under_autocast(x, w1, v1)
    _check(x, w1, bias, dispatch, num_bits)
    if w1.shape != v1.shape or w1.dtype != v1.dtype:
        raise ValueError(f"v1 is {tuple(v1.shape)} {v1.dtype}: must be {tuple(w1.shape)} {w1.dtype}, as w1")
    check_grouped(x, v1, dispatch.expert_offsets, gate_bias)
    return gathered_mm_op(x, w1, v1, bias, gate_bias, dispatch, num_bits)
