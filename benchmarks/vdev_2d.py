"""A peer of expert_parallel.py: torch's exchange over NVSHMEM around torch's grouped products.

    x (T, H) ─ gather the pairs by expert ─▶ send ─ all_to_all_vdev_2d ─▶ rows ─ up, SwiGLU, down ─▶ back
    y (T, H) ◀─ weighted sum over K ─ gather ◀─ home ◀──────── all_to_all_vdev_2d_offset ───────────┘

Each way is the other's backward. The host reads no size: the op begins each expert's rows at a multiple of ALIGN, and
grouped_mm takes their ends on the device. Sort, gathers, SwiGLU (compiled) and the sum are torch's. The router is ours,
so that both sides choose the same experts. The experts' gradients are sums over the ranks; ours are means.

What the two ops ask for, in torch 2.11.0:

- An op takes at most 16 experts of a rank. More experts go in groups: one call and one grouped product a group.
- A pair crosses the link, not a token: up to K times the rows of one copy a rank.
- What an op reads and writes must lie in symmetric memory. The gather writes there. What the experts compute does not
  lie there and is copied: y in forward, dx in backward.
- Sizes are static: `factor` times the rows of an even load, and room for the alignment. The op does not check them;
  `Exchange.check` does, once. Products skip the rows that no pair fills. SwiGLU and copies do not skip them, so a small
  factor is in the peer's favor.
- The rows at the experts are saved for backward where they arrived; gradients arrive in a second buffer. A second layer
  with the same buffers would have to copy its rows out.
- An op begins with a barrier between the ranks and ends with none. While a rank runs one op, a faster rank may begin
  the next, and writes splits and offsets to its peers before the barrier. So two ops in a row must not share these.
- Padding is not written. It is set to zero here, in forward and backward, because the products behind dW sum over it.

Legend: W ranks, T tokens of a rank, H hidden, I width, K choices, N = T·K pairs, G groups, E' experts of a rank in a
group, S = W·E' splits, M rows of a group's buffer.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from expert_parallel import Arms, Case, exchange_inputs, judge, timer, times_of, with_rates
from expert_parallel_peers import Peer as _Peer
from expert_parallel_peers import attempt, captured
from measure import Gate
from torch import Tensor, nn

from megablocks.moe.router import make_router

NAME = "torch all_to_all_vdev_2d"
ARMS = ("all_to_all, eager", f"{NAME}, eager", f"{NAME}, captured")
"""The first is ours, as in the launch without the peer. It joins the two launches."""

MOST_EXPERTS = 16
"""Of a rank in one call; torch's THREADS_PER_BLOCK / A2AV_TILE_SIZE."""
ALIGN = 8
"""Rows: 16 bytes of bf16, to which grouped_mm aligns where a group of rows is the inner dimension."""
MIB = 2**20


class Sizes(NamedTuple):
    """Of an exchange. experts: of a rank in all. factor: rows of a buffer over the rows of an even load."""

    world: int
    experts: int
    pairs: int
    hidden: int
    factor: float

    @property
    def per_group(self) -> int:
        """E'."""
        return max(n for n in range(1, MOST_EXPERTS + 1) if self.experts % n == 0)

    @property
    def groups(self) -> int:
        return self.experts // self.per_group

    @property
    def room(self) -> int:
        """M. The last row is never in use."""
        rows = math.ceil(self.pairs * self.factor / self.groups) + self.per_group * ALIGN + 1
        return math.ceil(rows / ALIGN) * ALIGN

    @property
    def symmetric_bytes(self) -> int:
        """Of symmetric memory, for bf16: five buffers in steps of 2 MiB, and 2 MiB for each of three small tensors."""
        buffer = self.groups * self.room * self.hidden * 2
        return 5 * math.ceil(buffer / (2 * MIB)) * 2 * MIB + 3 * 2 * MIB


