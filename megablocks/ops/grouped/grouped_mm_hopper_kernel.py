"""Ragged-M grouped GEMM in Gluon: y[r] = x[row(r)] · w[e] for the rows r of expert e. grouped_mm_hopper.py launches it.

With `summed` y[r] = x[r] · w[e] + x2[r] · w2[e]: the steps of the second product stand behind those of the first.
With `outer` y[r] gets slope[r] · right[e] besides, added to a tile's sums before they are rounded.

One persistent program a multiprocessor, warp-specialised: a producer fills a ring of shared-memory stages by TMA (rows
that are gathered: by cp.async, joined to the same barrier), two consumers multiply by wgmma and store by TMA.
With `pingpong` the two consumers own alternate tiles and one's epilogue hides under the other's products; otherwise
both share a tile.

Which rows a tile covers is found on the device: every role keeps the running number of tiles per expert in registers
(E / 32 a lane, a prefix sum over `offsets` at start) and finds a tile's expert by counting the experts that end before
it: one warp-wide sum, one maximum and two cached loads, taken one tile ahead. Where an expert's rows end inside a tile,
a second descriptor of the same memory lets the TMA unit clip the store there (`ragged_rows` of the launcher): neither
registers nor masks are spent on tails.
"""

# mypy: allow-untyped-defs
# (device code takes what Triton passes at compile time)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from megablocks.ops.hopper_gluon import barriers, multiply, parts_of, stage_out
from megablocks.ops.launch import quick

