"""Up-projection on Hopper (Gluon): gathered rows, one or two weights, bias and activation in one kernel.

    z[r] = x[token(r)] · w1[e]ᵀ + b1[e],  a[r] = act(z[r])
    gated:  u[r] = x[token(r)] · v1[e]ᵀ + c1[e],  a[r] = act(z[r]) ⊙ u[r]

The skeleton is that of grouped_mm_hopper_kernel.py. A gated tile holds BN/2 columns of W1
beside the same columns of V1, so one wgmma yields both, and a pair's product never leaves a thread's registers.
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

from megablocks.ops.activation_gluon import unary
from megablocks.ops.grouped.grouped_mm_hopper_kernel import _find_tile, _tile_ends, barriers, halves, store_rows
from megablocks.ops.launch import quick


@gluon.jit
def _finish(z, u, slot: gl.constexpr, bufs, outs, e, row, end, col, WG: gl.constexpr, c: gl.constexpr):
    """Activate and write one column part from col on, (rows, out_cols): z, u where gated, and a, from slot on."""
    z_desc, z_tail, u_desc, u_tail, a_desc, a_tail, b1_ptr, c1_ptr = outs
    NAME: gl.constexpr = c.act
    EXACT: gl.constexpr = c.exact
    j = gl.arange(0, c.out_cols, gl.SliceLayout(0, z.type.layout))
    if c.has_bias:
        z += gl.load(b1_ptr + e * c.I + col + j, mask=col + j < c.I, other=0).to(gl.float32)[None, :]
    zr = z.to(bufs.dtype)
    store_rows(zr, slot, bufs, z_desc, z_tail, row, end, col, WG, c)
    value, _ = unary(zr.to(gl.float32), NAME, EXACT)  # of the rounded value, as backward sees it
    if c.gated:
        if c.has_bias:
            u += gl.load(c1_ptr + e * c.I + col + j, mask=col + j < c.I, other=0).to(gl.float32)[None, :]
        ur = u.to(bufs.dtype)
        store_rows(ur, slot + 1, bufs, u_desc, u_tail, row, end, col, WG, c)
        value *= ur.to(gl.float32)
        store_rows(value.to(bufs.dtype), slot + 2, bufs, a_desc, a_tail, row, end, col, WG, c)
    else:
        store_rows(value.to(bufs.dtype), slot + 1, bufs, a_desc, a_tail, row, end, col, WG, c)


@gluon.jit
def _consumer(
    x_bufs, w_bufs, o_bufs, full, empty, turn, outs, offsets_ptr, experts, WG: gl.constexpr, c: gl.constexpr
):
    shape: gl.constexpr = [c.rows, c.BN]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, c.BN, 16])
    ends = _tile_ends(offsets_ptr, experts, c, 4)
    tiles = gl.max(ends, 0)
    start = gl.program_id(0)
    step = gl.num_programs(0)
    it = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    if c.pingpong:
        start += WG * step
        step *= 2
        it += WG * c.k_steps
    e, m0, end, n0 = _find_tile(gl.minimum(start, tiles - 1), ends, offsets_ptr, c)
    for tile in range(start, tiles, step):
        expert = e
        row = m0
        last = end
        col = n0 // 2 if c.gated else n0
        e, m0, end, n0 = _find_tile(gl.minimum(tile + step, tiles - 1), ends, offsets_ptr, c)
        acc = gl.zeros(shape, gl.float32, layout)
        if c.pingpong:
            # Waiting for a parity is only sound once the other consumer has passed its own waits on the same ring.
            mbarrier.wait(turn.index(WG), phase ^ (1 - WG))
        for k in range(c.k_steps):
            s = it % c.stages
            mbarrier.wait(full.index(s), (it // c.stages) & 1)
            fence_async_shared()  # rows came by cp.async
            if c.pingpong:
                a = x_bufs.index(s)
            else:
                a = x_bufs.index(s * 2 + WG)
            acc = warpgroup_mma(a, w_bufs.index(s).permute((1, 0)), acc, use_acc=k > 0, is_async=True)
            acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
            mbarrier.arrive(empty.index((it + c.stages - 1) % c.stages), count=1, pred=k > 0)
            it += 1
        if c.pingpong:
            mbarrier.arrive(turn.index(1 - WG), count=1)
            phase ^= 1
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
        mbarrier.arrive(empty.index((it + c.stages - 1) % c.stages), count=1)
        if c.pingpong:
            it += c.k_steps
        else:
            row += WG * c.rows
        h0, h1 = halves(acc, c.rows, c.BN)
        p0, p1 = halves(h0, c.rows, c.BN // 2)
        p2, p3 = halves(h1, c.rows, c.BN // 2)
        if c.gated:  # the lower half is z, the upper one u
            _finish(p0, p2, 0, o_bufs, outs, expert, row, last, col, WG, c)
            _finish(p1, p3, 3, o_bufs, outs, expert, row, last, col + c.out_cols, WG, c)
        else:
            # A loop, though it moves the parts through registers: written out for both consumers, four parts' code
            # leaves the instruction cache.
            for i in range(4):
                _finish(p0, p0, 0, o_bufs, outs, expert, row, last, col + i * c.out_cols, WG, c)
                p0 = p1
                p1 = p2
                p2 = p3
    tma.store_wait(0)


@gluon.jit
def _producer(
    x_bufs, w_bufs, full, empty, w_desc, v_desc, x_ptr, x_row, gather_ptr, offsets_ptr, experts, c: gl.constexpr
):
    half: gl.constexpr = c.BN // 2
    ends = _tile_ends(offsets_ptr, experts, c, c.producer_warps)
    tiles = gl.max(ends, 0)
    start = gl.program_id(0)
    step = gl.num_programs(0)
    it = gl.to_tensor(0)
    e, m0, end, n0 = _find_tile(gl.minimum(start, tiles - 1), ends, offsets_ptr, c)
    # A row's BK columns are one 128-byte segment: eight lanes of 16 bytes.
    lanes: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [c.producer_warps, 1], [1, 0])
    i = gl.arange(0, c.rows, gl.SliceLayout(1, lanes))
    cols = gl.arange(0, c.BK, gl.SliceLayout(0, lanes))
    ids = gl.load(gather_ptr + (m0 + i), mask=m0 + i < end, other=0)
    if c.row_parts == 2:
        ids2 = gl.load(gather_ptr + (m0 + c.rows + i), mask=m0 + c.rows + i < end, other=0)
    for tile in range(start, tiles, step):
        # Rows of the next expert's weights are multiplied too where a tile is wider than what is left of this one's;
        # the store clips their columns.
        w_row = e * c.I + (n0 // 2 if c.gated else n0)
        # Nothing is copied for rows past the expert's last, which all programs would queue for.
        live = (m0 + i < end)[:, None]
        src = x_ptr + (ids.to(gl.int64) * x_row * 8)[:, None] + cols[None, :]
        if c.row_parts == 2:
            live2 = (m0 + c.rows + i < end)[:, None]
            src2 = x_ptr + (ids2.to(gl.int64) * x_row * 8)[:, None] + cols[None, :]
        e, m0, end, n0 = _find_tile(gl.minimum(tile + step, tiles - 1), ends, offsets_ptr, c)
        ids = gl.load(gather_ptr + (m0 + i), mask=m0 + i < end, other=0)
        if c.row_parts == 2:
            ids2 = gl.load(gather_ptr + (m0 + c.rows + i), mask=m0 + c.rows + i < end, other=0)
        for k in range(c.k_steps):
            s = it % c.stages
            bar = full.index(s)
            k0 = k * c.BK
            mbarrier.wait(empty.index(s), ((it // c.stages) & 1) ^ 1)
            mbarrier.expect(bar, c.right_bytes)
            w_buf = w_bufs.index(s)
            if c.gated:
                tma.async_copy_global_to_shared(w_desc, [w_row, k0], bar, w_buf.slice(0, half))
                tma.async_copy_global_to_shared(v_desc, [w_row, k0], bar, w_buf.slice(half, half))
            else:
                tma.async_copy_global_to_shared(w_desc, [w_row, k0], bar, w_buf)
            if c.K % c.BK == 0:
                async_copy.async_copy_global_to_shared(x_bufs.index(s * c.row_parts), src + k0, mask=live)
                if c.row_parts == 2:
                    async_copy.async_copy_global_to_shared(x_bufs.index(s * 2 + 1), src2 + k0, mask=live2)
            else:
                inside = (cols + k0 < c.K)[None, :]
                async_copy.async_copy_global_to_shared(x_bufs.index(s * c.row_parts), src + k0, mask=live & inside)
                if c.row_parts == 2:
                    async_copy.async_copy_global_to_shared(x_bufs.index(s * 2 + 1), src2 + k0, mask=live2 & inside)
            async_copy.mbarrier_arrive(bar, increment_count=False)
            it += 1


@quick
@gluon.jit(do_not_specialize=["experts"])
def up_kernel(
    w_desc, v_desc, z_desc, z_tail, u_desc, u_tail, a_desc, a_tail, b1_ptr, c1_ptr, x_ptr, x_row, gather_ptr,
    offsets_ptr, experts, c: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """w_desc, v_desc (E·I, K); z, u and a (R, I), each with its ragged twin."""
    dtype: gl.constexpr = w_desc.dtype
    x_bufs = gl.allocate_shared_memory(
        dtype, [c.stages * c.row_parts, c.rows, c.BK], gl.NVMMASharedLayout.get_default_for([c.rows, c.BK], dtype)
    )
    w_bufs = gl.allocate_shared_memory(
        dtype, [c.stages, c.BN, c.BK], gl.NVMMASharedLayout.get_default_for([c.BN, c.BK], dtype)
    )
    o_bufs = gl.allocate_shared_memory(dtype, [2 * c.out_buffers, c.rows, c.out_cols], z_desc.layout)
    full, empty, turn = barriers(c)
    outs = (z_desc, z_tail, u_desc, u_tail, a_desc, a_tail, b1_ptr, c1_ptr)
    gl.warp_specialize(
        [
            (_consumer, (x_bufs, w_bufs, o_bufs, full, empty, turn, outs, offsets_ptr, experts, 0, c)),
            (_consumer, (x_bufs, w_bufs, o_bufs, full, empty, turn, outs, offsets_ptr, experts, 1, c)),
            (
                _producer,
                (
                    x_bufs, w_bufs, full, empty, w_desc, v_desc, x_ptr, x_row, gather_ptr, offsets_ptr, experts, c,
                ),
            ),
        ],
        [4, c.producer_warps],
        [c.consumer_regs, c.producer_regs],
    )  # fmt: skip
