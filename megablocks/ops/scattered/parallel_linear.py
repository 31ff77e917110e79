"""ScatterMoE's operators: experts' linear maps over tokens in any order, without copies of them.

    y[p] = x[p] · w[e] + bias[e]      e = the expert of pair p

Legend: T tokens, k pairs per token, L = T·k pairs, E experts; G·F = L. Pairs are "scattered", in token order, or
"grouped", sorted by expert: grouped row i is scattered pair sorted_scattered_idxs[i]. x and y can each be either:

    grouped_in   x (L, in), grouped          otherwise x (T, in), scattered: pair p reads token p // k
    grouped_out  y (L, out), grouped         otherwise y (L, out), scattered
    gates (G, F)                             y (G, out): y[g] = Σ_f gates[g, f] · (row g·F + f of the scattered y)

Names, arguments and layouts are ScatterMoE's (arXiv 2403.08245; github.com/shawntan/scattermoe). Unlike there, the sort
is stable, an id outside [0, E) means "no expert" (rows of zeros), the L rows before the gates are not saved for
backward, and no saved tensor is overwritten. The gradient of the gates is ⟨dY · wᵀ, x⟩ + ⟨dY, bias⟩.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megablocks.ops.grouped.grouped_mm import is_transposed
from megablocks.ops.library import custom_op, under_autocast
from megablocks.ops.routing.dispatch import Rows, count_valid
from megablocks.ops.scattered.dispatched import scattered_mm_dw_op, scattered_mm_op


def flatten_sort_count(expert_idxs: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sort pairs by expert, stably, without a host synchronization.

    Args:
        expert_idxs: (T, k), or of any shape with L elements, integer; ids outside [0, E) are "no expert".
        num_experts: E.

    Returns:
        sorted_expert_idxs (L,), in the dtype given, with E for "no expert", last; sorted_scattered_idxs (L,) int64, the
        pair of each; expert_offsets (E,) int64, the end of each expert's pairs.
    """
    with torch.no_grad():
        flat = expert_idxs.flatten()
        key = torch.where((flat >= 0) & (flat < num_experts), flat, num_experts)
        sorted_experts, sorted_pairs = torch.sort(key, stable=True)
        return sorted_experts, sorted_pairs, count_valid(flat, num_experts).cumsum(0)


def _sum_of(rows: Tensor, fan: int) -> Tensor:
    """(G·F, N) → (G, N), summed in float32 and rounded once."""
    # without the dtype, autocast would widen the sum on a GPU
    return rows if fan == 1 else rows.view(-1, fan, rows.shape[1]).sum(1, dtype=rows.dtype)


