"""GELU (its tanh form) of block-sparse matrices, and its in-place gradient, under megablocks 0.10's names."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from megablocks.layers.activation_fn import act_fn, is_matrix, with_values


def gelu(x: Any) -> Any:
    """Return a matrix with the pattern of x and the gelu of its values.

    Raises:
        ValueError: x is not a block-sparse matrix.
    """
    return act_fn(x, F.gelu, approximate="tanh")


def gelu_backward_(grad: Any, x: Any) -> Any:
    """Write grad ⊙ gelu'(x) over grad's values: two matrices with one pattern, or two tensors of one shape."""
    if is_matrix(grad) and is_matrix(x):
        return with_values(x, gelu_backward_(grad.data, x.data))
    return grad.copy_(torch.ops.aten.gelu_backward(grad, x, approximate="tanh"))
