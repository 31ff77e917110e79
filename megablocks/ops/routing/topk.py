"""Router logits to each token's experts and weights, with the load and the losses, in one op.

    scores      softmax(logits) over E, or sigmoid(logits)
    selection   the logits, which have the same order as the scores; with a bias or groups the scores + bias (the
                logits + bias if the softmax comes after top-k), restricted to the experts of the best groups
    ids         the K largest of the selection; among equals the lowest id first
    weight      the scores at the ids, or the softmax of their logits; then / p-norm, · scaling
    load_e      pairs of expert e
    sums_e      Σ_t share_te, the share being the softmax score, or the sigmoid score over the sum of the token's scores
    balance     factor · E/(K·n²) · Σ_e load_e · sums_e
    z           factor · 1/n · Σ_t logsumexp(logits_t)²

If both factors are 0, sums, balance and z are 0 too and are not computed.

Legend: T tokens, E experts, K top-k, n tokens that are not padding, at least 1. Everything is float32 inside (float64
for float64 logits). Padding (mask True) gets expert -1, counts in no load and no sum, and has a gradient of exactly 0.
A token with a NaN gets K different ids in [0, E) and the weights of the formulas; the NaN reaches no other token.

Sources: Shazeer et al. (arXiv 1701.06538) and megablocks 0.10 for softmax before top-k; DeepSeek-V3 (arXiv 2412.19437)
for sigmoid, groups and bias; Switch Transformer (arXiv 2101.03961) for balance; ST-MoE (arXiv 2202.08906) for z.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megablocks.ops.library import custom_op, runs_triton
from megablocks.ops.routing.dispatch import check_padding_mask, count_valid_ref
from megablocks.ops.routing.values import RouterGradients, RouterLosses, RouterOptions, RouterOutput, RouterSaved

_MAX_EXPERTS, _MAX_TOP_K = 1024, 32  # limits of a kernel's tile in registers
_TINY = 1e-20  # avoids 0/0 if all scores of a token underflowed; far below float32's resolution


def lowest_first_topk(values: Tensor, k: int) -> Tensor:
    """Indices (T, k) of the k largest of `values` (T, E) in descending order; among equals the lowest index first.

    torch.topk does not define the order of equals, and it differs between devices. k passes of argmax define it.
    """
    lowest = torch.finfo(values.dtype).min
    left = values.detach().clamp(min=lowest)  # -inf marks what was taken; NaN stays NaN, which argmax puts first
    taken = []
    for _ in range(k):
        best = left.argmax(dim=1, keepdim=True)
        taken.append(best)
        left = left.scatter(1, best, float("-inf"))
    return torch.cat(taken, dim=1)


def mask_to_best_groups(selection: Tensor, k: int, num_groups: int, group_top_k: int) -> Tensor:
    """`selection` (T, E) with -inf outside each token's best `group_top_k` of `num_groups` groups.

    A group's score is the sum of its best K/group_top_k values (at least one), as in DeepSeek-V3 and Megatron-LM.
    """
    num_tokens, num_experts = selection.shape
    grouped = selection.view(num_tokens, num_groups, num_experts // num_groups)
    group_score = grouped.topk(max(1, k // group_top_k), dim=2).values.sum(2)
    best = lowest_first_topk(group_score, group_top_k)
    outside = torch.ones_like(group_score, dtype=torch.bool).scatter(1, best, False)
    return grouped.masked_fill(outside.unsqueeze(2), float("-inf")).view(num_tokens, num_experts)


def wide_logits(logits: Tensor, padding_mask: Tensor | None) -> Tensor:
    """Logits (T, E) in the dtype of sums, with 0 in padding, which can contain any values."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits if padding_mask is None else logits.masked_fill(padding_mask.unsqueeze(1), 0.0)


def router_scores(logits: Tensor, sigmoid: bool) -> Tensor:
    """Scores (T, E) of logits (T, E), in float32 (float64 for float64)."""
    logits = wide_logits(logits, None)
    return logits.sigmoid() if sigmoid else logits.softmax(dim=1)


def balance_loss(sums: Tensor, load: Tensor, num_tokens: Tensor, top_k: int, factor: float) -> Tensor:
    """factor · E/(K·n²) · Σ_e load_e · sums_e: sums (E,) floating, load (E,) integer, num_tokens () integer → ()."""
    num_tokens = num_tokens.clamp(min=1)
    return factor * sums.shape[0] * torch.dot(load.to(sums.dtype) / (num_tokens * top_k), sums / num_tokens)


