"""Token movement of megablocks 0.10: tokens to rows in expert order and back, packed, padded or in bins.

Legend: T tokens, K top_k, H hidden, E experts, C bin_size, p a place in the sorted order. The index arrays are 0.10's:

    indices      (T·K,)  the sorted place p holds pair indices[p], of token indices[p] // K (what `sort` of the experts
                         of all pairs returns); each pair once
    bin_ids      (T·K,)  the expert of place p; follows from `bins`, so only its shape is checked
    bins         (E,)    int32, inclusive cumulative sum of the pairs per expert
    padded_bins  (E,)    int32, the same for the counts rounded up
    weights      (T·K,)  floating, one per pair in the order of the pairs, or None for ones

Under autocast x is cast to autocast's dtype. Sums are in a fixed order, without atomics. The functions here convert the
arrays for `megablocks.ops.permute`, which has the kernels. New code should call `permute` itself: it needs no sort,
accepts a bound for the padded rows, which are read from the device here, and weights half types in one pass. Results
here are 0.10's, which rounds each weighted row to x's dtype before it adds a token's rows in float32.
Source: megablocks 0.10, megablocks/ops/{gather,scatter,padded_*,binned_*}.py and backend/kernels.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megablocks.ops.library import under_autocast
from megablocks.ops.permute.rows import combine as _scatter
from megablocks.ops.permute.rows import combine_backward_op, combine_op
from megablocks.ops.permute.rows import gather as _gather
from megablocks.ops.routing.dispatch import Dispatch, pad_indices


def _check(indices: Tensor, bin_ids: Tensor | None, weights: Tensor | None = None) -> None:
    for name, other in (("bin_ids", bin_ids), ("weights", weights)):
        if other is not None and other.shape != indices.shape:
            raise ValueError(f"{name} is {tuple(other.shape)}: must be {tuple(indices.shape)}, one a pair, as indices")


class _RoundedScatter(torch.autograd.Function):
    """`scatter` of rows that are weighted and rounded first. Its gradients are those of the unrounded sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, padded: Dispatch) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weights, *padded[:5])
        weighted = (x * weights[padded.pair.clamp(min=0)].unsqueeze(1)).to(x.dtype)
        return combine_op(weighted, None, padded)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weights, *indices = ctx.saved_tensors
        need_x, need_weights = ctx.needs_input_grad[:2]
        dx, dw = combine_backward_op(grads[0], x, weights, Dispatch._make((*indices, True)))
        return dx if need_x else None, dw if need_weights else None, None


def _weighted(x: Tensor, weights: Tensor | None, padded: Dispatch, top_k: int) -> Tensor:
    """The weighted sum of each token's rows, rounded where 0.10 rounds."""
    (x,) = under_autocast(x)
    if weights is None or not weights.numel() or top_k == 1 or x.dtype not in (torch.float16, torch.bfloat16):
        return _scatter(x, weights, padded)
    if x.dim() != 2 or x.shape[0] != padded.pair.shape[0]:
        raise ValueError(f"x is {tuple(x.shape)}: must be (rows, H) with {padded.pair.shape[0]} rows")
    return _RoundedScatter.apply(x, weights, padded)


def gather(x: Tensor, indices: Tensor, bin_ids: Tensor, bins: Tensor, top_k: int) -> Tensor:
    """out[p] = x[indices[p] // top_k]: x (T, H) → (T·K, H); differentiable in x.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    _check(indices, bin_ids)
    (x,) = under_autocast(x)
    return _gather(x, pad_indices(indices, bins, bins, top_k, indices.shape[0]))


def scatter(x: Tensor, indices: Tensor, bin_ids: Tensor, weights: Tensor | None, bins: Tensor, top_k: int) -> Tensor:
    """out[t] = Σ of weights[r] · x[p] over the pairs r = indices[p] of token t: x (T·K, H) → (T, H).

    Differentiable in x and weights.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    _check(indices, bin_ids, weights)
    return _weighted(x, weights, pad_indices(indices, bins, bins, top_k, indices.shape[0]), top_k)


def padded_gather(x: Tensor, indices: Tensor, bin_ids: Tensor, bins: Tensor, padded_bins: Tensor, top_k: int) -> Tensor:
    """`gather` with expert e's rows from padded_bins[e-1] on: x (T, H) → (padded_bins[E-1], H), padding exactly 0.

    The number of rows is read from the device; `megablocks.ops.routing.dispatch` accepts a bound instead.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    _check(indices, bin_ids)
    (x,) = under_autocast(x)
    num_rows = int(padded_bins[-1]) if padded_bins.numel() else 0
    return _gather(x, pad_indices(indices, bins, padded_bins, top_k, num_rows))


def padded_scatter(
    x: Tensor,
    indices: Tensor,
    bin_ids: Tensor,
    weights: Tensor | None,
    bins: Tensor,
    padded_bins: Tensor,
    top_k: int,
) -> Tensor:
    """`scatter` from rows in the layout of `padded_gather`; padding is not read: x (padded rows, H) → (T, H).

    Differentiable in x and weights; the gradient of padding is exactly 0.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    _check(indices, bin_ids, weights)
    return _weighted(x, weights, pad_indices(indices, bins, padded_bins, top_k, x.shape[0]), top_k)


def binned_gather(x: Tensor, indices: Tensor, bins: Tensor, bin_size: int, top_k: int) -> Tensor:
    """The first C rows of each expert: x (T, H) → (E, C, H), places without a row exactly 0; differentiable in x.

    Raises:
        ValueError: shapes that do not fit, or a negative bin_size.
    """
    (x,) = under_autocast(x)
    return _gather(x, pad_indices(indices, bins, int(bin_size), top_k)).view(bins.shape[0], bin_size, x.shape[1])


def binned_scatter(x: Tensor, indices: Tensor, weights: Tensor | None, bins: Tensor, top_k: int) -> Tensor:
    """`scatter` from bins: x (E, C, H) → (T, H); pairs beyond their bin count as 0. Differentiable in x and weights.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    _check(indices, None, weights)
    if x.dim() != 3 or x.shape[0] != bins.shape[0]:
        raise ValueError(f"x is {tuple(x.shape)}: must be (E, C, H) with E={bins.shape[0]}, as bins")
    return _weighted(x.flatten(0, 1), weights, pad_indices(indices, bins, x.shape[1], top_k), top_k)
