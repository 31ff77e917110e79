"""Routing and movement on a GPU: launches, no host synchronization, one compilation for all token counts, row 2³¹."""

from __future__ import annotations

import contextlib

import pytest
import torch

from megablocks.config import MoEConfig
from megablocks.moe.router import route
from megablocks.ops.permute.permute_triton import _combine_backward_kernel, _combine_kernel, _expand_kernel
from megablocks.ops.permute.rows import combine, gather
from megablocks.ops.routing.dispatch import (
    Dispatch,
    bin_dispatch,
    build_dispatch,
    count_valid,
    make_routing,
    pad_dispatch,
)
from megablocks.ops.routing.rounding import route_rounded
from megablocks.ops.routing.topk import RouterOptions, route_topk
from megablocks.ops.sparse.matrix import topology
from megablocks.testing.routings import ROUTINGS
from megablocks.testing.syncs import no_sync

pytestmark = pytest.mark.gpu


def launches(fn):
    """Names of what one call runs on the device."""
    from torch.profiler import ProfilerActivity, profile

    fn()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as run:
        fn()
        torch.cuda.synchronize()
    return [e.name for e in run.events() if e.device_type == torch.autograd.DeviceType.CUDA and "Sync" not in e.name]


def replayed(fn):
    """fn's tensors as a replayed CUDA graph leaves them."""
    fn()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fn()
    for tensor in out:
        tensor.fill_(0)
    graph.replay()
    return out


def routing_of(tokens=24576, experts=128, top_k=8):
    ids = torch.randint(experts, (tokens, top_k), device="cuda")
    return make_routing(ids, torch.rand(tokens, top_k, device="cuda"), experts)