class Transport(Protocol):
    """Memory that the ranks share, and the two ops on it. `dispatch` aligns each expert's rows to ALIGN.

    input, out (M, H); in_splits (S,) by rank and expert; splits and offsets (2, S) int64, where the rows lie at the
    experts by expert and rank, at home by rank and expert.
    """

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor: ...

    def dispatch(self, input: Tensor, out: Tensor, in_splits: Tensor, out_splits_offsets: Tensor) -> None: ...

    def combine(self, input: Tensor, out: Tensor, in_splits_offsets: Tensor, out_splits_offsets: Tensor) -> None: ...


class Nvshmem:
    """torch's ops. What `empty` returns is kept: freeing is a collective, and the garbage collector runs alone."""

    def __init__(self, heap_bytes: int) -> None:
        """heap_bytes: of all `empty`. NVSHMEM needs to know them where it cannot let its heap grow (no CUDA VMM).

        Raises:
            RuntimeError, ImportError: NVSHMEM is not here, or some memory is symmetric by another backend.
        """
        import torch.distributed._symmetric_memory as symmetric

        if not symmetric.is_nvshmem_available():
            raise RuntimeError("torch finds no NVSHMEM (nvidia-nvshmem)")
        os.environ.setdefault("NVSHMEM_SYMMETRIC_SIZE", str(heap_bytes))
        os.environ.setdefault("NVSHMEM_REMOTE_TRANSPORT", "none")  # the ranks are on one host
        symmetric.set_backend("NVSHMEM")
        self.symmetric, self.group = symmetric, dist.group.WORLD.group_name
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.kept: list[Tensor] = []

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        tensor = self.symmetric.empty(shape, dtype=dtype, device=self.device).zero_()
        self.symmetric.rendezvous(tensor, self.group)
        self.kept.append(tensor)
        return tensor

    def dispatch(self, input: Tensor, out: Tensor, in_splits: Tensor, out_splits_offsets: Tensor) -> None:
        torch.ops.symm_mem.all_to_all_vdev_2d(input, out, in_splits, out_splits_offsets, self.group, major_align=ALIGN)

    def combine(self, input: Tensor, out: Tensor, in_splits_offsets: Tensor, out_splits_offsets: Tensor) -> None:
        torch.ops.symm_mem.all_to_all_vdev_2d_offset(input, out, in_splits_offsets, out_splits_offsets, self.group)


@dataclass
class Plan:
    """The way of the pairs of one routing.

    splits: (G, S) int64 pairs by group, rank and expert. pair: (G·M,) the pair that each row of `send` holds; 0 for a
    row without a pair. token: (G·M,) its token. slot: (N,) the row of each pair, in `send` and in `home`.
    ends: (G, E') int32, where each expert's rows end. padding: rows at the experts, of all groups, that no pair fills.
    Both are None before the first dispatch.
    """

    splits: Tensor
    pair: Tensor
    token: Tensor
    slot: Tensor
    ends: Tensor | None = None
    padding: Tensor | None = None


