"""How `Arguments` spread experts over ranks, and the mark on expert parameters, under megablocks 0.10's names.

If there are at most as many ranks as experts, each rank holds a block of experts. If there are more ranks (a multiple
of the experts), several ranks share an expert, and each holds an equal slice of its width. Source: megablocks 0.10,
layers/mpu.py.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megablocks.layers.arguments import Arguments
from megablocks.moe.groups import ExpertShard, group_rank, group_size, shard_of


class MoeParam(Tensor):
    """A type for annotations: a parameter marked by `set_expert_model_parallel_attributes`."""

    expert_model_parallel: bool


def is_moe_param(tensor: Tensor) -> bool:
    """Return whether the tensor is marked as an expert's parameter, spread over ranks or not."""
    return hasattr(tensor, "expert_model_parallel")


def set_expert_model_parallel_attributes(tensor: Tensor, is_parallel: bool) -> None:
    """Mark an expert's parameter; `is_parallel`: whether ranks hold different experts.

    Raises:
        ValueError: it is already marked.
    """
    if is_moe_param(tensor):
        raise ValueError(f"tensor: is marked already, with expert_model_parallel={tensor.expert_model_parallel}")  # type: ignore[attr-defined]
    tensor.expert_model_parallel = is_parallel  # type: ignore[attr-defined]


def param_is_expert_model_parallel(param: Tensor) -> bool:
    """Return whether ranks hold different values of this parameter."""
    return bool(getattr(param, "expert_model_parallel", False))


def copy_expert_model_parallel_attributes(destination_tensor: Tensor, source_tensor: Tensor) -> None:
    """Copy the mark of the source to the destination, if the source has one."""
    if is_moe_param(source_tensor):
        destination_tensor.expert_model_parallel = source_tensor.expert_model_parallel  # type: ignore[attr-defined]


def expert_parallel_group(args: Arguments) -> ProcessGroup | None:
    """Return the ranks that share the experts: args' group, or all ranks; None without expert parallelism."""
    return (args.expert_parallel_group or dist.group.WORLD) if args.moe_expert_model_parallelism else None


def get_expert_parallel_world_size(args: Arguments) -> int:
    """Return the number of ranks that share the experts; 1 without expert parallelism."""
    return group_size(expert_parallel_group(args))


def get_expert_parallel_rank(args: Arguments) -> int:
    """Return this process's rank among the ranks that share the experts; 0 without expert parallelism."""
    return group_rank(expert_parallel_group(args))


def expert_sharding_degree(args: Arguments) -> int:
    """Return over how many ranks the experts are spread.

    Raises:
        ValueError: that number does not divide the experts.
    """
    degree = min(get_expert_parallel_world_size(args), args.moe_num_experts)
    if args.moe_num_experts % degree:
        experts = args.moe_num_experts
        raise ValueError(f"moe_num_experts={experts}: must be divisible by the {degree} ranks that share them")
    return degree


def hidden_sharding_degree(args: Arguments) -> int:
    """Return over how many ranks each expert's width is split.

    Raises:
        ValueError: the number of ranks is not a multiple of the experts, or the ranks do not divide the width.
    """
    size, experts = get_expert_parallel_world_size(args), expert_sharding_degree(args)
    degree = size // experts
    if experts * degree != size:
        raise ValueError(f"moe_num_experts={args.moe_num_experts}: must divide or be divisible by the {size} ranks")
    if args.ffn_hidden_size % degree:
        raise ValueError(f"ffn_hidden_size={args.ffn_hidden_size}: must be divisible by {degree}, ranks per expert")
    return degree


def experts_per_rank(args: Arguments) -> int:
    """Return the number of experts that each rank holds."""
    return args.moe_num_experts // expert_sharding_degree(args)


def features_per_rank(args: Arguments) -> int:
    """Return the part of each expert's width that a rank holds."""
    return args.ffn_hidden_size // hidden_sharding_degree(args)


def expert_shard(args: Arguments) -> ExpertShard:
    """Return which experts, and which slice of their width, this rank holds."""
    rank, size = get_expert_parallel_rank(args), get_expert_parallel_world_size(args)
    return shard_of(rank, size, args.moe_num_experts, ffn_shards=hidden_sharding_degree(args), ffn_fastest=False)


def synchronized_print(group: ProcessGroup | None, *x: Any) -> None:
    """Print on one rank after another; every rank of the group must call it."""
    for rank in range(dist.get_world_size(group)):
        dist.barrier(group)
        if rank == dist.get_rank(group):
            print(f"rank = {rank}", *x)
