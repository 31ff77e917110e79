"""The gate: logits and x in one node, whose backward adds the experts' gradient of x within its own product."""

import contextlib

import pytest
import torch
import torch.nn.functional as F

from megablocks import MoEConfig, dMoE
from megablocks.routers import TopKRouter

CONFIG = MoEConfig(hidden_size=6, ffn_hidden_size=8, num_experts=4)


def router(dtype=torch.float64, **changes):
    torch.manual_seed(0)
    return TopKRouter(CONFIG.replace(**changes), dtype=dtype)


def batch(dtype=torch.float64):
    return torch.randn(5, 6, dtype=dtype, generator=torch.Generator().manual_seed(1))


def is_one_node(logits):
    return "_Gate" in logits.grad_fn.name()


@pytest.mark.parametrize("trains_x", [True, False])
@pytest.mark.parametrize("trains_w", [True, False])
@pytest.mark.parametrize("uses", ["both", "logits", "x"])
def test_R6_equals_a_linear_layer_beside_the_experts(trains_x, trains_w, uses):
    results = []
    for fused in (True, False):
        made, leaf = router(), batch().requires_grad_(trains_x)
        weight = made.layer.weight.requires_grad_(trains_w)
        logits, x = made.gate(leaf, owned=True) if fused else (F.linear(leaf, weight), leaf)
        loss = torch.zeros((), dtype=torch.float64, requires_grad=True) * 1.0
        if uses != "x":
            loss = loss + (logits.sin() * 2).sum()
        if uses != "logits":
            loss = loss + (x.exp() * x.cos()).sum()
        loss.backward()
        results.append((logits.detach(), x.detach(), leaf.grad, weight.grad))
    for got, want in zip(*results, strict=True):
        # a weight or input without a share in the loss may have no gradient, or zeros
        if got is None or want is None:
            assert (got is None or not got.any()) and (want is None or not want.any())
        else:
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("owned", [False, True])
def test_the_caller_s_tensors_stay_as_they_were(owned):
    """Also where x is passed on as it is, unless the gradient is said to be the experts' own."""
    made, leaf = router(torch.float32), batch(torch.float32).requires_grad_()
    logits, x = made.gate(leaf, owned=owned)
    y, dy = (x * 3 if owned else x), torch.ones(5, 6)
    before = leaf.detach().clone(), dy.clone()
    for _ in range(2):  # a second backward over the same graph
        torch.autograd.grad([y, logits.sum()], [leaf, made.layer.weight], [dy, None], retain_graph=True)
    assert torch.equal(leaf.detach(), before[0]) and torch.equal(dy, before[1])


def test_a_gradient_of_the_experts_own_is_written_over():
    made, leaf = router(torch.float32), batch(torch.float32).requires_grad_()
    logits, x = made.gate(leaf, owned=True)
    dx = torch.ones(5, 6)
    (got,) = torch.autograd.grad([logits, x], leaf, [torch.ones(5, 4), dx])
    assert got.data_ptr() == dx.data_ptr()


def test_an_expanded_gradient_is_not():
    made, leaf = router(), batch().requires_grad_()
    logits, x = made.gate(leaf, owned=True)
    (got,) = torch.autograd.grad([logits, x], leaf, [torch.ones(5, 4).double(), torch.ones(()).double().expand(5, 6)])
    torch.testing.assert_close(got, 1 + made.layer.weight.sum(0).expand(5, 6))


def test_second_derivatives():
    made = router()
    weight = made.layer.weight

    def fn(x):
        logits, x = made.gate(x, owned=True)
        return logits.sin().sum() + x.pow(3).sum()

    leaf = batch().requires_grad_()
    (first,) = torch.autograd.grad(fn(leaf), leaf, create_graph=True)
    (second,) = torch.autograd.grad(first.pow(2).sum(), leaf)
    plain = batch().requires_grad_()
    (one,) = torch.autograd.grad(F.linear(plain, weight).sin().sum() + plain.pow(3).sum(), plain, create_graph=True)
    (two,) = torch.autograd.grad(one.pow(2).sum(), plain)
    torch.testing.assert_close(second, two)


