"""Triton kernels behind `build_dispatch`: a stable counting sort of the pairs by expert in three launches.

Legend: T tokens, E experts, R pairs, V valid pairs, C = pairs a chunk (one program each).

1. count   counts[c, e]: pairs of expert e in chunk c; column E counts the pairs without an expert.
2. scan    counts[c, e] becomes the pairs of e in chunks before c, totals[e] the pairs of e.
3. place   each chunk sorts (expert, position) keys on chip, which is stable because the position is part of the key,
           and writes every index of `Dispatch`.

No float and no atomic takes part, so reruns are bit-identical. Bytes moved: the ids twice, five index arrays once, and
counts (R/C × E ints) three times, which stays in L2.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megablocks.ops.launch import cdiv, next_power_of_2, quick
from megablocks.ops.routing.dispatch import build_dispatch_ref

# Pairs a program. Sorting 1024 on chip takes over twice as long as 512; with 256 the scan gets long (notes/indices.md).
_CHUNK = 512


@triton.jit
def _key(expert, inside, E):
    """Sort key: the expert, E for "no expert", E + 1 for lanes past the end."""
    valid = (expert >= 0) & (expert < E)
    return tl.where(inside, tl.where(valid, expert, E), E + 1).to(tl.int32)


@quick
@triton.jit(do_not_specialize=["num_pairs"])
def _count_kernel(expert_ptr, counts_ptr, num_pairs, E, CHUNK: tl.constexpr, BINS: tl.constexpr):
    chunk = tl.program_id(0)
    r = chunk * CHUNK + tl.arange(0, CHUNK)
    key = _key(tl.load(expert_ptr + r, mask=r < num_pairs, other=0), r < num_pairs, E)
    b = tl.arange(0, BINS)
    tl.store(counts_ptr + chunk.to(tl.int64) * (E + 1) + b, tl.histogram(key, BINS), mask=b <= E)


@quick
@triton.jit(do_not_specialize=["num_chunks"])
def _scan_kernel(counts_ptr, totals_ptr, num_chunks, E, ROWS: tl.constexpr, COLS: tl.constexpr):
    col = tl.program_id(0) * COLS + tl.arange(0, COLS)
    carry = tl.zeros((COLS,), tl.int32)
    for start in range(0, num_chunks, ROWS):
        row = start + tl.arange(0, ROWS)
        ptr = counts_ptr + row[:, None].to(tl.int64) * (E + 1) + col[None, :]
        mask = (row < num_chunks)[:, None] & (col <= E)[None, :]
        count = tl.load(ptr, mask=mask, other=0)
        tl.store(ptr, tl.cumsum(count, 0) - count + carry[None, :], mask=mask)
        carry += tl.sum(count, 0)
    tl.store(totals_ptr + col, carry, mask=col <= E)


@quick
@triton.jit(do_not_specialize=["num_pairs", "num_tokens"])
def _place_kernel(
    token_ptr, expert_ptr, before_ptr, totals_ptr,
    expert_offsets_ptr, token_offsets_ptr, gather_ptr, scatter_ptr, pair_ptr,
    num_pairs, num_tokens, E, CHUNK: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    base = chunk * CHUNK
    b = tl.arange(0, BINS)
    total = tl.load(totals_ptr + b, mask=b <= E, other=0)
    first = tl.cumsum(total, 0) - total  # the first row of each expert; at E: the number of valid pairs V
    if chunk == 0:
        tl.store(expert_offsets_ptr + b, first, mask=b <= E)
    before = tl.load(before_ptr + chunk.to(tl.int64) * (E + 1) + b, mask=b <= E, other=0)

    i = tl.arange(0, CHUNK)
    r = base + i
    inside = r < num_pairs
    key = _key(tl.load(expert_ptr + r, mask=inside, other=0), inside, E)
    valid = (key < E).to(tl.int32)
    num_valid = tl.sum(tl.where(b == E, first, 0), 0)
    invalid_before = tl.sum(tl.where(b == E, before, 0), 0)
    # token-major slot of pair r: its rank among the valid pairs; pairs without an expert fill the slots from V on
    slot_valid = base - invalid_before + tl.cumsum(valid, 0) - valid
    slot = tl.where(valid == 1, slot_valid, num_valid + r - slot_valid)

    packed = tl.sort(key * CHUNK + i)
    sorted_key = packed // CHUNK
    source = packed % CHUNK
    histogram = tl.histogram(key, BINS)
    to_row = first + before - (tl.cumsum(histogram, 0) - histogram)
    row = tl.gather(to_row, sorted_key, 0) + i
    stored = sorted_key <= E
    used = sorted_key < E
    pair = base + source
    token = tl.load(token_ptr + pair, mask=used, other=0)
    tl.store(gather_ptr + row, tl.where(used, token, 0), mask=stored)
    tl.store(pair_ptr + row, tl.where(used, pair, 0), mask=stored)
    tl.store(scatter_ptr + tl.gather(slot, source, 0), tl.where(used, row, 0), mask=stored)

    # token_offsets[t] for the tokens whose first pair is r, and for the tokens without a pair just before them
    own = tl.load(token_ptr + r, mask=inside, other=0)
    previous = tl.load(token_ptr + r - 1, mask=inside & (r > 0), other=-1)
    gap = tl.where(inside, own - previous, 0)
    for back in range(tl.max(gap, 0)):
        tl.store(token_offsets_ptr + own - back, slot_valid, mask=back < gap)
    last = tl.load(token_ptr + num_pairs - 1)
    for start in range(last + 1 + chunk * CHUNK, num_tokens + 1, tl.num_programs(0) * CHUNK):
        tl.store(token_offsets_ptr + start + i, num_valid, mask=start + i <= num_tokens)


def count_launch(expert: Tensor, num_experts: int) -> Tensor:
    """Like `count_valid_ref`, for at least one pair; one launch, and a sum over the chunks."""
    expert, num_pairs = expert.contiguous(), expert.shape[0]
    chunks = cdiv(num_pairs, _CHUNK)
    counts = torch.empty(chunks, num_experts + 1, dtype=torch.int32, device=expert.device)
    bins = next_power_of_2(num_experts + 2)
    _count_kernel[(chunks,)](expert, counts, num_pairs, num_experts, CHUNK=_CHUNK, BINS=bins)
    return counts[:, :num_experts].sum(0)


def dispatch_launch(
    token: Tensor, expert: Tensor, num_tokens: int, num_experts: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The five index tensors of `Dispatch`; three launches, no host synchronization, and none for R = 0."""
    device, num_pairs = expert.device, expert.shape[0]
    if num_pairs == 0:
        return build_dispatch_ref(token, expert, num_tokens, num_experts)
    token, expert = token.contiguous(), expert.contiguous()
    chunks = cdiv(num_pairs, _CHUNK)
    bins = next_power_of_2(num_experts + 2)
    gather, scatter, pair = (torch.empty(num_pairs, dtype=torch.int32, device=device) for _ in range(3))
    token_offsets = torch.empty(num_tokens + 1, dtype=torch.int32, device=device)
    expert_offsets = torch.empty(num_experts + 1, dtype=torch.int32, device=device)
    # the totals first: then the alignment of the counts, on which Triton specializes, depends only on E
    totals, counts = torch.empty(chunks + 1, num_experts + 1, dtype=torch.int32, device=device).split([1, chunks])
    _count_kernel[(chunks,)](expert, counts, num_pairs, num_experts, CHUNK=_CHUNK, BINS=bins)
    _scan_kernel[(cdiv(num_experts + 1, 8),)](counts, totals, chunks, num_experts, ROWS=128, COLS=8)
    _place_kernel[(chunks,)](
        token, expert, counts, totals, expert_offsets, token_offsets, gather, scatter, pair,
        num_pairs, num_tokens, num_experts, CHUNK=_CHUNK, BINS=bins,
    )  # fmt: skip
    return expert_offsets, token_offsets, gather, scatter, pair
