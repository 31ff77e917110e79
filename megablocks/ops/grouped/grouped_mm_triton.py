"""Grouped GEMMs in plain Triton, on every GPU, for any size and stride, and interpreted.

    ragged_m   y[r] = x[row(r)] · w[e]        x (R|S, K), w (E, K, N), offsets (E+1,)   → y (R, N)
    ragged_k   o[e] = Σ_r a[r]ᵀ · b[row(r)]   a (R|S, M), b (R|S, N), offsets (E+1,)    → o (E, M, N), or added to one

Rows [offsets[e], offsets[e+1]) are expert e's; row(r) = r, or gather[r] when the operand's S rows are gathered. The
number of tiles an expert needs is counted on the device: no host synchronization, no tile map.
"""

# mypy: allow-untyped-defs
# (device code takes what Triton passes at compile time)

from __future__ import annotations

import functools
from dataclasses import asdict, dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from megablocks.ops.launch import cdiv, interpreted, next_power_of_2, quick


@dataclass(frozen=True)
class Config:
    """Tile BM × BN, in steps of BK; launch parameters of Triton."""

    BM: int
    BN: int
    BK: int
    num_warps: int
    num_stages: int


def choose(columns: int, t: Tensor) -> Config:
    """The config for operands like t: float32 products run without tensor cores and stage twice the bytes.

    The number of rows has no part in it, because a new one would compile another kernel.
    """
    if interpreted():
        return Config(16, 16, 16, 1, 1)
    if t.dtype == torch.float32:
        return Config(64, 64, 32, 4, 2)
    # BK = 64 takes 147 KB of shared memory. Data-center GPUs have that from the A100 on; others have 64 to 100.
    BK = 64 if _shared_bytes(t.device) >= 160_000 else 32
    if columns <= 64:
        return Config(128, 64, BK, 4, 3)
    if columns <= 128:
        return Config(128, 128, BK, 8, 3)
    return Config(128, 256, BK, 8, 3)


@functools.cache
def _shared_bytes(device: torch.device) -> int:
    return int(triton.runtime.driver.active.utils.get_device_properties(device.index or 0)["max_shared_mem"])


@quick
@triton.jit
def _ragged_m_kernel(
    x_ptr,
    w_ptr,
    y_ptr,
    gather_ptr,
    offsets_ptr,
    stride_xr,
    stride_xk,
    stride_we,
    stride_wk,
    stride_wn,
    stride_yr,
    N: tl.constexpr,
    K: tl.constexpr,
    E: tl.constexpr,
    LANES: tl.constexpr,
    GATHER: tl.constexpr,
    UPCAST: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
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
        src = rows
        if GATHER:
            src = tl.load(gather_ptr + rows, mask=rows < end, other=0)
        k = tl.arange(0, BK)
        # int64: rows · stride passes 2^31 at 130k tokens of a wide model
        a_ptrs = x_ptr + src.to(tl.int64)[:, None] * stride_xr + k[None, :] * stride_xk
        b_ptrs = w_ptr + e.to(tl.int64) * stride_we + k[:, None] * stride_wk + cols.to(tl.int64)[None, :] * stride_wn
        acc = tl.zeros((BM, BN), dtype=tl.float32)
        for k0 in range(0, K, BK):
            inside = k0 + k < K
            a = tl.load(a_ptrs, mask=(rows < end)[:, None] & inside[None, :], other=0.0)
            b = tl.load(b_ptrs, mask=inside[:, None] & (cols < N)[None, :], other=0.0)
            if UPCAST:
                acc += tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
            else:
                acc = tl.dot(a, b, acc, input_precision="ieee")
            a_ptrs += BK * stride_xk
            b_ptrs += BK * stride_wk
        y_ptrs = y_ptr + rows.to(tl.int64)[:, None] * stride_yr + cols[None, :]
        tl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty), mask=(rows < end)[:, None] & (cols < N)[None, :])


