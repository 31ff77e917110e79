"""Plain Triton kernels of fp8.py: quantizing passes to e4m3, and the products of quantized operands.

A group is 128 values with one float32 scale, or 128 × 128 values of a weight. Every product multiplies K-major operands
(both operands of Hopper's fp8 wgmma must be), sums 128 of K in the tensor core, and adds that sum, times the scales, to
a float32 sum in registers. So the gradients of weights need operands transposed and quantized along tokens, each
expert's rows padded to whole groups.

Legend: T tokens, H hidden, I expert width, E experts, R rows by expert, P padded rows, N and K of a product. H, I, N
and K are multiples of 128. All rows are valid. blocks (E+1,): padded rows of experts before e, in groups of 128.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megablocks.ops.launch import cdiv, interpreted, next_power_of_2

GROUP = 128
LARGEST = 448.0
FP8 = torch.float8_e4m3fn


class Quantized(NamedTuple):
    """values: e4m3. scales: float32, one a group; values · scale are the numbers."""

    values: Tensor
    scales: Tensor


def block_offsets(offsets: Tensor) -> Tensor:
    """offsets (E+1,) of the experts' rows → blocks (E+1,) int32."""
    groups = (offsets.diff() + (GROUP - 1)) // GROUP
    return torch.nn.functional.pad(groups.cumsum(0, dtype=torch.int32), (1, 0))


def most_blocks(rows: int, experts: int) -> int:
    """P / 128: no fewer groups than any routing of this many rows needs, so that no size depends on the routing."""
    return rows // GROUP + experts


@triton.jit
def _quantized(x, AXIS: tl.constexpr):
    largest = tl.max(tl.abs(x), AXIS)
    scale = tl.where(largest > 0, largest * (1.0 / 448.0), 1.0)
    return (x * tl.expand_dims(1.0 / scale, AXIS)).to(tl.float8e4nv), scale


