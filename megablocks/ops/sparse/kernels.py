"""Triton kernels of the block-sparse products and of the topology, for every architecture and the interpreter.

    sdd    S[r, c] = A[r, :] · B[:, c]     one program per block (four for blocks of 256)
    spmm   O = S·D, Sᵀ·D, D·S or D·Sᵀ      one program per tile of a line (block row or block column of S)

Legend: B block size, T tile along a block (≤ 128), D tile along the dense operand, K step of the reduction.
Operands come with their strides, so a transpose costs no copy; offsets into them are 64-bit.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megablocks.ops.activation_triton import unary
from megablocks.ops.launch import cdiv, interpreted, next_power_of_2, quick

from .matrix import Blocks, empty_topology
from .products import NONE, Epilogue, empty_result, empty_values


@triton.jit
def _dot(a, b, acc, PRECISION: tl.constexpr, UPCAST: tl.constexpr):
    if UPCAST:  # the interpreter multiplies bfloat16 wrongly
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    elif PRECISION == "ieee":
        # float32 is summed in two levels, K at a time, as in cuBLAS: one chain of adds has three times its error.
        # The move prevents the compiler from folding the outer sum back into the product.
        part = tl.dot(a, b, input_precision=PRECISION)
        return acc + tl.inline_asm_elementwise("mov.f32 $0, $1;", "=f,f", [part], tl.float32, is_pure=True, pack=1)
    return tl.dot(a, b, acc, input_precision=PRECISION)


@quick
@triton.jit(do_not_specialize=["last"])
def _sdd_kernel(
    a_ptr, b_ptr, out_ptr, rows_ptr, cols_ptr, offsets_ptr, bias_ptr, pre_ptr, act_ptr, last, k_size,
    a_m, a_k, b_k, b_n,
    B: tl.constexpr, T: tl.constexpr, K: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
    NAME: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    PARTS: tl.constexpr = B // T
    pid = tl.program_id(0)
    block = pid // (PARTS * PARTS)
    if block >= tl.load(offsets_ptr + last):
        return
    m = pid % (PARTS * PARTS) // PARTS * T + tl.arange(0, T)
    n = pid % PARTS * T + tl.arange(0, T)
    k = tl.arange(0, K)
    row = tl.load(rows_ptr + block).to(tl.int64) * B
    col = tl.load(cols_ptr + block).to(tl.int64) * B
    a_at = a_ptr + (row + m)[:, None] * a_m + k[None, :].to(tl.int64) * a_k
    b_at = b_ptr + k[:, None].to(tl.int64) * b_k + (col + n)[None, :] * b_n
    acc = tl.zeros((T, T), tl.float32)
    for k0 in range(0, k_size, K):
        inside = k0 + k < k_size
        a = tl.load(a_at, mask=inside[None, :], other=0.0)
        b = tl.load(b_at, mask=inside[:, None], other=0.0)
        acc = _dot(a, b, acc, PRECISION, UPCAST)
        a_at += K * a_k
        b_at += K * b_k
    at = block.to(tl.int64) * (B * B) + m[:, None] * B + n[None, :]
    if act_ptr is not None:
        if bias_ptr is not None:
            acc += tl.load(bias_ptr + col + n).to(tl.float32)[None, :]
        # of the rounded value, as backward sees it
        value, _ = unary(acc.to(out_ptr.dtype.element_ty).to(tl.float32), NAME, EXACT)
        tl.store(act_ptr + at, value.to(act_ptr.dtype.element_ty))
    elif pre_ptr is not None:
        _, slope = unary(tl.load(pre_ptr + at).to(tl.float32), NAME, EXACT)
        acc *= slope
    tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty))


@quick
@triton.jit(do_not_specialize=["dense_tiles"])
def _spmm_kernel(
    data_ptr, dense_ptr, out_ptr, work_ptr, index_ptr, block_ptr, size, dense_tiles, dense_k, dense_d, out_l, out_d,
    B: tl.constexpr, T: tl.constexpr, D: tl.constexpr, K: tl.constexpr, LEFT: tl.constexpr, BY_COLUMN: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Strides of the dense operand along the reduction (dense_k) and the result (dense_d), of the result (out_*)."""
    PARTS: tl.constexpr = B // T
    STEPS: tl.constexpr = B // K
    ALONG: tl.constexpr = 1 if BY_COLUMN else B  # strides of a block along its line and along the reduction
    INNER: tl.constexpr = B if BY_COLUMN else 1
    pid = tl.program_id(0)
    part = pid // dense_tiles
    work = work_ptr + part // PARTS * 4
    line = tl.load(work).to(tl.int64)
    first = tl.load(work + 1)
    end = tl.load(work + 2)
    along = part % PARTS * T + tl.arange(0, T)
    d = pid % dense_tiles * D + tl.arange(0, D)
    k = tl.arange(0, K)
    in_dense = d < size
    dense_at = dense_ptr + d.to(tl.int64) * dense_d
    acc = tl.zeros((T, D) if LEFT else (D, T), tl.float32)
    # A block's index is loaded one step ahead: a load whose address is itself loaded gets a shorter pipeline.
    next_other = tl.load(index_ptr + first, mask=first < end, other=0)
    next_block = tl.load(block_ptr + first, mask=first < end, other=0) if BY_COLUMN else first
    for i in range(first * STEPS, end * STEPS):
        inner = i % STEPS * K + k
        other = (next_other * B + inner).to(tl.int64) * dense_k
        values = data_ptr + next_block.to(tl.int64) * (B * B)
        following = (i + 1) // STEPS
        next_other = tl.load(index_ptr + following, mask=following < end, other=0)
        next_block = tl.load(block_ptr + following, mask=following < end, other=0) if BY_COLUMN else following
        if LEFT:
            s = tl.load(values + along[:, None] * ALONG + inner[None, :] * INNER)
            x = tl.load(dense_at[None, :] + other[:, None], mask=in_dense[None, :], other=0.0)
            acc = _dot(s, x, acc, PRECISION, UPCAST)
        else:
            s = tl.load(values + inner[:, None] * INNER + along[None, :] * ALONG)
            x = tl.load(dense_at[:, None] + other[None, :], mask=in_dense[:, None], other=0.0)
            acc = _dot(x, s, acc, PRECISION, UPCAST)
    out_line = (line * B + along) * out_l
    if LEFT:
        out_at = out_ptr + out_line[:, None] + d.to(tl.int64)[None, :] * out_d
        tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=in_dense[None, :])
    else:
        out_at = out_ptr + out_line[None, :] + d.to(tl.int64)[:, None] * out_d
        tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=in_dense[:, None])


