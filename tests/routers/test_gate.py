"""The gate: logits and x in one node, whose backward adds the experts' gradient of x within its own product."""

import pytest
import torch
import torch.nn.functional as F

from megablocks import MoEConfig
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
        logits, x = made.gate(leaf) if fused else (F.linear(leaf, weight), leaf)
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


def test_the_caller_s_tensors_stay_as_they_were():
    made, leaf = router(torch.float32), batch(torch.float32).requires_grad_()
    logits, x = made.gate(leaf)
    y, dy = x * 3, torch.ones(5, 6)
    before = leaf.detach().clone(), dy.clone()
    for _ in range(2):  # a second backward over the same graph
        torch.autograd.grad([y, logits.sum()], [leaf, made.layer.weight], [dy, None], retain_graph=True)
    assert torch.equal(leaf.detach(), before[0]) and torch.equal(dy, before[1])


def test_second_derivatives():
    made = router()
    weight = made.layer.weight

    def fn(x, w):
        made.layer.weight = torch.nn.Parameter(w) if not isinstance(w, torch.nn.Parameter) else w
        logits, x = made.gate(x)
        return logits.sin().sum() + x.pow(3).sum()

    leaf = batch().requires_grad_()
    (first,) = torch.autograd.grad(fn(leaf, weight), leaf, create_graph=True)
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
    (got,) = torch.autograd.grad([logits, x * 1.0], leaf, [d_logits, dx])
    assert torch.equal(got, exact.bfloat16())


@pytest.mark.parametrize("why", ["hook", "jitter", "dtype", "subclass", "patched", "autocast"])
def test_where_the_gate_is_more_than_a_product_it_is_left_to_autograd(why):
    made, x = router(torch.float32, jitter_eps=0.1 if why == "jitter" else None), batch(torch.float32).requires_grad_()
    called = []
    if why == "hook":
        made.layer.register_forward_hook(lambda *_: called.append(1))
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
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=why == "autocast"):
        logits, same = made.gate(x)
    assert same is x and not is_one_node(logits)
    assert bool(called) == (why in ("hook", "subclass", "patched"))
    assert is_one_node(router().gate(batch().requires_grad_())[0])
