"""Products with block-sparse matrices: SDD, DSD and DDS, in every transposition, with their gradients.

    sdd(a, b, pattern)   S = (a · b) at the used blocks of the pattern        S: Matrix
    dsd(s, d)            O = s · d, dds(d, s)  O = d · s; s may be a transposed view

The letters say sparse or dense for output, left and right (Gale et al., MegaBlocks, arXiv 2211.15841, section 5.1).
Sums are float32 (float64 for float64), in an order that depends only on the pattern, so reruns are bit-identical.
The same six kernels make up forward and backward of an expert MLP: y = dsd(act(sdd(x, w1ᵀ)), w2).

Not read: values and rows of unused blocks. Not written: values of unused blocks. Lines of a dense result whose block
row or column is empty are zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megablocks.ops.activation import activation_backward_ref, activation_ref
from megablocks.ops.activation_table import Activation
from megablocks.ops.hopper import kernels_for
from megablocks.ops.library import custom_op, under_autocast

from .matrix import Blocks, Matrix

# Number of blocks whose operands a reference holds at a time.
_REF_CHUNK = 256


@dataclass(frozen=True)
class Epilogue:
    """What sdd does to its result before it writes it: bias and activation, or in backward the activation's slope.

    activation: not gated.
    bias: (N,), added to the result, or None.
    act: (n, B, B), to which the activation of the result is written, or None.
    pre: (n, B, B); the result is multiplied by act'(pre); or None.
    """

    activation: Activation = Activation("gelu")
    bias: Tensor | None = None
    act: Tensor | None = None
    pre: Tensor | None = None


NONE = Epilogue()


def _blocks_of(t: Tensor, dim: int, block_size: int) -> Tensor:
    """t split into blocks along `dim`; the blocks come first: (blocks, …, block_size, …)."""
    return t.unflatten(dim, (-1, block_size)).movedim(dim, 0)


def sdd_ref(a: Tensor, b: Tensor, blocks: Blocks, epilogue: Epilogue = NONE) -> Tensor:
    """a (M, K), b (K, N) → values (n, B, B), rounded once; zero in unused blocks. Fills `epilogue.act`."""
    acc, size = torch.promote_types(a.dtype, torch.float32), blocks.block_size
    columns = blocks.column_indices.clamp(min=0).long()
    left, right = _blocks_of(a.to(acc), 0, size), _blocks_of(b.to(acc), 1, size)
    out = torch.zeros(columns.shape[0], size, size, dtype=acc, device=a.device)
    for i in torch.nonzero(blocks.row_indices >= 0)[:, 0].split(_REF_CHUNK):
        out[i] = left[blocks.row_indices[i].long()] @ right[columns[i]]
    if epilogue.pre is not None:
        return activation_backward_ref(out, epilogue.pre.to(acc), None, epilogue.activation)[0].to(a.dtype)
    if epilogue.bias is not None:
        out += epilogue.bias.to(acc).view(-1, 1, size)[columns]
    pre = out.to(a.dtype)
    if epilogue.act is not None:
        epilogue.act.copy_(activation_ref(pre, None, epilogue.activation))
    return pre


def spmm_ref(data: Tensor, dense: Tensor, blocks: Blocks, sparse_left: bool, by_column: bool) -> Tensor:
    """data (n, B, B) of S, dense D → as `spmm_op`: the lines of S are its block rows, or by_column its columns."""
    acc, size = torch.promote_types(data.dtype, torch.float32), blocks.block_size
    lines, others = blocks.row_indices, blocks.column_indices
    if by_column:
        lines, others = others, lines
    # one orientation: lines come first, O (lines·B, N) = Σ block (line, reduction) · dense (reduction, N)
    wide = (dense if sparse_left else dense.t()).to(acc)
    values = data.transpose(1, 2) if by_column else data
    right = _blocks_of(wide, 0, size)
    num_lines = (blocks.offsets_t if by_column else blocks.offsets).shape[0] - 1
    out = torch.zeros(num_lines, size, wide.shape[1], dtype=acc, device=data.device)
    for i in torch.nonzero(blocks.row_indices >= 0)[:, 0].split(_REF_CHUNK):
        out.index_add_(0, lines[i].long(), values[i].to(acc) @ right[others[i].long()])
    out = out.flatten(0, 1).to(data.dtype)
    return out if sparse_left else out.t().contiguous()


def _values(sparse: Matrix) -> Tensor:
    """The values of a matrix, which must have some."""
    if sparse.data is None:
        raise ValueError("sparse is a pattern without data: give it values with with_data, or make it by sdd")
    return sparse.data


def _strided(t: Tensor) -> Tensor:
    """t, or a copy if neither dimension is contiguous (such as a stride of zero, as in an expanded gradient)."""
    return t if 1 in t.stride() and min(t.stride()) > 0 else t.contiguous()


hopper_kernels = partial(kernels_for, "megablocks.ops.sparse.products_hopper")


def sdd_values(a: Tensor, b: Tensor, blocks: Blocks, epilogue: Epilogue = NONE) -> Tensor:
    """Values (n, B, B) of a · b at the used blocks, by whichever implementation fits; not differentiable."""
    if not a.is_cuda:
        return sdd_ref(a, b, blocks, epilogue)
    a, b = _strided(a), _strided(b)
    if (hopper := hopper_kernels(a)) and hopper.supports(blocks.block_size, a, b):
        return hopper.sdd(a, b, blocks, epilogue)
    from . import kernels

    return kernels.sdd(a, b, blocks, epilogue)


def empty_values(blocks: Blocks, like: Tensor) -> Tensor:
    """Unset values (n, B, B) in the dtype of `like`."""
    return like.new_empty(blocks.row_indices.shape[0], blocks.block_size, blocks.block_size)


@custom_op("megablocks::sparse_sdd", fake=lambda a: empty_values(a.blocks, a.a))
def sdd_op(a: Tensor, b: Tensor, blocks: Blocks) -> Tensor:
    return sdd_values(a, b, blocks)


def empty_result(data: Tensor, dense: Tensor, lines: int, sparse_left: bool) -> Tensor:
    """The unset product of `dense` with blocks that form this many lines, in the dtype of data."""
    return data.new_empty((lines, dense.shape[1]) if sparse_left else (dense.shape[0], lines))


def _lines(blocks: Blocks, by_column: bool) -> int:
    return blocks.lines(by_column)[0].shape[0] * blocks.block_size


@custom_op(
    "megablocks::sparse_spmm",
    fake=lambda a: empty_result(a.data, a.dense, _lines(a.blocks, a.by_column), a.sparse_left),
)
def spmm_op(data: Tensor, dense: Tensor, blocks: Blocks, sparse_left: bool, by_column: bool) -> Tensor:
    """S·D, or Sᵀ·D by_column; without sparse_left D·Sᵀ, or D·S by_column."""
    if not data.is_cuda:
        return spmm_ref(data, dense, blocks, sparse_left, by_column)
    data, dense = data.contiguous(), _strided(dense)
    if data.shape[0] == 0:  # the Triton kernel would be compiled on Hopper only for this case
        return empty_result(data, dense, _lines(blocks, by_column), sparse_left).zero_()
    # TMA writes rows of the result on 16 bytes; those of D·S are whole blocks
    aligned = not sparse_left or dense.shape[1] % 8 == 0
    if aligned and (hopper := hopper_kernels(data)) and hopper.supports(blocks.block_size, data, dense):
        return hopper.spmm(data, dense, *blocks.lines(by_column), sparse_left)
    from . import kernels

    return kernels.spmm(data, dense, *blocks.lines(by_column), sparse_left)


def _save_sdd(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    a, b, blocks = inputs
    *indices, ctx.block_size, ctx.run = blocks
    ctx.save_for_backward(a, b, *indices)


def _sdd_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    a, b, *indices = ctx.saved_tensors
    blocks = Blocks._make((*indices, ctx.block_size, ctx.run))
    # dA = dS·Bᵀ, dB = Aᵀ·dS
    d_a = spmm_op(grad, b.t(), blocks, True, False) if ctx.needs_input_grad[0] else None
    d_b = spmm_op(grad, a.t(), blocks, False, True) if ctx.needs_input_grad[1] else None
    return d_a, d_b, None


sdd_op.register_autograd(_sdd_backward, setup_context=_save_sdd)


def _save_spmm(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    data, dense, blocks, ctx.sparse_left, ctx.by_column = inputs
    *indices, ctx.block_size, ctx.run = blocks
    ctx.save_for_backward(data, dense, *indices)


def _spmm_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    data, dense, *indices = ctx.saved_tensors
    blocks, d_data, d_dense = Blocks._make((*indices, ctx.block_size, ctx.run)), None, None
    if ctx.needs_input_grad[0]:
        # O = S·D: dO·Dᵀ;  O = Sᵀ·D: D·dOᵀ;  O = D·S: Dᵀ·dO;  O = D·Sᵀ: dOᵀ·D
        if ctx.sparse_left:
            left, right = (dense, grad.t()) if ctx.by_column else (grad, dense.t())
        else:
            left, right = (dense.t(), grad) if ctx.by_column else (grad.t(), dense)
        d_data = sdd_op(left, right, blocks)
    if ctx.needs_input_grad[1]:
        d_dense = spmm_op(data, grad, blocks, ctx.sparse_left, not ctx.by_column)
    return d_data, d_dense, None, None, None


spmm_op.register_autograd(_spmm_backward, setup_context=_save_spmm)


def check_dense(name: str, t: Tensor, shape: tuple[int | None, int | None], like: Tensor, like_name: str) -> None:
    wanted = tuple("any" if n is None else n for n in shape)
    if t.dim() != 2 or any(n is not None and n != m for n, m in zip(shape, t.shape, strict=True)):
        raise ValueError(f"{name} is {tuple(t.shape)}, must be ({wanted[0]}, {wanted[1]})")
    if t.dtype != like.dtype or t.device != like.device:
        raise ValueError(f"{name} is {t.dtype} on {t.device}, must be {like.dtype} on {like.device} as {like_name} is")
    if t.is_cuda and t.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(f"{name} is {t.dtype}, must be torch.bfloat16, torch.float16 or torch.float32 on a GPU")


def sdd(a: Tensor, b: Tensor, pattern: Matrix) -> Matrix:
    """a · b at the used blocks of `pattern`.

    Args:
        a: (M, K), b: (K, N): bfloat16, float16 or float32 (float64 on the CPU); any strides, transposed views are free.
        pattern: Matrix (M, N), whose values, if any, are ignored.

    Returns:
        Matrix (M, N) over the same pattern. Unused blocks are unspecified.

    Raises:
        ValueError: shapes that do not fit, unequal or unsupported dtypes, tensors on different devices.
    """
    a, b = under_autocast(a, b)
    rows, columns = pattern.shape
    check_dense("a", a, (rows, None), a, "a")
    check_dense("b", b, (a.shape[1], columns), a, "a")
    check_device(pattern, a)
    if pattern.transposed:
        a, b = b.t(), a.t()
    return pattern.with_data(sdd_op(a, b, pattern.blocks))


def dsd(sparse: Matrix, dense: Tensor) -> Tensor:
    """sparse (M, K) · dense (K, N) → (M, N), contiguous; empty block rows give zero rows.

    Args and errors as `sdd`; `sparse` may be a transposed view, `dense` of any strides.
    """
    data, dense = under_autocast(_values(sparse), dense)
    check_device(sparse, dense)
    check_dense("dense", dense, (sparse.shape[1], None), data, "sparse")
    return spmm_op(data, dense, sparse.blocks, True, sparse.transposed)


def dds(dense: Tensor, sparse: Matrix) -> Tensor:
    """dense (M, K) · sparse (K, N) → (M, N), contiguous; empty block columns give zero columns.

    Args and errors as `sdd`; `sparse` may be a transposed view, `dense` of any strides.
    """
    data, dense = under_autocast(_values(sparse), dense)
    check_device(sparse, dense)
    check_dense("dense", dense, (None, sparse.shape[0]), data, "sparse")
    return spmm_op(data, dense, sparse.blocks, False, not sparse.transposed)


def check_device(matrix: Matrix, t: Tensor) -> None:
    if matrix.device != t.device:
        raise ValueError(f"the block indices are on {matrix.device}, must be on {t.device} as the dense operand is")