@custom_op(
    "megablocks::parallel_linear",
    fake=lambda a: a.x.new_empty(a.rows.count(a.x) // a.rows.out_fan, a.w.shape[2]),
)
def parallel_linear_op(x: Tensor, w: Tensor, bias: Tensor | None, weight: Tensor | None, rows: Rows) -> Tensor:
    """x (T, in) or (L, in), w (E, in, out), bias (E, out), weight (L,) → (L / rows.out_fan, out)."""
    return _sum_of(scattered_mm_op(x, w, bias, weight, None, None, rows, True)[0], rows.out_fan)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, w, bias, weight, rows = inputs
    need_x, need_w, need_bias, need_weight = ctx.needs_input_grad[:4]
    ctx.transposed = is_transposed(w)
    *indices, ctx.in_fan, ctx.out_fan = rows
    kept_x, kept_w = x if need_w or need_bias or need_weight else None, w if need_x or need_weight else None
    ctx.save_for_backward(kept_x, kept_w, bias if need_weight else None, weight, *indices)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, w, bias, weight, *indices = ctx.saved_tensors
    rows = Rows._make((*indices, ctx.in_fan, ctx.out_fan))
    need_x, need_w, need_bias, need_weight = ctx.needs_input_grad[:4]
    dx = dw = d_bias = d_weight = None
    if need_x or need_weight:
        other = x if need_weight else None
        d_rows, d_weight = scattered_mm_op(dy, w.transpose(1, 2), None, weight, other, bias, rows.swapped(), True)
        dx = _sum_of(d_rows, rows.in_fan) if need_x else None
    if need_w or need_bias:
        dw, d_bias = scattered_mm_dw_op(x, dy, weight, rows, ctx.transposed, need_bias)
    grads = zip((dx, dw, d_bias, d_weight), ctx.needs_input_grad[:4], strict=True)
    return *(grad if need else None for grad, need in grads), None


parallel_linear_op.register_autograd(_backward, setup_context=_setup_context)


def parallel_linear(
    inputs: Tensor,
    expert_weights: Tensor,
    k: int,
    sorted_expert_idxs: Tensor,
    sorted_scattered_idxs: Tensor,
    expert_offsets: Tensor,
    expert_biases: Tensor | None = None,
    gates: Tensor | None = None,
    grouped_in: bool = False,
    grouped_out: bool = False,
) -> Tensor:
    """Multiply each pair's row by its expert's matrix.

    Differentiable in inputs, expert_weights, expert_biases and gates.

    Args:
        inputs: (T, in), or (L, in) with grouped_in, where k is 1; float32, float16, bfloat16 or float64.
        expert_weights: (E, in, out), same dtype, of any stride.
        k: pairs per token of `inputs`.
        sorted_expert_idxs, sorted_scattered_idxs, expert_offsets: (L,), (L,) and (E,) integer, of `flatten_sort_count`.
            The first is not read, because the offsets contain the same.
        expert_biases: (E, out) floating.
        gates: (G, F) floating, G·F = L, over scattered rows: not with grouped_out.
        grouped_in, grouped_out: the order of the rows, see the module.

    Returns:
        (L, out), or (G, out) with gates, in inputs' dtype; 0 for a pair without an expert.

    Raises:
        ValueError: shapes or dtypes that do not fit, gates with grouped_out.
    """
    inputs, expert_weights = under_autocast(inputs, expert_weights)
    pairs = sorted_scattered_idxs.shape[0]
    if inputs.dim() != 2 or expert_weights.dim() != 3 or inputs.shape[1] != expert_weights.shape[1]:
        shapes = f"inputs {tuple(inputs.shape)}, expert_weights {tuple(expert_weights.shape)}"
        raise ValueError(f"{shapes}: must be (rows, in) and (E, in, out)")
    if inputs.dtype != expert_weights.dtype:
        raise ValueError(f"expert_weights is {expert_weights.dtype}, must be {inputs.dtype} as inputs is")
    experts, _, out = expert_weights.shape
    if sorted_expert_idxs.shape != (pairs,) or expert_offsets.shape != (experts,):
        raise ValueError(
            f"sorted_expert_idxs {tuple(sorted_expert_idxs.shape)}, expert_offsets {tuple(expert_offsets.shape)}: "
            f"must be ({pairs},) as sorted_scattered_idxs is, and ({experts},), one an expert"
        )
    if inputs.shape[0] * k != pairs or k < 1 or (grouped_in and k != 1):
        needed = "k must be 1 with grouped_in" if grouped_in and k != 1 else f"rows·k must be the {pairs} pairs"
        raise ValueError(f"inputs has {inputs.shape[0]} rows, k={k}: {needed}")
    if expert_biases is not None and expert_biases.shape != (experts, out):
        raise ValueError(f"expert_biases is {tuple(expert_biases.shape)}: must be ({experts}, {out})")
    if gates is not None and (gates.dim() != 2 or gates.numel() != pairs):
        raise ValueError(f"gates is {tuple(gates.shape)}: must be (G, F) with G·F={pairs}, one a pair")
    if gates is not None and grouped_out:
        raise ValueError("grouped_out=True: must be False with gates, which weigh and add up scattered rows")
    rows = Rows(
        expert_offsets,
        in_index=None if grouped_in else sorted_scattered_idxs,
        out_index=None if grouped_out else sorted_scattered_idxs,
        pair=sorted_scattered_idxs,
        in_fan=k,
        out_fan=1 if gates is None else gates.shape[1],
    )
    weight = None if gates is None else gates.flatten()
    return parallel_linear_op(inputs, expert_weights, expert_biases, weight, rows)
