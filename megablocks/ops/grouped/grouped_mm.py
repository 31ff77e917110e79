"""Grouped GEMM: each expert multiplies its own rows, whose number differs between experts.

    y[p] = x[p] · w[e] + bias[e]  for offsets[e] <= p < offsets[e+1]; the bias is optional
    dX   = grouped_mm(dY, wᵀ)     dW[e] = x[rows of e]ᵀ · dY[rows of e], exactly 0 for an expert without rows

Legend: R rows, E experts, K inner size, N outer size, V = offsets[E] <= R valid rows. Rows p >= V are never read, and
those rows of the result are unspecified. Source: MegaBlocks (arXiv 2211.15841), section 4, without padding.

The reference multiplies expert by expert, which needs the offsets on the host: free on a CPU, a synchronization on a
GPU. So kernels run on a GPU, without a synchronization. The first of these that supports the operands runs:

    grouped_mm_hopper.py   capability 9.0, bfloat16 and float16, sizes and strides in multiples of 16 bytes (dW: _dw.py)
    torch                  9.0 or newer, bfloat16; other strides are copied, K and N padded with zeros to multiples of 8
    grouped_mm_triton.py   8.0 or newer, any dtype but float64, any size and stride

MEGABLOCKS_HOPPER=0 in the environment turns Hopper's kernels off.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megablocks.ops.grouped.bias import add_expert_bias_op, expert_sum_op
from megablocks.ops.hopper import kernels_for
from megablocks.ops.library import custom_op, runs_triton, under_autocast

_ALIGN = 8  # bfloat16 values in 16 bytes


def grouped_mm_ref(x: Tensor, w: Tensor, offsets: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (R, K), w (E, K, N), offsets (E+1,), bias (E, N) → (R, N) in x's dtype, rounded once from float32 (float64)."""
    acc = torch.promote_types(x.dtype, torch.float32)
    out = x.new_empty(x.shape[0], w.shape[2])
    for expert, (start, end) in enumerate(pairwise(offsets.tolist())):
        product = x[start:end].to(acc) @ w[expert].to(acc)
        out[start:end] = product if bias is None else product + bias[expert]
    return out


def grouped_mm_dw_ref(x: Tensor, dy: Tensor, offsets: Tensor) -> Tensor:
    """x (R, K), dy (R, N), offsets (E+1,) → dW (E, K, N)."""
    acc = torch.promote_types(x.dtype, torch.float32)
    out = x.new_empty(offsets.shape[0] - 1, x.shape[1], dy.shape[1])
    for expert, (start, end) in enumerate(pairwise(offsets.tolist())):
        if start == end:
            out[expert].zero_()
        elif acc == x.dtype:
            torch.mm(x[start:end].t(), dy[start:end], out=out[expert])
        else:
            out[expert] = x[start:end].to(acc).t() @ dy[start:end].to(acc)
    return out


def _hopper(module: str, x: Tensor) -> ModuleType | None:
    """The module of Hopper's ragged-M or ragged-K kernel if it can run on x."""
    return kernels_for(module, x) if x.is_cuda else None


hopper_ragged_m = partial(_hopper, "megablocks.ops.grouped.grouped_mm_hopper")
hopper_ragged_k = partial(_hopper, "megablocks.ops.grouped.grouped_mm_hopper_dw")


def twin_kernels(x: Tensor) -> ModuleType | None:
    """The module of the plain Triton kernels if they can run on x."""
    if not runs_triton(x) or torch.version.hip is not None or torch.cuda.get_device_capability(x.device) < (8, 0):
        return None
    from megablocks.ops.grouped import grouped_mm_triton

    return grouped_mm_triton


def has_torch_kernel(x: Tensor) -> bool:
    """Whether torch's grouped GEMM can run on x."""
    return x.is_cuda and torch_kernel_on(x.device, x.dtype)


