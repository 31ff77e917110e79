"""Our experts with Megatron's interface: parallel attributes, sharded checkpoints, and the `experts` builder's call.

Used by our own layer, and as `MoESubmodules(experts=MegaBlocksExperts)` inside Megatron's MoELayer.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megablocks.megatron.model_config import check_config, moe_config
from megablocks.megatron.settings import settings_of
from megablocks.moe.experts import Experts
from megablocks.moe.groups import ExpertShard


class MegaBlocksExperts(MegatronModule):
    """The local experts of one layer; `core` holds the parameters and the computation.

    Args:
        num_local_experts: experts on this expert-parallel rank.
        config: Megatron's; `check_config` refuses unsupported values.
        pg_collection: groups `ep` (expert parallel), `expt_tp` (shards of every expert's width), `expt_dp`.
    """

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(config=config)
        check_config(config, dispatches=False)  # Megatron's layer may dispatch
        groups = get_default_pg_collection() if pg_collection is None else pg_collection
        self.ep_group, self.tp_group, self.dp_group = groups.ep, groups.expt_tp, groups.expt_dp
        draw = config.perform_initialization
        first = self.ep_group.rank() * num_local_experts
        self.core = Experts(
            moe_config(config, settings_of(config)),
            shard=ExpertShard(first, num_local_experts, self.tp_group.rank(), self.tp_group.size()),
            init_method=config.init_method if draw else torch.zero_,
            output_init_method=config.output_layer_init_method if draw else torch.zero_,
            device="cpu" if config.use_cpu_initialization else torch.cuda.current_device(),
            dtype=config.params_dtype,
        )
        for parameter in self.core.parameters():
            mark_expert(parameter)

    def forward(self, rows: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        """Megatron's call, for its own MoELayer.

        Args:
            rows: (R, H) sorted by local expert. tokens_per_expert: (E_local,) integers, adding up to R. probs: (R,).

        Returns:
            ((R, H) weighted by probs, None); a partial sum if the experts' width is split over ranks.
        """
        offsets = F.pad(tokens_per_expert.cumsum(0), (1, 0)).int()
        out = self.core.forward_sorted(rows, offsets.to(rows.device, non_blocking=True))
        return (out * probs.unsqueeze(-1)).to(rows.dtype), None

    def backward_dw(self) -> None:
        """Does nothing: backward has computed the weight gradients. `check_config` refuses to delay them."""

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[tuple[int, int, int], ...] = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """Each parameter as one global tensor over layers, experts and, where it has one, the experts' width.

        Global shapes, after the layer axes of `sharded_offsets`: w1, v1, w2 (E, I, H); b1, c1 (E, I); b2 (E, H).
        So a checkpoint loads at any expert, expert-tensor, tensor and pipeline parallel size.
        """
        return {
            f"{prefix}core.{name}": self._factory(f"{prefix}{name}", name, parameter, sharded_offsets)
            for name, parameter in self.core.named_parameters()
        }

    def _factory(
        self, key: str, name: str, parameter: Tensor, sharded_offsets: tuple[tuple[int, int, int], ...]
    ) -> ShardedTensorFactory:
        """A factory for the sharded tensor of the parameter, and of optimizer state of the same shape."""
        is_matrix, layers = name in ("w1", "v1", "w2"), len(sharded_offsets)
        experts = (layers, self.ep_group.rank(), self.ep_group.size())
        # b2 has no width, but Megatron allows biases only where the width is not split.
        width = (layers + 1, self.tp_group.rank(), self.tp_group.size())
        offsets, replica = (*sharded_offsets, experts, width), (0, 0, self.dp_group.rank())

        @torch.no_grad()
        def build(key: str, tensor: Tensor, replica_id: Any, flattened_range: slice | None) -> dict[str, ShardedTensor]:
            assert flattened_range is None, "Megatron 0.19 keeps the optimizer state in the shape of the parameter"
            local = tensor.view(self.core.num_local_experts, -1, tensor.shape[1]) if is_matrix else tensor
            shards = ShardedTensor.from_rank_offsets
            return {"data": shards(key, local, *offsets, replica_id=replica_id, prepend_axis_num=layers)}

        def merge(loaded: dict[str, Tensor]) -> Tensor:
            return loaded["data"].reshape(parameter.shape)

        return ShardedTensorFactory(key, parameter, build, merge, replica)


def mark_expert(parameter: torch.nn.Parameter) -> None:
    """Tell Megatron's data parallelism and gradient norm that this is a parameter of experts."""
    # False always: with True at expert parallel 2 Megatron averages different experts' gradients.
    parameter.allreduce = False  # type: ignore[attr-defined]
    # True always: without it the gradient norm leaves out every tensor-parallel rank but the first.
    set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=0, stride=1)
