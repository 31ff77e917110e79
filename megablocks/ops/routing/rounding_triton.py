"""Triton kernels of token rounding: each expert's first tokens, without a sort.

Legend: T tokens, E experts, R pairs. The keys (E, T) int32 represent the order of an expert's tokens as integers. They
are transposed, so that the keys of an expert are contiguous. A router's first kernel writes them (topk_triton.py).

1. odds     one program per expert: the weights in its last, partial tile of choices, for "stochastic_score"
2. loads    one program: loads → rounded loads, by every rule
3. select   one program per expert: its n-th largest key, two bits in each pass over the T keys; then the tokens above
            it, and the lowest tokens among those equal to it: flags (E, T) int8, KEPT and CHOSEN
4. count    kept pairs of each token; torch's scan of these T counts computes where a token's pairs end
5. place    tokens write their pairs after those of the tokens before; the remaining programs fill the unused rest

A sort would move each key through eight radix passes. The search reads 16 times 4·T bytes per expert, after the first
pass from the second-level cache. There are no atomics. Floats occur only in the odds, whose sums have a fixed order.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megablocks.ops.launch import cdiv, next_power_of_2, quick
from megablocks.ops.routing.topk import empty_output
from megablocks.ops.routing.topk_triton import CHOSEN, KEPT, PADDING_KEY, load_flags, score_launch
from megablocks.ops.routing.values import RoundedOutput, Rounding, RouterOptions

_BLOCK = 4096  # keys that a program of 16 warps reads at once


@triton.jit
def _load_keys(keys_ptr, t, num_tokens):
    """Keys as unsigned integers of the same order; 0, as padding's, past the end."""
    key = tl.load(keys_ptr + t, mask=t < num_tokens, other=PADDING_KEY)
    return key.to(tl.uint32, bitcast=True) ^ 0x80000000


@triton.jit
def _nth_key(keys_ptr, wanted, num_tokens, BLOCK: tl.constexpr):
    """(the largest value that at least `wanted` keys reach, keys above it), as `_load_keys` gives them."""
    lane = tl.arange(0, BLOCK)
    found = tl.full((), 0, tl.uint32)
    step = tl.full((), 1 << 30, tl.uint32)
    for _ in range(16):
        reach_1 = tl.zeros((BLOCK,), tl.int32)
        reach_2 = tl.zeros((BLOCK,), tl.int32)
        reach_3 = tl.zeros((BLOCK,), tl.int32)
        for start in range(0, num_tokens, BLOCK):
            key = _load_keys(keys_ptr, start + lane, num_tokens)
            reach_1 += (key >= found + step).to(tl.int32)
            reach_2 += (key >= found + 2 * step).to(tl.int32)
            reach_3 += (key >= found + 3 * step).to(tl.int32)
        digits = (tl.sum(reach_1, 0) >= wanted).to(tl.uint32)
        digits += (tl.sum(reach_2, 0) >= wanted).to(tl.uint32) + (tl.sum(reach_3, 0) >= wanted).to(tl.uint32)
        found += digits * step
        step = step >> 2
    above = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, num_tokens, BLOCK):
        above += (_load_keys(keys_ptr, start + lane, num_tokens) > found).to(tl.int32)
    return found, tl.sum(above, 0)


@quick
@triton.jit(do_not_specialize=["num_tokens"])
def _odds_kernel(keys_ptr, load_ptr, a_ptr, b_ptr, num_tokens, tile, BLOCK: tl.constexpr):
    """Weights in the places [⌊load⌋, load) of an expert's order, and in [⌊load⌋, ⌊load⌋ + tile)."""
    expert = tl.program_id(0)
    keys_ptr += expert.to(tl.int64) * num_tokens
    load = tl.load(load_ptr + expert).to(tl.int32)
    first = load // tile * tile
    upper, place_upper = _nth_key(keys_ptr, first, num_tokens, BLOCK)
    lower, place_lower = _nth_key(keys_ptr, first + tile, num_tokens, BLOCK)
    lane = tl.arange(0, BLOCK)
    a = tl.zeros((BLOCK,), tl.float32)
    b = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, num_tokens, BLOCK):
        t = start + lane
        key = tl.load(keys_ptr + t, mask=t < num_tokens, other=PADDING_KEY)
        order = key.to(tl.uint32, bitcast=True) ^ 0x80000000
        # equal keys have equal weights, so any of them can represent those inside the places
        at_upper = (order == upper).to(tl.int32)
        at_lower = ((order == lower) & (t < num_tokens)).to(tl.int32)
        behind = (order < upper) | ((at_upper != 0) & (place_upper + tl.cumsum(at_upper, 0) > first))
        within = (order > lower) | ((at_lower != 0) & (place_lower + tl.cumsum(at_lower, 0) <= first + tile))
        place_upper += tl.sum(at_upper, 0)
        place_lower += tl.sum(at_lower, 0)
        bits = tl.where(key < 0, key - (PADDING_KEY + 1), key)
        weight = tl.where(key == PADDING_KEY, 0, bits).to(tl.float32, bitcast=True)
        a += tl.where(behind & (key >= 0), weight, 0.0)
        b += tl.where(behind & within, weight, 0.0)
    tl.store(a_ptr + expert, tl.sum(a, 0))
    tl.store(b_ptr + expert, tl.sum(b, 0))


