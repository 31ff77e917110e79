"""Choose the pairs that a layer with a capacity drops, and the number of places per expert, on one or several ranks.

`megablocks.ops.routing.capacity` contains the rules, and drops pairs on one rank.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megablocks.config import MoEConfig
from megablocks.moe.groups import group_rank, group_size
from megablocks.ops.routing.capacity import apply_capacity, capacity_of
from megablocks.ops.routing.dispatch import Routing


@torch.no_grad()
def limit_to_capacity(routing: Routing, config: MoEConfig, group: ProcessGroup | None) -> tuple[Routing, int]:
    """Drop the pairs beyond config.capacity_factor, for experts that compute padded places.

    Every rank of the group must call it. Ranks can hold different numbers of tokens. The host needs the number of
    places. It must read it from the device for a factor <= 0, and over several ranks.

    Returns:
        (the routing without the dropped pairs, with the metric `dropped`; places that an expert computes on its rank).
    """
    factor, rule, tokens = config.capacity_factor, config.capacity_rule, routing.num_tokens
    assert factor is not None, "only layers with a capacity call this"
    experts, top_k, ranks = config.num_experts, config.top_k, group_size(group)
    load = routing.metrics["tokens_per_expert"]
    if ranks == 1:
        places = capacity_of(rule, factor, top_k, tokens, experts, load)
        capacity = int(places) if isinstance(places, Tensor) else places  # torch.export makes a constant of int()
        return apply_capacity(routing, capacity), capacity
    loads, every_tokens = _gather(torch.cat([load, load.new_full((1,), tokens)]), group).split([experts, 1], dim=1)
    together = rule == "megablocks"  # this rule counts the pairs of all ranks together
    fullest = (loads.sum(0) if together else loads.amax(0)).max()
    counted = every_tokens.sum() if together else every_tokens.max()
    on_host = torch.stack([fullest, counted]).tolist()
    capacity = int(capacity_of(rule, factor, top_k, on_host[1], experts, torch.tensor(on_host[:1])))
    if together:
        return apply_capacity(routing, capacity, before=_taken_before(loads, group)), capacity
    return apply_capacity(routing, capacity), capacity * ranks


@torch.no_grad()
def drop_beyond_capacity(routing: Routing, config: MoEConfig, group: ProcessGroup | None) -> Routing:
    """Drop the pairs beyond config.capacity_factor, for experts without padding. It never synchronizes.

    Every rank of the group must call it, with the same number of tokens. Tutel's negative factor means the smaller of
    the fullest expert's load and the bound, so it drops what the bound alone drops. A factor of 0 means the fullest
    expert's load, so it drops nothing.
    """
    if not config.capacity_factor:
        return routing
    load, before, ranks = routing.metrics["tokens_per_expert"], None, 1
    if config.capacity_rule == "megablocks" and group_size(group) > 1:
        ranks = group_size(group)
        before = _taken_before(_gather(load, group), group)
    factor, sizes = abs(config.capacity_factor), (config.top_k, routing.num_tokens, config.num_experts)
    capacity = capacity_of(config.capacity_rule, factor, *sizes, load, num_ranks=ranks)
    return apply_capacity(routing, capacity, before=before)


def _gather(mine: Tensor, group: ProcessGroup | None) -> Tensor:
    """(n,) of every rank → (ranks, n)."""
    table = mine.new_empty(group_size(group), mine.shape[0])
    dist.all_gather(list(table), mine.contiguous(), group=group)
    return table


def _taken_before(loads: Tensor, group: ProcessGroup | None) -> Tensor:
    """Places (E,) that the pairs of lower ranks occupy; those pairs come first."""
    return loads[: group_rank(group)].sum(0)