class Exchange:
    """The buffers of one layer and the way through them.

    send, home: (G, M, H) rows at the tokens' rank, in one order. rows, grads: (G, M, H) at the experts, what arrives in
    forward and in backward. back: (G, M, H) what they send home.
    """

    def __init__(self, transport: Transport, sizes: Sizes, dtype: torch.dtype, device: torch.device) -> None:
        self.transport, self.sizes = transport, sizes
        world, per_group, groups, room = sizes.world, sizes.per_group, sizes.groups, sizes.room
        self.send, self.rows, self.grads, self.back, self.home = (
            transport.empty(groups, room, sizes.hidden, dtype=dtype) for _ in range(5)
        )
        splits = world * per_group
        self.in_splits = transport.empty(groups, splits, dtype=torch.int64)
        self.arrived = transport.empty(groups, 2, splits, dtype=torch.int64)
        self.returned = transport.empty(groups, 2, splits, dtype=torch.int64)
        if device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()  # the ranks' memory exists

        def count(n: int) -> Tensor:
            return torch.arange(n, device=device)

        expert = count(world * sizes.experts)
        rank, local = expert // sizes.experts, expert % sizes.experts
        key = ((local // per_group) * world + rank) * per_group + local % per_group
        self.key_of_expert, self.keys = key.short(), expert.short()  # few bits to sort
        self.pair_ids, self.lanes = count(sizes.pairs), count(ALIGN)
        self.group_at = count(groups) * room
        self.zero = torch.zeros(1, dtype=torch.int64, device=device)

    def plan(self, expert: Tensor) -> Plan:
        """expert: (T, K) integer ids in [0, W·G·E')."""
        sizes = self.sizes
        key, order = self.key_of_expert.index_select(0, expert.flatten()).sort(stable=True)
        ends = torch.searchsorted(key, self.keys, right=True)
        splits = ends.diff(prepend=self.zero).view(sizes.groups, -1)
        shift = self.group_at - (ends.view(sizes.groups, -1)[:, 0] - splits[:, 0])
        row = self.pair_ids + shift.index_select(0, key.int() // splits.shape[1])
        slot = torch.empty_like(order).scatter_(0, order, row)
        pair = order.new_zeros(sizes.groups * sizes.room).scatter_(0, row, order)
        return Plan(splits, pair, pair // expert.shape[1], slot)

    def check(self, expert: Tensor) -> None:
        """A collective that synchronizes. Raises on every rank if the buffers of one are too small for expert (T, K).

        Raises:
            ValueError: with the rows that the fullest buffer would take.
        """
        sizes = self.sizes
        loads = expert.flatten().long().bincount(minlength=sizes.world * sizes.experts)
        every = [torch.empty_like(loads) for _ in range(sizes.world)]
        dist.all_gather(every, loads)
        # rank of the pair, rank of the expert, group, expert
        every = torch.stack(every).view(sizes.world, sizes.world, sizes.groups, sizes.per_group)
        sent, taken = every.sum((1, 3)).max(), self._aligned(every.sum(0)).sum(2).max()
        most = int(torch.maximum(sent, taken))
        if most >= sizes.room:
            raise ValueError(f"rows_factor={sizes.factor:g}: a buffer of {sizes.room} rows would take {most}; raise it")

    def dispatch(self, rows: Tensor, index: Tensor, plan: Plan, out: Tensor) -> None:
        """Send rows[index[m]] as row m of the groups, and take what the other ranks send to `out`, self.rows or .grads.

        rows: (…, H). index: (G·M,), plan.token or plan.pair.
        """
        torch.index_select(rows, 0, index, out=self.send.view(-1, self.sizes.hidden))
        self.in_splits.copy_(plan.splits)
        self.dispatch_op(out)
        if plan.ends is None or plan.padding is None:
            plan.ends, plan.padding = self._where()
        out.view(-1, self.sizes.hidden).index_fill_(0, plan.padding, 0)

    def dispatch_op(self, out: Tensor) -> None:
        """`dispatch` of what stands in self.send, by self.in_splits. Padding is not written."""
        for group in range(self.sizes.groups):
            self.transport.dispatch(self.send[group], out[group], self.in_splits[group], self.arrived[group])

    def combine(self, rows: Sequence[Tensor]) -> Tensor:
        """Send the experts' rows, (M, H) a group, home, by the last dispatch. Returns self.home as (G·M, H)."""
        for back, computed in zip(self.back, rows, strict=True):
            back.copy_(computed)
        self.combine_op()
        return self.home.view(-1, self.sizes.hidden)

    def combine_op(self) -> None:
        """`combine` of what stands in self.back."""
        for group in range(self.sizes.groups):
            self.transport.combine(self.back[group], self.home[group], self.arrived[group], self.returned[group])

    def poison(self) -> None:
        """Fill with NaN what the next dispatch and combine must write on this rank."""
        for buffer in (self.rows, self.grads, self.home):
            buffer.fill_(math.nan)

    def _aligned(self, loads: Tensor) -> Tensor:
        """Rows that the op gives to each expert, at least ALIGN."""
        return ((loads + ALIGN - 1) // ALIGN * ALIGN).clamp_(min=ALIGN)

    def _where(self) -> tuple[Tensor, Tensor]:
        """Plan.ends and Plan.padding of what arrived."""
        sizes = self.sizes
        loads = self.arrived[:, 0].view(sizes.groups, sizes.per_group, sizes.world).sum(2)
        aligned = self._aligned(loads)
        ends = aligned.cumsum(1)
        padding = (ends - aligned + loads).unsqueeze(2) + self.lanes
        padding = torch.where(padding < ends.unsqueeze(2), padding, sizes.room - 1)  # the last row is a dump
        return ends.int(), (padding + self.group_at.view(-1, 1, 1)).flatten()


class _ToExperts(torch.autograd.Function):
    """x (T, H) → rows (M, H) of each group, in the exchange's own memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: Plan, exchange: Exchange) -> tuple[Tensor, ...]:
        ctx.plan, ctx.exchange, ctx.shape = plan, exchange, (x.shape[0], -1, x.shape[1])
        exchange.dispatch(x, plan.token, plan, exchange.rows)
        return tuple(rows.detach() for rows in exchange.rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.exchange.combine(grads).index_select(0, ctx.plan.slot).view(ctx.shape).sum(1), None, None


class _ToHome(torch.autograd.Function):
    """Rows (M, H) of each group → (N, H) in the order of the pairs."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, exchange: Exchange, *rows: Tensor) -> Tensor:
        ctx.plan, ctx.exchange = plan, exchange
        return exchange.combine(rows).index_select(0, plan.slot)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.exchange.dispatch(grads[0], ctx.plan.pair, ctx.plan, ctx.exchange.grads)
        return None, None, *(rows.detach() for rows in ctx.exchange.grads)


def swiglu(z: Tensor) -> Tensor:
    gate, linear = z.chunk(2, dim=1)
    return F.silu(gate) * linear


def weighted_sum(pairs: Tensor, weight: Tensor) -> Tensor:
    """pairs (N, H), weight (T, K) → (T, H)."""
    return torch.bmm(weight.unsqueeze(1), pairs.view(*weight.shape, -1)).squeeze(1)


class Layer(nn.Module):
    """A dMoE layer with SwiGLU, with copies of the weights of `layer`.

    up: (E', 2I, H) of each group, w1 above v1. down: (E', I, H) of each group.
    """

    def __init__(self, layer: Any, exchange: Exchange) -> None:
        super().__init__()
        self.exchange = exchange
        self.router = make_router(layer.config, device=layer.experts.w1.device, dtype=layer.experts.w1.dtype)
        self.router.load_state_dict(layer.router.state_dict())
        w1, v1, w2 = (
            w.detach().view(exchange.sizes.experts, -1, w.shape[1])
            for w in (layer.experts.w1, layer.experts.v1, layer.experts.w2)
        )

        def of_groups(weight: Tensor) -> nn.ParameterList:
            return nn.ParameterList(w.clone() for w in weight.split(exchange.sizes.per_group))

        self.up, self.down = of_groups(torch.cat([w1, v1], 1)), of_groups(w2)
        self.activate = torch.compile(swiglu, dynamic=False) if w1.is_cuda else swiglu

    def forward(self, x: Tensor) -> Tensor:
        routing = self.router(x)
        expert = routing.expert.view(x.shape[0], -1)
        plan = self.exchange.plan(expert)
        rows = _ToExperts.apply(x, plan, self.exchange)
        done = []
        for group_rows, ends, up, down in zip(rows, plan.ends, self.up, self.down, strict=True):
            z = F.grouped_mm(group_rows, up.transpose(1, 2), offs=ends)
            done.append(F.grouped_mm(self.activate(z), down, offs=ends))
        pairs = _ToHome.apply(plan, self.exchange, *done)
        return weighted_sum(pairs, routing.weight.view(expert.shape).to(x.dtype))

    def poison(self) -> None:
        self.exchange.poison()

    def gradients(self) -> dict[str, Tensor]:
        """By our names, in our layouts; the experts' divided by W, as ours are."""
        up = torch.cat([w.grad for w in self.up])
        of_experts = {"w1": up[:, : up.shape[1] // 2], "v1": up[:, up.shape[1] // 2 :]}
        of_experts["w2"] = torch.cat([w.grad for w in self.down])
        world = self.exchange.sizes.world
        got = {name: grad.flatten(0, 1) / world for name, grad in of_experts.items()}
        return got | {"router": self.router.layer.weight.grad}


class Peer(_Peer):
    NAME, OURS = NAME, "all_to_all"

    def __init__(self, cases: Sequence[Case], factor: float) -> None:
        self.factor = factor
        needed = sum((1 + case.alone) * self.sizes(case).symmetric_bytes for case in cases) + 64 * MIB
        self.transport, self.problem = attempt(lambda: Nvshmem(needed))
        if not self.problem:
            self.problem = attempt(lambda: self.transport.empty(1, dtype=torch.int64))[1]  # starts NVSHMEM
        self.announce(f"{needed / MIB:.0f} MiB of symmetric memory, {factor:g} times the rows of an even load")

    def sizes(self, case: Case) -> Sizes:
        world = dist.get_world_size()
        return Sizes(world, case.experts // world, case.tokens * case.top_k, case.hidden, self.factor)

    def exchange(self, case: Case, expert: Tensor) -> Exchange:
        """With buffers that are large enough for expert (T, K)."""
        exchange = Exchange(self.transport, self.sizes(case), torch.bfloat16, expert.device)
        exchange.check(expert)
        return exchange

    def layer(self, ours: Any, case: Case, x: Tensor) -> Layer:
        with torch.no_grad():
            expert = ours.router(x).expert.view(case.tokens, -1)
        return Layer(ours, self.exchange(case, expert))

    def facts(self, case: Case) -> dict[str, float]:
        sizes = self.sizes(case)
        return {"rows_factor": self.factor, "calls": sizes.groups, "symmetric_mb": sizes.symmetric_bytes / 1e6}

    def exchange_case(self, case: Case, rounds: int, key: str, gate: Gate) -> Iterator[Arms]:
        """dispatch is gather and op, combine is copy, op, gather and sum over K; "…_op" is the op alone.

        Two exchanges take turns, because two ops in a row must not share splits.
        """
        if self.problem:
            return
        x, ids = exchange_inputs(case)
        two, problem = attempt(lambda: [self.exchange(case, ids) for _ in range(2)])
        if problem:
            gate.take({"bad": f"{key}/{NAME}", "why": problem})
            return
        plan, ones = two[0].plan(ids), x.new_ones(ids.shape)

        def back(e: Exchange) -> Tensor:
            return weighted_sum(e.combine(e.rows).index_select(0, plan.slot), ones)

        parts: dict[str, Callable[[Exchange], object]] = {
            "dispatch": lambda e: e.dispatch(x, plan.token, plan, e.rows),
            "combine": back,
            "dispatch_op": lambda e: e.dispatch_op(e.rows),
            "combine_op": lambda e: e.combine_op(),
        }
        calls = {name: partial(_of_each, part, two) for name, part in parts.items()}
        want, owner = case.top_k * x.float(), ids // (case.experts // dist.get_world_size())
        sent = int((owner != dist.get_rank()).sum()) * case.hidden * 2
        for how in ("eager", "captured"):
            arm = f"{NAME}, {how}"
            if how == "captured":
                graphs = {name: captured(call) for name, call in calls.items()}
                if problem := next((c for c in graphs.values() if isinstance(c, str)), ""):
                    gate.take({"bad": f"{key}/{arm}", "why": problem})
                    return
                calls = graphs
            got = []
            for there, home in (("dispatch", "combine"), ("dispatch_op", "combine"), ("dispatch_op", "combine_op")):
                for e in two:
                    e.poison()
                calls[there]()
                calls[home]()
                got += [weighted_sum(e.home.view(-1, case.hidden).index_select(0, plan.slot), ones) for e in two]
            if not judge(gate, f"{key}/{arm}", got, [want] * len(got)):
                return
            times = times_of({f"{arm}/{name}": timer(call) for name, call in calls.items()}, rounds)[arm]
            each = {name: ms / len(two) for name, ms in times.items()}
            yield self._described(case, {arm: with_rates(each, sent)})


def _of_each(part: Callable[[Exchange], object], exchanges: Sequence[Exchange]) -> None:
    for exchange in exchanges:
        part(exchange)
