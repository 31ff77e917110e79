"""An expert MLP of block-sparse products, with bias and activation in the first one's epilogue.

    forward    Z = x·W1 + b, A = act(Z)  one sdd, which writes both      y  = A·W2            dsd
    backward   dZ = (dy·W2ᵀ) ⊙ act'(Z)   one sdd, which reads Z          dW2 = Aᵀ·dy          dst_d
               db = Σ rows of dZ  dds of a row of ones                   dx = dZ·W1ᵀ, dW1 = xᵀ·dZ   dsd_t, ddt_s

    gated      G = x·V1 + c, A = act(Z) ⊙ G: two sdd; biases and activation are passes of their own

Z, G, A and their gradients are block-sparse over one pattern. Saved for backward: x, Z, G and A, or with `recompute` x,
Z and G, from which backward computes A again. Source: Gale et al., MegaBlocks (arXiv 2211.15841), section 5.1, and for
`recompute` megablocks 0.10's memory-optimized MLP; the fusion is ours.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megablocks.ops.activation import activation_backward_op, activation_op, check_activation
from megablocks.ops.activation_table import Activation
from megablocks.ops.library import custom_op, once_differentiable, under_autocast
from megablocks.ops.quant.quant import OFF, pack, unpack

from .matrix import Blocks, Matrix
from .products import Epilogue, check_dense, check_device, empty_values, sdd_op, sdd_values, spmm_op


@custom_op("megablocks::sparse_sdd_slope", fake=lambda a: empty_values(a.blocks, a.a))
def sdd_slope_op(a: Tensor, b: Tensor, pre: Tensor, blocks: Blocks, activation: Activation) -> Tensor:
    """Values (n, B, B) of (a · b) ⊙ act'(pre) at the used blocks."""
    return sdd_values(a, b, blocks, Epilogue(activation, pre=pre))


def _fake_sparse_mlp(a: Any) -> tuple[Tensor | None, ...]:
    pre, gate, act = (empty_values(a.blocks, a.x) for _ in range(3))
    y = a.x.new_empty(a.x.shape[0], a.w2.shape[1])
    return y, pre, None if a.v1 is None else gate, None if a.recompute else act


