"""How the tokens of a log interval were spread over the experts, and the fields of the log line that say so.

Legend: L layers with experts, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LoadSummary:
    """Load of a log interval, on the CPU: tokens (L, E) and dropped (L,), summed over ranks and micro-batches."""

    tokens: Tensor
    dropped: Tensor

    @classmethod
    def from_table(cls, table: Tensor, layers: Sequence[int]) -> LoadSummary:
        """table: (all layers, E+1) counts; the last column is dropped tokens. layers: 1-based, those with experts."""
        rows = table[torch.tensor([number - 1 for number in layers])]
        return cls(tokens=rows[:, :-1], dropped=rows[:, -1])

    @property
    def max_over_mean(self) -> Tensor:
        """(L,) the tokens of the fullest expert over the mean: 1 is perfect balance, E is collapse."""
        mean = self.tokens.double().mean(dim=1)
        return self.tokens.double().amax(dim=1) / mean.clamp(min=1e-9)

    @property
    def empty(self) -> Tensor:
        """(L,) the number of experts that got no token."""
        return (self.tokens == 0).sum(dim=1)

    def __str__(self) -> str:
        balance = "/".join(f"{value:.2f}" for value in self.max_over_mean.tolist())
        empty = "/".join(map(str, self.empty.tolist()))
        dropped = int(self.dropped.sum())
        return f" expert load max/mean: {balance} | empty experts: {empty} | tokens dropped: {dropped} |"
