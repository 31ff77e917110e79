"""`MoE`: the capacity layer. An expert has C places; tokens beyond are dropped, empty places are computed as padding.

The batch is (E, C, H) and each projection one torch.bmm, as in GShard, Switch, Tutel and megablocks 0.10's MoE; as
there, mlp_impl "grouped", "sparse" and "auto" name ways to compute ragged rows, which this layer does not have.

Host synchronisations: on one rank none for a positive factor, whose C follows from the number of tokens; one for a
factor <= 0, whose C is the fullest expert's load. Over several ranks one more than the dispatcher's own, since ranks
may hold different numbers of tokens.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from megablocks.config import ConfigError, MoEConfig
from megablocks.layers.base import MoEBase
from megablocks.layers.experts import Experts
from megablocks.layers.losses import (
    batched_load_balancing_loss,
    clear_load_balancing_loss,
    get_load_balancing_loss,
    save_load_balancing_loss,
)
from megablocks.ops.permute.binned import binned_gather, binned_scatter
from megablocks.ops.permute.padded import bin_dispatch
from megablocks.ops.routing.capacity import apply_capacity, capacity_of
from megablocks.ops.routing.dispatch import Dispatch, Routing
from megablocks.parallel.groups import group_rank, group_size

__all__ = [
    "MoE",
    "batched_load_balancing_loss",
    "clear_load_balancing_loss",
    "get_load_balancing_loss",
    "save_load_balancing_loss",
]


class _PaddedExperts:
    """Experts that compute a fixed number of places each, filled or not."""

    def __init__(self, experts: Experts, places: int) -> None:
        self.experts, self.places = experts, places

    def __call__(self, x: Tensor, dispatch: Dispatch, weight: Tensor | None) -> Tensor:
        bins = bin_dispatch(dispatch, self.places)
        places = self.experts.forward_padded(binned_gather(x, dispatch, self.places, bins=bins))
        return binned_scatter(places, weight, dispatch, bins=bins)


class MoE(MoEBase):
    """Capacity mixture of experts. Arguments as in `MoEBase`; config.capacity_factor is required.

    Which pairs drop: an expert takes the earliest, by rank, then token, then choice; see `ops.routing.capacity` for the
    rules. A token all of whose pairs dropped yields zeros. aux.metrics: `dropped` () this rank's dropped pairs,
    `capacity` () places an expert computes on its rank.
    """

    def _checked_config(self, config: MoEConfig) -> MoEConfig:
        if config.capacity_factor is None:
            raise ConfigError("capacity_factor=None: must be a number for MoE, or use dMoE")
        return config

    def _compute(self, x: Tensor, routing: Routing) -> tuple[Tensor, dict[str, Tensor]]:
        with torch.no_grad():
            capacity, places, before = self._capacity(routing)
        kept = apply_capacity(routing, capacity, before=before)
        y = self.dispatcher.run(x, kept, _PaddedExperts(self.experts, places))
        return y, {"dropped": kept.metrics["dropped"], "capacity": torch.tensor(places)}

    def _capacity(self, routing: Routing) -> tuple[int, int, Tensor | None]:
        """(pairs an expert takes by the rule, places it computes, places (E,) already taken by lower ranks)."""
        config, group = self.config, self.expert_parallel_group
        factor, rule = config.capacity_factor, config.capacity_rule
        assert factor is not None
        load, tokens = routing.metrics["tokens_per_expert"], routing.num_tokens
        if group is None or group_size(group) == 1:
            capacity = int(capacity_of(rule, factor, config.top_k, tokens, config.num_experts, load))
            return capacity, capacity, None
        ranks = group.size()
        mine = torch.cat([load, load.new_full((1,), tokens)])
        table = mine.new_empty(ranks * mine.shape[0])
        dist.all_gather_into_tensor(table, mine, group=group)
        loads, every_tokens = table.view(ranks, -1).split([config.num_experts, 1], dim=1)
        together = loads.sum(0) if rule == "megablocks" else loads.amax(0)
        fullest, total, largest = torch.stack([together.max(), every_tokens.sum(), every_tokens.max()]).tolist()
        counted = total if rule == "megablocks" else largest
        capacity = int(capacity_of(rule, factor, config.top_k, counted, config.num_experts, torch.tensor([fullest])))
        if rule == "megablocks":  # a count over all ranks: lower ranks' pairs come first
            return capacity, capacity, loads[: group_rank(group)].sum(0)
        return capacity, capacity * ranks, None
