"""An expert MLP out of block-sparse products, against its formula; the products' limits, refusals and precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megablocks.ops.hopper import is_available, runs_hopper
from megablocks.ops.sparse import Matrix, dds, dsd, sdd, topology
from megablocks.ops.sparse import products_hopper as hopper
from megablocks.testing.poison import poisoned_empty
from megablocks.testing.tolerances import assert_as_exact_as

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SIZE, H, F = 64, 40, 128
ON_EVERY_DEVICE = pytest.mark.parametrize("device", DEVICES)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def offsets_of(counts: list[int], device: str) -> Tensor:
    return torch.tensor([0, *counts], dtype=torch.int32, device=device).cumsum(0).int()


def padded_rows(counts: list[int], padded_offsets: Tensor) -> Tensor:
    """Where each of the rows sorted by expert stands among the padded ones."""
    starts = padded_offsets.tolist()
    return torch.cat([torch.arange(starts[e], starts[e] + n) for e, n in enumerate(counts)])


def mlp(x: Tensor, w1: Tensor, w2: Tensor, counts: list[int]) -> Tensor:
    """Each expert's relu(x·w1)·w2 for rows sorted by expert; w1 (H, E·F), w2 (E·F, H)."""
    t = topology(offsets_of(counts, str(x.device)), F, max_rows=len(x), block_size=SIZE)
    place = padded_rows(counts, t.padded_offsets).to(x.device)
    padded = x.new_zeros(t.pattern.shape[0], H).index_copy(0, place, x)
    hidden = sdd(padded, w1, t.pattern)
    return dsd(hidden.with_data(hidden.data.relu()), w2)[place]


def formula(x: Tensor, w1: Tensor, w2: Tensor, counts: list[int]) -> Tensor:
    parts = zip(x.split(counts), w1.split(F, 1), w2.split(F), strict=True)
    return torch.cat([(rows @ up).relu() @ down for rows, up, down in parts])


