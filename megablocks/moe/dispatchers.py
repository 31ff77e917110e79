"""Token dispatchers: bring each (token, expert) pair to the rank that holds the expert, and its output back.

    x (T, H), Routing ─ sort by expert ─▶ rows (V, H) ─ all-to-all ─▶ sort by local expert ─ experts ─▶ (…, H)
                                                       and all the way back, weighted and summed ─▶ y (T, H)

`make_dispatcher` chooses one of `kinds.DISPATCHERS`; nothing else knows how experts are spread.

Gradients. With R ranks that each hold their own tokens, plain data parallelism averages the ranks' gradients. An expert
that lives on one rank of an expert group receives, through the all-to-all's backward, the *sum* over that group of the
gradients of the ranks' losses. There are two ways to the plain average. Either scale that sum by 1/(size of the expert
group), with `Experts(grad_scale=...)`, and average it over the ranks that hold the same expert. Or leave the sum, add
it over those ranks and divide once by R, as Megatron's DDP does for parameters with `allreduce = False`. Dispatchers
never scale. In both ways the gradients of tokens and router are those of each rank's own loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megablocks.kinds import DISPATCHERS, load
from megablocks.moe.groups import ExpertShard, group_size, shard_of
from megablocks.ops.library import under_autocast
from megablocks.ops.permute.rows import combine, gather
from megablocks.ops.quant.quant import OFF
from megablocks.ops.routing.dispatch import Dispatch, Routing, build_dispatch, build_dispatch_op


class ExpertCompute(Protocol):
    """What a dispatcher calls: `megablocks.moe.experts.Experts`, or anything of the same shape."""

    def __call__(self, x: Tensor, dispatch: Dispatch, weight: Tensor | None) -> Tensor:
        """x (T, H), dispatch over the local experts, weight (R,) or None for ones → (T, H)."""
        ...


class Dispatcher(Protocol):
    """What a layer needs of a dispatcher: which experts live here (`shard`), and the way through them (`run`)."""

    shard: ExpertShard

    def run(self, x: Tensor, routing: Routing, experts: ExpertCompute) -> Tensor:
        """x (T, H) → (T, H): the weighted sum of each token's experts, wherever they are."""
        ...


class LocalDispatcher:
    """Every expert is on this rank. Of the arguments of `AllToAllDispatcher` it needs only the number of experts."""

    def __init__(self, group: ProcessGroup | None, num_experts: int, **_: Any) -> None:
        self.shard = ExpertShard(0, num_experts)

    def run(self, x: Tensor, routing: Routing, experts: ExpertCompute) -> Tensor:
        """x (T, H) → (T, H): the weighted sum of each token's experts."""
        return experts(x, build_dispatch(routing), routing.weight)


