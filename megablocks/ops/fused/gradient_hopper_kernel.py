"""Gradient through the activation on Hopper (Gluon): the product with w2 and all that becomes of it, in one kernel.

    dA[r] = dY[token(r)] · w2[e]ᵀ      and, of dA, z and u, what gradient.py's docstring says

The skeleton is that of grouped_mm_hopper_kernel.py, and its producer. With `pingpong` the two consumers own alternate
tiles: one reads z and u, computes and stores while the other multiplies. A fourth role, of one warp, loads z and u by
TMA into a ring of their own, ahead of the consumer that needs them.
"""

# mypy: allow-untyped-defs

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from megablocks.ops.activation_gluon import unary
from megablocks.ops.grouped.grouped_mm_hopper_kernel import (
    ROW_BOUND,
    consumer_walk,
    find_tile,
    m_producer,
    operand_buffers,
    tile_ends,
)
from megablocks.ops.hopper_gluon import barriers, multiply, parts_of
from megablocks.ops.launch import quick


@gluon.jit
def _finish(d_act, at, kept, a_buf, outs, scale, row, end, col, held, c: gl.constexpr):
    """Write the gradients of one column part of a tile; returns its share of the rows' ⟨dA, a⟩."""
    z_bufs, u_bufs, loaded, free = kept
    dz_desc, dz_tail, du_desc, du_tail, a_desc, a_tail = outs
    NAME: gl.constexpr = c.act
    EXACT: gl.constexpr = c.exact
    layout: gl.constexpr = d_act.type.layout
    s = at % c.ring
    z_buf = z_bufs.index(s)
    u_buf = u_bufs.index(s)
    mbarrier.wait(loaded.index(s), (at // c.ring) & 1)
    z = z_buf.load(layout).to(gl.float32)
    if c.gated:
        u = u_buf.load(layout).to(gl.float32)
    act, slope = unary(z, NAME, EXACT)
    d_scaled = d_act * scale[:, None]
    # All three are rounded before the first is stored: the compiler then works through them value by value, while a
    # store between would keep whole parts of intermediate values in registers, and spill them.
    if c.gated:
        d_gate = (d_scaled * act).to(z_bufs.dtype)
        act *= u
        slope *= u
    d_pre = (d_scaled * slope).to(z_bufs.dtype)
    scaled = (act * scale[:, None]).to(z_bufs.dtype)
    dots = gl.sum(d_act * act, 1)
    tma.store_wait(0)  # of the part before: its buffers may be filled again
    mbarrier.arrive(free.index((at + c.ring - c.row_parts) % c.ring), count=1, pred=held)
    z_buf.store(d_pre)
    if c.gated:
        u_buf.store(d_gate)
    a_buf.store(scaled)
    fence_async_shared()
    if row + c.rows <= end:
        tma.async_copy_shared_to_global(dz_desc, [row, col], z_buf)
        if c.gated:
            tma.async_copy_shared_to_global(du_desc, [row, col], u_buf)
        tma.async_copy_shared_to_global(a_desc, [row, col], a_buf)
    else:  # rows [row, end) belong to this expert, the next ones to another
        box: gl.constexpr = [1, 1, c.rows, c.out_cols]
        at_tail = [ROW_BOUND, end, ROW_BOUND - end + row, col]
        tma.async_copy_shared_to_global(dz_tail, at_tail, z_buf.reshape(box))
        if c.gated:
            tma.async_copy_shared_to_global(du_tail, at_tail, u_buf.reshape(box))
        tma.async_copy_shared_to_global(a_tail, at_tail, a_buf.reshape(box))
    return dots


@gluon.jit
def _consumer(
    dy_bufs, w_bufs, kept, o_bufs, full, empty, turn, epilogue_turn, outs, weight_ptr, pair_ptr, dots_ptr,
    offsets_ptr, experts, WG: gl.constexpr, c: gl.constexpr,
):  # fmt: skip
    rows: gl.constexpr = [c.rows]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, c.BN, 16])
    free = kept[3]
    ends, tiles, start, step, it = consumer_walk(offsets_ptr, experts, WG, c)
    at = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    at += WG * c.out_parts if c.pingpong else WG
    e, m0, end, n0 = find_tile(gl.minimum(start, tiles - 1), ends, offsets_ptr, c)
    for tile in range(start, tiles, step):
        row = m0
        last = end
        col = n0
        e, m0, end, n0 = find_tile(gl.minimum(tile + step, tiles - 1), ends, offsets_ptr, c)
        if not c.pingpong:
            row += WG * c.rows
        r = row + gl.arange(0, c.rows, gl.SliceLayout(1, layout))
        pair = gl.load(pair_ptr + r, mask=r < last, other=0)
        scale = gl.load(weight_ptr + pair, mask=r < last, other=0)
        acc, it = multiply(it, c.steps, dy_bufs, w_bufs, full, empty, turn, phase, WG, c)
        if c.pingpong:
            it += c.steps
            # As in multiply, on the ring of z and u.
            mbarrier.wait(epilogue_turn.index(WG), phase ^ (1 - WG))
        p0, p1, p2, p3 = parts_of(acc, c)
        part_rows: gl.constexpr = gl.SliceLayout(1, p0.type.layout)
        part_scale = gl.convert_layout(scale, part_rows)
        dots = gl.zeros(rows, gl.float32, part_rows)
        # A loop, though it moves the parts through registers: written out for both consumers, the code leaves the
        # instruction cache, and every part takes four times as long.
        for i in range(c.out_parts):
            dots += _finish(p0, at, kept, o_bufs.index(WG), outs, part_scale, row, last, col + i * c.out_cols, i > 0, c)
            at += c.row_parts
            p0 = p1
            p1 = p2
            p2 = p3
        tma.store_wait(0)
        mbarrier.arrive(free.index((at + c.ring - c.row_parts) % c.ring), count=1)
        if c.pingpong:
            mbarrier.arrive(epilogue_turn.index(1 - WG), count=1)
            phase ^= 1
            at += c.out_parts
        dots = gl.convert_layout(dots, gl.SliceLayout(1, layout))
        to = dots_ptr + pair.to(gl.int64) * c.n_tiles + col // c.BN
        gl.store(to, dots, mask=r < last)


