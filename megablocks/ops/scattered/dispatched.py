"""The scattered products over a `Dispatch`, for any routing: up with the gather fused, down with weights and combine.

    up     y[p] = x[gather[p]] · w[e] + bias[e]                                (T, H) → (R, N)
    down   y[t] = Σ_{rows p of t} weight[pair[p]] · (act(z[p], g[p]) · w[e] + bias[e])      (R, I) → (T, H)

Legend: T tokens, H hidden, I expert width, E experts, R rows of the dispatch, V <= R used ones; rows from V on are
unspecified and reach no result. Kept for backward: x and, by `down`, what it is given: never R·H values. `down` takes
z and g and computes the activation again in backward, or takes the activation itself (name "").
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from megablocks.ops.activation import activation_backward_op, activation_op, check_activation
from megablocks.ops.grouped.grouped_mm import is_transposed, under_autocast
from megablocks.ops.library import custom_op
from megablocks.ops.permute.combine import combine_op
from megablocks.ops.routing.dispatch import Dispatch
from megablocks.ops.scattered.products import scattered_rows, scattered_weights


@custom_op("megablocks::gathered_linear", mutates_args=())
def gathered_linear_op(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    offsets: Tensor,
    token_offsets: Tensor,
    gather: Tensor,
    scatter: Tensor,
    pair: Tensor,
) -> Tensor:
    return scattered_rows(x, w, offsets[1:], gather.shape[0], in_index=gather, bias=bias)[0]


@gathered_linear_op.register_fake
def _(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    offsets: Tensor,
    token_offsets: Tensor,
    gather: Tensor,
    scatter: Tensor,
    pair: Tensor,
) -> Tensor:
    return x.new_empty(gather.shape[0], w.shape[2])


def _up_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, w, bias, *indices = inputs
    need_x, need_w, need_bias = ctx.needs_input_grad[:3]
    ctx.transposed, ctx.bias_dtype = is_transposed(w), None if bias is None else bias.dtype
    ctx.save_for_backward(x if need_w or need_bias else None, w if need_x else None, *indices)


def _up_backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, w, offsets, token_offsets, gather, scatter, pair = ctx.saved_tensors
    need_x, need_w, need_bias = ctx.needs_input_grad[:3]
    dx = dw = d_bias = None
    if need_x:
        rows, _ = scattered_rows(dy, w.transpose(1, 2), offsets[1:], gather.shape[0])
        dx = combine_op(rows, None, pair, gather, scatter, token_offsets)
    if need_w or need_bias:
        dw, sums = scattered_weights(x, dy, offsets[1:], a_index=gather, transposed=ctx.transposed, with_sums=need_bias)
        d_bias = sums.to(ctx.bias_dtype) if need_bias else None
    return dx, (dw if need_w else None), d_bias, None, None, None, None, None


gathered_linear_op.register_autograd(_up_backward, setup_context=_up_context)


def gathered_linear(x: Tensor, w: Tensor, bias: Tensor | None, dispatch: Dispatch) -> Tensor:
    """Each row's token times its expert's matrix.

    Args:
        x: (T, H) floating.
        w: (E, H, N), same dtype, of any stride.
        bias: (E, N) floating, or None.
        dispatch: of T tokens, E experts and R pairs.

    Returns:
        (R, N) in x's dtype; rows from the last offset on are unspecified.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    x, w = under_autocast(x, w)
    _check(x, "x", w, bias, dispatch, dispatch.token_offsets.shape[0] - 1)
    offsets, token_offsets, gather, scatter, pair = dispatch
    return gathered_linear_op(x, w, bias, offsets, token_offsets, gather, scatter, pair)


@custom_op("megablocks::linear_combine", mutates_args=())
def linear_combine_op(
    z: Tensor,
    g: Tensor | None,
    w: Tensor,
    bias: Tensor | None,
    weight: Tensor | None,
    offsets: Tensor,
    token_offsets: Tensor,
    gather: Tensor,
    scatter: Tensor,
    pair: Tensor,
    name: str,
    approximate: str,
) -> Tensor:
    act = activation_op(z, g, name, approximate) if name else z
    rows, _ = scattered_rows(act, w, offsets[1:], pair.shape[0], bias=bias, gate=weight, pair=pair)
    return combine_op(rows, None, pair, gather, scatter, token_offsets)


@linear_combine_op.register_fake
def _(
    z: Tensor,
    g: Tensor | None,
    w: Tensor,
    bias: Tensor | None,
    weight: Tensor | None,
    offsets: Tensor,
    token_offsets: Tensor,
    gather: Tensor,
    scatter: Tensor,
    pair: Tensor,
    name: str,
    approximate: str,
) -> Tensor:
    return z.new_empty(token_offsets.shape[0] - 1, w.shape[2])


