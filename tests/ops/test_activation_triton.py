"""The activation kernels against float64, on the interpreter and on a GPU."""

from __future__ import annotations

import pytest
import torch

from megablocks.ops.activation import activation_backward_ref, activation_ref
from megablocks.ops.activation_table import GATED, UNARY, Activation
from megablocks.ops.activation_triton import activation_backward_launch, activation_launch

pytestmark = pytest.mark.any_device
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16] if DEVICE == "cuda" else [torch.float32]


@pytest.mark.parametrize("name", ["relu", "relu2", "reglu"])
def test_what_overflowed_downwards_is_zero_for_relu(name: str, poison: None) -> None:
    """As torch's: a float16 product may be -inf, which relu makes 0 and 0 · -inf would make NaN."""
    pre = torch.tensor([float("-inf"), -1.0, 0.0, 2.0], dtype=torch.float16, device=DEVICE)
    gate = torch.full_like(pre, 3.0) if name == "reglu" else None
    grad, activation = torch.ones_like(pre), Activation(name)
    assert torch.equal(activation_launch(pre, gate, activation), activation_ref(pre, gate, activation))
    found = activation_backward_launch(grad, pre, gate, activation)
    for one, other in zip(found, activation_backward_ref(grad, pre, gate, activation), strict=True):
        assert other is None or torch.equal(one, other)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [*UNARY, *GATED])
@pytest.mark.parametrize("approximate", ["tanh", "none"])
def test_N10_activation_kernels_equal_float64(name: str, approximate: str, dtype: torch.dtype, poison: None) -> None:
    pre = (torch.randn(13, 67, device=DEVICE) * 4).to(dtype)
    gate = torch.randn(13, 67, device=DEVICE).to(dtype) if name in GATED else None
    grad = torch.randn(1, 67, device=DEVICE).to(dtype).expand(13, 67)
    pre[3, 5] = float("nan")
    wide = [None if t is None else t.double() for t in (grad, pre, gate)]
    activation = Activation(name, approximate)
    expected = activation_ref(wide[1], wide[2], activation), *activation_backward_ref(*wide, activation)
    found = activation_launch(pre, gate, activation), *activation_backward_launch(grad, pre, gate, activation)
    eps = torch.finfo(dtype).eps
    for one, other in zip(found, expected, strict=True):
        if other is None:
            assert one is None
            continue
        assert one.dtype == dtype
        where = torch.ones_like(other, dtype=torch.bool)
        where[3, 5] = False
        torch.testing.assert_close(one.double()[where], other[where], rtol=4 * eps, atol=4e-6 if eps < 1e-6 else eps)
    assert found[0][3, 5].isnan()


@pytest.mark.parametrize("name", GATED)
@pytest.mark.parametrize("width", [67, 64, 3000])  # beside, within and beyond a program's elements
def test_halves_of_one_tensor_are_read_and_written_where_they_lie(name: str, width: int, poison: None) -> None:
    h, activation = torch.randn(13, 2 * width, device=DEVICE), Activation(name)
    pre, gate = h.chunk(2, dim=1)
    grad = torch.randn(13, width, device=DEVICE)
    plain = pre.contiguous(), gate.contiguous(), activation
    for y in (activation_launch(pre, gate, activation), activation_launch(h, None, activation)):
        assert torch.equal(y, activation_launch(*plain))
    expected = activation_backward_launch(grad, *plain)
    d_h, _ = activation_backward_launch(grad, h, None, activation)
    assert torch.equal(d_h, torch.cat(expected, dim=1))
    for one, other in zip(activation_backward_launch(grad, pre, gate, activation), expected, strict=True):
        assert torch.equal(one, other) and one.is_contiguous()
