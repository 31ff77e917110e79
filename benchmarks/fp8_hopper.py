"""The product of quantized rows and weights in Gluon for Hopper (sm_90), `fp8_kernels.rows_product_ref`.

Both consumers share a tile of 128 rows and 256 columns; 128 of K are a step.

The skeleton is that of megablocks/ops/grouped/grouped_mm_hopper.py. What differs: a step's products start at zero, and
the consumer adds them, times the scales, to its float32 sums. While one consumer does that, the other multiplies.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from fp8_kernels import GROUP, Quantized
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from megablocks.ops.grouped.grouped_mm_hopper import Plan, lanes_of
from megablocks.ops.hopper import multiprocessors, with_tail
from megablocks.ops.hopper_gluon import (
    barriers,
    find_tile,
    gather_rows,
    operand_buffers,
    row_ids,
    row_sources,
    store_rows,
    tma_load,
    walk,
)


@dataclass(frozen=True)
class _Plan(Plan):
    """Operands have one byte a value."""

    @property
    def left_bytes(self) -> int:
        return self.BM * self.BK

    @property
    def right_bytes(self) -> int:
        return self.BN * self.BK


@gluon.jit
def _scales(i, tile, groups, gather_ptr, WG: gl.constexpr, c: gl.constexpr):
    """Where a tile's first scales are: of its rows (and which rows are the expert's), and of its columns."""
    e, row, end, col = tile
    source = row + WG * c.rows + i
    live = source < end
    if c.gather:
        source = gl.load(gather_ptr + source, mask=live, other=0)
    return source * groups, live, (e * (c.N // 128) + col // 128) * groups


@gluon.jit
def _store(acc, slot: gl.constexpr, outs, row, end, col, WG: gl.constexpr, c: gl.constexpr):
    """128 columns from col on, in two parts."""
    y_bufs, y_desc, y_tail = outs
    p0, p1 = gl.split(acc.reshape([c.rows, 2, 64]).permute((0, 2, 1)))
    store_rows(p0, slot, y_bufs, y_desc, y_tail, row, end, col, WG, c)
    store_rows(p1, slot + 1, y_bufs, y_desc, y_tail, row, end, col + 64, WG, c)


@gluon.jit
def _consumer(ring, outs, scales, where, WG: gl.constexpr, c: gl.constexpr):
    a_bufs, b_bufs, full, empty = ring
    as_ptr, bs_ptr, groups = scales
    gather_ptr, offsets_ptr, experts = where
    shape: gl.constexpr = [c.rows, 128]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    ends, tiles, start, step, it = walk(offsets_ptr, experts, c, 4)
    i = gl.arange(0, c.rows, gl.SliceLayout(1, layout))
    next_tile = find_tile(gl.minimum(start, tiles - 1), ends, offsets_ptr, c)
    next_left, next_live, next_right = _scales(i, next_tile, groups, gather_ptr, WG, c)
    scale = gl.load(as_ptr + next_left, mask=next_live, other=0.0)
    column0 = gl.load(bs_ptr + next_right)
    column1 = gl.load(bs_ptr + next_right + groups)
    part = gl.zeros(shape, gl.float32, layout)
    for tile in range(start, tiles, step):
        e, row, end, col = next_tile
        left, live, right = next_left, next_live, next_right
        # One tile ahead, so that neither its place nor its first scales are waited for.
        next_tile = find_tile(gl.minimum(tile + step, tiles - 1), ends, offsets_ptr, c)
        next_left, next_live, next_right = _scales(i, next_tile, groups, gather_ptr, WG, c)
        acc0 = gl.zeros(shape, gl.float32, layout)
        acc1 = acc0
        for k in range(c.k_steps):
            s = it % c.stages
            mbarrier.wait(full.index(s), (it // c.stages) & 1)
            if c.gather:  # rows came by cp.async
                fence_async_shared()
            a = a_bufs.index(s * 2 + WG)
            b = b_bufs.index(s)
            part = warpgroup_mma(a, b.slice(0, 128).permute((1, 0)), part, use_acc=False, is_async=True)
            # Meanwhile the next step's scales arrive. A product of scales here would wait for loads before the wgmma.
            more = k + 1 < c.k_steps
            ahead = gl.load(
                as_ptr + gl.where(more, left + k + 1, next_left),
                mask=(live & more) | (next_live & (k + 1 >= c.k_steps)),
                other=0.0,
            )
            at = gl.where(more, right + k + 1, next_right)
            column0_ahead = gl.load(bs_ptr + at)
            column1_ahead = gl.load(bs_ptr + at + groups)
            part = warpgroup_mma_wait(num_outstanding=0, deps=(part,))
            acc0 += part * (scale * column0)[:, None]
            part = warpgroup_mma(a, b.slice(128, 128).permute((1, 0)), part, use_acc=False, is_async=True)
            part = warpgroup_mma_wait(num_outstanding=0, deps=(part,))
            mbarrier.arrive(empty.index(s), count=1)
            acc1 += part * (scale * column1)[:, None]
            scale = ahead
            column0 = column0_ahead
            column1 = column1_ahead
            it += 1
        row += WG * c.rows
        _store(acc0, 0, outs, row, end, col, WG, c)
        _store(acc1, 2, outs, row, end, col + 128, WG, c)
    tma.store_wait(0)


@gluon.jit
def _producer(ring, a_desc, b_desc, a_ptr, a_row, where, c: gl.constexpr):
    a_bufs, b_bufs, full, empty = ring
    gather_ptr, offsets_ptr, experts = where
    ends, tiles, start, step, it = walk(offsets_ptr, experts, c, c.producer_warps)
    if c.gather:  # a row's 128 values are one segment of 128 bytes: eight lanes of 16
        lanes_layout: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [c.producer_warps, 1], [1, 0])
        lanes = (
            gl.arange(0, c.rows, gl.SliceLayout(1, lanes_layout)),
            gl.arange(0, c.BK, gl.SliceLayout(0, lanes_layout)),
        )
    for tile in range(start, tiles, step):
        e, row, end, col = find_tile(tile, ends, offsets_ptr, c)
        if c.gather:
            sources = row_sources(a_ptr, a_row, row_ids(gather_ptr, row, end, lanes, c), row, end, lanes, c)
        for k in range(c.k_steps):
            s = it % c.stages
            bar = full.index(s)
            k0 = k * c.BK
            mbarrier.wait(empty.index(s), ((it // c.stages) & 1) ^ 1)
            mbarrier.expect(bar, c.right_bytes if c.gather else c.left_bytes + c.right_bytes)
            tma_load(b_desc, [e * c.N + col, k0], bar, b_bufs.index(s))
            if c.gather:
                gather_rows(a_bufs, s, sources, k0, lanes, bar, c)
            else:
                for p in gl.static_range(2):
                    tma_load(a_desc, [row + p * c.rows, k0], bar, a_bufs.index(s * 2 + p))
            it += 1


@gluon.jit(do_not_specialize=["experts"])
def product_kernel(
    a_desc, b_desc, y_desc, y_tail, a_ptr, a_row, as_ptr, bs_ptr, groups, gather_ptr, offsets_ptr, experts,
    c: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """a (…, K), b (…, K) in (rows, BK) and (BN, BK) boxes; y (…, N) and its ragged twin."""
    a_bufs, b_bufs = operand_buffers(b_desc.dtype, c)
    y_bufs = gl.allocate_shared_memory(y_desc.dtype, [2 * c.out_buffers, c.rows, c.out_cols], y_desc.layout)
    full, empty, _ = barriers(c)
    ring = (a_bufs, b_bufs, full, empty)
    outs = (y_bufs, y_desc, y_tail)
    scales = (as_ptr, bs_ptr, groups)
    where = (gather_ptr, offsets_ptr, experts)
    gl.warp_specialize(
        [
            (_consumer, (ring, outs, scales, where, 0, c)),
            (_consumer, (ring, outs, scales, where, 1, c)),
            (_producer, (ring, a_desc, b_desc, a_ptr, a_row, where, c)),
        ],
        [4, c.producer_warps],
        [c.consumer_regs, c.producer_regs],
    )


def _descriptor(t: Tensor, rows: int) -> Any:
    box = [rows, GROUP]
    return TensorDescriptor.from_tensor(t, box, gl.NVMMASharedLayout.get_default_for(box, gl.float8e4nv))


def rows_product(a: Quantized, b: Quantized, offsets: Tensor, gather: Tensor | None = None) -> Tensor:
    """As `rows_product_ref`, for N a multiple of 256."""
    rows = a.values.shape[0] if gather is None else gather.shape[0]
    y = torch.empty(rows, b.values.shape[1], dtype=torch.bfloat16, device=a.values.device)
    experts = offsets.shape[0] - 1
    c = _Plan(
        rows=64, BN=256, BK=GROUP, stages=4, out_parts=4, out_buffers=2, group_m=8, lanes=lanes_of(experts),
        gather=gather is not None, b_k_major=True, N=y.shape[1], K=a.values.shape[1],
    )  # fmt: skip
    assert c.N % c.BN == 0, "a tile has whole groups of columns"
    product_kernel[(multiprocessors(y.device.index),)](
        None if c.gather else _descriptor(a.values, c.rows),
        _descriptor(b.values.view(-1, c.K), c.BN),
        *with_tail(y, [c.rows, c.out_cols]),
        a.values if c.gather else None,
        a.values.stride(0) // 8,
        a.scales, b.scales, a.scales.shape[-1], gather, offsets, experts, c=c, num_warps=4,
    )  # fmt: skip
    return y
