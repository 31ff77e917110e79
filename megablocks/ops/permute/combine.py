"""Combine: expert-sorted rows back to tokens, weighted.

    y[t] = Σ_{s in token_offsets[t] .. token_offsets[t+1]} weight[pair[p]] · rows[p],  p = scatter[s]
    dRows[p] = weight[pair[p]] · dY[gather[p]]      d_weight[pair[p]] = ⟨dY[gather[p]], rows[p]⟩, 0 for an unused pair

Legend: T tokens, H hidden, R rows and pairs, V <= R valid ones. Summed in float32 (float64 for float64), rounded once.
A token's rows are summed in the order of its pairs: no atomics, so reruns are bit-identical. What stands in rows
p >= V reaches neither the result nor a gradient of something used. Where rows are padded (`padded`: gather and pair are
-1 for padding, a slot of -1 has no row; see padded.py) dRows of padding is 0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megablocks.ops.backend import runs_triton
from megablocks.ops.dtypes import accumulation_dtype
from megablocks.ops.library import custom_op
from megablocks.ops.routing.dispatch import Dispatch


def _sum_slots_by_token(slots: Tensor, token_offsets: Tensor) -> Tensor:
    """slots (R, H), token-major → (T, H). Slots behind token_offsets[T] are not read."""
    num_tokens = token_offsets.shape[0] - 1
    if slots.shape[0] == 0 or num_tokens == 0:
        return slots.new_zeros(num_tokens, slots.shape[1])
    if slots.is_cuda:  # unsafe: its checks would synchronise, and the last offset may be below R
        return torch.segment_reduce(slots, "sum", offsets=token_offsets, axis=0, unsafe=True)
    # On a CPU segment_reduce walks down the columns, five times slower; index_add is sequential over the rows there
    token = torch.repeat_interleave(token_offsets.diff())
    return slots.new_zeros(num_tokens, slots.shape[1]).index_add_(0, token, slots[: token.shape[0]])


def combine_ref(rows: Tensor, weight: Tensor | None, pair: Tensor, scatter: Tensor, token_offsets: Tensor) -> Tensor:
    """rows (N, H), weight (R,) or None for ones → (T, H) in rows' dtype."""
    acc = accumulation_dtype(rows.dtype)
    if rows.shape[0] == 0:
        return rows.new_zeros(token_offsets.shape[0] - 1, rows.shape[1])
    source = scatter.clamp(min=0)
    slots = rows.index_select(0, source).to(acc)
    if weight is not None:
        slots = slots * weight.to(acc).index_select(0, pair.index_select(0, source).clamp(min=0)).unsqueeze(1)
    slots = torch.where((scatter >= 0).unsqueeze(1), slots, 0)
    return _sum_slots_by_token(slots, token_offsets).to(rows.dtype)


