"""Token dispatchers: send each (token, expert) pair to the rank that holds the expert, and return its output.

    x (T, H) ─ one row per rank that holds an expert of the token ─▶ all-to-all ─▶ weighted sum over the experts there
                                        ─▶ all-to-all back ─▶ sum of the ranks' partial rows ─▶ y (T, H)

`make_dispatcher` chooses one of `kinds.DISPATCHERS`; no other code knows how experts are spread.

Gradients. R ranks hold different tokens, and plain data parallelism averages the ranks' gradients. Through the
all-to-all's backward, an expert receives the *sum* of the gradients of all ranks' losses in its expert group. There are
two ways to the plain average. Either scale that sum by 1/(size of the expert group), with `Experts(grad_scale=...)`,
and average it over the ranks that hold the same expert. Or keep the sum, add it over those ranks and divide once by R,
as Megatron's DDP does for parameters with `allreduce = False`. Dispatchers never scale. In both cases the gradients of
tokens and router come from each rank's own loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megablocks.kinds import DISPATCHERS, load
from megablocks.moe.groups import ExpertShard, SharesGroups, group_size, shard_of
from megablocks.ops.library import under_autocast
from megablocks.ops.permute.rows import combine, gather
from megablocks.ops.routing.dispatch import Dispatch, Routing, build_dispatch, build_dispatch_op


class ExpertCompute(Protocol):
    """What a dispatcher calls: `megablocks.moe.experts.Experts`, or any object with the same signature."""

    def __call__(self, x: Tensor, dispatch: Dispatch, weight: Tensor | None) -> Tensor:
        """x (T, H), dispatch over the local experts, weight (R,) or None for ones → (T, H)."""
        ...


class Dispatcher(Protocol):
    """What a layer needs from a dispatcher: `shard`, this rank's experts, and `run`, which computes all experts."""

    shard: ExpertShard

    def run(self, x: Tensor, routing: Routing, experts: ExpertCompute) -> Tensor:
        """x (T, H) → (T, H): the weighted sum of each token's experts, wherever they are."""
        ...


class LocalDispatcher:
    """Every expert is on this rank. It accepts the arguments of `AllToAllDispatcher` but reads only num_experts."""

    def __init__(self, group: ProcessGroup | None, num_experts: int, **_: Any) -> None:
        self.shard = ExpertShard(0, num_experts)

    def run(self, x: Tensor, routing: Routing, experts: ExpertCompute) -> Tensor:
        """x (T, H) → (T, H): the weighted sum of each token's experts."""
        return experts(x, build_dispatch(routing), routing.weight)


