"""Block-sparse products on Hopper (sm_90): tile choice, descriptors and launches for the kernels in hopper_kernels.py.

No launch synchronises with the host or depends on the number of used blocks: the grid is one program a multiprocessor,
and the tile is chosen by the weights' sizes.
All can be captured in a CUDA graph.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from megablocks.ops.hopper import aligned, descriptor, has_gluon, is_hopper, multiprocessors, runs_hopper

from .epilogue import NONE, Epilogue

BLOCK = 128


@dataclass(frozen=True)
class Tile:
    """How a product is cut: two consumers of `rows` × BN each, taking turns with pingpong, else one above the other.

    out_parts: column parts in which a consumer writes its tile, out_buffers: how many of them are in flight.
    """

    rows: int
    BN: int
    stages: int
    pingpong: bool = False
    out_parts: int = 1
    out_buffers: int = 1
    BK: int = 64

    @property
    def row_parts(self) -> int:
        return 1 if self.pingpong else 2

    @property
    def BM(self) -> int:
        return self.rows * self.row_parts

    @property
    def stage_bytes(self) -> int:
        return (self.BM + self.BN) * self.BK * 2

    @property
    def out_cols(self) -> int:
        return self.BN // self.out_parts

    @property
    def block_steps(self) -> int:
        return BLOCK // self.BK


@dataclass(frozen=True)
class _Plan(Tile):
    """A Tile with what the kernels must know at compile time."""

    a_k_major: bool = True
    b_k_major: bool = True
    sparse_out: bool = False
    sparse_left: bool = False
    by_column: bool = False
    dynamic: bool = False
    run: int = 1
    kind: str = ""
    act: str = ""
    exact: bool = False
    has_bias: bool = False
    gather: ClassVar[bool] = False


PINGPONG = Tile(128, 128, 6, pingpong=True, out_parts=4, out_buffers=2)
WIDE = Tile(64, 256, 4, out_parts=2)
TALL = Tile(128, 128, 4, out_parts=2)
FEW_ROW = Tile(128, 128, 5, pingpong=True, out_parts=2, out_buffers=2)
FEW_COLUMN = Tile(64, 256, 3, out_parts=2, out_buffers=2)
MANY_COLUMNS = 2048  # block columns, as 64 experts of width 4096 have


def choose_sdd(k: int, run: int) -> Tile:
    """The tile of sdd: 128 × 256 over two blocks side by side, where the reduction is long enough to hide epilogues."""
    return WIDE if run % 2 == 0 and k > 768 else PINGPONG


def choose_spmm(columns: int, sparse_left: bool, by_column: bool) -> Tile:
    """The tile of spmm. `columns`: block columns of S, those of all experts' weights.

    With four blocks or more a column, products are bound by arithmetic and the tile with most stages is best. With one
    or two they are bound by memory: there fewer stages and a whole tile of stores in flight are. How many there are
    hangs on the number of tokens, a new one of which would compile another kernel, so the columns that they spread over
    decide (benchmarks/NOTES.md).
    """
    if columns < MANY_COLUMNS or (by_column and not sparse_left):
        return PINGPONG
    return FEW_COLUMN if by_column else FEW_ROW


def is_available(device: int = 0) -> bool:
    """Whether the kernels can run on this CUDA device: Hopper, and a Triton with the Gluon they were written for."""
    return torch.cuda.is_available() and is_hopper(device) and has_gluon()


def k_major(t: Tensor, dim: int) -> bool | None:
    """Whether a matrix's reduction dimension `dim` is the contiguous one; None where TMA cannot read it at all."""
    return next((contiguous == dim for contiguous in (dim, 1 - dim) if aligned(t, contiguous)), None)


def supports(block_size: int, *operands: Tensor) -> bool:
    """Whether the kernels take these: Hopper, blocks of 128, 16-bit floats, dense matrices that TMA can read."""
    return (
        block_size == BLOCK
        and runs_hopper(operands[0])
        and all(t.numel() > 0 and (t.dim() == 3 or k_major(t, 1) is not None) for t in operands)
    )


def _rows(t: Tensor) -> Tensor:
    """A matrix as it lies in memory, its contiguous dimension last."""
    return t if aligned(t) else t.t()


def _operands(a: Tensor, b: Tensor, out: Tensor, c: _Plan) -> tuple[Any, Any, Any]:
    return (
        descriptor(_rows(a), [c.rows, c.BK] if c.a_k_major else [c.BK, c.rows]),
        descriptor(_rows(b), [c.BN, c.BK] if c.b_k_major else [c.BK, c.BN]),
        descriptor(_rows(out), [c.rows, c.out_cols]),
    )


