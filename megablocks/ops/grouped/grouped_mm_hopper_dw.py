"""Ragged-K grouped GEMM on Hopper (Gluon, sm_90): the choice of the tile, the kernel and its launch.

    o[e] = Σ_r a[r]ᵀ · b[row(r)] over the rows r of expert e      a (R, M), b (R|S, N), offsets (E+1,)  → o (E, M, N)

An expert owns the same number of tiles whatever its rows; one without rows takes no step and stores zeros. Both
consumers share a tile: turns would read more per product, and with rows / BK steps there is little epilogue to hide.

A program takes every P-th tile, so the tiles of an expert with many rows would make their programs late. An expert
with more than half of a program's share is cut into pieces of a quarter. The sums of a piece go to a slot in float32,
and a second kernel adds an expert's pieces in their order. Which experts are cut is found on the device. At even loads
none is, and the second kernel ends at once.

Rows from an expert's end on are another expert's, or were never written. The TMA unit reads zeros there through
`ragged_rows`, cp.async through its mask, so that neither operand's NaN meets the other's zero.

With `add` the sums are added to o in float32 instead. A tile has one writer, so this takes no atomics. Threads load and
store what they hold of the tile, 32 bytes by four neighbors, and shared memory is not used.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from megablocks.ops.grouped.grouped_mm_hopper import Plan, fits, lanes_of
from megablocks.ops.hopper import Tile, aligned, descriptor, multiprocessors, with_tail
from megablocks.ops.hopper_gluon import (
    ROW_BOUND,
    add,
    barriers,
    copy_load,
    multiply,
    parts_of,
    stage_out,
    tma_load,
    tma_store,
)
from megablocks.ops.launch import quick


@dataclass(frozen=True)
class PlanK(Plan):
    """Like Plan; with `add` the sums are added to what is there."""

    M: int = 0
    add: bool = False
    a_k_major: ClassVar[bool] = False

    @property
    def m_tiles(self) -> int:
        return -(-self.M // self.BM)

    @property
    def tiles(self) -> int:
        """Tiles of an expert; its number of rows does not matter."""
        return self.m_tiles * self.n_tiles

    @property
    def producer_regs(self) -> int:
        return max(super().producer_regs, 48)

    def pieces(self, rows: int, experts: int) -> tuple[int, int]:
        """How many rows a piece has: a quarter of a 128th of all tiles' rows, but no fewer than experts have at even
        loads. And how many pieces there are at most: three hold more rows than two full ones. Their sums have 100 MB.
        """
        least = max(rows * self.tiles / 512, rows / experts, _LEAST)
        longest = math.ceil(least / self.BK) * self.BK
        return longest, 3 * rows // (2 * longest) if rows > 2 * longest else 0


_LEAST = 512  # rows: adding a shorter piece takes about as long as its products

# Where an expert has few rows, the stores decide: two are in flight.
_SHARED = Tile(64, 256, 4, out_parts=4, out_buffers=2)


def choose_k(M: int, N: int) -> Tile:
    """The tile of ragged_k."""
    return _SHARED if N > 128 else Tile(128 if M > 128 else 64, 128, 4)


@functools.lru_cache(1024)  # a look-up takes less time than a new plan
def _plan(tile: Tile | None, experts: int, M: int, N: int, gather: bool, add: bool) -> PlanK:
    return PlanK(**vars(tile or choose_k(M, N)), lanes=lanes_of(experts), M=M, N=N, gather=gather, add=add)


def supports_k(a: Tensor, b: Tensor, offsets: Tensor) -> bool:
    """Whether ragged_k takes operands with which `runs_hopper`: as supports_m, with M and N multiples of 8."""
    return fits(offsets, a, b) and a.shape[1] % 8 == 0 and b.shape[1] % 8 == 0 and aligned(a) and aligned(b)


@gluon.jit
def _pieces(offsets_ptr, experts, longest, c: gl.constexpr, WARPS: gl.constexpr):
    """The experts, and in how many pieces each is cut (0: not at all), (c.lanes,) int32 each in every warp."""
    e = gl.arange(0, c.lanes, gl.BlockedLayout([c.lanes // 32], [32], [WARPS], [0]))
    first = gl.load(offsets_ptr + e, mask=e < experts, other=0)
    rows = gl.load(offsets_ptr + e + 1, mask=e < experts, other=0) - first
    return e, gl.where(rows > 2 * longest, (rows + longest - 1) // longest, 0)


@gluon.jit
def _count_tiles(offsets_ptr, experts, longest, c: gl.constexpr, WARPS: gl.constexpr):
    _, pieces = _pieces(offsets_ptr, experts, longest, c, WARPS)
    return (experts + gl.sum(gl.maximum(pieces - 1, 0), 0)) * c.tiles


@gluon.jit
def _find_block(tile, tiles, offsets_ptr, experts, longest, c: gl.constexpr, WARPS: gl.constexpr):
    """Expert, first row, end row, first output row and column of a ragged-K tile, and its piece's slot or -1.

    Of a tile past the last those of the last, so that they may be looked up ahead.
    """
    tile = gl.minimum(tile, tiles - 1)
    e = tile // c.tiles
    r = tile - e * c.tiles
    piece = gl.to_tensor(0)
    slot = gl.to_tensor(-1)
    if tiles > experts * c.tiles:  # experts are cut
        lane, pieces = _pieces(offsets_ptr, experts, longest, c, WARPS)
        ends = gl.associative_scan(gl.where(lane < experts, gl.maximum(pieces, 1), 0) * c.tiles, 0, add)
        done = ends <= tile
        e = gl.sum(done.to(gl.int32), 0)
        r = tile - gl.max(gl.where(done, ends, 0), 0)
        piece = r // c.tiles
        r -= piece * c.tiles
        # In an `if` of its own, ptxas makes this sum conditional, and one of CUDA 12.8 on a wrong condition.
        before = gl.sum(gl.where(done, pieces, 0), 0)
        slot = gl.where(gl.max(gl.where(lane == e, pieces, 0), 0) > 0, before + piece, -1)
    if c.m_tiles <= c.n_tiles:
        n = r // c.m_tiles
        m = r - n * c.m_tiles
    else:
        m = r // c.n_tiles
        n = r - m * c.n_tiles
    first = gl.load(offsets_ptr + e) + piece * longest
    end = gl.load(offsets_ptr + e + 1)
    if slot >= 0:
        end = gl.minimum(end, first + longest)
    return e, first, end, m * c.BM, n * c.BN, slot


@gluon.jit
def _places(part, i: gl.constexpr, base, block, row, col, c: gl.constexpr):
    """Where a part's values lie in blocks of (M, N) from base, and which are inside."""
    layout: gl.constexpr = part.type.layout
    rows = row + gl.arange(0, c.rows, gl.SliceLayout(1, layout))
    cols = col + i * c.out_cols + gl.arange(0, c.out_cols, gl.SliceLayout(0, layout))
    at = base + (block.to(gl.int64) * c.M + rows)[:, None] * c.N + cols[None, :]
    return at, (rows < c.M)[:, None] & (cols < c.N)[None, :]


