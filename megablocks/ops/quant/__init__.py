"""Quantized copies of tensors that backward needs."""

import torch

GROUP = {8: 64, 4: 16}
"""Features that share their scales, by bits."""

CURVE = 0.3
SLACK = 1.03  # at 4 bits, on the maximum before it is rounded: of 1, 1.03 and 1.06 the one that lost least
TINY = 2.0**-110  # so that the smallest level, TINY / 15 · 0.003 at 8 bits, is a normal number still


def largest_scale(dtype: torch.dtype) -> int:
    """Bits of the largest float32 of 3 bits of mantissa that `dtype` holds, so that nothing finite returns infinite."""
    return 0x47700000 if dtype == torch.float16 else 0x7F700000
