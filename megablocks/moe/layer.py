"""The layers: `dMoE`, which neither drops nor pads (MegaBlocks, arXiv 2211.15841), and `MoE`, which has a capacity.

x (..., H) ─ router ─▶ Routing ─ [capacity: MoE] ─ dispatcher, experts ─ [+ shared expert] [+ bias] ─▶ y (..., H)
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from megablocks.config import MoEConfig, check_config, refuse
from megablocks.moe.capacity import limit_to_capacity
from megablocks.moe.device_mesh import as_dtensors
from megablocks.moe.dispatchers import Dispatcher, make_dispatcher
from megablocks.moe.experts import Experts
from megablocks.moe.groups import SharesGroups, group_size
from megablocks.moe.memory import out_of_memory
from megablocks.moe.router import Router, make_router
from megablocks.moe.shared_expert import SharedExpert
from megablocks.ops.routing.dispatch import Routing


@dataclass(frozen=True)
class AuxOutput:
    """What a layer returns in addition to its output.

    losses: name → weighted float32 scalar with a graph, to be added to the training loss. In training it contains
        "load_balancing_loss" and "z_loss", if their weight is above 0.
    metrics: name → detached tensor, for logs: `tokens_per_expert` (E,) int64 before any drop, `dropped` () int64 pairs,
        and what `route` and `MoE` add.
    """

    losses: dict[str, Tensor] = field(default_factory=dict)
    metrics: dict[str, Tensor] = field(default_factory=dict)


class MoELayer(SharesGroups, nn.Module):
    """A mixture-of-experts layer; `dMoE` and `MoE` say what happens to tokens beyond an expert's capacity.

    Args:
        config: what the layer computes.
        expert_parallel_group: ranks over which the experts are spread in contiguous blocks; each has its own tokens.
            If the number of ranks is a larger multiple of the number of experts, each expert's width is split too.
        expert_mesh: a mesh with one dimension, instead of that group. The experts' parameters are then DTensors over
            it, for torch's FSDP2, optimizers and checkpoints; see docs/torch_native.md.
        loss_group: ranks of load_balancing_scope "global"; default the expert-parallel group.
        expert_grad_scale: factor on the experts' gradients. Default: 1/(size of the expert-parallel group). Averaged
            over the ranks that hold the same expert, gradients then equal plain data parallelism's. Use 1.0 if an
            outer data-parallel wrapper divides by all ranks itself (Megatron's DDP).
        seed: of the experts, see `Experts`. The router uses torch's generator: give it the same seed on every rank.
        device, dtype: of the parameters; None for the mesh's device, or without a mesh for torch's defaults.

    Raises:
        ConfigError: the layer cannot do this; one line says what and why.
        ValueError: E cannot be spread over the group.
    """

    has_capacity: bool
    router: Router
    experts: Experts
    dispatcher: Dispatcher
    shared_expert: SharedExpert | None

    def __init__(
        self,
        config: MoEConfig,
        *,
        expert_parallel_group: ProcessGroup | None = None,
        expert_mesh: DeviceMesh | None = None,
        loss_group: ProcessGroup | None = None,
        expert_grad_scale: float | None = None,
        seed: int | None = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_config(config)
        if (config.capacity_factor is not None) != self.has_capacity:
            rule = "must be a number for MoE, or use dMoE" if self.has_capacity else "must be None for dMoE, or use MoE"
            refuse("capacity_factor", config.capacity_factor, rule)
        self.config = config
        if expert_mesh is not None:
            if expert_mesh.ndim != 1:
                dimensions = f"has {expert_mesh.ndim} dimensions, must have one; select one, such as mesh['experts']"
                raise ValueError(f"expert_mesh: {dimensions}")
            if expert_parallel_group is not None:
                raise ValueError("expert_parallel_group: must be left out with expert_mesh, which has a group")
            expert_parallel_group = expert_mesh.get_group()
            device = expert_mesh.device_type if device is None else device
        self.expert_parallel_group = group = expert_parallel_group
        ranks = group_size(group)
        placed: dict[str, Any] = {"device": device, "dtype": dtype}
        self.router = make_router(config, loss_group=group if loss_group is None else loss_group, **placed)
        self.dispatcher = make_dispatcher(
            group,
            config.num_experts,
            kind=config.dispatcher,
            max_tokens=config.max_tokens,
            rows_factor=config.dispatch_rows_factor,
        )
        scale = 1 / ranks if expert_grad_scale is None else expert_grad_scale
        self.experts = Experts(config, shard=self.dispatcher.shard, seed=seed, grad_scale=scale, **placed)
        self.experts.mark(ranks > 1)
        if expert_mesh is not None:
            as_dtensors(self.experts, self.dispatcher.shard, expert_mesh)
        has_bias, has_shared = config.output_bias, config.shared_expert_hidden_size is not None
        self.output_bias = nn.Parameter(torch.zeros(config.hidden_size, **placed)) if has_bias else None
        self.shared_expert = SharedExpert(config, **placed) if has_shared else None
        if self.shared_expert is not None:
            self.shared_expert.reset_parameters()
        self._register_load_state_dict_pre_hook(_rename_old_keys)

    @torch.no_grad()
    def reset_parameters(self, seed: int | None = None) -> None:
        """Initialize every parameter again, as after `to_empty` of a layer on "meta"; `seed` is as in `Experts`."""
        self.router.reset_parameters()
        self.experts.reset_parameters(seed)
        if self.shared_expert is not None:
            self.shared_expert.reset_parameters()
        if self.output_bias is not None:
            self.output_bias.zero_()

    def _dispatch(self, x: Tensor, routing: Routing) -> tuple[Tensor, dict[str, Tensor]]:
        """Run the experts: x (T, H) → (T, H), and metrics that the routing does not contain."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """x (..., H) → (..., H), without auxiliary losses. `forward_with_aux` returns them; its errors are the same."""
        y, aux = self.forward_with_aux(x)
        if aux.losses:
            _warn_of_losses()
        return y

    def forward_with_aux(self, x: Tensor) -> tuple[Tensor, AuxOutput]:
        """x (..., H) → y (..., H), the losses to add to the training loss, and metrics.

        Raises:
            ValueError: the last dimension of x is not hidden_size, or, outside autocast, x has another dtype than the
                experts.
            torch.OutOfMemoryError: torch's error, with the sizes and what to change.
        """
        if not x.dim() or x.shape[-1] != self.config.hidden_size:
            shape, hidden = tuple(x.shape), self.config.hidden_size
            raise ValueError(f"x: has shape {shape}, its last dimension must be hidden_size={hidden}")
        tokens = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])  # a view costs the host 14 µs, backward included
        if tokens.is_cuda:
            self._compile_first_call(tokens)
        elif tokens.is_meta:
            self._check_without_values()
        routing = self.router(tokens)
        if self.config.batch_invariant and not tokens.is_cuda and tokens.shape[0]:
            y, extra = self._one_at_a_time(tokens)
        else:
            y, extra = self._compute(tokens, routing)
        return y if x.dim() == 2 else y.view(x.shape), AuxOutput(routing.losses, {**routing.metrics, **extra})

    def _compute(self, x: Tensor, routing: Routing) -> tuple[Tensor, dict[str, Tensor]]:
        """x (T, H) → y (T, H), and metrics that the routing does not contain."""
        try:
            y, extra = self._dispatch(x, routing)
        except torch.OutOfMemoryError as error:
            raise out_of_memory(self.config, x, routing.num_pairs, error) from error
        if self.shared_expert is not None:
            y = self.shared_expert(x) + y
        if self.output_bias is not None:
            y = y + self.output_bias.to(y.dtype)
        return y, extra

    def _one_at_a_time(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Like `_compute`, for config.batch_invariant on a CPU: each token is a batch of one.

        On a CPU torch's products choose an algorithm by the number of rows, and its elementwise functions use different
        code for the last few values of a tensor.
        """
        if group_size(self.expert_parallel_group) > 1:
            refuse("batch_invariant", True, "on a CPU needs all experts on one rank")
        # clone: a row's memory layout must not depend on its position in the batch either
        rows = [self._compute(row, self.router.choose(row)) for row in map(torch.clone, x.split(1))]
        return torch.cat([y for y, _ in rows]), rows[0][1]

    def _check_without_values(self) -> None:
        """Raise an error for options that read values of tensors on the host: tensors on "meta" have none."""
        config, ranks = self.config, group_size(self.expert_parallel_group)
        if config.mlp_impl == "reference":
            refuse("mlp_impl", config.mlp_impl, 'reads values; on device "meta" use another one, such as "auto"')
        if config.capacity_factor is not None and config.capacity_factor <= 0:
            refuse("capacity_factor", config.capacity_factor, 'reads the loads; on device "meta" must be > 0')
        if ranks > 1:
            raise ValueError(f'x: is on device "meta", must be on another one where {ranks} ranks exchange tokens')

    def _compile_first_call(self, tokens: Tensor) -> None:
        """Compile router and experts together, if both are classes of this package and there is only one rank."""
        from megablocks.ops.launch import compile_first_call

        def step(tokens: Tensor) -> list[Tensor]:
            routing = self.router.forward(tokens)  # not self.router(tokens): a user's hooks must not run here
            return [self.dispatcher.run(tokens, routing, self.experts.forward), *routing.losses.values()]

        ours = isinstance(self.router, Router) and type(self.experts) is Experts
        if ours and group_size(self.expert_parallel_group) == 1:
            compile_first_call(self, self.training, step, tokens)

    def extra_repr(self) -> str:
        return f"num_experts={self.config.num_experts}, top_k={self.config.top_k}"


class dMoE(MoELayer):  # noqa: N801
    """Dropless mixture of experts: every expert computes all tokens that are routed to it.

    With config.token_rounding, an expert whose load is rounded down loses its weakest pairs; aux counts them as
    dropped.
    Arguments as in `MoELayer`; config.capacity_factor must be None.
    """

    has_capacity = False

    def _dispatch(self, x: Tensor, routing: Routing) -> tuple[Tensor, dict[str, Tensor]]:
        y = self.dispatcher.run(x, routing, self.experts)
        if "dropped" in routing.metrics:  # by token rounding
            return y, {}
        return y, {"dropped": torch.zeros((), dtype=torch.int64, device=x.device)}


class MoE(MoELayer):
    """Mixture of experts with a capacity of C places per expert. More tokens are dropped; empty places are computed.

    The batch is (E, C, H) and each projection one torch.bmm, as in GShard, Switch, Tutel and megablocks 0.10's MoE.
    mlp_impl matters only if it is "reference": the others are ways to compute ragged rows.

    Which pairs are dropped: an expert keeps the earliest, by rank, then token, then choice. `megablocks.moe.capacity`
    contains the rules. A token without a kept pair yields zeros. aux.metrics: `dropped` () pairs dropped on this rank,
    `capacity` () places that an expert computes on its rank.

    Host synchronizations on one rank: none for a positive factor, because C follows from the number of tokens; one for
    a factor <= 0, because C is the fullest expert's load. Over several ranks: one more than the dispatcher needs,
    because ranks can hold different numbers of tokens.

    Arguments as in `MoELayer`; config.capacity_factor is required.
    """

    has_capacity = True

    def _dispatch(self, x: Tensor, routing: Routing) -> tuple[Tensor, dict[str, Tensor]]:
        kept, places = limit_to_capacity(routing, self.config, self.expert_parallel_group)
        y = self.dispatcher.run(x, kept, partial(self.experts, places=places))
        return y, {"dropped": kept.metrics["dropped"], "capacity": torch.tensor(places)}


def _rename_old_keys(state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Rename keys of megablocks 0.10, where the experts were one level deeper and contained the output bias."""
    for old, new in (
        ("experts.mlp.w1", "experts.w1"),
        ("experts.mlp.v1", "experts.v1"),
        ("experts.mlp.w2", "experts.w2"),
        ("experts.bias", "output_bias"),
    ):
        if prefix + old in state:
            state[prefix + new] = state.pop(prefix + old)


@torch.compiler.assume_constant_result  # torch.compile calls it while it traces; it cannot trace a warning
def _warn_of_losses() -> None:
    warnings.warn("forward leaves out the layer's auxiliary losses; call forward_with_aux", stacklevel=3)
