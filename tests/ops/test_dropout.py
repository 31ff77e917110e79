"""Bias, dropout and residual: the kernel, interpreted without a GPU, and the op. The reference says what is kept."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megablocks.ops.dropout import _philox, dropout_add, dropout_add_op, dropout_add_ref
from megablocks.ops.dropout_triton import dropout_add_launch
from megablocks.testing.oracle import relative_error
from megablocks.testing.poison import poisoned_empty

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def seed_of(value: int) -> Tensor:
    return torch.tensor(value, device=DEVICE)


def kept(shape: tuple[int, ...], seed: Tensor, p: float) -> Tensor:
    """By the reference without bias and residual."""
    ones = torch.ones(shape, dtype=torch.float64, device=DEVICE)
    return dropout_add_ref(ones, None, None, seed, p) != 0


def test_philox_gives_the_published_numbers() -> None:
    """Known answers of the Random123 library, with a counter and a key of zeros."""
    words = _philox(torch.tensor(0), torch.tensor([0]))
    assert [hex(int(word)) for word in words] == ["0x6627e8d5", "0xe169c58d", "0xbc57ac4c", "0x9b00dbd8"]


@pytest.mark.parametrize("shape", [(3, 13), (2, 5, 67), (1, 9001), (130, 128)])
@pytest.mark.parametrize(("biased", "added"), [(True, True), (False, True), (False, False)])
def test_the_kernel_equals_the_reference(shape: tuple[int, ...], biased: bool, added: bool) -> None:
    g = torch.Generator().manual_seed(sum(shape))
    x, residual = (torch.randn(shape, generator=g).to(DEVICE) for _ in range(2))
    bias = torch.randn(shape[-1], generator=g).to(DEVICE) if biased else None
    arguments = x, bias, residual if added else None, seed_of(2**62 + 12345), 0.3
    with poisoned_empty():
        y = dropout_add_launch(*arguments)
    expected = dropout_add_ref(*arguments)
    assert torch.equal(y == (residual if added else 0), expected == (residual if added else 0))
    assert relative_error(y, expected.double()) < 1e-6


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_kept_entries_are_as_many_as_asked_and_independent(p: float) -> None:
    shape = (500, 1000)
    mask = kept(shape, seed_of(7), p)
    deviation = (p * (1 - p) / mask.numel()) ** 0.5
    assert abs(float(mask.double().mean()) - (1 - p)) < 5 * deviation
    flat = mask.flatten()
    for apart in (1, 2, 1024, 4096, 8192):  # neighbors, halves of a word, words of a call, calls
        both = (flat[apart:] & flat[:-apart]).double().mean()
        assert abs(float(both) - (1 - p) ** 2) < 8 * deviation
    assert abs(float((mask & kept(shape, seed_of(8), p)).double().mean()) - (1 - p) ** 2) < 8 * deviation


@pytest.mark.parametrize("biased", [True, False])
def test_values_and_gradients_are_those_of_the_formula(biased: bool) -> None:
    shape, p = (4, 7, 33), 0.25
    seed = seed_of(5)
    inputs = [torch.randn(shape, dtype=torch.float64, device=DEVICE, requires_grad=True) for _ in range(2)]
    bias = torch.randn(33, dtype=torch.float64, device=DEVICE, requires_grad=True)
    dy = torch.randn(shape, dtype=torch.float64, device=DEVICE)
    y = dropout_add_op(inputs[0], bias if biased else None, inputs[1], seed, p)
    expected = inputs[1] + kept(shape, seed, p) * (inputs[0] + (bias if biased else 0)) / (1 - p)
    leaves = [*inputs, bias] if biased else inputs
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(torch.autograd.grad(y, leaves, dy), torch.autograd.grad(expected, leaves, dy))


def test_the_seed_follows_the_generator_and_the_residuals_dtype_stays() -> None:
    x, residual = torch.randn(3, 40, device=DEVICE).bfloat16(), torch.randn(3, 40, device=DEVICE)
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        runs.append([dropout_add(x, residual, 0.5) for _ in range(2)])
    assert torch.equal(runs[0][0], runs[1][0]) and torch.equal(runs[0][1], runs[1][1])
    assert not torch.equal(runs[0][0], runs[0][1]) and not torch.equal(runs[0][0], runs[2][0])
    assert runs[0][0].dtype == torch.float32
    assert torch.equal(dropout_add(x, residual, 0.0), x + residual)


def test_arguments_that_do_not_fit_are_refused() -> None:
    x = torch.zeros(3, 8)
    for p in (1.0, -0.1, float("nan")):
        with pytest.raises(ValueError, match=f"p={p}: must be at least 0 and smaller than 1"):
            dropout_add(x, x, p)
    with pytest.raises(ValueError, match=r"residual is \(3,\): must have x's shape \(3, 8\)"):
        dropout_add(x, x[:, 0], 0.1)
    with pytest.raises(ValueError, match=r"bias is \(7,\): must be \(8,\)"):
        dropout_add(x, x, 0.1, bias=x[0, :7])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1000, 768), (4099, 13), (70_001, 64)])
@pytest.mark.parametrize("biased", [True, False])
def test_N1_dropout_equals_float64_on_a_gpu(shape: tuple[int, ...], dtype: torch.dtype, biased: bool) -> None:
    x, residual, dy = (torch.randn(shape, device=DEVICE, dtype=dtype, requires_grad=True) for _ in range(3))
    bias = torch.randn(shape[-1], device=DEVICE, dtype=dtype, requires_grad=True) if biased else None
    leaves, seed, p = [x, residual, *([bias] if biased else [])], seed_of(11), 0.125
    results = []
    for kind in (dtype, torch.float64):
        wide = [t.detach().to(kind).requires_grad_() for t in leaves]
        y = dropout_add_op(wide[0], wide[2] if biased else None, wide[1], seed, p)
        results.append([y, *torch.autograd.grad(y, wide, dy.detach().to(kind))])
    for value, expected in zip(*results, strict=True):
        rounded = relative_error(expected.to(dtype), expected)
        assert value.dtype == dtype and relative_error(value, expected) <= max(4 * rounded, 1e-5)
