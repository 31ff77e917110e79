"""Binned movement: tokens to one bin of fixed capacity an expert, and back.

    bins[e, c] = rows[expert_offsets[e] + c]   for c < the number of rows of e, else 0      (rows: see gather)

Legend: T tokens, H hidden, R rows, E experts, C capacity. Rows beyond an expert's capacity are dropped: they are in no
bin and count as 0 on the way back. Source: megablocks 0.10's binned_gather and binned_scatter.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megablocks.ops.grouped.bias import expert_of_row
from megablocks.ops.library import custom_op
from megablocks.ops.permute.combine import combine
from megablocks.ops.permute.gather import gather
from megablocks.ops.routing.dispatch import Dispatch


def rows_to_bins_ref(rows: Tensor, expert_offsets: Tensor, capacity: int) -> Tensor:
    """rows (R, H) → (E, C, H)."""
    num_experts = expert_offsets.shape[0] - 1
    if rows.shape[0] == 0:
        return rows.new_zeros(num_experts, capacity, rows.shape[1])
    place = torch.arange(capacity, device=rows.device)
    used = place < expert_offsets.diff().unsqueeze(1)
    source = torch.where(used, expert_offsets[:-1].unsqueeze(1) + place, 0).flatten()
    bins = rows.index_select(0, source).view(num_experts, capacity, rows.shape[1])
    return torch.where(used.unsqueeze(2), bins, 0)


def bins_to_rows_ref(bins: Tensor, expert_offsets: Tensor, num_rows: int) -> Tensor:
    """bins (E, C, H) → (R, H); 0 for rows beyond their expert's capacity and for unused rows."""
    num_experts, capacity, hidden = bins.shape
    if bins.numel() == 0:
        return bins.new_zeros(num_rows, hidden)
    expert = expert_of_row(expert_offsets, num_rows)
    place = torch.arange(num_rows, device=bins.device) - expert_offsets[expert]
    used = (expert < num_experts) & (place < capacity)
    source = torch.where(used, expert * capacity + place, 0)
    return torch.where(used.unsqueeze(1), bins.reshape(-1, hidden).index_select(0, source), 0)


@custom_op("megablocks::rows_to_bins", mutates_args=())
def rows_to_bins_op(rows: Tensor, expert_offsets: Tensor, capacity: int) -> Tensor:
    return rows_to_bins_ref(rows, expert_offsets, capacity)


@rows_to_bins_op.register_fake
def _(rows: Tensor, expert_offsets: Tensor, capacity: int) -> Tensor:
    return rows.new_empty(expert_offsets.shape[0] - 1, capacity, rows.shape[1])


@custom_op("megablocks::bins_to_rows", mutates_args=())
def bins_to_rows_op(bins: Tensor, expert_offsets: Tensor, num_rows: int) -> Tensor:
    return bins_to_rows_ref(bins, expert_offsets, num_rows)


@bins_to_rows_op.register_fake
def _(bins: Tensor, expert_offsets: Tensor, num_rows: int) -> Tensor:
    return bins.new_empty(num_rows, bins.shape[2])


def _rows_to_bins_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    rows, expert_offsets, _ = inputs
    ctx.num_rows = rows.shape[0]
    ctx.save_for_backward(expert_offsets)


def _bins_to_rows_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    bins, expert_offsets, _ = inputs
    ctx.capacity = bins.shape[1]
    ctx.save_for_backward(expert_offsets)


# Each is a partial permutation of rows, so its transpose, the backward, is the other.
rows_to_bins_op.register_autograd(
    lambda ctx, grad: (bins_to_rows_op(grad, *ctx.saved_tensors, ctx.num_rows), None, None),
    setup_context=_rows_to_bins_context,
)
bins_to_rows_op.register_autograd(
    lambda ctx, grad: (rows_to_bins_op(grad, *ctx.saved_tensors, ctx.capacity), None, None),
    setup_context=_bins_to_rows_context,
)


def binned_gather(x: Tensor, dispatch: Dispatch, capacity: int) -> Tensor:
    """Copy tokens to their experts' bins: x (T, H) → (E, C, H), earliest tokens first, empty places 0.

    Raises:
        ValueError: a negative capacity, or x of another number of tokens than the dispatch.
    """
    if capacity < 0:
        raise ValueError(f"capacity={capacity}: must be >= 0")
    return rows_to_bins_op(gather(x, dispatch), dispatch.expert_offsets, capacity)


def binned_scatter(bins: Tensor, weight: Tensor | None, dispatch: Dispatch) -> Tensor:
    """Sum each token's places, times their pairs' weights: bins (E, C, H), weight (R,) or None → (T, H).

    Raises:
        ValueError: bins of another number of experts than the dispatch, or a weight of another length.
    """
    num_experts = dispatch.expert_offsets.shape[0] - 1
    if bins.dim() != 3 or bins.shape[0] != num_experts:
        raise ValueError(f"bins is {tuple(bins.shape)}: must be (E, C, H) with E={num_experts}, as in the dispatch")
    rows = bins_to_rows_op(bins, dispatch.expert_offsets, dispatch.pair.shape[0])
    return combine(rows, weight, dispatch)
