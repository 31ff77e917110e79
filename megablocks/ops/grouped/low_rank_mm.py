"""Grouped GEMM with a matrix plus a low-rank matrix, as in LoRA, without computing their sum.

    t[p] = x[p] · a[e]        y[p] = x[p] · w[e] + t[p] · b[e]            x[gather[p]] instead of x[p] if gathered
    dT = dY · bᵀ              dX = dY · wᵀ + dT · aᵀ                      by `combine` if gathered
    over the rows of e: dA[e] = xᵀ · dT     dB[e] = tᵀ · dY     dW[e] = xᵀ · dY

Legend: R rows, E experts, K inner size, N outer size, r rank. Rows after the last expert's are unspecified.

Both products of dX are one kernel, and so are those of y if rows are not gathered. So the sum is rounded once, and no
(R, N) or (R, K) of the low-rank part is written and read. x and t are saved only if dW, dA or dB needs them.
Source: LoRA (arXiv 2106.09685).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from megablocks.ops.grouped.gathered_mm import gathered_mm_dw_op, gathered_mm_op, grouped_mm_sum_op
from megablocks.ops.grouped.grouped_mm import check_grouped, grouped_mm_op, is_transposed, weight_gradient
from megablocks.ops.library import custom_op, once_differentiable, under_autocast
from megablocks.ops.permute.rows import combine_op
from megablocks.ops.routing.dispatch import Dispatch


@custom_op(
    "megablocks::low_rank_mm",
    fake=lambda a: tuple(a.x.new_empty(a.dispatch.num_rows, matrix.shape[2]) for matrix in (a.w, a.a)),
)
def low_rank_mm_op(
    x: Tensor, w: Tensor, a: Tensor, b: Tensor, dispatch: Dispatch, gathered: bool
) -> tuple[Tensor, Tensor]:
    """y (R, N), and t (R, r) for backward."""
    offsets = dispatch.expert_offsets
    if not gathered:
        t = grouped_mm_op.implementation(x, a, offsets)
        return grouped_mm_sum_op.implementation(x, w, t, b, offsets), t
    y, t = (gathered_mm_op.implementation(x, matrix, None, None, None, dispatch)[0] for matrix in (w, a))
    return y.add_(grouped_mm_op.implementation(t, b, offsets)), t


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, w, a, b, dispatch, ctx.gathered = inputs
    t = output[1]
    need_x, need_w, need_a, need_b = ctx.needs_input_grad[:4]
    ctx.mark_non_differentiable(t)
    ctx.set_materialize_grads(False)
    ctx.transposed = is_transposed(w), is_transposed(a), is_transposed(b)
    ctx.save_for_backward(
        x if need_w or need_a else None,
        w if need_x else None,
        a if need_x else None,
        b if need_x or need_a else None,
        t if need_b else None,
        *dispatch[:5],
    )


@once_differentiable
def _backward(ctx: Any, dy: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
    x, w, a, b, t, *indices = ctx.saved_tensors
    if dy is None:
        return (None,) * 6
    dispatch = Dispatch(*indices)
    offsets = dispatch.expert_offsets
    need_x, need_w, need_a, need_b = ctx.needs_input_grad[:4]
    w_transposed, a_transposed, b_transposed = ctx.transposed

    def of_matrix(grad: Tensor, transposed: bool) -> Tensor:
        if ctx.gathered:
            return gathered_mm_dw_op(grad, x, dispatch).transpose(1, 2)
        return weight_gradient(x, grad, offsets, transposed)

    dx = None
    dt = grouped_mm_op(dy, b.transpose(1, 2), offsets) if need_x or need_a else None
    if need_x:
        rows = grouped_mm_sum_op(dy, w.transpose(1, 2), dt, a.transpose(1, 2), offsets)
        dx = combine_op(rows, None, dispatch) if ctx.gathered else rows
    dw = of_matrix(dy, w_transposed) if need_w else None
    da = of_matrix(dt, a_transposed) if need_a else None  # type: ignore[arg-type]
    db = weight_gradient(t, dy, offsets, b_transposed) if need_b else None
    return dx, dw, da, db, None, None


low_rank_mm_op.register_autograd(_backward, setup_context=_setup_context)


def low_rank_mm(x: Tensor, w: Tensor, a: Tensor, b: Tensor, dispatch: Dispatch, *, gathered: bool) -> Tensor:
    """Multiply each expert's rows by w + a · b.

    Args:
        x: (T, K) floating if gathered, otherwise (R, K), sorted by expert.
        w: (E, K, N), same dtype, of any stride.
        a, b: (E, K, r) and (E, r, N), likewise.
        dispatch: of T tokens and R pairs.
        gathered: whether the dispatch gathers x's rows.

    Returns:
        (R, N) in x's dtype; rows after the last expert's are unspecified. Differentiable in x, w, a and b.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    x, w, a, b = under_autocast(x, w, a, b)
    count = dispatch.num_tokens if gathered else dispatch.num_rows
    if x.dim() != 2 or x.shape[0] != count:
        raise ValueError(f"x is {tuple(x.shape)}: must be ({count}, K), as in the dispatch")
    check_grouped(x, w, dispatch.expert_offsets)
    check_grouped(x, a, dispatch.expert_offsets)
    if b.shape != (a.shape[0], a.shape[2], w.shape[2]) or b.dtype != x.dtype:
        wanted = a.shape[0], a.shape[2], w.shape[2]
        raise ValueError(f"b is {tuple(b.shape)} {b.dtype}: must be {wanted} {x.dtype}")
    return low_rank_mm_op(x, w, a, b, dispatch, gathered)[0]
