"""Triton kernels of quantize and dequantize; quant.py says what they compute.

A program computes ROWS rows times BLOCK features, in whole groups. Bytes per feature in half precision: quantize reads
2 and writes 1.031 or 0.625, dequantize the reverse.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megablocks.ops.launch import cdiv, next_power_of_2, quick
from megablocks.ops.quant.quant import CURVE, GROUP, SLACK, TINY, empty_quantized, largest_scale


@triton.jit
def _scales(code):
    """int32 code of a group → the scales of its positive values and of its others."""
    larger = ((code & 0x7FF0) << 16).to(tl.float32, bitcast=True)
    larger = tl.where((code & 0x7F80) == 0x7F80, float("nan"), larger)
    smaller = larger * ((code & 15).to(tl.float32) * (1 / 15))
    other_larger = (code & 0x8000) != 0
    return tl.where(other_larger, smaller, larger), tl.where(other_larger, larger, smaller)


@triton.jit
def _level(k, BITS: tl.constexpr, CURVE: tl.constexpr):
    u = (k + 0.5) * (1 / ((1 << (BITS - 1)) - 0.5))
    return u * ((1 - CURVE) + CURVE * u)


@triton.jit
def _encode(bits, groups, BITS: tl.constexpr, CURVE: tl.constexpr, LARGEST: tl.constexpr):
    """Scale of these bits, cut to 3 of mantissa → code of the group, k of each value, the square that each value loses.

    All in units of the larger maximum: shares are magnitudes, and so are the two scales `own`. Groups are 8 values a
    thread at 4 bits, so what is done once a group counts: two divisions.
    """
    larger, inverse, ratio_of_maxima, others_larger, share, is_other = groups
    LEVELS: tl.constexpr = 1 << (BITS - 1)
    bits = tl.minimum(tl.maximum(bits & -0x100000, 0), LARGEST)  # -0x100000 is ~0xFFFFF
    own_larger = bits.to(tl.float32, bitcast=True) * inverse
    inv_larger = tl.where(own_larger > 0, 1 / tl.where(own_larger > 0, own_larger, 1.0), 0.0)
    fifteenths = ratio_of_maxima * inv_larger * 15
    rounded = tl.ceil(fifteenths) if BITS == 8 else tl.floor(fifteenths + 0.5)
    rounded = tl.where(fifteenths > 0, tl.minimum(tl.maximum(rounded, 1.0), 15.0), 0.0)
    code = (bits >> 16) | rounded.to(tl.int32)
    code = tl.where(larger < float("inf"), code, 0x7F80) | tl.where(others_larger, 0x8000, 0)
    own_smaller = own_larger * (rounded * (1 / 15))
    inv_smaller = tl.where(rounded > 0, inv_larger * (15 / tl.maximum(rounded, 1.0)), 0.0)
    is_larger = is_other == others_larger[:, :, None]
    ratio = tl.minimum(share * tl.where(is_larger, inv_larger[:, :, None], inv_smaller[:, :, None]), 1.0)
    root = tl.sqrt(ratio * (4 * CURVE) + (1 - CURVE) * (1 - CURVE))
    k = tl.floor((root - (1 - CURVE)) * ((LEVELS - 0.5) / (2 * CURVE)))
    k = tl.minimum(k, LEVELS - 1.0)
    lost = _level(k, BITS, CURVE) * tl.where(is_larger, own_larger[:, :, None], own_smaller[:, :, None]) - share
    return code, k, lost * lost


@quick
@triton.jit(do_not_specialize=["num_rows"])
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
    inverse = tl.where(usable, tl.div_rn(1.0, tl.where(usable, larger, 1.0)), 0.0)  # plain / gives 0 beyond 2^126
    share = tl.where(usable[:, :, None], magnitude * inverse[:, :, None], 0.0)  # infinity times 0 would be NaN
    groups = (larger, inverse, smaller * inverse, other > positive, share, is_other)
    if BITS == 8:
        bits = larger.to(tl.int32, bitcast=True) + 0xFFFFF
        code, k, _ = _encode(bits, groups, BITS, CURVE, LARGEST)
    else:
        bits = (larger * SLACK).to(tl.int32, bitcast=True) + 0x80000
        code, k, lost = _encode(bits, groups, BITS, CURVE, LARGEST)
        code_b, k_b, lost_b = _encode(bits - 0x100000, groups, BITS, CURVE, LARGEST)
        # A sum of differences: in a sum of products the compiler can fuse each lane's own product into its first
        # addition. Lanes of a group would then have different last bits and could choose differently.
        less = tl.sum(lost - lost_b, 2) > 0
        code = tl.where(less, code_b, code)
        k = tl.where(less[:, :, None], k_b, k)
    g = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    tl.store(scales_ptr + row[:, None] * num_groups + g[None, :], code.to(tl.int16), mask=live & (g < num_groups)[None])
    codes = k.to(tl.int32) + tl.where(is_other, LEVELS, 0)
    if BITS == 4:
        low, high = tl.split(tl.reshape(codes, (ROWS, BLOCK // 2, 2)))
        b = tl.program_id(1) * (BLOCK // 2) + tl.arange(0, BLOCK // 2)
        out = low | (high << 4)
    else:
        b = h
        out = tl.reshape(codes, (ROWS, BLOCK))
    at = row[:, None] * codes_width + b[None, :]
    tl.store(codes_ptr + at, out.to(tl.uint8), mask=live & (b < codes_width)[None, :])


@quick
@triton.jit(do_not_specialize=["num_rows"])
def _dequantize_kernel(
    codes_ptr, scales_ptr, out_ptr, num_rows, width, codes_width, num_groups,
    BITS: tl.constexpr, GROUP: tl.constexpr, CURVE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    LEVELS: tl.constexpr = 1 << (BITS - 1)
    GROUPS: tl.constexpr = BLOCK // GROUP
    CODES: tl.constexpr = BLOCK * BITS // 8
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = (row < num_rows)[:, None]
    g = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    at = row[:, None] * num_groups + g[None, :]
    code = tl.load(scales_ptr + at, mask=live & (g < num_groups)[None, :], other=0).to(tl.int32)
    s_positive, s_other = _scales(code)
    b = tl.program_id(1) * CODES + tl.arange(0, CODES)
    at = row[:, None] * codes_width + b[None, :]
    codes = tl.load(codes_ptr + at, mask=live & (b < codes_width)[None, :], other=0).to(tl.int32)
    if BITS == 4:
        codes = tl.join(codes & 15, codes >> 4)
    codes = tl.reshape(codes, (ROWS, GROUPS, GROUP))
    magnitude = _level((codes & (LEVELS - 1)).to(tl.float32), BITS, CURVE)
    x = tl.where(codes >= LEVELS, -magnitude * s_other[:, :, None], magnitude * s_positive[:, :, None])
    h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = row[:, None] * width + h[None, :]
    tl.store(out_ptr + at, tl.reshape(x, (ROWS, BLOCK)).to(out_ptr.dtype.element_ty), mask=live & (h < width)[None, :])


def _blocks(num_bits: int, width: int) -> dict[str, Any]:
    block = min(max(next_power_of_2(width), GROUP[num_bits]), 1024)
    sizes = {"ROWS": 2048 // block, "BLOCK": block, "num_warps": 4}
    return sizes | {"BITS": num_bits, "GROUP": GROUP[num_bits], "CURVE": CURVE}


def quantize_launch(x: Tensor, num_bits: int) -> tuple[Tensor, Tensor]:
    """x (R, H) → codes, scales; one launch."""
    x = x if x.stride(1) == 1 else x.contiguous()
    (rows, width), (codes, scales) = x.shape, empty_quantized(x, num_bits)
    blocks = _blocks(num_bits, max(width, 1))
    if codes.numel():
        _quantize_kernel[(cdiv(rows, blocks["ROWS"]), cdiv(width, blocks["BLOCK"]))](
            x, codes, scales, rows, width, x.stride(0), codes.shape[1], scales.shape[1],
            TINY=TINY, SLACK=SLACK, LARGEST=largest_scale(x.dtype), **blocks,
        )  # fmt: skip
    return codes, scales


def dequantize_launch(codes: Tensor, scales: Tensor, num_bits: int, width: int, dtype: torch.dtype) -> Tensor:
    """codes, scales → (R, H); one launch."""
    codes, scales, rows = codes.contiguous(), scales.contiguous(), codes.shape[0]
    out = codes.new_empty(rows, width, dtype=dtype)
    blocks = _blocks(num_bits, max(width, 1))
    if out.numel():
        _dequantize_kernel[(cdiv(rows, blocks["ROWS"]), cdiv(width, blocks["BLOCK"]))](
            codes, scales, out, rows, width, codes.shape[1], scales.shape[1], **blocks
        )
    return out
