"""Helpers for process groups: size and rank also without a group, and which rank owns which expert."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from torch.distributed import ProcessGroup


def group_size(group: ProcessGroup | None) -> int:
    """Number of ranks in `group`; 1 for None."""
    return 1 if group is None else group.size()


def group_rank(group: ProcessGroup | None) -> int:
    """This process's rank in `group`; 0 for None."""
    return 0 if group is None else group.rank()


class SharesGroups:
    """Base class: deep copies, such as averages of a model's weights, share the process groups of the original.

    A group represents connections between processes, and cannot be copied.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        memo |= {id(value): value for value in vars(self).values() if isinstance(value, ProcessGroup)}
        copied = memo[id(self)] = object.__new__(type(self))
        vars(copied).update(copy.deepcopy(vars(self), memo))
        return copied


@dataclass(frozen=True)
class ExpertShard:
    """What one rank of an expert group holds.

    expert_offset, num_local_experts: the contiguous block [offset, offset + num) of global experts.
    ffn_rank, ffn_size: each expert's width is split into `ffn_size` equal slices; this rank holds slice `ffn_rank`.
    """

    expert_offset: int
    num_local_experts: int
    ffn_rank: int = 0
    ffn_size: int = 1


def shard_of(rank: int, size: int, num_experts: int, *, ffn_shards: int = 1, ffn_fastest: bool = True) -> ExpertShard:
    """The shard of `rank` in an expert group of `size` = expert blocks × ffn shards ranks.

    Args:
        rank: rank in the group.
        size: ranks in the group.
        num_experts: E, all experts.
        ffn_shards: number of ranks over which each expert's width is split.
        ffn_fastest: True: ranks of one expert block are neighbors (rank = block·ffn_shards + shard, Megatron's
            tensor-and-expert group). False: rank = shard·blocks + block (megablocks 0.10).

    Raises:
        ValueError: when E cannot be divided over the ranks.
    """
    if size % ffn_shards:
        raise ValueError(f"ffn_shards={ffn_shards}: must divide the size of the expert group, {size}")
    blocks = size // ffn_shards
    if num_experts % blocks:
        raise ValueError(f"num_experts={num_experts}: must be divisible by the expert-parallel size {blocks}")
    block, shard = (rank // ffn_shards, rank % ffn_shards) if ffn_fastest else (rank % blocks, rank // blocks)
    local = num_experts // blocks
    return ExpertShard(block * local, local, shard, ffn_shards)
