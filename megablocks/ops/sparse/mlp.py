"""An expert MLP of block-sparse products, with bias and activation in the first one's epilogue.

    forward    Z = x·W1 + b, A = act(Z)  one sdd, which writes both      y  = A·W2            dsd
    backward   dZ = (dy·W2ᵀ) ⊙ act'(Z)   one sdd, which reads Z          dW2 = Aᵀ·dy          dst_d
               db = Σ rows of dZ  dds of a row of ones                   dx = dZ·W1ᵀ, dW1 = xᵀ·dZ   dsd_t, ddt_s

    gated      G = x·V1 + c, A = act(Z) ⊙ G: two sdd, biases and activation in passes of their own

Z, G, A and their gradients are block-sparse over one pattern. Apart, activation and bias would read and write Z twice
more forward, and dA, Z and dZ once each backward. Kept for backward: x, Z, G and A, or with `recompute` x, Z and G,
from which backward computes A again. Source: Gale et al., MegaBlocks (arXiv 2211.15841), section 5.1, and for
`recompute` megablocks 0.10's memory-optimised MLP; the fusion is ours.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megablocks.ops.activation import GATED, activation_backward_op, activation_op, check_activation
from megablocks.ops.grouped.grouped_mm import under_autocast
from megablocks.ops.library import custom_op, once_differentiable
from megablocks.ops.quant.saved import OFF, pack, unpack

from .epilogue import Epilogue
from .matrix import Matrix
from .products import check_dense, check_device, sdd_op, sdd_values, spmm_op


def _room(indices: list[Tensor], block_size: int, like: Tensor) -> Tensor:
    return torch.empty(indices[0].shape[0], block_size, block_size, dtype=like.dtype, device=like.device)


@custom_op("megablocks::sparse_sdd_activate", mutates_args=())
def sdd_activate_op(
    a: Tensor, b: Tensor, bias: Tensor | None, indices: list[Tensor], block_size: int, run: int, name: str,
    approximate: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    act = _room(indices, block_size, a)
    epilogue = Epilogue("activate", name, approximate == "none", bias=bias, act=act)
    return sdd_values(a, b, indices, block_size, run, epilogue), act


@sdd_activate_op.register_fake
def _(
    a: Tensor, b: Tensor, bias: Tensor | None, indices: list[Tensor], block_size: int, run: int, name: str,
    approximate: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return _room(indices, block_size, a), _room(indices, block_size, a)


@custom_op("megablocks::sparse_sdd_slope", mutates_args=())
def sdd_slope_op(
    a: Tensor, b: Tensor, pre: Tensor, indices: list[Tensor], block_size: int, run: int, name: str, approximate: str
) -> Tensor:
    epilogue = Epilogue("slope", name, approximate == "none", pre=pre)
    return sdd_values(a, b, indices, block_size, run, epilogue)


@sdd_slope_op.register_fake
def _(
    a: Tensor, b: Tensor, pre: Tensor, indices: list[Tensor], block_size: int, run: int, name: str, approximate: str
) -> Tensor:
    return _room(indices, block_size, a)


@custom_op("megablocks::sparse_mlp", mutates_args=())
def sparse_mlp_op(
    x: Tensor, w1: Tensor, v1: Tensor | None, bias: Tensor | None, gate_bias: Tensor | None, w2: Tensor,
    indices: list[Tensor], block_size: int, run: int, name: str, approximate: str, recompute: bool,
    input_bits: int, pre_bits: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(y, Z, G, A); G is empty for an ungated activation, A with `recompute`."""
    if v1 is None:
        pre, act = sdd_activate_op(x, w1, bias, indices, block_size, run, name, approximate)
        gate = x.new_empty(0)
    else:
        pre, gate = (
            _add_bias(sdd_values(x, w, indices, block_size, run), b, indices[1])
            for w, b in ((w1, bias), (v1, gate_bias))
        )
        act = activation_op(pre, gate, name, approximate)
    y = spmm_op(act, w2, indices, True, False, run)
    return y, pre, gate, x.new_empty(0) if recompute else act


