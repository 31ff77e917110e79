"""Products of a few pairs: the kernel, interpreted without a GPU, and the reference, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megablocks.ops.activation_table import ACTIVATIONS, Activation
from megablocks.ops.grouped import pair_mm_triton
from megablocks.ops.grouped.pair_mm import MOST_PAIRS, pair_mlp_op, pair_mlp_ref, pair_mm, pair_mm_ref
from megablocks.testing.oracle import FORMULAS, relative_error
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
    ids[ids == experts] = 2**32  # expert 0 in 32 bits
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
    return pair_mm_triton.pair_mm_launch(x, w, ids, bias, scale)


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
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32])
def test_ids_of_any_integer_dtype(dtype: torch.dtype) -> None:
    """With more experts than int8 can name."""
    x, w, _, bias, scale = draw((3, 2, 200, 8, 8), torch.float32, True)
    ids = torch.tensor([0, 1, 127, 5, 1, 9], dtype=dtype, device=DEVICE)
    expected = truth(x, w, ids, bias, scale)
    for run in (launch, pair_mm_ref):
        assert relative_error(run(x, w, ids, bias, scale), expected) < 1e-6


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


MLP_SHAPES = [(1, 1, 1, 64, 64), (3, 2, 5, 131, 37), (22, 3, 4, 20, 18), (0, 2, 3, 8, 8)]
"""T, K, E, H, I."""


def draw_mlp(
    shape: tuple[int, ...], name: str, dtype: torch.dtype = torch.float32, inner_first: bool = True
) -> tuple[Tensor, ...]:
    """x, ids with some outside [0, E), weight, up, down and both biases."""
    tokens, top_k, experts, hidden, width = shape
    g = torch.Generator().manual_seed(sum(shape))
    columns = width * (1 + Activation(name).gated)
    x, up, down = (
        torch.randn(s, generator=g) for s in ((tokens, hidden), (experts, hidden, columns), (experts, width, hidden))
    )
    up, down = up / hidden**0.5, down / width**0.5
    if inner_first:
        up, down = (w.mT.contiguous().mT for w in (up, down))
    ids = torch.randint(-1, experts + 1, (tokens, top_k), generator=g)
    weight, *biases = (torch.randn(s, generator=g) for s in ((tokens, top_k), (experts, columns), (experts, hidden)))
    x, up, down, *biases = (t.to(DEVICE, dtype) for t in (x, up, down, *biases))
    return x, ids.to(DEVICE), weight.to(DEVICE), up, down, *biases


def true_mlp(x: Tensor, ids: Tensor, weight: Tensor, *parameters: Tensor | None, name: str, form: str) -> Tensor:
    up, down, up_bias, down_bias = (t if t is None else t.double() for t in parameters)
    y, activation = torch.zeros(x.shape, dtype=torch.float64, device=x.device), Activation(name, form)
    for token, slot in torch.cartesian_prod(*map(torch.arange, ids.shape)).tolist():
        expert = int(ids[token, slot])
        if not 0 <= expert < len(up):
            continue
        h = x[token].double() @ up[expert] + (0 if up_bias is None else up_bias[expert])
        pre, gate = h.chunk(2) if activation.gated else (h, 1)
        act = FORMULAS[activation.unary](pre, form) * gate
        row = act @ down[expert] + (0 if down_bias is None else down_bias[expert])
        y[token] += weight[token, slot].double() * row
    return y


def launch_mlp(*arguments: Any) -> Tensor:
    return pair_mm_triton.pair_mlp_launch(*arguments)


@pytest.mark.any_device
@pytest.mark.parametrize("inner_first", [False, True])
@pytest.mark.parametrize("shape", MLP_SHAPES)
def test_mlp_kernel_and_reference_equal_float64(shape: tuple[int, ...], inner_first: bool) -> None:
    *inputs, up_bias, down_bias = draw_mlp(shape, "swiglu", inner_first=inner_first)
    for biases in ((None, None), (up_bias, down_bias)):
        expected = true_mlp(*inputs, *biases, name="swiglu", form="tanh")
        for run in (launch_mlp, pair_mlp_ref):
            with poisoned_empty():
                y = run(*inputs, *biases, Activation("swiglu"))
            assert relative_error(y, expected) < 1e-6


@pytest.mark.any_device
def test_an_mlp_without_width_sums_its_biases() -> None:
    x, ids, weight, _, _, _, bias = draw_mlp((3, 2, 5, 20, 1), "swiglu")
    parameters = x.new_empty(5, 20, 0), x.new_empty(5, 0, 20), None, bias
    expected = true_mlp(x, ids, weight, *parameters, name="swiglu", form="tanh")
    for run in (launch_mlp, pair_mlp_ref):
        with poisoned_empty():
            y = run(x, ids, weight, *parameters, Activation("swiglu"))
        assert relative_error(y, expected) < 1e-6


@pytest.mark.any_device
@pytest.mark.parametrize("form", ["tanh", "none"])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_every_activation_of_the_mlp(name: str, form: str) -> None:
    inputs = draw_mlp((2, 2, 3, 20, 12), name)
    expected = true_mlp(*inputs, name=name, form=form)
    for run in (launch_mlp, pair_mlp_ref):
        assert relative_error(run(*inputs, Activation(name, form)), expected) < 1e-6


@pytest.mark.any_device
@pytest.mark.parametrize("kind", ["one", "none"])
def test_R2_all_pairs_of_the_mlp_to_one_expert_and_to_none(kind: str) -> None:
    x, ids, *others = draw_mlp((7, 3, 7, 20, 9), "geglu")
    ids.fill_(6 if kind == "one" else 7)  # the same expert three times a token
    with poisoned_empty():
        y = launch_mlp(x, ids, *others, Activation("geglu"))
    expected = true_mlp(x, ids, *others, name="geglu", form="tanh")
    assert relative_error(y, expected) < 1e-6 if kind == "one" else not y.any()


@pytest.mark.gpu  # without one numpy multiplies, whose bits depend on a row's place
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_H4_a_token_has_the_same_bits_whatever_the_others_are(dtype: torch.dtype) -> None:
    x, ids, weight, *parameters = draw_mlp((64, 8, 16, 256, 384), "swiglu", dtype)
    whole = launch_mlp(x, ids, weight, *parameters, Activation("swiglu"))
    for _ in range(20):  # each time other programs are the last of their tokens
        assert torch.equal(launch_mlp(x, ids, weight, *parameters, Activation("swiglu")), whole)
    for some in (slice(0, 1), slice(5, 6), slice(0, 8), slice(7, 40)):  # both sizes of the vector of ids
        alone = launch_mlp(x[some], ids[some], weight[some], *parameters, Activation("swiglu"))
        assert torch.equal(alone, whole[some])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 64])
def test_N1_the_mlp_is_as_exact_as_torchs_in_half_types(dtype: torch.dtype, tokens: int) -> None:
    inputs = draw_mlp((tokens, 8, 16, 256, 384), "swiglu", dtype)
    expected = true_mlp(*inputs, name="swiglu", form="tanh")
    plain = relative_error(pair_mlp_ref(*inputs, Activation("swiglu")), expected)
    assert relative_error(launch_mlp(*inputs, Activation("swiglu")), expected) <= 1.5 * plain


def test_more_pairs_than_the_mlps_kernel_takes_are_computed() -> None:
    inputs = draw_mlp((MOST_PAIRS, 2, 3, 8, 8), "swiglu")
    y = pair_mlp_op(*inputs, Activation("swiglu"))
    assert (
        relative_error(
            y, pair_mlp_ref(*(t.double() if t.is_floating_point() else t for t in inputs), Activation("swiglu"))
        )
        < 1e-6
    )
