"""Rows through shared buffers: W ranks simulated in one process, with the same kernels and buffers as W GPUs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from megablocks.config import MoEConfig
from megablocks.moe.dispatchers import LocalDispatcher
from megablocks.moe.experts import Experts
from megablocks.moe.groups import shard_of
from megablocks.ops.exchange import Exchange, Layout
from megablocks.ops.exchange import to_experts as to_experts_op
from megablocks.ops.exchange import to_home as to_home_op
from megablocks.ops.fused.remote import Remote
from megablocks.ops.routing.dispatch import make_routing
from megablocks.testing.oracle import relative_error
from megablocks.testing.poison import poisoned_empty
from megablocks.testing.routings import nobody, one_hot, zipf

pytestmark = pytest.mark.any_device

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HIDDEN, EXPERTS = 24, 8


class Batch(NamedTuple):
    """One rank's tokens x (T, H), weights and ids (T, K), and the gradient of its output (T, H)."""

    x: Tensor
    weight: Tensor
    ids: Tensor
    dy: Tensor


class Meeting(Exchange):
    """A rank that is one of several threads: they take turns, and all push before any of them reads."""

    turns, everyone = threading.Lock(), threading.Barrier(1)

    def to_experts(self, *args: Any, part: str = "both") -> Any:
        return self._meet(super().to_experts, *args)

    def to_home(self, *args: Any, part: str = "both") -> Any:
        return self._meet(super().to_home, *args)

    def _meet(self, exchange: Callable[..., Any], *args: Any) -> Any:
        for part in ("push", "read"):
            result = exchange(*args, part=part)
            self.turns.release()
            try:
                self.everyone.wait(300)
            finally:
                self.turns.acquire()
        return result


def in_threads(ranks: list[Meeting], run: Callable[[int], Any]) -> list[Any]:
    """What run(rank) returns for each. One thread at a time computes; backward too, in its own thread."""

    def call(rank: int) -> Any:
        # Triton's interpreter changes its own module while a kernel runs, so ranks compute in turn throughout.
        with Meeting.turns, torch.autograd.set_multithreading_enabled(False):
            return run(rank)

    Meeting.everyone = threading.Barrier(len(ranks))
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(call, range(len(ranks))))


