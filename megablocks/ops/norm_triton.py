"""Triton kernels of LayerNorm and RMSNorm, one pass over memory each.

1. norm       a program normalizes ROWS rows, each wholly in registers; it stores the mean and r of each row
2. backward   P programs loop over the tiles: dX of each row; per program the sum of dY · x̂ over its rows, and for
              LayerNorm the sum of dY. The P partial results are added in their order: no atomics

Memory traffic bounds both: forward moves 2·H elements per row, backward 3·H.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megablocks.ops.launch import cdiv, next_power_of_2, quick
from megablocks.ops.routing.topk_triton import sum_products

_PROGRAMS = 528  # four per multiprocessor of the largest Hopper; a constant, so that sums are the same on every GPU
_TILE = 2048  # elements of a program; 16 a thread leave registers for both sums


@quick
@triton.jit(do_not_specialize=["num_rows"])
def _norm_kernel(
    x_ptr, weight_ptr, bias_ptr, y_ptr, mean_ptr, rstd_ptr, num_rows, H, eps, offset,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    h = tl.arange(0, BLOCK)
    alive = row < num_rows
    inside = alive[:, None] & (h < H)[None, :]
    at = row[:, None] * H + h[None, :]
    x = tl.load(x_ptr + at, mask=inside, other=0).to(tl.float32)
    if bias_ptr is not None:
        mean = tl.sum(x, 1) / H
        tl.store(mean_ptr + row, mean, mask=alive)
        x -= mean[:, None]
    rstd = tl.rsqrt(sum_products(x, x, inside) / H + eps)
    tl.store(rstd_ptr + row, rstd, mask=alive)
    y = x * rstd[:, None] * (tl.load(weight_ptr + h, mask=h < H, other=0).to(tl.float32) + offset)[None, :]
    if bias_ptr is not None:
        y += tl.load(bias_ptr + h, mask=h < H, other=0).to(tl.float32)[None, :]
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=inside)


@quick
@triton.jit(do_not_specialize=["num_rows", "tiles"])
def _norm_backward_kernel(
    dy_ptr, x_ptr, weight_ptr, mean_ptr, rstd_ptr, dx_ptr, partial_ptr, num_rows, tiles, H, offset,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    h = tl.arange(0, BLOCK)
    factor = (tl.load(weight_ptr + h, mask=h < H, other=0).to(tl.float32) + offset)[None, :]
    # Per lane of a tile, and summed across its rows at the end, so that threads exchange nothing in the loop.
    d_factor = tl.zeros((ROWS, BLOCK), tl.float32)
    d_bias = tl.zeros((ROWS, BLOCK), tl.float32)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        row = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        alive = row < num_rows
        inside = alive[:, None] & (h < H)[None, :]
        at = row[:, None] * H + h[None, :]
        hat = tl.load(x_ptr + at, mask=inside, other=0).to(tl.float32)
        dy = tl.load(dy_ptr + at, mask=inside, other=0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row, mask=alive, other=0)
        if mean_ptr is not None:
            hat -= tl.load(mean_ptr + row, mask=alive, other=0)[:, None]
            d_bias += dy
        hat *= rstd[:, None]
        d_factor += dy * hat
        d = tl.where(inside, dy * factor, 0.0)
        dx = d - hat * (sum_products(d, hat, inside) / H)[:, None]
        if mean_ptr is not None:
            dx -= (tl.sum(d, 1) / H)[:, None]
        tl.store(dx_ptr + at, (dx * rstd[:, None]).to(dx_ptr.dtype.element_ty), mask=inside)
    partial_ptr += tl.program_id(0) * (1 if mean_ptr is None else 2) * H
    tl.store(partial_ptr + h, tl.sum(d_factor, 0), mask=h < H)
    if mean_ptr is not None:
        tl.store(partial_ptr + H + h, tl.sum(d_bias, 0), mask=h < H)


def _sizes(hidden: int) -> dict[str, int]:
    block = max(next_power_of_2(hidden), 16)
    rows = max(_TILE // block, 1)
    return {"ROWS": rows, "BLOCK": block, "num_warps": min(max(rows * block // 512, 4), 32)}


def norm_launch(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, offset: float
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Like `norm_ref`; one launch."""
    x, weight, bias = x.contiguous(), weight.contiguous(), None if bias is None else bias.contiguous()
    (num_rows, hidden), device = x.shape, x.device
    y, rstd = torch.empty_like(x), torch.empty(num_rows, dtype=torch.float32, device=device)
    mean = torch.empty(0 if bias is None else num_rows, dtype=torch.float32, device=device)
    if x.numel():
        sizes = _sizes(hidden)
        _norm_kernel[(cdiv(num_rows, sizes["ROWS"]),)](
            x, weight, bias, y, mean, rstd, num_rows, hidden, eps, offset, **sizes
        )
    return y, None if bias is None else mean, rstd


def norm_backward_launch(
    dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor | None, rstd: Tensor, offset: float
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Like `norm_backward_ref`; one launch, and torch's sums of the partial results."""
    dy, x, weight = dy.contiguous(), x.contiguous(), weight.contiguous()
    num_rows, hidden = x.shape
    sizes = _sizes(hidden)
    tiles = cdiv(num_rows, sizes["ROWS"])
    programs, dx = min(tiles, _PROGRAMS), torch.empty_like(x)
    partial = torch.empty(programs, 1 if mean is None else 2, hidden, dtype=torch.float32, device=x.device)
    if x.numel():
        _norm_backward_kernel[(programs,)](
            dy, x, weight, mean, rstd, dx, partial, num_rows, tiles, hidden, offset, **sizes
        )
    # Two sums, because outputs of an op must not share memory.
    return dx, partial[:, 0].sum(0), None if mean is None else partial[:, 1].sum(0)
