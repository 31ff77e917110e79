"""sparse_mlp: bias, activation and its gradient in the products' epilogues, against the same layer written out."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from megablocks.ops.activation import activation_backward_ref, activation_ref
from megablocks.ops.activation_table import GATED, UNARY, Activation
from megablocks.ops.hopper import is_available
from megablocks.ops.sparse import Matrix, kernels, sparse_mlp, topology
from megablocks.ops.sparse import products_hopper as hopper
from megablocks.ops.sparse.products import Epilogue
from megablocks.testing.poison import poisoned_empty
from megablocks.testing.tolerances import assert_as_exact_as

GELU = Activation("gelu")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
UNARY_FORMS = [(name, "tanh") for name in UNARY] + [("gelu", "none")]
FORMS = [*UNARY_FORMS, *((name, "tanh") for name in GATED), ("geglu", "none")]


def pattern(device: str, size: int, counts: tuple[int, ...] = (70, 0, 200, 3)) -> Matrix:
    offsets = torch.tensor([0, *counts], dtype=torch.int32, device=device).cumsum(0).int()
    return topology(offsets, 2 * size, max_rows=sum(counts) + size, block_size=size).pattern


def dense(p: Matrix, t: dict[str, Tensor], name: str, approximate: str) -> Tensor:
    x = t["x"]
    mask = p.with_data(torch.ones(p.num_blocks, p.block_size, p.block_size, device=x.device)).to_dense()
    pre = x @ t["w1"] + t.get("bias", 0)
    gate = x @ t["v1"] + t.get("gate_bias", 0) if "v1" in t else None
    return (activation_ref(pre, gate, Activation(name, approximate)) * mask.to(x.dtype)) @ t["w2"]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name,approximate", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_N10_every_activation_and_its_gradients(
    device: str, with_bias: bool, recompute: bool, name: str, approximate: str, dtype: torch.dtype
) -> None:
    p = pattern(device, 128 if device == "cuda" else 64)

    def rand(*shape: int) -> Tensor:
        return (torch.randn(*shape, device=device) / shape[0] ** 0.25).to(dtype).requires_grad_()

    inputs = {"x": rand(p.shape[0], 40), "w1": rand(40, p.shape[1]), "w2": rand(p.shape[1], 48)}
    if name in GATED:
        inputs["v1"] = rand(40, p.shape[1])
    if with_bias:
        inputs |= {b: rand(p.shape[1]) for b in ("bias", "gate_bias")[: 1 + (name in GATED)]}
    g = torch.randn(p.shape[0], 48, device=device).to(dtype)

    def all_of(t: dict[str, Tensor], fused: bool) -> list[Tensor]:
        if fused:
            with poisoned_empty():
                y = sparse_mlp(**t, pattern=p, activation=Activation(name, approximate), recompute=recompute)
                return [y, *torch.autograd.grad(y, list(t.values()), g)]
        y = dense(p, t, name, approximate)
        return [y, *torch.autograd.grad(y, list(t.values()), g.to(y.dtype))]

    truth = all_of({key: t.detach().double().requires_grad_() for key, t in inputs.items()}, False)
    for got, plain, want in zip(all_of(inputs, True), all_of(inputs, False), truth, strict=True):
        assert_as_exact_as(got, plain, want, 3.0)  # a cruder exponential than torch's, and sums of rounded values


@pytest.mark.parametrize("name", ["gelu", "swiglu"])
@pytest.mark.parametrize("transposed", [False, True])
def test_gradients_take_the_layout_of_the_weights(transposed: bool, name: str) -> None:
    """So that a parameter takes its gradient as it is: the layers' w1 is a view of (N, H) storage."""
    p = pattern("cpu", 64)
    m, n = p.shape
    stored = [torch.randn((n, 8) if transposed else (8, n), requires_grad=True) for _ in range(1 + (name in GATED))]
    w1, *v1 = (w.t() if transposed else w for w in stored)
    gate = v1[0] if v1 else None
    y = sparse_mlp(torch.randn(m, 8), w1, torch.randn(n, 8), p, v1=gate, activation=Activation(name))
    for w, grad in zip(stored, torch.autograd.grad(y.sum(), stored), strict=True):
        assert grad.stride() == w.stride()


@pytest.mark.parametrize("name", ["silu", "swiglu"])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("frozen", ["x", "w1", "v1", "w2", "bias", "x w1 v1 bias", "w1 v1 w2 bias"])
def test_N5_frozen_operands(name: str, recompute: bool, frozen: str) -> None:
    p = pattern("cpu", 64)
    n = p.shape[1]
    shapes = {"x": (p.shape[0], 8), "w1": (8, n), "w2": (n, 8), "bias": (n,)} | (
        {"v1": (8, n)} if name in GATED else {}
    )
    inputs = {key: torch.randn(shape) for key, shape in shapes.items()}

    def gradients(frozen: str) -> dict[str, Tensor | None]:
        t = {key: value.clone().requires_grad_(key not in frozen.split()) for key, value in inputs.items()}
        with poisoned_empty():
            sparse_mlp(**t, pattern=p, activation=Activation(name), recompute=recompute).sin().sum().backward()
        return {key: value.grad for key, value in t.items()}

    whole = gradients("")
    for key, grad in gradients(frozen).items():
        assert grad is None if key in frozen.split() else torch.equal(grad, whole[key]), key


