"""The whole MLP of a layer's experts as one differentiable op that keeps what its gradient cannot do without.

    a = act(x[token] · w1ᵀ + b1), or act(…) ⊙ (x[token] · v1ᵀ + c1)       y[t] = Σ over t's pairs of s · (a · w2 + b2)

Legend: T tokens, H hidden, R rows and pairs, E experts, I expert width, s a pair's weight. Row p computes pair pair[p].

Forward: up with its activation, down, combine. Kept for backward: x, z and u (the two factors before the activation),
s and the indices: 2·T·H + 4·R·I bytes in bfloat16 where gated (2·T·H + 2·R·I else), or with `recompute` x and s alone;
x and the factors also quantised (`ops.quant`). Neither a nor anything of size R·H outlives a call. Backward:

    dA = dY[token] · w2ᵀ            → d_z, d_u, s·a and dS = ⟨dA, a⟩ (+ ⟨dY, b2⟩), one pass     (gradient.py)
    dW2 = (s·a)ᵀ · dY[token]        db2[e] = Σ s · dY[token]
    dX  = Σ over t's pairs of d_z · w1 + d_u · v1       dW1 = d_zᵀ · x[token], dV1 = d_uᵀ · x[token]

The weights' gradients may go to float32 buffers of the caller's instead (`main_grads`), each added as it is computed.

Where the weights are s = scaling · softmax of x · router_weight[e] over a token's K pairs, they pass on a gradient to x
too, with a term for each pair and none for other experts: ds_p · router_weight[e], ds_p the slope of the pair's logit.
Given router_weight, dX's rows get theirs before they are rounded and summed, which costs no byte of (T, H), where the
router's product of (T, E) · (E, H) reads dX and writes it again.

Source: SonicMoE (arXiv 2512.14080), section 3.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megablocks.ops.activation import GATED, check_activation
from megablocks.ops.dtypes import accumulation_dtype
from megablocks.ops.fused.gradient import down_gradient_op
from megablocks.ops.fused.up import fused_up_op
from megablocks.ops.grouped.bias import add_expert_bias_op, expert_of_row, expert_sum_op
from megablocks.ops.grouped.gathered_mm import (
    gathered_mm_dw_add_op,
    gathered_mm_dw_op,
    gathered_mm_dw_pair_add_op,
    gathered_mm_dw_pair_op,
    grouped_mm_outer_op,
    grouped_mm_sum_op,
)
from megablocks.ops.grouped.grouped_mm import grouped_mm_op, under_autocast
from megablocks.ops.library import custom_op, once_differentiable
from megablocks.ops.permute.combine import combine_op
from megablocks.ops.quant.saved import OFF, pack, unpack
from megablocks.ops.routing.dispatch import Dispatch
from megablocks.ops.routing.router import chosen_slopes_op

_WIDTH = 8  # columns of the narrowest product that every kernel takes


@custom_op("megablocks::fused_mlp", mutates_args=())
def fused_mlp_op(
    x: Tensor, weight: Tensor, w1: Tensor, v1: Tensor | None, w2: Tensor, b1: Tensor | None, c1: Tensor | None,
    b2: Tensor | None, pair: Tensor, gather: Tensor, scatter: Tensor, token_offsets: Tensor, offsets: Tensor,
    name: str, approximate: str, recompute: bool, in_order: bool, input_bits: int, pre_bits: int,
    main_w1: Tensor | None = None, main_v1: Tensor | None = None, main_w2: Tensor | None = None,
    router_weight: Tensor | None = None, router_scaling: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """y (T, H), and z and u (R, I) for backward: both empty with recompute, u empty unless gated."""
    z, u, a = fused_up_op(x, w1, v1, b1, c1, pair, gather, scatter, token_offsets, offsets, name, approximate)
    if recompute:
        z, u = x.new_empty(0), x.new_empty(0)
    rows = grouped_mm_op(a, w2, offsets)
    del a
    if b2 is not None:
        rows = add_expert_bias_op(rows, b2, offsets)
    y = rows if in_order else combine_op(rows, weight, pair, gather, scatter, token_offsets)
    return y, z, u


@fused_mlp_op.register_fake
def _(
    x: Tensor, weight: Tensor, w1: Tensor, v1: Tensor | None, w2: Tensor, b1: Tensor | None, c1: Tensor | None,
    b2: Tensor | None, pair: Tensor, gather: Tensor, scatter: Tensor, token_offsets: Tensor, offsets: Tensor,
    name: str, approximate: str, recompute: bool, in_order: bool, input_bits: int, pre_bits: int,
    main_w1: Tensor | None = None, main_v1: Tensor | None = None, main_w2: Tensor | None = None,
    router_weight: Tensor | None = None, router_scaling: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    z = x.new_empty(0 if recompute else (gather.shape[0], w1.shape[1]))
    return x.new_empty(x.shape), z, x.new_empty(0) if v1 is None else torch.empty_like(z)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, weight, w1, v1, w2, b1, c1, b2, *indices, ctx.name, ctx.approximate, ctx.recompute = inputs[:-8]
    # Not saved: other micro-batches add to these before this one's backward, which is no mistake here.
    ctx.in_order, input_bits, pre_bits, *ctx.main_grads, router_weight, ctx.router_scaling = inputs[-8:]
    _, z, u = output
    ctx.mark_non_differentiable(z, u)
    ctx.set_materialize_grads(False)
    ctx.packed_x, *kept_x = pack(x, input_bits)
    ctx.packed_z, *kept_z = pack(z, pre_bits)
    ctx.packed_u, *kept_u = pack(u, pre_bits)
    ctx.save_for_backward(*kept_x, *kept_z, *kept_u, weight, w1, v1, w2, b1, c1, b2, router_weight, *indices)


@once_differentiable
def _backward(ctx: Any, dy: Tensor | None, *_: Any) -> tuple[Any, ...]:
    x, x_scales, z, z_scales, u, u_scales, weight, w1, v1, w2, b1, c1, b2, router_weight, *indices = ctx.saved_tensors
    pair, gather, _, _, offsets = indices
    main_w1, main_v1, main_w2 = ctx.main_grads
    x, z, u = unpack(ctx.packed_x, x, x_scales), unpack(ctx.packed_z, z, z_scales), unpack(ctx.packed_u, u, u_scales)
    need_x, need_weight, need_w1, need_v1, need_w2, need_b1, need_c1, need_b2 = ctx.needs_input_grad[:8]
    dx = d_weight = dw1 = dv1 = dw2 = db1 = dc1 = db2 = None
    if dy is None:
        return (None,) * 24
    dy = dy.contiguous()  # an expanded gradient has strides that no kernel reads
    if ctx.recompute:
        z, u, _ = fused_up_op(x, w1, v1, b1, c1, *indices, ctx.name, ctx.approximate)
    below_act = need_x or need_w1 or need_v1 or need_b1 or need_c1
    if below_act or need_weight or need_w2:
        d_z, d_u, scaled, d_weight = down_gradient_op(
            dy, w2, z, None if v1 is None else u, weight, *indices, ctx.name, ctx.approximate
        )
        del z, u
        if need_w2:
            dw2 = _weight_gradient(main_w2, scaled, dy, indices)
        del scaled
        if b2 is not None and (need_weight or router_weight is not None):
            assert d_weight is not None
            d_weight = d_weight + _bias_gradient_of_weight(dy, b2, pair, gather, offsets, weight.dtype)
        if need_x:
            if router_weight is not None:
                top_k = max(weight.shape[0] // max(dy.shape[0], 1), 1)
                slope = chosen_slopes_op(weight, d_weight, pair, top_k, ctx.router_scaling)
                gated = (None, None) if v1 is None else (d_u, v1)
                rows = grouped_mm_outer_op(d_z, w1, *gated, slope, router_weight, offsets)
            elif v1 is None:
                rows = grouped_mm_op(d_z, w1, offsets)
            else:
                rows = grouped_mm_sum_op(d_z, w1, d_u, v1, offsets)
            dx = rows if ctx.in_order else combine_op(rows, None, *indices[:4])
            del rows
        if need_w1 and need_v1 and main_w1 is None and main_v1 is None:
            dw1, dv1 = gathered_mm_dw_pair_op(d_z, d_u, x, *indices)
        elif need_w1 and need_v1 and main_w1 is not None and main_v1 is not None:
            gathered_mm_dw_pair_add_op(main_w1, main_v1, d_z, d_u, x, *indices)
        else:
            dw1 = _weight_gradient(main_w1, d_z, x, indices) if need_w1 else None
            dv1 = _weight_gradient(main_v1, d_u, x, indices) if need_v1 else None
        db1 = expert_sum_op(d_z, offsets).to(b1.dtype) if need_b1 else None
        dc1 = expert_sum_op(d_u, offsets).to(c1.dtype) if need_c1 else None
    if need_b2:
        # Σ s·dY is a product with one column of weights
        scale = weight.to(dy.dtype).index_select(0, pair).unsqueeze(1)
        column = torch.nn.functional.pad(scale, (0, _WIDTH - 1))
        db2 = gathered_mm_dw_op(column, dy, *indices)[:, 0].to(b2.dtype)
    d_weight = d_weight if need_weight else None
    return dx, d_weight, dw1, dv1, dw2, db1, dc1, db2, *(None,) * 16


def _weight_gradient(
    main_grad: Tensor | None, left: Tensor, right: Tensor | None, indices: list[Tensor]
) -> Tensor | None:
    """leftᵀ · right[token] of each expert (E, I, H), or None once it is added to main_grad."""
    if main_grad is None:
        return gathered_mm_dw_op(left, right, *indices)
    gathered_mm_dw_add_op(main_grad, left, right, *indices)
    return None


def _bias_gradient_of_weight(
    dy: Tensor, b2: Tensor, pair: Tensor, gather: Tensor, offsets: Tensor, dtype: torch.dtype
) -> Tensor:
    """⟨dY[token], b2[e]⟩ of every pair (R,), 0 for an unused one: picked out of dY · b2ᵀ (T, E)."""
    experts, pairs = b2.shape[0], pair.shape[0]
    acc = accumulation_dtype(dy.dtype)
    expert = expert_of_row(offsets, pairs)
    used = expert < experts
    with torch.autocast(dy.device.type, enabled=False):  # or torch would narrow what the router learns from
        dots = (dy.to(acc) @ b2.to(acc).t()).flatten()
    at = gather.long() * experts + expert.clamp(max=experts - 1)
    values = dots.index_select(0, at).to(dtype)
    target = torch.where(used, pair, pairs).long()  # unused rows write to a spare place
    return values.new_zeros(pairs + 1).scatter_(0, target, values)[:-1]


fused_mlp_op.register_autograd(_backward, setup_context=_save)


def fused_mlp(
    x: Tensor, weight: Tensor | None, dispatch: Dispatch, w1: Tensor, w2: Tensor, *, v1: Tensor | None = None,
    b1: Tensor | None = None, c1: Tensor | None = None, b2: Tensor | None = None, activation: str = "swiglu",
    approximate: str = "tanh", recompute: bool = False, in_order: bool = False, input_bits: int = OFF,
    pre_bits: int = OFF, main_grads: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None),
    router_weight: Tensor | None = None, router_scaling: float = 1.0,
) -> Tensor:  # fmt: skip
    """Each token's experts and their weighted sum.

    Args:
        x: (T, H) floating.
        weight: (R,) floating (float32 in a layer), one a pair in the order of the Routing; None for ones.
        dispatch: of T tokens and R pairs.
        w1, w2: (E, I, H) in x's dtype; v1 the same, given when `activation` is gated ("swiglu", "geglu", "reglu").
        b1, c1: (E, I), c1 only when gated; b2: (E, H).
        activation, approximate: as in `activate`.
        recompute: keep x and weight alone, and compute the up-projection again in backward.
        in_order: the dispatch's rows are its tokens as they stand, and weight is None: nothing is summed, and rows of
            the result and of x's gradient beyond the last expert's are unspecified.
        input_bits, pre_bits: 4 or 8 keep x, or the pre-activations, quantised (`ops.quant`); -1 as they are.
        main_grads: for w1, v1 and w2 a contiguous float32 tensor (float64 for float64) of its shape, or None. Backward
            adds the weight's gradient to it and gives the weight none.
        router_weight: (E, H) in x's dtype; says that `weight` is router_scaling times the softmax over each token's K
            pairs of x · router_weight[e], of x detached: x's gradient through it is then in x's here. Its own is not.
            Every pair must have an expert, which is not checked: it would wait for the GPU.

    Returns:
        (T, H) in x's dtype; 0 for a token without a valid pair. Differentiable in x, weight, weights and biases.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    x, w1, w2 = under_autocast(x, w1, w2)
    if v1 is not None:
        (v1,) = under_autocast(v1)
    d = dispatch
    num_tokens, num_pairs, experts = d.token_offsets.shape[0] - 1, d.pair.shape[0], d.expert_offsets.shape[0] - 1
    if x.dim() != 2 or x.shape[0] != num_tokens:
        raise ValueError(f"x is {tuple(x.shape)}: must be (T, H) with T={num_tokens}, as in the dispatch")
    if w1.dim() != 3 or w1.shape[0] != experts or w1.shape[2] != x.shape[1]:
        raise ValueError(f"w1 is {tuple(w1.shape)}: must be (E, I, H) with E={experts} and H={x.shape[1]}")
    if (v1 is None) == (activation in GATED):
        raise ValueError(f"v1 is {'missing' if v1 is None else 'given'}: activation={activation!r} wants the opposite")
    if c1 is not None and v1 is None:
        raise ValueError(f"c1 is given: activation={activation!r} has no gate to add it to")
    inner, hidden = w1.shape[1:]
    for what, t, shape in (
        ("w2", w2, w1.shape), ("v1", v1, w1.shape), ("b1", b1, (experts, inner)), ("c1", c1, (experts, inner)),
        ("b2", b2, (experts, hidden)), ("weight", weight, (num_pairs,)),
    ):  # fmt: skip
        if t is not None and t.shape != shape:
            raise ValueError(f"{what} is {tuple(t.shape)}: must be {tuple(shape)}")
    for what, t in (("w1", w1), ("v1", v1), ("w2", w2)):
        if t is not None and t.dtype != x.dtype:
            raise ValueError(f"{what} is {t.dtype}, must be {x.dtype} as x is: cast one, or run under autocast")
    for what, t, main in zip(("w1", "v1", "w2"), (w1, v1, w2), main_grads, strict=True):
        if main is not None:
            _check_main_grad(what, t, main)
    check_activation(w1, v1, activation, approximate)
    biases = [None if b is None else b.to(x.dtype) for b in (b1, c1, b2)]
    indices = d.pair, d.gather, d.scatter, d.token_offsets, d.expert_offsets
    if in_order and (weight is not None or num_tokens != num_pairs):
        raise ValueError(f"in_order: wants weight=None and as many tokens as rows, not {num_tokens} and {num_pairs}")
    if weight is None:
        weight = torch.ones(num_pairs, dtype=accumulation_dtype(x.dtype), device=x.device)
    if router_weight is not None:
        (router_weight,) = under_autocast(router_weight.detach())
        _check_router_weight(router_weight, router_scaling, x, experts, num_pairs, in_order)
    options = activation, approximate, recompute, in_order, input_bits, pre_bits
    routed = router_weight, router_scaling
    return fused_mlp_op(x, weight, w1, v1, w2, *biases, *indices, *options, *main_grads, *routed)[0]


