"""The ops on a GPU: equal to the CPU's float64, without a host synchronization, and bit-identical in ten reruns."""

import contextlib

import pytest
import torch

from megablocks.ops.activation import activate
from megablocks.ops.activation_table import Activation
from megablocks.ops.fused.down import activate_and_project
from megablocks.ops.grouped.bias import add_expert_bias
from megablocks.ops.grouped.grouped_mm import grouped_mm
from megablocks.ops.permute.rows import combine, gather
from megablocks.ops.routing.capacity import apply_capacity, capacity_of
from megablocks.ops.routing.dispatch import Dispatch, Routing, build_dispatch
from megablocks.ops.routing.topk import RouterOptions, route_topk
from megablocks.testing.oracle import relative_error
from megablocks.testing.routings import ROUTINGS
from megablocks.testing.syncs import no_sync

pytestmark = pytest.mark.gpu


def _layer(x, w1, w2, b1, weight, d, fused):
    experts, width, hidden = w1.shape
    pre = grouped_mm(gather(x, d), w1.transpose(1, 2), d.expert_offsets)
    pre = add_expert_bias(pre, b1, d.expert_offsets)
    if fused:
        y = activate_and_project(pre, None, w2, d.expert_offsets, Activation("gelu"))
    else:
        y = grouped_mm(activate(pre, None, Activation("gelu")), w2, d.expert_offsets)
    return combine(y, weight, d)


def _case(name, hidden, width, dtype, num_tokens=67, num_experts=5):
    routing = ROUTINGS[name](num_tokens, num_experts, 2)
    generator = torch.Generator().manual_seed(1)

    def draw(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).double()

    tensors = [
        draw(num_tokens, hidden),
        draw(num_experts, width, hidden) / hidden**0.5,
        draw(num_experts, width, hidden) / width**0.5,
        draw(num_experts, width),
    ]
    return routing, [t.to(dtype) for t in tensors], routing.weight.float()


def _run(routing, tensors, weight, device, dtype, fused, guard):
    d = build_dispatch(routing)
    d = Dispatch(*(t.to(device) for t in d[:5]))
    inputs = [t.to(device, dtype).requires_grad_() for t in tensors] + [weight.to(device).requires_grad_()]
    with guard:
        y = _layer(*inputs, d, fused)
        grads = torch.autograd.grad(y.float().square().sum() if dtype != torch.float64 else y.square().sum(), inputs)
    return [t.cpu() for t in (y, *grads)]


@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize(("hidden", "width"), [(64, 128), (60, 100), (13, 67)])
@pytest.mark.parametrize("fused", [False, True])
def test_bf16_layer_equals_float64(name, hidden, width, fused, poison):
    routing, tensors, weight = _case(name, hidden, width, torch.bfloat16)
    truth = _run(routing, tensors, weight.double(), "cpu", torch.float64, fused, contextlib.nullcontext())
    got = _run(routing, tensors, weight, "cuda", torch.bfloat16, fused, no_sync())
    for value, expected in zip(got, truth, strict=True):
        assert relative_error(value, expected) < 0.02
    if name == "one_hot":
        assert (got[2][:-1] == 0).all() and (got[3][:-1] == 0).all()


@pytest.mark.parametrize("name", ROUTINGS)
def test_float32_layer_equals_float64(name):
    routing, tensors, weight = _case(name, 60, 100, torch.float32)
    truth = _run(routing, tensors, weight.double(), "cpu", torch.float64, True, contextlib.nullcontext())
    got = _run(routing, tensors, weight, "cuda", torch.float32, True, contextlib.nullcontext())
    for value, expected in zip(got, truth, strict=True):
        assert relative_error(value, expected) < 1e-5


def test_N2_ten_reruns_are_bit_identical():
    routing, tensors, weight = _case("zipf", 64, 128, torch.bfloat16, num_tokens=2000)
    runs = [_run(routing, tensors, weight, "cuda", torch.bfloat16, False, contextlib.nullcontext()) for _ in range(10)]
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(run, runs[0], strict=True))


@pytest.mark.parametrize("name", ROUTINGS)
def test_bookkeeping_equals_the_cpus(name, poison):
    routing = ROUTINGS[name](67, 5, 2)
    moved = Routing(
        routing.token.cuda(),
        routing.expert.cuda(),
        routing.weight.cuda(),
        67,
        5,
        metrics={"tokens_per_expert": routing.metrics["tokens_per_expert"].cuda()},
    )
    with no_sync():
        d = build_dispatch(moved)
        kept = apply_capacity(moved, capacity_of("tutel", -0.5, 2, 67, 5, moved.metrics["tokens_per_expert"]))
    for a, b in zip(d[:5], build_dispatch(routing)[:5], strict=True):
        assert torch.equal(a.cpu(), b)
    expected = apply_capacity(routing, capacity_of("tutel", -0.5, 2, 67, 5, routing.metrics["tokens_per_expert"]))
    assert torch.equal(kept.expert.cpu(), expected.expert)


def test_topk_breaks_ties_as_the_cpu_does():
    logits = torch.randint(0, 4, (500, 16)).float()
    on_device = logits.cuda()
    with no_sync():
        out = route_topk(on_device, RouterOptions(5))
    assert torch.equal(out.expert.cpu(), route_topk(logits, RouterOptions(5)).expert)
