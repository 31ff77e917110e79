"""Triton kernels that move tokens: a program takes TOKENS tokens times BLOCK features, and every byte moves once.

Legend: T tokens, H hidden, N rows in expert order, slots of token t = scatter[token_offsets[t] : token_offsets[t+1]].

  expand            rows[scatter[s]] = x[t]                          reads T·H, writes V·H
  combine           y[t] = Σ_s weight · rows[scatter[s]]             float32 sum in slot order
  combine backward  drows[scatter[s]] = weight · dy[t], dweight = ⟨rows[scatter[s]], dy[t]⟩       one pass over both

A slot of -1 has no row. Where rows are padded (pair[row] = -1), programs behind those of the tokens write their zeros.
A token's rows are summed in slot order by one program: no atomics, reruns are bit-identical.
"""

# mypy: allow-untyped-defs
# (device code takes what Triton passes at compile time)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _tokens(token_offsets_ptr, num_tokens, TOKENS: tl.constexpr):
    """Token ids of this program and the slots of each: (ids, first, last); empty for lanes past the end."""
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    live = t < num_tokens
    first = tl.load(token_offsets_ptr + t, mask=live, other=0)
    last = tl.load(token_offsets_ptr + t + 1, mask=live, other=0)
    return t.to(tl.int64), first, last


