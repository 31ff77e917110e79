"""Logits to experts, weights, load and losses in one op: all that a top-k router does behind its projection.

    ids, weights    as `topk_weights`                              Legend: T tokens, E experts, K top-k
    load_e          pairs of expert e
    sums_e          Σ_t share_te, share = the softmax scores, or the sigmoid's over their sum
    balance         weight · E/(K·n²) · Σ_e load_e · sums_e        n tokens that are no padding, at least 1
    z               weight · 1/n · Σ_t logsumexp(logits_t)²

Sources: Switch Transformer (arXiv 2101.03961) and megablocks 0.10 for balance, ST-MoE (arXiv 2202.08906) for z.
Padding (mask True) gets expert -1, is no load, enters no sum, and has a gradient of exactly 0, whatever it holds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megablocks.ops.backend import runs_triton
from megablocks.ops.dtypes import accumulation_dtype
from megablocks.ops.library import Op, custom_op
from megablocks.ops.routing.dispatch import count_valid
from megablocks.ops.routing.topk import router_scores, topk_weights

MAX_EXPERTS, MAX_TOP_K = 1024, 32  # what a tile in registers holds
_TINY = 1e-20  # as topk's: keeps 0/0 out where every sigmoid underflowed


class RouterOptions(NamedTuple):
    """What a router is asked for; an argument each in the ops' schemas.

    top_k: K.
    sigmoid: scores are the logits' sigmoids, else their softmax.
    after: weights are the softmax of the chosen logits alone, as softmax_order "after_topk"; not with sigmoid.
    norm_p: a token's weights are divided by their p-norm, p 1 or 2; 0 for no norm.
    scaling: factor on the weights, last.
    balance_weight, z_weight: factors on the losses.
    """

    top_k: int
    sigmoid: bool
    after: bool
    norm_p: int
    scaling: float
    balance_weight: float
    z_weight: float


class RouterOutput(NamedTuple):
    """What a router gives for T tokens.

    weight (T·K,), balance (), z (), sums (E,): float32 (float64 for float64 logits), differentiable.
    expert, token: (T·K,) int32.    load: (E,) int64.
    stats: (3,) int64: tokens with NaN or infinite logits, tokens that are no padding, and 0, the ids out of range.
    """

    weight: Tensor
    balance: Tensor
    z: Tensor
    sums: Tensor
    expert: Tensor
    token: Tensor
    load: Tensor
    stats: Tensor


def balance_loss(sums: Tensor, load: Tensor, num_tokens: int | Tensor, top_k: int, weight: float) -> Tensor:
    """weight · E/(K·T²) · Σ_e load_e · sums_e: sums (E,) floating, load (E,) integer, T an int or () integer → ()."""
    num_tokens = num_tokens.clamp(min=1) if isinstance(num_tokens, Tensor) else max(num_tokens, 1)
    fraction = load.to(sums.dtype) / (num_tokens * top_k)
    return weight * sums.shape[0] * torch.dot(fraction, sums / num_tokens)


def score_shares(logits: Tensor, score_function: str) -> Tensor:
    """Scores (T, E) of which each token's sum to 1."""
    scores = router_scores(logits, score_function)
    return scores / (scores.sum(1, keepdim=True) + _TINY) if score_function == "sigmoid" else scores


def router_ref(
    logits: Tensor, bias: Tensor | None, padding_mask: Tensor | None, options: RouterOptions
) -> tuple[Tensor, ...]:
    """`router_op` in plain torch, differentiable by autograd."""
    num_tokens, num_experts = logits.shape
    logits, function = logits.to(accumulation_dtype(logits.dtype)), "sigmoid" if options.sigmoid else "softmax"
    living = torch.ones(num_tokens, dtype=torch.bool, device=logits.device)
    if padding_mask is not None:
        living = ~padding_mask
        logits = logits.masked_fill(padding_mask.unsqueeze(1), 0.0)
    ids, weight = topk_weights(
        logits,
        options.top_k,
        score_function=function,
        softmax_order="after_topk" if options.after else "before_topk",
        bias=bias,
        norm_p=float(options.norm_p) if options.norm_p else None,
        scaling=options.scaling,
    )
    expert = torch.where(living.unsqueeze(1), ids, -1).flatten().int()
    token = torch.arange(num_tokens, dtype=torch.int32, device=logits.device).repeat_interleave(options.top_k)
    load, count = count_valid(expert, num_experts), living.sum()
    sums = score_shares(logits, function).masked_fill(~living.unsqueeze(1), 0.0).sum(0)
    squares = torch.logsumexp(logits, dim=1).square().masked_fill(~living, 0.0).sum()
    balance = balance_loss(sums, load, count, options.top_k, options.balance_weight)
    z = options.z_weight * (squares / count.clamp(min=1))
    broken = (~logits.detach().isfinite()).any(1).sum()
    stats = torch.stack([broken, count, torch.zeros_like(count)])
    return weight.flatten(), balance, z, sums, expert, token, load, stats