def test_the_sum_is_rounded_once():
    """In bf16 autograd's sum of two rounded gradients is further from the exact one."""
    made, leaf = router(torch.bfloat16), batch(torch.bfloat16).requires_grad_()
    logits, x = made.gate(leaf)
    d_logits, dx = (torch.randn(5, n, generator=torch.Generator().manual_seed(n)).bfloat16() for n in (4, 6))
    exact = dx.double() + d_logits.double() @ made.layer.weight.double()
    (got,) = torch.autograd.grad([logits, x], leaf, [d_logits, dx])
    assert torch.equal(got, exact.bfloat16())


@pytest.mark.parametrize(
    "why",
    [*("hook", "pre hook", "backward hook", "global hook", "forward", "bias", "jitter", "dtype", "subclass", "patched"),
     *("autocast", "forward mode", "no gradient")],
)  # fmt: skip
def test_where_the_gate_is_more_than_a_product_it_is_left_to_autograd(why):
    made, x = router(torch.float32, jitter_eps=0.1 if why == "jitter" else None), batch(torch.float32).requires_grad_()
    called, layer, stack = [], made.layer, contextlib.ExitStack()

    def seen(*_):
        called.append(1)

    if why == "hook":
        layer.register_forward_hook(seen)
    if why == "pre hook":
        layer.register_forward_pre_hook(seen)
    if why == "backward hook":
        layer.register_full_backward_pre_hook(seen)
    if why == "global hook":
        stack.callback(torch.nn.modules.module.register_module_forward_hook(seen).remove)
    if why == "forward":
        layer.forward = lambda x: called.append(1) or F.linear(x, layer.weight)
    if why == "bias":
        made.layer = torch.nn.Linear(6, 4)
    if why == "dtype":
        x = x.detach().double().requires_grad_()
    if why == "subclass":

        class Louder(TopKRouter):
            def logits(self, x):
                called.append(1)
                return 2 * super().logits(x)

        made = Louder(CONFIG)
    if why == "patched":
        made.logits = lambda x: called.append(1) or torch.ones(5, 4, requires_grad=True) * 1.0
    if why == "autocast":
        stack.enter_context(torch.autocast("cpu", dtype=torch.bfloat16))
    if why == "forward mode":
        stack.enter_context(torch.autograd.forward_ad.dual_level())
    if why == "no gradient":
        x = x.detach()
    with stack:
        logits, same = made.gate(x)
        assert same is x and not is_one_node(logits)
        logits.sum().backward()
    assert bool(called) == (why not in ("bias", "jitter", "dtype", "autocast", "forward mode", "no gradient"))
    if why == "bias":
        assert torch.equal(logits, made.layer(x))


def test_else_it_is_one_node():
    assert is_one_node(router().gate(batch().requires_grad_())[0])


@pytest.mark.parametrize("around", [None, "hook", "wrapper", "no gate"])
def test_a_layer_writes_over_its_own_experts_gradients_alone(around):
    """Whatever stands around the experts may keep the gradient of x; x's is the same."""
    grads = []
    for changed in (None, around):
        layer = dMoE(CONFIG, seed=0)
        with torch.no_grad():
            layer.router.layer.weight.copy_(torch.ones(4, 6).tril())
        owned, gate = [], layer.router.gate
        layer.router.gate = lambda x, owned_=owned, gate=gate, **o: owned_.append(o["owned"]) or gate(x, **o)
        if changed == "hook":
            layer.experts.register_full_backward_hook(lambda *_: None)
        if changed == "wrapper":

            class Wrapper(type(layer.experts)):
                pass

            layer.experts.__class__ = Wrapper
        if changed == "no gate":

            class Other(torch.nn.Module):
                def __init__(self, router):
                    super().__init__()
                    self.logits, self.route = router.logits, router.route

            layer.router = Other(layer.router)
        x = batch(torch.float32).requires_grad_()
        layer(x).square().sum().backward()
        grads.append(x.grad)
        assert owned == ([] if changed == "no gate" else [changed is None])
    torch.testing.assert_close(*grads)
