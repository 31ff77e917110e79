"""Router modules: a linear gate in front of `route`.

Legend: T tokens, H hidden, E experts, K top-k.

The gate's weight (E, H) is equal on every rank: whoever builds a router on several ranks draws it under one seed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad

from megablocks.config import ConfigError, MoEConfig
from megablocks.ops.routing.dispatch import Routing
from megablocks.routers.functional import follows_chosen_logits, route


def is_as_made(owner: object, name: str, *functions: Callable[..., Any]) -> bool:
    """Whether a method of `owner` is one of these functions, by which it was defined: not overridden, nor replaced."""
    return name not in vars(owner) and getattr(type(owner), name) in functions


class _Gate(torch.autograd.Function):
    """x·wᵀ, and x for whoever else reads it: the product in backward adds the gradient from there as it writes.

    autograd would add the two afterwards: 11 µs of a step of 1,170 at 8,192 tokens of 1,024 on an H200.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, owned: bool) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.owned = owned
        need_x, need_w, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if need_w else None, w if need_x else None)
        return F.linear(x, w), x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, Tensor | None, None]:
        (x, w), (d_logits, dx) = ctx.saved_tensors, grads
        if d_logits is None:
            return dx, None, None
        dw = None if x is None else d_logits.t() @ x
        if w is None:
            return None, dw, None
        if dx is None:
            return d_logits @ w, dw, None
        in_place = ctx.owned and dx.is_contiguous() and not torch.is_grad_enabled()  # nor for a second derivative
        return (dx.addmm_ if in_place else dx.addmm)(d_logits, w), dw, None


