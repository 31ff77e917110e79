"""Kernels of megablocks.ops.adam, over tables of addresses: one launch takes many tensors.

A table (tensors, columns) int64 holds a tensor in a row: its size, then addresses. A program takes one chunk of one
tensor; `chunks` (programs, 2) int32 names the row and the chunk.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megablocks.ops.launch import quick

CHUNK = 16384
_BLOCK = 1024  # elements at once: 4 a thread, one read of 16 bytes; with 8 the copy would pass through shared memory
_WARPS = 8
ALIGNMENT = 16
"""Bytes. Where all addresses, and the size in elements, are multiples of it, a thread reads 16 bytes at once."""
COPIES: dict[torch.dtype | None, Any] = {
    None: None, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32
}  # fmt: skip


class Item(NamedTuple):
    """One tensor's row in a table. Tensors of one kind share a launch."""

    kind: Hashable
    numbers: tuple[int, ...]  # the size first


class Table(NamedTuple):
    kind: Any
    rows: Tensor
    chunks: Tensor


class Tables:
    """Tables of addresses on the device. They are made again when any size, address or kind differs from the last."""

    def __init__(self) -> None:
        self._items: Sequence[Item] = ()
        self._tables: list[Table] = []

    def of(self, items: list[Item], device: torch.device) -> list[Table]:
        """The tables of these parameters, one for each kind; made anew only where an address changed."""
        if items != self._items:
            kinds: dict[Hashable, list[tuple[int, ...]]] = {}
            for kind, numbers in items:
                if numbers[0]:
                    kinds.setdefault(kind, []).append(numbers)
            self._tables = [_table(kind, rows, device) for kind, rows in kinds.items()]
            self._items = items
        return self._tables


def _table(kind: Hashable, rows: list[tuple[int, ...]], device: torch.device) -> Table:
    """rows: sizes and addresses of parameters of one kind → the table, with a line for each chunk of a parameter."""
    table = torch.tensor(rows, dtype=torch.int64)
    count = (table[:, 0] + CHUNK - 1) // CHUNK
    row = torch.repeat_interleave(torch.arange(len(rows)), count)
    chunk = torch.arange(len(row)) - (count.cumsum(0) - count)[row]
    return Table(kind, to_device(table, device), to_device(torch.stack([row, chunk], 1).int(), device))


def to_device(t: Tensor, device: torch.device) -> Tensor:
    """Copy from the host without waiting for the GPU."""
    return t.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else t


@triton.jit
def _address(row_ptr, column, first, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    at = tl.load(row_ptr + column).to(tl.pointer_type(TYPE)) + first
    return tl.multiple_of(at, 16) if ALIGNED else at


@triton.jit
def _place(table_ptr, chunks_ptr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr, ALIGNED: tl.constexpr):
    """A program's row of the table, the first element of its chunk, and how many elements the chunk has."""
    at = chunks_ptr + tl.program_id(0).to(tl.int64) * 2
    row_ptr = table_ptr + tl.load(at).to(tl.int64) * COLUMNS
    first = tl.load(at + 1).to(tl.int64) * CHUNK
    left = tl.minimum(tl.load(row_ptr) - first, CHUNK).to(tl.int32)
    return row_ptr, first, tl.multiple_of(left, 16) if ALIGNED else left


@quick
@triton.jit
def _adam_kernel(
    table_ptr, chunks_ptr, scalars_ptr, scale_ptr,
    COPY: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row_ptr, first, left = _place(table_ptr, chunks_ptr, 7, CHUNK, ALIGNED)
    s = scalars_ptr + tl.load(row_ptr + 1) * 8
    p_ptr = _address(row_ptr, 2, first, tl.float32, ALIGNED)
    g_ptr = _address(row_ptr, 3, first, tl.float32, ALIGNED)
    m_ptr = _address(row_ptr, 4, first, tl.float32, ALIGNED)
    v_ptr = _address(row_ptr, 5, first, tl.float32, ALIGNED)
    if COPY is not None:
        copy_ptr = _address(row_ptr, 6, first, COPY, ALIGNED)
    share1, beta2, share2, l2 = tl.load(s), tl.load(s + 1), tl.load(s + 2), tl.load(s + 3)
    decay, rate, root, eps = tl.load(s + 4), tl.load(s + 5), tl.load(s + 6), tl.load(s + 7)
    scale = tl.load(scale_ptr)
    left = tl.where(scale == scale, left, 0)  # a NaN leaves everything as it is
    for start in range(0, left, BLOCK):
        i = start + tl.arange(0, BLOCK)
        live = i < left
        g = tl.load(g_ptr + i, mask=live)
        m = tl.load(m_ptr + i, mask=live)
        v = tl.load(v_ptr + i, mask=live)
        p = tl.load(p_ptr + i, mask=live)
        g = g * scale + l2 * p
        m += share1 * (g - m)
        v = beta2 * v + share2 * g * g
        p = p * decay - rate * tl.div_rn(m, tl.sqrt_rn(v) * root + eps)
        tl.store(m_ptr + i, m, mask=live)
        tl.store(v_ptr + i, v, mask=live)
        tl.store(p_ptr + i, p, mask=live)
        if COPY is not None:
            tl.store(copy_ptr + i, p.to(COPY), mask=live)


@quick
@triton.jit
def _square_sum_kernel(table_ptr, chunks_ptr, out_ptr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    row_ptr, first, left = _place(table_ptr, chunks_ptr, 2, CHUNK, ALIGNED)
    x_ptr = _address(row_ptr, 1, first, tl.float32, ALIGNED)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, left, BLOCK):
        i = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + i, mask=i < left, other=0.0)
        total += x * x
    tl.store(out_ptr + tl.program_id(0), tl.sum(total.to(tl.float64)))


def _options(aligned: bool) -> dict[str, Any]:
    return {"ALIGNED": aligned, "CHUNK": CHUNK, "BLOCK": _BLOCK, "num_warps": _WARPS}


def adam_launch(tables: list[Table], scalars: Tensor, scale: Tensor) -> None:
    """One launch for each kind (dtype of the copy, aligned). Columns: size, row of `scalars`, p, g, m, v, copy."""
    with torch.cuda.device_of(scalars):
        for (copy, aligned), rows, chunks in tables:
            _adam_kernel[(len(chunks),)](rows, chunks, scalars, scale, COPY=COPIES[copy], **_options(aligned))


def square_sum_launch(tables: list[Table], device: torch.device) -> Tensor:
    """The sum of all squares, () float64; one launch for each kind (aligned) and one sum. Columns: size, x."""
    partial = torch.empty(sum(len(t.chunks) for t in tables), dtype=torch.float64, device=device)
    done = 0
    with torch.cuda.device_of(partial):
        for aligned, rows, chunks in tables:
            out = partial[done : done + len(chunks)]
            _square_sum_kernel[(len(chunks),)](rows, chunks, out, **_options(aligned))
            done += len(chunks)
    return partial.sum()
