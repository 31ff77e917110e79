"""The grouped GEMM kernels against float64: the Triton ones interpreted or on any GPU, Gluon's on Hopper."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megablocks.ops.fused import gradient_hopper, up_hopper
from megablocks.ops.grouped import TILE_ROWS
from megablocks.ops.grouped import grouped_mm_hopper as hopper
from megablocks.ops.grouped import grouped_mm_hopper_dw as hopper_dw
from megablocks.ops.grouped import grouped_mm_triton as twin
from megablocks.ops.grouped.bias import expert_of_row
from megablocks.ops.hopper import Tile
from megablocks.ops.launch import interpreted
from megablocks.testing.poison import poisoned_empty
from megablocks.testing.syncs import no_sync
from ops.far_rows import far_rows

pytestmark = pytest.mark.any_device
HAS_GPU = torch.cuda.is_available()
IS_HOPPER = HAS_GPU and torch.cuda.get_device_capability() == (9, 0)
DEVICE = "cuda" if HAS_GPU and not interpreted() else "cpu"
needs_interpreter_or_gpu = pytest.mark.skipif(
    DEVICE == "cpu" and not interpreted(), reason="needs TRITON_INTERPRET=1 or a GPU"
)
hopper_only = pytest.mark.skipif(not IS_HOPPER or interpreted(), reason="needs a Hopper GPU")

# Rows an expert: none, one, around a tile of 16 (interpreted) or 128 (Hopper), all in one, none anywhere.
SMALL_LOADS = {"odd": [0, 1, 17, 16, 0, 13, 3], "one": [0, 0, 40], "nobody": [0, 0, 0], "single": [5]}
LARGE_LOADS = {
    "odd": [0, 1, 127, 128, 129, 0, 300, 64, 7, 0, 1000, 13, 67, 200, 255, 256, 257, 0],
    "one": [0, 0, 1111, 0],
    "even": [192] * 40,
    "tiny": [3, 0, 5, 1] * 33,
}


def make(loads: list[int], spare: int, device: str) -> tuple[Tensor, int]:
    offsets = torch.tensor([0, *loads], dtype=torch.int64).cumsum(0).to(device, torch.int32)
    return offsets, sum(loads) + spare


def test_no_tile_has_more_rows_than_token_rounding_takes_them_to_have(monkeypatch):
    """Of an expert's rows; those of ragged_k are its steps. A load of whole TILE_ROWS fills lower tiles, too."""
    sizes = (1, 64, 128, 129, 256, 257, 512, 513, 1024, 2048, 2049, 8192)
    rows = {hopper.choose_m(n, k, gather).BM for n in sizes for k in sizes for gather in (False, True)}
    rows |= {hopper_dw.choose_k(m, n).BK for m in sizes for n in sizes}
    rows |= {up_hopper._SHARED.BM, up_hopper._WIDE.BM, gradient_hopper._TILE.BM}
    monkeypatch.setattr(twin, "interpreted", lambda: False)
    for shared in (99_000, 232_000):
        monkeypatch.setattr(twin, "_shared_bytes", lambda device, shared=shared: shared)
        chosen = [twin.choose(n, torch.empty(0, dtype=d)) for n in sizes for d in (torch.bfloat16, torch.float32)]
        rows |= {c.BM for c in chosen} | {c.BK for c in chosen}
    assert max(rows) == TILE_ROWS and all(TILE_ROWS % height == 0 for height in rows)


def fill(*shape: int, dtype: torch.dtype, device: str, seed: int, poison_from: int | None = None) -> Tensor:
    """Normal draws; rows from `poison_from` on are NaN: nobody may read them into a result."""
    t = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)
    if poison_from is not None:
        t[poison_from:] = float("nan")
    return t.to(device, dtype)


def rows_ref(x: Tensor, w: Tensor, offsets: Tensor, gather: Tensor | None) -> Tensor:
    x = x.double() if gather is None else x.double()[gather.long()]
    bounds = offsets.tolist()
    parts = [x[lo:hi] @ w[e].double() for e, (lo, hi) in enumerate(zip(bounds, bounds[1:], strict=False))]
    return torch.cat(parts)


