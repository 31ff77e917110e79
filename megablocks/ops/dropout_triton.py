"""Triton kernel of bias, dropout and residual, one pass over memory forward and one backward.

A program takes 8 · LANES entries in a row. A thread calls Philox once for eight entries, some 130 instructions.

Bytes: x, the residual and y once each forward, dY and dX backward.
"""

# mypy: allow-untyped-defs
# (device code takes what Triton passes at compile time)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megablocks.ops.dropout import LANES, limit_of
from megablocks.ops.launch import cdiv, quick


@quick
@triton.jit(do_not_specialize=["limit"])
def _dropout_add_kernel(
    x_ptr, bias_ptr, residual_ptr, seed_ptr, y_ptr, size, limit, scale,
    H: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    lane = tl.arange(0, LANES)
    call = tl.program_id(0).to(tl.int64) * LANES + lane
    zero = tl.zeros((LANES,), tl.uint32)
    words = tl.philox(tl.load(seed_ptr), call.to(tl.uint32), (call >> 32).to(tl.uint32), zero, zero)
    first = tl.program_id(0).to(tl.int64) * (8 * LANES)
    column = (first % H).to(tl.int32)
    for j in tl.static_range(8):
        at = first + j * LANES + lane
        inside = at < size
        value = tl.load(x_ptr + at, mask=inside, other=0).to(tl.float32)
        if bias_ptr is not None:
            value += tl.load(bias_ptr + (column + j * LANES + lane) % H, mask=inside, other=0).to(tl.float32)
        number = ((words[j // 2] >> (16 * (j % 2))) & 0xFFFF).to(tl.int32)
        value = tl.where(number >= limit, value * scale, 0.0)
        if residual_ptr is not None:
            value += tl.load(residual_ptr + at, mask=inside, other=0).to(tl.float32)
        tl.store(y_ptr + at, value.to(y_ptr.dtype.element_ty), mask=inside)


def dropout_add_launch(x: Tensor, bias: Tensor | None, residual: Tensor | None, seed: Tensor, p: float) -> Tensor:
    """As `dropout_add_ref`; one launch."""
    x, bias = x.contiguous(), None if bias is None else bias.contiguous()
    residual = None if residual is None else residual.contiguous()
    out, limit = x if residual is None else residual, limit_of(p)
    y = torch.empty(x.shape, dtype=out.dtype, device=x.device)
    if x.numel():
        _dropout_add_kernel[(cdiv(x.numel(), 8 * LANES),)](
            x, bias, residual, seed, y, x.numel(), limit, 65536 / (65536 - limit), H=x.shape[-1], LANES=LANES
        )
    return y
