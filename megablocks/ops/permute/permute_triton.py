"""Triton kernels that move tokens: a program processes TOKENS tokens times BLOCK features; every byte moves once.

Legend: T tokens, H hidden, N rows in expert order, slots of token t = scatter[token_offsets[t] : token_offsets[t+1]].

  expand            rows[scatter[s]] = x[t]                          reads T·H, writes V·H
  combine           y[t] = Σ_s weight · rows[scatter[s]]             float32 sum in slot order
  combine backward  drows[scatter[s]] = weight · dy[t], dweight = ⟨rows[scatter[s]], dy[t]⟩       one pass over both

A slot of -1 has no row. If rows are padded (pair[row] = -1), the first programs write zeros to the padding.
One program sums a token's rows in slot order: no atomics, reruns are bit-identical.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megablocks.ops.launch import cdiv, next_power_of_2, quick
from megablocks.ops.routing.dispatch import Dispatch


@triton.jit
def _tokens(token_offsets_ptr, program, num_tokens, TOKENS: tl.constexpr):
    """Token ids of a program and the slots of each: (ids, first, last); none for lanes past the end or program < 0."""
    t = program * TOKENS + tl.arange(0, TOKENS)
    t = tl.where(t < 0, num_tokens, t)
    live = t < num_tokens
    first = tl.load(token_offsets_ptr + t, mask=live, other=0)
    last = tl.load(token_offsets_ptr + t + 1, mask=live, other=0)
    return t.to(tl.int64), first, last


@triton.jit
def _row_of(scatter_ptr, first, last, i):
    """Row of each token's slot i, -1 behind its last."""
    return tl.load(scatter_ptr + first + i, mask=first + i < last, other=-1).to(tl.int64)


@triton.jit
def _early_row_of(scatter_ptr, t, first, last, i, num_tokens, per_token):
    """The same for i < per_token, mostly without a wait for `first`.

    Where the tokens before had per_token slots each, as is the rule, the slot is i + t·per_token: loaded while `first`
    is on the way, which saves a round trip to memory; elsewhere it is loaded again.
    """
    guess = t.to(tl.int32) * per_token + i
    row = tl.load(scatter_ptr + guess, mask=(t < num_tokens) & (i < per_token), other=-1)
    slot = first + i
    wrong = (guess != slot) | (i >= per_token)
    again = tl.load(scatter_ptr + slot, mask=wrong & (slot < last), other=-1)
    return tl.where(slot < last, tl.where(wrong, again, row), -1).to(tl.int64)


@triton.jit
def _pair_of(pair_ptr, slot, row, live, dense):
    """The pair of a slot: the slot itself where every pair has an expert, which saves a round trip to memory."""
    return tl.where(dense, slot, tl.load(pair_ptr + row, mask=live & (not dense), other=0))


@triton.jit
def _zero_padding(
    rows_ptr, pair_ptr, program, num_rows, H, column, FILL: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr
):
    """Zeros in the padding among FILL rows, BLOCK features from `column` on."""
    every = program * FILL + tl.arange(0, FILL)
    pair = tl.load(pair_ptr + every, mask=every < num_rows, other=0)
    if tl.min(pair, 0) < 0:
        h = column + tl.arange(0, BLOCK)
        zeros = tl.zeros((TOKENS, BLOCK), rows_ptr.dtype.element_ty)
        for start in range(0, FILL, TOKENS):
            row = program * FILL + start + tl.arange(0, TOKENS)
            padding = tl.load(pair_ptr + row, mask=row < num_rows, other=0) < 0
            at = row.to(tl.int64)[:, None] * H + h[None, :]
            tl.store(rows_ptr + at, zeros, mask=padding[:, None] & (h < H)[None, :])


