"""Grouped GEMMs on Hopper (sm_90): tile choice, descriptors and launches of the Gluon kernels beside this file.

    ragged_m   y[r] = x[row(r)] · w[e]        x (R|S, K), w (E, K, N) of either major, offsets (E+1,)  → y (R, N)
    ragged_k   o[e] = Σ_r a[r]ᵀ · b[row(r)]   a (R, M), b (R|S, N), offsets (E+1,)                     → o (E, M, N)
               and of two a at once, ragged_k_pair

Rows [offsets[e], offsets[e+1]) are expert e's; row(r) = r, or gather[r] when the operand's S rows are gathered. Neither
call synchronises with the host or looks at the number of tokens: the grid is one program a multiprocessor, and the
tile is chosen by N, K and whether rows are gathered. Both can be captured in a CUDA graph.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import triton
from torch import Tensor

from megablocks.ops.hopper import aligned, descriptor, multiprocessors, runs_hopper

# The prefix sum over experts lives in registers, E / 32 a lane.
MAX_EXPERTS = 512
# Row coordinates of a ragged descriptor, and so rows, stay below this.
ROW_BOUND = 2**30


@dataclass(frozen=True)
class Tile:
    """How a product is cut: two consumers of `rows` × BN each, sharing a tile or, with pingpong, owning alternate ones.

    out_parts: column parts (2 or 4) in which a tile is written, out_buffers: how many of them a consumer has in flight.
    group_m: row tiles that are walked together before the next column tile (1 walks columns first).
    """

    rows: int
    BN: int
    stages: int
    pingpong: bool = False
    out_parts: int = 2
    out_buffers: int = 1
    BK: int = 64
    group_m: int = 1

    @property
    def row_parts(self) -> int:
        return 1 if self.pingpong else 2

    @property
    def BM(self) -> int:
        return self.rows * self.row_parts


@dataclass(frozen=True)
class Plan(Tile):
    """A Tile with the problem's constants: what the kernel sees as one compile-time value."""

    lanes: int = 32
    N: int = 0
    K: int = 0
    gather: bool = False
    b_k_major: bool = False
    summed: bool = False
    outer: bool = False
    a_k_major: ClassVar[bool] = True

    @property
    def n_tiles(self) -> int:
        return -(-self.N // self.BN)

    @property
    def k_steps(self) -> int:
        return -(-self.K // self.BK)

    @property
    def steps(self) -> int:
        return (1 + self.summed) * self.k_steps

    @property
    def out_cols(self) -> int:
        return self.BN // self.out_parts

    @property
    def left_bytes(self) -> int:
        return self.BM * self.BK * 2

    @property
    def right_bytes(self) -> int:
        return self.BN * self.BK * 2

    @property
    def producer_warps(self) -> int:
        return 4 if self.gather else 1

    @property
    def producer_regs(self) -> int:
        """Registers a thread; two consumers and the producer share 512. Gathering holds 16 addresses a row part."""
        if not self.gather:
            return 40
        return 88 if self.BM > 128 else 56

    @property
    def consumer_regs(self) -> int:
        return (512 - self.producer_regs) // 16 * 8


@dataclass(frozen=True)
class PlanK(Plan):
    """A Plan of ragged_k; `paired` with a second left operand, `add` to what is there."""

    M: int = 0
    add: bool = False
    paired: bool = False
    a_k_major: ClassVar[bool] = False

    @property
    def m_tiles(self) -> int:
        return -(-self.M // self.BM)

    @property
    def tiles(self) -> int:
        """Of an expert, whatever its rows."""
        return (1 + self.paired) * self.m_tiles * self.n_tiles

    @property
    def late(self) -> bool:
        """Whether a tile waits, rounded, for the next one's products."""
        return self.out_parts == 4 and not self.add


# Each consumer a tile of its own: its epilogue hides under the other's products, but it reads the most per product.
_TALL = Tile(128, 128, 6, pingpong=True, out_parts=4)
# With four steps a tile the stores decide: two in flight.
_TALL_SHORT = replace(_TALL, out_buffers=2)
# Half the rows by twice the columns.
_WIDE = Tile(64, 256, 5, pingpong=True, out_parts=4)
# Both consumers on one tile reads the least, which tells when many steps follow each other at the limit of power.
_SHARED = Tile(64, 256, 4, group_m=8)
# For ragged_k: where an expert has few rows, its stores decide.
_SHARED_K = Tile(64, 256, 4, out_parts=4, out_buffers=2)


def choose_m(N: int, K: int, gather: bool) -> Tile:
    """The tile of ragged_m; benchmarks/NOTES.md has the measurements behind it.

    Few rows an expert do not ask for a lower tile, which a new token count would have to compile: a value of w costs
    256/640e12 s of arithmetic in 128 rows, full or not, and 2/4.2e12 s to read, so the reading still bounds.
    """
    if K <= 256 and not gather:
        return _TALL_SHORT
    if N <= 128:
        return _TALL
    if gather and K > 512:  # a gathered row costs more than one by TMA: read it for 256 columns at once
        return _WIDE if K <= 2048 and N <= 512 else _SHARED
    return _TALL if K <= 2048 else _SHARED


def choose_k(M: int, N: int) -> Tile:
    """The tile of ragged_k."""
    return _SHARED_K if N > 128 else Tile(128 if M > 128 else 64, 128, 4)


@functools.lru_cache(1024)
def _plan_m(
    tile: Tile | None, experts: int, N: int, K: int, gather: bool, b_k_major: bool, summed: bool, outer: bool
) -> Plan:
    """Kept, since making and comparing one takes longer than finding it; of numbers alone, so never out of date."""
    tile = tile or choose_m(N, K * (1 + summed), gather)
    return Plan(
        **vars(tile), lanes=lanes_of(experts), N=N, K=K, gather=gather, b_k_major=b_k_major, summed=summed, outer=outer
    )


@functools.lru_cache(1024)
def _plan_k(tile: Tile | None, M: int, N: int, gather: bool, add: bool, paired: bool) -> PlanK:
    return PlanK(**vars(tile or choose_k(M, N)), M=M, N=N, gather=gather, add=add, paired=paired)


def lanes_of(experts: int) -> int:
    return max(32, triton.next_power_of_2(experts))


def _supports(offsets: Tensor, *operands: Tensor) -> bool:
    first = operands[0]
    for t in operands:
        if t.dtype != first.dtype or t.numel() == 0:
            return False
    return (
        runs_hopper(first)
        and offsets.numel() <= MAX_EXPERTS + 1
        and offsets.is_contiguous()
        and first.shape[0] < ROW_BOUND
    )


def supports_m(x: Tensor, w: Tensor, offsets: Tensor, rows: int) -> bool:
    """Whether ragged_m takes these: Hopper, 16-bit floats, N and K multiples of 8, 16-byte rows, E <= 512.

    rows: the result's, which are more than x's where they are gathered. The TMA unit clips rows by 30-bit coordinates.
    """
    return (
        _supports(offsets, x, w)
        and rows < ROW_BOUND
        and w.shape[1] % 8 == 0
        and w.shape[2] % 8 == 0
        and aligned(x)
        and (aligned(w, 1) or aligned(w, 2))
    )


def supports_sum(x: Tensor, w: Tensor, x2: Tensor, w2: Tensor, offsets: Tensor) -> bool:
    """Whether ragged_m_sum takes these: each product alone, of equal shapes, w and w2 of the same major."""
    return (
        supports_m(x, w, offsets, x.shape[0])
        and supports_m(x2, w2, offsets, x2.shape[0])
        and x.shape == x2.shape
        and w.shape == w2.shape
        and aligned(w, 2) == aligned(w2, 2)
    )


def supports_k(a: Tensor, b: Tensor, offsets: Tensor) -> bool:
    """Whether ragged_k takes these: as supports_m, with M and N multiples of 8."""
    return _supports(offsets, a, b) and a.shape[1] % 8 == 0 and b.shape[1] % 8 == 0 and aligned(a) and aligned(b)


def ragged_rows(t: Tensor, box: list[int]) -> Any:
    """A descriptor of t (R, C) through which the TMA unit keeps to rows [.., end) for an `end` given at each access.

    Coordinates (2³⁰, end, 2³⁰ − end + row, col) address row·s + col for row stride s: the outer strides 2³⁴ − s and s
    make the sum 2⁶⁴ + row·s, whose carry is lost. The row dimension's bound of 2³⁰ then stands exactly at `end`.
    """
    stride = t.stride(0) if t.shape[0] > 1 else t.shape[1]
    shape = [ROW_BOUND + 1, t.shape[0] + 1, ROW_BOUND, t.shape[1]]
    return descriptor(t, [1, 1, *box], shape, [2**34 - stride, stride, stride, 1])


def ragged_m(
    x: Tensor, w: Tensor, offsets: Tensor, gather: Tensor | None = None, *, tile: Tile | None = None
) -> Tensor:
    """y (R, N): y[r] = x[r] · w[e], or x[gather[r]] · w[e], for the expert e that owns row r; float32 sums.

    Args:
        x: (R, K), or (S, K) with gather; bfloat16 or float16. See supports_m.
        w: (E, K, N), contiguous along K or along N.
        offsets: (E+1,) int32, non-decreasing; rows from offsets[E] on are left as they were allocated.
        gather: (R,) int32 in [0, S).
    """
    return _launch_m(x, w, None, None, offsets, gather, None, tile)


def ragged_m_sum(x: Tensor, w: Tensor, x2: Tensor, w2: Tensor, offsets: Tensor, *, tile: Tile | None = None) -> Tensor:
    """x · w + x2 · w2 (R, N) in one launch, summed in float32 and rounded once. See supports_sum."""
    return _launch_m(x, w, x2, w2, offsets, None, None, tile)


def supports_outer(slope: Tensor, right: Tensor, w: Tensor) -> bool:
    """Whether ragged_m_outer takes these beside a w (E, K, N) that it takes: right of w's dtype, both contiguous."""
    kinds = slope.dtype == torch.float32 and right.dtype == w.dtype
    return kinds and right.shape == (w.shape[0], w.shape[2]) and slope.is_contiguous() and right.is_contiguous()


def ragged_m_outer(
    x: Tensor, w: Tensor, x2: Tensor | None, w2: Tensor | None, slope: Tensor, right: Tensor, offsets: Tensor, *,
    tile: Tile | None = None,
) -> Tensor:  # fmt: skip
    """x · w, or x · w + x2 · w2, plus slope[r] · right[e] at each row r (R, N), summed in float32 and rounded once.

    Args:
        slope: (R,) float32.
        right: (E, N). The others as in ragged_m and ragged_m_sum. See supports_outer.
    """
    return _launch_m(x, w, x2, w2, offsets, None, (slope, right), tile)


def _launch_m(
    x: Tensor, w: Tensor, x2: Tensor | None, w2: Tensor | None, offsets: Tensor, gather: Tensor | None,
    outer: tuple[Tensor, Tensor] | None, tile: Tile | None,
) -> Tensor:  # fmt: skip
    from megablocks.ops.grouped.grouped_mm_hopper_kernel import ragged_m_kernel

    experts, K, N = w.shape
    rows = x.shape[0] if gather is None else gather.shape[0]
    y = torch.empty(rows, N, dtype=x.dtype, device=x.device)
    if rows == 0:
        return y
    k_major, gathered, summed = not aligned(w, 2), gather is not None, x2 is not None
    c = _plan_m(tile, experts, N, K, gathered, k_major, summed, outer is not None)
    x_box, y_box = [c.rows, c.BK], [c.rows, c.out_cols]

    def weight(t: Tensor) -> Any:
        return descriptor(t.transpose(1, 2), [1, c.BN, c.BK]) if k_major else descriptor(t, [1, c.BK, c.BN])

    ragged_m_kernel[(multiprocessors(x.device.index),)](
        None if gathered else descriptor(x, x_box),
        weight(w),
        None if x2 is None else descriptor(x2, x_box),
        None if w2 is None else weight(w2),
        descriptor(y, y_box),
        ragged_rows(y, y_box),
        x if gathered else None,
        x.stride(0) // 8 if gathered else 0,
        gather,
        *(outer or (None, None)),
        offsets,
        experts,
        c=c,
        num_warps=4,
    )
    return y


def ragged_k(
    a: Tensor, b: Tensor, offsets: Tensor, gather: Tensor | None = None, *, add_to: Tensor | None = None,
    tile: Tile | None = None,
) -> Tensor:  # fmt: skip
    """o (E, M, N): o[e] = Σ a[r]ᵀ b[r], or b[gather[r]], over the rows r of expert e; zero where it has none.

    Args:
        a: (R, M) bfloat16 or float16. See supports_k.
        b: (R, N), or (S, N) with gather.
        offsets: (E+1,) int32, non-decreasing; rows from offsets[E] on are not read into any sum.
        gather: (R,) int32 in [0, S).
        add_to: (E, M, N) float32, contiguous: the sums are added to it, unrounded, and it is returned.
    """
    return _launch_k(a, None, b, offsets, gather, None if add_to is None else (add_to,), tile)[0]


def supports_pair(a: Tensor, a2: Tensor, b: Tensor, offsets: Tensor) -> bool:
    """Whether ragged_k_pair takes these: each product alone, of equal shapes."""
    return supports_k(a, b, offsets) and supports_k(a2, b, offsets) and a.shape == a2.shape


def ragged_k_pair(
    a: Tensor, a2: Tensor, b: Tensor, offsets: Tensor, gather: Tensor | None = None, *,
    add_to: tuple[Tensor, Tensor] | None = None, tile: Tile | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`ragged_k` of a and of a2, (E, M, N) each, in one launch, which reads b's rows for both. See supports_pair."""
    o, o2 = _launch_k(a, a2, b, offsets, gather, add_to, tile)
    return o, o2


def _launch_k(
    a: Tensor, a2: Tensor | None, b: Tensor, offsets: Tensor, gather: Tensor | None, add_to: tuple[Tensor, ...] | None,
    tile: Tile | None,
) -> list[Tensor]:  # fmt: skip
    from megablocks.ops.grouped.grouped_mm_hopper_dw import ragged_k_kernel

    assert tile is None or not tile.pingpong, "the consumers of ragged_k share a tile"
    experts, M, N = offsets.shape[0] - 1, a.shape[1], b.shape[1]
    lefts = [a] if a2 is None else [a, a2]
    if add_to is None:
        outs = [torch.empty(experts, M, N, dtype=a.dtype, device=a.device) for _ in lefts]
    else:
        outs = list(add_to)
    if a.shape[0] == 0 or b.shape[0] == 0:
        return outs if add_to is not None else [o.zero_() for o in outs]
    c = _plan_k(tile, M, N, gather is not None, add_to is not None, a2 is not None)
    a_box, b_box, o_box = [c.BK, c.rows], [c.BK, c.BN], [1, c.rows, c.out_cols]
    o, o2 = outs[0], outs[1] if c.paired else None
    ragged_k_kernel[(multiprocessors(a.device.index),)](
        descriptor(a, a_box),
        ragged_rows(a, a_box),
        None if a2 is None else descriptor(a2, a_box),
        None if a2 is None else ragged_rows(a2, a_box),
        None if c.gather else descriptor(b, b_box),
        None if c.gather else ragged_rows(b, b_box),
        None if c.add else descriptor(o, o_box),
        o if c.add else None,
        None if c.add or o2 is None else descriptor(o2, o_box),
        o2 if c.add else None,
        b if c.gather else None,
        b.stride(0) // 8 if c.gather else 0,
        gather,
        offsets,
        experts,
        c=c,
        num_warps=4,
    )
    return outs