def check_mlp(counts: list[int], device: str, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """Output and gradients against the formula in float64; returns (dx, dw1, dw2)."""
    rows, experts = sum(counts), len(counts)

    def rand(*shape: int) -> Tensor:
        return (torch.randn(*shape, dtype=torch.float64) / shape[-1] ** 0.5).to(device, dtype).requires_grad_()

    inputs = rand(rows, H), rand(H, experts * F), rand(experts * F, H)
    with poisoned_empty():
        got = mlp(*inputs, counts)
        g = torch.randn_like(got)
        grads = torch.autograd.grad(got, inputs, g)
    exact = [t.detach().double().requires_grad_() for t in inputs]
    want = formula(*exact, counts)
    want_grads = torch.autograd.grad(want, exact, g.double())
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    for a, b in zip((got, *grads), (want, *want_grads), strict=True):
        assert a.shape == b.shape and torch.allclose(a.double(), b, rtol=tolerance, atol=tolerance * 10)
    return grads


def dtype_on(device: str) -> torch.dtype:
    return torch.float64 if device == "cpu" else torch.float32


@ON_EVERY_DEVICE
def test_R1_empty_experts_leave_the_rest_alone_and_get_exact_zeros(device: str) -> None:
    _, dw1, dw2 = check_mlp([0, 70, 0, 64, 0], device, dtype_on(device))
    for e in (0, 2, 4):
        assert (dw1[:, e * F : (e + 1) * F] == 0).all() and (dw2[e * F : (e + 1) * F] == 0).all()


@ON_EVERY_DEVICE
@pytest.mark.parametrize("taker", [0, 1, 3])
def test_R2_all_rows_to_one_expert(device: str, taker: int) -> None:
    check_mlp([130 if e == taker else 0 for e in range(4)], device, dtype_on(device))


@ON_EVERY_DEVICE
@pytest.mark.parametrize("counts", [[1], [0, 0], [3, 1, 2], [64, 65, 63], [129, 600, 1]])
def test_R6_any_number_of_rows(device: str, counts: list[int]) -> None:
    check_mlp(counts, device, dtype_on(device))


def products(x: Tensor, w: Tensor, data: Tensor, p: Matrix) -> dict[str, Tensor]:
    """The four kinds of product of x (M, H), w (H, N) and S (M, N)."""
    s = p.with_data(data)
    return {"sdd": sdd(x, w, p).to_dense(), "dsd": dsd(s, w.t()), "dst_d": dsd(s.t(), x), "dds": dds(x.t(), s)}


@pytest.mark.parametrize(
    "device,size", [("cpu", 64)] + [pytest.param("cuda", s, marks=pytest.mark.gpu) for s in (64, 128, 256)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_N1_as_exact_as_a_dense_product_of_the_same_dtype(device: str, size: int, dtype: torch.dtype) -> None:
    """On a GPU by both kernels: blocks of 128 in half precision go to Hopper's, where there is one."""
    counts = [300, 0, 500, 64]
    p = topology(offsets_of(counts, device), 256, max_rows=sum(counts), block_size=size).pattern
    x, w = (
        torch.randn(p.shape[0], 96, device=device, dtype=dtype),
        torch.randn(96, p.shape[1], device=device, dtype=dtype),
    )
    data = torch.randn(p.num_blocks, size, size, device=device, dtype=dtype)
    mask = p.with_data(torch.ones_like(data)).to_dense()
    s = p.with_data(data).to_dense()

    def dense(x: Tensor, w: Tensor, s: Tensor, mask: Tensor) -> dict[str, Tensor]:
        return {"sdd": (x @ w) * mask, "dsd": s @ w.t(), "dst_d": s.t() @ x, "dds": x.t() @ s}

    plain, truth = dense(x, w, s, mask), dense(*(t.double() for t in (x, w, s, mask)))
    for name, got in products(x, w, data, p).items():
        assert_as_exact_as(got, plain[name], truth[name])


@ON_EVERY_DEVICE
def test_N5_autocast_computes_and_returns_its_dtype(device: str) -> None:
    p = topology(offsets_of([70, 3], device), F, max_rows=73, block_size=SIZE).pattern
    x, w = torch.randn(p.shape[0], H, device=device), torch.randn(H, p.shape[1], device=device, requires_grad=True)
    with torch.autocast(device, torch.bfloat16):
        hidden = sdd(x, w, p)
        out = dsd(hidden, w.t())
        again = dds(x.t(), hidden.with_data(hidden.data.float()))
    assert hidden.dtype == out.dtype == again.dtype == torch.bfloat16
    want = sdd(x.bfloat16(), w.bfloat16(), p)
    assert torch.equal(hidden.to_dense(), want.to_dense())
    (grad,) = torch.autograd.grad(out.float().sum(), w)
    assert grad.dtype == torch.float32 and grad.isfinite().all()


@ON_EVERY_DEVICE
def test_N5_backward_twice_and_frozen_operands(device: str) -> None:
    p = topology(offsets_of([70, 3], device), F, max_rows=73, block_size=SIZE).pattern
    x, w = torch.randn(p.shape[0], H, device=device), torch.randn(H, p.shape[1], device=device)

    def out(x: Tensor, w: Tensor) -> Tensor:
        return dsd(sdd(x, w, p), w.t()).square().sum()

    a, b = x.clone().requires_grad_(), w.clone().requires_grad_()
    loss = out(a, b)
    first = torch.autograd.grad(loss, (a, b), retain_graph=True)
    for one, two in zip(first, torch.autograd.grad(loss, (a, b)), strict=True):
        assert torch.equal(one, two)
    assert torch.equal(torch.autograd.grad(out(a, w), a)[0], first[0])
    assert torch.equal(torch.autograd.grad(out(x, b), b)[0], first[1])


@ON_EVERY_DEVICE
def test_R8_gradients_of_stride_zero_and_strided_operands(device: str) -> None:
    p = topology(offsets_of([70, 3], device), F, max_rows=73, block_size=SIZE).pattern
    x = torch.randn(p.shape[0], 2 * H, device=device)[:, ::2].requires_grad_()
    w = torch.randn(H, p.shape[1], device=device).requires_grad_()
    got = torch.autograd.grad(dsd(sdd(x, w, p), w.t()).sum(), (x, w))
    mask = p.with_data(torch.ones(p.num_blocks, SIZE, SIZE, device=device)).to_dense()
    want = torch.autograd.grad((((x @ w) * mask) @ w.t()).sum(), (x, w))
    for a, b in zip(got, want, strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-3)


Make = Callable[[Matrix, Matrix], Any]


@pytest.mark.parametrize(
    "make,match",
    [
        (lambda p, s: sdd(torch.zeros(64, 8), torch.zeros(8, 256), p), r"a is \(64, 8\), must be \(128, any\)"),
        (lambda p, s: sdd(torch.zeros(128, 8), torch.zeros(9, 256), p), r"b is \(9, 256\), must be \(8, 256\)"),
        (lambda p, s: sdd(torch.zeros(128), torch.zeros(9, 256), p), r"a is \(128,\), must be"),
        (
            lambda p, s: sdd(torch.zeros(128, 8), torch.zeros(8, 256).half(), p),
            "b is torch.float16 on cpu, must be torch.float32 on cpu as a is",
        ),
        (lambda p, s: dsd(p, torch.zeros(256, 8)), "sparse is a pattern without data: give it values with with_data"),
        (lambda p, s: dsd(s, torch.zeros(128, 8)), r"dense is \(128, 8\), must be \(256, any\)"),
        (lambda p, s: dsd(s.t(), torch.zeros(256, 8)), r"dense is \(256, 8\), must be \(128, any\)"),
        (lambda p, s: dds(torch.zeros(8, 256), s), r"dense is \(8, 256\), must be \(any, 128\)"),
        (lambda p, s: dds(torch.zeros(8, 128).double(), s), "dense is torch.float64 on cpu, must be torch.float32"),
    ],
)
def test_refusals_name_the_operand_and_what_it_must_be(make: Make, match: str) -> None:
    p = topology(offsets_of([64, 3], "cpu"), F, max_rows=67, block_size=SIZE, block_rows=2).pattern
    assert p.shape == (128, 256)
    with pytest.raises(ValueError, match=match):
        make(p, p.with_data(torch.zeros(p.num_blocks, SIZE, SIZE)))


@pytest.mark.gpu
def test_what_a_gpu_cannot_take_is_refused() -> None:
    p = topology(offsets_of([64], "cuda"), F, max_rows=64, block_size=SIZE).pattern
    x, w = torch.zeros(64, 8, device="cuda").double(), torch.zeros(8, F, device="cuda").double()
    with pytest.raises(ValueError, match="a is torch.float64, must be torch.bfloat16, torch.float16 or torch.float32"):
        sdd(x, w, p)
    on_the_host = topology(offsets_of([64], "cpu"), F, max_rows=64, block_size=SIZE).pattern
    with pytest.raises(ValueError, match="the block indices are on cpu, must be on cuda:0 as the dense operand is"):
        sdd(x.float(), w.float(), on_the_host)


@pytest.mark.gpu
@pytest.mark.parametrize("path", ["hopper", "triton"])
def test_N4_values_and_rows_beyond_two_to_the_31(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """2³¹ elements of a block-sparse matrix are 131,072 blocks; the dense operand is as long."""
    if path == "hopper" and not is_available():
        pytest.skip("needs a Hopper GPU and a Triton with Gluon")
    monkeypatch.setenv("MEGABLOCKS_HOPPER", str(int(path == "hopper")))
    if torch.cuda.mem_get_info()[0] < 24 * 2**30:
        pytest.skip("needs 24 GiB")
    blocks, inner = 2**31 // 128**2 + 3, 136
    p = topology(offsets_of([blocks * 128], "cuda"), 128, max_rows=blocks * 128, block_rows=blocks).pattern
    x = torch.randn(blocks * 128, inner, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(inner, 128, device="cuda", dtype=torch.bfloat16)
    assert hopper.supports(128, x, w) and runs_hopper(x) == (path == "hopper")
    with poisoned_empty():
        s = sdd(x, w, p)
        out = dsd(s, w.t())
    edges = [0, 2**31 // (128 * inner), 2**31 // 128**2]
    for block in {min(max(edge + step, 0), blocks - 1) for edge in edges for step in (-1, 0, 1)}:
        rows = slice(block * 128, block * 128 + 128)
        want = (x[rows].double() @ w.double()).bfloat16()
        assert (s.data[block].double() - want.double()).abs().max() <= 2**-7 * want.double().abs().max()
        want = s.data[block].double() @ w.t().double()
        assert (out[rows].double() - want).abs().max() <= 2**-7 * want.abs().max()
    # the sum over all rows, of which the last ones alone are not zero
    s.data[:-2] = 0
    want = s.data[-2:].flatten(0, 1).t().double() @ x[-256:].double()
    assert (dsd(s.t(), x).double() - want).abs().max() <= 2**-7 * want.abs().max()


def test_what_hopper_can_read() -> None:
    x = torch.zeros(128, 8, dtype=torch.bfloat16)
    assert hopper.supports(128, x, x.t()) and not hopper.supports(64, x) and not hopper.supports(128, x[:0])
    assert hopper.k_major(x, 1) is True and hopper.k_major(x, 0) is False
    assert hopper.k_major(x[:, :3], 1) is True and hopper.k_major(torch.zeros(128, 3).bfloat16(), 1) is None
