"""Triton kernels of the cross entropy: a row's sums in one pass over its logits, and the gradient that overwrites them.

Legend: T tokens, V words. sums: one program per row reads it in blocks and rescales its sum when a block raises the
maximum. gradient: one program per block of a row; it is elementwise, because the row's maximum and sum are known. Both
compute in float32 and move 2·V bytes per row in bf16, the gradient twice as many.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megablocks.ops.launch import cdiv, next_power_of_2, quick

_SUMS_BLOCK, _GRADIENT_BLOCK = 8192, 2048  # of 4 warps: a lane's 64 elements and 16


@quick
@triton.jit(do_not_specialize=["num_rows"])
def _sums_kernel(logits_ptr, labels_ptr, sums_ptr, num_rows, V, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * V
    v = tl.arange(0, BLOCK)
    maximum = float("-inf")
    total = 0.0
    for first in range(0, V, BLOCK):
        logits = tl.load(logits_ptr + first + v, mask=first + v < V, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(maximum, tl.max(logits, 0))
        shift = tl.where(higher == float("-inf"), 0.0, higher)  # -inf - -inf would be NaN
        total = total * tl.exp(maximum - shift) + tl.sum(tl.exp(logits - shift), 0)
        maximum = higher
    label = tl.load(labels_ptr + row)
    chosen = tl.load(logits_ptr + label, mask=(label >= 0) & (label < V), other=0).to(tl.float32)
    tl.store(sums_ptr + row, maximum)
    tl.store(sums_ptr + num_rows + row, total)
    tl.store(sums_ptr + 2 * num_rows.to(tl.int64) + row, chosen)


@quick
@triton.jit
def _gradient_kernel(logits_ptr, labels_ptr, maximum_ptr, total_ptr, grad_ptr, grad_stride, V, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    v = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    grad = tl.load(grad_ptr + row * grad_stride).to(tl.float32)
    scale = grad / tl.load(total_ptr + row)
    at = logits_ptr + row * V + v
    logits = tl.load(at, mask=v < V, other=0).to(tl.float32)
    d_logits = tl.exp(logits - tl.load(maximum_ptr + row)) * scale
    d_logits = tl.where(v == tl.load(labels_ptr + row), d_logits - grad, d_logits)
    d_logits = tl.where(grad == 0, 0.0, d_logits)
    tl.store(at, d_logits.to(logits_ptr.dtype.element_ty), mask=v < V)


def sums_launch(logits: Tensor, labels: Tensor) -> Tensor:
    """logits (T, V) contiguous, labels (T,) int64 contiguous → (3, T) float32, see `cross_entropy_sums_ref`."""
    rows, words = logits.shape
    sums = torch.empty((3, rows), dtype=torch.float32, device=logits.device)
    if rows:
        block = min(_SUMS_BLOCK, next_power_of_2(words))
        _sums_kernel[(rows,)](logits, labels, sums, rows, words, BLOCK=block)
    return sums


def gradient_launch(logits: Tensor, labels: Tensor, maximum: Tensor, total: Tensor, grad: Tensor) -> None:
    """Overwrite logits (T, V), contiguous, with their gradient, see `cross_entropy_gradient_ref`.

    labels, maximum and total (T,) are contiguous; grad (T,) may have any stride.
    """
    rows, words = logits.shape
    if rows:
        block = min(_GRADIENT_BLOCK, next_power_of_2(words))
        _gradient_kernel[(rows, cdiv(words, block))](
            logits, labels, maximum, total, grad, grad.stride(0), words, BLOCK=block
        )
