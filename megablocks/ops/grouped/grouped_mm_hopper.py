"""Ragged-M grouped GEMM on Hopper (sm_90): tile choice, descriptors and launch of the Gluon kernel beside this file.

    y[r] = x[row(r)] · w[e]        x (R|S, K), w (E, K, N) of either major, offsets (E+1,)  → y (R, N)

Rows [offsets[e], offsets[e+1]) are expert e's; row(r) = r, or gather[r] when x's S rows are gathered. The call neither
synchronises with the host nor looks at the number of tokens: the grid is one program a multiprocessor, and the tile is
chosen by N, K and the mean rows an expert (R / E). It can be captured in a CUDA graph.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton
from packaging.version import Version
from torch import Tensor

# Gluon is experimental and changes: these releases compile the kernel, and 3.6 has run it.
_TRITON_RELEASES = Version("3.6"), Version("3.8")
# The prefix sum over experts lives in registers, E / 32 a lane.
MAX_EXPERTS = 512
# Row coordinates of a ragged descriptor, and so rows, stay below this.
_ROW_BOUND = 2**30


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
class _Plan(Tile):
    """A Tile with the problem's constants: what the kernel sees as one compile-time value."""

    lanes: int = 32
    N: int = 0
    K: int = 0
    gather: bool = False
    w_k_major: bool = False

    @property
    def n_tiles(self) -> int:
        return -(-self.N // self.BN)

    @property
    def k_steps(self) -> int:
        return -(-self.K // self.BK)

    @property
    def out_cols(self) -> int:
        return self.BN // self.out_parts

    @property
    def x_bytes(self) -> int:
        return self.BM * self.BK * 2

    @property
    def w_bytes(self) -> int:
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


# Each consumer a tile of its own: its epilogue hides under the other's products, but it reads the most per product.
_TALL = Tile(128, 128, 6, pingpong=True, out_parts=4)
# The same with half the rows, so that fewer of them are empty at an expert's end.
_WIDE = Tile(64, 256, 5, pingpong=True, out_parts=4)
# Both consumers on one tile reads the least, which tells when many steps follow each other at the limit of power.
_SHARED = Tile(64, 256, 4, group_m=8)


def choose_m(N: int, K: int, mean_rows: float, gather: bool) -> Tile:
    """The tile of ragged_m; benchmarks/NOTES.md has the measurements behind it."""
    if mean_rows <= 96:
        return _WIDE if N > 128 else Tile(64, 128, 6, pingpong=True, out_parts=4)
    if N <= 128:
        return _TALL
    if gather and K > 512:  # a gathered row costs more than one by TMA: read it for 256 columns at once
        return _WIDE if K <= 2048 and N <= 512 else _SHARED
    return _TALL if K <= 2048 else _SHARED


@functools.cache
def _multiprocessors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def _has_gluon() -> bool:
    first, beyond = _TRITON_RELEASES
    if not first <= Version(triton.__version__) < beyond or triton.knobs.runtime.interpret:
        return False
    try:
        from megablocks.ops.grouped import grouped_mm_hopper_kernel  # noqa: F401
    except ImportError:
        return False
    return True


@functools.cache
def _is_hopper(device: int) -> bool:
    return torch.cuda.get_device_capability(device) == (9, 0)


def _lanes(experts: int) -> int:
    return max(32, triton.next_power_of_2(experts))


def _aligned(t: Tensor, major: int = -1) -> bool:
    """TMA reads a matrix whose start and rows stand on 16 bytes and whose `major` dimension is contiguous."""
    unit = 16 // t.element_size()
    dims = [d for d in range(t.dim()) if d != major % t.dim() and t.shape[d] > 1]
    return t.stride(major) == 1 and t.data_ptr() % 16 == 0 and all(t.stride(d) % unit == 0 for d in dims)


def supports_m(x: Tensor, w: Tensor, offsets: Tensor) -> bool:
    """Whether ragged_m takes these: Hopper, 16-bit floats, N and K multiples of 8, 16-byte rows, E <= 512."""
    return (
        x.is_cuda
        and _is_hopper(x.device.index)
        and _has_gluon()
        and x.dtype in (torch.bfloat16, torch.float16)
        and w.dtype == x.dtype
        and x.numel() > 0
        and w.numel() > 0
        and offsets.numel() <= MAX_EXPERTS + 1
        and offsets.is_contiguous()
        and x.shape[0] < _ROW_BOUND
        and w.shape[1] % 8 == 0
        and w.shape[2] % 8 == 0
        and _aligned(x)
        and (_aligned(w, 1) or _aligned(w, 2))
    )


@functools.cache
def _layout(box: tuple[int, ...], dtype: torch.dtype) -> Any:
    """Shared memory's layout of a box, kept: working it out takes longer than the rest of a descriptor."""
    from triton.experimental.gluon import language as gl

    element = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}[dtype]
    return gl.NVMMASharedLayout.get_default_for(list(box), element)


def _descriptor(t: Tensor, box: list[int], shape: list[int] | None = None, strides: list[int] | None = None) -> Any:
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    if strides is None:
        unit = 16 // t.element_size()
        # The stride of a dimension of one is anything; TMA wants it on 16 bytes all the same.
        strides = [s if n > 1 else -(-s // unit) * unit for s, n in zip(t.stride()[:-1], t.shape, strict=False)] + [1]
    return TensorDescriptor(t, list(t.shape) if shape is None else shape, strides, box, _layout(tuple(box), t.dtype))


def ragged_rows(t: Tensor, box: list[int]) -> Any:
    """A descriptor of t (R, C) through which the TMA unit keeps to rows [.., end) for an `end` given at each access.

    Coordinates (2³⁰, end, 2³⁰ − end + row, col) address row·s + col for row stride s: the outer strides 2³⁴ − s and s
    make the sum 2⁶⁴ + row·s, whose carry is lost. The row dimension's bound of 2³⁰ then stands exactly at `end`.
    """
    stride = t.stride(0) if t.shape[0] > 1 else t.shape[1]
    shape = [_ROW_BOUND + 1, t.shape[0] + 1, _ROW_BOUND, t.shape[1]]
    return _descriptor(t, [1, 1, *box], shape, [2**34 - stride, stride, stride, 1])


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
    from megablocks.ops.grouped.grouped_mm_hopper_kernel import ragged_m_kernel

    experts, K, N = w.shape
    rows = x.shape[0] if gather is None else gather.shape[0]
    y = torch.empty(rows, N, dtype=x.dtype, device=x.device)
    if rows == 0:
        return y
    k_major = not _aligned(w, 2)
    tile = tile or choose_m(N, K, rows / experts, gather is not None)
    c = _Plan(**vars(tile), lanes=_lanes(experts), N=N, K=K, gather=gather is not None, w_k_major=k_major)
    box = [c.rows, c.out_cols]
    ragged_m_kernel[(_multiprocessors(x.device.index),)](
        None if c.gather else _descriptor(x, [c.rows, c.BK]),
        _descriptor(w.transpose(1, 2), [1, c.BN, c.BK]) if k_major else _descriptor(w, [1, c.BK, c.BN]),
        _descriptor(y, box),
        ragged_rows(y, box),
        x if c.gather else None,
        x.stride(0) // 8 if c.gather else 0,
        gather,
        offsets,
        experts,
        c=c,
        num_warps=4,
    )
    return y
