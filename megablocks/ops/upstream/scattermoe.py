"""ScatterMoE's kernels with the names and arguments of its `kernels.ops`, without gradients, on any device.

Only programs with autograd functions of their own need them; others should call `parallel_linear`. Its module explains
the letters and the orders of rows. Source: ScatterMoE 0.3 (github.com/shawntan/scattermoe).
"""

from __future__ import annotations

import torch
from torch import Tensor

from megablocks.ops.routing.dispatch import Rows
from megablocks.ops.scattered.dispatched import scattered_mm_dw_op
from megablocks.ops.scattered.parallel_linear import parallel_linear
from megablocks.ops.upstream import as_kernel


@as_kernel
def scatter2scatter(
    X: Tensor, W: Tensor, sorted_expert_idxs: Tensor, sorted_scattered_idxs: Tensor, k: int, b: Tensor | None = None,
    x_grouped: bool = False, y_grouped: bool = False, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`parallel_linear` of X by W (E, in, out) with the biases b: (L, out), written into `out` if it is given."""
    experts = torch.arange(W.shape[0], device=X.device, dtype=sorted_expert_idxs.dtype)
    ends = torch.searchsorted(sorted_expert_idxs, experts, right=True)
    order = k, sorted_expert_idxs, sorted_scattered_idxs, ends
    y = parallel_linear(X, W, *order, b, grouped_in=x_grouped, grouped_out=y_grouped)
    return y if out is None else out.copy_(y)


@as_kernel
def group(
    A: Tensor, sorted_expert_idxs: Tensor, coeff: Tensor | None = None, fan_out: int = 1, out: Tensor | None = None
) -> Tensor:
    """The rows of A (L / fan_out, H) in grouped order: (L, H), written into `out` if it is given.

    Args:
        sorted_expert_idxs: (L,) the scattered pair of each grouped row: `sorted_scattered_idxs`, despite the name.
        coeff: (L,) factors of the rows in the order of the scattered pairs; None for ones.
    """
    pair = sorted_expert_idxs.long()
    y = A[pair // fan_out]
    y = y if coeff is None else (y * coeff[pair].unsqueeze(1)).to(A.dtype)
    return y if out is None else out.copy_(y)


@as_kernel
def group_bwd_W(
    DY: Tensor, X: Tensor, expert_offsets: Tensor, E: int, has_bias: bool = False
) -> tuple[Tensor, Tensor | None]:
    """The gradients of the weights, (E, in, out), and with has_bias of the biases, (E, out), else None.

    DY (L, out) and X (L, in) have rows grouped by expert; expert_offsets (E,) is the end of each expert's rows.

    Raises:
        ValueError: expert_offsets of another shape.
    """
    if expert_offsets.shape != (E,):
        raise ValueError(f"expert_offsets is {tuple(expert_offsets.shape)}: must be ({E},), one an expert")
    dw, sums = scattered_mm_dw_op(X, DY, None, Rows(expert_offsets), True, has_bias)
    return dw, sums.to(DY.dtype) if has_bias else None
