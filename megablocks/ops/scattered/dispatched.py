"""Products that gather and scatter rows in their own loads and stores, and an expert MLP's two linear maps on them.

    scattered_mm      y[out(p)] = weight(p) · (x[in(p)] · w[e] + bias[e])
                      dots[pair(p)] = ⟨x[in(p)] · w[e], other[out(p)]⟩ + ⟨x[in(p)], dot_bias[e]⟩
    scattered_mm_dw   dw[e] = Σ_p a[in(p)]ᵀ · (weight(p) · b[out(p)])          sums[e] = Σ_p weight(p) · b[out(p)]
    gathered_linear   y[p] = x[gather[p]] · w[e] + bias[e]                                        (T, H) → (R, N)
    linear_combine    y[t] = Σ_{rows p of t} weight(p) · (act(pre[p], gate[p]) · w[e] + bias[e])   (R, I) → (T, H)

Legend: T tokens, H hidden, I expert width, E experts, R rows, M, N sizes of a matrix. e is the expert of row p and
weight(p) = weight[pair(p)], or 1 without weights; `Rows` has in, out and pair. scattered_mm computes forward, and with
wᵀ backward: there x is the gradient of the output, `other` the input, and dots the gradient of the weights, so no
output is saved for it (SonicMoE, arXiv 2512.14080, dS = ⟨dA′, A⟩). Only the operands are saved for backward, never R·H
values. linear_combine computes the activation again in backward. Source: ScatterMoE (arXiv 2403.08245).
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from megablocks.ops.activation import activation_backward_op, activation_op, check_activation
from megablocks.ops.activation_table import Activation
from megablocks.ops.grouped.bias import empty_sums
from megablocks.ops.grouped.grouped_mm import is_transposed
from megablocks.ops.library import custom_op, under_autocast
from megablocks.ops.permute.rows import combine_op
from megablocks.ops.routing.dispatch import Dispatch, Rows


def _at(index: Tensor | None, p: slice, fan: int = 1) -> Tensor | slice:
    """The rows at places p: p itself without an index, otherwise those of the index, with `fan` places per row."""
    return p if index is None else index[p].long() // fan


def _experts(ends: Tensor) -> Iterable[tuple[int, slice]]:
    """Each expert with its places. Reads the ends on the host."""
    return enumerate(slice(start, end) for start, end in pairwise([0, *ends.tolist()]))


def scattered_mm_ref(
    x: Tensor, w: Tensor, bias: Tensor | None, weight: Tensor | None, other: Tensor | None, dot_bias: Tensor | None,
    rows: Rows, zero_tail: bool = True,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """x (S, M), w (E, M, N) → y (R, N) in x's dtype, dots (R,) float32 (float64 for float64), None without `other`.

    bias: (E, N). weight: (R,). other: (S', N) and dot_bias (E, M), for the dots.
    zero_tail: rows of y without an expert are 0, and out_index must be a permutation; otherwise they stay unwritten.
    """
    acc = torch.promote_types(x.dtype, torch.float32)
    y = x.new_zeros((x if rows.in_index is None else rows.in_index).shape[0], w.shape[2])
    dots = y.new_zeros(y.shape[0], dtype=acc)
    for e, p in _experts(rows.ends):
        left, pair = x[_at(rows.in_index, p, rows.in_fan)].to(acc), _at(rows.pair, p)
        product = left @ w[e].to(acc)
        if other is not None:
            dots[pair] = (product * other[_at(rows.out_index, p, rows.out_fan)]).sum(1)
            if dot_bias is not None:
                dots[pair] += left @ dot_bias[e].to(acc)
        if bias is not None:
            product += bias[e]
        if weight is not None:
            product *= weight[pair].to(acc).unsqueeze(1)
        y[_at(rows.out_index, p)] = product.to(y.dtype)
    return y, None if other is None else dots


def scattered_mm_dw_ref(
    a: Tensor, b: Tensor, weight: Tensor | None, rows: Rows, transposed: bool, with_sums: bool
) -> tuple[Tensor, Tensor | None]:
    """a (S, M), b (S', N) → dw (E, M, N) in a's dtype, sums (E, N) float32 (float64 for float64) or None.

    transposed: dw has the layout (E, N, M), so that a parameter behind a transposed view needs no copy.
    """
    dw, acc = rows.empty_dw(a, b, transposed), torch.promote_types(a.dtype, torch.float32)
    sums = b.new_empty(dw.shape[0], dw.shape[2], dtype=acc)
    for e, p in _experts(rows.ends):
        right = b[_at(rows.out_index, p, rows.out_fan)].to(acc)
        if weight is not None:
            right = right * weight[_at(rows.pair, p)].to(acc).unsqueeze(1)
        dw[e] = a[_at(rows.in_index, p, rows.in_fan)].to(acc).t() @ right
        sums[e] = right.sum(0)
    return dw, sums if with_sums else None


scattered_mm_op = custom_op(
    "megablocks::scattered_mm",
    fake=lambda a: (
        a.x.new_empty(a.rows.count(a.x), a.w.shape[2]),
        None if a.other is None else empty_sums(a.x, a.rows.count(a.x)),
    ),
    kernel="megablocks.ops.grouped.grouped_mm_triton:scattered_mm_launch",
)(scattered_mm_ref)


def _fake_scattered_mm_dw(a: Any) -> tuple[Tensor, Tensor | None]:
    dw = a.rows.empty_dw(a.a, a.b, a.transposed)
    return dw, empty_sums(a.a, dw.shape[0], dw.shape[2]) if a.with_sums else None


scattered_mm_dw_op = custom_op(
    "megablocks::scattered_mm_dw",
    fake=_fake_scattered_mm_dw,
    kernel="megablocks.ops.grouped.grouped_mm_triton:scattered_mm_dw_launch",
)(scattered_mm_dw_ref)


@custom_op("megablocks::gathered_linear", fake=lambda a: a.x.new_empty(a.dispatch.num_rows, a.w.shape[2]))
def gathered_linear_op(x: Tensor, w: Tensor, bias: Tensor | None, dispatch: Dispatch) -> Tensor:
    rows = Rows(dispatch.expert_offsets[1:], in_index=dispatch.gather)
    return scattered_mm_op.implementation(x, w, bias, None, None, None, rows, False)[0]


def _save_linear(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, w, _, dispatch = inputs
    need_x, need_w, need_bias = ctx.needs_input_grad[:3]
    ctx.transposed = is_transposed(w)
    ctx.save_for_backward(x if need_w or need_bias else None, w if need_x else None, *dispatch[:5])


def _linear_backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, w, *indices = ctx.saved_tensors
    dispatch = Dispatch(*indices)
    need_x, need_w, need_bias = ctx.needs_input_grad[:3]
    ends, dx, dw, d_bias = dispatch.expert_offsets[1:], None, None, None
    if need_x:
        rows, _ = scattered_mm_op(dy, w.transpose(1, 2), None, None, None, None, Rows(ends), False)
        dx = combine_op(rows, None, dispatch)
    if need_w or need_bias:
        dw, d_bias = scattered_mm_dw_op(x, dy, None, Rows(ends, in_index=dispatch.gather), ctx.transposed, need_bias)
    return dx, dw if need_w else None, d_bias if need_bias else None, None


gathered_linear_op.register_autograd(_linear_backward, setup_context=_save_linear)


def gathered_linear(x: Tensor, w: Tensor, bias: Tensor | None, dispatch: Dispatch) -> Tensor:
    """Multiply each row's token by its expert's matrix.

    Args:
        x: (T, H) floating.
        w: (E, H, N), same dtype, of any stride.
        bias: (E, N) floating, or None.
        dispatch: of T tokens, E experts and R pairs, not padded.

    Returns:
        (R, N) in x's dtype; rows from the last offset on are unspecified. Differentiable in x, w and bias.

    Raises:
        ValueError: shapes or dtypes that do not fit, or a dispatch that is padded or has fewer rows than pairs.
    """
    if not x.is_meta and torch.is_autocast_enabled(x.device.type):
        x, w = under_autocast(x, w)
    _check(x, "x", w, bias, dispatch, dispatch.token_offsets.shape[0] - 1)
    return gathered_linear_op(x, w, bias, dispatch)


_IDENTITY = Activation("")


@custom_op("megablocks::linear_combine", fake=lambda a: a.pre.new_empty(a.dispatch.num_tokens, a.w.shape[2]))
def linear_combine_op(
    pre: Tensor, gate: Tensor | None, w: Tensor, bias: Tensor | None, weight: Tensor | None, dispatch: Dispatch,
    activation: Activation,
) -> Tensor:  # fmt: skip
    act = pre if activation == _IDENTITY else activation_op(pre, gate, activation)
    rows = Rows(dispatch.expert_offsets[1:], pair=dispatch.pair)
    y, _ = scattered_mm_op.implementation(act, w, bias, weight, None, None, rows, False)
    return combine_op.implementation(y, None, dispatch)


def _save_combine(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    pre, gate, w, bias, weight, dispatch, ctx.activation = inputs
    need_pre, need_gate, _, _, need_weight = ctx.needs_input_grad[:5]
    ctx.transposed = is_transposed(w)
    kept = w if need_pre or need_gate or need_weight else None, bias if need_weight else None
    ctx.save_for_backward(pre, gate, *kept, weight, *dispatch[:5])


def _combine_backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    pre, gate, w, bias, weight, *indices = ctx.saved_tensors
    dispatch, activation = Dispatch(*indices), ctx.activation
    need_pre, need_gate, need_w, need_bias, need_weight = ctx.needs_input_grad[:5]
    d_pre = d_gate = dw = d_bias = d_weight = None
    act = pre if activation == _IDENTITY else activation_op(pre, gate, activation)
    rows = Rows(dispatch.expert_offsets[1:], out_index=dispatch.gather, pair=dispatch.pair)
    if need_pre or need_gate or need_weight:
        other = act if need_weight else None
        d_act, d_weight = scattered_mm_op(dy, w.transpose(1, 2), None, weight, other, bias, rows.swapped(), False)
        d_pre = d_act
        if activation != _IDENTITY and (need_pre or need_gate):
            d_pre, d_gate = activation_backward_op(d_act, pre, gate, activation)
    if need_w or need_bias:
        dw, d_bias = scattered_mm_dw_op(act, dy, weight, rows, ctx.transposed, need_bias)
    grads = zip((d_pre, d_gate, dw, d_bias, d_weight), ctx.needs_input_grad[:5], strict=True)
    return *(grad if need else None for grad, need in grads), None, None


linear_combine_op.register_autograd(_combine_backward, setup_context=_save_combine)


def linear_combine(
    pre: Tensor, gate: Tensor | None, w: Tensor, bias: Tensor | None, weight: Tensor | None, dispatch: Dispatch,
    activation: Activation | None = None,
) -> Tensor:  # fmt: skip
    """Project rows down, multiply them by their weights, and sum each token's rows.

    Args:
        pre: (R, I) floating: the pre-activation, or without `activation` the operand itself.
        gate: (R, I), same dtype, for a gated activation, otherwise None.
        w: (E, I, H), same dtype, of any stride.
        bias: (E, H) floating, or None. weight: (R,) floating, one per pair in the order of the Routing; None for ones.
        dispatch: of T tokens, E experts and R pairs, not padded.

    Returns:
        (T, H) in pre's dtype; 0 for a token without an expert. Differentiable in pre, gate, w, bias and weight.

    Raises:
        ValueError: as for `gathered_linear`, or a gate that does not fit the activation.
    """
    if not pre.is_meta and torch.is_autocast_enabled(pre.device.type):
        pre, gate, w = under_autocast(pre, gate, w)
    if activation is not None:
        check_activation(pre, gate, activation)
    elif gate is not None:
        raise ValueError("gate is given: must be None without an activation")
    _check(pre, "pre", w, bias, dispatch, dispatch.pair.shape[0])
    if weight is not None and weight.shape != dispatch.scatter.shape:
        raise ValueError(f"weight is {tuple(weight.shape)}: must be {tuple(dispatch.scatter.shape)}, one a pair")
    return linear_combine_op(pre, gate, w, bias, weight, dispatch, activation or _IDENTITY)


def _check(x: Tensor, name: str, w: Tensor, bias: Tensor | None, dispatch: Dispatch, rows: int) -> None:
    experts = dispatch.expert_offsets.shape[0] - 1
    if dispatch.padded:
        raise ValueError("dispatch has padded rows: must be as build_dispatch made it")
    if dispatch.gather.shape[0] < dispatch.scatter.shape[0]:  # Dynamo of torch 2.8 traces no property of a NamedTuple
        raise ValueError("dispatch has fewer rows than pairs: mlp_impl='scatter' needs dispatch_rows_factor >= ranks")
    if x.dim() != 2 or x.shape[0] != rows:
        raise ValueError(f"{name} is {tuple(x.shape)}: must have {rows} rows, as the dispatch says")
    if w.dim() != 3 or w.shape[0] != experts or w.shape[1] != x.shape[1]:
        raise ValueError(f"w is {tuple(w.shape)}: must be ({experts}, {x.shape[1]}, N), a matrix an expert")
    if w.dtype != x.dtype:
        raise ValueError(f"w is {w.dtype}, must be {x.dtype} as {name} is: cast one, or run under autocast")
    if bias is not None and bias.shape != (experts, w.shape[2]):
        raise ValueError(f"bias is {tuple(bias.shape)}: must be ({experts}, {w.shape[2]})")
