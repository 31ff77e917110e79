"""How tokens spread over experts in an interval, in the words of a log line.

Legend: L layers with experts, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LoadSummary:
    """Load of an interval: tokens (L, E) and dropped (L,), on the CPU, summed over ranks and micro-batches."""

    tokens: Tensor
    dropped: Tensor

    @classmethod
    def from_table(cls, table: Tensor, layers: Sequence[int]) -> LoadSummary:
        """table: (all layers, E+1) counts, the last column dropped tokens. layers: 1-based, those with experts."""
        rows = table[torch.tensor([number - 1 for number in layers])]
        return cls(tokens=rows[:, :-1], dropped=rows[:, -1])

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
