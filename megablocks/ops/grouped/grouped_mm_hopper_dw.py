"""Ragged-K grouped GEMM in Gluon: o[e] = Σ_r a[r]ᵀ · b[row(r)] over the rows r of expert e; grouped_mm_hopper.py
launches it.

The roles are those of grouped_mm_hopper_kernel.py. An expert owns the same number of tiles whatever its rows; one
without rows takes no step and stores the zeros it starts from. Both consumers share a tile: taking turns would read
more per product, and with steps as many as an expert has rows / BK there is little epilogue to hide.

Rows from an expert's end on are another expert's, or were never written: the TMA unit reads zeros there through the
ragged descriptors of the launcher, cp.async through its mask, so that neither operand's NaN meets the other's zero.

With `add` the sums are added to o in float32 instead. A tile has one writer, so this takes no atomics; threads load and
store what they hold of it, four neighbours 32 bytes, and nothing is staged.
"""

# mypy: allow-untyped-defs
# (device code takes what Triton passes at compile time)

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

from megablocks.ops.grouped.grouped_mm_hopper_kernel import ROW_BOUND
from megablocks.ops.hopper_gluon import barriers, parts_of, stage_out
from megablocks.ops.launch import quick


@gluon.jit
def _find_block(tile, offsets_ptr, c: gl.constexpr):
    """Expert, first row, end row, first output row and column of a ragged-K tile."""
    per_expert: gl.constexpr = c.m_tiles * c.n_tiles
    e = tile // per_expert
    r = tile - e * per_expert
    if c.m_tiles <= c.n_tiles:
        n = r // c.m_tiles
        m = r - n * c.m_tiles
    else:
        m = r // c.n_tiles
        n = r - m * c.n_tiles
    return e, gl.load(offsets_ptr + e), gl.load(offsets_ptr + e + 1), m * c.BM, n * c.BN


@gluon.jit
def _store_block(part, i: gl.constexpr, bufs, desc, o_ptr, e, row, col, steps, WG: gl.constexpr, c: gl.constexpr):
    if c.add:
        layout: gl.constexpr = part.type.layout
        rows = row + gl.arange(0, c.rows, gl.SliceLayout(1, layout))
        cols = col + i * c.out_cols + gl.arange(0, c.out_cols, gl.SliceLayout(0, layout))
        at = o_ptr + (e.to(gl.int64) * c.M + rows)[:, None] * c.N + cols[None, :]
        inside = ((rows < c.M) & (steps > 0))[:, None] & (cols < c.N)[None, :]
        gl.store(at, gl.load(at, mask=inside) + part, mask=inside)
    else:
        buf = stage_out(part, i, bufs, WG, c)
        tma.async_copy_shared_to_global(desc, [e, row, col + i * c.out_cols], buf.reshape([1, c.rows, c.out_cols]))