def blocks_ref(a: Tensor, b: Tensor, offsets: Tensor, gather: Tensor | None) -> Tensor:
    b = b.double() if gather is None else b.double()[gather.long()]
    bounds = offsets.tolist()
    return torch.stack([a[lo:hi].double().T @ b[lo:hi] for lo, hi in zip(bounds, bounds[1:], strict=False)])


def assert_near(result: Tensor, truth: Tensor, terms: int) -> None:
    """A dot product of `terms` unit normals, rounded once to the result's dtype.

    A tensor core cuts off, rather than rounds, the float32 sum after every 16 terms.
    """
    eps = torch.finfo(result.dtype).eps
    scale = math.sqrt(max(terms, 1))
    assert result.shape == truth.shape
    assert not result.isnan().any(), "a value was never written, or read from poison"
    error = (result.double() - truth).abs()
    bound = eps * truth.abs() + (eps * 2**-4 + 2e-6 + terms / 16 * 2**-23) * scale * 4
    assert bool((error <= bound).all()), f"largest error {error.max():.3e} of {truth.abs().max():.3e}"


def gather_of(rows: int, sources: int, device: str) -> Tensor:
    return torch.randint(sources, (rows,), generator=torch.Generator().manual_seed(7)).to(device, torch.int32)


@needs_interpreter_or_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("gathered", [False, True], ids=["rows", "gather"])
@pytest.mark.parametrize("k_major", [False, True], ids=["N", "K"])
@pytest.mark.parametrize("loads", SMALL_LOADS.values(), ids=SMALL_LOADS)
def test_R6_ragged_m_twin(loads: list[int], k_major: bool, gathered: bool, dtype: torch.dtype) -> None:
    offsets, rows = make(loads, 3, DEVICE)
    used, experts, k, n = sum(loads), len(loads), 20, 19
    gather = gather_of(rows, 11, DEVICE) if gathered else None
    x = fill(11 if gathered else rows, k, dtype=dtype, device=DEVICE, seed=1, poison_from=None if gathered else used)
    w = fill(experts, n, k, dtype=dtype, device=DEVICE, seed=2).transpose(1, 2)
    w = w if k_major else w.contiguous()
    with poisoned_empty():
        y = twin.ragged_m(x, w, offsets, gather)
    assert_near(y[:used], rows_ref(x, w, offsets, gather), k)


@needs_interpreter_or_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("gathered", [False, True], ids=["rows", "gather"])
@pytest.mark.parametrize("loads", SMALL_LOADS.values(), ids=SMALL_LOADS)
def test_ragged_k_twin(loads: list[int], gathered: bool, dtype: torch.dtype) -> None:
    offsets, rows = make(loads, 3, DEVICE)
    used, m, n = sum(loads), 18, 21
    gather = gather_of(rows, 11, DEVICE) if gathered else None
    a = fill(rows, m, dtype=dtype, device=DEVICE, seed=1, poison_from=used)
    b = fill(11 if gather is not None else rows, n, dtype=dtype, device=DEVICE, seed=2)
    if gather is None:
        b[used:] = float("nan")
    truth = blocks_ref(a, b, offsets, gather)
    with poisoned_empty():
        o = twin.ragged_k(a, b, offsets, gather)
    assert_near(o, truth, max(loads))
    assert bool((o[[e for e, load in enumerate(loads) if load == 0]] == 0).all())