class AllToAllDispatcher(SharesGroups):
    """Experts in contiguous blocks over the ranks of a group; each expert's width can be split over several ranks.

    A token is sent once to each rank that holds some of its experts, with the local ids and the weights. That rank
    adds the weighted outputs of these experts, and sends one partial row back. The token's rank adds the partial rows
    in the order of the ranks. Both sums are float32 and are rounded once. At top-8 over two ranks this moves a quarter
    of the rows that one row per pair would move; it never moves more rows.

    A forward exchanges counts (three integers per rank, the only host synchronization), then ids and weights, and rows
    twice. All exchanges except the counts have a counterpart in backward. Ranks with zero tokens take the same path. A
    rank enters a collective in backward only if its autograd reaches it. So x must need a gradient on all ranks or on
    none, and the weights too: `run` raises an error otherwise, unless it is compiled. If neither needs one, the experts
    must need one on all ranks or on none. Every rank's loss must depend on y.

    Args:
        group: all ranks that share the experts, expert blocks × ffn shards.
        num_experts: E.
        ffn_shards: ranks over which each expert's width is split. Rows are sent to every shard of the expert, and the
            token's rank adds the partial outputs of the shards.
        ffn_fastest: rank order inside `group`, see `shard_of`.
    """

    def __init__(self, group: ProcessGroup, num_experts: int, *, ffn_shards: int = 1, ffn_fastest: bool = True) -> None:
        self.group = group
        self.size = group.size()
        self.shard = shard_of(group.rank(), self.size, num_experts, ffn_shards=ffn_shards, ffn_fastest=ffn_fastest)
        self.num_experts = num_experts
        self.ffn_shards = ffn_shards
        self.ffn_fastest = ffn_fastest

    def run(self, x: Tensor, routing: Routing, experts: ExpertCompute) -> Tensor:
        """x (T, H) → (T, H): the weighted sum of each token's experts, wherever they are.

        Raises:
            ValueError: the routing and the dispatcher have different numbers of experts, or x or the weights need a
                gradient on only some of the ranks.
        """
        if routing.num_experts != self.num_experts:
            raise ValueError(f"routing.num_experts={routing.num_experts}: must be the dispatcher's {self.num_experts}")
        (x,) = under_autocast(x)  # cast before rows are copied, to move half the bytes
        to_ranks, local, weight, send, receive = self._exchange_pairs(routing, x.requires_grad)
        incoming = all_to_all(gather(x, to_ranks), send, receive, self.group)
        partial = all_to_all(experts(incoming, local, weight), receive, send, self.group)
        return combine(partial, None, to_ranks)

    def _exchange_pairs(
        self, routing: Routing, x_wants: bool
    ) -> tuple[Dispatch, Dispatch, Tensor, Sequence[int], Sequence[int]]:
        """Send each rank the expert ids and weights for the rows that it will receive from this rank.

        Returns (the Dispatch from tokens to the rows sent, sorted by rank; the Dispatch from the rows received to the
        local experts; the weights of its pairs; rows to send to each rank; rows to receive from each rank).
        """
        size, tokens = self.size, routing.num_tokens
        token, expert, weight, rank = self._pairs(routing)
        by_rank = build_dispatch_op(token, rank, tokens, size)
        # one place per token and rank; the places of rank `size` are for pairs without an expert
        place = torch.add(rank, token, alpha=size + 1).long()
        wanted = torch.full((tokens * (size + 1),), size, dtype=torch.int32, device=rank.device)
        wanted.scatter_(0, place, rank)
        owner = torch.arange(wanted.shape[0], dtype=torch.int32, device=rank.device) // (size + 1)
        rank_offsets, token_offsets, *rows = build_dispatch_op(owner, wanted, tokens, size)

        wants = (routing.weight.requires_grad * 2 + x_wants) * torch.is_grad_enabled()
        state = rank_offsets.new_full((size,), wants)
        counts = torch.stack([rank_offsets.diff(), by_rank[0].diff(), state], 1)
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts, group=self.group)
        on_host = torch.stack([counts, received]).tolist()
        (send, send_pairs, _), (receive, receive_pairs, states) = (zip(*side, strict=True) for side in on_host)
        _check_gradients(wants, states)
        # drop unused rows, as the host knows the count; narrow tells torch.compile the size, a slice does not
        to_ranks = Dispatch(rank_offsets, token_offsets, *(t.narrow(0, 0, sum(send)) for t in rows))

        pair = by_rank[-1].narrow(0, 0, sum(send_pairs))
        place = place.index_select(0, pair)
        before = torch.cat([place.new_full((1,), -1), place]).narrow(0, 0, sum(send_pairs))
        code = expert.index_select(0, pair) % self.shard.num_local_experts * 2 + (place != before)
        # one exchange moves weights and codes: the codes are stored as floats, exact up to 2²⁴
        pairs = torch.stack([weight.index_select(0, pair), code.to(weight.dtype)], 1)
        weight, code = all_to_all(pairs, send_pairs, receive_pairs, self.group).unbind(1)
        code = code.detach().int()
        row = (code & 1).cumsum(0, dtype=torch.int32).sub_(1)
        local = Dispatch(*build_dispatch_op(row, code >> 1, sum(receive), self.shard.num_local_experts))
        return to_ranks, local, weight.contiguous(), send, receive

    def _pairs(self, routing: Routing) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return token, expert, weight and rank for each pair and each shard of its expert; rank `size`: no expert."""
        blocks, shards = self.size // self.ffn_shards, self.ffn_shards
        token, expert, weight = routing.token, routing.expert, routing.weight
        weight = weight.to(torch.promote_types(weight.dtype, torch.float32))
        block = expert.div(self.shard.num_local_experts, rounding_mode="floor").clamp(-1, blocks) % (blocks + 1)
        if shards == 1:
            return token, expert, weight, block
        shard = torch.arange(shards, dtype=torch.int32, device=block.device)
        block = block.unsqueeze(1)
        rank = block * shards + shard if self.ffn_fastest else block + blocks * shard
        rank = torch.where(block < blocks, rank, self.size).flatten()
        token, expert, weight = (t.repeat_interleave(shards) for t in (token, expert, weight))
        return token, expert, weight, rank


def _check_gradients(wants: int, states: Sequence[int]) -> None:
    """Raise a ValueError if x or the weights need a gradient on only some of the ranks: backward's exchange would hang.

    wants: bit 0 for x, bit 1 for the weights. states: the same bits of all ranks.
    """
    if torch.compiler.is_compiling():  # a graph knows the values only when it runs
        return
    for rank, state in enumerate(states):
        if state != wants:
            name, bit = ("x", 1) if (state ^ wants) & 1 else ("routing.weight", 2)
            raise ValueError(
                f"{name}.requires_grad={bool(wants & bit)}, on rank {rank} {bool(state & bit)}: must be equal on all "
                "ranks that share the experts; freeze the router and what computes x on all or none"
            )


def make_dispatcher(
    group: ProcessGroup | None,
    num_experts: int,
    *,
    ffn_shards: int | None = None,
    ffn_fastest: bool = False,
    kind: str = "auto",
    max_tokens: int | None = None,
    rows_factor: float = 2.0,
) -> Dispatcher:
    """Return the dispatcher of a layer: "local" on one rank, `kind` on several.

    Args:
        group: all ranks that share the experts; None for one rank.
        ffn_shards: ranks over which each expert's width is split. None splits it only if the number of ranks is a
            larger multiple of the number of experts.
        ffn_fastest: as in `AllToAllDispatcher`.
        kind: one of `kinds.DISPATCHER_CHOICES`. "auto" is "symmetric" if `max_tokens` is given, rows cannot overflow
            (`rows_factor` is at least the number of ranks) and the ranks support it, otherwise "all_to_all".
        max_tokens, rows_factor: as in `megablocks.moe.symmetric.SymmetricDispatcher`, which needs both.

    Raises:
        ValueError: the experts cannot be spread over the group, or "symmetric" without max_tokens.
    """
    if kind == "symmetric" and max_tokens is None:
        raise ValueError("max_tokens=None: must be given with dispatcher='symmetric', which sizes its buffers by it")
    ranks = group_size(group)
    if ffn_shards is None:
        ffn_shards = ranks // num_experts if ranks > num_experts and ranks % num_experts == 0 else 1
    options: dict[str, Any] = {"ffn_shards": ffn_shards, "ffn_fastest": ffn_fastest}
    if ranks == 1:
        name = "local"
    elif kind == "all_to_all" or max_tokens is None or (kind == "auto" and rows_factor < ranks):
        name = "all_to_all"
    else:
        name = "symmetric"
        options |= {"max_tokens": max_tokens, "rows_factor": rows_factor, "strict": kind == "symmetric"}
    make: Callable[..., Dispatcher] = load(DISPATCHERS[name])
    return make(group, num_experts, **options)


class AllToAll(torch.autograd.Function):
    """`all_to_all` over several ranks."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, send: Sequence[int], receive: Sequence[int], group: ProcessGroup, async_op: bool = False
    ) -> Any:
        """x (sum(send), ...) → (sum(receive), ...). With async_op also a handle: wait for it before you read rows."""
        ctx.send, ctx.receive, ctx.group = send, receive, group
        out = x.new_empty((sum(receive), *x.shape[1:]))
        work = dist.all_to_all_single(out, x.contiguous(), list(receive), list(send), group=group, async_op=async_op)
        return (out, work) if async_op else out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Send the gradients back, and wait for them."""
        return AllToAll.apply(grads[0], ctx.receive, ctx.send, ctx.group), None, None, None, None


def all_to_all(x: Tensor, send: Sequence[int], receive: Sequence[int], group: ProcessGroup) -> Tensor:
    """Exchange rows: the first send[0] rows of `x` go to rank 0 of the group, the next send[1] to rank 1, and so on.

    Every rank enters the collective in forward and, if the input needs a gradient, in backward. It does so with zero
    rows too: if it returned early, the other ranks would wait forever.

    Args:
        x: (sum(send), ...) any dtype that the backend supports.
        send, receive: rows per rank, known on the host; send[j] here equals receive[i] on rank j.

    Returns:
        (sum(receive), ...): rows in the order of the ranks that sent them. Differentiable once or more.

    Raises:
        ValueError: the number of rows of x is not the sum of `send`.
    """
    if x.shape[0] != sum(send):
        raise ValueError(f"x: has {x.shape[0]} rows, but send={list(send)} adds up to {sum(send)}")
    if group.size() == 1:
        return x
    if torch.compiler.is_compiling():  # if torch 2.11 compiles AllToAll, its gradients are 0
        from torch.distributed._functional_collectives import all_to_all_single_autograd

        return all_to_all_single_autograd(x.contiguous(), list(receive), list(send), group)
    return AllToAll.apply(x, send, receive, group)
