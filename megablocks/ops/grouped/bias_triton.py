"""Triton kernels of the experts' biases, one pass over the rows each.

add         y[p] = rows[p] + bias[e]
expert sum  out[e] = Σ rows of e, in float32: a program adds an expert's rows in order, so reruns are bit-identical
            or, from dY of the tokens, Σ weight · dY over the rows of e
expert dot  d_weight[pair[p]] = ⟨dY[gather[p]], bias[e]⟩
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megablocks.ops.launch import cdiv, next_power_of_2, quick
from megablocks.ops.routing.dispatch import Dispatch


@triton.jit
def _expert_of(offsets_ptr, row, experts, LANES: tl.constexpr):
    """The experts whose rows end before each row: its expert, or `experts` behind the last one's rows."""
    lane = tl.arange(0, LANES)
    ends = tl.load(offsets_ptr + 1 + lane, mask=lane < experts, other=2147483647)
    return tl.sum((ends[None, :] <= row[:, None]).to(tl.int32), 1)


@quick
@triton.jit(do_not_specialize=["num_rows"])
def _add_bias_kernel(
    rows_ptr, bias_ptr, y_ptr, offsets_ptr, experts, num_rows, N, row_stride, bias_stride,
    LANES: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    expert = _expert_of(offsets_ptr, row, experts, LANES)
    mask = (expert < experts)[:, None] & (row < num_rows)[:, None] & (n < N)[None, :]
    value = tl.load(rows_ptr + row[:, None] * row_stride + n[None, :], mask=mask, other=0).to(tl.float32)
    value += tl.load(bias_ptr + expert[:, None] * bias_stride + n[None, :], mask=mask, other=0).to(tl.float32)
    tl.store(y_ptr + row[:, None] * N + n[None, :], value.to(y_ptr.dtype.element_ty), mask=mask)


@quick
@triton.jit
def _expert_sum_kernel(
    rows_ptr, weight_ptr, out_ptr, offsets_ptr, gather_ptr, pair_ptr, N, row_stride,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(0)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    first = tl.load(offsets_ptr + expert).to(tl.int64)
    end = tl.load(offsets_ptr + expert + 1).to(tl.int64)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(first, end, ROWS):
        row = start + tl.arange(0, ROWS)
        live = row < end
        mask = live[:, None] & (n < N)[None, :]
        if gather_ptr is not None:
            pair = tl.load(pair_ptr + row, mask=live, other=0)
            weight = tl.load(weight_ptr + pair, mask=live, other=0).to(tl.float32)
            row = tl.load(gather_ptr + row, mask=live, other=0).to(tl.int64)
        value = tl.load(rows_ptr + row[:, None] * row_stride + n[None, :], mask=mask, other=0).to(tl.float32)
        total += value * weight[:, None] if gather_ptr is not None else value
    tl.store(out_ptr + expert.to(tl.int64) * N + n, tl.sum(total, 0), mask=n < N)


@quick
@triton.jit(do_not_specialize=["num_rows"])
def _expert_dot_kernel(
    dy_ptr, bias_ptr, d_weight_ptr, offsets_ptr, gather_ptr, pair_ptr, experts, num_rows, N, dy_stride,
    LANES: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    expert = _expert_of(offsets_ptr, row, experts, LANES)
    live = (expert < experts) & (row < num_rows)
    token = tl.load(gather_ptr + row, mask=live, other=0).to(tl.int64)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(0, N, BLOCK):
        n = start + tl.arange(0, BLOCK)
        mask = live[:, None] & (n < N)[None, :]
        value = tl.load(dy_ptr + token[:, None] * dy_stride + n[None, :], mask=mask, other=0).to(tl.float32)
        total += value * tl.load(bias_ptr + expert[:, None] * N + n[None, :], mask=mask, other=0).to(tl.float32)
    tl.store(d_weight_ptr + tl.load(pair_ptr + row, mask=live, other=0), tl.sum(total, 1), mask=live)


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


def expert_sum_launch(
    rows: Tensor, offsets: Tensor, weight: Tensor | None = None, gather: Tensor | None = None,
    pair: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Like `expert_sum_ref`; one launch."""
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    weight = None if weight is None else weight.contiguous()
    width, experts = rows.shape[1], offsets.shape[0] - 1
    out = torch.empty(experts, width, dtype=torch.float32, device=rows.device)
    if out.numel():
        _expert_sum_kernel[(experts, cdiv(width, 64))](
            rows, weight, out, offsets, gather, pair, width, rows.stride(0), ROWS=64, BLOCK=64, num_warps=4
        )
    return out


def output_bias_dot_launch(dy: Tensor, bias: Tensor, dispatch: Dispatch) -> Tensor:
    """dy (T, N), bias (E, N) → (R,) float32, 0 for an unused pair; one launch and one fill."""
    dy, bias = dy if dy.stride(1) == 1 else dy.contiguous(), bias.contiguous()
    (experts, width), num_rows = bias.shape, dispatch.num_rows
    d_weight = torch.zeros(dispatch.num_pairs, dtype=torch.float32, device=dy.device)
    if num_rows and width and dy.shape[0]:
        block = min(next_power_of_2(width), 256)
        _expert_dot_kernel[(cdiv(num_rows, 16),)](
            dy, bias, d_weight, dispatch.expert_offsets, dispatch.gather, dispatch.pair, experts, num_rows, width,
            dy.stride(0), LANES=next_power_of_2(experts), ROWS=16, BLOCK=block, num_warps=4,
        )  # fmt: skip
    return d_weight
