"""The config of a mixture-of-experts layer. It is frozen, validates its values, and refuses unknown keys.

`MoEConfig` says what a layer computes. Process groups and devices are arguments of the layers instead. So a config
works on a machine without a GPU, and is equal on every rank.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from megablocks.kinds import DISPATCHER_CHOICES, IMPLS, MLP_IMPLS, QUANTIZED, ROUTERS
from megablocks.ops.activation_table import ACTIVATIONS, APPROXIMATIONS, Activation

QUANTIZE_NUM_BITS = (-1, 4, 8)
SCORE_FUNCTIONS = ("softmax", "sigmoid")
SOFTMAX_ORDERS = ("before_topk", "after_topk")
CAPACITY_RULES = ("megablocks", "tutel")
LOSS_SCOPES = ("local", "global")
TOKEN_ROUNDINGS = ("nearest", "stochastic_frequency", "stochastic_score", "balanced", "up", "down")


class ConfigError(ValueError):
    """A config has an invalid value. The message is one line: field, value, what is allowed."""


def refuse(field: str, value: object, allowed: str) -> NoReturn:
    """Raise a ConfigError with the message "field=value: allowed"."""
    raise ConfigError(f"{field}={value!r}: {allowed}")


def check_config(config: object) -> None:
    """Raise a ConfigError unless `config` is a MoEConfig."""
    if not isinstance(config, MoEConfig):
        makers = "MoEConfig.from_dict converts a dict, Arguments.to_config converts Arguments"
        raise ConfigError(f"config is a {type(config).__name__}: must be a MoEConfig; {makers}")


def is_dry_run() -> bool:
    """Return whether DRY_RUN=1 is set: print what a run would do. Raises ConfigError unless it is 0, 1 or unset."""
    value = os.environ.get("DRY_RUN") or "0"
    if value not in ("0", "1"):
        refuse("DRY_RUN", value, "must be 0 or 1")
    return value == "1"


def check_width(mlp_impl: str, ffn_hidden_size: int, shards: int = 1, field: str = "ffn_hidden_size") -> None:
    """Raise a ConfigError if mlp_impl cannot compute the width, named `field`, in `shards` equal parts."""
    multiple = IMPLS[mlp_impl].width_multiple if mlp_impl in IMPLS else 1
    if ffn_hidden_size % (shards * multiple):
        where = "" if shards == 1 else f" on each of {shards} shards"
        allowed = f"must be a multiple of {multiple}{where} with mlp_impl={mlp_impl!r}, or use mlp_impl='auto'"
        refuse(field, ffn_hidden_size, allowed)


def check_flags(config: Any) -> None:
    """Raise a ConfigError if a field of type bool in the dataclass `config` holds another type."""
    for field in dataclasses.fields(config):
        if field.type in (bool, "bool") and not isinstance(getattr(config, field.name), bool):
            refuse(field.name, getattr(config, field.name), "must be True or False")


def check_integers(config: Any, *names: str) -> None:
    """Raise a ConfigError if a field of these names is not an integer >= 1."""
    for name in names:
        value = getattr(config, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            refuse(name, value, "must be an integer >= 1")


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """What one mixture-of-experts layer computes.

    Legend: T tokens, H hidden_size, I ffn_hidden_size (width of one expert), E num_experts, K top_k.

    Experts
        hidden_size, ffn_hidden_size, num_experts: H, I and E (global, before any expert parallelism).
        activation: one of `ops.activation_table.ACTIVATIONS`. Gated ones compute act(x·w1ᵀ) ⊙ (x·v1ᵀ).
        gelu_approximate: form of gelu, "tanh" (the default) or "none" (exact, by erf).
        mlp_bias: biases b1 (E, I) [, c1 (E, I) for gated] and b2 (E, H) inside each expert.
        output_bias: one bias (H,) that all experts share, added after the combine (megablocks 0.10's `bias`).
        mlp_impl: how the experts are computed: one of `kinds.IMPLS`, or "auto", which picks grouped or fused by device
            and shape and logs the choice once. All compute the same function. `MoE` has the same number of places for
            every expert and uses one torch.bmm per projection instead. Exceptions are mlp_impl="reference", and
            quantized inputs or pre-activations.
        recompute_activation: save less for backward and recompute it there; `kinds.IMPLS` says what each saves.
        quantize_inputs_num_bits: save the experts' input, for the gradients of w1 and v1, in 4 or 8 bits; -1 saves it
            unquantized. `ops.quant` lists bytes and errors.
        quantize_rematerialize_num_bits: the same for the pre-activations; the activation is then recomputed. 8 bits
            need half the bytes of bf16, like fp8, and have a fifth of the error of float8_e4m3fn.
        quantize_scatter_num_bits: the same for the experts' output, which the gradient of the router's weights needs.
        gradient_accumulation_fusion: add the gradients of w1, v1 and w2 to their `main_grad`, which Megatron's data
            parallelism creates. "fused" adds them inside the products, unrounded; the others add each gradient when it
            is complete. Without `main_grad` this changes nothing.
        batch_invariant: make a token's output independent of the other tokens of the batch, bit for bit. Use it for a
            server with changing batches, or to repeat a server's forward in training. Gradients are the usual ones. A
            CPU computes one token at a time. It is refused if a token's experts depend on other tokens by definition,
            or if mlp_impl does not support it (`kinds.IMPLS`).
        shared_expert_hidden_size: width of an expert that computes every token; None for no such expert.
        shared_expert_gate: scale the shared expert's output by sigmoid(x·g), g (H,).
    Router
        router_type: one of `kinds.ROUTERS`: "topk" (each token picks K experts) or "expert_choice" (each expert picks
            T·K/E tokens).
        score_function: "softmax" or "sigmoid" over the logits, in float32.
        softmax_order: softmax "before_topk" (over E) or "after_topk" (over the K chosen). Sigmoid and expert choice
            ignore it.
        normalize_top_k: p of the p-norm that divides a token's K weights, None for no normalization.
        top_k_scaling: factor on the K weights after normalization.
        jitter_eps: multiply the router's input by U(1-eps, 1+eps) in training, None for off.
        num_groups, group_top_k: group-limited top-k: choose only experts in the best `group_top_k` of `num_groups`
            groups.
        expert_score_bias: balance without a loss: a buffer (E,) is added to the scores for selection only.
        expert_score_bias_rate: step by which that buffer moves towards balance at each update.
        uniform_assignment: replace the chosen ids by round robin (for benchmarks that need no convergence).
        token_rounding: in training, round each expert's load to a multiple of token_rounding_tile rows by one of
            `TOKEN_ROUNDINGS`, None for plain top-k; see `megablocks.ops.routing.rounding`. A tile of None means the
            tile of the grouped products, `megablocks.ops.grouped.TILE_ROWS`.
    Losses (float32, returned with the output)
        load_balancing_loss_weight: coefficient of E/(K·T²)·Σ_e tokens_e·Σ_t share_te, 0 for none. A share is
            the softmax over all E, or a sigmoid score divided by the sum of the token's E scores. tokens_e counts
            the chosen pairs, also with expert_score_bias and groups.
        load_balancing_scope: "local" (this rank's micro-batch) or "global" (token counts and T over the loss group).
        z_loss_weight: coefficient of mean(logsumexp(logits)²), 0 for none.
    Capacity (layer `MoE` only; `dMoE` has none)
        capacity_factor: None in a dropless layer. 0: the capacity is the fullest expert's load, nothing is dropped.
        capacity_rule: "megablocks": int(factor·K·T·ranks/E). "tutel": K·int(factor·ceil(T/E)); negative factor: the
            smaller of the fullest expert and that capacity with |factor|.
    Expert parallelism (if the layer has an expert_parallel_group)
        dispatcher: one of `kinds.DISPATCHER_CHOICES`. "symmetric" exchanges rows through memory that the GPUs of one
            host share, without a host synchronization; "all_to_all" uses torch.distributed. "auto" is "symmetric" if
            max_tokens is given, rows cannot overflow and the ranks support it, otherwise "all_to_all".
        max_tokens: the largest number of tokens of a rank; it sets the buffer sizes of "symmetric".
        dispatch_rows_factor: rows that a rank's experts accept with "symmetric", as a multiple of max_tokens·K. If more
            arrive, the output is NaN and the next call raises. A factor of at least the number of ranks always fits.
    Initialization
        init_std: std of the normal from which w1, v1 and the router are drawn.
        output_init_std: the same for w2, None for init_std.

    Raises:
        ConfigError: a value that is not allowed above, or two that exclude each other; one line names the field.
    """

    hidden_size: int
    ffn_hidden_size: int
    num_experts: int
    top_k: int = 1

    activation: str = "gelu"
    gelu_approximate: str = "tanh"
    mlp_bias: bool = False
    output_bias: bool = False
    mlp_impl: str = "auto"
    recompute_activation: bool = False
    quantize_inputs_num_bits: int = -1
    quantize_rematerialize_num_bits: int = -1
    quantize_scatter_num_bits: int = -1
    gradient_accumulation_fusion: bool = False
    batch_invariant: bool = False
    shared_expert_hidden_size: int | None = None
    shared_expert_gate: bool = False

    router_type: str = "topk"
    score_function: str = "softmax"
    softmax_order: str = "before_topk"
    normalize_top_k: float | None = None
    top_k_scaling: float = 1.0
    jitter_eps: float | None = None
    num_groups: int | None = None
    group_top_k: int | None = None
    expert_score_bias: bool = False
    expert_score_bias_rate: float = 1e-3
    uniform_assignment: bool = False
    token_rounding: str | None = None
    token_rounding_tile: int | None = None

    load_balancing_loss_weight: float = 0.0
    load_balancing_scope: str = "local"
    z_loss_weight: float = 0.0

    capacity_factor: float | None = None
    capacity_rule: str = "megablocks"

    dispatcher: str = "auto"
    max_tokens: int | None = None
    dispatch_rows_factor: float = 2.0

    init_std: float = 0.02
    output_init_std: float | None = None

    def __post_init__(self) -> None:
        check_integers(self, "hidden_size", "ffn_hidden_size", "num_experts", "top_k")
        optional = "shared_expert_hidden_size", "token_rounding_tile", "num_groups", "group_top_k", "max_tokens"
        check_integers(self, *(name for name in optional if getattr(self, name) is not None))
        if self.top_k > self.num_experts:
            refuse("top_k", self.top_k, f"must be at most num_experts={self.num_experts}")
        for name, choices in (
            ("activation", ACTIVATIONS),
            ("gelu_approximate", APPROXIMATIONS),
            ("mlp_impl", MLP_IMPLS),
            ("router_type", tuple(ROUTERS)),
            ("score_function", SCORE_FUNCTIONS),
            ("softmax_order", SOFTMAX_ORDERS),
            ("load_balancing_scope", LOSS_SCOPES),
            ("capacity_rule", CAPACITY_RULES),
            ("dispatcher", DISPATCHER_CHOICES),
        ):
            if getattr(self, name) not in choices:
                refuse(name, getattr(self, name), f"must be one of {', '.join(choices)}")
        check_flags(self)
        weights = "load_balancing_loss_weight", "z_loss_weight", "expert_score_bias_rate"
        self._check_floats(">= 0", *weights, "init_std", "output_init_std", "jitter_eps")
        self._check_floats("> 0", "top_k_scaling", "dispatch_rows_factor", "normalize_top_k")
        self._check_floats("", "capacity_factor")
        if self.dispatcher == "symmetric" and self.max_tokens is None:
            refuse("max_tokens", None, "must be given with dispatcher='symmetric', which sizes its buffers by it")
        if self.jitter_eps is not None and self.jitter_eps >= 1:
            refuse("jitter_eps", self.jitter_eps, "must be below 1, or the router's input may change sign")
        if self.capacity_factor is not None:
            if abs(self.capacity_factor) > 2**31:  # places are counted in 64 bits
                refuse("capacity_factor", self.capacity_factor, "must be within ±2**31")
            if self.capacity_factor < 0 and self.capacity_rule != "tutel":
                refuse("capacity_factor", self.capacity_factor, "must be >= 0, or use capacity_rule='tutel'")
        self._check_quantizers()
        self._check_groups()
        if self.token_rounding is not None:
            self._check_token_rounding()
        if self.batch_invariant:
            self._check_batch_invariant()
        for name, needed, why in ROUTERS[self.router_type].needs:
            if getattr(self, name) != needed:
                refuse(name, getattr(self, name), f"must be {needed!r} with router_type={self.router_type!r}: {why}")
        if self.shared_expert_gate and self.shared_expert_hidden_size is None:
            refuse("shared_expert_gate", True, "needs shared_expert_hidden_size")
        check_width(self.mlp_impl, self.ffn_hidden_size)

    def _check_floats(self, bound: str, *names: str) -> None:
        """Raise a ConfigError unless fields are finite and fit the bound ">= 0", "> 0" or "". A default None passes."""
        for name in names:
            value = getattr(self, name)
            if value is None and getattr(type(self), name) is None:
                continue
            bad = isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= sys.float_info.max
            if bad or (bound and value < 0) or (bound == "> 0" and value == 0):
                refuse(name, value, f"must be a finite number {bound}".rstrip())

    def _check_quantizers(self) -> None:
        impl = IMPLS.get(self.mlp_impl)
        for name in QUANTIZED:
            value = getattr(self, name)
            if type(value) is not int or value not in QUANTIZE_NUM_BITS:
                refuse(name, value, f"must be one of {', '.join(map(str, QUANTIZE_NUM_BITS))}")
            if value != -1 and impl is not None and name in impl.not_quantized:
                others = ", ".join(repr(key) for key, other in IMPLS.items() if name not in other.not_quantized)
                refuse(name, value, f"must be -1 with mlp_impl={self.mlp_impl!r}, or use 'auto', {others}")
        bits = self.quantize_rematerialize_num_bits
        if bits != -1 and self.recompute_activation and impl is not None and impl.recomputes_pre:
            allowed = f"must be -1 with mlp_impl={self.mlp_impl!r} and recompute_activation=True, which save no "
            refuse("quantize_rematerialize_num_bits", bits, allowed + "pre-activations")

    def _check_groups(self) -> None:
        if (self.num_groups is None) != (self.group_top_k is None):
            missing = "group_top_k" if self.group_top_k is None else "num_groups"
            refuse(missing, None, "num_groups and group_top_k are given together or not at all")
        if self.num_groups is None or self.group_top_k is None:
            return
        if self.num_experts % self.num_groups:
            refuse("num_groups", self.num_groups, f"must divide num_experts={self.num_experts}")
        if self.group_top_k > self.num_groups:
            refuse("group_top_k", self.group_top_k, f"must be at most num_groups={self.num_groups}")
        reachable = self.group_top_k * (self.num_experts // self.num_groups)
        if self.top_k > reachable:
            where = f"the experts in group_top_k={self.group_top_k} groups"
            refuse("top_k", self.top_k, f"must be at most {reachable}, {where}")

    def _check_token_rounding(self) -> None:
        rule = self.token_rounding
        if rule not in TOKEN_ROUNDINGS:
            refuse("token_rounding", rule, f"must be None or one of {', '.join(TOKEN_ROUNDINGS)}")
        for name, needed in (
            ("num_groups", None),  # rounding can add a token to an expert outside the token's best groups
            ("uniform_assignment", False),
            ("capacity_factor", None),
        ):
            if getattr(self, name) != needed:
                refuse("token_rounding", rule, f"needs {name}={needed!r}, not {getattr(self, name)!r}")

    def _check_batch_invariant(self) -> None:
        for name, needed in (("token_rounding", None), ("capacity_factor", None), ("uniform_assignment", False),
                             ("jitter_eps", None)):  # fmt: skip
            if getattr(self, name) != needed:
                allowed = f"must be {needed!r} with batch_invariant=True: it makes a token depend on the batch"
                refuse(name, getattr(self, name), allowed)
        if self.mlp_impl in IMPLS and not IMPLS[self.mlp_impl].batch_invariant:
            able = ", ".join(repr(name) for name, impl in IMPLS.items() if impl.batch_invariant)
            refuse("mlp_impl", self.mlp_impl, f"must be 'auto' or one of {able} with batch_invariant=True")

    @property
    def is_gated(self) -> bool:
        """Whether an expert has the second up-projection v1."""
        return self.act.gated

    @functools.cached_property
    def act(self) -> Activation:
        """The activation in the form that the ops accept."""
        return Activation(self.activation, self.gelu_approximate)

    def replace(self, **changes: Any) -> MoEConfig:
        """Return a copy with `changes`, validated again. An unknown name raises a ConfigError."""
        return type(self).from_dict({**self.to_dict(), **changes})

    def to_dict(self) -> dict[str, Any]:
        """Return the field values by name; JSON can store all of them."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> MoEConfig:
        """Build a config from a mapping. An unknown key raises a ConfigError that names the most similar field."""
        import difflib

        if not isinstance(values, Mapping):
            raise ConfigError(f"values is a {type(values).__name__}: must be a mapping from field to value")
        names = [f.name for f in dataclasses.fields(cls)]
        for key in values:
            if key not in names:
                near = difflib.get_close_matches(str(key), names, n=1)
                refuse(key, values[key], "no such field" + (f", did you mean {near[0]!r}?" if near else ""))
        for field in dataclasses.fields(cls):
            if field.default is dataclasses.MISSING and field.name not in values:
                refuse(field.name, None, "is required")
        return cls(**values)
