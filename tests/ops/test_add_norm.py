"""Bias, dropout, residual and norm in one op: the kernels, interpreted without a GPU, and the op, against float64."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megablocks.ops import norm_triton
from megablocks.ops.add_norm import (
    DROP_BITS,
    AddNormOptions,
    add_norm,
    add_norm_backward_ref,
    add_norm_op,
    add_norm_ref,
    random_bits,
)
from megablocks.ops.norm_triton import add_norm_backward_launch, add_norm_launch
from megablocks.testing.oracle import relative_error
from megablocks.testing.poison import poisoned_empty

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS, SEED = 1e-5, 0x123456789ABCDEF
BOTH = list(product((True, False), repeat=2))


def draw(rows: int, hidden: int, dtype: torch.dtype, biased: bool, layer_norm: bool) -> list[Tensor | None]:
    """x, x_bias, residual, weight, bias, and the gradients of the sum and of its norm."""
    g = torch.Generator().manual_seed(rows + hidden)
    wide, narrow = ([torch.randn(*shape, generator=g) for _ in range(4)] for shape in ((rows, hidden), (hidden,)))
    x, residual, d_out, dy = wide
    residual += 4 * torch.randn(rows, 1, generator=g)
    case = [x, narrow[0] if biased else None, residual, narrow[1], narrow[2] if layer_norm else None, d_out, dy]
    return [None if t is None else t.to(DEVICE, dtype) for t in case]


def of_torch(case: list[Tensor | None], keep: Tensor, p: float, zero_centered: bool = False) -> list[Tensor]:
    """The sum, its norm, and the gradients of x, x_bias, residual, weight and bias, by torch's own functions."""
    *inputs, d_out, dy = case
    x, x_bias, residual, weight, bias = [None if t is None else t.detach().clone().requires_grad_() for t in inputs]
    out = residual + torch.where(keep, (x if x_bias is None else x + x_bias) / (1 - p), 0.0)
    factor, shape = weight + 1 if zero_centered else weight, x.shape[-1:]
    y = F.rms_norm(out, shape, factor, EPS) if bias is None else F.layer_norm(out, shape, factor, bias, EPS)
    leaves = [t for t in (x, x_bias, residual, weight, bias) if t is not None]
    return [out, y, *torch.autograd.grad([out, y], leaves, [d_out, dy])]


def keep_of(seed: int, rows: int, hidden: int, p: float) -> Tensor:
    return random_bits(torch.tensor(seed, device=DEVICE), rows, hidden)[:, :hidden] >= p * 2**DROP_BITS


def truth_of(case: list[Tensor | None], p: float, seed: int, zero_centered: bool = False) -> list[Tensor]:
    """`of_torch` in float64, with the mask that the seed draws."""
    rows, hidden = case[0].shape
    keep = keep_of(seed, rows, hidden, p)
    return of_torch([None if t is None else t.double() for t in case], keep, p, zero_centered)


def of_kernels(case: list[Tensor | None], p: float, offset: float = 0.0) -> list[Tensor]:
    x, x_bias, residual, weight, bias, d_out, dy = case
    options = AddNormOptions(round(p * 2**DROP_BITS), EPS, offset)
    seed = torch.tensor(SEED, device=DEVICE) if p else None
    with poisoned_empty():
        out, y, mean, rstd, mask = add_norm_launch(x, x_bias, residual, seed, weight, bias, options)
        given = (d_out, dy, out, mask, weight, mean, rstd, x_bias is not None, options)
        d_residual, dx, dx_bias, dg, d_bias = add_norm_backward_launch(*given)
    assert (dx is None) == (seed is None) and (dx_bias is None) == (x_bias is None)
    found = (out, y, d_residual if dx is None else dx, dx_bias, d_residual, dg, d_bias)
    return [t for t in found if t is not None]


