"""Which program computes which tile of a block-sparse product on Hopper (device code of products_hopper.py).

Tiles are dealt to the programs in rounds, every other round backwards. The longest lines come first (Matrix.row_work,
Matrix.column_work), so a program that got a long line in one round gets a short one in the next. All programs get as
many tiles. Block rows of a dropless layer are equally long, but a block column is as long as its expert has rows. So of
block columns (`by_column`) only the first two rounds are dealt, and from then on a program draws its next tile from a
counter. Who computes a tile changes nothing in it, so reruns stay bit-identical.

The producer announces its program's tiles on a board in shared memory, from which both consumers read them.
"""

# mypy: allow-untyped-defs

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

# Tiles that the producer may have announced ahead of a consumer.
SLOTS = gl.constexpr(4)


@gluon.jit
def tile_of_round(i):
    programs = gl.num_programs(0)
    p = gl.program_id(0)
    return i * programs + gl.where(i % 2 == 0, p, programs - 1 - p)


@gluon.jit
def rounds(tiles):
    """How many tiles this program is dealt."""
    full = tiles // gl.num_programs(0)
    return full + (tile_of_round(full) < tiles).to(gl.int32)


@gluon.jit
def draw(i, counter_ptr, c: gl.constexpr):
    """This program's i-th tile, or a ticket for it, for which only `drawn` waits."""
    if c.by_column:
        lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
        # only the first lane draws
        return gl.inline_asm_elementwise(
            "{ .reg .pred first; setp.eq.u32 first, $2, 0; @first atom.relaxed.gpu.global.add.u32 $0, [$1], 1; }",
            "=r,l,r",
            [counter_ptr + lane * 0, lane],
            dtype=gl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        return tile_of_round(i)


@gluon.jit
def drawn(ticket, c: gl.constexpr):
    if c.by_column:
        lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
        return 2 * gl.num_programs(0) + gl.sum(gl.where(lane == 0, ticket, 0), 0)
    else:
        return ticket


@gluon.jit
def line_of(tile, tiles, work_ptr, dense_tiles):
    """Line of S, its first and end block, and the tile along the dense operand; beyond the last tile, that tile's."""
    tile = gl.minimum(tile, tiles - 1)
    line = tile // dense_tiles
    at = work_ptr + 4 * line
    return gl.load(at), gl.load(at + 1), gl.load(at + 2), tile - line * dense_tiles


@gluon.jit
def make_board():
    slots = gl.allocate_shared_memory(gl.int32, [3 * SLOTS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    ready = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(free.index(i), count=2)
    fence_async_shared()
    return slots, ready, free


@gluon.jit
def announce(i, line, steps, dense, board):
    """Tell the consumers the i-th tile of this program; steps < 0: there is none."""
    slots, ready, free = board
    s = i % SLOTS
    one: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    mbarrier.wait(free.index(s), ((i // SLOTS) & 1) ^ 1)
    slots.index(3 * s).store(gl.full([1], line, gl.int32, one))
    slots.index(3 * s + 1).store(gl.full([1], steps, gl.int32, one))
    slots.index(3 * s + 2).store(gl.full([1], dense, gl.int32, one))
    mbarrier.arrive(ready.index(s), count=1)


@gluon.jit
def announced(i, board):
    """Line, steps and tile along the dense operand of this program's i-th tile."""
    slots, ready, free = board
    s = i % SLOTS
    one: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    mbarrier.wait(ready.index(s), (i // SLOTS) & 1)
    line = gl.max(slots.index(3 * s).load(one), 0)
    steps = gl.max(slots.index(3 * s + 1).load(one), 0)
    dense = gl.max(slots.index(3 * s + 2).load(one), 0)
    mbarrier.arrive(free.index(s), count=1)
    return line, steps, dense
