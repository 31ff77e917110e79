"""The capacity layer under the names of megablocks 0.10, built from `Arguments`; `megablocks.moe` computes it."""

from __future__ import annotations

import copy
from abc import ABCMeta
from typing import Any

import torch
from torch import Tensor, nn

from megablocks.config import MoEConfig, refuse
from megablocks.layers import common, mlp, mpu, router, sharedexpert_registry
from megablocks.layers.arguments import Arguments
from megablocks.layers.losses import (
    batched_load_balancing_loss,
    clear_load_balancing_loss,
    get_load_balancing_loss,
    save_load_balancing_loss,
)
from megablocks.moe import layer
from megablocks.moe.capacity import limit_to_capacity
from megablocks.moe.dispatchers import make_dispatcher
from megablocks.moe.groups import SharesGroups, group_size
from megablocks.moe.memory import out_of_memory
from megablocks.ops.permute.rows import combine, gather
from megablocks.ops.routing.dispatch import Dispatch, build_dispatch_op, make_routing, pad_indices

__all__ = [
    "MoE",
    "ParallelMLP",
    "batched_load_balancing_loss",
    "clear_load_balancing_loss",
    "get_load_balancing_loss",
    "save_load_balancing_loss",
]


class ParallelMLP(SharesGroups, nn.Module):
    """A capacity layer without its router: the experts `mlp`, and the layer's output `bias` (H,).

    Ranks exchange tokens only in this module, so it is the module to wrap in FSDP.

    Args:
        args: of the layer; a capacity layer needs a capacity factor.

    Raises:
        ConfigError: a capacity layer without a capacity factor.
    """

    def __init__(self, args: Arguments) -> None:
        super().__init__()
        self.args = args
        self.config = self._config_of(args)
        self.num_experts, self.top_k = self.config.num_experts, self.config.top_k
        self.expert_parallel_group = group = mpu.expert_parallel_group(args)
        self.dispatcher = make_dispatcher(group, self.num_experts, ffn_shards=mpu.hidden_sharding_degree(args))
        self.mlp = self._init_mlp(args)
        zeros = torch.zeros(args.hidden_size, device=args.resolve_device(), dtype=args.dtype)
        self.bias = nn.Parameter(zeros) if args.bias else None
        self.sort_end_bit = max((self.num_experts - 1).bit_length(), 1)
        self.forward_fn = self.parallel_forward_once if args.moe_expert_model_parallelism else self.forward_once

    def _config_of(self, args: Arguments) -> MoEConfig:
        if args.moe_capacity_factor is None:
            refuse("moe_capacity_factor", None, "must be a number in a capacity layer, or use dMoE")
        return args.to_config()

    def _init_mlp(self, args: Arguments) -> nn.Module:
        return mlp.MLP(args)

    def expert_capacity(self, tokens: int) -> int:
        """Return the places of an expert if every rank has `tokens` tokens; 0 means the fullest expert's load."""
        ranks = mpu.get_expert_parallel_world_size(self.args)
        return int(self.args.moe_capacity_factor * (self.top_k * tokens * ranks / self.num_experts))

    def indices_and_bins(self, top_expert: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """top_expert (R,) → indices (R,), bin_ids (R,), bins (E,), tokens_per_expert (E,), int32, see `megablocks.ops`.

        Ids outside [0, E) come last: their bin_ids are E, and no bin holds them.
        """
        experts, pairs = self.num_experts, top_expert.shape[0]
        ids = top_expert.long().clamp(-1, experts).remainder(experts + 1).int()  # a narrow type cannot hold -1 and E
        row = torch.arange(pairs, dtype=torch.int32, device=ids.device)
        offsets, *_, indices = build_dispatch_op(row, ids, pairs, experts + 1)
        return indices, ids.index_select(0, indices), offsets[1:-1], offsets.diff()[:-1]

    def permute_and_compute(
        self, x: Tensor, tokens_per_expert: Tensor, indices: Tensor, bin_ids: Tensor, expert_weights: Tensor | None,
        bins: Tensor, expert_capacity: int, top_k: int,
    ) -> Tensor:  # fmt: skip
        """x (..., H) of T tokens → (T, H) by the first expert_capacity pairs of each expert in the order of indices.

        Args:
            tokens_per_expert, indices, bin_ids, bins: (E,), (R,), (R,), (E,) of `indices_and_bins`, R = T·top_k pairs.
            expert_weights: (R,), the factor on a pair's output; None for ones.
            expert_capacity: places of an expert.
        """
        padded = pad_indices(indices, bins, int(expert_capacity), top_k)
        rows = gather(x.reshape(-1, x.shape[-1]), padded).view(bins.shape[0], int(expert_capacity), x.shape[-1])
        bits = self.config.quantize_scatter_num_bits
        return combine(self.mlp(rows).flatten(0, 1), expert_weights, padded, num_bits=bits)

    def forward_once(self, x: Tensor, expert_weights: Tensor, top_experts: Tensor) -> tuple[Tensor, Tensor]:
        """x (..., H) → (T, H) without bias, and tokens_per_expert (E,) int32, if this rank holds every expert.

        expert_weights, top_experts: (T, K), or as many values in another shape.
        """
        with torch.no_grad():
            indices, bin_ids, bins, counts = self.indices_and_bins(top_experts.flatten())
            capacity = -1  # of a dropless layer
            if self.config.capacity_factor is not None:
                capacity = self.expert_capacity(x.shape[:-1].numel()) or int(counts.max())
        weights = expert_weights.flatten()
        return self.permute_and_compute(x, counts, indices, bin_ids, weights, bins, capacity, self.top_k), counts

    def parallel_forward_once(self, x: Tensor, expert_weights: Tensor, top_experts: Tensor) -> tuple[Tensor, Tensor]:
        """Like `forward_once`, if ranks hold different experts: each rank computes the rows that it receives."""
        if group_size(self.expert_parallel_group) == 1:
            return self.forward_once(x, expert_weights, top_experts)
        shape = (-1, self.top_k)
        routing = make_routing(top_experts.reshape(shape), expert_weights.reshape(shape), self.num_experts)
        kept, capacity, bits = routing, -1, self.config.quantize_scatter_num_bits
        if self.config.capacity_factor is not None:
            kept, capacity = limit_to_capacity(routing, self.config, self.expert_parallel_group)

        def compute(x: Tensor, dispatch: Dispatch, weight: Tensor | None) -> Tensor:
            bins, counts = dispatch.expert_offsets[1:], dispatch.expert_offsets.diff()
            rows = gather(x, dispatch)  # one row per pair, as in 0.10, because overridden methods expect it
            bin_ids = torch.repeat_interleave(counts, output_size=rows.shape[0])
            indices = torch.arange(rows.shape[0], dtype=torch.int32, device=x.device)
            rows = self.permute_and_compute(rows, counts, indices, bin_ids, None, bins, capacity, 1)
            return combine(rows, weight, dispatch, num_bits=bits)

        y = self.dispatcher.run(x.reshape(-1, x.shape[-1]), kept, compute)
        return y, routing.metrics["tokens_per_expert"].int()

    def forward(
        self, x: Tensor, scores: Tensor, expert_weights: Tensor, top_experts: Tensor
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Compute each token's experts. In training, record what the load-balancing loss needs.

        Args:
            x: (..., H), T tokens in all.
            scores: (T, E), only recorded.
            expert_weights, top_experts: (T, K), or as many values in another shape; ids outside [0, E) mean no expert.

        Returns:
            (..., H) with the bias added, or with `return_bias` (without it, bias).
        """
        y, tokens_per_expert = self.forward_fn(x, expert_weights, top_experts)
        if self.training and self.args.moe_loss_weight > 0:
            save_load_balancing_loss((tokens_per_expert, scores))
        y = y.view(x.shape)
        if self.bias is None:
            return y
        if not self.args.return_bias:
            return y + self.bias
        # A reentrant checkpoint would make the parameter an output with a backward, which would then never end.
        return y, self.bias if torch.is_grad_enabled() else self.bias.detach()


class MoE(nn.Module, metaclass=ABCMeta):
    """megablocks 0.10's capacity layer: modules `router`, `experts` (a `ParallelMLP`) and `shared_expert`.

    With a `MoEConfig`, `MoE(config)` returns a `megablocks.moe.MoE` instead, which counts as an instance of this class.

    Raises:
        ValueError: args is neither of the two, or there is another argument in addition to `Arguments`.
    """

    _of_config: type[layer.MoELayer] = layer.MoE

    def __new__(cls, args: Any = None, *rest: Any, **options: Any) -> Any:  # a subclass can accept any arguments
        if isinstance(args, MoEConfig):
            return cls._of_config(args, *rest, **options)
        return super().__new__(cls)

    def __init__(self, args: Arguments, **options: Any) -> None:
        super().__init__()
        if not hasattr(args, "validate"):
            raise ValueError(f"args is a {type(args).__name__}: must be a MoEConfig or Arguments")
        if options:
            raise ValueError(f"{', '.join(options)}: must be left out, because Arguments has them")
        # A copy keeps attributes that the program added. Later changes of the original do not change the layer.
        self.args = args = copy.copy(args)
        args.validate()
        args.device = args.resolve_device()  # as in 0.10's Arguments; a program's own experts read it
        self.router = router.LearnedRouter(args)
        self.experts = self._init_experts_mlp(args)
        self.shared_expert = sharedexpert_registry.get(args) if args.shared_expert else None

    def _init_experts_mlp(self, args: Arguments) -> ParallelMLP:
        return ParallelMLP(args)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """x (..., H) → (..., H) with the bias added, or with `bias` and `return_bias` (without it, bias).

        In training it records what `batched_load_balancing_loss` and `batched_router_zloss` need.

        Raises:
            ValueError: the last dimension of x is not hidden_size.
            torch.OutOfMemoryError: torch's error, with the sizes and what to change.
        """
        hidden = self.args.hidden_size
        if not x.dim() or x.shape[-1] != hidden:
            raise ValueError(f"x: has shape {tuple(x.shape)}, its last dimension must be hidden_size={hidden}")
        x = common.cast_if_autocast_enabled(x)  # before rows are copied
        scores, weights, ids = self.router(x)
        try:
            out = self.experts(x, scores, weights, ids)
        except torch.OutOfMemoryError as error:
            tokens = x.reshape(-1, x.shape[-1])
            raise out_of_memory(self.experts.config, tokens, ids.numel(), error) from error
        if self.shared_expert is None:
            return out
        shared, add = self.shared_expert(x), self.shared_expert.add_experts_sharedexpert
        return (add(shared, out[0]), out[1]) if isinstance(out, tuple) else add(shared, out)


MoE.register(layer.MoE)
