"""Ragged-K grouped GEMM on Hopper (Gluon, sm_90): the choice of the tile, the kernel and its launch.

    o[e] = Σ_r a[r]ᵀ · b[row(r)] over the rows r of expert e      a (R, M), b (R|S, N), offsets (E+1,)  → o (E, M, N)

With `gated` also o2[e] = Σ_r a2[r]ᵀ · b[row(r)]. An expert's tiles of o2 stand below those of o, and both are walked
before the next expert's, so that b's rows, which both read, are read while they are in L2.

An expert owns the same number of tiles whatever its rows; one without rows takes no step and stores zeros. Both
consumers share a tile: turns would read more per product, and with rows / BK steps there is little epilogue to hide.

Rows from an expert's end on are another expert's, or were never written. The TMA unit reads zeros there through
`ragged_rows`, cp.async through its mask, so that neither operand's NaN meets the other's zero.

With `add` the sums are added to o in float32 instead. A tile has one writer, so this takes no atomics. Threads load and
store what they hold of the tile, 32 bytes by four neighbors, and shared memory is not used.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from megablocks.ops.grouped.grouped_mm_hopper import Plan, fits
from megablocks.ops.hopper import Tile, aligned, descriptor, multiprocessors, with_tail
from megablocks.ops.hopper_gluon import (
    ROW_BOUND,
    barriers,
    copy_load,
    issue,
    parts_of,
    retire,
    rounded_parts,
    stage_out,
    tma_load,
    tma_store,
)
from megablocks.ops.launch import quick


@dataclass(frozen=True)
class PlanK(Plan):
    """Like Plan; `gated` with a second left operand, `add` to what is there."""

    M: int = 0
    add: bool = False
    gated: bool = False
    a_k_major: ClassVar[bool] = False

    @property
    def m_tiles(self) -> int:
        return -(-self.M // self.BM)

    @property
    def tiles(self) -> int:
        """Tiles of an expert; its number of rows does not matter."""
        return (1 + self.gated) * self.m_tiles * self.n_tiles

    @property
    def late(self) -> bool:
        """Whether a tile waits, rounded, for the next one's products."""
        return self.out_parts == 4 and not self.add


# Where an expert has few rows, the stores decide: two are in flight.
_SHARED = Tile(64, 256, 4, out_parts=4, out_buffers=2)


def choose_k(M: int, N: int) -> Tile:
    """The tile of ragged_k."""
    return _SHARED if N > 128 else Tile(128 if M > 128 else 64, 128, 4)


@functools.lru_cache(1024)  # a look-up takes less time than a new plan
def _plan(tile: Tile | None, M: int, N: int, gather: bool, add: bool, gated: bool) -> PlanK:
    return PlanK(**vars(tile or choose_k(M, N)), M=M, N=N, gather=gather, add=add, gated=gated)


def supports_k(a: Tensor, b: Tensor, offsets: Tensor) -> bool:
    """Whether ragged_k takes operands with which `runs_hopper`: as supports_m, with M and N multiples of 8."""
    return fits(offsets, a, b) and a.shape[1] % 8 == 0 and b.shape[1] % 8 == 0 and aligned(a) and aligned(b)


def supports_gated(a: Tensor, a2: Tensor, b: Tensor, offsets: Tensor) -> bool:
    """Whether ragged_k_gated takes these: each product alone, of equal shapes."""
    return supports_k(a, b, offsets) and supports_k(a2, b, offsets) and a.shape == a2.shape


@gluon.jit
def _find_block(tile, offsets_ptr, c: gl.constexpr):
    """Expert, first row, end row, first output row and column of a ragged-K tile, and whether it is one of o2's."""
    height: gl.constexpr = (1 + c.gated) * c.m_tiles
    e = tile // c.tiles
    r = tile - e * c.tiles
    if height <= c.n_tiles:
        n = r // height
        m = r - n * height
    else:
        m = r // c.n_tiles
        n = r - m * c.n_tiles
    second = m // c.m_tiles
    m -= second * c.m_tiles
    return e, gl.load(offsets_ptr + e), gl.load(offsets_ptr + e + 1), m * c.BM, n * c.BN, second


