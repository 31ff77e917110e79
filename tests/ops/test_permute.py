"""gather and combine, also of bins, against loops over the pairs."""

import dataclasses

import pytest
import torch
from torch.autograd import gradcheck

from megablocks.ops.permute.rows import combine, gather
from megablocks.ops.routing.dispatch import bin_dispatch, build_dispatch, make_routing
from megablocks.testing.routings import ROUTINGS
from megablocks.testing.tolerances import assert_as_exact_as

NAN = float("nan")


def rows_of(routing):
    """[(token, pair)] a row, in the order of the rows."""
    valid = [r for r, e in enumerate(routing.expert.tolist()) if 0 <= e < routing.num_experts]
    by_expert = sorted(valid, key=lambda r: routing.expert[r].item())
    return [(int(routing.token[r]), r) for r in by_expert]


def combine_loop(rows, weight, routing):
    out = torch.zeros(routing.num_tokens, rows.shape[1], dtype=torch.float64)
    for row, (token, pair) in enumerate(rows_of(routing)):
        out[token] += rows[row].double() * (1 if weight is None else weight[pair].double())
    return out


@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("num_tokens", [0, 1, 13])
def test_gather_and_combine_equal_the_loop(name, num_tokens, poison):
    routing = ROUTINGS[name](num_tokens, 3, 2)
    d, pairs = build_dispatch(routing), rows_of(routing)
    x = torch.randn(num_tokens, 5)
    rows = gather(x, d)
    assert rows.shape == (routing.num_pairs, 5)
    assert torch.equal(rows[: len(pairs)], x[[t for t, _ in pairs]])
    for weight in (None, routing.weight.float()):
        y = combine(rows, weight, d)
        assert torch.allclose(y.double(), combine_loop(rows, weight, routing), atol=1e-6)


@pytest.mark.parametrize("name", ROUTINGS)
def test_gradients(name):
    routing = ROUTINGS[name](7, 3, 2)
    d = build_dispatch(routing)
    x = torch.randn(7, 4, dtype=torch.float64, requires_grad=True)
    weight = routing.weight.clone().requires_grad_()
    assert gradcheck(lambda x, w: combine(gather(x, d).sin(), w, d), (x, weight))
    assert gradcheck(lambda x: combine(gather(x, d).sin(), None, d), (x,))


@pytest.mark.parametrize("name", ["nobody", "ragged"])
@pytest.mark.parametrize("weighted", [True, False])
def test_unused_rows_leak_nothing(name, weighted, poison):
    routing = ROUTINGS[name](9, 3, 2, seed=3)
    d, used = build_dispatch(routing), len(rows_of(routing))
    assert used < routing.num_pairs
    clean = torch.randn(routing.num_pairs, 4, dtype=torch.float64)
    dirty = clean.clone()
    dirty[used:] = NAN
    results = []
    for rows in (clean, dirty):
        rows.requires_grad_()
        weight = routing.weight.clone().requires_grad_() if weighted else None
        y = combine(rows, weight, d)
        y.square().sum().backward()
        results.append((y, rows.grad[:used], weight.grad if weighted else y))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
    x = torch.randn(9, 4, requires_grad=True)
    grad = torch.randn(routing.num_pairs, 4)
    grad[used:] = NAN
    gather(x, d).backward(grad)
    assert x.grad.isfinite().all()


def test_unused_pairs_have_zero_weight_gradient():
    routing = make_routing(torch.tensor([[0, -1], [5, 1]]), torch.ones(2, 2), 2)
    weight = torch.ones(4, requires_grad=True)
    rows = torch.tensor([[1.0, 2.0], [3.0, 4.0], [7.0, 7.0], [7.0, 7.0]])
    combine(rows, weight, build_dispatch(routing)).sum().backward()
    assert weight.grad.tolist() == [3.0, 0.0, 0.0, 7.0]


def test_N3_nan_token_stays_in_that_token():
    routing = make_routing(torch.tensor([[0, 1], [1, 0], [0, 0]]), torch.ones(3, 2), 2)
    d = build_dispatch(routing)
    x = torch.randn(3, 4)
    x[1] = NAN
    x.requires_grad_()
    y = combine(gather(x, d), routing.weight, d)
    assert y[1].isnan().all()
    assert y[[0, 2]].isfinite().all()
    grad = torch.randn(3, 4)
    grad[1] = NAN
    y.backward(grad)
    assert x.grad[1].isnan().all()
    assert x.grad[[0, 2]].isfinite().all()


def test_R7_repeated_expert_counts_twice():
    routing = make_routing(torch.tensor([[1, 1], [-1, 0]]), torch.tensor([[0.25, 0.5], [9.0, 2.0]]), 2)
    d = build_dispatch(routing)
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True)
    y = combine(gather(x, d), routing.weight, d)
    assert y.tolist() == [[0.75, 1.5], [6.0, 8.0]]
    y.sum().backward()
    assert x.grad.tolist() == [[0.75, 0.75], [2.0, 2.0]]


