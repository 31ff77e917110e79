"""The all-to-all of rows with megablocks 0.10's signature. It can return before the rows have arrived."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megablocks.moe.dispatchers import AllToAll
from megablocks.moe.dispatchers import all_to_all as _exchange
from megablocks.ops.upstream import function_class


def all_to_all(
    x: Tensor,
    output_split_sizes: Sequence[int],
    input_split_sizes: Sequence[int],
    group: ProcessGroup | None,
    async_op: bool = False,
) -> tuple[Tensor, dist.Work | None]:
    """Exchange rows: the first input_split_sizes[0] rows of `x` go to rank 0 of the group, and so on.

    Args:
        x: (sum(input_split_sizes), ...).
        output_split_sizes: rows from each rank.
        group: None for all ranks.
        async_op: return immediately; the rows have arrived after `handle.wait()`.

    Returns:
        ((sum(output_split_sizes), ...), handle); the handle is None without async_op. Differentiable in x.

    Raises:
        ValueError: the number of rows of x is not the sum of input_split_sizes.
    """
    group = dist.group.WORLD if group is None else group
    if group is None:
        raise ValueError("group=None: needs torch.distributed to be initialized")
    if not async_op:
        return _exchange(x, input_split_sizes, output_split_sizes, group), None
    if x.shape[0] != sum(input_split_sizes):
        raise ValueError(f"input_split_sizes={list(input_split_sizes)}: must add up to the {x.shape[0]} rows of x")
    return AllToAll.apply(x, input_split_sizes, output_split_sizes, group, True)


AllToAllOp = function_class("AllToAllOp", all_to_all)
