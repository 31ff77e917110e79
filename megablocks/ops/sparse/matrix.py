"""Block-sparse matrices: blocked CSR with the row indices written out, and an index of the transpose.

Legend: B block size, n blocks (static: the room in `data`), u ≤ n used blocks, block row = B rows, block column alike.

Blocks are in row order. `offsets` says which blocks belong to a block row (CSR). `row_indices` and `column_indices` say
where each block is (COO, so that a product with a sparse result needs one program per block and no search). The
transpose is only an index: `block_offsets_t` lists the same blocks in column order, values never move (Gale et al.,
MegaBlocks, arXiv 2211.15841, section 5.1.2). Blocks from offsets[-1] on are unused: their row and column are −1, and no
kernel reads their values.

`topology` builds the pattern of a dropless MoE's hidden activations on the device, in one launch. Expert e has t_e
rows, padded to n_e = ⌈t_e / B⌉ block rows. In its block rows the I / B blocks of its own columns are nonzero, so the
pattern is block-diagonal, (block rows × B, E × I) (MegaBlocks, section 5.2). Only the device knows how many block rows
there are, so they get a static bound: ⌊(R + E·(B−1)) / B⌋ for R rows.

    block row r of expert e, first block row s_e = Σ_{e' < e} n_e', f = I / B:
    blocks r·f … r·f + f − 1 at columns e·f …;   in column order, column e·f + j holds blocks (s_e + i)·f + j, i < n_e
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megablocks.ops.library import custom_op

BLOCK_SIZES = (64, 128, 256)
# A longer matrix would need wider metadata. Its blocks would fill 64 GiB per column of blocks.
_MAX_SIDE = 2**31 - 1


class Blocks(NamedTuple):
    """Where the blocks of a matrix are. Ops take it as one argument; the names are stanford-stk's.

    row_indices, column_indices: (n,) int32, −1 for unused blocks; columns ascend within a row.
    offsets: (block rows + 1,) int32; blocks [offsets[i], offsets[i+1]) are in block row i.
    column_indices_t: (n,) int32: block rows in column order. block_offsets_t: (n,) int32: positions in `data`.
    offsets_t: (block columns + 1,) int32, into the two above.
    row_work, column_work: (lines, 4) int32: line, first, end, 0. Kernels process the lines in this order: longest
        first, so that the short ones balance the load at the end.
    block_size: B.
    run: every aligned group of `run` blocks is side by side in one row; 1 promises nothing.
    """

    row_indices: Tensor
    column_indices: Tensor
    offsets: Tensor
    column_indices_t: Tensor
    offsets_t: Tensor
    block_offsets_t: Tensor
    row_work: Tensor
    column_work: Tensor
    block_size: int = 128
    run: int = 1

    def lines(self, by_column: bool) -> tuple[Tensor, Tensor, Tensor | None]:
        """(work, index, places) of the block rows or columns: `index` is where their blocks meet a dense operand.

        places: positions of the blocks in `data`; None for block rows, whose blocks are in order.
        """
        if by_column:
            return self.column_work, self.column_indices_t, self.block_offsets_t
        return self.row_work, self.column_indices, None


_INDICES = Blocks._fields[:-2]  # the tensors


def _index_shapes(n: int, rows: int, columns: int) -> tuple[tuple[int, ...], ...]:
    """The shapes of `_INDICES` for room for n blocks, block rows and block columns."""
    return (n,), (n,), (rows + 1,), (n,), (columns + 1,), (n,), (rows, 4), (columns, 4)


@dataclass(frozen=True, eq=False)
class Matrix:
    """A block-sparse matrix, or with data=None a pattern of blocks. `.t()` is a view.

    shape: (rows, columns), multiples of block_size; swapped if `transposed`.
    data: (n, B, B) floating, differentiable, or None.
    blocks: where they are in the stored matrix, even if this one is `transposed`.

    Raises:
        ValueError: a shape, dtype or device that does not fit. Contents are checked by `validate`.
    """

    shape: tuple[int, int]
    data: Tensor | None
    blocks: Blocks
    transposed: bool = False

    def __post_init__(self) -> None:
        size, run = self.blocks.block_size, self.blocks.run  # by name, as below: Dynamo of torch 2.8 traces no property
        if size not in BLOCK_SIZES:
            raise ValueError(f"block_size={size}: must be one of {', '.join(map(str, BLOCK_SIZES))}")
        for name, side in zip(("rows", "columns"), self.shape, strict=True):
            if side % size or not 0 <= side <= _MAX_SIDE:
                raise ValueError(f"shape {tuple(self.shape)}: {name} must be a multiple of block_size={size}")
        n = self.num_blocks
        for name, shape in zip(_INDICES, _index_shapes(n, *self.stored_grid), strict=True):
            t = getattr(self.blocks, name)
            if t.dtype != torch.int32 or tuple(t.shape) != shape or t.device != self.device:
                raise ValueError(
                    f"{name} is {tuple(t.shape)} {t.dtype} on {t.device}, must be {shape} torch.int32 on {self.device}"
                )
        if run < 1 or n % run:
            raise ValueError(f"run={run}: must divide the {n} blocks")
        data, wanted = self.data, (n, size, size)
        if data is None:
            return
        if tuple(data.shape) != wanted or data.device != self.device or not data.dtype.is_floating_point:
            given = f"{tuple(data.shape)} {data.dtype} on {data.device}"
            raise ValueError(f"data is {given}, must be {wanted} floating on {self.device}")

    @property
    def block_size(self) -> int:
        return self.blocks.block_size

    @property
    def device(self) -> torch.device:
        return self.blocks.offsets.device

    @property
    def dtype(self) -> torch.dtype:
        if self.data is None:
            raise ValueError("this Matrix is a pattern: it has no data and so no dtype")
        return self.data.dtype

    @property
    def num_blocks(self) -> int:
        """Number of blocks that `data` has room for; offsets[-1] blocks are used, which only the device knows."""
        return self.blocks.row_indices.shape[0]

    @property
    def stored_grid(self) -> tuple[int, int]:
        """Block rows and block columns as stored, even if `transposed`."""
        rows, columns = (side // self.block_size for side in self.shape)
        return (columns, rows) if self.transposed else (rows, columns)

    def t(self) -> Matrix:
        """The transpose, as a view: same data and indices."""
        return replace(self, shape=(self.shape[1], self.shape[0]), transposed=not self.transposed)

    def with_data(self, data: Tensor | None) -> Matrix:
        """The same pattern around other values (n, B, B)."""
        return replace(self, data=data)

    def to_dense(self) -> Tensor:
        """(rows, columns) in data's dtype, zero outside the blocks; differentiable, no host synchronization.

        Raises:
            ValueError: the matrix is a pattern without values.
        """
        if self.data is None:
            raise ValueError("to_dense: this Matrix is a pattern, give it values with with_data")
        (block_rows, block_columns), size = self.stored_grid, self.block_size
        used = self.blocks.row_indices >= 0
        # unused blocks go to a spare place; they can contain anything, including NaN
        spare = block_rows * block_columns
        place = self.blocks.row_indices.long() * block_columns + self.blocks.column_indices
        place = torch.where(used, place, spare)
        values = torch.where(used[:, None, None], self.data, torch.zeros((), dtype=self.dtype, device=self.device))
        blocks = values.new_zeros(spare + 1, size, size).index_copy(0, place, values)
        dense = blocks[:-1].view(block_rows, block_columns, size, size).transpose(1, 2)
        dense = dense.reshape(block_rows * size, block_columns * size)
        return dense.t() if self.transposed else dense

    def validate(self) -> Matrix:
        """Check the contents of the indices. Synchronizes with the host.

        Raises:
            ValueError: the first inconsistency found.
        """
        (block_rows, block_columns), size, b = self.stored_grid, self.block_size, self.blocks
        used = int(b.offsets[-1])
        rows, columns = (t[:used].clamp(min=0) for t in (b.row_indices, b.column_indices))
        shape = block_rows * size, block_columns * size
        want = from_coordinates(shape, rows, columns, block_size=size, num_blocks=self.num_blocks).blocks
        for name in ("row_indices", "column_indices", "offsets", "offsets_t"):
            if not torch.equal(getattr(b, name), getattr(want, name)):
                raise ValueError(f"{name} does not describe {block_rows}x{block_columns} blocks in row order")
        for name in ("column_indices_t", "block_offsets_t"):
            if not torch.equal(getattr(b, name)[:used], getattr(want, name)[:used]):
                raise ValueError(f"{name} does not list the blocks of row_indices and column_indices in column order")
        for name, work, offsets in (("row_work", b.row_work, b.offsets), ("column_work", b.column_work, b.offsets_t)):
            lines = torch.arange(len(work), dtype=torch.int32, device=self.device)
            if not torch.equal(work[work[:, 0].argsort(), :3], torch.stack([lines, offsets[:-1], offsets[1:]], 1)):
                raise ValueError(f"{name} does not list every line once with its first and end block")
        rows, columns = (t[: used - used % b.run].view(-1, b.run) for t in (rows, columns))
        side_by_side = columns[:, :1] + torch.arange(b.run, device=self.device)
        if used % b.run or not ((rows == rows[:, :1]).all() and (columns == side_by_side).all()):
            raise ValueError(f"run={b.run}: not every {b.run} blocks stand side by side in one row")
        return self

    def to_stk(self) -> Any:
        """An `stk.Matrix` of the used blocks (needs stanford-stk; synchronizes with the host).

        Raises:
            ValueError: stanford-stk is not installed or does not import.
        """
        try:
            import stk  # type: ignore[import-not-found, unused-ignore]
        except Exception as error:  # its kernels do not import with every Triton
            raise ValueError(f"stanford-stk does not import ({error}): install it to convert matrices") from error
        b, size = self.blocks, self.block_size
        used = int(b.offsets[-1])
        narrow = torch.int16 if max(self.stored_grid) < 2**15 else torch.int32
        data = torch.empty(used, size, size, device="meta") if self.data is None else self.data[:used]
        rows, columns, columns_t = (t[:used].to(narrow) for t in (b.row_indices, b.column_indices, b.column_indices_t))
        by_column = columns_t, b.offsets_t, b.block_offsets_t[:used]
        shape = torch.Size(side * size for side in self.stored_grid)
        out = stk.Matrix(shape, data, rows, columns, b.offsets, *by_column)
        return out.t() if self.transposed else out

    @classmethod
    def from_stk(cls, other: Any) -> Matrix:
        """A Matrix around the values of an `stk.Matrix`, or of anything with its attributes.

        Raises:
            ValueError: blocks of another size than 64, 128 or 256.
        """
        transposed = not other.is_contiguous()
        rows, columns = reversed(tuple(other.size())) if transposed else tuple(other.size())
        data = other.data
        out = from_coordinates((rows, columns), other.row_indices, other.column_indices, block_size=data.shape[-1])
        if data.device.type != "meta":
            out = out.with_data(data)
        return out.t() if transposed else out

    @classmethod
    def from_dense(cls, dense: Tensor, block_size: int = 128) -> Matrix:
        """The blocks of `dense` (rows, columns) that hold a nonzero; synchronizes with the host.

        Raises:
            ValueError: `dense` is not a matrix, or a side is not a multiple of block_size.
        """
        if dense.dim() != 2 or dense.shape[0] % block_size or dense.shape[1] % block_size:
            raise ValueError(f"dense is {tuple(dense.shape)}, must be 2-D, its sides multiples of {block_size}")
        rows, columns = (side // block_size for side in dense.shape)
        blocks = dense.reshape(rows, block_size, columns, block_size).transpose(1, 2)
        place = (blocks != 0).any(-1).any(-1).nonzero()
        out = from_coordinates((dense.shape[0], dense.shape[1]), place[:, 0], place[:, 1], block_size=block_size)
        return out.with_data(blocks[place[:, 0], place[:, 1]].contiguous())


def from_coordinates(
    shape: tuple[int, int], rows: Tensor, columns: Tensor, *, block_size: int = 128, num_blocks: int | None = None
) -> Matrix:
    """The pattern with blocks at (rows[i], columns[i]), in that order of `data`.

    Args:
        rows, columns: (u,) integer block coordinates, sorted by row, then column, each at most once.
        num_blocks: room in `data`, ≥ u; default u.

    Raises:
        ValueError: unsorted, repeated or outside the shape (checking synchronizes with the host).
    """
    block_rows, block_columns = (side // block_size for side in shape)
    rows, columns = rows.long(), columns.long()
    used, room = rows.numel(), rows.numel() if num_blocks is None else num_blocks
    place = rows * block_columns + columns
    inside = (rows >= 0) & (rows < block_rows) & (columns >= 0) & (columns < block_columns)
    if used and not (bool(inside.all()) and bool((place.diff() > 0).all())):
        raise ValueError(f"blocks must lie in {block_rows}x{block_columns}, each once, sorted by row and then column")
    if room < used:
        raise ValueError(f"num_blocks={room}: must be at least the {used} blocks of the pattern")
    return Matrix(shape, None, _blocks_at(rows, columns, (block_rows, block_columns), room, block_size))


def _blocks_at(rows: Tensor, columns: Tensor, grid: tuple[int, int], room: int, block_size: int) -> Blocks:
    """The indices of `from_coordinates`, unchecked: rows, columns (u,) int64, room for n >= u blocks."""
    device = rows.device

    def offsets(line: Tensor, lines: int) -> Tensor:
        out = torch.zeros(lines + 1, dtype=torch.int32, device=device)
        out[1:] = torch.bincount(line, minlength=lines).cumsum(0)
        return out

    def padded(t: Tensor) -> Tensor:
        return torch.cat([t.int(), torch.full((room - len(t),), -1, dtype=torch.int32, device=device)])

    by_row, by_column = offsets(rows, grid[0]), offsets(columns, grid[1])
    order = torch.sort(columns, stable=True).indices
    return Blocks(
        padded(rows), padded(columns), by_row, padded(rows[order]), by_column, padded(order), _work(by_row),
        _work(by_column), block_size,
    )  # fmt: skip


def _work(offsets: Tensor) -> Tensor:
    """offsets (L+1,) of L block rows or columns → (L, 4) int32: number, first block, end, 0; the longest first."""
    longest_first = torch.sort(offsets.diff(), descending=True, stable=True).indices
    columns = [longest_first.int(), offsets[:-1][longest_first], offsets[1:][longest_first]]
    return torch.stack([*columns, torch.zeros_like(columns[0])], 1).contiguous()


class Topology(NamedTuple):
    """pattern: Matrix without data. padded_offsets: (E+1,) int32, expert e's padded rows begin at padded_offsets[e]."""

    pattern: Matrix
    padded_offsets: Tensor


