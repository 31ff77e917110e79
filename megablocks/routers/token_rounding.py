"""Token rounding: top-k routing whose load of each expert is a multiple of the grouped product's tile of rows.

    f_e   = tokens whose top-k holds expert e;  ⌊f_e⌋, ⌈f_e⌉: the multiples of the tile around it
    n_e   = ⌊f_e⌋ or ⌈f_e⌉ by the rule, at most T
    order = expert e's column of weights, the tokens that chose e first, then all others, each by falling weight
    expert e computes the first n_e tokens of its order

So padding is filled with the next-best tokens and dropping takes the weakest; either moves an expert by less than one
tile, and an expert that nobody chose stays empty. Source: SonicMoE (arXiv 2512.14080) and its benchmark
`moe-token-rounding.py`. It is for training with at least two tiles a mean expert (T·K/E ≥ 2·tile): far below, `nearest`
and `down` leave most experts without tokens. Evaluate with plain top-k, as `route` does.

    nearest                up where f_e − ⌊f_e⌋ ≥ tile/2
    stochastic_frequency   up with probability (f_e − ⌊f_e⌋)/tile, so that the expected load is f_e
    stochastic_score       up with probability a/b: a the weights of the choices beyond the first ⌊f_e⌋ of the order, b
                           the weights of the whole tile that starts there
    balanced               so that the running total over the experts is off by at most tile/2
    up, down               always up, always down

Weights: a pair that the top-k chose keeps the weight that the top-k gave it, also where rounding took away others of
its token's choices; a pair that rounding adds has the expert's score over all E, not normalised. Both as in that code.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from megablocks.ops.grouped import TILE_ROWS
from megablocks.ops.routing.dispatch import Routing, count_valid
from megablocks.ops.routing.rounding import STOCHASTIC, check_rounding, max_pairs, round_loads, select_tokens


def round_tokens(
    ids: Tensor,
    weights: Tensor,
    scores: Tensor,
    rule: str = "nearest",
    tile: int = TILE_ROWS,
    *,
    padding_mask: Tensor | None = None,
    generator: Generator | None = None,
) -> Routing:
    """Round the loads of a top-k routing to multiples of `tile`.

    Args:
        ids: (T, K) int64, different ids in [0, E) a token.
        weights: (T, K) ≥ 0, float32 or float64, differentiable: of these choices.
        scores: (T, E) ≥ 0, same dtype, differentiable: the weight of a pair that rounding adds.
        rule: see the module.
        tile: rows.
        padding_mask: (T,) bool, True for padding, which gets no expert and is no load.
        generator: of the stochastic rules, on the scores' device; None is torch's own.

    Returns:
        Routing of R = `max_pairs` pairs in token order, and within a token by expert; pairs beyond the rounded loads
        have no expert; top_k is None. metrics: `tokens_per_expert` (E,) as the top-k chose, which balancing losses and
        biases are to see; `rounded_per_expert` (E,) as computed; `dropped` () choices that rounding down left out.

    Raises:
        ValueError: shapes that do not fit, an unknown rule, a tile below 1.
    """
    check_rounding(rule, tile)
    _check(ids, weights, scores)
    (num_tokens, top_k), num_experts = ids.shape, scores.shape[1]
    num_pairs = max_pairs(rule, num_tokens, num_experts, top_k, tile)
    weight_of = scores.scatter(1, ids, weights)  # every pair's, chosen or not
    with torch.no_grad():
        values = weight_of.detach()
        counted = ids if padding_mask is None else torch.where(padding_mask.unsqueeze(1), -1, ids)
        counts = count_valid(counted.flatten(), num_experts)
        draw = torch.rand(num_experts, generator=generator, device=ids.device) if rule in STOCHASTIC else None
        rounded, dropped = round_loads(values, ids, counts, rule, tile, draw, padding_mask)
        token, expert, source = select_tokens(values, ids, rounded, num_pairs, padding_mask=padding_mask)
    return Routing(
        token=token,
        expert=expert,
        # unused pairs take different places, so that the zeros of their gradients do not queue at one
        weight=torch.where(expert >= 0, weight_of.flatten().gather(0, source), 0.0),
        num_tokens=num_tokens,
        num_experts=num_experts,
        metrics={
            "tokens_per_expert": counts,
            "rounded_per_expert": rounded,
            "dropped": dropped,
            "invalid": torch.zeros((), dtype=torch.int64, device=scores.device),
        },
    )


def _check(ids: Tensor, weights: Tensor, scores: Tensor) -> None:
    if ids.dim() != 2 or weights.shape != ids.shape or scores.dim() != 2 or scores.shape[0] != ids.shape[0]:
        shapes = f"ids {tuple(ids.shape)}, weights {tuple(weights.shape)}, scores {tuple(scores.shape)}"
        raise ValueError(f"{shapes}: must be (T, K), (T, K) and (T, E)")
    if weights.dtype != scores.dtype or scores.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"weights are {weights.dtype}, scores {scores.dtype}: must both be float32 or both float64")
