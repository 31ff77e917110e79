"""Block-sparse matrices: blocked CSR with the row indices written out, and an index of the transpose.

Legend: B block size, n blocks (static: the room in `data`), u ≤ n used blocks, block row = B rows, block column alike.

Blocks stand in row order. `offsets` says which belong to a block row (CSR), `row_indices` and `column_indices` where
each one stands (COO, so that a product with a sparse result needs one program a block and no search). The transpose is
an index alone: `block_offsets_t` lists the same blocks in column order, values never move (Gale et al., MegaBlocks,
arXiv 2211.15841, section 5.1.2). Blocks from offsets[-1] on are room that the pattern does not use: their row and
column are −1 and no kernel reads their values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

BLOCK_SIZES = (64, 128, 256)
# A longer matrix would need wider metadata; its blocks alone would fill 64 GiB per column of blocks.
_MAX_SIDE = 2**31 - 1


@dataclass(frozen=True, eq=False)
class Matrix:
    """A block-sparse matrix, or with data=None a pattern of blocks. `.t()` is a view.

    shape: (rows, columns), multiples of block_size; swapped when `transposed`.
    data: (n, B, B) floating, differentiable, or None.
    row_indices, column_indices: (n,) int32, −1 for unused blocks; columns ascend within a row.
    offsets: (block rows + 1,) int32; blocks [offsets[i], offsets[i+1]) stand in block row i.
    column_indices_t: (n,) int32: block rows in column order. block_offsets_t: (n,) int32: positions in `data`.
    offsets_t: (block columns + 1,) int32, into the two above.
    row_work, column_work: (lines, 4) int32: line, first, end, 0. The lines in the order in which kernels take them up:
        longest first, so that the short ones even out what the long ones left.
    run: every aligned group of `run` blocks stands side by side in one row; 1 promises nothing.

    The six indices always describe the stored matrix, not the transposed view; the names are stanford-stk's.

    Raises:
        ValueError: a shape, dtype or device that does not fit. Contents are checked by `validate`.
    """

    shape: tuple[int, int]
    data: Tensor | None
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
    transposed: bool = False

    def __post_init__(self) -> None:
        size = self.block_size
        if size not in BLOCK_SIZES:
            raise ValueError(f"block_size={size}: must be one of {', '.join(map(str, BLOCK_SIZES))}")
        for name, side in zip(("rows", "columns"), self.shape, strict=True):
            if side % size or not 0 <= side <= _MAX_SIDE:
                raise ValueError(f"shape {tuple(self.shape)}: {name} must be a multiple of block_size={size}")
        block_rows, block_columns = self.stored_grid
        n = self.num_blocks
        wanted = {
            "row_indices": (n,), "column_indices": (n,), "offsets": (block_rows + 1,), "column_indices_t": (n,),
            "offsets_t": (block_columns + 1,), "block_offsets_t": (n,), "row_work": (block_rows, 4),
            "column_work": (block_columns, 4),
        }  # fmt: skip
        for name, shape in wanted.items():
            t = getattr(self, name)
            if t.dtype != torch.int32 or tuple(t.shape) != shape or t.device != self.device:
                raise ValueError(
                    f"{name} is {tuple(t.shape)} {t.dtype} on {t.device}, must be {shape} torch.int32 on {self.device}"
                )
        if self.run < 1 or n % self.run:
            raise ValueError(f"run={self.run}: must divide the {n} blocks")
        if self.data is not None:
            _check_data(self.data, (n, size, size), self.device)

    @property
    def device(self) -> torch.device:
        return self.offsets.device

    @property
    def dtype(self) -> torch.dtype:
        if self.data is None:
            raise ValueError("this Matrix is a pattern: it has no data and so no dtype")
        return self.data.dtype

    @property
    def num_blocks(self) -> int:
        """Blocks that `data` has room for; how many are used is offsets[-1], known on the device only."""
        return self.row_indices.shape[0]

    @property
    def stored_grid(self) -> tuple[int, int]:
        """Block rows and block columns as stored, whatever `transposed` says."""
        rows, columns = (side // self.block_size for side in self.shape)
        return (columns, rows) if self.transposed else (rows, columns)

    @property
    def indices(self) -> tuple[Tensor, ...]:
        """The eight index tensors, in the order of the fields."""
        return (
            self.row_indices, self.column_indices, self.offsets, self.column_indices_t, self.offsets_t,
            self.block_offsets_t, self.row_work, self.column_work,
        )  # fmt: skip

    def t(self) -> Matrix:
        """The transpose, as a view: same data and indices."""
        return replace(self, shape=(self.shape[1], self.shape[0]), transposed=not self.transposed)

    def with_data(self, data: Tensor | None) -> Matrix:
        """The same pattern around other values (n, B, B)."""
        return replace(self, data=data)

    def to_dense(self) -> Tensor:
        """(rows, columns) in data's dtype, zero where there is no block; differentiable, no host synchronisation."""
        if self.data is None:
            raise ValueError("to_dense: this Matrix is a pattern, give it values with with_data")
        (block_rows, block_columns), size = self.stored_grid, self.block_size
        used = self.row_indices >= 0
        # unused blocks go to a spare place; their contents may be anything, NaN included
        spare = block_rows * block_columns
        place = torch.where(used, self.row_indices.long() * block_columns + self.column_indices, spare)
        values = torch.where(used[:, None, None], self.data, torch.zeros((), dtype=self.dtype, device=self.device))
        blocks = values.new_zeros(spare + 1, size, size).index_copy(0, place, values)
        dense = blocks[:-1].view(block_rows, block_columns, size, size).transpose(1, 2)
        dense = dense.reshape(block_rows * size, block_columns * size)
        return dense.t() if self.transposed else dense

    def validate(self) -> Matrix:
        """Check the contents of the indices; synchronises with the host.

        Raises:
            ValueError: the first inconsistency found.
        """
        block_rows, block_columns = self.stored_grid
        want = from_coordinates(
            (block_rows * self.block_size, block_columns * self.block_size),
            *(t[: int(self.offsets[-1])].clamp(min=0) for t in (self.row_indices, self.column_indices)),
            block_size=self.block_size,
            num_blocks=self.num_blocks,
        )
        for name in ("row_indices", "column_indices", "offsets", "offsets_t"):
            if not torch.equal(getattr(self, name), getattr(want, name)):
                raise ValueError(f"{name} does not describe {block_rows}x{block_columns} blocks in row order")
        used = int(self.offsets[-1])
        for name in ("column_indices_t", "block_offsets_t"):
            if not torch.equal(getattr(self, name)[:used], getattr(want, name)[:used]):
                raise ValueError(f"{name} does not list the blocks of row_indices and column_indices in column order")
        for name, offsets in (("row_work", self.offsets), ("column_work", self.offsets_t)):
            work = getattr(self, name)[getattr(self, name)[:, 0].argsort()]
            lines = torch.arange(len(work), dtype=torch.int32, device=self.device)
            if not torch.equal(work[:, :3], torch.stack([lines, offsets[:-1], offsets[1:]], 1)):
                raise ValueError(f"{name} does not list every line once with its first and end block")
        rows, columns = (t[:used].view(-1, self.run) for t in (self.row_indices, self.column_indices))
        side_by_side = columns[:, :1] + torch.arange(self.run, device=self.device)
        if used % self.run or not ((rows == rows[:, :1]).all() and (columns == side_by_side).all()):
            raise ValueError(f"run={self.run}: not every {self.run} blocks stand side by side in one row")
        return self

    def to_stk(self) -> Any:
        """An `stk.Matrix` of the used blocks (needs stanford-stk; synchronises with the host).

        Raises:
            ValueError: stanford-stk is not installed or does not import.
        """
        stk = _stk()
        used = int(self.offsets[-1])
        size = torch.Size(side * self.block_size for side in self.stored_grid)
        narrow = torch.int16 if max(self.stored_grid) < 2**15 else torch.int32
        no_data = torch.empty(used, self.block_size, self.block_size, device="meta")
        data = no_data if self.data is None else self.data[:used]
        rows, columns, columns_t = (
            t[:used].to(narrow) for t in (self.row_indices, self.column_indices, self.column_indices_t)
        )
        by_column = columns_t, self.offsets_t, self.block_offsets_t[:used]
        out = stk.Matrix(size, data, rows, columns, self.offsets, *by_column)
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
        """The blocks of `dense` (rows, columns) that hold a nonzero; synchronises with the host.

        Raises:
            ValueError: `dense` is no matrix or its sides are no multiples of block_size.
        """
        if dense.dim() != 2 or dense.shape[0] % block_size or dense.shape[1] % block_size:
            raise ValueError(f"dense is {tuple(dense.shape)}, must be 2-D, its sides multiples of {block_size}")
        rows, columns = (side // block_size for side in dense.shape)
        blocks = dense.reshape(rows, block_size, columns, block_size).transpose(1, 2)
        place = (blocks != 0).any(-1).any(-1).nonzero()
        out = from_coordinates((dense.shape[0], dense.shape[1]), place[:, 0], place[:, 1], block_size=block_size)
        return out.with_data(blocks[place[:, 0], place[:, 1]].contiguous())


def from_indices(shape: tuple[int, int], indices: Sequence[Tensor], *, block_size: int = 128, run: int = 1) -> Matrix:
    """The pattern whose `Matrix.indices` these are."""
    rows, columns, offsets, columns_t, offsets_t, block_offsets_t, row_work, column_work = indices
    return Matrix(
        shape,
        None,
        rows,
        columns,
        offsets,
        columns_t,
        offsets_t,
        block_offsets_t,
        row_work,
        column_work,
        block_size,
        run,
    )


def from_coordinates(
    shape: tuple[int, int], rows: Tensor, columns: Tensor, *, block_size: int = 128, num_blocks: int | None = None
) -> Matrix:
    """The pattern with blocks at (rows[i], columns[i]), in that order of `data`.

    Args:
        rows, columns: (u,) integer block coordinates, sorted by row, then column, each at most once.
        num_blocks: room in `data`, ≥ u; default u.

    Raises:
        ValueError: unsorted, repeated or outside the shape (checking synchronises with the host).
    """
    block_rows, block_columns = (side // block_size for side in shape)
    rows, columns, device = rows.long(), columns.long(), rows.device
    used, room = rows.numel(), rows.numel() if num_blocks is None else num_blocks
    place = rows * block_columns + columns
    inside = (rows >= 0) & (rows < block_rows) & (columns >= 0) & (columns < block_columns)
    if used and not (bool(inside.all()) and bool((place.diff() > 0).all())):
        raise ValueError(f"blocks must lie in {block_rows}x{block_columns}, each once, sorted by row and then column")
    if room < used:
        raise ValueError(f"num_blocks={room}: must be at least the {used} blocks of the pattern")

    def offsets(line: Tensor, lines: int) -> Tensor:
        out = torch.zeros(lines + 1, dtype=torch.int32, device=device)
        out[1:] = torch.bincount(line, minlength=lines).cumsum(0)
        return out

    def padded(t: Tensor) -> Tensor:
        return torch.cat([t.int(), torch.full((room - used,), -1, dtype=torch.int32, device=device)])

    by_row, by_column = offsets(rows, block_rows), offsets(columns, block_columns)
    order = torch.sort(columns, stable=True).indices
    return Matrix(
        shape, None, padded(rows), padded(columns), by_row, padded(rows[order]), by_column, padded(order),
        _work(by_row), _work(by_column), block_size,
    )  # fmt: skip


def _work(offsets: Tensor) -> Tensor:
    longest_first = torch.sort(offsets.diff(), descending=True, stable=True).indices
    columns = [longest_first.int(), offsets[:-1][longest_first], offsets[1:][longest_first]]
    return torch.stack([*columns, torch.zeros_like(columns[0])], 1).contiguous()


def _check_data(data: Tensor, shape: tuple[int, int, int], device: torch.device) -> None:
    if tuple(data.shape) != shape or data.device != device or not data.dtype.is_floating_point:
        raise ValueError(
            f"data is {tuple(data.shape)} {data.dtype} on {data.device}, must be {shape} floating on {device}"
        )


def _stk() -> Any:
    try:
        import stk  # type: ignore[import-not-found, unused-ignore]
    except Exception as error:  # its kernels do not import with every Triton
        raise ValueError(f"stanford-stk does not import ({error}): install it to convert matrices") from error
    return stk
