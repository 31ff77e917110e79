"""Triton kernel of `pad_indices_ref`: the indices of padded rows, in one launch.

Legend: E experts, R pairs, N padded rows, T tokens. Program i computes BLOCK rows and BLOCK slots; each finds its
expert by bisection in the E offsets, which stay in L1. Bytes: the indices in and out, 4·(3·R + 2·N), once.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megablocks.ops.launch import cdiv, quick
from megablocks.ops.routing.dispatch import Dispatch

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
@triton.jit(do_not_specialize=["num_rows", "num_pairs", "capacity"])
def _pad_kernel(
    ends_ptr, padded_ends_ptr, gather_ptr, scatter_ptr, pair_ptr, gather_out_ptr, scatter_out_ptr, pair_out_ptr,
    num_rows, num_pairs, E, capacity, STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)

    # padded row i of expert e is its row p without padding
    if padded_ends_ptr is None:  # bins
        e = i // capacity
        start = e * capacity
    else:
        e = _bin_of(padded_ends_ptr, i, E, STEPS)
        start = _start(padded_ends_ptr, e, E)
    p = _start(ends_ptr, e, E) + i - start
    used = (i < num_rows) & (e < E) & (p < tl.load(ends_ptr + e, mask=e < E, other=0))
    pair = tl.load(pair_ptr + p, mask=used, other=-1)
    token = tl.load(gather_ptr + p, mask=used, other=-1)
    tl.store(pair_out_ptr + i, pair, mask=i < num_rows)
    tl.store(gather_out_ptr + i, token, mask=i < num_rows)

    # slot i holds row p of expert e
    live = i < num_pairs
    p = tl.load(scatter_ptr + i, mask=live, other=0)
    e = _bin_of(ends_ptr, p, E, STEPS)
    place = p - _start(ends_ptr, e, E)
    if padded_ends_ptr is None:  # bins
        row = e * capacity + place
        end = row - place + capacity
    else:
        row = _start(padded_ends_ptr, e, E) + place
        end = tl.load(padded_ends_ptr + e, mask=e < E, other=0)
    fits = (e < E) & (row < end) & (row < num_rows)
    tl.store(scatter_out_ptr + i, tl.where(fits, row, -1), mask=live)


def pad_launch(d: Dispatch, padded_ends: Tensor | None, capacity: int, num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Like `pad_indices_ref`; one launch."""
    num_pairs, num_experts = d.num_pairs, d.num_experts
    gather, pair, scatter = d.pair.new_empty(num_rows), d.pair.new_empty(num_rows), torch.empty_like(d.scatter)
    if num_rows or num_pairs:
        _pad_kernel[(cdiv(max(num_rows, num_pairs), _BLOCK),)](
            d.expert_offsets[1:], padded_ends, d.gather, d.scatter, d.pair, gather, scatter, pair,
            num_rows, num_pairs, num_experts, max(capacity, 1), STEPS=num_experts.bit_length(), BLOCK=_BLOCK,
        )  # fmt: skip
    return gather, scatter, pair