def combine_backward_ref(
    dy: Tensor,
    rows: Tensor | None,
    weight: Tensor,
    pair: Tensor,
    gather: Tensor,
    num_valid: Tensor,
    padded: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """dRows (N, H) and, when `rows` are given, d_weight (R,). `num_valid`: () the number V; unread if `padded`."""
    acc, num_rows, num_pairs = accumulation_dtype(dy.dtype), pair.shape[0], weight.shape[0]
    if num_pairs == 0 or dy.shape[0] == 0:
        return dy.new_zeros(num_rows, dy.shape[1]), None if rows is None else torch.zeros_like(weight)
    picked = dy.index_select(0, gather.clamp(min=0)).to(acc)
    d_rows = (picked * weight.to(acc).index_select(0, pair.clamp(min=0)).unsqueeze(1)).to(dy.dtype)
    if padded:
        d_rows = torch.where((pair >= 0).unsqueeze(1), d_rows, 0)
    if rows is None:
        return d_rows, None
    dots = (picked * rows).sum(1).to(weight.dtype)
    unused = pair < 0 if padded else torch.arange(num_rows, device=pair.device) >= num_valid
    target = torch.where(unused, num_pairs, pair)  # unused rows write to a spare place
    return d_rows, weight.new_zeros(num_pairs + 1).scatter_(0, target.long(), dots)[:num_pairs]


@custom_op("megablocks::combine", mutates_args=())
def combine_op(
    rows: Tensor,
    weight: Tensor | None,
    pair: Tensor,
    gather: Tensor,
    scatter: Tensor,
    token_offsets: Tensor,
    padded: bool = False,
) -> Tensor:
    if runs_triton(rows):
        from megablocks.ops.permute.permute_triton import combine_launch

        return combine_launch(rows, weight, pair, scatter, token_offsets)
    return combine_ref(rows, weight, pair, scatter, token_offsets)


@combine_op.register_fake
def _(
    rows: Tensor,
    weight: Tensor | None,
    pair: Tensor,
    gather: Tensor,
    scatter: Tensor,
    token_offsets: Tensor,
    padded: bool = False,
) -> Tensor:
    return rows.new_empty(token_offsets.shape[0] - 1, rows.shape[1])


@custom_op("megablocks::combine_backward", mutates_args=())
def combine_backward_op(
    dy: Tensor,
    rows: Tensor | None,
    weight: Tensor,
    pair: Tensor,
    gather: Tensor,
    scatter: Tensor,
    token_offsets: Tensor,
    padded: bool = False,
) -> tuple[Tensor, Tensor]:
    if runs_triton(dy):
        from megablocks.ops.permute.permute_triton import combine_backward_launch

        d_rows, d_weight = combine_backward_launch(dy, rows, weight, pair, scatter, token_offsets, padded)
    else:
        d_rows, d_weight = combine_backward_ref(dy, rows, weight, pair, gather, token_offsets[-1], padded)
    return d_rows, weight.new_empty(0) if d_weight is None else d_weight


@combine_backward_op.register_fake
def _(
    dy: Tensor,
    rows: Tensor | None,
    weight: Tensor,
    pair: Tensor,
    gather: Tensor,
    scatter: Tensor,
    token_offsets: Tensor,
    padded: bool = False,
) -> tuple[Tensor, Tensor]:
    return dy.new_empty(pair.shape[0], dy.shape[1]), weight.new_empty(0 if rows is None else weight.shape[0])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    rows, weight, pair, gather, scatter, token_offsets, ctx.padded = inputs
    need_rows, need_weight = ctx.needs_input_grad[:2]
    ctx.save_for_backward(rows if need_weight else None, weight, pair, gather, scatter, token_offsets)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    from megablocks.ops.permute.gather import gather_op  # here, since that module imports this one

    rows, weight, *indices = ctx.saved_tensors
    need_rows, need_weight = ctx.needs_input_grad[:2]
    if weight is None:
        return gather_op(dy, *indices, ctx.padded), None, None, None, None, None, None
    d_rows, d_weight = combine_backward_op(dy, rows, weight, *indices, ctx.padded)
    return (d_rows if need_rows else None), (d_weight if need_weight else None), None, None, None, None, None


combine_op.register_autograd(_backward, setup_context=_setup_context)


def combine(rows: Tensor, weight: Tensor | None, dispatch: Dispatch) -> Tensor:
    """Sum each token's rows, times their weights.

    Args:
        rows: (R, H), sorted by expert.
        weight: (R,) floating, one a pair in the order of the Routing (not of the rows); None for ones.
        dispatch: of T tokens and R pairs.

    Returns:
        (T, H) in the rows' dtype; 0 for a token without a valid pair.

    Raises:
        ValueError: rows or weight of another length than the dispatch.
    """
    num_pairs = dispatch.pair.shape[0]
    if rows.dim() != 2 or rows.shape[0] != num_pairs:
        raise ValueError(f"rows is {tuple(rows.shape)}: must be (R, H) with R={num_pairs}, as in the dispatch")
    if weight is not None and weight.shape != (num_pairs,):
        raise ValueError(f"weight is {tuple(weight.shape)}: must be ({num_pairs},), one a pair of the dispatch")
    return combine_op(rows, weight, dispatch.pair, dispatch.gather, dispatch.scatter, dispatch.token_offsets)
