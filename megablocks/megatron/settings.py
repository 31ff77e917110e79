"""The settings of the driver, those of our layers that Megatron's TransformerConfig lacks, and where they come from.

The driver has one `--megablocks-*` flag for each field. It stores the layers' settings on the TransformerConfig as the
attribute `megablocks`. Megatron-LM's own pretrain_gpt.py with `--spec` stores nothing; then the settings come from
environment variables of the same names, such as MEGABLOCKS_CAPACITY_FACTOR=1.25.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megablocks.config import CAPACITY_RULES, QUANTIZE_NUM_BITS, TOKEN_ROUNDINGS, ConfigError, refuse
from megablocks.kinds import DISPATCHER_CHOICES, IMPLS, MLP_IMPLS, QUANTIZED, ROUTERS

_FUSED = ("fused", "megatron")
PREFIX = "megablocks_"
"""Prefix of a field's name in the driver's parsed flags and, in capitals, in the environment."""

_DISPATCH = ("dispatcher", "max_tokens", "dispatch_rows_factor")
_ROUTING = ("router_type", "token_rounding", "token_rounding_tile", "normalize_top_k", "uniform_assignment")
_CAPACITY = ("capacity_factor", "capacity_rule", "pad_to_capacity")
_EXPERTS = ("mlp_impl", "recompute_activation", *QUANTIZED, "gradient_accumulation_fusion")
EXPERTS_ONLY = ("layer", *_DISPATCH, *_ROUTING, *_CAPACITY, *_EXPERTS)
"""The settings that a dense model does not read."""
# The settings that each other layer does not read. With "experts", Megatron applies the weights to the output itself.
_NOT_READ = {
    "experts": (*_DISPATCH, *_ROUTING, *_CAPACITY, "quantize_scatter_num_bits"),
    "megatron": (*_DISPATCH, *_ROUTING, *_CAPACITY, *_EXPERTS),
    "tutel": (*_ROUTING, *_EXPERTS),
}


def option(
    default: Any, text: str, choices: Sequence[Any] | None = None, *, least: int | None = None, most: int | None = None
) -> Any:
    """A dataclass field that `add_flags` turns into a flag. With the default `...` a value is required.

    choices, or least and most: what `check_options` allows.
    """
    given = {} if default is ... else {"default": default}
    return field(**given, metadata={"help": text, "choices": choices, "least": least, "most": most})


def add_flags(parser: Any, options: type, prefix: str = "", *, unset: bool = False) -> None:
    """Add a flag for each field of a dataclass of `option`s. unset: a flag that is not given is None."""
    for one in dataclasses.fields(options):
        kind = kind_of(one)
        default = None if one.default is dataclasses.MISSING else one.default
        text = one.metadata["help"] + ("" if default is None else f" (default: {default})")
        how: dict[str, Any] = {"type": kind, "choices": one.metadata["choices"]}
        if kind is bool:
            how = {"action": argparse.BooleanOptionalAction}
        parser.add_argument(flag_of(prefix + one.name), default=None if unset else default, help=text, **how)


_LIMITS = {int: (1, 2**63 - 1, "below 2**63"), float: (0, sys.float_info.max, "finite")}
"""By type of a number: its least value, its largest value, and the latter in words. A field can set its own limits."""


def check_options(options: type, values: Mapping[str, Any]) -> None:
    """Raises ConfigError for a value that its field of a dataclass of `option`s does not allow. None is unset."""
    for one in dataclasses.fields(options):
        value, choices, kind = values.get(one.name), one.metadata["choices"], kind_of(one)
        if value is None:
            continue
        if choices is not None and value not in choices:
            refuse(one.name, value, f"must be one of {', '.join(map(str, choices))}")
        if choices is not None or kind not in _LIMITS:
            continue
        (least, largest, in_words), most = _LIMITS[kind], one.metadata["most"]
        least = least if one.metadata["least"] is None else one.metadata["least"]
        if most is not None and not least <= value <= most:
            refuse(one.name, value, f"must be {least} to {most}")
        if not least <= value <= largest:
            refuse(one.name, value, f"must be >= {least}" + ("" if value < least else f" and {in_words}"))


def kind_of(one: dataclasses.Field) -> type:
    """The type of a field's values, apart from None."""
    return {"int": int, "float": float, "bool": bool}.get(str(one.type).split(" ")[0], str)


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def check_heads(args: Any, query_groups: int | None) -> None:
    """Refuse heads that do not fit the model. query_groups: heads of keys and values; None: one per head."""
    hidden, heads = args.hidden_size, args.num_attention_heads
    if args.kv_channels is None and hidden % heads:
        refuse("num_attention_heads", heads, f"must divide hidden_size={hidden}, or give --kv-channels")
    if query_groups is not None and heads % query_groups:
        refuse("num_query_groups", query_groups, f"must divide num_attention_heads={heads}")
    rotated, width = "kv_channels", args.kv_channels or hidden // heads
    if getattr(args, "multi_latent_attention", False):
        rotated, width = "qk_pos_emb_head_dim", args.qk_pos_emb_head_dim
    if args.position_embedding_type == "rope" and width % 2:
        refuse(rotated, width, "must be even with --position-embedding-type rope")