@gluon.jit
def _store_block(part, i: gl.constexpr, bufs, outs, e, row, col, second, steps, WG: gl.constexpr, c: gl.constexpr):
    o_desc, o_ptr, o2_desc, o2_ptr = outs
    if c.add:
        layout: gl.constexpr = part.type.layout
        rows = row + gl.arange(0, c.rows, gl.SliceLayout(1, layout))
        cols = col + i * c.out_cols + gl.arange(0, c.out_cols, gl.SliceLayout(0, layout))
        total_ptr = o_ptr
        if c.gated:
            if second > 0:
                total_ptr = o2_ptr
        at = total_ptr + (e.to(gl.int64) * c.M + rows)[:, None] * c.N + cols[None, :]
        inside = ((rows < c.M) & (steps > 0))[:, None] & (cols < c.N)[None, :]
        gl.store(at, gl.load(at, mask=inside) + part, mask=inside)
    else:
        buf = stage_out(part, i, bufs, WG, c).reshape([1, c.rows, c.out_cols])
        where = [e, row, col + i * c.out_cols]
        if c.gated:
            if second > 0:
                tma_store(o2_desc, where, buf)
            else:
                tma_store(o_desc, where, buf)
        else:
            tma_store(o_desc, where, buf)


@gluon.jit
def _store_parts(parts, at, steps, bufs, outs, WG: gl.constexpr, c: gl.constexpr):
    PARTS: gl.constexpr = c.out_parts
    e, row, col, second = at
    for i in gl.static_range(PARTS):
        _store_block(parts[i], i, bufs, outs, e, row, col, second, steps, WG, c)