@quick
@triton.jit(do_not_specialize=["block_rows"])
def _topology_kernel(
    expert_offsets, padded_offsets, row_indices, column_indices, offsets, column_indices_t, offsets_t, block_offsets_t,
    row_work, column_work, block_rows,
    E: tl.constexpr, F: tl.constexpr, B: tl.constexpr, E_POW2: tl.constexpr, F_POW2: tl.constexpr,
):  # fmt: skip
    """One program a block row, then one an expert; F blocks a row. Each repeats the prefix sum over experts."""
    pid = tl.program_id(0)
    e = tl.arange(0, E_POW2)
    real = e < E
    rows = tl.load(expert_offsets + e + 1, mask=real, other=0) - tl.load(expert_offsets + e, mask=real, other=0)
    ends = tl.minimum(tl.cumsum((rows + B - 1) // B, 0), block_rows)
    used = tl.max(ends, 0)
    j = tl.arange(0, F_POW2)
    in_row = j < F
    if pid < block_rows:
        expert = tl.sum((real & (ends <= pid)).to(tl.int32), 0)
        start = tl.max(tl.where(ends <= pid, ends, 0), 0)
        end = tl.sum(tl.where(e == expert, ends, 0), 0)
        blocks = pid * F + j
        is_used = pid < used
        # a used row writes the transpose entries of its own blocks, an unused row those at its own place past the end
        entry = tl.where(is_used, start * F + j * (end - start) + pid - start, blocks)
        tl.store(row_indices + blocks, tl.where(is_used, pid, -1), mask=in_row)
        tl.store(column_indices + blocks, tl.where(is_used, expert * F + j, -1), mask=in_row)
        tl.store(column_indices_t + entry, tl.where(is_used, pid, -1), mask=in_row)
        tl.store(block_offsets_t + entry, tl.where(is_used, blocks, -1), mask=in_row)
        first = tl.minimum(pid, used) * F
        last = tl.minimum(pid + 1, used) * F
        tl.store(offsets + pid + 1, last)
        if pid == 0:
            tl.store(offsets, 0)
        _store_work(row_work + 4 * pid, pid, first, last, first >= 0)
    else:
        mine = pid - block_rows
        stop = tl.sum(tl.where(e == mine, ends, 0), 0)
        begin = tl.max(tl.where(e < mine, ends, 0), 0)
        heights = ends - tl.minimum(tl.cumsum((rows + B - 1) // B, 0) - (rows + B - 1) // B, block_rows)
        height = stop - begin
        # longest first, equal ones in order
        rank = tl.sum((real & ((heights > height) | ((heights == height) & (e < mine)))).to(tl.int32), 0)
        entries = begin * F + j * height
        tl.store(offsets_t + mine * F + j, entries, mask=in_row)
        _store_work(column_work + 4 * (rank * F + j), mine * F + j, entries, entries + height, in_row)
        tl.store(padded_offsets + mine + 1, stop * B)
        if mine == 0:
            tl.store(padded_offsets, 0)
        if mine == E - 1:
            tl.store(offsets_t + E * F, used * F)
            if block_rows == 0:
                tl.store(offsets, 0)


@triton.jit
def _store_work(at, line, first, last, mask):
    tl.store(at, line, mask=mask)
    tl.store(at + 1, first, mask=mask)
    tl.store(at + 2, last, mask=mask)
    tl.store(at + 3, 0, mask=mask)


def topology_launch(expert_offsets: Tensor, blocks_per_row: int, block_rows: int, block_size: int) -> list[Tensor]:
    """Like `topology_ref`; one launch."""
    experts, out = expert_offsets.shape[0] - 1, empty_topology(expert_offsets, blocks_per_row, block_rows)
    _topology_kernel[(block_rows + experts,)](
        expert_offsets, *out, block_rows,
        E=experts, F=blocks_per_row, B=block_size,
        E_POW2=next_power_of_2(experts), F_POW2=next_power_of_2(blocks_per_row), num_warps=1,
    )  # fmt: skip
    return out


def _settings(t: Tensor, block_size: int) -> dict[str, Any]:
    """Tile sizes and launch options: three stages of a 128 × 128 tile need 96 KiB, which every architecture has."""
    tile = min(block_size, 128)
    wide = t.dtype == torch.float32
    precision = "ieee" if wide and torch.get_float32_matmul_precision() == "highest" else "tf32"
    return dict(
        B=block_size, T=tile, K=32 if wide else 64, PRECISION=precision, UPCAST=interpreted(),
        num_warps=8 if tile == 128 else 4, num_stages=3,
    )  # fmt: skip


def sdd(a: Tensor, b: Tensor, blocks: Blocks, epilogue: Epilogue = NONE) -> Tensor:
    """Values (n, B, B) of a (M, K) · b (K, N) at the used blocks. Unused blocks are not written."""
    out, e = empty_values(blocks, a), epilogue
    if out.numel():
        settings = _settings(a, blocks.block_size)
        _sdd_kernel[(out.shape[0] * (blocks.block_size // settings["T"]) ** 2,)](
            a, b, out, blocks.row_indices, blocks.column_indices, blocks.offsets, e.bias, e.pre, e.act,
            blocks.offsets.shape[0] - 1, a.shape[1], *a.stride(), *b.stride(),
            NAME=e.activation.unary, EXACT=e.activation.exact, **settings,
        )  # fmt: skip
    return out


def spmm(
    data: Tensor, dense: Tensor, work: Tensor, index: Tensor, block_offsets: Tensor | None, sparse_left: bool
) -> Tensor:
    """S·D, Sᵀ·D, D·S or D·Sᵀ; arguments as hopper.spmm, for blocks (n, B, B)."""
    block_size, lines = data.shape[-1], work.shape[0]
    size = dense.shape[1] if sparse_left else dense.shape[0]
    out = empty_result(data, dense, lines * block_size, sparse_left)
    if out.numel():
        settings = _settings(data, block_size)
        tile = 64 if size <= 64 else 128
        dense_tiles = cdiv(size, tile)
        _spmm_kernel[(lines * (block_size // settings["T"]) * dense_tiles,)](
            data, dense, out, work, index, index if block_offsets is None else block_offsets, size, dense_tiles,
            *(dense.stride() if sparse_left else dense.stride()[::-1]),
            *(out.stride() if sparse_left else out.stride()[::-1]),
            D=tile, LEFT=sparse_left, BY_COLUMN=block_offsets is not None, **settings,
        )  # fmt: skip
    return out
