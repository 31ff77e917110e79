"""Token → expert bookkeeping: `Routing` (what the router chose) and `Dispatch` (the indices every kernel shares).

Legend: T tokens, H hidden, E experts, K top-k, R pairs (T·K for top-k; a static bound otherwise), V ≤ R valid pairs.

A pair is (token, expert, weight). Pairs stand in token order: pair r belongs to token[r], and token is non-decreasing.
Expert ids outside [0, E) mean "no expert": such a pair contributes nothing anywhere, and R stays static when tokens
choose different numbers of experts or a capacity drops some.

Sorting the pairs stably by expert gives the rows of the expert computation: row p < V belongs to expert e where
expert_offsets[e] <= p < expert_offsets[e+1]. Rows p >= V are unused; kernels never read their contents.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from megablocks.ops.backend import runs_triton
from megablocks.ops.library import custom_op
from megablocks.ops.routing.histogram import histogram_op


def count_valid(expert: Tensor, num_experts: int) -> Tensor:
    """Pairs of each expert: (R,) integer → (E,) int64. Ids outside [0, E) are not counted."""
    return histogram_op(expert, num_experts)


@dataclass(frozen=True)
class Routing:
    """What a router chose for T tokens.

    token: (R,) int32, non-decreasing, in [0, T).
    expert: (R,) int32; outside [0, E) is "no expert".
    weight: (R,) float32, differentiable; what the expert's output is multiplied by.
    num_tokens, num_experts: T and E.
    top_k: K when pair r is exactly the (r % K)-th choice of token r // K, else None.
    losses: name → scalar float32 tensor, already weighted, to be added to the training loss.
    metrics: name → detached tensor, for logs only: `tokens_per_expert` (E,) int64 before any drop, always present;
        `invalid` () int64 pairs whose id was outside [0, E) although their token is no padding.
    router_weight, router_scaling: (E, H) and a number, where the weights come from x detached and the experts add their
        gradient of x to x's, as `fused_mlp` takes them; None elsewhere, and with pairs that have no expert.
    """

    token: Tensor
    expert: Tensor
    weight: Tensor
    num_tokens: int
    num_experts: int
    top_k: int | None = None
    losses: dict[str, Tensor] = field(default_factory=dict)
    metrics: dict[str, Tensor] = field(default_factory=dict)
    router_weight: Tensor | None = None
    router_scaling: float = 1.0

    @property
    def num_pairs(self) -> int:
        return self.expert.shape[0]


class Dispatch(NamedTuple):
    """Indices from tokens to expert-sorted rows and back, all int32, built once a layer.

    expert_offsets: (E+1,) rows [expert_offsets[e], expert_offsets[e+1]) belong to expert e; expert_offsets[E] = V.
    token_offsets: (T+1,) slots [token_offsets[t], token_offsets[t+1]) of `scatter` belong to token t.
    gather: (R,) row p reads token gather[p]; 0 for p >= V.
    scatter: (R,) slot s (token-major over valid pairs) is row scatter[s]; 0 for s >= V.
    pair: (R,) row p is pair pair[p] of the Routing (its weight is weight[pair[p]]); 0 for p >= V.
    """

    expert_offsets: Tensor
    token_offsets: Tensor
    gather: Tensor
    scatter: Tensor
    pair: Tensor


def make_routing(expert: Tensor, weight: Tensor, num_experts: int, *, padding_mask: Tensor | None = None) -> Routing:
    """The Routing of a fixed number of choices a token.

    Args:
        expert: (T, K) integer ids; outside [0, E) is "no expert". The same id twice for a token counts twice.
        weight: (T, K) floating.
        padding_mask: (T,) bool, True for padding: its pairs get no expert and count as no load.

    Raises:
        ValueError: shapes that do not fit.
    """
    if expert.dim() != 2 or weight.shape != expert.shape:
        raise ValueError(f"expert {tuple(expert.shape)} and weight {tuple(weight.shape)}: both must be (T, K)")
    num_tokens, top_k = expert.shape
    if padding_mask is not None and padding_mask.shape != (num_tokens,):
        raise ValueError(f"padding_mask is {tuple(padding_mask.shape)}: must be ({num_tokens},), one a token")
    outside = (expert < 0) | (expert >= num_experts)
    if padding_mask is not None:
        outside = outside & ~padding_mask.unsqueeze(1)
        expert = torch.where(padding_mask.unsqueeze(1), -1, expert)
    expert = expert.flatten().int()
    token = torch.arange(num_tokens, dtype=torch.int32, device=expert.device)
    return Routing(
        token=token.unsqueeze(1).expand(num_tokens, top_k).flatten(),
        expert=expert,
        weight=weight.flatten(),
        num_tokens=num_tokens,
        num_experts=num_experts,
        top_k=top_k,
        metrics={"tokens_per_expert": count_valid(expert, num_experts), "invalid": outside.sum()},
    )


def check_routing(routing: Routing) -> None:
    """A debugging aid that synchronises with the device: refuse what kernels take on trust or silently skip.

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
        raise ValueError("token is not sorted: pairs must stand in token order")


