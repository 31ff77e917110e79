"""What `dMoE` and `MoE` share: router, experts, dispatcher, shared expert, output bias, and old state dicts.

x (..., H) ─ router ─▶ Routing ─ [capacity: MoE] ─ dispatcher, experts ─ [+ shared expert] [+ bias] ─▶ y (..., H)
"""

from __future__ import annotations

import dataclasses
import warnings
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megablocks.config import MoEConfig
from megablocks.layers import sharedexpert_registry
from megablocks.layers.ahead import Ahead, leaf
from megablocks.layers.arguments import Arguments
from megablocks.layers.common import cast_if_autocast_enabled
from megablocks.layers.experts import Experts
from megablocks.layers.memory import out_of_memory
from megablocks.layers.router import LearnedRouter
from megablocks.layers.shared_expert import SharedExpert
from megablocks.ops.routing.dispatch import Routing
from megablocks.parallel.dispatcher import AllToAllDispatcher, ExpertCompute, LocalDispatcher
from megablocks.parallel.groups import ExpertShard, group_size
from megablocks.routers.functional import route
from megablocks.routers.router import is_as_made, make_router


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
        args: a `MoEConfig`, or megablocks 0.10's `Arguments`, which say all that follows themselves: then the modules,
            parameter names and calls are 0.10's, and the other arguments must be left out.
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
        ValueError: E cannot be spread over the group, or an argument that `Arguments` say themselves.
    """

    def __init__(
        self,
        args: MoEConfig | Arguments,
        *,
        expert_parallel_group: ProcessGroup | None = None,
        loss_group: ProcessGroup | None = None,
        expert_grad_scale: float | None = None,
        seed: int | None = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.arguments: Arguments | None = None
        if isinstance(args, Arguments):
            others = (expert_parallel_group, loss_group, expert_grad_scale, seed, device, dtype)
            if any(value is not None for value in others):
                raise ValueError("args: is an Arguments, which says group, device, dtype and the rest itself")
            self._build_as_in_0_10(args)
            return
        self.config = self._checked_config(args)
        self._ahead = Ahead(self.config, type(self).__name__)
        self.expert_parallel_group = expert_parallel_group
        ranks = group_size(expert_parallel_group)
        placed: dict[str, Any] = {"device": device, "dtype": dtype}

        self.router: Any = make_router(
            self.config,
            loss_group=expert_parallel_group if loss_group is None else loss_group,
            **placed,
        )
        self.dispatcher, shard = self._spread(expert_parallel_group)
        self.experts: Any = Experts(
            self.config,
            num_local_experts=shard.num_local_experts,
            expert_offset=shard.expert_offset,
            ffn_shard=(shard.ffn_rank, shard.ffn_size),
            seed=seed,
            grad_scale=1 / ranks if expert_grad_scale is None else expert_grad_scale,
            **placed,
        )
        for parameter in self.experts.parameters():  # 0.10's mark, by which its users tell them from replicated ones
            parameter.expert_model_parallel = ranks > 1  # type: ignore[attr-defined]
        has_bias = self.config.output_bias
        self.output_bias = nn.Parameter(torch.zeros(self.config.hidden_size, **placed)) if has_bias else None
        self.shared_expert: Any = None
        if self.config.shared_expert_hidden_size is not None:
            self.shared_expert = self._build_shared(placed)
        self._register_load_state_dict_pre_hook(_rename_old_keys)

    def _build_as_in_0_10(self, args: Arguments) -> None:
        """The modules of megablocks 0.10 by its names: router, experts with mlp and bias, shared_expert."""
        # A copy, checked again: later changes of the caller's object are not this layer's.
        self.arguments = arguments = dataclasses.replace(args)
        self.config = self._checked_config(arguments.to_config())
        self.router = LearnedRouter(arguments)
        self.experts = self._init_experts_mlp(arguments)
        self.shared_expert = sharedexpert_registry.get(arguments) if arguments.shared_expert else None

    def _init_experts_mlp(self, args: Arguments) -> nn.Module:
        """The module behind the router of a layer built from `Arguments`, called as (x, scores, weights, ids)."""
        raise NotImplementedError

    def _checked_config(self, config: MoEConfig) -> MoEConfig:
        raise NotImplementedError

    def _spread(self, group: ProcessGroup | None) -> tuple[LocalDispatcher | AllToAllDispatcher, ExpertShard]:
        experts, ranks = self.config.num_experts, group_size(group)
        if group is None or ranks == 1:
            return LocalDispatcher(), ExpertShard(0, experts)
        shards = ranks // experts if ranks > experts and ranks % experts == 0 else 1
        num_bits = self.config.quantize_scatter_num_bits
        dispatcher = AllToAllDispatcher(
            group, experts, ffn_shards=shards, ffn_fastest=False, quantize_num_bits=num_bits
        )
        return dispatcher, dispatcher.shard

    def _build_shared(self, placed: dict[str, Any]) -> SharedExpert:
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
        if self.arguments is not None:
            return self._forward_as_in_0_10(x)
        y, aux = self.forward_with_aux(x)
        if aux.losses:
            warnings.warn("forward leaves out the layer's auxiliary losses; call forward_with_aux", stacklevel=2)
        return y

    def _forward_as_in_0_10(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        self._check(x)
        x = cast_if_autocast_enabled(x)
        scores, weights, ids = self.router(x)
        try:
            out = self.experts(x, scores, weights, ids)
        except torch.OutOfMemoryError as error:
            raise out_of_memory(self.config, x.reshape(-1, x.shape[-1]), ids.numel(), error) from error
        if self.shared_expert is None:
            return out
        shared = self.shared_expert(x)
        if isinstance(out, tuple):
            return self.shared_expert.add_experts_sharedexpert(shared, out[0]), out[1]
        return self.shared_expert.add_experts_sharedexpert(shared, out)

    def forward_with_aux(self, x: Tensor) -> tuple[Tensor, AuxOutput]:
        """x (..., H) → y (..., H), complete with its bias, and the losses to add to the training loss, and metrics."""
        self._check(x)
        x = cast_if_autocast_enabled(x)  # before rows are copied, to move half the bytes
        tokens = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])  # a view is a node of autograd
        ours = hasattr(self.router, "gate")  # or somebody else's
        if ours and tokens.is_cuda and not torch.compiler.is_compiling() and self.arguments is None:
            self._ahead(self.training, tokens, self.router.layer.weight, lambda: self._step_ahead(tokens))
        taken = ours and self._experts_take_router(tokens)
        if taken:
            logits = self.router.layer(tokens.detach())
        elif ours:
            logits, tokens = self.router.gate(tokens, owned=self._owns_gradients())
        else:
            logits = self.router.logits(tokens)
        routing = self.router.route(logits)
        if taken:
            routing = self._with_router(routing)
        compute = self._compute if self.arguments is None else self.experts.compute
        try:
            y, extra = compute(tokens, routing)
        except torch.OutOfMemoryError as error:
            raise out_of_memory(self.config, tokens, routing.num_pairs, error) from error
        if self.shared_expert is not None:
            shared = self.shared_expert(tokens)
            y = shared + y if self.arguments is None else self.shared_expert.add_experts_sharedexpert(shared, y)
        bias = self.output_bias if self.arguments is None else self.experts.bias
        y = y if bias is None else y + bias.to(y.dtype)
        return y if x.dim() == 2 else y.view(x.shape), AuxOutput(routing.losses, {**routing.metrics, **extra})

    def _experts_take_router(self, x: Tensor) -> bool:
        """Whether the experts add to x's gradient what the router's weights pass on, see `fused_mlp`."""
        return False

    def _with_router(self, routing: Routing) -> Routing:
        weight: Tensor = self.router.layer.weight
        scaling = self.router.config.top_k_scaling
        return dataclasses.replace(routing, router_weight=weight.detach(), router_scaling=scaling)

    def _experts_for(self, routing: Routing) -> ExpertCompute:
        """The experts, given what the routing has for them beside the weights."""
        if routing.router_weight is None:
            experts: ExpertCompute = self.experts
            return experts
        return partial(self.experts.forward_with_router, router=(routing.router_weight, routing.router_scaling))

    def _has_plain_experts(self) -> bool:
        """Whether a call of the experts is `Experts.forward`: anything else may gather parameters, or count calls."""
        return (
            type(self.experts) is Experts
            and Experts.forward is _FORWARD
            and is_as_made(self.experts, "forward_with_router", _FORWARD_WITH_ROUTER)
            and _is_untouched(self.experts)
        )

    def _owns_gradients(self) -> bool:
        """Whether what reads x is this package's, whose gradients of x are tensors that nobody else holds."""
        readers = [m for m in (self.experts, self.shared_expert) if m is not None]
        ours = all(type(m).__module__.startswith("megablocks.") for m in (self, *readers))
        return ours and all(map(_is_untouched, readers))

    def _step_ahead(self, tokens: Tensor) -> list[Tensor]:
        """From logits to y, for `Ahead`, without the router's counts and what concerns other ranks."""
        weight, bias = self.router.layer.weight, getattr(self.router, "expert_score_bias", None)
        logits = weight.new_zeros(tokens.shape[0], self.config.num_experts).requires_grad_(weight.requires_grad)
        routing = route(cast_if_autocast_enabled(logits), self.config, score_bias=bias, training=self.training)
        results = [*routing.losses.values(), routing.weight]
        if self._experts_take_router(tokens):
            routing = self._with_router(routing)
        local = isinstance(self.dispatcher, LocalDispatcher) and self.config.capacity_factor is None
        if local and self._has_plain_experts():
            experts = self.experts.forward if routing.router_weight is None else self._experts_for(routing)
            results.append(self.dispatcher.run(leaf(tokens), routing, experts))
        return results

    def _check(self, x: Tensor) -> None:
        hidden = self.config.hidden_size
        if x.shape[-1] != hidden:
            raise ValueError(f"x: has shape {tuple(x.shape)}, its last dimension must be hidden_size={hidden}")

    def extra_repr(self) -> str:
        return f"num_experts={self.config.num_experts}, top_k={self.config.top_k}"


_FORWARD, _FORWARD_WITH_ROUTER = Experts.forward, Experts.forward_with_router


def _is_untouched(module: nn.Module) -> bool:
    """Whether calling the module is calling its class's forward, as far as hooks of its own go."""
    hooks = module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks
    return not any(hooks) and "forward" not in vars(module) and module._compiled_call_impl is None


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
