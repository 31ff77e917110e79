"""ScatterMoE's modules under its names (arXiv 2403.08245; github.com/shawntan/scattermoe), on our `parallel_linear`.

Constructors, forward signatures, parameter names and shapes equal those of its package, so its checkpoints load. The
modules accept the router's output: expert_p (T, K) weights and expert_idxs (T, K) ids. A program that imports this
module as `scattermoe` finds `scattermoe.mlp.MLP` and `scattermoe.kernels.ops.group` as in that package.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable

from torch import Tensor, nn

from megablocks.moe.parallel_experts import ParallelExperts
from megablocks.ops.scattered.parallel_linear import flatten_sort_count, parallel_linear
from megablocks.ops.upstream import function_class
from megablocks.ops.upstream import scattermoe as _kernels

__all__ = ["GLUMLP", "MLP", "ParallelExperts", "ParallelLinear", "flatten_sort_count", "kernels", "parallel_linear"]

mlp = parallel_experts = sys.modules[__name__]
kernels = types.SimpleNamespace(ops=_kernels)
ParallelLinear = function_class("ParallelLinear", parallel_linear)


class MLP(nn.Module):
    """Σ_k expert_p · output_experts(activation(experts(x))); `activation` None is the identity.

    Args:
        input_size, hidden_size: H of a token, and I of an expert.
        num_experts, top_k: E, and the number of experts per token; more than E count as E.
        bias: whether both linear maps of an expert have biases.
    """

    _up_factor = 1

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        bias: bool = False,
        activation: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.num_experts, self.input_size, self.hidden_size = num_experts, input_size, hidden_size
        self.experts = ParallelExperts(num_experts, input_size, self._up_factor * hidden_size, bias=bias)
        self.output_experts = ParallelExperts(num_experts, hidden_size, input_size, bias=bias)
        self.top_k = min(top_k, num_experts)
        self.activation = activation

    def _activate(self, h: Tensor) -> Tensor:
        return h if self.activation is None else self.activation(h)

    def forward(self, x: Tensor, expert_p: Tensor, expert_idxs: Tensor) -> Tensor:
        """x (..., input_size) of T tokens, expert_p and expert_idxs (T, top_k) → (..., input_size)."""
        tokens = x.reshape(-1, x.shape[-1])
        order = flatten_sort_count(expert_idxs, num_experts=self.num_experts)
        h = self.experts(tokens, self.top_k, *order, grouped_out=True)
        y = self.output_experts(self._activate(h), 1, *order, grouped_in=True, gates=expert_p)
        return y.view(*x.shape[:-1], y.shape[-1])

    def extra_repr(self) -> str:
        return f"k={self.top_k}"


class GLUMLP(MLP):
    """The gated form of `MLP`: the first half of the experts' columns is multiplied by activation(second half)."""

    _up_factor = 2

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        bias: bool = False,
        activation: Callable[[Tensor], Tensor] | None = nn.SiLU(),  # noqa: B008  (its package's default)
    ) -> None:
        super().__init__(input_size, hidden_size, num_experts, top_k, bias, activation)

    def _activate(self, h: Tensor) -> Tensor:
        up, gate = h.chunk(2, dim=-1)
        return super()._activate(gate) * up
