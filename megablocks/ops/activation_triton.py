"""Triton kernels of the activations: one pass over memory forward, one backward, float32 inside.

Legend: n elements, in rows of I. A gated activation moves 3·n values forward and 5·n backward, a plain one 2·n and 3·n;
the gate of clamp.py moves as many as any gated one.
A device function computes the activation of one element and its derivative; fused kernels share it.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megablocks.ops.activation import halves
from megablocks.ops.activation_table import Activation
from megablocks.ops.clamp import Clamp
from megablocks.ops.launch import cdiv, quick

_BLOCK = 2048  # elements a program of 4 warps: 16 bytes a lane and load in half precision, two loads an operand


@triton.jit
def _normal(z):
    """Φ(z), the share of the normal distribution below z, and exp(-z²/2)."""
    return 0.5 + 0.5 * tl.erf(z * 0.7071067811865476), tl.exp(-0.5 * z * z)


@triton.jit
def unary(
    z, NAME: tl.constexpr, EXACT: tl.constexpr, SIGMOID: tl.constexpr = tl.sigmoid, NORMAL: tl.constexpr = _normal
):
    """The activation NAME (gelu, silu, relu, relu2) of float32 z, and its derivative; EXACT for gelu's erf form.

    SIGMOID, NORMAL: a kernel's own, where it has cheaper ones.
    """
    if NAME == "gelu":
        if EXACT:
            phi, bell = NORMAL(z)
            value = z * phi
            slope = phi + z * 0.3989422804014327 * bell
        else:
            # 0.5·(1 + tanh(u)) is σ(2u)
            half = SIGMOID(1.5957691216057308 * z * (1 + 0.044715 * z * z))
            value = z * half
            slope = half + z * half * (1 - half) * 1.5957691216057308 * (1 + 0.134145 * z * z)
    elif NAME == "silu":
        sigma = SIGMOID(z)
        value = z * sigma
        slope = sigma * (1 + z * (1 - sigma))
    elif NAME == "relu":
        value = tl.where(z <= 0, 0.0, z)  # keeps a NaN, and -inf is 0
        slope = tl.where(z > 0, 1.0, 0.0)
    else:
        positive = tl.where(z <= 0, 0.0, z)
        value = positive * positive
        slope = 2 * positive
    return value, slope


@triton.jit
def _in_rows(i, width, stride, BLOCK: tl.constexpr):
    """Where elements i of (rows, width) lie if rows are `stride` apart; None where nothing is between them."""
    if stride is not None:
        first = tl.program_id(0).to(tl.int64) * BLOCK
        row = first // width  # one division in 64 bits, the others in 32
        beyond = (first - row * width).to(tl.int32) + tl.arange(0, BLOCK)
        i += (row + beyond // width) * (stride - width)
    return i


@quick
@triton.jit(do_not_specialize=["num_rows"])
def _forward_kernel(
    pre_ptr, gate_ptr, out_ptr, num_rows, width, stride,
    NAME: tl.constexpr, EXACT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    n = num_rows.to(tl.int64) * width  # known to be a multiple of 16 where the width is: such a mask leaves loads wide
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    at = _in_rows(i, width, stride, BLOCK)
    z = tl.load(pre_ptr + at, mask=i < n, other=0).to(tl.float32)
    value, _ = unary(z, NAME, EXACT)
    if gate_ptr is not None:
        value *= tl.load(gate_ptr + at, mask=i < n, other=0).to(tl.float32)
    tl.store(out_ptr + i, value.to(out_ptr.dtype.element_ty), mask=i < n)


@quick
@triton.jit(do_not_specialize=["num_rows"])
def _backward_kernel(
    grad_ptr, pre_ptr, gate_ptr, d_pre_ptr, d_gate_ptr, num_rows, width, stride, d_stride,
    NAME: tl.constexpr, EXACT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    n = num_rows.to(tl.int64) * width
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    at, d_at = _in_rows(i, width, stride, BLOCK), _in_rows(i, width, d_stride, BLOCK)
    z = tl.load(pre_ptr + at, mask=i < n, other=0).to(tl.float32)
    grad = tl.load(grad_ptr + i, mask=i < n, other=0).to(tl.float32)
    value, slope = unary(z, NAME, EXACT)
    if gate_ptr is not None:
        tl.store(d_gate_ptr + d_at, (grad * value).to(d_gate_ptr.dtype.element_ty), mask=i < n)
        grad *= tl.load(gate_ptr + at, mask=i < n, other=0).to(tl.float32)
    tl.store(d_pre_ptr + d_at, (grad * slope).to(d_pre_ptr.dtype.element_ty), mask=i < n)


@triton.jit
def _alternate(i, n):
    """Where both factors of elements i lie if they alternate, and which there are: (BLOCK, 2) and (BLOCK, 1)."""
    return 2 * i[:, None] + tl.arange(0, 2)[None, :], (i < n)[:, None]


@triton.jit
def _clamped(h_ptr, i, n, width, limit, alpha, offset, INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr):
    """Elements i of a clamped gate: (value, its derivatives by a and by b)."""
    if INTERLEAVED:
        at, live = _alternate(i, n)
        a, b = tl.split(tl.load(h_ptr + at, mask=live, other=0).to(tl.float32))
    else:
        at = _in_rows(i, width, 2 * width, BLOCK)
        a = tl.load(h_ptr + at, mask=i < n, other=0).to(tl.float32)
        b = tl.load(h_ptr + at + width, mask=i < n, other=0).to(tl.float32)
    z = tl.where(a > limit, limit, a)  # a minimum may lose a NaN
    factor = tl.where(b > limit, limit, tl.where(b < -limit, -limit, b)) + offset
    sigma = tl.sigmoid(alpha * z)
    d_a = tl.where(a > limit, 0.0, factor * sigma * (1 + alpha * z * (1 - sigma)))
    d_b = tl.where(tl.abs(b) > limit, 0.0, z * sigma)
    return factor * z * sigma, d_a, d_b


@quick
@triton.jit(do_not_specialize=["num_rows"])
def _clamped_kernel(
    h_ptr, out_ptr, num_rows, width, limit, alpha, offset, INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr
):
    n = num_rows.to(tl.int64) * width
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value, _, _ = _clamped(h_ptr, i, n, width, limit, alpha, offset, INTERLEAVED, BLOCK)
    tl.store(out_ptr + i, value.to(out_ptr.dtype.element_ty), mask=i < n)


@quick
@triton.jit(do_not_specialize=["num_rows"])
def _clamped_backward_kernel(
    grad_ptr, h_ptr, d_h_ptr, num_rows, width, limit, alpha, offset, INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr
):
    n = num_rows.to(tl.int64) * width
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    grad = tl.load(grad_ptr + i, mask=i < n, other=0).to(tl.float32)
    _, d_a, d_b = _clamped(h_ptr, i, n, width, limit, alpha, offset, INTERLEAVED, BLOCK)
    d_a = (grad * d_a).to(d_h_ptr.dtype.element_ty)
    d_b = (grad * d_b).to(d_h_ptr.dtype.element_ty)
    if INTERLEAVED:
        at, live = _alternate(i, n)
        tl.store(d_h_ptr + at, tl.join(d_a, d_b), mask=live)
    else:
        at = _in_rows(i, width, 2 * width, BLOCK)
        tl.store(d_h_ptr + at, d_a, mask=i < n)
        tl.store(d_h_ptr + at + width, d_b, mask=i < n)


def _rows_of(pre: Tensor, gate: Tensor | None) -> tuple[Tensor, Tensor | None, int | None]:
    """Both as the kernels read them, and the stride of their rows; None if both are contiguous, copied or not."""
    strided = gate is not None and pre.dim() == 2 and pre.stride() == gate.stride() and pre.stride(1) == 1
    if strided and not pre.is_contiguous():
        return pre, gate, pre.stride(0)
    return pre.contiguous(), None if gate is None else gate.contiguous(), None


def activation_launch(pre: Tensor, gate: Tensor | None, activation: Activation) -> Tensor:
    """Like `activation_ref`; one launch. Halves of (R, 2·I) are read in place."""
    pre, gate, stride = _rows_of(*halves(pre, gate, activation))
    out = torch.empty(pre.shape, dtype=pre.dtype, device=pre.device)
    if out.numel():
        _forward_kernel[(cdiv(out.numel(), _BLOCK),)](
            pre, gate, out, out.numel() // out.shape[-1], out.shape[-1], stride,
            NAME=activation.unary, EXACT=activation.exact, BLOCK=_BLOCK,
        )  # fmt: skip
    return out


def activation_backward_launch(
    grad: Tensor, pre: Tensor, gate: Tensor | None, activation: Activation
) -> tuple[Tensor, Tensor | None]:
    """Like `activation_backward_ref`; one launch. Gradients of halves of (R, 2·I) are written side by side."""
    grad, d_whole = grad.contiguous(), torch.empty(pre.shape, dtype=pre.dtype, device=pre.device)
    d_other = None if gate is None else torch.empty_like(d_whole)
    d_pre, d_gate = halves(d_whole, d_other, activation)
    d_stride = d_whole.shape[1] if d_gate is not d_other else None
    pre, gate, stride = _rows_of(*halves(pre, gate, activation))
    if d_pre.numel():
        _backward_kernel[(cdiv(d_pre.numel(), _BLOCK),)](
            grad, pre, gate, d_pre, d_gate, pre.numel() // pre.shape[-1], pre.shape[-1], stride, d_stride,
            NAME=activation.unary, EXACT=activation.exact, BLOCK=_BLOCK,
        )  # fmt: skip
    return d_whole, d_other


def clamped_gate_launch(h: Tensor, clamp: Clamp) -> Tensor:
    """h (R, 2·I) → (R, I); one launch."""
    h, width = h.contiguous(), h.shape[1] // 2
    out = h.new_empty(h.shape[0], width)
    if out.numel():
        _clamped_kernel[(cdiv(out.numel(), _BLOCK),)](
            h, out, h.shape[0], width, clamp.limit, clamp.alpha, clamp.offset, INTERLEAVED=clamp.interleaved,
            BLOCK=_BLOCK,
        )  # fmt: skip
    return out


def clamped_gate_backward_launch(grad: Tensor, h: Tensor, clamp: Clamp) -> Tensor:
    """grad (R, I), h (R, 2·I) → the gradient of h; one launch."""
    h, grad = h.contiguous(), grad.contiguous()
    d_h = torch.empty_like(h)
    if d_h.numel():
        _clamped_backward_kernel[(cdiv(grad.numel(), _BLOCK),)](
            grad, h, d_h, h.shape[0], h.shape[1] // 2, clamp.limit, clamp.alpha, clamp.offset,
            INTERLEAVED=clamp.interleaved, BLOCK=_BLOCK,
        )  # fmt: skip
    return d_h