def build_dispatch_ref(token: Tensor, expert: Tensor, num_tokens: int, num_experts: int) -> Dispatch:
    """Stable sort of pairs by expert, without a host synchronisation.

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
    expert_offsets[1:] = count_valid(expert, num_experts).cumsum(0)
    per_token = torch.zeros(num_tokens, dtype=torch.int64, device=device).scatter_add_(0, token, valid.long())
    token_offsets = torch.zeros(num_tokens + 1, dtype=torch.int32, device=device)
    token_offsets[1:] = per_token.cumsum(0)
    row_is_used = torch.arange(num_pairs, device=device) < expert_offsets[-1]
    pair = torch.where(row_is_used, order, 0)
    gather = torch.where(row_is_used, token[order], 0) if num_pairs else token
    row_of_pair = torch.empty_like(order).scatter_(0, order, torch.arange(num_pairs, device=device))
    slot = torch.where(valid, valid.long().cumsum(0) - 1, num_pairs)  # invalid pairs write to a spare slot
    scatter = torch.zeros(num_pairs + 1, dtype=torch.int64, device=device).scatter_(0, slot, row_of_pair)[:num_pairs]
    return Dispatch(expert_offsets, token_offsets, gather.int(), scatter.int(), pair.int())


@custom_op("megablocks::build_dispatch", mutates_args=())
def build_dispatch_op(
    token: Tensor, expert: Tensor, num_tokens: int, num_experts: int, top_k: int | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    if expert.shape[0] and runs_triton(expert):
        from megablocks.ops.routing.dispatch_triton import dispatch_launch

        return dispatch_launch(token, expert, num_tokens, num_experts, top_k)
    return build_dispatch_ref(token, expert, num_tokens, num_experts)[:]


@build_dispatch_op.register_fake
def _(
    token: Tensor, expert: Tensor, num_tokens: int, num_experts: int, top_k: int | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    def make(length: int) -> Tensor:
        return torch.empty(length, dtype=torch.int32, device=expert.device)

    num_pairs = expert.shape[0]
    return make(num_experts + 1), make(num_tokens + 1), make(num_pairs), make(num_pairs), make(num_pairs)


def build_dispatch(routing: Routing) -> Dispatch:
    """The indices of a Routing, without a host synchronisation.

    Raises:
        ValueError: token and expert of different lengths.
    """
    if routing.token.shape != routing.expert.shape or routing.expert.dim() != 1:
        raise ValueError(
            f"token {tuple(routing.token.shape)} and expert {tuple(routing.expert.shape)}: both must be (R,)"
        )
    return Dispatch(
        *build_dispatch_op(routing.token, routing.expert, routing.num_tokens, routing.num_experts, routing.top_k)
    )
