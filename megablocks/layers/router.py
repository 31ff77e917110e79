"""The router and its losses under the names of megablocks 0.10; `megablocks.moe.router` computes them."""

from __future__ import annotations

import torch
from torch import Tensor

from megablocks.layers.arguments import Arguments
from megablocks.layers.losses import batched_router_zloss, clear_router_zloss, save_router_logits
from megablocks.moe.router import TopKRouter, route
from megablocks.ops.routing.topk import router_scores

__all__ = ["LearnedRouter", "batched_router_zloss", "clear_router_zloss"]


def _uniform_expert_assignment(x: Tensor, num_experts: int) -> Tensor:
    """Return 0, 1, … num_experts-1, 0, 1, … in x's shape and dtype, for programs that replace a router's forward."""
    return torch.arange(x.numel(), dtype=x.dtype, device=x.device).remainder(num_experts).view(x.shape)


class LearnedRouter(TopKRouter):
    """A `TopKRouter` built from `Arguments` that returns tensors; its parameter is `layer.weight` (E, H)."""

    def __init__(self, args: Arguments) -> None:
        super().__init__(args.to_config(), init_method=args.init_method, device=args.resolve_device(), dtype=args.dtype)
        self.args = args

    def _top_k(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """scores (T, E) → each token's K largest scores and their ids, (T, K) each; for subclasses' forwards."""
        values, ids = scores.topk(self.args.moe_top_k, dim=-1)
        return values, ids

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        """Choose experts for x (..., H), T tokens in all. In training, record what the z-loss needs.

        Returns:
            (scores (T, E), expert_weights (T, K), expert_indices (T, K) int64), float32; in 0.10 in x's dtype.
        """
        logits = self.logits(x)
        if self.training and self.args.moe_zloss_weight > 0:
            save_router_logits(logits)
        routing = route(logits, self.config, training=False)  # without losses: the recorded ones are used
        shape = (logits.shape[0], self.config.top_k)
        scores = router_scores(logits, self.config.score_function == "sigmoid")
        return scores, routing.weight.view(shape), routing.expert.view(shape).long()