def max_block_rows(rows: int, num_experts: int, block_size: int = 128) -> int:
    """The most block rows that `rows` rows of `num_experts` experts can need, if each is padded to whole blocks."""
    return min(rows, (rows + num_experts * (block_size - 1)) // block_size)


def topology_ref(expert_offsets: Tensor, blocks_per_row: int, block_rows: int, block_size: int) -> list[Tensor]:
    """padded_offsets and the tensors of `Blocks`, in plain torch. Reads the number of block rows on the host."""
    f, experts = blocks_per_row, expert_offsets.shape[0] - 1
    ends = ((expert_offsets.diff() + block_size - 1) // block_size).cumsum(0).clamp(max=block_rows)
    used = torch.arange(int(ends[-1]), device=ends.device)
    first_column = torch.searchsorted(ends, used, right=True) * f
    columns = (first_column[:, None] + torch.arange(f, device=ends.device)).flatten()
    blocks = _blocks_at(used.repeat_interleave(f), columns, (block_rows, experts * f), block_rows * f, block_size)
    return [F.pad(ends * block_size, (1, 0)).int(), *blocks[:-2]]


def empty_topology(expert_offsets: Tensor, blocks_per_row: int, block_rows: int) -> list[Tensor]:
    """Unset padded_offsets and tensors of `Blocks`."""
    experts, n = expert_offsets.shape[0] - 1, block_rows * blocks_per_row
    shapes = _index_shapes(n, block_rows, experts * blocks_per_row)
    return [expert_offsets.new_empty(shape) for shape in ((experts + 1,), *shapes)]


topology_op = custom_op(
    "megablocks::sparse_topology",
    fake=lambda a: empty_topology(a.expert_offsets, a.blocks_per_row, a.block_rows),
    kernel="megablocks.ops.sparse.kernels:topology_launch",
)(topology_ref)


def topology(
    expert_offsets: Tensor, ffn_size: int, *, max_rows: int, block_size: int = 128, block_rows: int | None = None
) -> Topology:
    """The pattern of the hidden activations of experts whose rows are sorted by expert, without host synchronization.

    Args:
        expert_offsets: (E+1,) int32, non-decreasing: unpadded rows [expert_offsets[e], expert_offsets[e+1]) are expert
            e's (`Dispatch.expert_offsets`).
        ffn_size: I, the width of one expert; a multiple of block_size.
        max_rows: R ≥ expert_offsets[E], a bound that the host knows: the number of (token, expert) pairs.
        block_rows: block rows of the pattern, default `max_block_rows`. If it is too small for the rows, the last rows
            are dropped; pass it only if the number is known, as with uniform routing.

    Returns:
        Topology: pattern (block_rows·B, E·I), padded_offsets (E+1,).

    Raises:
        ValueError: a width that is not a multiple of the block size, or a bad block size, shape or dtype.
    """
    if expert_offsets.dim() != 1 or expert_offsets.shape[0] < 2 or expert_offsets.dtype != torch.int32:
        raise ValueError(
            f"expert_offsets is {tuple(expert_offsets.shape)} {expert_offsets.dtype}, must be (E+1,) torch.int32"
        )
    if block_size not in BLOCK_SIZES:
        raise ValueError(f"block_size={block_size}: must be one of {', '.join(map(str, BLOCK_SIZES))}")
    if ffn_size <= 0 or ffn_size % block_size:
        raise ValueError(
            f"ffn_size={ffn_size}: block-sparse products need a multiple of block_size={block_size}; "
            "choose such a width, a smaller block_size or mlp_impl='grouped'"
        )
    if max_rows < 0 or (block_rows is not None and block_rows < 0):
        raise ValueError(f"max_rows={max_rows}, block_rows={block_rows}: must not be negative")
    experts = expert_offsets.shape[0] - 1
    if block_rows is None:
        block_rows = max_block_rows(max_rows, experts, block_size)
    blocks_per_row = ffn_size // block_size
    padded_offsets, *indices = topology_op(expert_offsets.contiguous(), blocks_per_row, block_rows, block_size)
    run = 2 if blocks_per_row % 2 == 0 else 1
    shape = (block_rows * block_size, experts * ffn_size)
    # not Blocks._make, which Dynamo of torch 2.8 does not trace
    return Topology(Matrix(shape, None, Blocks(*indices, block_size, run)), padded_offsets)  # type: ignore[call-arg]