@custom_op("megablocks::sparse_mlp", fake=_fake_sparse_mlp)
def sparse_mlp_op(
    x: Tensor, w1: Tensor, v1: Tensor | None, w2: Tensor, bias: Tensor | None, gate_bias: Tensor | None,
    blocks: Blocks, activation: Activation, recompute: bool, input_bits: int, pre_bits: int,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """(y, Z, G, A); G is empty for an ungated activation, A with `recompute`."""
    if v1 is None:
        act, gate = empty_values(blocks, x), None
        pre = sdd_values(x, w1, blocks, Epilogue(activation, bias, act))
    else:
        pre = _add_bias(sdd_values(x, w1, blocks), bias, blocks)
        gate = _add_bias(sdd_values(x, v1, blocks), gate_bias, blocks)
        act = activation_op.implementation(pre, gate, activation)
    y = spmm_op.implementation(act, w2, blocks, True, False)
    return y, pre, gate, None if recompute else act


def _add_bias(values: Tensor, bias: Tensor | None, blocks: Blocks) -> Tensor:
    """values (n, B, B) + bias (N,) by column, in place. The contents of unused blocks stay unspecified."""
    if bias is None:
        return values
    by_block = bias.to(values.dtype).view(-1, 1, blocks.block_size)
    return values.add_(by_block.index_select(0, blocks.column_indices.clamp(min=0)))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, w1, v1, w2, _, _, blocks, ctx.activation, ctx.recompute, input_bits, pre_bits = inputs
    _, pre, gate, act = output
    need_x, need_w1, need_v1, need_w2, need_bias, need_gate_bias = ctx.needs_input_grad[:6]
    ctx.transposed, ctx.rows = w1.stride(0) == 1 and w1.stride(1) != 1, x.shape[0]
    *indices, ctx.block_size, ctx.run = blocks
    ctx.mark_non_differentiable(pre, gate, act)
    ctx.set_materialize_grads(False)
    need_hidden = need_x or need_w1 or need_v1 or need_bias or need_gate_bias
    need_pre = need_hidden or (need_w2 and ctx.recompute)

    def keep(t: Tensor | None, num_bits: int) -> Any:
        return (None, t, None) if num_bits == OFF else pack(t, num_bits)

    ctx.packed_x, *kept_x = keep(x if need_w1 or need_v1 else None, input_bits)
    ctx.packed_pre, *kept_pre = keep(pre if need_pre else None, pre_bits)
    ctx.packed_gate, *kept_gate = keep(gate if need_pre and v1 is not None else None, pre_bits)
    weights = (w1 if need_x else None, v1 if need_x else None, w2 if need_hidden else None)
    ctx.save_for_backward(*kept_x, *kept_pre, *kept_gate, act if need_w2 else None, *weights, *indices)


@once_differentiable
def _backward(ctx: Any, dy: Tensor | None, *_: Any) -> tuple[Any, ...]:
    need_x, need_w1, need_v1, need_w2, need_bias, need_gate_bias = ctx.needs_input_grad[:6]
    if dy is None:
        return (None,) * 11
    saved = ctx.saved_tensors
    act, w1, v1, w2, *indices = saved[6:]
    x, pre, gate = (
        unpack(how, *saved[i : i + 2]) for i, how in ((0, ctx.packed_x), (2, ctx.packed_pre), (4, ctx.packed_gate))
    )
    blocks = Blocks._make((*indices, ctx.block_size, ctx.run))
    dx = dw1 = dv1 = dw2 = dbias = dgate_bias = None

    def weight_gradient(d_values: Tensor) -> Tensor:
        assert x is not None
        # if W is stored as its transpose, so is the gradient; otherwise the parameter would copy it
        if ctx.transposed:
            return spmm_op(d_values, x, blocks, True, True).t()
        return spmm_op(d_values, x.t(), blocks, False, True)

    def bias_gradient(d_values: Tensor) -> Tensor:
        ones = torch.ones(1, ctx.rows, dtype=d_values.dtype, device=d_values.device)
        return spmm_op(d_values, ones, blocks, False, True)[0]

    if need_x or need_w1 or need_v1 or need_bias or need_gate_bias:
        if ctx.activation.gated:
            d_act = sdd_op(dy, w2.t(), blocks)
            d_pre, d_gate = activation_backward_op(d_act, pre, gate, ctx.activation)
            dv1 = weight_gradient(d_gate) if need_v1 else None
            dgate_bias = bias_gradient(d_gate) if need_gate_bias else None
        else:
            d_pre = sdd_slope_op(dy, w2.t(), pre, blocks, ctx.activation)
        dx = spmm_op(d_pre, w1.t(), blocks, True, False) if need_x else None
        if need_x and ctx.activation.gated:
            dx = dx + spmm_op(d_gate, v1.t(), blocks, True, False)
        dw1 = weight_gradient(d_pre) if need_w1 else None
        dbias = bias_gradient(d_pre) if need_bias else None
    if need_w2:
        act = activation_op(pre, gate, ctx.activation) if ctx.recompute else act
        dw2 = spmm_op(act, dy, blocks, True, True)
    return dx, dw1, dv1, dw2, dbias, dgate_bias, None, None, None, None, None


sparse_mlp_op.register_autograd(_backward, setup_context=_save)


def sparse_mlp(
    x: Tensor, w1: Tensor, w2: Tensor, pattern: Matrix, *, v1: Tensor | None = None, bias: Tensor | None = None,
    gate_bias: Tensor | None = None, activation: Activation, recompute: bool = False, input_bits: int = OFF,
    pre_bits: int = OFF,
) -> Tensor:  # fmt: skip
    """act(x · w1 + bias) · w2, or (act(x · w1 + bias) ⊙ (x · v1 + gate_bias)) · w2, at the used blocks of `pattern`.

    Args:
        x: (M, H), w1, v1: (H, N), w2: (N, O), of one dtype: bfloat16, float16 or float32 (float64 on the CPU), any
            strides; v1 has w1's. The gradients of w1 and v1 have their strides, those of w2 are contiguous.
        pattern: Matrix (M, N), as `topology` makes it; not a transposed view.
        v1: for a gated activation, which needs it.
        bias, gate_bias: (N,) or None; gate_bias with v1 only.
        recompute: save only the pre-activations and compute the activation again in backward: M·N/E fewer values.
        input_bits: 4 or 8 save x quantized (`ops.quant`) for the gradients of w1 and v1; -1 saves it as it is.
        pre_bits: the same for the pre-activations; implies recompute.

    Returns:
        (M, O); zero in block rows without blocks. Differentiable in x, w1, v1, w2 and the biases.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit, a gate missing or unwanted, a transposed pattern.
    """
    x, w1, v1, w2 = under_autocast(x, w1, v1, w2)
    rows, columns = pattern.shape
    check_activation(x, None if v1 is None else x, activation, "v1")
    if pattern.transposed:
        raise ValueError("pattern is a transposed view: give the pattern as topology made it")
    check_dense("x", x, (rows, None), x, "x")
    for what, w in (("w1", w1), ("v1", v1)):
        if w is not None:
            check_dense(what, w, (x.shape[1], columns), x, "x")
    check_dense("w2", w2, (columns, None), x, "x")
    if gate_bias is not None and v1 is None:
        raise ValueError(f"gate_bias is given for activation={activation.name!r}, which has no gate")
    for what, b in (("bias", bias), ("gate_bias", gate_bias)):
        if b is not None and (tuple(b.shape) != (columns,) or b.device != x.device):
            raise ValueError(f"{what} is {tuple(b.shape)} on {b.device}, must be ({columns},) on {x.device}")
    check_device(pattern, x)
    bias, gate_bias = (None if b is None else b.contiguous() for b in (bias, gate_bias))
    recompute = recompute or pre_bits != OFF
    return sparse_mlp_op(
        x, w1, v1, w2, bias, gate_bias, pattern.blocks, activation, recompute, input_bits, pre_bits
    )[0]  # fmt: skip
