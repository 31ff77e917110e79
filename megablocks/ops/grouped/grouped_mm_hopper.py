"""Ragged-M grouped GEMM on Hopper (Gluon, sm_90): the choice of the tile, the kernel and its launch.

    y[r] = x[row(r)] · w[e]                 x (R|S, K), w (E, K, N) of either major, offsets (E+1,)  → y (R, N)
    y[r] = x[r] · w[e] + x2[r] · v[e]      with K2 > 0: the steps of the second product follow those of the first
    y[r] = x[r] · w[e] + bias[e]           added before the one rounding

Rows [offsets[e], offsets[e+1]) are expert e's; row(r) = r, or gather[r] if x's S rows are gathered. The grid is one
program per multiprocessor. N, K and whether rows are gathered decide the tile. hopper_gluon.py describes the roles of a
program's warps and the loop over the tiles.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from megablocks.ops import hopper_gluon as hg
from megablocks.ops.hopper import MAX_EXPERTS, ROW_BOUND, Tile, aligned, descriptor, multiprocessors, with_tail
from megablocks.ops.launch import next_power_of_2, quick


@dataclass(frozen=True)
class Plan(Tile):
    """A tile with the constants of a problem. The kernel is compiled with it."""

    lanes: int = 32
    N: int = 0
    K: int = 0
    gather: bool = False
    b_k_major: bool = False
    K2: int = 0
    a_k_major: ClassVar[bool] = True
    flat: ClassVar[bool] = False  # w is (E·N, K), as up_hopper.py has it, whose gated tiles hold columns of two

    @property
    def n_tiles(self) -> int:
        return -(-self.N // self.BN)

    @property
    def k_steps(self) -> int:
        return -(-self.K // self.BK)

    @property
    def steps(self) -> int:
        return self.k_steps + -(-self.K2 // self.BK)

    @property
    def producer_warps(self) -> int:
        return 4 if self.gather else 1

    @property
    def producer_regs(self) -> int:
        """Registers per thread; two consumers and the producer share 512. Gathering holds 16 addresses per row part."""
        if not self.gather:
            return 40
        return 88 if self.BM > 128 else 56

    @property
    def consumer_regs(self) -> int:
        return (512 - self.producer_regs) // 16 * 8


# Each consumer has its own tile: one's products hide the other's epilogue, but this tile reads the most per product.
_TALL = Tile(128, 128, 6, pingpong=True, out_parts=4)
# With four steps per tile the stores limit the speed: two are in flight.
_TALL_SHORT = replace(_TALL, out_buffers=2)
# Half the rows by twice the columns.
_WIDE = Tile(64, 256, 5, pingpong=True, out_parts=4)
# Both consumers on one tile read the least. That pays if many steps run one after the other at the power limit.
_SHARED = Tile(64, 256, 4, group_m=8)


def choose_m(N: int, K: int, gather: bool) -> Tile:
    """The tile of ragged_m; benchmarks/notes/grouped.md has the measurements behind it.

    It does not depend on the number of rows, because a new token count would compile another kernel. A lower tile would
    not help experts with few rows: reading w takes longer there than its products with 128 rows, full or not.
    """
    if K <= 256 and not gather:
        return _TALL_SHORT
    if N <= 128:
        return _TALL
    if gather and K > 512:  # a gathered row costs more than one by TMA: read it for 256 columns at once
        return _WIDE if K <= 2048 and N <= 512 else _SHARED
    return _TALL if K <= 2048 else _SHARED


@functools.lru_cache(1024)  # a look-up takes less time than a new plan
def _plan(tile: Tile | None, experts: int, N: int, K: int, gather: bool, b_k_major: bool, K2: int) -> Plan:
    """K2: the second product's inner size, 0 without one."""
    tile, lanes = tile or choose_m(N, K + K2, gather), lanes_of(experts)
    return Plan(**vars(tile), lanes=lanes, N=N, K=K, gather=gather, b_k_major=b_k_major, K2=K2)


def lanes_of(experts: int) -> int:
    return max(32, next_power_of_2(experts))


def fits(offsets: Tensor, *operands: Tensor) -> bool:
    """Whether the ragged kernels support the sizes of these operands of one dtype, and of their offsets."""
    first = operands[0]
    for t in operands:
        if t.dtype != first.dtype or t.numel() == 0:
            return False
    return offsets.numel() <= MAX_EXPERTS + 1 and offsets.is_contiguous() and first.shape[0] < ROW_BOUND


