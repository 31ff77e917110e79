"""Grouped products, expert biases and the recomputing down-projection, against a float64 loop over the experts."""

import pytest
import torch
from torch.autograd import gradcheck

from megablocks.ops.activation import activate, activation_ref
from megablocks.ops.activation_table import ACTIVATIONS, GATED, Activation
from megablocks.ops.fused.down import activate_and_project
from megablocks.ops.grouped.bias import add_expert_bias
from megablocks.ops.grouped.grouped_mm import grouped_mm, grouped_mm_ref
from megablocks.testing.oracle import relative_error
from megablocks.testing.tolerances import assert_as_exact_as

COUNTS = {
    "even": [4, 4, 4],
    "empty_first": [0, 5, 2],
    "empty_middle": [3, 0, 4],
    "one_expert": [7],
    "all_to_last": [0, 0, 0, 6],
    "odd": [13, 1, 67],
    "no_rows": [0, 0],
}
NAN = float("nan")


def offsets_of(counts):
    return torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)


def loop(x, w, offsets):
    """(valid rows, N)"""
    bounds = offsets.tolist()
    return torch.cat([x[a:b] @ w[e] for e, (a, b) in enumerate(zip(bounds, bounds[1:], strict=False))])


def case(counts, k=5, n=3, spare=2, dtype=torch.float64, seed=0):
    """x with `spare` unused rows that hold NaN, w, offsets and a gradient that is NaN there too."""
    torch.manual_seed(seed)
    offsets = offsets_of(counts)
    used = int(offsets[-1])
    x, grad = (torch.randn(used + spare, width, dtype=torch.float64).to(dtype) for width in (k, n))
    x[used:], grad[used:] = NAN, NAN
    w = torch.randn(len(counts), k, n, dtype=torch.float64).to(dtype)
    return x.requires_grad_(), w.requires_grad_(), offsets, grad, used


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_grouped_mm_equals_the_loop(name, dtype, poison):
    x, w, offsets, grad, used = case(COUNTS[name], dtype=dtype)
    y = grouped_mm(x, w, offsets)
    dx, dw = torch.autograd.grad(y, (x, w), grad)
    wide_x, wide_w = (t.detach().double().requires_grad_() for t in (x, w))
    truth = loop(wide_x, wide_w, offsets)
    true_dx, true_dw = torch.autograd.grad(truth, (wide_x, wide_w), grad[:used].double())
    bound = 4 * torch.finfo(dtype).eps
    assert y.dtype == dx.dtype == dw.dtype == dtype
    assert relative_error(y[:used], truth) < bound
    assert relative_error(dx[:used], true_dx[:used]) < bound
    assert relative_error(dw, true_dw) < bound


def test_empty_expert_has_exactly_zero_gradient(poison):
    x, w, offsets, grad, _ = case([3, 0, 4])
    grouped_mm(x, w, offsets).backward(grad)
    assert torch.equal(w.grad[1], torch.zeros_like(w[1]))
    assert w.grad.isfinite().all()


def test_gradcheck_of_the_ops():
    x, w, offsets, _, _ = case([3, 0, 4], spare=0)
    assert gradcheck(lambda x, w: grouped_mm(x, w, offsets), (x, w))
    bias = torch.randn(3, w.shape[2], dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda x, w, b: grouped_mm(x, w, offsets, b), (x, w, bias))
    bias = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda x, b: add_expert_bias(x, b, offsets), (x, bias))


def test_transposed_weight_gets_a_gradient_in_its_own_layout():
    x, _, offsets, grad, used = case([3, 0, 4], spare=0)
    parameter = torch.randn(3 * 3, 5, dtype=torch.float64, requires_grad=True)  # (E·N, K)
    view = parameter.view(3, 3, 5).transpose(1, 2)
    y = grouped_mm(x, view, offsets)
    assert torch.equal(y, loop(x, view, offsets))
    layouts = []
    view.register_hook(lambda g: layouts.append(g.stride()))
    y.backward(grad)
    assert layouts == [view.stride()]  # so the parameter takes it without a copy
    expected = torch.autograd.grad(loop(x, view, offsets), (parameter,), grad)[0]
    assert torch.allclose(parameter.grad, expected, atol=1e-12)


