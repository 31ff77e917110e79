"""Up-projection with its activation in plain Triton: the twin of up_hopper.py, on every GPU, and interpreted.

Tiles are found on the device, as in grouped_mm_triton.py. A gated tile multiplies the same rows by the same columns of
W1 and of V1, so the activation needs nothing that another program holds.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

from dataclasses import asdict, replace

import triton
import triton.language as tl
from torch import Tensor

from megablocks.ops.activation_table import Activation
from megablocks.ops.activation_triton import unary
from megablocks.ops.grouped.grouped_mm_triton import _programs, choose
from megablocks.ops.launch import interpreted, next_power_of_2, quick
from megablocks.ops.routing.dispatch import Dispatch


@quick
@triton.jit
def _up_kernel(
    x_ptr, w_ptr, v_ptr, b_ptr, c_ptr, pre_ptr, gate_ptr, act_ptr, gather_ptr, offsets_ptr,
    stride_xr, stride_xk, stride_we, stride_wn, stride_wk,
    N: tl.constexpr, K: tl.constexpr, E: tl.constexpr, LANES: tl.constexpr, NAME: tl.constexpr, EXACT: tl.constexpr,
    IS_GATED: tl.constexpr, HAS_BIAS: tl.constexpr, UPCAST: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    n_tiles: tl.constexpr = (N + BN - 1) // BN
    lane = tl.arange(0, LANES)
    first_row = tl.load(offsets_ptr + lane, mask=lane < E, other=0)
    last_row = tl.load(offsets_ptr + lane + 1, mask=lane < E, other=0)
    ends = tl.cumsum((last_row - first_row + BM - 1) // BM, 0) * n_tiles
    tiles = tl.max(ends, 0)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        done = ends <= tile
        e = tl.sum(done.to(tl.int32), 0)
        r = tile - tl.max(tl.where(done, ends, 0), 0)
        end = tl.load(offsets_ptr + e + 1)
        rows = tl.load(offsets_ptr + e) + (r // n_tiles) * BM + tl.arange(0, BM)
        cols = (r % n_tiles) * BN + tl.arange(0, BN)
        live, inside_n = rows < end, cols < N
        source = tl.load(gather_ptr + rows, mask=live, other=0).to(tl.int64)
        k = tl.arange(0, BK)
        x_ptrs = x_ptr + source[:, None] * stride_xr + k[None, :] * stride_xk
        at = e.to(tl.int64) * stride_we + k[:, None] * stride_wk + cols.to(tl.int64)[None, :] * stride_wn
        pre = tl.zeros((BM, BN), dtype=tl.float32)
        gate = tl.zeros((BM, BN), dtype=tl.float32)
        for k0 in range(0, K, BK):
            inside = k0 + k < K
            x = tl.load(x_ptrs, mask=live[:, None] & inside[None, :], other=0.0)
            w_mask = inside[:, None] & inside_n[None, :]
            w = tl.load(w_ptr + at, mask=w_mask, other=0.0)
            if UPCAST:
                pre += tl.dot(x.to(tl.float32), w.to(tl.float32), input_precision="ieee")
            else:
                pre = tl.dot(x, w, pre, input_precision="ieee")
            if IS_GATED:
                v = tl.load(v_ptr + at, mask=w_mask, other=0.0)
                if UPCAST:
                    gate += tl.dot(x.to(tl.float32), v.to(tl.float32), input_precision="ieee")
                else:
                    gate = tl.dot(x, v, gate, input_precision="ieee")
            x_ptrs += BK * stride_xk
            at += BK * stride_wk
        mask = live[:, None] & inside_n[None, :]
        out = rows.to(tl.int64)[:, None] * N + cols[None, :]
        dtype = pre_ptr.dtype.element_ty
        if HAS_BIAS:
            pre += tl.load(b_ptr + e * N + cols, mask=inside_n, other=0).to(tl.float32)[None, :]
        pre = pre.to(dtype)
        tl.store(pre_ptr + out, pre, mask=mask)
        act, _ = unary(pre.to(tl.float32), NAME, EXACT)  # of the rounded value, as backward sees it
        if IS_GATED:
            if HAS_BIAS:
                gate += tl.load(c_ptr + e * N + cols, mask=inside_n, other=0).to(tl.float32)[None, :]
            gate = gate.to(dtype)
            tl.store(gate_ptr + out, gate, mask=mask)
            act *= gate.to(tl.float32)
        tl.store(act_ptr + out, act.to(dtype), mask=mask)


def up(
    x: Tensor, w1: Tensor, v1: Tensor | None, b1: Tensor | None, c1: Tensor | None, dispatch: Dispatch,
    activation: Activation,
) -> tuple[Tensor, Tensor | None, Tensor]:  # fmt: skip
    """pre, gate (None unless gated) and act, (R, I) each. Rows from offsets[E] on are left as allocated."""
    (experts, inner, hidden), rows = w1.shape, dispatch.num_rows
    pre, act = x.new_empty(rows, inner), x.new_empty(rows, inner)
    gate = None if v1 is None else x.new_empty(rows, inner)
    if v1 is not None and v1.stride() != w1.stride():
        w1, v1 = w1.contiguous(), v1.contiguous()
    config = choose(inner, x)
    if v1 is not None and not interpreted():  # two accumulators of half the columns
        config = replace(config, BN=max(config.BN // 2, 32))
    _up_kernel[(_programs(x.device),)](
        x, w1, v1, b1, c1, pre, gate, act, dispatch.gather, dispatch.expert_offsets, *x.stride(), *w1.stride(),
        N=inner, K=hidden, E=experts, LANES=next_power_of_2(experts), NAME=activation.unary, EXACT=activation.exact,
        IS_GATED=v1 is not None, HAS_BIAS=b1 is not None, UPCAST=interpreted(), **asdict(config),
    )  # fmt: skip
    return pre, gate, act
