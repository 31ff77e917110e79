"""Block-sparse products on Hopper (Gluon, sm_90), blocks of 128: tile choice, kernels and launches.

    sdd_kernel    S[r, c] = A[r, :] · B[:, c]        for the used blocks (r, c) of a pattern
    spmm_kernel   O = S·D, Sᵀ·D, D·S or D·Sᵀ         line by line: from a block row or block column of S one of O

hopper_gluon.py describes the roles of a program's warps.

The values of S are read and written as one tall matrix (n·128, 128), in which a block is 128 rows. The operand along S
and the major of each operand are known at compile time. Sizes are not, so a new token count compiles nothing. No launch
depends on the number of used blocks: the grid is one program per multiprocessor, and the weights' sizes decide the
tile.

Programs get their tiles in rounds, every other round in reverse order. The longest lines come first (Matrix.row_work,
Matrix.column_work), so a program that got a long line in one round gets a short one in the next. All programs get
equally many tiles. Block rows of a dropless layer are equally long, but the length of a block column is its expert's
number of rows. So with block columns (`by_column`) only the first two rounds are fixed; after them a program draws its
next tile from a counter. A tile's result is the same in every program, so reruns stay bit-identical.

The producer writes its program's tiles to a board in shared memory, from which both consumers read them.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from megablocks.ops import hopper_gluon as hg
from megablocks.ops.hopper import Tile, aligned, descriptor, multiprocessors
from megablocks.ops.launch import quick

from .matrix import Blocks
from .products import NONE, Epilogue, empty_result, empty_values

BLOCK = 128


@dataclass(frozen=True)
class _Plan(Tile):
    """A tile with the constants of a problem. The kernel is compiled with it."""

    a_k_major: bool = True
    b_k_major: bool = True
    sparse_out: bool = False
    sparse_left: bool = False
    by_column: bool = False
    run: int = 1
    unary: str = ""
    exact: bool = False
    gather: ClassVar[bool] = False


PINGPONG = Tile(128, 128, 6, pingpong=True, out_parts=4, out_buffers=2)
WIDE = Tile(64, 256, 4, out_parts=2)


def choose_sdd(k: int, run: int) -> Tile:
    """The tile of sdd: 128 × 256 over two blocks side by side, if the reduction is long enough to hide epilogues."""
    return WIDE if run % 2 == 0 and k > 768 else PINGPONG


def k_major(t: Tensor, dim: int) -> bool | None:
    """Whether a matrix's reduction dimension `dim` is the contiguous one; None if TMA cannot read the matrix."""
    return next((contiguous == dim for contiguous in (dim, 1 - dim) if aligned(t, contiguous)), None)


def supports(block_size: int, *operands: Tensor) -> bool:
    """Whether the kernels support these: blocks of 128, dense matrices that TMA can read."""
    return block_size == BLOCK and all(t.numel() > 0 and (t.dim() == 3 or k_major(t, 1) is not None) for t in operands)


# Most tiles that the producer announces ahead of a consumer.
SLOTS = gl.constexpr(4)


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
        return hg.tile_of_round(i)


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
    """Send the consumers the i-th tile of this program; negative `steps` tell them that they are done."""
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


@gluon.jit
def _write(part, slot: gl.constexpr, bufs, desc, row, col, WG: gl.constexpr, c: gl.constexpr):
    """Store from the consumer's next buffer, once the store that last read it has gone."""
    hg.tma_store(desc, [row, col], hg.stage_out(part, slot, bufs, WG, c))


@gluon.jit
def _store_part(part, i: gl.constexpr, bufs, outs, row, col, WG: gl.constexpr, c: gl.constexpr):
    """Finish and write part i of a tile; outs: the result's descriptor, the activation's, bias and pre-activation."""
    desc, act_desc, bias_ptr, pre_ptr = outs
    if not c.sparse_out:
        _write(part.to(bufs.dtype), i, bufs, desc, row, col + i * c.out_cols, WG, c)
    else:  # columns beyond 128 are the next block's: the next 128 rows of the values
        at: gl.constexpr = i * c.out_cols % 128
        row += i * c.out_cols // 128 * 128
        layout: gl.constexpr = part.type.layout
        NAME: gl.constexpr = c.unary
        EXACT: gl.constexpr = c.exact
        j = gl.arange(0, c.out_cols, gl.SliceLayout(0, layout))
        if act_desc is not None:
            if bias_ptr is not None:
                part += gl.load(bias_ptr + col + i * c.out_cols + j).to(gl.float32)[None, :]
            pre = part.to(bufs.dtype)
            _write(pre, 2 * i, bufs, desc, row, at, WG, c)
            value, _ = hg.unary(pre.to(gl.float32), NAME, EXACT)  # of the rounded value, as backward sees it
            _write(value.to(bufs.dtype), 2 * i + 1, bufs, act_desc, row, at, WG, c)
        else:
            if pre_ptr is not None:
                rows = (row + gl.arange(0, c.rows, gl.SliceLayout(1, layout))).to(gl.int64)
                z = gl.load(pre_ptr + rows[:, None] * 128 + (at + j)[None, :])
                _, slope = hg.unary(z.to(gl.float32), NAME, EXACT)
                part *= slope
            _write(part.to(bufs.dtype), i, bufs, desc, row, at, WG, c)


