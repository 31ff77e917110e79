"""Capacity: how many pairs an expert computes, and which pairs are dropped.

Legend: T tokens (of one rank), E experts, K top-k, n ranks.

    "megablocks"  int(factor · K · T · n / E) pairs per expert from all n ranks together (megablocks 0.10)
    "tutel"       K · int(factor · ⌈T/E⌉) pairs per expert from each rank (Tutel, arXiv 2206.03382)
    factor = 0    the load of the fullest expert, so that nothing is dropped
    factor < 0    "tutel" only: the smaller of the fullest expert's load and |factor|'s capacity

An expert keeps its earliest pairs: in the order of ranks, then of tokens, then of a token's choices. Padding and pairs
without an expert take no place.
"""

from __future__ import annotations

import dataclasses
from numbers import Integral

import torch
from torch import Tensor

from megablocks.ops.routing.dispatch import Routing, build_dispatch

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def capacity_of(
    rule: str, factor: float, top_k: int, num_tokens: int, num_experts: int, load: Tensor, *, num_ranks: int = 1
) -> int | Tensor:
    """The number of places of an expert.

    Args:
        rule: "megablocks" or "tutel".
        factor: >= 0, or any with "tutel".
        num_tokens: T, of one rank.
        load: (E,) integer, pairs per expert: the sum over the ranks for "megablocks", their maximum for "tutel". Read
            only for factor <= 0.
        num_ranks: n, for "megablocks". If ranks hold different numbers of tokens, pass their sum as num_tokens.

    Returns:
        an int, or for factor <= 0 a () tensor on load's device, so that nothing waits for it.

    Raises:
        ValueError: an unknown rule, a factor that is not finite or beyond ±2³¹, or a negative one with "megablocks".
    """
    if rule not in ("megablocks", "tutel"):
        raise ValueError(f"rule={rule!r}: must be 'megablocks' or 'tutel'")
    try:  # the same number from two integers: to torch.compile they are constants, but a float is a symbol
        numerator, denominator = float(factor).as_integer_ratio()
        factor = numerator / denominator
    except (OverflowError, ValueError):
        raise ValueError(f"factor={factor!r}: must be finite") from None
    if abs(factor) > 2**31:  # places are counted in 64 bits
        raise ValueError(f"factor={factor!r}: must be within ±2**31")
    if factor < 0 and rule == "megablocks":
        raise ValueError(f"factor={factor!r}: must be >= 0, or use rule='tutel'")
    if factor == 0:
        return load.max()
    if rule == "megablocks":
        return torch.sym_int(factor * (top_k * num_tokens * num_ranks / num_experts))
    bound = top_k * torch.sym_int(abs(factor) * -(-num_tokens // num_experts))
    return bound if factor > 0 else load.max().clamp(max=bound)


def _check_counts(name: str, counts: object, *shapes: tuple[int, ...]) -> None:
    """Raise ValueError unless counts is a tensor of integers and has one of the shapes."""
    found: object = counts
    if isinstance(counts, Tensor):
        if tuple(counts.shape) in shapes and counts.dtype in _INTEGERS:
            return
        found = f"{counts.dtype} {tuple(counts.shape)}"
    raise ValueError(f"{name} is {found}: must be a tensor of integers, of shape {' or '.join(map(str, shapes))}")


def apply_capacity(routing: Routing, capacity: int | Tensor, *, before: Tensor | None = None) -> Routing:
    """Drop the pairs that exceed the capacity: they get expert -1.

    Args:
        capacity: places per expert, an int or a () or (E,) integer tensor on the routing's device.
        before: (E,) places already taken by lower ranks; None for none.

    Returns:
        a Routing whose metrics gain `dropped` () int64; its losses and `tokens_per_expert` are those before the drop.

    Raises:
        ValueError: a capacity or `before` of another type or shape, or a negative int.
    """
    num_experts, num_pairs = routing.num_experts, routing.num_pairs
    if isinstance(capacity, Tensor):
        _check_counts("capacity", capacity, (), (num_experts,))
    elif isinstance(capacity, bool) or not isinstance(capacity, (Integral, torch.SymInt)) or capacity < 0:
        raise ValueError(f"capacity={capacity!r}: must be an integer >= 0, or a tensor of integers")
    if before is not None:
        _check_counts("before", before, (num_experts,))
    dispatch = build_dispatch(routing)
    offsets, pair = dispatch.expert_offsets, dispatch.pair.long()
    rows = torch.arange(num_pairs, device=offsets.device)
    used = rows < offsets[-1]
    # rows of one expert are in pair order, so a row's distance from its expert's first row is its place
    expert = routing.expert[pair].long().clamp(0, num_experts - 1)
    place = rows - offsets[expert]
    if before is not None:
        place = place + before[expert]
    room = capacity[expert] if isinstance(capacity, Tensor) and capacity.dim() else capacity
    over = used & (place >= room)
    target = torch.where(over, pair, num_pairs)  # all others write to a spare place
    drop = torch.zeros(num_pairs + 1, dtype=torch.bool, device=offsets.device).scatter_(0, target, True)[:num_pairs]
    return dataclasses.replace(
        routing,
        expert=torch.where(drop, -1, routing.expert),
        metrics={**routing.metrics, "dropped": drop.sum()},
    )
