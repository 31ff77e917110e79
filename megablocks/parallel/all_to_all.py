"""An all-to-all of rows with uneven splits that autograd can go through, and a gradient scale.

The collective is called on every rank in forward and, when the input needs a gradient, in backward, whatever the
number of rows: a rank that returned early on zero rows would leave the others waiting.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, send: Sequence[int], receive: Sequence[int], group: ProcessGroup) -> Tensor:
        ctx.send, ctx.receive, ctx.group = send, receive, group
        out = x.new_empty((sum(receive), *x.shape[1:]))
        dist.all_to_all_single(out, x.contiguous(), list(receive), list(send), group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _AllToAll.apply(grads[0], ctx.receive, ctx.send, ctx.group), None, None, None


def all_to_all(x: Tensor, send: Sequence[int], receive: Sequence[int], group: ProcessGroup) -> Tensor:
    """Exchange rows: the first send[0] rows of `x` go to rank 0 of the group, the next send[1] to rank 1, and so on.

    Args:
        x: (sum(send), ...) any dtype that the backend moves.
        send, receive: rows per rank, known on the host; send[j] here equals receive[i] on rank j.

    Returns:
        (sum(receive), ...): rows in the order of the ranks they came from. Differentiable once or more.
    """
    if x.shape[0] != sum(send):
        raise ValueError(f"x: has {x.shape[0]} rows, but send={list(send)} adds up to {sum(send)}")
    if group.size() == 1:
        return x
    return _AllToAll.apply(x, send, receive, group)


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * ctx.scale, None


def scale_gradient(x: Tensor, scale: float) -> Tensor:
    """`x` itself; its gradient is multiplied by `scale`."""
    return x if scale == 1.0 else _ScaleGradient.apply(x, scale)
