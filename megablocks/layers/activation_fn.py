"""Apply a function to the values of a block-sparse matrix, under megablocks 0.10's name.

A matrix here is a `megablocks.ops.sparse.Matrix` or stanford-stk's. A result has the same class as its argument.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megablocks.ops.sparse.matrix import Matrix


def is_matrix(x: object) -> bool:
    """Return whether x is a block-sparse matrix, our class or stanford-stk's."""
    return isinstance(x, Matrix) or (hasattr(x, "block_offsets_t") and hasattr(x, "data"))


def with_values(matrix: Any, data: Tensor) -> Any:
    """Return a matrix with the same class and pattern, and with the values `data`, n blocks (n, B, B)."""
    if isinstance(matrix, Matrix):
        return matrix.with_data(data)
    by_column = matrix.column_indices_t, matrix.offsets_t, matrix.block_offsets_t
    return type(matrix)(matrix.size(), data, matrix.row_indices, matrix.column_indices, matrix.offsets, *by_column)


def act_fn(
    x: Any, function: Callable[..., Tensor], return_grad_fn: bool = False, **kwargs: Any
) -> Any | tuple[Any, Callable[..., None]]:
    """Return a matrix with the pattern of x and the values function(values of x, **kwargs).

    Args:
        return_grad_fn: also return a function that accepts the gradient of the result's values and adds the gradient
            of x's values to `x.data.grad`. The graph for it is built even if gradients are off.

    Returns:
        a matrix, or (matrix, function).

    Raises:
        ValueError: x is not a block-sparse matrix.
    """
    if not is_matrix(x):
        raise ValueError(f"x is a {type(x).__name__}: must be a block-sparse Matrix")
    with torch.set_grad_enabled(torch.is_grad_enabled() or return_grad_fn):
        if return_grad_fn:
            x.data.requires_grad_()
        out = function(x.data, **kwargs)
    y = with_values(x, out)
    return (y, out.backward) if return_grad_fn else y
