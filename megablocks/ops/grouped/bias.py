"""One bias vector per expert, added to that expert's rows.

    y[p] = rows[p] + bias[e]   for offsets[e] <= p < offsets[e+1]      d_bias[e] = Σ of dY over the rows of e

and if the biased rows are weighted and summed to tokens, from dY of the tokens (`Dispatch` has gather and pair):

    d_bias[e] = Σ over the rows p of e of weight[pair[p]] · dY[gather[p]]
    d_weight[pair[p]] += ⟨dY[gather[p]], bias[e]⟩

Legend: T tokens, R rows, E experts, N width. Rows p >= offsets[E] are unspecified; no gradient reads them.
The sum runs over each expert's rows in order, in float32: no atomics, so reruns are bit-identical.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from megablocks.ops.library import custom_op
from megablocks.ops.permute.rows import by_pair
from megablocks.ops.routing.dispatch import Dispatch


def expert_of_row(offsets: Tensor, num_rows: int) -> Tensor:
    """offsets (E+1,) → (num_rows,) int64: the expert of each row, E for the unused rows after the last expert's."""
    rows = torch.arange(num_rows, device=offsets.device, dtype=offsets.dtype)
    return torch.searchsorted(offsets[1:].contiguous(), rows, right=True)


def add_expert_bias_ref(rows: Tensor, bias: Tensor, offsets: Tensor) -> Tensor:
    """rows (R, N), bias (E, N), offsets (E+1,) → (R, N), contiguous."""
    expert = expert_of_row(offsets, rows.shape[0]).clamp_(max=bias.shape[0] - 1)
    return (rows + bias.to(rows.dtype).index_select(0, expert)).contiguous()


def expert_sum_ref(
    rows: Tensor, offsets: Tensor, weight: Tensor | None = None, gather: Tensor | None = None,
    pair: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Sum each expert's rows: (R, N), (E+1,) → (E, N) in float32 (float64 for float64).

    weight, gather, pair: of pairs and from a Dispatch; then row p is weight[pair[p]] · rows[gather[p]], rows (T, N).
    """
    if weight is not None and gather is not None and pair is not None:
        rows = rows.index_select(0, gather) * weight.index_select(0, pair).unsqueeze(1)
    wide = rows.to(torch.promote_types(rows.dtype, torch.float32)).contiguous()
    out = wide.new_zeros(offsets.shape[0] - 1, rows.shape[1])
    for expert, (start, end) in enumerate(pairwise(offsets.tolist())):
        torch.sum(wide[start:end], dim=0, out=out[expert])
    return out


def output_bias_dot_ref(dy: Tensor, bias: Tensor, dispatch: Dispatch) -> Tensor:
    """dy (T, N), bias (E, N) → (R,) in float32 (float64 for float64), 0 for an unused pair."""
    acc = torch.promote_types(dy.dtype, torch.float32)
    expert = expert_of_row(dispatch.expert_offsets, dispatch.num_rows).clamp_(max=bias.shape[0] - 1)
    rows = dy.to(acc).index_select(0, dispatch.gather) * bias.to(acc).index_select(0, expert)
    return by_pair(rows.sum(1), dispatch)


def empty_sums(like: Tensor, *shape: int) -> Tensor:
    """Unset float32 (float64 for float64)."""
    return like.new_empty(*shape, dtype=torch.promote_types(like.dtype, torch.float32))


add_expert_bias_op = custom_op(
    "megablocks::add_expert_bias",
    fake=lambda a: a.rows.new_empty(a.rows.shape),
    kernel="megablocks.ops.grouped.bias_triton:add_expert_bias_launch",
)(add_expert_bias_ref)
expert_sum_op = custom_op(
    "megablocks::expert_sum",
    fake=lambda a: empty_sums(a.rows, a.offsets.shape[0] - 1, a.rows.shape[1]),
    kernel="megablocks.ops.grouped.bias_triton:expert_sum_launch",
)(expert_sum_ref)
output_bias_dot_op = custom_op(
    "megablocks::output_bias_dot",
    fake=lambda a: empty_sums(a.dy, a.dispatch.num_pairs),
    kernel="megablocks.ops.grouped.bias_triton:output_bias_dot_launch",
)(output_bias_dot_ref)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(inputs[2])


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    (offsets,) = ctx.saved_tensors
    need_rows, need_bias = ctx.needs_input_grad[:2]
    return (dy if need_rows else None), expert_sum_op(dy, offsets) if need_bias else None, None


add_expert_bias_op.register_autograd(_backward, setup_context=_setup_context)


def add_expert_bias(rows: Tensor, bias: Tensor, offsets: Tensor) -> Tensor:
    """Add `bias[e]` to the rows of expert e.

    Args:
        rows: (R, N) floating, sorted by expert.
        bias: (E, N) floating, cast to the rows' dtype.
        offsets: (E+1,) int32, as in `grouped_mm`.

    Returns:
        (R, N) in the rows' dtype; rows >= offsets[E] are unspecified. Differentiable in rows and bias.

    Raises:
        ValueError: shapes that do not fit.
    """
    if rows.dim() != 2 or bias.dim() != 2 or rows.shape[1] != bias.shape[1] or offsets.shape != (bias.shape[0] + 1,):
        raise ValueError(
            f"rows {tuple(rows.shape)}, bias {tuple(bias.shape)}, offsets {tuple(offsets.shape)}: "
            "must be (R, N), (E, N) and (E+1,)"
        )
    if offsets.dtype != torch.int32:
        raise ValueError(f"offsets is {offsets.dtype}: must be torch.int32")
    return add_expert_bias_op(rows, bias, offsets)
