"""Token rounding: top-k routing whose load of each expert is a multiple of the grouped product's tile of rows.

    f_e   = tokens whose top-k holds expert e;  ⌊f_e⌋, ⌈f_e⌉: the multiples of the tile around it
    n_e   = ⌊f_e⌋ or ⌈f_e⌉ by the rule, at most T
    order = expert e's column of weights, the tokens that chose e first, then all others, each by falling weight
    expert e computes the first n_e tokens of its order

So padding is filled with the next-best tokens and dropping takes the weakest; either moves an expert by less than one
tile, and an expert that nobody chose stays empty. Source: SonicMoE (arXiv 2512.14080) and its benchmark
`moe-token-rounding.py`. It is for training with at least two tiles a mean expert (T·K/E ≥ 2·tile): far below, `nearest`
and `down` leave most experts without tokens. Evaluate with plain top-k, as `route` does.

    nearest                up where f_e − ⌊f_e⌋ ≥ tile/2
    stochastic_frequency   up with probability (f_e − ⌊f_e⌋)/tile, so that the expected load is f_e
    stochastic_score       up with probability a/b: a the weights of the choices beyond the first ⌊f_e⌋ of the order, b
                           the weights of the whole tile that starts there
    balanced               so that the running total over the experts is off by at most tile/2
    up, down               always up, always down

Weights: a pair that the top-k chose keeps the weight that the top-k gave it, also where rounding took away others of
its token's choices; a pair that rounding adds has the expert's score over all E, not normalised. Both as in that code.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from megablocks.config import TOKEN_ROUNDINGS
from megablocks.ops.routing.dispatch import Routing
from megablocks.ops.routing.rounding import rank_order, select_tokens


def max_pairs(rule: str, num_tokens: int, num_experts: int, top_k: int, tile: int) -> int:
    """R: the most pairs that `rule` can leave, whatever the logits; T, E, K and the tile decide it, no device value.

    At most min(E, T·K) experts have a choice, and each of these grows by less than a tile; `nearest` adds at most half
    a tile to each, `balanced` half a tile to all together, `down` nothing. No expert takes more than T tokens.
    """
    loaded = min(num_experts, num_tokens * top_k)
    growth = {"down": 0, "balanced": tile // 2, "nearest": loaded * (tile // 2)}.get(rule, loaded * (tile - 1))
    return min(num_tokens * top_k + growth, num_tokens * num_experts)


def rounded_loads(
    counts: Tensor,
    rule: str,
    tile: int,
    up_odds: tuple[Tensor, Tensor] | None = None,
    generator: Generator | None = None,
) -> Tensor:
    """Loads (E,) int64 → multiples of `tile` (E,) int64, without a host synchronisation.

    Args:
        up_odds: a and b, each (E,), of "stochastic_score": up with probability a/b, never where b is 0.
        generator: on the counts' device, for the stochastic rules; None is torch's own.
    """
    down = counts.div(tile, rounding_mode="floor") * tile
    rest = counts - down
    if rule == "balanced":
        # Rounding the running total is the running accumulator in one pass: from the multiple before, at most tile/2
        # off, the nearest one is ⌊f⌋ or ⌈f⌉ away. Ties go up always, or a load of whole tiles could change by one.
        total = (counts.cumsum(0) + tile // 2).div(tile, rounding_mode="floor") * tile
        return total.diff(prepend=total.new_zeros(1))
    if rule in ("up", "down"):
        up = rest > 0 if rule == "up" else torch.zeros_like(rest, dtype=torch.bool)
    elif rule == "nearest":
        up = rest + tile // 2 >= tile
    else:
        a, b = (rest, torch.full_like(rest, tile)) if up_odds is None else up_odds
        draw = torch.rand(counts.shape, generator=generator, device=counts.device)
        up = draw * b < a
    return down + up * tile


def round_tokens(
    ids: Tensor,
    weights: Tensor,
    scores: Tensor,
    rule: str = "nearest",
    tile: int = 128,
    *,
    padding_mask: Tensor | None = None,
    generator: Generator | None = None,
) -> Routing:
    """Round the loads of a top-k routing to multiples of `tile`.

    Args:
        ids: (T, K) int64, different ids in [0, E) a token.
        weights: (T, K) ≥ 0, float32 or float64, differentiable: of these choices.
        scores: (T, E) ≥ 0, same dtype, differentiable: the weight of a pair that rounding adds.
        rule: see the module.
        tile: rows.
        padding_mask: (T,) bool, True for padding, which gets no expert and is no load.
        generator: of the stochastic rules, on the scores' device; None is torch's own.

    Returns:
        Routing of R = `max_pairs` pairs in token order, and within a token by expert; pairs beyond the rounded loads
        have no expert; top_k is None. metrics: `tokens_per_expert` (E,) as the top-k chose, which balancing losses and
        biases are to see; `rounded_per_expert` (E,) as computed; `dropped` () choices that rounding down left out.

    Raises:
        ValueError: shapes that do not fit, an unknown rule, a tile below 1.
    """
    _check(ids, weights, scores, rule, tile)
    (num_tokens, top_k), num_experts = ids.shape, scores.shape[1]
    num_pairs = max_pairs(rule, num_tokens, num_experts, top_k, tile)
    weight_of = scores.scatter(1, ids, weights)  # every pair's, chosen or not
    with torch.no_grad():
        values = weight_of.detach()
        chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, ids, True)
        if padding_mask is not None:
            chosen &= ~padding_mask.unsqueeze(1)
        counts = chosen.sum(0)
        odds = _odds_by_score(values, chosen, padding_mask, counts, tile) if rule == "stochastic_score" else None
        available = num_tokens if padding_mask is None else (~padding_mask).sum()
        rounded = rounded_loads(counts, rule, tile, odds, generator).clamp(max=available)
        token, expert, source = select_tokens(values, ids, rounded, num_pairs, padding_mask=padding_mask)
    return Routing(
        token=token,
        expert=expert,
        # unused pairs take different places, so that the zeros of their gradients do not queue at one
        weight=torch.where(expert >= 0, weight_of.flatten().gather(0, source), 0.0),
        num_tokens=num_tokens,
        num_experts=num_experts,
        metrics={
            "tokens_per_expert": counts,
            "rounded_per_expert": rounded,
            "dropped": (counts - rounded).clamp_min(0).sum(),
            "invalid": torch.zeros((), dtype=torch.int64, device=scores.device),
        },
    )


def _odds_by_score(
    values: Tensor, chosen: Tensor, padding_mask: Tensor | None, counts: Tensor, tile: int
) -> tuple[Tensor, Tensor]:
    """(E,), (E,): weights of the choices in each expert's last, partial tile, and of that tile filled up."""
    order = rank_order(values, chosen, padding_mask)
    ordered = torch.nan_to_num(values, nan=0.0).gather(0, order)
    rank = torch.arange(values.shape[0], device=values.device).unsqueeze(1)
    start = counts.div(tile, rounding_mode="floor") * tile
    whole = torch.where((rank >= start) & (rank < start + tile), ordered, 0.0)
    return torch.where(rank < counts, whole, 0.0).sum(0), whole.sum(0)


def _check(ids: Tensor, weights: Tensor, scores: Tensor, rule: str, tile: int) -> None:
    if ids.dim() != 2 or weights.shape != ids.shape or scores.dim() != 2 or scores.shape[0] != ids.shape[0]:
        shapes = f"ids {tuple(ids.shape)}, weights {tuple(weights.shape)}, scores {tuple(scores.shape)}"
        raise ValueError(f"{shapes}: must be (T, K), (T, K) and (T, E)")
    if weights.dtype != scores.dtype or scores.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"weights are {weights.dtype}, scores {scores.dtype}: must both be float32 or both float64")
    if rule not in TOKEN_ROUNDINGS:
        raise ValueError(f"rule={rule!r}: must be one of {', '.join(TOKEN_ROUNDINGS)}")
    if tile < 1:
        raise ValueError(f"tile={tile}: must be at least 1")
