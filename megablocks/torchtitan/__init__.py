"""Compute the experts of torchtitan's models with our kernels. No other folder imports torchtitan.

    --override.imports megablocks.torchtitan.routed_experts
    --override.imports 'megablocks.torchtitan.routed_experts={"recompute_activation": true}'

    y[t] = Σ over t's pairs of score · (silu(x[t] · w1_eᵀ) ⊙ (x[t] · w3_eᵀ)) · w2_eᵀ          e = expert of the pair

torchtitan's letters for shapes: B batch, L sequence, D model, K top-k, E experts, F expert width. Its w1_EFD, w3_EFD
and w2_EDF remain three parameters with the same names, initializers, sharding and checkpoints. They are read in place,
w2 as a transposed view. As in torchtitan, the products are computed in bfloat16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megablocks.config import MoEConfig
from megablocks.moe.dispatchers import make_dispatcher
from megablocks.moe.experts import COMPUTE, local_part, without_autocast
from megablocks.moe.impls import ExpertCall, impl_for
from megablocks.ops.fused.mlp import ExpertParameters
from megablocks.ops.routing.dispatch import Dispatch, make_routing

try:
    from torchtitan.config.override import derive, override
    from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
    from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher, LocalTokenDispatcher
except ImportError as error:
    raise ImportError(f"megablocks.torchtitan needs torchtitan 0.3 and what it imports: {error}") from error

__all__ = ["MegaBlocksGroupedExperts", "MegaBlocksRoutedExperts", "routed_experts"]

_DTYPE = torch.bfloat16


class MegaBlocksGroupedExperts(GroupedExperts):
    """torchtitan's parameters of the experts; forward gathers tokens, computes the experts and adds their outputs."""

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):  # noqa: D106
        mlp_impl: str = "auto"
        recompute_activation: bool = False

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.config = MoEConfig(
            hidden_size=config.dim,
            ffn_hidden_size=config.hidden_dim,
            num_experts=config.num_experts,
            activation="swiglu",
            mlp_impl=config.mlp_impl,
            recompute_activation=config.recompute_activation,
        )

    def forward(self, x: Tensor, dispatch: Dispatch, weight: Tensor | None) -> Tensor:
        """x (T, D) in bfloat16, dispatch over the local experts, weight (R,) float32 or None for ones → (T, D)."""
        w1, w3, w2 = (local_part(w).to(_DTYPE) for w in (self.w1_EFD, self.w3_EFD, self.w2_EDF))
        parameters = ExpertParameters(w1, w3, w2.transpose(1, 2))
        impl = impl_for(self.config, x.device, x.dtype, w1.shape[0], w1.shape[1])
        with without_autocast(x):
            return COMPUTE[impl](ExpertCall(parameters, x, dispatch, weight, self.config))


class MegaBlocksRoutedExperts(RoutedExperts):
    """Dispatch, products and weighted sum in one module; over the ranks of torchtitan's mesh "ep" by our all-to-all."""

    @dataclass(kw_only=True, slots=True)
    class Config(RoutedExperts.Config):  # noqa: D106
        pass

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.dispatcher = make_dispatcher(None, self.inner_experts.num_experts)

    def parallelize(self, parallel_dims: Any) -> None:
        """Like torchtitan's `parallelize`, with our exchange of tokens over the "ep" mesh."""
        super().parallelize(parallel_dims)
        mesh = parallel_dims.get_optional_mesh("ep")
        if mesh is not None:
            self.dispatcher = make_dispatcher(mesh.get_group(), self.inner_experts.num_experts)

    def forward(  # torchtitan shards the arguments by these names
        self, x_BLD: Tensor, topk_scores_BLK: Tensor, topk_expert_ids_BLK: Tensor, num_local_tokens_per_expert_E: Tensor
    ) -> Tensor:  # fmt: skip
        """Route x_BLD (B, L, D) through its experts.

        Args:
            x_BLD: floating.
            topk_scores_BLK, topk_expert_ids_BLK: (B, L, K), factors on the experts' outputs, and ids over all ranks.
            num_local_tokens_per_expert_E: not read, because our dispatcher counts the tokens.

        Returns:
            (B, L, D) in the dtype of x_BLD.
        """
        top_k = topk_scores_BLK.shape[-1]
        ids, scores = topk_expert_ids_BLK.reshape(-1, top_k), topk_scores_BLK.reshape(-1, top_k).float()
        routing = make_routing(ids, scores, self.inner_experts.num_experts)
        tokens = x_BLD.reshape(-1, x_BLD.shape[-1]).to(_DTYPE)
        return self.dispatcher.run(tokens, routing, self.inner_experts).view(x_BLD.shape).type_as(x_BLD)


@override(target=RoutedExperts.Config, description="Experts by MegaBlocks")
def routed_experts(cfg: Any, *, mlp_impl: str = "auto", recompute_activation: bool = False) -> Any:
    """Convert the config of torchtitan's routed experts to the config of `MegaBlocksRoutedExperts`.

    Args:
        cfg: of `RoutedExperts`, as in torchtitan's Qwen3, DeepSeek-V3 and Kimi models.
        mlp_impl, recompute_activation: as in `MoEConfig`.

    Raises:
        ValueError: experts with another formula (gpt-oss, float8, MXFP8), or an exchange of tokens by another package.
    """
    allowed = {
        "routed_experts": (cfg, (RoutedExperts,)),
        "inner_experts": (cfg.inner_experts, (GroupedExperts,)),
        "token_dispatcher": (cfg.token_dispatcher, (LocalTokenDispatcher, AllToAllTokenDispatcher)),
    }
    for name, (found, kinds) in allowed.items():
        if type(found) not in [kind.Config for kind in kinds]:
            must = " or ".join(kind.Config.__qualname__ for kind in kinds)
            raise ValueError(f"{name}={type(found).__qualname__}: must be {must} for megablocks.torchtitan")
    options = {"mlp_impl": mlp_impl, "recompute_activation": recompute_activation}
    inner = derive(cfg.inner_experts, MegaBlocksGroupedExperts.Config, **options)
    return derive(cfg, MegaBlocksRoutedExperts.Config, inner_experts=inner)
