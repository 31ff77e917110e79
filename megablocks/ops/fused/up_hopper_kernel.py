"""Up-projection on Hopper (Gluon): gathered rows, one or two weights, bias and activation in one kernel.

    z[r] = x[token(r)] · w1[e]ᵀ + b1[e],  a[r] = act(z[r])
    gated:  u[r] = x[token(r)] · v1[e]ᵀ + c1[e],  a[r] = act(z[r]) ⊙ u[r]

The skeleton is that of grouped_mm_hopper_kernel.py. A gated tile holds BN/2 columns of W1
beside the same columns of V1, so one wgmma yields both, and a pair's product never leaves a thread's registers.
"""

# mypy: allow-untyped-defs

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma_wait

from megablocks.ops.activation_gluon import unary
from megablocks.ops.grouped.grouped_mm_hopper_kernel import (
    consumer_walk,
    find_tile,
    gather_lanes,
    gather_rows,
    operand_buffers,
    row_ids,
    row_sources,
    store_rows,
    walk,
)
from megablocks.ops.hopper_gluon import barriers, issue, multiply, parts_of, retire, rounded_parts
from megablocks.ops.launch import quick


@gluon.jit
def _finish(z, u, slot: gl.constexpr, bufs, outs, e, row, end, col, WG: gl.constexpr, c: gl.constexpr):
    """Activate and write one column part from col on, (rows, out_cols): z, u where gated, and a, from slot on."""
    z_desc, z_tail, u_desc, u_tail, a_desc, a_tail, b1_ptr, c1_ptr = outs
    NAME: gl.constexpr = c.act
    EXACT: gl.constexpr = c.exact
    j = gl.arange(0, c.out_cols, gl.SliceLayout(0, z.type.layout))
    if c.has_bias:
        z += gl.load(b1_ptr + e * c.N + col + j, mask=col + j < c.N, other=0).to(gl.float32)[None, :]
    zr = z.to(bufs.dtype)
    store_rows(zr, slot, bufs, z_desc, z_tail, row, end, col, WG, c)
    value, _ = unary(zr.to(gl.float32), NAME, EXACT)  # of the rounded value, as backward sees it
    if c.gated:
        if c.has_bias:
            u += gl.load(c1_ptr + e * c.N + col + j, mask=col + j < c.N, other=0).to(gl.float32)[None, :]
        ur = u.to(bufs.dtype)
        store_rows(ur, slot + 1, bufs, u_desc, u_tail, row, end, col, WG, c)
        value *= ur.to(gl.float32)
        store_rows(value.to(bufs.dtype), slot + 2, bufs, a_desc, a_tail, row, end, col, WG, c)
    else:
        store_rows(value.to(bufs.dtype), slot + 1, bufs, a_desc, a_tail, row, end, col, WG, c)


@gluon.jit
def _direct_consumer(
    x_bufs, w_bufs, o_bufs, full, empty, turn, outs, offsets_ptr, experts, WG: gl.constexpr, c: gl.constexpr
):
    ends, tiles, start, step, it = consumer_walk(offsets_ptr, experts, WG, c)
    phase = gl.to_tensor(0)
    e, m0, end, n0 = find_tile(gl.minimum(start, tiles - 1), ends, offsets_ptr, c)
    for tile in range(start, tiles, step):
        expert = e
        row = m0
        last = end
        col = n0 // 2 if c.gated else n0
        e, m0, end, n0 = find_tile(gl.minimum(tile + step, tiles - 1), ends, offsets_ptr, c)
        acc, it = multiply(it, c.steps, x_bufs, w_bufs, full, empty, turn, phase, WG, c)
        if c.pingpong:
            phase ^= 1
            it += c.steps
        else:
            row += WG * c.rows
        p0, p1, p2, p3 = parts_of(acc, c)
        if c.gated:  # the lower half is z, the upper one u
            _finish(p0, p2, 0, o_bufs, outs, expert, row, last, col, WG, c)
            _finish(p1, p3, 3, o_bufs, outs, expert, row, last, col + c.out_cols, WG, c)
        else:
            # A loop, though it moves the parts through registers: written out for both consumers, four parts' code
            # leaves the instruction cache.
            for i in range(c.out_parts):
                _finish(p0, p0, 0, o_bufs, outs, expert, row, last, col + i * c.out_cols, WG, c)
                p0 = p1
                p1 = p2
                p2 = p3
    tma.store_wait(0)


