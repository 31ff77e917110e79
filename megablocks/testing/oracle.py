"""A mixture of experts that computes one expert at a time in float64, for tests to compare with."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from megablocks.ops.activation_table import GATED


def gelu(z: Tensor, approximate: str) -> Tensor:
    """Compute GELU by the textbook's formula, not with torch's function."""
    if approximate == "none":
        return 0.5 * z * (1 + torch.erf(z / math.sqrt(2)))
    return 0.5 * z * (1 + torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))


FORMULAS: dict[str, Callable[[Tensor, str], Tensor]] = {
    "gelu": gelu,
    "silu": lambda z, approximate: z / (1 + torch.exp(-z)),
    "relu": lambda z, approximate: torch.maximum(z, z.new_zeros(())),
    "relu2": lambda z, approximate: torch.maximum(z, z.new_zeros(())) ** 2,
}
"""The unary activations as their papers write them; tests compare `megablocks.ops.activation_table` with them."""


def experts_oracle(
    x: Tensor,
    token: Tensor,
    expert: Tensor,
    weight: Tensor,
    parameters: Mapping[str, Tensor],
    num_experts: int,
    activation: str,
    approximate: str = "tanh",
) -> Tensor:
    """Return the sum of weight · expert(x) over the pairs of each token.

    Args:
        x: (T, H) float64. token, expert, weight: (R,). Pairs with an id outside [0, E) contribute nothing.
        parameters: w1, v1, w2 as (E·I, H), b1, c1 (E, I), b2 (E, H), in float64. v1 and the biases are optional.
        activation, approximate: as in `MoEConfig`.

    Returns:
        (T, H) float64.
    """
    hidden = x.shape[1]

    def of(name: str, e: int) -> Tensor:
        value = parameters[name]
        return value.view(num_experts, -1, hidden)[e] if name in ("w1", "v1", "w2") else value[e]

    y = torch.zeros_like(x)
    for e in range(num_experts):
        chosen = (expert == e).nonzero().flatten()
        rows = token[chosen].long()
        up = x[rows] @ of("w1", e).t()
        if "b1" in parameters:
            up = up + of("b1", e)
        act = FORMULAS[GATED.get(activation, activation)](up, approximate)
        if "v1" in parameters:
            gate = x[rows] @ of("v1", e).t()
            act = act * (gate + of("c1", e) if "c1" in parameters else gate)
        out = act @ of("w2", e)
        if "b2" in parameters:
            out = out + of("b2", e)
        y = y.index_add(0, rows, out * weight[chosen].unsqueeze(1))
    return y


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """‖actual − expected‖ / ‖expected‖ in float64; ‖actual‖ if `expected` is zero; inf if it is NaN."""
    difference, scale = (actual.double() - expected.double()).norm().item(), expected.double().norm().item()
    error = difference / scale if scale else difference
    return float("inf") if error != error else error
