"""The entry points of megablocks 0.10's kernels, with its names, arguments and results, on any device.

They take the arrays of `megablocks.ops` and move rows like its functions. In addition a gather can multiply its rows by
weights, and `..._wgrad` computes the gradient of a scatter's weights. Like a kernel launch, they build no graph and
ignore autocast. Only programs with autograd functions of their own need them; others should call `megablocks.ops`.

Legend: T tokens, K top_k, H hidden, E experts, C places of a bin. Rows are sorted by expert. The row of pair r has the
weight weights[r]. Source: megablocks 0.10, megablocks/backend/kernels.py.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megablocks.ops.upstream import as_kernel, movement

scatter = as_kernel(movement.scatter)
padded_scatter = as_kernel(movement.padded_scatter)
binned_scatter = as_kernel(movement.binned_scatter)


@as_kernel
def gather(x: Tensor, indices: Tensor, bin_ids: Tensor, weights: Tensor | None, bins: Tensor, top_k: int) -> Tensor:
    """`ops.gather` of x (T, H), each row times its weight: (T·K, H)."""
    return _weighted(lambda t, k: movement.gather(t, indices, bin_ids, bins, k), x, weights, top_k)


@as_kernel
def padded_gather(
    x: Tensor, indices: Tensor, bin_ids: Tensor, weights: Tensor | None, bins: Tensor, padded_bins: Tensor, top_k: int
) -> Tensor:
    """`ops.padded_gather` of x (T, H), each row times its weight: (padded_bins[E-1], H); padding is exactly 0."""
    return _weighted(lambda t, k: movement.padded_gather(t, indices, bin_ids, bins, padded_bins, k), x, weights, top_k)


@as_kernel
def binned_gather(
    x: Tensor, indices: Tensor, weights: Tensor | None, bins: Tensor, expert_capacity: int, top_k: int
) -> Tensor:
    """`ops.binned_gather` of x (T, H), each row times its weight: (E, C, H); places without a row are exactly 0."""
    return _weighted(lambda t, k: movement.binned_gather(t, indices, bins, expert_capacity, k), x, weights, top_k)


def _weighted(rows_of: Callable[[Tensor, int], Tensor], x: Tensor, weights: Tensor | None, top_k: int) -> Tensor:
    rows = rows_of(x, top_k)
    return rows if weights is None else (rows * rows_of(weights.unsqueeze(1), 1)).to(x.dtype)


@as_kernel
def scatter_wgrad(x: Tensor, grad: Tensor, indices: Tensor, bin_ids: Tensor, bins: Tensor, top_k: int) -> Tensor:
    """The gradient of `scatter`'s weights: x (T·K, H), grad (T, H) → (T·K,) in x's dtype."""
    return _dots(movement.scatter(x, indices, bin_ids, None, bins, 1), grad, top_k)


@as_kernel
def padded_scatter_wgrad(
    x: Tensor, grad: Tensor, indices: Tensor, bin_ids: Tensor, bins: Tensor, padded_bins: Tensor, top_k: int
) -> Tensor:
    """The gradient of `padded_scatter`'s weights: x (padded rows, H), grad (T, H) → (T·K,) in x's dtype."""
    return _dots(movement.padded_scatter(x, indices, bin_ids, None, bins, padded_bins, 1), grad, top_k)


@as_kernel
def binned_scatter_wgrad(x: Tensor, grad: Tensor, indices: Tensor, bins: Tensor, top_k: int) -> Tensor:
    """The gradient of `binned_scatter`'s weights: x (E, C, H), grad (T, H) → (T·K,); 0 for a pair beyond its bin."""
    return _dots(movement.binned_scatter(x, indices, None, bins, 1), grad, top_k)


def _dots(rows: Tensor, grad: Tensor, top_k: int) -> Tensor:
    """rows (T·K, H) in the order of the pairs, grad (T, H) → the product of each row with its token's gradient."""
    if grad.shape != (rows.shape[0] // top_k, rows.shape[1]):
        raise ValueError(f"grad is {tuple(grad.shape)}: must be {(rows.shape[0] // top_k, rows.shape[1])}, (T, H)")
    wide = torch.promote_types(rows.dtype, torch.float32)
    return (rows.to(wide).view(-1, top_k, rows.shape[1]) @ grad.to(wide).unsqueeze(2)).flatten().to(rows.dtype)
