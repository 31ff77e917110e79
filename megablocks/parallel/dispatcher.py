"""Token dispatchers: bring each (token, expert) pair to the rank that holds the expert, and its output back.

    x (T, H), Routing ─ sort by expert ─▶ rows (V, H) ─ all-to-all ─▶ sort by local expert ─ experts ─▶ (…, H)
                                                       and all the way back, weighted and summed ─▶ y (T, H)

Both dispatchers have one method, `run(x, routing, experts) -> y`, and nothing else knows how experts are spread.

Gradients. With R ranks that each hold their own tokens, plain data parallelism averages the ranks' gradients. An expert
that lives on one rank of an expert group receives, through the all-to-all's backward, the *sum* over that group of the
gradients of the ranks' losses. To get the plain average, scale that sum by 1/(size of the expert group) and average it
over the ranks that hold the same expert; or leave the sum, add it over those ranks and divide once by R, as Megatron's
DDP does for parameters with `allreduce = False`. The dispatcher never scales: `Experts(grad_scale=...)` is the first
way. Tokens' and router's gradients are those of each rank's own loss, in both.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megablocks.ops.permute.combine import combine
from megablocks.ops.permute.gather import gather
from megablocks.ops.routing.dispatch import Dispatch, Routing, build_dispatch, build_dispatch_op
from megablocks.parallel.all_to_all import all_to_all
from megablocks.parallel.groups import ExpertShard, shard_of


class ExpertCompute(Protocol):
    """What a dispatcher calls: `megablocks.layers.experts.Experts`, or anything of the same shape."""

    def __call__(self, x: Tensor, dispatch: Dispatch, weight: Tensor | None) -> Tensor:
        """x (T, H), dispatch over the local experts, weight (R,) or None → (T, H)."""
        ...


class LocalDispatcher:
    """Every expert is on this rank."""

    def run(self, x: Tensor, routing: Routing, experts: ExpertCompute) -> Tensor:
        """x (T, H) → (T, H): the weighted sum of each token's experts."""
        dispatch = build_dispatch(routing)
        return experts(x, dispatch, routing.weight)


class AllToAllDispatcher:
    """Experts in contiguous blocks over the ranks of a group; optionally each expert's width cut over several ranks.

    A step makes one exchange of row counts (E integers, the one host synchronisation) and two all-to-alls of rows, each
    with its counterpart in backward. Zero tokens on a rank, or on all, take the same path. A collective of backward is
    entered by the ranks whose autograd reaches it: x needs a gradient on all ranks or on none, and every rank's loss
    must depend on y.

    Args:
        group: all ranks that share the experts, expert blocks × ffn shards.
        num_experts: E.
        ffn_shards: ranks over which each expert's width is cut. Rows go to every shard of the owner, and the shards'
            partial outputs are added where the token lives.
        ffn_fastest: rank order inside `group`, see `shard_of`.
    """

    def __init__(self, group: ProcessGroup, num_experts: int, *, ffn_shards: int = 1, ffn_fastest: bool = True) -> None:
        self.group = group
        self.size = group.size()
        self.shard: ExpertShard = shard_of(
            group.rank(), self.size, num_experts, ffn_shards=ffn_shards, ffn_fastest=ffn_fastest
        )
        self.num_experts = num_experts
        self.ffn_shards = ffn_shards
        self.blocks = self.size // ffn_shards
        # block_of[g]: which block of experts rank g of the group holds
        self.block_of = [g // ffn_shards if ffn_fastest else g % self.blocks for g in range(self.size)]

    def run(self, x: Tensor, routing: Routing, experts: ExpertCompute) -> Tensor:
        """x (T, H) → (T, H): the weighted sum of each token's experts, wherever they are."""
        if routing.num_experts != self.num_experts:
            raise ValueError(f"routing.num_experts={routing.num_experts}: the dispatcher spreads {self.num_experts}")
        dispatch = build_dispatch(routing)
        received, block_rows, send, receive = self._exchange_counts(dispatch.expert_offsets)

        rows = gather(x, dispatch)
        outgoing = rows[: sum(block_rows)]
        if self.ffn_shards > 1:
            blocks = outgoing.split(block_rows)
            outgoing = torch.cat([blocks[b] for b in self.block_of])
        incoming = all_to_all(outgoing, send, receive, self.group)

        local = self._local_dispatch(received, incoming.shape[0])
        outputs = all_to_all(experts(incoming, local, None), receive, send, self.group)

        if self.ffn_shards > 1:
            outputs = self._sum_shards(outputs, send)
        if outputs.shape[0] < routing.num_pairs:  # pairs without an expert: rows that nobody reads
            outputs = torch.cat([outputs, outputs.new_zeros(routing.num_pairs - outputs.shape[0], x.shape[1])])
        return combine(outputs, routing.weight, dispatch)

    def _exchange_counts(self, expert_offsets: Tensor) -> tuple[Tensor, list[int], list[int], list[int]]:
        """Tell each rank how many rows each of its experts gets from here.

        Returns (received (size, E_local) int64 on the device: rows from each rank for each local expert; rows here for
        each expert block; rows to send to each rank; rows to receive from each rank).
        """
        counts = expert_offsets.diff().long().view(self.blocks, self.shard.num_local_experts)
        outgoing = counts if self.ffn_shards == 1 else torch.stack([counts[b] for b in self.block_of])
        received = torch.empty_like(outgoing)
        dist.all_to_all_single(received, outgoing.contiguous(), group=self.group)
        host = torch.cat([counts.sum(1), received.sum(1)]).tolist()
        block_rows, receive = host[: self.blocks], host[self.blocks :]
        return received, block_rows, [block_rows[b] for b in self.block_of], receive

    def _local_dispatch(self, received: Tensor, num_rows: int) -> Dispatch:
        """Indices that sort rows, which arrive by (rank, local expert), by local expert; stable, so by rank inside."""
        device, num_local = received.device, self.shard.num_local_experts
        expert = torch.arange(num_local, device=device).repeat(self.size)
        expert = torch.repeat_interleave(expert, received.flatten(), output_size=num_rows).int()
        row = torch.arange(num_rows, device=device, dtype=torch.int32)
        return Dispatch(*build_dispatch_op(row, expert, num_rows, num_local, 1))

    def _sum_shards(self, outputs: Tensor, send: list[int]) -> Tensor:
        """Add the partial outputs of the shards of each block, which came back in the order of the group's ranks."""
        by_rank = outputs.split(send)
        total: list[Tensor | None] = [None] * self.blocks
        for block, part in zip(self.block_of, by_rank, strict=True):
            so_far = total[block]
            total[block] = part if so_far is None else so_far + part
        return torch.cat([part for part in total if part is not None])
