"""The whole mixture-of-experts layer inside Megatron: its router's parameters, our routing, dispatch and experts.

    x (S, B, H) ─ MegaBlocksRouter ─▶ Routing ─ [capacity] ─ dispatcher, MegaBlocksExperts ─ [+ shared] ─▶ (S, B, H)

A subclass of Megatron's MoELayer, because Megatron asks `isinstance` where it treats such layers differently. It builds
no token dispatcher of Megatron's.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_layer import BaseMoELayer, MoELayer, MoESubmodules
from megatron.core.transformer.moe.moe_utils import MoECudaGraphTensorStore, get_default_pg_collection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megablocks.layers.memory import out_of_memory
from megablocks.megatron.load import ExpertLoad
from megablocks.megatron.model_config import check_config
from megablocks.megatron.settings import settings_of
from megablocks.ops.routing.capacity import apply_capacity, capacity_of
from megablocks.ops.routing.dispatch import Routing
from megablocks.parallel.dispatcher import AllToAllDispatcher, LocalDispatcher


class MegaBlocksMoELayer(MoELayer):
    """Takes the place, the arguments and the config of Megatron's MoELayer.

    Args:
        submodules: builders of the router (a `MegaBlocksRouter`), of the experts (`MegaBlocksExperts`) and, where the
            config has them, of the shared experts (Megatron's).
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MoESubmodules | None = None,
        layer_number: int | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        is_mtp_layer: bool = False,
        name: str | None = None,
    ) -> None:
        check_config(config)
        assert submodules is not None
        groups = get_default_pg_collection() if pg_collection is None else pg_collection
        BaseMoELayer.__init__(self, config, layer_number, groups, is_mtp_layer)  # MoELayer's would build a dispatcher
        selective = config.recompute_granularity == "selective"
        self.submodules = submodules
        self.tp_group = groups.tp
        self.moe_layer_recompute = selective and "moe" in config.recompute_modules
        self.shared_experts_recompute = selective and "shared_experts" in config.recompute_modules
        self.cudagraph_tensor_store = MoECudaGraphTensorStore()

        self.router = submodules.router(config=config, pg_collection=groups, is_mtp_layer=is_mtp_layer)
        self.experts = submodules.experts(self.num_local_experts, config, pg_collection=groups)
        if self.use_shared_expert:
            assert submodules.shared_experts is not None
            self.shared_experts = submodules.shared_experts(
                config=config, pg_collection=groups, gate=config.moe_shared_expert_gate
            )
        self.settings = settings_of(config)
        self.dispatch_group = groups.tp_ep
        self.dispatcher = self._build_dispatcher(groups)
        self.expert_load = ExpertLoad(config.num_moe_experts)

    def _build_dispatcher(self, groups: ProcessGroupCollection) -> LocalDispatcher | AllToAllDispatcher:
        shards = groups.expt_tp.size()
        if groups.ep.size() * shards == 1:
            return LocalDispatcher()
        # In Megatron's group of expert-tensor × expert-parallel ranks the former are neighbours.
        return AllToAllDispatcher(
            self.dispatch_group,
            self.config.num_moe_experts,
            ffn_shards=shards,
            quantize_num_bits=self.settings.quantize_scatter_num_bits,
        )

    def forward(
        self, hidden_states: Tensor, intermediate_tensors: Any = None, padding_mask: Tensor | None = None, **_: Any
    ) -> tuple[Tensor, None]:
        """hidden_states (S, B, H), padding_mask (B, S) bool, True = padding → ((S, B, H), None)."""
        assert intermediate_tensors is None, "check_config refuses the CUDA graphs that would pass these"
        if padding_mask is not None:
            padding_mask = padding_mask.transpose(0, 1).bool()
        if self.moe_layer_recompute and self.training:
            return tensor_parallel.checkpoint(self._forward, False, hidden_states, padding_mask), None
        return self._forward(hidden_states, padding_mask), None

    def _forward(self, hidden_states: Tensor, padding_mask: Tensor | None) -> Tensor:
        shared = self.shared_experts_compute(hidden_states)
        routing = self._drop(self.router(hidden_states, padding_mask))
        if self.training and torch.is_grad_enabled():  # once a step, also when the layer is recomputed
            self.expert_load.add(routing.metrics["tokens_per_expert"], routing.metrics.get("dropped", 0))
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        try:
            out = self.dispatcher.run(tokens, routing, self.experts.core).view_as(hidden_states)
        except torch.OutOfMemoryError as error:
            # without the capacity, which pads nothing here
            config = self.experts.core.config.replace(capacity_factor=None)
            raise out_of_memory(config, tokens, routing.num_pairs, error) from error
        return out if shared is None else out + shared

    def _drop(self, routing: Routing) -> Routing:
        """Apply the capacity of our settings, where one is set."""
        factor, rule = self.settings.capacity_factor, self.settings.capacity_rule
        if not factor:  # None: dropless; 0: the fullest expert's load, which drops nothing either
            return routing
        # Tutel's negative factor, the smaller of the fullest expert's load and the bound, drops what the bound does.
        load = routing.metrics["tokens_per_expert"]
        group = self.dispatch_group
        ranks, before = 1, None
        if rule == "megablocks" and group.size() > 1:  # counts the tokens of all ranks together, earlier ranks first
            ranks = group.size()
            loads = load.new_empty(ranks * load.shape[0])
            torch.distributed.all_gather_into_tensor(loads, load.contiguous(), group=group)
            before = loads.view(ranks, -1)[: group.rank()].sum(0)
        top_k = self.config.moe_router_topk
        capacity = capacity_of(rule, abs(factor), top_k, routing.num_tokens, load.shape[0], load, num_ranks=ranks)
        return apply_capacity(routing, capacity, before=before)