def sdd(
    a: Tensor, b: Tensor, row_indices: Tensor, column_indices: Tensor, offsets: Tensor, run: int,
    epilogue: Epilogue = NONE, *, tile: Tile | None = None,
) -> Tensor:  # fmt: skip
    """Values (n, 128, 128) of a (M, K) · b (K, N) at the used blocks; see `supports`. Unused blocks are not written."""
    from .hopper_kernels import sdd_kernel

    k = a.shape[1]
    n = row_indices.shape[0]
    out = torch.empty(n, BLOCK, BLOCK, dtype=a.dtype, device=a.device)
    if n == 0:
        return out
    tile = tile or choose_sdd(k, run)
    more: dict[str, Any] = {"a_k_major": bool(k_major(a, 1)), "b_k_major": bool(k_major(b, 0))}
    if epilogue.kind:
        more |= {"kind": epilogue.kind, "act": epilogue.name, "exact": epilogue.exact}
    c = _Plan(**vars(tile), **more, sparse_out=True, run=tile.BN // BLOCK, has_bias=epilogue.bias is not None)
    assert run % c.run == 0, "a tile of two blocks needs them side by side"
    assert c.BM == BLOCK and BLOCK % c.out_cols == 0, "a tile is whole blocks, and each part it stores lies in one"
    act = out if epilogue.act is None else epilogue.act
    extra = next((t for t in (epilogue.bias, epilogue.pre) if t is not None), offsets)
    sdd_kernel[(multiprocessors(a.device.index),)](
        *_operands(a, b, out.view(-1, BLOCK), c), descriptor(act.view(-1, BLOCK), [c.rows, c.out_cols]), extra,
        row_indices, column_indices, offsets, offsets.shape[0] - 1, -(-k // c.BK), c=c, num_warps=4,
    )  # fmt: skip
    return out


@dataclass(frozen=True)
class _Counters:
    """A device's zeros, for good: `free` are handed out one by one, `of_stream` to those that come back."""

    zeros: Tensor
    free: list[Tensor]
    of_stream: dict[int, Tensor]


_counters: dict[int, _Counters] = {}


def _make_counters(device: torch.device) -> _Counters:
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        zeros = torch.zeros(4 * 8192, dtype=torch.int32, device=device)
    stream.synchronize()  # once a device, so that no launch, nor any graph, has to wait for the fill
    # 16 bytes apart: Triton compiles anew for a pointer that is less aligned
    return _Counters(zeros, list(zeros.split(4)), {})


def _counter(device: torch.device) -> Tensor:
    """An int32 that is zero before a launch and after it, and from which no other launch draws meanwhile.

    A stream has one, since its launches follow each other. A launch in a CUDA graph gets its own for good: the graph
    may be replayed on any stream. Where none is left, a fill makes one.
    """
    index = device.index
    mine = _counters.get(index)
    if torch.cuda.is_current_stream_capturing():
        return mine.free.pop() if mine and mine.free else torch.zeros(1, dtype=torch.int32, device=device)
    if mine is None:
        # By another thread: before it captures a function, torch.compile runs it with this thread's allocations in the
        # pool of its graphs, whose memory it gives to other tensors later.
        with ThreadPoolExecutor(1) as pool:
            made = pool.submit(_make_counters, device).result()
        mine = _counters.setdefault(index, made)  # another thread's, where that was quicker
    stream = torch._C._cuda_getCurrentRawStream(index)  # the object around it takes a quarter of a launch to make
    counter = mine.of_stream.get(stream)
    if counter is None:
        if not mine.free:
            return torch.zeros(1, dtype=torch.int32, device=device)
        counter = mine.of_stream[stream] = mine.free.pop()
    return counter


def spmm(
    data: Tensor, dense: Tensor, work: Tensor, index: Tensor, block_offsets: Tensor | None, sparse_left: bool,
    *, tile: Tile = PINGPONG,
) -> Tensor:  # fmt: skip
    """S·D (lines = block rows), Sᵀ·D (block columns), D·S (block columns) or D·Sᵀ (block rows); see `supports`.

    Args:
        data: (n, 128, 128), contiguous.
        dense: D (K, N) for sparse_left, else (M, K).
        work: (lines, 4), one line of the result's block rows (sparse_left) or block columns each.
        index: (n,) int32, the 128 of the reduction that the blocks of the lines meet.
        block_offsets: (n,) int32, where those blocks are, when lines are block columns of S.
        tile: see `choose_spmm`.
    """
    from .hopper_kernels import spmm_kernel

    lines, n = work.shape[0], data.shape[0]
    size = dense.shape[1] if sparse_left else dense.shape[0]
    shape = (lines * BLOCK, size) if sparse_left else (size, lines * BLOCK)
    out = torch.empty(shape, dtype=data.dtype, device=data.device)
    if out.numel() == 0:
        return out
    by_column = block_offsets is not None
    flat = data.view(-1, BLOCK)
    dense_k_major = bool(k_major(dense, 0 if sparse_left else 1))
    # a block is read as it lies: its columns are the reduction where lines are block rows, else its rows are
    sparse_k_major = not by_column
    c = _Plan(
        **vars(tile),
        a_k_major=sparse_k_major if sparse_left else dense_k_major,
        b_k_major=dense_k_major if sparse_left else sparse_k_major,
        sparse_left=sparse_left,
        by_column=by_column,
        # Block rows of a dropless layer are equally long; its block columns are as long as their expert has rows.
        dynamic=by_column,
    )
    dense_tiles = -(-size // (c.BN if sparse_left else c.BM))
    counter = _counter(data.device) if c.dynamic else work
    spmm_kernel[(multiprocessors(data.device.index),)](
        *_operands(flat if sparse_left else dense, dense if sparse_left else flat, out, c),
        work, index, block_offsets if by_column else index, counter, lines * dense_tiles, dense_tiles, n, c=c,
        num_warps=4,
    )  # fmt: skip
    return out