def ranks_of(
    world: int, max_tokens: int, top_k: int, dtype: torch.dtype = torch.float32, kind: type[Exchange] = Exchange,
    **options: Any,
) -> list[Any]:  # fmt: skip
    """The exchanges of `world` ranks whose buffers all lie on one device. The buffers come last, to be kept."""
    layout = Layout(world, max_tokens, HIDDEN, top_k, dtype)
    buffers = [torch.zeros(layout.num_bytes, dtype=torch.uint8, device=DEVICE) for _ in range(world)]
    for buffer in buffers:  # rows that nobody sent are NaN; ids, values and flags are not
        for half in (0, layout.half_bytes):
            buffer[half : half + layout.ids_at].view(dtype).fill_(float("nan"))
    addresses = [buffer.data_ptr() for buffer in buffers]
    return [*(kind(layout, r, addresses, DEVICE, EXPERTS // world, **options) for r in range(world)), buffers]


def to_experts(ranks: list[Exchange], batches: list[Batch]) -> list[tuple[Tensor, Tensor, Any]]:
    for rank, b in zip(ranks, batches, strict=True):
        rank.to_experts(b.x, b.ids, b.weight, part="push")
    return [rank.to_experts(b.x, b.ids, b.weight, part="read") for rank, b in zip(ranks, batches, strict=True)]


def to_home(
    ranks: list[Exchange], batches: list[Batch], rows: list[Tensor], local: list[Tensor], values: list[Any]
) -> list[tuple[Tensor, Tensor | None]]:
    calls = list(zip(ranks, rows, local, batches, values, strict=True))
    for rank, row, ids, b, value in calls:
        rank.to_home(row, ids, b.ids, value, part="push")
    return [rank.to_home(row, ids, b.ids, value, part="read") for rank, row, ids, b, value in calls]


def draw(kind: str, tokens: list[int], top_k: int, seed: int) -> list[Batch]:
    made = {"zipf": zipf, "one_hot": one_hot, "nobody": nobody}.get(kind)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for rank, t in enumerate(tokens):
        if kind == "every expert":
            ids = torch.arange(EXPERTS).expand(t, EXPERTS)
        elif made is None or (kind == "nobody" and rank > 0):
            ids = torch.randint(-1, EXPERTS, (t, top_k), generator=g)
        else:
            ids = made(t, EXPERTS, top_k, seed=seed + rank).expert.view(t, top_k)
        x, dy = torch.randn(2, t, HIDDEN, generator=g)
        weight = torch.rand(t, top_k, generator=g)
        batches.append(Batch(*(v.to(DEVICE) for v in (x, weight, ids.int(), dy))))
    return batches


def layer(impl: str, top_k: int) -> MoEConfig:
    return MoEConfig(
        hidden_size=HIDDEN, ffn_hidden_size=64, num_experts=EXPERTS, top_k=top_k, activation="swiglu", mlp_impl=impl,
        init_std=0.2,
    )  # fmt: skip


CASES = [
    (2, "uniform", [21, 13], 3, "fused"),
    (2, "every expert", [9, 9], EXPERTS, "grouped"),
    (4, "zipf", [9, 0, 17, 5], 2, "grouped"),
    (4, "nobody", [8, 8, 8, 8], 2, "sparse"),
    (8, "uniform", [3, 1, 0, 6, 2, 7, 5, 4], 2, "fused"),
    (8, "one_hot", [2] * 8, 1, "scatter"),
    (4, "uniform", [0, 0, 0, 0], 2, "grouped"),
]


@pytest.mark.parametrize(("world", "kind", "tokens", "top_k", "impl"), CASES)
def test_E1_simulated_ranks_equal_one_process(world: int, kind: str, tokens: list[int], top_k: int, impl: str) -> None:
    *ranks, _kept = ranks_of(world, max(*tokens, 4) + 1, top_k)
    config = layer(impl, top_k)
    parts = [
        Experts(config, shard=shard_of(r, world, EXPERTS), seed=1, grad_scale=1.0).to(DEVICE) for r in range(world)
    ]
    whole = Experts(config, seed=1, grad_scale=1.0).to(DEVICE)
    for step in range({2: 3, 4: 2, 8: 1}[world]):  # the halves of the buffers take turns
        batches = draw(kind, tokens, top_k, seed=10 * step)
        with poisoned_empty():
            taken = to_experts(ranks, batches)
            leaves = [(rows.requires_grad_(), weight.requires_grad_()) for rows, _, weight in taken]
            local = [ids for _, ids, _ in taken]
            partial = [
                part(rows, rank.dispatch(ids), weight.flatten())
                for part, rank, ids, (rows, weight) in zip(parts, ranks, local, leaves, strict=True)
            ]
            y = to_home(ranks, batches, [p.detach() for p in partial], local, [None] * world)
            for rank, b, ids in zip(ranks, batches, local, strict=True):
                rank.to_experts(b.dy, b.ids, None, ids, part="push")
            for rank, b, p, ids in zip(ranks, batches, partial, local, strict=True):
                p.backward(rank.to_experts(b.dy, b.ids, None, ids, part="read")[0])
            d_rows = [rows.grad for rows, _ in leaves]
            d_weight = [weight.grad for _, weight in leaves]
            d = to_home(ranks, batches, d_rows, local, d_weight)  # type: ignore[arg-type]
        for rank, b, (y_rank, _), (dx, dw) in zip(ranks, batches, y, d, strict=True):
            rank.check()
            x, weight = b.x.clone().requires_grad_(), b.weight.clone().requires_grad_()
            truth = LocalDispatcher(None, EXPERTS).run(x, make_routing(b.ids, weight, EXPERTS), whole)
            truth.backward(b.dy)
            assert x.grad is not None and weight.grad is not None and dw is not None
            for actual, expected in ((y_rank, truth), (dx, x.grad), (dw, weight.grad)):
                assert relative_error(actual, expected) < 1e-5
    for name in ("w1", "v1", "w2"):
        gradient = torch.cat([getattr(part, name).grad for part in parts])
        assert relative_error(gradient, getattr(whole, name).grad) < 1e-5


@pytest.mark.parametrize(
    ("world", "kind", "tokens", "top_k", "changes"),
    [
        (2, "uniform", [21, 13], 3, {}),
        (2, "one_hot", [5, 9], 1, {"mlp_bias": True}),
        (4, "zipf", [9, 0, 17, 5], 2, {"recompute_activation": True}),
        (4, "every expert", [3, 3, 3, 3], EXPERTS, {}),
        (2, "uniform", [5, 8], 3, {"gradient_accumulation_fusion": True}),
    ],
    ids=str,
)
def test_E6_experts_that_exchange_equal_exchanges_around_them(
    world: int, kind: str, tokens: list[int], top_k: int, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The op that sums rows while it pushes them, beside `combine` and an exchange of its sums: the same bits."""
    monkeypatch.setenv("MEGABLOCKS_COMPILE_AHEAD", "0")  # it would run one rank alone, which then waits for the others
    monkeypatch.setattr("megablocks.ops.exchange_triton.LAG", 1)  # fewer than there are chunks, as for many tokens
    if changes:  # most slots then have more pairs than are read at once
        monkeypatch.setattr("megablocks.ops.exchange_triton.UNROLL", 1)
    config = layer("fused", top_k).replace(**changes)
    batches = draw(kind, tokens, top_k, seed=4)
    parts = [Experts(config, shard=shard_of(r, world, EXPERTS), seed=1).to(DEVICE) for r in range(world)]

    def step(rank: int, exchange: Exchange, within: bool) -> list[Tensor]:
        b, part = batches[rank], parts[rank]
        for p in part.parameters():
            p.grad, p.main_grad = None, torch.zeros_like(p)  # type: ignore[attr-defined]
        x, weight = b.x.clone().requires_grad_(), b.weight.clone().requires_grad_()
        if within:
            assert part.takes_remote(x)
            y = part(x, Remote(exchange, b.ids), weight)
        else:
            rows, ids, values = to_experts_op(exchange, x, weight, b.ids)
            y = to_home_op(exchange, part(rows, exchange.dispatch(ids), values.flatten()), ids, b.ids)
        y.backward(b.dy)
        where = "main_grad" if config.gradient_accumulation_fusion else "grad"
        return [y.detach(), x.grad, weight.grad, *(getattr(p, where) for p in part.parameters())]

    results = []
    for within in (False, True):
        # room for fewer rows than there might be
        *ranks, _kept = ranks_of(world, max(tokens) + 1, top_k, kind=Meeting, max_rows=max(40, *tokens) * top_k)
        with poisoned_empty():
            results.append(in_threads(ranks, lambda r, ranks=ranks, within=within: step(r, ranks[r], within)))
        for rank in ranks:
            rank.check()
    for around, inside in zip(*results, strict=True):
        for a, b in zip(around, inside, strict=True):
            # two compiled kernels may fuse a product and a sum in one and not in the other
            assert a.any() or not a.numel() or kind == "one_hot"
            assert torch.equal(a, b) if DEVICE.type == "cpu" else relative_error(a, b) < 1e-6


@pytest.mark.parametrize("impl", ["grouped", "fused", "sparse"])
def test_E3_overflow_gives_nan_and_one_error_with_sizes(impl: str) -> None:
    *ranks, _kept = ranks_of(2, 16, 2, max_rows=40)
    *unlimited, _kept_too = ranks_of(2, 16, 2)
    whole = unlimited[0]
    parts = [Experts(layer(impl, 2), shard=shard_of(r, 2, EXPERTS), seed=1).to(DEVICE) for r in range(2)]

    def step(kind: str) -> list[Tensor]:
        batches = draw(kind, [16, 16], 2, seed=3)
        taken = to_experts(ranks, batches)
        partial = []
        for part, rank, (rows, ids, weight) in zip(parts, ranks, taken, strict=True):
            grads = []
            for dispatch in (rank.dispatch(ids), whole.dispatch(ids)):
                leaves = rows.detach().requires_grad_(), weight.detach().requires_grad_()
                out = part(leaves[0], dispatch, leaves[1].flatten())
                grads.append(torch.autograd.grad(out.sum(), (*leaves, part.w1)))
            if kind == "uniform":  # at most 40 of 64 rows on each rank: nothing changes
                assert all(torch.equal(limited, free) for limited, free in zip(*grads, strict=True))
            partial.append(part(rows, rank.dispatch(ids), weight.flatten()).detach())
        return [y for y, _ in to_home(ranks, batches, partial, [ids for _, ids, _ in taken], [None, None])]

    with poisoned_empty():
        assert all(y.isfinite().all() for y in step("uniform"))
        for rank in ranks:
            rank.check()
        outputs = step("one_hot")  # all 64 rows go to rank 1
    assert outputs[0].isnan().all()  # rank 0 computed nothing, but its tokens went to rank 1
    assert outputs[1].isnan().all()
    with pytest.raises(RuntimeError, match="max_rows=40: 64 rows arrived .* raise dispatch_rows_factor .* until all"):
        ranks[1].check()


def test_half_precision_rows_are_summed_in_float32() -> None:
    *ranks, _kept = ranks_of(4, 8, 4, torch.float16)
    ids = torch.arange(0, EXPERTS, 2, dtype=torch.int32, device=DEVICE).expand(8, 4).contiguous()  # one on each rank
    g = torch.Generator().manual_seed(0)
    batches = [Batch(torch.zeros(8, HIDDEN, dtype=torch.float16, device=DEVICE), ids.float(), ids, ids)] * 4
    taken = to_experts(ranks, batches)
    partial = [torch.randn(32, HIDDEN, generator=g).half().to(DEVICE) for _ in range(4)]
    got = to_home(ranks, batches, partial, [ids for _, ids, _ in taken], [None] * 4)
    for rank, (y, _) in enumerate(got):
        expected = sum(p[8 * rank : 8 * rank + 8].float() for p in partial)
        assert isinstance(expected, Tensor)
        assert torch.equal(y, expected.half())
