"""A language model's last projection and its cross entropy, without float32 logits of all tokens.

    l_t = x_t·Wᵀ        loss_t = max(l_t) − l_t[label_t] + log s_t        s_t = Σ_v exp(l_tv − max(l_t))
    dl_tv = g_t · (exp(l_tv − max(l_t)) / s_t − [v = label_t])            dx = dl·W        dW = dlᵀ·x

Legend: T tokens, H hidden, V words of the vocabulary on this rank, g the incoming gradient of each token's loss.

Tokens are computed in chunks. A chunk's logits are in x's dtype, and backward overwrites them with their gradient.
The logits of the first chunks, up to `keep_bytes`, stay in memory for backward. Backward computes the others again, a
fourth product of T·V·H in addition to the three that are needed. So the result is exact for any incoming gradient: a
mask, a loss scale, or weights that differ by token. dW is the sum of the chunks' products in float32.

A vocabulary that is split over the ranks of a group needs two all-reduces of numbers per token in forward, and none in
backward: the caller adds dx over the ranks.

LigerFusedLinearCrossEntropy (liger-kernel 0.8.5) computes the gradients of a mean or a sum in forward, which needs each
token's incoming gradient there. For a loss per token it computes them in backward too, and all logits again. It also
reads the number of tokens from the GPU, has no split vocabulary, and rounds dW before it is accumulated.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megablocks.ops.library import custom_op, once_differentiable, under_autocast

CHUNK_BYTES = 2**29
"""Bytes of a chunk's logits. A chunk reads and writes dW once, 8·V·H bytes: at 8,192 tokens 2 % of its products."""
KEEP_BYTES = 2**32
"""Bytes of the logits that are kept for backward by default. Plain cross entropy needs three times as many for them."""


