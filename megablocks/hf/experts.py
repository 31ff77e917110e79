"""Compute the experts of a transformers model with our kernels: `experts_implementation="megablocks"` calls this.

    h[p] = x[token of p] · up[e] + up_bias[e]           e = expert of pair p; up holds both halves of a gated MLP
    y[t] = Σ over t's pairs of weight · norm(gate(h[p]) · down[e] + down_bias[e])

Legend: T tokens, H hidden, K top-k, R = T·K pairs, E experts, I expert width, N = 2·I if gated, otherwise I.

Attributes of a transformers module describe the layout of its parameters:

    has_gate               gate_up_proj with both halves, otherwise up_proj
    is_transposed          (E, H, N) and (E, I, H), otherwise (E, N, H) and (E, H, I)
    is_concatenated        gate before up, otherwise their columns alternate
    has_bias               …_proj_bias (E, N) and (E, H)
    has_post_expert_norm   post_expert_norm is applied to each pair's output

The model's own code runs between the products: `_apply_gate`, or `act_fn` without a gate. If that is transformers'
default with an activation of our table, our kernel replaces it, or the whole MLP is one op. The clamped gates of
gpt-oss and the other classes in `_CLAMPED` have a kernel too. Any other gate runs without a change.

Weights are read in place; nothing is copied. Ids outside [0, E) are skipped. There is no host synchronization.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2CLS, ACT2FN
from transformers.integrations.moe import _default_apply_gate

from megablocks.hf.weights import Weight, read_weight
from megablocks.moe.impls import choose_impl, runs_on_hopper
from megablocks.ops.activation import activate, activate_halves
from megablocks.ops.activation_table import GATED, Activation
from megablocks.ops.clamp import Clamp, clamped_gate
from megablocks.ops.fused.mlp import ExpertParameters, fused_mlp
from megablocks.ops.grouped.pair_mm import MOST_PAIRS, pair_mlp_op
from megablocks.ops.library import under_autocast
from megablocks.ops.permute.rows import combine
from megablocks.ops.routing.dispatch import Dispatch, Routing, build_dispatch, narrow_ids

FEW_PAIRS = {"cuda": MOST_PAIRS, "cpu": 16}
"""At most this many pairs are computed without sorting, if no gradient is needed: with top-8, 64 tokens and two."""

_PARAMETERS = ("gate_up_proj", "up_proj", "down_proj")
_GATED = {unary: gated for gated, unary in GATED.items()}


class _Call(NamedTuple):
    """One call of an experts module.

    module: the experts module; its gate, activation and norm are called, its attributes describe the layout.
    x: (T, H), in the parameters' dtype.
    up, down: (E, H, N) and (E, I, H).
    up_bias, down_bias: (E, N) and (E, H), or None.
    activation: what our kernels apply between the products; None if the module's own code or `clamp` is applied.
    clamp: the clamped gate between the products, or None.
    """

    module: Any
    x: Tensor
    up: Weight
    down: Weight
    up_bias: Tensor | None
    down_bias: Tensor | None
    activation: Activation | None
    clamp: Clamp | None


_BY_NAME = {
    "silu": Activation("silu"),
    "swish": Activation("silu"),
    "gelu": Activation("gelu", "none"),
    "gelu_new": Activation("gelu", "tanh"),
    "gelu_pytorch_tanh": Activation("gelu", "tanh"),
    "relu": Activation("relu"),
    "relu2": Activation("relu2"),
}
_ACTIVATIONS: dict[Any, Activation] = {
    # without names that have arguments, such as gelu_10: their classes do more than the name says
    **{type(ACT2FN[name]): act for name, act in _BY_NAME.items() if isinstance(ACT2CLS.get(name), type)},
    F.silu: Activation("silu"),
    F.gelu: Activation("gelu", "none"),
    F.relu: Activation("relu"),
}
"""Classes and functions of transformers, and our activations that compute the same."""

_CLAMPED = {
    "GptOssExperts": ("limit", "alpha", 1.0),
    "OpenAIPrivacyFilterExperts": ("limit", "alpha", 1.0),
    "MiniMaxM3VLExperts": ("swiglu_limit", "swiglu_alpha", 1.0),
    "DeepseekV4Experts": ("limit", "", 0.0),
    "Glm5NextTextExperts": ("swiglu_limit", "", 0.0),
    "HYV4Experts": ("swiglu_limit", "", 0.0),
    "HYV4VLExperts": ("swiglu_limit", "", 0.0),
}
"""Classes of transformers whose gate is clamped: its attributes for limit and alpha ("" for 1), and the offset."""


def _has_own_gate(module: Any) -> bool:
    return type(module)._apply_gate is not _default_apply_gate or "_apply_gate" in vars(module)


def _act_of(module: Any, default: Any = None) -> Activation | None:
    """Return our activation for the `act_fn` of `module`, or None."""
    act = getattr(module, "act_fn", default)
    return _ACTIVATIONS.get(type(act) if isinstance(act, nn.Module) else act)


def activation_of(module: Any) -> Activation | None:
    """Return our activation between the products of `module`, or None if our table does not have it."""
    known = _act_of(module)
    if known is None or not module.has_gate:
        return known
    replaceable = known.name in _GATED and not _has_own_gate(module)
    return Activation(_GATED[known.name], known.approximate) if replaceable else None


def clamp_of(module: Any) -> Clamp | None:
    """Return the clamped gate of `module`, or None if it has another gate, also one that a subclass or a user set."""
    family, names = type(module), _CLAMPED.get(type(module).__name__)
    own = not family.__module__.startswith("transformers.models.") or "_apply_gate" in vars(module)
    if names is None or own or _act_of(module, F.silu) != Activation("silu"):
        return None
    limit, alpha, offset = names
    scale = getattr(module, alpha) if alpha else 1.0
    return Clamp(float(getattr(module, limit)), float(scale), offset, interleaved=not module.is_concatenated)


def _halves(call: _Call, h: Tensor) -> tuple[Tensor, Tensor]:
    """Return the two halves (R, I) of h (R, 2·I): the input of the activation, and the factor on its output."""
    if call.module.is_concatenated:
        pre, gate = h.chunk(2, dim=-1)
        return pre, gate
    return h[:, ::2], h[:, 1::2]


def _between(call: _Call, h: Tensor) -> Tensor:
    """h (R, N) → (R, I): the gate or the activation."""
    module, activation = call.module, call.activation
    if call.clamp is not None:
        return clamped_gate(h, call.clamp)
    if not module.has_gate:
        return module.act_fn(h) if activation is None else activate(h, None, activation)
    if activation is not None:
        return activate_halves(h, activation) if module.is_concatenated else activate(*_halves(call, h), activation)
    if not module.is_concatenated and not _has_own_gate(module):
        pre, gate = _halves(call, h)  # the default gate would split h in the middle
        return module.act_fn(pre) * gate
    return module._apply_gate(h)


def _without_unused(rows: Tensor, dispatch: Dispatch, compute: Callable[[Tensor], Tensor]) -> Tensor:
    """Return compute(rows) with 0 in the unused rows of the argument, of the result and of their gradients.

    Unused rows have unspecified values. Our ops never read them, but a parameter of the model would add their
    gradients.
    """
    used = torch.arange(rows.shape[0], device=rows.device).unsqueeze(1) < dispatch.expert_offsets[-1]
    return torch.where(used, compute(torch.where(used, rows, 0)), 0)


def _has_own_parameters(module: nn.Module) -> bool:
    """Return whether the model's own gate or activation might use parameters."""
    known = {f"{name}{end}" for name in _PARAMETERS for end in ("", "_bias")}
    others = (name.split(".")[0] for name, _ in module.named_parameters() if name not in known)
    return any(name not in ("parametrizations", "post_expert_norm") for name in others)


