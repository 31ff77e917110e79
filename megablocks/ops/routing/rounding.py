"""Token rounding: top-k routing in which each expert's load is a multiple of the grouped product's tile of rows.

    f_e         number of tokens whose top-k contains expert e;  ⌊f_e⌋, ⌈f_e⌉: the multiples of the tile around it
    rounded_e   ⌊f_e⌋ or ⌈f_e⌉ by the rule, at most n
    value_te    weight of the pair: that of the top-k if it chose e for t, otherwise score · scaling, not normalized
    order of e  first the tokens that chose e, then the others, each by falling value; among equals the lowest first
    pairs       the first rounded_e tokens of every expert's order, in token order, and within a token by expert

    nearest                up if f_e − ⌊f_e⌋ ≥ tile/2
    stochastic_frequency   up with probability (f_e − ⌊f_e⌋)/tile, so that the expected load is f_e
    stochastic_score       up with probability a/b: a = sum of the weights of the choices after the first ⌊f_e⌋ of the
                           order, b = sum of the weights of the whole tile that starts there
    balanced               up or down so that the running total over the experts is off by at most tile/2
    up, down               always up, always down

Legend: T tokens, n of them not padding, E experts, K top-k, R pairs (`max_pairs`, static). Losses and padding are as in
topk.py; the losses use the load before rounding. An expert that no token chose stays empty. A pair that the top-k chose
keeps its weight, even if its token loses other choices.

Use it for training, with at least two tiles for the mean expert (T·K/E ≥ 2·tile). Far below that, "nearest" and "down"
leave most experts without tokens. Evaluate with plain top-k. Source: SonicMoE (arXiv 2512.14080),
`moe-token-rounding.py`. For pairs that were not chosen, that code ranks by weight − 1, which makes small weights equal:
float32 has steps of 6e-8 below 1. Here the bits of the weights decide the order. The references sort; on a GPU a
bitwise search finds each expert's last weight (rounding_triton.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Generator, Tensor

from megablocks.ops.library import custom_op
from megablocks.ops.routing.topk import (
    check_router,
    empty_output,
    gradient_of_logits,
    has_losses,
    kernels_take,
    router_ref,
    router_scores,
    save_for_logits,
    wide_logits,
)
from megablocks.ops.routing.values import RoundedOutput, Rounding, RouterGradients, RouterOptions, RouterSaved

STOCHASTIC = ("stochastic_frequency", "stochastic_score")  # the rules that draw random numbers
ROUNDINGS = ("nearest", *STOCHASTIC, "balanced", "up", "down")


def max_pairs(rule: str, num_tokens: int, num_experts: int, top_k: int, tile: int) -> int:
    """R: the most pairs that `rule` can leave, for any logits. It depends on T, E, K and the tile, on no device value.

    At most min(E, T·K) experts have a choice, and each of these grows by less than a tile; `nearest` adds at most half
    a tile to each, `balanced` half a tile to all together, `down` nothing. No expert takes more than T tokens.
    """
    loaded = min(num_experts, num_tokens * top_k)
    growth = {"down": 0, "balanced": tile // 2, "nearest": loaded * (tile // 2)}.get(rule, loaded * (tile - 1))
    return min(num_tokens * top_k + growth, num_tokens * num_experts)


def rank_order(values: Tensor, chosen: Tensor, padding_mask: Tensor | None) -> Tensor:
    """values (T, E) ≥ 0, chosen (T, E) bool, padding_mask (T,) → (T, E) int64: each expert's order, padding last.

    NaN ranks as 0. The bits of floats ≥ 0 are in the order of the floats.
    """
    bits = torch.nan_to_num(values, nan=0.0).view(torch.int32 if values.dtype == torch.float32 else torch.int64)
    lowest = torch.iinfo(bits.dtype).min
    keys = torch.where(chosen, bits, bits + (lowest + 1))
    if padding_mask is not None:
        keys = keys.masked_fill(padding_mask.unsqueeze(1), lowest)
    return keys.sort(dim=0, descending=True, stable=True).indices


def rounded_loads(
    load: Tensor, rule: str, tile: int, draw: Tensor | None = None, up_odds: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """Loads (E,) int64 → multiples of `tile` (E,) int64.

    Args:
        draw: (E,) uniform in [0, 1), for the stochastic rules.
        up_odds: a and b, each (E,), for "stochastic_score": up with probability a/b, never if b is 0.
    """
    down = load.div(tile, rounding_mode="floor") * tile
    rest = load - down
    if rule == "balanced":
        # The total of the experts before is within tile/2 of its rounded total. So the next rounded total, the nearest
        # multiple, is ⌊f⌋ or ⌈f⌉ further. Ties always go up; otherwise a load of whole tiles could change by one tile.
        total = (load.cumsum(0) + tile // 2).div(tile, rounding_mode="floor") * tile
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
    values: Tensor, order: Tensor, padding_mask: Tensor | None, load: Tensor, tile: int
) -> tuple[Tensor, Tensor]:
    """(E,), (E,): summed weights of the choices in each expert's last, partial tile, and of that tile when full."""
    values = torch.nan_to_num(values, nan=0.0)
    if padding_mask is not None:
        values = values.masked_fill(padding_mask.unsqueeze(1), 0.0)
    ordered = values.gather(0, order)
    rank = torch.arange(values.shape[0], device=values.device).unsqueeze(1)
    start = load.div(tile, rounding_mode="floor") * tile
    whole = torch.where((rank >= start) & (rank < start + tile), ordered, 0.0)
    return torch.where(rank < load, whole, 0.0).sum(0), whole.sum(0)


