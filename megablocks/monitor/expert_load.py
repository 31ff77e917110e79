"""The load of the experts: counted on the device in every training step, read and summed once per log interval.

Legend: L layers with experts, E experts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megablocks.config import refuse


class ExpertLoad:
    """A layer's counts on this rank since the last reset. They stay on the device until `gather_load` reads them."""

    def __init__(self, num_experts: int) -> None:
        self.num_experts = num_experts
        self.counts: Tensor | None = None

    @torch.no_grad()
    def add(self, tokens_per_expert: Tensor, dropped: Tensor | int) -> None:
        """Add a step's counts.

        Args:
            tokens_per_expert: (E,), pairs (token, expert) by expert, before any drop.
            dropped: (), how many of these pairs were dropped.
        """
        if self.counts is None:
            self.counts = torch.zeros(self.num_experts + 1, dtype=torch.int64, device=tokens_per_expert.device)
        self.counts[:-1] += tokens_per_expert
        self.counts[-1] += dropped

    def reset(self) -> None:
        if self.counts is not None:
            self.counts.zero_()  # in place: a replayed CUDA graph adds to the memory that it was captured with


def _loads(model: Iterable[nn.Module]) -> Iterator[tuple[int, ExpertLoad]]:
    """The number (from 1) and the counts of each layer of `gather_load`'s model that counts its load."""
    for chunk in model:
        for module in chunk.modules():
            load = getattr(module, "expert_load", None)
            if isinstance(load, ExpertLoad):
                layer_number = module.layer_number
                assert isinstance(layer_number, int), "TransformerLayer sets it"
                yield layer_number, load


def check_load(model: Iterable[nn.Module], num_experts: int) -> None:
    """Refuse, with a ConfigError, layers whose counts do not fit into one table of `gather_load`."""
    for layer_number, load in _loads(model):
        if load.num_experts != num_experts:
            rule = "must be the number of every layer that counts its load"
            refuse("num_experts", num_experts, f"layer {layer_number} has {load.num_experts} experts; {rule}")


def gather_load(model: Iterable[nn.Module], num_layers: int, num_experts: int) -> Tensor:
    """Sum the counts of all layers over all ranks since the last call, and reset them. Every rank must call it.

    Args:
        model: this rank's model chunks. A layer with experts has an `ExpertLoad` as `expert_load`, and its number in
            the whole model, from 1, as `layer_number`. Ranks of a tensor-parallel group hold different tokens.

    Returns:
        (num_layers, num_experts + 1) int64 on the CPU: pairs of each expert, then dropped pairs. Rows of layers without
        experts are 0.
    """
    device = "cpu" if dist.get_backend() == "gloo" else torch.device("cuda", torch.cuda.current_device())
    table = torch.zeros(num_layers, num_experts + 1, dtype=torch.int64, device=device)
    for layer_number, load in _loads(model):
        if load.counts is not None:
            table[layer_number - 1] += load.counts.to(device)
            load.reset()
    dist.all_reduce(table)
    return table.cpu()


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
