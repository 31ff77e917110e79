"""Histogram: how many ids each expert has.

    counts[e] = |{r : id_r = e}|  for e in [0, E)

Legend: R ids, E bins. Ids outside [0, E) are not counted.
Two launches on a GPU: counts of each chunk of ids, and their sum. Integers throughout, so reruns are equal.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megablocks.ops.backend import runs_triton


def histogram_ref(ids: Tensor, num_bins: int) -> Tensor:
    """ids (R,) integer → (E,) int64."""
    key = torch.where((ids >= 0) & (ids < num_bins), ids, num_bins).long()
    counts = torch.zeros(num_bins + 1, dtype=torch.int64, device=ids.device)
    return counts.scatter_add_(0, key, torch.ones_like(key))[:num_bins].clone()


@torch.library.custom_op("megablocks::histogram", mutates_args=())
def histogram_op(ids: Tensor, num_bins: int) -> Tensor:
    if runs_triton(ids) and ids.shape[0]:
        from megablocks.ops.routing.dispatch_triton import count_launch

        return count_launch(ids, num_bins)[:, :num_bins].sum(0)
    return histogram_ref(ids, num_bins)


@histogram_op.register_fake
def _(ids: Tensor, num_bins: int) -> Tensor:
    return torch.empty(num_bins, dtype=torch.int64, device=ids.device)


def histogram(ids: Tensor, num_bins: int) -> Tensor:
    """Count the ids of each bin: ids (R,) integer → (E,) int64; those outside [0, E) are not counted.

    Raises:
        ValueError: ids of another rank or dtype, or num_bins < 1.
    """
    if ids.dim() != 1 or ids.is_floating_point():
        raise ValueError(f"ids is {tuple(ids.shape)} {ids.dtype}: must be (R,) integer")
    if num_bins < 1:
        raise ValueError(f"num_bins={num_bins}: must be >= 1")
    return histogram_op(ids, num_bins)
