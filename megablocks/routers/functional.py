"""Router logits to a Routing: the part of a router without parameters, for any source of logits.

Legend: T tokens, E experts, K top-k, R pairs. Everything is computed in float32 (float64 for float64 logits).

NaN: a token whose logits hold NaN still gets K different ids in [0, E); its weights become NaN, so its output does and
no other token's. Expert choice picks such a token last. The metric `nonfinite_tokens` counts tokens with NaN or
infinite logits, and a loss that is on becomes NaN: a fault is contained, never hidden.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megablocks.config import MoEConfig
from megablocks.ops.dtypes import accumulation_dtype
from megablocks.ops.grouped import TILE_ROWS
from megablocks.ops.routing.dispatch import Routing, count_valid, make_routing
from megablocks.ops.routing.rounded_router import RoundedOutput, route_rounded
from megablocks.ops.routing.router import RouterOutput, route_topk, router_kernel_takes, score_shares
from megablocks.ops.routing.topk import router_scores, topk_weights
from megablocks.routers.losses import balance_loss_over_ranks, load_balancing_loss, z_loss
from megablocks.routers.token_rounding import round_tokens


def route(
    logits: Tensor,
    config: MoEConfig,
    *,
    score_bias: Tensor | None = None,
    training: bool,
    loss_group: dist.ProcessGroup | None = None,
    padding_mask: Tensor | None = None,
) -> Routing:
    """Choose experts for tokens, with the auxiliary losses that the config weighs.

    Args:
        logits: (T, E) floating, differentiable.
        score_bias: (E,) added to the scores for the selection only, for router_type "topk".
        training: whether the losses are computed, and token_rounding rounds.
        loss_group: the ranks of load_balancing_scope "global"; None counts this rank alone.
        padding_mask: (T,) bool, True for padding: such a token gets no expert, is no load and enters no loss.

    Returns:
        Routing; `losses` holds "load_balancing_loss" and "z_loss" where their weight is above 0, `metrics` also
        `nonfinite_tokens` () int64.

    Raises:
        ValueError: logits or padding_mask of another shape.
    """
    num_tokens = logits.shape[0]
    if logits.dim() != 2 or logits.shape[1] != config.num_experts:
        raise ValueError(f"logits is {tuple(logits.shape)}: must be (T, {config.num_experts}), one column an expert")
    if padding_mask is not None and padding_mask.shape != (num_tokens,):
        raise ValueError(f"padding_mask is {tuple(padding_mask.shape)}: must be ({num_tokens},), one a token")
    if config.router_type == "topk" and router_kernel_takes(
        logits, config.top_k, num_groups=config.num_groups, norm_p=config.normalize_top_k
    ):
        return _fused_token_choice(logits, config, score_bias, training, loss_group, padding_mask)
    logits = logits.to(accumulation_dtype(logits.dtype))
    if padding_mask is not None:  # before any score: padding may hold anything, and its gradient is exactly 0
        logits = logits.masked_fill(padding_mask.unsqueeze(1), 0.0)

    if config.router_type == "expert_choice":
        routing = expert_choice(router_scores(logits, config.score_function), config, padding_mask)
    else:
        routing = _token_choice(logits, config, score_bias, padding_mask, training)
    routing.metrics["nonfinite_tokens"] = (~logits.detach().isfinite()).any(1).sum()
    losses = _losses(logits, routing, config, loss_group, padding_mask) if training else {}
    return dataclasses.replace(routing, losses=losses)


def follows_chosen_logits(config: MoEConfig, training: bool) -> bool:
    """Whether `route`'s weights are top_k_scaling times the softmax of the logits of a token's experts, and no loss or
    rounding reads the others: their gradient is 0.
    """
    losses = config.load_balancing_loss_weight > 0 or config.z_loss_weight > 0
    return (
        config.router_type == "topk"
        and (config.score_function, config.softmax_order) == ("softmax", "after_topk")
        and config.normalize_top_k is None
        and not config.uniform_assignment
        and not (training and (losses or config.token_rounding is not None))
    )


def _fused_token_choice(
    logits: Tensor,
    config: MoEConfig,
    score_bias: Tensor | None,
    training: bool,
    loss_group: dist.ProcessGroup | None,
    padding_mask: Tensor | None,
) -> Routing:
    """`route` for top-k in one op: the same formulas in a few launches forward and one backward."""
    options: dict[str, Any] = {
        "score_function": config.score_function,
        "softmax_order": config.softmax_order,
        "bias": score_bias,
        "norm_p": config.normalize_top_k,
        "scaling": config.top_k_scaling,
        "balance_weight": config.load_balancing_loss_weight,
        "z_weight": config.z_loss_weight,
        "padding_mask": padding_mask,
    }
    balances, bounds = training and config.load_balancing_loss_weight > 0, training and config.z_loss_weight > 0
    out: RouterOutput | RoundedOutput
    top_k: int | None
    if training and config.token_rounding is not None:
        top_k = None  # what is left of a token's choices varies
        tile = config.token_rounding_tile or TILE_ROWS
        out = route_rounded(logits, config.top_k, config.token_rounding, tile, **options)
        metrics = {"rounded_per_expert": out.rounded, "dropped": out.dropped}
    else:
        top_k = config.top_k
        out = route_topk(logits, top_k, losses=balances or bounds, **options)
        metrics = {"dropped": out.stats[2]}  # the 0 that is there: a new one is a launch
    nonfinite, num_tokens, invalid = out.stats.unbind()
    routing = Routing(
        token=out.token,
        expert=out.expert,
        weight=out.weight,
        num_tokens=logits.shape[0],
        num_experts=config.num_experts,
        top_k=top_k,
        metrics={"tokens_per_expert": out.load, **metrics, "invalid": invalid},
    )
    if config.uniform_assignment:
        ids = _round_robin(out.expert.view(-1, config.top_k), config.num_experts)
        routing = make_routing(ids, out.weight.view(ids.shape), config.num_experts, padding_mask=padding_mask)
    routing.metrics["nonfinite_tokens"] = nonfinite
    if balances:
        group = loss_group if config.load_balancing_scope == "global" else None
        routing.losses["load_balancing_loss"] = out.balance
        if config.uniform_assignment or (group is not None and dist.get_world_size(group) > 1):
            load, weight = routing.metrics["tokens_per_expert"], config.load_balancing_loss_weight
            loss = balance_loss_over_ranks(out.sums, load, num_tokens, config.top_k, weight, group)
            routing.losses["load_balancing_loss"] = loss
    if bounds:
        routing.losses["z_loss"] = out.z
    return routing


def _token_choice(
    logits: Tensor, config: MoEConfig, score_bias: Tensor | None, padding_mask: Tensor | None, training: bool
) -> Routing:
    ids, weights = topk_weights(
        logits,
        config.top_k,
        score_function=config.score_function,
        softmax_order=config.softmax_order,
        bias=score_bias,
        num_groups=config.num_groups,
        group_top_k=config.group_top_k,
        norm_p=config.normalize_top_k,
        scaling=config.top_k_scaling,
    )
    if training and config.token_rounding is not None:
        scores = router_scores(logits, config.score_function) * config.top_k_scaling
        rule, tile = config.token_rounding, config.token_rounding_tile or TILE_ROWS
        return round_tokens(ids, weights, scores, rule, tile, padding_mask=padding_mask)
    if config.uniform_assignment:
        ids = _round_robin(ids, config.num_experts)
    return make_routing(ids, weights, config.num_experts, padding_mask=padding_mask)


def _round_robin(ids: Tensor, num_experts: int) -> Tensor:
    """Ids in turn, as megablocks 0.10's uniform assignment; the weights stay the router's."""
    return torch.arange(ids.numel(), device=ids.device).remainder(num_experts).view(ids.shape)


def expert_choice(scores: Tensor, config: MoEConfig, padding_mask: Tensor | None = None) -> Routing:
    """Each expert picks its ⌈T·K/E⌉ best tokens, equal ones by the lowest token first (Zhou et al., arXiv 2202.09368).

    Args:
        scores: (T, E) float32, differentiable.
        padding_mask: (T,) bool, True for padding, which is picked last and then gets no expert.

    Returns:
        Routing with R = E·⌈T·K/E⌉ pairs in token order, and within a token by expert; top_k is None.
    """
    num_tokens, num_experts = scores.shape
    picks_each = -(-num_tokens * config.top_k // num_experts)
    with torch.no_grad():
        selection = torch.where(scores.isnan(), float("-inf"), scores)
        if padding_mask is not None:
            selection = selection.masked_fill(padding_mask.unsqueeze(1), float("-inf"))
            # NaN tokens come before padding: they take part, padding does not
            selection = torch.where(scores.isnan(), torch.finfo(scores.dtype).min, selection)
        picked = selection.t().sort(dim=1, descending=True, stable=True).indices[:, :picks_each]
        token, order = picked.flatten().sort(stable=True)
        expert = order.div(max(picks_each, 1), rounding_mode="floor")
    weight = scores.flatten().gather(0, token * num_experts + expert) * config.top_k_scaling
    if padding_mask is not None:
        expert = torch.where(padding_mask[token], -1, expert)
    expert = expert.int()
    return Routing(
        token=token.int(),
        expert=expert,
        weight=weight,
        num_tokens=num_tokens,
        num_experts=num_experts,
        metrics={
            "tokens_per_expert": count_valid(expert, num_experts),
            "invalid": torch.zeros((), dtype=torch.int64, device=expert.device),
        },
    )


def _losses(
    logits: Tensor,
    routing: Routing,
    config: MoEConfig,
    group: dist.ProcessGroup | None,
    padding_mask: Tensor | None,
) -> dict[str, Tensor]:
    losses: dict[str, Tensor] = {}
    num_tokens = routing.num_tokens if padding_mask is None else (~padding_mask).sum()
    if config.load_balancing_loss_weight > 0:
        scores = score_shares(logits, config.score_function)
        if padding_mask is not None:
            scores = scores.masked_fill(padding_mask.unsqueeze(1), 0.0)
        losses["load_balancing_loss"] = load_balancing_loss(
            scores,
            routing.metrics["tokens_per_expert"],
            num_tokens,
            config.top_k,
            config.load_balancing_loss_weight,
            group=group if config.load_balancing_scope == "global" else None,
        )
    if config.z_loss_weight > 0:
        losses["z_loss"] = z_loss(logits, num_tokens, config.z_loss_weight, padding_mask=padding_mask)
    return losses
