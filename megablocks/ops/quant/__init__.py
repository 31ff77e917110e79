"""Quantized copies of tensors that backward needs."""

import torch
from torch import Tensor

GROUP = {8: 64, 4: 16}
"""Features that share their scales, by bits."""

CURVE = 0.3
SLACK = 1.03  # at 4 bits, on the maximum before it is rounded: of 1, 1.03 and 1.06 the one that lost least
TINY = 2.0**-110  # so that the smallest level, TINY / 15 · 0.003 at 8 bits, is a normal number still


def widths(num_bits: int, width: int) -> tuple[int, int]:
    """B and ⌈H/G⌉: how many codes and scales a row of `width` features has."""
    return width if num_bits == 8 else -(-width // 2), -(-width // GROUP[num_bits])


def empty_quantized(x: Tensor, num_bits: int) -> tuple[Tensor, Tensor]:
    """Unset codes (R, B) uint8 and scales (R, ⌈H/G⌉) int16 of x (R, H)."""
    codes, scales = widths(num_bits, x.shape[1])
    return x.new_empty(x.shape[0], codes, dtype=torch.uint8), x.new_empty(x.shape[0], scales, dtype=torch.int16)


def largest_scale(dtype: torch.dtype) -> int:
    """Bits of the largest float32 of 3 bits of mantissa that `dtype` holds, so that nothing finite returns infinite."""
    return 0x47700000 if dtype == torch.float16 else 0x7F700000
