"""Grouped GEMMs in plain Triton, on every GPU, for any size and stride, and interpreted.

    rows      y[out(p)] = weight(p) · (x[in(p)] · w[e] + bias[e]), and dots[pair(p)]      `scattered_mm_launch`
    weights   dw[e] = Σ_p a[in(p)]ᵀ · (weight(p) · b[out(p)]), and sums[e]                `scattered_mm_dw_launch`

A missing operand of a `Rows` is left out when the kernel is compiled: `ragged_m` and `ragged_k` are only the products.
megablocks/ops/scattered/dispatched.py has the formulas and their other users.

Legend: R rows, E experts, K inner size, N outer size. A missing index is p itself, and an index with a fan F reads row
index[p] // F. Sums in float32, int64 row offsets, no atomics: results of several programs (dots) are written separately
for each column tile, and the launch sums them in order. The device counts the tiles that an expert needs: no host
synchronization, no tile map.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import functools
from dataclasses import asdict, dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from megablocks.ops.hopper import multiprocessors
from megablocks.ops.launch import cdiv, interpreted, next_power_of_2, quick
from megablocks.ops.routing.dispatch import Rows


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

    It does not depend on the number of rows, because a new number would compile another kernel.
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


@triton.jit
def _at(index_ptr, p, mask, FAN: tl.constexpr):
    """Rows that p stands for, int64: row · stride passes 2^31 at 130k tokens of a wide model."""
    if index_ptr is None:
        row = p.to(tl.int64)
    else:
        row = tl.load(index_ptr + p, mask=mask, other=0).to(tl.int64) // FAN
    return row


@quick
@triton.jit(do_not_specialize=["num_rows"])
def _rows_kernel(
    x_ptr, w_ptr, y_ptr, ends_ptr, in_ptr, out_ptr, bias_ptr, weight_ptr, pair_ptr,
    other_ptr, other_in_ptr, dot_bias_ptr, dots_ptr,
    num_rows, stride_xr, stride_xk, stride_we, stride_wk, stride_wn, stride_other,
    N: tl.constexpr, K: tl.constexpr, E: tl.constexpr, IN_FAN: tl.constexpr, OTHER_FAN: tl.constexpr,
    TAIL: tl.constexpr, LANES: tl.constexpr, UPCAST: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    n_tiles: tl.constexpr = (N + BN - 1) // BN
    lane = tl.arange(0, LANES)
    first_row = tl.load(ends_ptr + lane - 1, mask=(lane > 0) & (lane <= E), other=0).to(tl.int32)
    last_row = tl.load(ends_ptr + lane, mask=lane < E, other=0).to(tl.int32)
    last_row = tl.where(lane == E, num_rows if TAIL else first_row, last_row)  # group E: rows of no expert
    tile_ends = tl.cumsum(tl.where(lane <= E, (last_row - first_row + BM - 1) // BM, 0), 0) * n_tiles
    tiles = tl.max(tile_ends, 0)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        done = tile_ends <= tile
        e = tl.sum(done.to(tl.int32), 0)
        r = tile - tl.max(tl.where(done, tile_ends, 0), 0)
        end = tl.sum(tl.where(lane == e, last_row, 0), 0)
        p = tl.sum(tl.where(lane == e, first_row, 0), 0) + (r // n_tiles) * BM + tl.arange(0, BM)
        n = (r % n_tiles) * BN + tl.arange(0, BN)
        k = tl.arange(0, BK)
        live = p < end
        used = live & (e < E)
        src = _at(in_ptr, p, used, IN_FAN)
        a_ptrs = x_ptr + src[:, None] * stride_xr + k[None, :] * stride_xk
        b_ptrs = w_ptr + e.to(tl.int64) * stride_we + k[:, None] * stride_wk + n.to(tl.int64)[None, :] * stride_wn
        acc = tl.zeros((BM, BN), dtype=tl.float32)
        for k0 in range(0, tl.where(e < E, K, 0) if TAIL else K, BK):
            inside = k0 + k < K
            a = tl.load(a_ptrs, mask=used[:, None] & inside[None, :], other=0.0)
            b = tl.load(b_ptrs, mask=inside[:, None] & (n < N)[None, :], other=0.0)
            if UPCAST:
                acc += tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
            else:
                acc = tl.dot(a, b, acc, input_precision="ieee")
            a_ptrs += BK * stride_xk
            b_ptrs += BK * stride_wk
        mask = live[:, None] & (n < N)[None, :]
        pair = _at(pair_ptr, p, live, 1)
        if other_ptr is not None:
            row = _at(other_in_ptr, p, used, OTHER_FAN)
            other_ptrs = other_ptr + row[:, None] * stride_other + n[None, :]
            other = tl.load(other_ptrs, mask=used[:, None] & (n < N)[None, :], other=0.0).to(tl.float32)
            # Masked after the product, and the next one summed in registers first: a product directly under a sum
            # across lanes is fused with the first addition, in each lane with its own product. Lanes that store one sum
            # would store different last bits.
            dot = tl.sum(tl.where(mask, acc * other, 0.0), 1)
            if dot_bias_ptr is not None:
                if r % n_tiles == 0:  # once per row; its operand is still in the second-level cache
                    products = tl.zeros((BM, BK), dtype=tl.float32)
                    for k0 in range(0, tl.where(e < E, K, 0) if TAIL else K, BK):
                        inside = k0 + k < K
                        at = x_ptr + src[:, None] * stride_xr + (k0 + k).to(tl.int64)[None, :] * stride_xk
                        a = tl.load(at, mask=used[:, None] & inside[None, :], other=0.0).to(tl.float32)
                        b = tl.load(dot_bias_ptr + e * K + k0 + k, mask=inside, other=0.0).to(tl.float32)
                        products += a * b[None, :]
                    dot += tl.sum(products, 1)
            tl.store(dots_ptr + (r % n_tiles).to(tl.int64) * num_rows + pair, dot, mask=live)
        if bias_ptr is not None:
            acc += tl.load(bias_ptr + e * N + n, mask=(n < N) & (e < E), other=0.0).to(tl.float32)[None, :]
        if weight_ptr is not None:
            acc *= tl.load(weight_ptr + pair, mask=used, other=0.0).to(tl.float32)[:, None]
        y_ptrs = y_ptr + _at(out_ptr, p, live, 1)[:, None] * N + n[None, :]
        tl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty), mask=mask)


@quick
@triton.jit
def _weights_kernel(
    a_ptr, b_ptr, o_ptr, sums_ptr, ends_ptr, a_in_ptr, b_in_ptr, weight_ptr, pair_ptr,
    stride_ar, stride_am, stride_br, stride_bn, stride_oe, stride_om, stride_on,
    M: tl.constexpr, N: tl.constexpr, A_FAN: tl.constexpr, B_FAN: tl.constexpr, ADD: tl.constexpr,
    UPCAST: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    m_tiles: tl.constexpr = (M + BM - 1) // BM
    n_tiles: tl.constexpr = (N + BN - 1) // BN
    tile = tl.program_id(0)
    e = tile // (m_tiles * n_tiles)
    r = tile % (m_tiles * n_tiles)
    m = (r % m_tiles) * BM + tl.arange(0, BM)
    n = (r // m_tiles) * BN + tl.arange(0, BN)
    start = tl.load(ends_ptr + e - 1, mask=e > 0, other=0).to(tl.int32)
    end = tl.load(ends_ptr + e).to(tl.int32)
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for p0 in range(start, end, BK):
        p = p0 + tl.arange(0, BK)
        live = p < end
        a_ptrs = a_ptr + _at(a_in_ptr, p, live, A_FAN)[None, :] * stride_ar + m.to(tl.int64)[:, None] * stride_am
        b_ptrs = b_ptr + _at(b_in_ptr, p, live, B_FAN)[:, None] * stride_br + n.to(tl.int64)[None, :] * stride_bn
        a = tl.load(a_ptrs, mask=live[None, :] & (m < M)[:, None], other=0.0)
        b = tl.load(b_ptrs, mask=live[:, None] & (n < N)[None, :], other=0.0)
        if weight_ptr is not None:
            weight = tl.load(weight_ptr + _at(pair_ptr, p, live, 1), mask=live, other=0.0).to(tl.float32)
            b = (b.to(tl.float32) * weight[:, None]).to(a.dtype)
        if UPCAST:
            acc += tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
        else:
            acc = tl.dot(a, b, acc, input_precision="ieee")
    o_ptrs = o_ptr + e.to(tl.int64) * stride_oe + m.to(tl.int64)[:, None] * stride_om + n[None, :] * stride_on
    mask = (m < M)[:, None] & (n < N)[None, :]
    if ADD:  # a tile has one writer, so this needs no atomics and reruns give the same bits
        mask = mask & (start < end)
        acc += tl.load(o_ptrs, mask=mask, other=0.0)
    tl.store(o_ptrs, acc.to(o_ptr.dtype.element_ty), mask=mask)
    if sums_ptr is not None:
        if r % m_tiles == 0:  # of the tiles that share these columns one adds them up
            total = tl.zeros((BN,), dtype=tl.float32)
            for p0 in range(start, end, BK):
                p = p0 + tl.arange(0, BK)
                live = p < end
                row = _at(b_in_ptr, p, live, B_FAN)[:, None]
                b_ptrs = b_ptr + row * stride_br + n.to(tl.int64)[None, :] * stride_bn
                b = tl.load(b_ptrs, mask=live[:, None] & (n < N)[None, :], other=0.0).to(tl.float32)
                if weight_ptr is not None:
                    weight = tl.load(weight_ptr + _at(pair_ptr, p, live, 1), mask=live, other=0.0).to(tl.float32)
                    b *= weight[:, None]
                total += tl.sum(b, 0)
            tl.store(sums_ptr + e * N + n, total, mask=n < N)


def scattered_mm_launch(
    x: Tensor, w: Tensor, bias: Tensor | None, weight: Tensor | None, other: Tensor | None, dot_bias: Tensor | None,
    rows: Rows, zero_tail: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Like `scattered_mm_ref`; one launch, and with `other` one sum over the column tiles."""
    (experts, K, N), num_rows = w.shape, rows.count(x)
    y = x.new_empty(num_rows, N)
    config = choose(N, x)
    dots, other_index, other_fan = None, None, 1
    if other is not None:  # registers hold the tile of `other` and the sums: 128 × 256 would spill
        config = replace(config, BN=min(config.BN, 128))
        other = other if other.stride(1) == 1 else other.contiguous()
        other_index, other_fan = rows.out_index, rows.out_fan
        allocate = torch.empty if zero_tail else torch.zeros  # pairs without a row keep the zero
        dots = allocate(cdiv(N, config.BN), num_rows, dtype=torch.float32, device=x.device)
    if num_rows == 0 or N == 0:
        return y, None if dots is None else dots.sum(0)
    # two programs per multiprocessor, so that one's products hide the other's epilogue
    programs = 2 * multiprocessors(x.device.index) if x.is_cuda else 3
    programs = min(programs, (cdiv(num_rows, config.BM) + experts + 1) * cdiv(N, config.BN))
    _rows_kernel[(programs,)](
        x, w, y, *map(_dense, (rows.ends, rows.in_index, rows.out_index, bias, weight, rows.pair)),
        other, _dense(other_index), _dense(dot_bias), dots, num_rows, *x.stride(), *w.stride(),
        0 if other is None else other.stride(0),
        N=N, K=K, E=experts, IN_FAN=rows.in_fan, OTHER_FAN=other_fan, TAIL=zero_tail,
        LANES=next_power_of_2(experts + 1), UPCAST=interpreted(), **asdict(config),
    )  # fmt: skip
    return y, None if dots is None else dots.sum(0)