def test_R8_strides(poison):
    routing = ROUTINGS["zipf"](6, 3, 2)
    d = build_dispatch(routing)
    x = torch.randn(4, 6).t()  # not contiguous
    assert torch.equal(gather(x, d), gather(x.contiguous(), d))
    rows = torch.randn(12, 8)[:, ::2].requires_grad_()
    weight = torch.randn(24)[::2].requires_grad_()
    y = combine(rows, weight, d)
    assert torch.equal(y, combine(rows.contiguous(), weight.contiguous(), d))
    grads = []
    for grad in (torch.ones(1, 1).expand(6, 4), torch.ones(6, 4)):  # strides 0 and ordinary
        before = grad.clone()
        grads.append(torch.autograd.grad(y, (rows, weight), grad, retain_graph=True))
        assert torch.equal(grad, before)
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    z = x.contiguous().requires_grad_()
    gather(z, d).backward(torch.ones(1, 1).expand(12, 4))
    assert torch.equal(z.grad, torch.full((6, 4), 2.0))


def test_frozen_inputs_keep_and_compute_nothing():
    routing = ROUTINGS["zipf"](6, 3, 2)
    d = build_dispatch(routing)
    rows, weight = torch.randn(12, 4, requires_grad=True), torch.randn(12)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.data_ptr()) or t, lambda t: t):
        y = combine(rows, weight, d)
    assert rows.data_ptr() not in kept  # only a weight's gradient needs them
    y.sum().backward()
    assert rows.grad is not None
    rows = rows.detach()
    weight.requires_grad_()
    combine(rows, weight, d).sum().backward()
    assert weight.grad is not None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_N1_combine_is_as_exact_as_torch(dtype, poison):
    routing = ROUTINGS["zipf"](40, 5, 3)
    d, pairs = build_dispatch(routing), rows_of(routing)
    rows, weight = torch.randn(120, 16).to(dtype), routing.weight.float()
    token, pair = torch.tensor(pairs).t()
    plain = torch.zeros(40, 16, dtype=dtype).index_add(0, token, rows * weight[pair].to(dtype).unsqueeze(1))
    assert_as_exact_as(combine(rows, weight, d), plain, combine_loop(rows, weight, routing))
    x = rows[:40].clone().requires_grad_()
    (dx,) = torch.autograd.grad(gather(x, d), (x,), rows)
    plain = torch.zeros(40, 16, dtype=dtype).index_add(0, token, rows)
    assert_as_exact_as(dx, plain, combine_loop(rows, None, routing))


def test_ten_backwards_are_bit_identical():
    routing = ROUTINGS["ragged"](50, 4, 3)
    d = build_dispatch(routing)
    x, weight = torch.randn(50, 8, requires_grad=True), routing.weight.float().requires_grad_()

    def run():
        return torch.autograd.grad(combine(gather(x, d), weight, d).sin().sum(), (x, weight))

    first = run()
    assert all(all(torch.equal(a, b) for a, b in zip(first, run(), strict=True)) for _ in range(10))


@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("capacity", [0, 1, 4, 40])
def test_binned_equals_the_loop(name, capacity, poison):
    routing = ROUTINGS[name](7, 3, 2)
    d = build_dispatch(routing)
    x = torch.randn(7, 4, dtype=torch.float64)
    expected = torch.zeros(3, capacity, 4, dtype=torch.float64)
    kept_pairs, places = [], [0, 0, 0]
    for token, pair in rows_of(routing):
        e = int(routing.expert[pair])
        if places[e] < capacity:
            expected[e, places[e]] = x[token]
            kept_pairs.append(pair)
        places[e] += 1
    p = bin_dispatch(d, capacity)
    bins = gather(x, p)
    assert torch.equal(bins.view(3, capacity, 4), expected)
    kept = torch.full_like(routing.expert, -1)
    kept[kept_pairs] = routing.expert[kept_pairs]
    small = build_dispatch(dataclasses.replace(routing, expert=kept))
    got = combine(bins.sin(), routing.weight, p)
    assert torch.allclose(got, combine(gather(x, small).sin(), routing.weight, small), atol=1e-12)


def test_binned_gradients():
    routing = ROUTINGS["ragged"](7, 3, 2)
    bins = bin_dispatch(build_dispatch(routing), 2)
    x = torch.randn(7, 4, dtype=torch.float64, requires_grad=True)
    weight = routing.weight.clone().requires_grad_()
    assert gradcheck(lambda x, w: combine(gather(x, bins).sin(), w, bins), (x, weight))


def test_bad_shapes_are_named():
    d = build_dispatch(ROUTINGS["balanced"](4, 3, 2))
    with pytest.raises(ValueError, match=r"^x is \(5, 2\): must be \(T, H\) with T=4"):
        gather(torch.ones(5, 2), d)
    with pytest.raises(ValueError, match=r"^rows is \(7, 2\): must be \(N, H\) with N=8"):
        combine(torch.ones(7, 2), None, d)
    with pytest.raises(ValueError, match=r"^weight is \(4, 2\): must be \(8,\)"):
        combine(torch.ones(8, 2), torch.ones(4, 2), d)
    with pytest.raises(ValueError, match="^weight is torch.int64: must be floating"):
        combine(torch.ones(8, 2), torch.ones(8, dtype=torch.int64), d)
    with pytest.raises(ValueError, match=r"^rows is \(2, 2\): must be \(N, H\) with N=3"):
        combine(torch.ones(2, 2), None, bin_dispatch(d, 1))