@dataclass(frozen=True, kw_only=True)
class MegaBlocksSettings:
    """What our layers compute and how. A field holds its default, help text and choices; its flag has the same."""

    layer: str = option(
        "megablocks",
        "mixture-of-experts layer: megablocks, ours; experts, our experts in Megatron's MoELayer; megatron, Megatron's "
        "own; tutel, Tutel's own if the package tutel is installed, else ours with Tutel's capacity rule",
        ("megablocks", "experts", "megatron", "tutel"),
    )
    mlp_impl: str = option(
        "auto",
        "how the experts are computed; auto: grouped or fused, by device and shape; "
        + "; ".join(f"{name}: {impl.summary}" for name, impl in IMPLS.items()),
        MLP_IMPLS,
    )
    router_type: str = option(
        "topk", "; ".join(f"{name}: {kind.summary}" for name, kind in ROUTERS.items()), tuple(ROUTERS)
    )
    token_rounding: str | None = option(
        None, "in training, round each expert's number of tokens to a multiple of a tile, by this rule; unset: do not",
        TOKEN_ROUNDINGS,
    )  # fmt: skip
    token_rounding_tile: int | None = option(
        None, "rows of a tile of the token rounding; unset: as many as the experts' kernels use"
    )
    normalize_top_k: float | None = option(
        None,
        "divide a token's weights by their p-norm with this p; after a softmax over the top-k 1 changes nothing; "
        "unset: as Megatron, which divides sigmoid scores by their sum and leaves softmax weights",
    )
    capacity_factor: float | None = option(
        None,
        "drop tokens beyond this many times an expert's fair share; 0: the capacity is the fullest expert's load; "
        "unset: drop none, but 1 with layer tutel",
        least=-(2**31),
    )
    capacity_rule: str = option(
        "megablocks",
        "formula of the capacity; only tutel takes a negative factor, and layer tutel has only tutel",
        CAPACITY_RULES,
    )
    pad_to_capacity: bool = option(
        False, "with a capacity, compute each expert's empty places too, as GShard and Tutel do; off: only drop tokens"
    )
    uniform_assignment: bool = option(False, "give tokens to experts in turn, without the router, for benchmarks")
    recompute_activation: bool = option(False, "recompute the experts' activation in backward instead of saving it")
    quantize_inputs_num_bits: int = option(
        -1, "bits in which the experts' input is saved; -1: as it is", QUANTIZE_NUM_BITS
    )
    quantize_rematerialize_num_bits: int = option(
        -1,
        "bits in which pre-activations are saved; backward recomputes the activation from them; -1: as they are",
        QUANTIZE_NUM_BITS,
    )
    quantize_scatter_num_bits: int = option(
        -1, "bits in which the experts' output is saved for the router's gradient; -1: as it is",
        QUANTIZE_NUM_BITS,
    )  # fmt: skip
    gradient_accumulation_fusion: bool | None = option(
        None,
        "let the experts add the gradients of their matrices to Megatron's main gradients during backward; unset: on a "
        "GPU yes, elsewhere as Megatron's own flag says",
    )
    dispatcher: str = option(
        "auto",
        "how tokens reach the experts of other ranks: symmetric, through memory that the GPUs of one host share, "
        "without a host synchronization; all_to_all; auto: symmetric where the ranks can share memory, max_tokens is "
        "known and rows cannot overflow",
        DISPATCHER_CHOICES,
    )
    max_tokens: int | None = option(
        None, "most tokens that a rank brings to a layer, for dispatcher=symmetric; the driver knows it"
    )
    dispatch_rows_factor: float = option(
        2.0,
        "rows that a rank's experts take with dispatcher=symmetric, as a multiple of max_tokens times top-k; the run "
        "stops if more arrive",
    )
    attention: str = option(
        "sdpa", "core attention without Transformer Engine: sdpa, torch's fused one; megatron, Megatron's",
        ("sdpa", "megatron"),
    )  # fmt: skip
    norm: str = option(
        "fused",
        "norms on a GPU without Transformer Engine: fused, our Triton kernels, which also add bias, dropout and "
        "residual before a norm unless --no-bias-dropout-fusion is given; torch, torch's",
        ("fused", "torch"),
    )  # fmt: skip
    qkv_bias: str = option(
        "fused",
        "bias of queries, keys and values on a GPU without Transformer Engine: fused, added inside the product where "
        "no tensor parallelism splits it; megatron, in a pass of its own",
        _FUSED,
    )
    rope: str = option(
        "fused",
        "rotary embedding on a GPU without Transformer Engine: fused, our Triton kernel; megatron, torch's operations",
        _FUSED,
    )
    qk_norm: str = option(
        "head",
        "what --qk-layernorm normalizes: head, each head of queries and keys, as Megatron; all, all heads of a token "
        "together, as OLMoE; all needs tensor parallel size 1 and no Transformer Engine",
        ("head", "all"),
    )

    def __post_init__(self) -> None:
        check_options(MegaBlocksSettings, vars(self))
        if self.layer == "tutel":  # whichever code runs it, the rule and the default factor are Tutel's
            object.__setattr__(self, "capacity_rule", "tutel")
            if self.capacity_factor is None:
                object.__setattr__(self, "capacity_factor", 1.0)
        defaults = {f.name: f.default for f in dataclasses.fields(self)}
        for name in _NOT_READ.get(self.layer, ()):
            if (value := getattr(self, name)) != defaults[name]:
                allowed = f"must be {defaults[name]!r} with layer={self.layer!r}, which does not read it"
                refuse(name, value, f"{allowed}, or use layer='megablocks'")
        if self.capacity_factor is None:
            for name in ("capacity_rule", "pad_to_capacity"):
                if (value := getattr(self, name)) != defaults[name]:
                    refuse(name, value, "needs a capacity_factor; without one nothing is dropped or padded")
        if self.capacity_factor is not None and self.capacity_factor < 0 and self.capacity_rule != "tutel":
            refuse("capacity_factor", self.capacity_factor, "must be >= 0, or use capacity_rule='tutel'")

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> MegaBlocksSettings:
        """The settings in MEGABLOCKS_<FIELD>. Raises ConfigError, which names the variable, at a wrong value."""
        names = {(PREFIX + f.name).upper(): f for f in dataclasses.fields(cls)}
        return cls(**{f.name: _parse(name, environ[name], f) for name, f in names.items() if name in environ})


