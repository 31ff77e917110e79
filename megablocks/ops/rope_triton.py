"""Triton kernel of the rotary embedding, one pass over memory forward and one backward.

A program processes up to STEPS tiles of ROWS heads of one position, which has B · N heads. It computes the cosines and
sines of that position itself, once. For them each thread needs 16 angles and computes 32 values of some 25 instructions
each. That takes as long as a tile; three tiles of heads hide it.

Memory traffic bounds it: each entry of x is read and written once.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megablocks.ops.launch import cdiv, next_power_of_2, quick

_TILE = 4096  # entries of a tile
_STEPS = 8


@quick
@triton.jit(do_not_specialize=["num_rows", "chunks"])
def _rope_kernel(
    x_ptr, angle_ptr, y_ptr, num_rows, chunks, heads, stride_s, stride_b, stride_n, scale,
    R: tl.constexpr, D: tl.constexpr, INTERLEAVED: tl.constexpr, TRANSPOSED: tl.constexpr,
    ROWS: tl.constexpr, STEPS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    position = (tl.program_id(0) // chunks).to(tl.int64)
    h = tl.arange(0, HALF)
    both = tl.arange(0, 2 * HALF)
    rest = R + tl.arange(0, REST)
    angle_ptr += position * R
    if INTERLEAVED:
        angle = tl.load(angle_ptr + both, mask=both < R, other=0).to(tl.float32)
        angle1, angle2 = tl.split(tl.reshape(angle, (HALF, 2)))
    else:
        angle1 = tl.load(angle_ptr + h, mask=h < R // 2, other=0).to(tl.float32)
        angle2 = tl.load(angle_ptr + R // 2 + h, mask=h < R // 2, other=0).to(tl.float32)
    cos1, cos2 = (tl.cos(angle1) * scale)[None, :], (tl.cos(angle2) * scale)[None, :]
    sin1, sin2 = (tl.sin(angle1) * scale)[None, :], (tl.sin(angle2) * scale)[None, :]
    if TRANSPOSED:
        sin1, sin2 = -sin2, -sin1
    first = tl.program_id(0) % chunks * (STEPS * ROWS)
    for start in range(first, min(first + STEPS * ROWS, num_rows), ROWS):
        row = start + tl.arange(0, ROWS)
        alive = (row < num_rows)[:, None]
        b = (row // heads).to(tl.int64)
        n = (row % heads).to(tl.int64)
        source = (x_ptr + position * stride_s + b * stride_b + n * stride_n)[:, None]
        target = (y_ptr + (position * num_rows + row) * D)[:, None]
        if INTERLEAVED:
            whole = alive & (both < R)[None, :]
            x = tl.load(source + both[None, :], mask=whole, other=0).to(tl.float32)
            x1, x2 = tl.split(tl.reshape(x, (ROWS, HALF, 2)))
        else:
            inside = alive & (h < R // 2)[None, :]
            x1 = tl.load(source + h[None, :], mask=inside, other=0).to(tl.float32)
            x2 = tl.load(source + R // 2 + h[None, :], mask=inside, other=0).to(tl.float32)
        y1 = (x1 * cos1 - x2 * sin1).to(y_ptr.dtype.element_ty)
        y2 = (x2 * cos2 + x1 * sin2).to(y_ptr.dtype.element_ty)
        if INTERLEAVED:
            tl.store(target + both[None, :], tl.reshape(tl.join(y1, y2), (ROWS, 2 * HALF)), mask=whole)
        else:
            tl.store(target + h[None, :], y1, mask=inside)
            tl.store(target + R // 2 + h[None, :], y2, mask=inside)
        if R < D:
            beyond = alive & (rest < D)[None, :]
            tl.store(target + rest[None, :], tl.load(source + rest[None, :], mask=beyond), mask=beyond)


def rope_launch(x: Tensor, angles: Tensor, interleaved: bool, scale: float, transposed: bool) -> Tensor:
    """Like `rope_ref`; one launch."""
    x, angles = x if x.stride(3) == 1 else x.contiguous(), angles.contiguous()
    (positions, batch, heads, size), rotated = x.shape, angles.shape[1]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        half, rest = next_power_of_2(max(rotated // 2, 1)), next_power_of_2(max(size - rotated, 1))
        rows = min(next_power_of_2(batch * heads), max(_TILE // max(2 * half, rest), 1))
        chunks = cdiv(batch * heads, _STEPS * rows)
        _rope_kernel[(positions * chunks,)](
            x, angles, y, batch * heads, chunks, heads, *x.stride()[:3], scale,
            R=rotated, D=size, INTERLEAVED=interleaved, TRANSPOSED=transposed,
            ROWS=rows, STEPS=_STEPS, HALF=half, REST=rest,
        )  # fmt: skip
    return y
