"""Experts over two GPUs through symmetric memory, against one process, and what happens when a rank is late or gone."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megablocks.config import ConfigError, MoEConfig
from megablocks.moe import dMoE
from megablocks.moe.dispatchers import AllToAllDispatcher, make_dispatcher
from megablocks.moe.experts import Experts
from megablocks.moe.symmetric import SymmetricDispatcher, limit_s
from megablocks.ops.exchange import Exchange, Layout, to_experts, to_home
from megablocks.ops.routing.dispatch import make_routing
from megablocks.testing.launcher import run_distributed_test
from megablocks.testing.oracle import experts_oracle, relative_error
from megablocks.testing.poison import poisoned_empty

pytestmark = pytest.mark.xdist_group("ranks")
GPUS = torch.cuda.device_count()
two_gpus = pytest.mark.skipif(GPUS < 2, reason="needs two GPUs of one host")

H, E = 64, 8


def config(top_k, **changes):
    values = dict(
        hidden_size=H, ffn_hidden_size=96, num_experts=E, top_k=top_k, activation="swiglu", init_std=0.1
    )  # fmt: skip
    return MoEConfig(**{**values, **changes})


def batch(rank, tokens, top_k, kind):
    g = torch.Generator().manual_seed(50 + rank)
    ids = torch.randint(-1, E, (tokens, top_k), generator=g)
    if kind == "one":
        ids.fill_(E - 1)
    if kind == "every":
        ids = torch.arange(E).expand(tokens, E)
    if kind == "zipf":
        ids = torch.multinomial(1 / torch.arange(1.0, E + 1).expand(max(tokens, 1), E), top_k, generator=g)[:tokens]
    x, dy = torch.randn(2, tokens, H, generator=g)
    return x, torch.rand(tokens, top_k, generator=g), ids, dy


def run_rank(counts, top_k, kind, impl, dtype):
    rank = dist.get_rank()
    c = config(top_k, mlp_impl=impl)
    dispatcher = SymmetricDispatcher(
        dist.group.WORLD, E, max_tokens=max(*counts, 1) + 3, rows_factor=2.0, strict=True
    )  # fmt: skip
    experts = Experts(c, shard=dispatcher.shard, seed=7, grad_scale=1.0).to("cuda", dtype)
    out = []
    for _ in range(3):
        x, weight, ids, dy = (t.cuda() for t in batch(rank, counts[rank], top_k, kind))
        x = x.to(dtype).requires_grad_()
        weight.requires_grad_()
        experts.zero_grad()
        with poisoned_empty():
            y = dispatcher.run(x, make_routing(ids, weight, E), experts)
            y.backward(dy.to(dtype))
        torch.cuda.synchronize()
        got = {"y": y, "x": x.grad, "weight": weight.grad, **{n: p.grad for n, p in experts.named_parameters()}}
        out.append({name: t.detach().cpu() for name, t in got.items()})
    return out


@two_gpus
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("counts", "top_k", "kind", "impl"),
    [
        ([67, 67], 2, "uniform", "fused"),
        ([200, 13], 3, "zipf", "grouped"),
        ([40, 0], 2, "uniform", "scatter"),
        ([0, 0], 2, "uniform", "fused"),
        ([33, 50], 1, "one", "fused"),
        ([30, 30], E, "every", "grouped"),
    ],
)
def test_E1_two_gpus_equal_one_process(counts, top_k, kind, impl, dtype):
    results = run_distributed_test(run_rank, 2, counts, top_k, kind, impl, dtype, backend="nccl", timeout=120.0)
    whole = Experts(config(top_k), seed=7, grad_scale=1.0).to(dtype)
    wide = {n: p.detach().double().requires_grad_() for n, p in whole.named_parameters()}
    limit = 1e-5 if dtype == torch.float32 else 2e-2
    for rank in range(2):
        x, weight, ids, dy = batch(rank, counts[rank], top_k, kind)
        x = x.to(dtype).double().requires_grad_()
        weight = weight.double().requires_grad_()
        routing = make_routing(ids, weight, E)
        truth = experts_oracle(x, routing.token, routing.expert, routing.weight, wide, E, "swiglu")
        truth.backward(dy.to(dtype).double())
        for step in results[rank]:
            for name, expected in (("y", truth), ("x", x.grad), ("weight", weight.grad)):
                assert relative_error(step[name], expected) < limit, (rank, name)
            assert all(torch.equal(step[name], results[rank][0][name]) for name in step)  # reruns: the same bits
    for name, parameter in wide.items():
        got = torch.cat([results[rank][-1][name] for rank in range(2)])
        expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        assert relative_error(got, expected) < limit, name


def epochs(count, most):
    """Mistakes of `count` exchanges of random sizes whose result is known; delays between data and flag."""
    rank, device = dist.get_rank(), torch.device("cuda", dist.get_rank())
    top_k, hidden = 2, 72
    dispatcher = SymmetricDispatcher(dist.group.WORLD, E, max_tokens=most, strict=True)
    x = torch.zeros(1, hidden, dtype=torch.bfloat16, device=device)
    routing = make_routing(torch.zeros(1, top_k, dtype=torch.int32, device=device), torch.ones(1, top_k).cuda(), E)
    exchange = dispatcher._exchange(x, routing)
    g = torch.Generator().manual_seed(rank)
    mistakes = torch.zeros((), dtype=torch.int64, device=device)
    for epoch in range(count):
        tokens = int(torch.randint(0, most + 1, (), generator=g))
        exchange.delay_ns = 30_000 if (epoch + rank) % 3 == 0 else 0
        ids = torch.randint(-1, E, (tokens, top_k), generator=g).int().to(device, non_blocking=True)
        x = torch.randint(-8, 9, (tokens, hidden), generator=g).to(device, torch.bfloat16, non_blocking=True)
        weight = torch.rand(tokens, top_k, generator=g).to(device, non_blocking=True)
        x.requires_grad_()
        weight.requires_grad_()
        rows, local, w = to_experts(exchange, x, weight, ids)
        y = to_home(exchange, torch.where((local >= 0).any(1, keepdim=True), rows, 0), local, ids)
        (y.float().sum() + w.sum()).backward()
        # y is x once for each rank that has an expert of the token
        ranks = sum(((ids // (E // 2)) == r).logical_and(ids >= 0).any(1).to(x.dtype) for r in range(2))
        mistakes += (y != x * ranks[:, None]).sum() + (x.grad != ranks[:, None].expand_as(x)).sum()
        mistakes += (weight.grad != (ids >= 0)).sum()
    exchange.check()
    return int(mistakes)


@two_gpus
@pytest.mark.gpu
def test_E2_delays_and_random_sizes_change_nothing():
    assert run_distributed_test(epochs, 2, 1000, 90, backend="nccl", timeout=200.0) == [0, 0]


def leave(phase):
    """Rank 1 stops before an exchange. Rank 0 says who is missing, in time, and its output is NaN."""
    rank = dist.get_rank()
    device = torch.device("cuda", rank)
    dispatcher = SymmetricDispatcher(dist.group.WORLD, E, max_tokens=16, strict=True)
    c = config(2)
    experts = Experts(c, shard=dispatcher.shard, seed=7).cuda()
    x, weight, ids, dy = (t.to(device) for t in batch(rank, 16, 2, "uniform"))
    routing = make_routing(ids.clamp(min=0), weight, E)
    exchange = dispatcher._exchange(x, routing)
    exchange.limit_s = 1.0

    def stop_at(wanted):
        return rank == 1 and phase == wanted

    if stop_at("dispatch"):
        return None
    y = dispatcher.run(x.requires_grad_(), routing, experts) if not stop_at("combine") else None
    if stop_at("combine"):
        to_experts(exchange, x, weight, routing.expert.view(16, 2))
        return None
    if stop_at("backward"):
        return None
    start = time.monotonic()
    y.backward(dy)
    torch.cuda.synchronize()
    took = time.monotonic() - start
    try:
        dispatcher.run(x, routing, experts)
    except RuntimeError as error:
        return str(error), took, bool(y.isnan().all()), bool(x.grad.isnan().all())
    return "no error"


@two_gpus
@pytest.mark.gpu
@pytest.mark.parametrize("phase", ["dispatch", "combine", "backward"])
def test_E4_stopped_peer_is_named_in_time(phase):
    message, took, y_is_nan, dx_is_nan = run_distributed_test(leave, 2, phase, backend="nccl", timeout=60.0)[0]
    assert message.startswith("rank 1 of the expert group sent nothing for 1 s, waited for by rank 0")
    assert took < 5
    assert dx_is_nan
    assert y_is_nan == (phase != "backward")


def captured(tokens):
    """The largest difference between a captured and an eager step of a whole layer, with other tokens."""
    rank = dist.get_rank()
    device = torch.device("cuda", rank)
    torch.manual_seed(3)
    c = config(2, dispatcher="symmetric", max_tokens=tokens)
    layer = dMoE(c, expert_parallel_group=dist.group.WORLD, seed=5, device=device, dtype=torch.bfloat16)
    g = torch.Generator().manual_seed(rank)
    batches = torch.randn(3, tokens, H, generator=g).to(device, torch.bfloat16)
    x = batches[0].clone().requires_grad_()

    def step():
        for p in (x, *layer.parameters()):
            p.grad = None
        y = layer(x)
        y.backward(batches[2])
        return y

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        y = step()
    held = [y, x.grad, *(p.grad for p in layer.parameters())]
    with torch.no_grad():
        x.copy_(batches[1])
    for _ in range(3):
        graph.replay()
    replayed = [t.clone() for t in held]
    torch.cuda.synchronize()
    eager = [step(), x.grad, *(p.grad for p in layer.parameters())]
    return all(torch.equal(a, b) for a, b in zip(replayed, eager, strict=True)), bool(eager[0].isfinite().all())


@two_gpus
@pytest.mark.gpu
def test_a_graph_captures_a_layer_over_two_gpus():
    assert run_distributed_test(captured, 2, 96, backend="nccl", timeout=120.0) == [(True, True)] * 2


def made(**options):
    return type(make_dispatcher(dist.group.WORLD, E, **options))


def on_cpu():
    dispatcher = make_dispatcher(dist.group.WORLD, E, max_tokens=8)
    experts = Experts(config(2), shard=dispatcher.shard, seed=7)
    x, weight, ids, _ = batch(dist.get_rank(), 8, 2, "uniform")
    y = dispatcher.run(x, make_routing(ids, weight, E), experts)
    plain = make_dispatcher(dist.group.WORLD, E, kind="all_to_all")
    same = torch.equal(y, plain.run(x, make_routing(ids, weight, E), experts))
    errors = []
    for call in (
        lambda: dispatcher.run(torch.zeros(9, H), make_routing(ids, weight, E), experts),
        lambda: make_dispatcher(dist.group.WORLD, E, kind="symmetric", max_tokens=8).run(
            x, make_routing(ids, weight, E), experts
        ),
    ):
        try:
            call()
        except ValueError as error:
            errors.append(str(error))
    kinds = made(), made(kind="all_to_all", max_tokens=8), made(kind="symmetric", max_tokens=8, rows_factor=1.5)
    kinds += made(max_tokens=8), made(max_tokens=8, rows_factor=1.5)  # auto only where rows cannot overflow
    return same, errors, kinds


def test_auto_falls_back_to_all_to_all_and_symmetric_says_why():
    for same, errors, kinds in run_distributed_test(on_cpu, 2):
        assert same
        assert errors == [
            "x: has 9 tokens, must have at most max_tokens=8",
            "dispatcher='symmetric': it takes bf16, fp16 or float32 tokens on a GPU, not torch.float32 on cpu; use "
            "'auto' or 'all_to_all'",
        ]
        symmetric, plain = SymmetricDispatcher, AllToAllDispatcher
        assert kinds == (plain, plain, symmetric, symmetric, plain)


def test_timeout_of_the_environment(monkeypatch):
    group, name = SimpleNamespace(size=lambda: 2, rank=lambda: 0), "MEGABLOCKS_EXCHANGE_TIMEOUT"
    for text, seconds in (("", 600), ("1.5", 1.5)):
        monkeypatch.setenv(name, text)
        SymmetricDispatcher(group, E, max_tokens=4)
        assert limit_s() == seconds
    for text in ("abc", "0", "-1", "nan", "inf"):
        monkeypatch.setenv(name, text)
        said = f"^{name}='{text}': must be a number of seconds, > 0 and <= 1e9, such as 600$"
        with pytest.raises(ConfigError, match=said):
            SymmetricDispatcher(group, E, max_tokens=4)


def test_exchange_says_what_went_wrong():
    exchange = Exchange(Layout(4, 8, H, 2, torch.float32), 2, [0, 0, 0, 0], torch.device("cpu"), 2, limit_s=5)
    exchange.check()
    exchange.alarm[0] = 2
    said = "^rank 1 of the expert group sent nothing for 5 s, waited for by rank 2: .* every later one until all ranks"
    with pytest.raises(RuntimeError, match=said):
        exchange.check()
