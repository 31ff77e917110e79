"""What ends one part of a Transformer block and begins the next: bias, dropout, residual and norm in one pass each way.

    out = residual + drop(x + x_bias)       drop(v) = v · keep / (1 − p)
    y   = norm(out)                         LayerNorm or RMSNorm, as in norm.py
    d_residual = dOut + the norm's dX for dY;  dx = d_residual · keep / (1 − p);  dx_bias = Σ dx

Without a residual the op is the norm of x alone.

`out` is rounded once, and the norm reads the rounded value. `keep` is a bit per element, and backward reads these bits:
a bit for column j of row i comes from 16 bits, half j mod 8 of Philox of (j div 8, i), with one seed per call.
Forward moves 8 bytes per element of bf16 and backward 10; as ops of their own they move 11 and 19.

Legend: R rows, H hidden. Everything is float32 inside (float64 for float64). Source of Philox: Salmon et al., Parallel
random numbers: as easy as 1, 2, 3 (SC 2011), which finds no fault with 7 rounds.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from megablocks.ops.library import custom_op, runs_triton

DROP_BITS, ROUNDS = 16, 7
"""p is a multiple of 2**-DROP_BITS. ROUNDS: of Philox."""
_MAX_HIDDEN = 16384  # a program holds a whole row in registers


class AddNormOptions(NamedTuple):
    """drops: p · 2**DROP_BITS, at least 0 and less than 2**DROP_BITS. offset: the norm's factor is weight + offset."""

    drops: int
    eps: float
    offset: float

    @property
    def scale(self) -> float:
        """1 / (1 − p)."""
        return 1 / (1 - self.drops / 2**DROP_BITS)


def norm_ref(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, offset: float
) -> tuple[Tensor, Tensor | None, Tensor]:
    """x (…, H), weight, bias (H,) → y (…, H), mean (R,) (None for RMSNorm) and r (R,); g = weight + offset.

    y is no view: autograd would refuse to change a view in place.
    """
    wide, mean = x.contiguous().to(torch.promote_types(x.dtype, torch.float32)), None
    if bias is not None:
        mean = wide.mean(-1)
        wide = wide - mean.unsqueeze(-1)
    rstd = torch.rsqrt(wide.square().mean(-1) + eps)
    y = wide * rstd.unsqueeze(-1) * (weight.to(wide.dtype) + offset)
    y = y if bias is None else y + bias.to(wide.dtype)
    return y.to(x.dtype), None if mean is None else mean.flatten(), rstd.flatten()


def wide_norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor | None, rstd: Tensor, offset: float
) -> tuple[Tensor, Tensor, Tensor | None]:
    """dy, x (R, H) → dx (R, H), dg and dbias (H,), in float32 (float64 for float64). RMSNorm's dbias is None."""
    dy, wide = (t.contiguous().to(rstd.dtype) for t in (dy, x))
    hat = (wide if mean is None else wide - mean.unsqueeze(1)) * rstd.unsqueeze(1)
    d = dy * (weight.to(rstd.dtype) + offset)
    dx = d - hat * (d * hat).mean(1, keepdim=True)
    d_bias = None
    if mean is not None:
        dx, d_bias = dx - d.mean(1, keepdim=True), dy.sum(0)
    return dx * rstd.unsqueeze(1), (dy * hat).sum(0), d_bias


