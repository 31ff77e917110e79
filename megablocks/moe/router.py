"""Routers: modules with a linear layer, and `route`, which chooses experts by logits from any source.

Legend: T tokens, H hidden, E experts, K top-k, R pairs. After the logits everything is computed in float32 (float64 for
float64 logits).

NaN: a token whose logits contain a NaN still gets K different ids in [0, E). Its weights and its output become NaN, but
no other token's. Expert choice picks such a token last. The metric `nonfinite_tokens` counts tokens with NaN or
infinite logits. A NaN makes each loss NaN on purpose, so that a guard sees it.

The linear layer's weight (E, H) must be equal on every rank: give torch the same seed there before you build a router.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megablocks.config import ConfigError, MoEConfig
from megablocks.kinds import ROUTERS, load
from megablocks.moe.groups import SharesGroups
from megablocks.ops.grouped import TILE_ROWS
from megablocks.ops.grouped.rows_linear import rows_linear
from megablocks.ops.library import custom_op
from megablocks.ops.routing.dispatch import Routing, check_padding_mask, count_valid, make_routing
from megablocks.ops.routing.rounding import route_rounded
from megablocks.ops.routing.topk import balance_loss, has_losses, losses_ref, route_topk, router_scores, wide_logits
from megablocks.ops.routing.values import RoundedOutput, RouterLosses, RouterOptions, RouterOutput


class Router(SharesGroups, nn.Module):
    """A linear layer followed by `route`. `megablocks.kinds.ROUTERS` lists the subclasses."""

    router_type: str
    expert_score_bias: Tensor | None

    def __init__(
        self,
        config: MoEConfig,
        *,
        loss_group: dist.ProcessGroup | None = None,
        init_method: Callable[[Tensor], Any] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """
        Args:
            loss_group: the ranks of load_balancing_scope "global".
            init_method: fills the weight (E, H) in place; None draws it with std config.init_std.
            device: of the weight; torch's default if None.
            dtype: of the weight; the logits are computed in it and all after them in float32.

        Raises:
            ConfigError: the config names another router_type.
        """
        super().__init__()
        if config.router_type != self.router_type:
            raise ConfigError(f"router_type={config.router_type!r}: must be {self.router_type!r} for this router")
        self.config = config
        self.loss_group = loss_group
        self.layer = nn.Linear(config.hidden_size, config.num_experts, bias=False, device=device, dtype=dtype)
        self._init_method = init_method or partial(nn.init.normal_, std=config.init_std)
        self.reset_parameters()
        self.register_buffer("expert_score_bias", None)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialize the weight again; buffers do not change."""
        self._init_method(self.layer.weight)

    def logits(self, x: Tensor) -> Tensor:
        """x (..., H), T tokens in all → (T, E) in the weight's dtype, with jitter in training."""
        x = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
        if self.training and self.config.jitter_eps is not None:
            x = x * self.jitter(x)
        x = x.to(self.layer.weight.dtype)
        return rows_linear(x, self.layer.weight) if self.config.batch_invariant else self.layer(x)

    def jitter(self, x: Tensor) -> Tensor:
        """Random factors for x (T, H), of its shape and dtype: uniform in [1 - jitter_eps, 1 + jitter_eps]."""
        eps = self.config.jitter_eps or 0.0
        low, high = 1.0 - eps, 1.0 + eps
        return low + torch.rand_like(x) * (high - low)

    def forward(self, x: Tensor, *, padding_mask: Tensor | None = None) -> Routing:
        """Route x (..., H), T tokens in all; padding_mask (T,) bool, True for padding."""
        return self.route(self.logits(x), padding_mask=padding_mask)

    def choose(self, x: Tensor) -> Routing:
        """Route x (T, H) without losses, and without counting its load; only for top-k."""
        return route(self.logits(x), self.config, score_bias=self.expert_score_bias, training=False)

    def route(self, logits: Tensor, *, padding_mask: Tensor | None = None) -> Routing:
        """Route by the logits (T, E) that `logits(x)` returned, for callers that need them too.

        padding_mask: (T,) bool, True for padding.
        """
        return route(
            logits,
            self.config,
            score_bias=self.expert_score_bias,
            training=self.training,
            loss_group=self.loss_group,
            padding_mask=padding_mask,
        )


