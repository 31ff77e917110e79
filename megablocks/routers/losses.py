"""Auxiliary losses of a router, in float32 (float64 for float64 scores), per layer.

Legend: T tokens that are no padding, E experts, K top-k, n ranks.

A NaN score makes the loss NaN on purpose, so that the guard sees it; the gradient of every other token stays finite,
since it reads the other tokens' counts and its own scores only.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from megablocks.ops.routing.router import balance_loss


def load_balancing_loss(
    scores: Tensor,
    tokens_per_expert: Tensor,
    num_tokens: int | Tensor,
    top_k: int,
    weight: float,
    *,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """weight · E/(K·T²) · Σ_e tokens_e · Σ_t score_te (Switch Transformer, arXiv 2101.03961; megablocks 0.10).

    Args:
        scores: (T, E), differentiable, rows of padding 0.
        tokens_per_expert: (E,) integer, before any drop.
        num_tokens: T, an int or a () integer tensor.
        group: ranks whose tokens are balanced together (arXiv 2501.11873). Counts and T are summed over it, scores stay
            local, and the result is scaled by n, so that the mean over the ranks is the loss of all their tokens, for
            any split of the tokens. None for this rank's tokens alone.

    Returns:
        () scalar; 0 without tokens.
    """
    return balance_loss_over_ranks(scores.sum(0), tokens_per_expert, num_tokens, top_k, weight, group)


def balance_loss_over_ranks(
    sums: Tensor,
    tokens_per_expert: Tensor,
    num_tokens: int | Tensor,
    top_k: int,
    weight: float,
    group: dist.ProcessGroup | None,
) -> Tensor:
    """`load_balancing_loss` from the sums (E,) of this rank's scores."""
    num_ranks = 1
    if group is not None and (num_ranks := dist.get_world_size(group)) > 1:
        count = torch.as_tensor(num_tokens, dtype=torch.int64, device=tokens_per_expert.device)
        totals = torch.cat((tokens_per_expert.long(), count.view(1)))
        dist.all_reduce(totals, group=group)
        tokens_per_expert, num_tokens = totals[:-1], totals[-1]
    return balance_loss(sums, tokens_per_expert, num_tokens, top_k, weight * num_ranks)


def z_loss(logits: Tensor, num_tokens: int | Tensor, weight: float, *, padding_mask: Tensor | None = None) -> Tensor:
    """weight · mean over the tokens of logsumexp(logits)² (ST-MoE, arXiv 2202.08906).

    Args:
        logits: (T, E), differentiable.
        num_tokens: tokens that are no padding, an int or a () integer tensor.
        padding_mask: (T,) bool, True for padding.

    Returns:
        () scalar; 0 without tokens.
    """
    squares = torch.logsumexp(logits, dim=1).square()
    if padding_mask is not None:
        squares = squares.masked_fill(padding_mask, 0.0)
    num_tokens = num_tokens.clamp(min=1) if isinstance(num_tokens, Tensor) else max(num_tokens, 1)
    return weight * (squares.sum() / num_tokens)
