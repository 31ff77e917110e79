"""Gather: tokens to rows sorted by expert.

    rows[p] = x[gather[p]]      dX[t] = Σ of dRows over the rows that token t gave

Legend: T tokens, H hidden, R rows, V <= R valid ones. Rows p >= V are unspecified, but 0 where the rows are padded
(`padded`: gather and pair are -1 there, and a slot of -1 has no row; see padded.py). The backward sums each token's
rows in a fixed order through the token-major list of the dispatch (no atomics), so reruns are bit-identical.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megablocks.ops.backend import runs_triton
from megablocks.ops.library import custom_op
from megablocks.ops.permute.combine import combine_op
from megablocks.ops.routing.dispatch import Dispatch


def gather_ref(x: Tensor, gather: Tensor, padded: bool = False) -> Tensor:
    """x (T, H), gather (N,) → (N, H)."""
    if not padded:
        return x.index_select(0, gather)
    if x.shape[0] == 0:
        return x.new_zeros(gather.shape[0], x.shape[1])
    return torch.where((gather >= 0).unsqueeze(1), x.index_select(0, gather.clamp(min=0)), 0)


@custom_op("megablocks::gather", mutates_args=())
def gather_op(
    x: Tensor, pair: Tensor, gather: Tensor, scatter: Tensor, token_offsets: Tensor, padded: bool = False
) -> Tensor:
    if runs_triton(x):
        from megablocks.ops.permute.permute_triton import expand_launch

        return expand_launch(x, scatter, token_offsets, pair, padded)
    return gather_ref(x, gather, padded)


@gather_op.register_fake
def _(x: Tensor, pair: Tensor, gather: Tensor, scatter: Tensor, token_offsets: Tensor, padded: bool = False) -> Tensor:
    return x.new_empty(gather.shape[0], x.shape[1])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *indices, ctx.padded = inputs[1:]
    ctx.save_for_backward(*indices)


def _backward(ctx: Any, d_rows: Tensor) -> tuple[Tensor | None, ...]:
    pair, gather, scatter, token_offsets = ctx.saved_tensors
    dx = combine_op(d_rows, None, pair, gather, scatter, token_offsets, ctx.padded)
    return dx, None, None, None, None, None


gather_op.register_autograd(_backward, setup_context=_setup_context)


def gather(x: Tensor, dispatch: Dispatch) -> Tensor:
    """Copy each pair's token to its row.

    Args:
        x: (T, H), any dtype and stride.
        dispatch: of T tokens and R pairs.

    Returns:
        (R, H) in x's dtype; rows >= V are unspecified.

    Raises:
        ValueError: x has another number of tokens than the dispatch.
    """
    num_tokens = dispatch.token_offsets.shape[0] - 1
    if x.dim() != 2 or x.shape[0] != num_tokens:
        raise ValueError(f"x is {tuple(x.shape)}: must be (T, H) with T={num_tokens}, as in the dispatch")
    return gather_op(x, dispatch.pair, dispatch.gather, dispatch.scatter, dispatch.token_offsets)
