"""A linear map in which a row of the result depends only on its row of x, bit for bit: y[r] = x[r] · wᵀ + b.

Legend: R rows, K inner size, N outer size. cuBLAS chooses its algorithm by the number of rows, and two algorithms add
in different orders. The plain Triton kernel (`grouped_mm_triton.py`, one expert) has one tile for all numbers of rows
and adds along K from the first value to the last, so a row has the same bits among any other rows.

Only forward is invariant: gradients are torch's products. On a CPU this is torch's product too. A caller who needs the
same bits there must pass one row at a time.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megablocks.ops.grouped.grouped_mm import twin_kernels
from megablocks.ops.library import custom_op, under_autocast


def rows_linear_ref(x: Tensor, w: Tensor) -> Tensor:
    """x (R, K), w (N, K) → (R, N), in x's dtype."""
    return F.linear(x, w)


def rows_linear_launch(x: Tensor, w: Tensor) -> Tensor:
    """Like `rows_linear_ref`, with float32 sums. One expert owns all rows."""
    from megablocks.ops.grouped.grouped_mm_triton import ragged_m

    offsets = torch.arange(2, dtype=torch.int32, device=x.device) * x.shape[0]  # made on the device: no copy
    return ragged_m(x, w.t().unsqueeze(0), offsets)


@custom_op("megablocks::rows_linear", fake=lambda a: a.x.new_empty(a.x.shape[0], a.w.shape[0]))
def rows_linear_op(x: Tensor, w: Tensor) -> Tensor:
    if twin_kernels(x) is not None and x.shape[0] > 0:
        return rows_linear_launch(x, w)
    return rows_linear_ref(x, w)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, w = inputs
    need_x, need_w = ctx.needs_input_grad[:2]
    ctx.save_for_backward(x if need_w else None, w if need_x else None)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None]:
    x, w = ctx.saved_tensors
    return None if w is None else dy @ w, None if x is None else dy.t() @ x


rows_linear_op.register_autograd(_backward, setup_context=_setup_context)


def rows_linear(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """x · wᵀ + bias, where a row of the result depends only on that row of x.

    Args:
        x: (R, K) floating.
        w: (N, K), same dtype, as a torch Linear holds it.
        bias: (N,) or None.

    Returns:
        (R, N) in x's dtype.

    Raises:
        ValueError: shapes or dtypes that do not fit, or a GPU on which the kernel does not run.
    """
    x, w, bias = under_autocast(x, w, bias)
    if x.dim() != 2 or w.dim() != 2 or x.shape[1] != w.shape[1]:
        raise ValueError(f"x {tuple(x.shape)} and w {tuple(w.shape)}: must be (R, K) and (N, K)")
    if x.dtype != w.dtype:
        raise ValueError(f"w is {w.dtype}, must be {x.dtype} as x is: cast one, or run under autocast")
    if x.is_cuda and twin_kernels(x) is None:
        raise ValueError(f"x is {x.dtype} on {x.device}: must be float32 or narrower, on a GPU that runs Triton")
    y: Tensor = rows_linear_op(x, w)
    return y if bias is None else y + bias