def has_losses(options: RouterOptions) -> bool:
    """Whether a loss has a weight. If not, the losses and sums are 0."""
    return options.balance_weight != 0 or options.z_weight != 0


def losses_ref(logits: Tensor, padding_mask: Tensor | None, load: Tensor, options: RouterOptions) -> RouterLosses:
    """Losses and counts of `wide_logits`, for any choice with this load; differentiable by autograd."""
    living = torch.ones_like(logits[:, 0], dtype=torch.bool) if padding_mask is None else ~padding_mask
    count = living.sum()
    broken = (~logits.detach().isfinite()).any(1).sum()
    stats = torch.stack([broken, count, torch.zeros_like(count)])
    if not has_losses(options):
        return RouterLosses(logits.new_zeros(()), logits.new_zeros(()), logits.new_zeros(logits.shape[1]), stats)
    shares = router_scores(logits, options.sigmoid)
    if options.sigmoid:
        shares = shares / (shares.sum(1, keepdim=True) + _TINY)
    sums = shares.masked_fill(~living.unsqueeze(1), 0.0).sum(0)
    squares = torch.logsumexp(logits, dim=1).square().masked_fill(~living, 0.0).sum()
    return RouterLosses(
        balance=balance_loss(sums, load, count, options.top_k, options.balance_weight),
        z=options.z_weight * (squares / count.clamp(min=1)),
        sums=sums,
        stats=stats,
    )


def _norm(weight: Tensor, p: float) -> Tensor:
    """The p-norms (T, 1) of the rows of weight (T, K) ≥ 0."""
    # over the row's largest weight: with p above 2 the powers of small weights underflow
    largest = weight.detach().amax(1, keepdim=True).clamp(min=_TINY)
    return largest * torch.linalg.vector_norm(weight / largest, ord=p, dim=1, keepdim=True)


def router_ref(
    logits: Tensor, bias: Tensor | None, padding_mask: Tensor | None, options: RouterOptions
) -> RouterOutput:
    """`router_op` in plain torch, differentiable by autograd."""
    (num_tokens, num_experts), top_k = logits.shape, options.top_k
    logits = wide_logits(logits, padding_mask)
    values = logits if options.after else router_scores(logits, options.sigmoid)
    selection = (logits if bias is None and not options.num_groups else values).detach()
    if bias is not None:
        selection = selection + bias.to(values.dtype)
    if options.num_groups:
        selection = mask_to_best_groups(selection, top_k, options.num_groups, options.group_top_k)
    ids = lowest_first_topk(selection, top_k)
    weight = values.gather(1, ids)
    if options.after:
        weight = weight.softmax(dim=1)
    if options.norm_p:
        weight = weight / (_norm(weight, options.norm_p) + _TINY)
    expert = (ids if padding_mask is None else ids.masked_fill(padding_mask.unsqueeze(1), -1)).flatten().int()
    token = torch.arange(num_tokens, dtype=torch.int32, device=logits.device).repeat_interleave(top_k)
    load = count_valid_ref(expert, num_experts)
    losses = losses_ref(logits, padding_mask, load, options)
    return RouterOutput(
        weight=(weight * options.scaling).flatten(),
        expert=expert,
        token=token,
        load=load,
        **losses._asdict(),
    )


def _gradients_of_kept(d_weight: Tensor, saved: RouterSaved, options: RouterOptions) -> tuple[Tensor, Tensor, Tensor]:
    """Ids (T, K) of the top-k in any order, gradients of their weights (T, K), and gradients of the scores (T, E)."""
    assert saved.flags is not None and saved.ends is not None
    kept, chosen = (saved.flags.t() & 1).long(), (saved.flags.t() & 2) > 0
    ids = chosen.int().sort(dim=1, descending=True, stable=True).indices[:, : options.top_k]
    pair = (saved.ends.unsqueeze(1) - kept.sum(1, keepdim=True) + kept.cumsum(1) - 1).clamp(min=0)
    d_values = torch.where(kept > 0, d_weight[pair], 0.0) if d_weight.numel() else d_weight.new_zeros(kept.shape)
    return ids, d_values.gather(1, ids), torch.where(chosen, 0.0, d_values * options.scaling)