def supports_m(x: Tensor, w: Tensor, offsets: Tensor, rows: int) -> bool:
    """Whether ragged_m supports operands for which `runs_hopper`: N and K multiples of 8, 16-byte rows, E <= 512.

    rows: the result's; with gathered rows they can be more than x's. The TMA unit clips rows by 30-bit coordinates.
    """
    return (
        fits(offsets, x, w)
        and rows < ROW_BOUND
        and w.shape[1] % 8 == 0
        and w.shape[2] % 8 == 0
        and aligned(x)
        and (aligned(w, 1) or aligned(w, 2))
    )


def supports_sum(x: Tensor, w: Tensor, x2: Tensor, v: Tensor, offsets: Tensor) -> bool:
    """Whether ragged_m supports both: each product alone, equally many rows and columns, w and v of one major."""
    return (
        supports_m(x, w, offsets, x.shape[0])
        and supports_m(x2, v, offsets, x2.shape[0])
        and x.shape[0] == x2.shape[0]
        and w.shape[2] == v.shape[2]
        and aligned(w, 2) == aligned(v, 2)
    )


@gluon.jit
def _m_consumer(common, WG: gl.constexpr, c: gl.constexpr):
    x_bufs, w_bufs, y_bufs, full, empty, turn, y_desc, y_tail, bias_ptr, offsets_ptr, experts = common
    PARTS: gl.constexpr = c.out_parts
    ends, tiles, start, step, it = hg.consumer_walk(offsets_ptr, experts, WG, c)
    phase = gl.to_tensor(0)
    e, m0, end, n0 = hg.find_tile(gl.minimum(start, tiles - 1), ends, offsets_ptr, c)
    for tile in range(start, tiles, step):
        expert, row, last, col = e, m0, end, n0
        e, m0, end, n0 = hg.find_tile(gl.minimum(tile + step, tiles - 1), ends, offsets_ptr, c)
        if not c.pingpong:
            row += WG * c.rows
        acc, it = hg.multiply(it, c.steps, x_bufs, w_bufs, full, empty, turn, phase, WG, c)
        if c.pingpong:
            phase ^= 1
            it += c.steps
        parts = hg.parts_of(acc, c)
        for i in gl.static_range(PARTS):
            part = parts[i]
            if bias_ptr is not None:
                j = col + i * c.out_cols + gl.arange(0, c.out_cols, gl.SliceLayout(0, part.type.layout))
                part += gl.load(bias_ptr + expert * c.N + j, mask=j < c.N, other=0).to(gl.float32)[None, :]
            hg.store_rows(part, i, y_bufs, y_desc, y_tail, row, last, col + i * c.out_cols, WG, c)
    tma.store_wait(0)


@gluon.jit
def _load_w(desc, expert, k0, col, bar, buf, c: gl.constexpr):
    if c.b_k_major:
        hg.tma_load(desc, [expert, col, k0], bar, buf.reshape([1, c.BN, c.BK]))
    else:
        hg.tma_load(desc, [expert, k0, col], bar, buf.reshape([1, c.BK, c.BN]))


@gluon.jit
def _load_flat(w_desc, v_desc, row, k0, bar, buf, c: gl.constexpr):
    """From `row` on of W (E·N, K) all BN rows of a stage, or where gated one half, and of V the other."""
    half: gl.constexpr = c.BN // 2
    if c.gated:
        hg.tma_load(w_desc, [row, k0], bar, buf.slice(0, half))
        hg.tma_load(v_desc, [row, k0], bar, buf.slice(half, half))
    else:
        hg.tma_load(w_desc, [row, k0], bar, buf)


@gluon.jit
def _load_x(desc, row, k0, bar, bufs, s, c: gl.constexpr):
    ROW_PARTS: gl.constexpr = c.row_parts
    for p in gl.static_range(ROW_PARTS):
        hg.tma_load(desc, [row + p * c.rows, k0], bar, bufs.index(s * c.row_parts + p))


