"""Bookkeeping of megablocks 0.10: sort, histogram, cumulative sums, rounding, replication, block columns.

Legend: N values, E experts (bins), B batch rows. No function synchronizes with the host. `bins` are inclusive
cumulative sums: bin e is [bins[e-1], bins[e]). Source: megablocks 0.10, megablocks/ops and csrc.

Intended differences from 0.10: a cumulative sum of one value keeps its shape (1,), where 0.10 returned (); dtypes that
its kernels lacked work; what would overflow or be out of bounds there is refused or skipped here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megablocks.ops.grouped.bias import expert_sum_op

_BITS = {torch.int16: 16, torch.int32: 32, torch.int64: 64}


def _check_integers(x: Tensor, dims: tuple[int, ...]) -> None:
    if x.dim() not in dims or x.dtype not in _BITS:
        allowed = " or ".join(f"{dim}-D" for dim in dims)
        raise ValueError(f"x is {tuple(x.shape)} {x.dtype}: must be {allowed} and torch.int16, int32 or int64")


def sort(x: Tensor, end_bit: int | None = None) -> tuple[Tensor, Tensor]:
    """Stable ascending radix sort.

    Args:
        x: (N,) int16, int32 or int64.
        end_bit: only the bits [0, end_bit) of the values are compared; None for all bits, including the sign.

    Returns:
        (values, indices): (N,) each and both in x's dtype; values[i] = x[indices[i]].

    Raises:
        ValueError: another shape or dtype, end_bit outside [0, bits], or more values than x's dtype can index.
    """
    _check_integers(x, (1,))
    bits = _BITS[x.dtype]
    end_bit = bits if end_bit is None else end_bit
    if not 0 <= end_bit <= bits:
        raise ValueError(f"end_bit={end_bit}: must be in [0, {bits}] for {x.dtype}")
    if x.shape[0] > torch.iinfo(x.dtype).max:
        raise ValueError(f"x has {x.shape[0]} values, whose indices do not fit its {x.dtype}: use a wider dtype")
    key = x if end_bit == bits else x & ((1 << end_bit) - 1)
    order = torch.sort(key, stable=True).indices
    return x[order], order.to(x.dtype)


def histogram(x: Tensor, max_val: int) -> Tensor:
    """How often each of 0 … max_val-1 occurs; other values are not counted.

    Args:
        x: (N,) or (B, N) int16, int32 or int64.

    Returns:
        (max_val,) or (B, max_val) int32.

    Raises:
        ValueError: another shape or dtype, or max_val below 1.
    """
    _check_integers(x, (1, 2))
    if max_val < 1:
        raise ValueError(f"max_val={max_val}: must be >= 1")
    rows = x.shape[0] if x.dim() == 2 else 1
    wide = x.long()  # first, because int16 does not hold every max_val
    key = torch.where((wide >= 0) & (wide < max_val), wide, max_val).view(rows, x.shape[-1])
    # one dimension, with a spare place per row: on a GPU scatter_add_ is deterministic only in one dimension
    key = (key + torch.arange(rows, device=x.device).unsqueeze(1) * (max_val + 1)).flatten()
    counts = torch.zeros(rows * (max_val + 1), dtype=torch.int32, device=x.device)
    counts.scatter_add_(0, key, torch.ones_like(key, dtype=torch.int32))
    return counts.view(rows, max_val + 1)[:, :max_val].reshape(*x.shape[:-1], max_val)


def inclusive_cumsum(x: Tensor, dim: int) -> Tensor:
    """Σ of x up to and including each place along `dim`, in x's shape and dtype.

    Raises:
        ValueError: x has no such dimension.
    """
    if x.dim() == 1:  # as in 0.10, any dim means the only one
        dim = 0
    elif x.dim() == 0 or not -x.dim() <= dim < x.dim():
        raise ValueError(f"dim={dim}: must be a dimension of x, which is {tuple(x.shape)}")
    return x.cumsum(dim, dtype=x.dtype)


def exclusive_cumsum(x: Tensor, dim: int) -> Tensor:
    """Σ of x before each place along `dim`, in x's shape and dtype. Raises the same as `inclusive_cumsum`."""
    return inclusive_cumsum(x, dim) - x


