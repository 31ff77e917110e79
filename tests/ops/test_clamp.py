"""The clamped gate: its kernels, interpreted without a GPU, and its reference, against torch in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megablocks.ops.activation_triton import clamped_gate_backward_launch, clamped_gate_launch
from megablocks.ops.clamp import Clamp, clamped_gate, clamped_gate_backward_ref, clamped_gate_ref

pytestmark = pytest.mark.any_device
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16] if DEVICE == "cuda" else [torch.float32]


def _of_torch(h: Tensor, clamp: Clamp) -> Tensor:
    """What the models write."""
    gate, up = (h[..., ::2], h[..., 1::2]) if clamp.interleaved else h.chunk(2, dim=-1)
    gate, up = gate.clamp(max=clamp.limit), up.clamp(min=-clamp.limit, max=clamp.limit)
    return (up + clamp.offset) * (gate * torch.sigmoid(gate * clamp.alpha))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("rows", "width"), [(0, 8), (1, 1), (13, 67), (9, 3000), (40, 64)])
@pytest.mark.parametrize(("alpha", "offset"), [(1.0, 0.0), (1.702, 1.0)])
def test_N10_clamped_gate_equals_float64(dtype, interleaved, rows, width, alpha, offset, poison):
    clamp = Clamp(2.0, alpha, offset, interleaved)
    h = (torch.randn(rows, 2 * width, device=DEVICE) * 3).to(dtype)
    h.flatten()[:2] = 2.0  # at the limit the gradient passes, which it does in torch before 2.15
    grad = torch.randn(rows, width, device=DEVICE).to(dtype)
    wide = torch.where(h == 2.0, h.double() - 1e-12, h.double()).requires_grad_()
    y = _of_torch(wide, clamp)
    (d_h,) = torch.autograd.grad(y, wide, grad.double())
    kernels = clamped_gate_launch(h, clamp), clamped_gate_backward_launch(grad, h, clamp)
    refs = clamped_gate_ref(h, clamp), clamped_gate_backward_ref(grad, h, clamp)
    eps = torch.finfo(dtype).eps
    for found in (kernels, refs):
        for one, want in zip(found, (y, d_h), strict=True):
            assert one.dtype == dtype
            torch.testing.assert_close(one.double(), want.detach(), rtol=4 * eps, atol=16 * eps)


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_nan_stays_in_its_element(interleaved, poison):
    h = torch.ones(3, 8, device=DEVICE)
    h[1, 2] = float("nan")
    y = clamped_gate_launch(h, Clamp(7.0, interleaved=interleaved))
    assert y.isnan().sum() == 1 and y[1, 1 if interleaved else 2].isnan()


def test_gradcheck():
    h = torch.randn(3, 10, dtype=torch.float64, requires_grad=True)
    for interleaved in (False, True):
        assert torch.autograd.gradcheck(lambda h, i=interleaved: clamped_gate(h, Clamp(0.7, 1.702, 1.0, i)), (h,))


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match=r"h is \(3, 5\): must be \(R, 2·I\)"):
        clamped_gate(torch.zeros(3, 5), Clamp(1.0))
    for limit in (-1.0, float("nan")):
        with pytest.raises(ValueError, match=f"limit={limit}: must be >= 0"):
            clamped_gate(torch.zeros(3, 4), Clamp(limit))