def routing_of(ids: Tensor, weight: Tensor, num_experts: int) -> Routing:
    """ids (T, K) integer, weight (T, K) → the Routing, without counts, which are not needed here."""
    num_tokens, top_k = ids.shape
    token = torch.arange(num_tokens, dtype=torch.int32, device=ids.device).repeat_interleave(top_k)
    return Routing(token, narrow_ids(ids.flatten()), weight.flatten(), num_tokens, num_experts, top_k)


def grouped(call: _Call, dispatch: Dispatch, weight: Tensor | None) -> Tensor:
    """One grouped product for both halves, the gate, one grouped product down, and the weighted sum: (T, H).

    dispatch, weight: of R pairs; weight (R,), or None for ones.
    """
    module = call.module
    h = call.up.product(call.x, dispatch, call.up_bias, gathered=True)
    between = functools.partial(_between, call)
    masked = call.activation is None and _has_own_parameters(module)
    act = _without_unused(h, dispatch, between) if masked else between(h)
    rows = call.down.product(act.to(call.x.dtype), dispatch, call.down_bias, gathered=False)
    if getattr(module, "has_post_expert_norm", False):
        rows = _without_unused(rows, dispatch, module.post_expert_norm)
    return combine(rows, weight, dispatch)


def fused(call: _Call, dispatch: Dispatch, weight: Tensor | None) -> Tensor:
    """Like `grouped`, but the whole MLP in one op, which saves no rows (R, H) for backward."""
    # both halves as one matrix: with two, autograd would copy their gradients into one tensor
    parameters = ExpertParameters(call.up.w.mT, None, call.down.w, call.up_bias, None, call.down_bias)
    assert call.activation is not None
    return fused_mlp(call.x, weight, dispatch, parameters, call.activation)


