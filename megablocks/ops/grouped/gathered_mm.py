"""Gather and product in one: each expert multiplies its tokens where they stand, without a copy of their rows.

    y[p] = x[gather[p]] · w[e]                   for offsets[e] <= p < offsets[e+1]; for a gated MLP also z[p], with v
    dX[t] = Σ over the rows p of token t of dY[p] · w[e]ᵀ + dZ[p] · v[e]ᵀ
    dW[e] = Σ over the rows p of e of x[gather[p]]ᵀ · dY[p], exactly 0 for an expert without rows; dV likewise

Legend: T tokens, H hidden, R rows, V <= R valid ones, E experts, N outer size. Rows p >= V are never read, and what
stands there in a result is unspecified. Backward keeps x (T, H) and no (R, H) but the one whose tokens' sum is dX; a
token's rows are summed in the order of its pairs, so reruns are bit-identical.
Source: ScatterMoE (arXiv 2403.08245) and SonicMoE (arXiv 2512.14080) fuse the gather likewise.

Two weights share a call because their gradients of x do: one product over 2·N sums dX where two would write, read and
add (R, H) each; and their own gradients are one launch, which reads x's rows once. Forward they stay two: one for both
was no faster (benchmarks/NOTES.md). What runs where is `grouped_mm`'s choice; torch's kernels get rows gathered
beforehand.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megablocks.ops.dtypes import accumulation_dtype
from megablocks.ops.grouped.bias import expert_of_row
from megablocks.ops.grouped.grouped_mm import (
    check_grouped,
    grouped_mm_dw_op,
    grouped_mm_dw_ref,
    grouped_mm_op,
    grouped_mm_ref,
    has_torch_kernel,
    hopper_kernels,
    twin_kernels,
    under_autocast,
)
from megablocks.ops.library import custom_op
from megablocks.ops.permute.combine import combine_op
from megablocks.ops.permute.gather import gather_op
from megablocks.ops.quant.saved import OFF, pack, unpack
from megablocks.ops.routing.dispatch import Dispatch


def grouped_mm_sum_ref(x: Tensor, w: Tensor, x2: Tensor, w2: Tensor, offsets: Tensor) -> Tensor:
    """x (R, K), w (E, K, N), x2 (R, K), w2 (E, K, N) → x·w + x2·w2 (R, N), rounded once."""
    acc = accumulation_dtype(x.dtype)
    total = grouped_mm_ref(x.to(acc), w.to(acc), offsets) + grouped_mm_ref(x2.to(acc), w2.to(acc), offsets)
    return total.to(x.dtype)


@custom_op("megablocks::grouped_mm_sum", mutates_args=())
def grouped_mm_sum_op(x: Tensor, w: Tensor, x2: Tensor, w2: Tensor, offsets: Tensor) -> Tensor:
    if not x.is_cuda:
        return grouped_mm_sum_ref(x, w, x2, w2, offsets)
    if (hopper := hopper_kernels(x)) and hopper.supports_sum(x, w, x2, w2, offsets):
        return hopper.ragged_m_sum(x, w, x2, w2, offsets)
    return grouped_mm_op(x, w, offsets) + grouped_mm_op(x2, w2, offsets)


@grouped_mm_sum_op.register_fake
def _(x: Tensor, w: Tensor, x2: Tensor, w2: Tensor, offsets: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], w.shape[2])


@custom_op("megablocks::grouped_mm_outer", mutates_args=())
def grouped_mm_outer_op(
    x: Tensor, w: Tensor, x2: Tensor | None, w2: Tensor | None, slope: Tensor, right: Tensor, offsets: Tensor
) -> Tensor:
    """x (R, K), w (E, K, N), x2, w2 the same or None, slope (R,), right (E, N) → (R, N).

    y[r] = x[r]·w[e] (+ x2[r]·w2[e]) + slope[r]·right[e]; unused rows are unspecified. Rounded once, but on a GPU where
    Hopper's kernels do not run: there each term is, and the slope.
    """
    assert (x2 is None) == (w2 is None), "both or neither"
    if (hopper := hopper_kernels(x)) and hopper.supports_outer(slope, right, w):
        if x2 is None or w2 is None:
            taken = hopper.supports_m(x, w, offsets, x.shape[0])
        else:
            taken = hopper.supports_sum(x, w, x2, w2, offsets)
        if taken:
            return hopper.ragged_m_outer(x, w, x2, w2, slope, right, offsets)
    acc = x.dtype if x.is_cuda else accumulation_dtype(x.dtype)
    rows = grouped_mm_op(x.to(acc), w.to(acc), offsets)
    if x2 is not None and w2 is not None:
        rows += grouped_mm_op(x2.to(acc), w2.to(acc), offsets)
    expert = expert_of_row(offsets, rows.shape[0]).clamp_(max=right.shape[0] - 1)
    return rows.addcmul_(slope.to(acc).unsqueeze(1), right.to(acc).index_select(0, expert)).to(x.dtype)


@grouped_mm_outer_op.register_fake
def _(
    x: Tensor, w: Tensor, x2: Tensor | None, w2: Tensor | None, slope: Tensor, right: Tensor, offsets: Tensor
) -> Tensor:
    return x.new_empty(x.shape[0], w.shape[2])


@custom_op("megablocks::gathered_mm_dw", mutates_args=())
def gathered_mm_dw_op(
    dy: Tensor, x: Tensor, pair: Tensor, gather: Tensor, scatter: Tensor, token_offsets: Tensor, offsets: Tensor
) -> Tensor:
    """dy (R, N), x (T, H) → dWᵀ (E, N, H), as a Linear's weight lies."""
    if gather.shape[0] > 0:
        if (hopper := hopper_kernels(x)) and hopper.supports_k(dy, x, offsets):
            return hopper.ragged_k(dy, x, offsets, gather)
        if not has_torch_kernel(x) and (twin := twin_kernels(x)):
            return twin.ragged_k(dy, x, offsets, gather)
    return grouped_mm_dw_op(dy, gather_op(x, pair, gather, scatter, token_offsets), offsets)


