"""Bias, dropout and residual of Megatron's layers as one kernel each way, `megablocks.ops.dropout`.

Megatron lets torch.compile fuse the three. That kernel draws four random numbers for each that it needs, and keeps a
mask for backward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from torch import Tensor

from megablocks.ops.dropout import dropout_add


def bias_dropout_add(training: bool, fused: bool) -> Callable[..., Tensor]:
    """Stands for Megatron's `get_bias_dropout_add`, whose function it gives in evaluation and unless `fused`."""
    original = get_bias_dropout_add(training, fused)
    return functools.partial(_add, original) if training and fused else original


def _add(original: Any, x_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, prob: float) -> Tensor:
    x, bias = x_with_bias
    if 0 < prob < 1 and x.shape == residual.shape:
        return dropout_add(x, residual, prob, bias=bias)
    out: Tensor = original(x_with_bias, residual, prob)  # without dropout torch's kernel has nothing to draw
    return out
