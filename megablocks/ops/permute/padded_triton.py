"""Triton kernel of `pad_indices_ref`: the indices of padded rows, by one launch.

Legend: E experts, R pairs, N padded rows, T tokens. Program i takes BLOCK rows and BLOCK slots; each looks its expert
up by bisection in the E offsets, which stay in L1. Bytes: the indices in and out, 4·(3·R + 2·N), once.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from megablocks.ops.launch import cdiv, quick
from megablocks.ops.permute import Unpadded

_BLOCK = 256


@triton.jit
def _bin_of(ends_ptr, i, E, STEPS: tl.constexpr):
    """How many of the E ascending ends are <= i: the bin that i is in, E behind the last."""
    low = i * 0
    high = low + E
    for _ in tl.static_range(STEPS):
        middle = (low + high) // 2
        end = tl.load(ends_ptr + middle, mask=low < high, other=0)
        right = (low < high) & (end <= i)
        high = tl.where((low < high) & (end > i), middle, high)
        low = tl.where(right, middle + 1, low)
    return low


@triton.jit
def _start(ends_ptr, e, E):
    return tl.load(ends_ptr + e - 1, mask=(e > 0) & (e <= E), other=0)


@quick
@triton.jit(do_not_specialize=["num_rows", "num_pairs", "num_tokens", "capacity"])
def _pad_kernel(
    ends_ptr, padded_ends_ptr, gather_ptr, scatter_ptr, pair_ptr,
    token_offsets_out_ptr, gather_out_ptr, scatter_out_ptr, pair_out_ptr,
    num_rows, num_pairs, num_tokens, E, capacity, top_k,
    BINNED: tl.constexpr, PLAIN: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)

    # padded row i of expert e is its row p without padding
    if BINNED:
        e = i // capacity
        start = e * capacity
    else:
        e = _bin_of(padded_ends_ptr, i, E, STEPS)
        start = _start(padded_ends_ptr, e, E)
    p = _start(ends_ptr, e, E) + i - start
    used = (i < num_rows) & (e < E) & (p < tl.load(ends_ptr + e, mask=e < E, other=0))
    pair = tl.load(pair_ptr + p, mask=used, other=-1)
    if PLAIN:
        token = tl.where(used, pair // top_k, -1)
    else:
        token = tl.load(gather_ptr + p, mask=used, other=-1)
    tl.store(pair_out_ptr + i, pair, mask=i < num_rows)
    tl.store(gather_out_ptr + i, token, mask=i < num_rows)

    # slot s holds row p of expert e
    live = i < num_pairs
    if PLAIN:
        slot = tl.load(pair_ptr + i, mask=live, other=0)
        p = i
        tl.store(token_offsets_out_ptr + i, i * top_k, mask=i <= num_tokens)
    else:
        slot = i
        p = tl.load(scatter_ptr + i, mask=live, other=0)
    e = _bin_of(ends_ptr, p, E, STEPS)
    place = p - _start(ends_ptr, e, E)
    if BINNED:
        row = e * capacity + place
        end = row - place + capacity
    else:
        row = _start(padded_ends_ptr, e, E) + place
        end = tl.load(padded_ends_ptr + e, mask=e < E, other=0)
    fits = (i < tl.load(ends_ptr + E - 1)) & (e < E) & (row < end) & (row < num_rows)
    tl.store(scatter_out_ptr + slot, tl.where(fits, row, -1), mask=live)


def pad_launch(
    rows: Unpadded, padded_ends: Tensor | None, capacity: int, num_rows: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Like `pad_indices_ref`; one launch."""
    ends, pair, gather, scatter, top_k = rows
    num_pairs, num_experts, plain = (pair if scatter is None else scatter).shape[0], ends.shape[0], gather is None
    num_tokens = num_pairs // top_k if plain else 0
    token_offsets = pair.new_empty(num_tokens + 1 if plain else 0)
    gather_out, pair_out, scatter_out = pair.new_empty(num_rows), pair.new_empty(num_rows), pair.new_empty(num_pairs)
    most = max(num_rows, num_pairs, num_tokens + 1)
    _pad_kernel[(cdiv(most, _BLOCK),)](
        ends, padded_ends, gather, scatter, pair, token_offsets, gather_out, scatter_out, pair_out,
        num_rows, num_pairs, num_tokens, num_experts, max(capacity, 1), top_k,
        BINNED=padded_ends is None, PLAIN=plain, STEPS=num_experts.bit_length(), BLOCK=_BLOCK,
    )  # fmt: skip
    return token_offsets, gather_out, scatter_out, pair_out