def router_backward_ref(
    logits: Tensor, padding_mask: Tensor | None, saved: RouterSaved, grads: RouterGradients, options: RouterOptions
) -> Tensor:
    """The gradient of the logits (T, E), in their dtype, contiguous."""
    wide = wide_logits(logits, padding_mask)
    soft, count = wide.softmax(1), saved.stats[1].clamp(min=1)
    scores = wide.sigmoid() if options.sigmoid else soft
    d_weight, d_balance, d_z, d_sums = (None if grad is None else grad.to(wide.dtype) for grad in grads)
    d_scores, d_logits = torch.zeros_like(wide), torch.zeros_like(wide)  # d_logits: what does not go through the scores
    if d_weight is not None:
        if saved.expert is None:
            ids, grad, d_scores = _gradients_of_kept(d_weight, saved, options)
        else:
            ids = saved.expert.view(-1, options.top_k).clamp(min=0).long()
            grad = d_weight.view(ids.shape)
        grad = grad * options.scaling
        weight = wide.gather(1, ids).softmax(1) if options.after else scores.gather(1, ids)
        if options.norm_p:
            norm = _norm(weight, options.norm_p)
            slope = torch.where((weight > 0) & (norm > 0), (weight / norm).pow(options.norm_p - 1), 0.0)
            norm = norm + _TINY
            grad = grad / norm - slope * (grad * weight).sum(1, keepdim=True) / norm.square()
        if options.after:
            d_logits.scatter_add_(1, ids, weight * (grad - (grad * weight).sum(1, keepdim=True)))
        else:
            d_scores = d_scores.scatter_add(1, ids, grad)
    d_share = wide.new_zeros(wide.shape[1])
    if d_sums is not None:
        d_share = d_share + d_sums
    if d_balance is not None:
        scale = d_balance * options.balance_weight * wide.shape[1]
        d_share = d_share + scale * saved.load.to(wide.dtype) / (count * options.top_k) / count
    if options.sigmoid:
        whole = scores.sum(1, keepdim=True) + _TINY
        d_scores = d_scores + (d_share - (scores * d_share).sum(1, keepdim=True) / whole) / whole
        d_logits = d_logits + d_scores * scores * (1 - scores)
    else:
        d_scores = d_scores + d_share
        d_logits = d_logits + scores * (d_scores - (d_scores * scores).sum(1, keepdim=True))
    if d_z is not None:
        scale = 2 * options.z_weight * d_z / count
        d_logits = d_logits + soft * (scale * torch.logsumexp(wide, 1)).unsqueeze(1)
    if padding_mask is not None:
        d_logits = d_logits.masked_fill(padding_mask.unsqueeze(1), 0.0)
    return d_logits.to(logits.dtype).contiguous()


def router_weight_backward_ref(
    weight: Tensor, expert: Tensor, d_weight: Tensor, num_experts: int, dtype: torch.dtype, options: RouterOptions
) -> Tensor:
    """The gradient of the logits (T, E), from the weights (T·K,), scaled softmaxes over the chosen, and d_weight."""
    ids = torch.where(expert < 0, num_experts, expert).long().view(-1, options.top_k)  # padding: an extra column
    weight, grad = weight.view(ids.shape), d_weight.view(ids.shape).to(weight.dtype)
    d_chosen = weight * (grad - (grad * weight).sum(1, keepdim=True) / options.scaling)
    d_logits = weight.new_zeros(ids.shape[0], num_experts + 1).scatter_(1, ids, d_chosen)
    return d_logits[:, :-1].to(dtype, memory_format=torch.contiguous_format)


def kernels_take(values: Tensor, num_experts: int, options: RouterOptions) -> bool:
    """Whether kernels run for E experts, these options, and `values`' device and dtype; otherwise references run."""
    fits = num_experts <= _MAX_EXPERTS and options.top_k <= _MAX_TOP_K
    return fits and runs_triton(values) and options.norm_p in (0, 1, 2) and not options.num_groups


router_op = custom_op(
    "megablocks::router",
    fake=lambda a: empty_output(a.logits, a.logits.shape[0] * a.options.top_k),
    kernel="megablocks.ops.routing.topk_triton:route_launch",
    takes=lambda logits, bias, padding_mask, options: kernels_take(logits, logits.shape[1], options),
)(router_ref)


def empty_output(logits: Tensor, num_pairs: int) -> RouterOutput:
    """Unset results of a router that returns this many pairs."""
    num_experts, acc = logits.shape[1], torch.promote_types(logits.dtype, torch.float32)

    def make(dtype: torch.dtype, *shape: int) -> Tensor:
        return logits.new_empty(shape, dtype=dtype)

    return RouterOutput(
        weight=make(acc, num_pairs),
        balance=make(acc),
        z=make(acc),
        sums=make(acc, num_experts),
        expert=make(torch.int32, num_pairs),
        token=make(torch.int32, num_pairs),
        load=make(torch.int64, num_experts),
        stats=make(torch.int64, 3),
    )