class ExpertChoiceRouter(Router):
    """Each expert picks its ⌈T·K/E⌉ best tokens (arXiv 2202.09368), so a token can have any number of experts."""

    router_type = "expert_choice"


class TopKRouter(Router):
    """Each token picks its K best experts.

    With config.expert_score_bias it has two buffers. `expert_score_bias` (E,) float32 stays float32 when the module is
    cast. `tokens_since_update` (E,) int64 counts pairs per expert since the last update, and is not saved.
    """

    router_type = "topk"
    tokens_since_update: Tensor | None

    def __init__(self, config: MoEConfig, *, device: torch.device | str | None = None, **kwargs: Any) -> None:
        super().__init__(config, device=device, **kwargs)
        self.register_buffer("tokens_since_update", None, persistent=False)
        if config.expert_score_bias:
            self.expert_score_bias = torch.zeros(config.num_experts, dtype=torch.float32, device=device)
            self.tokens_since_update = torch.zeros(config.num_experts, dtype=torch.int64, device=device)
        self.register_load_state_dict_post_hook(_count_where_the_bias_is)

    def route(self, logits: Tensor, *, padding_mask: Tensor | None = None) -> Routing:
        """Like `Router.route`; also counts the load for the next update of the bias."""
        routing = super().route(logits, padding_mask=padding_mask)
        counts = self.tokens_since_update
        if counts is not None and self.training and torch.is_grad_enabled():
            count_once(counts, routing.metrics["tokens_per_expert"])
        return routing

    @torch.no_grad()
    def update_expert_score_bias(self, group: dist.ProcessGroup | None = None) -> None:
        """Move each expert's bias by the rate towards balance. Call it once per optimizer step (arXiv 2408.15664).

            bias_e += rate · sign(mean load − load_e),  load = tokens_since_update summed over `group`, then reset to 0

        torch's DDP needs broadcast_buffers=False. By default it replaces every rank's counts by rank 0's before each
        forward, so several micro-batches of a step would be counted wrong.

        Args:
            group: all ranks that share the bias and see different tokens; None for this rank alone.

        Raises:
            ConfigError: the router has no bias.
        """
        bias, counts = self.expert_score_bias, self.tokens_since_update
        if bias is None or counts is None:
            raise ConfigError("expert_score_bias=False: must be True for update_expert_score_bias")
        load = counts.clone()
        if group is not None:
            dist.all_reduce(load, group=group)
        # Compare E·load with the total: integers are exact, while a float mean could make a balanced expert unbalanced.
        bias += self.config.expert_score_bias_rate * torch.sign(load.sum() - load * load.numel())
        counts.zero_()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> TopKRouter:
        """Called by `module.to` and similar methods. The score bias stays float32; buffers from "meta" start at 0."""
        bias, were = self.expert_score_bias, list(self.buffers(recurse=False))
        super()._apply(fn, recurse)
        moved = self.expert_score_bias
        for old, new in zip(were, self.buffers(recurse=False), strict=True):
            if old.is_meta:  # `to_empty` leaves memory uninitialized, and no checkpoint contains the counts
                new.zero_()
        if bias is not None and moved is not None and moved.dtype != torch.float32:
            # bf16 would lose the update: 1 + 1e-3 rounds to 1
            self.expert_score_bias = bias.to(moved.device)
        return self


def _count_where_the_bias_is(router: TopKRouter, _: Any) -> None:
    """Called after `load_state_dict`, which with assign=True replaces a bias on "meta". No state has the counts."""
    bias, counts = router.expert_score_bias, router.tokens_since_update
    if bias is not None and counts is not None and counts.device != bias.device:
        router.tokens_since_update = torch.zeros_like(counts, device=bias.device)


