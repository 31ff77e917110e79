"""Triton kernels of the router's gradients: those of weights, losses and sums to that of the logits, in one pass.

Legend: as in router_triton.py, whose device functions these share.

1. route backward   reads the logits again. For token rounding it reads a pair's gradient where a flag says that the
                    pair was kept (rounded_router_triton.py).
2. weight backward  from the weights alone, where they are a softmax over the chosen logits and there are no losses.
3. chosen slopes    the same of the chosen logits alone, in the order of rows; a token's weights are read K times.

Bytes: logits once (of 'route backward' alone), their gradient once.
"""

# mypy: allow-untyped-defs
# (device code takes what Triton passes at compile time)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megablocks.ops.launch import cdiv, next_power_of_2, quick
from megablocks.ops.routing.rounding_triton import load_flags
from megablocks.ops.routing.router import RouterOptions
from megablocks.ops.routing.router_triton import (
    TINY,
    WARPS,
    choices,
    chosen_weights,
    load_logits,
    softmax_rows,
    sum_products,
    tile_sizes,
)


@quick
@triton.jit(do_not_specialize=["num_tokens"])
def _route_backward_kernel(
    logits_ptr, mask_ptr, expert_ptr, load_ptr, stats_ptr, flags_ptr, ends_ptr,
    d_weight_ptr, d_sums_ptr, d_balance_ptr, d_z_ptr, out_ptr,
    num_tokens, E, scaling, balance_weight, z_weight,
    K: tl.constexpr, KPAD: tl.constexpr, SIGMOID: tl.constexpr, AFTER: tl.constexpr, NORM: tl.constexpr,
    MASKED: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    e = tl.arange(0, BLOCK)
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    logits, alive, inside = load_logits(logits_ptr, mask_ptr, t, e, num_tokens, E, MASKED)
    exp, top, total = softmax_rows(logits, inside)
    soft = exp / total[:, None]
    scores = tl.where(inside, tl.sigmoid(logits), 0.0) if SIGMOID else soft
    count = tl.maximum(tl.load(stats_ptr + 1), 1).to(tl.float32)

    # d_scores: of the scores; d_logits: what does not pass through them
    d_scores = tl.zeros((TOKENS, BLOCK), tl.float32)
    d_logits = tl.zeros((TOKENS, BLOCK), tl.float32)
    if d_weight_ptr is not None and flags_ptr is not None:  # of the pairs that rounding kept
        kept, taken, pair = load_flags(flags_ptr, ends_ptr, t, e, num_tokens, E)
        grad = tl.load(d_weight_ptr + pair, mask=kept, other=0).to(tl.float32) * scaling
        weight, norm = choices(logits, scores, taken, AFTER, NORM)
        d_taken = tl.where(taken, grad, 0.0)
        d_scores += grad - d_taken
        if NORM > 0:
            factor = 1.0 / (norm + TINY)
            pull = sum_products(d_taken, weight, taken) * factor * factor
            if NORM == 1:
                slope = tl.where(weight > 0, 1.0, 0.0)
            else:
                slope = tl.where(norm == 0.0, 0.0, 1.0 / norm)[:, None] * weight
            d_taken = tl.where(taken, d_taken * factor[:, None] - pull[:, None] * slope, 0.0)
        if AFTER:
            d_logits += weight * (d_taken - sum_products(d_taken, weight, taken)[:, None])
        else:
            d_scores += d_taken
    elif d_weight_ptr is not None:
        k = tl.arange(0, KPAD)
        live = alive[:, None] & (k < K)[None, :]
        row = t.to(tl.int64) * K
        ids = tl.load(expert_ptr + row[:, None] + k[None, :], mask=live, other=0)
        grad = tl.load(d_weight_ptr + row[:, None] + k[None, :], mask=live, other=0).to(tl.float32) * scaling
        chosen = tl.load(logits_ptr + t[:, None].to(tl.int64) * E + ids, mask=live, other=0).to(tl.float32)
        weight, top_k, total_k = chosen_weights(chosen, top, total, k, K, SIGMOID, AFTER)
        weight = tl.where(live, weight, 0.0)
        # weights before the norm: d = factor · grad − pull · slope, slope = 1 or the weight itself
        factor = tl.full((TOKENS,), 1.0, tl.float32)
        pull = tl.zeros((TOKENS,), tl.float32)
        if NORM == 1:
            norm = tl.sum(weight, 1)
            factor = 1.0 / (norm + TINY)
            pull = sum_products(grad, weight, live) * factor * factor
        elif NORM == 2:
            norm = tl.sqrt(sum_products(weight, weight, live))
            factor = 1.0 / (norm + TINY)
            pull = sum_products(grad, weight, live) * factor * factor
            pull = tl.where(norm == 0.0, 0.0, pull / norm)
        d_weight = grad * factor[:, None]
        if NORM == 1:
            d_weight -= tl.where(weight > 0, pull[:, None], 0.0)
        elif NORM == 2:
            d_weight -= weight * pull[:, None]
        mean = tl.zeros((TOKENS,), tl.float32)
        if AFTER:
            mean = sum_products(d_weight, weight, live)
        for i in range(K):
            expert = tl.load(expert_ptr + row + i, mask=alive, other=-1)
            g = tl.load(d_weight_ptr + row + i, mask=alive, other=0).to(tl.float32) * (scaling * factor)
            hit = e[None, :] == expert[:, None]
            if AFTER:
                w = tl.exp(logits - top_k[:, None]) / total_k[:, None]
            else:
                w = scores
            d = g[:, None]
            if NORM == 1:
                d = d - tl.where(w > 0, pull[:, None], 0.0)
            elif NORM == 2:
                d = d - w * pull[:, None]
            if AFTER:
                d_logits += tl.where(hit, w * (d - mean[:, None]), 0.0)
            else:
                d_scores += tl.where(hit, d, 0.0)

    d_share = tl.zeros((BLOCK,), tl.float32)
    if d_sums_ptr is not None:
        d_share += tl.load(d_sums_ptr + e, mask=e < E, other=0)
    if d_balance_ptr is not None:
        load = tl.load(load_ptr + e, mask=e < E, other=0).to(tl.float32)
        d_share += tl.load(d_balance_ptr) * balance_weight * E * load / (count * K) / count
    if SIGMOID:
        whole = tl.sum(scores, 1) + TINY
        common = sum_products(scores, d_share[None, :], inside) / whole
        d_scores += (d_share[None, :] - common[:, None]) / whole[:, None]
        d_logits += d_scores * scores * (1.0 - scores)
    else:
        d_scores += d_share[None, :]
        d_logits += scores * (d_scores - sum_products(d_scores, scores, inside)[:, None])
    if d_z_ptr is not None:
        lse = top + tl.log(total)
        d_logits += soft * (lse * (2.0 * tl.load(d_z_ptr) * z_weight / count))[:, None]
    d_logits = tl.where(alive[:, None], d_logits, 0.0)
    at = t[:, None].to(tl.int64) * E + e[None, :]
    tl.store(out_ptr + at, d_logits.to(out_ptr.dtype.element_ty), mask=(t < num_tokens)[:, None] & inside)


@quick
@triton.jit(do_not_specialize=["num_tokens"])
def _weight_backward_kernel(
    weight_ptr, expert_ptr, d_weight_ptr, out_ptr, num_tokens, E, scaling,
    K: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    e = tl.arange(0, BLOCK)
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    alive = t < num_tokens
    row = t.to(tl.int64) * K
    mean = tl.zeros((TOKENS,), tl.float32)
    for i in range(K):
        weight = tl.load(weight_ptr + row + i, mask=alive, other=0)
        mean += weight * tl.load(d_weight_ptr + row + i, mask=alive, other=0).to(tl.float32)
    mean /= scaling
    d_logits = tl.zeros((TOKENS, BLOCK), tl.float32)
    for i in range(K):
        expert = tl.load(expert_ptr + row + i, mask=alive, other=-1)  # -1 of padding: no column is it
        weight = tl.load(weight_ptr + row + i, mask=alive, other=0)
        grad = tl.load(d_weight_ptr + row + i, mask=alive, other=0).to(tl.float32)
        d_logits = tl.where(e[None, :] == expert[:, None], (weight * (grad - mean))[:, None], d_logits)
    at = t[:, None].to(tl.int64) * E + e[None, :]
    tl.store(out_ptr + at, d_logits.to(out_ptr.dtype.element_ty), mask=alive[:, None] & (e < E)[None, :])


@quick
@triton.jit(do_not_specialize=["num_rows"])
def _chosen_slopes_kernel(
    weight_ptr, d_weight_ptr, pair_ptr, slope_ptr, num_rows, scaling,
    K: tl.constexpr, KPAD: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < num_rows
    pair = tl.load(pair_ptr + row, mask=inside, other=0)
    k = tl.arange(0, KPAD)
    at = (pair // K * K)[:, None] + k[None, :]  # all of the token's pairs
    live = inside[:, None] & (k < K)[None, :]
    weights = tl.load(weight_ptr + at, mask=live, other=0)
    mean = sum_products(weights, tl.load(d_weight_ptr + at, mask=live, other=0).to(tl.float32), live) / scaling
    weight = tl.load(weight_ptr + pair, mask=inside, other=0)
    grad = tl.load(d_weight_ptr + pair, mask=inside, other=0).to(tl.float32)
    tl.store(slope_ptr + row, weight * (grad - mean), mask=inside)


def route_backward_launch(
    logits: Tensor,
    padding_mask: Tensor | None,
    expert: Tensor | None,
    load: Tensor,
    stats: Tensor,
    grads: tuple[Tensor | None, ...],
    options: RouterOptions,
    flags: Tensor | None = None,
    ends: Tensor | None = None,
) -> Tensor:
    """The gradient of the logits (T, E), in their dtype, from those of weight, balance, z and sums; one launch.

    flags, ends: of token rounding, and then the weights are of the pairs that it kept; expert is not read.
    """
    logits = logits.contiguous()
    d_weight, d_balance, d_z, d_sums = grads
    padding_mask, d_weight, d_sums = (None if t is None else t.contiguous() for t in (padding_mask, d_weight, d_sums))
    num_tokens, num_experts = logits.shape
    out = torch.empty_like(logits)
    sizes = tile_sizes(num_experts, options.top_k)
    if out.numel():
        _route_backward_kernel[(cdiv(num_tokens, sizes["TOKENS"]),)](
            logits, padding_mask, expert, load, stats, flags, ends, d_weight, d_sums, d_balance, d_z, out,
            num_tokens, num_experts, options.scaling, options.balance_weight, options.z_weight,
            SIGMOID=options.sigmoid, AFTER=options.after, NORM=options.norm_p, MASKED=padding_mask is not None,
            num_warps=WARPS, **sizes,
        )  # fmt: skip
    return out


def chosen_slopes_launch(weight: Tensor, d_weight: Tensor, pair: Tensor, top_k: int, scaling: float) -> Tensor:
    """Results as of `chosen_slopes_op`; one launch."""
    weight, d_weight, pair = weight.contiguous(), d_weight.contiguous(), pair.contiguous()
    num_rows, kpad = pair.shape[0], next_power_of_2(top_k)
    slope, rows = weight.new_empty(num_rows), max(1, 1024 // kpad)
    if num_rows:
        _chosen_slopes_kernel[(cdiv(num_rows, rows),)](
            weight, d_weight, pair, slope, num_rows, scaling, K=top_k, KPAD=kpad, ROWS=rows, num_warps=4
        )
    return slope


def weight_backward_launch(
    weight: Tensor, expert: Tensor, d_weight: Tensor, num_experts: int, dtype: torch.dtype, options: RouterOptions
) -> Tensor:
    """Results as of `router_weight_backward_op`; one launch."""
    num_tokens = weight.shape[0] // options.top_k
    out = torch.empty(num_tokens, num_experts, dtype=dtype, device=weight.device)
    sizes = tile_sizes(num_experts, options.top_k)
    del sizes["KPAD"]
    if out.numel():
        _weight_backward_kernel[(cdiv(num_tokens, sizes["TOKENS"]),)](
            weight, expert, d_weight.contiguous(), out, num_tokens, num_experts, options.scaling,
            num_warps=WARPS, **sizes,
        )  # fmt: skip
    return out
