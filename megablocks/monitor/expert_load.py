"""How tokens spread over experts, accumulated on the device and read once a log interval.

Legend: L layers with experts, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LoadSummary:
    """Load of an interval: tokens (L, E) and dropped (L,), on the CPU, summed over ranks and micro-batches."""

    tokens: Tensor
    dropped: Tensor

    @property
    def max_over_mean(self) -> Tensor:
        """(L,) the fullest expert's tokens over the mean: 1 is perfect balance, E is collapse."""
        mean = self.tokens.double().mean(dim=1)
        return self.tokens.double().amax(dim=1) / mean.clamp(min=1e-9)

    @property
    def empty(self) -> Tensor:
        """(L,) number of experts that saw no token."""
        return (self.tokens == 0).sum(dim=1)

    def __str__(self) -> str:
        def join(values: list[str]) -> str:
            return "/".join(values)

        return (
            f" expert load max/mean: {join([f'{v:.2f}' for v in self.max_over_mean.tolist()])} |"
            f" empty experts: {join([str(v) for v in self.empty.tolist()])} |"
            f" tokens dropped: {int(self.dropped.sum())} |"
        )


class ExpertLoad:
    """Counters for L layers of E experts. `add` never synchronises; `read` does, once, and starts a new interval."""

    def __init__(self, num_layers: int, num_experts: int, device: torch.device | str) -> None:
        self._counts = torch.zeros(num_layers, num_experts + 1, dtype=torch.int64, device=device)

    def add(self, layer: int, tokens_per_expert: Tensor, dropped: Tensor | None = None) -> None:
        """Add one micro-batch. layer: 0-based row. tokens_per_expert: (E,) integer. dropped: () integer."""
        self._counts[layer, :-1] += tokens_per_expert
        if dropped is not None:
            self._counts[layer, -1] += dropped

    def read(self, group: torch.distributed.ProcessGroup | None = None) -> LoadSummary:
        """Sum over the ranks of `group` (None: all), reset, and bring to the host. A collective call."""
        counts = self._counts.clone()
        self._counts.zero_()
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(counts, group=group)
        counts = counts.cpu()
        return LoadSummary(tokens=counts[:, :-1], dropped=counts[:, -1])