class AllToAllDispatcher:
    """Experts in contiguous blocks over the ranks of a group; each expert's width may be cut over several ranks.

    A step makes one exchange of row counts (E integers, the only host synchronization) and two all-to-alls of rows,
    each with its counterpart in backward. Zero tokens on a rank, or on all, take the same path. The ranks whose
    autograd reaches a collective of backward enter it, so x needs a gradient on all ranks or on none, and every rank's
    loss must depend on y.

    Args:
        group: all ranks that share the experts, expert blocks × ffn shards.
        num_experts: E.
        ffn_shards: ranks over which each expert's width is cut. Rows go to every shard of the owner, and the partial
            outputs of the shards are added where the token lives.
        ffn_fastest: rank order inside `group`, see `shard_of`.
        quantize_num_bits: as `combine` takes it, for the rows that came back; -1 for none.
    """

    def __init__(
        self,
        group: ProcessGroup,
        num_experts: int,
        *,
        ffn_shards: int = 1,
        ffn_fastest: bool = True,
        quantize_num_bits: int = OFF,
    ) -> None:
        self.group = group
        self.size = group.size()
        self.shard = shard_of(group.rank(), self.size, num_experts, ffn_shards=ffn_shards, ffn_fastest=ffn_fastest)
        self.num_experts = num_experts
        self.ffn_shards = ffn_shards
        self.quantize_num_bits = quantize_num_bits
        self.blocks = self.size // ffn_shards
        # block_of[g]: which block of experts rank g of the group holds
        self.block_of = [g // ffn_shards if ffn_fastest else g % self.blocks for g in range(self.size)]

    def run(self, x: Tensor, routing: Routing, experts: ExpertCompute) -> Tensor:
        """x (T, H) → (T, H): the weighted sum of each token's experts, wherever they are."""
        if routing.num_experts != self.num_experts:
            raise ValueError(f"routing.num_experts={routing.num_experts}: the dispatcher spreads {self.num_experts}")
        (x,) = under_autocast(x)  # before rows are copied, to move half the bytes
        dispatch = build_dispatch(routing)
        received, block_rows, send, receive = self._exchange_counts(dispatch.expert_offsets)

        outgoing = gather(x, dispatch)[: sum(block_rows)]
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
        return combine(outputs, routing.weight, dispatch, num_bits=self.quantize_num_bits)

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
        """Indices that sort rows by local expert. Rows arrive by (rank, local expert); the sort is stable."""
        device, num_local = received.device, self.shard.num_local_experts
        expert = torch.arange(num_local, device=device).repeat(self.size)
        expert = torch.repeat_interleave(expert, received.flatten(), output_size=num_rows).int()
        row = torch.arange(num_rows, device=device, dtype=torch.int32)
        return Dispatch(*build_dispatch_op(row, expert, num_rows, num_local, 1))

    def _sum_shards(self, outputs: Tensor, send: list[int]) -> Tensor:
        """Add the partial outputs of each block's shards, which came back in the order of the group's ranks."""
        by_rank = outputs.split(send)
        total: list[Tensor | None] = [None] * self.blocks
        for block, part in zip(self.block_of, by_rank, strict=True):
            so_far = total[block]
            total[block] = part if so_far is None else so_far + part
        return torch.cat([part for part in total if part is not None])


def make_dispatcher(
    group: ProcessGroup | None,
    num_experts: int,
    *,
    ffn_shards: int | None = None,
    ffn_fastest: bool = False,
    quantize_num_bits: int = OFF,
    kind: str = "auto",
    max_tokens: int | None = None,
    rows_factor: float = 2.0,
) -> Dispatcher:
    """The dispatcher of a layer: "local" on one rank, on several `kind`.

    Args:
        group: all ranks that share the experts; None for one rank.
        ffn_shards: ranks over which each expert's width is cut. None cuts it where there are more ranks than experts,
            a multiple of them.
        ffn_fastest, quantize_num_bits: as in `AllToAllDispatcher`.
        kind: one of `kinds.DISPATCHER_CHOICES`. "auto" is "symmetric" where `max_tokens` is given and the ranks can,
            else "all_to_all".
        max_tokens, rows_factor: as in `megablocks.moe.symmetric.SymmetricDispatcher`, which needs both.

    Raises:
        ValueError: the experts cannot be spread over the group, or "symmetric" without max_tokens.
    """
    if kind == "symmetric" and max_tokens is None:
        raise ValueError("max_tokens=None: must be given with dispatcher='symmetric', which sizes its buffers by it")
    ranks = group_size(group)
    if ffn_shards is None:
        ffn_shards = ranks // num_experts if ranks > num_experts and ranks % num_experts == 0 else 1
    options = {"ffn_shards": ffn_shards, "ffn_fastest": ffn_fastest, "quantize_num_bits": quantize_num_bits}
    if ranks == 1:
        name = "local"
    elif kind == "all_to_all" or max_tokens is None:
        name = "all_to_all"
    else:
        name = "symmetric"
        options |= {"max_tokens": max_tokens, "rows_factor": rows_factor, "strict": kind == "symmetric"}
    make: Callable[..., Dispatcher] = load(DISPATCHERS[name])
    return make(group, num_experts, **options)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, send: Sequence[int], receive: Sequence[int], group: ProcessGroup) -> Tensor:
        ctx.send, ctx.receive, ctx.group = send, receive, group
        out = x.new_empty((sum(receive), *x.shape[1:]))
        dist.all_to_all_single(out, x.contiguous(), list(receive), list(send), group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _AllToAll.apply(grads[0], ctx.receive, ctx.send, ctx.group), None, None, None


def all_to_all(x: Tensor, send: Sequence[int], receive: Sequence[int], group: ProcessGroup) -> Tensor:
    """Exchange rows: the first send[0] rows of `x` go to rank 0 of the group, the next send[1] to rank 1, and so on.

    Every rank enters the collective in forward and, when the input needs a gradient, in backward, whatever its number
    of rows: a rank that returned early on zero rows would leave the others waiting.

    Args:
        x: (sum(send), ...) any dtype that the backend moves.
        send, receive: rows per rank, known on the host; send[j] here equals receive[i] on rank j.

    Returns:
        (sum(receive), ...): rows in the order of the ranks they came from. Differentiable once or more.
    """
    if x.shape[0] != sum(send):
        raise ValueError(f"x: has {x.shape[0]} rows, but send={list(send)} adds up to {sum(send)}")
    if group.size() == 1:
        return x
    return _AllToAll.apply(x, send, receive, group)
