"""Matrix: what it holds, converts and refuses."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megablocks.ops.sparse import Blocks, Matrix, from_coordinates

ROWS, COLUMNS = torch.tensor([0, 0, 2, 2, 2]), torch.tensor([1, 3, 0, 1, 3])
SHAPE = (3 * 64, 4 * 64)


def made(num_blocks: int | None = None) -> Matrix:
    return from_coordinates(SHAPE, ROWS, COLUMNS, block_size=64, num_blocks=num_blocks)


def filled(num_blocks: int | None = None) -> Matrix:
    p = made(num_blocks)
    data = torch.arange(1.0, p.num_blocks + 1)[:, None, None] + torch.rand(p.num_blocks, 64, 64) / 2
    data[len(ROWS) :] = float("nan")
    return p.with_data(data)


def test_indices_of_a_pattern_by_hand() -> None:
    p = made(7).validate()
    assert p.blocks.row_indices.tolist() == [0, 0, 2, 2, 2, -1, -1]
    assert p.blocks.column_indices.tolist() == [1, 3, 0, 1, 3, -1, -1]
    assert p.blocks.offsets.tolist() == [0, 2, 2, 5]
    assert p.blocks.offsets_t.tolist() == [0, 1, 3, 3, 5]
    assert p.blocks.column_indices_t.tolist() == [2, 0, 2, 0, 2, -1, -1]
    assert p.blocks.block_offsets_t.tolist() == [2, 0, 3, 1, 4, -1, -1]
    assert p.blocks.row_work[:, :3].tolist() == [[2, 2, 5], [0, 0, 2], [1, 2, 2]]
    assert p.blocks.column_work[:, :3].tolist() == [[1, 1, 3], [3, 3, 5], [0, 0, 1], [2, 3, 3]]


@pytest.mark.parametrize("room", [5, 8])
def test_dense_and_back(room: int) -> None:
    m = filled(room)
    dense = m.to_dense()
    want = torch.zeros(3, 64, 4, 64)
    for i, (r, c) in enumerate(zip(ROWS.tolist(), COLUMNS.tolist(), strict=True)):
        want[r, :, c] = m.data[i]
    assert torch.equal(dense, want.view(SHAPE))
    assert torch.equal(m.t().to_dense(), dense.t()) and torch.equal(m.t().t().to_dense(), dense)
    back = Matrix.from_dense(dense, 64).validate()
    assert torch.equal(back.to_dense(), dense) and back.num_blocks == len(ROWS)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [64, 128, 256])
def test_dense_and_back_on_a_gpu(size: int) -> None:
    p = from_coordinates((3 * size, 4 * size), ROWS.cuda(), COLUMNS.cuda(), block_size=size, num_blocks=8).validate()
    data = torch.randn(8, size, size, device="cuda")
    data[5:] = float("nan")
    m = p.with_data(data)
    want = torch.zeros(3, size, 4, size, device="cuda")
    for i, (r, c) in enumerate(zip(ROWS.tolist(), COLUMNS.tolist(), strict=True)):
        want[r, :, c] = data[i]
    assert torch.equal(m.to_dense(), want.view(3 * size, 4 * size))
    back = Matrix.from_dense(m.to_dense(), size).validate()
    assert back.num_blocks == len(ROWS) and torch.equal(back.t().to_dense(), m.to_dense().t())


def test_dense_has_the_gradient_of_the_used_blocks_alone() -> None:
    m = filled(7)
    data = m.data.clone().requires_grad_()
    g = torch.randn(SHAPE)
    (got,) = torch.autograd.grad(m.with_data(data).to_dense(), data, g)
    blocks = g.view(3, 64, 4, 64).transpose(1, 2)
    assert torch.equal(got[:5], blocks[ROWS, COLUMNS]) and (got[5:] == 0).all()


class FakeStk:
    """stanford-stk's Matrix, as far as it is used."""

    def __init__(self, size: torch.Size, data: Tensor, *indices: Tensor) -> None:
        self._size, self.data, self._transposed = size, data, False
        self.row_indices, self.column_indices, self.offsets, *self.by_column = indices

    def size(self) -> torch.Size:
        return torch.Size(reversed(self._size)) if self._transposed else self._size

    def is_contiguous(self) -> bool:
        return not self._transposed

    def t(self) -> FakeStk:
        out = FakeStk(self._size, self.data, self.row_indices, self.column_indices, self.offsets, *self.by_column)
        out._transposed = not self._transposed
        return out


@pytest.mark.parametrize("transposed", [False, True])
def test_to_stk_and_back(monkeypatch: pytest.MonkeyPatch, transposed: bool) -> None:
    monkeypatch.setitem(sys.modules, "stk", SimpleNamespace(Matrix=FakeStk))
    m = filled(8)
    m = m.t() if transposed else m
    out = m.to_stk()
    assert out.data.shape[0] == len(ROWS) and out.row_indices.dtype == torch.int16
    assert tuple(out.size()) == m.shape
    back = Matrix.from_stk(out)
    assert back.transposed == transposed and torch.equal(back.to_dense(), m.to_dense())
    pattern = Matrix.from_stk(made().to_stk())
    assert pattern.data is None and torch.equal(pattern.blocks.row_indices, made().blocks.row_indices)