def adds_to_what_is_there(ragged_k, loads: list[int], m: int, n: int, dtype: torch.dtype, device: str, shift: int = 0):
    """An expert with rows gets its sums, unrounded; one without keeps its bits. `shift`: values past 16 bytes."""
    offsets, rows = make(loads, 3, device)
    gather = gather_of(rows, 11, device)
    a = fill(rows, m, dtype=dtype, device=device, seed=1, poison_from=sum(loads))
    b = fill(11, n, dtype=dtype, device=device, seed=2)
    total = fill(len(loads) * m * n + shift, dtype=torch.float32, device=device, seed=3)[shift:].view(len(loads), m, n)
    before, truth = total.clone(), total.double() + blocks_ref(a, b, offsets, gather)
    assert ragged_k(a, b, offsets, gather, add_to=total) is total
    empty = offsets[1:] == offsets[:-1]
    assert_near(total, truth, max(loads))
    assert torch.equal(total[empty], before[empty])
    for order in (gather, None):
        again = [before.clone() for _ in range(2)]
        other = b if order is not None else fill(rows, n, dtype=dtype, device=device, seed=2)
        for t in again:
            ragged_k(a, other, offsets, order, add_to=t)
        assert torch.equal(*again), "the same sums, other bits"
        assert_near(again[0], before.double() + blocks_ref(a, other, offsets, order), max(loads))
        assert order is None or torch.equal(again[0], total)
    nothing = torch.empty(0, m, dtype=dtype, device=device)
    assert torch.equal(ragged_k(nothing, b[:0], torch.zeros_like(offsets), add_to=again[0]), again[1])


@needs_interpreter_or_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("loads", SMALL_LOADS.values(), ids=SMALL_LOADS)
def test_N6_twin_adds_to_what_is_there(loads: list[int], dtype: torch.dtype) -> None:
    adds_to_what_is_there(twin.ragged_k, loads, 18, 21, dtype, DEVICE)


@needs_interpreter_or_gpu
def test_N4_twin_takes_rows_past_two_to_the_31_elements() -> None:
    """Row · stride overflows int32 at row 2."""
    x = far_rows(fill(3, 16, dtype=torch.float16, device=DEVICE, seed=1))
    w = fill(1, 16, 16, dtype=torch.float16, device=DEVICE, seed=2)
    offsets, _ = make([3], 0, DEVICE)
    gather = torch.tensor([2, 0, 2], dtype=torch.int32, device=DEVICE)
    for index in (None, gather):
        assert_near(twin.ragged_m(x, w, offsets, index), rows_ref(x, w, offsets, index), 16)
        assert_near(twin.ragged_k(x, x, offsets, index), blocks_ref(x, x, offsets, index), 3)
    columns = x.t()  # the same of columns, as an operand that came from a transpose has them
    offsets, _ = make([16], 0, DEVICE)
    assert_near(twin.ragged_k(columns, columns, offsets), blocks_ref(columns, columns, offsets, None), 16)


# (K, N), tails in each but the first
SHAPES = [(256, 384, torch.bfloat16), (64, 320, torch.float16), (200, 136, torch.bfloat16), (1032, 72, torch.float16)]
TILES = {
    "default": None,
    "shared": Tile(64, 256, 4, group_m=8),
    "four-parts": Tile(64, 256, 4, out_parts=4, out_buffers=2),
    "square": Tile(128, 128, 4),
    "pingpong": Tile(128, 128, 6, pingpong=True, out_parts=4),
    "pingpong-two-stores": Tile(128, 128, 6, pingpong=True, out_parts=4, out_buffers=2),
    "wide": Tile(64, 256, 5, pingpong=True, out_parts=4),
}


@pytest.mark.gpu
@hopper_only
@pytest.mark.parametrize("gathered", [False, True], ids=["rows", "gather"])
@pytest.mark.parametrize("k_major", [False, True], ids=["N", "K"])
@pytest.mark.parametrize("k,n,dtype", SHAPES, ids=str)
@pytest.mark.parametrize("loads", LARGE_LOADS.values(), ids=LARGE_LOADS)
def test_ragged_m_hopper(
    loads: list[int], k: int, n: int, dtype: torch.dtype, k_major: bool, gathered: bool, tile: Tile | None = None
) -> None:
    offsets, rows = make(loads, 21, "cuda")
    used, experts = sum(loads), len(loads)
    gather = gather_of(rows, 500, "cuda") if gathered else None
    x = fill(500 if gathered else rows, k, dtype=dtype, device="cuda", seed=1, poison_from=None if gathered else used)
    w = fill(experts, n, k, dtype=dtype, device="cuda", seed=2).transpose(1, 2)
    w = w if k_major else w.contiguous()
    assert hopper.supports_m(x, w, offsets, rows)
    want, bias = rows_ref(x, w, offsets, gather), fill(experts, n, dtype=dtype, device="cuda", seed=3)
    of_row = bias.index_select(0, expert_of_row(offsets, used))
    for b, shift in ((None, 0), (bias, of_row.to(want.dtype))):
        with poisoned_empty():
            y = hopper.ragged_m(x, w, offsets, gather, bias=b, tile=tile)
        assert_near(y[:used], want + shift, k)
        assert bool(y[used:].isnan().all()), "rows of no expert were written"