@gluon.jit
def _loader(kept, z_desc, u_desc, offsets_ptr, experts, c: gl.constexpr):
    """z and u of every part in the order in which the consumers reach them."""
    z_bufs, u_bufs, loaded, free = kept
    PARTS: gl.constexpr = c.out_parts
    ROW_PARTS: gl.constexpr = c.row_parts
    ends = tile_ends(offsets_ptr, experts, c, 1)
    tiles = gl.max(ends, 0)
    at = gl.to_tensor(0)
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        e, m0, end, n0 = find_tile(tile, ends, offsets_ptr, c)
        for i in gl.static_range(PARTS):
            for p in gl.static_range(ROW_PARTS):
                s = at % c.ring
                bar = loaded.index(s)
                mbarrier.wait(free.index(s), ((at // c.ring) & 1) ^ 1)
                mbarrier.expect(bar, c.kept_bytes)
                where = [m0 + p * c.rows, n0 + i * c.out_cols]
                tma.async_copy_global_to_shared(z_desc, where, bar, z_bufs.index(s))
                if c.gated:
                    tma.async_copy_global_to_shared(u_desc, where, bar, u_bufs.index(s))
                at += 1


@quick
@gluon.jit(do_not_specialize=["experts"])
def down_gradient_kernel(
    w_desc, z_desc, u_desc, dz_desc, dz_tail, du_desc, du_tail, a_desc, a_tail, dy_ptr, dy_row, gather_ptr, weight_ptr,
    pair_ptr, dots_ptr, offsets_ptr, experts, c: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """w_desc (E, I, H); z, u (R, I); d_z, d_u and scaled (R, I), each with its ragged twin; dots (R, column tiles).

    None of u and d_u unless gated.
    """
    dtype: gl.constexpr = w_desc.dtype
    RING: gl.constexpr = c.ring
    dy_bufs, w_bufs = operand_buffers(dtype, c)
    z_bufs = gl.allocate_shared_memory(dtype, [c.ring, c.rows, c.out_cols], z_desc.layout)
    if c.gated:
        u_bufs = gl.allocate_shared_memory(dtype, [c.ring, c.rows, c.out_cols], z_desc.layout)
    else:
        u_bufs = z_bufs
    o_bufs = gl.allocate_shared_memory(dtype, [2, c.rows, c.out_cols], z_desc.layout)
    loaded = gl.allocate_shared_memory(gl.int64, [c.ring, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [c.ring, 1], mbarrier.MBarrierLayout())
    epilogue_turn = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(RING):
        mbarrier.init(loaded.index(i), count=1)
        mbarrier.init(free.index(i), count=1)
    for i in gl.static_range(2):
        mbarrier.init(epilogue_turn.index(i), count=1)
    full, empty, turn = barriers(c)
    kept = (z_bufs, u_bufs, loaded, free)
    outs = (dz_desc, dz_tail, du_desc, du_tail, a_desc, a_tail)
    gl.warp_specialize(
        [
            (
                _consumer,
                (
                    dy_bufs, w_bufs, kept, o_bufs, full, empty, turn, epilogue_turn, outs, weight_ptr, pair_ptr,
                    dots_ptr, offsets_ptr, experts, 0, c,
                ),
            ),
            (
                _consumer,
                (
                    dy_bufs, w_bufs, kept, o_bufs, full, empty, turn, epilogue_turn, outs, weight_ptr, pair_ptr,
                    dots_ptr, offsets_ptr, experts, 1, c,
                ),
            ),
            (
                m_producer,
                (
                    dy_bufs, w_bufs, full, empty, None, w_desc, None, None, dy_ptr, dy_row, gather_ptr, offsets_ptr,
                    experts, c,
                ),
            ),
            (_loader, (kept, z_desc, u_desc, offsets_ptr, experts, c)),
        ],
        [4, c.producer_warps, 1],
        [c.consumer_regs, c.producer_regs, c.producer_regs],
    )  # fmt: skip
