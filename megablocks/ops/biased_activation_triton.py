"""Triton kernels of bias and activation: one pass over memory forward, one backward, float32 inside.

1. forward    a program computes a tile of ROWS rows and BLOCK columns, for which it loads BLOCK values of the bias
2. backward   each of P programs has one block of columns and loops over tiles of rows. It stores dx, and at the end the
              sum of its dx for each column. partials_triton.py adds these in their order: no atomics

Memory traffic bounds both: forward moves 2·I elements per row, backward 3·I.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megablocks.ops.activation_table import Activation
from megablocks.ops.activation_triton import unary
from megablocks.ops.launch import cdiv, next_power_of_2, quick
from megablocks.ops.partials_triton import add_partials_launch

_PROGRAMS = 528  # four per multiprocessor of the largest Hopper; a constant, so that sums are the same on every GPU
_BLOCK, _FORWARD_TILE, _BACKWARD_TILE = 512, 4096, 2048  # columns, and elements, of a program's tile
_STAGES = 3  # tiles in flight in backward


@quick
@triton.jit(do_not_specialize=["num_rows"])
def _biased_kernel(
    x_ptr, bias_ptr, y_ptr, num_rows, width,
    NAME: tl.constexpr, EXACT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(width, BLOCK)
    row = (tl.program_id(0) // blocks * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    i = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = (row < num_rows)[:, None] & (i < width)[None, :]
    at = row[:, None] * width + i[None, :]
    z = tl.load(x_ptr + at, mask=inside, other=0).to(tl.float32)
    z += tl.load(bias_ptr + i, mask=i < width, other=0).to(tl.float32)[None, :]
    value, _ = unary(z, NAME, EXACT)
    tl.store(y_ptr + at, value.to(y_ptr.dtype.element_ty), mask=inside)


@quick
@triton.jit(do_not_specialize=["num_rows"])
def _biased_backward_kernel(
    dy_ptr, x_ptr, bias_ptr, dx_ptr, partial_ptr, num_rows, width,
    NAME: tl.constexpr, EXACT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(width, BLOCK)
    i = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    bias = tl.load(bias_ptr + i, mask=i < width, other=0).to(tl.float32)[None, :]
    # Per lane of a tile, and summed across its rows at the end, so that threads exchange nothing in the loop.
    d_bias = tl.zeros((ROWS, BLOCK), tl.float32)
    first, programs = tl.program_id(0) // blocks, tl.num_programs(0) // blocks
    for tile in tl.range(first, tl.cdiv(num_rows, ROWS), programs, num_stages=STAGES):
        row = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        inside = (row < num_rows)[:, None] & (i < width)[None, :]
        at = row[:, None] * width + i[None, :]
        z = tl.load(x_ptr + at, mask=inside, other=0).to(tl.float32) + bias
        _, slope = unary(z, NAME, EXACT)
        dx = tl.load(dy_ptr + at, mask=inside, other=0).to(tl.float32) * slope
        tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=inside)
        if partial_ptr is not None:
            d_bias += dx
    if partial_ptr is not None:
        tl.store(partial_ptr + first * width + i, tl.sum(d_bias, 0), mask=i < width)


def _sizes(width: int, elements: int) -> dict[str, int]:
    block = min(max(next_power_of_2(width), 16), _BLOCK)
    return {"ROWS": elements // block, "BLOCK": block, "num_warps": 4}


def biased_activation_launch(x: Tensor, bias: Tensor, activation: Activation) -> Tensor:
    """Like `biased_activation_ref`; one launch."""
    x, bias = x.contiguous(), bias.contiguous()
    y, width = torch.empty_like(x), x.shape[-1]
    if x.numel():
        num_rows, sizes = x.numel() // width, _sizes(width, _FORWARD_TILE)
        _biased_kernel[(cdiv(num_rows, sizes["ROWS"]) * cdiv(width, sizes["BLOCK"]),)](
            x, bias, y, num_rows, width, NAME=activation.unary, EXACT=activation.exact, **sizes
        )
    return y


def biased_activation_backward_launch(
    dy: Tensor, x: Tensor, bias: Tensor, sums: bool, activation: Activation
) -> tuple[Tensor, Tensor | None]:
    """Like `biased_activation_backward_ref`; two launches, or one without sums."""
    dy, x, bias = dy.contiguous(), x.contiguous(), bias.contiguous()
    dx, width = torch.empty_like(x), x.shape[-1]
    if not x.numel():
        return dx, torch.zeros(width, dtype=torch.float32, device=x.device) if sums else None
    num_rows, sizes = x.numel() // width, _sizes(width, _BACKWARD_TILE)
    blocks = cdiv(width, sizes["BLOCK"])
    programs = min(cdiv(num_rows, sizes["ROWS"]), max(_PROGRAMS // blocks, 1))  # of one block of columns
    partial = torch.empty(programs, 1, width, dtype=torch.float32, device=x.device) if sums else None
    _biased_backward_kernel[(programs * blocks,)](
        dy, x, bias, dx, partial, num_rows, width, NAME=activation.unary, EXACT=activation.exact, STAGES=_STAGES,
        **sizes,
    )  # fmt: skip
    return dx, None if partial is None else add_partials_launch(partial)[0]