def test_the_bits_are_philoxs() -> None:
    """Random123's published vector of Philox-4x32-7 for counter 0 and key 0; rows, columns and seeds differ."""
    low, high = random_bits(torch.tensor(0), 1, 8).view(4, 2).T
    assert [f"{a:08x}" for a in (low + (high << 16)).tolist()] == ["5f6fb709", "0d893f64", "4f121f81", "4f730a48"]
    bits = [random_bits(torch.tensor(seed), 64, 96).view(-1, 8) for seed in (SEED, SEED + 1, SEED + (1 << 40))]
    assert len(torch.cat(bits).unique(dim=0)) == 3 * 64 * 12


@pytest.mark.parametrize(
    ("rows", "hidden", "p", "biased", "layer_norm"),
    [
        (1, 13, 0.25, True, True),
        (167, 64, 0.125, False, False),
        (3, 2100, 0.0, True, False),
        (37, 200, 0.5, False, True),
        (11, 768, 0.125, True, True),
    ],
)
def test_N1_add_norm_kernels_equal_float64(
    rows: int, hidden: int, p: float, biased: bool, layer_norm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(norm_triton, "_PROGRAMS", 2)  # each computes several tiles
    case = draw(rows, hidden, torch.float32, biased, layer_norm)
    case[0] = torch.cat([case[0], case[0]], 1)[:, :hidden]  # strided
    for got, expected in zip(of_kernels(case, p), truth_of(case, p, SEED), strict=True):
        assert relative_error(got, expected) < 1e-6


@pytest.mark.parametrize(("biased", "layer_norm"), BOTH)
def test_the_reference_equals_torch(biased: bool, layer_norm: bool) -> None:
    case = [None if t is None else t.double() for t in draw(7, 33, torch.float32, biased, layer_norm)]
    x, x_bias, residual, weight, bias, d_out, dy = case
    seed, options = torch.tensor(SEED, device=DEVICE), AddNormOptions(2**DROP_BITS // 4, EPS, 1.0)
    out, y, mean, rstd, mask = add_norm_ref(x, x_bias, residual, seed, weight, bias, options)
    grads = add_norm_backward_ref(d_out, dy, out, mask, weight, mean, rstd, biased, options)
    found = [out, y, *(grads[i] for i in (1, 2, 0, 3, 4) if grads[i] is not None)]
    for got, expected in zip(found, truth_of(case, 0.25, SEED, zero_centered=True), strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("p", [0.0, 0.25])
def test_the_op_has_every_gradient_and_draws_its_mask_from_the_generator(p: float) -> None:
    case = [None if t is None else t.unflatten(0, (3, 2)) if t.dim() == 2 else t
            for t in draw(6, 40, torch.float32, True, True)]  # fmt: skip
    x, x_bias, residual, weight, bias, d_out, dy = case
    leaves = [t.clone().requires_grad_() for t in (x, x_bias, residual, weight, bias)]

    def run(seed: int) -> list[Tensor]:
        torch.manual_seed(seed)
        options: dict[str, Any] = {"x_bias": leaves[1], "p": p, "eps": EPS}
        out, y, scale = add_norm(leaves[0], leaves[2], leaves[3], leaves[4], **options)
        assert out.shape == y.shape == x.shape and not out._is_view() and not scale.requires_grad
        torch.testing.assert_close(scale, (out.flatten(0, -2).var(1, correction=0) + EPS).rsqrt())
        return [out, y, *torch.autograd.grad([out, y], leaves, [d_out, dy])]

    found, again, other = run(3), run(3), run(4)
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
    assert torch.equal(found[0], other[0]) == (p == 0)
    keep = found[0] != residual
    for got, expected in zip(found, of_torch(case, keep, p), strict=True):
        assert relative_error(got, expected) < 1e-6


def test_one_of_both_results_and_frozen_parameters_are_enough() -> None:
    x, _, residual, weight, bias, *_ = draw(4, 16, torch.float32, True, True)
    x.requires_grad_()
    out, y, _ = add_norm(x, residual, weight, bias, eps=EPS)
    assert torch.equal(torch.autograd.grad(out.sum(), x, retain_graph=True)[0], torch.ones_like(x))
    expected = torch.autograd.grad(F.layer_norm(x + residual, (16,), weight, bias, EPS).square().sum(), x)[0]
    torch.testing.assert_close(torch.autograd.grad(y.square().sum(), x)[0], expected)
    empty = torch.empty(0, 3, 16, device=DEVICE, requires_grad=True)
    _, y, _ = add_norm(empty, empty.detach(), weight, None, p=0.5, eps=EPS)
    assert torch.autograd.grad(y.sum(), empty)[0].shape == empty.shape


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"p": 1.0}, r"p=1\.0: must be >= 0 and < 1"),
        ({"p": float("nan")}, r"p=nan: must be >= 0 and < 1"),
        ({"eps": -1.0}, r"eps=-1\.0: must be >= 0"),
        ({"weight": torch.ones(7)}, r"weight is \(7,\): must be \(8,\) for x \(2, 8\)"),
        ({"bias": torch.ones(7)}, r"bias is \(7,\): must be \(8,\) for x \(2, 8\)"),
        ({"x_bias": torch.ones(7)}, r"x_bias is \(7,\): must be \(8,\) for x \(2, 8\)"),
        ({"residual": torch.ones(2, 8).half()}, r"residual is \(2, 8\) torch\.float16: must be \(2, 8\) torch\.float"),
        ({"residual": torch.ones(8)}, r"residual is \(8,\) torch\.float32: must be \(2, 8\) torch\.float32"),
    ],
)
def test_add_norm_refuses_what_it_cannot_compute(change: dict[str, Any], message: str) -> None:
    given = {"residual": torch.ones(2, 8), "weight": torch.ones(8), "bias": None, "eps": EPS, **change}
    with pytest.raises(ValueError, match=f"^{message}"):
        add_norm(torch.ones(2, 8), **given)


