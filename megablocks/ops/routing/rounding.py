"""Each expert takes as many tokens as its load says: first those that chose it, then the others, by falling weight.

    order of expert e = its tokens by (chose e, weight) falling, equal ones by the lowest token first; padding last
    pairs             = the first loads[e] tokens of every expert's order, sorted by token, and within one by expert

Legend: T tokens, E experts, K top-k, R pairs (a static bound). The selection step of token rounding (SonicMoE, arXiv
2512.14080). There a weight − 1 stands for what was not chosen, which makes equals of small weights: float32 has steps
of 6e-8 below 1. Here the order is that of the weights' bits, which for floats ≥ 0 is that of the floats. The reference
sorts; on a GPU a bitwise search finds each expert's last weight (rounding_triton.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from megablocks.ops.backend import runs_triton
from megablocks.ops.library import custom_op

STOCHASTIC = ("stochastic_frequency", "stochastic_score")  # the rules that draw
ROUNDINGS = ("nearest", *STOCHASTIC, "balanced", "up", "down")


def rank_order(weights: Tensor, chosen: Tensor, padding_mask: Tensor | None) -> Tensor:
    """weights (T, E) ≥ 0, chosen (T, E) bool, padding_mask (T,) → (T, E) int64: every column's tokens in its order."""
    bits = torch.nan_to_num(weights, nan=0.0).view(torch.int32 if weights.dtype == torch.float32 else torch.int64)
    lowest = torch.iinfo(bits.dtype).min
    keys = torch.where(chosen, bits, bits + (lowest + 1))
    if padding_mask is not None:
        keys = keys.masked_fill(padding_mask.unsqueeze(1), lowest)
    return keys.sort(dim=0, descending=True, stable=True).indices


def check_rounding(rule: str, tile: int) -> None:
    """Refuse a rule that is none of `ROUNDINGS`, and a tile below 1."""
    if rule not in ROUNDINGS:
        raise ValueError(f"rule={rule!r}: must be one of {', '.join(ROUNDINGS)}")
    if tile < 1:
        raise ValueError(f"tile={tile}: must be at least 1")


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
    draw: Tensor | None = None,
    up_odds: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Loads (E,) int64 → multiples of `tile` (E,) int64, without a host synchronisation.

    Args:
        draw: (E,) even in [0, 1), of the stochastic rules.
        up_odds: a and b, each (E,), of "stochastic_score": up with probability a/b, never where b is 0.
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
        assert draw is not None, f"{rule} draws"
        a, b = (rest, torch.full_like(rest, tile)) if up_odds is None else up_odds
        up = draw * b < a
    return down + up * tile


def odds_by_score(
    values: Tensor, chosen: Tensor, padding_mask: Tensor | None, counts: Tensor, tile: int
) -> tuple[Tensor, Tensor]:
    """(E,), (E,): weights of the choices in each expert's last, partial tile, and of that tile filled up."""
    order = rank_order(values, chosen, padding_mask)
    values = torch.nan_to_num(values, nan=0.0)
    if padding_mask is not None:
        values = values.masked_fill(padding_mask.unsqueeze(1), 0.0)
    ordered = values.gather(0, order)
    rank = torch.arange(values.shape[0], device=values.device).unsqueeze(1)
    start = counts.div(tile, rounding_mode="floor") * tile
    whole = torch.where((rank >= start) & (rank < start + tile), ordered, 0.0)
    return torch.where(rank < counts, whole, 0.0).sum(0), whole.sum(0)