@triton.jit
def _rows_quantize_kernel(x_ptr, q_ptr, s_ptr, groups, INNER: tl.constexpr, GATED: tl.constexpr, MANY: tl.constexpr):
    """x (R, I), or with GATED SwiGLU of x (R, 2I), quantized along columns."""
    g = tl.program_id(0) * MANY + tl.arange(0, MANY)
    live = (g < groups)[:, None]
    to = g.to(tl.int64)[:, None] * 128 + tl.arange(0, 128)[None, :]
    at = x_ptr + to
    if GATED:
        at += ((g // (INNER // 128)).to(tl.int64) * INNER)[:, None]
    x = tl.load(at, mask=live, other=0.0).to(tl.float32)
    if GATED:
        x *= tl.sigmoid(x) * tl.load(at + INNER, mask=live, other=0.0).to(tl.float32)
    q, scale = _quantized(x, 1)
    tl.store(q_ptr + to, q, mask=live)
    tl.store(s_ptr + g, scale, mask=g < groups)


@triton.jit
def _weights_quantize_kernel(
    w_ptr, q_ptr, qt_ptr, s_ptr, st_ptr, row0, INNER: tl.constexpr, H: tl.constexpr, ROWS: tl.constexpr
):
    """w (E, I, H) → rows row0.. of q (E, ROWS, H), columns row0.. of qt (E, H, ROWS), and the scales of both."""
    e = tl.program_id(2).to(tl.int64)
    i = tl.program_id(1) * 128
    h = tl.program_id(0) * 128 + tl.arange(0, 128)
    w = tl.load(w_ptr + (e * INNER + i + tl.arange(0, 128))[:, None] * H + h[None, :]).to(tl.float32)
    largest = tl.max(tl.max(tl.abs(w), 1), 0)
    scale = tl.where(largest > 0, largest * (1.0 / 448.0), 1.0)
    q = (w * (1.0 / scale)).to(tl.float8e4nv)
    row = row0 + i + tl.arange(0, 128)
    tl.store(q_ptr + (e * ROWS + row)[:, None] * H + h[None, :], q)
    tl.store(qt_ptr + (e * H + h)[None, :] * ROWS + row[:, None], q)
    block = (row0 + i) // 128
    tl.store(s_ptr + (e * (ROWS // 128) + block) * (H // 128) + tl.program_id(0), scale)
    tl.store(st_ptr + (e * (H // 128) + tl.program_id(0)) * (ROWS // 128) + block, scale)


@triton.jit
def _rows_of(block, offsets_ptr, blocks_ptr, E: tl.constexpr, LANES: tl.constexpr):
    """Expert of a block of 128 padded rows, its first row and the end of the expert's. Behind the last block e = E."""
    lane = tl.arange(0, LANES)
    e = tl.sum(tl.where(lane < E, tl.load(blocks_ptr + 1 + lane, mask=lane < E, other=0) <= block, False).to(tl.int32))
    safe = tl.minimum(e, E - 1)
    row = tl.load(offsets_ptr + safe) + (block - tl.load(blocks_ptr + safe)) * 128
    return e, row, tl.load(offsets_ptr + safe + 1)


@triton.jit
def _store_transposed(x, q_ptr, s_ptr, block, col, P, COLS: tl.constexpr):
    """x (128 rows of a block, 128 columns) quantized along the rows: to q (COLS, P) and s (P / 128, COLS)."""
    q, scale = _quantized(x, 0)
    row = block.to(tl.int64) * 128 + tl.arange(0, 128)
    tl.store(q_ptr + col.to(tl.int64)[None, :] * P + row[:, None], q)
    tl.store(s_ptr + block.to(tl.int64) * COLS + col, scale)


@triton.jit
def _transpose_quantize_kernel(
    x_ptr, gather_ptr, offsets_ptr, blocks_ptr, q_ptr, s_ptr, P, H: tl.constexpr, E: tl.constexpr, LANES: tl.constexpr
):
    block = tl.program_id(1)
    e, row, end = _rows_of(block, offsets_ptr, blocks_ptr, E, LANES)
    if e < E:
        p = row + tl.arange(0, 128)
        col = tl.program_id(0) * 128 + tl.arange(0, 128)
        token = tl.load(gather_ptr + p, mask=p < end, other=0).to(tl.int64)
        x = tl.load(x_ptr + token[:, None] * H + col[None, :], mask=(p < end)[:, None], other=0.0).to(tl.float32)
        _store_transposed(x, q_ptr, s_ptr, block, col, P, H)


@triton.jit
def _swiglu_backward_kernel(
    da_ptr, z_ptr, weight_ptr, pair_ptr, offsets_ptr, blocks_ptr, dzq_ptr, dzs_ptr, dz_ptr, scaled_ptr, dzt_ptr,
    dzts_ptr, at_ptr, ats_ptr, dots_ptr, R, P, INNER: tl.constexpr, E: tl.constexpr, LANES: tl.constexpr,
    TRANSPOSED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """d_act (R, I), z (R, 2I) → dZ quantized along columns and ⟨d_act, act⟩ of each column tile.

    Also dZ and s · act: transposed and quantized along rows with TRANSPOSED, else in bfloat16.
    """
    block = tl.program_id(1)
    tile = tl.program_id(0)
    if TRANSPOSED:
        e, row, end = _rows_of(block, offsets_ptr, blocks_ptr, E, LANES)
    else:  # nothing is summed along rows, so tiles of fewer rows may cross experts
        e, row, end = 0, block * ROWS, R
    if e < E:
        p = row + tl.arange(0, ROWS)
        col = tile * 128 + tl.arange(0, 128)
        live = (p < end)[:, None]
        at = p.to(tl.int64)[:, None] * (2 * INNER) + col[None, :]
        narrow = p.to(tl.int64)[:, None] * INNER + col[None, :]
        pair = tl.load(pair_ptr + p, mask=p < end, other=0)
        s = tl.load(weight_ptr + pair, mask=p < end, other=0.0)[:, None]
        da = tl.load(da_ptr + narrow, mask=live, other=0.0).to(tl.float32)
        pre = tl.load(z_ptr + at, mask=live, other=0.0).to(tl.float32)
        gate = tl.load(z_ptr + at + INNER, mask=live, other=0.0).to(tl.float32)
        sig = tl.sigmoid(pre)
        act = pre * sig * gate
        tl.store(dots_ptr + tile.to(tl.int64) * R + pair, tl.sum(da * act, 1), mask=p < end)
        act *= s
        da *= s
        for half in tl.static_range(2):
            d = da * (pre * sig) if half == 1 else da * gate * sig * (1.0 + pre * (1.0 - sig))
            q, scale = _quantized(d, 1)
            tl.store(dzq_ptr + at + half * INNER, q, mask=live)
            tl.store(dzs_ptr + p.to(tl.int64) * (2 * INNER // 128) + half * (INNER // 128) + tile, scale, mask=p < end)
            if TRANSPOSED:
                _store_transposed(d, dzt_ptr, dzts_ptr, block, half * INNER + col, P, 2 * INNER)
            else:
                tl.store(dz_ptr + at + half * INNER, d.to(tl.bfloat16), mask=live)
        if TRANSPOSED:
            _store_transposed(act, at_ptr, ats_ptr, block, col, P, INNER)
        else:
            tl.store(scaled_ptr + narrow, act.to(tl.bfloat16), mask=live)


@triton.jit
def _rows_product_kernel(
    a_ptr, as_ptr, gather_ptr, b_ptr, bs_ptr, y_ptr, offsets_ptr, blocks_ptr, N: tl.constexpr, K: tl.constexpr,
    E: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    col = (tl.program_id(0) % (N // 128)) * 128
    e, row, end = _rows_of(tl.program_id(0) // (N // 128), offsets_ptr, blocks_ptr, E, LANES)
    if e < E:
        p = row + tl.arange(0, 128)
        k = tl.arange(0, 128)
        n = col + tl.arange(0, 128)
        src = p.to(tl.int64)
        if gather_ptr is not None:
            src = tl.load(gather_ptr + p, mask=p < end, other=0).to(tl.int64)
        a_ptrs = a_ptr + src[:, None] * K + k[None, :]
        b_ptrs = b_ptr + (e.to(tl.int64) * N + n)[None, :] * K + k[:, None]
        as_ptrs = as_ptr + src * (K // 128)
        bs_ptrs = bs_ptr + (e * (N // 128) + col // 128) * (K // 128)
        acc = tl.zeros((128, 128), dtype=tl.float32)
        for step in range(K // 128):
            a = tl.load(a_ptrs + step * 128, mask=(p < end)[:, None], other=0.0)
            b = tl.load(b_ptrs + step * 128)
            scale = tl.load(as_ptrs + step, mask=p < end, other=0.0) * tl.load(bs_ptrs + step)
            acc += tl.dot(a, b) * scale[:, None]
        tl.store(y_ptr + p.to(tl.int64)[:, None] * N + n[None, :], acc.to(tl.bfloat16), mask=(p < end)[:, None])


@triton.jit
def _weights_product_kernel(
    a_ptr, as_ptr, b_ptr, bs_ptr, y_ptr, blocks_ptr, P, M: tl.constexpr, N: tl.constexpr
):
    tiles: tl.constexpr = (M // 128) * (N // 128)
    e = tl.program_id(0) // tiles
    r = tl.program_id(0) % tiles
    m = (r % (M // 128)) * 128 + tl.arange(0, 128)
    n = (r // (M // 128)) * 128 + tl.arange(0, 128)
    k = tl.arange(0, 128)
    first = tl.load(blocks_ptr + e)
    acc = tl.zeros((128, 128), dtype=tl.float32)
    for block in range(first, tl.load(blocks_ptr + e + 1)):
        at = block * 128 + k
        a = tl.load(a_ptr + (m.to(tl.int64) * P)[:, None] + at[None, :])
        b = tl.load(b_ptr + n.to(tl.int64)[None, :] * P + at[:, None])
        left = tl.load(as_ptr + block * M + m)
        right = tl.load(bs_ptr + block * N + n)
        acc += tl.dot(a, b) * left[:, None] * right[None, :]
    tl.store(y_ptr + (e.to(tl.int64) * M + m)[:, None] * N + n[None, :], acc.to(tl.bfloat16))


def quantize_rows(x: Tensor, gated: bool = False) -> Quantized:
    """x (R, K), or SwiGLU of x (R, 2K), pre beside gate → (R, K) and (R, K / 128)."""
    rows, columns = x.shape[0], x.shape[1] // (1 + gated)
    q = Quantized(x.new_empty(rows, columns, dtype=FP8), x.new_empty(rows, columns // GROUP, dtype=torch.float32))
    groups = rows * columns // GROUP
    _rows_quantize_kernel[(cdiv(groups, 32),)](x, *q, groups, INNER=columns, GATED=gated, MANY=32)
    return q


def quantize_weights(*weights: Tensor) -> tuple[Quantized, Quantized]:
    """Weights (E, I, H), put below each other → (E, n·I, H) and its transpose (E, H, n·I), a scale a 128 × 128."""
    experts, inner, hidden = weights[0].shape
    rows = len(weights) * inner

    def empty(m: int, n: int) -> Quantized:
        scales = torch.empty(experts, m // GROUP, n // GROUP, dtype=torch.float32, device=weights[0].device)
        return Quantized(weights[0].new_empty(experts, m, n, dtype=FP8), scales)

    q, qt = empty(rows, hidden), empty(hidden, rows)
    grid = (hidden // GROUP, inner // GROUP, experts)
    for i, w in enumerate(weights):
        _weights_quantize_kernel[grid](
            w, q.values, qt.values, q.scales, qt.scales, i * inner, INNER=inner, H=hidden, ROWS=rows, num_warps=8
        )
    return q, qt


def _experts(blocks: Tensor) -> dict[str, int]:
    experts = blocks.shape[0] - 1
    return {"E": experts, "LANES": next_power_of_2(experts)}


def _empty_transposed(like: Tensor, columns: int, padded: int) -> Quantized:
    return Quantized(
        like.new_empty(columns, padded * GROUP, dtype=FP8), like.new_empty(padded, columns, dtype=torch.float32)
    )


def transpose_quantize(x: Tensor, gather: Tensor, offsets: Tensor, blocks: Tensor) -> Quantized:
    """x (T, H) → gathered rows, padded and transposed (H, P), quantized along rows; scales (P / 128, H)."""
    padded, hidden = most_blocks(gather.shape[0], offsets.shape[0] - 1), x.shape[1]
    q = _empty_transposed(x, hidden, padded)
    grid = (hidden // GROUP, padded)
    _transpose_quantize_kernel[grid](
        x, gather, offsets, blocks, *q, padded * GROUP, H=hidden, num_warps=8, **_experts(blocks)
    )
    return q


def swiglu_backward(
    d_act: Tensor, z: Tensor, weight: Tensor, pair: Tensor, offsets: Tensor, blocks: Tensor, transposed: bool
) -> tuple[Quantized, Tensor | Quantized, Tensor | Quantized, Tensor]:
    """dZ for dX; dZ and s · act for dW1 and dW2, transposed or in bfloat16; d_weight (R,) by pair."""
    (rows, inner), padded = d_act.shape, most_blocks(d_act.shape[0], offsets.shape[0] - 1)
    dz = Quantized(torch.empty_like(z, dtype=FP8), z.new_empty(rows, 2 * inner // GROUP, dtype=torch.float32))
    dots = torch.empty(inner // GROUP, rows, dtype=torch.float32, device=z.device)
    none = (None, None)
    if transposed:
        left1, left2 = _empty_transposed(z, 2 * inner, padded), _empty_transposed(z, inner, padded)
        outs = (*none, *left1, *left2)
    else:
        left1, left2 = torch.empty_like(z), torch.empty_like(d_act)
        outs = (left1, left2, *none, *none)
    tile_rows = GROUP if transposed else 32
    _swiglu_backward_kernel[(inner // GROUP, padded if transposed else cdiv(rows, tile_rows))](
        d_act, z, weight, pair, offsets, blocks, *dz, *outs, dots, rows, padded * GROUP, INNER=inner,
        TRANSPOSED=transposed, ROWS=tile_rows, num_warps=16 if transposed else 8, **_experts(blocks),
    )  # fmt: skip
    return dz, left1, left2, dots.sum(0)


def rows_product(a: Quantized, b: Quantized, offsets: Tensor, blocks: Tensor, gather: Tensor | None = None) -> Tensor:
    """y (R, N) bfloat16: y[r] = a[r] · b[e]ᵀ, or a[gather[r]] · b[e]ᵀ.

    Args:
        a: (R, K), or (T, K) with gather, scales (…, K / 128).
        b: (E, N, K), scales (E, N / 128, K / 128).
    """
    rows = a.values.shape[0] if gather is None else gather.shape[0]
    experts, N, K = b.values.shape
    y = torch.empty(rows, N, dtype=torch.bfloat16, device=a.values.device)
    grid = (most_blocks(rows, experts) * (N // GROUP),)
    _rows_product_kernel[grid](
        *a, gather, *b, y, offsets, blocks, N=N, K=K, num_warps=1 if interpreted() else 8, num_stages=4,
        **_experts(blocks),
    )  # fmt: skip
    return y


def weights_product(a: Quantized, b: Quantized, blocks: Tensor) -> Tensor:
    """o (E, M, N) bfloat16: o[e] = Σ over the padded rows r of e of a[:, r] · b[:, r]ᵀ; a (M, P), b (N, P)."""
    (M, padded), N, experts = a.values.shape, b.values.shape[0], blocks.shape[0] - 1
    o = torch.empty(experts, M, N, dtype=torch.bfloat16, device=a.values.device)
    grid = (experts * (M // GROUP) * (N // GROUP),)
    _weights_product_kernel[grid](*a, *b, o, blocks, padded, M=M, N=N, num_warps=8, num_stages=4)
    return o
