"""Triton kernels behind `select_tokens`: three launches and one scan of T counts, no sort.

1. keys     (E, T) int32: the order of an expert's tokens as integers, transposed so that an expert's are contiguous
2. select   a program an expert: its n-th largest key, two bits a pass over the T keys; then who is above it, and of
            those at it the lowest tokens, as bytes (T, E)
3. place    tokens write their pairs behind those of the tokens before; the programs behind them fill the unused rest

A sort of the columns would move each key through eight radix passes; the search reads 16 times 4·T bytes an expert, and
from the second pass on they lie in the second-level cache. No float and no atomic takes part.
"""

# mypy: allow-untyped-defs
# (device code takes what Triton passes at compile time)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megablocks.ops.launch import cdiv, next_power_of_2, quick

_LOWEST = tl.constexpr(-(2**31))
_BLOCK = 4096  # keys that a program of 16 warps looks at together


@quick
@triton.jit(do_not_specialize=["num_tokens"])
def _keys_kernel(
    weights_ptr, ids_ptr, padding_ptr, keys_ptr, num_tokens, stride_t,
    E: tl.constexpr, K: tl.constexpr, TOKENS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    e = tl.program_id(1) * EXPERTS + tl.arange(0, EXPERTS)
    live = t < num_tokens
    mask = live[:, None] & (e < E)[None, :]
    weight = tl.load(weights_ptr + t.to(tl.int64)[:, None] * stride_t + e[None, :], mask=mask, other=0.0)
    weight = tl.where(weight == weight, weight, 0.0)  # NaN ranks as 0
    bits = weight.to(tl.int32, bitcast=True)
    chosen = tl.zeros((TOKENS, EXPERTS), dtype=tl.int1)
    for k in range(K):
        pick = tl.load(ids_ptr + t.to(tl.int64) * K + k, mask=live, other=-1).to(tl.int32)
        chosen = chosen | (pick[:, None] == e[None, :])
    keys = tl.where(chosen, bits, bits + (_LOWEST + 1))
    if padding_ptr is not None:
        padding = tl.load(padding_ptr + t, mask=live, other=0)
        keys = tl.where((padding != 0)[:, None], _LOWEST, keys)
    at = e.to(tl.int64)[None, :] * num_tokens + t[:, None]
    tl.store(keys_ptr + at, keys, mask=mask)


@quick
@triton.jit(do_not_specialize=["num_tokens"])
def _select_kernel(keys_ptr, loads_ptr, keep_ptr, num_tokens, E, BLOCK: tl.constexpr):
    e = tl.program_id(0)
    keys_ptr += e.to(tl.int64) * num_tokens
    wanted = tl.load(loads_ptr + e).to(tl.int32)
    lane = tl.arange(0, BLOCK)
    # the largest value that at least `wanted` keys reach, two bits at a time; int64, for the steps pass 2^31
    found = tl.full((), _LOWEST, tl.int64)
    step = tl.full((), 1 << 30, tl.int64)
    for _ in range(16):
        reach_1 = tl.zeros((), tl.int32)
        reach_2 = tl.zeros((), tl.int32)
        reach_3 = tl.zeros((), tl.int32)
        for start in range(0, num_tokens, BLOCK):
            t = start + lane
            key = tl.load(keys_ptr + t, mask=t < num_tokens, other=_LOWEST).to(tl.int64)
            reach_1 += tl.sum((key >= found + step).to(tl.int32), 0)
            reach_2 += tl.sum((key >= found + 2 * step).to(tl.int32), 0)
            reach_3 += tl.sum((key >= found + 3 * step).to(tl.int32), 0)
        digits = (reach_1 >= wanted).to(tl.int64) + (reach_2 >= wanted).to(tl.int64) + (reach_3 >= wanted).to(tl.int64)
        found += digits * step
        step = step >> 2
    above = tl.zeros((), tl.int32)
    for start in range(0, num_tokens, BLOCK):
        t = start + lane
        key = tl.load(keys_ptr + t, mask=t < num_tokens, other=_LOWEST).to(tl.int64)
        above += tl.sum((key > found).to(tl.int32), 0)
    left = wanted - above
    for start in range(0, num_tokens, BLOCK):
        t = start + lane
        live = t < num_tokens
        key = tl.load(keys_ptr + t, mask=live, other=_LOWEST).to(tl.int64)
        tie = ((key == found) & live).to(tl.int32)
        keep = (key > found) | ((tie != 0) & (tl.cumsum(tie, 0) <= left))
        left -= tl.sum(tie, 0)
        tl.store(keep_ptr + t.to(tl.int64) * E + e, keep.to(tl.int8), mask=live)


@quick
@triton.jit(do_not_specialize=["num_tokens", "num_pairs", "token_programs"])
def _place_kernel(
    keep_ptr, ends_ptr, token_ptr, expert_ptr, source_ptr, num_tokens, num_pairs, token_programs,
    E: tl.constexpr, TOKENS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    if program < token_programs:
        t = program * TOKENS + tl.arange(0, TOKENS)
        e = tl.arange(0, LANES)
        live = t < num_tokens
        at = t.to(tl.int64)[:, None] * E + e[None, :]
        keep = tl.load(keep_ptr + at, mask=live[:, None] & (e < E)[None, :], other=0).to(tl.int32)
        end = tl.load(ends_ptr + t, mask=live, other=0)
        slot = end[:, None] - tl.sum(keep, 1)[:, None] + tl.cumsum(keep, 1) - 1
        tl.store(token_ptr + slot, tl.broadcast_to(t[:, None], (TOKENS, LANES)), mask=keep != 0)
        tl.store(expert_ptr + slot, tl.broadcast_to(e[None, :], (TOKENS, LANES)), mask=keep != 0)
        tl.store(source_ptr + slot, at, mask=keep != 0)
    else:
        r = (program - token_programs) * TOKENS * LANES + tl.arange(0, TOKENS * LANES)
        unused = (r >= tl.load(ends_ptr + num_tokens - 1)) & (r < num_pairs)
        tl.store(token_ptr + r, tl.full((TOKENS * LANES,), num_tokens - 1, tl.int32), mask=unused)
        tl.store(expert_ptr + r, tl.full((TOKENS * LANES,), -1, tl.int32), mask=unused)
        tl.store(source_ptr + r, r.to(tl.int64), mask=unused)


def select_launch(
    weights: Tensor, ids: Tensor, loads: Tensor, padding_mask: Tensor | None, num_pairs: int
) -> tuple[Tensor, Tensor, Tensor]:
    """As `select_tokens_ref`, for float32 and at least one token and expert."""
    (tokens, experts), device = weights.shape, weights.device
    weights = weights if weights.stride(1) == 1 else weights.contiguous()
    keys = torch.empty(experts, tokens, dtype=torch.int32, device=device)
    block = min(64, next_power_of_2(experts))
    _keys_kernel[(cdiv(tokens, 64), cdiv(experts, block))](
        weights, ids.contiguous(), None if padding_mask is None else padding_mask.contiguous().view(torch.uint8), keys,
        tokens, weights.stride(0), E=experts, K=ids.shape[1], TOKENS=64, EXPERTS=block, num_warps=4,
    )  # fmt: skip
    keep = torch.empty(tokens, experts, dtype=torch.int8, device=device)
    _select_kernel[(experts,)](keys, loads.contiguous(), keep, tokens, experts, BLOCK=_BLOCK, num_warps=16)
    ends = keep.sum(1, dtype=torch.int32).cumsum(0, dtype=torch.int32)
    token, expert = (torch.empty(num_pairs, dtype=torch.int32, device=device) for _ in range(2))
    source = torch.empty(num_pairs, dtype=torch.int64, device=device)
    lanes = next_power_of_2(experts)
    rows = max(1, 2048 // lanes)
    programs = cdiv(tokens, rows)
    _place_kernel[(programs + cdiv(num_pairs, rows * lanes),)](
        keep, ends, token, expert, source, tokens, num_pairs, programs,
        E=experts, TOKENS=rows, LANES=lanes, num_warps=4,
    )  # fmt: skip
    return token, expert, source