def cross_entropy_sums_ref(logits: Tensor, labels: Tensor) -> Tensor:
    """The terms of each row's loss: its maximum, its Σ exp(l − maximum), and the logit of its label.

    Args:
        logits: (T, V). labels: (T,) int64; a label outside [0, V) has the logit 0.

    Returns:
        (3, T) float32 (float64 for float64).
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    here = (labels >= 0) & (labels < logits.shape[1])
    chosen = wide.gather(1, torch.where(here, labels, 0)[:, None]).squeeze(1)
    maximum = wide.amax(1)
    shift = torch.where(maximum == -torch.inf, 0.0, maximum)
    return torch.stack([maximum, (wide - shift[:, None]).exp().sum(1), torch.where(here, chosen, 0.0)])


def cross_entropy_gradient_ref(logits: Tensor, labels: Tensor, maximum: Tensor, total: Tensor, grad: Tensor) -> Tensor:
    """The gradient of the logits: grad · (exp(logits − maximum) / total − [label]), and 0 in rows where grad is 0.

    Args:
        logits: (T, V). labels: (T,) int64; none if outside [0, V). maximum, total, grad: (T,), of the whole vocabulary.
    """
    wide = (logits - maximum[:, None]).exp() * (grad / total)[:, None]
    wide -= torch.where(torch.arange(logits.shape[1], device=logits.device) == labels[:, None], grad[:, None], 0.0)
    return torch.where(grad[:, None] == 0, 0.0, wide).to(logits.dtype)


cross_entropy_sums_op = custom_op(
    "megablocks::cross_entropy_sums",
    fake=lambda a: a.logits.new_empty((3, len(a.logits)), dtype=torch.promote_types(a.logits.dtype, torch.float32)),
    kernel="megablocks.ops.loss_triton:sums_launch",
)(cross_entropy_sums_ref)


@custom_op(
    "megablocks::cross_entropy_gradient_",
    mutates_args=("logits",),
    fake=lambda a: None,
    kernel="megablocks.ops.loss_triton:gradient_launch",
)
def cross_entropy_gradient_op(logits: Tensor, labels: Tensor, maximum: Tensor, total: Tensor, grad: Tensor) -> None:
    """Overwrite the logits with their gradient."""
    logits.copy_(cross_entropy_gradient_ref(logits, labels, maximum, total, grad))


class _LinearCrossEntropy(torch.autograd.Function):
    """An autograd.Function, because a custom op of torch cannot have a process group as an argument."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, labels: Tensor, group: dist.ProcessGroup | None, main_grad: Tensor | None,
        rows: int, keep: int,
    ) -> Tensor:  # fmt: skip
        chunks = [slice(first, first + rows) for first in range(0, len(x), rows)]
        if not any(ctx.needs_input_grad[:2]):
            keep = 0
        sums = torch.empty((3, len(x)), dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
        kept = []
        for chunk in chunks:
            logits = torch.mm(x[chunk], weight.t())
            sums[:, chunk] = cross_entropy_sums_op(logits, labels[chunk])
            if chunk.start + len(logits) <= keep:
                kept.append(logits)
            del logits  # before the next chunk's are allocated
        maximum, total, chosen = sums if group is None else _over_ranks(sums, group)
        ctx.save_for_backward(x, weight, labels, maximum, total)
        ctx.chunks, ctx.kept, ctx.main_grad = chunks, kept, main_grad
        return (maximum - chosen) + total.log()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, labels, maximum, total = ctx.saved_tensors
        kept, ctx.kept = list(ctx.kept), []  # a second backward computes them again
        wants_x, wants_weight = ctx.needs_input_grad[:2]
        dx = torch.empty_like(x) if wants_x else None
        dw = ctx.main_grad if wants_weight else None
        if wants_weight and dw is None:
            dw = torch.zeros(weight.shape, dtype=total.dtype, device=x.device)
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            for chunk in ctx.chunks:
                logits = kept.pop(0) if kept else torch.mm(x[chunk], weight.t())
                cross_entropy_gradient_op(logits, labels[chunk], maximum[chunk], total[chunk], grad[chunk])
                if dx is not None:
                    torch.mm(logits, weight, out=dx[chunk])
                if dw is not None:
                    _add_product(dw, logits, x[chunk])
                del logits
        if dw is not None:
            dw = None if ctx.main_grad is not None else dw.to(weight.dtype)
        return dx, dw, None, None, None, None, None


def _over_ranks(sums: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, ...]:
    """The sums (3, T) of the whole vocabulary from those of each rank's part."""
    maximum = sums[0].clone()
    dist.all_reduce(maximum, dist.ReduceOp.MAX, group)
    rest = torch.stack([sums[1] * (sums[0] - maximum).exp(), sums[2]])  # one rank has the label, the others 0
    dist.all_reduce(rest, group=group)
    return maximum, *rest


def _add_product(out: Tensor, left: Tensor, right: Tensor) -> None:
    """out (V, H) float32 += leftᵀ (V, T) · right (T, H), with accumulation in float32."""
    if left.dtype == out.dtype:
        out.addmm_(left.t(), right)
    elif left.device.type == "cuda":
        torch.addmm(out, left.t(), right, out_dtype=out.dtype, out=out)
    else:
        out.addmm_(left.t().to(out.dtype), right.to(out.dtype))


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    main_grad: Tensor | None = None,
    keep_bytes: int = KEEP_BYTES,
    chunk_bytes: int = CHUNK_BYTES,
) -> Tensor:
    """Cross entropy of softmax(x·weightᵀ) with each token's label.

    Args:
        x: (..., H) floating. With a group, the same on every rank of it.
        weight: (V, H), in x's dtype. With a group, this rank's V of the W·V words; ranks hold them in order.
        labels: (...) int64, words of the whole vocabulary. A label outside it, such as -100, means "ignored": its loss
            and its gradients are 0.
        group: the ranks that share the vocabulary. The gradient of x is then this rank's part, which the caller adds
            over the ranks.
        main_grad: (V, H) float32, to which backward adds the gradient of weight; autograd then gets none.
        keep_bytes: how many bytes of logits stay in memory for backward, which computes the others again.
        chunk_bytes: how many bytes of logits are computed at once.

    Returns:
        (...) float32 (float64 for float64): the loss of each token.

    Raises:
        ValueError: an argument's shape or dtype is wrong.
    """
    x, weight = under_autocast(x, weight)
    if weight.ndim != 2 or x.shape[-1:] != weight.shape[1:] or weight.dtype != x.dtype or not x.is_floating_point():
        given = f"{tuple(weight.shape)} {weight.dtype} for x {tuple(x.shape)} {x.dtype}"
        raise ValueError(f"weight is {given}: must be (V, {x.shape[-1] if x.ndim else 'H'}) in x's floating dtype")
    if labels.shape != x.shape[:-1] or labels.dtype != torch.int64:
        raise ValueError(f"labels are {tuple(labels.shape)} {labels.dtype}: must be {tuple(x.shape[:-1])} torch.int64")
    wide = torch.promote_types(x.dtype, torch.float32)
    if main_grad is not None and (main_grad.shape != weight.shape or main_grad.dtype != wide):
        given = f"{tuple(main_grad.shape)} {main_grad.dtype}"
        raise ValueError(f"main_grad is {given}: must be {tuple(weight.shape)} {wide} as weight is")
    words, first = len(weight), 0
    if group is not None:
        words, first = words * group.size(), words * group.rank()
    row_bytes = max(1, len(weight) * x.element_size())
    rows = max(1, chunk_bytes // row_bytes)
    rows = rows // 128 * 128 or rows  # whole tiles of the products
    flat = labels.reshape(-1)
    loss = _LinearCrossEntropy.apply(
        x.reshape(-1, x.shape[-1]), weight, flat - first, group, main_grad, rows, keep_bytes // row_bytes
    )
    return torch.where((flat >= 0) & (flat < words), loss, 0.0).view(labels.shape)