@quick
@triton.jit(do_not_specialize=["num_tokens", "num_rows", "per_token", "fill_programs"])
def _expand_kernel(
    x_ptr, rows_ptr, token_offsets_ptr, scatter_ptr, pair_ptr,
    num_tokens, num_rows, per_token, fill_programs, H, x_stride,
    PADDED: tl.constexpr, FILL: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(1) * BLOCK
    program = tl.program_id(0) - fill_programs
    if PADDED:
        if program < 0:
            _zero_padding(rows_ptr, pair_ptr, tl.program_id(0), num_rows, H, column, FILL, TOKENS, BLOCK)
    t, first, last = _tokens(token_offsets_ptr, program, num_tokens, TOKENS)
    h = column + tl.arange(0, BLOCK)
    inside = (h < H)[None, :]
    # read whether it has a slot or not: the slots are known one round trip later
    x = tl.load(x_ptr + t[:, None] * x_stride + h[None, :], mask=(t < num_tokens)[:, None] & inside, other=0)
    row = _early_row_of(scatter_ptr, t, first, last, 0, num_tokens, per_token)  # not in the loop: its length is a wait
    tl.store(rows_ptr + row[:, None] * H + h[None, :], x, mask=(row >= 0)[:, None] & inside, cache_modifier=".cs")
    for i in range(1, tl.max(last - first, 0)):
        row = _row_of(scatter_ptr, first, last, i)
        tl.store(rows_ptr + row[:, None] * H + h[None, :], x, mask=(row >= 0)[:, None] & inside, cache_modifier=".cs")


@triton.jit
def _add_rows(acc, source, start, EARLY: tl.constexpr, UNROLL: tl.constexpr):
    """acc plus UNROLL rows of each token from its slot `start` on, their loads all in flight."""
    rows_ptr, weight_ptr, scatter_ptr, pair_ptr, t, first, last, num_tokens, per_token, dense, H, h = source
    for u in tl.static_range(UNROLL):
        if EARLY:
            row = _early_row_of(scatter_ptr, t, first, last, start + u, num_tokens, per_token)
        else:
            row = _row_of(scatter_ptr, first, last, start + u)
        live = row >= 0
        at = row[:, None] * H + h[None, :]
        value = tl.load(rows_ptr + at, mask=live[:, None] & (h < H)[None, :], other=0).to(tl.float32)
        if weight_ptr is not None:
            pair = _pair_of(pair_ptr, first + start + u, row, live, dense)
            value *= tl.load(weight_ptr + pair, mask=live, other=0).to(tl.float32)[:, None]
        acc += value
    return acc


@quick
@triton.jit(do_not_specialize=["num_tokens", "num_pairs", "per_token"])
def _combine_kernel(
    rows_ptr, weight_ptr, y_ptr, token_offsets_ptr, scatter_ptr, pair_ptr, num_tokens, num_pairs, per_token, H,
    UNROLL: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    t, first, last = _tokens(token_offsets_ptr, tl.program_id(0), num_tokens, TOKENS)
    h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    dense = tl.load(token_offsets_ptr + num_tokens) == num_pairs
    source = (rows_ptr, weight_ptr, scatter_ptr, pair_ptr, t, first, last, num_tokens, per_token, dense, H, h)
    acc = tl.zeros((TOKENS, BLOCK), tl.float32)
    acc = _add_rows(acc, source, 0, True, UNROLL)  # the first not in the loop, whose length is a wait
    for start in range(UNROLL, tl.max(last - first, 0), UNROLL):
        acc = _add_rows(acc, source, start, False, UNROLL)
    mask = (t < num_tokens)[:, None] & (h < H)[None, :]
    tl.store(y_ptr + t[:, None] * H + h[None, :], acc.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _fetch(source, row, slot, REST: tl.constexpr):
    """(pair, weight, values of the row, those of its second block of REST features) of a slot. Values need rows."""
    rows_ptr, weight_ptr, pair_ptr, dense, H, h, g = source
    live = row >= 0
    pair = _pair_of(pair_ptr, slot, row, live, dense)
    weight = tl.load(weight_ptr + pair, mask=live, other=0).to(tl.float32)
    if rows_ptr is not None:
        value = tl.load(rows_ptr + row[:, None] * H + h[None, :], mask=live[:, None] & (h < H)[None, :], other=0)
    else:
        value = weight
    if rows_ptr is not None and REST > 0:
        rest = tl.load(rows_ptr + row[:, None] * H + g[None, :], mask=live[:, None] & (g < H)[None, :], other=0)
    else:
        rest = weight
    return pair, weight, value, rest


@triton.jit
def _give(target, row, pair, weight, value, rest, REST: tl.constexpr):
    """Store drows and dweight of a slot."""
    drows_ptr, dweight_ptr, dy, dy_rest, H, h, g = target
    if dweight_ptr is not None:
        dot = tl.sum(dy * value.to(tl.float32), 1)
        if REST > 0:
            dot += tl.sum(dy_rest * rest.to(tl.float32), 1)
        tl.store(dweight_ptr + pair, dot, mask=row >= 0)
    out = (dy * weight[:, None]).to(drows_ptr.dtype.element_ty)
    mask = (row >= 0)[:, None] & (h < H)[None, :]
    tl.store(drows_ptr + row[:, None] * H + h[None, :], out, mask=mask)
    if REST > 0:
        out = (dy_rest * weight[:, None]).to(drows_ptr.dtype.element_ty)
        tl.store(drows_ptr + row[:, None] * H + g[None, :], out, mask=(row >= 0)[:, None] & (g < H)[None, :])


@quick
@triton.jit(do_not_specialize=["num_tokens", "num_rows", "num_pairs", "per_token", "fill_programs"])
def _combine_backward_kernel(
    rows_ptr, weight_ptr, dy_ptr, drows_ptr, dweight_ptr, token_offsets_ptr, scatter_ptr, pair_ptr,
    num_tokens, num_rows, num_pairs, per_token, fill_programs, H, dy_stride,
    PADDED: tl.constexpr, FILL: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr,
    WHOLE: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0) - fill_programs
    if PADDED:
        if program < 0:
            for column in range(0, H, BLOCK):
                _zero_padding(drows_ptr, pair_ptr, tl.program_id(0), num_rows, H, column, FILL, TOKENS, BLOCK)
    t, first, last = _tokens(token_offsets_ptr, program, num_tokens, TOKENS)
    h = tl.arange(0, BLOCK)
    dense = tl.load(token_offsets_ptr + num_tokens) == num_pairs
    row = _early_row_of(scatter_ptr, t, first, last, 0, num_tokens, per_token)
    if WHOLE:  # the row fits one block: dy is read once for all slots, and a slot's row while the one before is written
        mask = (t < num_tokens)[:, None] & (h < H)[None, :]
        dy = tl.load(dy_ptr + t[:, None] * dy_stride + h[None, :], mask=mask, other=0).to(tl.float32)
        g = BLOCK + tl.arange(0, max(REST, 1))
        dy_rest = dy
        if REST > 0:
            mask = (t < num_tokens)[:, None] & (g < H)[None, :]
            dy_rest = tl.load(dy_ptr + t[:, None] * dy_stride + g[None, :], mask=mask, other=0).to(tl.float32)
        source = (rows_ptr, weight_ptr, pair_ptr, dense, H, h, g)
        target = (drows_ptr, dweight_ptr, dy, dy_rest, H, h, g)
        pair, weight, value, rest = _fetch(source, row, first, REST)
        if AHEAD:  # 0.92 instead of 0.84 of copy speed at 32768 × 4096, K = 8; narrower rows: 0.79 instead of 0.88
            for i in range(1, tl.max(last - first, 0)):
                next_row = _row_of(scatter_ptr, first, last, i)
                next_pair, next_weight, next_value, next_rest = _fetch(source, next_row, first + i, REST)
                _give(target, row, pair, weight, value, rest, REST)
                row, pair, weight, value, rest = next_row, next_pair, next_weight, next_value, next_rest
            _give(target, row, pair, weight, value, rest, REST)
        else:
            _give(target, row, pair, weight, value, rest, REST)
            for i in range(1, tl.max(last - first, 0)):
                row = _row_of(scatter_ptr, first, last, i)
                pair, weight, value, rest = _fetch(source, row, first + i, REST)
                _give(target, row, pair, weight, value, rest, REST)
    else:
        for i in range(tl.max(last - first, 0)):
            row = _row_of(scatter_ptr, first, last, i)
            live = row >= 0
            pair, weight, _, _ = _fetch((None, weight_ptr, pair_ptr, dense, H, h, h), row, first + i, 0)
            dot = tl.zeros((TOKENS, BLOCK), tl.float32)
            for start in range(0, H, BLOCK):
                mask = live[:, None] & (start + h < H)[None, :]
                part = tl.load(dy_ptr + t[:, None] * dy_stride + start + h[None, :], mask=mask, other=0).to(tl.float32)
                at = row[:, None] * H + start + h[None, :]
                if dweight_ptr is not None:
                    dot += part * tl.load(rows_ptr + at, mask=mask, other=0).to(tl.float32)
                tl.store(drows_ptr + at, (part * weight[:, None]).to(drows_ptr.dtype.element_ty), mask=mask)
            if dweight_ptr is not None:
                tl.store(dweight_ptr + pair, tl.sum(dot, 1), mask=live)


_FILL = 64  # rows that a program checks for padding: one load, and mostly nothing else


def _blocks(hidden: int) -> dict[str, int]:
    """1024 features per one-warp program: narrow rows share one, wide rows are split. More warps: up to 20 % slower."""
    block = min(next_power_of_2(max(hidden, 256)), 1024)
    return {"TOKENS": 1024 // block, "BLOCK": block, "num_warps": 1}


def _whole_rows(hidden: int, padded: bool) -> dict[str, int]:
    """Whole rows, so that dy is read once; 1024 features per warp. Three quarters of a power of two are two blocks.

    At 1536 one warp computes both: 0.92 of copy speed instead of 0.86. For padded rows it would reach 0.78.
    """
    block = min(next_power_of_2(max(hidden, 256)), 4096)
    tokens, warps = max(1, 1024 // block), max(1, block // 1024)
    if hidden == block // 4 * 3:
        one = hidden == 1536 and not padded
        return {"TOKENS": tokens, "BLOCK": block // 2, "REST": block // 4, "num_warps": 1 if one else warps}
    return {"TOKENS": tokens, "BLOCK": block, "REST": 0, "num_warps": warps}


def _fill_programs(dispatch: Dispatch) -> int:
    return cdiv(dispatch.num_rows, _FILL) if dispatch.padded else 0


def expand_launch(x: Tensor, dispatch: Dispatch) -> Tensor:
    """x (T, H) → rows (N, H); one launch. Padding is 0; other unused rows are not written."""
    x = x if x.stride(1) == 1 else x.contiguous()
    (num_tokens, hidden), num_rows = x.shape, dispatch.num_rows
    rows = x.new_empty(num_rows, hidden)
    blocks = _blocks(hidden)
    fill = _fill_programs(dispatch)
    programs = fill + cdiv(num_tokens, blocks["TOKENS"])
    if rows.numel() and programs:
        _expand_kernel[(programs, cdiv(hidden, blocks["BLOCK"]))](
            x, rows, dispatch.token_offsets, dispatch.scatter, dispatch.pair,
            num_tokens, num_rows, dispatch.num_pairs // max(num_tokens, 1), fill, hidden, x.stride(0),
            PADDED=dispatch.padded, FILL=_FILL, **blocks,
        )  # fmt: skip
    return rows


def combine_launch(rows: Tensor, weight: Tensor | None, dispatch: Dispatch) -> Tensor:
    """rows (N, H), weight (R,) or None → (T, H); one launch."""
    rows = rows.contiguous()
    weight = None if weight is None else weight.contiguous()
    num_tokens, num_pairs, hidden = dispatch.num_tokens, dispatch.num_pairs, rows.shape[1]
    y = rows.new_empty(num_tokens, hidden)
    blocks = _blocks(hidden)
    grid = (cdiv(num_tokens, blocks["TOKENS"]), cdiv(hidden, blocks["BLOCK"]))
    unroll = min(4, next_power_of_2(cdiv(max(num_pairs, 1), max(num_tokens, 1))))
    if y.numel():
        _combine_kernel[grid](
            rows, weight, y, dispatch.token_offsets, dispatch.scatter, dispatch.pair,
            num_tokens, num_pairs, num_pairs // num_tokens, hidden, UNROLL=unroll, **blocks,
        )  # fmt: skip
    return y


def combine_backward_launch(
    dy: Tensor, rows: Tensor | None, weight: Tensor, dispatch: Dispatch
) -> tuple[Tensor, Tensor | None]:
    """dRows (N, H) as by `expand_launch` and, where `rows` are given, d_weight (R,); one launch and one fill."""
    dy = dy if dy.stride(1) == 1 else dy.contiguous()
    rows = None if rows is None else rows.contiguous()
    weight = weight.contiguous()
    (num_tokens, hidden), num_rows, num_pairs = dy.shape, dispatch.num_rows, dispatch.num_pairs
    d_rows = dy.new_empty(num_rows, hidden)
    d_weight = None if rows is None else torch.zeros_like(weight)  # unused pairs keep the zero
    blocks = _whole_rows(hidden, dispatch.padded)
    fill = _fill_programs(dispatch)
    programs = fill + cdiv(num_tokens, blocks["TOKENS"])
    if d_rows.numel() and programs:
        _combine_backward_kernel[(programs,)](
            rows, weight, dy, d_rows, d_weight, dispatch.token_offsets, dispatch.scatter, dispatch.pair,
            num_tokens, num_rows, num_pairs, num_pairs // max(num_tokens, 1), fill, hidden, dy.stride(0),
            PADDED=dispatch.padded, FILL=_FILL, WHOLE=blocks["BLOCK"] + blocks["REST"] >= hidden,
            AHEAD=blocks["BLOCK"] > 1024 and num_pairs > num_tokens, **blocks,
        )  # fmt: skip
    return d_rows, d_weight
