"""Bias, dropout and residual in one pass, without a mask in memory.

    y = residual + keep · (x + bias) / (1 − p)        dX = keep · dY / (1 − p)      dbias = Σ dX      d residual = dY

Entry i is kept if a random number of 16 bits is at least 65,536 · p, rounded, so p is one of 65,536 values; the factor
is that of the rounded p. Backward draws the same numbers again from a seed, which is all that is kept. One call of
Philox gives the numbers of eight entries: `_words` says which.

Legend: H width of the bias. Everything is float32 inside (float64 for float64) and rounded once. Sources: dropout
(jmlr.org/papers/v15/srivastava14a.html), Philox 4×32 with 10 rounds (Salmon et al., SC 2011).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megablocks.ops.library import custom_op, runs_triton

LANES = 1024
"""Of 8 · LANES entries in a row, those LANES apart share a call of Philox."""
_LOW = 0xFFFFFFFF


def _philox(seed: Tensor, counter: Tensor) -> tuple[Tensor, ...]:
    """Four words of 32 bits for each counter, all in int64."""
    a, b, c, d = counter & _LOW, counter >> 32 & _LOW, torch.zeros_like(counter), torch.zeros_like(counter)
    key, other = seed & _LOW, seed >> 32 & _LOW
    for _ in range(10):
        first, second = a * 0xD2511F53, c * 0xCD9E8D57
        a, b = (second >> 32 & _LOW) ^ b ^ key, second & _LOW
        c, d = (first >> 32 & _LOW) ^ d ^ other, first & _LOW
        key, other = key + 0x9E3779B9 & _LOW, other + 0xBB67AE85 & _LOW
    return a, b, c, d


def _words(seed: Tensor, size: int) -> Tensor:
    """(size,) random numbers of 16 bits: eight rows of LANES for each LANES calls, the low half of a word first."""
    calls = -(-size // (8 * LANES)) * LANES
    words = torch.stack(_philox(seed, torch.arange(calls, device=seed.device)))
    halves = torch.stack((words & 0xFFFF, words >> 16), 1).view(8, -1, LANES)
    return halves.transpose(0, 1).reshape(-1)[:size]


def limit_of(p: float) -> int:
    """The smallest random number that keeps its entry."""
    return round(p * 65536)


def dropout_add_ref(x: Tensor, bias: Tensor | None, residual: Tensor | None, seed: Tensor, p: float) -> Tensor:
    """x, residual (…, H), bias (H,), seed () int64 → y (…, H) of the residual's dtype, or of x's without one."""
    out = x if residual is None else residual
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    wide = wide if bias is None else wide + bias
    keep = (_words(seed, x.numel()) >= limit_of(p)).view(x.shape)
    y = torch.where(keep, wide * (65536 / (65536 - limit_of(p))), 0)
    return (y if residual is None else y + residual).to(out.dtype)


@custom_op("megablocks::dropout_add")
def dropout_add_op(x: Tensor, bias: Tensor | None, residual: Tensor | None, seed: Tensor, p: float) -> Tensor:
    """As `dropout_add_ref`."""
    if runs_triton(x):
        from megablocks.ops.dropout_triton import dropout_add_launch

        return dropout_add_launch(x, bias, residual, seed, p)
    return dropout_add_ref(x, bias, residual, seed, p)


@dropout_add_op.register_fake
def _(x: Tensor, bias: Tensor | None, residual: Tensor | None, seed: Tensor, p: float) -> Tensor:
    return x.new_empty(x.shape, dtype=x.dtype if residual is None else residual.dtype)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, bias, _, seed, ctx.p = inputs
    ctx.dtypes = x.dtype, None if bias is None else bias.dtype
    ctx.save_for_backward(seed)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    need_x, need_bias, need_residual = ctx.needs_input_grad[:3]
    dx = d_bias = None
    if need_x or need_bias:
        dx = dropout_add_op(dy, None, None, *ctx.saved_tensors, ctx.p).to(ctx.dtypes[0])
        d_bias = dx.flatten(0, -2).sum(0).to(ctx.dtypes[1]) if need_bias else None
    return dx if need_x else None, d_bias, dy if need_residual else None, None, None


dropout_add_op.register_autograd(_backward, setup_context=_setup_context)


def dropout_add(x: Tensor, residual: Tensor, p: float, *, bias: Tensor | None = None) -> Tensor:
    """residual + dropout(x + bias). The seed comes from the default generator of x's device.

    Args:
        x, residual: (…, H) floating, of one shape.
        p: the share that is dropped, 0 <= p < 1.
        bias: (H,) floating.

    Returns:
        (…, H) of the residual's dtype.

    Raises:
        ValueError: shapes or a p that do not fit.
    """
    if residual.shape != x.shape or x.dim() < 2:
        raise ValueError(f"residual is {tuple(residual.shape)}: must have x's shape {tuple(x.shape)}, of two or more")
    if bias is not None and bias.shape != x.shape[-1:]:
        raise ValueError(f"bias is {tuple(bias.shape)}: must be ({x.shape[-1]},) for x {tuple(x.shape)}")
    if not (p >= 0 and limit_of(p) < 65536):
        raise ValueError(f"p={p}: must be at least 0 and smaller than 1")
    seed = torch.empty((), dtype=torch.int64, device=x.device).random_()
    y: Tensor = dropout_add_op(x, bias, residual, seed, p)
    return y