@gluon.jit
def _store_tile(acc, bufs, outs, row, col, WG: gl.constexpr, c: gl.constexpr):
    PARTS: gl.constexpr = c.out_parts
    if not c.pingpong:
        row += WG * c.rows
    parts = hg.parts_of(acc, c)
    for i in gl.static_range(PARTS):
        _store_part(parts[i], i, bufs, outs, row, col, WG, c)


@gluon.jit
def _sdd_consumer(common, WG: gl.constexpr, c: gl.constexpr):
    a_bufs, b_bufs, o_bufs, full, empty, turn, outs, cols_ptr, used_ptr, last, k_steps = common
    count = hg.rounds(gl.load(used_ptr + last) // c.run)
    stride: gl.constexpr = 2 if c.pingpong else 1
    start: gl.constexpr = WG if c.pingpong else 0
    it = gl.to_tensor(0) + start * k_steps
    phase = gl.to_tensor(0)
    for i in range(start, count, stride):
        block = hg.tile_of_round(i) * c.run
        col = 0
        if outs[2] is not None:
            col = gl.load(cols_ptr + block) * 128
        acc, it = hg.multiply(it, k_steps, a_bufs, b_bufs, full, empty, turn, phase, WG, c)
        phase ^= 1
        it += (stride - 1) * k_steps
        _store_tile(acc, o_bufs, outs, block * 128, col, WG, c)
    tma.store_wait(0)


@gluon.jit
def _load_stage(it, a_desc, b_desc, a_bufs, b_bufs, full, empty, a_m, a_k, b_k, b_n, c: gl.constexpr):
    """Fill the next stage: A from row a_m, B from column b_n, and where each stands along the reduction."""
    PARTS: gl.constexpr = c.row_parts
    s = it % c.stages
    bar = full.index(s)
    mbarrier.wait(empty.index(s), ((it // c.stages) & 1) ^ 1)
    mbarrier.expect(bar, c.left_bytes + c.right_bytes)
    for p in gl.static_range(PARTS):
        row = a_m + p * c.rows
        hg.tma_load(a_desc, [row, a_k] if c.a_k_major else [a_k, row], bar, a_bufs.index(s * c.row_parts + p))
    hg.tma_load(b_desc, [b_n, b_k] if c.b_k_major else [b_k, b_n], bar, b_bufs.index(s))


@gluon.jit
def _sdd_producer(given, c: gl.constexpr):
    a_bufs, b_bufs, full, empty, a_desc, b_desc, rows_ptr, cols_ptr, used_ptr, last, k_steps = given
    tiles = gl.load(used_ptr + last) // c.run
    count = hg.rounds(tiles)
    it = gl.to_tensor(0)
    block = gl.maximum(gl.minimum(hg.tile_of_round(0), tiles - 1), 0) * c.run
    next_row = gl.load(rows_ptr + block)
    next_col = gl.load(cols_ptr + block)
    for i in range(count):
        row = next_row * 128
        col = next_col * 128
        block = gl.minimum(hg.tile_of_round(i + 1), tiles - 1) * c.run
        next_row = gl.load(rows_ptr + block)
        next_col = gl.load(cols_ptr + block)
        for k in range(k_steps):
            at = k * c.BK
            _load_stage(it, a_desc, b_desc, a_bufs, b_bufs, full, empty, row, at, at, col, c)
            it += 1


@gluon.jit
def _spmm_consumer(common, WG: gl.constexpr, c: gl.constexpr):
    a_bufs, b_bufs, o_bufs, full, empty, turn, board, o_desc = common
    i = gl.to_tensor(0)
    it = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    line, steps, dense = announced(i, board)
    if WG == 1:  # the first tile is the other consumer's
        it += gl.maximum(steps, 0)
        i += 1
        line, steps, dense = announced(i, board)
    while steps >= 0:
        row, col = (line * 128, dense * c.BN) if c.sparse_left else (dense * c.BM, line * 128)
        acc, it = hg.multiply(it, steps, a_bufs, b_bufs, full, empty, turn, phase, WG, c)
        phase ^= 1
        _store_tile(acc, o_bufs, (o_desc, None, None, None), row, col, WG, c)
        i += 1
        line, steps, dense = announced(i, board)
        it += gl.maximum(steps, 0)
        i += 1
        line, steps, dense = announced(i, board)
    tma.store_wait(0)


@gluon.jit
def _entry(i, index_ptr, block_ptr, c: gl.constexpr):
    """Which block is the i-th of its line, and where the dense operand's matching 128 begin."""
    other = gl.load(index_ptr + i)
    return (gl.load(block_ptr + i) if c.by_column else i), other


@gluon.jit
def _spmm_producer(given, work, c: gl.constexpr):
    a_bufs, b_bufs, full, empty, board, a_desc, b_desc = given
    work_ptr, index_ptr, block_ptr, counter_ptr, tiles, dense_tiles, entries = work
    STEPS: gl.constexpr = 128 // c.BK  # of a block
    i = gl.to_tensor(0)
    it = gl.to_tensor(0)
    # A tile is drawn three steps ahead, its line is looked up two ahead, and the line's first block one: no wait.
    ticket = draw(2, counter_ptr, c)
    tile = hg.tile_of_round(0)
    tile1 = hg.tile_of_round(1)
    line, first, end, dense = line_of(tile, tiles, work_ptr, dense_tiles)
    line1, first1, end1, dense1 = line_of(tile1, tiles, work_ptr, dense_tiles)
    next_block, next_other = _entry(gl.minimum(first, entries - 1), index_ptr, block_ptr, c)
    while tile < tiles:
        announce(i, line, (end - first) * STEPS, dense, board)
        block, other = next_block, next_other
        next_block, next_other = _entry(gl.minimum(first1, entries - 1), index_ptr, block_ptr, c)
        tile2 = drawn(ticket, c)
        line2, first2, end2, dense2 = line_of(tile2, tiles, work_ptr, dense_tiles)
        ticket = draw(i + 3, counter_ptr, c)
        for j in range(first, end):
            inner = other * 128
            outer = block * 128
            block, other = _entry(gl.minimum(j + 1, end - 1), index_ptr, block_ptr, c)
            for step in gl.static_range(STEPS):
                at = step * c.BK
                if c.sparse_left:
                    a_m = outer if c.a_k_major else 0
                    a_k = at if c.a_k_major else outer + at
                    b_k = inner + at
                    b_n = dense * c.BN
                else:
                    a_m = dense * c.BM
                    a_k = inner + at
                    b_k = at if c.b_k_major else outer + at
                    b_n = outer if c.b_k_major else 0
                _load_stage(it, a_desc, b_desc, a_bufs, b_bufs, full, empty, a_m, a_k, b_k, b_n, c)
                it += 1
        tile, line, first, end, dense = tile1, line1, first1, end1, dense1
        tile1, line1, first1, end1, dense1 = tile2, line2, first2, end2, dense2
        i += 1
    announce(i, 0, -1, 0, board)  # one for each consumer
    announce(i + 1, 0, -1, 0, board)


@gluon.jit
def _buffers(o_desc, c: gl.constexpr):
    a_bufs, b_bufs = hg.operand_buffers(o_desc.dtype, c)
    o_bufs = gl.allocate_shared_memory(o_desc.dtype, [2 * c.out_buffers, c.rows, c.out_cols], o_desc.layout)
    full, empty, turn = hg.barriers(c)
    return a_bufs, b_bufs, o_bufs, full, empty, turn


@quick
@gluon.jit(do_not_specialize=["last", "k_steps"])
def sdd_kernel(
    a_desc, b_desc, o_desc, act_desc, bias_ptr, pre_ptr, rows_ptr, cols_ptr, used_ptr, last, k_steps,
    c: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """a_desc, b_desc: the dense operands in their own major; o_desc: (n·128, 128); used_ptr[last]: the used blocks.

    act_desc, bias_ptr, pre_ptr: what the epilogue writes beside the result and reads, or None.
    """
    a_bufs, b_bufs, o_bufs, full, empty, turn = _buffers(o_desc, c)
    outs = (o_desc, act_desc, bias_ptr, pre_ptr)
    common = (a_bufs, b_bufs, o_bufs, full, empty, turn, outs, cols_ptr, used_ptr, last, k_steps)
    given = (a_bufs, b_bufs, full, empty, a_desc, b_desc, rows_ptr, cols_ptr, used_ptr, last, k_steps)
    gl.warp_specialize(
        [(_sdd_consumer, (common, 0, c)), (_sdd_consumer, (common, 1, c)), (_sdd_producer, (given, c))],
        [4, 1],
        [232, 40],
    )


@quick
@gluon.jit(do_not_specialize=["tiles", "dense_tiles", "entries"])
def spmm_kernel(
    a_desc, b_desc, o_desc, work_ptr, index_ptr, block_ptr, counter_ptr, tiles, dense_tiles, entries, c: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """work_ptr: four ints a line of S; index_ptr, block_ptr: what its blocks meet and, by column, where they are.

    counter_ptr: with c.by_column one int, zero before the launch.
    """
    a_bufs, b_bufs, o_bufs, full, empty, turn = _buffers(o_desc, c)
    board = make_board()
    common = (a_bufs, b_bufs, o_bufs, full, empty, turn, board, o_desc)
    given = (a_bufs, b_bufs, full, empty, board, a_desc, b_desc)
    work = (work_ptr, index_ptr, block_ptr, counter_ptr, tiles, dense_tiles, entries)
    gl.warp_specialize(
        [(_spmm_consumer, (common, 0, c)), (_spmm_consumer, (common, 1, c)), (_spmm_producer, (given, work, c))],
        [4, 1],
        [232, 40],
    )


def _rows(t: Tensor) -> Tensor:
    """A matrix with its contiguous dimension last."""
    return t if aligned(t) else t.t()


def _operands(a: Tensor, b: Tensor, out: Tensor, c: _Plan) -> tuple[Any, Any, Any]:
    return (
        descriptor(_rows(a), [c.rows, c.BK] if c.a_k_major else [c.BK, c.rows]),
        descriptor(_rows(b), [c.BN, c.BK] if c.b_k_major else [c.BK, c.BN]),
        descriptor(_rows(out), [c.rows, c.out_cols]),
    )


def sdd(a: Tensor, b: Tensor, blocks: Blocks, epilogue: Epilogue = NONE) -> Tensor:
    """Values (n, 128, 128) of a (M, K) · b (K, N) at the used blocks; see `supports`. Unused blocks are not written."""
    k, out, offsets = a.shape[1], empty_values(blocks, a), blocks.offsets
    if out.numel() == 0:
        return out
    tile, e = choose_sdd(k, blocks.run), epilogue
    c = _Plan(
        **vars(tile), a_k_major=bool(k_major(a, 1)), b_k_major=bool(k_major(b, 0)), sparse_out=True,
        run=tile.BN // BLOCK, unary=e.activation.unary, exact=e.activation.exact,
    )  # fmt: skip
    act = None if e.act is None else descriptor(e.act.view(-1, BLOCK), [c.rows, c.out_cols])
    sdd_kernel[(multiprocessors(a.device.index),)](
        *_operands(a, b, out.view(-1, BLOCK), c), act, e.bias, e.pre, blocks.row_indices, blocks.column_indices,
        offsets, offsets.shape[0] - 1, -(-k // c.BK), c=c, num_warps=4,
    )  # fmt: skip
    return out


def spmm(
    data: Tensor, dense: Tensor, work: Tensor, index: Tensor, block_offsets: Tensor | None, sparse_left: bool
) -> Tensor:
    """S·D (lines = block rows), Sᵀ·D (block columns), D·S (block columns) or D·Sᵀ (block rows); see `supports`.

    Args:
        data: (n, 128, 128), contiguous.
        dense: D (K, N) for sparse_left, else (M, K).
        work: (lines, 4), one entry for each of the result's block rows (sparse_left) or block columns.
        index: (n,) int32, which 128 of the reduction each block of the lines meets.
        block_offsets: (n,) int32, where those blocks are, if lines are block columns of S.
    """
    lines, n = work.shape[0], data.shape[0]
    size = dense.shape[1] if sparse_left else dense.shape[0]
    out = empty_result(data, dense, lines * BLOCK, sparse_left)
    if out.numel() == 0:
        return out
    by_column = block_offsets is not None
    flat = data.view(-1, BLOCK)
    dense_k_major = bool(k_major(dense, 0 if sparse_left else 1))
    # a block is not transposed: the reduction runs over its columns if lines are block rows, otherwise over its rows
    sparse_k_major = not by_column
    c = _Plan(
        **vars(PINGPONG),
        a_k_major=sparse_k_major if sparse_left else dense_k_major,
        b_k_major=dense_k_major if sparse_left else sparse_k_major,
        sparse_left=sparse_left,
        by_column=by_column,
    )
    dense_tiles = -(-size // (c.BN if sparse_left else c.BM))
    counter = torch.zeros(1, dtype=torch.int32, device=data.device) if by_column else work
    spmm_kernel[(multiprocessors(data.device.index),)](
        *_operands(flat if sparse_left else dense, dense if sparse_left else flat, out, c),
        work, index, block_offsets if by_column else index, counter, lines * dense_tiles, dense_tiles, n, c=c,
        num_warps=4,
    )  # fmt: skip
    return out
