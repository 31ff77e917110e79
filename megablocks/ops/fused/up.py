"""Up-projection of gathered tokens with bias and activation; what a fused expert MLP keeps, and what it passes on.

    z[p] = x[gather[p]] · w1[e]ᵀ + b1[e]      a[p] = act(z[p])
    gated: u[p] = x[gather[p]] · v1[e]ᵀ + c1[e], a[p] = act(z[p]) ⊙ u[p]

Legend: T tokens, H hidden, R rows, E experts, I expert width. a is of the rounded z and u, as backward sees them.

One kernel where Hopper's runs (up_hopper.py) or the plain Triton one does (up_triton.py); torch's grouped GEMM, where
it runs instead, takes gathered rows, and bias and activation are passes of their own.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from megablocks.ops.activation import activation_op
from megablocks.ops.grouped.bias import add_expert_bias_op
from megablocks.ops.grouped.gathered_mm import gathered_mm_op
from megablocks.ops.grouped.grouped_mm import has_torch_kernel, hopper_kernels, twin_kernels
from megablocks.ops.library import custom_op


def _kernels(
    x: Tensor, w1: Tensor, v1: Tensor | None, b1: Tensor | None, c1: Tensor | None, offsets: Tensor, rows: int
) -> ModuleType | None:
    """The module of the kernel that takes these for so many rows, None where the op is made of others."""
    if v1 is not None and (b1 is None) != (c1 is None):
        return None  # the kernels add both biases or none
    if hopper_kernels(x) is not None:
        from megablocks.ops.fused import up_hopper

        if all(up_hopper.supports(x, w, offsets, rows) for w in (w1, v1) if w is not None):
            return up_hopper
    if twin_kernels(x) is None or has_torch_kernel(x):
        return None
    from megablocks.ops.fused import up_triton

    return up_triton


@custom_op("megablocks::fused_up", mutates_args=())
def fused_up_op(
    x: Tensor, w1: Tensor, v1: Tensor | None, b1: Tensor | None, c1: Tensor | None, pair: Tensor, gather: Tensor,
    scatter: Tensor, token_offsets: Tensor, offsets: Tensor, name: str, approximate: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """x (T, H), w1, v1 (E, I, H), b1, c1 (E, I) → z, u (empty unless gated), a (R, I); not differentiable by itself."""
    rows = gather.shape[0]
    if rows and (kernels := _kernels(x, w1, v1, b1, c1, offsets, rows)):
        b, c = (None if t is None else t.contiguous() for t in (b1, c1))
        z, u, a = kernels.up(x, w1, v1, b, c, gather, offsets, name, approximate)
        return z, x.new_empty(0) if u is None else u, a
    second = None if v1 is None else v1.transpose(1, 2)
    z, u = gathered_mm_op(x, w1.transpose(1, 2), second, pair, gather, scatter, token_offsets, offsets)
    if b1 is not None:
        z = add_expert_bias_op(z, b1, offsets)
    if c1 is not None:
        u = add_expert_bias_op(u, c1, offsets)
    return z, u, activation_op(z, None if v1 is None else u, name, approximate)


@fused_up_op.register_fake
def _(
    x: Tensor, w1: Tensor, v1: Tensor | None, b1: Tensor | None, c1: Tensor | None, pair: Tensor, gather: Tensor,
    scatter: Tensor, token_offsets: Tensor, offsets: Tensor, name: str, approximate: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    z = x.new_empty(gather.shape[0], w1.shape[1])
    return z, x.new_empty(0) if v1 is None else torch.empty_like(z), torch.empty_like(z)
