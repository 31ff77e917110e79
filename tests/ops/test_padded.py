"""Padded and binned movement against loops over the pairs, on the references and on the kernels."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.autograd import gradcheck

from megablocks.ops.permute.rows import combine, gather
from megablocks.ops.routing.dispatch import bin_dispatch, build_dispatch, make_routing, pad_dispatch, pad_indices
from megablocks.testing.routings import ROUTINGS
from megablocks.testing.tolerances import assert_as_exact_as

NAN = float("nan")
E = 3


def loads(routing):
    return [int((routing.expert == e).sum()) for e in range(routing.num_experts)]


def offsets_of(counts):
    return torch.tensor([0, *counts], dtype=torch.int32).cumsum(0).int()


def rounded(routing, block):
    return offsets_of([-(-count // block) * block for count in loads(routing)])


def placed(routing, padded_offsets, num_rows):
    """{row: pair}, in the order of the pairs within an expert, for those that fit."""
    rows, next_row = {}, padded_offsets.tolist()
    for r, e in enumerate(routing.expert.tolist()):
        if 0 <= e < routing.num_experts:
            if next_row[e] < min(int(padded_offsets[e + 1]), num_rows):
                rows[next_row[e]] = r
            next_row[e] += 1
    return rows


@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("num_tokens", [0, 1, 13])
@pytest.mark.parametrize("fit", ["round", "short", "tail"])
def test_padded_equals_the_loop(name, num_tokens, fit, poison):
    routing = ROUTINGS[name](num_tokens, E, 2)
    d, offsets = build_dispatch(routing), rounded(routing, 4)
    if fit == "short":  # room for fewer rows than there are
        offsets = offsets_of([2] * E)
    num_rows = int(offsets[-1]) + (3 if fit == "tail" else 0)
    p, rows_of = pad_dispatch(d, offsets, num_rows), placed(routing, offsets, num_rows)
    x = torch.randn(num_tokens, 5, dtype=torch.float64)
    expected = torch.zeros(num_rows, 5, dtype=torch.float64)
    for row, pair in rows_of.items():
        expected[row] = x[routing.token[pair]]
    rows = gather(x, p)
    assert torch.equal(rows, expected)
    assert p.pair.tolist() == [rows_of.get(row, -1) for row in range(num_rows)]

    dirty = rows.sin()
    dirty[p.pair < 0] = NAN  # padding is never read
    for weight in (None, routing.weight):
        y = torch.zeros(num_tokens, 5, dtype=torch.float64)
        for row, pair in sorted(rows_of.items()):
            y[routing.token[pair]] += dirty[row] * (1 if weight is None else weight[pair])
        assert torch.allclose(combine(dirty, weight, p), y, atol=1e-12)


@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("block", [1, 4])
def test_gradients(name, block):
    routing = ROUTINGS[name](7, E, 2)
    d, offsets = build_dispatch(routing), rounded(routing, block)
    p = pad_dispatch(d, offsets, int(offsets[-1]) + 2)
    x = torch.randn(7, 4, dtype=torch.float64, requires_grad=True)
    weight = routing.weight.clone().requires_grad_()
    assert gradcheck(lambda x, w: combine(gather(x, p).sin(), w, p), (x, weight))
    assert gradcheck(lambda x: combine(gather(x, p).cos(), None, p), (x,))
    short = bin_dispatch(d, 2)  # dropped pairs have no gradient
    assert gradcheck(lambda x, w: combine(gather(x, short).sin(), w, short), (x, weight))


def test_R9_padding_has_zero_gradient_and_leaks_none(poison):
    routing = ROUTINGS["ragged"](9, E, 2, seed=3)
    d, offsets = build_dispatch(routing), rounded(routing, 8)
    p = pad_dispatch(d, offsets, int(offsets[-1]) + 5)
    padding = p.pair < 0
    assert padding.any()
    x = torch.randn(9, 4, requires_grad=True)
    grad = torch.randn(padding.shape[0], 4)
    grad[padding] = NAN
    gather(x, p).backward(grad)
    assert x.grad.isfinite().all()
    for weight in (routing.weight.float().requires_grad_(), None):
        rows = torch.randn(padding.shape[0], 4)
        rows[padding] = NAN
        rows.requires_grad_()
        combine(rows, weight, p).sum().backward()
        assert (rows.grad[padding] == 0).all()
        assert rows.grad.isfinite().all()
    padded = routing.weight.float().requires_grad_()
    combine(rows.detach(), padded, p).sum().backward()
    assert padded.grad.isfinite().all()
    outside = (routing.expert < 0) | (routing.expert >= E)
    assert (padded.grad[outside] == 0).all()


def test_R8_strides(poison):
    routing = ROUTINGS["zipf"](6, E, 2)
    d, offsets = build_dispatch(routing), rounded(routing, 4)
    p = pad_dispatch(d, offsets, int(offsets[-1]))
    x = torch.randn(4, 6).t()
    assert torch.equal(gather(x, p), gather(x.contiguous(), p))
    rows = torch.randn(p.pair.shape[0], 8)[:, ::2].requires_grad_()
    weight = torch.randn(24)[::2].requires_grad_()
    y = combine(rows, weight, p)
    spread = torch.autograd.grad(y, (rows, weight), torch.ones(1, 1).expand(6, 4), retain_graph=True)
    plain = torch.autograd.grad(y, (rows, weight), torch.ones(6, 4))
    assert all(torch.equal(a, b) for a, b in zip(spread, plain, strict=True))


@pytest.mark.parametrize("name", ["balanced", "one_hot", "zipf"])
@pytest.mark.parametrize("kind", ["plain", "padded", "short", "binned"])
def test_plain_indices_equal_the_dispatchs(name, kind):
    """The arrays of megablocks 0.10, in which every pair is valid, give the same rows."""
    routing = ROUTINGS[name](9, E, 2)
    d = build_dispatch(routing)
    indices, bins = d.pair.long(), d.expert_offsets[1:].long()
    if kind == "binned":
        p, expected = pad_indices(indices, bins, 4, 2), bin_dispatch(d, 4)
    else:
        offsets = {"plain": d.expert_offsets, "padded": rounded(routing, 8), "short": offsets_of([5, 0, 3])}[kind]
        num_rows = int(offsets[-1])
        p = pad_indices(indices, bins, offsets[1:], 2, num_rows)
        expected = pad_dispatch(d, offsets, num_rows)
    assert torch.equal(p.pair, expected.pair)
    assert torch.equal(p.gather, expected.gather)
    x = torch.randn(9, 4)
    assert torch.equal(gather(x, p), gather(x, expected))
    rows = torch.randn(p.pair.shape[0], 4)
    weight = torch.randn(18)
    assert torch.allclose(combine(rows, weight, p), combine(rows, weight, expected), atol=1e-6)
    if kind == "plain":
        assert torch.equal(gather(x, p), gather(x, d))
        assert torch.allclose(combine(rows, weight, p), combine(rows, weight, d), atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_N1_padded_combine_is_as_exact_as_torch(dtype, poison):
    routing = ROUTINGS["zipf"](40, 5, 3)
    offsets = rounded(routing, 16)
    p = pad_dispatch(build_dispatch(routing), offsets, int(offsets[-1]))
    used = p.pair >= 0
    rows, weight = torch.randn(p.pair.shape[0], 16).to(dtype), routing.weight.float()
    token, scale = p.gather[used].long(), weight[p.pair[used].long()]
    plain = torch.zeros(40, 16, dtype=dtype).index_add(0, token, rows[used] * scale.to(dtype).unsqueeze(1))
    truth = torch.zeros(40, 16, dtype=torch.float64)
    truth.index_add_(0, token, rows[used].double() * scale.double().unsqueeze(1))
    assert_as_exact_as(combine(rows, weight, p), plain, truth)


def test_N3_nan_token_stays_in_that_token():
    routing = make_routing(torch.tensor([[0, 1], [1, 0], [0, 0]]), torch.ones(3, 2), 2)
    d = build_dispatch(routing)
    p = pad_dispatch(d, rounded(routing, 8), 16)
    x = torch.randn(3, 4)
    x[1] = NAN
    y = combine(gather(x.requires_grad_(), p), routing.weight, p)
    grad = torch.randn(3, 4)
    grad[1] = NAN
    y.backward(grad)
    assert y[1].isnan().all() and x.grad[1].isnan().all()
    assert y[[0, 2]].isfinite().all() and x.grad[[0, 2]].isfinite().all()


def test_R7_repeated_and_missing_experts():
    routing = make_routing(torch.tensor([[1, 1], [-1, 0]]), torch.tensor([[0.25, 0.5], [9.0, 2.0]]), 2)
    p = pad_dispatch(build_dispatch(routing), offsets_of([4, 4]), 8)
    assert p.gather.tolist() == [1, -1, -1, -1, 0, 0, -1, -1]
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True)
    y = combine(gather(x, p), routing.weight, p)
    assert y.tolist() == [[0.75, 1.5], [6.0, 8.0]]
    y.sum().backward()
    assert x.grad.tolist() == [[0.75, 0.75], [2.0, 2.0]]


@pytest.mark.parametrize("frozen", [None, "x", "weight"])
def test_N5_retain_graph_twice_and_frozen_inputs(frozen):
    routing = ROUTINGS["ragged"](9, E, 2)
    p = bin_dispatch(build_dispatch(routing), 4)
    x = torch.randn(9, 4, requires_grad=frozen != "x")
    weight = routing.weight.float().requires_grad_(frozen != "weight")
    loss = combine(gather(x, p).sin(), weight, p).square().sum()
    wanted = [leaf for leaf in (x, weight) if leaf.requires_grad]
    first, second = (torch.autograd.grad(loss, wanted, retain_graph=True) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b) and a.abs().sum() > 0


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64])
def test_gathered_rows_have_the_dtype_of_x(dtype):
    d = build_dispatch(ROUTINGS["zipf"](7, E, 2))
    x = torch.ones(7, 5, dtype=dtype)
    for dispatch in (d, bin_dispatch(d, 4)):
        rows = gather(x, dispatch)
        assert rows.dtype == dtype and int(rows[:, 0].sum()) == int((dispatch.pair >= 0).sum())


def test_bad_shapes_are_named():
    d = build_dispatch(ROUTINGS["balanced"](4, E, 2))
    p = bin_dispatch(d, 4)
    with pytest.raises(ValueError, match=r"^padded_offsets is \(3,\): must be \(4,\)"):
        pad_dispatch(d, torch.zeros(3, dtype=torch.int32), 4)
    with pytest.raises(ValueError, match="^num_rows=-1: must be >= 0"):
        pad_dispatch(d, d.expert_offsets, -1)
    with pytest.raises(ValueError, match="^capacity=-1: must be >= 0"):
        bin_dispatch(d, -1)
    with pytest.raises(ValueError, match=r"^x is \(5, 2\): must be \(T, H\) with T=4"):
        gather(torch.ones(5, 2), p)
    with pytest.raises(ValueError, match=r"^rows is \(8, 2\): must be \(N, H\) with N=12"):
        combine(torch.ones(8, 2), None, p)
    with pytest.raises(ValueError, match=r"^weight is \(9,\): must be \(8,\)"):
        combine(torch.ones(12, 2), torch.ones(9), p)
    with pytest.raises(ValueError, match="^top_k=3: must divide the 8 indices"):
        pad_indices(d.pair, d.expert_offsets[1:], 4, 3)
    with pytest.raises(ValueError, match=r"^padded_bins is \(2,\): must be \(3,\), as bins"):
        pad_indices(d.pair, d.expert_offsets[1:], d.pair[:2], 2, 8)
    with pytest.raises(ValueError, match="^num_rows=None: must be >= 0"):
        pad_indices(d.pair, d.expert_offsets[1:], d.expert_offsets[1:], 2)


def test_a_dropped_pair_counts_as_no_expert():
    routing = ROUTINGS["zipf"](8, E, 2)
    d = build_dispatch(routing)
    p = bin_dispatch(d, 3)
    kept = torch.full_like(routing.expert, -1)
    kept[p.pair[p.pair >= 0].long()] = routing.expert[p.pair[p.pair >= 0].long()]
    assert (kept < 0).any()
    small = build_dispatch(dataclasses.replace(routing, expert=kept))
    x = torch.randn(8, 4)
    got = combine(gather(x, p), routing.weight.float(), p)
    assert torch.allclose(got, combine(gather(x, small), routing.weight.float(), small), atol=1e-6)
