"""LayerNorm and RMSNorm: the kernels, interpreted without a GPU, and the op, against torch in float64."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megablocks.ops.add_norm import AddNormOptions, add_norm, norm_ref, wide_norm_backward
from megablocks.ops.norm import norm
from megablocks.ops.norm_triton import add_norm_backward_launch, add_norm_launch, add_partials_launch
from megablocks.testing.oracle import relative_error
from megablocks.testing.poison import poisoned_empty

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = 1e-5


def draw(rows: int, hidden: int, dtype: torch.dtype, biased: bool) -> list[Tensor | None]:
    """x, weight, bias and dy. The rows have means of their own, which the variance must not feel."""
    g = torch.Generator().manual_seed(rows + hidden)
    x = torch.randn(rows, hidden, generator=g) + 4 * torch.randn(rows, 1, generator=g)
    weight, bias = torch.randn(hidden, generator=g), torch.randn(hidden, generator=g)
    made = (x, weight, bias if biased else None, torch.randn(rows, hidden, generator=g))
    return [None if t is None else t.to(DEVICE, dtype) for t in made]


def of_torch(x: Tensor, weight: Tensor, bias: Tensor | None, dy: Tensor, zero_centered: bool) -> list[Tensor]:
    """y and the gradients of x, weight and bias, in the inputs' dtype."""
    inputs = [t.detach().clone().requires_grad_() for t in (x, weight, bias) if t is not None]
    factor, shape = inputs[1] + 1 if zero_centered else inputs[1], x.shape[-1:]
    if bias is None:
        y = F.rms_norm(inputs[0], shape, factor, EPS)
    else:
        y = F.layer_norm(inputs[0], shape, factor, inputs[2], EPS)
    return [y, *torch.autograd.grad(y, inputs, dy)]


def of_norm(x: Tensor, weight: Tensor, bias: Tensor | None, dy: Tensor, zero_centered: bool) -> list[Tensor]:
    inputs = [t.detach().clone().requires_grad_() for t in (x, weight, bias) if t is not None]
    with poisoned_empty():
        y = norm(*inputs[:2], inputs[2] if bias is not None else None, eps=EPS, zero_centered=zero_centered)
        return [y, *torch.autograd.grad(y, inputs, dy)]


def doubles(case: list[Tensor | None]) -> list[Tensor | None]:
    return [None if t is None else t.double() for t in case]


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize(("rows", "hidden"), [(1, 13), (67, 64), (5, 200), (3, 2100)])
def test_norm_kernels_equal_float64(rows: int, hidden: int, biased: bool) -> None:
    x, weight, bias, dy = draw(rows, hidden, torch.float32, biased)
    truth = of_torch(*doubles([x, weight, bias, dy]), False)
    strided, options = torch.cat([x, x], 1)[:, :hidden], AddNormOptions(0, EPS, 0.0)
    with poisoned_empty():
        _, y, mean, rstd, _ = add_norm_launch(strided, None, None, None, weight, bias, options)
        dx, _, _, *others = add_norm_backward_launch(None, dy, x, None, weight, mean, rstd, False, options)
    grads = dx, *others
    for got, expected in zip((y, *grads), truth, strict=False):
        assert relative_error(got, expected) < 1e-6
    assert biased or mean is grads[2] is None


@pytest.mark.parametrize(("biased", "zero_centered"), list(product((True, False), repeat=2)))
def test_the_reference_equals_torch(biased: bool, zero_centered: bool) -> None:
    x, weight, bias, dy = doubles(draw(7, 33, torch.float32, biased))
    y, mean, rstd = norm_ref(x, weight, bias, EPS, float(zero_centered))
    grads = wide_norm_backward(dy, x, weight, mean, rstd, float(zero_centered))
    for got, expected in zip((y, *grads), of_torch(x, weight, bias, dy, zero_centered), strict=False):
        torch.testing.assert_close(got, expected)
    assert biased or mean is grads[2] is None


class _Unused(torch.autograd.Function):
    """Its backward gives no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        return None


def test_norms_take_no_rows_and_frozen_parameters() -> None:
    x = torch.empty(0, 3, 8, device=DEVICE, requires_grad=True)
    weight = torch.ones(8, device=DEVICE)
    assert torch.autograd.grad(norm(x, weight, None, eps=EPS).sum(), x)[0].shape == x.shape
    x = torch.randn(2, 3, 8, device=DEVICE)
    unused = torch.autograd.grad(_Unused.apply(norm(x.requires_grad_(), weight, None, eps=EPS)), x, allow_unused=True)
    assert unused == (None,)
    weight.requires_grad_()
    assert norm(x, weight, weight, eps=EPS).shape == x.shape
    with pytest.raises(ValueError, match=r"bias is \(7,\): must be \(8,\)"):
        norm(x, weight, weight[:7], eps=EPS)
    with pytest.raises(ValueError, match=r"weight is \(7,\): must be \(8,\)"):
        norm(x, weight[:7], weight, eps=EPS)


@pytest.mark.parametrize("biased", [False, True])
def test_the_result_may_be_changed_in_place(biased: bool) -> None:
    x, weight, bias, _ = draw(6, 8, torch.float32, biased)
    leaf = x.view(2, 3, 8).requires_grad_()
    for y_of in (lambda: norm(leaf, weight, bias, eps=EPS), lambda: add_norm(leaf, leaf, weight, bias, eps=EPS)[1]):
        changed, expected = (torch.autograd.grad(y.sin().sum(), leaf) for y in (y_of().mul_(2), 2 * y_of()))
        assert torch.equal(changed[0], expected[0])


@pytest.mark.parametrize("eps", [-1e-5, float("nan")])
def test_a_norm_refuses_an_eps_that_can_make_nan(eps: float) -> None:
    x, weight = torch.ones(2, 8, device=DEVICE), torch.ones(8, device=DEVICE)
    with pytest.raises(ValueError, match=f"^eps={eps}: must be >= 0$"):
        norm(x, weight, None, eps=eps)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("rows", "hidden"), [(4099, 768), (1000, 1000), (70_001, 64), (130, 4096), (9, 16384), (5, 17001)]
)
@pytest.mark.parametrize(("biased", "zero_centered"), list(product((True, False), repeat=2)))
def test_N1_norms_equal_float64_on_a_gpu(
    rows: int, hidden: int, dtype: torch.dtype, biased: bool, zero_centered: bool
) -> None:
    case = draw(rows, hidden, dtype, biased)
    truth = of_torch(*doubles(case), zero_centered)
    got, plain = of_norm(*case, zero_centered), of_torch(*case, zero_centered)
    for value, expected, of_torch_itself in zip(got, truth, plain, strict=True):
        assert value.dtype == dtype
        least = 1e-6 if dtype == torch.float32 else 0
        assert relative_error(value, expected) <= max(2 * relative_error(of_torch_itself, expected), least)
    again = of_norm(*case, zero_centered)
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))


@pytest.mark.parametrize(("programs", "count", "width"), [(0, 1, 5), (1, 3, 40), (131, 2, 13), (396, 3, 768)])
def test_partials_are_added_in_float32(programs: int, count: int, width: int) -> None:
    partial = torch.randn(programs, count, width, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    with poisoned_empty():
        sums = add_partials_launch(partial)
    assert len(sums) == count and len({one.untyped_storage().data_ptr() for one in sums}) == count
    for got, expected in zip(sums, partial.double().sum(0), strict=True):
        assert got.dtype == torch.float32
        assert relative_error(got, expected) < 1e-6 if programs else not got.any()
    assert all(torch.equal(a, b) for a, b in zip(sums, add_partials_launch(partial), strict=True))
