"""Megatron's top-k router with our routing: the same parameters, losses and metrics; a `Routing`, no dense maps.

`aux_loss`, `global_aux_loss` and the z-loss come from the op that routes: it sums the scores and counts the load, so
there is no second softmax, no second top-k and no map of tokens and experts. Megatron's own methods sum the losses
over ranks, attach them and log them, so their flags mean the same as in Megatron. One trap remains: Megatron divides
the gradient of `global_aux_loss` by the data-parallel size. Jitter and expert bias are Megatron's own methods too.

Megatron balances the top-k of the plain scores. With an expert bias, groups or uniform assignment we choose other
experts. In these cases, for `seq_aux_loss`, which sums over each sequence, and for a per-token loss over several
ranks, Megatron's dense scores and map are computed.

Settings that our functional routing lacks (sinkhorn, quantile balancing, replay, Megatron's own capacity, sqrt-softplus
scores, Transformer Engine's fused router) run Megatron's routing, whose dense map becomes a `Routing`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from megatron.core.transformer.moe.moe_utils import (
    MoEAuxLossAutoScaler,
    apply_biased_logits,
    apply_random_logits,
    compute_routing_scores_for_aux_loss,
)
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megablocks.megatron.model_config import moe_config, needs_megatron_routing
from megablocks.megatron.settings import settings_of
from megablocks.moe.router import route
from megablocks.monitor.expert_load import ExpertLoad
from megablocks.ops.routing.dispatch import Routing, make_routing


def forced_logits(config: TransformerConfig, logits: Tensor, layer_number: int | None) -> Tensor:
    """The logits; with --moe-router-force-load-balancing or --moe-router-force-biased Megatron's random ones."""
    if config.moe_router_force_load_balancing:
        logits = apply_random_logits(logits)
    if config.moe_router_force_biased is not None:
        logits = apply_biased_logits(logits, config.moe_router_force_biased, layer_number)
    return logits


