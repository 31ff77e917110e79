"""What the Gluon kernels for Hopper (sm_90) share on the device: the ring of stages, a tile's products, its parts.

A kernel is one persistent program a multiprocessor, warp-specialised: a producer fills the ring's stages, two consumers
multiply by wgmma what is in them. With `pingpong` the consumers own alternate tiles, and take turns at the ring;
otherwise they share a tile, upper and lower half.

c is a kernel's plan. Of it are used: stages, pingpong, row_parts, rows, BN, gather and producer_warps, a_k_major,
b_k_major, out_parts, out_buffers.
"""

# mypy: allow-untyped-defs
# (device code takes what Triton passes at compile time)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)


@gluon.jit
def barriers(c: gl.constexpr):
    STAGES: gl.constexpr = c.stages
    full = gl.allocate_shared_memory(gl.int64, [c.stages, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [c.stages, 1], mbarrier.MBarrierLayout())
    turn = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        # Each gathering thread arrives when its own copies have landed, beside the one that expects TMA's bytes.
        mbarrier.init(full.index(i), count=1 + 32 * c.producer_warps if c.gather else 1)
        mbarrier.init(empty.index(i), count=c.row_parts)
    for i in gl.static_range(2):
        mbarrier.init(turn.index(i), count=1)
    fence_async_shared()
    return full, empty, turn


@gluon.jit
def issue(it, acc, a_bufs, b_bufs, full, use_acc, WG: gl.constexpr, c: gl.constexpr):
    """Start the products of the stage of step `it`, once it is filled."""
    s = it % c.stages
    mbarrier.wait(full.index(s), (it // c.stages) & 1)
    if c.gather:  # rows came by cp.async
        fence_async_shared()
    if c.pingpong:
        a = a_bufs.index(s)
    else:
        a = a_bufs.index(s * 2 + WG)
    b = b_bufs.index(s)
    if not c.a_k_major:
        a = a.permute((1, 0))
    if c.b_k_major:
        b = b.permute((1, 0))
    return warpgroup_mma(a, b, acc, use_acc=use_acc, is_async=True)


@gluon.jit
def retire(it, acc, empty, pred, c: gl.constexpr):
    """Wait for the products before those of step `it`, whose stage may be filled again."""
    acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
    mbarrier.arrive(empty.index((it + c.stages - 1) % c.stages), count=1, pred=pred)
    return acc


@gluon.jit
def multiply(it, steps, a_bufs, b_bufs, full, empty, turn, phase, WG: gl.constexpr, c: gl.constexpr):
    """A consumer's share of a tile from `steps` stages, (rows, BN) in float32, and the stage after them."""
    shape: gl.constexpr = [c.rows, c.BN]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, c.BN, 16])
    acc = gl.zeros(shape, gl.float32, layout)
    if c.pingpong:
        # Waiting for a parity is only sound once the other consumer has passed its own waits on the same ring.
        mbarrier.wait(turn.index(WG), phase ^ (1 - WG))
    for k in range(steps):
        acc = issue(it, acc, a_bufs, b_bufs, full, k > 0, WG, c)
        acc = retire(it, acc, empty, k > 0, c)
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
    """acc (rows, BN) in out_parts pieces of its columns, 1, 2 or 4, from left to right."""
    if c.out_parts == 1:
        return (acc,)
    elif c.out_parts == 2:
        p0, p1 = _halves(acc, c.rows, c.BN)
        return p0, p1
    else:
        h0, h1 = _halves(acc, c.rows, c.BN)
        p0, p1 = _halves(h0, c.rows, c.BN // 2)
        p2, p3 = _halves(h1, c.rows, c.BN // 2)
        return p0, p1, p2, p3


@gluon.jit
def rounded_parts(acc, dtype: gl.constexpr, c: gl.constexpr):
    """The four of parts_of, as a tile that is written late waits in registers."""
    p0, p1, p2, p3 = parts_of(acc, c)
    return p0.to(dtype), p1.to(dtype), p2.to(dtype), p3.to(dtype)


@gluon.jit
def stage_out(part, i: gl.constexpr, bufs, WG: gl.constexpr, c: gl.constexpr):
    """Write part i of a tile to the consumer's next output buffer, once the store that last read it has gone."""
    buf = bufs.index(WG * c.out_buffers + i % c.out_buffers)
    tma.store_wait(c.out_buffers - 1)
    buf.store(part.to(bufs.dtype))
    fence_async_shared()
    return buf
