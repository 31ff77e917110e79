"""ScatterMoE's modules under its names (arXiv 2403.08245; github.com/shawntan/scattermoe), on our `parallel_linear`.

Constructors, forward signatures, parameter names and shapes are those of its package, so that its checkpoints load.
They take the router's choice as it comes: expert_p (T, K) weights and expert_idxs (T, K) ids.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from megablocks.ops.scattered.parallel_linear import flatten_sort_count, parallel_linear

__all__ = ["GLUMLP", "MLP", "ParallelExperts", "flatten_sort_count", "parallel_linear"]


class ParallelExperts(nn.Module):
    """E linear maps: weight (E, output_size, input_size), bias (E, output_size) or None."""

    def __init__(
        self,
        num_experts: int,
        input_size: int,
        output_size: int,
        bias: bool = False,
        *,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, output_size, input_size, device=device, dtype=dtype))
        empty_bias = torch.empty(num_experts, output_size, device=device, dtype=dtype) if bias else None
        self.bias = None if empty_bias is None else nn.Parameter(empty_bias)
        self.num_experts, self.input_size, self.output_size = num_experts, input_size, output_size
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """A normal of std 0.02, biases 0."""
        nn.init.normal_(self.weight, std=0.02)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(
        self,
        inputs: Tensor,
        k: int,
        sorted_expert_idxs: Tensor,
        sorted_scattered_idxs: Tensor,
        expert_offsets: Tensor,
        gates: Tensor | None = None,
        grouped_in: bool = False,
        grouped_out: bool = False,
    ) -> Tensor:
        """As `parallel_linear`."""
        return parallel_linear(
            inputs, self.weight.transpose(1, 2), k, sorted_expert_idxs, sorted_scattered_idxs, expert_offsets,
            expert_biases=self.bias, gates=gates, grouped_in=grouped_in, grouped_out=grouped_out,
        )  # fmt: skip

    def extra_repr(self) -> str:
        return f"num_experts={self.num_experts}, input_size={self.input_size}, output_size={self.output_size}"


class MLP(nn.Module):
    """Σ_k expert_p · output_experts(activation(experts(x))); `activation` None is the identity."""

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
    """The gated form: the first half of the experts' columns is multiplied by activation(second half)."""

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