@quick
@triton.jit
def _ragged_k_kernel(
    a_ptr,
    b_ptr,
    o_ptr,
    gather_ptr,
    offsets_ptr,
    stride_ar,
    stride_am,
    stride_br,
    stride_bn,
    M: tl.constexpr,
    N: tl.constexpr,
    GATHER_A: tl.constexpr,
    GATHER_B: tl.constexpr,
    ADD: tl.constexpr,
    UPCAST: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    m_tiles: tl.constexpr = (M + BM - 1) // BM
    n_tiles: tl.constexpr = (N + BN - 1) // BN
    tile = tl.program_id(0)
    e = tile // (m_tiles * n_tiles)
    r = tile % (m_tiles * n_tiles)
    m = (r % m_tiles) * BM + tl.arange(0, BM)
    n = (r // m_tiles) * BN + tl.arange(0, BN)
    start = tl.load(offsets_ptr + e)
    end = tl.load(offsets_ptr + e + 1)
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for k0 in range(start, end, BK):
        k = k0 + tl.arange(0, BK)
        inside = k < end
        a_row = k.to(tl.int64)
        b_row = a_row
        if GATHER_A or GATHER_B:
            source = tl.load(gather_ptr + k, mask=inside, other=0).to(tl.int64)
            if GATHER_A:
                a_row = source
            else:
                b_row = source
        a_ptrs = a_ptr + a_row[None, :] * stride_ar + m.to(tl.int64)[:, None] * stride_am
        b_ptrs = b_ptr + b_row[:, None] * stride_br + n.to(tl.int64)[None, :] * stride_bn
        a = tl.load(a_ptrs, mask=inside[None, :] & (m < M)[:, None], other=0.0)
        b = tl.load(b_ptrs, mask=inside[:, None] & (n < N)[None, :], other=0.0)
        if UPCAST:
            acc += tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
        else:
            acc = tl.dot(a, b, acc, input_precision="ieee")
    o_ptrs = o_ptr + (e.to(tl.int64) * M + m[:, None]) * N + n[None, :]
    mask = (m < M)[:, None] & (n < N)[None, :]
    if ADD:  # a tile has one writer, so this needs no atomics and reruns give the same bits
        mask = mask & (start < end)
        acc += tl.load(o_ptrs, mask=mask, other=0.0)
    tl.store(o_ptrs, acc.to(o_ptr.dtype.element_ty), mask=mask)


@functools.cache
def _programs(device: torch.device) -> int:
    """Programs that walk the tiles: two a multiprocessor, so that one's epilogue hides under the other's products."""
    if device.type != "cuda":
        return 3
    return 2 * torch.cuda.get_device_properties(device).multi_processor_count


def ragged_m(
    x: Tensor, w: Tensor, offsets: Tensor, gather: Tensor | None = None, *, config: Config | None = None
) -> Tensor:
    """y (R, N): y[r] = x[r] · w[e], or x[gather[r]] · w[e], for the expert e that owns row r; float32 sums.

    Args:
        x: (R, K), or (S, K) with gather; float32, float16 or bfloat16.
        w: (E, K, N) of any stride, same dtype.
        offsets: (E+1,) int32, non-decreasing; rows from offsets[E] on are left as they were allocated.
        gather: (R,) int32 in [0, S).
    """
    experts, K, N = w.shape
    rows = x.shape[0] if gather is None else gather.shape[0]
    y = x.new_empty(rows, N)
    if y.numel() == 0:
        return y
    config = config or choose(N, x)
    _ragged_m_kernel[(_programs(x.device),)](
        x, w, y, gather if gather is not None else offsets, offsets, *x.stride(), *w.stride(), y.stride(0),
        N=N, K=K, E=experts, LANES=next_power_of_2(experts), GATHER=gather is not None, UPCAST=interpreted(),
        **asdict(config),
    )  # fmt: skip
    return y


def ragged_k(
    a: Tensor, b: Tensor, offsets: Tensor, gather: Tensor | None = None, *, gather_a: bool = False,
    add_to: Tensor | None = None, config: Config | None = None,
) -> Tensor:  # fmt: skip
    """o (E, M, N): o[e] = Σ a[r]ᵀ b[r] over the rows r of expert e; exactly zero where it has none.

    Args:
        a: (R, M), b: (R, N); any stride; float32, float16 or bfloat16.
        offsets: (E+1,) int32, non-decreasing; rows from offsets[E] on are not read into any sum.
        gather: (R,) int32; then b is (S, N) and its row gather[r] stands for b[r], or a (S, M) with gather_a.
        add_to: (E, M, N) float32, contiguous: the sums are added to it, unrounded, and it is returned.
    """
    experts, M, N = offsets.shape[0] - 1, a.shape[1], b.shape[1]
    o = a.new_empty(experts, M, N) if add_to is None else add_to
    rows = a.shape[0] if gather is None else gather.shape[0]
    if rows == 0 or o.numel() == 0:
        return o.zero_() if add_to is None else o
    config = config or choose(N, a)
    tiles = experts * cdiv(M, config.BM) * cdiv(N, config.BN)
    _ragged_k_kernel[(tiles,)](
        a, b, o, gather if gather is not None else offsets, offsets, *a.stride(), *b.stride(),
        M=M, N=N, GATHER_A=gather is not None and gather_a, GATHER_B=gather is not None and not gather_a,
        ADD=add_to is not None, UPCAST=interpreted(), **asdict(config),
    )  # fmt: skip
    return o