class _Router(nn.Module):
    router_type: str

    def __init__(
        self,
        config: MoEConfig,
        *,
        loss_group: dist.ProcessGroup | None = None,
        init_method: Callable[[Tensor], Any] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """
        Args:
            loss_group: the ranks of load_balancing_scope "global".
            init_method: fills the weight (E, H) in place; None draws it with std config.init_std.
            dtype: of the weight; the gate computes in it and all after it in float32.
        """
        super().__init__()
        if config.router_type != self.router_type:
            raise ConfigError(f"router_type={config.router_type!r}: must be {self.router_type!r} for this router")
        self.config = config
        self.loss_group = loss_group
        self.layer = nn.Linear(config.hidden_size, config.num_experts, bias=False, device=device, dtype=dtype)
        with torch.no_grad():
            if init_method is None:
                nn.init.normal_(self.layer.weight, std=config.init_std)
            else:
                init_method(self.layer.weight)

    def logits(self, x: Tensor) -> Tensor:
        """(..., H) → (T, E) in the weight's dtype, with jitter in training."""
        x = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
        if self.training and self.config.jitter_eps is not None:
            low, high = 1.0 - self.config.jitter_eps, 1.0 + self.config.jitter_eps
            x = x * (low + torch.rand_like(x) * (high - low))
        return self.layer(x.to(self.layer.weight.dtype))

    def gate(self, x: Tensor, *, owned: bool = False) -> tuple[Tensor, Tensor]:
        """x (T, H) → `logits(x)`, and x for the experts, whose gradient then costs no addition.

        Only where the gate is a plain product in x's dtype; else x comes back as it is.

        Args:
            owned: whether the experts' gradient of x is a tensor that nobody else holds; it is written over.
        """
        return _Gate.apply(x, self.layer.weight, owned) if self.gate_is_plain(x) else (self.logits(x), x)

    def gate_is_plain(self, x: Tensor) -> bool:
        """Whether `logits(x)` is x · weightᵀ in x's dtype, with nothing around it, and x wants a gradient."""
        layer = self.layer
        return (
            x.requires_grad
            and is_as_made(self, "logits", _LOGITS)
            and type(layer) is nn.Linear
            and layer.bias is None
            and layer.weight.dtype == x.dtype
            and not (self.training and self.config.jitter_eps is not None)
            and is_as_made(layer, "forward", _LINEAR)
            and not (layer._forward_hooks or layer._forward_pre_hooks)
            and not (layer._backward_hooks or layer._backward_pre_hooks)
            and not nn.modules.module._has_any_global_hook()
            and not torch.is_autocast_enabled(x.device.type)
            and not torch.compiler.is_compiling()
            and not torch._C._are_functorch_transforms_active()
            and forward_ad._current_level < 0
        )

    def follows_chosen_logits(self) -> bool:
        """As the function of this name, of `route` if that is the class's, or adds a constant to the logits first."""
        constant = hasattr(vars(self).get("route"), "adds_a_constant") and type(self).route in _ROUTES
        known = is_as_made(self, "gate", _GATE) and (constant or is_as_made(self, "route", *_ROUTES))
        return known and follows_chosen_logits(self.config, self.training)

    def forward(self, x: Tensor, *, padding_mask: Tensor | None = None) -> Routing:
        """Route x (..., H), T tokens in all; padding_mask (T,) bool, True for padding."""
        return self.route(self.logits(x), padding_mask=padding_mask)

    def route(self, logits: Tensor, *, padding_mask: Tensor | None = None) -> Routing:
        """Route by the logits (T, E) of `logits(x)`, for callers that need those too."""
        return route(
            logits,
            self.config,
            training=self.training,
            loss_group=self.loss_group,
            padding_mask=padding_mask,
        )


class ExpertChoiceRouter(_Router):
    """Each expert picks its best tokens."""

    router_type = "expert_choice"


class TopKRouter(_Router):
    """Each token picks its K best experts.

    With config.expert_score_bias it holds two buffers: `expert_score_bias` (E,) float32, which stays float32 when the
    module is cast, and `tokens_since_update` (E,) int64, not saved: pairs an expert since the last update.
    """

    router_type = "topk"
    expert_score_bias: Tensor | None
    tokens_since_update: Tensor | None

    def __init__(self, config: MoEConfig, *, device: torch.device | str | None = None, **kwargs: Any) -> None:
        super().__init__(config, device=device, **kwargs)
        bias = counts = None
        if config.expert_score_bias:
            bias = torch.zeros(config.num_experts, dtype=torch.float32, device=device)
            counts = torch.zeros(config.num_experts, dtype=torch.int64, device=device)
        self.register_buffer("expert_score_bias", bias)
        self.register_buffer("tokens_since_update", counts, persistent=False)

    def route(self, logits: Tensor, *, padding_mask: Tensor | None = None) -> Routing:
        """As the base's; counts the load for the next update of the bias."""
        routing = route(
            logits,
            self.config,
            score_bias=self.expert_score_bias,
            training=self.training,
            loss_group=self.loss_group,
            padding_mask=padding_mask,
        )
        counts = self.tokens_since_update
        if counts is not None and self.training and torch.is_grad_enabled() and not _repeats_counted_forward():
            counts += routing.metrics["tokens_per_expert"]
        return routing

    @torch.no_grad()
    def update_expert_score_bias(self, group: dist.ProcessGroup | None = None) -> None:
        """Move each expert's bias by the rate towards balance, once an optimizer step (arXiv 2408.15664).

            bias_e += rate · sign(mean load − load_e),  load = tokens_since_update summed over `group`, then reset to 0

        Args:
            group: the ranks that share the bias, i.e. all that see other tokens; None for this rank alone.

        Raises:
            ConfigError: the router has no bias.
        """
        bias, counts = self.expert_score_bias, self.tokens_since_update
        if bias is None or counts is None:
            raise ConfigError("expert_score_bias=False: must be True for update_expert_score_bias")
        load = counts.clone()
        if group is not None:
            dist.all_reduce(load, group=group)
        # E·load against the total: exact in integers, where a float mean could call a balanced expert unbalanced
        bias += self.config.expert_score_bias_rate * torch.sign(load.sum() - load * load.numel())
        counts.zero_()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> TopKRouter:
        bias = self.expert_score_bias
        super()._apply(fn, recurse)
        moved = self.expert_score_bias
        if bias is not None and moved is not None and moved.dtype != torch.float32:
            # bf16 would swallow the update rate: 1 + 1e-3 rounds to 1
            self.expert_score_bias = bias.to(moved.device)
        return self


def make_router(config: MoEConfig, **kwargs: Any) -> TopKRouter | ExpertChoiceRouter:
    """The router that config.router_type names; keyword arguments as for the modules."""
    return (TopKRouter if config.router_type == "topk" else ExpertChoiceRouter)(config, **kwargs)


_LOGITS, _GATE, _ROUTES = _Router.logits, _Router.gate, (_Router.route, TopKRouter.route)
_LINEAR = nn.Linear.forward


def _repeats_counted_forward() -> bool:
    """Whether this forward recomputes one that was counted already.

    Both kinds of activation checkpointing recompute inside a backward pass. The reentrant kind ran the first forward
    without gradients, so it was not counted; the other ran it with them and recomputes under saved-tensor hooks.
    """
    if torch.compiler.is_compiling():
        return False
    in_backward = torch._C._current_graph_task_id() != -1
    return in_backward and torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