@gluon.jit
def _store_block(
    part, i: gl.constexpr, bufs, o_desc, o_ptr, sums_ptr, e, slot, row, col, steps, WG: gl.constexpr, c: gl.constexpr
):
    if slot >= 0:
        at, inside = _places(part, i, sums_ptr, slot, row, col, c)
        gl.store(at, part, mask=inside)
    elif c.add:
        at, inside = _places(part, i, o_ptr, e, row, col, c)
        inside = inside & (steps > 0)
        gl.store(at, gl.load(at, mask=inside) + part, mask=inside)
    else:
        buf = stage_out(part, i, bufs, WG, c).reshape([1, c.rows, c.out_cols])
        tma_store(o_desc, [e, row, col + i * c.out_cols], buf)


@gluon.jit
def _consumer(
    a_bufs, b_bufs, o_bufs, full, empty, o_desc, o_ptr, sums_ptr, offsets_ptr, experts, longest, WG: gl.constexpr,
    c: gl.constexpr,
):  # fmt: skip
    PARTS: gl.constexpr = c.out_parts
    tiles = _count_tiles(offsets_ptr, experts, longest, c, 4)
    start = gl.program_id(0)
    step = gl.num_programs(0)
    it = gl.to_tensor(0)
    e, first, end, m0, n0, slot = _find_block(start, tiles, offsets_ptr, experts, longest, c, 4)
    for tile in range(start, tiles, step):
        expert = e
        place = slot
        row = m0 + WG * c.rows
        col = n0
        steps = (end - first + (c.BK - 1)) // c.BK
        e, first, end, m0, n0, slot = _find_block(tile + step, tiles, offsets_ptr, experts, longest, c, 4)
        # That multiply asks whether there are steps also keeps an expert's first and last row alive: Triton 3.6 and 3.7
        # take a value that is carried around a loop and only bounds an inner one for dead. Then the steps of the first
        # tile stand for every tile, the producer's differ, and the kernel hangs.
        acc, it = multiply(it, steps, a_bufs, b_bufs, full, empty, (), 0, WG, c)
        parts = parts_of(acc, c)
        for i in gl.static_range(PARTS):
            _store_block(parts[i], i, o_bufs, o_desc, o_ptr, sums_ptr, expert, place, row, col, steps, WG, c)
    tma.store_wait(0)


