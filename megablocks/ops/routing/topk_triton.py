"""Triton kernels of a router: scores, top-k, weights, load and loss sums in one pass over the logits, and gradients.

Legend: T tokens, E experts, K top-k, P programs. A tile is TOKENS tokens times BLOCK >= E experts, in registers.

1. route            P programs loop over the tiles: ids and weights of each token; per program the sums of the scores,
                    the load, the squared log-sum-exp, and the numbers of non-finite tokens and of tokens that are not
                    padding. For token rounding it stores every pair's weight and key, not each token's choices.
2. finish           one program adds the P partial results in their order and computes both losses. No atomics.
3. route backward   the gradient of the logits from those of weights, losses and sums; reads the logits again. For token
                    rounding it reads a pair's gradient if a flag says that the pair was kept.
4. weight backward  the same from only the weights, if they are a softmax over the chosen logits without losses.

Bytes: forward reads the logits once and stores no scores; backward writes their gradient once.

The K largest are found in K passes of "largest key, then its lowest id". A float's key is its bits as an integer in the
same order, because integers reduce over a warp in one instruction. NaN has the largest key, -inf that of the lowest
finite number, and the smallest integer marks what was taken. So ids are K different ones in [0, E) for any logits.
A key of 16-bit logits leaves 13 bits free. 12 of them hold the id, so one maximum finds both and no key occurs twice.
Keys have 31 bits: the largest key below another is the largest difference from it as an unsigned number. So nothing is
marked, and an expert costs one instruction per pass.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megablocks.ops.launch import cdiv, next_power_of_2, quick
from megablocks.ops.routing.topk import empty_output, has_losses
from megablocks.ops.routing.values import RouterGradients, RouterOptions, RouterOutput, RouterSaved

_PROGRAMS = 264  # two per multiprocessor of the largest Hopper; a constant, so that sums are the same on every GPU
_TILE = 4096
_WARPS = 8
_TINY = tl.constexpr(1e-20)
_TAKEN = tl.constexpr(-(2**31))
_LOWEST = tl.constexpr(-2139095040)  # the key of -3.4028235e38
_LARGEST = tl.constexpr(2**31 - 1)
_ID = tl.constexpr(2**12 - 1)  # the bits of a packed key that hold _ID - id
KEPT, CHOSEN = tl.constexpr(1), tl.constexpr(2)  # bits of a flag: the pair is computed; the top-k chose it
PADDING_KEY = tl.constexpr(-(2**31))


@triton.jit
def load_logits(logits_ptr, mask_ptr, t, e, num_tokens, E):
    """(logits float32, 0 in padding; alive (TOKENS,), False for padding and past the end; inside (1, BLOCK))."""
    inside = (e < E)[None, :]
    alive = t < num_tokens
    if mask_ptr is not None:
        alive = alive & (tl.load(mask_ptr + t, mask=alive, other=0).to(tl.int32) == 0)
    at = t[:, None].to(tl.int64) * E + e[None, :]
    return tl.load(logits_ptr + at, mask=alive[:, None] & inside, other=0).to(tl.float32), alive, inside


@triton.jit
def sum_products(a, b, inside):
    """Σ a·b over a row's places `inside`, masked after the product.

    A product straight under a sum across lanes is fused with the first addition, each lane's own: the lanes of a row
    would hold sums of different last bits, and those that all store it in one place would race.
    """
    return tl.sum(tl.where(inside, a * b, 0.0), 1)


@triton.jit
def softmax_rows(logits, inside):
    """(exp(logits - top), top, sum) of each row; 0 outside. A NaN makes the sum NaN, whatever the maximum does."""
    top = tl.max(tl.where(inside, logits, float("-inf")), 1)
    exp = tl.where(inside, tl.exp(logits - top[:, None]), 0.0)
    return exp, top, tl.sum(exp, 1)


@triton.jit
def _keys(value, inside):
    bits = (value + 0.0).to(tl.int32, bitcast=True)  # -0 becomes 0
    key = tl.maximum(bits ^ ((bits >> 31) & 0x7FFFFFFF), _LOWEST)
    key = tl.where(value != value, _LARGEST, key)
    return tl.where(inside, key, _TAKEN)


@triton.jit
def choices(logits, scores, chosen, AFTER: tl.constexpr, NORM: tl.constexpr):
    """(weights of the chosen before their norm, 0 elsewhere; their norm), all experts of a token in a row."""
    if AFTER:
        exp, _, total = softmax_rows(logits, chosen)
        weight = exp / total[:, None]
    else:
        weight = tl.where(chosen, scores, 0.0)
    if NORM == 2:
        return weight, tl.sqrt(sum_products(weight, weight, chosen))
    return weight, tl.sum(weight, 1)


@triton.jit
def chosen_weights(chosen, top, total, k, K: tl.constexpr, SIGMOID: tl.constexpr, AFTER: tl.constexpr):
    """(weights of the chosen logits (TOKENS, KPAD) before their norm; the top and sum of the softmax they are of)."""
    if SIGMOID:
        return tl.sigmoid(chosen), top, total
    if AFTER:
        exp, top, total = softmax_rows(chosen, (k < K)[None, :])
        return exp / total[:, None], top, total
    return tl.exp(chosen - top[:, None]) / total[:, None], top, total


@triton.jit
def order_keys(weight, chosen, alive):
    """Integers in the order of `rank_order`: weight (tokens, experts) ≥ 0, chosen the same, alive (tokens,)."""
    weight = tl.where(weight == weight, weight, 0.0)  # NaN ranks as 0
    bits = weight.to(tl.int32, bitcast=True)
    return tl.where(alive[:, None], tl.where(chosen, bits, bits + (PADDING_KEY + 1)), PADDING_KEY)


@triton.jit
def load_flags(flags_ptr, ends_ptr, t, e, num_tokens, E):
    """(kept, chosen, pair), each (tokens, experts): the first two bool, and the place of a kept pair among the R."""
    live = t < num_tokens
    at = e.to(tl.int64)[None, :] * num_tokens + t[:, None]
    flags = tl.load(flags_ptr + at, mask=live[:, None] & (e < E)[None, :], other=0).to(tl.int32)
    kept = flags & KEPT
    end = tl.load(ends_ptr + t, mask=live, other=0)
    pair = end[:, None] - tl.sum(kept, 1)[:, None] + tl.cumsum(kept, 1) - 1
    return kept != 0, (flags & CHOSEN) != 0, pair


@quick
@triton.jit(do_not_specialize=["num_tokens", "num_tiles"])
def _route_kernel(
    logits_ptr, bias_ptr, mask_ptr, expert_ptr, token_ptr, weight_ptr, values_ptr, keys_ptr, partial_ptr, count_ptr,
    num_tokens, num_tiles, scaling,
    K: tl.constexpr, KPAD: tl.constexpr, SIGMOID: tl.constexpr, AFTER: tl.constexpr, NORM: tl.constexpr,
    LOSSES: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    BITS: tl.constexpr = logits_ptr.dtype.element_ty.primitive_bitwidth
    PACKED: tl.constexpr = bias_ptr is None and BITS == 16 and BLOCK <= _ID + 1  # a key has room for logit and id
    e = tl.arange(0, BLOCK)
    k = tl.arange(0, KPAD)
    sums = tl.zeros((TOKENS, BLOCK), tl.float32)
    load = tl.zeros((TOKENS, BLOCK), tl.int32)
    squares = tl.zeros((TOKENS,), tl.float32)
    broken = tl.zeros((TOKENS,), tl.int32)
    living = tl.zeros((TOKENS,), tl.int32)
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        t = tile * TOKENS + tl.arange(0, TOKENS)
        logits, alive, inside = load_logits(logits_ptr, mask_ptr, t, e, num_tokens, E)
        finite = tl.sum(logits - logits, 1) == 0.0  # of an infinity the difference is NaN
        broken += 1 - finite.to(tl.int32)
        living += alive.to(tl.int32)
        top, total = tl.zeros((TOKENS,), tl.float32), tl.zeros((TOKENS,), tl.float32)
        scores = logits
        if SIGMOID:
            scores = tl.where(inside, tl.sigmoid(logits), 0.0)
        if LOSSES or keys_ptr is not None or not (SIGMOID or AFTER):
            exp, top, total = softmax_rows(logits, inside)
            if not SIGMOID:
                scores = exp / total[:, None]
        if LOSSES:
            if SIGMOID:
                sums += scores * tl.where(alive, 1.0 / (tl.sum(scores, 1) + _TINY), 0.0)[:, None]
            else:
                sums += exp * tl.where(alive, 1.0 / total, 0.0)[:, None]
            lse = top + tl.log(total)
            squares += tl.where(alive, lse * lse, 0.0)

        pick = scores if bias_ptr is not None and not AFTER else logits
        if bias_ptr is not None:
            pick += tl.load(bias_ptr + e, mask=e < E, other=0).to(tl.float32)[None, :]
        key = _keys(pick, inside)
        best = tl.zeros((TOKENS, KPAD), tl.int32)
        if PACKED:
            key = (key >> 1) & ~_ID | tl.where(inside, _ID - e[None, :], 0)
            last = tl.full((TOKENS,), 2**30, tl.int32)  # above every key
            for i in range(K):
                last += tl.max((key - last[:, None]).to(tl.uint32, bitcast=True), 1).to(tl.int32, bitcast=True)
                best = tl.where((k == i)[None, :], last[:, None], best)
            ids = _ID - (best & _ID)
            taken = key >= last[:, None]
        else:
            for i in range(K):
                highest = tl.max(key, 1)
                expert = tl.min(tl.where(key == highest[:, None], e[None, :], BLOCK), 1)
                key = tl.where(e[None, :] == expert[:, None], _TAKEN, key)
                best = tl.where((k == i)[None, :], expert[:, None], best)
            ids = best
            taken = inside & (key == _TAKEN)
        load += tl.where(taken & alive[:, None], 1, 0)

        if keys_ptr is not None:  # every pair's weight, and the order of an expert's tokens
            value, norm = choices(logits, scores, taken, AFTER, NORM)
            if NORM > 0:
                value = value / (norm + _TINY)[:, None]
            value = tl.where(taken, value, scores) * scaling
            stored = (t < num_tokens)[:, None] & inside
            tl.store(values_ptr + t[:, None].to(tl.int64) * E + e[None, :], value, mask=stored)
            at = e[None, :].to(tl.int64) * num_tokens + t[:, None]
            tl.store(keys_ptr + at, order_keys(value, taken, alive), mask=stored)
        else:
            live = (t < num_tokens)[:, None] & (k < K)[None, :]
            at = logits_ptr + t[:, None].to(tl.int64) * E + ids
            chosen = tl.load(at, mask=live & alive[:, None], other=0).to(tl.float32)
            weight, _, _ = chosen_weights(chosen, top, total, k, K, SIGMOID, AFTER)
            if NORM == 1:
                weight = weight / (tl.sum(tl.where(live, weight, 0.0), 1) + _TINY)[:, None]
            elif NORM == 2:
                weight = weight / (tl.sqrt(sum_products(weight, weight, live)) + _TINY)[:, None]
            at = t[:, None].to(tl.int64) * K + k[None, :]
            tl.store(weight_ptr + at, weight * scaling, mask=live)
            tl.store(expert_ptr + at, tl.where(alive[:, None], ids, -1), mask=live)
            tl.store(token_ptr + at, t[:, None] + ids * 0, mask=live)
    row = tl.program_id(0)
    if LOSSES:
        tl.store(partial_ptr + row * (E + 1) + e, tl.sum(sums, 0), mask=e < E)
        tl.store(partial_ptr + row * (E + 1) + E, tl.sum(squares, 0))
    tl.store(count_ptr + row * (E + 2) + e, tl.sum(load, 0), mask=e < E)
    tl.store(count_ptr + row * (E + 2) + E, tl.sum(broken, 0))
    tl.store(count_ptr + row * (E + 2) + E + 1, tl.sum(living, 0))


@quick
@triton.jit(do_not_specialize=["num_partials"])
def _finish_kernel(
    partial_ptr, count_ptr, sums_ptr, load_ptr, stats_ptr, balance_ptr, z_ptr,
    num_partials, E, balance_weight, z_weight,
    LOSSES: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    e = tl.arange(0, BLOCK)
    sums = tl.zeros((ROWS, BLOCK), tl.float32)
    load = tl.zeros((ROWS, BLOCK), tl.int32)
    for start in range(0, num_partials, ROWS):
        row = start + tl.arange(0, ROWS)
        mask = (row < num_partials)[:, None] & (e < E)[None, :]
        if LOSSES:
            sums += tl.load(partial_ptr + row[:, None] * (E + 1) + e[None, :], mask=mask, other=0)
        load += tl.load(count_ptr + row[:, None] * (E + 2) + e[None, :], mask=mask, other=0)
    row = tl.arange(0, ALL)
    mask = row < num_partials
    broken = tl.sum(tl.load(count_ptr + row * (E + 2) + E, mask=mask, other=0), 0)
    living = tl.sum(tl.load(count_ptr + row * (E + 2) + E + 1, mask=mask, other=0), 0)
    score, tokens = tl.sum(sums, 0), tl.sum(load, 0)
    tl.store(sums_ptr + e, score, mask=e < E)
    tl.store(load_ptr + e, tokens.to(tl.int64), mask=e < E)
    tl.store(stats_ptr, broken.to(tl.int64))
    tl.store(stats_ptr + 1, living.to(tl.int64))
    tl.store(stats_ptr + 2, 0 * living.to(tl.int64))  # ids outside [0, E): there are none
    count = tl.maximum(living, 1).to(tl.float32)
    balance = tl.sum(tl.where(e < E, tokens.to(tl.float32) / (count * K) * (score / count), 0.0), 0)
    tl.store(balance_ptr, balance_weight * E * balance)
    squares = tl.zeros((), tl.float32)
    if LOSSES:
        squares += tl.sum(tl.load(partial_ptr + row * (E + 1) + E, mask=mask, other=0), 0)
    tl.store(z_ptr, z_weight * (squares / count))


@quick
@triton.jit(do_not_specialize=["num_tokens"])
def _route_backward_kernel(
    logits_ptr, mask_ptr, expert_ptr, load_ptr, stats_ptr, flags_ptr, ends_ptr,
    d_weight_ptr, d_sums_ptr, d_balance_ptr, d_z_ptr, out_ptr,
    num_tokens, E, scaling, balance_weight, z_weight,
    K: tl.constexpr, KPAD: tl.constexpr, SIGMOID: tl.constexpr, AFTER: tl.constexpr, NORM: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    e = tl.arange(0, BLOCK)
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    logits, alive, inside = load_logits(logits_ptr, mask_ptr, t, e, num_tokens, E)
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
            factor = 1.0 / (norm + _TINY)
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
        if NORM > 0:
            norm = tl.sum(weight, 1) if NORM == 1 else tl.sqrt(sum_products(weight, weight, live))
            factor = 1.0 / (norm + _TINY)
            pull = sum_products(grad, weight, live) * factor * factor
        if NORM == 2:
            pull = tl.where(norm == 0.0, 0.0, pull / norm)
        d_weight = grad * factor[:, None]
        if NORM == 1:
            d_weight -= tl.where(weight > 0, pull[:, None], 0.0)
        elif NORM == 2:
            d_weight -= weight * pull[:, None]
        if AFTER:
            mean = sum_products(d_weight, weight, live)
        for i in range(K):
            expert = tl.load(expert_ptr + row + i, mask=alive, other=-1)
            g = tl.load(d_weight_ptr + row + i, mask=alive, other=0).to(tl.float32) * (scaling * factor)
            hit = e[None, :] == expert[:, None]
            w = tl.exp(logits - top_k[:, None]) / total_k[:, None] if AFTER else scores
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
        whole = tl.sum(scores, 1) + _TINY
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
    K: tl.constexpr, KPAD: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    e = tl.arange(0, BLOCK)
    k = tl.arange(0, KPAD)
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    alive = (t < num_tokens)[:, None]
    live = alive & (k < K)[None, :]
    at = t[:, None].to(tl.int64) * K + k[None, :]
    expert = tl.load(expert_ptr + at, mask=live, other=-1)  # -1 of padding
    weight = tl.load(weight_ptr + at, mask=live, other=0)
    grad = tl.load(d_weight_ptr + at, mask=live, other=0).to(tl.float32)
    mean = sum_products(weight, grad, live) / scaling
    row = out_ptr + t[:, None].to(tl.int64) * E
    tl.store(row + e[None, :], tl.zeros((TOKENS, BLOCK), out_ptr.dtype.element_ty), mask=alive & (e < E)[None, :])
    tl.debug_barrier()  # the zeros come first
    tl.store(row + expert, (weight * (grad - mean[:, None])).to(out_ptr.dtype.element_ty), mask=live & (expert >= 0))


def _tile_sizes(num_experts: int, top_k: int, values: int = _TILE) -> dict[str, int]:
    block = max(next_power_of_2(num_experts), 16)
    return {"TOKENS": max(values // block, 4), "BLOCK": block, "K": top_k, "KPAD": next_power_of_2(top_k)}


def _backward_sizes(num_experts: int, top_k: int) -> dict[str, int]:
    """Small tiles: with a whole tile a thread of `_route_backward_kernel` needs 178 registers, so only one program runs
    on a multiprocessor; and `_weight_backward_kernel` waits less at its barrier."""
    sizes = _tile_sizes(num_experts, top_k, _TILE // 4)
    return sizes | {"num_warps": _WARPS // 2 if sizes["TOKENS"] * sizes["BLOCK"] <= _TILE // 2 else _WARPS}


def score_launch(
    logits: Tensor, bias: Tensor | None, padding_mask: Tensor | None, out: RouterOutput,
    every: tuple[Tensor, Tensor] | None, options: RouterOptions,
) -> None:  # fmt: skip
    """Write the losses, the load and the statistics of `out`; two launches.

    every: values (T, E) and keys (E, T) of all pairs, to be written instead of out's expert, token and weight.
    """
    logits = logits.contiguous()
    bias, padding_mask = (None if t is None else t.contiguous() for t in (bias, padding_mask))
    (num_tokens, num_experts), device = logits.shape, logits.device
    # Addresses of every pair need registers: 214 per thread with a whole tile, 128 with half a tile. With half a tile
    # two programs of 8 warps share a multiprocessor, as they do without these addresses (118).
    sizes = _tile_sizes(num_experts, options.top_k, _TILE if every is None else _TILE // 2)
    tiles = cdiv(num_tokens, sizes["TOKENS"])
    programs = max(min(tiles, _PROGRAMS), 1)
    losses = has_losses(options)
    partial = torch.empty(programs if losses else 0, num_experts + 1, dtype=torch.float32, device=device)
    count = torch.empty(programs, num_experts + 2, dtype=torch.int32, device=device)
    pairs = (out.expert, out.token, out.weight, None, None) if every is None else (None, None, None, *every)
    _route_kernel[(programs,)](
        logits, bias, padding_mask, *pairs, partial, count, num_tokens, tiles, options.scaling,
        SIGMOID=options.sigmoid, AFTER=options.after, NORM=int(options.norm_p), LOSSES=losses, E=num_experts,
        num_warps=_WARPS, **sizes,
    )  # fmt: skip
    _finish_kernel[(1,)](
        partial, count, out.sums, out.load, out.stats, out.balance, out.z, programs, num_experts,
        options.balance_weight, options.z_weight, LOSSES=losses, K=options.top_k, ROWS=max(8192 // sizes["BLOCK"], 1),
        BLOCK=sizes["BLOCK"], ALL=next_power_of_2(_PROGRAMS), num_warps=_WARPS,
    )  # fmt: skip


def route_launch(
    logits: Tensor, bias: Tensor | None, padding_mask: Tensor | None, options: RouterOptions
) -> RouterOutput:
    """Like `router_ref`; two launches."""
    out = empty_output(logits, logits.shape[0] * options.top_k)
    score_launch(logits, bias, padding_mask, out, None, options)
    return out


def route_backward_launch(
    logits: Tensor, padding_mask: Tensor | None, saved: RouterSaved, grads: RouterGradients, options: RouterOptions
) -> Tensor:
    """Like `router_backward_ref`; one launch."""
    d_weight, d_balance, d_z, d_sums = grads
    logits, num_tokens, num_experts = logits.contiguous(), *logits.shape
    padding_mask, d_weight, d_sums = (None if t is None else t.contiguous() for t in (padding_mask, d_weight, d_sums))
    out = torch.empty_like(logits)
    sizes = _backward_sizes(num_experts, options.top_k)
    if out.numel():
        _route_backward_kernel[(cdiv(num_tokens, sizes["TOKENS"]),)](
            logits, padding_mask, *saved, d_weight, d_sums, d_balance, d_z, out,
            num_tokens, num_experts, options.scaling, options.balance_weight, options.z_weight,
            SIGMOID=options.sigmoid, AFTER=options.after, NORM=int(options.norm_p), **sizes,
        )  # fmt: skip
    return out


def weight_backward_launch(
    weight: Tensor, expert: Tensor, d_weight: Tensor, num_experts: int, dtype: torch.dtype, options: RouterOptions
) -> Tensor:
    """Like `router_weight_backward_ref`; one launch."""
    num_tokens = weight.shape[0] // options.top_k
    out = torch.empty(num_tokens, num_experts, dtype=dtype, device=weight.device)
    sizes = _backward_sizes(num_experts, options.top_k)
    if out.numel():
        _weight_backward_kernel[(cdiv(num_tokens, sizes["TOKENS"]),)](
            weight, expert, d_weight.contiguous(), out, num_tokens, num_experts, options.scaling, **sizes
        )  # fmt: skip
    return out