@gathered_mm_dw_op.register_fake
def _(
    dy: Tensor, x: Tensor, pair: Tensor, gather: Tensor, scatter: Tensor, token_offsets: Tensor, offsets: Tensor
) -> Tensor:
    return x.new_empty(offsets.shape[0] - 1, dy.shape[1], x.shape[1])


@custom_op("megablocks::gathered_mm_dw_add", mutates_args=("total",))
def gathered_mm_dw_add_op(
    total: Tensor, dy: Tensor, x: Tensor, pair: Tensor, gather: Tensor, scatter: Tensor, token_offsets: Tensor,
    offsets: Tensor,
) -> None:  # fmt: skip
    """Add what gathered_mm_dw_op returns, before it is rounded, to total (E, N, H), float32 and contiguous.

    torch's kernel rounds what it returns, so that the plain Triton one runs where Hopper's does not.
    """
    if gather.shape[0] == 0:
        return
    if (hopper := hopper_kernels(x)) and hopper.supports_k(dy, x, offsets):
        hopper.ragged_k(dy, x, offsets, gather, add_to=total)
    elif twin := twin_kernels(x):
        twin.ragged_k(dy, x, offsets, gather, add_to=total)
    else:
        rows = gather_op(x, pair, gather, scatter, token_offsets)
        total += grouped_mm_dw_ref(dy.to(total.dtype), rows.to(total.dtype), offsets)


@gathered_mm_dw_add_op.register_fake
def _(
    total: Tensor, dy: Tensor, x: Tensor, pair: Tensor, gather: Tensor, scatter: Tensor, token_offsets: Tensor,
    offsets: Tensor,
) -> None:  # fmt: skip
    return None


