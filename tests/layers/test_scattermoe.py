"""ScatterMoE's modules under its names: the formula a token at a time, its state dicts, any leading sizes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megablocks.layers.scattermoe import GLUMLP, MLP, ParallelExperts, flatten_sort_count
from megablocks.testing.oracle import relative_error

T, E, K, IN, WIDTH = 11, 4, 2, 10, 6


def by_token(m: MLP, x: Tensor, p: Tensor, ids: Tensor) -> Tensor:
    def linear(experts: ParallelExperts, v: Tensor, e: int) -> Tensor:
        return F.linear(v, experts.weight[e], None if experts.bias is None else experts.bias[e])

    def expert(v: Tensor, e: int) -> Tensor:
        h = linear(m.experts, v, e)
        if isinstance(m, GLUMLP):
            up, gate = h.split(WIDTH)
            h = m.activation(gate) * up
        elif m.activation is not None:
            h = m.activation(h)
        return linear(m.output_experts, h, e)

    return torch.stack([sum(p[t, j] * expert(x[t], int(ids[t, j])) for j in range(K)) for t in range(T)])


def build(kind: type[MLP], bias: bool, **options) -> MLP:
    torch.manual_seed(0)
    m = kind(IN, WIDTH, E, K, bias=bias, **options).double()
    with torch.no_grad():
        for p in m.parameters():
            p.normal_()
    return m


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind,options", [(MLP, {"activation": nn.GELU()}), (MLP, {}), (GLUMLP, {})], ids=str)
def test_equals_its_formula(kind, options, bias):
    m = build(kind, bias, **options)
    x = torch.randn(T, IN, dtype=torch.float64, requires_grad=True)
    p, ids = torch.randn(T, E, dtype=torch.float64).softmax(1).topk(K)
    p = p.detach().requires_grad_()
    y, expected = m(x, p, ids), by_token(m, x, p, ids)
    assert relative_error(y, expected) < 1e-12
    leaves = [x, p, *m.parameters()]
    for a, b in zip(
        torch.autograd.grad(y.sin().sum(), leaves), torch.autograd.grad(expected.sin().sum(), leaves), strict=True
    ):
        assert relative_error(a, b) < 1e-10


def test_takes_any_leading_sizes():
    m = build(GLUMLP, False)
    x, ids = torch.randn(3, 4, IN, dtype=torch.float64), torch.randint(E, (12, K))
    p = torch.rand(12, K, dtype=torch.float64)
    assert torch.equal(m(x, p, ids), m(x.view(12, IN), p, ids).view(3, 4, IN))


def test_parameters_have_its_names_and_shapes():
    m = GLUMLP(IN, WIDTH, E, K, bias=True)
    assert {n: tuple(p.shape) for n, p in m.state_dict().items()} == {
        "experts.weight": (E, 2 * WIDTH, IN),
        "experts.bias": (E, 2 * WIDTH),
        "output_experts.weight": (E, IN, WIDTH),
        "output_experts.bias": (E, IN),
    }
    assert (m.experts.bias == 0).all() and 0.01 < m.experts.weight.std() < 0.03
    assert MLP(IN, WIDTH, 2, 5).top_k == 2


def test_parallel_experts_scattered_to_scattered():
    experts, x, ids = ParallelExperts(E, IN, WIDTH, bias=True), torch.randn(T, IN), torch.randint(E, (T, K))
    with torch.no_grad():
        experts.bias.normal_()
    y = experts(x, K, *flatten_sort_count(ids, E))
    expected = [F.linear(x[t], experts.weight[e], experts.bias[e]) for t in range(T) for e in ids[t].tolist()]
    assert torch.allclose(y, torch.stack(expected), atol=1e-6)
