"""Triton kernels of the experts' biases, one pass over the rows each.

add         y[p] = rows[p] + bias[e]
expert sum  out[e] = Σ rows of e, in float32: a program walks an expert's rows in order, so reruns are bit-identical
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megablocks.ops.launch import cdiv, next_power_of_2, quick


@quick
@triton.jit(do_not_specialize=["num_rows"])
def _add_bias_kernel(
    rows_ptr, bias_ptr, y_ptr, offsets_ptr, experts, num_rows, N, row_stride, bias_stride,
    LANES: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    lane = tl.arange(0, LANES)
    ends = tl.load(offsets_ptr + 1 + lane, mask=lane < experts, other=2147483647)
    expert = tl.sum((ends[None, :] <= row[:, None]).to(tl.int32), 1)  # experts whose rows end before this one
    mask = (expert < experts)[:, None] & (row < num_rows)[:, None] & (n < N)[None, :]
    value = tl.load(rows_ptr + row[:, None] * row_stride + n[None, :], mask=mask, other=0).to(tl.float32)
    value += tl.load(bias_ptr + expert[:, None] * bias_stride + n[None, :], mask=mask, other=0).to(tl.float32)
    tl.store(y_ptr + row[:, None] * N + n[None, :], value.to(y_ptr.dtype.element_ty), mask=mask)


@quick
@triton.jit
def _expert_sum_kernel(rows_ptr, out_ptr, offsets_ptr, N, row_stride, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    expert = tl.program_id(0)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    first = tl.load(offsets_ptr + expert).to(tl.int64)
    end = tl.load(offsets_ptr + expert + 1).to(tl.int64)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(first, end, ROWS):
        row = start + tl.arange(0, ROWS)
        mask = (row < end)[:, None] & (n < N)[None, :]
        total += tl.load(rows_ptr + row[:, None] * row_stride + n[None, :], mask=mask, other=0).to(tl.float32)
    tl.store(out_ptr + expert.to(tl.int64) * N + n, tl.sum(total, 0), mask=n < N)


def add_expert_bias_launch(rows: Tensor, bias: Tensor, offsets: Tensor) -> Tensor:
    """rows (R, N), bias (E, N) → (R, N); one launch. Rows from offsets[E] on are not written."""
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    bias = bias if bias.stride(1) == 1 else bias.contiguous()
    (num_rows, width), experts = rows.shape, bias.shape[0]
    y = rows.new_empty(num_rows, width)
    if y.numel():
        block = min(next_power_of_2(width), 256)
        _add_bias_kernel[(cdiv(num_rows, 16), cdiv(width, block))](
            rows, bias, y, offsets, experts, num_rows, width, rows.stride(0), bias.stride(0),
            LANES=next_power_of_2(experts), ROWS=16, BLOCK=block, num_warps=4,
        )  # fmt: skip
    return y


def expert_sum_launch(rows: Tensor, offsets: Tensor) -> Tensor:
    """rows (R, N) → (E, N) float32; one launch."""
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    width, experts = rows.shape[1], offsets.shape[0] - 1
    out = torch.empty(experts, width, dtype=torch.float32, device=rows.device)
    if out.numel():
        _expert_sum_kernel[(experts, cdiv(width, 64))](
            rows, out, offsets, width, rows.stride(0), ROWS=64, BLOCK=64, num_warps=4
        )
    return out
