"""The mixture of experts as its formula reads, one expert at a time in float64, for tests to compare with."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor


def _act(name: str, z: Tensor, approximate: str) -> Tensor:
    if name in ("gelu", "geglu"):
        return F.gelu(z, approximate=approximate)
    if name in ("silu", "swiglu"):
        return F.silu(z)
    return F.relu(z) ** 2 if name == "relu2" else F.relu(z)


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
    """Σ over the pairs of each token of weight · expert(x).

    Args:
        x: (T, H) float64; token, expert, weight: (R,), ids outside [0, E) contribute nothing.
        parameters: w1, v1, w2 as (E·I, H), b1, c1 (E, I), b2 (E, H); float64, those that exist.
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
        act = _act(activation, up, approximate)
        if "v1" in parameters:
            gate = x[rows] @ of("v1", e).t()
            act = act * (gate + of("c1", e) if "c1" in parameters else gate)
        out = act @ of("w2", e)
        if "b2" in parameters:
            out = out + of("b2", e)
        y = y.index_add(0, rows, out * weight[chosen].unsqueeze(1))
    return y


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """‖actual − expected‖ / ‖expected‖ in float64; ‖actual‖ where `expected` is zero. NaN counts as inf."""
    difference, scale = (actual.double() - expected.double()).norm().item(), expected.double().norm().item()
    error = difference / scale if scale else difference
    return float("inf") if error != error else error