def _add_bias(values: Tensor, bias: Tensor | None, column_indices: Tensor) -> Tensor:
    """values (n, B, B), changed in place, + bias (N,) by column; what unused blocks hold stays unspecified."""
    if bias is None:
        return values
    by_block = bias.to(values.dtype).view(-1, 1, values.shape[-1])
    return values.add_(by_block.index_select(0, column_indices.clamp(min=0)))


@sparse_mlp_op.register_fake
def _(
    x: Tensor, w1: Tensor, v1: Tensor | None, bias: Tensor | None, gate_bias: Tensor | None, w2: Tensor,
    indices: list[Tensor], block_size: int, run: int, name: str, approximate: str, recompute: bool,
    input_bits: int, pre_bits: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    pre = _room(indices, block_size, x)
    gate = x.new_empty(0) if v1 is None else torch.empty_like(pre)
    act = x.new_empty(0) if recompute else torch.empty_like(pre)
    return x.new_empty(x.shape[0], w2.shape[1]), pre, gate, act


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, w1, v1, bias, gate_bias, w2, indices, ctx.block_size, ctx.run, ctx.name, ctx.approximate, *keeping = inputs
    ctx.recompute, input_bits, pre_bits = keeping
    _, pre, gate, act = output
    need_x, need_w1, need_v1, need_bias, need_gate_bias, need_w2 = ctx.needs_input_grad[:6]
    ctx.bias_dtype, ctx.gate_bias_dtype = (None if b is None else b.dtype for b in (bias, gate_bias))
    ctx.gated = v1 is not None
    ctx.transposed, ctx.rows = w1.stride(0) == 1 and w1.stride(1) != 1, x.shape[0]
    ctx.mark_non_differentiable(pre, gate, act)
    ctx.set_materialize_grads(False)
    need_hidden = need_x or need_w1 or need_v1 or need_bias or need_gate_bias
    need_pre = need_hidden or (need_w2 and ctx.recompute)
    ctx.packed_x, *kept_x = pack(x if need_w1 or need_v1 else None, input_bits)
    ctx.packed_pre, *kept_pre = pack(pre if need_pre else None, pre_bits)
    ctx.packed_gate, *kept_gate = pack(gate if need_pre else None, pre_bits)
    ctx.save_for_backward(
        *kept_x,
        w1 if need_x else None,
        v1 if need_x else None,
        w2 if need_hidden else None,
        *kept_pre,
        *kept_gate,
        act if need_w2 else None,
        *indices,
    )


@once_differentiable
def _backward(ctx: Any, dy: Tensor | None, *_: Any) -> tuple[Any, ...]:
    x, x_scales, w1, v1, w2, pre, pre_scales, gate, gate_scales, act, *indices = ctx.saved_tensors
    no_gradients = [None] * len(indices), None, None, None, None, None, None, None
    need_x, need_w1, need_v1, need_bias, need_gate_bias, need_w2 = ctx.needs_input_grad[:6]
    if dy is None:
        return *[None] * 6, *no_gradients
    dx = dw1 = dv1 = dbias = dgate_bias = dw2 = None
    if need_w1 or need_v1:
        x = unpack(ctx.packed_x, x, x_scales)
    pre, gate = unpack(ctx.packed_pre, pre, pre_scales), unpack(ctx.packed_gate, gate, gate_scales)
    gate = gate if ctx.gated else None

    def weight_gradient(d_values: Tensor) -> Tensor:
        # of W stored as its transpose, the view's gradient too, or the parameter behind it would copy it
        if ctx.transposed:
            return spmm_op(d_values, x, indices, True, True, ctx.run).t()
        return spmm_op(d_values, x.t(), indices, False, True, ctx.run)

    def bias_gradient(d_values: Tensor, dtype: torch.dtype) -> Tensor:
        ones = torch.ones(1, ctx.rows, dtype=d_values.dtype, device=d_values.device)
        return spmm_op(d_values, ones, indices, False, True, ctx.run)[0].to(dtype)

    if need_x or need_w1 or need_v1 or need_bias or need_gate_bias:
        if ctx.gated:
            d_act = sdd_op(dy, w2.t(), indices, ctx.block_size, ctx.run)
            d_pre, d_gate = activation_backward_op(d_act, pre, gate, ctx.name, ctx.approximate)
            dv1 = weight_gradient(d_gate) if need_v1 else None
            dgate_bias = bias_gradient(d_gate, ctx.gate_bias_dtype) if need_gate_bias else None
        else:
            d_pre = sdd_slope_op(dy, w2.t(), pre, indices, ctx.block_size, ctx.run, ctx.name, ctx.approximate)
        dx = spmm_op(d_pre, w1.t(), indices, True, False, ctx.run) if need_x else None
        if need_x and ctx.gated:
            dx = dx + spmm_op(d_gate, v1.t(), indices, True, False, ctx.run)
        dw1 = weight_gradient(d_pre) if need_w1 else None
        dbias = bias_gradient(d_pre, ctx.bias_dtype) if need_bias else None
    if need_w2:
        act = activation_op(pre, gate, ctx.name, ctx.approximate) if ctx.recompute else act
        dw2 = spmm_op(act, dy, indices, True, True, ctx.run)
    return dx, dw1, dv1, dbias, dgate_bias, dw2, *no_gradients


sparse_mlp_op.register_autograd(_backward, setup_context=_save)


def sparse_mlp(
    x: Tensor, w1: Tensor, w2: Tensor, pattern: Matrix, *, v1: Tensor | None = None, bias: Tensor | None = None,
    gate_bias: Tensor | None = None, activation: str = "gelu", approximate: str = "tanh", recompute: bool = False,
    input_bits: int = OFF, pre_bits: int = OFF,
) -> Tensor:  # fmt: skip
    """act(x · w1 + bias) · w2, or (act(x · w1 + bias) ⊙ (x · v1 + gate_bias)) · w2, at the used blocks of `pattern`.

    Args:
        x: (M, H), w1, v1: (H, N), w2: (N, O), of one dtype: bfloat16, float16 or float32 (float64 on the CPU), any
            strides; v1 has w1's. The gradients of w1 and v1 have their strides, those of w2 are contiguous.
        pattern: Matrix (M, N), as `topology` makes it; not a transposed view.
        v1: for "swiglu", "geglu" and "reglu", which need it.
        bias, gate_bias: (N,) or None; gate_bias with v1 only.
        activation, approximate: as in `activate`.
        recompute: keep the pre-activations only and compute the activation again in backward: M·N/E values less.
        input_bits: 4 or 8 keep x quantised (`ops.quant`) for the gradients of w1 and v1; -1 as it is.
        pre_bits: the same for the pre-activations, and recomputes.

    Returns:
        (M, O); zero in block rows without blocks. Differentiable in x, w1, v1, w2 and the biases.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit, a gate missing or unwanted, a transposed pattern.
    """
    x, w1, w2 = under_autocast(x, w1, w2)
    if v1 is not None:
        (v1,) = under_autocast(v1)
    rows, columns = pattern.shape
    if (v1 is None) == (activation in GATED):
        raise ValueError(f"v1 is {'missing' if v1 is None else 'given'} for activation={activation!r}")
    check_activation(x, None if v1 is None else x, activation, approximate)
    if pattern.transposed:
        raise ValueError("pattern is a transposed view: give the pattern as topology made it")
    check_dense("x", x, (rows, None), x, "x")
    check_dense("w1", w1, (x.shape[1], columns), x, "x")
    if v1 is not None:
        check_dense("v1", v1, (x.shape[1], columns), x, "x")
    check_dense("w2", w2, (columns, None), x, "x")
    if gate_bias is not None and v1 is None:
        raise ValueError(f"gate_bias is given for activation={activation!r}, which has no gate")
    for name, b in (("bias", bias), ("gate_bias", gate_bias)):
        if b is not None and (tuple(b.shape) != (columns,) or b.device != x.device):
            raise ValueError(f"{name} is {tuple(b.shape)} on {b.device}, must be ({columns},) on {x.device}")
    check_device(pattern, x)
    bias, gate_bias = (None if b is None else b.contiguous() for b in (bias, gate_bias))
    out = sparse_mlp_op(
        x, w1, v1, bias, gate_bias, w2, list(pattern.indices), pattern.block_size, pattern.run, activation, approximate,
        recompute or pre_bits != OFF, input_bits, pre_bits,
    )  # fmt: skip
    return out[0]