def test_R8_strides(poison):
    x, w, offsets, _, used = case([3, 0, 4], spare=0)
    x_t = x.detach().t().contiguous().t().requires_grad_()
    w_t = w.detach().permute(2, 0, 1).contiguous().permute(1, 2, 0).requires_grad_()
    assert not x_t.is_contiguous() and not w_t.is_contiguous()
    grads = []
    for a, b, grad in ((x, w, torch.ones(7, 3).double()), (x_t, w_t, torch.ones(1, 1).double().expand(7, 3))):
        before = grad.clone()
        y = grouped_mm(a, b, offsets)
        grads.append((y, *torch.autograd.grad(y, (a, b), grad)))
        assert torch.equal(grad, before)
    for a, b in zip(*grads, strict=True):
        assert torch.allclose(a, b, atol=1e-12)


def test_frozen_inputs_skip_their_gradient():
    x, w, offsets, grad, _ = case([3, 0, 4], spare=0)
    for frozen, live in ((x, w), (w, x)):
        frozen.requires_grad_(False)
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: kept.append(t.data_ptr()) or t, lambda t: t):
            y = grouped_mm(x, w, offsets)
        assert live.data_ptr() not in kept  # an operand is kept for the other's gradient alone
        y.backward(grad)
        assert live.grad is not None and frozen.grad is None
        frozen.requires_grad_(True)
        live.grad = None


def test_inputs_and_gradients_stay_as_they_were():
    x, w, offsets, grad, _ = case([3, 0, 4], spare=0)
    tensors = (x, w, offsets, grad)
    before = [t.detach().clone() for t in tensors]
    y = grouped_mm(x, w, offsets)
    y.backward(grad, retain_graph=True)
    first = x.grad.clone()
    y.backward(grad)
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))
    assert torch.equal(x.grad, 2 * first)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_N1_grouped_mm_is_as_exact_as_torch(dtype, poison):
    x, w, offsets, grad, used = case([33, 0, 100], k=64, n=60, spare=0, dtype=dtype)
    plain = loop(x, w, offsets)
    plain_grads = torch.autograd.grad(plain, (x, w), grad)
    wide_x, wide_w = (t.detach().double().requires_grad_() for t in (x, w))
    truth = loop(wide_x, wide_w, offsets)
    true_grads = torch.autograd.grad(truth, (wide_x, wide_w), grad.double())
    y = grouped_mm(x, w, offsets)
    grads = torch.autograd.grad(y, (x, w), grad)
    for got, other, expected in zip((y, *grads), (plain, *plain_grads), (truth, *true_grads), strict=True):
        assert_as_exact_as(got, other, expected)


