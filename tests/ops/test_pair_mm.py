"""Products of a few pairs: the kernel, interpreted without a GPU, and the reference, against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megablocks.ops.grouped import pair_mm_triton
from megablocks.ops.grouped.pair_mm import MOST_PAIRS, pair_mm, pair_mm_ref
from megablocks.testing.oracle import relative_error
from megablocks.testing.poison import poisoned_empty

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [(1, 1, 1, 64, 64), (3, 2, 5, 67, 13), (5, 8, 4, 200, 100), (40, 3, 7, 60, 130), (0, 2, 3, 8, 8)]
"""T, K, E, I, N."""


def draw(shape: tuple[int, ...], dtype: torch.dtype, inner_first: bool) -> tuple[Tensor, ...]:
    """x, w, ids with some outside [0, E), bias and scale."""
    tokens, top_k, experts, inner, outer = shape
    g = torch.Generator().manual_seed(sum(shape))
    x = torch.randn(tokens, 2 * inner, generator=g)[:, inner:]
    w = torch.randn(experts, inner, outer, generator=g)
    if inner_first:
        w = w.transpose(1, 2).contiguous().transpose(1, 2)
    ids = torch.randint(-1, experts + 1, (tokens * top_k,), generator=g)
    bias, scale = torch.randn(experts, outer, generator=g), torch.randn(tokens * top_k, generator=g)
    x, w, bias = (t.to(DEVICE, dtype) for t in (x, w, bias))
    return x, w, ids.to(DEVICE), bias, scale.to(DEVICE)


def truth(x: Tensor, w: Tensor, ids: Tensor, bias: Tensor | None, scale: Tensor | None) -> Tensor:
    y = torch.zeros(len(ids), w.shape[2], dtype=torch.float64, device=x.device)
    for pair, expert in enumerate(ids.tolist()):
        if 0 <= expert < len(w):
            y[pair] = x[pair * len(x) // len(ids)].double() @ w[expert].double()
            y[pair] += 0 if bias is None else bias[expert].double()
            y[pair] *= 1 if scale is None else scale[pair].double()
    return y


def launch(x: Tensor, w: Tensor, ids: Tensor, bias: Tensor | None, scale: Tensor | None) -> Tensor:
    return pair_mm_triton.pair_mm_launch(x, w, ids, bias, scale, x.dtype if scale is None else torch.float32)


@pytest.mark.any_device
@pytest.mark.parametrize("inner_first", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_kernel_and_reference_equal_float64(shape: tuple[int, ...], inner_first: bool) -> None:
    x, w, ids, bias, scale = draw(shape, torch.float32, inner_first)
    for b, s in ((None, None), (bias, None), (bias, scale)):
        expected = truth(x, w, ids, b, s)
        for run in (launch, pair_mm_ref):
            with poisoned_empty():
                y = run(x, w, ids, b, s)
            assert y.shape == expected.shape and not y[(ids < 0) | (ids >= len(w))].any()
            assert relative_error(y, expected) < 1e-6


@pytest.mark.any_device
@pytest.mark.parametrize("kind", ["one", "none"])
def test_R2_all_pairs_to_one_expert_and_to_none(kind: str) -> None:
    x, w, ids, bias, scale = draw((40, 3, 7, 60, 130), torch.float32, True)
    ids.fill_(6 if kind == "one" else -1)
    with poisoned_empty():
        y = launch(x, w, ids, bias, scale)
    assert relative_error(y, truth(x, w, ids, bias, scale)) < 1e-6 if kind == "one" else not y.any()


@pytest.mark.gpu  # without one numpy multiplies, whose bits depend on a row's place
def test_H4_a_pair_has_the_same_bits_whatever_the_others_are() -> None:
    x, w, ids, bias, scale = draw((40, 3, 7, 60, 130), torch.float32, True)
    whole = launch(x, w, ids, bias, scale)
    for tokens in (1, 7, 21):  # both sizes of the vector of ids
        pairs = slice(0, 3 * tokens)
        assert torch.equal(launch(x[:tokens], w, ids[pairs], bias, scale[pairs]), whole[pairs])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_N1_half_types_are_as_exact_as_torchs(dtype: torch.dtype) -> None:
    x, w, ids, bias, scale = draw((64, 8, 16, 256, 384), dtype, True)
    expected = truth(x, w, ids, bias, scale)
    plain = relative_error(pair_mm_ref(x, w, ids, bias, scale), expected)
    assert relative_error(pair_mm(x, w, ids, bias, scale), expected) <= 2 * plain


@pytest.mark.gpu
def test_N4_weights_past_two_to_the_31_elements() -> None:
    w = torch.zeros(2**31 // (64 * 64) + 2, 64, 64, dtype=torch.bfloat16, device=DEVICE)
    w[-1] = torch.eye(64)
    x = torch.randn(1, 64, device=DEVICE).bfloat16()
    ids = torch.tensor([len(w) - 1], device=DEVICE)
    assert torch.equal(pair_mm(x, w, ids), x)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"w": torch.zeros(2, 5, 3)}, r"w is \(2, 5, 3\) torch.float32: must be \(experts, 4, outer size\)"),
        ({"w": torch.zeros(2, 4, 3).double()}, "torch.float64: must be .* of x's torch.float32"),
        ({"ids": torch.zeros(3).int()}, r"ids is \(3,\) torch.int32: must be \(R,\) integer, R a multiple of the 2"),
        ({"ids": torch.zeros(4)}, "torch.float32: must be"),
        ({"bias": torch.zeros(3)}, r"bias is \(3,\): must be \(2, 3\)"),
        ({"scale": torch.zeros(3)}, r"scale is \(3,\): must be \(4,\)"),
    ],
)
def test_bad_input_is_named(changed: dict[str, Tensor], message: str) -> None:
    given = {"x": torch.zeros(2, 4), "w": torch.zeros(2, 4, 3), "ids": torch.zeros(4).int()}
    with pytest.raises(ValueError, match=message):
        pair_mm(**(given | changed))


def test_more_pairs_than_the_kernel_takes_are_computed() -> None:
    x, w, ids, bias, scale = draw((MOST_PAIRS, 2, 3, 8, 8), torch.float32, False)
    assert relative_error(pair_mm(x, w, ids, bias, scale), truth(x, w, ids, bias, scale)) < 1e-6