def test_without_stk_the_message_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "stk", None)
    with pytest.raises(ValueError, match="stanford-stk does not import .*install it"):
        filled().to_stk()


def spoil(name: str, place: int, value: int) -> Matrix:
    m = made(7)
    t = getattr(m.blocks, name).clone()
    t.view(-1)[place] = value
    return replace(m, blocks=m.blocks._replace(**{name: t}))


@pytest.mark.parametrize(
    "name,place,value,match",
    [
        ("row_indices", 5, 1, "row_indices does not describe 3x4 blocks in row order"),
        ("column_indices", 6, 0, "column_indices does not describe"),
        ("row_indices", 2, 1, "offsets does not describe"),
        ("column_indices", 1, 1, "each once, sorted by row and then column"),
        ("offsets", 1, 1, "offsets does not describe"),
        ("offsets_t", 1, 0, "offsets_t does not describe"),
        ("column_indices_t", 0, 0, "column_indices_t does not list the blocks"),
        ("block_offsets_t", 0, 0, "block_offsets_t does not list the blocks"),
        ("row_work", 0, 1, "row_work does not list every line once"),
        ("column_work", 2, 9, "column_work does not list every line once"),
    ],
)
def test_validate_names_what_is_inconsistent(name: str, place: int, value: int, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        spoil(name, place, value).validate()


def test_validate_checks_runs() -> None:
    side_by_side = from_coordinates(SHAPE, torch.tensor([1, 1]), torch.tensor([2, 3]), block_size=64)
    replace(side_by_side, blocks=side_by_side.blocks._replace(run=2)).validate()
    apart = from_coordinates(SHAPE, torch.tensor([1, 1]), torch.tensor([1, 3]), block_size=64)
    with pytest.raises(ValueError, match="run=2: not every 2 blocks stand side by side"):
        replace(apart, blocks=apart.blocks._replace(run=2)).validate()
    three = from_coordinates(SHAPE, torch.tensor([1, 1, 1]), torch.arange(3), block_size=64, num_blocks=4)
    with pytest.raises(ValueError, match="run=2: not every 2 blocks stand side by side"):
        replace(three, blocks=three.blocks._replace(run=2)).validate()


def _replaced(**changes: Any) -> Matrix:
    return replace(made(), blocks=made().blocks._replace(**changes))


@pytest.mark.parametrize(
    "make,match",
    [
        (lambda: _replaced(block_size=32), "block_size=32: must be one of 64, 128, 256"),
        (lambda: replace(made(), shape=(100, 256)), r"shape \(100, 256\): rows must be a multiple of block_size=64"),
        (lambda: replace(made(), shape=(192, 250)), "columns must be a multiple of block_size=64"),
        (
            lambda: _replaced(offsets=torch.zeros(9, dtype=torch.int32)),
            r"offsets is \(9,\) torch.int32 on cpu, must be",
        ),
        (lambda: _replaced(row_indices=ROWS), "row_indices is .* torch.int64 on cpu, must be .* torch.int32"),
        (lambda: _replaced(run=2), "run=2: must divide the 5 blocks"),
        (lambda: made().with_data(torch.zeros(4, 64, 64)), r"data is \(4, 64, 64\) .* must be \(5, 64, 64\) floating"),
        (lambda: made().with_data(torch.zeros(5, 64, 64, dtype=torch.int32)), "must be .* floating on cpu"),
        (lambda: made().dtype, "this Matrix is a pattern: it has no data and so no dtype"),
        (lambda: made().to_dense(), "to_dense: this Matrix is a pattern"),
        (lambda: Matrix.from_dense(torch.zeros(100, 64), 64), r"dense is \(100, 64\), must be 2-D"),
        (lambda: from_coordinates(SHAPE, ROWS.flip(0), COLUMNS, block_size=64), "blocks must lie in 3x4"),
        (lambda: from_coordinates(SHAPE, ROWS, COLUMNS + 2, block_size=64), "blocks must lie in 3x4"),
        (lambda: made(4), "num_blocks=4: must be at least the 5 blocks of the pattern"),
    ],
)
def test_refusals_name_the_field_and_what_is_allowed(make: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        make()


def test_an_empty_matrix() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    for shape in ((0, 128), (128, 0), (128, 128)):
        p = from_coordinates(shape, none, none, block_size=64).validate()
        dense = p.with_data(torch.zeros(0, 64, 64)).to_dense()
        assert dense.shape == shape and not dense.any()


def test_blocks_are_their_tensors_and_sizes() -> None:
    p = made()
    *indices, block_size, run = p.blocks  # as the ops save and restore them
    again = Blocks(*indices, block_size, run)
    assert all(a is b for a, b in zip(p.blocks, again, strict=True))
    Matrix(p.shape, None, again).validate()
