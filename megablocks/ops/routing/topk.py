"""Top-k: router logits to each token's experts and their weights.

Legend: T tokens, E experts, K top-k, G groups of E/G neighbouring experts. float32 inside (float64 for float64 logits).

    scores    = softmax(logits) over E, or sigmoid(logits)
    selection = the scores, or the logits where softmax comes after; + bias
    id_1..id_K = the K largest of the selection, equal ones by the lowest id first
    weight    = the scores at the ids, or the softmax of their logits; then / p-norm, · scaling

Sources: Shazeer et al. (arXiv 1701.06538) and megablocks 0.10 for softmax before top-k; DeepSeek-V3 (arXiv 2412.19437)
for sigmoid, groups and the selection bias. A NaN among a token's logits counts as its largest value: its ids are K
different ones in [0, E), its weights NaN or not as the formula gives, and no other token sees it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megablocks.ops.dtypes import accumulation_dtype

_TINY = 1e-20  # keeps 0/0 out of a normalisation whose K scores all underflowed; far below float32's resolution


def lowest_first_topk(values: Tensor, k: int) -> Tensor:
    """Indices (T, k) of the k largest of `values` (T, E) in descending order; among equals the lowest index first.

    torch.topk leaves the order of equals open, and it differs between devices. k passes of argmax do not.
    """
    lowest = torch.finfo(values.dtype).min
    left = values.detach().clamp(min=lowest)  # -inf is for what was taken; NaN stays NaN, which argmax puts first
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


def topk_weights(
    logits: Tensor,
    k: int,
    *,
    score_function: str = "softmax",
    softmax_order: str = "before_topk",
    bias: Tensor | None = None,
    num_groups: int | None = None,
    group_top_k: int | None = None,
    norm_p: float | None = None,
    scaling: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Each token's experts and their weights.

    Args:
        logits: (T, E) floating.
        k: K, at most E.
        score_function: "softmax" or "sigmoid".
        softmax_order: "before_topk" or "after_topk"; ignored for sigmoid.
        bias: (E,), added for the selection only.
        num_groups, group_top_k: restrict a token to its best groups; both or neither.
        norm_p: divide a token's weights by their p-norm.
        scaling: factor on the weights, last.

    Returns:
        ids (T, K) int64 in [0, E), in descending order of selection; weights (T, K) float32, differentiable.
    """
    logits = logits.to(accumulation_dtype(logits.dtype))
    after = score_function == "softmax" and softmax_order == "after_topk"
    scores = logits if after else router_scores(logits, score_function)
    with torch.no_grad():
        selection = scores.detach() if bias is None else scores.detach() + bias.to(scores.dtype)
        if num_groups is not None and group_top_k is not None:
            selection = mask_to_best_groups(selection, k, num_groups, group_top_k)
        ids = lowest_first_topk(selection, k)
    weights = scores.gather(1, ids)
    if after:
        weights = weights.softmax(dim=1)
    if norm_p is not None:
        weights = weights / (torch.linalg.vector_norm(weights, ord=norm_p, dim=1, keepdim=True) + _TINY)
    return ids, weights if scaling == 1.0 else weights * scaling


def router_scores(logits: Tensor, score_function: str) -> Tensor:
    """Scores (T, E) in float32 (float64 for float64) of logits (T, E)."""
    logits = logits.to(accumulation_dtype(logits.dtype))
    return logits.softmax(dim=1) if score_function == "softmax" else logits.sigmoid()