def round_up(x: Tensor, value: int) -> Tensor:
    """Each element of x rounded up to a multiple of `value`. x: int32 of any shape, not negative.

    Raises:
        ValueError: x of another dtype, or a value that is not an integer of at least 1.
    """
    if x.dtype != torch.int32:
        raise ValueError(f"x is {x.dtype}: must be torch.int32")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"value={value!r}: must be an integer >= 1")
    return torch.div(x + (value - 1), value, rounding_mode="trunc") * value


def repeat(x: Tensor, tiling: Sequence[int]) -> Tensor:
    """`x.repeat(*tiling)` for any shape and dtype, or x itself if that changes nothing."""
    return x if all(times == 1 for times in tiling) else x.repeat(*tiling)


def sum(x: Tensor, dim: int = 0) -> Tensor:
    """`x.sum(dim)` for any shape and dtype, without a copy if there is only one value to add."""
    return x.squeeze(dim) if x.shape[dim] == 1 else x.sum(dim)


class _Replicate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bins: Tensor, num_outputs: int) -> Tensor:
        ctx.save_for_backward(bins)
        places, last = torch.arange(num_outputs, dtype=torch.int32, device=bins.device), bins.shape[0] - 1
        e = torch.searchsorted(bins, places, right=True)
        return torch.where(e <= last, x.index_select(1, e.clamp(max=last)), 0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (bins,), (dout,) = ctx.saved_tensors, grads
        offsets = F.pad(bins.clamp(max=dout.shape[1]), (1, 0))
        return expert_sum_op(dout.t(), offsets).t().to(dout.dtype), None, None


def replicate(x: Tensor, bins: Tensor, num_outputs: int) -> Tensor:
    """out[b, j] = x[b, e] for the bin e of j; differentiable in x: dx[b, e] = Σ of dout[b] over bin e.

    Args:
        x: (B, E).
        bins: (E,) int32, in [0, num_outputs].

    Returns:
        (B, num_outputs) in x's dtype; places from bins[E-1] on are 0.

    Raises:
        ValueError: shapes or dtypes that do not fit, or a negative num_outputs.
    """
    if x.dim() != 2 or bins.dim() != 1 or x.shape[1] != bins.shape[0] or bins.shape[0] == 0:
        raise ValueError(f"x {tuple(x.shape)} and bins {tuple(bins.shape)}: must be (B, E) and (E,) with E >= 1")
    if bins.dtype != torch.int32:
        raise ValueError(f"bins is {bins.dtype}: must be torch.int32")
    if num_outputs < 0:
        raise ValueError(f"num_outputs={num_outputs}: must be >= 0")
    return _Replicate.apply(x, bins.contiguous(), num_outputs)


def topology(padded_bins: Tensor, block_size: int, output_block_rows: int, output_block_columns: int) -> Tensor:
    """Column of each block of a dropless MoE's hidden activations, whose block row r belongs to expert e of row r·B.

    Args:
        padded_bins: (E,) int32, multiples of block_size.
        output_block_rows: number of block rows; those from padded_bins[E-1] / block_size on have no expert.
        output_block_columns: block columns of one expert, its width / block_size.

    Returns:
        (output_block_rows · output_block_columns,) int16, or int32 if a column would not fit: for each block row its
        expert's columns e·output_block_columns …, ascending; -1 for a row without an expert.

    Raises:
        ValueError: a shape, dtype or size that does not fit.
    """
    if padded_bins.dim() != 1 or padded_bins.shape[0] == 0 or padded_bins.dtype != torch.int32:
        raise ValueError(f"padded_bins is {tuple(padded_bins.shape)} {padded_bins.dtype}: must be (E,) torch.int32")
    for name, size, least in (
        ("block_size", block_size, 1),
        ("output_block_rows", output_block_rows, 0),
        ("output_block_columns", output_block_columns, 1),
    ):
        if size < least:
            raise ValueError(f"{name}={size}: must be >= {least}")
    experts, columns = padded_bins.shape[0], output_block_columns
    row = torch.arange(output_block_rows, dtype=torch.int32, device=padded_bins.device)
    expert = torch.searchsorted(padded_bins // block_size, row, right=True).unsqueeze(1)
    column = expert * columns + torch.arange(columns, device=padded_bins.device)
    dtype = torch.int16 if experts * columns <= 2**15 else torch.int32
    return torch.where(expert < experts, column, -1).flatten().to(dtype)
