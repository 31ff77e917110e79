"""Kernels of megablocks.ops.adam, over its tables of addresses: one launch takes many tensors."""

# mypy: allow-untyped-defs

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megablocks.ops.adam import CHUNK, Table
from megablocks.ops.launch import quick

_BLOCK = 1024  # elements at once: 4 a thread, one read of 16 bytes; with 8 the copy would pass through shared memory
_WARPS = 8
COPIES: dict[torch.dtype | None, Any] = {
    None: None, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32
}  # fmt: skip


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
