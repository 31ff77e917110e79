"""Routings that tests and benchmarks share: even, extreme, skewed and ragged loads.

Legend: T tokens, E experts, K top-k, R pairs. Weights are float64 normal draws, so a test may cast them as it likes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

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


def skewed_loads(num_pairs: int, num_experts: int, skew: float) -> list[int]:
    """Pairs of each expert, fullest first: ∝ 1/(e+1)^s with the s that makes max/mean = skew; skew 1 is balance.

    The fullest has exactly round(skew · num_pairs / E) pairs; the others share the rest by largest remainder.

    Raises:
        ValueError: a skew outside [1, E].
    """
    if not 1 <= skew <= num_experts:
        raise ValueError(f"skew={skew}: max/mean load must be in [1, {num_experts}], the number of experts")

    def shares(s: float) -> list[float]:
        powers = [(e + 1) ** -s for e in range(num_experts)]
        return [p / math.fsum(powers) for p in powers]

    low, high = 0.0, 64.0  # at s = 64 all but 2^-64 of the pairs are the fullest expert's
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if shares(middle)[0] * num_experts < skew else (low, middle)
    fullest = min(num_pairs, math.floor(skew * num_pairs / num_experts + 0.5))
    if num_experts == 1:
        return [num_pairs]
    _, *tail = shares(low)
    wanted = [t / max(math.fsum(tail), 1e-300) * (num_pairs - fullest) for t in tail]
    loads = [math.floor(w) for w in wanted]
    by_remainder = sorted(range(len(tail)), key=lambda i: loads[i] - wanted[i])
    for i in by_remainder[: num_pairs - fullest - sum(loads)]:
        loads[i] += 1
    return [fullest, *loads]


def skewed(num_tokens: int, num_experts: int, top_k: int, skew: float, seed: int = 0) -> Tensor:
    """Expert ids (T, K) int64 whose fullest expert holds exactly skew times the mean (`skewed_loads`).

    A token's K ids differ while no expert holds more than T pairs (skew <= E/K). Which expert is how full, and which
    tokens it gets, is drawn under `seed`.
    """
    generator = torch.Generator().manual_seed(seed)
    loads = torch.tensor(skewed_loads(num_tokens * top_k, num_experts, skew))
    expert = torch.randperm(num_experts, generator=generator).repeat_interleave(loads)
    # Pair i goes to token i mod T, so up to T neighbours, which share an expert, go to different tokens.
    return expert.view(top_k, num_tokens).t()[torch.randperm(num_tokens, generator=generator)]


class _Router(Protocol):
    """What routes by logits: `megablocks.routers.TopKRouter`."""

    route: Callable[..., Routing]


def steer(router: _Router, ids: Tensor, strength: float = 8.0) -> None:
    """Make a router choose `ids` (T, K), by a constant added to its logits there; all of its work is still done.

    The constant must exceed the spread of the logits, or some token chooses otherwise: check the loads.
    """
    original, replaced = router.route, "route" in vars(router)
    constant: Tensor | None = None

    def steered(logits: Tensor, **options: Any) -> Routing:
        nonlocal constant
        if constant is None:
            constant = torch.zeros_like(logits).scatter_(1, ids.to(logits.device), strength)
        return original(logits + constant, **options)

    if not replaced:  # its slopes are then those of its class's
        steered.adds_a_constant = True  # type: ignore[attr-defined]
    router.route = steered