def make_router(config: MoEConfig, **kwargs: Any) -> Router:
    """Return the router that config.router_type names. Its class gets the keyword arguments."""
    kind: type[Router] = load(ROUTERS[config.router_type].module)
    return kind(config, **kwargs)


@custom_op("megablocks::count_once", mutates_args=("counts",), fake=lambda *_: None)
def count_once(counts: Tensor, load: Tensor) -> None:
    """Add the load (E,) to the counts (E,), unless this forward recomputes one that was already counted.

    Both kinds of activation checkpointing recompute inside a backward pass. The reentrant kind runs the first forward
    without gradients, so it is not counted. The other kind runs it with gradients and recomputes under saved-tensor
    hooks. This is an op because a compiled layer runs the same code in both passes.
    """
    in_backward = torch._C._current_graph_task_id() != -1
    if not in_backward or torch._C._autograd._top_saved_tensors_default_hooks(True) is None:
        counts += load


def route(
    logits: Tensor,
    config: MoEConfig,
    *,
    score_bias: Tensor | None = None,
    training: bool,
    loss_group: dist.ProcessGroup | None = None,
    padding_mask: Tensor | None = None,
) -> Routing:
    """Choose experts for tokens, and compute the auxiliary losses that have a weight in the config.

    Args:
        logits: (T, E) floating, differentiable.
        score_bias: (E,) added to the scores for the selection only, for router_type "topk".
        training: whether the losses are computed, and token_rounding rounds.
        loss_group: the ranks of load_balancing_scope "global"; None counts this rank alone.
        padding_mask: (T,) bool, True for padding: such a token gets no expert, and counts in no load and no loss.

    Returns:
        Routing; `losses` contains "load_balancing_loss" and "z_loss" if their weight is above 0, `metrics` also
        `nonfinite_tokens` () int64, and with token rounding `rounded_per_expert` (E,), the loads after rounding.

    Raises:
        ValueError: logits or padding_mask of another shape, or a mask that is not bool.
    """
    num_tokens = logits.shape[0]
    if logits.dim() != 2 or logits.shape[1] != config.num_experts:
        raise ValueError(f"logits is {tuple(logits.shape)}: must be (T, {config.num_experts}), one column an expert")
    if padding_mask is not None:
        check_padding_mask(padding_mask, num_tokens)
    options = RouterOptions(
        top_k=config.top_k,
        sigmoid=config.score_function == "sigmoid",
        after=config.score_function == "softmax" and config.softmax_order == "after_topk",
        norm_p=config.normalize_top_k or 0.0,
        scaling=config.top_k_scaling,
        balance_weight=config.load_balancing_loss_weight if training else 0.0,
        z_weight=config.z_loss_weight if training else 0.0,
        num_groups=config.num_groups or 0,
        group_top_k=config.group_top_k or 0,
    )
    kind = "rounded" if training and config.token_rounding is not None else config.router_type
    routing, out = _KINDS[kind](logits, config, options, score_bias, padding_mask)
    nonfinite, count, _ = out.stats.unbind()
    routing.metrics["nonfinite_tokens"] = nonfinite
    if options.balance_weight:
        loss, load = out.balance, routing.metrics["tokens_per_expert"]
        ranks = loss_group.size() if loss_group is not None and config.load_balancing_scope == "global" else 1
        if ranks > 1:  # arXiv 2501.11873: loads and tokens of all ranks, scores of this rank
            totals = torch.cat((load, count.view(1)))
            dist.all_reduce(totals, group=loss_group)
            load, count = totals[:-1], totals[-1]
        if ranks > 1 or config.uniform_assignment:
            # times the ranks: the mean over ranks is then the loss of all tokens, however they are split
            loss = balance_loss(out.sums, load, count, config.top_k, options.balance_weight * ranks)
        routing.losses["load_balancing_loss"] = loss
    if options.z_weight:
        routing.losses["z_loss"] = out.z
    return dataclasses.replace(routing, score_sums=out.sums) if has_losses(options) else routing


