"""The movement functions of megablocks 0.10 against loops over their index arrays, values and gradients."""

import pytest
import torch

from megablocks import ops
from megablocks.testing.poison import poisoned_empty

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SIZES = [(1, 5, 1, 1), (13, 7, 3, 1), (13, 7, 3, 2), (10, 60, 4, 4), (6, 1, 9, 3), (0, 4, 2, 2)]


def _routed(tokens, experts, top_k, device, seed=0):
    """0.10's arrays for random experts, the last expert without a token where there are several."""
    used = experts - 1 if experts > 1 else 1
    generator = torch.Generator().manual_seed(seed)
    top_experts = torch.randint(0, used, (tokens * top_k,), generator=generator).int().to(device)
    bin_ids, indices = ops.sort(top_experts)
    counts = ops.histogram(top_experts, experts)
    padded_bins = ops.inclusive_cumsum(ops.round_up(counts, 8), 0)
    return indices, bin_ids, ops.inclusive_cumsum(counts, 0), padded_bins


def _row_of(p, bin_ids, bins, padded_bins):
    """The padded row of sorted place p, as the text of 0.10 counts it."""
    e = int(bin_ids[p])
    first, padded_first = (int(b[e - 1]) if e else 0 for b in (bins, padded_bins))
    return padded_first + p - first


def _draw(*shape, device, dtype=torch.float32):
    return torch.randn(*shape, device=device).to(dtype)


