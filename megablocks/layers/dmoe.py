"""`dMoE`: a mixture of experts that never drops a token and never pads (MegaBlocks, arXiv 2211.15841)."""

from __future__ import annotations

import torch
from torch import Tensor

from megablocks.config import ConfigError, MoEConfig
from megablocks.layers import dmlp_registry
from megablocks.layers.arguments import Arguments
from megablocks.layers.base import MoEBase
from megablocks.layers.mlp import SparseMLP
from megablocks.layers.mlp_choice import kernels_take, router_pays
from megablocks.layers.moe import ParallelMLP
from megablocks.ops.hopper import runs_hopper
from megablocks.ops.routing.dispatch import Routing
from megablocks.parallel.dispatcher import LocalDispatcher
from megablocks.routers.router import TopKRouter, is_as_made


def _dropped(routing: Routing) -> dict[str, Tensor]:
    """The metric of what rounding loads down left out; nothing else drops a pair here."""
    if "dropped" in routing.metrics:
        return {"dropped": routing.metrics["dropped"]}
    return {"dropped": torch.zeros((), dtype=torch.int64, device=routing.weight.device)}


class ParallelDroplessMLP(ParallelMLP):
    """As `ParallelMLP`, and no token is dropped: args' capacity factor is ignored, as in megablocks 0.10."""

    def _config_of(self, args: Arguments) -> MoEConfig:
        return args.to_config().replace(capacity_factor=None)

    def _init_mlp(self, args: Arguments) -> SparseMLP:
        return dmlp_registry.get(args)

    def compute(self, x: Tensor, routing: Routing) -> tuple[Tensor, dict[str, Tensor]]:
        """As the base's, with every pair."""
        return self.dispatcher.run(x, routing, self.mlp), _dropped(routing)


class dMoE(MoEBase):  # noqa: N801
    """Dropless mixture of experts: every expert computes all the tokens that were sent to it, however many.

    With config.token_rounding, loads that the router rounds down lose their weakest pairs, which aux counts as dropped.

    Arguments as in `MoEBase`. The capacity factor of `Arguments` is ignored, as in megablocks 0.10; that of a
    `MoEConfig` must be None.
    """

    def _checked_config(self, config: MoEConfig) -> MoEConfig:
        if config.capacity_factor is not None and self.arguments is None:
            raise ConfigError(f"capacity_factor={config.capacity_factor!r}: must be None for dMoE, or use MoE")
        return config.replace(capacity_factor=None)

    def _init_experts_mlp(self, args: Arguments) -> ParallelDroplessMLP:
        return ParallelDroplessMLP(args)

    def _compute(self, x: Tensor, routing: Routing) -> tuple[Tensor, dict[str, Tensor]]:
        return self.dispatcher.run(x, routing, self._experts_for(routing)), _dropped(routing)

    def _experts_take_router(self, x: Tensor) -> bool:
        """Where nothing but the chosen weights depends on the logits, nobody comes between, and it pays."""
        return (
            self.arguments is None
            and is_as_made(self, "_compute", _COMPUTE)
            and is_as_made(self, "_experts_for", _EXPERTS_FOR)
            and type(self.dispatcher) is LocalDispatcher
            and is_as_made(self.dispatcher, "run", _RUN)
            and isinstance(self.router, TopKRouter)
            and self.router.follows_chosen_logits()
            and self.router.gate_is_plain(x)
            and self._has_plain_experts()
            and self.experts.mlp_impl_for(device=x.device, dtype=x.dtype) == "fused"
            and (not x.is_cuda or self._router_pays(x))
        )

    def _router_pays(self, x: Tensor) -> bool:
        config, width = self.config, self.experts.ffn_hidden_size
        taken = kernels_take(num_experts=config.num_experts, hidden_size=config.hidden_size, ffn_hidden_size=width)
        columns = width * (2 if config.is_gated else 1)
        return router_pays(on_hopper=taken and runs_hopper(x), top_k=self.router.config.top_k, columns=columns)


_COMPUTE, _EXPERTS_FOR, _RUN = dMoE._compute, dMoE._experts_for, LocalDispatcher.run