@gluon.jit
def _sum_rows(it, rows, waits, held, at, a_bufs, b_bufs, o_bufs, full, empty, outs, WG: gl.constexpr, c: gl.constexpr):
    """A consumer's share of a tile from an expert's `rows`, (rows, BN) in float32, and the stage after them.

    With `late` the tile before is stored meanwhile, if one `waits`: held are its parts, at its place.
    """
    shape: gl.constexpr = [c.rows, c.BN]
    HALF: gl.constexpr = c.BK // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, c.BN, 16])
    steps = (rows + (c.BK - 1)) // c.BK
    # Of a last step that holds at most HALF rows only these are multiplied; the others read as zero.
    short = ((rows % c.BK > 0) & (rows % c.BK <= HALF)).to(gl.int32)
    acc = gl.zeros(shape, gl.float32, layout)
    for k in range(steps - short):
        acc = issue(it, acc, a_bufs, b_bufs, full, k > 0, WG, c)
        if c.late:
            if (k == 1) & waits:  # beside the products of two steps
                _store_parts(held, at, 1, o_bufs, outs, WG, c)
        acc = retire(it, acc, empty, k > 0, c)
        it += 1
    if c.late:
        if (steps - short < 2) & waits:
            _store_parts(held, at, 1, o_bufs, outs, WG, c)
    if short > 0:
        s = it % c.stages
        mbarrier.wait(full.index(s), (it // c.stages) & 1)
        if c.gather:
            fence_async_shared()
        a = a_bufs.index(s * 2 + WG).slice(0, HALF)
        b = b_bufs.index(s).slice(0, HALF)
        acc = warpgroup_mma(a.permute((1, 0)), b, acc, use_acc=steps > 1, is_async=True)
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
        mbarrier.arrive(empty.index((it + c.stages - 1) % c.stages), count=1, pred=steps > 1)
        it += 1
    else:
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
    # The predicate is also what keeps an expert's first and last row alive: Triton 3.6 and 3.7 take a value that is
    # carried around a loop and only bounds an inner one for dead. Then the first tile's steps stand for every tile, the
    # producer's differ, and the kernel hangs.
    mbarrier.arrive(empty.index((it + c.stages - 1) % c.stages), count=1, pred=steps > 0)
    return acc, it


@gluon.jit
def _direct_consumer(
    a_bufs, b_bufs, o_bufs, full, empty, outs, offsets_ptr, experts, WG: gl.constexpr, c: gl.constexpr
):
    tiles = experts * c.tiles
    start = gl.program_id(0)
    step = gl.num_programs(0)
    it = gl.to_tensor(0)
    e, first, end, m0, n0, second = _find_block(gl.minimum(start, tiles - 1), offsets_ptr, c)
    for tile in range(start, tiles, step):
        at = (e, m0 + WG * c.rows, n0, second)
        rows = end - first
        e, first, end, m0, n0, second = _find_block(gl.minimum(tile + step, tiles - 1), offsets_ptr, c)
        acc, it = _sum_rows(it, rows, False, (), (), a_bufs, b_bufs, o_bufs, full, empty, outs, WG, c)
        _store_parts(parts_of(acc, c), at, rows, o_bufs, outs, WG, c)
    tma.store_wait(0)


@gluon.jit
def _late_consumer(a_bufs, b_bufs, o_bufs, full, empty, outs, offsets_ptr, experts, WG: gl.constexpr, c: gl.constexpr):
    """As _direct_consumer, each tile written *late*: rounded, it waits in registers for the next one's second step.

    As in up_hopper.py the rounding must stay in front of those products.
    """
    shape: gl.constexpr = [c.rows, c.BN]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, c.BN, 16])
    dtype: gl.constexpr = o_bufs.dtype
    tiles = experts * c.tiles
    start = gl.program_id(0)
    step = gl.num_programs(0)
    it = gl.to_tensor(0)
    e, first, end, m0, n0, second = _find_block(gl.minimum(start, tiles - 1), offsets_ptr, c)
    h0, h1, h2, h3 = rounded_parts(gl.zeros(shape, gl.float32, layout), dtype, c)
    # Where the tile that waits goes. Each starts as an object of its own, or Triton does not carry it around the loop.
    expert = gl.to_tensor(0)
    row = gl.to_tensor(0)
    col = gl.to_tensor(0)
    of_second = gl.to_tensor(0)
    for tile in range(start, tiles, step):
        next_expert = e
        next_row = m0 + WG * c.rows
        next_col = n0
        next_of_second = second
        rows = end - first
        e, first, end, m0, n0, second = _find_block(gl.minimum(tile + step, tiles - 1), offsets_ptr, c)
        held = (h0, h1, h2, h3)
        at = (expert, row, col, of_second)
        acc, it = _sum_rows(it, rows, tile > start, held, at, a_bufs, b_bufs, o_bufs, full, empty, outs, WG, c)
        h0, h1, h2, h3 = rounded_parts(acc, dtype, c)
        expert = next_expert
        row = next_row
        col = next_col
        of_second = next_of_second
    if start < tiles:
        _store_parts((h0, h1, h2, h3), (expert, row, col, of_second), 1, o_bufs, outs, WG, c)
    tma.store_wait(0)


@gluon.jit
def _consumer(a_bufs, b_bufs, o_bufs, full, empty, outs, offsets_ptr, experts, WG: gl.constexpr, c: gl.constexpr):
    if c.late:
        _late_consumer(a_bufs, b_bufs, o_bufs, full, empty, outs, offsets_ptr, experts, WG, c)
    else:
        _direct_consumer(a_bufs, b_bufs, o_bufs, full, empty, outs, offsets_ptr, experts, WG, c)


@gluon.jit
def _load_rows(desc, tail_desc, row, end, col, bar, buf, WIDTH: gl.constexpr, c: gl.constexpr):
    """BK rows from `row`, WIDTH columns from `col`; rows at and past `end` are another expert's and read as zero."""
    if row + c.BK <= end:
        tma_load(desc, [row, col], bar, buf)
    else:
        tma_load(tail_desc, [ROW_BOUND, end, ROW_BOUND - end + row, col], bar, buf.reshape([1, 1, c.BK, WIDTH]))