def _loop_gather(x, rows, indices, top_k, num_rows):
    out = torch.zeros(num_rows, x.shape[1], dtype=torch.float64, device=x.device)
    for p, row in enumerate(rows):
        if row is not None:
            out = out.index_add(0, torch.tensor([row], device=x.device), x[int(indices[p]) // top_k].double()[None])
    return out


def _loop_scatter(x, rows, indices, weights, top_k, tokens):
    out = torch.zeros(tokens, x.shape[1], dtype=torch.float64, device=x.device)
    for p, row in enumerate(rows):
        if row is not None:
            pair = int(indices[p])
            scaled = x[row].double() if weights is None else x[row].double() * weights[pair].double()
            out = out.index_add(0, torch.tensor([pair // top_k], device=x.device), scaled[None])
    return out


def _compare(function, loop, inputs, tolerance=1e-5):
    """Values and the gradient of each input; what is never written would show as NaN."""
    inputs = [None if t is None else t.detach().requires_grad_() for t in inputs]
    wide = [None if t is None else t.detach().double().requires_grad_() for t in inputs]
    with poisoned_empty():
        out = function(*inputs)
        grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).to(out)
        out.backward(grad)
    expected = loop(*wide)
    if expected.requires_grad:
        expected.backward(grad.double())
    assert out.dtype == inputs[0].dtype
    assert torch.allclose(out.double(), expected, atol=tolerance, rtol=tolerance)
    for t, w in zip(inputs, wide, strict=True):
        if t is not None:
            wanted = torch.zeros_like(w) if w.grad is None else w.grad
            assert t.grad.dtype == t.dtype and torch.allclose(t.grad.double(), wanted, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tokens, hidden, experts, top_k", SIZES)
def test_gather_and_scatter(tokens, hidden, experts, top_k, device):
    indices, bin_ids, bins, _ = _routed(tokens, experts, top_k, device)
    rows = list(range(tokens * top_k))
    _compare(
        lambda x: ops.gather(x, indices, bin_ids, bins, top_k),
        lambda x: _loop_gather(x, rows, indices, top_k, tokens * top_k),
        [_draw(tokens, hidden, device=device)],
    )
    for weights in (_draw(tokens * top_k, device=device), None):
        _compare(
            lambda x, w: ops.scatter(x, indices, bin_ids, w, bins, top_k),
            lambda x, w: _loop_scatter(x, rows, indices, w, top_k, tokens),
            [_draw(tokens * top_k, hidden, device=device), weights],
        )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tokens, hidden, experts, top_k", SIZES)
def test_padded_gather_and_scatter(tokens, hidden, experts, top_k, device):
    indices, bin_ids, bins, padded_bins = _routed(tokens, experts, top_k, device)
    rows = [_row_of(p, bin_ids, bins, padded_bins) for p in range(tokens * top_k)]
    num_rows = int(padded_bins[-1])
    _compare(
        lambda x: ops.padded_gather(x, indices, bin_ids, bins, padded_bins, top_k),
        lambda x: _loop_gather(x, rows, indices, top_k, num_rows),
        [_draw(tokens, hidden, device=device)],
    )
    padding = [row for row in range(num_rows) if row not in rows]
    out = ops.padded_gather(_draw(tokens, hidden, device=device), indices, bin_ids, bins, padded_bins, top_k)
    assert (out[padding] == 0).all()
    for weights in (_draw(tokens * top_k, device=device), None):
        _compare(
            lambda x, w: ops.padded_scatter(x, indices, bin_ids, w, bins, padded_bins, top_k),
            lambda x, w: _loop_scatter(x, rows, indices, w, top_k, tokens),
            [_draw(num_rows, hidden, device=device), weights],
        )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("capacity", [0, 1, 3, 50])
@pytest.mark.parametrize("tokens, hidden, experts, top_k", SIZES)
def test_binned_gather_and_scatter(tokens, hidden, experts, top_k, capacity, device):
    indices, bin_ids, bins, _ = _routed(tokens, experts, top_k, device)
    rows = []
    for p in range(tokens * top_k):
        e = int(bin_ids[p])
        place = p - (int(bins[e - 1]) if e else 0)
        rows.append(e * capacity + place if place < capacity else None)
    shape = (experts, capacity, hidden)
    _compare(
        lambda x: ops.binned_gather(x, indices, bins, capacity, top_k),
        lambda x: _loop_gather(x, rows, indices, top_k, experts * capacity).view(shape),
        [_draw(tokens, hidden, device=device)],
    )
    for weights in (_draw(tokens * top_k, device=device), None):
        _compare(
            lambda x, w: ops.binned_scatter(x, indices, w, bins, top_k),
            lambda x, w: _loop_scatter(x.flatten(0, 1), rows, indices, w, top_k, tokens),
            [_draw(*shape, device=device), weights],
        )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_are_rounded_where_0_10_does(dtype, device):
    """Each weighted row, and their sum; the gradients are those of the sum in float64, rounded once."""
    indices, bin_ids, bins, padded_bins = _routed(40, 3, 2, device)
    x = _draw(int(padded_bins[-1]), 33, device=device, dtype=dtype).requires_grad_()
    w = _draw(80, device=device, dtype=dtype).requires_grad_()
    row = torch.tensor([_row_of(p, bin_ids, bins, padded_bins) for p in range(80)], device=device)
    row_of_pair = torch.empty(80, dtype=torch.long, device=device).scatter_(0, indices.long(), row)
    weighted = x[row_of_pair] * w.unsqueeze(1)
    assert weighted.dtype == dtype
    out = ops.padded_scatter(x, indices, bin_ids, w, bins, padded_bins, 2)
    assert torch.equal(out, weighted.view(40, 2, 33).sum(1))

    grad = torch.randn_like(out)
    out.backward(grad)
    spread = grad.double().repeat_interleave(2, 0)
    dx = torch.zeros_like(x, dtype=torch.float64).index_add_(0, row_of_pair, spread * w.double().unsqueeze(1))
    assert torch.equal(x.grad, dx.to(dtype))
    dw = (spread * x[row_of_pair].double()).sum(1)
    assert torch.allclose(w.grad.double(), dw, rtol=torch.finfo(dtype).eps, atol=1e-3)


def test_half_types_of_no_tokens():
    """Bins have places where no token has a pair."""
    x = torch.ones(3, 4, 8, dtype=torch.bfloat16, requires_grad=True)
    indices, weights = torch.zeros(0, dtype=torch.int32), torch.zeros(0, requires_grad=True)
    out = ops.binned_scatter(x, indices, weights, torch.zeros(3, dtype=torch.int32), 2)
    assert out.shape == (0, 8)
    out.sum().backward()
    assert bool((x.grad == 0).all()) and weights.grad.shape == (0,)


def test_autocast_moves_its_own_dtype():
    indices, bin_ids, bins, padded_bins = _routed(6, 3, 2, "cpu")
    x, weights = torch.randn(6, 4), torch.rand(12)
    with torch.autocast("cpu", torch.bfloat16):
        rows = ops.padded_gather(x, indices, bin_ids, bins, padded_bins, 2)
        out = ops.padded_scatter(rows.float(), indices, bin_ids, weights, bins, padded_bins, 2)
    assert rows.dtype == out.dtype == torch.bfloat16


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda a: ops.gather(torch.zeros(5, 4), *a, 2), r"x is \(5, 4\): must be \(T, H\) with T=6"),
        (lambda a: ops.gather(torch.zeros(6, 4), a[0], a[1][1:], a[2], 2), r"bin_ids is \(11,\): must be \(12,\)"),
        (lambda a: ops.gather(torch.zeros(6, 4), *a, 5), "top_k=5: must divide the 12 indices"),
        (lambda a: ops.scatter(torch.zeros(12, 4), a[0], a[1], torch.zeros(6), a[2], 2), r"weights is \(6,\)"),
        (lambda a: ops.padded_gather(torch.zeros(6, 4), *a, a[2][1:], 2), r"padded_bins is \(2,\): must be \(3,\)"),
        (lambda a: ops.binned_gather(torch.zeros(6, 4), a[0], a[2], -1, 2), "capacity=-1: must be >= 0"),
        (lambda a: ops.binned_scatter(torch.zeros(2, 3, 4), a[0], None, a[2], 2), r"must be \(E, C, H\) with E=3"),
    ],
)
def test_bad_input_is_one_line(call, message):
    with pytest.raises(ValueError, match=message) as error:
        call(_routed(6, 3, 2, "cpu")[:3])
    assert "\n" not in str(error.value)