def place_ref(kept: Tensor, num_pairs: int) -> tuple[Tensor, Tensor, Tensor]:
    """kept (T, E) bool → token, expert (R,) int32 and source (R,) int64, the place of each pair in (T·E,).

    After the last pair token is T-1 and expert -1. Sources differ there, so that zero gradients do not queue at one.
    """
    num_tokens, num_experts = kept.shape
    kept = kept.flatten()
    slot = torch.where(kept, kept.cumsum(0) - 1, num_pairs)  # all others write to a spare slot
    places = torch.arange(kept.shape[0], device=kept.device)
    source = places.new_zeros(num_pairs + 1).scatter_(0, slot, places)[:num_pairs]
    spare = places[:num_pairs]
    used = spare < kept.sum()
    token = torch.where(used, source.div(num_experts, rounding_mode="floor"), num_tokens - 1)
    expert = torch.where(used, source.remainder(num_experts), -1)
    return token.int(), expert.int(), torch.where(used, source, spare)


def rounded_router_ref(
    logits: Tensor, bias: Tensor | None, padding_mask: Tensor | None, draw: Tensor | None,
    rounding: Rounding, options: RouterOptions,
) -> RoundedOutput:  # fmt: skip
    """`rounded_router_op` in plain torch, differentiable by autograd."""
    top, tile = router_ref(logits, bias, padding_mask, options), rounding.tile
    scores = router_scores(wide_logits(logits, padding_mask), options.sigmoid) * options.scaling
    ids = top.expert.view(-1, options.top_k).long()
    ids = torch.where(ids < 0, torch.arange(options.top_k, device=ids.device), ids)  # those of padding are not used
    values = scores.scatter(1, ids, top.weight.view(ids.shape))  # every pair's weight, chosen or not
    with torch.no_grad():
        chosen = torch.zeros_like(values, dtype=torch.bool).scatter_(1, ids, True)
        order = rank_order(values.detach(), chosen, padding_mask)
        odds = None
        if rounding.rule == "stochastic_score":
            odds = odds_by_score(values.detach(), order, padding_mask, top.load, tile)
        rounded = rounded_loads(top.load, rounding.rule, tile, draw, odds).clamp(max=top.stats[1])
        rank = torch.arange(len(values), device=values.device).unsqueeze(1)
        kept = torch.zeros_like(chosen).scatter_(0, order, rank < rounded)
        token, expert, source = place_ref(kept, rounding.num_pairs)
        flags = kept + 2 * chosen.to(torch.int8)
        if padding_mask is not None:
            flags = flags.masked_fill(padding_mask.unsqueeze(1), 0)
    weight = torch.where(expert >= 0, values.flatten().gather(0, source), 0.0)
    return RoundedOutput(
        *top._replace(weight=weight, expert=expert, token=token),
        rounded=rounded,
        dropped=(top.load - rounded).clamp_min(0).sum(),
        flags=flags.t().contiguous(),
        ends=kept.sum(1).cumsum(0).int(),
    )


def _fake_rounded_router(a: Any) -> RoundedOutput:
    (num_tokens, num_experts), top = a.logits.shape, empty_output(a.logits, a.rounding.num_pairs)
    return RoundedOutput(
        *top,
        rounded=torch.empty_like(top.load),
        dropped=top.load.new_empty(()),
        flags=a.logits.new_empty(num_experts, num_tokens, dtype=torch.int8),
        ends=a.logits.new_empty(num_tokens, dtype=torch.int32),
    )


rounded_router_op = custom_op(
    "megablocks::rounded_router",
    fake=_fake_rounded_router,
    kernel="megablocks.ops.routing.rounding_triton:rounded_route_launch",
    takes=lambda logits, *others: logits.shape[0] > 0 and kernels_take(logits, logits.shape[1], others[-1]),
)(rounded_router_ref)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    logits, _, padding_mask, _, _, options = inputs
    out = RoundedOutput(*output)
    if not has_losses(options):
        ctx.mark_non_differentiable(out.balance, out.z, out.sums)
    save_for_logits(ctx, logits, padding_mask, RouterSaved(None, out.load, out.stats, out.flags, out.ends), options)


def _backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    return gradient_of_logits(ctx, RouterGradients(*grads[:4])), None, None, None, None, None


rounded_router_op.register_autograd(_backward, setup_context=_setup_context)


def route_rounded(
    logits: Tensor,
    options: RouterOptions,
    rule: str,
    tile: int,
    *,
    bias: Tensor | None = None,
    padding_mask: Tensor | None = None,
    generator: Generator | None = None,
) -> RoundedOutput:
    """Each token's experts, with rounded loads, without a host synchronization.

    Args:
        logits, options, bias, padding_mask: as for `route_topk`.
        rule: one of `ROUNDINGS`.
        tile: rows, at least 1.
        generator: for the stochastic rules, on the logits' device; None for torch's own.

    Raises:
        ValueError: as for `route_topk`, an unknown rule, or a tile below 1.
    """
    if rule not in ROUNDINGS:
        raise ValueError(f"rule={rule!r}: must be one of {', '.join(ROUNDINGS)}")
    if tile < 1:
        raise ValueError(f"tile={tile}: must be at least 1")
    check_router(logits, options, bias, padding_mask)
    num_tokens, num_experts = logits.shape
    draw = torch.rand(num_experts, generator=generator, device=logits.device) if rule in STOCHASTIC else None
    rounding = Rounding(rule, tile, max_pairs(rule, num_tokens, num_experts, options.top_k, tile))
    return rounded_router_op(logits, bias, padding_mask, draw, rounding, options)
