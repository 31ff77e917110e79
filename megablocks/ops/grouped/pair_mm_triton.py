"""Triton kernel of `pair_mm` and `pair_mlp_op`: no sorting, each expert's weights read once.

A program has a pair p and a block of columns. If p is the first pair of its expert, the program computes these columns
for all pairs of that expert, 16 at a time; otherwise it ends. So experts without a pair cost nothing. It finds the
pairs by comparing all ids, 2 KB that the caches hold, with its own.

The MLP is two launches. The first applies the activation to its products: a program has some columns of the argument
and the same columns of the gate. The second also sums: its programs store their rows in float32 and count them by token
and block of columns. The program that counts a token's last row sums all of them, in the order of the pairs, so the
bits do not depend on which program it is. No program waits. The first launch has set the counters to 0.

Memory traffic: the weights of the experts that have a pair, once. It bounds the time up to about 100 pairs per expert.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from megablocks.ops.activation_table import Activation
from megablocks.ops.activation_triton import unary
from megablocks.ops.grouped.pair_mm import out_dtype
from megablocks.ops.launch import cdiv, next_power_of_2, quick

_FEW = 64  # up to this many pairs the vector of ids and the blocks of columns are small


@dataclass(frozen=True, eq=False)  # compared and hashed by identity, which costs nothing; `_plan` caches them
class Plan:
    """The constants that a launch is compiled with.

    experts, inner, outer: E, I and the columns of the result, which a gate halves.
    each: pairs per row of x.
    w_strides: of w (E, I, N), in elements.
    ids: length of the vector of ids.
    block, step: columns and inner size of a tile.
    unary, exact: of an activation, or "" and False.
    half: distance in columns of w from the activation's argument to its gate; 0 without a gate.
    top_k: pairs per token if rows are summed, otherwise 0.
    counters: counters per token that are set to 0 for the launch that sums; otherwise 0.
    """

    experts: int
    inner: int
    outer: int
    each: int
    w_strides: tuple[int, int, int]
    ids: int
    block: int
    step: int
    unary: str = ""
    exact: bool = False
    half: int = 0
    top_k: int = 0
    counters: int = 0

    @property
    def blocks(self) -> int:
        return cdiv(self.outer, self.block)

    @property
    def all_counters(self) -> int:
        return next_power_of_2(max(self.counters, 1))

    @property
    def even(self) -> bool:
        """Whether steps need no mask."""
        return self.inner % self.step == 0


@triton.jit
def _weights(w_ptr, k, n, inside, c: tl.constexpr):
    """Rows k and columns n of an expert's w, (step, block)."""
    if c.w_strides[1] == 1:  # the inner size is contiguous
        at = w_ptr + n.to(tl.int64)[None, :] * c.w_strides[2] + k[:, None]
    else:
        at = w_ptr + k.to(tl.int64)[:, None] * c.w_strides[1] + n.to(tl.int64)[None, :] * c.w_strides[2]
    mask = inside[None, :]
    if not c.even:
        mask = mask & (k < c.inner)[:, None]
    return tl.load(at, mask=mask, other=0)


@triton.jit
def _count(rows_ptr, y_ptr, counters_ptr, pair, block, n, inside, c: tl.constexpr):
    """Count that a pair's columns are stored, behind a barrier. With a token's last pair its rows are summed."""
    BLOCK: tl.constexpr = c.block
    TOP_K: tl.constexpr = c.top_k
    token = pair // TOP_K
    before = tl.atomic_add(counters_ptr + token * c.blocks + block, 1, sem="acq_rel")
    if before == TOP_K - 1:
        first = (token * TOP_K).to(tl.int64)
        total = tl.zeros((BLOCK,), dtype=tl.float32)
        for k in tl.static_range(TOP_K):
            total += tl.load(rows_ptr + (first + k) * c.outer + n, mask=inside, other=0, cache_modifier=".cg")
        tl.store(y_ptr + token.to(tl.int64) * c.outer + n, total.to(y_ptr.dtype.element_ty), mask=inside)