def round_loads(
    values: Tensor,
    ids: Tensor,
    counts: Tensor,
    rule: str,
    tile: int,
    draw: Tensor | None,
    padding_mask: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """values (T, E), ids (T, K), counts (E,) of tokens that are no padding → `rounded_loads` (E,), dropped ()."""
    odds = None
    if rule == "stochastic_score":
        chosen = torch.zeros_like(values, dtype=torch.bool).scatter_(1, ids, True)
        odds = odds_by_score(values, chosen, padding_mask, counts, tile)
    available = values.shape[0] if padding_mask is None else (~padding_mask).sum()
    rounded = rounded_loads(counts, rule, tile, draw, odds).clamp(max=available)
    return rounded, (counts - rounded).clamp_min(0).sum()


def select_tokens_ref(
    weights: Tensor, ids: Tensor, loads: Tensor, padding_mask: Tensor | None, num_pairs: int
) -> tuple[Tensor, Tensor, Tensor]:
    """weights (T, E), ids (T, K), loads (E,) → token, expert, source (R,), as `select_tokens`."""
    (num_tokens, num_experts), device = weights.shape, weights.device
    chosen = torch.zeros_like(weights, dtype=torch.bool).scatter_(1, ids, True)
    order = rank_order(weights, chosen, padding_mask)
    rank = torch.arange(num_tokens, device=device).unsqueeze(1)
    keep = torch.zeros_like(chosen).scatter_(0, order, rank < loads).flatten()
    slot = torch.where(keep, keep.cumsum(0) - 1, num_pairs)  # the others write to a spare slot
    flat = torch.arange(num_tokens * num_experts, device=device)
    pair = flat.new_zeros(num_pairs + 1).scatter_(0, slot, flat)[:num_pairs]
    spare = torch.arange(num_pairs, device=device)
    used = spare < loads.sum()
    token = torch.where(used, pair.div(num_experts, rounding_mode="floor"), num_tokens - 1)
    expert = torch.where(used, pair.remainder(num_experts), -1)
    return token.int(), expert.int(), torch.where(used, pair, spare)


@custom_op("megablocks::select_tokens", mutates_args=())
def select_tokens_op(
    weights: Tensor, ids: Tensor, loads: Tensor, padding_mask: Tensor | None, num_pairs: int
) -> tuple[Tensor, Tensor, Tensor]:
    if weights.numel() and runs_triton(weights):
        from megablocks.ops.routing.rounding_triton import select_launch

        return select_launch(weights, ids, loads, padding_mask, num_pairs)
    return select_tokens_ref(weights, ids, loads, padding_mask, num_pairs)


@select_tokens_op.register_fake
def _(
    weights: Tensor, ids: Tensor, loads: Tensor, padding_mask: Tensor | None, num_pairs: int
) -> tuple[Tensor, Tensor, Tensor]:
    token = torch.empty(num_pairs, dtype=torch.int32, device=weights.device)
    return token, torch.empty_like(token), torch.empty_like(token, dtype=torch.int64)


def select_tokens(
    weights: Tensor, ids: Tensor, loads: Tensor, num_pairs: int, *, padding_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The first loads[e] tokens of every expert's order, without a host synchronisation; not differentiable.

    Args:
        weights: (T, E) float32 or float64, ≥ 0: a pair's, chosen or not. NaN ranks as 0.
        ids: (T, K) int64 in [0, E): each token's choices.
        loads: (E,) int64, at most the number of tokens that are no padding.
        num_pairs: R, at least the sum of the loads and at most T·E.
        padding_mask: (T,) bool, True for padding, which comes last in every order.

    Returns:
        token (R,) int32, non-decreasing; expert (R,) int32, -1 behind the last pair; source (R,) int64, the pair's
        place in weights.flatten(), and for those behind the last pair any places that differ from each other.

    Raises:
        ValueError: shapes that do not fit.
    """
    tokens, experts = weights.shape
    if ids.dim() != 2 or ids.shape[0] != tokens or loads.shape != (experts,) or not 0 <= num_pairs <= tokens * experts:
        shapes = f"weights {tuple(weights.shape)}, ids {tuple(ids.shape)}, loads {tuple(loads.shape)}"
        raise ValueError(f"{shapes}, num_pairs={num_pairs}: must be (T, E), (T, K), (E,) and at most T·E")
    if padding_mask is not None and padding_mask.shape != (tokens,):
        raise ValueError(f"padding_mask is {tuple(padding_mask.shape)}: must be ({tokens},), one a token")
    return select_tokens_op(weights, ids, loads, padding_mask, num_pairs)
