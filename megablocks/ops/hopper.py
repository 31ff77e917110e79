"""What the Gluon kernels for Hopper (sm_90) share on the host: when they may run, and descriptors for the TMA unit."""

from __future__ import annotations

import functools
import os
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor

# Gluon is experimental and changes: these releases compile the kernels, and 3.6 has run them.
TRITON_RELEASES = Version("3.6"), Version("3.8")


@functools.cache
def has_gluon() -> bool:
    """Whether Triton is one of the releases that the kernels were written for, and compiles rather than interprets."""
    try:
        import triton
        from triton.experimental.gluon.language.nvidia import hopper  # noqa: F401
    except ImportError:
        return False
    from megablocks.ops.launch import interpreted

    first, beyond = TRITON_RELEASES
    return first <= Version(triton.__version__) < beyond and not interpreted()


@functools.cache
def is_hopper(device: int) -> bool:
    return torch.cuda.get_device_capability(device) == (9, 0)


@functools.cache
def multiprocessors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def switched_on() -> bool:
    """MEGABLOCKS_HOPPER=0 in the environment leaves all kernels for Hopper out."""
    return os.environ.get("MEGABLOCKS_HOPPER", "1") != "0"


def runs_hopper(t: Tensor) -> bool:
    """Whether the kernels may run on t: switched on, a Hopper GPU, bfloat16 or float16, a Triton that has them."""
    return (
        switched_on()
        and t.is_cuda
        and t.dtype in (torch.bfloat16, torch.float16)
        and is_hopper(t.device.index)
        and has_gluon()
    )


def aligned(t: Tensor, major: int = -1) -> bool:
    """TMA reads a tensor whose start and rows stand on 16 bytes and whose `major` dimension is contiguous.

    Rows may not overlap: a stride below the contiguous dimension's length (0 of an expanded gradient) is refused.
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
    """The class and a layout of it: made anew they would take half of a launch's time on the host."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    element = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}[dtype]
    return TensorDescriptor, gl.NVMMASharedLayout.get_default_for(list(box), element)


def descriptor(t: Tensor, box: list[int], shape: list[int] | None = None, strides: list[int] | None = None) -> Any:
    """A TMA descriptor of t, whose last dimension is contiguous, in pieces of `box`; see `aligned`.

    Triton's constructor checks the pointer, the strides and the box at every call, a third of a launch's time on the
    host with eight descriptors. `aligned` has said the same of operands, and results are allocated to suit.
    """
    tensor_descriptor, layout = _descriptor_of(tuple(box), t.dtype)
    if strides is None:
        strides, sizes = list(t.stride()), t.shape
        if 1 in sizes:
            unit = 16 // t.element_size()
            # The stride of a dimension of one is anything; TMA wants it on 16 bytes all the same.
            strides = [s if n > 1 else -(-max(s, 1) // unit) * unit for s, n in zip(strides, sizes, strict=True)]
            strides[-1] = 1
    made = object.__new__(tensor_descriptor)
    made.base, made.shape, made.strides = t, list(t.shape) if shape is None else shape, strides
    made.block_shape, made.layout = box, layout
    return made
