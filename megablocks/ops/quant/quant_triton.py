"""Triton kernels of quantize and dequantize; quant.py says what they compute.

A program takes ROWS rows times BLOCK features, whole groups of them. Bytes a feature in half precision: quantize reads
2 and writes 1.031 or 0.625, dequantize the other way round.
"""

# mypy: allow-untyped-defs
# (device code takes what Triton passes at compile time)

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megablocks.ops.quant.quant import CURVE, GROUP, SLACK, TINY, largest_scale


@triton.jit
def _scales(code):
    """int32 code of a group → the scales of its positive values and of its others."""
    larger = ((code & 0x7FF0) << 16).to(tl.float32, bitcast=True)
    larger = tl.where((code & 0x7F80) == 0x7F80, float("nan"), larger)
    smaller = larger * tl.div_rn((code & 15).to(tl.float32), 15.0)
    other_larger = (code & 0x8000) != 0
    return tl.where(other_larger, smaller, larger), tl.where(other_larger, larger, smaller)


@triton.jit
def _levels(k, BITS: tl.constexpr, CURVE: tl.constexpr):
    u = (k.to(tl.float32) + 0.5) * (1 / ((1 << (BITS - 1)) - 0.5))
    return u * ((1 - CURVE) + CURVE * u)


@triton.jit
def _encode(
    bits, larger, smaller, others_larger, share, is_other, usable, inverse,
    BITS: tl.constexpr, CURVE: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """Scale of these bits, cut to 3 of mantissa → code of the group, k of each value, sum of the squares lost."""
    LEVELS: tl.constexpr = 1 << (BITS - 1)
    bits = tl.minimum(tl.maximum(bits & -0x100000, 0), LARGEST)  # -0x100000 is ~0xFFFFF
    scale = bits.to(tl.float32, bitcast=True)
    fifteenths = tl.where(usable, tl.div_rn(smaller, tl.where(usable, scale, 1.0)) * 15, 0.0)
    if BITS == 8:
        rounded = tl.ceil(fifteenths)
    else:
        rounded = tl.floor(fifteenths + 0.5)
    rounded = tl.minimum(tl.maximum(rounded, 1.0), 15.0)
    code = (bits >> 16) | tl.where(fifteenths > 0, rounded, 0.0).to(tl.int32)
    code = tl.where(larger == float("inf"), 0x7F80, code) | tl.where(others_larger, 0x8000, 0)
    s_positive, s_other = _scales(code)
    s_positive, s_other = s_positive * inverse, s_other * inverse
    inv_positive = tl.where(s_positive > 0, tl.div_rn(1.0, tl.where(s_positive > 0, s_positive, 1.0)), 0.0)
    inv_other = tl.where(s_other > 0, tl.div_rn(1.0, tl.where(s_other > 0, s_other, 1.0)), 0.0)
    ratio = share * tl.where(is_other, inv_other[:, :, None], inv_positive[:, :, None])
    ratio = tl.where(ratio < 1, ratio, 1.0)  # also where a NaN came of infinity times 0
    u = tl.sqrt((1 - CURVE) * (1 - CURVE) + 4 * CURVE * ratio) - (1 - CURVE)
    k = tl.minimum((u * ((LEVELS - 0.5) / (2 * CURVE))).to(tl.int32), LEVELS - 1)
    lost = _levels(k, BITS, CURVE) * tl.where(is_other, s_other[:, :, None], s_positive[:, :, None]) - share
    return code, k, tl.sum(lost * lost, 2)


@triton.jit
def _quantize_kernel(
    x_ptr, codes_ptr, scales_ptr, num_rows, width, x_stride, codes_width, num_groups,
    BITS: tl.constexpr, GROUP: tl.constexpr, CURVE: tl.constexpr, TINY: tl.constexpr, SLACK: tl.constexpr,
    LARGEST: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    LEVELS: tl.constexpr = 1 << (BITS - 1)
    GROUPS: tl.constexpr = BLOCK // GROUP
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = (row < num_rows)[:, None]
    x = tl.load(x_ptr + row[:, None] * x_stride + h[None, :], mask=live & (h < width)[None, :], other=0)
    x = tl.reshape(x.to(tl.float32), (ROWS, GROUPS, GROUP))

    magnitude = tl.where(x == x, tl.abs(x), float("inf"))
    magnitude = tl.where(magnitude < TINY, 0.0, magnitude)
    is_other = (x > 0) == 0
    positive = tl.max(tl.where(is_other, 0.0, magnitude), 2)
    other = tl.max(tl.where(is_other, magnitude, 0.0), 2)
    larger, smaller = tl.maximum(positive, other), tl.minimum(positive, other)
    usable = (larger > 0) & (larger < float("inf"))
    inverse = tl.where(usable, tl.div_rn(1.0, tl.where(usable, larger, 1.0)), 0.0)
    share = magnitude * inverse[:, :, None]
    if BITS == 8:
        bits = larger.to(tl.int32, bitcast=True) + 0xFFFFF
        code, k, _ = _encode(
            bits, larger, smaller, other > positive, share, is_other, usable, inverse, BITS, CURVE, LARGEST
        )
    else:
        bits = (larger * SLACK).to(tl.int32, bitcast=True) + 0x80000
        code, k, lost = _encode(
            bits, larger, smaller, other > positive, share, is_other, usable, inverse, BITS, CURVE, LARGEST
        )
        code_b, k_b, lost_b = _encode(
            bits - 0x100000, larger, smaller, other > positive, share, is_other, usable, inverse, BITS, CURVE, LARGEST
        )
        less = lost_b < lost
        code = tl.where(less, code_b, code)
        k = tl.where(less[:, :, None], k_b, k)
    g = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    tl.store(scales_ptr + row[:, None] * num_groups + g[None, :], code.to(tl.int16), mask=live & (g < num_groups)[None])
    codes = k + tl.where(is_other, LEVELS, 0)
    if BITS == 4:
        low, high = tl.split(tl.reshape(codes, (ROWS, BLOCK // 2, 2)))
        b = tl.program_id(1) * (BLOCK // 2) + tl.arange(0, BLOCK // 2)
        out = low | (high << 4)
    else:
        b = h
        out = tl.reshape(codes, (ROWS, BLOCK))
    at = row[:, None] * codes_width + b[None, :]
    tl.store(codes_ptr + at, out.to(tl.uint8), mask=live & (b < codes_width)[None, :])


@triton.jit
def _dequantize_kernel(
    codes_ptr, scales_ptr, out_ptr, num_rows, width, codes_width, num_groups,
    BITS: tl.constexpr, GROUP: tl.constexpr, CURVE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    LEVELS: tl.constexpr = 1 << (BITS - 1)
    GROUPS: tl.constexpr = BLOCK // GROUP
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = (row < num_rows)[:, None]
    g = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    at = row[:, None] * num_groups + g[None, :]
    code = tl.load(scales_ptr + at, mask=live & (g < num_groups)[None, :], other=0).to(tl.int32)
    s_positive, s_other = _scales(code)
    if BITS == 4:
        b = tl.program_id(1) * (BLOCK // 2) + tl.arange(0, BLOCK // 2)
    else:
        b = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = row[:, None] * codes_width + b[None, :]
    codes = tl.load(codes_ptr + at, mask=live & (b < codes_width)[None, :], other=0).to(tl.int32)
    if BITS == 4:
        codes = tl.join(codes & 15, codes >> 4)
    codes = tl.reshape(codes, (ROWS, GROUPS, GROUP))
    magnitude = _levels(codes & (LEVELS - 1), BITS, CURVE)
    x = tl.where(codes >= LEVELS, -magnitude * s_other[:, :, None], magnitude * s_positive[:, :, None])
    h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = row[:, None] * width + h[None, :]
    tl.store(out_ptr + at, tl.reshape(x, (ROWS, BLOCK)).to(out_ptr.dtype.element_ty), mask=live & (h < width)[None, :])


def _blocks(num_bits: int, width: int) -> dict[str, Any]:
    block = min(max(triton.next_power_of_2(width), GROUP[num_bits]), 1024)
    sizes = {"ROWS": 2048 // block, "BLOCK": block, "num_warps": 4}
    return sizes | {"BITS": num_bits, "GROUP": GROUP[num_bits], "CURVE": CURVE}


def quantize_launch(x: Tensor, num_bits: int) -> tuple[Tensor, Tensor]:
    """x (R, H) → codes, scales; one launch."""
    x = x if x.stride(1) == 1 else x.contiguous()
    (rows, width), groups = x.shape, triton.cdiv(x.shape[1], GROUP[num_bits])
    codes = x.new_empty(rows, width if num_bits == 8 else triton.cdiv(width, 2), dtype=torch.uint8)
    scales = x.new_empty(rows, groups, dtype=torch.int16)
    blocks = _blocks(num_bits, max(width, 1))
    if codes.numel():
        _quantize_kernel[(triton.cdiv(rows, blocks["ROWS"]), triton.cdiv(width, blocks["BLOCK"]))](
            x,
            codes,
            scales,
            rows,
            width,
            x.stride(0),
            codes.shape[1],
            groups,
            TINY=TINY,
            SLACK=SLACK,
            LARGEST=largest_scale(x.dtype),
            **blocks,
        )
    return codes, scales


def dequantize_launch(codes: Tensor, scales: Tensor, num_bits: int, width: int, dtype: torch.dtype) -> Tensor:
    """codes, scales → (R, H); one launch."""
    codes, scales, rows = codes.contiguous(), scales.contiguous(), codes.shape[0]
    out = codes.new_empty(rows, width, dtype=dtype)
    blocks = _blocks(num_bits, max(width, 1))
    if out.numel():
        _dequantize_kernel[(triton.cdiv(rows, blocks["ROWS"]), triton.cdiv(width, blocks["BLOCK"]))](
            codes, scales, out, rows, width, codes.shape[1], scales.shape[1], **blocks
        )
    return out