@pytest.mark.gpu
@hopper_only
@pytest.mark.parametrize("gathered", [False, True], ids=["rows", "gather"])
@pytest.mark.parametrize("m,n,dtype", SHAPES, ids=str)
@pytest.mark.parametrize("loads", LARGE_LOADS.values(), ids=LARGE_LOADS)
def test_R6_ragged_k_hopper(
    loads: list[int], m: int, n: int, dtype: torch.dtype, gathered: bool, tile: Tile | None = None
) -> None:
    """Both operands hold NaN from the last expert's end on, and the next expert's numbers from each expert's end on."""
    offsets, rows = make(loads, 21, "cuda")
    used = sum(loads)
    gather = gather_of(rows, 500, "cuda") if gathered else None
    a = fill(rows, m, dtype=dtype, device="cuda", seed=1, poison_from=used)
    b = fill(501 if gathered else rows, n, dtype=dtype, device="cuda", seed=2, poison_from=500 if gathered else used)
    if gather is not None:
        gather[used:] = 500
    assert hopper_dw.supports_k(a, b, offsets)
    with poisoned_empty():
        o = hopper_dw.ragged_k(a, b, offsets, gather, tile=tile)
    assert_near(o, blocks_ref(a, b, offsets, gather), max(loads))
    assert bool((o[offsets[1:] == offsets[:-1]] == 0).all())


@pytest.mark.gpu
@hopper_only
@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("m,n,dtype", SHAPES, ids=str)
@pytest.mark.parametrize("loads", LARGE_LOADS.values(), ids=LARGE_LOADS)
def test_N6_hopper_adds_to_what_is_there(loads: list[int], m: int, n: int, dtype: torch.dtype, shift: int) -> None:
    adds_to_what_is_there(hopper_dw.ragged_k, loads, m, n, dtype, "cuda", shift)


@pytest.mark.gpu
@hopper_only
@pytest.mark.parametrize("gathered", [False, True], ids=["rows", "gather"])
@pytest.mark.parametrize("m,n,dtype", SHAPES, ids=str)
@pytest.mark.parametrize("loads", LARGE_LOADS.values(), ids=LARGE_LOADS)
def test_N6_halves_of_one_weight_gradient_equal_each_alone(
    loads: list[int], m: int, n: int, dtype: torch.dtype, gathered: bool
) -> None:
    """Bit for bit."""
    offsets, rows = make(loads, 21, "cuda")
    used = sum(loads)
    gather = gather_of(rows, 500, "cuda") if gathered else None
    lefts = [fill(rows, m, dtype=dtype, device="cuda", seed=seed, poison_from=used) for seed in (1, 3)]
    b = fill(501 if gathered else rows, n, dtype=dtype, device="cuda", seed=2, poison_from=500 if gathered else used)
    if gather is not None:
        gather[used:] = 500
    with poisoned_empty():
        whole = torch.empty(len(loads), 2 * m, n, dtype=dtype, device="cuda")
        for left, half in zip(lefts, whole.chunk(2, dim=1), strict=True):
            assert hopper_dw.ragged_k(left, b, offsets, gather, out=half) is half
        alone = [hopper_dw.ragged_k(left, b, offsets, gather) for left in lefts]
    assert torch.equal(whole, torch.cat(alone, dim=1))