def few(call: _Call, ids: Tensor, weights: Tensor) -> Tensor:
    """Compute ids, weights (T, K) without sorting and without a gradient; in one op if the activation is ours."""
    module, has_norm = call.module, getattr(call.module, "has_post_expert_norm", False)
    if call.activation is not None and module.is_concatenated and not has_norm and not _has_lora(call):
        return pair_mlp_op(call.x, ids, weights, call.up.w, call.down.w, call.up_bias, call.down_bias, call.activation)
    (num_tokens, top_k), pairs = ids.shape, ids.flatten()
    h = call.up.each(call.x, pairs, call.up_bias)
    act = _between(call, h)
    scale = weights.flatten()
    rows = call.down.each(act.to(call.x.dtype), pairs, call.down_bias, None if has_norm else scale)
    if has_norm:
        rows = module.post_expert_norm(rows)
        rows = rows * scale.to(torch.promote_types(rows.dtype, torch.float32)).unsqueeze(1)
        rows.masked_fill_(((pairs < 0) | (pairs >= call.up.w.shape[0])).unsqueeze(1), 0)
    return rows.view(num_tokens, top_k, rows.shape[1]).sum(1).to(call.x.dtype)


def _has_lora(call: _Call) -> bool:
    return call.up.a is not None or call.down.a is not None


WAYS: dict[str, Callable[[_Call, Dispatch, Tensor | None], Tensor]] = {"fused": fused, "grouped": grouped}
"""Ways to compute sorted pairs, from a call, its Dispatch and the weights (R,). Both return the same values."""


def choose_way(call: _Call) -> str:
    """Return a key of `WAYS`. It depends only on sizes, dtype and device."""
    x, module = call.x, call.module
    has_norm = getattr(module, "has_post_expert_norm", False)
    if call.activation is None or has_norm or _has_lora(call) or module.is_transposed or not module.is_concatenated:
        return "grouped"
    return choose_impl(
        on_hopper=runs_on_hopper(x.device),
        dtype=x.dtype,
        saves_less=False,
        num_experts=call.up.w.shape[0],
        hidden_size=x.shape[1],
        ffn_hidden_size=call.down.w.shape[1],
    )


def needs_gradient(call: _Call, weights: Tensor) -> bool:
    """Return whether autograd would save anything of this call with routing weights (T, K)."""
    if not torch.is_grad_enabled():
        return False
    tensors = (*call.up, *call.down, call.x, weights, call.up_bias, call.down_bias)
    return any(t is not None and t.requires_grad for t in tensors)


def read_call(module: Any, x: Tensor) -> _Call:
    """Return the parameters of `module` and x (T, H), in one dtype."""
    first, up_bias, down_bias = "gate_up_proj" if module.has_gate else "up_proj", None, None
    autocast = not x.is_meta and torch.is_autocast_enabled(x.device.type)
    up, down = read_weight(module, first, autocast), read_weight(module, "down_proj", autocast)
    if module.has_bias:
        up_bias, down_bias = getattr(module, f"{first}_bias"), module.down_proj_bias
    if autocast:
        (x,) = under_autocast(x)
    x = x if x.dtype == up.w.dtype else x.to(up.w.dtype)  # `to` takes a microsecond even to change nothing
    return _Call(module, x, up, down, up_bias, down_bias, activation_of(module), clamp_of(module))


def compute_rows(module: Any, x: Tensor, dispatch: Dispatch, weight: Tensor | None) -> Tensor:
    """x (T, H), dispatch over the module's experts, weight (R,) or None for ones → (T, H) in x's dtype."""
    call = read_call(module, x)
    return WAYS[choose_way(call)](call, dispatch, weight).to(x.dtype)


def experts_forward(self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Return the weighted sum of each token's experts. It replaces the `forward` of a decorated experts class.

    Args:
        self: the experts module of transformers.
        hidden_states: (T, H) floating; cast to the weights' dtype if it differs, as in transformers.
        top_k_index: (T, K) integer ids; those outside [0, E) are skipped.
        top_k_weights: (T, K) floating.

    Returns:
        (T, H) in the dtype of hidden_states. Differentiable in hidden_states, top_k_weights and the parameters; a
        frozen parameter costs no gradient computation.

    Raises:
        ValueError: weights in a quantized dtype.
    """
    call = read_call(self, hidden_states)
    most = FEW_PAIRS.get(hidden_states.device.type, 0)
    exporting = torch.compiler.is_exporting()  # a choice by size would fix the size of an exported program
    if not exporting and top_k_index.numel() <= most and not needs_gradient(call, top_k_weights):
        y = few(call, top_k_index, top_k_weights)
        return y if y.dtype == hidden_states.dtype else y.to(hidden_states.dtype)
    routing = routing_of(top_k_index, top_k_weights, call.up.w.shape[0])
    return WAYS[choose_way(call)](call, build_dispatch(routing), routing.weight).to(hidden_states.dtype)
