"""Linear maps of many experts as one module, on `parallel_linear` (ScatterMoE, arXiv 2403.08245)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megablocks.ops.scattered.parallel_linear import parallel_linear


class ParallelExperts(nn.Module):
    """E = num_experts linear maps: weight (E, output_size, input_size), bias (E, output_size) or None.

    device, dtype: of the parameters; torch's defaults if None.
    """

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
        self.bias = nn.Parameter(torch.empty(num_experts, output_size, device=device, dtype=dtype)) if bias else None
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
        """`parallel_linear` with this module's weight and bias: shapes and errors are those of `parallel_linear`.

        inputs (T, input_size) of T tokens, or with grouped_in (T·k, input_size), → (T·k, output_size), or with gates
        (T, k) their weighted sums (T, output_size).
        """
        return parallel_linear(
            inputs, self.weight.transpose(1, 2), k, sorted_expert_idxs, sorted_scattered_idxs, expert_offsets,
            expert_biases=self.bias, gates=gates, grouped_in=grouped_in, grouped_out=grouped_out,
        )  # fmt: skip

    def extra_repr(self) -> str:
        return f"num_experts={self.num_experts}, input_size={self.input_size}, output_size={self.output_size}"