@pytest.mark.parametrize("m,n", [(8, 8), (256, 768), (328, 712), (1024, 1536), (4096, 4096), (6144, 8192)], ids=str)
def test_every_piece_of_a_cut_expert_has_a_slot(m: int, n: int) -> None:
    """At loads that leave the fewest rows to whole experts: one has all, or as many as can be are just long enough."""
    for experts in (1, 2, 3, 8, 64, 300):
        plan = hopper_dw._plan(None, m, n, False, False)
        for rows in (1, 4097, 65537, 1_000_003):
            longest, slots = plan.pieces(rows, experts)
            cut = min(experts, rows // (2 * longest + 1))
            pieces = -(-rows // longest) if rows > 2 * longest else 0
            assert pieces <= slots and 3 * cut <= slots and slots * m * n * 4 < 101e6


@pytest.mark.gpu
@hopper_only
@pytest.mark.parametrize("gathered", [False, True], ids=["rows", "gather"])
@pytest.mark.parametrize("m,n,dtype", [*SHAPES, (512, 1024, torch.bfloat16)], ids=str)
@pytest.mark.parametrize("loads", [[1500, 0, 70, 3, 900, 64, 1], [0, 5, 2000, 31] * 4], ids=["two", "four"])
def test_R6_ragged_k_hopper_cuts_long_experts(
    loads: list[int], m: int, n: int, dtype: torch.dtype, gathered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hopper_dw, "_LEAST", 64)
    plan = hopper_dw._plan(None, m, n, gathered, False)
    assert plan.pieces(sum(loads) + 21, len(loads))[0] < max(loads) / 2
    test_R6_ragged_k_hopper(loads, m, n, dtype, gathered)
    test_N6_halves_of_one_weight_gradient_equal_each_alone(loads, m, n, dtype, gathered)
    adds_to_what_is_there(hopper_dw.ragged_k, loads, m, n, dtype, "cuda")


@pytest.mark.gpu
@hopper_only
@pytest.mark.parametrize("k_major", [False, True], ids=["N", "K"])
@pytest.mark.parametrize("k,n,dtype", SHAPES, ids=str)
@pytest.mark.parametrize("loads", LARGE_LOADS.values(), ids=LARGE_LOADS)
def test_sum_of_two_products(loads: list[int], k: int, n: int, dtype: torch.dtype, k_major: bool) -> None:
    offsets, rows = make(loads, 21, "cuda")
    used, experts = sum(loads), len(loads)
    x, x2 = (fill(rows, k, dtype=dtype, device="cuda", seed=seed, poison_from=used) for seed in (1, 4))
    weights = [fill(experts, n, k, dtype=dtype, device="cuda", seed=seed).transpose(1, 2) for seed in (2, 3)]
    w, v = weights if k_major else [t.contiguous() for t in weights]
    with poisoned_empty():
        y = hopper.ragged_m(x, w, offsets, x2=x2, v=v)
    assert_near(y[:used], rows_ref(x, w, offsets, None) + rows_ref(x2, v, offsets, None), 2 * k)
    assert bool(y[used:].isnan().all()), "rows of no expert were written"


@pytest.mark.gpu
@hopper_only
@pytest.mark.parametrize("k_major", [False, True], ids=["N", "K"])
@pytest.mark.parametrize("rank", [8, 16, 64, 200])
@pytest.mark.parametrize("k,n,dtype", SHAPES, ids=str)
def test_sum_of_products_of_unequal_inner_sizes(k: int, n: int, rank: int, dtype: torch.dtype, k_major: bool) -> None:
    loads = LARGE_LOADS["odd"]
    offsets, rows = make(loads, 21, "cuda")
    used, experts = sum(loads), len(loads)
    x, x2 = (fill(rows, size, dtype=dtype, device="cuda", seed=size, poison_from=used) for size in (k, rank))
    weights = [fill(experts, n, size, dtype=dtype, device="cuda", seed=2).transpose(1, 2) for size in (k, rank)]
    w, v = weights if k_major else [t.contiguous() for t in weights]
    assert hopper.supports_sum(x, w, x2, v, offsets)
    with poisoned_empty():
        y = hopper.ragged_m(x, w, offsets, x2=x2, v=v)
    assert_near(y[:used], rows_ref(x, w, offsets, None) + rows_ref(x2, v, offsets, None), k + rank)
    assert bool(y[used:].isnan().all()), "rows of no expert were written"


@pytest.mark.gpu
@hopper_only
@pytest.mark.parametrize("gathered", [False, True], ids=["rows", "gather"])
@pytest.mark.parametrize("tile", TILES.values(), ids=TILES)
def test_every_tile_of_hopper(tile: Tile | None, gathered: bool) -> None:
    loads = LARGE_LOADS["odd"] * 3
    test_ragged_m_hopper(loads, 328, 712, torch.bfloat16, True, gathered, tile)
    test_ragged_m_hopper(loads, 328, 712, torch.bfloat16, False, gathered, tile)
    if tile is None or not tile.pingpong:
        test_R6_ragged_k_hopper(loads, 328, 712, torch.bfloat16, gathered, tile)


@pytest.mark.gpu
@hopper_only
def test_nan_of_one_expert_stays_in_it() -> None:
    loads = [70, 45, 130, 200]
    offsets, rows = make(loads, 0, "cuda")
    x = fill(rows, 200, dtype=torch.bfloat16, device="cuda", seed=1)
    w = fill(4, 200, 136, dtype=torch.bfloat16, device="cuda", seed=2)
    x[70:115] = float("nan")
    w[2] = float("nan")
    y = hopper.ragged_m(x, w, offsets)
    finite = torch.cat([torch.arange(0, 70), torch.arange(245, 445)])
    assert not y[finite.cuda()].isnan().any()
    assert y[70:245].isnan().all()
    gather = torch.arange(rows, dtype=torch.int32, device="cuda")
    for index in (None, gather):
        dw = hopper_dw.ragged_k(x, y, offsets, index)
        assert not dw[0].isnan().any() and not dw[3].isnan().any()
        assert dw[1:3].isnan().all()


@pytest.mark.gpu
@hopper_only
def test_N4_hopper_takes_rows_past_two_to_the_31_elements() -> None:
    stride = 2**30 + 8
    x = torch.empty(2 * stride + 64, dtype=torch.bfloat16, device="cuda").as_strided((3, 64), (stride, 1))
    x.copy_(fill(3, 64, dtype=torch.bfloat16, device="cuda", seed=1))
    w = fill(1, 64, 64, dtype=torch.bfloat16, device="cuda", seed=2)
    offsets, _ = make([3], 0, "cuda")
    gather = torch.tensor([2, 0, 2], dtype=torch.int32, device="cuda")
    for index in (None, gather):
        assert_near(hopper.ragged_m(x, w, offsets, index), rows_ref(x, w, offsets, index), 64)
        assert_near(hopper_dw.ragged_k(x, x, offsets, index), blocks_ref(x, x, offsets, index), 3)


@pytest.mark.gpu
@hopper_only
@pytest.mark.skipif(HAS_GPU and torch.cuda.mem_get_info()[0] < 2**34, reason="needs 16 GiB of free GPU memory")
def test_N4_results_past_two_to_the_31_elements() -> None:
    """Rows beyond 2³¹ / N of a result, and of the operands of dW."""
    n, loads = 1024, [2**20, 5, 2**20 + 77, 300]
    offsets, rows = make(loads, 0, "cuda")
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(rows, 64, device="cuda", dtype=torch.bfloat16, generator=generator)
    w = torch.randn(4, 64, n, device="cuda", dtype=torch.bfloat16, generator=generator)
    assert rows * n > 2**31
    for twisted in (False, True):
        ragged_m, ragged_k = (twin.ragged_m, twin.ragged_k) if twisted else (hopper.ragged_m, hopper_dw.ragged_k)
        y = ragged_m(x, w, offsets)
        for e, row in ((2, 2**31 // n - 1), (2, 2**31 // n), (2, 2**31 // n + 1), (3, rows - 1)):
            assert_near(y[row], x[row].double() @ w[e].double(), 64)
        last = slice(rows - 300, rows)
        assert_near(ragged_k(x, y, offsets)[3], x[last].double().T @ y[last].double(), 300 * 64)
        del y


@pytest.mark.gpu
@hopper_only
@pytest.mark.skipif(HAS_GPU and torch.cuda.mem_get_info()[0] < 2**34, reason="needs 16 GiB of free GPU memory")
@pytest.mark.parametrize("ragged_k", [hopper_dw.ragged_k, twin.ragged_k], ids=["hopper", "twin"])
def test_N4_sums_added_past_two_to_the_31_elements(ragged_k) -> None:
    """2³¹ values stand before expert 128; the experts on either side of it and the last one have rows."""
    experts, size, having = 130, 4096, (127, 128, 129)
    loads = [70 if e in having else 0 for e in range(experts)]
    offsets, rows = make(loads, 0, "cuda")
    a, b = (fill(rows, size, dtype=torch.bfloat16, device="cuda", seed=seed) for seed in (1, 2))
    total = torch.ones(experts, size, size, device="cuda")
    assert total.numel() > 2**31
    gather = torch.arange(rows, dtype=torch.int32, device="cuda")
    for i, index in enumerate((None, gather)):
        ragged_k(a, b, offsets, index, add_to=total)
        for j, e in enumerate(having):
            part = slice(70 * j, 70 * (j + 1))
            assert_near(total[e], 1 + (i + 1) * (a[part].double().T @ b[part].double()), 140)
    assert bool((total[: having[0]] == 1).all())


@pytest.mark.gpu
@hopper_only
def test_N2_graph_replays_another_routing_without_a_sync_and_bit_for_bit() -> None:
    offsets, rows = make([300, 0, 100, 7], 200, "cuda")
    x = fill(rows, 256, dtype=torch.bfloat16, device="cuda", seed=1)
    w = fill(4, 256, 384, dtype=torch.bfloat16, device="cuda", seed=2)
    gather = gather_of(rows, rows, "cuda")

    def run() -> list[Tensor]:
        return [
            hopper.ragged_m(x, w, offsets, gather), hopper.ragged_m(x, w, offsets),
            hopper.ragged_m(x, w, offsets, x2=x, v=w),
            hopper_dw.ragged_k(x, x, offsets), hopper_dw.ragged_k(x, x, offsets, gather),
            hopper_dw.ragged_k(x, x, offsets, gather, add_to=torch.ones(4, 256, 256, device="cuda")),
        ]  # fmt: skip

    run()
    with no_sync():
        run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    offsets.copy_(make([0, 33, 512, 1], 0, "cuda")[0])
    used = 546
    for _ in range(10):
        for t in captured:
            t.fill_(float("nan"))
        graph.replay()
        for again, fresh in zip(captured, run(), strict=True):
            assert torch.equal(again[:used], fresh[:used])


def test_hopper_refuses_what_it_cannot_read() -> None:
    offsets, rows = make([3, 4], 0, "cpu")
    x, w = torch.zeros(rows, 32, dtype=torch.bfloat16), torch.zeros(2, 32, 16, dtype=torch.bfloat16)
    narrow, strided, shifted = x[:, :12].contiguous(), x[:, ::2], x.flatten()[1 : 1 + 16 * rows].view(rows, 16)
    assert hopper.supports_m(x, w, offsets, rows) and hopper_dw.supports_k(x, x[:, :16], offsets)
    assert not hopper.supports_m(x.half(), w, offsets, rows) and not hopper_dw.supports_k(x, x.half(), offsets)
    assert not hopper.supports_m(x, w[..., ::2], offsets, rows) and not hopper.supports_m(x[:0], w, offsets, rows)
    assert not hopper.supports_m(x, w, torch.zeros(514, dtype=torch.int32), rows), "too many experts"
    for other in (narrow, strided, shifted):
        assert not hopper.supports_m(other, w[:, : other.shape[1]], offsets, rows)
        assert not hopper_dw.supports_k(x, other, offsets) and not hopper_dw.supports_k(other, x, offsets)
