"""Triton kernel of `pair_mm`: one launch, no sorting, each expert's weights read once.

A program has a pair p and a block of columns. Where p is the first pair of its expert, the program computes these
columns for all pairs of that expert, 16 at a time; else it ends. So the grid has no expert without a pair. It finds the
pairs by comparing all ids, 2 KB that the caches hold, with its own.

Bytes: the weights of the experts that have a pair, once. They bound it up to about 100 pairs an expert.
"""

# mypy: allow-untyped-defs
# (device code takes what Triton passes at compile time)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megablocks.ops.launch import cdiv, quick

_ROWS = 16  # of a tile: what the tensor cores take at least
_SIZES = (64, 512)  # of the vector of ids


@quick
@triton.jit(do_not_specialize=["num_pairs", "each", "num_experts"])
def _pair_mm_kernel(
    x_ptr, w_ptr, ids_ptr, bias_ptr, scale_ptr, y_ptr, num_pairs, each, num_experts, inner, outer,
    x_stride, w_stride_e, w_stride_i, w_stride_n,
    HAS_BIAS: tl.constexpr, HAS_SCALE: tl.constexpr, FIRST_STRIDE: tl.constexpr,
    PAIRS: tl.constexpr, ROWS: tl.constexpr, INNER: tl.constexpr, OUTER: tl.constexpr,
):  # fmt: skip
    p = tl.program_id(1)
    n = tl.program_id(0) * OUTER + tl.arange(0, OUTER)
    inside = n < outer
    expert = tl.load(ids_ptr + p).to(tl.int32)
    if (expert < 0) | (expert >= num_experts):
        zero = tl.zeros((OUTER,), dtype=y_ptr.dtype.element_ty)
        tl.store(y_ptr + p.to(tl.int64) * outer + n, zero, mask=inside)
        return
    every = tl.arange(0, PAIRS)
    ids = tl.load(ids_ptr + every, mask=every < num_pairs, other=-1).to(tl.int32)
    mine = ids == expert
    if tl.min(tl.where(mine, every, PAIRS), 0) != p:
        return
    place = tl.cumsum(mine.to(tl.int32), 0) - 1
    count = tl.sum(mine.to(tl.int32), 0)
    k = tl.arange(0, INNER)
    n64 = n.to(tl.int64)
    w_ptr += expert.to(tl.int64) * w_stride_e
    for start in range(0, count, ROWS):
        slot = start + tl.arange(0, ROWS)
        pair = tl.sum(tl.where(mine[None, :] & (place[None, :] == slot[:, None]), every[None, :], 0), 1)
        alive = slot < count
        x_rows = x_ptr + (pair // each).to(tl.int64)[:, None] * x_stride
        acc = tl.zeros((ROWS, OUTER), dtype=tl.float32)
        for i in range(0, inner, INNER):
            known = i + k < inner
            a = tl.load(x_rows + (i + k)[None, :], mask=alive[:, None] & known[None, :], other=0)
            if FIRST_STRIDE:  # w lies with its inner size contiguous
                at = w_ptr + n64[None, :] * w_stride_n + (i + k)[:, None]
            else:
                at = w_ptr + (i + k).to(tl.int64)[:, None] * w_stride_i + n64[None, :] * w_stride_n
            b = tl.load(at, mask=known[:, None] & inside[None, :], other=0)
            if x_ptr.dtype.element_ty == tl.float32:
                acc += tl.dot(a, b, input_precision="ieee")
            else:
                acc += tl.dot(a, b)
        if HAS_BIAS:
            acc += tl.load(bias_ptr + expert.to(tl.int64) * outer + n, mask=inside, other=0).to(tl.float32)[None, :]
        if HAS_SCALE:
            acc *= tl.load(scale_ptr + pair, mask=alive, other=0).to(tl.float32)[:, None]
        y_at = y_ptr + pair.to(tl.int64)[:, None] * outer + n[None, :]
        tl.store(y_at, acc.to(y_ptr.dtype.element_ty), mask=alive[:, None] & inside[None, :])


def pair_mm_launch(
    x: Tensor, w: Tensor, ids: Tensor, bias: Tensor | None, scale: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """As `pair_mm_ref`, of at most 512 pairs; the result in `dtype`."""
    x = x if x.stride(1) == 1 else x.contiguous()
    pairs, (experts, inner, outer) = ids.shape[0], w.shape
    y = torch.empty(pairs, outer, dtype=dtype, device=x.device)
    if y.numel():
        block = 32 if pairs <= _SIZES[0] else 64
        _pair_mm_kernel[(cdiv(outer, block), pairs)](
            x, w, ids.contiguous(), *(t if t is None else t.contiguous() for t in (bias, scale)), y,
            pairs, pairs // x.shape[0], experts, inner, outer, x.stride(0), *w.stride(),
            HAS_BIAS=bias is not None, HAS_SCALE=scale is not None, FIRST_STRIDE=w.stride(1) == 1,
            PAIRS=_SIZES[pairs > _SIZES[0]], ROWS=_ROWS, INNER=128 if x.dtype.itemsize == 2 else 64, OUTER=block,
            num_stages=4,
        )  # fmt: skip
    return y
