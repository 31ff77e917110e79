"""`route_topk` with the experts' loads rounded to multiples of a tile, in one op.

    values_te  weight of the pair: the top-k's where it chose e for t, else the score · scaling
    load_e     pairs that the top-k gave expert e; rounded_e its multiple of the tile by the rule (rounding.py)
    pairs      the first rounded_e tokens of every expert's order, in token order, and within a token by expert

Legend: T tokens, E experts, K top-k, R pairs (`max_pairs`, static). Losses and padding are `route_topk`'s, and see the
load before rounding. For the backward pass the op keeps one byte a (token, expert) beside the logits: whether the pair
is computed, and whether the top-k chose it. Source: SonicMoE (arXiv 2512.14080).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor

from megablocks.ops.backend import runs_triton
from megablocks.ops.dtypes import accumulation_dtype
from megablocks.ops.library import custom_op
from megablocks.ops.routing.rounding import STOCHASTIC, check_rounding, max_pairs, round_loads, select_tokens_ref
from megablocks.ops.routing.router import (
    RouterOptions,
    RouterOutput,
    register_router_autograd,
    router_backward_ref,
    router_options,
    router_ref,
)
from megablocks.ops.routing.topk import router_scores


class RoundedOutput(NamedTuple):
    """What a router with token rounding gives for T tokens: the fields of `RouterOutput` for R pairs, and

    expert (R,): -1 behind the last pair; load (E,): before rounding.
    rounded: (E,) int64 loads as computed.    dropped: () int64 choices that rounding down left out.
    flags: (E, T) int8, 1 for a pair that is computed + 2 for one that the top-k chose.
    ends: (T,) int32 pairs up to and with each token's.
    """

    weight: Tensor
    balance: Tensor
    z: Tensor
    sums: Tensor
    expert: Tensor
    token: Tensor
    load: Tensor
    stats: Tensor
    rounded: Tensor
    dropped: Tensor
    flags: Tensor
    ends: Tensor


def rounded_router_ref(
    logits: Tensor, bias: Tensor | None, padding_mask: Tensor | None, draw: Tensor | None,
    rule: str, tile: int, num_pairs: int, options: RouterOptions,
) -> tuple[Tensor, ...]:  # fmt: skip
    """`rounded_router_op` in plain torch, differentiable by autograd."""
    top = RouterOutput(*router_ref(logits, bias, padding_mask, options))
    logits = logits.to(accumulation_dtype(logits.dtype))
    if padding_mask is not None:
        logits = logits.masked_fill(padding_mask.unsqueeze(1), 0.0)
    scores = router_scores(logits, "sigmoid" if options.sigmoid else "softmax") * options.scaling
    picked = top.expert.view(-1, options.top_k).long()
    padding_ids = torch.arange(options.top_k, device=picked.device)  # which are not taken
    ids = torch.where(picked < 0, padding_ids, picked)
    values = scores.scatter(1, ids, top.weight.view(ids.shape))
    with torch.no_grad():
        rounded, dropped = round_loads(values, ids, top.load, rule, tile, draw, padding_mask)
        token, expert, source = select_tokens_ref(values.detach(), ids, rounded, padding_mask, num_pairs)
        kept = torch.zeros(
            values.numel() + 1, dtype=torch.int8, device=logits.device
        )  # the unused pairs' place is last
        kept = kept.scatter_(0, torch.where(expert >= 0, source, values.numel()), 1)[:-1].view(values.shape)
        flags = kept + torch.zeros_like(kept).scatter_(1, ids, 2)
        if padding_mask is not None:
            flags = flags.masked_fill(padding_mask.unsqueeze(1), 0)
        ends = (flags & 1).sum(1).cumsum(0).int()
    weight = torch.where(expert >= 0, values.flatten().gather(0, source), 0.0)
    losses = (top.balance, top.z, top.sums)
    flags = flags.t().contiguous()
    return weight, *losses, expert, token, top.load, top.stats, rounded, dropped, flags, ends


def rounded_router_backward_ref(
    logits: Tensor, padding_mask: Tensor | None, flags: Tensor, ends: Tensor, load: Tensor, stats: Tensor,
    grads: tuple[Tensor | None, ...], options: RouterOptions,
) -> Tensor:  # fmt: skip
    """The gradient of the logits (T, E) from those of weight (R,), balance, z and sums, None for no gradient."""
    kept, chosen = (flags.t() & 1).long(), (flags.t() & 2) > 0
    # in any order: none of padding's
    ids = chosen.int().sort(dim=1, descending=True, stable=True).indices[:, : options.top_k]
    d_weight, *others = grads
    d_choice = d_scores = None
    if d_weight is not None:
        pair = (ends.unsqueeze(1) - kept.sum(1, keepdim=True) + kept.cumsum(1) - 1).clamp(min=0)
        d_values = torch.where(kept > 0, d_weight[pair], 0.0) if d_weight.numel() else torch.zeros_like(logits)
        d_choice = d_values.gather(1, ids).flatten()
        d_scores = torch.where(chosen, 0.0, d_values * options.scaling)
    grads = (d_choice, *others)
    return router_backward_ref(logits, padding_mask, ids.flatten(), load, stats, grads, options, d_scores)


@custom_op("megablocks::rounded_router", mutates_args=())
def rounded_router_op(
    logits: Tensor, bias: Tensor | None, padding_mask: Tensor | None, draw: Tensor | None,
    rule: str, tile: int, num_pairs: int, options: RouterOptions,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    args = (logits, bias, padding_mask, draw, rule, tile, num_pairs, options)
    if logits.shape[0] and runs_triton(logits):
        from megablocks.ops.routing.rounded_router_triton import rounded_route_launch

        return RoundedOutput(*rounded_route_launch(*args))[:]
    return RoundedOutput(*rounded_router_ref(*args))[:]


@rounded_router_op.register_fake
def _(
    logits: Tensor, bias: Tensor | None, padding_mask: Tensor | None, draw: Tensor | None,
    rule: str, tile: int, num_pairs: int, *_: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    (tokens, experts), acc = logits.shape, accumulation_dtype(logits.dtype)

    def make(*shape: int, dtype: torch.dtype = acc) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    floats = (make(num_pairs), make(), make(), make(experts))
    pairs = (make(num_pairs, dtype=torch.int32), make(num_pairs, dtype=torch.int32))
    counts = [make(*shape, dtype=torch.int64) for shape in ((experts,), (3,), (experts,), ())]
    kept = (make(experts, tokens, dtype=torch.int8), make(tokens, dtype=torch.int32))
    return RoundedOutput(*[*floats, *pairs, *counts, *kept])[:]


@custom_op("megablocks::rounded_router_backward", mutates_args=())
def rounded_router_backward_op(
    logits: Tensor, padding_mask: Tensor | None, flags: Tensor, ends: Tensor, load: Tensor, stats: Tensor,
    d_weight: Tensor | None, d_balance: Tensor | None, d_z: Tensor | None, d_sums: Tensor | None,
    options: RouterOptions,
) -> Tensor:  # fmt: skip
    grads = (d_weight, d_balance, d_z, d_sums)
    if runs_triton(logits):
        from megablocks.ops.routing.router_backward_triton import route_backward_launch

        return route_backward_launch(logits, padding_mask, None, load, stats, grads, options, flags, ends)
    return rounded_router_backward_ref(logits, padding_mask, flags, ends, load, stats, grads, options)


def _saved(*results: Tensor) -> tuple[Tensor, ...]:
    out = RoundedOutput(*results)
    return out.flags, out.ends, out.load, out.stats


register_router_autograd(rounded_router_op, rounded_router_backward_op, _saved)


def route_rounded(
    logits: Tensor,
    top_k: int,
    rule: str,
    tile: int,
    *,
    score_function: str = "softmax",
    softmax_order: str = "before_topk",
    bias: Tensor | None = None,
    norm_p: float | None = None,
    scaling: float = 1.0,
    balance_weight: float = 0.0,
    z_weight: float = 0.0,
    padding_mask: Tensor | None = None,
    generator: Generator | None = None,
) -> RoundedOutput:
    """Choose each token's experts and round their loads; no host synchronisation.

    Args:
        logits: (T, E) floating, differentiable.
        rule: one of `ROUNDINGS`.
        tile: rows, at least 1.
        generator: of the stochastic rules, on the logits' device; None is torch's own.
        The others are those of `route_topk`.

    Raises:
        ValueError: as `route_topk`, an unknown rule, or a tile below 1.
    """
    check_rounding(rule, tile)
    factors = (scaling, balance_weight, z_weight)
    options = router_options(logits, top_k, bias, padding_mask, score_function, softmax_order, norm_p, *factors)
    (tokens, experts), device = logits.shape, logits.device
    draw = torch.rand(experts, generator=generator, device=device) if rule in STOCHASTIC else None
    rounding = (rule, tile, max_pairs(rule, tokens, experts, top_k, tile))
    return RoundedOutput(*rounded_router_op(logits, bias, padding_mask, draw, *rounding, *options))
