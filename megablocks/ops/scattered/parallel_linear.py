"""ScatterMoE's operators: experts' linear maps over tokens in any order, without copies of them.

    y[p] = x[p] · w[e] + bias[e]      e = the expert of pair p

Legend: T tokens, K pairs a token here `k`, L = T·k pairs, E experts; G·F = L. Pairs stand "scattered", in token order,
or "grouped", sorted by expert: grouped row i is scattered pair sorted_scattered_idxs[i]. Each of x and y may be either:

    grouped_in   x (L, in), grouped          else x (T, in), scattered: pair p reads token p // k
    grouped_out  y (L, out), grouped         else y (L, out), scattered
    gates (G, F)                             y (G, out): y[g] = Σ_f gates[g, f] · (row g·F + f of the scattered y)

Names, arguments and layouts are ScatterMoE's (arXiv 2403.08245; github.com/shawntan/scattermoe), and unlike there the
sort is stable, an id outside [0, E) means "no expert" (rows of zeros), the L rows before the gates are not kept for
backward, and no saved tensor is written to. Backward takes the gradient of the gates from ⟨dY · wᵀ, x⟩ + ⟨dY, bias⟩.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megablocks.ops.grouped.grouped_mm import is_transposed, under_autocast
from megablocks.ops.library import custom_op
from megablocks.ops.routing.dispatch import count_valid
from megablocks.ops.scattered.products import (
    scattered_rows,
    scattered_rows_ref,
    scattered_weights,
)


def flatten_sort_count(expert_idxs: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sort pairs by expert, stably, without a host synchronisation.

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


def parallel_linear_ref(
    x: Tensor,
    w: Tensor,
    pair: Tensor,
    ends: Tensor,
    bias: Tensor | None,
    gates: Tensor | None,
    k: int,
    grouped_in: bool,
    grouped_out: bool,
) -> Tensor:
    """x (T, in) or (L, in), w (E, in, out), pair (L,), ends (E,), bias (E, out), gates (G, F) → (L or G, out)."""
    at = None if grouped_in else pair
    gate = None if gates is None else gates.flatten()
    out = None if grouped_out else pair
    none = (None, None, 1, None)
    y, _ = scattered_rows_ref(x, w, ends, pair.shape[0], at, k, out, bias, gate, pair, *none, True)
    return _sum_of(y, 1 if gates is None else gates.shape[1])


def _sum_of(rows: Tensor, fan: int) -> Tensor:
    """(G·F, N) → (G, N), summed in float32 and rounded once."""
    # the dtype is named, or autocast would widen the sum on a GPU
    return rows if fan == 1 else rows.view(-1, fan, rows.shape[1]).sum(1, dtype=rows.dtype)


@custom_op("megablocks::parallel_linear", mutates_args=())
def parallel_linear_op(
    x: Tensor,
    w: Tensor,
    pair: Tensor,
    ends: Tensor,
    bias: Tensor | None,
    gates: Tensor | None,
    k: int,
    grouped_in: bool,
    grouped_out: bool,
) -> Tensor:
    y, _ = scattered_rows(
        x, w, ends, pair.shape[0],
        in_index=None if grouped_in else pair, in_fan=k, out_index=None if grouped_out else pair, bias=bias,
        gate=None if gates is None else gates.flatten(), pair=pair, zero_tail=True,
    )  # fmt: skip
    return _sum_of(y, 1 if gates is None else gates.shape[1])


@parallel_linear_op.register_fake
def _(
    x: Tensor,
    w: Tensor,
    pair: Tensor,
    ends: Tensor,
    bias: Tensor | None,
    gates: Tensor | None,
    k: int,
    grouped_in: bool,
    grouped_out: bool,
) -> Tensor:
    return x.new_empty(pair.shape[0] if gates is None else gates.shape[0], w.shape[2])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, w, pair, ends, bias, gates, ctx.k, ctx.grouped_in, ctx.grouped_out = inputs
    need_x, need_w, _, _, need_bias, need_gates = ctx.needs_input_grad[:6]
    ctx.transposed, ctx.num_tokens = is_transposed(w), x.shape[0]
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.save_for_backward(
        x if need_w or need_bias or need_gates else None,
        w if need_x or need_gates else None,
        pair, ends, bias if need_gates else None, gates,
    )  # fmt: skip


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, w, pair, ends, bias, gates = ctx.saved_tensors
    need_x, need_w, _, _, need_bias, need_gates = ctx.needs_input_grad[:6]
    dx = dw = d_bias = d_gates = None
    # the gradient of grouped row i is row dy_index[i] // fan of dy, times its gate
    fan, gate = (1, None) if gates is None else (gates.shape[1], gates.flatten())
    dy_index, x_index = (None if ctx.grouped_out else pair), (None if ctx.grouped_in else pair)
    if need_x or need_gates:
        rows, dots = scattered_rows(
            dy, w.transpose(1, 2), ends, pair.shape[0],
            in_index=dy_index, in_fan=fan, out_index=x_index, gate=gate, pair=pair,
            other=x if need_gates else None, other_index=x_index, other_fan=ctx.k, dot_bias=bias, zero_tail=True,
        )  # fmt: skip
        dx = _sum_of(rows, ctx.k) if need_x else None
        d_gates = dots.view(gates.shape).to(gates.dtype) if need_gates else None
    if need_w or need_bias:
        dw, sums = scattered_weights(
            x, dy, ends, a_index=x_index, a_fan=ctx.k, b_index=dy_index, b_fan=fan, gate=gate, pair=pair,
            transposed=ctx.transposed, with_sums=need_bias,
        )  # fmt: skip
        d_bias = sums.to(ctx.bias_dtype) if need_bias else None
    return dx, (dw if need_w else None), None, None, d_bias, d_gates, None, None, None


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
    """Each pair's row times its expert's matrix; differentiable in inputs, expert_weights, expert_biases and gates.

    Args:
        inputs: (T, in), or (L, in) with grouped_in, where k is 1; float32, float16, bfloat16 or float64.
        expert_weights: (E, in, out), same dtype, of any stride.
        k: pairs a token of `inputs`.
        sorted_expert_idxs, sorted_scattered_idxs, expert_offsets: of `flatten_sort_count`. The first is not read: the
            offsets say the same.
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
    return parallel_linear_op(
        inputs, expert_weights, sorted_scattered_idxs, expert_offsets, expert_biases, gates, k, grouped_in, grouped_out
    )