@dataclass(frozen=True, kw_only=True)
class DriverSettings:
    """What the driver adds to Megatron's training loop; one `--megablocks-*` flag a field."""

    run_dir: str | None = option(None, "folder of loss.csv, loss.png, expert_load.* and env.txt; unset: --save")
    nonfinite_guard: bool = option(
        True,
        "at a NaN or Inf, stop every rank without that update and name the layer that it came from; with the fused "
        "optimizer the host looks once a log interval",
    )
    loss_spike_factor: float = option(
        0.0, "skip the update of a step whose loss exceeds this many times the median of the past losses; 0: never"
    )
    loss_spike_window: int = option(
        64, "number of past losses in the median of the loss spike factor; checkpoints keep them", least=4
    )
    hang_timeout: float = option(600.0, "seconds without a sign of life after which a rank counts as dead; 0: never")
    fused_optimizer: bool = option(
        True,
        "on a GPU, let Megatron's Adam read and write each parameter once, and keep the gradient norm on the GPU; off: "
        "Transformer Engine's, apex's or torch's Adam, whichever is installed",
    )
    verify_checkpoint: bool = option(
        True, "before a checkpoint is loaded, compare every file with the sha256 that was recorded when it was saved"
    )
    keep_checkpoints: int = option(
        0, "after a save, keep only this many of the run's newest complete checkpoints; 0: keep all", least=0
    )
    allow_other_model: bool = option(
        False, "resume even if flags that define the model, such as the top-k, differ from the saved ones"
    )
    fixed_validation: bool = option(
        False,
        "let every evaluation read the same validation samples, whatever --seed is; off: each evaluation reads the "
        "next ones, in an order drawn from --seed",
    )
    fused_loss: bool = option(
        True,
        "project to the vocabulary and compute the loss in one op, in chunks of tokens, without float32 logits; off "
        "without a GPU",
    )
    fused_loss_kept_gib: float | None = option(
        None,
        "GiB of logits that the fused loss keeps for backward; backward computes the others again; unset: a tenth of "
        "the GPU's memory",
    )

    def __post_init__(self) -> None:
        check_options(DriverSettings, vars(self))
        if 0 < self.loss_spike_factor <= 1:
            refuse("loss_spike_factor", self.loss_spike_factor, "must be > 1, or 0 for never")


def _parse(name: str, text: str, one: dataclasses.Field) -> Any:
    """The value of a field from the text of its environment variable `name`."""
    kind = kind_of(one)
    if text.lower() in ("", "none") and "None" in str(one.type):
        return None
    if kind is bool:
        if text.lower() not in ("0", "1", "true", "false"):
            refuse(name, text, "must be 0, 1, true or false")
        return text.lower() in ("1", "true")
    try:
        return kind(text)
    except ValueError:
        raise ConfigError(f"{name}={text!r}: must be {'an integer' if kind is int else 'a number'}") from None


def settings_of(config: Any) -> MegaBlocksSettings:
    """The settings stored on a TransformerConfig as `megablocks`, otherwise those of the environment."""
    stored = getattr(config, "megablocks", None)
    return stored if stored is not None else MegaBlocksSettings.from_env()
