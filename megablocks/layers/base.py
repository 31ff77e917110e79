"""What `dMoE` and `MoE` share: router, experts, dispatcher, shared expert, output bias, and old state dicts.

x (..., H) ─ router ─▶ Routing ─ [capacity: MoE] ─ dispatcher, experts ─ [+ shared expert] [+ bias] ─▶ y (..., H)
"""

from __future__ import annotations

import dataclasses
import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megablocks.config import MoEConfig
from megablocks.layers import losses
from megablocks.layers.arguments import Arguments
from megablocks.layers.experts import Experts
from megablocks.layers.memory import out_of_memory
from megablocks.layers.shared_expert import SharedExpert
from megablocks.ops.routing.dispatch import Routing
from megablocks.ops.routing.topk import router_scores
from megablocks.parallel.dispatcher import AllToAllDispatcher, LocalDispatcher
from megablocks.parallel.groups import ExpertShard, group_size
from megablocks.routers.router import make_router


@dataclass(frozen=True)
class AuxOutput:
    """What a layer returns beside its output.

    losses: name → float32 scalar with a graph, weighted, to be added to the training loss: "load_balancing_loss" and
        "z_loss", those whose weight is above 0.
    metrics: name → detached tensor, for logs: `tokens_per_expert` (E,) int64 before any drop, `dropped` () int64 pairs.
    """

    losses: dict[str, Tensor] = field(default_factory=dict)
    metrics: dict[str, Tensor] = field(default_factory=dict)


