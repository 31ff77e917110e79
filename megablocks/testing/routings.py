"""Routings that tests and benchmarks share: even, extreme, skewed and ragged loads.

Legend: T tokens, E experts, K top-k, R pairs. Weights are float64 normal draws, so a test may cast them as it likes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megablocks.ops.routing.dispatch import Routing, count_valid, make_routing


def _weights(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def balanced(num_tokens: int, num_experts: int, top_k: int, seed: int = 0) -> Routing:
    """Round robin: loads differ by at most one."""
    ids = torch.arange(num_tokens * top_k).remainder(num_experts).view(num_tokens, top_k)
    return make_routing(ids, _weights((num_tokens, top_k), seed), num_experts)


def one_hot(num_tokens: int, num_experts: int, top_k: int, seed: int = 0) -> Routing:
    """Every pair to the last expert; all others are empty. For top_k > 1 the same expert several times a token."""
    ids = torch.full((num_tokens, top_k), num_experts - 1)
    return make_routing(ids, _weights((num_tokens, top_k), seed), num_experts)


def nobody(num_tokens: int, num_experts: int, top_k: int, seed: int = 0) -> Routing:
    """No pair has an expert."""
    ids = torch.full((num_tokens, top_k), -1)
    return make_routing(ids, _weights((num_tokens, top_k), seed), num_experts)


def zipf(num_tokens: int, num_experts: int, top_k: int, seed: int = 0) -> Routing:
    """Different experts a token, drawn with probability ∝ 1/(e+1): a long tail, as an untrained router shows."""
    odds = (1.0 / torch.arange(1, num_experts + 1)).expand(num_tokens, num_experts)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.multinomial(odds, top_k, generator=generator) if num_tokens else torch.empty(0, top_k, dtype=torch.long)
    return make_routing(ids, _weights((num_tokens, top_k), seed), num_experts)


def ragged(num_tokens: int, num_experts: int, top_k: int, seed: int = 0) -> Routing:
    """0 to 2·K pairs a token, repeated experts and ids outside [0, E) among them; top_k is None."""
    generator = torch.Generator().manual_seed(seed)
    counts = torch.randint(0, 2 * top_k + 1, (num_tokens,), generator=generator)
    token = torch.repeat_interleave(counts).int()
    expert = torch.randint(-2, num_experts + 2, (token.shape[0],), generator=generator).int()
    return Routing(
        token=token,
        expert=expert,
        weight=_weights((token.shape[0],), seed),
        num_tokens=num_tokens,
        num_experts=num_experts,
        metrics={"tokens_per_expert": count_valid(expert, num_experts)},
    )


ROUTINGS: dict[str, Callable[..., Routing]] = {
    "balanced": balanced,
    "one_hot": one_hot,
    "nobody": nobody,
    "zipf": zipf,
    "ragged": ragged,
}
