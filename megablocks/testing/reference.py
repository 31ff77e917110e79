"""The truth of an MoE layer: a loop over the pairs in plain torch, each written out from its formula."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from megablocks.ops.routing.dispatch import Routing


def activation_formula(name: str, pre: Tensor, gate_pre: Tensor | None, approximate: str = "tanh") -> Tensor:
    """The activation's textbook formula, in pre's dtype, without torch.nn.functional."""
    if name in ("gelu", "geglu"):
        if approximate == "tanh":
            out = 0.5 * pre * (1 + torch.tanh(math.sqrt(2 / math.pi) * (pre + 0.044715 * pre**3)))
        else:
            out = 0.5 * pre * (1 + torch.erf(pre / math.sqrt(2)))
    elif name in ("silu", "swiglu"):
        out = pre / (1 + torch.exp(-pre))
    else:
        out = torch.where(pre > 0, pre, torch.zeros_like(pre))
        out = out * out if name == "relu2" else out
    return out if gate_pre is None else out * gate_pre


def moe_loop(
    x: Tensor,
    routing: Routing,
    w1: Tensor,
    w2: Tensor,
    *,
    v1: Tensor | None = None,
    biases: Sequence[Tensor | None] = (None, None, None),
    activation: str = "gelu",
    approximate: str = "tanh",
    weight: Tensor | None = None,
) -> Tensor:
    """y[t] = Σ over t's pairs of weight · (act(x·w1ᵀ + b1) [⊙ (x·v1ᵀ + c1)] · w2 + b2), pair by pair.

    x (T, H); w1, v1, w2 (E, I, H); biases b1, c1 (E, I) and b2 (E, H) or None; weight (R,), default the routing's.
    """
    weight = routing.weight if weight is None else weight
    b1, c1, b2 = biases
    rows = [torch.zeros_like(x[0]) for _ in range(routing.num_tokens)]
    for pair, (token, expert) in enumerate(zip(routing.token.tolist(), routing.expert.tolist(), strict=True)):
        if not 0 <= expert < routing.num_experts:
            continue
        pre = w1[expert] @ x[token] + (0 if b1 is None else b1[expert])
        gate = None if v1 is None else v1[expert] @ x[token] + (0 if c1 is None else c1[expert])
        y = activation_formula(activation, pre, gate, approximate) @ w2[expert] + (0 if b2 is None else b2[expert])
        rows[token] = rows[token] + weight[pair] * y
    return torch.stack(rows) if rows else torch.zeros_like(x)
