"""Ragged-K grouped GEMM on Hopper (Gluon, sm_90): the choice of the tile, the kernel and its launch.

    o[e] = Σ_r a[r]ᵀ · b[row(r)] over the rows r of expert e      a (R, M), b (R|S, N), offsets (E+1,)  → o (E, M, N)

Every expert owns the same number of tiles; one without rows takes no step and stores zeros. Both consumers share a
tile: turns would read more per product, and with rows / BK steps there is little epilogue to hide.

A program computes every P-th tile, so programs with tiles of an expert with many rows would end late. A kernel before
this one sorts the experts by their rows, and splits those with more than half of a program's share into pieces of a
quarter. Programs get tiles in rounds, every second round in reverse order, so that the program with the longest tile
gets the shortest one next. The sums of a piece go to a slot in float32; a kernel after this one adds an expert's pieces
in their order.

Rows from an expert's end on are another expert's, or were never written. The TMA unit reads zeros there through
`ragged_rows`, cp.async through its mask, so that neither operand's NaN meets the other's zero.

With `add` the sums are added to o in float32 instead. A tile has one writer, so this needs no atomics. Threads load and
store their own values of the tile, 32 bytes by four neighbors, without shared memory.
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

from megablocks.ops import hopper_gluon as hg
from megablocks.ops.grouped.grouped_mm_hopper import Plan, fits
from megablocks.ops.grouped.pieces_triton import add_launch, list_launch
from megablocks.ops.hopper import Tile, aligned, descriptor, multiprocessors, with_tail
from megablocks.ops.hopper_gluon import ROW_BOUND
from megablocks.ops.launch import quick


@dataclass(frozen=True)
class PlanK(Plan):
    """Like Plan; with `add` the sums are added to the output's values."""

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

    def pieces(self, rows: int, experts: int) -> tuple[int, int]:
        """The rows of a piece: a quarter of a 128th of all tiles' rows, but at least an expert's rows at even load.
        And the most pieces that there can be: three hold more rows than two full ones. Their sums have 100 MB.
        """
        least = max(rows * self.tiles / 512, rows / experts, _LEAST)
        longest = math.ceil(least / self.BK) * self.BK
        return longest, 3 * rows // (2 * longest) if rows > 2 * longest else 0


_LEAST = 512  # rows: adding a shorter piece takes about as long as its products

# If an expert has few rows, the stores limit the speed: two are in flight.
_SHARED = Tile(64, 256, 4, out_parts=4, out_buffers=2)


def choose_k(M: int, N: int) -> Tile:
    """The tile of ragged_k."""
    return _SHARED if N > 128 else Tile(128 if M > 128 else 64, 128, 4)


@functools.lru_cache(1024)  # a look-up takes less time than a new plan
def _plan(tile: Tile | None, M: int, N: int, gather: bool, add: bool) -> PlanK:
    return PlanK(**vars(tile or choose_k(M, N)), M=M, N=N, gather=gather, add=add)


def supports_k(a: Tensor, b: Tensor, offsets: Tensor) -> bool:
    """Whether ragged_k supports operands for which `runs_hopper`: as supports_m, with M and N multiples of 8."""
    return fits(offsets, a, b) and a.shape[1] % 8 == 0 and b.shape[1] % 8 == 0 and aligned(a) and aligned(b)


@gluon.jit
def _find_block(turn, tiles, list_ptr, c: gl.constexpr):
    """Expert, first row, end row, first output row and column of a program's tile, and its piece's slot or -1.

    For a tile past the last it returns those of the last, so that a caller can look them up ahead.
    """
    tile = gl.minimum(hg.tile_of_round(turn), tiles - 1)
    item = tile // c.tiles
    r = tile - item * c.tiles
    if c.m_tiles <= c.n_tiles:
        n = r // c.m_tiles
        m = r - n * c.m_tiles
    else:
        m = r // c.n_tiles
        n = r - m * c.n_tiles
    row = list_ptr + (1 + item) * 4
    return gl.load(row), gl.load(row + 1), gl.load(row + 2), m * c.BM, n * c.BN, gl.load(row + 3)


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
        buf = hg.stage_out(part, i, bufs, WG, c).reshape([1, c.rows, c.out_cols])
        hg.tma_store(o_desc, [e, row, col + i * c.out_cols], buf)


@gluon.jit
def _consumer(common, WG: gl.constexpr, c: gl.constexpr):
    a_bufs, b_bufs, o_bufs, full, empty, o_desc, o_ptr, sums_ptr, list_ptr = common
    PARTS: gl.constexpr = c.out_parts
    tiles = gl.load(list_ptr) * c.tiles
    turns = hg.rounds(tiles)
    it = gl.to_tensor(0)
    e, first, end, m0, n0, slot = _find_block(0, tiles, list_ptr, c)
    for turn in range(turns):
        expert, place, row, col = e, slot, m0 + WG * c.rows, n0
        steps = (end - first + (c.BK - 1)) // c.BK
        e, first, end, m0, n0, slot = _find_block(turn + 1, tiles, list_ptr, c)
        # multiply checks whether there are steps. This check also keeps an expert's first and last row alive: Triton
        # 3.6 and 3.7 treat a value that is carried around a loop and only bounds an inner loop as dead. Then every tile
        # has the steps of the first tile, the producer's steps differ, and the kernel hangs.
        acc, it = hg.multiply(it, steps, a_bufs, b_bufs, full, empty, (), 0, WG, c)
        parts = hg.parts_of(acc, c)
        for i in gl.static_range(PARTS):
            _store_block(parts[i], i, o_bufs, o_desc, o_ptr, sums_ptr, expert, place, row, col, steps, WG, c)
    tma.store_wait(0)