def launched(p: Matrix, a: Tensor, b: Tensor, epilogue: Epilogue, path: str) -> Tensor:
    return (hopper if path == "hopper" else kernels).sdd(a, b, p.blocks, epilogue)


PATHS = [
    "triton",
    pytest.param("hopper", marks=[pytest.mark.gpu, pytest.mark.skipif(not is_available(), reason="no Hopper")]),
]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name,approximate", UNARY_FORMS)
def test_N10_epilogues_of_each_kernel(path: str, name: str, approximate: str) -> None:
    """With a long reduction too, where the Hopper path takes another tile."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    p = pattern(device, 128 if path == "hopper" else 64)
    n = p.num_blocks
    for k, with_bias in itertools.product((40, 1024 if device == "cuda" else 104), (False, True)):
        a = (torch.randn(p.shape[0], k, device=device) / k**0.5).to(dtype)
        b = torch.randn(k, p.shape[1], device=device).to(dtype)
        bias = torch.randn(p.shape[1], device=device) if with_bias else None
        activation = Activation(name, approximate)
        act = torch.full((n, p.block_size, p.block_size), float("nan"), device=device, dtype=dtype)
        pre = launched(p, a, b, Epilogue(activation, bias, act), path)
        used = p.blocks.row_indices >= 0
        product = a.double() @ b.double()
        want = product if bias is None else product + bias.double()

        def blocks(t: Tensor) -> Tensor:
            size = p.block_size
            cut = t.view(t.shape[0] // size, size, t.shape[1] // size, size).transpose(1, 2)  # noqa: B023
            return cut[p.blocks.row_indices[used].long(), p.blocks.column_indices[used].long()]  # noqa: B023

        tolerance = {"rtol": 2**-7, "atol": 2**-7} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
        torch.testing.assert_close(pre[used].double(), blocks(want), **tolerance)
        want_act = activation_ref(pre[used].double(), None, Activation(name, approximate))
        torch.testing.assert_close(act[used].double(), want_act, **tolerance)
        slope = launched(p, a, b, Epilogue(activation, pre=pre), path)
        want_slope = activation_backward_ref(blocks(product), pre[used].double(), None, Activation(name, approximate))[
            0
        ]
        torch.testing.assert_close(slope[used].double(), want_slope, **tolerance)


def test_refusals_name_the_argument() -> None:
    p = pattern("cpu", 64)
    m, n = p.shape
    x, w1, w2 = torch.zeros(m, 8), torch.zeros(8, n), torch.zeros(n, 4)
    with pytest.raises(ValueError, match="v1 is missing for activation='swiglu'"):
        sparse_mlp(x, w1, w2, p, activation=Activation("swiglu"))
    with pytest.raises(ValueError, match="v1 is given for activation='gelu'"):
        sparse_mlp(x, w1, w2, p, v1=w1, activation=GELU)
    with pytest.raises(ValueError, match=r"v1 is \(8, 3\), must be"):
        sparse_mlp(x, w1, w2, p, v1=torch.zeros(8, 3), activation=Activation("swiglu"))
    with pytest.raises(ValueError, match="gate_bias is given for activation='gelu', which has no gate"):
        sparse_mlp(x, w1, w2, p, gate_bias=torch.zeros(n), activation=GELU)
    with pytest.raises(ValueError, match="activation='tanh': must be one of gelu"):
        sparse_mlp(x, w1, w2, p, activation=Activation("tanh"))
    with pytest.raises(ValueError, match="approximate='erf': must be 'tanh' or 'none'"):
        sparse_mlp(x, w1, w2, p, activation=Activation("gelu", "erf"))
    with pytest.raises(ValueError, match="pattern is a transposed view"):
        sparse_mlp(x, w1, w2, p.t(), activation=GELU)
    with pytest.raises(ValueError, match=r"w2 is \(8, 4\), must be"):
        sparse_mlp(x, w1, torch.zeros(8, 4), p, activation=GELU)
    with pytest.raises(ValueError, match=r"bias is \(3,\) on cpu, must be"):
        sparse_mlp(x, w1, w2, p, bias=torch.zeros(3), activation=GELU)
    with pytest.raises(ValueError, match="w1 is torch.float16 on cpu, must be torch.float32"):
        sparse_mlp(x, w1.half(), w2, p, activation=GELU)