@triton.jit
def _zero_padding(
    rows_ptr, pair_ptr, program, num_rows, H, column,
    STEPS: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Zeros in the padding among STEPS x TOKENS rows, BLOCK features from `column` on."""
    h = column + tl.arange(0, BLOCK)
    zeros = tl.zeros((TOKENS, BLOCK), rows_ptr.dtype.element_ty)
    for step in range(STEPS):
        row = (program * STEPS + step) * TOKENS + tl.arange(0, TOKENS)
        padding = tl.load(pair_ptr + row, mask=row < num_rows, other=0) < 0
        if tl.max(padding.to(tl.int32), 0) > 0:
            at = row.to(tl.int64)[:, None] * H + h[None, :]
            tl.store(rows_ptr + at, zeros, mask=padding[:, None] & (h < H)[None, :])


@triton.jit
def _expand_kernel(
    x_ptr, rows_ptr, token_offsets_ptr, scatter_ptr, pair_ptr, num_tokens, num_rows, H, x_stride,
    PADDED: tl.constexpr, STEPS: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(1) * BLOCK
    behind = tl.program_id(0) - tl.cdiv(num_tokens, TOKENS)
    if PADDED:
        if behind >= 0:
            _zero_padding(rows_ptr, pair_ptr, behind, num_rows, H, column, STEPS, TOKENS, BLOCK)
    t, first, last = _tokens(token_offsets_ptr, num_tokens, TOKENS)  # no slots in programs behind the tokens'
    h = column + tl.arange(0, BLOCK)
    inside = (h < H)[None, :]
    x = tl.load(x_ptr + t[:, None] * x_stride + h[None, :], mask=(last > first)[:, None] & inside, other=0)
    for i in range(tl.max(last - first, 0)):
        row = tl.load(scatter_ptr + first + i, mask=first + i < last, other=-1).to(tl.int64)
        tl.store(rows_ptr + row[:, None] * H + h[None, :], x, mask=(row >= 0)[:, None] & inside)


@triton.jit
def _combine_kernel(
    rows_ptr, weight_ptr, y_ptr, token_offsets_ptr, scatter_ptr, pair_ptr, num_tokens, H,
    HAS_WEIGHT: tl.constexpr, UNROLL: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    t, first, last = _tokens(token_offsets_ptr, num_tokens, TOKENS)
    h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (h < H)[None, :]
    acc = tl.zeros((TOKENS, BLOCK), tl.float32)
    for start in range(0, tl.max(last - first, 0), UNROLL):
        for u in tl.static_range(UNROLL):  # as many loads in flight
            slot = first + start + u
            row = tl.load(scatter_ptr + slot, mask=slot < last, other=-1).to(tl.int64)
            live = row >= 0
            value = tl.load(rows_ptr + row[:, None] * H + h[None, :], mask=live[:, None] & inside, other=0).to(
                tl.float32
            )
            if HAS_WEIGHT:
                weight = tl.load(weight_ptr + tl.load(pair_ptr + row, mask=live, other=0), mask=live, other=0)
                value *= weight.to(tl.float32)[:, None]
            acc += value
    tl.store(
        y_ptr + t[:, None] * H + h[None, :], acc.to(y_ptr.dtype.element_ty), mask=(t < num_tokens)[:, None] & inside
    )


@triton.jit
def _combine_backward_kernel(
    rows_ptr, weight_ptr, dy_ptr, drows_ptr, dweight_ptr, token_offsets_ptr, scatter_ptr, pair_ptr,
    num_tokens, num_rows, H, dy_stride,
    WEIGHT_GRAD: tl.constexpr, PADDED: tl.constexpr, STEPS: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    behind = tl.program_id(0) - tl.cdiv(num_tokens, TOKENS)
    if PADDED:
        if behind >= 0:
            for column in range(0, H, BLOCK):
                _zero_padding(drows_ptr, pair_ptr, behind, num_rows, H, column, STEPS, TOKENS, BLOCK)
    t, first, last = _tokens(token_offsets_ptr, num_tokens, TOKENS)
    h = tl.arange(0, BLOCK)
    some = (last > first)[:, None]
    if WHOLE:  # the row fits one block: dy is read once for all slots
        dy = tl.load(dy_ptr + t[:, None] * dy_stride + h[None, :], mask=some & (h < H)[None, :], other=0).to(tl.float32)
    for i in range(tl.max(last - first, 0)):
        row = tl.load(scatter_ptr + first + i, mask=first + i < last, other=-1).to(tl.int64)
        live = row >= 0
        pair = tl.load(pair_ptr + row, mask=live, other=0)
        weight = tl.load(weight_ptr + pair, mask=live, other=0).to(tl.float32)
        if WHOLE:
            mask = live[:, None] & (h < H)[None, :]
            if WEIGHT_GRAD:
                value = tl.load(rows_ptr + row[:, None] * H + h[None, :], mask=mask, other=0).to(tl.float32)
                tl.store(dweight_ptr + pair, tl.sum(dy * value, 1), mask=live)
            out = (dy * weight[:, None]).to(drows_ptr.dtype.element_ty)
            tl.store(drows_ptr + row[:, None] * H + h[None, :], out, mask=mask)
        else:
            dot = tl.zeros((TOKENS, BLOCK), tl.float32)
            for start in range(0, H, BLOCK):
                mask = live[:, None] & (start + h < H)[None, :]
                part = tl.load(dy_ptr + t[:, None] * dy_stride + start + h[None, :], mask=mask, other=0).to(tl.float32)
                at = row[:, None] * H + start + h[None, :]
                if WEIGHT_GRAD:
                    dot += part * tl.load(rows_ptr + at, mask=mask, other=0).to(tl.float32)
                tl.store(drows_ptr + at, (part * weight[:, None]).to(drows_ptr.dtype.element_ty), mask=mask)
            if WEIGHT_GRAD:
                tl.store(dweight_ptr + pair, tl.sum(dot, 1), mask=live)


_FILL_STEPS = 16  # groups of rows that a program looks through for padding: four bytes a row, so many at once


def _blocks(hidden: int) -> dict[str, int]:
    """1024 features a one-warp program: narrow rows share one, wide ones are cut. Within 8 % of the best shape that a
    sweep found at each size (benchmarks/NOTES.md)."""
    block = min(triton.next_power_of_2(max(hidden, 256)), 1024)
    return {"TOKENS": 1024 // block, "BLOCK": block, "num_warps": 1}


def _fill_programs(padded: bool, num_rows: int, tokens: int) -> int:
    return triton.cdiv(num_rows, _FILL_STEPS * tokens) if padded else 0


def expand_launch(x: Tensor, scatter: Tensor, token_offsets: Tensor, pair: Tensor, padded: bool = False) -> Tensor:
    """x (T, H), pair (N,) → rows (N, H); one launch. Rows without a pair are 0 if `padded`, else not written."""
    x = x if x.stride(1) == 1 else x.contiguous()
    (num_tokens, hidden), num_rows = x.shape, pair.shape[0]
    rows = x.new_empty(num_rows, hidden)
    blocks = _blocks(hidden)
    programs = triton.cdiv(num_tokens, blocks["TOKENS"]) + _fill_programs(padded, num_rows, blocks["TOKENS"])
    if rows.numel() and programs:
        _expand_kernel[(programs, triton.cdiv(hidden, blocks["BLOCK"]))](
            x, rows, token_offsets, scatter, pair, num_tokens, num_rows, hidden, x.stride(0),
            PADDED=padded, STEPS=_FILL_STEPS, **blocks,
        )  # fmt: skip
    return rows


def combine_launch(rows: Tensor, weight: Tensor | None, pair: Tensor, scatter: Tensor, token_offsets: Tensor) -> Tensor:
    """rows (N, H), weight (R,) or None → (T, H); one launch."""
    rows = rows.contiguous()
    weight = None if weight is None else weight.contiguous()
    num_tokens, hidden = token_offsets.shape[0] - 1, rows.shape[1]
    y = rows.new_empty(num_tokens, hidden)
    blocks = _blocks(hidden)
    grid = (triton.cdiv(num_tokens, blocks["TOKENS"]), triton.cdiv(hidden, blocks["BLOCK"]))
    unroll = min(4, triton.next_power_of_2(triton.cdiv(max(scatter.shape[0], 1), max(num_tokens, 1))))
    if y.numel():
        _combine_kernel[grid](
            rows, weight, y, token_offsets, scatter, pair, num_tokens, hidden,
            HAS_WEIGHT=weight is not None, UNROLL=unroll, **blocks,
        )  # fmt: skip
    return y


def combine_backward_launch(
    dy: Tensor,
    rows: Tensor | None,
    weight: Tensor,
    pair: Tensor,
    scatter: Tensor,
    token_offsets: Tensor,
    padded: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """dRows (N, H) and, where `rows` are given, d_weight (R,); one launch and one fill.

    Rows without a pair are 0 if `padded`, else not written.
    """
    dy = dy if dy.stride(1) == 1 else dy.contiguous()
    rows = None if rows is None else rows.contiguous()
    weight = weight.contiguous()
    (num_tokens, hidden), num_rows = dy.shape, pair.shape[0]
    d_rows = dy.new_empty(num_rows, hidden)
    d_weight = None if rows is None else torch.zeros_like(weight)  # unused pairs keep the zero
    # Here a token's whole row, so that dy is read once: 0.91-0.96 of copy speed against 0.83 in pieces
    block = min(triton.next_power_of_2(max(hidden, 256)), 4096)
    tokens = max(1, 1024 // block)
    programs = triton.cdiv(num_tokens, tokens) + _fill_programs(padded, num_rows, tokens)
    if d_rows.numel() and programs:
        _combine_backward_kernel[(programs,)](
            rows, weight, dy, d_rows, d_weight, token_offsets, scatter, pair,
            num_tokens, num_rows, hidden, dy.stride(0),
            WEIGHT_GRAD=rows is not None, PADDED=padded, STEPS=_FILL_STEPS,
            TOKENS=tokens, BLOCK=block, WHOLE=block >= hidden, num_warps=max(1, tokens * block // 512),
        )  # fmt: skip
    return d_rows, d_weight