@gluon.jit
def _late_consumer(x_bufs, w_bufs, o_bufs, full, empty, outs, offsets_ptr, experts, WG: gl.constexpr, c: gl.constexpr):
    """As _direct_consumer, of gated tiles that both share, each written *late*.

    Rounded, a tile waits in registers; its two column parts are activated and stored while the next one's first
    products run. ptxas must not move the rounding in among those, or it waits for each as soon as it is issued:
    tests/ops/test_grouped_compile.py asks it.
    """
    LATE: gl.constexpr = 2
    shape: gl.constexpr = [c.rows, c.BN]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, c.BN, 16])
    dtype: gl.constexpr = o_bufs.dtype
    ends, tiles, start, step, it = consumer_walk(offsets_ptr, experts, WG, c)
    e, m0, end, n0 = find_tile(gl.minimum(start, tiles - 1), ends, offsets_ptr, c)
    z0, z1, u0, u1 = rounded_parts(gl.zeros(shape, gl.float32, layout), dtype, c)
    expert = gl.to_tensor(0)  # of the tile that waits; each is an object of its own, or Triton does not carry it
    row = gl.to_tensor(0)
    last = gl.to_tensor(0)
    col = gl.to_tensor(0)
    for tile in range(start, tiles, step):
        next_expert = e
        next_row = m0 + WG * c.rows
        next_last = end
        next_col = n0 // 2
        e, m0, end, n0 = find_tile(gl.minimum(tile + step, tiles - 1), ends, offsets_ptr, c)
        acc = gl.zeros(shape, gl.float32, layout)
        for i in gl.static_range(LATE):
            acc = issue(it, acc, x_bufs, w_bufs, full, i > 0, WG, c)
            if tile > start:
                if i == 0:
                    _finish(z0, u0, 0, o_bufs, outs, expert, row, last, col, WG, c)
                else:
                    _finish(z1, u1, 3, o_bufs, outs, expert, row, last, col + c.out_cols, WG, c)
            acc = retire(it, acc, empty, i > 0, c)
            it += 1
        for _ in range(LATE, c.steps):
            acc = issue(it, acc, x_bufs, w_bufs, full, True, WG, c)
            acc = retire(it, acc, empty, True, c)
            it += 1
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
        mbarrier.arrive(empty.index((it + c.stages - 1) % c.stages), count=1)
        z0, z1, u0, u1 = rounded_parts(acc, dtype, c)
        expert = next_expert
        row = next_row
        last = next_last
        col = next_col
    if start < tiles:
        _finish(z0, u0, 0, o_bufs, outs, expert, row, last, col, WG, c)
        _finish(z1, u1, 3, o_bufs, outs, expert, row, last, col + c.out_cols, WG, c)
    tma.store_wait(0)


@gluon.jit
def _consumer(x_bufs, w_bufs, o_bufs, full, empty, turn, outs, offsets_ptr, experts, WG: gl.constexpr, c: gl.constexpr):
    if c.late:
        _late_consumer(x_bufs, w_bufs, o_bufs, full, empty, outs, offsets_ptr, experts, WG, c)
    else:
        _direct_consumer(x_bufs, w_bufs, o_bufs, full, empty, turn, outs, offsets_ptr, experts, WG, c)


@gluon.jit
def _producer(
    x_bufs, w_bufs, full, empty, w_desc, v_desc, x_ptr, x_row, gather_ptr, offsets_ptr, experts, c: gl.constexpr
):
    half: gl.constexpr = c.BN // 2
    ends, tiles, start, step, it = walk(offsets_ptr, experts, c, c.producer_warps)
    e, m0, end, n0 = find_tile(gl.minimum(start, tiles - 1), ends, offsets_ptr, c)
    lanes = gather_lanes(c)
    ids = row_ids(gather_ptr, m0, end, lanes, c)
    for tile in range(start, tiles, step):
        # Rows of the next expert's weights are multiplied too where a tile is wider than what is left of this one's;
        # the store clips their columns.
        w_row = e * c.N + (n0 // 2 if c.gated else n0)
        sources = row_sources(x_ptr, x_row, ids, m0, end, lanes, c)
        e, m0, end, n0 = find_tile(gl.minimum(tile + step, tiles - 1), ends, offsets_ptr, c)
        ids = row_ids(gather_ptr, m0, end, lanes, c)
        for k in range(c.steps):
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
            gather_rows(x_bufs, s, sources, k0, lanes, bar, c)
            it += 1


@quick
@gluon.jit(do_not_specialize=["experts"])
def up_kernel(
    w_desc, v_desc, z_desc, z_tail, u_desc, u_tail, a_desc, a_tail, b1_ptr, c1_ptr, x_ptr, x_row, gather_ptr,
    offsets_ptr, experts, c: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """w_desc, v_desc (E·I, K); z, u and a (R, I), each with its ragged twin; None of v and u unless gated."""
    x_bufs, w_bufs = operand_buffers(w_desc.dtype, c)
    o_bufs = gl.allocate_shared_memory(w_desc.dtype, [2 * c.out_buffers, c.rows, c.out_cols], z_desc.layout)
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
