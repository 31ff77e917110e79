"""Token → expert bookkeeping: `Routing` (what the router chose) and `Dispatch` (the indices every kernel shares).

Legend: T tokens, H hidden, E experts, K top-k, R pairs (T·K for top-k; a static bound otherwise), V ≤ R valid pairs.

A pair is (token, expert, weight). Pairs are in token order: pair r belongs to token[r], and token is non-decreasing.
Expert ids outside [0, E) mean "no expert". Such a pair contributes nothing, so R stays static when tokens choose
different numbers of experts or a capacity drops some.

`pad_dispatch` leaves room after each expert's rows, so that each expert begins where a product needs it. Forward and
backward write the padding and never read it. Pairs that do not fit are dropped: they have no row, and add 0 to the
output of their token. Bins of equal capacity are one case (`bin_dispatch`).
Source of padding: megablocks 0.10's padded_gather, binned_gather and related functions (arXiv 2211.15841, section 5).

Sorting the pairs stably by expert gives the rows of the expert computation: row p < V belongs to expert e where
expert_offsets[e] <= p < expert_offsets[e+1]. Rows p >= V are unused; kernels never read their contents.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megablocks.ops.library import custom_op, runs_triton


def count_valid_ref(expert: Tensor, num_experts: int) -> Tensor:
    """Pairs of each expert: (R,) integer → (E,) int64. Ids outside [0, E) are not counted."""
    key = torch.where((expert >= 0) & (expert < num_experts), expert, num_experts).long()
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=expert.device)
    return counts.scatter_add_(0, key, torch.ones_like(key))[:num_experts].clone()


count_valid = custom_op(
    "megablocks::count_valid",
    fake=lambda a: a.expert.new_empty(a.num_experts, dtype=torch.int64),
    kernel="megablocks.ops.routing.dispatch_triton:count_launch",
    takes=lambda expert, num_experts: runs_triton(expert) and expert.shape[0] > 0,
)(count_valid_ref)


@dataclass(frozen=True)
class Routing:
    """What a router chose for T tokens.

    token: (R,) int32, non-decreasing, in [0, T).
    expert: (R,) int32; outside [0, E) is "no expert".
    weight: (R,) float32, differentiable; the factor of the expert's output.
    num_tokens, num_experts: T and E.
    top_k: K if pair r is exactly the (r % K)-th choice of token r // K, otherwise None.
    losses: name → scalar float32 tensor, already weighted, to be added to the training loss.
    metrics: name → detached tensor, for logs only: `tokens_per_expert` (E,) int64 before any drop, always present;
        `invalid` () int64 pairs whose id was outside [0, E) although their token is not padding.
    score_sums: (E,) sums of the tokens' scores, for other load-balancing losses, differentiable; None if no loss has a
        weight.
    """

    token: Tensor
    expert: Tensor
    weight: Tensor
    num_tokens: int
    num_experts: int
    top_k: int | None = None
    losses: dict[str, Tensor] = field(default_factory=dict)
    metrics: dict[str, Tensor] = field(default_factory=dict)
    score_sums: Tensor | None = None

    @property
    def num_pairs(self) -> int:
        """R, including the pairs that have no expert."""
        return self.expert.shape[0]


class Dispatch(NamedTuple):
    """Indices from tokens to rows sorted by expert and back, all int32, built once per layer.

    N is the number of rows: R, or more if the rows are padded, or less if the caller knows that V is below R.

    expert_offsets: (E+1,) rows [expert_offsets[e], expert_offsets[e+1]) belong to expert e; expert_offsets[E] = V.
        If rows are padded, these ranges include the padding. Empty for bins of equal size.
    token_offsets: (T+1,) slots [token_offsets[t], token_offsets[t+1]) of `scatter` belong to token t.
    gather: (N,) row p reads token gather[p]; 0 for p >= V, -1 for padding.
    scatter: (R,) slot s (token-major over valid pairs) is row scatter[s]; 0 for s >= V. If rows are padded, -1 for a
        dropped pair, and unspecified for s >= V.
    pair: (N,) row p is pair pair[p] of the Routing (its weight is weight[pair[p]]); 0 for p >= V, -1 for padding.
    padded: whether rows are padded, see `pad_dispatch`.
    """

    expert_offsets: Tensor
    token_offsets: Tensor
    gather: Tensor
    scatter: Tensor
    pair: Tensor
    padded: bool = False

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.token_offsets.shape[0] - 1

    @property
    def num_pairs(self) -> int:
        """R, or V if the caller knows it."""
        return self.scatter.shape[0]

    @property
    def num_rows(self) -> int:
        """N."""
        return self.pair.shape[0]

    @property
    def num_experts(self) -> int:
        """E. Not for bins of equal size, which have no offsets."""
        return self.expert_offsets.shape[0] - 1


def check_padding_mask(padding_mask: Tensor, num_tokens: int) -> None:
    """Refuse a mask that is not (T,) bool. A numeric attention mask means the opposite: 1 for tokens, 0 for padding."""
    if padding_mask.shape != (num_tokens,):
        raise ValueError(f"padding_mask is {tuple(padding_mask.shape)}: must be ({num_tokens},), one a token")
    if padding_mask.dtype != torch.bool:
        raise ValueError(f"padding_mask is {padding_mask.dtype}: must be torch.bool, True for padding")


def narrow_ids(expert: Tensor) -> Tensor:
    """Integer ids in int32. Ids that it cannot hold stay outside [0, E); a plain cast would make 2**32 expert 0."""
    return (expert.clamp(-(2**31), 2**31 - 1) if expert.dtype == torch.int64 else expert).int()


def make_routing(expert: Tensor, weight: Tensor, num_experts: int, *, padding_mask: Tensor | None = None) -> Routing:
    """The Routing of a fixed number of choices per token.

    Args:
        expert: (T, K) integer ids; outside [0, E) is "no expert". The same id twice for a token counts twice.
        weight: (T, K) floating.
        padding_mask: (T,) bool, True for padding: its pairs get no expert and do not count as load.

    Raises:
        ValueError: expert, weight or mask of another shape, or ids of a dtype that is not an integer.
    """
    if expert.dim() != 2 or weight.shape != expert.shape:
        raise ValueError(f"expert {tuple(expert.shape)} and weight {tuple(weight.shape)}: both must be (T, K)")
    num_tokens, top_k = expert.shape
    if padding_mask is not None:
        check_padding_mask(padding_mask, num_tokens)
    if expert.is_floating_point() or expert.is_complex() or expert.dtype == torch.bool:
        raise ValueError(f"expert is {expert.dtype}: must be an integer dtype, ids are not rounded")
    expert = narrow_ids(expert)  # first, because narrow types hold neither -1 nor every E
    outside = (expert < 0) | (expert >= num_experts)
    if padding_mask is not None:
        outside = outside & ~padding_mask.unsqueeze(1)
        expert = torch.where(padding_mask.unsqueeze(1), -1, expert)
    expert = expert.flatten()
    return Routing(
        token=torch.arange(num_tokens, dtype=torch.int32, device=expert.device).repeat_interleave(top_k),
        expert=expert,
        weight=weight.flatten(),
        num_tokens=num_tokens,
        num_experts=num_experts,
        top_k=top_k,
        metrics={"tokens_per_expert": count_valid(expert, num_experts), "invalid": outside.sum()},
    )


def check_routing(routing: Routing) -> None:
    """Refuse values that kernels do not check or silently skip. For debugging: it synchronizes with the device.

    Raises:
        ValueError: token not sorted or outside [0, T), an expert id outside [-1, E), wrong shapes or dtypes.
    """
    shape = (routing.num_pairs,)
    for name in ("token", "expert", "weight"):
        if getattr(routing, name).shape != shape:
            raise ValueError(f"{name} is {tuple(getattr(routing, name).shape)}: must be {shape}, one a pair")
    for name, start, end in (("token", 0, routing.num_tokens), ("expert", -1, routing.num_experts)):
        ids = getattr(routing, name)
        if ids.dtype != torch.int32:
            raise ValueError(f"{name} is {ids.dtype}: must be torch.int32")
        outside = ids[(ids < start) | (ids >= end)]
        if outside.numel():
            raise ValueError(f"{name}={int(outside[0])}: must be in [{start}, {end})")
    if bool((routing.token.diff() < 0).any()):
        raise ValueError("token is not sorted: pairs must be in token order")


def build_dispatch_ref(
    token: Tensor, expert: Tensor, num_tokens: int, num_experts: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The five tensors of a `Dispatch`, by a stable sort of the pairs by expert.

    Args:
        token: (R,) integer, non-decreasing, in [0, T).
        expert: (R,) integer; outside [0, E) is "no expert".
    """
    device, num_pairs = expert.device, expert.shape[0]
    expert, token = expert.long(), token.long()
    valid = (expert >= 0) & (expert < num_experts)
    key = torch.where(valid, expert, num_experts)
    order = torch.sort(key, stable=True).indices
    expert_offsets = torch.zeros(num_experts + 1, dtype=torch.int32, device=device)
    expert_offsets[1:] = count_valid_ref(expert, num_experts).cumsum(0)
    per_token = torch.zeros(num_tokens, dtype=torch.int64, device=device).scatter_add_(0, token, valid.long())
    token_offsets = torch.zeros(num_tokens + 1, dtype=torch.int32, device=device)
    token_offsets[1:] = per_token.cumsum(0)
    row_is_used = torch.arange(num_pairs, device=device) < expert_offsets[-1]
    pair = torch.where(row_is_used, order, 0)
    gather = torch.where(row_is_used, token[order], 0) if num_pairs else token
    row_of_pair = torch.empty_like(order).scatter_(0, order, torch.arange(num_pairs, device=device))
    slot = torch.where(valid, valid.long().cumsum(0) - 1, num_pairs)  # invalid pairs write to a spare slot
    scatter = torch.zeros(num_pairs + 1, dtype=torch.int64, device=device).scatter_(0, slot, row_of_pair)[:num_pairs]
    return expert_offsets, token_offsets, gather.int(), scatter.int(), pair.int()


