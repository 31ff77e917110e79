"""Padded movement: tokens to rows with room behind each expert's, and back.

    rows[q] = x[gather[q]], or 0 where q is padding (gather[q] = -1)
    y[t] = Σ_s weight[pair[q]] · rows[q],  q = scatter[s]

Legend: T tokens, H hidden, E experts, R pairs, N padded rows, C capacity. Expert e's rows begin at padded row
padded_offsets[e]; those that do not fit before padded_offsets[e+1] or N are dropped: they have no row and count as 0 on
the way back. Padding is written in forward and backward and read in neither, so the kernels are those of gather and
combine with other indices. Bins of equal capacity (binned.py) are the case padded_offsets[e] = e·C.
Source: padded_gather, padded_scatter and their binned kin of megablocks 0.10 (arXiv 2211.15841, section 5).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megablocks.ops.backend import runs_triton
from megablocks.ops.library import custom_op
from megablocks.ops.permute.combine import combine_op
from megablocks.ops.permute.gather import gather_op
from megablocks.ops.routing.dispatch import Dispatch


class PaddedDispatch(NamedTuple):
    """Indices from tokens to padded rows and back, all int32.

    token_offsets: (T+1,) slots [token_offsets[t], token_offsets[t+1]) of `scatter` belong to token t.
    gather: (N,) the token of each row; -1 for padding.
    scatter: (R,) slot s (token-major) is row scatter[s]; -1 where the pair is dropped, and for slots of no token.
    pair: (N,) the pair of each row (its weight is weight[pair[q]]); -1 for padding.
    """

    token_offsets: Tensor
    gather: Tensor
    scatter: Tensor
    pair: Tensor


def pad_indices_ref(
    ends: Tensor,
    padded_ends: Tensor | None,
    capacity: int,
    num_rows: int,
    pair: Tensor,
    gather: Tensor | None,
    scatter: Tensor | None,
    top_k: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(token_offsets, gather, scatter, pair) of padded rows.

    Args:
        ends: (E,) where each expert's rows end.
        padded_ends: (E,) where its padded rows end; None for bins of `capacity`.
        pair: (R,) the pair of each row. gather, scatter: (R,) of the Dispatch; or None for pairs that are all valid,
            `top_k` a token; only then token_offsets is more than empty.
    """
    device, num_experts, num_pairs = ends.device, ends.shape[0], pair.shape[0]
    if padded_ends is None:
        padded_ends = torch.arange(1, num_experts + 1, device=device) * capacity
    ends, padded_ends = ends.long(), padded_ends.long()
    starts, padded_starts = ends - ends.diff(prepend=ends[:1] * 0), padded_ends - padded_ends.diff(prepend=ends[:1] * 0)
    if gather is None or scatter is None:
        token_offsets = torch.arange(num_pairs // top_k + 1, device=device) * top_k
        gather = pair // top_k
        rows = torch.arange(num_pairs, device=device)
        scatter = torch.zeros_like(rows).scatter_(0, pair.long(), rows)
    else:
        token_offsets = ends[:0]

    q = torch.arange(num_rows, device=device)
    e = torch.searchsorted(padded_ends, q, right=True)
    inside = e.clamp(max=num_experts - 1)
    p = starts[inside] + q - padded_starts[inside]
    used = (e < num_experts) & (p < ends[inside])
    source = torch.where(used, p, num_pairs)  # padding reads the -1 behind
    padded_gather, padded_pair = (torch.cat([t, t.new_full((1,), -1)])[source] for t in (gather, pair))

    p = scatter.long()
    inside = torch.searchsorted(ends, p, right=True).clamp(max=num_experts - 1)
    q = padded_starts[inside] + p - starts[inside]
    valid = torch.arange(num_pairs, device=device) < ends[-1]
    padded_scatter = torch.where(valid & (q < padded_ends[inside]) & (q < num_rows), q, -1)
    return token_offsets.int(), padded_gather.int(), padded_scatter.int(), padded_pair.int()


@custom_op("megablocks::pad_indices", mutates_args=())
def pad_indices_op(
    ends: Tensor,
    padded_ends: Tensor | None,
    capacity: int,
    num_rows: int,
    pair: Tensor,
    gather: Tensor | None,
    scatter: Tensor | None,
    top_k: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if runs_triton(pair):
        from megablocks.ops.permute.padded_triton import pad_launch

        return pad_launch(ends, padded_ends, capacity, num_rows, pair, gather, scatter, top_k)
    return pad_indices_ref(ends, padded_ends, capacity, num_rows, pair, gather, scatter, top_k)


@pad_indices_op.register_fake
def _(
    ends: Tensor,
    padded_ends: Tensor | None,
    capacity: int,
    num_rows: int,
    pair: Tensor,
    gather: Tensor | None,
    scatter: Tensor | None,
    top_k: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    def make(length: int) -> Tensor:
        return torch.empty(length, dtype=torch.int32, device=pair.device)

    num_pairs = pair.shape[0]
    return make(num_pairs // top_k + 1 if gather is None else 0), make(num_rows), make(num_pairs), make(num_rows)


def pad_dispatch(dispatch: Dispatch, padded_offsets: Tensor, num_rows: int) -> PaddedDispatch:
    """Indices of padded rows, without a host synchronisation; one launch on a GPU.

    Args:
        dispatch: of T tokens, E experts and R pairs.
        padded_offsets: (E+1,) int32, ascending from 0 (`Topology.padded_offsets`).
        num_rows: N, the rows in all; those behind padded_offsets[E] are padding.

    Raises:
        ValueError: padded_offsets of another number of experts than the dispatch, or a negative num_rows.
    """
    ends = dispatch.expert_offsets[1:]
    if padded_offsets.shape != dispatch.expert_offsets.shape:
        raise ValueError(
            f"padded_offsets is {tuple(padded_offsets.shape)}: must be ({ends.shape[0] + 1},), as in the dispatch"
        )
    if num_rows < 0:
        raise ValueError(f"num_rows={num_rows}: must be >= 0")
    _, *indices = pad_indices_op(
        ends, padded_offsets[1:].int(), 0, num_rows, dispatch.pair, dispatch.gather, dispatch.scatter, 1
    )
    return PaddedDispatch(dispatch.token_offsets, *indices)


def bin_dispatch(dispatch: Dispatch, capacity: int) -> PaddedDispatch:
    """`pad_dispatch` to E bins of `capacity` rows each, N = E·C.

    Raises:
        ValueError: a negative capacity.
    """
    if capacity < 0:
        raise ValueError(f"capacity={capacity}: must be >= 0")
    ends = dispatch.expert_offsets[1:]
    num_rows = ends.shape[0] * capacity
    _, *indices = pad_indices_op(ends, None, capacity, num_rows, dispatch.pair, dispatch.gather, dispatch.scatter, 1)
    return PaddedDispatch(dispatch.token_offsets, *indices)


def pad_indices(
    indices: Tensor, bins: Tensor, padded_bins: Tensor | int, top_k: int, num_rows: int | None = None
) -> PaddedDispatch:
    """The indices of padded rows from the plain arrays of megablocks 0.10, where every pair is valid.

    Args:
        indices: (R,) integer, the pairs sorted by expert: row p is pair indices[p], of token indices[p] // top_k.
        bins: (E,) integer, inclusive cumulative sum of the pairs an expert.
        padded_bins: (E,) the same with padding, or an int: the capacity of every expert. `bins` itself for no padding.
        top_k: K; R is a multiple of it.
        num_rows: N; needed where padded_bins is a tensor, which the host does not know.

    Raises:
        ValueError: shapes that do not fit, R no multiple of K, or no num_rows.
    """
    if indices.dim() != 1 or bins.dim() != 1 or bins.shape[0] == 0:
        raise ValueError(f"indices {tuple(indices.shape)} and bins {tuple(bins.shape)}: must be (R,) and (E,), E >= 1")
    if top_k < 1 or indices.shape[0] % top_k:
        raise ValueError(f"top_k={top_k}: must divide the {indices.shape[0]} indices")
    capacity = 0
    if isinstance(padded_bins, int):
        if padded_bins < 0:
            raise ValueError(f"capacity={padded_bins}: must be >= 0")
        capacity, num_rows, padded_ends = padded_bins, bins.shape[0] * padded_bins, None
    else:
        if padded_bins.shape != bins.shape:
            raise ValueError(f"padded_bins is {tuple(padded_bins.shape)}: must be {tuple(bins.shape)}, as bins")
        padded_ends = padded_bins.int().contiguous()
    if num_rows is None or num_rows < 0:
        raise ValueError(f"num_rows={num_rows}: must be >= 0, the rows with their padding")
    ends, pair = bins.int().contiguous(), indices.int().contiguous()
    return PaddedDispatch(*pad_indices_op(ends, padded_ends, capacity, num_rows, pair, None, None, top_k))


def padded_gather(x: Tensor, padded: PaddedDispatch) -> Tensor:
    """Copy each pair's token to its row: x (T, H) → (N, H), padding exactly 0; differentiable in x.

    Raises:
        ValueError: x has another number of tokens than the indices.
    """
    num_tokens = padded.token_offsets.shape[0] - 1
    if x.dim() != 2 or x.shape[0] != num_tokens:
        raise ValueError(f"x is {tuple(x.shape)}: must be (T, H) with T={num_tokens}, as in the dispatch")
    return gather_op(x, padded.pair, padded.gather, padded.scatter, padded.token_offsets, True)


def padded_scatter(rows: Tensor, weight: Tensor | None, padded: PaddedDispatch) -> Tensor:
    """Sum each token's rows, times their weights: rows (N, H) → (T, H); differentiable in rows and weight.

    Args:
        rows: (N, H); padding is not read, and its gradient is exactly 0.
        weight: (R,) floating, one a pair in the order of the Routing; None for ones.

    Raises:
        ValueError: rows or weight of another length than the indices.
    """
    num_rows, num_pairs = padded.pair.shape[0], padded.scatter.shape[0]
    if rows.dim() != 2 or rows.shape[0] != num_rows:
        raise ValueError(f"rows is {tuple(rows.shape)}: must be (N, H) with N={num_rows}, as in the dispatch")
    if weight is not None and weight.shape != (num_pairs,):
        raise ValueError(f"weight is {tuple(weight.shape)}: must be ({num_pairs},), one a pair of the dispatch")
    return combine_op(rows, weight, padded.pair, padded.gather, padded.scatter, padded.token_offsets, True)