@gluon.jit
def _load_rows(desc, tail_desc, row, end, col, bar, buf, WIDTH: gl.constexpr, c: gl.constexpr):
    """BK rows from `row`, WIDTH columns from `col`; rows at and past `end` are another expert's and read as zero."""
    if row + c.BK <= end:
        tma_load(desc, [row, col], bar, buf)
    else:
        tma_load(tail_desc, [ROW_BOUND, end, ROW_BOUND - end + row, col], bar, buf.reshape([1, 1, c.BK, WIDTH]))


@gluon.jit
def _k_producer(
    a_bufs, b_bufs, full, empty, a_desc, a_tail, b_desc, b_tail, b_ptr, b_row, gather_ptr, offsets_ptr, experts,
    longest, c: gl.constexpr,
):  # fmt: skip
    WARPS: gl.constexpr = c.producer_warps
    tiles = _count_tiles(offsets_ptr, experts, longest, c, WARPS)
    start = gl.program_id(0)
    step = gl.num_programs(0)
    it = gl.to_tensor(0)
    e, first, end, m0, n0, _ = _find_block(start, tiles, offsets_ptr, experts, longest, c, WARPS)
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
        e, first, end, m0, n0, _ = _find_block(tile + step, tiles, offsets_ptr, experts, longest, c, WARPS)
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
                _load_rows(a_desc, a_tail, k, k1, row + p * c.rows, bar, a_bufs.index(s * 2 + p), c.rows, c)
            if c.gather:
                copy_load(b_bufs.index(s), src, mask=inside)
                async_copy.mbarrier_arrive(bar, increment_count=False)
            else:
                _load_rows(b_desc, b_tail, k, k1, col, bar, b_bufs.index(s), c.BN, c)
            it += 1
        if c.gather:
            ids = next_ids


