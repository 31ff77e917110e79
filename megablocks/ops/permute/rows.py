"""Gather: tokens to rows sorted by expert. Combine: rows back to tokens, weighted.

    gather     rows[p] = x[gather[p]]        dX[t] = Σ of dRows over the rows of token t
    combine    y[t] = Σ_{s in token_offsets[t] .. token_offsets[t+1]} weight[pair[p]] · rows[p],  p = scatter[s]
               dRows[p] = weight[pair[p]] · dY[gather[p]]
               d_weight[pair[p]] = ⟨dY[gather[p]], rows[p]⟩, 0 for an unused pair

Legend: T tokens, H hidden, R pairs, N rows, V <= N valid ones. Sums are float32 (float64 for float64), rounded once.
A token's rows are summed in the order of its pairs: no atomics, so reruns are bit-identical. `gather` leaves rows
p >= V unspecified and writes 0 to padding (see `pad_dispatch`). The contents of these rows affect no result of
`combine` and no gradient that is used. dRows of padding is 0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megablocks.ops.library import custom_op, runs_triton
from megablocks.ops.quant.quant import OFF, check_bits, pack, unpack
from megablocks.ops.routing.dispatch import Dispatch


def gather_ref(x: Tensor, dispatch: Dispatch) -> Tensor:
    """x (T, H) → (N, H)."""
    token = dispatch.gather
    if not dispatch.padded:
        return x.index_select(0, token)
    if x.shape[0] == 0:
        return x.new_zeros(token.shape[0], x.shape[1])
    return x.index_select(0, token.clamp(min=0)).masked_fill_((token < 0).unsqueeze(1), 0)


gather_op = custom_op(
    "megablocks::gather",
    fake=lambda a: a.x.new_empty(a.dispatch.num_rows, a.x.shape[1]),
    kernel="megablocks.ops.permute.permute_triton:expand_launch",
)(gather_ref)


def _save_gather(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *indices, ctx.padded = inputs[1]
    ctx.save_for_backward(*indices)


def _gather_backward(ctx: Any, d_rows: Tensor) -> tuple[Tensor, None]:
    return combine_op(d_rows, None, Dispatch._make((*ctx.saved_tensors, ctx.padded))), None


gather_op.register_autograd(_gather_backward, setup_context=_save_gather)


def gather(x: Tensor, dispatch: Dispatch) -> Tensor:
    """Copy each pair's token to its row.

    Args:
        x: (T, H), any dtype and stride.
        dispatch: of T tokens and N rows.

    Returns:
        (N, H) in x's dtype; rows >= V are unspecified, padding is exactly 0. Bins are
        `gather(x, bin_dispatch(dispatch, C)).view(E, C, H)`.

    Raises:
        ValueError: x has another number of tokens than the dispatch.
    """
    num_tokens = dispatch.token_offsets.shape[0] - 1
    if x.dim() != 2 or x.shape[0] != num_tokens:
        raise ValueError(f"x is {tuple(x.shape)}: must be (T, H) with T={num_tokens}, as in the dispatch")
    return gather_op(x, dispatch)


def _sum_slots_by_token(slots: Tensor, token_offsets: Tensor) -> Tensor:
    """slots (R, H), token-major → (T, H). Slots after token_offsets[T] are not read."""
    num_tokens = token_offsets.shape[0] - 1
    if slots.shape[0] == 0 or num_tokens == 0:
        return slots.new_zeros(num_tokens, slots.shape[1])
    if slots.is_cuda:  # unsafe: its checks would synchronize, and the last offset may be below R
        return torch.segment_reduce(slots, "sum", offsets=token_offsets, axis=0, unsafe=True)
    # On a CPU segment_reduce goes through column by column, five times slower; index_add there adds row after row
    token = torch.repeat_interleave(token_offsets.diff())
    return slots.new_zeros(num_tokens, slots.shape[1]).index_add_(0, token, slots[: token.shape[0]])


def combine_ref(rows: Tensor, weight: Tensor | None, dispatch: Dispatch) -> Tensor:
    """rows (N, H), weight (R,) or None for ones → (T, H) in rows' dtype."""
    acc = torch.promote_types(rows.dtype, torch.float32)
    if rows.shape[0] == 0:
        return rows.new_zeros(dispatch.num_tokens, rows.shape[1])
    source = dispatch.scatter.clamp(min=0)
    slots = rows.index_select(0, source).to(acc)
    if weight is not None:
        pair = dispatch.pair.index_select(0, source).clamp(min=0)
        slots = slots * weight.to(acc).index_select(0, pair).unsqueeze(1)
    slots = torch.where((dispatch.scatter >= 0).unsqueeze(1), slots, 0)
    return _sum_slots_by_token(slots, dispatch.token_offsets).to(rows.dtype)


