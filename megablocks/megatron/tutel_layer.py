"""Tutel's own mixture-of-experts layer (github.com/microsoft/Tutel) inside Megatron, as an alternative to ours.

Imported only where the package tutel is installed. Router, capacity, all-to-all and experts are Tutel's; weights are
drawn, scaled losses logged and checkpoints written as Megatron does for its own layer.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_layer import BaseMoELayer, MoELayer, MoESubmodules
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, get_default_pg_collection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from tutel import moe as tutel_moe

from megablocks.config import refuse
from megablocks.megatron.local_experts import mark_expert
from megablocks.megatron.model_config import check_config
from megablocks.megatron.settings import settings_of
from megablocks.megatron.topk_router import forced_logits
from megablocks.monitor.expert_load import ExpertLoad
from megablocks.ops.routing.capacity import capacity_of

_ALONE: dict[str, tuple[Any, ...]] = {
    "gated_linear_unit": (False,),
    "moe_shared_expert_intermediate_size": (None,),
    "moe_z_loss_coeff": (None, 0, 0.0),
    "moe_input_jitter_eps": (None, 0, 0.0),
    "moe_router_enable_expert_bias": (False,),
    "moe_router_num_groups": (None,),
    "moe_router_topk_scaling_factor": (None,),
    "moe_router_dtype": (None,),
    "moe_router_score_function": ("softmax",),
    "moe_router_load_balancing_type": ("aux_loss", "none"),
    "moe_expert_capacity_factor": (None,),
    "tensor_model_parallel_size": (1,),
}


class TutelMoELayer(MoELayer):
    """Replaces Megatron's MoELayer. Raises ConfigError for what Tutel's layer lacks."""

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
        for field, allowed in _ALONE.items():
            if (value := getattr(config, field)) not in allowed:
                refuse(field, value, f"must be {allowed[0]!r} in Tutel's layer")
        groups = get_default_pg_collection() if pg_collection is None else pg_collection
        BaseMoELayer.__init__(self, config, layer_number, groups, is_mtp_layer)
        assert config.num_moe_experts is not None
        self.settings = settings_of(config)
        self.dp_group, self.loss_group = groups.expt_dp, groups.tp_cp
        self.expert_load = ExpertLoad(config.num_moe_experts)
        with torch.device("cpu" if config.use_cpu_initialization else torch.cuda.current_device()):
            self.moe = tutel_moe.moe_layer(
                gate_type={
                    "type": "top",
                    "k": config.moe_router_topk,
                    "capacity_factor": self.settings.capacity_factor,
                },
                model_dim=config.hidden_size,
                experts={
                    "type": "ffn",
                    "num_experts_per_device": self.num_local_experts,
                    "hidden_size_per_expert": config.moe_ffn_hidden_size,
                    "activation_fn": config.activation_func,
                    "has_fc1_bias": config.add_bias_linear,
                    "has_fc2_bias": config.add_bias_linear,
                },
                scan_expert_func=lambda _name, parameter: mark_expert(parameter),
                group=self.ep_group,
                normalize_gate=not config.moe_router_pre_softmax,
            )
        for gate in self.moe.gates:
            gate.register_forward_hook(lambda _gate, _input, logits: forced_logits(config, logits, self.layer_number))
        if config.perform_initialization:
            self._draw()
        self.moe.to(config.params_dtype)

    @torch.no_grad()
    def _draw(self) -> None:
        """Megatron's initialization; every expert under its own draw, the same for any expert-parallel size."""
        config, first = self.config, self.local_expert_indices[0]
        for gate in self.moe.gates:
            config.init_method(gate.wg.weight)
        for parameter, init in (
            (self.moe.experts.batched_fc1_w, config.init_method),
            (self.moe.experts.batched_fc2_w, config.output_layer_init_method),
        ):
            full = torch.empty_like(parameter[0])
            for expert in range(config.num_moe_experts):
                init(full)
                if first <= expert < first + self.num_local_experts:
                    parameter[expert - first].copy_(full)

    def set_layer_number(self, layer_number: int) -> None:
        self.layer_number = layer_number

    def forward(
        self, hidden_states: Tensor, intermediate_tensors: Any = None, padding_mask: Tensor | None = None, **_: Any
    ) -> tuple[Tensor, None]:
        """hidden_states (S, B, H) → ((S, B, H), None). Padding is computed like any token."""
        out = self.moe(hidden_states)
        if self.training and torch.is_grad_enabled():
            self._count(hidden_states.shape[:-1].numel())
            out = self._attach_loss(out, out.l_aux)
        return out, None

    @torch.no_grad()
    def _count(self, num_tokens: int) -> None:
        """Add this step's loads, and the pairs that Tutel dropped, to the counts for the log."""
        config, load = self.config, self.moe.dispatch_count.long()
        factor = self.settings.capacity_factor
        if not factor:  # the fullest expert's load
            return self.expert_load.add(load, 0)
        # A negative factor's capacity may be smaller than the bound, but not than the fullest expert's load.
        room = capacity_of("tutel", abs(factor), config.moe_router_topk, num_tokens, load.shape[0], load)
        self.expert_load.add(load, (load - room).clamp_min(0).sum())

    def _attach_loss(self, out: Tensor, loss: Tensor) -> Tensor:
        """`out`, whose gradient carries that of Tutel's load-balancing loss; Megatron's log gets the loss."""
        config, coeff = self.config, self.config.moe_aux_loss_coeff
        if not coeff or self.layer_number is None:
            return out
        get_moe_metrics_tracker().record(
            "load_balancing_loss", loss, self.layer_number, config.num_layers, reduce_group=self.loss_group
        )
        return MoEAuxLossAutoScaler.apply(out, coeff * loss.float())

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[tuple[int, int, int], ...] = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """Experts are split along their first axis over expert-parallel ranks; each rank has the whole gate."""
        layers, out = len(sharded_offsets), {}
        for name, tensor in self.moe.state_dict(prefix="", keep_vars=True).items():
            is_expert = name.startswith("experts.")
            own = [(layers, self.ep_group.rank(), self.ep_group.size())] if is_expert else []
            replica = (0, 0, self.dp_group.rank()) if is_expert else (0, self.ep_group.rank(), self.dp_group.rank())
            out[f"{prefix}moe.{name}"] = ShardedTensor.from_rank_offsets(
                f"{prefix}tutel.{name}",
                tensor,
                *sharded_offsets,
                *own,
                replica_id=replica,
                prepend_axis_num=layers,
            )
        return out
