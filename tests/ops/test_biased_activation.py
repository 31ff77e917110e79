"""A bias and an activation: the kernels, interpreted without a GPU, and the op, against formulas in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megablocks.ops import biased_activation_triton
from megablocks.ops.activation_table import UNARY, Activation
from megablocks.ops.biased_activation import (
    activate_biased,
    biased_activation_backward_ref,
    biased_activation_ref,
)
from megablocks.ops.biased_activation_triton import biased_activation_backward_launch, biased_activation_launch
from megablocks.testing.oracle import FORMULAS, relative_error
from megablocks.testing.poison import poisoned_empty

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LEAST = 3e-6  # in float32; gelu's slope has an error of its sigmoid up to 50 times
FORMS = [*map(Activation, UNARY), Activation("gelu", "none")]


def draw(rows: int, width: int, dtype: torch.dtype) -> list[Tensor]:
    """x, bias and dy. No sum is 0, where the formula of relu has another slope."""
    g = torch.Generator().manual_seed(rows + width)
    shapes = (rows, width), (width,), (rows, width)
    x, bias, dy = [(2 * torch.randn(shape, generator=g)).to(DEVICE, dtype) for shape in shapes]
    return [torch.where(x == -bias, 1 - bias, x), bias, dy]


def doubles(case: list[Tensor]) -> list[Tensor]:
    return [t.double() for t in case]


def of_torch(x: Tensor, bias: Tensor, dy: Tensor, activation: Activation) -> list[Tensor]:
    """y and the gradients of x and bias, by torch's operations in the inputs' dtype."""
    inputs = [t.detach().clone().requires_grad_() for t in (x, bias)]
    y = FORMULAS[activation.name](inputs[0] + inputs[1], activation.approximate)
    return [y, *torch.autograd.grad(y, inputs, dy)]


def of_op(x: Tensor, bias: Tensor, dy: Tensor, activation: Activation) -> list[Tensor]:
    inputs = [t.detach().clone().requires_grad_() for t in (x, bias)]
    with poisoned_empty():
        y = activate_biased(*inputs, activation)
        return [y, *torch.autograd.grad(y, inputs, dy)]


@pytest.mark.parametrize("activation", FORMS)
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (67, 13), (37, 64), (29, 200)])
def test_N1_biased_kernels_equal_float64(
    rows: int, width: int, activation: Activation, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"_PROGRAMS": 6, "_BLOCK": 64, "_FORWARD_TILE": 256, "_BACKWARD_TILE": 256}.items():
        monkeypatch.setattr(biased_activation_triton, name, value)  # several tiles a program, and blocks of columns
    x, bias, dy = draw(rows, width, torch.float32)
    truth = of_torch(*doubles([x, bias, dy]), activation)
    strided = torch.cat([x, x], 1)[:, :width]
    with poisoned_empty():
        y = biased_activation_launch(strided, bias, activation)
        grads = biased_activation_backward_launch(dy, strided, bias, True, activation)
        alone, none = biased_activation_backward_launch(dy, x, bias, False, activation)
    for got, expected in zip((y, *grads), truth, strict=True):
        assert got.is_contiguous() and relative_error(got, expected) < LEAST
    halves = doubles([t.half() for t in (x, bias, dy)])
    half_y = biased_activation_launch(x.half(), bias.half(), activation)
    half_grads = biased_activation_backward_launch(dy.half(), x.half(), bias.half(), True, activation)
    limits = (4e-4, 4e-4, 1e-5)  # the sum is not rounded to half precision
    for got, expected, limit in zip((half_y, *half_grads), of_torch(*halves, activation), limits, strict=True):
        assert relative_error(got, expected) < limit
    assert none is None and torch.equal(alone, grads[0])


@pytest.mark.parametrize("activation", FORMS)
def test_the_reference_equals_torch(activation: Activation) -> None:
    x, bias, dy = doubles(draw(7, 33, torch.float32))
    got = biased_activation_ref(x, bias, activation), *biased_activation_backward_ref(dy, x, bias, True, activation)
    for value, expected in zip(got, of_torch(x, bias, dy, activation), strict=True):
        torch.testing.assert_close(value, expected)


def test_the_bias_gradient_sums_unrounded_values() -> None:
    x, bias, dy = draw(64, 8, torch.bfloat16)
    for backward in (biased_activation_backward_ref, biased_activation_backward_launch):
        _, d_bias = backward(dy, x, bias, True, FORMS[0])
        assert d_bias.dtype == torch.float32
        assert relative_error(d_bias, of_torch(*doubles([x, bias, dy]), FORMS[0])[2]) < 1e-5


def test_bias_and_x_may_differ_in_dtype_and_need_no_gradient() -> None:
    x, bias, dy = draw(5, 8, torch.float32)
    x, wide = x.bfloat16().view(5, 1, 8).requires_grad_(), bias.clone().requires_grad_()
    y = activate_biased(x, wide, FORMS[0])
    dx, d_bias = torch.autograd.grad(y, (x, wide), dy.bfloat16().view_as(y))
    assert y.shape == dx.shape == x.shape and y.dtype == dx.dtype == torch.bfloat16 and d_bias.dtype == torch.float32
    for frozen in ((x, bias), (x.detach(), wide)):
        got = torch.autograd.grad(activate_biased(*frozen, FORMS[0]), x if frozen[0] is x else wide, dy.view_as(y))
        assert torch.equal(got[0], dx if frozen[0] is x else d_bias)


def test_no_rows_and_one_dimension() -> None:
    bias = torch.randn(8, device=DEVICE, requires_grad=True)
    x = torch.empty(3, 0, 8, device=DEVICE, requires_grad=True)
    dx, d_bias = torch.autograd.grad(activate_biased(x, bias, FORMS[0]).sum(), (x, bias))
    assert dx.shape == x.shape and torch.equal(d_bias, torch.zeros_like(bias))
    with poisoned_empty():
        _, d_bias = biased_activation_backward_launch(x, x, bias, True, FORMS[0])
        assert torch.equal(d_bias, torch.zeros_like(bias))
        assert biased_activation_backward_launch(x[..., :0], x[..., :0], bias[:0], True, FORMS[0])[1].shape == (0,)
    empty = x[..., :0]
    assert activate_biased(empty, bias[:0], FORMS[0]).shape == empty.shape
    torch.testing.assert_close(activate_biased(bias, bias, FORMS[0]), FORMULAS["gelu"](2 * bias, "tanh"))


def test_bad_arguments_are_named() -> None:
    x, bias = torch.ones(2, 3), torch.ones(3)
    with pytest.raises(ValueError, match="^activation='tanh': must be one of gelu, silu,"):
        activate_biased(x, bias, Activation("tanh"))
    with pytest.raises(ValueError, match="^approximate='fast': must be 'tanh' or 'none'"):
        activate_biased(x, bias, Activation("gelu", "fast"))
    with pytest.raises(ValueError, match="^gate is missing for activation='swiglu'"):
        activate_biased(x, bias, Activation("swiglu"))
    for wrong in (bias[:2], x, bias[0]):
        with pytest.raises(ValueError, match=r"^bias is \(.*\): must be \(I,\) for x \(…, I\), which is \(2, 3\)"):
            activate_biased(x, wrong, Activation("gelu"))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "width"), [(4099, 3072), (70_001, 64), (1000, 1000), (130, 12288), (200_003, 13)])
@pytest.mark.parametrize("activation", FORMS)
def test_N1_biased_activation_equals_float64_on_a_gpu(
    rows: int, width: int, dtype: torch.dtype, activation: Activation
) -> None:
    case = draw(rows, width, dtype)
    truth = of_torch(*doubles(case), activation)
    got, plain = of_op(*case, activation), of_torch(*case, activation)
    for value, expected, of_torch_itself in zip(got, truth, plain, strict=True):
        assert value.dtype == dtype
        least = LEAST if dtype == torch.float32 else 0
        assert relative_error(value, expected) <= max(2 * relative_error(of_torch_itself, expected), least)
    again = of_op(*case, activation)
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))
