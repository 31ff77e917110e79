"""Rotary embedding: the kernel, interpreted without a GPU, and the op, against matrices of float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megablocks.ops.rope import rope, rope_ref
from megablocks.ops.rope_triton import rope_launch
from megablocks.testing.oracle import relative_error
from megablocks.testing.poison import poisoned_empty

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SCALE = 1.25
SHAPES = [(5, 2, 3, 16, 16), (3, 1, 1, 6, 2), (4, 3, 5, 20, 12), (2, 1, 67, 13, 10), (2, 130, 67, 6, 4)]
"""S, B, N, D, R."""


def draw(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """x and dy, which are parts of wider tensors as in a fused projection, and angles, large and other in each half."""
    *sizes, rotated = shape
    g = torch.Generator().manual_seed(sum(shape))
    x, dy = (torch.randn(*sizes[:2], sizes[2], 3 * sizes[3], generator=g)[..., sizes[3] : 2 * sizes[3]] for _ in "xy")
    angles = 5000 * torch.rand(sizes[0], rotated, generator=g)
    return x.to(DEVICE, dtype), dy.to(DEVICE, dtype), angles.to(DEVICE)


def matrices(angles: Tensor, size: int, interleaved: bool) -> Tensor:
    """The matrix (S, D, D) of each position, in float64."""
    positions, rotated = angles.shape
    out = torch.eye(size, dtype=torch.float64, device=angles.device).repeat(positions, 1, 1)
    for pair in range(rotated // 2):
        i, j = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + rotated // 2)
        first, second = angles[:, i].double(), angles[:, j].double()
        out[:, i, i], out[:, i, j] = SCALE * first.cos(), -SCALE * first.sin()
        out[:, j, j], out[:, j, i] = SCALE * second.cos(), SCALE * second.sin()
    return out


def truth(x: Tensor, dy: Tensor, angles: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    matrix = matrices(angles, x.shape[3], interleaved)
    return torch.einsum("sij,sbnj->sbni", matrix, x.double()), torch.einsum("sij,sbni->sbnj", matrix, dy.double())


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_kernel_and_reference_equal_float64(shape: tuple[int, ...], interleaved: bool) -> None:
    x, dy, angles = draw(shape, torch.float32)
    y, dx = truth(x, dy, angles, interleaved)
    for run in (rope_launch, rope_ref):
        with poisoned_empty():
            got = run(x, angles, interleaved, SCALE, False), run(dy, angles, interleaved, SCALE, True)
        assert relative_error(got[0], y) < 1e-6 and relative_error(got[1], dx) < 1e-6
        assert all(t.is_contiguous() and t.shape == x.shape for t in got)


@pytest.mark.parametrize("interleaved", [False, True])
def test_gradients_equal_float64(interleaved: bool) -> None:
    x, dy, angles = draw(SHAPES[2], torch.float64)
    x.requires_grad_()
    y = rope(x, angles, interleaved=interleaved, scale=SCALE)
    torch.testing.assert_close((y, *torch.autograd.grad(y, x, dy)), truth(x.detach(), dy, angles, interleaved))


def test_no_heads_no_pairs_and_a_strided_last_dimension() -> None:
    angles = torch.randn(3, 4, device=DEVICE)
    assert rope(torch.empty(3, 0, 2, 8, device=DEVICE), angles).shape == (3, 0, 2, 8)
    x = torch.randn(3, 2, 8, 5, device=DEVICE).transpose(2, 3)
    assert torch.equal(rope_launch(x, angles[:, :0], False, 1.0, False), x)
    assert (
        relative_error(rope_launch(x, angles, False, 1.0, False), rope_ref(x.double(), angles, False, 1.0, False))
        < 1e-6
    )


@pytest.mark.parametrize(
    ("x", "angles", "message"),
    [
        ((3, 2, 8), (3, 4), r"x is \(3, 2, 8\): must be \(positions, sequences, heads"),
        ((3, 2, 1, 8), (3, 5), r"angles is \(3, 5\): must be \(3, an even number up to 8\)"),
        ((3, 2, 1, 8), (3, 10), r"angles is \(3, 10\): must be"),
        ((3, 2, 1, 8), (2, 4), r"angles is \(2, 4\): must be"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(x: tuple[int, ...], angles: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rope(torch.zeros(x), torch.zeros(angles))
    with pytest.raises(ValueError, match="angles requires a gradient: detach it"):
        rope(torch.zeros(3, 2, 1, 8), torch.zeros(3, 4, requires_grad=True))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "shape", [(4096, 2, 12, 64, 64), (1000, 3, 5, 96, 48), (7, 1, 3, 128, 128), (67, 200, 13, 40, 36)]
)
@pytest.mark.parametrize("interleaved", [False, True])
def test_N1_rope_equals_float64_on_a_gpu(shape: tuple[int, ...], dtype: torch.dtype, interleaved: bool) -> None:
    x, dy, angles = draw(shape, dtype)
    results = []
    for wide in (x.dtype, torch.float64):
        given = x.detach().to(wide).requires_grad_()
        y = rope(given, angles, interleaved=interleaved, scale=SCALE)
        results.append((y, *torch.autograd.grad(y, given, dy.to(wide))))
    for value, wide_value, exact in zip(*results, truth(x, dy, angles, interleaved), strict=True):
        assert value.dtype == dtype and relative_error(wide_value, exact) < 1e-12
        rounded = relative_error(exact.to(dtype), exact)
        assert relative_error(value, exact) <= max(2 * rounded, 1e-6)