@quick
@triton.jit(do_not_specialize=["num_pairs"])
def _pair_mm_kernel(
    x_ptr, w_ptr, ids_ptr, bias_ptr, scale_ptr, rows_ptr, y_ptr, counters_ptr, num_pairs,
    c: tl.constexpr, num_stages: tl.constexpr,
):  # fmt: skip
    """x (R / each, I), w (E, I, N), bias (E, N) or None, scale (R,) or None → rows (R, outer), and their sums y."""
    BLOCK: tl.constexpr = c.block  # Triton takes no attribute of a plan in a tuple, nor as an argument
    UNARY: tl.constexpr = c.unary
    EXACT: tl.constexpr = c.exact
    block = tl.program_id(0)
    p = tl.program_id(1)
    n = block * BLOCK + tl.arange(0, BLOCK)
    inside = n < c.outer
    if c.counters > 0:
        if (block == 0) & (p % c.each == 0):
            i = tl.arange(0, c.all_counters)
            tl.store(counters_ptr + (p // c.each) * c.counters + i, 0, mask=i < c.counters)
    expert = tl.load(ids_ptr + p).to(tl.int64)  # in 32 bits 2**32 would be expert 0
    if (expert < 0) | (expert >= c.experts):
        zero = tl.zeros((BLOCK,), dtype=rows_ptr.dtype.element_ty)
        tl.store(rows_ptr + p.to(tl.int64) * c.outer + n, zero, mask=inside)
        if c.top_k > 0:
            tl.debug_barrier()
            _count(rows_ptr, y_ptr, counters_ptr, p, block, n, inside, c)
        return
    every = tl.arange(0, c.ids)
    ids = tl.load(ids_ptr + every, mask=every < num_pairs, other=-1).to(tl.int64)
    mine = ids == expert
    if tl.min(tl.where(mine, every, c.ids), 0) != p:
        return
    place = tl.cumsum(mine.to(tl.int32), 0) - 1
    count = tl.sum(mine.to(tl.int32), 0)
    k = tl.arange(0, c.step)
    w_ptr += expert * c.w_strides[0]
    gate_ptr = w_ptr + c.half * c.w_strides[2]
    if bias_ptr is not None:
        bias_ptr += expert * (c.outer + c.half) + n
    for start in range(0, count, 16):  # rows of a tile: what the tensor cores take at least
        slot = start + tl.arange(0, 16)
        pair = tl.sum(tl.where(mine[None, :] & (place[None, :] == slot[:, None]), every[None, :], 0), 1)
        alive = slot < count
        x_rows = x_ptr + (pair // c.each).to(tl.int64)[:, None] * c.inner
        acc = tl.zeros((16, BLOCK), dtype=tl.float32)
        gate = acc
        for i in range(0, c.inner, c.step):
            known = alive[:, None]
            if not c.even:
                known = known & (i + k < c.inner)[None, :]
            a = tl.load(x_rows + (i + k)[None, :], mask=known, other=0)
            acc += tl.dot(a, _weights(w_ptr, i + k, n, inside, c), input_precision="ieee")
            if c.half > 0:
                gate += tl.dot(a, _weights(gate_ptr, i + k, n, inside, c), input_precision="ieee")
        if bias_ptr is not None:
            acc += tl.load(bias_ptr, mask=inside, other=0).to(tl.float32)[None, :]
            if c.half > 0:
                gate += tl.load(bias_ptr + c.half, mask=inside, other=0).to(tl.float32)[None, :]
        if c.unary != "":
            # of what backward would see: rounded
            acc, _ = unary(acc.to(rows_ptr.dtype.element_ty).to(tl.float32), UNARY, EXACT)
            if c.half > 0:
                acc *= gate.to(rows_ptr.dtype.element_ty).to(tl.float32)
        if scale_ptr is not None:
            acc *= tl.load(scale_ptr + pair, mask=alive, other=0).to(tl.float32)[:, None]
        rows_at = rows_ptr + pair.to(tl.int64)[:, None] * c.outer + n[None, :]
        tl.store(rows_at, acc.to(rows_ptr.dtype.element_ty), mask=alive[:, None] & inside[None, :])
        if c.top_k > 0:
            tl.debug_barrier()
            for s in range(start, tl.minimum(start + 16, count)):
                one = tl.sum(tl.where(mine & (place == s), every, 0), 0)
                _count(rows_ptr, y_ptr, counters_ptr, one, block, n, inside, c)


@functools.lru_cache(1024)  # a look-up takes less time than a new plan
def _plan(
    shape: torch.Size, w_strides: tuple[int, int, int], each: int, itemsize: int, many: bool,
    activation: Activation | None, top_k: int = 0, counters: int = 0,
) -> Plan:  # fmt: skip
    """The plan for w's shape and strides, and the size of an element."""
    experts, inner, outer = shape
    form, half = ("", False), 0
    if activation is not None:
        form = activation.unary, activation.exact
        outer, half = (outer // 2, outer // 2) if activation.gated else (outer, 0)
    block = (64 if many else 32) // (1 + (half > 0))  # the gate's columns are read too
    step = 128 if itemsize == 2 else 64
    ids = 512 if many else _FEW
    return Plan(experts, inner, outer, each, w_strides, ids, block, step, *form, half, top_k, counters)


def pair_mm_launch(x: Tensor, w: Tensor, ids: Tensor, bias: Tensor | None, scale: Tensor | None) -> Tensor:
    """Like `pair_mm_ref`, for at most 512 pairs."""
    pairs = ids.shape[0]
    y = torch.empty(pairs, w.shape[2], dtype=out_dtype(x, scale), device=x.device)
    if y.numel():
        c = _plan(w.shape, w.stride(), pairs // x.shape[0], x.dtype.itemsize, pairs > _FEW, None)
        bias, scale = (t if t is None else t.contiguous() for t in (bias, scale))
        _pair_mm_kernel[(c.blocks, pairs)](
            x.contiguous(), w, ids.contiguous(), bias, scale, y, None, None, pairs, c=c, num_stages=4
        )
    return y


def pair_mlp_launch(
    x: Tensor, ids: Tensor, weight: Tensor, up: Tensor, down: Tensor, up_bias: Tensor | None, down_bias: Tensor | None,
    activation: Activation,
) -> Tensor:  # fmt: skip
    """Like `pair_mlp_ref`, for at most 512 pairs; two launches."""
    (tokens, top_k), hidden, size = ids.shape, down.shape[2], x.dtype.itemsize
    pairs, device = tokens * top_k, x.device
    y = torch.empty(tokens, hidden, dtype=x.dtype, device=device)
    if pairs == 0 or y.numel() == 0:
        return y.zero_()
    last = _plan(down.shape, down.stride(), 1, size, pairs > _FEW, None, top_k)
    blocks = last.blocks
    first = _plan(up.shape, up.stride(), top_k, size, pairs > _FEW, activation, 0, blocks)
    up_bias, down_bias = (t if t is None else t.contiguous() for t in (up_bias, down_bias))
    ids = ids.contiguous()
    act = torch.empty(pairs, first.outer, dtype=x.dtype, device=device)
    rows = torch.empty(pairs * hidden, dtype=torch.float32, device=device)
    counters = torch.empty(tokens * blocks, dtype=torch.int32, device=device)
    _pair_mm_kernel[(max(first.blocks, 1), pairs)](  # even with I = 0 it must set the counters
        x.contiguous(), up, ids, up_bias, None, act, None, counters, pairs, c=first, num_stages=4
    )
    _pair_mm_kernel[(blocks, pairs)](
        act, down, ids, down_bias, weight.contiguous(), rows, y, counters, pairs, c=last, num_stages=4
    )
    return y