def combine_backward_ref(
    dy: Tensor, rows: Tensor | None, weight: Tensor, dispatch: Dispatch
) -> tuple[Tensor, Tensor | None]:
    """dRows (N, H) and, if `rows` are given, d_weight (R,)."""
    acc, pair, num_pairs = torch.promote_types(dy.dtype, torch.float32), dispatch.pair, weight.shape[0]
    if num_pairs == 0 or dy.shape[0] == 0:
        return dy.new_zeros(pair.shape[0], dy.shape[1]), None if rows is None else torch.zeros_like(weight)
    picked = dy.index_select(0, dispatch.gather.clamp(min=0)).to(acc)
    d_rows = (picked * weight.to(acc).index_select(0, pair.clamp(min=0)).unsqueeze(1)).to(dy.dtype)
    if dispatch.padded:
        d_rows = torch.where((pair >= 0).unsqueeze(1), d_rows, 0)
    if rows is None:
        return d_rows, None
    return d_rows, by_pair((picked * rows).sum(1).to(weight.dtype), dispatch)


def by_pair(values: Tensor, dispatch: Dispatch) -> Tensor:
    """values (N,) of the rows → (R,) of the pairs, 0 for an unused one."""
    num_pairs, row = dispatch.num_pairs, torch.arange(values.shape[0], device=values.device)
    unused = dispatch.pair < 0 if dispatch.padded else row >= dispatch.token_offsets[-1]
    target = torch.where(unused, num_pairs, dispatch.pair).long()  # unused rows write to a spare place
    return values.new_zeros(num_pairs + 1).scatter_(0, target, values)[:num_pairs]


@custom_op("megablocks::combine", fake=lambda a: a.rows.new_empty(a.dispatch.num_tokens, a.rows.shape[1]))
def combine_op(rows: Tensor, weight: Tensor | None, dispatch: Dispatch, num_bits: int = OFF) -> Tensor:
    if rows.is_cuda and runs_triton(rows):
        from megablocks.ops.permute.permute_triton import combine_launch

        return combine_launch(rows, weight, dispatch)
    return combine_ref(rows, weight, dispatch)


combine_backward_op = custom_op(
    "megablocks::combine_backward",
    fake=lambda a: (
        a.dy.new_empty(a.dispatch.num_rows, a.dy.shape[1]),
        None if a.rows is None else a.weight.new_empty(a.weight.shape),
    ),
    kernel="megablocks.ops.permute.permute_triton:combine_backward_launch",
)(combine_backward_ref)


def _save_combine(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    rows, weight, dispatch, num_bits = inputs
    rows = rows if ctx.needs_input_grad[1] else None
    ctx.packed, *kept = (None, rows, None) if num_bits == OFF else pack(rows, num_bits)
    *indices, ctx.padded = dispatch
    ctx.save_for_backward(*kept, weight, *indices)


def _combine_backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    codes, scales, weight, *indices = ctx.saved_tensors
    dispatch = Dispatch._make((*indices, ctx.padded))
    need_rows, need_weight = ctx.needs_input_grad[:2]
    if weight is None:
        return gather_op(dy, dispatch), None, None, None
    rows = unpack(ctx.packed, codes, scales) if need_weight else None
    d_rows, d_weight = combine_backward_op(dy, rows, weight, dispatch)
    return (d_rows if need_rows else None), (d_weight if need_weight else None), None, None


combine_op.register_autograd(_combine_backward, setup_context=_save_combine)


def combine(rows: Tensor, weight: Tensor | None, dispatch: Dispatch, *, num_bits: int = OFF) -> Tensor:
    """Sum each token's rows, times their weights.

    Args:
        rows: (N, H), sorted by expert; padding is not read, and its gradient is exactly 0.
        weight: (R,) floating, one per pair in the order of the Routing (not of the rows); None for ones.
        dispatch: of T tokens, R pairs and N rows.
        num_bits: 4 or 8 save the rows quantized (`ops.quant`) for the weights' gradient; -1 saves them as they are.

    Returns:
        (T, H) in the rows' dtype; 0 for a token without a valid pair.

    Raises:
        ValueError: rows or weight of another length than the dispatch, integer weights, or other bits.
    """
    num_rows, num_pairs = dispatch.pair.shape[0], dispatch.scatter.shape[0]
    if rows.dim() != 2 or rows.shape[0] != num_rows:
        raise ValueError(f"rows is {tuple(rows.shape)}: must be (N, H) with N={num_rows}, as in the dispatch")
    if weight is not None and weight.shape != (num_pairs,):
        raise ValueError(f"weight is {tuple(weight.shape)}: must be ({num_pairs},), one a pair of the dispatch")
    if weight is not None and not weight.is_floating_point():
        raise ValueError(f"weight is {weight.dtype}: must be floating, or None for ones")
    if num_bits != OFF:
        check_bits(num_bits, "4, 8, or -1 for off")
    return combine_op(rows, weight, dispatch, num_bits)
