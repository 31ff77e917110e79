"""Quantize to 8 or 4 bits and back, in groups of consecutive features with 16 bits of scale each.

    x ≈ sign · s · f((k + ½) / (n − ½)),  f(u) = (1 − C)·u + C·u²       k = 0 … n−1, n = 128 or 8, C = 0.3

Legend: R rows, H features, G features per group (64 at 8 bits, 16 at 4), B bytes of values per row: H, or ⌈H/2⌉ at 4
bits. A code is a sign bit above the bits of k. The positive values of a group have one scale s, the others a second
one: the largest magnitude of each kind. Both are in 16 bits: 11 bits of a float (8 exponent, 3 mantissa) for the larger
scale, 4 bits for the ratio of the smaller to it in fifteenths, and one bit that says whether the larger belongs to the
others. Bytes: R·(B + 2·⌈H/G⌉), so 1.031 per feature at 8 bits and 0.625 at 4. On normal draws the error is 0.53 % at 8
bits and 6.5 % at 4.

No value is rounded to 0: an activation whose slope jumps at 0 (relu) needs the sign of each value in backward. Two
scales and the bent f, whose levels are closer where values are more frequent, lose less than multiples of one scale
(8.5 % at 4 bits).

Zeros are exact if the group has no negative value, so groups of zeros are. Magnitudes below 2^-110 count as 0. A NaN or
an infinity makes its own group NaN and no other. Everything is float32, also for float64, and rows are independent, so
garbage in a row affects no other row. One pass over memory each way.

An op that saves a tensor quantized for backward calls `pack` in its setup_context, so the tensor itself is never saved,
and `unpack` in its backward.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megablocks.ops.library import custom_op, runs_triton, unknown_to_autograd

OFF = -1
"""The number of bits that means: not quantized."""
GROUP = {8: 64, 4: 16}
"""Number of features that share their scales, by bits."""

CURVE = 0.3
SLACK = 1.03  # at 4 bits, factor on the maximum before rounding: 1.03 lost less than 1 and 1.06
TINY = 2.0**-110  # so that the smallest level, TINY / 15 · 0.003 at 8 bits, is still a normal number


def widths(num_bits: int, width: int) -> tuple[int, int]:
    """B and ⌈H/G⌉: the number of codes and of scales in a row of `width` features."""
    return width if num_bits == 8 else -(-width // 2), -(-width // GROUP[num_bits])


def empty_quantized(x: Tensor, num_bits: int) -> tuple[Tensor, Tensor]:
    """Unset codes (R, B) uint8 and scales (R, ⌈H/G⌉) int16 of x (R, H)."""
    codes, scales = widths(num_bits, x.shape[1])
    return x.new_empty(x.shape[0], codes, dtype=torch.uint8), x.new_empty(x.shape[0], scales, dtype=torch.int16)


def largest_scale(dtype: torch.dtype) -> int:
    """Bits of the largest float32 with 3 mantissa bits that `dtype` holds, so that finite values stay finite."""
    return 0x47700000 if dtype == torch.float16 else 0x7F700000


def packed_bytes(num_bits: int, rows: int, width: int) -> int:
    """Bytes of the codes and scales of (rows, width) values."""
    codes, scales = widths(num_bits, width)
    return rows * (codes + 2 * scales)


def quantize_ref(x: Tensor, num_bits: int) -> tuple[Tensor, Tensor]:
    """x (R, H) → codes (R, B) uint8, scales (R, ⌈H/G⌉) int16."""
    (rows, width), group, levels = x.shape, GROUP[num_bits], 1 << (num_bits - 1)
    codes_width, groups = widths(num_bits, width)
    padded = torch.nn.functional.pad(x.float(), (0, groups * group - width)).view(rows, groups, group)
    magnitude = torch.where(padded.isnan(), torch.inf, padded.abs())
    magnitude = torch.where(magnitude < TINY, 0.0, magnitude)
    is_other = ~(padded > 0)
    positive = torch.where(is_other, 0.0, magnitude).amax(2)
    other = torch.where(is_other, magnitude, 0.0).amax(2)
    larger, smaller = torch.maximum(positive, other), torch.minimum(positive, other)
    usable, others_larger = (larger > 0) & larger.isfinite(), other > positive
    inverse = torch.where(usable, 1 / larger, 0.0)
    share = torch.where(usable[..., None], magnitude * inverse[..., None], 0.0)

    def encode(bits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """For a scale of these bits: the group's code, k of each value, and each value's squared error."""
        bits = (bits & ~0xFFFFF).clamp(0, largest_scale(x.dtype))
        own_larger = bits.view(torch.float32) * inverse
        inv_larger = torch.where(own_larger > 0, 1 / own_larger, 0.0)
        fifteenths = smaller * inverse * inv_larger * 15
        rounded = fifteenths.ceil() if num_bits == 8 else (fifteenths + 0.5).floor()
        rounded = torch.where(fifteenths > 0, rounded.clamp(1, 15), 0.0)
        code = bits >> 16 | rounded.int()
        code = torch.where(larger.isinf(), 0x7F80, code) | torch.where(others_larger, 1 << 15, 0)
        own_smaller = own_larger * (rounded * (1 / 15))
        inv_smaller = torch.where(rounded > 0, inv_larger * (15 / rounded.clamp(min=1)), 0.0)
        is_larger = is_other == others_larger[..., None]
        ratio = (share * torch.where(is_larger, inv_larger[..., None], inv_smaller[..., None])).clamp(max=1)
        u = (ratio * (4 * CURVE) + (1 - CURVE) ** 2).sqrt() - (1 - CURVE)
        k = (u * ((levels - 0.5) / (2 * CURVE))).floor().clamp(max=levels - 1)
        own = torch.where(is_larger, own_larger[..., None], own_smaller[..., None])
        return code, k, (_level_ref(k, levels) * own - share).square()

    if num_bits == 8:  # the next larger scale: a clipped maximum would be the largest error
        code, k, _ = encode(larger.view(torch.int32) + 0xFFFFF)
    else:  # the nearest scale or the next smaller one, whichever loses less
        near = (larger * SLACK).view(torch.int32) + 0x80000
        (code, k, lost), (next_code, next_k, next_lost) = encode(near), encode(near - 0x100000)
        less = (lost - next_lost).sum(2) > 0
        code, k = torch.where(less, next_code, code), torch.where(less[..., None], next_k, k)
    codes = (k.int() + is_other.int() * levels).view(rows, groups * group)
    if num_bits == 4:
        codes = codes[:, ::2] | codes[:, 1::2] << 4
    codes = codes[:, :codes_width].to(torch.uint8, memory_format=torch.contiguous_format)
    return codes, code.to(torch.int16)


def _level_ref(k: Tensor, levels: int) -> Tensor:
    u = (k + 0.5) * (1 / (levels - 0.5))
    return u * ((1 - CURVE) + CURVE * u)


def _scales_ref(scales: Tensor) -> tuple[Tensor, Tensor]:
    """The scales of the positive values and of the others, float32; NaN for a group that contained one."""
    code = scales.int()
    larger = ((code & 0x7FF0) << 16).view(torch.float32)
    larger = torch.where(larger.isinf(), torch.nan, larger)
    smaller = larger * ((code & 15).float() * (1 / 15))
    others_larger = (code & 0x8000) != 0
    return torch.where(others_larger, smaller, larger), torch.where(others_larger, larger, smaller)


def dequantize_ref(codes: Tensor, scales: Tensor, num_bits: int, width: int, dtype: torch.dtype) -> Tensor:
    """codes (R, B) uint8, scales (R, ⌈H/G⌉) int16 → (R, H)."""
    levels, group = 1 << (num_bits - 1), GROUP[num_bits]
    flat = codes.int()
    if num_bits == 4:
        flat = torch.stack([flat & 15, flat >> 4], 2).flatten(1)[:, :width]
    s_positive, s_other = (
        s.repeat_interleave(group, 1, output_size=s.shape[1] * group)[:, :width] for s in _scales_ref(scales)
    )
    magnitude = _level_ref((flat & (levels - 1)).float(), levels)
    return torch.where(flat >= levels, -magnitude * s_other, magnitude * s_positive).to(dtype)


quantize_op = custom_op(
    "megablocks::quantize",
    fake=lambda a: empty_quantized(a.x, a.num_bits),
    kernel="megablocks.ops.quant.quant_triton:quantize_launch",
)(quantize_ref)
dequantize_op = custom_op(
    "megablocks::dequantize",
    fake=lambda a: a.codes.new_empty(a.codes.shape[0], a.width, dtype=a.dtype),
    kernel="megablocks.ops.quant.quant_triton:dequantize_launch",
    takes=lambda codes, scales, num_bits, width, dtype: runs_triton(codes) and dtype != torch.float64,
)(dequantize_ref)


def quantize(x: Tensor, num_bits: int) -> tuple[Tensor, Tensor]:
    """Quantize each row.

    Args:
        x: (R, H) floating, any strides.
        num_bits: 8 or 4.

    Returns:
        codes (R, B) uint8, B = H at 8 bits and ⌈H/2⌉ at 4 (feature 2i in the low half); scales (R, ⌈H/G⌉) int16, see
        the module. Not differentiable.

    Raises:
        ValueError: another number of bits, or x is not a matrix of a floating dtype.
    """
    check_bits(num_bits)
    if x.dim() != 2 or not x.is_floating_point():
        raise ValueError(f"x is {tuple(x.shape)} {x.dtype}: must be (R, H) of a floating dtype")
    return quantize_op(x.detach(), num_bits)


def dequantize(codes: Tensor, scales: Tensor, num_bits: int, width: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values that `quantize` kept, (R, H) in `dtype`.

    Args:
        codes, scales: (R, B) uint8 and (R, ⌈H/G⌉) int16, from `quantize` with this num_bits.
        width: H.
        dtype: of the result.

    Raises:
        ValueError: another number of bits, or shapes that do not fit H.
    """
    check_bits(num_bits)
    wanted = tuple((codes.shape[0], length) for length in widths(num_bits, width))
    if (codes.shape, scales.shape) != wanted:
        raise ValueError(
            f"codes {tuple(codes.shape)}, scales {tuple(scales.shape)}: must be {wanted[0]}, {wanted[1]} for "
            f"width={width} at {num_bits} bits"
        )
    return dequantize_op(codes, scales, num_bits, width, dtype)


