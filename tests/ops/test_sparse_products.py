"""sdd, dsd and dds on random block patterns, in every transposition, against dense float64."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megablocks.ops.hopper import is_available
from megablocks.ops.sparse import Matrix, dds, dsd, from_coordinates, kernels, sdd, topology
from megablocks.ops.sparse import products_hopper as hopper
from megablocks.testing.poison import poisoned_empty

CPU_ONLY = torch.device("cpu")
ROOM = 4
"""Unused blocks at the end of every pattern here; their contents are NaN."""


def pattern(rows: int, columns: int, block: int, density: float, device: torch.device, run: int = 1) -> Matrix:
    """A random pattern of rows × columns blocks with an empty row and column, its blocks in runs of `run`."""
    generator = torch.Generator().manual_seed(rows * 31 + columns)
    mask = torch.rand(rows, columns // run, generator=generator) < density
    mask[rows // 2] = False
    mask[:, 0] = False
    mask = mask.repeat_interleave(run, 1)
    place = mask.nonzero().to(device)
    made = from_coordinates(
        (rows * block, columns * block), place[:, 0], place[:, 1], block_size=block, num_blocks=len(place) + ROOM
    )
    return Matrix(made.shape, None, made.blocks._replace(run=run)).validate()


def dense_mask(p: Matrix) -> Tensor:
    ones = torch.ones(p.num_blocks, p.block_size, p.block_size, dtype=torch.float64, device=p.device)
    return p.with_data(ones).to_dense()


def values(p: Matrix, dtype: torch.dtype) -> Tensor:
    data = torch.randn(p.num_blocks, p.block_size, p.block_size, dtype=dtype, device=p.device)
    data[p.num_blocks - ROOM :] = float("nan")
    return data


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def tolerance(dtype: torch.dtype, interpreted: bool) -> float:
    """One rounding to nearest and a little for the sum; the interpreter truncates to bfloat16."""
    half = 8e-3 if interpreted else 4.2e-3
    return {torch.float64: 1e-13, torch.float32: 2e-6, torch.float16: 6e-4, torch.bfloat16: half}[dtype]


def close(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    """Relative to the largest value: one rounding of the result, and sums in a wider type."""
    assert got.shape == want.shape
    assert torch.isfinite(got).all()
    off = (got.double() - want.double()).abs().max() / want.double().abs().max().clamp_min(1e-30)
    assert off <= tolerance(dtype, not got.is_cuda), f"relative error {off:.1e}"


def check_all(p: Matrix, dtype: torch.dtype, inner: int) -> None:
    """Every product and transposition, its operands in both majors, with the gradients of everything."""
    device = p.device
    M, N = p.shape
    mask = dense_mask(p)
    used = p.num_blocks - ROOM

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=dtype, device=device)

    def grads(out: Tensor, inputs: tuple[Tensor, ...], gradient: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, inputs, gradient)

    for a_t, b_t, p_t in itertools.product((False, True), repeat=3):
        pat, want_mask = (p.t(), mask.t()) if p_t else (p, mask)
        rows, columns = pat.shape
        a = (rand(inner, rows).t() if a_t else rand(rows, inner)).requires_grad_()
        b = (rand(columns, inner).t() if b_t else rand(inner, columns)).requires_grad_()
        with poisoned_empty():
            out = sdd(a, b, pat)
        assert out.transposed == p_t
        a64, b64 = (t.detach().double().requires_grad_() for t in (a, b))
        want = (a64 @ b64) * want_mask
        close(out.to_dense(), want, dtype)
        g = values(p, dtype)
        g_dense = pat.with_data(g).to_dense().double()
        with poisoned_empty():
            got = grads(out.data, (a, b), g)
        for i, j in zip(got, grads(want, (a64, b64), g_dense), strict=True):
            close(i, j, dtype)
    for s_t, d_t, left in itertools.product((False, True), repeat=3):
        data = values(p, dtype).requires_grad_()
        s = p.with_data(data)
        s = s.t() if s_t else s
        reduction = s.shape[1] if left else s.shape[0]
        shape = (reduction, inner) if left else (inner, reduction)
        d = (rand(*shape[::-1]).t() if d_t else rand(*shape)).requires_grad_()
        with poisoned_empty():
            out = dsd(s, d) if left else dds(d, s)
        s64, d64 = s.to_dense().detach().double().requires_grad_(), d.detach().double().requires_grad_()
        want = s64 @ d64 if left else d64 @ s64
        close(out, want, dtype)
        g = rand(*out.shape)
        with poisoned_empty():
            got_data, got_d = grads(out, (data, d), g)
        want_s, want_d = grads(want, (s64, d64), g.double())
        got_s = p.with_data(got_data)
        got_s = got_s.t() if s_t else got_s
        close(got_s.to_dense(), want_s * (mask.t() if s_t else mask), dtype)
        close(got_d, want_d, dtype)
    assert used > 0 and M != N


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("rows,columns", [(3, 4), (5, 2)])
def test_every_transposition_on_random_patterns(dtype: torch.dtype, rows: int, columns: int) -> None:
    check_all(pattern(rows, columns, 64, 0.6, CPU_ONLY), dtype, 24)


@pytest.mark.parametrize("block", [64, 128, 256])
def test_empty_lines_come_out_as_zeros(block: int) -> None:
    p = pattern(3, 4, block, 0.9, CPU_ONLY)
    s = p.with_data(values(p, torch.float32))
    with poisoned_empty():
        out, out_t = dsd(s, torch.randn(4 * block, 8)), dds(torch.randn(8, 3 * block), s)
    assert (out[block : 2 * block] == 0).all() and (out_t[:, :block] == 0).all()
    assert (out[:block] != 0).any()


Product = Callable[..., Tensor]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("block", [64, 128])
def test_triton_kernels_equal_dense(dtype: torch.dtype, block: int) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    check_kernels(pattern(3, 2, block, 0.7, device), dtype, 40, kernels_sdd, kernels.spmm)


@pytest.mark.parametrize("inner", [1, 13, 67])
def test_R6_triton_kernels_at_odd_sizes_of_the_dense_operand(inner: int) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    check_kernels(pattern(3, 2, 64, 0.7, device), torch.float16, inner, kernels_sdd, kernels.spmm)


@pytest.mark.gpu
@pytest.mark.parametrize("inner", [1, 13, 60, 129, 600])
def test_R6_odd_sizes_of_the_dense_operand_on_a_gpu(inner: int) -> None:
    """What TMA cannot read goes to the other kernels."""
    check_all(pattern(3, 5, 128, 0.5, torch.device("cuda")), torch.bfloat16, inner)


def kernels_sdd(a: Tensor, b: Tensor, p: Matrix) -> Tensor:
    return kernels.sdd(a, b, p.blocks)


def check_kernels(p: Matrix, dtype: torch.dtype, inner: int, sdd_of: Product, spmm_of: Product) -> None:
    """The launches by themselves, so that the CPU's reference does not stand in for them."""
    M, N = p.shape

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=dtype, device=p.device)

    for a_t, b_t in itertools.product((False, True), repeat=2):
        a = rand(inner, M).t() if a_t else rand(M, inner)
        b = rand(N, inner).t() if b_t else rand(inner, N)
        with poisoned_empty():
            out = sdd_of(a, b, p)
        close(p.with_data(out).to_dense(), (a.double() @ b.double()) * dense_mask(p), dtype)
    data = values(p, dtype)
    dense = p.with_data(data).to_dense().double()
    for left, column, d_t in itertools.product((False, True), repeat=3):
        s = dense.t() if left == column else dense
        reduction = s.shape[1] if left else s.shape[0]
        shape = (reduction, inner) if left else (inner, reduction)
        d = rand(*shape[::-1]).t() if d_t else rand(*shape)
        with poisoned_empty():
            out = spmm_of(data, d, *p.blocks.lines(column), left)
        close(out, s @ d.double() if left else d.double() @ s, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("block", [64, 128, 256])
def test_every_transposition_on_a_gpu(dtype: torch.dtype, block: int) -> None:
    check_all(pattern(5, 8, block, 0.5, torch.device("cuda"), run=2), dtype, 200)
    check_all(pattern(7, 3, block, 0.5, torch.device("cuda")), dtype, 67 if dtype == torch.float32 else 600)


@pytest.mark.gpu
@pytest.mark.skipif(not is_available(), reason="needs a Hopper GPU and a Triton with Gluon")
@pytest.mark.parametrize("inner", [8, 200, 1024])
def test_every_hopper_tile(inner: int) -> None:
    p = pattern(9, 12, 128, 0.5, torch.device("cuda"), run=2)
    check_kernels(p, torch.bfloat16, inner, lambda a, b, p: hopper.sdd(a, b, p.blocks), hopper.spmm)


@pytest.mark.gpu
def test_N2_reruns_of_block_sparse_products_are_bit_identical() -> None:
    counts = torch.tensor([0, 300, 0, 1, 700, 129, 128, 64])
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int().cuda()
    p = topology(offsets, 512, max_rows=1400).pattern
    x = torch.randn(p.shape[0], 256, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(256, p.shape[1], device="cuda", dtype=torch.bfloat16)

    def step() -> list[Tensor]:
        s = sdd(x, w, p)
        return [s.to_dense(), dsd(s, w.t()), dsd(s.t(), x), dds(x.t(), s)]

    first = step()
    for _ in range(9):
        assert all(torch.equal(a, b) for a, b in zip(first, step(), strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(not is_available(), reason="needs a Hopper GPU and a Triton with Gluon")
def test_tiles_drawn_from_a_counter_are_all_computed_once() -> None:
    """Many more tiles than multiprocessors, block columns of very different lengths, empty ones among them."""
    generator = torch.Generator().manual_seed(0)
    counts = (torch.rand(40, generator=generator) ** 8 * 6000).int()
    counts[::5] = 0
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int().cuda()
    p = topology(offsets, 256, max_rows=int(counts.sum())).pattern
    x = torch.randn(p.shape[0], 1096, device="cuda", dtype=torch.bfloat16)
    data = torch.randn(p.num_blocks, 128, 128, device="cuda", dtype=torch.bfloat16)
    s = p.with_data(data)
    dense = s.to_dense().float()
    want = dense.t() @ x.float(), x.float().t() @ dense

    def step() -> list[Tensor]:
        with poisoned_empty():
            return [dsd(s.t(), x), dds(x.t(), s)]

    def check(results: list[Tensor]) -> None:
        for got, exact in zip(results, want, strict=True):
            close(got, exact, torch.bfloat16)

    check(step())
    graphs = [torch.cuda.CUDAGraph() for _ in range(2)]
    captured = []
    for graph in graphs:
        with torch.cuda.graph(graph):
            captured.append([dsd(s.t(), x), dds(x.t(), s)])
    # all at once, over and over: no launch may draw from another's counter
    streams = [torch.cuda.Stream() for _ in range(4)]
    outs: list[list[Tensor]] = []
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
    for _ in range(5):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                if i < 2:
                    graphs[i].replay()
                else:
                    outs.append(step())
    torch.cuda.synchronize()
    for results in (*outs, *captured):
        check(results)


@pytest.mark.gpu
@pytest.mark.slow
def test_N2_products_replayed_by_torch_compile() -> None:
    """mode="reduce-overhead": other routings than the captured one, two shapes in turn, forward and backward."""
    generator = torch.Generator().manual_seed(0)

    def step(x: Tensor, w: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        p = topology(offsets, 256, max_rows=3000, block_rows=x.shape[0] // 128).pattern
        s = sdd(x, w.t(), p)
        return dsd(s, w), dsd(s.t(), x)

    compiled = torch.compile(step, mode="reduce-overhead", fullgraph=True, dynamic=False)
    for i in range(8):
        counts = (torch.rand(20, generator=generator) ** 4 * 400).int()
        offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int().cuda()
        x = torch.randn((5120, 6144)[i % 2], 1096, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        w = torch.randn(20 * 256, 1096, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        grads, results = None, []
        for function in (step, compiled):
            torch.compiler.cudagraph_mark_step_begin()
            outs = function(x, w, offsets)
            grads = grads or [torch.randn_like(o) for o in outs]
            results.append([t.clone() for t in (*outs, *torch.autograd.grad(outs, (x, w), grads))])
        for got, want in zip(results[1], results[0], strict=True):
            assert want.norm() > 0 and (got - want).norm() < 1e-2 * want.norm()
        assert all(torch.equal(got, want) for got, want in zip(results[1][:2], results[0][:2], strict=True))


@pytest.mark.gpu
def test_products_and_topology_in_a_cuda_graph() -> None:
    counts = torch.tensor([200, 0, 129, 3])
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int().cuda()
    x = torch.randn(1024, 128, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(4 * 256, 128, device="cuda", dtype=torch.bfloat16)

    def step() -> Tensor:
        p = topology(offsets, 256, max_rows=400, block_rows=8).pattern
        s = sdd(x, w.t(), p)
        return dsd(s, w) + dsd(s.t(), x).sum()

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    offsets.copy_(torch.tensor([0, 1, 300, 300, 332], dtype=torch.int32))
    graph.replay()
    assert torch.equal(out, step())
