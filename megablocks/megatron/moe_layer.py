"""The whole mixture-of-experts layer inside Megatron: its router's parameters, our routing, dispatch and experts.

    x (S, B, H) ─ MegaBlocksRouter ─▶ Routing ─ [capacity] ─ dispatcher, MegaBlocksExperts ─ [+ shared] ─▶ (S, B, H)

The layer is a subclass of Megatron's MoELayer, because Megatron recognizes such layers by `isinstance`. It does not
build Megatron's token dispatcher.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_layer import BaseMoELayer, MoELayer, MoESubmodules
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megablocks.megatron.model_config import check_config
from megablocks.megatron.settings import settings_of
from megablocks.moe.capacity import drop_beyond_capacity, limit_to_capacity
from megablocks.moe.dispatchers import make_dispatcher
from megablocks.moe.memory import out_of_memory
from megablocks.monitor.expert_load import ExpertLoad


class MegaBlocksMoELayer(MoELayer):
    """Replaces Megatron's MoELayer, with the same arguments and config.

    submodules: builders of the router (a `MegaBlocksRouter`), of the experts (`MegaBlocksExperts`) and, where the
    config has them, of the shared experts (Megatron's).
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MoESubmodules,
        layer_number: int | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        is_mtp_layer: bool = False,
        name: str | None = None,
    ) -> None:
        check_config(config)
        groups = get_default_pg_collection() if pg_collection is None else pg_collection
        BaseMoELayer.__init__(self, config, layer_number, groups, is_mtp_layer)  # MoELayer's would build a dispatcher
        selective = config.recompute_granularity == "selective"
        self.tp_group = groups.tp
        self.moe_layer_recompute = selective and "moe" in config.recompute_modules
        self.shared_experts_recompute = selective and "shared_experts" in config.recompute_modules

        self.router = submodules.router(config=config, pg_collection=groups, is_mtp_layer=is_mtp_layer)
        self.experts = submodules.experts(self.num_local_experts, config, pg_collection=groups)
        if self.use_shared_expert:
            assert submodules.shared_experts is not None
            self.shared_experts = submodules.shared_experts(
                config=config, pg_collection=groups, gate=config.moe_shared_expert_gate
            )
        self.dispatch_group, settings = groups.tp_ep, settings_of(config)
        # In Megatron's group of expert-tensor × expert-parallel ranks, expert-tensor ranks are neighbors.
        self.dispatcher = make_dispatcher(
            self.dispatch_group,
            config.num_moe_experts,
            ffn_shards=groups.expt_tp.size(),
            ffn_fastest=True,
            kind=settings.dispatcher,
            max_tokens=settings.max_tokens,
            rows_factor=settings.dispatch_rows_factor,
        )
        self.expert_load = ExpertLoad(config.num_moe_experts)
        self.pads = settings.pad_to_capacity

    def forward(
        self, hidden_states: Tensor, intermediate_tensors: Any = None, padding_mask: Tensor | None = None, **_: Any
    ) -> tuple[Tensor, None]:
        """hidden_states (S, B, H), padding_mask (B, S) bool, True = padding → ((S, B, H), None)."""
        assert intermediate_tensors is None, "check_config refuses the CUDA graphs that would pass these"
        if (self.moe_layer_recompute or self.shared_experts_recompute) and not hidden_states.requires_grad:
            # Above frozen layers Megatron's checkpoint would compute no gradients, not even of the layer's weights.
            hidden_states = hidden_states.detach().requires_grad_()
        if padding_mask is not None:
            padding_mask = padding_mask.transpose(0, 1).bool()
        if self.moe_layer_recompute and self.training:
            return tensor_parallel.checkpoint(self._forward, False, hidden_states, padding_mask), None
        return self._forward(hidden_states, padding_mask), None

    def _forward(self, hidden_states: Tensor, padding_mask: Tensor | None) -> Tensor:
        """hidden_states (S, B, H) → (S, B, H). Backward calls it again if the layer is recomputed."""
        shared = self.shared_experts_compute(hidden_states)
        core = self.experts.core
        routing, experts = self.router(hidden_states, padding_mask), core
        if self.pads:
            routing, places = limit_to_capacity(routing, core.config, self.dispatch_group)
            experts = partial(core, places=places)
        else:
            routing = drop_beyond_capacity(routing, core.config, self.dispatch_group)
        if self.training and torch.is_grad_enabled():  # once per step, even if the layer is recomputed
            self.expert_load.add(routing.metrics["tokens_per_expert"], routing.metrics.get("dropped", 0))
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        try:
            out = self.dispatcher.run(tokens, routing, experts).view_as(hidden_states)
        except torch.OutOfMemoryError as error:
            config = core.config if self.pads else core.config.replace(capacity_factor=None)
            raise out_of_memory(config, tokens, routing.num_pairs, error) from error
        return out if shared is None else out + shared