_Result = tuple[Routing, RouterOutput | RoundedOutput | RouterLosses]


def _top_k(
    logits: Tensor, config: MoEConfig, options: RouterOptions, score_bias: Tensor | None, padding_mask: Tensor | None
) -> _Result:
    """Each token picks its K best experts."""
    out = route_topk(logits, options, bias=score_bias, padding_mask=padding_mask)
    if config.uniform_assignment:  # round robin, as in megablocks 0.10; the weights are still the router's
        ids = torch.arange(out.expert.shape[0], device=logits.device).remainder(config.num_experts)
        shape = (-1, options.top_k)
        weight = out.weight.view(shape)
        return make_routing(ids.view(shape), weight, config.num_experts, padding_mask=padding_mask), out
    zero = out.stats[2]  # a new tensor would need a launch
    metrics = {"tokens_per_expert": out.load, "dropped": zero, "invalid": zero}
    sizes = (logits.shape[0], config.num_experts, options.top_k)
    return Routing(out.token, out.expert, out.weight, *sizes, metrics=metrics), out


def _rounded(
    logits: Tensor, config: MoEConfig, options: RouterOptions, score_bias: Tensor | None, padding_mask: Tensor | None
) -> _Result:
    """Like `_top_k`, but then rounds the loads, so that tokens have different numbers of experts."""
    assert config.token_rounding is not None
    rounding = (config.token_rounding, config.token_rounding_tile or TILE_ROWS)
    out = route_rounded(logits, options, *rounding, bias=score_bias, padding_mask=padding_mask)
    metrics = {
        "tokens_per_expert": out.load,
        "rounded_per_expert": out.rounded,
        "dropped": out.dropped,
        "invalid": out.stats[2],
    }
    return Routing(out.token, out.expert, out.weight, logits.shape[0], config.num_experts, metrics=metrics), out


def _expert_choice(
    logits: Tensor, config: MoEConfig, options: RouterOptions, score_bias: Tensor | None, padding_mask: Tensor | None
) -> _Result:
    """Each expert picks its ⌈T·K/E⌉ best tokens; ties go to the lower token (Zhou et al., arXiv 2202.09368).

    Padding is picked last and then gets no expert. The R = E·⌈T·K/E⌉ pairs are sorted by token, then by expert; top_k
    is None.
    """
    logits = wide_logits(logits, padding_mask)
    scores = router_scores(logits, options.sigmoid)
    num_tokens, num_experts = scores.shape
    picks_each = -(-num_tokens * options.top_k // num_experts)
    with torch.no_grad():
        selection = torch.where(scores.isnan(), float("-inf"), scores)
        if padding_mask is not None:
            selection = selection.masked_fill(padding_mask.unsqueeze(1), float("-inf"))
            # NaN tokens come before padding: they are routed, padding is not
            selection = torch.where(scores.isnan(), torch.finfo(scores.dtype).min, selection)
        picked = selection.t().sort(dim=1, descending=True, stable=True).indices[:, :picks_each]
        token, order = picked.flatten().sort(stable=True)
        expert = order.div(max(picks_each, 1), rounding_mode="floor")
    weight = scores.flatten().gather(0, token * num_experts + expert) * options.scaling
    if padding_mask is not None:
        expert = torch.where(padding_mask[token], -1, expert)
    expert = expert.int()
    load = count_valid(expert, num_experts)
    losses = losses_ref(logits, padding_mask, load, options)
    metrics = {"tokens_per_expert": load, "invalid": losses.stats[2]}
    return Routing(token.int(), expert, weight, num_tokens, num_experts, metrics=metrics), losses


_KINDS = {"topk": _top_k, "rounded": _rounded, "expert_choice": _expert_choice}