class MoEBase(nn.Module):
    """A mixture-of-experts layer; `dMoE` and `MoE` say what becomes of tokens beyond an expert's capacity.

    Args:
        config: a `MoEConfig`, or megablocks 0.10's `Arguments`, which also says device, dtype and expert group.
        expert_parallel_group: ranks over which the experts are spread in contiguous blocks, each with its own tokens.
            With more ranks than experts (a multiple), each expert's width is cut over several ranks, as in 0.10.
        loss_group: ranks of load_balancing_scope "global"; default the expert-parallel group.
        expert_grad_scale: factor on the experts' gradients. Default 1/(size of the expert-parallel group), as in 0.10:
            averaging the gradients over the ranks that hold the same expert then gives plain data parallelism's.
            1.0 where an outer data-parallel wrapper divides by all ranks itself (Megatron's DDP).
        seed: of the experts, see `Experts`. The router is drawn from torch's generator: seed it alike on every rank.
        device, dtype: of the parameters; torch's defaults if None.

    Raises:
        ConfigError: what the layer cannot do, in one line.
        ValueError: E cannot be spread over the group.
    """

    def __init__(
        self,
        config: MoEConfig | Arguments,
        *,
        expert_parallel_group: ProcessGroup | None = None,
        loss_group: ProcessGroup | None = None,
        expert_grad_scale: float | None = None,
        seed: int | None = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        # A copy, checked again: later changes of the caller's object are not this layer's.
        arguments = dataclasses.replace(config) if isinstance(config, Arguments) else None
        self.arguments = arguments
        if arguments is not None:
            device = arguments.resolve_device() if device is None else device
            dtype = arguments.dtype if dtype is None else dtype
            if arguments.moe_expert_model_parallelism and expert_parallel_group is None:
                expert_parallel_group = arguments.expert_parallel_group or dist.group.WORLD
        self.config = self._checked_config(config if isinstance(config, MoEConfig) else config.to_config())
        self.expert_parallel_group = expert_parallel_group
        ranks = group_size(expert_parallel_group)
        placed: dict[str, Any] = {"device": device, "dtype": dtype}

        self.router = make_router(
            self.config,
            loss_group=expert_parallel_group if loss_group is None else loss_group,
            init_method=None if arguments is None else arguments.init_method,
            **placed,
        )
        self.dispatcher, shard = self._spread(expert_parallel_group)
        self.experts = Experts(
            self.config,
            num_local_experts=shard.num_local_experts,
            expert_offset=shard.expert_offset,
            ffn_shard=(shard.ffn_rank, shard.ffn_size),
            init_method=None if arguments is None else arguments.init_method,
            output_init_method=None if arguments is None else arguments.output_layer_init_method,
            seed=seed,
            grad_scale=1 / ranks if expert_grad_scale is None else expert_grad_scale,
            **placed,
        )
        for parameter in self.experts.parameters():  # 0.10's mark, by which its users tell them from replicated ones
            parameter.expert_model_parallel = ranks > 1  # type: ignore[attr-defined]
        has_bias = self.config.output_bias
        self.output_bias = nn.Parameter(torch.zeros(self.config.hidden_size, **placed)) if has_bias else None
        self.shared_expert = self._build_shared(placed) if self.config.shared_expert_hidden_size is not None else None
        self._register_load_state_dict_pre_hook(_rename_old_keys)

    def _checked_config(self, config: MoEConfig) -> MoEConfig:
        raise NotImplementedError

    def _spread(self, group: ProcessGroup | None) -> tuple[LocalDispatcher | AllToAllDispatcher, ExpertShard]:
        experts, ranks = self.config.num_experts, group_size(group)
        if group is None or ranks == 1:
            return LocalDispatcher(), ExpertShard(0, experts)
        shards = ranks // experts if ranks > experts and ranks % experts == 0 else 1
        dispatcher = AllToAllDispatcher(group, experts, ffn_shards=shards, ffn_fastest=False)
        return dispatcher, dispatcher.shard

    def _build_shared(self, placed: dict[str, Any]) -> SharedExpert:
        arguments = self.arguments
        if arguments is not None:  # initialised by its linear class, as in 0.10
            return SharedExpert(
                self.config, bias=arguments.bias, linear=arguments.fc_cls, linear_kwargs=arguments.fc_kwargs, **placed
            )
        shared, std = SharedExpert(self.config, **placed), self.config.init_std
        for name, weight in shared.named_parameters():
            if name != "gate":
                down_std = self.config.output_init_std
                nn.init.normal_(weight, std=down_std if name == "down_proj.weight" and down_std is not None else std)
        return shared

    def _compute(self, x: Tensor, routing: Routing) -> tuple[Tensor, dict[str, Tensor]]:
        """x (T, H) → (T, H), and metrics that the routing does not have."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """x (..., H) → (..., H).

        A layer built from `Arguments` behaves as in megablocks 0.10: with `bias` and `return_bias` it returns (y, bias)
        and leaves the adding to the caller, and in training it records what `batched_load_balancing_loss` and
        `batched_router_zloss` need. One built from a `MoEConfig` returns y with the bias added; use `forward_with_aux`
        to get its losses.

        Raises:
            torch.OutOfMemoryError: torch's own, with the sizes and what to change.
        """
        y, aux, logits = self._run(x)
        if self.arguments is not None:
            self._record(aux, logits)
            if self.output_bias is not None and self.arguments.return_bias:
                return y, self.output_bias
        elif aux.losses:
            warnings.warn("forward leaves out the layer's auxiliary losses; call forward_with_aux", stacklevel=2)
        return self._add_bias(y)

    def forward_with_aux(self, x: Tensor) -> tuple[Tensor, AuxOutput]:
        """x (..., H) → y (..., H), complete with its bias, and the losses to add to the training loss, and metrics."""
        y, aux, _ = self._run(x)
        return self._add_bias(y), aux

    def _run(self, x: Tensor) -> tuple[Tensor, AuxOutput, Tensor]:
        hidden = self.config.hidden_size
        if x.shape[-1] != hidden:
            raise ValueError(f"x: has shape {tuple(x.shape)}, its last dimension must be hidden_size={hidden}")
        if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
            x = x.to(torch.get_autocast_dtype(x.device.type))  # before rows are copied, to move half the bytes
        tokens = x.reshape(-1, hidden)
        logits = self.router.logits(tokens)
        routing = self.router.route(logits)
        try:
            y, extra = self._compute(tokens, routing)
        except torch.OutOfMemoryError as error:
            raise out_of_memory(self.config, tokens, routing.num_pairs, error) from error
        if self.shared_expert is not None:
            y = self._add_shared(y, self.shared_expert(tokens))
        return y.view(x.shape), AuxOutput(routing.losses, {**routing.metrics, **extra}), logits

    def _add_shared(self, y: Tensor, shared: Tensor) -> Tensor:
        if self.arguments is not None and self.arguments.shared_expert_weighted_sum:
            top_k = self.config.top_k
            return shared / (top_k + 1) + y * (top_k / (top_k + 1))
        return shared + y

    def _add_bias(self, y: Tensor) -> Tensor:
        return y if self.output_bias is None else y + self.output_bias.to(y.dtype)

    def _record(self, aux: AuxOutput, logits: Tensor) -> None:
        if not self.training:
            return
        if self.config.load_balancing_loss_weight > 0:
            scores = router_scores(logits, self.config.score_function)
            losses.save_load_balancing_loss((aux.metrics["tokens_per_expert"], scores))
        if self.config.z_loss_weight > 0:
            losses.save_router_logits(logits)

    def extra_repr(self) -> str:
        return f"num_experts={self.config.num_experts}, top_k={self.config.top_k}"


def _rename_old_keys(state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Take the keys of megablocks 0.10, whose experts stood one level deeper and held the output bias."""
    for old, new in (
        ("experts.mlp.w1", "experts.w1"),
        ("experts.mlp.v1", "experts.v1"),
        ("experts.mlp.w2", "experts.w2"),
        ("experts.bias", "output_bias"),
    ):
        if prefix + old in state:
            state[prefix + new] = state.pop(prefix + old)
