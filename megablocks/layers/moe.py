"""`MoE`: the capacity layer. An expert has C places; tokens beyond are dropped, empty places are computed as padding.

The batch is (E, C, H) and each projection one torch.bmm, as in GShard, Switch, Tutel and megablocks 0.10's MoE; as
there, mlp_impl "grouped", "sparse" and "auto" name ways to compute ragged rows, which this layer does not have.

Host synchronisations: on one rank none for a positive factor, whose C follows from the number of tokens; one for a
factor <= 0, whose C is the fullest expert's load. Over several ranks one more than the dispatcher's own, since ranks
may hold different numbers of tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megablocks.config import ConfigError, MoEConfig
from megablocks.layers import mpu
from megablocks.layers.arguments import Arguments
from megablocks.layers.base import MoEBase
from megablocks.layers.losses import (
    batched_load_balancing_loss,
    clear_load_balancing_loss,
    get_load_balancing_loss,
    save_load_balancing_loss,
)
from megablocks.layers.mlp import MLP
from megablocks.ops.permute.binned import binned_gather, binned_scatter
from megablocks.ops.permute.padded import bin_dispatch
from megablocks.ops.routing.capacity import apply_capacity, capacity_of
from megablocks.ops.routing.dispatch import Dispatch, Routing, make_routing
from megablocks.parallel.dispatcher import AllToAllDispatcher, LocalDispatcher
from megablocks.parallel.groups import group_rank, group_size

__all__ = [
    "MoE",
    "ParallelMLP",
    "batched_load_balancing_loss",
    "clear_load_balancing_loss",
    "get_load_balancing_loss",
    "save_load_balancing_loss",
]

Dispatcher = LocalDispatcher | AllToAllDispatcher


class _PaddedExperts:
    """Experts that compute a fixed number of places each, filled or not."""

    def __init__(self, mlp: Callable[[Tensor], Tensor], places: int, num_bits: int) -> None:
        self.mlp, self.places, self.num_bits = mlp, places, num_bits

    def __call__(self, x: Tensor, dispatch: Dispatch, weight: Tensor | None) -> Tensor:
        bins = bin_dispatch(dispatch, self.places)
        places = self.mlp(binned_gather(x, dispatch, self.places, bins=bins))
        return binned_scatter(places, weight, dispatch, bins=bins, num_bits=self.num_bits)


def _with_capacity(
    x: Tensor,
    routing: Routing,
    config: MoEConfig,
    mlp: Callable[[Tensor], Tensor],
    dispatcher: Dispatcher,
    group: ProcessGroup | None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """x (T, H) → (T, H) by mlp: (E, C, H) → (E, C, H), and the metrics of `MoE`."""
    with torch.no_grad():
        capacity, places, before = _capacity(routing, config, group)
    kept = apply_capacity(routing, capacity, before=before)
    y = dispatcher.run(x, kept, _PaddedExperts(mlp, places, config.quantize_scatter_num_bits))
    return y, {"dropped": kept.metrics["dropped"], "capacity": torch.tensor(places)}


def _capacity(routing: Routing, config: MoEConfig, group: ProcessGroup | None) -> tuple[int, int, Tensor | None]:
    """(pairs an expert takes by the rule, places it computes, places (E,) already taken by lower ranks)."""
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


class ParallelMLP(nn.Module):
    """The experts of megablocks 0.10's capacity layer behind its router: `mlp`, and the layer's one output `bias` (H,).

    It owns all exchange of tokens between ranks, so it is the module to wrap in FSDP.

    Args:
        args: the layer; a capacity factor is needed.
    """

    def __init__(self, args: Arguments) -> None:
        super().__init__()
        self.args = args
        self.config = self._config_of(args)
        self.num_experts, self.top_k = self.config.num_experts, self.config.top_k
        self.expert_parallel_group = group = mpu.expert_parallel_group(args)
        self.dispatcher: Dispatcher = LocalDispatcher()
        if group is not None and group_size(group) > 1:
            shards, num_bits = mpu.hidden_sharding_degree(args), self.config.quantize_scatter_num_bits
            self.dispatcher = AllToAllDispatcher(
                group, self.num_experts, ffn_shards=shards, ffn_fastest=False, quantize_num_bits=num_bits
            )
        self.mlp = self._init_mlp(args)
        zeros = torch.zeros(args.hidden_size, device=args.resolve_device(), dtype=args.dtype)
        self.bias = nn.Parameter(zeros) if args.bias else None

    def _config_of(self, args: Arguments) -> MoEConfig:
        return args.to_config()

    def _init_mlp(self, args: Arguments) -> nn.Module:
        return MLP(args)

    def expert_capacity(self, tokens: int) -> int:
        """Places of an expert where every rank has `tokens` tokens; 0 means the fullest expert's load."""
        ranks = mpu.get_expert_parallel_world_size(self.args)
        return int(self.args.moe_capacity_factor * (self.top_k * tokens * ranks / self.num_experts))

    def compute(self, x: Tensor, routing: Routing) -> tuple[Tensor, dict[str, Tensor]]:
        """x (T, H) → (T, H) without bias, and metrics that the routing does not have."""
        return _with_capacity(x, routing, self.config, self.mlp, self.dispatcher, self.expert_parallel_group)

    def forward(
        self, x: Tensor, scores: Tensor, expert_weights: Tensor, top_experts: Tensor
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Send tokens through the experts chosen for them; in training, record what the load-balancing loss needs.

        Args:
            x: (..., H), T tokens in all.
            scores: (T, E), recorded only.
            expert_weights, top_experts: (T, K), or as many values in another shape; ids outside [0, E) are nobody's.

        Returns:
            (..., H) with the bias added, or with `return_bias` (without it, bias).
        """
        shape = (-1, self.top_k)
        routing = make_routing(top_experts.reshape(shape), expert_weights.reshape(shape), self.num_experts)
        y, _ = self.compute(x.reshape(-1, x.shape[-1]), routing)
        if self.training and self.args.moe_loss_weight > 0:
            save_load_balancing_loss((routing.metrics["tokens_per_expert"], scores))
        y = y.view(x.shape)
        if self.bias is None:
            return y
        return (y, self.bias) if self.args.return_bias else y + self.bias.to(y.dtype)


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

    def _init_experts_mlp(self, args: Arguments) -> ParallelMLP:
        return ParallelMLP(args)

    def _compute(self, x: Tensor, routing: Routing) -> tuple[Tensor, dict[str, Tensor]]:
        group = self.expert_parallel_group
        return _with_capacity(x, routing, self.config, self.experts.forward_padded, self.dispatcher, group)
