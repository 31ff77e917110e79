"""What the tests of megablocks 0.10's classes share: arguments, and the comparison with a plain formula in float64."""

import torch
import torch.nn.functional as F

from megablocks.layers import Arguments
from megablocks.testing.oracle import relative_error
from megablocks.testing.poison import poisoned_empty

H, F_, E, K = 12, 128, 3, 2
TOLERANCE = 1e-5


def args_of(**changes):
    values = dict(hidden_size=H, ffn_hidden_size=F_, moe_num_experts=E, moe_top_k=K, fp16=False, device="cpu")
    values |= dict(init_method=normal, output_layer_init_method=normal)
    return Arguments(**{**values, **changes})


def normal(t):
    return torch.nn.init.normal_(t, std=0.3)


def wide_parameters(module):
    return {name: p.detach().double().requires_grad_() for name, p in module.named_parameters()}


def hidden_of(x, w1, v1):
    """act(x·w1ᵀ), or act(x·w1ᵀ) ⊙ (x·v1ᵀ); w1, v1 (…, H)."""
    hidden = F.gelu(x @ w1.t(), approximate="tanh")
    return hidden if v1 is None else hidden * (x @ v1.t())


def compare(module, call, formula, x):
    """call(x) against formula(x, parameters): values, dx and the gradient of every parameter."""
    wide, wide_x = wide_parameters(module), x.detach().double().requires_grad_()
    x = x.detach().requires_grad_()
    with poisoned_empty():
        y = call(x)
        grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
        y.backward(grad)
    expected = formula(wide_x, wide)
    expected.backward(grad.double())
    assert y.dtype == x.dtype and relative_error(y, expected.detach()) < TOLERANCE
    assert relative_error(x.grad, wide_x.grad) < TOLERANCE
    for name, p in module.named_parameters():
        assert relative_error(p.grad, wide[name].grad) < TOLERANCE, name