class MegaBlocksRouter(TopKRouter):
    """forward(x (S, B, H), padding_mask (S, B), True = padding) → Routing over T = S·B tokens."""

    def __init__(
        self,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection | None = None,
        is_mtp_layer: bool = False,
    ) -> None:
        super().__init__(config=config, pg_collection=pg_collection, is_mtp_layer=is_mtp_layer)
        self.moe_config = moe_config(config, settings_of(config))
        self.uses_megatron_routing = needs_megatron_routing(config)
        self.own_losses, self.dense_losses = self._sort_losses()
        ranks = self.tp_cp_group.size()
        balance = self.get_aux_loss_coeff("aux_loss") if "aux_loss" in self.own_losses else 0.0
        self.z_weight = (config.moe_z_loss_coeff or 0.0) / ranks
        # `route` returns the mean over the ranks of the group, but Megatron sums over them. If only the global loss is
        # on, any weight makes the sums differentiable.
        self.loss_config = self.moe_config.replace(
            load_balancing_loss_weight=balance / ranks or float("global_aux_loss" in self.own_losses),
            load_balancing_scope="global" if balance else "local",
            z_loss_weight=self.z_weight,
        )

    def _sort_losses(self) -> tuple[set[str], set[str]]:
        """The load-balancing losses that are on: those that the routing op computes, and those from the dense map."""
        kinds = {kind for kind in ("aux_loss", "seq_aux_loss", "global_aux_loss") if self.get_aux_loss_coeff(kind) > 0}
        config, own = self.moe_config, set()
        if not (config.expert_score_bias or config.num_groups or config.uniform_assignment):
            groups = {"aux_loss": self.tp_cp_group, "global_aux_loss": self.tp_dp_cp_group}
            # Over several ranks Megatron's per-token loss counts tokens as only its own code does.
            per_token = self.calculate_per_token_loss
            own = {kind for kind in kinds & groups.keys() if not (per_token and groups[kind].size() > 1)}
        return own, kinds - own

    def forward(self, input: Tensor, padding_mask: Tensor | None = None) -> Routing:
        self._maintain_float32_expert_bias()
        logits = forced_logits(self.config, self.gating(self.apply_input_jitter(input)), self.layer_number)
        if self.uses_megatron_routing:
            probs, routing_map = self.routing(logits, padding_mask=padding_mask)
            return routing_from_map(probs, routing_map, self.topk)
        return self._our_routing(logits, padding_mask)

    def _our_routing(self, logits: Tensor, padding_mask: Tensor | None) -> Routing:
        """logits (S, B, E) → the Routing of S·B tokens, whose weights carry the auxiliary losses."""
        seq, batch = logits.shape[:2]
        logits = logits.view(-1, self.num_experts)
        if padding_mask is not None:
            padding_mask = padding_mask.reshape(-1)
        learning = self.training and torch.is_grad_enabled()  # false in the first pass of a recomputed layer
        routing = route(
            logits,
            self.loss_config if learning else self.moe_config,
            score_bias=self.expert_bias,
            training=self.training,
            loss_group=self.tp_cp_group,
            padding_mask=padding_mask,
        )
        if learning:
            weight = self._attach_losses(routing, padding_mask)
            if self.dense_losses:
                weight = self._attach_dense_losses(weight, logits, padding_mask, seq, batch)
            routing = dataclasses.replace(routing, weight=weight, losses={})  # which the weights now carry
        if self.enable_expert_bias and torch.is_grad_enabled():
            with torch.no_grad():
                self.local_tokens_per_expert += routing.metrics["tokens_per_expert"]
        return routing

    def _attach_losses(self, routing: Routing, padding_mask: Tensor | None) -> Tensor:
        """The weights (R,), unchanged; in backward they also pass gradients to the losses that `route` computed."""
        weight, losses = routing.weight, routing.losses
        tokens = routing.num_tokens if padding_mask is None else (~padding_mask).sum()
        if "aux_loss" in self.own_losses:
            weight = self.attach_and_log_load_balancing_loss(
                weight,
                self.get_aux_loss_coeff("aux_loss"),
                losses["load_balancing_loss"],
                "load_balancing_loss",
                self.tp_cp_group,
                valid_token_count=tokens,
            )
        if "global_aux_loss" in self.own_losses:  # one row: the sums over all tokens, which Megatron would compute
            assert routing.score_sums is not None
            load, sums = routing.metrics["tokens_per_expert"].unsqueeze(0), routing.score_sums.unsqueeze(0)
            weight = self._apply_global_aux_loss(weight, sums, load, with_padding_mask=True)
        if self.z_weight:
            weight = self._attach_z_loss(weight, losses["z_loss"], tokens)
        return weight

    def _attach_z_loss(self, weight: Tensor, loss: Tensor, tokens: Tensor | int) -> Tensor:
        """Do with the weights, after the routing, what Megatron's `apply_z_loss` does with the logits."""
        get_moe_metrics_tracker().record(
            "z_loss",
            loss / self.z_weight,
            self.layer_number,
            self.config.num_layers,
            avg_group=self.tp_dp_cp_group,
        )
        if self.calculate_per_token_loss:
            loss = loss * tokens * self.tp_cp_group.size()
        return MoEAuxLossAutoScaler.apply(weight, loss)

    def _attach_dense_losses(
        self, weight: Tensor, logits: Tensor, padding_mask: Tensor | None, seq: int, batch: int
    ) -> Tensor:
        """Like `_attach_losses`, for the losses that Megatron computes from its dense scores and map."""
        chosen, scores = compute_routing_scores_for_aux_loss(
            logits, self.topk, self.score_function, fused=False, padding_mask=padding_mask
        )
        masked = padding_mask is not None
        if "aux_loss" in self.dense_losses:
            weight = self._apply_aux_loss(weight, scores, chosen, with_padding_mask=masked)
        if "seq_aux_loss" in self.dense_losses:
            weight = self._apply_seq_aux_loss(weight, scores, chosen, seq, batch, with_padding_mask=masked)
        if "global_aux_loss" in self.dense_losses:
            weight = self._apply_global_aux_loss(weight, scores, chosen, with_padding_mask=masked)
        return weight


class CountingTopKRouter(TopKRouter):
    """Megatron's own router, for its own layer, that also counts the load of the experts."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.expert_load = ExpertLoad(self.num_experts)

    def forward(self, input: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        probs, routing_map = super().forward(input, padding_mask)
        if self.training and torch.is_grad_enabled():
            counts = routing_map.sum(0)
            dropped = routing_map.shape[0] * self.topk - counts.sum()
            self.expert_load.add(counts, dropped)
        return probs, routing_map


def routing_from_map(probs: Tensor, routing_map: Tensor, top_k: int) -> Routing:
    """Megatron's dense routing → pairs, with a static number of them.

    probs: (T, E) weights. routing_map: (T, E) bool, at most `top_k` per row; missing ones are "no expert".
    """
    chosen, expert = routing_map.int().topk(top_k, dim=1)
    weight = probs.float().gather(1, expert)
    routing = make_routing(torch.where(chosen > 0, expert, -1), weight, routing_map.shape[1])
    routing.metrics["dropped"] = routing.metrics.pop("invalid")  # pairs without an expert
    return routing
