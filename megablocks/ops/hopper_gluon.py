"""Device code that the Gluon kernels for Hopper (sm_90) share.

    the ring of stages and a tile's products            barriers, multiply, parts_of, stage_out
    tiles over each expert's ragged number of rows      walk, find_tile, store_rows, gather_rows and what they need
    activations                                         unary

A kernel is one persistent program per multiprocessor, warp-specialized: a producer fills the ring's stages by TMA (with
gathered rows by cp.async, which arrives at the same barrier), and two consumers multiply by wgmma and store by TMA.
With `pingpong` the consumers own alternate tiles and use the ring in turns, so that one consumer's products hide the
other's epilogue; otherwise they share a tile, upper and lower half.

The device computes which rows a tile covers. Every role keeps the running number of tiles of each expert in registers
(E / 32 per lane, a prefix sum over `offsets` at the start). The number of experts that end before a tile is the tile's
expert: one warp-wide sum, one maximum and two cached loads, done one tile ahead. If an expert's rows end inside a tile,
a second descriptor of the same memory (`hopper.ragged_rows`) lets the TMA unit clip the store there, so tails need
neither registers nor masks.

c is the plan of a kernel: the constants that it is compiled with.
"""

# mypy: allow-untyped-defs

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

from megablocks.ops import activation_triton, hopper

ROW_BOUND = gl.constexpr(hopper.ROW_BOUND)
# Copies whose names Triton 3.9 changed: tma_load(descriptor, coordinates, barrier, shared, pred) and
# tma_store(descriptor, coordinates, shared) by the TMA unit, copy_load(shared, pointers, mask) by threads.
tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
tma_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
copy_load = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
_unary = gluon.jit(activation_triton.unary.fn)