build_dispatch_op = custom_op(
    "megablocks::build_dispatch",
    fake=lambda a: tuple(
        a.expert.new_empty(length, dtype=torch.int32)
        for length in (a.num_experts + 1, a.num_tokens + 1, *[a.expert.shape[0]] * 3)
    ),
    kernel="megablocks.ops.routing.dispatch_triton:dispatch_launch",
)(build_dispatch_ref)


def build_dispatch(routing: Routing) -> Dispatch:
    """The indices of a Routing, without a host synchronization.

    Raises:
        ValueError: token and expert of different lengths.
    """
    if routing.token.shape != routing.expert.shape or routing.expert.dim() != 1:
        raise ValueError(
            f"token {tuple(routing.token.shape)} and expert {tuple(routing.expert.shape)}: both must be (R,)"
        )
    return Dispatch(*build_dispatch_op(routing.token, routing.expert, routing.num_tokens, routing.num_experts))


class Rows(NamedTuple):
    """R rows sorted by expert, and the row of the input and of the output for each. An index of None means p itself.

    ends: (E,) integer; row p is expert e's if ends[e-1] <= p < ends[e]. Rows from ends[E-1] on have no expert.
    in_index, in_fan: (R,) integer; row p reads row in_index[p] // in_fan of the input.
    out_index, out_fan: (R,) integer; the product writes row p to row out_index[p] of R. Its caller then sums every
        out_fan rows into one, so row p reads row out_index[p] // out_fan of the output's gradient.
    pair: (R,) integer; row p is pair pair[p].
    """

    ends: Tensor
    in_index: Tensor | None = None
    out_index: Tensor | None = None
    pair: Tensor | None = None
    in_fan: int = 1
    out_fan: int = 1

    def swapped(self) -> Rows:
        """The rows of backward: its input is the output's gradient, its output the input's gradient."""
        return Rows(self.ends, self.out_index, self.in_index, self.pair, self.out_fan, self.in_fan)

    def count(self, x: Tensor) -> int:
        """R, for the x that `in_index` reads."""
        return (x if self.in_index is None else self.in_index).shape[0]

    def empty_dw(self, a: Tensor, b: Tensor, transposed: bool) -> Tensor:
        """Unset matrices (E, M, N) of a (S, M) and b (S', N), `transposed` a view of (E, N, M) storage."""
        experts, m, n = self.ends.shape[0], a.shape[1], b.shape[1]
        return a.new_empty(experts, n, m).transpose(1, 2) if transposed else a.new_empty(experts, m, n)