def scattered_mm_dw_launch(
    a: Tensor, b: Tensor, weight: Tensor | None, rows: Rows, transposed: bool, with_sums: bool,
    add_to: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Like `scattered_mm_dw_ref`; one launch, and none where there are no rows, whose strides may be any.

    add_to: (E, M, N) float32, contiguous: dw is added to it, unrounded, and it is returned.
    """
    dw = rows.empty_dw(a, b, transposed) if add_to is None else add_to
    experts, M, N = dw.shape
    sums = torch.empty(experts, N, dtype=torch.float32, device=a.device) if with_sums else None
    if 0 in (dw.numel(), a.shape[0], b.shape[0]):
        return dw.zero_() if add_to is None else dw, None if sums is None else sums.zero_()
    config = choose(N, a)
    tiles = experts * cdiv(M, config.BM) * cdiv(N, config.BN)
    _weights_kernel[(tiles,)](
        a, b, dw, sums, *map(_dense, (rows.ends, rows.in_index, rows.out_index, weight, rows.pair)),
        *a.stride(), *b.stride(), *dw.stride(),
        M=M, N=N, A_FAN=rows.in_fan, B_FAN=rows.out_fan, ADD=add_to is not None, UPCAST=interpreted(), **asdict(config),
    )  # fmt: skip
    return dw, sums


def _dense(t: Tensor | None) -> Tensor | None:
    """`t` in the form in which the kernels read biases, weights and indices: without strides."""
    return None if t is None else t.contiguous()


def ragged_m(
    x: Tensor, w: Tensor, offsets: Tensor, gather: Tensor | None = None, *, bias: Tensor | None = None
) -> Tensor:
    """y (R, N): y[r] = x[r] · w[e] + bias[e], or of x[gather[r]], for the expert e that owns row r; float32 sums.

    Args:
        x: (R, K), or (S, K) with gather; float32, float16 or bfloat16.
        w: (E, K, N) of any stride, same dtype.
        offsets: (E+1,) int32, non-decreasing; rows from offsets[E] on are not written.
        gather: (R,) int32 in [0, S).
        bias: (E, N), added before the one rounding, or None.
    """
    return scattered_mm_launch(x, w, bias, None, None, None, Rows(offsets[1:], in_index=gather), False)[0]


def ragged_k(
    a: Tensor, b: Tensor, offsets: Tensor, gather: Tensor | None = None, *, add_to: Tensor | None = None
) -> Tensor:
    """o (E, M, N): o[e] = Σ a[r]ᵀ b[r] over the rows r of expert e; exactly zero if it has none.

    Args:
        a: (R, M), b: (R, N); any stride; float32, float16 or bfloat16.
        offsets: (E+1,) int32, non-decreasing; rows from offsets[E] on are not read into any sum.
        gather: (R,) int32; then b is (S, N) and its row gather[r] replaces b[r].
        add_to: (E, M, N) float32, contiguous: the sums are added to it, unrounded, and it is returned.
    """
    return scattered_mm_dw_launch(a, b, None, Rows(offsets[1:], out_index=gather), False, False, add_to)[0]
