"""Replicate: one value a bin, spread over the bin's places.

    y[b, i] = x[b, e]  for ends[e-1] <= i < ends[e], 0 behind the last bin
    dX[b, e] = Σ of dY over the bin's places

Legend: B rows, E bins, N places. The sum runs in float32 in the order of the places, by one program a bin: reruns are
bit-identical. `megablocks.ops.replicate` checks its arguments and calls replicate_op.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megablocks.ops.library import custom_op, runs_triton


def replicate_ref(x: Tensor, ends: Tensor, num_places: int) -> Tensor:
    """x (B, E), ends (E,) → (B, N)."""
    e = torch.searchsorted(ends, torch.arange(num_places, device=ends.device, dtype=ends.dtype), right=True)
    return torch.where(e < ends.shape[0], x.index_select(1, e.clamp(max=ends.shape[0] - 1)), 0)


def bin_sum_ref(dy: Tensor, ends: Tensor) -> Tensor:
    """dY (B, N), ends (E,) → (B, E) in dY's dtype."""
    places = torch.arange(dy.shape[1], device=ends.device, dtype=ends.dtype)
    e = torch.searchsorted(ends, places, right=True)
    acc = torch.promote_types(dy.dtype, torch.float32) if dy.is_floating_point() else torch.int64
    out = torch.zeros(dy.shape[0], ends.shape[0] + 1, dtype=acc, device=dy.device)
    return out.index_add_(1, e, dy.to(acc))[:, :-1].to(dy.dtype).contiguous()


@custom_op("megablocks::replicate", fake=lambda x, ends, num_places: x.new_empty(x.shape[0], num_places))
def replicate_op(x: Tensor, ends: Tensor, num_places: int) -> Tensor:
    if runs_triton(x):
        from megablocks.ops.permute.padded_triton import replicate_launch

        return replicate_launch(x, ends, num_places)
    return replicate_ref(x, ends, num_places)


@custom_op("megablocks::bin_sum", fake=lambda dy, ends: dy.new_empty(dy.shape[0], ends.shape[0]))
def bin_sum_op(dy: Tensor, ends: Tensor) -> Tensor:
    if runs_triton(dy):
        from megablocks.ops.permute.padded_triton import bin_sum_launch

        return bin_sum_launch(dy, ends)
    return bin_sum_ref(dy, ends)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(inputs[1])


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    return bin_sum_op(dy, *ctx.saved_tensors), None, None


replicate_op.register_autograd(_backward, setup_context=_setup_context)