def pad_indices_ref(
    d: Dispatch, padded_ends: Tensor | None, capacity: int, num_rows: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(gather, scatter, pair) of padded rows.

    padded_ends: (E,) where each expert's padded rows end; None for bins of `capacity`.
    """
    ends, device, num_experts = d.expert_offsets[1:].long(), d.pair.device, d.num_experts
    if padded_ends is None:
        padded_ends = torch.arange(1, num_experts + 1, device=device) * capacity
    padded_ends = padded_ends.long()
    starts, padded_starts = (t - t.diff(prepend=t[:1] * 0) for t in (ends, padded_ends))

    q = torch.arange(num_rows, device=device)
    e = torch.searchsorted(padded_ends, q, right=True)
    inside = e.clamp(max=num_experts - 1)
    p = starts[inside] + q - padded_starts[inside]
    used = (e < num_experts) & (p < ends[inside])
    source = torch.where(used, p, d.num_rows)  # padding reads the -1 at the end
    gather, pair = (torch.cat([t, t.new_full((1,), -1)])[source] for t in (d.gather, d.pair))

    p = d.scatter.long()
    e = torch.searchsorted(ends, p, right=True)
    inside = e.clamp(max=num_experts - 1)
    q = padded_starts[inside] + p - starts[inside]
    scatter = torch.where((e < num_experts) & (q < padded_ends[inside]) & (q < num_rows), q, -1)
    return gather, scatter.int(), pair


pad_indices_op = custom_op(
    "megablocks::pad_indices",
    fake=lambda a: tuple(a.d.pair.new_empty(length) for length in (a.num_rows, a.d.num_pairs, a.num_rows)),
    kernel="megablocks.ops.permute.padded_triton:pad_launch",
    takes=lambda d, *_: d.pair.is_cuda and runs_triton(d.pair),
)(pad_indices_ref)


def _pad(d: Dispatch, padded_offsets: Tensor | None, capacity: int, num_rows: int) -> Dispatch:
    """d with its rows at padded places, or in bins of `capacity` places if padded_offsets is None."""
    padded_ends = None if padded_offsets is None else padded_offsets[1:].int()
    gather, scatter, pair = pad_indices_op(d, padded_ends, capacity, num_rows)
    offsets = d.expert_offsets[:0] if padded_offsets is None else padded_offsets
    return Dispatch(offsets, d.token_offsets, gather, scatter, pair, True)


def pad_dispatch(dispatch: Dispatch, padded_offsets: Tensor, num_rows: int) -> Dispatch:
    """The Dispatch of padded rows, without a host synchronization; one launch on a GPU.

    Args:
        dispatch: of T tokens, E experts and R pairs.
        padded_offsets: (E+1,) int32, ascending from 0 (`Topology.padded_offsets`).
        num_rows: N, the total number of rows; those after padded_offsets[E] are padding.

    Raises:
        ValueError: padded_offsets and the dispatch differ in the number of experts, or a negative num_rows.
    """
    shape = tuple(dispatch.expert_offsets.shape)
    if padded_offsets.shape != shape:
        raise ValueError(f"padded_offsets is {tuple(padded_offsets.shape)}: must be {shape}, as in the dispatch")
    if num_rows < 0:
        raise ValueError(f"num_rows={num_rows}: must be >= 0")
    return _pad(dispatch, padded_offsets, 0, num_rows)


def bin_dispatch(dispatch: Dispatch, capacity: int) -> Dispatch:
    """`pad_dispatch` to E bins of `capacity` rows each, N = E·C. Rows (N, H) are bins by `.view(E, C, H)`.

    Raises:
        ValueError: a negative capacity.
    """
    if capacity < 0:
        raise ValueError(f"capacity={capacity}: must be >= 0")
    experts = dispatch.expert_offsets.shape[0] - 1  # torch.compile of 2.8 cannot trace a NamedTuple's properties
    return _pad(dispatch, None, capacity, experts * capacity)


def pad_indices(
    indices: Tensor, bins: Tensor, padded_bins: Tensor | int, top_k: int, num_rows: int | None = None
) -> Dispatch:
    """The Dispatch of padded rows from the plain arrays of megablocks 0.10, where every pair is valid.

    Args:
        indices: (R,) integer, the pairs sorted by expert: row p is pair indices[p], of token indices[p] // top_k.
        bins: (E,) integer, inclusive cumulative sum of the pairs per expert.
        padded_bins: (E,) the same with padding, or an int: the capacity of every expert. `bins` itself for no padding.
        top_k: K; R is a multiple of it.
        num_rows: N; needed if padded_bins is a tensor, whose values the host does not know.

    Raises:
        ValueError: shapes that do not fit, R is not a multiple of K, or num_rows is missing.
    """
    if indices.dim() != 1 or bins.dim() != 1 or bins.shape[0] == 0:
        raise ValueError(f"indices {tuple(indices.shape)} and bins {tuple(bins.shape)}: must be (R,) and (E,), E >= 1")
    if top_k < 1 or indices.shape[0] % top_k:
        raise ValueError(f"top_k={top_k}: must divide the {indices.shape[0]} indices")
    num_pairs, padded_offsets, capacity = indices.shape[0], None, 0
    if isinstance(padded_bins, int):
        if padded_bins < 0:
            raise ValueError(f"capacity={padded_bins}: must be >= 0")
        capacity, num_rows = padded_bins, bins.shape[0] * padded_bins
    else:
        if padded_bins.shape != bins.shape:
            raise ValueError(f"padded_bins is {tuple(padded_bins.shape)}: must be {tuple(bins.shape)}, as bins")
        padded_offsets = F.pad(padded_bins.int(), (1, 0))
    if num_rows is None or num_rows < 0:
        raise ValueError(f"num_rows={num_rows}: must be >= 0, the rows with their padding")
    pair, place = indices.int(), torch.arange(num_pairs, dtype=torch.int32, device=indices.device)
    scatter = torch.empty_like(place).scatter_(0, indices.long(), place)  # slot r is pair r
    token_offsets = torch.arange(0, num_pairs + 1, top_k, dtype=torch.int32, device=indices.device)
    plain = Dispatch(F.pad(bins.int(), (1, 0)), token_offsets, pair // top_k, scatter, pair)
    return _pad(plain, padded_offsets, capacity, num_rows)