@gluon.jit
def _k_producer(
    a_bufs, b_bufs, full, empty, a_desc, a_tail, a2_desc, a2_tail, b_desc, b_tail, b_ptr, b_row, gather_ptr,
    offsets_ptr, experts, c: gl.constexpr,
):  # fmt: skip
    tiles = experts * c.tiles
    start = gl.program_id(0)
    step = gl.num_programs(0)
    it = gl.to_tensor(0)
    e, first, end, m0, n0, second = _find_block(gl.minimum(start, tiles - 1), offsets_ptr, c)
    if c.gather:
        lanes: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [c.producer_warps, 1], [1, 0])
        i = gl.arange(0, c.BK, gl.SliceLayout(1, lanes))
        cols = gl.arange(0, c.BN, gl.SliceLayout(0, lanes))
        ids = gl.load(gather_ptr + (first + i), mask=first + i < end, other=0)
    for tile in range(start, tiles, step):
        k0 = first
        k1 = end
        # Not range(k0, k1, BK): the note in the consumer holds for bounds of this loop, too.
        steps = (k1 - k0 + (c.BK - 1)) // c.BK
        row = m0
        col = n0
        of_second = second
        e, first, end, m0, n0, second = _find_block(gl.minimum(tile + step, tiles - 1), offsets_ptr, c)
        if c.gather:
            next_ids = gl.load(gather_ptr + (first + i), mask=first + i < end, other=0)
            base = b_ptr + col
        for step_of_tile in range(steps):
            k = k0 + step_of_tile * c.BK
            s = it % c.stages
            bar = full.index(s)
            if c.gather:
                src = base + (ids.to(gl.int64) * b_row * 8)[:, None] + cols[None, :]
                inside = (k + i < k1)[:, None]
                if c.N % c.BN != 0:
                    inside = inside & (col + cols < c.N)[None, :]
                ahead = k + c.BK + i
                ids = gl.load(gather_ptr + ahead, mask=ahead < k1, other=0)
            mbarrier.wait(empty.index(s), ((it // c.stages) & 1) ^ 1)
            mbarrier.expect(bar, c.left_bytes if c.gather else c.left_bytes + c.right_bytes)
            for p in gl.static_range(2):
                buf = a_bufs.index(s * 2 + p)
                if c.gated:
                    if of_second > 0:
                        _load_rows(a2_desc, a2_tail, k, k1, row + p * c.rows, bar, buf, c.rows, c)
                    else:
                        _load_rows(a_desc, a_tail, k, k1, row + p * c.rows, bar, buf, c.rows, c)
                else:
                    _load_rows(a_desc, a_tail, k, k1, row + p * c.rows, bar, buf, c.rows, c)
            if c.gather:
                copy_load(b_bufs.index(s), src, mask=inside)
                async_copy.mbarrier_arrive(bar, increment_count=False)
            else:
                _load_rows(b_desc, b_tail, k, k1, col, bar, b_bufs.index(s), c.BN, c)
            it += 1
        if c.gather:
            ids = next_ids


@quick
@gluon.jit(do_not_specialize=["experts"])
def ragged_k_kernel(
    a_desc, a_tail, a2_desc, a2_tail, b_desc, b_tail, o_desc, o_ptr, o2_desc, o2_ptr, b_ptr, b_row, gather_ptr,
    offsets_ptr, experts, c: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """a (R, M) and b (R, N) in (BK, rows) and (BK, BN) boxes, each with its ragged twin; o_desc or o_ptr (E, M, N).

    a2_desc, a2_tail, o2_desc, o2_ptr: as those without 2, with `gated`.
    """
    dtype: gl.constexpr = a_desc.dtype
    a_bufs = gl.allocate_shared_memory(dtype, [c.stages * 2, c.BK, c.rows], a_desc.layout)
    b_bufs = gl.allocate_shared_memory(
        dtype, [c.stages, c.BK, c.BN], gl.NVMMASharedLayout.get_default_for([c.BK, c.BN], dtype)
    )
    if c.add:
        o_bufs: gl.constexpr = None
    else:
        o_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([c.rows, c.out_cols], o_desc.dtype)
        o_bufs = gl.allocate_shared_memory(o_desc.dtype, [2 * c.out_buffers, c.rows, c.out_cols], o_layout)
    full, empty, _ = barriers(c)
    outs = (o_desc, o_ptr, o2_desc, o2_ptr)
    gl.warp_specialize(
        [
            (_consumer, (a_bufs, b_bufs, o_bufs, full, empty, outs, offsets_ptr, experts, 0, c)),
            (_consumer, (a_bufs, b_bufs, o_bufs, full, empty, outs, offsets_ptr, experts, 1, c)),
            (
                _k_producer,
                (
                    a_bufs, b_bufs, full, empty, a_desc, a_tail, a2_desc, a2_tail, b_desc, b_tail, b_ptr, b_row,
                    gather_ptr, offsets_ptr, experts, c,
                ),
            ),
        ],
        [4, c.producer_warps],
        [c.consumer_regs, c.producer_regs],
    )  # fmt: skip


def ragged_k(
    a: Tensor, b: Tensor, offsets: Tensor, gather: Tensor | None = None, *, add_to: Tensor | None = None,
    tile: Tile | None = None,
) -> Tensor:  # fmt: skip
    """o (E, M, N): o[e] = Σ a[r]ᵀ b[r], or b[gather[r]], over the rows r of expert e; zero where it has none.

    Args:
        a: (R, M) bfloat16 or float16. See supports_k.
        b: (R, N), or (S, N) with gather.
        offsets: (E+1,) int32, non-decreasing; rows from offsets[E] on are not read into any sum.
        gather: (R,) int32 in [0, S).
        add_to: (E, M, N) float32, contiguous: the sums are added to it, unrounded, and it is returned.
    """
    return _launch(a, None, b, offsets, gather, None if add_to is None else (add_to,), tile)[0]


def ragged_k_gated(
    a: Tensor, a2: Tensor, b: Tensor, offsets: Tensor, gather: Tensor | None = None, *,
    add_to: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`ragged_k` of a and of a2 in one launch, which reads b's rows for both: (E, M, N) each. See supports_gated."""
    o, o2 = _launch(a, a2, b, offsets, gather, add_to)
    return o, o2


def _launch(
    a: Tensor, a2: Tensor | None, b: Tensor, offsets: Tensor, gather: Tensor | None, add_to: tuple[Tensor, ...] | None,
    tile: Tile | None = None,
) -> list[Tensor]:  # fmt: skip
    assert tile is None or not tile.pingpong, "the consumers of ragged_k share a tile"
    experts, M, N = offsets.shape[0] - 1, a.shape[1], b.shape[1]
    lefts = [a] if a2 is None else [a, a2]
    if add_to is None:
        outs = [torch.empty(experts, M, N, dtype=a.dtype, device=a.device) for _ in lefts]
    else:
        outs = list(add_to)
    if a.shape[0] == 0 or b.shape[0] == 0:
        return outs if add_to is not None else [o.zero_() for o in outs]
    c = _plan(tile, M, N, gather is not None, add_to is not None, a2 is not None)
    a_box, b_box, o_box = [c.BK, c.rows], [c.BK, c.BN], [1, c.rows, c.out_cols]
    o, o2 = outs[0], outs[1] if c.gated else None
    ragged_k_kernel[(multiprocessors(a.device.index),)](
        *with_tail(a, a_box),
        *with_tail(a2, a_box),
        *with_tail(None if c.gather else b, b_box),
        None if c.add else descriptor(o, o_box),
        o if c.add else None,
        None if c.add or o2 is None else descriptor(o2, o_box),
        o2 if c.add else None,
        b if c.gather else None,
        b.stride(0) // 8 if c.gather else 0,
        gather,
        offsets,
        experts,
        c=c,
        num_warps=4,
    )
    return outs
