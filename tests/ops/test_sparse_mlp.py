"""sparse_mlp: bias, activation and its gradient in the products' epilogues, against the same layer written out."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from megablocks.ops.activation import UNARY, activation_backward_ref, activation_ref
from megablocks.ops.sparse import Matrix, hopper, kernels, sparse_mlp, topology
from megablocks.ops.sparse.epilogue import Epilogue
from megablocks.testing.poison import poisoned_empty
from megablocks.testing.tolerances import assert_as_exact_as

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
FORMS = [(name, "tanh") for name in UNARY] + [("gelu", "none")]


def pattern(device: str, size: int, counts: tuple[int, ...] = (70, 0, 200, 3)) -> Matrix:
    offsets = torch.tensor([0, *counts], dtype=torch.int32, device=device).cumsum(0).int()
    return topology(offsets, 2 * size, max_rows=sum(counts) + size, block_size=size).pattern


def dense(p: Matrix, x: Tensor, w1: Tensor, w2: Tensor, bias: Tensor | None, name: str, approximate: str) -> Tensor:
    mask = p.with_data(torch.ones(p.num_blocks, p.block_size, p.block_size, device=x.device)).to_dense()
    pre = x @ w1 if bias is None else x @ w1 + bias
    return (activation_ref(pre, None, name, approximate) * mask.to(x.dtype)) @ w2


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("name,approximate", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_N10_every_activation_and_its_gradients(
    device: str, with_bias: bool, name: str, approximate: str, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    p = pattern(device, 128 if device == "cuda" else 64)

    def rand(*shape: int) -> Tensor:
        return (torch.randn(*shape, device=device) / shape[0] ** 0.25).to(dtype).requires_grad_()

    inputs = [rand(p.shape[0], 40), rand(40, p.shape[1]), rand(p.shape[1], 48)] + [rand(p.shape[1])] * with_bias
    g = torch.randn(p.shape[0], 48, device=device).to(dtype)

    def all_of(inputs: list[Tensor], fused: bool) -> list[Tensor]:
        x, w1, w2, *bias = inputs
        b = bias[0] if bias else None
        if fused:
            with poisoned_empty():
                y = sparse_mlp(x, w1, w2, p, bias=b, activation=name, approximate=approximate)
                return [y, *torch.autograd.grad(y, inputs, g)]
        y = dense(p, x, w1, w2, b, name, approximate)
        return [y, *torch.autograd.grad(y, inputs, g.to(y.dtype))]

    truth = all_of([t.detach().double().requires_grad_() for t in inputs], False)
    for got, plain, want in zip(all_of(inputs, True), all_of(inputs, False), truth, strict=True):
        assert_as_exact_as(got, plain, want, 3.0)  # a cruder exponential than torch's, and sums of rounded values


def launched(p: Matrix, a: Tensor, b: Tensor, epilogue: Epilogue, path: str) -> Tensor:
    if path == "hopper":
        return hopper.sdd(a, b, p.row_indices, p.column_indices, p.offsets, p.run, epilogue)
    return kernels.sdd(a, b, p.row_indices, p.column_indices, p.offsets, p.block_size, epilogue)


PATHS = [
    "triton",
    pytest.param("hopper", marks=[pytest.mark.gpu, pytest.mark.skipif(not hopper.is_available(), reason="no Hopper")]),
]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name,approximate", FORMS)
def test_N10_epilogues_of_each_kernel(path: str, name: str, approximate: str) -> None:
    """With a long reduction too, where the Hopper path takes another tile."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    p = pattern(device, 128 if path == "hopper" else 64)
    n = p.num_blocks
    for k, with_bias in itertools.product((40, 1024 if device == "cuda" else 104), (False, True)):
        a = (torch.randn(p.shape[0], k, device=device) / k**0.5).to(dtype)
        b = torch.randn(k, p.shape[1], device=device).to(dtype)
        bias = torch.randn(p.shape[1], device=device) if with_bias else None
        exact = approximate == "none"
        act = torch.full((n, p.block_size, p.block_size), float("nan"), device=device, dtype=dtype)
        pre = launched(p, a, b, Epilogue("activate", name, exact, bias=bias, act=act), path)
        used = p.row_indices >= 0
        product = a.double() @ b.double()
        want = product if bias is None else product + bias.double()

        def blocks(t: Tensor) -> Tensor:
            size = p.block_size
            cut = t.view(t.shape[0] // size, size, t.shape[1] // size, size).transpose(1, 2)  # noqa: B023
            return cut[p.row_indices[used].long(), p.column_indices[used].long()]  # noqa: B023

        tolerance = {"rtol": 2**-7, "atol": 2**-7} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
        torch.testing.assert_close(pre[used].double(), blocks(want), **tolerance)
        want_act = activation_ref(pre[used].double(), None, name, approximate)
        torch.testing.assert_close(act[used].double(), want_act, **tolerance)
        slope = launched(p, a, b, Epilogue("slope", name, exact, pre=pre), path)
        want_slope = activation_backward_ref(blocks(product), pre[used].double(), None, name, approximate)[0]
        torch.testing.assert_close(slope[used].double(), want_slope, **tolerance)


def test_refusals_name_the_argument() -> None:
    p = pattern("cpu", 64)
    m, n = p.shape
    x, w1, w2 = torch.zeros(m, 8), torch.zeros(8, n), torch.zeros(n, 4)
    with pytest.raises(ValueError, match="activation='swiglu': must be one of gelu, silu, relu, relu2; gated ones are"):
        sparse_mlp(x, w1, w2, p, activation="swiglu")
    with pytest.raises(ValueError, match="approximate='erf': must be 'tanh' or 'none'"):
        sparse_mlp(x, w1, w2, p, approximate="erf")
    with pytest.raises(ValueError, match="pattern is a transposed view"):
        sparse_mlp(x, w1, w2, p.t())
    with pytest.raises(ValueError, match=r"w2 is \(8, 4\), must be"):
        sparse_mlp(x, w1, torch.zeros(8, 4), p)
    with pytest.raises(ValueError, match=r"bias is \(3,\) on cpu, must be"):
        sparse_mlp(x, w1, w2, p, bias=torch.zeros(3))
    with pytest.raises(ValueError, match="w1 is torch.float16 on cpu, must be torch.float32"):
        sparse_mlp(x, w1.half(), w2, p)
