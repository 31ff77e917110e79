"""Host code that the Gluon kernels for Hopper (sm_90) share: when they run, tiles, and descriptors for the TMA unit.

None of their launches synchronizes with the host or compiles for a token count. All can be captured in a CUDA graph.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor

# Gluon is experimental and changes: these releases compile the kernels, and 3.6 has run them.
TRITON_RELEASES = Version("3.6"), Version("3.10")

logger = logging.getLogger(__name__)

SWITCHES = ("MEGABLOCKS_HOPPER", "MEGABLOCKS_COMPILE_AHEAD")
"""Variables of the environment that `switch` reads."""
ROW_BOUND = 2**30
"""Row coordinates of a descriptor of `ragged_rows`, and so row numbers, must be below this."""
MAX_EXPERTS = 512
"""Most experts of the ragged kernels. Their prefix sum over the experts is in registers, E / 32 per lane."""


@dataclass(frozen=True)
class Tile:
    """How a product is split into tiles. Two consumers compute `rows` × BN each.

    pingpong: each consumer computes tiles of its own, in turns; otherwise they compute the two halves of one tile.
    stages: how many steps of BK the shared memory holds.
    out_parts: in how many column parts a consumer writes its tile; out_buffers: how many parts are in flight.
    group_m: how many row tiles are computed before the next column tile; 1 means columns first.
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

    @property
    def out_cols(self) -> int:
        return self.BN // self.out_parts

    @property
    def left_bytes(self) -> int:
        """Bytes of the left operand in a stage; those of the right operand follow."""
        return self.BM * self.BK * 2

    @property
    def right_bytes(self) -> int:
        return self.BN * self.BK * 2


@functools.cache
def has_gluon() -> bool:
    """Whether Triton is one of the releases that the kernels were written for, and compiles rather than interprets.

    The first call logs a warning if the release is another one.
    """
    try:
        import triton
        from triton.experimental.gluon.language.nvidia import hopper  # noqa: F401
    except ImportError:
        return False
    from megablocks.ops.launch import interpreted

    first, beyond = TRITON_RELEASES
    if not first <= Version(triton.__version__) < beyond:
        logger.warning(
            "triton=%s: the kernels for Hopper are off, slower ones run; install triton >=%s,<%s",
            triton.__version__, first, beyond,
        )  # fmt: skip
        return False
    return not interpreted()


@functools.cache
def is_hopper(device: int) -> bool:
    return torch.cuda.get_device_capability(device) == (9, 0)


@functools.cache
def multiprocessors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def is_available(device: int = 0) -> bool:
    """Whether the kernels can run on this CUDA device: Hopper, and a Triton with the Gluon they were written for."""
    return torch.cuda.is_available() and is_hopper(device) and has_gluon()


def switch(name: str) -> bool:
    """Whether an environment variable is 1, empty or unset; False if it is 0. Raises ValueError for other values."""
    value = os.environ.get(name) or "1"
    if value not in ("0", "1"):
        raise ValueError(f"{name}={value}: must be 0 or 1")
    return value == "1"


def switched_on() -> bool:
    """Whether kernels for Hopper may run. MEGABLOCKS_HOPPER=0 in the environment turns them all off."""
    return switch("MEGABLOCKS_HOPPER")


def why_off(device: int) -> str | None:
    """Why a Hopper GPU runs without its kernels, in a few words. None if they run, and on other GPUs."""
    if not is_hopper(device):
        return None
    if not switched_on():
        return "MEGABLOCKS_HOPPER=0"
    return None if has_gluon() else "this release of Triton"


def runs_hopper(t: Tensor) -> bool:
    """Whether the kernels may run on t: they are switched on, and GPU, dtype and release of Triton fit."""
    return (
        t.is_cuda
        and switched_on()
        and t.dtype in (torch.bfloat16, torch.float16)
        and is_hopper(t.device.index)
        and has_gluon()
    )


def kernels_for(module: str, t: Tensor) -> ModuleType | None:
    """The module of kernels for Hopper if they may run on t, else None. The module says which operands it supports."""
    return importlib.import_module(module) if runs_hopper(t) else None


def aligned(t: Tensor, major: int = -1) -> bool:
    """Whether TMA can read t: its start and rows are multiples of 16 bytes, and its `major` dimension is contiguous.

    Rows must not overlap: a stride below the contiguous dimension's length, as in an expanded gradient, is refused.
    """
    shape, unit = t.shape, 16 // t.element_size()
    if t.data_ptr() % 16:
        return False
    if major == -1 and shape[-1] % unit == 0 and t.is_contiguous():
        return True
    strides = t.stride()
    if strides[major] != 1:
        return False
    for d in range(len(shape)):
        other = d != major % len(shape) and shape[d] > 1
        if other and (strides[d] % unit or strides[d] < shape[major]):
            return False
    return True


@functools.cache
def _descriptor_of(box: tuple[int, ...], dtype: torch.dtype) -> tuple[Any, Any]:
    """The class of descriptors and their layout, cached because a new one takes half of a launch's host time."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    element = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}[dtype]
    return TensorDescriptor, gl.NVMMASharedLayout.get_default_for(list(box), element)


def descriptor(t: Tensor, box: list[int], shape: list[int] | None = None, strides: list[int] | None = None) -> Any:
    """A TMA descriptor of t, whose last dimension is contiguous, in pieces of `box`; see `aligned`.

    It skips Triton's constructor, which checks again what `aligned` has checked: a third of a launch's host time.
    """
    tensor_descriptor, layout = _descriptor_of(tuple(box), t.dtype)
    if strides is None:
        strides, sizes = list(t.stride()), t.shape
        if 1 in sizes:
            unit = 16 // t.element_size()
            # a dimension of one may have any stride, but TMA requires a multiple of 16 bytes
            strides = [s if n > 1 else -(-max(s, 1) // unit) * unit for s, n in zip(strides, sizes, strict=True)]
            strides[-1] = 1
    made = object.__new__(tensor_descriptor)
    made.base, made.shape, made.strides = t, list(t.shape) if shape is None else shape, strides
    made.block_shape, made.layout = box, layout
    return made


def ragged_rows(t: Tensor, box: list[int]) -> Any:
    """A descriptor of t (R, C) with which the TMA unit skips rows >= `end`; each access gives its own `end`.

    Coordinates (2³⁰, end, 2³⁰ − end + row, col) address row·s + col for row stride s: the outer strides 2³⁴ − s and s
    make the sum 2⁶⁴ + row·s, whose carry is lost. The row dimension's bound of 2³⁰ is then exactly at `end`.
    """
    stride = t.stride(0) if t.shape[0] > 1 else t.shape[1]
    shape = [ROW_BOUND + 1, t.shape[0] + 1, ROW_BOUND, t.shape[1]]
    return descriptor(t, [1, 1, *box], shape, [2**34 - stride, stride, stride, 1])


def with_tail(t: Tensor | None, box: list[int]) -> tuple[Any, Any]:
    """`descriptor` and `ragged_rows` of t; None for None."""
    return (None, None) if t is None else (descriptor(t, box), ragged_rows(t, box))