@gluon.jit
def barriers(c: gl.constexpr):
    STAGES: gl.constexpr = c.stages
    full = gl.allocate_shared_memory(gl.int64, [c.stages, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [c.stages, 1], mbarrier.MBarrierLayout())
    turn = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        # Each gathering thread arrives when its own copies are complete, and so does the one that expects TMA's bytes.
        mbarrier.init(full.index(i), count=1 + 32 * c.producer_warps if c.gather else 1)
        mbarrier.init(empty.index(i), count=c.row_parts)
    for i in gl.static_range(2):
        mbarrier.init(turn.index(i), count=1)
    fence_async_shared()
    return full, empty, turn


@gluon.jit
def multiply(it, steps, a_bufs, b_bufs, full, empty, turn, phase, WG: gl.constexpr, c: gl.constexpr):
    """A consumer's share of a tile from `steps` stages, (rows, BN) in float32, and the stage after them."""
    shape: gl.constexpr = [c.rows, c.BN]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, c.BN, 16])
    acc = gl.zeros(shape, gl.float32, layout)
    if c.pingpong:
        # Waiting for a parity is only correct after the other consumer has passed its own waits on the same ring.
        mbarrier.wait(turn.index(WG), phase ^ (1 - WG))
    for k in range(steps):
        follows = k > 0
        s = it % c.stages
        mbarrier.wait(full.index(s), (it // c.stages) & 1)
        if c.gather:  # rows came by cp.async
            fence_async_shared()
        a = a_bufs.index(s if c.pingpong else s * 2 + WG)
        b = b_bufs.index(s)
        if not c.a_k_major:
            a = a.permute((1, 0))
        if c.b_k_major:
            b = b.permute((1, 0))
        acc = warpgroup_mma(a, b, acc, use_acc=follows, is_async=True)
        # The products of the step before are complete: its stage may be filled again.
        acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
        mbarrier.arrive(empty.index((it + c.stages - 1) % c.stages), count=1, pred=follows)
        it += 1
    if c.pingpong:
        mbarrier.arrive(turn.index(1 - WG), count=1)
    acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
    mbarrier.arrive(empty.index((it + c.stages - 1) % c.stages), count=1, pred=steps > 0)
    return acc, it


@gluon.jit
def _halves(x, ROWS: gl.constexpr, COLS: gl.constexpr):
    return gl.split(x.reshape([ROWS, 2, COLS // 2]).permute((0, 2, 1)))


@gluon.jit
def parts_of(acc, c: gl.constexpr):
    """acc (rows, BN) in out_parts pieces of its columns, 2 or 4, from left to right."""
    if c.out_parts == 2:
        return _halves(acc, c.rows, c.BN)
    else:
        left, right = _halves(acc, c.rows, c.BN)
        return _halves(left, c.rows, c.BN // 2) + _halves(right, c.rows, c.BN // 2)


@gluon.jit
def stage_out(part, i: gl.constexpr, bufs, WG: gl.constexpr, c: gl.constexpr):
    """Write part i of a tile to the consumer's next output buffer, once the store that last read it has gone."""
    buf = bufs.index(WG * c.out_buffers + i % c.out_buffers)
    tma.store_wait(c.out_buffers - 1)
    buf.store(part.to(bufs.dtype))
    fence_async_shared()
    return buf


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
def store_rows(part, i: gl.constexpr, bufs, desc, tail_desc, row, end, col, WG: gl.constexpr, c: gl.constexpr):
    """Write the i-th part of a consumer's tile, whose first column is col, to rows [row, end)."""
    buf = stage_out(part, i, bufs, WG, c)
    if row + c.rows <= end:
        tma_store(desc, [row, col], buf)
    else:  # rows [row, end) belong to this expert, the next ones to another
        tma_store(tail_desc, [ROW_BOUND, end, ROW_BOUND - end + row, col], buf.reshape([1, 1, c.rows, c.out_cols]))


@gluon.jit
def tile_of_round(i):
    """The tile that this program takes in its i-th round; every second round begins with the last program."""
    programs = gl.num_programs(0)
    p = gl.program_id(0)
    return i * programs + gl.where(i % 2 == 0, p, programs - 1 - p)


@gluon.jit
def rounds(tiles):
    """How many tiles this program is dealt."""
    full = tiles // gl.num_programs(0)
    return full + (tile_of_round(full) < tiles).to(gl.int32)


@gluon.jit
def operand_buffers(dtype: gl.constexpr, c: gl.constexpr):
    """Shared memory for the stages of both operands, each in its own major."""
    a_shape: gl.constexpr = [c.rows, c.BK] if c.a_k_major else [c.BK, c.rows]
    b_shape: gl.constexpr = [c.BN, c.BK] if c.b_k_major else [c.BK, c.BN]
    a_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(a_shape, dtype)
    b_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(b_shape, dtype)
    a_bufs = gl.allocate_shared_memory(dtype, [c.stages * c.row_parts] + a_shape, a_layout)
    return a_bufs, gl.allocate_shared_memory(dtype, [c.stages] + b_shape, b_layout)


@gluon.jit
def gather_lanes(c: gl.constexpr):
    """Rows of a row part and columns of a stage, as the threads copy them."""
    # A row's BK columns are one 128-byte segment: eight lanes with 16 bytes each.
    lanes: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [c.producer_warps, 1], [1, 0])
    return gl.arange(0, c.rows, gl.SliceLayout(1, lanes)), gl.arange(0, c.BK, gl.SliceLayout(0, lanes))


@gluon.jit
def _ids(gather_ptr, row, end, lanes):
    i, _ = lanes
    return gl.load(gather_ptr + (row + i), mask=row + i < end, other=0)


@gluon.jit
def row_ids(gather_ptr, row, end, lanes, c: gl.constexpr):
    """Which rows of x a tile gathers, for each of its row parts. row: the tile's first; end: of the expert's rows."""
    ids = _ids(gather_ptr, row, end, lanes)
    return (ids,) if c.row_parts == 1 else (ids, _ids(gather_ptr, row + c.rows, end, lanes))


@gluon.jit
def _source(x_ptr, x_row, ids, row, end, lanes):
    i, cols = lanes
    live = (row + i < end)[:, None]
    return x_ptr + (ids.to(gl.int64) * x_row * 8)[:, None] + cols[None, :], live


@gluon.jit
def row_sources(x_ptr, x_row, ids, row, end, lanes, c: gl.constexpr):
    """For each row part the addresses of its rows at a stage's columns, and which rows are the expert's."""
    first = _source(x_ptr, x_row, ids[0], row, end, lanes)
    return (first,) if c.row_parts == 1 else (first, _source(x_ptr, x_row, ids[1], row + c.rows, end, lanes))


@gluon.jit
def gather_rows(x_bufs, s, sources, k0, lanes, bar, c: gl.constexpr):
    """Copy a tile's rows into stage s, columns from k0 on.

    Rows past the expert's last are not copied. Copying row 0 in their place makes all programs queue for that row.
    """
    _, cols = lanes
    ROW_PARTS: gl.constexpr = c.row_parts
    for p in gl.static_range(ROW_PARTS):
        src, mask = sources[p]
        if c.K % c.BK != 0:
            mask = mask & (cols + k0 < c.K)[None, :]
        copy_load(x_bufs.index(s * c.row_parts + p), src + k0, mask=mask)
    async_copy.mbarrier_arrive(bar, increment_count=False)


@gluon.jit
def _sigmoid(z):
    """σ(z) in 4 instructions, where exp and a division take 12. Relative error up to 1e-6, below z = -5 up to 5e-6."""
    return gl.inline_asm_elementwise(
        """{
            .reg .f32 t;
            mul.f32 t, $1, 0fBFB8AA3B;
            ex2.approx.ftz.f32 t, t;
            add.f32 t, t, 0f3F800000;
            rcp.approx.ftz.f32 $0, t;
        }""",
        "=f,f",
        [z],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _normal(z):
    """Φ(z) and exp(-z²/2) in 16 instructions, where erf and exp take 40. Relative error up to 7e-6.

    Φ(-|z|) = exp(-z²/2) · t · p(t) with t = 1 / (1 + 0.31·|z|). The coefficients of p were fitted, by weighted least
    squares, to the smallest relative error for |z| up to 14.
    """
    t, bell = gl.inline_asm_elementwise(
        """{
            .reg .f32 a, b;
            abs.f32 a, $2;
            mul.f32 b, $2, $2;
            fma.rn.f32 a, a, 0f3E9EB852, 0f3F800000;
            mul.f32 b, b, 0fBF38AA3B;
            rcp.approx.ftz.f32 $0, a;
            ex2.approx.ftz.f32 $1, b;
        }""",
        "=f,=f,f",
        [z],
        dtype=(gl.float32, gl.float32),
        is_pure=True,
        pack=1,
    )
    p = t * -0.07392869744287202 + 0.1804490810967262
    p = p * t + 0.015746085115990332
    p = p * t + 0.13342907773292995
    p = p * t + 0.1204414472944249
    p = p * t + 0.12386068663700767
    tail = p * (t * bell)
    return gl.where(z < 0, tail, 1 - tail), bell


@gluon.jit
def unary(z, NAME: gl.constexpr, EXACT: gl.constexpr):
    """The activation NAME of float32 z and its derivative, as activation_triton's with cheaper functions."""
    return _unary(z, NAME, EXACT, _sigmoid, _normal)