def torch_kernel_on(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch's grouped GEMM runs for this dtype on this GPU. It chooses its tile by the number of rows."""
    if dtype != torch.bfloat16 or not hasattr(torch, "_grouped_mm"):
        return False
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


def ragged_m_kernels(x: Tensor, offsets: Tensor, rows: int, *weights: Tensor) -> ModuleType | None:
    """The module whose `ragged_m` multiplies `rows` rows of x, gathered or not, by each of the weights (E, K, N).

    None if torch's grouped GEMM or the reference computes it.
    """
    if (hopper := hopper_ragged_m(x)) and all(hopper.supports_m(x, w, offsets, rows) for w in weights):
        return hopper
    return None if has_torch_kernel(x) else twin_kernels(x)


def ragged_k_kernels(a: Tensor, b: Tensor, offsets: Tensor, *, add: bool = False) -> ModuleType | None:
    """The module whose `ragged_k` multiplies a and b, likewise. add: to sums in float32, which torch's cannot do."""
    if (hopper := hopper_ragged_k(a)) and hopper.supports_k(a, b, offsets):
        return hopper
    return None if has_torch_kernel(a) and not add else twin_kernels(a)


def _for_torch(t: Tensor, padded_dims: int = 1) -> Tensor:
    """`t` with its last dimensions padded with zeros to 16 bytes, and with strides that torch's kernel supports.

    One of the last two strides must be 1 and the other a multiple of 16 bytes; otherwise `t` is copied.
    """
    zeros = [n for size in t.shape[: -padded_dims - 1 : -1] for n in (0, -size % _ALIGN)]
    if any(zeros):
        t = F.pad(t, zeros)
    rows = t if t.stride(-1) == 1 else t.mT
    fits = rows.stride(-1) == 1 and rows.stride(-2) % _ALIGN == 0 and rows.stride(-2) >= rows.shape[-1]
    if fits and (t.dim() == 2 or t.stride(0) % _ALIGN == 0) and t.data_ptr() % 16 == 0:
        return t
    return t.clone(memory_format=torch.contiguous_format)


def _grouped_mm_torch(x: Tensor, w: Tensor, offsets: Tensor) -> Tensor:
    """`grouped_mm` by torch's kernel, which requires widths that are multiples of 16 bytes."""
    y = torch._grouped_mm(_for_torch(x), _for_torch(w, padded_dims=2), offs=offsets[1:])
    return y[:, : w.shape[2]].contiguous()


def _grouped_mm_dw_torch(x: Tensor, dy: Tensor, offsets: Tensor) -> Tensor:
    """`grouped_mm_dw` by torch's kernel, which leaves the matrices of experts without rows unspecified."""
    # the kernel's left operand is (K, R) with contiguous columns: a view of row-major x
    dw = torch._grouped_mm(_for_torch(x).t(), _for_torch(dy), offs=offsets[1:])
    has_rows = (offsets[1:] > offsets[:-1])[:, None, None]
    return torch.where(has_rows, dw, 0)[:, : x.shape[1], : dy.shape[1]].contiguous()


@custom_op("megablocks::grouped_mm", fake=lambda a: a.x.new_empty(a.x.shape[0], a.w.shape[2]))
def grouped_mm_op(x: Tensor, w: Tensor, offsets: Tensor, bias: Tensor | None = None) -> Tensor:
    empty = x.shape[0] == 0 or w.numel() == 0
    if not empty and (kernels := ragged_m_kernels(x, offsets, x.shape[0], w)):
        return kernels.ragged_m(x, w, offsets, bias=bias)
    if empty or not has_torch_kernel(x):
        return grouped_mm_ref(x, w, offsets, bias)
    y = _grouped_mm_torch(x, w, offsets)
    return y if bias is None else add_expert_bias_op.implementation(y, bias, offsets)


@custom_op(
    "megablocks::grouped_mm_dw",
    fake=lambda a: a.x.new_empty(a.offsets.shape[0] - 1, a.x.shape[1], a.dy.shape[1]),
)
def grouped_mm_dw_op(x: Tensor, dy: Tensor, offsets: Tensor) -> Tensor:
    if x.shape[0] == 0:
        return x.new_zeros(offsets.shape[0] - 1, x.shape[1], dy.shape[1])
    if kernels := ragged_k_kernels(x, dy, offsets):
        return kernels.ragged_k(x, dy, offsets)
    return _grouped_mm_dw_torch(x, dy, offsets) if has_torch_kernel(x) else grouped_mm_dw_ref(x, dy, offsets)


def is_transposed(w: Tensor) -> bool:
    """Whether `w` (E, K, N) is a view of (E, N, K) storage. Its gradient then has that layout too."""
    return w.stride(1) == 1 and w.stride(2) != 1


def weight_gradient(x: Tensor, dy: Tensor, offsets: Tensor, transposed: bool) -> Tensor:
    """dW (E, K, N); with `transposed` a view of (E, N, K) storage, so a parameter behind such a view needs no copy."""
    return grouped_mm_dw_op(dy, x, offsets).transpose(1, 2) if transposed else grouped_mm_dw_op(x, dy, offsets)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, w, offsets, _ = inputs
    need_x, need_w = ctx.needs_input_grad[:2]
    ctx.transposed = is_transposed(w)
    ctx.save_for_backward(x if need_w else None, w if need_x else None, offsets)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, w, offsets = ctx.saved_tensors
    need_x, need_w = ctx.needs_input_grad[:2]  # read again, because a caller may want one gradient of two
    need_bias = any(ctx.needs_input_grad[3:])  # torch passes no default
    dx = grouped_mm_op(dy, w.transpose(1, 2), offsets) if need_x else None
    dw = weight_gradient(x, dy, offsets, ctx.transposed) if need_w else None
    return dx, dw, None, expert_sum_op(dy, offsets) if need_bias else None


grouped_mm_op.register_autograd(_backward, setup_context=_setup_context)


def check_grouped(x: Tensor, w: Tensor, offsets: Tensor, bias: Tensor | None = None) -> None:
    """The ValueErrors of `grouped_mm`."""
    if x.dim() != 2 or w.dim() != 3 or x.shape[1] != w.shape[1]:
        raise ValueError(f"x {tuple(x.shape)} and w {tuple(w.shape)}: must be (R, K) and (E, K, N)")
    if x.dtype != w.dtype:
        raise ValueError(f"w is {w.dtype}, must be {x.dtype} as x is: cast one, or run under autocast")
    if offsets.shape != (w.shape[0] + 1,) or offsets.dtype != torch.int32:
        raise ValueError(f"offsets is {tuple(offsets.shape)} {offsets.dtype}: must be ({w.shape[0] + 1},) torch.int32")
    if bias is not None and bias.shape != (w.shape[0], w.shape[2]):
        raise ValueError(f"bias is {tuple(bias.shape)}: must be (E, N), {(w.shape[0], w.shape[2])}")


def grouped_mm(x: Tensor, w: Tensor, offsets: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply each expert's rows by its matrix, and add its bias if one is given.

    Args:
        x: (R, K) floating, rows sorted by expert.
        w: (E, K, N), same dtype; a view of any stride, e.g. `w1.view(E, N, K).transpose(1, 2)`.
        offsets: (E+1,) int32, non-decreasing from 0: rows [offsets[e], offsets[e+1]) are expert e's.
        bias: (E, N) floating.

    Returns:
        (R, N) in x's dtype; rows >= offsets[E] are unspecified. Differentiable in x, w and bias.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    x, w = under_autocast(x, w)
    check_grouped(x, w, offsets, bias)
    return grouped_mm_op(x, w, offsets, bias)