@quick
@triton.jit
def _loads_kernel(
    load_ptr, stats_ptr, draw_ptr, a_ptr, b_ptr, rounded_ptr, dropped_ptr, E, tile,
    RULE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`rounded_loads`, at most the tokens that there are, and what they drop."""
    e = tl.arange(0, BLOCK)
    load = tl.load(load_ptr + e, mask=e < E, other=0)
    down = load // tile * tile
    rest = load - down
    if RULE == "balanced":
        total = tl.cumsum(load, 0)
        rounded = (total + tile // 2) // tile * tile - (total - load + tile // 2) // tile * tile
    else:
        if RULE == "up":
            up = rest > 0
        elif RULE == "down":
            up = rest < 0
        elif RULE == "nearest":
            up = rest + tile // 2 >= tile
        else:
            draw = tl.load(draw_ptr + e, mask=e < E, other=0)
            if a_ptr is None:
                up = draw * tile < rest.to(tl.float32)
            else:
                up = draw * tl.load(b_ptr + e, mask=e < E, other=0) < tl.load(a_ptr + e, mask=e < E, other=0)
        rounded = down + tl.where(up, tile, 0)
    rounded = tl.minimum(rounded, tl.load(stats_ptr + 1))
    tl.store(rounded_ptr + e, rounded, mask=e < E)
    tl.store(dropped_ptr, tl.sum(tl.maximum(load - rounded, 0), 0))


@quick
@triton.jit(do_not_specialize=["num_tokens"])
def _select_kernel(keys_ptr, loads_ptr, flags_ptr, num_tokens, BLOCK: tl.constexpr):
    e = tl.program_id(0)
    keys_ptr += e.to(tl.int64) * num_tokens
    flags_ptr += e.to(tl.int64) * num_tokens
    wanted = tl.load(loads_ptr + e).to(tl.int32)
    found, above = _nth_key(keys_ptr, wanted, num_tokens, BLOCK)
    left = wanted - above
    lane = tl.arange(0, BLOCK)
    for start in range(0, num_tokens, BLOCK):
        t = start + lane
        live = t < num_tokens
        key = _load_keys(keys_ptr, t, num_tokens)
        tie = ((key == found) & live).to(tl.int32)
        keep = (key > found) | ((tie != 0) & (tl.cumsum(tie, 0) <= left))
        left -= tl.sum(tie, 0)
        flags = tl.where(keep, KEPT, 0) | tl.where(key >= 0x80000000, CHOSEN, 0)
        tl.store(flags_ptr + t, flags.to(tl.int8), mask=live)


@quick
@triton.jit(do_not_specialize=["num_tokens"])
def _count_kernel(flags_ptr, count_ptr, num_tokens, E, TOKENS: tl.constexpr, EXPERTS: tl.constexpr):
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    count = tl.zeros((EXPERTS, TOKENS), tl.int32)
    for start in range(0, E, EXPERTS):
        e = start + tl.arange(0, EXPERTS)
        at = e.to(tl.int64)[:, None] * num_tokens + t[None, :]
        flags = tl.load(flags_ptr + at, mask=(e < E)[:, None] & (t < num_tokens)[None, :], other=0)
        count += flags.to(tl.int32) & KEPT
    tl.store(count_ptr + t, tl.sum(count, 0), mask=t < num_tokens)


@quick
@triton.jit(do_not_specialize=["num_tokens", "num_pairs", "token_programs"])
def _place_kernel(
    flags_ptr, ends_ptr, values_ptr, token_ptr, expert_ptr, weight_ptr,
    num_tokens, num_pairs, token_programs,
    E: tl.constexpr, TOKENS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    if program < token_programs:
        t = program * TOKENS + tl.arange(0, TOKENS)
        e = tl.arange(0, LANES)
        kept, _, pair = load_flags(flags_ptr, ends_ptr, t, e, num_tokens, E)
        at = t.to(tl.int64)[:, None] * E + e[None, :]
        tl.store(token_ptr + pair, tl.broadcast_to(t[:, None], (TOKENS, LANES)), mask=kept)
        tl.store(expert_ptr + pair, tl.broadcast_to(e[None, :], (TOKENS, LANES)), mask=kept)
        tl.store(weight_ptr + pair, tl.load(values_ptr + at, mask=kept, other=0), mask=kept)
    else:
        r = (program - token_programs) * TOKENS * LANES + tl.arange(0, TOKENS * LANES)
        unused = (r >= tl.load(ends_ptr + num_tokens - 1)) & (r < num_pairs)
        tl.store(token_ptr + r, tl.full((TOKENS * LANES,), num_tokens - 1, tl.int32), mask=unused)
        tl.store(expert_ptr + r, tl.full((TOKENS * LANES,), -1, tl.int32), mask=unused)
        tl.store(weight_ptr + r, tl.zeros((TOKENS * LANES,), tl.float32), mask=unused)


def round_launch(
    keys: Tensor, load: Tensor, stats: Tensor, draw: Tensor | None, rule: str, tile: int
) -> tuple[Tensor, Tensor]:
    """keys (E, T), load (E,), stats (3,), draw (E,) in [0, 1) → rounded loads (E,), dropped ()."""
    experts, tokens = keys.shape
    a = b = None
    if rule == "stochastic_score":
        a, b = (torch.empty(experts, dtype=torch.float32, device=keys.device) for _ in range(2))
        _odds_kernel[(experts,)](keys, load, a, b, tokens, tile, BLOCK=_BLOCK, num_warps=16)
    rounded, dropped = torch.empty_like(load), torch.empty((), dtype=torch.int64, device=keys.device)
    _loads_kernel[(1,)](
        load, stats, draw, a, b, rounded, dropped, experts, tile,
        RULE=rule, BLOCK=next_power_of_2(experts), num_warps=4,
    )  # fmt: skip
    return rounded, dropped


def flags_launch(keys: Tensor, loads: Tensor) -> tuple[Tensor, Tensor]:
    """keys (E, T), loads (E,) → flags (E, T) int8 and ends (T,) int32: pairs up to and including each token's."""
    experts, tokens = keys.shape
    flags = torch.empty(experts, tokens, dtype=torch.int8, device=keys.device)
    _select_kernel[(experts,)](keys, loads, flags, tokens, BLOCK=_BLOCK, num_warps=16)
    count = torch.empty(tokens, dtype=torch.int32, device=keys.device)
    _count_kernel[(cdiv(tokens, 128),)](flags, count, tokens, experts, TOKENS=128, EXPERTS=16, num_warps=4)
    return flags, count.cumsum(0, dtype=torch.int32)


def place_launch(flags: Tensor, ends: Tensor, num_pairs: int, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """token, expert (R,) int32 and weight (R,) of the pairs that the flags keep; values (T, E) are all weights."""
    (experts, tokens), device = flags.shape, flags.device
    token, expert = (torch.empty(num_pairs, dtype=torch.int32, device=device) for _ in range(2))
    weight = torch.empty(num_pairs, dtype=torch.float32, device=device)
    lanes = next_power_of_2(experts)
    rows = max(1, 4096 // lanes)
    programs = cdiv(tokens, rows)
    _place_kernel[(programs + cdiv(num_pairs, rows * lanes),)](
        flags, ends, values, token, expert, weight, tokens, num_pairs, programs,
        E=experts, TOKENS=rows, LANES=lanes, num_warps=8,
    )  # fmt: skip
    return token, expert, weight


def rounded_route_launch(
    logits: Tensor, bias: Tensor | None, padding_mask: Tensor | None, draw: Tensor | None,
    rounding: Rounding, options: RouterOptions,
) -> RoundedOutput:  # fmt: skip
    """Like `rounded_router_ref`, for at least one token; six launches and a scan, one more for "stochastic_score"."""
    num_tokens, num_experts = logits.shape
    values = torch.empty(num_tokens, num_experts, dtype=torch.float32, device=logits.device)
    keys = torch.empty(num_experts, num_tokens, dtype=torch.int32, device=logits.device)
    top = empty_output(logits, 0)
    score_launch(logits, bias, padding_mask, top, (values, keys), options)
    rounded, dropped = round_launch(keys, top.load, top.stats, draw, rounding.rule, rounding.tile)
    flags, ends = flags_launch(keys, rounded)
    token, expert, weight = place_launch(flags, ends, rounding.num_pairs, values)
    return RoundedOutput(*top._replace(weight=weight, expert=expert, token=token), rounded, dropped, flags, ends)
