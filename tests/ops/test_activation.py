"""Every activation against its textbook formula in float64, forward and backward."""

from functools import partial

import pytest
import torch
from torch.autograd import gradcheck

from megablocks.ops.activation import activate, activate_halves
from megablocks.ops.activation_table import ACTIVATIONS, GATED, Activation
from megablocks.testing.oracle import FORMULAS, relative_error
from megablocks.testing.tolerances import assert_as_exact_as

FORMS = [(name, form) for name in ACTIVATIONS for form in (("tanh", "none") if "ge" in name else ("tanh",))]


def formula(name, z, g, approximate):
    out = FORMULAS[GATED.get(name, name)](z, approximate)
    return out if g is None else out * g


def _inputs(name, shape, dtype=torch.float64, seed=0):
    torch.manual_seed(seed)
    z = (3 * torch.randn(shape, dtype=torch.float64)).to(dtype).requires_grad_()
    g = torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_() if name in GATED else None
    return z, g


@pytest.mark.parametrize(("name", "approximate"), FORMS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_N10_activation_equals_its_formula(name, approximate, dtype, poison):
    z, g = _inputs(name, (13, 7), dtype)
    grad = torch.randn(13, 7, dtype=torch.float64).to(dtype)
    inputs = [t for t in (z, g) if t is not None]
    wide = [t.detach().double().requires_grad_() for t in inputs]
    truth = formula(name, wide[0], wide[1] if g is not None else None, approximate)
    truth_grads = torch.autograd.grad(truth, wide, grad.double())
    out = activate(z, g, Activation(name, approximate))
    grads = torch.autograd.grad(out, inputs, grad)
    bound = 4 * torch.finfo(dtype).eps if dtype != torch.float64 else 1e-14
    for got, expected in zip((out, *grads), (truth, *truth_grads), strict=True):
        assert got.dtype == dtype
        assert relative_error(got, expected) < bound


@pytest.mark.parametrize(("name", "approximate"), FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_N1_activation_is_as_exact_as_torch(name, approximate, dtype):
    z, g = _inputs(name, (64, 33), dtype, seed=1)
    plain = formula(name, z, g, approximate)
    truth = formula(name, z.double(), None if g is None else g.double(), approximate)
    assert_as_exact_as(activate(z, g, Activation(name, approximate)), plain, truth)


@pytest.mark.parametrize(("name", "approximate"), FORMS)
def test_gradcheck(name, approximate):
    z, g = _inputs(name, (5, 3))
    with torch.no_grad():
        z[z.abs() < 0.05] += 0.1  # away from relu's kink
    inputs = (z,) if g is None else (z, g)
    assert gradcheck(lambda *t: activate(t[0], t[1] if len(t) > 1 else None, Activation(name, approximate)), inputs)


@pytest.mark.parametrize("name", ["gelu", "swiglu"])
def test_R8_strides_of_inputs_and_gradient(name):
    z, g = _inputs(name, (6, 8))
    z_t = z.detach().t().contiguous().t().requires_grad_()
    g_t = None if g is None else g.detach().t().contiguous().t().requires_grad_()
    activate(z, g, Activation(name)).sum().backward()
    out = activate(z_t, g_t, Activation(name))
    assert out.is_contiguous()
    out.sum().backward()  # sum's gradient has stride 0
    assert torch.equal(z.grad, z_t.grad)
    assert g is None or torch.equal(g.grad, g_t.grad)


@pytest.mark.parametrize(("name", "approximate"), [form for form in FORMS if form[0] in GATED])
def test_the_two_halves_of_a_tensor(name, approximate):
    z, g = _inputs(name, (5, 3))
    with torch.no_grad():
        z[z.abs() < 0.05] += 0.1  # away from relu's kink
    activation, h = Activation(name, approximate), torch.cat([z, g], dim=1).detach().requires_grad_()
    y, expected = activate_halves(h, activation), activate(z, g, activation)
    # some CPUs round rows of a wider tensor, and packed rows, differently in the last bit
    assert_close = partial(torch.testing.assert_close, rtol=1e-14, atol=1e-15)
    assert_close(y, expected)
    for grad in (torch.randn_like(y), torch.ones(5, 1, dtype=y.dtype).expand(5, 3)):
        (d_h,) = torch.autograd.grad(y, (h,), grad, retain_graph=True)
        assert_close(d_h, torch.cat(torch.autograd.grad(expected, (z, g), grad, retain_graph=True), dim=1))
    assert gradcheck(lambda t: activate_halves(t, activation), (h,))


def test_keeps_only_its_inputs():
    z, g = _inputs("swiglu", (4, 6))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.data_ptr()), lambda _: None):
        activate(z, g, Activation("swiglu"))
    assert sorted(kept) == sorted([z.data_ptr(), g.data_ptr()])


def test_only_one_input_needs_a_gradient():
    z, g = _inputs("geglu", (4, 6))
    (d_gate,) = torch.autograd.grad(activate(z.detach(), g, Activation("geglu")).sum(), (g,))
    (expected,) = torch.autograd.grad(activate(z, g, Activation("geglu")).sum(), (g,))
    assert torch.equal(d_gate, expected)


def test_bad_arguments_are_named():
    z = torch.ones(2, 3)
    with pytest.raises(ValueError, match="^activation='tanh': must be one of gelu, silu,"):
        activate(z, None, Activation("tanh"))
    with pytest.raises(ValueError, match="^approximate='fast': must be 'tanh' or 'none'"):
        activate(z, None, Activation("gelu", "fast"))
    with pytest.raises(ValueError, match="^gate is missing for activation='swiglu'"):
        activate(z, None, Activation("swiglu"))
    with pytest.raises(ValueError, match="^gate is given for activation='gelu'"):
        activate(z, z, Activation("gelu"))
    with pytest.raises(ValueError, match=r"^gate is \(2, 2\) torch.float32, must be \(2, 3\) torch.float32"):
        activate(z, torch.ones(2, 2), Activation("swiglu"))
    with pytest.raises(ValueError, match=r"^h is \(2, 3\): must be \(R, 2·I\)"):
        activate_halves(z, Activation("swiglu"))
    with pytest.raises(ValueError, match="^gate is given for activation='silu'"):
        activate_halves(torch.ones(2, 4), Activation("silu"))