def test_autocast_casts_both_operands():
    x, w, offsets, _, _ = case([3, 4], spare=0, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = grouped_mm(x, w, offsets)
        z = activate_and_project(x, None, w, offsets, Activation("relu"))
    assert y.dtype == z.dtype == torch.bfloat16
    y.float().sum().backward()
    assert x.grad.dtype == w.grad.dtype == torch.float32
    assert relative_error(y, loop(x.double(), w.double(), offsets)) < 0.02
    x, w, offsets, _, _ = case([3, 4], spare=0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert grouped_mm(x, w, offsets).dtype == torch.float64


def test_bad_operands_are_named():
    x, w, offsets = torch.ones(4, 5), torch.ones(2, 5, 3), offsets_of([2, 2])
    with pytest.raises(ValueError, match=r"^x \(4, 4\) and w \(2, 5, 3\): must be \(R, K\) and \(E, K, N\)"):
        grouped_mm(x[:, :4], w, offsets)
    with pytest.raises(ValueError, match="^w is torch.float64, must be torch.float32"):
        grouped_mm(x, w.double(), offsets)
    with pytest.raises(ValueError, match=r"^offsets is \(3,\) torch.int64: must be \(3,\) torch.int32"):
        grouped_mm(x, w, offsets.long())
    with pytest.raises(ValueError, match=r"^bias is \(2, 5\): must be \(E, N\), \(2, 3\)"):
        grouped_mm(x, w, offsets, torch.ones(2, 5))
    with pytest.raises(ValueError, match=r"^rows \(4, 5\), bias \(2, 3\), offsets \(3,\)"):
        add_expert_bias(x, torch.ones(2, 3), offsets)
    for dtype in (torch.int64, torch.float32):
        with pytest.raises(ValueError, match=f"^offsets is {dtype}: must be torch.int32"):
            add_expert_bias(x, torch.ones(2, 5), offsets.to(dtype))


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_expert_bias_equals_the_loop(name, dtype, poison):
    x, _, offsets, _, used = case(COUNTS[name], dtype=dtype)
    bias = torch.randn(len(COUNTS[name]), 5, dtype=torch.float64).to(dtype).requires_grad_()
    grad = torch.randn(x.shape, dtype=torch.float64).to(dtype)
    grad[used:] = NAN
    y = add_expert_bias(x, bias, offsets)
    dx, d_bias = torch.autograd.grad(y, (x, bias), grad)
    counts = torch.tensor(COUNTS[name])
    assert torch.equal(y[:used], x[:used] + bias.repeat_interleave(counts, 0))
    assert torch.equal(dx[:used], grad[:used])
    expected = torch.stack([part.double().sum(0) for part in grad[:used].split(COUNTS[name])])
    assert relative_error(d_bias, expected) < 2 * torch.finfo(dtype).eps


def test_bias_takes_a_stride_zero_gradient():
    x, _, offsets, _, _ = case([3, 0, 4], spare=0)
    bias = torch.zeros(3, 5, dtype=torch.float64, requires_grad=True)
    add_expert_bias(x, bias, offsets).sum().backward()
    assert bias.grad[:, 0].tolist() == [3.0, 0.0, 4.0]


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("transposed", [False, True])
def test_N10_activate_and_project_equals_its_parts(name, transposed, poison):
    z, w, offsets, grad, used = case([3, 0, 4])
    g = torch.randn_like(z).requires_grad_() if name in GATED else None
    if transposed:
        w = w.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    inputs = [z, w] + ([g] if g is not None else [])
    whole = activate_and_project(z, g, w, offsets, Activation(name))
    parts = grouped_mm(activate(z, g, Activation(name)), w, offsets)
    assert torch.equal(whole[:used], parts[:used])
    with torch.no_grad():
        assert torch.equal(whole[:used], grouped_mm_ref(activation_ref(z, g, Activation(name)), w, offsets)[:used])
    got, expected = (torch.autograd.grad(y, inputs, grad) for y in (whole, parts))
    for i, (a, b) in enumerate(zip(got, expected, strict=True)):
        assert torch.equal(a, b) if i == 1 else torch.equal(a[:used], b[:used])
    assert got[1].stride() == w.stride()


def test_activate_and_project_keeps_no_activation():
    z, w, offsets, _, _ = case([3, 4], spare=0)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.data_ptr()) or t, lambda t: t):
        activate_and_project(z, None, w, offsets, Activation("gelu"))
    assert sorted(kept) == sorted(t.data_ptr() for t in (z, w, offsets))


@pytest.mark.parametrize("frozen", ["pre", "w"])
def test_activate_and_project_with_one_side_frozen(frozen):
    z, w, offsets, grad, _ = case([3, 4], spare=0)
    expected = torch.autograd.grad(activate_and_project(z, None, w, offsets, Activation("silu")), (z, w), grad)
    (z if frozen == "pre" else w).requires_grad_(False)
    y = activate_and_project(z, None, w, offsets, Activation("silu"))
    live = w if frozen == "pre" else z
    (got,) = torch.autograd.grad(y, (live,), grad)
    assert torch.equal(got, expected[1] if frozen == "pre" else expected[0])