@gluon.jit
def _load_rows(desc, tail_desc, row, end, col, bar, buf, WIDTH: gl.constexpr, c: gl.constexpr):
    """BK rows from `row`, WIDTH columns from `col`; rows at and past `end` are another expert's and read as zero."""
    if row + c.BK <= end:
        hg.tma_load(desc, [row, col], bar, buf)
    else:
        at_tail = [ROW_BOUND, end, ROW_BOUND - end + row, col]
        hg.tma_load(tail_desc, at_tail, bar, buf.reshape([1, 1, c.BK, WIDTH]))


@gluon.jit
def _k_producer(given, c: gl.constexpr):
    a_bufs, b_bufs, full, empty, a_desc, a_tail, b_desc, b_tail, b_ptr, b_row, gather_ptr, list_ptr = given
    tiles = gl.load(list_ptr) * c.tiles
    turns = hg.rounds(tiles)
    it = gl.to_tensor(0)
    _, first, end, m0, n0, _ = _find_block(0, tiles, list_ptr, c)
    if c.gather:
        lanes: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [c.producer_warps, 1], [1, 0])
        i = gl.arange(0, c.BK, gl.SliceLayout(1, lanes))
        cols = gl.arange(0, c.BN, gl.SliceLayout(0, lanes))
        ids = gl.load(gather_ptr + (first + i), mask=first + i < end, other=0)
    for turn in range(turns):
        k0, k1, row, col = first, end, m0, n0
        # Not range(k0, k1, BK): the comment in the consumer holds for the bounds of this loop too.
        steps = (k1 - k0 + (c.BK - 1)) // c.BK
        _, first, end, m0, n0, _ = _find_block(turn + 1, tiles, list_ptr, c)
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
                hg.copy_load(b_bufs.index(s), src, mask=inside)
                async_copy.mbarrier_arrive(bar, increment_count=False)
            else:
                _load_rows(b_desc, b_tail, k, k1, col, bar, b_bufs.index(s), c.BN, c)
            it += 1
        if c.gather:
            ids = next_ids


@quick
@gluon.jit
def ragged_k_kernel(
    a_desc, a_tail, b_desc, b_tail, o_desc, o_ptr, sums_ptr, b_ptr, b_row, gather_ptr, list_ptr, c: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """a (R, M) and b (R, N) in (BK, rows) and (BK, BN) boxes, each with its ragged twin; o_desc or o_ptr (E, M, N).

    sums_ptr: (slots, M, N) float32. list_ptr: of `list_launch`.
    """
    a_bufs, b_bufs = hg.operand_buffers(a_desc.dtype, c)
    if c.add:
        o_bufs: gl.constexpr = None
    else:
        o_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([c.rows, c.out_cols], o_desc.dtype)
        o_bufs = gl.allocate_shared_memory(o_desc.dtype, [2 * c.out_buffers, c.rows, c.out_cols], o_layout)
    full, empty, _ = hg.barriers(c)
    common = (a_bufs, b_bufs, o_bufs, full, empty, o_desc, o_ptr, sums_ptr, list_ptr)
    given = (a_bufs, b_bufs, full, empty, a_desc, a_tail, b_desc, b_tail, b_ptr, b_row, gather_ptr, list_ptr)
    gl.warp_specialize(
        [(_consumer, (common, 0, c)), (_consumer, (common, 1, c)), (_k_producer, (given, c))],
        [4, c.producer_warps],
        [c.consumer_regs, c.producer_regs],
    )


def ragged_k(
    a: Tensor, b: Tensor, offsets: Tensor, gather: Tensor | None = None, *, add_to: Tensor | None = None,
    out: Tensor | None = None, tile: Tile | None = None,
) -> Tensor:  # fmt: skip
    """o (E, M, N) as from grouped_mm_triton's ragged_k, for operands that `supports_k` allows: bfloat16 or float16.

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
    c = _plan(tile, M, N, gather is not None, add)
    programs = multiprocessors(a.device.index)
    longest, slots = c.pieces(a.shape[0], experts)
    items = list_launch(offsets, longest, slots)
    sums = torch.empty(slots, M, N, dtype=torch.float32, device=a.device)
    ragged_k_kernel[(programs,)](
        *with_tail(a, [c.BK, c.rows]), *with_tail(None if c.gather else b, [c.BK, c.BN]),
        None if add else descriptor(o, [1, c.rows, c.out_cols]), o if add else None, sums,
        b if c.gather else None, b.stride(0) // 8 if c.gather else 0, gather, items, c=c, num_warps=4,
    )  # fmt: skip
    add_launch(sums, items, experts + slots, o, add, 4 * programs)
    return o
