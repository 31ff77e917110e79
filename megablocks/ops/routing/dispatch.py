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


@dataclass(frozen=True)
class Routing:
    """What a router chose for T tokens.

    token: (R,) int32, non-decreasing, in [0, T).
    expert: (R,) int32; outside [0, E) is "no expert".
    weight: (R,) float32, differentiable; what the expert's output is multiplied by.
    num_tokens, num_experts: T and E.
    top_k: K when pair r is exactly the (r % K)-th choice of token r // K, else None.
    losses: name → scalar float32 tensor, already weighted, to be added to the training loss.
    metrics: name → detached tensor, for logs only: `tokens_per_expert` (E,) int64 before any drop, always present.
    """

    token: Tensor
    expert: Tensor
    weight: Tensor
    num_tokens: int
    num_experts: int
    top_k: int | None = None
    losses: dict[str, Tensor] = field(default_factory=dict)
    metrics: dict[str, Tensor] = field(default_factory=dict)

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
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=device).scatter_add_(0, key, torch.ones_like(key))
    expert_offsets = torch.zeros(num_experts + 1, dtype=torch.int32, device=device)
    expert_offsets[1:] = counts[:num_experts].cumsum(0)
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
