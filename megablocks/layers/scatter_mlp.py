"""The experts' MLP in ScatterMoE's way: tokens are gathered and weighted inside the products, never copied.

    y[t] = Σ_{pairs of t} weight · MLP_e(x[t])

It stands for `gather`, `grouped_mlp` and `combine` together, over the same weights and dispatch. Kept for backward
are x, the pre-activations and, unless it is recomputed, the activation.
"""

from __future__ import annotations

from torch import Tensor

from megablocks.config import MoEConfig
from megablocks.layers.expert_mlp import ExpertWeights
from megablocks.ops.activation import activate
from megablocks.ops.routing.dispatch import Dispatch
from megablocks.ops.scattered.dispatched import gathered_linear, linear_combine


def scatter_mlp(
    weights: ExpertWeights, x: Tensor, dispatch: Dispatch, weight: Tensor | None, config: MoEConfig
) -> Tensor:
    """x (T, H), dispatch over the experts of `weights`, weight (R,) or None for ones → (T, H), 0 without an expert."""
    pre = gathered_linear(x, weights.w1.transpose(1, 2), weights.b1, dispatch)
    gate = None if weights.v1 is None else gathered_linear(x, weights.v1.transpose(1, 2), weights.c1, dispatch)
    name, approximate = config.activation, config.gelu_approximate
    if config.recompute_activation:
        return linear_combine(pre, gate, weights.w2, weights.b2, weight, dispatch, name, approximate)
    act = activate(pre, gate, name, approximate)
    return linear_combine(act, None, weights.w2, weights.b2, weight, dispatch)