def check_bits(num_bits: int, allowed: str = "4 or 8", name: str = "num_bits") -> None:
    """Refuse bits that `quantize` does not support. allowed, name: what the caller accepts, and its argument."""
    if num_bits not in GROUP:
        raise ValueError(f"{name}={num_bits!r}: must be {allowed}")


class Packed(NamedTuple):
    """How a tensor was packed; not a tensor itself, so an op keeps it on its ctx."""

    num_bits: int
    shape: torch.Size
    dtype: torch.dtype


def pack(t: Tensor | None, num_bits: int) -> tuple[Packed | None, Tensor | None, Tensor | None]:
    """t (..., H) → (how, what to save, what else to save). None, `OFF` and an empty tensor are saved as they are."""
    if t is None or num_bits == OFF or t.numel() == 0:
        return None, t, None
    return Packed(num_bits, t.shape, t.dtype), *quantize_op(t.detach().reshape(-1, t.shape[-1]), num_bits)


def unpack(how: Packed | None, saved: Tensor | None, scales: Tensor | None) -> Tensor | None:
    """The tensor that `pack` was given, as exactly as its bits allow.

    Autograd does not see that it depends on the packed tensor, so a second derivative through it raises.
    """
    if how is None:
        return saved
    assert saved is not None and scales is not None
    t = dequantize_op(saved, scales, how.num_bits, how.shape[-1], how.dtype).view(how.shape)
    return unknown_to_autograd(t, "what is kept quantized")