def _product(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
    """The high and the low 32 bits of the products of 32-bit numbers, as int64."""
    wide = a * b  # the low 64 bits, also where int64 overflows
    return (wide >> 32) & 0xFFFFFFFF, wide & 0xFFFFFFFF


def random_bits(seed: Tensor, rows: int, hidden: int) -> Tensor:
    """seed () int64 → (R, 8 · ⌈H / 8⌉) int64: 16 random bits an element."""
    c0 = torch.arange((hidden + 7) // 8, device=seed.device).expand(rows, -1)
    c1 = torch.arange(rows, device=seed.device).unsqueeze(1).expand_as(c0)
    c2 = c3 = torch.zeros_like(c0)
    k0, k1 = seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF
    for _ in range(ROUNDS):
        (high0, low0), (high2, low2) = _product(0xD2511F53, c0), _product(0xCD9E8D57, c2)
        c0, c1, c2, c3 = high2 ^ c1 ^ k0, low2, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    halves = [half for word in (c0, c1, c2, c3) for half in (word & 0xFFFF, word >> 16)]
    return torch.stack(halves, -1).flatten(1)


def _drop(x: Tensor, mask: Tensor | None, options: AddNormOptions) -> Tensor:
    """mask: (R, ⌈H / 8⌉) uint8 with a bit for each element, the lowest first; None keeps all."""
    if mask is None:
        return x
    bits = mask.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=mask.device) & 1
    factors = bits.flatten(1)[:, : x.shape[-1]].view(x.shape) * options.scale
    return x * factors  # a NaN that is dropped stays one, as in torch


def add_norm_ref(
    x: Tensor, x_bias: Tensor | None, residual: Tensor | None, seed: Tensor | None, weight: Tensor,
    bias: Tensor | None, options: AddNormOptions,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor | None]:  # fmt: skip
    """x, residual (…, H) → out, y (…, H), the norm's mean (None for RMSNorm) and r (R,), and the mask of `_drop`.

    residual: None for the norm of x. Then x_bias and seed are None, and out is empty.
    seed: None for p = 0. Then the mask is None.
    """
    mask, hidden, out = None, x.shape[-1], x
    if seed is not None:
        keep = (random_bits(seed, x.numel() // hidden, hidden) >= options.drops).unflatten(1, (-1, 8))
        mask = (keep << torch.arange(8, device=x.device)).sum(-1).to(torch.uint8)
    if residual is not None:
        wide, residual = x.contiguous().to(torch.promote_types(x.dtype, torch.float32)), residual.contiguous()
        wide = wide if x_bias is None else wide + x_bias.to(wide.dtype)
        out = (residual.to(wide.dtype) + _drop(wide, mask, options)).to(x.dtype)
    y, mean, rstd = norm_ref(out, weight, bias, options.eps, options.offset)
    return x.new_empty(0) if residual is None else out, y, mean, rstd, mask


def add_norm_backward_ref(
    d_out: Tensor | None, dy: Tensor, out: Tensor, mask: Tensor | None, weight: Tensor, mean: Tensor | None,
    rstd: Tensor, has_x_bias: bool, options: AddNormOptions,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor, Tensor | None]:  # fmt: skip
    """d_out, dy, out (…, H) → d_residual, dx (…, H), and dx_bias, dg and dbias (H,) in float32 (float64 for float64).

    d_out: None for 0. out: without a residual x, whose gradient is then d_residual.
    dx is None without a mask: then it is d_residual.
    """
    rows = dy.reshape(-1, out.shape[-1]), out.reshape(-1, out.shape[-1])
    d_residual, dg, d_bias = wide_norm_backward(*rows, weight, mean, rstd, options.offset)
    d_residual = d_residual.view(out.shape)
    if d_out is not None:
        d_residual = d_residual + d_out.contiguous().to(d_residual.dtype)
    dx = _drop(d_residual, mask, options)
    dx_bias = dx.reshape(-1, out.shape[-1]).sum(0) if has_x_bias else None
    return d_residual.to(out.dtype), None if mask is None else dx.to(out.dtype), dx_bias, dg, d_bias


def kernels_take(x: Tensor) -> bool:
    return runs_triton(x) and x.shape[-1] <= _MAX_HIDDEN


def _fake(a: Any) -> tuple[Tensor | None, ...]:
    rows, wide = a.x.numel() // a.x.shape[-1], torch.promote_types(a.x.dtype, torch.float32)
    mean, rstd = (a.x.new_empty(rows, dtype=wide) for _ in range(2))
    mask = None if a.seed is None else a.x.new_empty((rows, (a.x.shape[-1] + 7) // 8), dtype=torch.uint8)
    out = a.x.new_empty(0 if a.residual is None else a.x.shape)
    return out, a.x.new_empty(a.x.shape), None if a.bias is None else mean, rstd, mask


def _fake_backward(a: Any) -> tuple[Tensor | None, ...]:
    like, sums = a.out.new_empty, [a.rstd.new_empty(a.out.shape[-1]) for _ in range(3)]
    dx = None if a.mask is None else like(a.out.shape)
    return like(a.out.shape), dx, sums[0] if a.has_x_bias else None, sums[1], None if a.mean is None else sums[2]


add_norm_op = custom_op(
    "megablocks::add_norm",
    fake=_fake,
    kernel="megablocks.ops.norm_triton:add_norm_launch",
    takes=lambda x, *_: kernels_take(x),
)(add_norm_ref)
add_norm_backward_op = custom_op(
    "megablocks::add_norm_backward",
    fake=_fake_backward,
    kernel="megablocks.ops.norm_triton:add_norm_backward_launch",
    takes=lambda d_out, dy, *_: kernels_take(dy),
)(add_norm_backward_ref)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, x_bias, residual, seed, weight, bias, ctx.options = inputs
    out, _, mean, rstd, mask = output
    ctx.has_x_bias, ctx.has_mask = x_bias is not None, seed is not None
    ctx.mark_non_differentiable(mean, rstd, mask, *([out] if residual is None else []))
    ctx.set_materialize_grads(False)  # no zeros for these
    out = x if residual is None else out
    ctx.save_for_backward(out, mask if ctx.has_mask else None, weight, mean if bias is not None else None, rstd)


def _backward(ctx: Any, d_out: Tensor | None, dy: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if d_out is None and dy is None:
        return (None,) * 7
    out, mask, weight, mean, rstd = ctx.saved_tensors
    dy = torch.zeros_like(out) if dy is None else dy
    given = (d_out, dy, out, mask, weight, mean, rstd, ctx.has_x_bias, ctx.options)
    d_residual, dx, dx_bias, dg, d_bias = add_norm_backward_op(*given)
    dx = dx if ctx.has_mask else d_residual
    made = (dx, dx_bias, d_residual, None, dg, d_bias)
    return *(t if needed else None for t, needed in zip(made, ctx.needs_input_grad, strict=False)), None


add_norm_op.register_autograd(_backward, setup_context=_setup_context)


def check_norm(x: Tensor, eps: float, **vectors: Tensor | None) -> None:
    """Raise ValueError for a negative eps, and for one of the vectors that is not (H,)."""
    if not eps >= 0:
        raise ValueError(f"eps={eps}: must be >= 0")
    for name, t in vectors.items():
        if t is not None and t.shape != x.shape[-1:]:
            raise ValueError(f"{name} is {tuple(t.shape)}: must be ({x.shape[-1]},) for x {tuple(x.shape)}")


def add_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    x_bias: Tensor | None = None,
    p: float = 0.0,
    eps: float,
    zero_centered: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """residual + dropout(x + x_bias), and its LayerNorm, or RMSNorm without a bias, over the last dimension H.

    Args:
        x, residual: (…, H) floating, of one dtype and shape.
        weight, bias: of the norm, (H,) floating, of any dtype; bias None for RMSNorm.
        x_bias: (H,) floating, of any dtype, or None.
        p: probability that dropout sets an element to 0, at least 0 and less than 1, rounded to a multiple of 2^-16;
            0 in evaluation. The seed comes from torch's generator of x's device.
        eps, zero_centered: as in `megablocks.ops.norm.norm`.

    Returns:
        The sum and its norm, both (…, H) in x's dtype, and the norm's factor r of each row, in float32 (float64 for
        float64) without a gradient.

    Raises:
        ValueError: shapes or dtypes that do not fit, p that is not in [0, 1), or a negative eps.
    """
    check_norm(x, eps, weight=weight, bias=bias, x_bias=x_bias)
    if (residual.shape, residual.dtype) != (x.shape, x.dtype):
        got = f"residual is {tuple(residual.shape)} {residual.dtype}"
        raise ValueError(f"{got}: must be {tuple(x.shape)} {x.dtype}, as x")
    if not 0 <= p < 1:
        raise ValueError(f"p={p}: must be >= 0 and < 1")
    options = AddNormOptions(min(round(p * 2**DROP_BITS), 2**DROP_BITS - 1), eps, float(zero_centered))
    seed = torch.empty((), dtype=torch.int64, device=x.device).random_() if options.drops else None
    out, y, _, rstd, _ = add_norm_op(x, x_bias, residual, seed, weight, bias, options)
    return out, y, rstd