@quick
@gluon.jit(do_not_specialize=["experts", "longest"])
def ragged_k_kernel(
    a_desc, a_tail, b_desc, b_tail, o_desc, o_ptr, sums_ptr, b_ptr, b_row, gather_ptr, offsets_ptr, experts, longest,
    c: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """a (R, M) and b (R, N) in (BK, rows) and (BK, BN) boxes, each with its ragged twin; o_desc or o_ptr (E, M, N).

    sums_ptr: (slots, M, N) float32, of pieces of at most `longest` rows.
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
    gl.warp_specialize(
        [
            (
                _consumer,
                (
                    a_bufs, b_bufs, o_bufs, full, empty, o_desc, o_ptr, sums_ptr, offsets_ptr, experts, longest, 0, c,
                ),
            ),
            (
                _consumer,
                (
                    a_bufs, b_bufs, o_bufs, full, empty, o_desc, o_ptr, sums_ptr, offsets_ptr, experts, longest, 1, c,
                ),
            ),
            (
                _k_producer,
                (
                    a_bufs, b_bufs, full, empty, a_desc, a_tail, b_desc, b_tail, b_ptr, b_row, gather_ptr, offsets_ptr,
                    experts, longest, c,
                ),
            ),
        ],
        [4, c.producer_warps],
        [c.consumer_regs, c.producer_regs],
    )  # fmt: skip


@quick
@gluon.jit(do_not_specialize=["experts", "longest"])
def add_pieces_kernel(
    sums_ptr, o_ptr, o_block, o_row, offsets_ptr, experts, longest, c: gl.constexpr, num_warps: gl.constexpr
):
    """Each cut expert's pieces, added in their order and stored to its (M, N) of o, or added to it with c.add."""
    BLOCK: gl.constexpr = 4096
    blocks: gl.constexpr = (c.M * c.N + BLOCK - 1) // BLOCK
    lane, pieces = _pieces(offsets_ptr, experts, longest, c, num_warps)
    rank = gl.associative_scan((pieces > 0).to(gl.int32), 0, add)
    for item in range(gl.program_id(0), gl.max(rank, 0) * blocks, gl.num_programs(0)):
        mine = (pieces > 0) & (rank == item // blocks + 1)
        e = gl.sum(gl.where(mine, lane, 0), 0)
        count = gl.sum(gl.where(mine, pieces, 0), 0)
        slot = gl.sum(gl.where(lane < e, pieces, 0), 0).to(gl.int64)
        i = item % blocks * BLOCK + gl.arange(0, BLOCK, gl.BlockedLayout([4], [32], [num_warps], [0]))
        inside = i < c.M * c.N
        at = o_ptr + e.to(gl.int64) * o_block + (i // c.N).to(gl.int64) * o_row + i % c.N
        if c.add:
            total = gl.load(at, mask=inside)
        else:
            total = gl.load(sums_ptr + slot * (c.M * c.N) + i, mask=inside)
        for piece in range(0 if c.add else 1, count):
            total += gl.load(sums_ptr + (slot + piece) * (c.M * c.N) + i, mask=inside)
        gl.store(at, total.to(o_ptr.dtype.element_ty), mask=inside)


def ragged_k(
    a: Tensor, b: Tensor, offsets: Tensor, gather: Tensor | None = None, *, add_to: Tensor | None = None,
    out: Tensor | None = None, tile: Tile | None = None,
) -> Tensor:  # fmt: skip
    """o (E, M, N) as grouped_mm_triton's ragged_k gives it, of operands that `supports_k` takes: bfloat16 or float16.

    out: (E, M, N) of a's dtype, rows contiguous, such as a half of a joined weight: where o is written.
    """
    assert tile is None or not tile.pingpong, "the consumers of ragged_k share a tile"
    experts, M, N, add = offsets.shape[0] - 1, a.shape[1], b.shape[1], add_to is not None
    if add_to is not None:
        o = add_to
    else:
        o = torch.empty(experts, M, N, dtype=a.dtype, device=a.device) if out is None else out
    if a.shape[0] == 0 or b.shape[0] == 0:
        return o if add else o.zero_()
    c = _plan(tile, experts, M, N, gather is not None, add)
    programs = (multiprocessors(a.device.index),)
    longest, slots = c.pieces(a.shape[0], experts)
    sums = torch.empty(slots, M, N, dtype=torch.float32, device=a.device)
    ragged_k_kernel[programs](
        *with_tail(a, [c.BK, c.rows]),
        *with_tail(None if c.gather else b, [c.BK, c.BN]),
        None if add else descriptor(o, [1, c.rows, c.out_cols]),
        o if add else None,
        sums,
        b if c.gather else None,
        b.stride(0) // 8 if c.gather else 0,
        gather,
        offsets,
        experts,
        longest,
        c=c,
        num_warps=4,
    )
    add_pieces_kernel[(4 * programs[0],)](
        sums, o, o.stride(0), o.stride(1), offsets, experts, longest, c=c, num_warps=4
    )
    return o