# Row coordinates of a descriptor made by ragged_rows count up to this bound; beyond it the hardware clips.
ROW_BOUND = gl.constexpr(2**30)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def tile_ends(offsets_ptr, experts, c: gl.constexpr, WARPS: gl.constexpr):
    """(c.lanes,) int32 in every warp: the number of ragged-M tiles of experts 0..e."""
    layout: gl.constexpr = gl.BlockedLayout([c.lanes // 32], [32], [WARPS], [0])
    e = gl.arange(0, c.lanes, layout)
    first = gl.load(offsets_ptr + e, mask=e < experts, other=0)
    end = gl.load(offsets_ptr + e + 1, mask=e < experts, other=0)
    return gl.associative_scan((end - first + (c.BM - 1)) // c.BM * c.n_tiles, 0, _add)


@gluon.jit
def find_tile(tile, ends, offsets_ptr, c: gl.constexpr):
    """Expert, first row, end of the expert's rows, first column of a ragged-M tile."""
    done = ends <= tile
    e = gl.sum(done.to(gl.int32), 0)
    r = tile - gl.max(gl.where(done, ends, 0), 0)
    first = gl.load(offsets_ptr + e)
    end = gl.load(offsets_ptr + e + 1)
    if c.group_m == 1:
        m = r // c.n_tiles
        n = r - m * c.n_tiles
    else:  # c.group_m row tiles share each column tile of W while it is in L2
        per_group: gl.constexpr = c.group_m * c.n_tiles
        g = r // per_group
        height = gl.minimum((end - first + (c.BM - 1)) // c.BM - g * c.group_m, c.group_m)
        r -= g * per_group
        n = r // height
        m = g * c.group_m + r - n * height
    # without any tile m is negative: what is loaded ahead for it must not begin before the first row
    return e, gl.maximum(first + m * c.BM, first), end, n * c.BN


@gluon.jit
def store_rows(part, i: gl.constexpr, bufs, desc, tail_desc, row, end, col, WG: gl.constexpr, c: gl.constexpr):
    """Write the i-th part that a consumer stores of a tile, whose first column is col, to rows [row, end)."""
    buf = stage_out(part, i, bufs, WG, c)
    if row + c.rows <= end:
        tma.async_copy_shared_to_global(desc, [row, col], buf)
    else:  # rows [row, end) belong to this expert, the next ones to another
        tma.async_copy_shared_to_global(
            tail_desc, [ROW_BOUND, end, ROW_BOUND - end + row, col], buf.reshape([1, 1, c.rows, c.out_cols])
        )


@gluon.jit
def walk(offsets_ptr, experts, c: gl.constexpr, WARPS: gl.constexpr):
    """tile_ends and their last, the program's first tile and the stride to its next, the first stage."""
    ends = tile_ends(offsets_ptr, experts, c, WARPS)
    return ends, gl.max(ends, 0), gl.program_id(0), gl.num_programs(0), gl.to_tensor(0)


@gluon.jit
def consumer_walk(offsets_ptr, experts, WG: gl.constexpr, c: gl.constexpr):
    """As walk, over the tiles that a consumer owns."""
    ends, tiles, start, step, it = walk(offsets_ptr, experts, c, 4)
    if c.pingpong:
        start += WG * step
        step *= 2
        it += WG * c.steps
    return ends, tiles, start, step, it


@gluon.jit
def _outer_factors(outer, e, row, end, col, c: gl.constexpr):
    """slope[r] of the rows from `row` on and right[e] of the columns from `col` on, as sums lie in registers."""
    slope_ptr, right_ptr = outer
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, c.BN, 16])
    r = row + gl.arange(0, c.rows, gl.SliceLayout(1, layout))
    j = col + gl.arange(0, c.BN, gl.SliceLayout(0, layout))
    slope = gl.load(slope_ptr + r, mask=r < end, other=0)
    return slope, gl.load(right_ptr + e.to(gl.int64) * c.N + j, mask=j < c.N, other=0)


@gluon.jit
def _m_consumer(
    x_bufs, w_bufs, y_bufs, full, empty, turn, y_desc, y_tail, outer, offsets_ptr, experts, WG: gl.constexpr,
    c: gl.constexpr,
):  # fmt: skip
    PARTS: gl.constexpr = c.out_parts
    ends, tiles, start, step, it = consumer_walk(offsets_ptr, experts, WG, c)
    phase = gl.to_tensor(0)
    e, m0, end, n0 = find_tile(gl.minimum(start, tiles - 1), ends, offsets_ptr, c)
    for tile in range(start, tiles, step):
        expert = e
        row = m0
        last = end
        col = n0
        e, m0, end, n0 = find_tile(gl.minimum(tile + step, tiles - 1), ends, offsets_ptr, c)
        if not c.pingpong:
            row += WG * c.rows
        if c.outer:  # loaded here, so that it comes while the products run
            slope, right = _outer_factors(outer, expert, row, last, col, c)
        acc, it = multiply(it, c.steps, x_bufs, w_bufs, full, empty, turn, phase, WG, c)
        if c.pingpong:
            phase ^= 1
            it += c.steps
        if c.outer:
            acc += slope[:, None] * right.to(gl.float32)[None, :]
        parts = parts_of(acc, c)
        for i in gl.static_range(PARTS):
            store_rows(parts[i], i, y_bufs, y_desc, y_tail, row, last, col + i * c.out_cols, WG, c)
    tma.store_wait(0)


@gluon.jit
def _load_w(desc, expert, k0, col, bar, buf, c: gl.constexpr):
    if c.b_k_major:
        tma.async_copy_global_to_shared(desc, [expert, col, k0], bar, buf.reshape([1, c.BN, c.BK]))
    else:
        tma.async_copy_global_to_shared(desc, [expert, k0, col], bar, buf.reshape([1, c.BK, c.BN]))


@gluon.jit
def _load_x(desc, row, k0, bar, bufs, s, c: gl.constexpr):
    ROW_PARTS: gl.constexpr = c.row_parts
    for p in gl.static_range(ROW_PARTS):
        tma.async_copy_global_to_shared(desc, [row + p * c.rows, k0], bar, bufs.index(s * c.row_parts + p))


@gluon.jit
def gather_lanes(c: gl.constexpr):
    """Rows of a row part and columns of a stage, as the threads copy them."""
    # A row's BK columns are one 128-byte segment: eight lanes of 16 bytes.
    lanes: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [c.producer_warps, 1], [1, 0])
    return gl.arange(0, c.rows, gl.SliceLayout(1, lanes)), gl.arange(0, c.BK, gl.SliceLayout(0, lanes))


@gluon.jit
def _ids(gather_ptr, row, end, lanes):
    i, _ = lanes
    return gl.load(gather_ptr + (row + i), mask=row + i < end, other=0)


@gluon.jit
def row_ids(gather_ptr, row, end, lanes, c: gl.constexpr):
    """Which rows of x a tile gathers, for each of its row parts; row, end: its first, and the end of the expert's."""
    ids = _ids(gather_ptr, row, end, lanes)
    if c.row_parts == 1:
        return (ids,)
    else:
        return ids, _ids(gather_ptr, row + c.rows, end, lanes)


@gluon.jit
def _source(x_ptr, x_row, ids, row, end, lanes):
    i, cols = lanes
    live = (row + i < end)[:, None]
    return x_ptr + (ids.to(gl.int64) * x_row * 8)[:, None] + cols[None, :], live


@gluon.jit
def row_sources(x_ptr, x_row, ids, row, end, lanes, c: gl.constexpr):
    """For each row part where its rows are, at a stage's columns, and which of them are the expert's."""
    first = _source(x_ptr, x_row, ids[0], row, end, lanes)
    if c.row_parts == 1:
        return (first,)
    else:
        return first, _source(x_ptr, x_row, ids[1], row + c.rows, end, lanes)


@gluon.jit
def gather_rows(x_bufs, s, sources, k0, lanes, bar, c: gl.constexpr):
    """Copy columns from k0 on of a tile's rows into stage s.

    Nothing is copied for rows past the expert's last. Row 0 would do in their place, as the store clips them, but then
    all programs queue for that row.
    """
    _, cols = lanes
    ROW_PARTS: gl.constexpr = c.row_parts
    for p in gl.static_range(ROW_PARTS):
        src, mask = sources[p]
        if c.K % c.BK != 0:
            mask = mask & (cols + k0 < c.K)[None, :]
        async_copy.async_copy_global_to_shared(x_bufs.index(s * c.row_parts + p), src + k0, mask=mask)
    async_copy.mbarrier_arrive(bar, increment_count=False)


@gluon.jit
def m_producer(
    x_bufs, w_bufs, full, empty, x_desc, w_desc, x2_desc, w2_desc, x_ptr, x_row, gather_ptr, offsets_ptr, experts,
    c: gl.constexpr,
):  # fmt: skip
    ends, tiles, start, step, it = walk(offsets_ptr, experts, c, c.producer_warps)
    e, m0, end, n0 = find_tile(gl.minimum(start, tiles - 1), ends, offsets_ptr, c)
    if c.gather:
        lanes = gather_lanes(c)
        ids = row_ids(gather_ptr, m0, end, lanes, c)
    for tile in range(start, tiles, step):
        expert = e
        row = m0
        col = n0
        if c.gather:
            sources = row_sources(x_ptr, x_row, ids, m0, end, lanes, c)
        e, m0, end, n0 = find_tile(gl.minimum(tile + step, tiles - 1), ends, offsets_ptr, c)
        if c.gather:
            ids = row_ids(gather_ptr, m0, end, lanes, c)
        for k in range(c.steps):
            s = it % c.stages
            bar = full.index(s)
            k0 = k * c.BK
            mbarrier.wait(empty.index(s), ((it // c.stages) & 1) ^ 1)
            mbarrier.expect(bar, c.right_bytes if c.gather else c.left_bytes + c.right_bytes)
            w_buf = w_bufs.index(s)
            if c.summed:
                if k < c.k_steps:
                    _load_w(w_desc, expert, k0, col, bar, w_buf, c)
                    _load_x(x_desc, row, k0, bar, x_bufs, s, c)
                else:
                    _load_w(w2_desc, expert, k0 - c.k_steps * c.BK, col, bar, w_buf, c)
                    _load_x(x2_desc, row, k0 - c.k_steps * c.BK, bar, x_bufs, s, c)
            else:
                _load_w(w_desc, expert, k0, col, bar, w_buf, c)
                if c.gather:
                    gather_rows(x_bufs, s, sources, k0, lanes, bar, c)
                else:
                    _load_x(x_desc, row, k0, bar, x_bufs, s, c)
            it += 1


@gluon.jit
def operand_buffers(dtype: gl.constexpr, c: gl.constexpr):
    """The stages of gathered or consecutive rows, and of weights."""
    w_shape: gl.constexpr = [c.BN, c.BK] if c.b_k_major else [c.BK, c.BN]
    x_bufs = gl.allocate_shared_memory(
        dtype, [c.stages * c.row_parts, c.rows, c.BK], gl.NVMMASharedLayout.get_default_for([c.rows, c.BK], dtype)
    )
    w_bufs = gl.allocate_shared_memory(
        dtype, [c.stages] + w_shape, gl.NVMMASharedLayout.get_default_for(w_shape, dtype)
    )
    return x_bufs, w_bufs


@quick
@gluon.jit(do_not_specialize=["experts"])
def ragged_m_kernel(
    x_desc, w_desc, x2_desc, w2_desc, y_desc, y_tail, x_ptr, x_row, gather_ptr, slope_ptr, right_ptr, offsets_ptr,
    experts, c: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """x_desc (R, K) in (rows, BK) boxes; w_desc (E, N, K) or (E, K, N); y_desc (R, N) and its ragged twin y_tail.

    x2_desc, w2_desc: as those without 2, with `summed`. slope (R,) float32 and right (E, N) with `outer`.
    """
    x_bufs, w_bufs = operand_buffers(w_desc.dtype, c)
    y_bufs = gl.allocate_shared_memory(y_desc.dtype, [2 * c.out_buffers, c.rows, c.out_cols], y_desc.layout)
    full, empty, turn = barriers(c)
    outer = (slope_ptr, right_ptr)
    gl.warp_specialize(
        [
            (
                _m_consumer,
                (x_bufs, w_bufs, y_bufs, full, empty, turn, y_desc, y_tail, outer, offsets_ptr, experts, 0, c),
            ),
            (
                _m_consumer,
                (x_bufs, w_bufs, y_bufs, full, empty, turn, y_desc, y_tail, outer, offsets_ptr, experts, 1, c),
            ),
            (
                m_producer,
                (
                    x_bufs, w_bufs, full, empty, x_desc, w_desc, x2_desc, w2_desc, x_ptr, x_row, gather_ptr,
                    offsets_ptr, experts, c,
                ),
            ),
        ],
        [4, c.producer_warps],
        [c.consumer_regs, c.producer_regs],
    )  # fmt: skip
