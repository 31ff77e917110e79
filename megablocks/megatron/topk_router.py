"""Megatron's top-k router with our routing: the same parameters, losses and metrics; a `Routing`, no dense maps.

Losses, z-loss, jitter, expert bias and their logging are Megatron's own methods, so their flags mean what they mean in
Megatron. One trap stays with them: the gradient of its `global_aux_loss` is divided by the data-parallel size.

Settings that our functional routing lacks (sinkhorn, quantile balancing, replay, Megatron's own capacity, sqrt-softplus
scores, Transformer Engine's fused router) run Megatron's routing, whose dense map becomes a `Routing`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_utils import (
    apply_biased_logits,
    apply_random_logits,
    compute_routing_scores_for_aux_loss,
)
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megablocks.megatron.load import ExpertLoad
from megablocks.megatron.model_config import moe_config, needs_megatron_routing
from megablocks.megatron.settings import settings_of
from megablocks.moe.router import route
from megablocks.ops.routing.dispatch import Routing


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

    def forward(self, input: Tensor, padding_mask: Tensor | None = None) -> Routing:
        self._maintain_float32_expert_bias()
        logits = self.gating(self.apply_input_jitter(input))
        if self.config.moe_router_force_load_balancing:
            logits = apply_random_logits(logits)
        if self.config.moe_router_force_biased is not None:
            logits = apply_biased_logits(logits, self.config.moe_router_force_biased, self.layer_number)
        if self.uses_megatron_routing:
            probs, routing_map = self.routing(logits, padding_mask=padding_mask)
            return routing_from_map(probs, routing_map, self.topk)
        return self._our_routing(logits, padding_mask)

    def _our_routing(self, logits: Tensor, padding_mask: Tensor | None) -> Routing:
        seq, batch = logits.shape[:2]
        logits = logits.view(-1, self.num_experts)
        if padding_mask is not None:
            padding_mask = padding_mask.reshape(-1)
        logits = self.apply_z_loss(logits, padding_mask=padding_mask)
        routing = route(
            logits, self.moe_config, score_bias=self.expert_bias, training=self.training, padding_mask=padding_mask
        )
        assert not routing.losses, "the losses are Megatron's"
        learning = self.training and torch.is_grad_enabled()  # false in the first pass of a recomputed layer
        if learning and self.is_aux_loss_enabled():
            routing = with_weight(routing, self._attach_aux_losses(routing.weight, logits, padding_mask, seq, batch))
        if self.enable_expert_bias and torch.is_grad_enabled():
            with torch.no_grad():
                self.local_tokens_per_expert += routing.metrics["tokens_per_expert"]
        return routing

    def _attach_aux_losses(
        self, weight: Tensor, logits: Tensor, padding_mask: Tensor | None, seq: int, batch: int
    ) -> Tensor:
        """Megatron's load-balancing losses: `weight` unchanged, with the losses' gradients behind it."""
        chosen, scores = compute_routing_scores_for_aux_loss(
            logits, self.topk, self.score_function, fused=False, padding_mask=padding_mask
        )
        masked = padding_mask is not None
        weight = self._apply_aux_loss(weight, scores, chosen, with_padding_mask=masked)
        weight = self._apply_seq_aux_loss(weight, scores, chosen, seq, batch, with_padding_mask=masked)
        return self._apply_global_aux_loss(weight, scores, chosen, with_padding_mask=masked)


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


def with_weight(routing: Routing, weight: Tensor) -> Routing:
    """`routing` with other weights, for the same pairs."""
    return dataclasses.replace(routing, weight=weight)


def routing_from_map(probs: Tensor, routing_map: Tensor, top_k: int) -> Routing:
    """Megatron's dense routing → pairs, with a static number of them.

    Args:
        probs: (T, E) weights. routing_map: (T, E) bool, at most `top_k` a row; where fewer, the rest are "no expert".
    """
    num_tokens, num_experts = routing_map.shape
    chosen, expert = routing_map.int().topk(top_k, dim=1)
    weight = probs.float().gather(1, expert)
    token = torch.arange(num_tokens, dtype=torch.int32, device=probs.device).repeat_interleave(top_k)
    counts = routing_map.sum(0)
    return Routing(
        token=token,
        expert=torch.where(chosen > 0, expert, -1).flatten().int(),
        weight=weight.flatten(),
        num_tokens=num_tokens,
        num_experts=num_experts,
        top_k=top_k,
        metrics={"tokens_per_expert": counts.detach(), "dropped": num_tokens * top_k - counts.sum()},
    )