router_backward_op = custom_op(
    "megablocks::router_backward",
    fake=lambda a: torch.empty_like(a.logits, memory_format=torch.contiguous_format),
    kernel="megablocks.ops.routing.topk_triton:route_backward_launch",
    takes=lambda logits, mask, saved, grads, options: kernels_take(logits, logits.shape[1], options),
)(router_backward_ref)
router_weight_backward_op = custom_op(
    "megablocks::router_weight_backward",
    fake=lambda a: a.weight.new_empty(a.weight.shape[0] // a.options.top_k, a.num_experts, dtype=a.dtype),
    kernel="megablocks.ops.routing.topk_triton:weight_backward_launch",
    takes=lambda weight, expert, d_weight, num_experts, dtype, options: kernels_take(weight, num_experts, options),
)(router_weight_backward_ref)


def _saves_weights(options: RouterOptions) -> bool:
    """Whether backward needs only the T·K weights, not the T·E logits.

    The gradient of a softmax over the chosen logits follows from its values; the gradient of all other logits is 0.
    """
    return options.after and not options.norm_p and options.scaling != 0 and not has_losses(options)


def save_for_logits(
    ctx: Any, logits: Tensor, padding_mask: Tensor | None, saved: RouterSaved, options: RouterOptions
) -> None:
    """Save what `gradient_of_logits` needs."""
    ctx.options = options
    ctx.set_materialize_grads(False)  # an unused loss allocates no zeros
    ctx.save_for_backward(logits, padding_mask, *saved)


def gradient_of_logits(ctx: Any, grads: RouterGradients) -> Tensor | None:
    """The gradient of the logits (T, E), None for 0."""
    if all(grad is None for grad in grads):
        return None
    logits, padding_mask, *saved = ctx.saved_tensors
    return router_backward_op(logits, padding_mask, RouterSaved(*saved), grads, ctx.options)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    logits, _, padding_mask, options = inputs
    out = RouterOutput(*output)
    if not has_losses(options):
        ctx.mark_non_differentiable(out.balance, out.z, out.sums)
    if _saves_weights(options):
        ctx.options, ctx.like = options, (logits.shape[1], logits.dtype)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(out.weight, out.expert)
    else:
        save_for_logits(ctx, logits, padding_mask, RouterSaved(out.expert, out.load, out.stats), options)


def _backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    weight, options = grads[0], ctx.options
    if not _saves_weights(options):
        return gradient_of_logits(ctx, RouterGradients(*grads[:4])), None, None, None
    d_logits = None if weight is None else router_weight_backward_op(*ctx.saved_tensors, weight, *ctx.like, options)
    return d_logits, None, None, None


router_op.register_autograd(_backward, setup_context=_setup_context)


def check_router(logits: Tensor, options: RouterOptions, bias: Tensor | None, padding_mask: Tensor | None) -> None:
    """The ValueErrors of `route_topk`."""
    if logits.dim() != 2:
        raise ValueError(f"logits is {tuple(logits.shape)}: must be (T, E)")
    (num_tokens, num_experts), top_k = logits.shape, options.top_k
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"top_k={top_k}: must be from 1 to the number of experts, {num_experts}")
    if not 0 <= options.norm_p < float("inf"):
        raise ValueError(f"norm_p={options.norm_p}: must be a finite number above 0, or 0 for no norm")
    groups, best = options.num_groups, options.group_top_k
    if groups and (num_experts % groups or not 1 <= best <= groups or top_k > best * (num_experts // groups)):
        raise ValueError(
            f"num_groups={groups}, group_top_k={best}: groups must divide {num_experts} experts, and the best ones "
            f"must hold at least top_k={top_k}"
        )
    if bias is not None and bias.shape != (num_experts,):
        raise ValueError(f"bias is {tuple(bias.shape)}: must be ({num_experts},) for logits {tuple(logits.shape)}")
    if padding_mask is not None:
        check_padding_mask(padding_mask, num_tokens)


def route_topk(
    logits: Tensor, options: RouterOptions, *, bias: Tensor | None = None, padding_mask: Tensor | None = None
) -> RouterOutput:
    """Each token's experts and weights, with the load and the losses, without a host synchronization.

    Args:
        logits: (T, E) floating, differentiable.
        bias: (E,), added for the selection only.
        padding_mask: (T,) bool, True for padding.

    Raises:
        ValueError: a top_k outside [1, E], a norm_p below 0, groups that do not fit, a bias or mask of another shape,
            or a mask that is not bool.
    """
    check_router(logits, options, bias, padding_mask)
    return router_op(logits, bias, padding_mask, options)