@gluon.jit
def m_producer(given, c: gl.constexpr):
    x_bufs, w_bufs, full, empty, x_desc, w_desc, x2_desc, v_desc, x_ptr, x_row, gather_ptr, offsets_ptr, experts = given
    ends, tiles, start, step, it = hg.walk(offsets_ptr, experts, c, c.producer_warps)
    e, m0, end, n0 = hg.find_tile(gl.minimum(start, tiles - 1), ends, offsets_ptr, c)
    if c.gather:
        lanes = hg.gather_lanes(c)
        ids = hg.row_ids(gather_ptr, m0, end, lanes, c)
    for tile in range(start, tiles, step):
        expert, row, col = e, m0, n0
        if c.flat:
            # If a tile is wider than the rest of this expert's weights, rows of the next expert's weights are
            # multiplied too, and the store clips their columns.
            col = e * c.N + (n0 // 2 if c.gated else n0)
        if c.gather:
            sources = hg.row_sources(x_ptr, x_row, ids, m0, end, lanes, c)
        e, m0, end, n0 = hg.find_tile(gl.minimum(tile + step, tiles - 1), ends, offsets_ptr, c)
        if c.gather:
            ids = hg.row_ids(gather_ptr, m0, end, lanes, c)
        for k in range(c.steps):
            s = it % c.stages
            bar = full.index(s)
            k0 = k * c.BK
            mbarrier.wait(empty.index(s), ((it // c.stages) & 1) ^ 1)
            mbarrier.expect(bar, c.right_bytes if c.gather else c.left_bytes + c.right_bytes)
            w_buf = w_bufs.index(s)
            if c.K2 > 0:
                if k < c.k_steps:
                    _load_w(w_desc, expert, k0, col, bar, w_buf, c)
                    _load_x(x_desc, row, k0, bar, x_bufs, s, c)
                else:
                    _load_w(v_desc, expert, k0 - c.k_steps * c.BK, col, bar, w_buf, c)
                    _load_x(x2_desc, row, k0 - c.k_steps * c.BK, bar, x_bufs, s, c)
            else:
                if c.flat:
                    _load_flat(w_desc, v_desc, col, k0, bar, w_buf, c)
                else:
                    _load_w(w_desc, expert, k0, col, bar, w_buf, c)
                if c.gather:
                    hg.gather_rows(x_bufs, s, sources, k0, lanes, bar, c)
                else:
                    _load_x(x_desc, row, k0, bar, x_bufs, s, c)
            it += 1


@quick
@gluon.jit(do_not_specialize=["experts"])
def ragged_m_kernel(
    x_desc, w_desc, x2_desc, v_desc, y_desc, y_tail, bias_ptr, x_ptr, x_row, gather_ptr, offsets_ptr, experts,
    c: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """x_desc (R, K) in (rows, BK) boxes; w_desc (E, N, K) or (E, K, N); y_desc (R, N) and its ragged twin y_tail.

    x2_desc, v_desc: the operands of the second product, or None.
    """
    x_bufs, w_bufs = hg.operand_buffers(w_desc.dtype, c)
    y_bufs = gl.allocate_shared_memory(y_desc.dtype, [2 * c.out_buffers, c.rows, c.out_cols], y_desc.layout)
    full, empty, turn = hg.barriers(c)
    common = (x_bufs, w_bufs, y_bufs, full, empty, turn, y_desc, y_tail, bias_ptr, offsets_ptr, experts)
    given = (
        x_bufs, w_bufs, full, empty, x_desc, w_desc, x2_desc, v_desc, x_ptr, x_row, gather_ptr, offsets_ptr, experts,
    )  # fmt: skip
    gl.warp_specialize(
        [(_m_consumer, (common, 0, c)), (_m_consumer, (common, 1, c)), (m_producer, (given, c))],
        [4, c.producer_warps],
        [c.consumer_regs, c.producer_regs],
    )


def ragged_m(
    x: Tensor, w: Tensor, offsets: Tensor, gather: Tensor | None = None, *, bias: Tensor | None = None,
    x2: Tensor | None = None, v: Tensor | None = None, tile: Tile | None = None,
) -> Tensor:  # fmt: skip
    """y (R, N) as from grouped_mm_triton's ragged_m, for operands that `supports_m` allows: bfloat16 or float16.

    bias: (E, N) or None. x2 (R, K2), v (E, K2, N): y is x · w + x2 · v, rounded once, see `supports_sum`.
    """
    experts, K, N = w.shape
    rows = x.shape[0] if gather is None else gather.shape[0]
    y = torch.empty(rows, N, dtype=x.dtype, device=x.device)
    if rows == 0:
        return y
    k_major, gathered = not aligned(w, 2), gather is not None
    c = _plan(tile, experts, N, K, gathered, k_major, 0 if x2 is None else x2.shape[1])
    x_box, y_box = [c.rows, c.BK], [c.rows, c.out_cols]

    def weight(t: Tensor) -> Any:
        return descriptor(t.transpose(1, 2), [1, c.BN, c.BK]) if k_major else descriptor(t, [1, c.BK, c.BN])

    ragged_m_kernel[(multiprocessors(x.device.index),)](
        None if gathered else descriptor(x, x_box), weight(w), None if x2 is None else descriptor(x2, x_box),
        None if v is None else weight(v), *with_tail(y, y_box), None if bias is None else bias.contiguous(),
        x if gathered else None, x.stride(0) // 8 if gathered else 0, gather, offsets, experts, c=c, num_warps=4,
    )  # fmt: skip
    return y