def test_the_mask_keeps_its_share() -> None:
    ones = torch.ones(256, 1024, device=DEVICE)
    torch.manual_seed(1)
    for p in (0.1, 0.5, 1 - 2.0**-16):
        out, *_ = add_norm(ones, torch.zeros_like(ones), ones[0], None, p=p, eps=EPS)
        assert abs(float((out == 0).float().mean()) - p) < 5 * (p * (1 - p) / ones.numel()) ** 0.5 + 1e-6


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("rows", "hidden", "p"),
    [(4099, 768, 0.125), (1000, 1000, 0.0), (70_001, 64, 0.25), (130, 4096, 0.5), (9, 16384, 0.125), (5, 17001, 0.125)],
)
@pytest.mark.parametrize(("biased", "layer_norm"), BOTH)
def test_N1_add_norm_equals_float64_on_a_gpu(
    rows: int, hidden: int, p: float, dtype: torch.dtype, biased: bool, layer_norm: bool
) -> None:
    """Each result is at most twice as far from float64 as torch's own functions of the same dtype."""
    case = draw(rows, hidden, dtype, biased, layer_norm)
    x, x_bias, residual, weight, bias, d_out, dy = case
    leaves = [None if t is None else t.clone().requires_grad_() for t in (x, x_bias, residual, weight, bias)]
    seed = torch.tensor(SEED, device=DEVICE) if p else None
    options = AddNormOptions(round(p * 2**DROP_BITS), EPS, 0.0)

    def run() -> list[Tensor]:
        with poisoned_empty():
            out, y, *_ = add_norm_op(*leaves[:3], seed, *leaves[3:], options)
            wanted = [t for t in leaves if t is not None]
            return [out, y, *torch.autograd.grad([out, y], wanted, [d_out, dy])]

    keep = keep_of(SEED, rows, hidden, p)
    found, truth, plain = run(), truth_of(case, p, SEED), of_torch(case, keep, p)
    for got, expected, torchs in zip(found, truth, plain, strict=True):
        assert got.dtype == dtype
        least = 1e-6 if dtype == torch.float32 else 0
        assert relative_error(got, expected) <= max(2 * relative_error(torchs, expected), least)
    assert all(torch.equal(a, b) for a, b in zip(found, run(), strict=True))
