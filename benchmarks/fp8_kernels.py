"""What fp8.py computes beside the products: the passes that quantize to e4m3, in Triton, and the products' reference.

A group is 128 values with one float32 scale, or 128 × 128 values of a weight. A product multiplies K-major operands
(both operands of Hopper's fp8 wgmma must be), sums 128 of K in the tensor core, and adds that sum, times the scales, to
a float32 sum in registers.

Legend: T tokens, H hidden, I expert width, E experts, R rows by expert, N and K of a product. H, I, N and K are
multiples of 128. All rows are valid.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megablocks.ops.launch import cdiv

GROUP = 128
FP8 = torch.float8_e4m3fn


class Quantized(NamedTuple):
    """values: e4m3. scales: float32, one a group; values · scale are the numbers."""

    values: Tensor
    scales: Tensor


@triton.jit
def _quantized(x):
    largest = tl.max(tl.abs(x), 1)
    scale = tl.where(largest > 0, largest * (1.0 / 448.0), 1.0)
    return (x * (1.0 / scale)[:, None]).to(tl.float8e4nv), scale


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
    q, scale = _quantized(x)
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
def _swiglu_backward_kernel(
    da_ptr, z_ptr, weight_ptr, pair_ptr, dzq_ptr, dzs_ptr, dz_ptr, scaled_ptr, dots_ptr, R, INNER: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """d_act (R, I), z (R, 2I) → dZ, also quantized along columns; s · act; ⟨d_act, act⟩ of each column tile."""
    tile = tl.program_id(0)
    p = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    col = tile * 128 + tl.arange(0, 128)
    live = (p < R)[:, None]
    at = p.to(tl.int64)[:, None] * (2 * INNER) + col[None, :]
    narrow = p.to(tl.int64)[:, None] * INNER + col[None, :]
    pair = tl.load(pair_ptr + p, mask=p < R, other=0)
    s = tl.load(weight_ptr + pair, mask=p < R, other=0.0)[:, None]
    da = tl.load(da_ptr + narrow, mask=live, other=0.0).to(tl.float32)
    pre = tl.load(z_ptr + at, mask=live, other=0.0).to(tl.float32)
    gate = tl.load(z_ptr + at + INNER, mask=live, other=0.0).to(tl.float32)
    sig = tl.sigmoid(pre)
    act = pre * sig * gate
    tl.store(dots_ptr + tile.to(tl.int64) * R + pair, tl.sum(da * act, 1), mask=p < R)
    tl.store(scaled_ptr + narrow, (act * s).to(tl.bfloat16), mask=live)
    da *= s
    for half in tl.static_range(2):
        d = da * (pre * sig) if half == 1 else da * gate * sig * (1.0 + pre * (1.0 - sig))
        q, scale = _quantized(d)
        tl.store(dzq_ptr + at + half * INNER, q, mask=live)
        tl.store(dzs_ptr + p.to(tl.int64) * (2 * INNER // 128) + half * (INNER // 128) + tile, scale, mask=p < R)
        tl.store(dz_ptr + at + half * INNER, d.to(tl.bfloat16), mask=live)


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


def swiglu_backward(d_act: Tensor, z: Tensor, weight: Tensor, pair: Tensor) -> tuple[Quantized, Tensor, Tensor, Tensor]:
    """dZ for dX; dZ and s · act in bfloat16 for dW1 and dW2; d_weight (R,) by pair."""
    (rows, inner), tile_rows = d_act.shape, 32
    dz8 = Quantized(torch.empty_like(z, dtype=FP8), z.new_empty(rows, 2 * inner // GROUP, dtype=torch.float32))
    dz, scaled = torch.empty_like(z), torch.empty_like(d_act)
    dots = torch.empty(inner // GROUP, rows, dtype=torch.float32, device=z.device)
    _swiglu_backward_kernel[(inner // GROUP, cdiv(rows, tile_rows))](
        d_act, z, weight, pair, *dz8, dz, scaled, dots, rows, INNER=inner, ROWS=tile_rows, num_warps=8
    )
    return dz8, dz, scaled, dots.sum(0)


def rows_product_ref(a: Quantized, b: Quantized, offsets: Tensor, gather: Tensor | None = None) -> Tensor:
    """y (R, N) bfloat16: y[r] = a[r] · b[e]ᵀ, or a[gather[r]] · b[e]ᵀ. Synchronizes.

    Args:
        a: (R, K), or (T, K) with gather, scales (…, K / 128).
        b: (E, N, K), scales (E, N / 128, K / 128).
    """
    rows = a.values.shape[0] if gather is None else gather.shape[0]
    y = torch.empty(rows, b.values.shape[1], dtype=torch.bfloat16, device=a.values.device)
    left, ends = a.values.float() * a.scales.repeat_interleave(GROUP, 1), offsets.tolist()
    left = left if gather is None else left[gather]
    for e, (values, scales) in enumerate(zip(*b, strict=True)):
        right = values.float() * scales.repeat_interleave(GROUP, 0).repeat_interleave(GROUP, 1)
        mine = slice(ends[e], ends[e + 1])
        y[mine] = (left[mine] @ right.T).bfloat16()
    return y
