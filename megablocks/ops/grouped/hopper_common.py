"""What both Hopper grouped GEMMs share on the device (Gluon, sm_90). The letters are those of hopper.py.

One persistent program a multiprocessor, warp-specialised: a producer fills a ring of shared-memory stages by TMA (rows
that are gathered: by cp.async, joined to the same barrier), two consumers multiply by wgmma and store by TMA.
With `pingpong` (ragged-M alone) the two consumers own alternate tiles and one's epilogue hides under the other's
products; otherwise both share a tile.

Where an expert's rows end inside a tile, a second descriptor of the same memory lets the TMA unit clip (store) or
zero-fill (load) there, see `ragged_rows` in hopper.py; neither registers nor masks are spent on tails.
"""

# mypy: allow-untyped-defs
# (device code takes what Triton passes at compile time)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

# Row coordinates of a descriptor made by hopper.ragged_rows count up to this bound; beyond it the hardware clips.
ROW_BOUND = gl.constexpr(2**30)


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
def halves(x, ROWS: gl.constexpr, COLS: gl.constexpr):
    return gl.split(x.reshape([ROWS, 2, COLS // 2]).permute((0, 2, 1)))


@gluon.jit
def stage_out(part, i: gl.constexpr, bufs, WG: gl.constexpr, c: gl.constexpr):
    """Write part i of a tile to the consumer's next output buffer, once the store that last read it has gone."""
    buf = bufs.index(WG * c.out_buffers + i % c.out_buffers)
    tma.store_wait(c.out_buffers - 1)
    buf.store(part.to(bufs.dtype))
    fence_async_shared()
    return buf