def _down_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    z, g, w, bias, weight, *indices, ctx.name, ctx.approximate = inputs
    need_z, need_g, _, _, need_weight = ctx.needs_input_grad[:5]
    ctx.transposed, ctx.bias_dtype = is_transposed(w), None if bias is None else bias.dtype
    saved_bias = bias if need_weight else None
    ctx.save_for_backward(z, g, w if need_z or need_g or need_weight else None, saved_bias, weight, *indices)


def _down_backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    z, g, w, bias, weight, offsets, token_offsets, gather, scatter, pair = ctx.saved_tensors
    need_z, need_g, need_w, need_bias, need_weight = ctx.needs_input_grad[:5]
    dz = dg = dw = d_bias = d_weight = None
    act = activation_op(z, g, ctx.name, ctx.approximate) if ctx.name else z
    if need_z or need_g or need_weight:
        d_act, dots = scattered_rows(
            dy, w.transpose(1, 2), offsets[1:], pair.shape[0], in_index=gather, gate=weight, pair=pair,
            other=act if need_weight else None, dot_bias=bias,
        )  # fmt: skip
        d_weight = dots.to(weight.dtype) if need_weight else None
        dz = d_act
        if ctx.name and (need_z or need_g):
            dz, dg = activation_backward_op(d_act, z, g, ctx.name, ctx.approximate)
    if need_w or need_bias:
        dw, sums = scattered_weights(
            act, dy, offsets[1:], b_index=gather, gate=weight, pair=pair, transposed=ctx.transposed, with_sums=need_bias
        )
        d_bias = sums.to(ctx.bias_dtype) if need_bias else None
    grads = (dz if need_z else None, dg if need_g else None, dw if need_w else None, d_bias, d_weight)
    return *grads, None, None, None, None, None, None, None


linear_combine_op.register_autograd(_down_backward, setup_context=_down_context)


def linear_combine(
    z: Tensor,
    g: Tensor | None,
    w: Tensor,
    bias: Tensor | None,
    weight: Tensor | None,
    dispatch: Dispatch,
    name: str = "",
    approximate: str = "tanh",
) -> Tensor:
    """Project rows down, weigh them, and add up each token's.

    Args:
        z: (R, I) floating: the pre-activation of `name`, or with name "" the operand itself.
        g: (R, I), same dtype, for a gated `name`, else None.
        w: (E, I, H), same dtype, of any stride.
        bias: (E, H) floating, or None. weight: (R,) floating, one a pair in the order of the Routing; None for ones.
        dispatch: of T tokens, E experts and R pairs.
        name, approximate: as in `activate`.

    Returns:
        (T, H) in z's dtype; 0 for a token without an expert.

    Raises:
        ValueError: shapes, dtypes or names that do not fit.
    """
    z, w = under_autocast(z, w)
    if g is not None:
        (g,) = under_autocast(g)
    if name or g is not None:
        check_activation(z, g, name, approximate)
    num_pairs = dispatch.pair.shape[0]
    _check(z, "z", w, bias, dispatch, num_pairs)
    if weight is not None and weight.shape != (num_pairs,):
        raise ValueError(f"weight is {tuple(weight.shape)}: must be ({num_pairs},), one a pair of the dispatch")
    offsets, token_offsets, gather, scatter, pair = dispatch
    return linear_combine_op(
        z, g, w, bias, weight, offsets, token_offsets, gather, scatter, pair, name, approximate
    )  # fmt: skip


def _check(x: Tensor, name: str, w: Tensor, bias: Tensor | None, dispatch: Dispatch, rows: int) -> None:
    experts = dispatch.expert_offsets.shape[0] - 1
    if x.dim() != 2 or x.shape[0] != rows:
        raise ValueError(f"{name} is {tuple(x.shape)}: must have {rows} rows, as the dispatch says")
    if w.dim() != 3 or w.shape[0] != experts or w.shape[1] != x.shape[1]:
        raise ValueError(f"w is {tuple(w.shape)}: must be ({experts}, {x.shape[1]}, N), a matrix an expert")
    if w.dtype != x.dtype:
        raise ValueError(f"w is {w.dtype}, must be {x.dtype} as {name} is: cast one, or run under autocast")
    if bias is not None and bias.shape != (experts, w.shape[2]):
        raise ValueError(f"bias is {tuple(bias.shape)}: must be ({experts}, {w.shape[2]})")