@gluon.jit
def _k_consumer(
    a_bufs, b_bufs, o_bufs, full, empty, o_desc, o_ptr, offsets_ptr, experts, WG: gl.constexpr, c: gl.constexpr
):
    shape: gl.constexpr = [c.rows, c.BN]
    HALF: gl.constexpr = c.BK // 2
    PARTS: gl.constexpr = c.out_parts
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, c.BN, 16])
    tiles = experts * (c.m_tiles * c.n_tiles)
    start = gl.program_id(0)
    step = gl.num_programs(0)
    it = gl.to_tensor(0)
    e, first, end, m0, n0 = _find_block(gl.minimum(start, tiles - 1), offsets_ptr, c)
    for tile in range(start, tiles, step):
        expert = e
        rows = end - first
        steps = (rows + (c.BK - 1)) // c.BK
        # Of a last step that holds at most HALF rows only these are multiplied; the others read as zero.
        short = ((rows % c.BK > 0) & (rows % c.BK <= HALF)).to(gl.int32)
        row = m0 + WG * c.rows
        col = n0
        e, first, end, m0, n0 = _find_block(gl.minimum(tile + step, tiles - 1), offsets_ptr, c)
        acc = gl.zeros(shape, gl.float32, layout)
        for k in range(steps - short):
            s = it % c.stages
            mbarrier.wait(full.index(s), (it // c.stages) & 1)
            if c.gather:
                fence_async_shared()
            a = a_bufs.index(s * 2 + WG)
            acc = warpgroup_mma(a.permute((1, 0)), b_bufs.index(s), acc, use_acc=k > 0, is_async=True)
            acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
            mbarrier.arrive(empty.index((it + c.stages - 1) % c.stages), count=1, pred=k > 0)
            it += 1
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
        # The predicate is also what keeps `first` and `end` alive: Triton 3.6 and 3.7 take a value that is carried
        # around a loop and only bounds an inner one for dead. Then the first tile's steps stand for every tile, the
        # producer's differ, and the kernel hangs.
        mbarrier.arrive(empty.index((it + c.stages - 1) % c.stages), count=1, pred=steps > 0)
        parts = parts_of(acc, c)
        for i in gl.static_range(PARTS):
            _store_block(parts[i], i, o_bufs, o_desc, o_ptr, expert, row, col, steps, WG, c)
    tma.store_wait(0)


@gluon.jit
def _load_rows(desc, tail_desc, row, end, col, bar, buf, WIDTH: gl.constexpr, c: gl.constexpr):
    """BK rows from `row`, WIDTH columns from `col`; rows at and past `end` are another expert's and read as zero."""
    if row + c.BK <= end:
        tma.async_copy_global_to_shared(desc, [row, col], bar, buf)
    else:
        tma.async_copy_global_to_shared(
            tail_desc, [ROW_BOUND, end, ROW_BOUND - end + row, col], bar, buf.reshape([1, 1, c.BK, WIDTH])
        )


@gluon.jit
def _k_producer(
    a_bufs, b_bufs, full, empty, a_desc, a_tail, b_desc, b_tail, b_ptr, b_row, gather_ptr, offsets_ptr,
    experts, c: gl.constexpr,
):  # fmt: skip
    tiles = experts * (c.m_tiles * c.n_tiles)
    start = gl.program_id(0)
    step = gl.num_programs(0)
    it = gl.to_tensor(0)
    e, first, end, m0, n0 = _find_block(gl.minimum(start, tiles - 1), offsets_ptr, c)
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
        e, first, end, m0, n0 = _find_block(gl.minimum(tile + step, tiles - 1), offsets_ptr, c)
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
                _load_rows(a_desc, a_tail, k, k1, row + p * c.rows, bar, buf, c.rows, c)
            if c.gather:
                async_copy.async_copy_global_to_shared(b_bufs.index(s), src, mask=inside)
                async_copy.mbarrier_arrive(bar, increment_count=False)
            else:
                _load_rows(b_desc, b_tail, k, k1, col, bar, b_bufs.index(s), c.BN, c)
            it += 1
        if c.gather:
            ids = next_ids


@quick
@gluon.jit(do_not_specialize=["experts"])
def ragged_k_kernel(
    a_desc, a_tail, b_desc, b_tail, o_desc, o_ptr, b_ptr, b_row, gather_ptr, offsets_ptr, experts, c: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """a (R, M) and b (R, N) in (BK, rows) and (BK, BN) boxes, each with its ragged twin; o_desc or o_ptr (E, M, N)."""
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
            (_k_consumer, (a_bufs, b_bufs, o_bufs, full, empty, o_desc, o_ptr, offsets_ptr, experts, 0, c)),
            (_k_consumer, (a_bufs, b_bufs, o_bufs, full, empty, o_desc, o_ptr, offsets_ptr, experts, 1, c)),
            (
                _k_producer,
                (
                    a_bufs, b_bufs, full, empty, a_desc, a_tail, b_desc, b_tail, b_ptr, b_row, gather_ptr,
                    offsets_ptr, experts, c,
                ),
            ),
        ],
        [4, c.producer_warps],
        [c.consumer_regs, c.producer_regs],
    )  # fmt: skip