def test_bookkeeping_takes_four_launches_and_no_synchronization():
    routing = routing_of()
    with no_sync():
        d = build_dispatch(routing)
        built = topology(d.expert_offsets, 512, max_rows=routing.num_pairs)
        p = pad_dispatch(d, built.padded_offsets, built.pattern.shape[0])
    assert len(launches(lambda: build_dispatch(routing))) <= 4
    pad = lambda: pad_dispatch(d, built.padded_offsets, built.pattern.shape[0])  # noqa: E731
    assert len(launches(pad)) == 1
    assert all(torch.equal(a, b) for a, b in zip(replayed(lambda: build_dispatch(routing)[:5]), d[:5], strict=True))
    for a, b in zip(replayed(lambda: pad()[1:5]), p[1:5], strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("padded", [False, True])
def test_router_step_takes_six_launches_forward_and_four_backward(padded):
    config = MoEConfig(
        hidden_size=8, ffn_hidden_size=8, num_experts=64, top_k=4, normalize_top_k=1.0,
        load_balancing_loss_weight=0.1, z_loss_weight=0.1,
    )  # fmt: skip
    logits = torch.randn(4096, 64, device="cuda", dtype=torch.bfloat16).requires_grad_()
    mask = torch.arange(4096, device="cuda") % 5 == 0 if padded else None
    grads = [torch.rand(4096 * 4, device="cuda"), torch.ones((), device="cuda"), torch.ones((), device="cuda")]

    def forward():
        routing = route(logits, config, training=True, padding_mask=mask)
        return [routing.weight, *routing.losses.values()]

    def backward():
        return torch.autograd.grad(forward(), logits, grads)

    with no_sync():
        (expected,) = backward()
    assert len(launches(forward)) <= 6
    assert len(launches(backward)) <= 6 + 4
    assert torch.equal(replayed(backward)[0], expected)


def test_a_new_token_count_compiles_nothing():
    from megablocks.ops.permute.padded_triton import _pad_kernel
    from megablocks.ops.routing import dispatch_triton, topk_triton

    kernels = [
        _expand_kernel, _combine_kernel, _combine_backward_kernel, _pad_kernel,
        *(getattr(dispatch_triton, f"_{name}_kernel") for name in ("count", "scan", "place")),
        *(getattr(topk_triton, f"_{name}_kernel") for name in ("route", "finish", "route_backward")),
    ]  # fmt: skip
    seen = []
    for tokens in (1000, 1024, 1, 77, 5000):
        logits = torch.randn(tokens, 16, device="cuda", requires_grad=True)
        out = route_topk(logits, RouterOptions(2, balance_weight=0.1))
        routing = make_routing(out.expert.view(-1, 2), out.weight.view(-1, 2), 16)
        d = build_dispatch(routing)
        x = torch.randn(tokens, 64, device="cuda", requires_grad=True)
        for p in (pad_dispatch(d, d.expert_offsets, 2 * tokens), bin_dispatch(d, tokens // 2 + 1)):
            y = combine(gather(x, p), routing.weight, p)
            torch.autograd.grad(y.sum() + out.balance, (x, logits), retain_graph=True)
        seen.append(sum(len(caches[0]) for kernel in kernels for caches in kernel.device_caches.values()))
    assert seen == seen[:1] * 5


@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("hidden", [64, 60, 129])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_R1_R2_R6_padded_equals_the_cpus(name, hidden, dtype, poison):
    routing = ROUTINGS[name](67, 5, 2)
    d = build_dispatch(routing)
    offsets = torch.zeros(6, dtype=torch.int32)
    offsets[1:] = ((d.expert_offsets.diff() + 15) // 16 * 16).cumsum(0)
    x, dy = (torch.randn(67, hidden).to(dtype) for _ in range(2))
    results = []
    for device, wide in (("cpu", torch.float64), ("cuda", dtype)):
        moved = Dispatch(*(t.to(device) for t in d[:5]))
        weight = routing.weight.to(device, torch.float32 if wide == dtype else wide).requires_grad_()
        mine = x.to(device, wide).requires_grad_()
        where, grad = offsets.to(device), dy.to(device, wide)
        with no_sync() if device == "cuda" else contextlib.nullcontext():
            p = pad_dispatch(moved, where, 200)
            rows = gather(mine, p)
            y = combine(rows, weight, p)
            results.append((*p[:5], rows, y, *torch.autograd.grad(y, (mine, weight), grad)))
    for expected, got in zip(*results, strict=True):
        scale = 1 + float(expected.detach().abs().max()) if expected.numel() else 1.0
        tolerance = (2**-7 if dtype == torch.bfloat16 else 1e-5) * scale
        torch.testing.assert_close(got.double().cpu(), expected.double(), rtol=0, atol=tolerance)


def test_N2_ten_padded_reruns_are_bit_identical():
    routing = routing_of(3000, 16, 3)
    d = build_dispatch(routing)
    p = bin_dispatch(d, 500)
    x = torch.randn(3000, 96, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = routing.weight.clone().requires_grad_()
    runs = []
    for _ in range(10):
        y = combine(gather(x, p), weight, p)
        runs.append((y, *torch.autograd.grad(y.float().square().sum(), (x, weight))))
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(run, runs[0], strict=True))


@pytest.mark.parametrize("hidden", [64, 5000])  # whole rows, and rows in pieces
def test_N4_rows_beyond_two_to_the_31(hidden):
    edge = 2**31 // hidden
    routing = make_routing(torch.tensor([[0], [1], [1], [1]], device="cuda"), torch.ones(4, 1, device="cuda"), 2)
    offsets = torch.tensor([0, edge - 1, edge + 2], dtype=torch.int32, device="cuda")
    p = pad_dispatch(build_dispatch(routing), offsets, edge + 2)
    x = torch.randn(4, hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.rand(4, device="cuda", requires_grad=True)
    rows = gather(x, p)
    assert torch.equal(rows[[0, edge - 1, edge, edge + 1]], x)
    assert not rows[1 : edge - 1].any()
    y = combine(rows, weight, p)
    assert torch.allclose(y, (x.float() * weight[:, None]).bfloat16(), rtol=2**-7)
    dx, d_weight = torch.autograd.grad(y, (x, weight), torch.ones_like(y))
    assert torch.allclose(dx, weight.bfloat16()[:, None].expand_as(dx), rtol=2**-7)
    assert torch.allclose(d_weight, x.float().sum(1), rtol=1e-3, atol=1e-2)


def test_N4_router_logits_beyond_two_to_the_31():
    tokens = 2**31 // 512 + 3
    logits = torch.zeros(tokens, 512, device="cuda", dtype=torch.bfloat16)
    logits[-1, 500] = logits[-2, 7] = 3.0
    out = route_topk(logits.requires_grad_(), RouterOptions(1))
    assert out.expert[-3:].tolist() == [0, 7, 500]
    (grad,) = torch.autograd.grad(out.weight[-1], logits)
    score = float(out.weight[-1].detach())
    assert float(grad[-1, 500]) == pytest.approx(score * (1 - score), rel=1e-2)
    assert not grad[:-1].any()


@pytest.mark.parametrize("frozen", [None, "x", "weight", "logits"])
def test_N5_retain_graph_twice_and_frozen_inputs(frozen):
    leaves = {
        "logits": torch.randn(50, 8, device="cuda"),
        "x": torch.randn(50, 32, device="cuda"),
        "weight": torch.rand(100, device="cuda"),
    }
    for name, leaf in leaves.items():
        leaf.requires_grad_(name != frozen)
    out = route_topk(leaves["logits"], RouterOptions(2, norm_p=1.0, balance_weight=0.1, z_weight=0.1))
    d = build_dispatch(make_routing(out.expert.view(50, 2), out.weight.view(50, 2), 8))
    p = bin_dispatch(d, 30)
    y = combine(gather(leaves["x"], p), leaves["weight"] * out.weight, p)
    wanted = [leaf for leaf in leaves.values() if leaf.requires_grad]
    loss = y.square().sum() + out.balance + out.z
    first, second = (torch.autograd.grad(loss, wanted, retain_graph=True) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b) and a.abs().sum() > 0


def test_N9_router_and_padded_rows_compile():
    def step(logits, x):
        out = route_topk(logits, RouterOptions(2, norm_p=1.0, balance_weight=0.1, z_weight=0.1))
        d = build_dispatch(make_routing(out.expert.view(-1, 2), out.weight.view(-1, 2), 8))
        p = bin_dispatch(d, 30)
        unweighted = combine(gather(x, p), None, p)
        return combine(gather(x, p), out.weight, p) + unweighted, out.balance + out.z

    inputs = torch.randn(50, 8, device="cuda").requires_grad_(), torch.randn(50, 32, device="cuda").requires_grad_()
    results = []
    for fn in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        y, loss = fn(*inputs)
        results.append((y, loss, *torch.autograd.grad(y.sin().sum() + loss, inputs)))
    for a, b in zip(*results, strict=True):
        assert torch.allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("rule", ["nearest", "stochastic_score"])
def test_rounded_router_replays_from_a_graph(rule):
    """Forward and backward; a rule that draws does so by torch's generator, anew at each replay."""
    logits = torch.randn(3000, 40, device="cuda")

    def run():
        leaf = logits.detach().requires_grad_()  # one that backward saw on another stream makes a capture wait for it
        out = route_rounded(leaf, RouterOptions(3, norm_p=1.0, balance_weight=0.1), rule, 64)
        (grad,) = torch.autograd.grad(out.weight.square().sum() + out.balance, leaf)
        return [out.rounded, out.expert, out.weight, grad]

    with no_sync():
        eager = run()
    rounded, expert, weight, grad = replayed(run)
    assert torch.equal(count_valid(expert, 40), rounded) and bool((rounded % 64 == 0).all())
    assert weight.isfinite().all() and grad.isfinite().all()
    if rule == "nearest":
        assert all(torch.equal(a, b) for a, b in zip(eager, (rounded, expert, weight, grad), strict=True))


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.mem_get_info()[0] < 48 * 2**30, reason="needs 48 GiB of free GPU memory"
)
def test_N4_rounding_of_weights_beyond_two_to_the_31():
    """Three tokens choose each expert but the first, which all other tokens choose. Rounding down drops each third."""
    experts = 512
    tokens = 2**31 // experts + 3
    logits = torch.zeros(tokens, experts, device="cuda", dtype=torch.bfloat16)
    logits[:, 0] = 1.0
    choosers = torch.arange(tokens - 3 * (experts - 1), tokens, device="cuda")
    chosen = torch.arange(1, experts, device="cuda").repeat(3)
    logits[choosers, chosen] = torch.tensor([4.0, 3.0, 2.0], device="cuda").repeat_interleave(experts - 1).bfloat16()
    out = route_rounded(logits, RouterOptions(1), "down", 2)
    assert out.load.tolist() == [tokens - 3 * (experts - 1)] + [3] * (experts - 1)
    assert out.rounded.tolist() == [int(out.load[0]) // 2 * 2] + [2] * (experts - 1)
    kept = out.expert > 0
    assert torch.equal(out.token[kept].long(), choosers[: 2 * (experts - 1)])
    assert torch.equal(out.expert[kept].long(), chosen[: 2 * (experts - 1)])
    assert int((out.expert == 0).sum()) == int(out.rounded[0])