@custom_op("megablocks::gathered_mm_dw_pair", mutates_args=())
def gathered_mm_dw_pair_op(
    dy: Tensor, dz: Tensor, x: Tensor, pair: Tensor, gather: Tensor, scatter: Tensor, token_offsets: Tensor,
    offsets: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """gathered_mm_dw_op of dy and of dz (R, N)."""
    if gather.shape[0] > 0 and (hopper := hopper_kernels(x)) and hopper.supports_pair(dy, dz, x, offsets):
        return hopper.ragged_k_pair(dy, dz, x, offsets, gather)
    indices = pair, gather, scatter, token_offsets, offsets
    return gathered_mm_dw_op(dy, x, *indices), gathered_mm_dw_op(dz, x, *indices)


@gathered_mm_dw_pair_op.register_fake
def _(
    dy: Tensor, dz: Tensor, x: Tensor, pair: Tensor, gather: Tensor, scatter: Tensor, token_offsets: Tensor,
    offsets: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    shape = offsets.shape[0] - 1, dy.shape[1], x.shape[1]
    return x.new_empty(shape), x.new_empty(shape)


@custom_op("megablocks::gathered_mm_dw_pair_add", mutates_args=("total", "total2"))
def gathered_mm_dw_pair_add_op(
    total: Tensor, total2: Tensor, dy: Tensor, dz: Tensor, x: Tensor, pair: Tensor, gather: Tensor, scatter: Tensor,
    token_offsets: Tensor, offsets: Tensor,
) -> None:  # fmt: skip
    """gathered_mm_dw_add_op of dy to total and of dz to total2."""
    if gather.shape[0] > 0 and (hopper := hopper_kernels(x)) and hopper.supports_pair(dy, dz, x, offsets):
        hopper.ragged_k_pair(dy, dz, x, offsets, gather, add_to=(total, total2))
        return
    indices = pair, gather, scatter, token_offsets, offsets
    gathered_mm_dw_add_op(total, dy, x, *indices)
    gathered_mm_dw_add_op(total2, dz, x, *indices)


@gathered_mm_dw_pair_add_op.register_fake
def _(
    total: Tensor, total2: Tensor, dy: Tensor, dz: Tensor, x: Tensor, pair: Tensor, gather: Tensor, scatter: Tensor,
    token_offsets: Tensor, offsets: Tensor,
) -> None:  # fmt: skip
    return None


@custom_op("megablocks::gathered_mm", mutates_args=())
def gathered_mm_op(
    x: Tensor,
    w: Tensor,
    v: Tensor | None,
    pair: Tensor,
    gather: Tensor,
    scatter: Tensor,
    token_offsets: Tensor,
    offsets: Tensor,
    num_bits: int = OFF,
) -> tuple[Tensor, Tensor]:
    """(R, N) of w and of v, the latter empty without v."""
    none = x.new_empty(0)
    given, rows = [t for t in (w, v) if t is not None], gather.shape[0]
    if (hopper := hopper_kernels(x)) and all(hopper.supports_m(x, t, offsets, rows) for t in given):
        return hopper.ragged_m(x, w, offsets, gather), none if v is None else hopper.ragged_m(x, v, offsets, gather)
    if not has_torch_kernel(x) and (twin := twin_kernels(x)):
        return twin.ragged_m(x, w, offsets, gather), none if v is None else twin.ragged_m(x, v, offsets, gather)
    x = gather_op(x, pair, gather, scatter, token_offsets)
    return grouped_mm_op(x, w, offsets), none if v is None else grouped_mm_op(x, v, offsets)


@gathered_mm_op.register_fake
def _(
    x: Tensor,
    w: Tensor,
    v: Tensor | None,
    pair: Tensor,
    gather: Tensor,
    scatter: Tensor,
    token_offsets: Tensor,
    offsets: Tensor,
    num_bits: int = OFF,
) -> tuple[Tensor, Tensor]:
    y = x.new_empty(gather.shape[0], w.shape[2])
    return y, x.new_empty(0) if v is None else torch.empty_like(y)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, w, v, *indices, num_bits = inputs
    need_x, need_w, need_v = ctx.needs_input_grad[:3]
    ctx.gated = v is not None
    ctx.packed, *kept = pack(x if need_w or need_v else None, num_bits)
    ctx.save_for_backward(*kept, *((w, v) if need_x else (None, None)), *indices)


def _backward(ctx: Any, dy: Tensor, dz: Tensor) -> tuple[Tensor | None, ...]:
    codes, scales, w, v, pair, gather, scatter, token_offsets, offsets = ctx.saved_tensors
    need_x, need_w, need_v = ctx.needs_input_grad[:3]  # asked again: a caller may want one gradient of three
    dx = dw = dv = None
    if need_x:
        if ctx.gated:
            d_rows = grouped_mm_sum_op(dy, w.transpose(1, 2), dz, v.transpose(1, 2), offsets)
        else:
            d_rows = grouped_mm_op(dy, w.transpose(1, 2), offsets)
        dx = combine_op(d_rows, None, pair, gather, scatter, token_offsets)
    indices = pair, gather, scatter, token_offsets, offsets
    x = unpack(ctx.packed, codes, scales) if need_w or need_v else None
    if need_w and need_v and ctx.gated:
        dw, dv = (d.transpose(1, 2) for d in gathered_mm_dw_pair_op(dy, dz, x, *indices))
    elif need_w:
        dw = gathered_mm_dw_op(dy, x, *indices).transpose(1, 2)
    elif need_v and ctx.gated:
        dv = gathered_mm_dw_op(dz, x, *indices).transpose(1, 2)
    return dx, dw, dv, None, None, None, None, None, None


gathered_mm_op.register_autograd(_backward, setup_context=_setup_context)


def _check(x: Tensor, w: Tensor, dispatch: Dispatch) -> None:
    num_tokens = dispatch.token_offsets.shape[0] - 1
    if x.dim() != 2 or x.shape[0] != num_tokens:
        raise ValueError(f"x is {tuple(x.shape)}: must be (T, H) with T={num_tokens}, as in the dispatch")
    check_grouped(x, w, dispatch.expert_offsets)


def gathered_mm(x: Tensor, w: Tensor, dispatch: Dispatch, *, num_bits: int = OFF) -> Tensor:
    """`grouped_mm(gather(x, dispatch), w, dispatch.expert_offsets)` that neither makes nor keeps the gathered rows.

    Args:
        x: (T, H) floating.
        w: (E, H, N), same dtype; any stride, best a view `w1.transpose(1, 2)` of (E, N, H), as its gradient is.
        dispatch: of T tokens and R pairs.
        num_bits: 4 or 8 keep x quantised (`ops.quant`) for dW; -1 as it is.

    Returns:
        (R, N) in x's dtype; rows >= V are unspecified.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    x, w = under_autocast(x, w)
    _check(x, w, dispatch)
    d = dispatch
    return gathered_mm_op(x, w, None, d.pair, d.gather, d.scatter, d.token_offsets, d.expert_offsets, num_bits)[0]


def gathered_mm_pair(
    x: Tensor, w: Tensor, v: Tensor, dispatch: Dispatch, *, num_bits: int = OFF
) -> tuple[Tensor, Tensor]:
    """`gathered_mm` with w and with v, the two weights of a gated MLP, sharing what they can.

    Args:
        x, dispatch, num_bits: as in `gathered_mm`.
        w, v: (E, H, N) of equal shape.

    Returns:
        x·w and x·v, (R, N) each; rows >= V are unspecified.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    x, w, v = under_autocast(x, w, v)
    _check(x, w, dispatch)
    _check(x, v, dispatch)
    if w.shape != v.shape:
        raise ValueError(f"v is {tuple(v.shape)}: must be {tuple(w.shape)}, as w")
    d = dispatch
    return gathered_mm_op(x, w, v, d.pair, d.gather, d.scatter, d.token_offsets, d.expert_offsets, num_bits)
