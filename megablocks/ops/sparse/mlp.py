"""An expert MLP of block-sparse products, with bias and activation in the first one's epilogue.

    forward    Z = x·W1 + b, A = act(Z)  one sdd, which writes both      y  = A·W2            dsd
    backward   dZ = (dy·W2ᵀ) ⊙ act'(Z)   one sdd, which reads Z          dW2 = Aᵀ·dy          dst_d
               db = Σ rows of dZ  dds of a row of ones                   dx = dZ·W1ᵀ, dW1 = xᵀ·dZ   dsd_t, ddt_s

Z, A and dZ are block-sparse over one pattern. Apart, activation and bias would read and write Z twice more forward, and
dA, Z and dZ once each backward. Source: Gale et al., MegaBlocks (arXiv 2211.15841), section 5.1; the fusion is ours.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megablocks.ops.activation import UNARY, check_activation
from megablocks.ops.grouped.grouped_mm import under_autocast
from megablocks.ops.library import custom_op

from .epilogue import Epilogue
from .matrix import Matrix
from .products import check_dense, check_device, sdd_values, spmm_op


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
    x: Tensor, w1: Tensor, bias: Tensor | None, w2: Tensor, indices: list[Tensor], block_size: int, run: int, name: str,
    approximate: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    pre, act = sdd_activate_op(x, w1, bias, indices, block_size, run, name, approximate)
    return spmm_op(act, w2, indices, True, False, run), pre, act


@sparse_mlp_op.register_fake
def _(
    x: Tensor, w1: Tensor, bias: Tensor | None, w2: Tensor, indices: list[Tensor], block_size: int, run: int, name: str,
    approximate: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    pre, act = _room(indices, block_size, x), _room(indices, block_size, x)
    return x.new_empty(x.shape[0], w2.shape[1]), pre, act


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, w1, bias, w2, indices, ctx.block_size, ctx.run, ctx.name, ctx.approximate = inputs
    _, pre, act = output
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.mark_non_differentiable(pre, act)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, w1, w2, pre, act, *indices)


def _backward(ctx: Any, dy: Tensor | None, *_: Any) -> tuple[Any, ...]:
    x, w1, w2, pre, act, *indices = ctx.saved_tensors
    need_x, need_w1, need_bias, need_w2 = ctx.needs_input_grad[:4]
    dx = dw1 = dbias = dw2 = None
    if dy is not None and (need_x or need_w1 or need_bias):
        d_pre = sdd_slope_op(dy, w2.t(), pre, indices, ctx.block_size, ctx.run, ctx.name, ctx.approximate)
        dx = spmm_op(d_pre, w1.t(), indices, True, False, ctx.run) if need_x else None
        dw1 = spmm_op(d_pre, x.t(), indices, False, True, ctx.run) if need_w1 else None
        if need_bias:
            ones = x.new_ones(1, x.shape[0])
            dbias = spmm_op(d_pre, ones, indices, False, True, ctx.run)[0].to(ctx.bias_dtype)
    if dy is not None and need_w2:
        dw2 = spmm_op(act, dy, indices, True, True, ctx.run)
    return dx, dw1, dbias, dw2, [None] * len(indices), None, None, None, None


sparse_mlp_op.register_autograd(_backward, setup_context=_save)


def sparse_mlp(
    x: Tensor, w1: Tensor, w2: Tensor, pattern: Matrix, *, bias: Tensor | None = None, activation: str = "gelu",
    approximate: str = "tanh",
) -> Tensor:  # fmt: skip
    """act(x · w1 + bias) · w2, where x · w1 is taken at the used blocks of `pattern`.

    Args:
        x: (M, H), w1: (H, N), w2: (N, O), of one dtype: bfloat16, float16 or float32 (float64 on the CPU), any strides.
        pattern: Matrix (M, N), as `topology` makes it; not a transposed view.
        bias: (N,) or None.
        activation, approximate: one of "gelu", "silu", "relu", "relu2", and gelu's form. Gated ones are two sdd and
            `activate`.

    Returns:
        (M, O); zero in block rows without blocks. Differentiable in x, w1, w2 and bias.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit, a gated activation, a transposed pattern.
    """
    x, w1, w2 = under_autocast(x, w1, w2)
    rows, columns = pattern.shape
    if activation not in UNARY:
        raise ValueError(
            f"activation={activation!r}: must be one of {', '.join(UNARY)}; gated ones are made of two sdd"
        )
    check_activation(x, None, activation, approximate)
    if pattern.transposed:
        raise ValueError("pattern is a transposed view: give the pattern as topology made it")
    check_dense("x", x, (rows, None), x, "x")
    check_dense("w1", w1, (x.shape[1], columns), x, "x")
    check_dense("w2", w2, (columns, None), x, "x")
    if bias is not None and (tuple(bias.shape) != (columns,) or bias.device != x.device):
        raise ValueError(f"bias is {tuple(bias.shape)} on {bias.device}, must be ({columns},) on {x.device}")
    check_device(pattern, x)
    bias = None if bias is None else bias.contiguous()
    indices = list(pattern.indices)
    return sparse_mlp_op(x, w1, bias, w2, indices, pattern.block_size, pattern.run, activation, approximate)[0]
