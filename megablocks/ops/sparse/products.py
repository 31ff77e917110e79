"""Products with block-sparse matrices: SDD, DSD and DDS, in every transposition, with their gradients.

    sdd(a, b, pattern)   S = (a · b) at the used blocks of the pattern        S: Matrix
    dsd(s, d)            O = s · d, dds(d, s)  O = d · s; s may be a transposed view

The letters say sparse or dense for output, left and right (Gale et al., MegaBlocks, arXiv 2211.15841, section 5.1).
Sums are float32 (float64 for float64), in an order that depends on the pattern alone, so reruns are bit-identical.
The same six kernels make up forward and backward of an expert MLP: y = dsd(act(sdd(x, w1ᵀ)), w2).

Not read: values and rows of unused blocks. Not written: values of unused blocks. Lines of a dense result whose block
row or column is empty are zero.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megablocks.ops.activation import activation_backward_ref, activation_ref
from megablocks.ops.dtypes import accumulation_dtype
from megablocks.ops.grouped.grouped_mm import under_autocast
from megablocks.ops.library import custom_op

from . import hopper
from .epilogue import NONE, Epilogue
from .matrix import Matrix

# How many blocks' operands a reference holds at a time.
_REF_CHUNK = 256


def _blocks_of(t: Tensor, dim: int, block_size: int) -> Tensor:
    """t cut into blocks along `dim`, which comes first: (blocks, …, block_size, …)."""
    return t.unflatten(dim, (-1, block_size)).movedim(dim, 0)


def _sdd_ref(a: Tensor, b: Tensor, row_indices: Tensor, column_indices: Tensor, block_size: int) -> Tensor:
    acc = accumulation_dtype(a.dtype)
    left, right = _blocks_of(a.to(acc), 0, block_size), _blocks_of(b.to(acc), 1, block_size)
    out = torch.zeros(row_indices.shape[0], block_size, block_size, dtype=a.dtype, device=a.device)
    used = torch.nonzero(row_indices >= 0)[:, 0]
    for i in used.split(_REF_CHUNK):
        out[i] = (left[row_indices[i].long()] @ right[column_indices[i].long()]).to(a.dtype)
    return out


def _finished_ref(
    a: Tensor, b: Tensor, row_indices: Tensor, column_indices: Tensor, block_size: int, epilogue: Epilogue
) -> Tensor:
    """_sdd_ref and an epilogue, whose `act` it fills; rounded once."""
    if not epilogue.kind:
        return _sdd_ref(a, b, row_indices, column_indices, block_size)
    dtype, acc, name = a.dtype, accumulation_dtype(a.dtype), epilogue.name
    approximate = "none" if epilogue.exact else "tanh"
    out = _sdd_ref(a.to(acc), b.to(acc), row_indices, column_indices, block_size)
    if epilogue.kind == "slope":
        assert epilogue.pre is not None
        return activation_backward_ref(out, epilogue.pre.to(acc), None, name, approximate)[0].to(dtype)
    if epilogue.bias is not None:
        out += epilogue.bias.to(acc).view(-1, 1, block_size)[column_indices.clamp(min=0).long()]
    pre = out.to(dtype)
    assert epilogue.act is not None
    epilogue.act.copy_(activation_ref(pre, None, name, approximate))
    return pre


def _spmm_ref(data: Tensor, dense: Tensor, indices: list[Tensor], sparse_left: bool, by_column: bool) -> Tensor:
    row_indices, column_indices, offsets, _, offsets_t = indices[:5]
    acc, block_size = accumulation_dtype(data.dtype), data.shape[-1]
    lines, others = (column_indices, row_indices) if by_column else (row_indices, column_indices)
    num_lines = (offsets_t if by_column else offsets).shape[0] - 1
    # one orientation: lines come first, O (lines·B, size) = Σ block (line, reduction) · dense (reduction, size)
    wide = (dense if sparse_left else dense.t()).to(acc)
    blocks = data.transpose(1, 2) if by_column else data
    right = _blocks_of(wide, 0, block_size)
    out = torch.zeros(num_lines, block_size, wide.shape[1], dtype=acc, device=data.device)
    for i in torch.nonzero(row_indices >= 0)[:, 0].split(_REF_CHUNK):
        out.index_add_(0, lines[i].long(), blocks[i].to(acc) @ right[others[i].long()])
    out = out.flatten(0, 1).to(data.dtype)
    return out if sparse_left else out.t().contiguous()


def sdd_ref(a: Tensor, b: Tensor, pattern: Matrix) -> Matrix:
    """sdd in plain torch; unused blocks are zero."""
    if pattern.transposed:
        return sdd_ref(b.t(), a.t(), pattern.t()).t()
    return pattern.with_data(_sdd_ref(a, b, pattern.row_indices, pattern.column_indices, pattern.block_size))


def dsd_ref(sparse: Matrix, dense: Tensor) -> Tensor:
    """dsd in plain torch."""
    return _spmm_ref(_values(sparse), dense, list(sparse.indices), True, sparse.transposed)


def dds_ref(dense: Tensor, sparse: Matrix) -> Tensor:
    """dds in plain torch."""
    return _spmm_ref(_values(sparse), dense, list(sparse.indices), False, not sparse.transposed)


def _values(sparse: Matrix) -> Tensor:
    if sparse.data is None:
        raise ValueError("sparse is a pattern without data: give it values with with_data, or make it by sdd")
    return sparse.data


def _strided(t: Tensor) -> Tensor:
    """t, copied if neither dimension is contiguous (a stride of zero, as in an expanded gradient, included)."""
    return t if 1 in t.stride() and min(t.stride()) > 0 else t.contiguous()


def sdd_values(
    a: Tensor, b: Tensor, indices: list[Tensor], block_size: int, run: int, epilogue: Epilogue = NONE
) -> Tensor:
    """Values (n, B, B) of a · b at the used blocks, by whichever implementation fits; not differentiable."""
    row_indices, column_indices, offsets = indices[:3]
    if not a.is_cuda:
        with torch.autocast(a.device.type, enabled=False):  # or torch would narrow the reference's own products
            return _finished_ref(a, b, row_indices, column_indices, block_size, epilogue)
    a, b = _strided(a), _strided(b)
    if hopper.supports(block_size, a, b):
        return hopper.sdd(a, b, row_indices, column_indices, offsets, run, epilogue)
    from . import kernels

    return kernels.sdd(a, b, row_indices, column_indices, offsets, block_size, epilogue)


@custom_op("megablocks::sparse_sdd", mutates_args=())
def sdd_op(a: Tensor, b: Tensor, indices: list[Tensor], block_size: int, run: int) -> Tensor:
    return sdd_values(a, b, indices, block_size, run)


@sdd_op.register_fake
def _(a: Tensor, b: Tensor, indices: list[Tensor], block_size: int, run: int) -> Tensor:
    return a.new_empty(indices[0].shape[0], block_size, block_size)


@custom_op("megablocks::sparse_spmm", mutates_args=())
def spmm_op(data: Tensor, dense: Tensor, indices: list[Tensor], sparse_left: bool, by_column: bool, run: int) -> Tensor:
    if not data.is_cuda:
        with torch.autocast(data.device.type, enabled=False):
            return _spmm_ref(data, dense, indices, sparse_left, by_column)
    _, column_indices, _, column_indices_t, _, block_offsets_t, row_work, column_work = indices
    data, dense = data.contiguous(), _strided(dense)
    work, index = (column_work, column_indices_t) if by_column else (row_work, column_indices)
    places = block_offsets_t if by_column else None
    if data.shape[0] == 0:  # not by the Triton kernel, which nothing but a count of zero would compile on Hopper
        return data.new_zeros(_spmm_shape(data, dense, work, sparse_left))
    # TMA writes rows of the result on 16 bytes; those of D·S are whole blocks
    aligned = not sparse_left or dense.shape[1] % 8 == 0
    if aligned and hopper.supports(data.shape[-1], data, dense):
        tile = hopper.choose_spmm(column_work.shape[0], sparse_left, by_column)
        return hopper.spmm(data, dense, work, index, places, sparse_left, tile=tile)
    from . import kernels

    return kernels.spmm(data, dense, work, index, places, sparse_left)


@spmm_op.register_fake
def _(data: Tensor, dense: Tensor, indices: list[Tensor], sparse_left: bool, by_column: bool, run: int) -> Tensor:
    return data.new_empty(_spmm_shape(data, dense, indices[7 if by_column else 6], sparse_left))


def _spmm_shape(data: Tensor, dense: Tensor, work: Tensor, sparse_left: bool) -> tuple[int, int]:
    lines = work.shape[0] * data.shape[-1]
    return (lines, dense.shape[1]) if sparse_left else (dense.shape[0], lines)


def _save_sdd(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    a, b, indices, ctx.block_size, ctx.run = inputs
    ctx.save_for_backward(a, b, *indices)


def _sdd_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    a, b, *indices = ctx.saved_tensors
    # dA = dS·Bᵀ, dB = Aᵀ·dS
    d_a = spmm_op(grad, b.t(), indices, True, False, ctx.run) if ctx.needs_input_grad[0] else None
    d_b = spmm_op(grad, a.t(), indices, False, True, ctx.run) if ctx.needs_input_grad[1] else None
    return d_a, d_b, [None] * len(indices), None, None


sdd_op.register_autograd(_sdd_backward, setup_context=_save_sdd)


def _save_spmm(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    data, dense, indices, ctx.sparse_left, ctx.by_column, ctx.run = inputs
    ctx.save_for_backward(data, dense, *indices)


def _spmm_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    data, dense, *indices = ctx.saved_tensors
    d_data = d_dense = None
    if ctx.needs_input_grad[0]:
        # O = S·D: dO·Dᵀ;  O = Sᵀ·D: D·dOᵀ;  O = D·S: Dᵀ·dO;  O = D·Sᵀ: dOᵀ·D
        if ctx.sparse_left:
            left, right = (dense, grad.t()) if ctx.by_column else (grad, dense.t())
        else:
            left, right = (dense.t(), grad) if ctx.by_column else (grad.t(), dense)
        d_data = sdd_op(left, right, indices, data.shape[-1], ctx.run)
    if ctx.needs_input_grad[1]:
        d_dense = spmm_op(data, grad, indices, ctx.sparse_left, not ctx.by_column, ctx.run)
    return d_data, d_dense, [None] * len(indices), None, None, None


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
    return pattern.with_data(sdd_op(a, b, list(pattern.indices), pattern.block_size, pattern.run))


def dsd(sparse: Matrix, dense: Tensor) -> Tensor:
    """sparse (M, K) · dense (K, N) → (M, N), contiguous; empty block rows give zero rows.

    Args and errors as `sdd`; `sparse` may be a transposed view, `dense` of any strides.
    """
    data, dense = under_autocast(_values(sparse), dense)
    check_device(sparse, dense)
    check_dense("dense", dense, (sparse.shape[1], None), data, "sparse")
    return spmm_op(data, dense, list(sparse.indices), True, sparse.transposed, sparse.run)


def dds(dense: Tensor, sparse: Matrix) -> Tensor:
    """dense (M, K) · sparse (K, N) → (M, N), contiguous; empty block columns give zero columns.

    Args and errors as `sdd`; `sparse` may be a transposed view, `dense` of any strides.
    """
    data, dense = under_autocast(_values(sparse), dense)
    check_device(sparse, dense)
    check_dense("dense", dense, (None, sparse.shape[0]), data, "sparse")
    return spmm_op(data, dense, list(sparse.indices), False, not sparse.transposed, sparse.run)


def check_device(matrix: Matrix, t: Tensor) -> None:
    if matrix.device != t.device:
        raise ValueError(f"the block indices are on {matrix.device}, must be on {t.device} as the dense operand is")