def router_backward_ref(
    logits: Tensor,
    padding_mask: Tensor | None,
    expert: Tensor,
    load: Tensor,
    stats: Tensor,
    grads: tuple[Tensor | None, ...],
    options: RouterOptions,
    d_scores: Tensor | None = None,
) -> Tensor:
    """The gradient of the logits (T, E) from those of weight, balance, z, sums and scores, None for no gradient."""
    acc, ids = accumulation_dtype(logits.dtype), expert.view(-1, options.top_k).clamp(min=0).long()
    wide = logits.to(acc)
    if padding_mask is not None:
        wide = wide.masked_fill(padding_mask.unsqueeze(1), 0.0)
    soft, count = wide.softmax(1), stats[1].clamp(min=1)
    scores = wide.sigmoid() if options.sigmoid else soft
    d_weight, d_balance, d_z, d_sums = grads
    d_scores, d_logits = torch.zeros_like(wide) if d_scores is None else d_scores.to(acc), torch.zeros_like(wide)
    if d_weight is not None:
        grad = d_weight.view(ids.shape).to(acc) * options.scaling
        weight = wide.gather(1, ids).softmax(1) if options.after else scores.gather(1, ids)
        if options.norm_p:
            norm = torch.linalg.vector_norm(weight, ord=options.norm_p, dim=1, keepdim=True)
            slope = weight.sign() if options.norm_p == 1 else torch.where(norm == 0, 0.0, weight / norm)
            grad = grad / (norm + _TINY) - slope * (grad * weight).sum(1, keepdim=True) / (norm + _TINY).square()
        if options.after:
            d_logits.scatter_add_(1, ids, weight * (grad - (grad * weight).sum(1, keepdim=True)))
        else:
            d_scores = d_scores.scatter_add(1, ids, grad)
    d_share = torch.zeros_like(wide[0]) if wide.shape[0] else wide.new_zeros(wide.shape[1])
    if d_sums is not None:
        d_share = d_share + d_sums.to(acc)
    if d_balance is not None:
        scale = d_balance.to(acc) * options.balance_weight * wide.shape[1]
        d_share = d_share + scale * load.to(acc) / (count * options.top_k) / count
    if options.sigmoid:
        whole = scores.sum(1, keepdim=True) + _TINY
        d_scores = d_scores + (d_share - (scores * d_share).sum(1, keepdim=True) / whole) / whole
        d_logits = d_logits + d_scores * scores * (1 - scores)
    else:
        d_scores = d_scores + d_share
        d_logits = d_logits + scores * (d_scores - (d_scores * scores).sum(1, keepdim=True))
    if d_z is not None:
        scale = 2 * options.z_weight * d_z.to(acc) / count
        d_logits = d_logits + soft * (scale * torch.logsumexp(wide, 1)).unsqueeze(1)
    if padding_mask is not None:
        d_logits = d_logits.masked_fill(padding_mask.unsqueeze(1), 0.0)
    return d_logits.to(logits.dtype)


