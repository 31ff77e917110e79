"""LayerNorm and RMSNorm over the last dimension, and their gradients.

    LayerNorm  y = (x − mean(x)) · r · g + bias     r = 1 / √(mean((x − mean(x))²) + eps)
    RMSNorm    y = x · r · g                        r = 1 / √(mean(x²) + eps)
    with x̂ = (x − mean) · r, or x · r, and d = dY · g:
    dX = r · (d − x̂ · mean(d · x̂) − mean(d)), the last term only for LayerNorm;  dg = Σ dY · x̂,  dbias = Σ dY

Legend: R rows, H hidden; g = weight, or 1 + weight if zero-centered. Everything is float32 inside (float64 for
float64) and rounded once. The sums over the rows have a fixed order, so reruns are bit-identical.
Sources: LayerNorm (arXiv 1607.06450), RMSNorm (arXiv 1910.07467).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megablocks.ops.library import custom_op, runs_triton

_MAX_HIDDEN = 16384  # a program holds a whole row in registers


def norm_ref(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, offset: float
) -> tuple[Tensor, Tensor | None, Tensor]:
    """x (R, H), weight, bias (H,) → y (R, H), mean (R,) (None for RMSNorm) and r (R,); g = weight + offset."""
    wide, mean = x.contiguous().to(torch.promote_types(x.dtype, torch.float32)), None
    if bias is not None:
        mean = wide.mean(1)
        wide = wide - mean.unsqueeze(1)
    rstd = torch.rsqrt(wide.square().mean(1) + eps)
    y = wide * rstd.unsqueeze(1) * (weight.to(wide.dtype) + offset)
    return (y if bias is None else y + bias.to(wide.dtype)).to(x.dtype), mean, rstd


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


def norm_backward_ref(
    dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor | None, rstd: Tensor, offset: float
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Like `wide_norm_backward`, with dx in x's dtype."""
    dx, dg, d_bias = wide_norm_backward(dy, x, weight, mean, rstd, offset)
    return dx.to(x.dtype), dg, d_bias


def kernels_take(x: Tensor) -> bool:
    return runs_triton(x) and x.shape[-1] <= _MAX_HIDDEN


def _fake_norm(a: Any) -> tuple[Tensor | None, ...]:
    mean, rstd = (a.x.new_empty(a.x.shape[0], dtype=torch.promote_types(a.x.dtype, torch.float32)) for _ in range(2))
    return a.x.new_empty(a.x.shape), None if a.bias is None else mean, rstd


norm_op = custom_op(
    "megablocks::norm",
    fake=_fake_norm,
    kernel="megablocks.ops.norm_triton:norm_launch",
    takes=lambda x, *_: kernels_take(x),
)(norm_ref)
norm_backward_op = custom_op(
    "megablocks::norm_backward",
    fake=lambda a: (
        a.x.new_empty(a.x.shape),
        a.rstd.new_empty(a.x.shape[1]),
        None if a.mean is None else a.rstd.new_empty(a.x.shape[1]),
    ),
    kernel="megablocks.ops.norm_triton:norm_backward_launch",
    takes=lambda dy, x, *_: kernels_take(x),
)(norm_backward_ref)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, weight, bias, _, ctx.offset = inputs
    _, mean, rstd = output
    ctx.mark_non_differentiable(mean, rstd)
    ctx.set_materialize_grads(False)  # no zeros for these
    ctx.save_for_backward(x, weight, mean if bias is not None else None, rstd)


def _backward(ctx: Any, dy: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if dy is None:
        return (None,) * 5
    x, weight, mean, rstd = ctx.saved_tensors
    dx, dg, d_bias = norm_backward_op(dy, x, weight, mean, rstd, ctx.offset)
    need_x, need_weight, need_bias = ctx.needs_input_grad[:3]
    return dx if need_x else None, dg if need_weight else None, d_bias if need_bias else None, None, None


norm_op.register_autograd(_backward, setup_context=_setup_context)


def check_norm(x: Tensor, eps: float, **vectors: Tensor | None) -> None:
    """Raise ValueError for a negative eps, and for one of the vectors that is not (H,)."""
    if not eps >= 0:
        raise ValueError(f"eps={eps}: must be >= 0")
    for name, t in vectors.items():
        if t is not None and t.shape != x.shape[-1:]:
            raise ValueError(f"{name} is {tuple(t.shape)}: must be ({x.shape[-1]},) for x {tuple(x.shape)}")


def norm(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float, zero_centered: bool = False) -> Tensor:
    """LayerNorm, or RMSNorm without a bias, of x (…, H) over H.

    Args:
        x: floating.
        weight, bias: (H,) floating, of any dtype; bias None for RMSNorm.
        eps: at least 0, added to the variance, or to the mean of squares.
        zero_centered: the factor is 1 + weight.

    Returns:
        (…, H) in x's dtype.

    Raises:
        ValueError: a weight or bias of another length, or a negative eps.
    """
    check_norm(x, eps, weight=weight, bias=bias)
    rows = x.reshape(-1, x.shape[-1])
    return norm_op(rows, weight, bias, eps, float(zero_centered))[0].view(x.shape)
