"""Binned movement: tokens to one bin of fixed capacity an expert, and back.

    bins[e, c] = rows[expert_offsets[e] + c]   for c < the number of rows of e, else 0      (rows: see gather)

Legend: T tokens, H hidden, R rows, E experts, C capacity. Rows beyond an expert's capacity are dropped: they are in no
bin and count as 0 on the way back. Bins are padded rows (padded.py) of E·C places, so each direction and its gradient
is one pass over memory. Source: megablocks 0.10's binned_gather and binned_scatter.
"""

from __future__ import annotations

from torch import Tensor

from megablocks.ops.permute.padded import PaddedDispatch, bin_dispatch, padded_gather, padded_scatter
from megablocks.ops.routing.dispatch import Dispatch


def binned_gather(x: Tensor, dispatch: Dispatch, capacity: int, *, bins: PaddedDispatch | None = None) -> Tensor:
    """Copy tokens to their experts' bins: x (T, H) → (E, C, H), earliest tokens first, empty places 0.

    Args:
        bins: `bin_dispatch(dispatch, capacity)` where the caller has it.

    Raises:
        ValueError: a negative capacity, or x of another number of tokens than the dispatch.
    """
    bins = bin_dispatch(dispatch, capacity) if bins is None else bins
    num_experts = dispatch.expert_offsets.shape[0] - 1
    return padded_gather(x, bins).view(num_experts, capacity, x.shape[1])


def binned_scatter(
    places: Tensor, weight: Tensor | None, dispatch: Dispatch, *, bins: PaddedDispatch | None = None
) -> Tensor:
    """Sum each token's places, times their pairs' weights: places (E, C, H), weight (R,) or None → (T, H).

    Args:
        bins: `bin_dispatch(dispatch, C)` where the caller has it.

    Raises:
        ValueError: places of another number of experts than the dispatch, or a weight of another length.
    """
    num_experts = dispatch.expert_offsets.shape[0] - 1
    if places.dim() != 3 or places.shape[0] != num_experts:
        raise ValueError(f"bins is {tuple(places.shape)}: must be (E, C, H) with E={num_experts}, as in the dispatch")
    bins = bin_dispatch(dispatch, places.shape[1]) if bins is None else bins
    return padded_scatter(places.flatten(0, 1), weight, bins)