@custom_op("megablocks::router", mutates_args=())
def router_op(
    logits: Tensor, bias: Tensor | None, padding_mask: Tensor | None, options: RouterOptions
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    return _route(logits, bias, padding_mask, options)


@custom_op("megablocks::router_without_losses", mutates_args=())
def router_without_losses_op(
    logits: Tensor, bias: Tensor | None, padding_mask: Tensor | None, options: RouterOptions
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`router_op` for options that `keeps_weights_alone`: weight is its one differentiable result."""
    return _route(logits, bias, padding_mask, options)


def _route(
    logits: Tensor, bias: Tensor | None, padding_mask: Tensor | None, options: RouterOptions
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    if runs_triton(logits):
        from megablocks.ops.routing.router_triton import route_launch

        return route_launch(logits, bias, padding_mask, options)
    return RouterOutput(*router_ref(logits, bias, padding_mask, options))[:]


def keeps_weights_alone(options: RouterOptions) -> bool:
    """Whether the gradient of the logits follows from the weights, so that backward keeps T·K of them, not T·E logits.

    A softmax over the chosen logits has a slope of its own values, and every other logit's gradient is 0.
    """
    return options.after and not options.norm_p and options.scaling != 0


@router_op.register_fake
@router_without_losses_op.register_fake
def _(logits: Tensor, bias: Tensor | None, padding_mask: Tensor | None, top_k: int, *_: Any) -> tuple[Tensor, ...]:
    (num_tokens, num_experts), device = logits.shape, logits.device
    pairs, acc = num_tokens * top_k, accumulation_dtype(logits.dtype)

    def make(*shape: int, dtype: torch.dtype = acc) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    ids = (make(pairs, dtype=torch.int32), make(pairs, dtype=torch.int32))
    counts = (make(num_experts, dtype=torch.int64), make(3, dtype=torch.int64))
    return make(pairs), make(), make(), make(num_experts), *ids, *counts


@custom_op("megablocks::router_backward", mutates_args=())
def router_backward_op(
    logits: Tensor, padding_mask: Tensor | None, expert: Tensor, load: Tensor, stats: Tensor,
    d_weight: Tensor | None, d_balance: Tensor | None, d_z: Tensor | None, d_sums: Tensor | None,
    options: RouterOptions,
) -> Tensor:  # fmt: skip
    saved, grads = (logits, padding_mask, expert, load, stats), (d_weight, d_balance, d_z, d_sums)
    if runs_triton(logits):
        from megablocks.ops.routing.router_backward_triton import route_backward_launch

        return route_backward_launch(*saved, grads, options)
    return router_backward_ref(*saved, grads, options)


def _slopes_of_pairs(weight: Tensor, d_weight: Tensor, top_k: int, scaling: float) -> Tensor:
    weight, grad = weight.view(-1, top_k), d_weight.view(-1, top_k).to(weight.dtype)
    return weight * (grad - (grad * weight).sum(1, keepdim=True) / scaling)


def chosen_slopes_ref(weight: Tensor, d_weight: Tensor, pair: Tensor, top_k: int, scaling: float) -> Tensor:
    """weight, d_weight (T·K,), pair (R,) → (R,) in the weight's dtype."""
    return _slopes_of_pairs(weight, d_weight, top_k, scaling).flatten().index_select(0, pair)


@custom_op("megablocks::chosen_slopes", mutates_args=())
def chosen_slopes_op(weight: Tensor, d_weight: Tensor, pair: Tensor, top_k: int, scaling: float) -> Tensor:
    """The gradient of the logit that row p's pair[p] was chosen by (R,), weights (T·K,) being `scaling` times a softmax
    over those of each token."""
    if runs_triton(weight):
        from megablocks.ops.routing.router_backward_triton import chosen_slopes_launch

        return chosen_slopes_launch(weight, d_weight, pair, top_k, scaling)
    return chosen_slopes_ref(weight, d_weight, pair, top_k, scaling)


@chosen_slopes_op.register_fake
def _(weight: Tensor, d_weight: Tensor, pair: Tensor, top_k: int, scaling: float) -> Tensor:
    return weight.new_empty(pair.shape[0])


def router_weight_backward_ref(
    weight: Tensor, expert: Tensor, d_weight: Tensor, num_experts: int, dtype: torch.dtype, options: RouterOptions
) -> Tensor:
    """The gradient of the logits (T, E) from the weights (T·K,), scaled softmaxes over the chosen, and theirs."""
    ids = torch.where(expert < 0, num_experts, expert).long().view(-1, options.top_k)  # padding's: a column more
    d_chosen = _slopes_of_pairs(weight, d_weight, options.top_k, options.scaling)
    d_logits = weight.new_zeros(ids.shape[0], num_experts + 1).scatter_(1, ids, d_chosen)
    return d_logits[:, :-1].to(dtype, memory_format=torch.contiguous_format)


@custom_op("megablocks::router_weight_backward", mutates_args=())
def router_weight_backward_op(
    weight: Tensor, expert: Tensor, d_weight: Tensor, num_experts: int, dtype: torch.dtype, options: RouterOptions
) -> Tensor:
    if runs_triton(weight):
        from megablocks.ops.routing.router_backward_triton import weight_backward_launch

        return weight_backward_launch(weight, expert, d_weight, num_experts, dtype, options)
    return router_weight_backward_ref(weight, expert, d_weight, num_experts, dtype, options)


@router_weight_backward_op.register_fake
def _(
    weight: Tensor, expert: Tensor, d_weight: Tensor, num_experts: int, dtype: torch.dtype, top_k: int, *_: Any
) -> Tensor:
    return weight.new_empty(weight.shape[0] // top_k, num_experts, dtype=dtype)


def _save_weights(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    logits, _, _, *ctx.options = inputs
    out = RouterOutput(*output)
    ctx.like = logits.shape[1], logits.dtype
    ctx.mark_non_differentiable(out.balance, out.z, out.sums)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(out.weight, out.expert)


def _backward_of_weights(ctx: Any, d_weight: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    nothing = (None,) * (2 + len(ctx.options))
    if d_weight is None:
        return None, *nothing
    return router_weight_backward_op(*ctx.saved_tensors, d_weight, *ctx.like, *ctx.options), *nothing


router_without_losses_op.register_autograd(_backward_of_weights, setup_context=_save_weights)


def register_router_autograd(op: Op, backward_op: Op, saved: Callable[..., tuple[Tensor, ...]]) -> None:
    """Make `backward_op` the gradient of the logits, and of nothing else, of a router's `op`.

    backward_op: takes logits, padding_mask, `saved(*results)`, the gradients of weight, balance, z and sums, options.
    """

    @backward_op.register_fake
    def _(logits: Tensor, *_: Any) -> Tensor:
        return torch.empty_like(logits, memory_format=torch.contiguous_format)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        logits, _, padding_mask, *settings = inputs
        ctx.rest, ctx.options = (None,) * (len(inputs) - 1), settings[-len(RouterOptions._fields) :]
        ctx.set_materialize_grads(False)  # a loss that nobody uses costs no zeros
        ctx.save_for_backward(logits, padding_mask, *saved(*output))

    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if all(grad is None for grad in grads[:4]):
            return None, *ctx.rest
        return backward_op(*ctx.saved_tensors, *grads[:4], *ctx.options), *ctx.rest

    op.register_autograd(backward, setup_context=setup_context)


def _saved(*results: Tensor) -> tuple[Tensor, ...]:
    out = RouterOutput(*results)
    return out.expert, out.load, out.stats


register_router_autograd(router_op, router_backward_op, _saved)


def router_kernel_takes(
    logits: Tensor, top_k: int, *, num_groups: int | None = None, norm_p: float | None = None
) -> bool:
    """Whether `route_topk` runs as a kernel for these logits (T, E) and options."""
    plain = num_groups is None and norm_p in (None, 1.0, 2.0)
    return plain and runs_triton(logits) and logits.shape[1] <= MAX_EXPERTS and top_k <= MAX_TOP_K


def router_options(
    logits: Tensor,
    top_k: int,
    bias: Tensor | None,
    padding_mask: Tensor | None,
    score_function: str,
    softmax_order: str,
    norm_p: float | None,
    scaling: float,
    balance_weight: float,
    z_weight: float,
) -> RouterOptions:
    """The options of `route_topk` as its op takes them; raises as `route_topk`."""
    if norm_p not in (None, 1.0, 2.0):
        raise ValueError(f"norm_p={norm_p!r}: must be None, 1 or 2; topk_weights takes others")
    if not 1 <= top_k <= logits.shape[1]:
        raise ValueError(f"top_k={top_k}: must be from 1 to the number of experts, {logits.shape[1]}")
    for name, t, length in (("bias", bias, logits.shape[1]), ("padding_mask", padding_mask, logits.shape[0])):
        if t is not None and t.shape != (length,):
            raise ValueError(f"{name} is {tuple(t.shape)}: must be ({length},) for logits {tuple(logits.shape)}")
    if runs_triton(logits) and not router_kernel_takes(logits, top_k):
        raise ValueError(
            f"logits {tuple(logits.shape)}, top_k={top_k}: must be at most {MAX_EXPERTS} experts and top_k={MAX_TOP_K}"
        )
    after = score_function == "softmax" and softmax_order == "after_topk"
    norm = 0 if norm_p is None else int(norm_p)
    weights = (float(balance_weight), float(z_weight))
    return RouterOptions(top_k, score_function == "sigmoid", after, norm, float(scaling), *weights)


def route_topk(
    logits: Tensor,
    top_k: int,
    *,
    score_function: str = "softmax",
    softmax_order: str = "before_topk",
    bias: Tensor | None = None,
    norm_p: float | None = None,
    scaling: float = 1.0,
    balance_weight: float = 0.0,
    z_weight: float = 0.0,
    padding_mask: Tensor | None = None,
    losses: bool = True,
) -> RouterOutput:
    """Choose each token's experts, with the load and the losses; no host synchronisation.

    Args:
        logits: (T, E) floating, differentiable.
        norm_p: None, 1 or 2. The other options are those of `topk_weights`.
        balance_weight, z_weight: of the losses.
        padding_mask: (T,) bool, True for padding.
        losses: whether balance, z and sums need to be differentiable. Where they need not, a softmax over the chosen
            logits keeps its weights for backward in place of all logits.

    Raises:
        ValueError: another norm_p, a top_k outside [1, E], a bias or mask of another shape, or more experts or choices
            than the kernel holds.
    """
    factors = (scaling, balance_weight, z_weight)
    options = router_options(logits, top_k, bias, padding_mask, score_function, softmax_order, norm_p, *factors)
    op = router_op if losses or not keeps_weights_alone(options) else router_without_losses_op
    return RouterOutput(*op(logits, bias, padding_mask, *options))
