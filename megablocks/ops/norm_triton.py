"""Triton kernels of LayerNorm and RMSNorm, alone and after bias, dropout and residual; one pass over memory each.

1. norm       a program normalizes ROWS rows, each wholly in registers; it stores the mean and r of each row. With a
              residual, it first adds to it what dropout keeps of x and its bias, and stores the sum
2. backward   P programs loop over the tiles: dX of each row; per program the sum of dY · x̂ over its rows, and for
              LayerNorm the sum of dY. With a residual, the sum's own gradient is added to dX, and dropout's gradient
              and its sum are made of that
3. partials   the P programs' sums are added in their order: no atomics

Memory traffic bounds both: forward moves 2·H elements per row, backward 3·H; with a residual 4·H and 5·H.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megablocks.ops.add_norm import ROUNDS, AddNormOptions
from megablocks.ops.launch import cdiv, next_power_of_2, quick
from megablocks.ops.routing.topk_triton import sum_products

_PROGRAMS = 396  # three per multiprocessor of the largest Hopper; a constant, so that sums are the same on every GPU
_STAGES, _STAGED_BYTES = 3, 8192  # the tiles in flight in backward, if no tensor's part of one is larger than this
_TILE = 2048  # elements of a program; 16 a thread leave registers for both sums


@triton.jit
def _two(word, drops, place: tl.constexpr):
    """Bits `place` and `place` + 1 of a byte of the mask, from the halves of a random word."""
    return ((word & 0xFFFF).to(tl.int32) >= drops).to(tl.int32) << place | (
        (word >> 16).to(tl.int32) >= drops
    ).to(tl.int32) << (place + 1)


@triton.jit
def _draw_mask(seed_ptr, row, drops, ROWS: tl.constexpr, BLOCK: tl.constexpr, ROUNDS: tl.constexpr):
    """(ROWS, BLOCK // 8) int32: a bit for each element that dropout keeps, from `add_norm.random_bits`."""
    octet = tl.broadcast_to(tl.arange(0, BLOCK // 8)[None, :], (ROWS, BLOCK // 8))
    of_row = tl.broadcast_to(row.to(tl.int32)[:, None], (ROWS, BLOCK // 8))
    c0, c1, c2, c3 = tl.philox(tl.load(seed_ptr), octet, of_row, octet * 0, octet * 0, ROUNDS)
    return _two(c0, drops, 0) | _two(c1, drops, 2) | _two(c2, drops, 4) | _two(c3, drops, 6)


@triton.jit
def _bits(byte, h, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """(ROWS, BLOCK // 8) bytes of the mask → (ROWS, BLOCK) bool."""
    byte = tl.reshape(tl.broadcast_to(byte[:, :, None], (ROWS, BLOCK // 8, 8)), (ROWS, BLOCK))
    return (byte >> (h % 8)[None, :]) & 1 != 0


@quick
@triton.jit(do_not_specialize=["num_rows", "drops"])
def _norm_kernel(
    x_ptr, x_bias_ptr, residual_ptr, seed_ptr, weight_ptr, bias_ptr, out_ptr, y_ptr, mean_ptr, rstd_ptr, mask_ptr,
    num_rows, H, eps, offset, drops, scale,
    ROUNDS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    h = tl.arange(0, BLOCK)
    alive = row < num_rows
    inside = alive[:, None] & (h < H)[None, :]
    at = row[:, None] * H + h[None, :]
    x = tl.load(x_ptr + at, mask=inside, other=0).to(tl.float32)
    if residual_ptr is not None:
        if x_bias_ptr is not None:
            x += tl.load(x_bias_ptr + h, mask=h < H, other=0).to(tl.float32)[None, :]
        if seed_ptr is not None:
            octet = tl.arange(0, BLOCK // 8)
            byte = _draw_mask(seed_ptr, row, drops, ROWS, BLOCK, ROUNDS)
            place = mask_ptr + row[:, None] * tl.cdiv(H, 8) + octet[None, :]
            tl.store(place, byte.to(tl.uint8), mask=alive[:, None] & (octet * 8 < H)[None, :])
            x *= tl.where(_bits(byte, h, ROWS, BLOCK), scale, 0.0)
        x += tl.load(residual_ptr + at, mask=inside, other=0).to(tl.float32)
        rounded = x.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + at, rounded, mask=inside)
        x = rounded.to(tl.float32)
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
    dy_ptr, d_out_ptr, x_ptr, mask_ptr, weight_ptr, mean_ptr, rstd_ptr, dx_ptr, dropped_ptr, partial_ptr,
    num_rows, tiles, H, offset, scale,
    SUMS_X: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    h = tl.arange(0, BLOCK)
    factor = (tl.load(weight_ptr + h, mask=h < H, other=0).to(tl.float32) + offset)[None, :]
    # Per lane of a tile, and summed across its rows at the end, so that threads exchange nothing in the loop.
    d_factor = tl.zeros((ROWS, BLOCK), tl.float32)
    d_bias = tl.zeros((ROWS, BLOCK), tl.float32)
    d_x_bias = tl.zeros((ROWS, BLOCK), tl.float32)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
        row = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        alive = row < num_rows
        inside = alive[:, None] & (h < H)[None, :]
        at = row[:, None] * H + h[None, :]
        hat = tl.load(x_ptr + at, mask=inside, other=0).to(tl.float32)
        dy = tl.load(dy_ptr + at, mask=inside, other=0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row, mask=alive, other=0)
        if mask_ptr is not None:  # here, because the sums below wait for all that was loaded before
            octet = tl.arange(0, BLOCK // 8)
            place = mask_ptr + row[:, None] * tl.cdiv(H, 8) + octet[None, :]
            byte = tl.load(place, mask=alive[:, None] & (octet * 8 < H)[None, :], other=0).to(tl.int32)
        if mean_ptr is not None:
            hat -= tl.load(mean_ptr + row, mask=alive, other=0)[:, None]
            d_bias += dy
        hat *= rstd[:, None]
        d_factor += dy * hat
        d = tl.where(inside, dy * factor, 0.0)
        dx = d - hat * (sum_products(d, hat, inside) / H)[:, None]
        if mean_ptr is not None:
            dx -= (tl.sum(d, 1) / H)[:, None]
        dx *= rstd[:, None]
        if d_out_ptr is not None:
            dx += tl.load(d_out_ptr + at, mask=inside, other=0).to(tl.float32)
        tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=inside)
        if mask_ptr is not None:
            dx *= tl.where(_bits(byte, h, ROWS, BLOCK), scale, 0.0)
            tl.store(dropped_ptr + at, dx.to(dropped_ptr.dtype.element_ty), mask=inside)
        if SUMS_X:
            d_x_bias += dx
    partial_ptr += tl.program_id(0) * (1 + (mean_ptr is not None) + SUMS_X) * H
    tl.store(partial_ptr + h, tl.sum(d_factor, 0), mask=h < H)
    if mean_ptr is not None:
        partial_ptr += H
        tl.store(partial_ptr + h, tl.sum(d_bias, 0), mask=h < H)
    if SUMS_X:
        tl.store(partial_ptr + H + h, tl.sum(d_x_bias, 0), mask=h < H)


@quick
@triton.jit(do_not_specialize=["programs"])
def _add_partials_kernel(
    partial_ptr, first_ptr, second_ptr, third_ptr, programs, N,
    COUNT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    which = tl.program_id(1)
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(0, programs, ROWS):
        program = start + tl.arange(0, ROWS)
        mask = (program < programs)[:, None] & (n < N)[None, :]
        at = partial_ptr + (program * COUNT + which)[:, None].to(tl.int64) * N + n[None, :]
        total += tl.load(at, mask=mask, other=0)
    out_ptr = first_ptr if which == 0 else (second_ptr if which == 1 else third_ptr)
    tl.store(out_ptr + n, tl.sum(total, 0), mask=n < N)


def _sizes(hidden: int) -> dict[str, int]:
    block = max(next_power_of_2(hidden), 16)
    rows = max(_TILE // block, 1)
    return {"ROWS": rows, "BLOCK": block, "num_warps": min(max(rows * block // 512, 4), 32)}


def add_norm_launch(
    x: Tensor, x_bias: Tensor | None, residual: Tensor | None, seed: Tensor | None, weight: Tensor,
    bias: Tensor | None, options: AddNormOptions,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor | None]:  # fmt: skip
    """Like `add_norm_ref`; one launch. Without a residual, y is the norm of x, and the sum is empty."""
    x, weight = x.contiguous(), weight.contiguous()
    x_bias, residual, bias = (None if t is None else t.contiguous() for t in (x_bias, residual, bias))
    hidden, device = x.shape[-1], x.device
    num_rows = x.numel() // hidden
    out = x.new_empty(0) if residual is None else torch.empty_like(x)
    y, rstd = torch.empty_like(x), torch.empty(num_rows, dtype=torch.float32, device=device)
    mean = torch.empty(0 if bias is None else num_rows, dtype=torch.float32, device=device)
    mask = None if seed is None else torch.empty(num_rows, cdiv(hidden, 8), dtype=torch.uint8, device=device)
    if x.numel():
        sizes = _sizes(hidden)
        _norm_kernel[(cdiv(num_rows, sizes["ROWS"]),)](
            x, x_bias, residual, seed, weight, bias, out, y, mean, rstd, mask,
            num_rows, hidden, options.eps, options.offset, options.drops, options.scale,
            ROUNDS=ROUNDS, **sizes,
        )  # fmt: skip
    return out, y, None if bias is None else mean, rstd, mask


def add_partials_launch(partial: Tensor) -> list[Tensor]:
    """partial (programs, count, N) float32, contiguous, count at most 3 → its sums over the programs, count × (N,)."""
    programs, count, width = partial.shape
    sums = [torch.empty(width, dtype=torch.float32, device=partial.device) for _ in range(count)]
    if width:
        places = (sums * 3)[:3]
        _add_partials_kernel[(cdiv(width, 16), count)](
            partial, *places, programs, width, COUNT=count, ROWS=128, BLOCK=16
        )
    return sums


def add_norm_backward_launch(
    d_out: Tensor | None, dy: Tensor, x: Tensor, mask: Tensor | None, weight: Tensor, mean: Tensor | None,
    rstd: Tensor, has_x_bias: bool, options: AddNormOptions,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor, Tensor | None]:  # fmt: skip
    """Like `add_norm_backward_ref`; two launches."""
    dy, x, weight = dy.contiguous(), x.contiguous(), weight.contiguous()
    d_out = None if d_out is None else d_out.contiguous()
    hidden = x.shape[-1]
    num_rows, sizes = x.numel() // hidden, _sizes(hidden)
    tiles = cdiv(num_rows, sizes["ROWS"])
    programs, dx = min(tiles, _PROGRAMS), torch.empty_like(x)
    stages = _STAGES if sizes["ROWS"] * sizes["BLOCK"] * x.element_size() <= _STAGED_BYTES else 1
    dropped = None if mask is None else torch.empty_like(x)
    count = 1 + (mean is not None) + has_x_bias
    partial = torch.empty(programs, count, hidden, dtype=torch.float32, device=x.device)
    if x.numel():
        _norm_backward_kernel[(programs,)](
            dy, d_out, x, mask, weight, mean, rstd, dx, dropped, partial,
            num_rows, tiles, hidden, options.offset, options.scale, SUMS_X=has_x_bias, STAGES=stages, **sizes,
        )  # fmt: skip
    sums = add_partials_launch(partial)
    return dx, dropped, sums[-1] if has_x_bias else None, sums[0], None if mean is None else sums[1]