def _check_router_weight(
    router_weight: Tensor, router_scaling: float, x: Tensor, experts: int, num_pairs: int, in_order: bool
) -> None:
    num_tokens, hidden = x.shape
    if router_scaling == 0:
        raise ValueError(f"router_scaling={router_scaling!r}: must not be 0, or drop router_weight")
    if router_weight.shape != (experts, hidden) or router_weight.dtype != x.dtype:
        given = f"{tuple(router_weight.shape)} {router_weight.dtype}"
        raise ValueError(f"router_weight is {given}: must be {(experts, hidden)} {x.dtype}, one row an expert")
    if in_order or num_pairs % max(num_tokens, 1):
        raise ValueError(f"router_weight is given for {num_pairs} pairs of {num_tokens} tokens: must be K pairs each")


def _check_main_grad(what: str, weight: Tensor | None, main: Tensor) -> None:
    if weight is None:
        raise ValueError(f"main_grads has a tensor for {what}, which is None: must be None there too")
    dtype = accumulation_dtype(weight.dtype)
    if main.shape != weight.shape or main.dtype != dtype or not main.is_contiguous():
        strides = "contiguous" if main.is_contiguous() else f"of strides {main.stride()}"
        given = f"{tuple(main.shape)} {main.dtype}, {strides}"
        raise ValueError(f"main_grads of {what} is {given}: must be {tuple(weight.shape)} {dtype}, contiguous")
