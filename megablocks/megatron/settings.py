"""What our layers need to know beyond Megatron's TransformerConfig, and how they learn it.

The driver generates its `--megablocks-*` flags from the dataclass and stores the result on the TransformerConfig as
the attribute `megablocks`. Where nothing stored it (Megatron-LM's own pretrain_gpt.py with `--spec`), environment
variables of the same names fill it: MEGABLOCKS_CAPACITY_FACTOR=1.25.
"""

from __future__ import annotations

import dataclasses
import os
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megablocks.config import (
    CAPACITY_RULES,
    MLP_IMPLS,
    QUANTIZE_NUM_BITS,
    ROUTER_TYPES,
    TOKEN_ROUNDINGS,
    ConfigError,
)

LAYERS = ("megablocks", "experts", "megatron", "tutel")
ATTENTIONS = ("sdpa", "megatron")
ENV_PREFIX = "MEGABLOCKS_"

_ROUTING = ("router_type", "token_rounding", "normalize_top_k", "uniform_assignment")
_EXPERTS = ("mlp_impl", "recompute_activation", "quantize_inputs_num_bits", "quantize_rematerialize_num_bits",
            "quantize_scatter_num_bits", "gradient_accumulation_fusion")  # fmt: skip
# What a layer that is not ours, or not all ours, never reads. Megatron weights the output of our experts itself.
_NOT_READ = {
    "experts": (*_ROUTING, "capacity_factor", "quantize_scatter_num_bits"),
    "megatron": (*_ROUTING, "capacity_factor", *_EXPERTS),
    "tutel": (*_ROUTING, *_EXPERTS),
}


def _option(default: Any, text: str, choices: tuple[Any, ...] | None = None) -> Any:
    return field(default=default, metadata={"help": text, "choices": choices})


@dataclass(frozen=True, kw_only=True)
class MegaBlocksSettings:
    """Each field's metadata holds its help text and its choices; flags are generated from them."""

    layer: str = _option(
        "megablocks",
        "mixture-of-experts layer: ours; Megatron's MoELayer with our experts; Megatron's own; Tutel's own where the "
        "package tutel is installed, otherwise ours with Tutel's capacity rule",
        LAYERS,
    )
    mlp_impl: str = _option(
        "auto",
        "how the experts are computed: grouped GEMMs; block-sparse products, for a width that is a multiple of 64, "
        "better 128; scatter, products that gather and weigh rows themselves; fused, the whole MLP in one op that "
        "keeps the least; the float32 reference; auto picks grouped or sparse by device and shape",
        MLP_IMPLS,
    )
    router_type: str = _option("topk", "tokens choose experts, or experts choose tokens", ROUTER_TYPES)
    token_rounding: str | None = _option(
        None, "in training, round each expert's load to a multiple of a tile by this rule; unset: plain top-k",
        TOKEN_ROUNDINGS,
    )  # fmt: skip
    token_rounding_tile: int | None = _option(None, "that tile in rows; unset: the experts' products' own")
    normalize_top_k: float | None = _option(
        None, "p of the p-norm that divides a token's weights (softmax before top-k only); Megatron's own rule if unset"
    )
    capacity_factor: float | None = _option(
        None, "drop tokens beyond this many times an expert's fair share; 0: the fullest expert's load; unset: dropless"
    )
    capacity_rule: str = _option(
        "megablocks", "formula of the capacity; only tutel takes a negative factor", CAPACITY_RULES
    )
    uniform_assignment: bool = _option(False, "replace the router's choice by round robin, for benchmarks")
    recompute_activation: bool = _option(False, "recompute the experts' activation in backward instead of storing it")
    quantize_inputs_num_bits: int = _option(-1, "bits of the experts' kept input; -1: as it is", QUANTIZE_NUM_BITS)
    quantize_rematerialize_num_bits: int = _option(
        -1, "bits of the kept pre-activations, from which backward recomputes; -1: as they are", QUANTIZE_NUM_BITS
    )
    quantize_scatter_num_bits: int = _option(
        -1, "bits of the experts' output kept for the router; -1: as it is", QUANTIZE_NUM_BITS
    )
    gradient_accumulation_fusion: bool | None = _option(
        None,
        "add the gradients of the experts' matrices to Megatron's main gradients as they are computed; "
        "unset: as --no-gradient-accumulation-fusion and the lack of apex say",
    )
    attention: str = _option(
        "sdpa", "core attention without Transformer Engine: torch's fused one, or Megatron's", ATTENTIONS
    )

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            value, choices = getattr(self, f.name), f.metadata["choices"]
            unset = value is None and f.default is None
            if choices is not None and not unset and value not in choices:
                raise ConfigError(f"{f.name}={value!r}: must be one of {', '.join(map(str, choices))}")
        if self.layer == "tutel":  # the rule is Tutel's, whichever code runs it, and so is the default factor
            object.__setattr__(self, "capacity_rule", "tutel")
            if self.capacity_factor is None:
                object.__setattr__(self, "capacity_factor", 1.0)
        defaults = {f.name: f.default for f in dataclasses.fields(self)}
        for name in _NOT_READ.get(self.layer, ()):
            if (value := getattr(self, name)) != defaults[name]:
                allowed = f"must be {defaults[name]!r} with layer={self.layer!r}, which does not read it"
                raise ConfigError(f"{name}={value!r}: {allowed}, or use layer='megablocks'")
        if self.capacity_factor is not None and self.capacity_factor < 0 and self.capacity_rule != "tutel":
            raise ConfigError(f"capacity_factor={self.capacity_factor!r}: must be >= 0, or use capacity_rule='tutel'")

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> MegaBlocksSettings:
        """Read MEGABLOCKS_<FIELD> for each field. ConfigError, naming the variable, at a value of the wrong type."""
        hints = typing.get_type_hints(cls)
        values = {}
        for f in dataclasses.fields(cls):
            name = ENV_PREFIX + f.name.upper()
            if name in environ:
                values[f.name] = _parse(name, environ[name], hints[f.name])
        return cls(**values)


def _parse(name: str, text: str, hint: Any) -> Any:
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if type(None) in kinds and text.lower() in ("", "none"):
        return None
    if bool in kinds:
        if text.lower() not in ("0", "1", "true", "false"):
            raise ConfigError(f"{name}={text!r}: must be 0, 1, true or false")
        return text.lower() in ("1", "true")
    for kind, what in ((int, "an integer"), (float, "a number")):
        if kind in kinds:
            try:
                return kind(text)
            except ValueError:
                raise ConfigError(f"{name}={text!r}: must be {what}") from None
    return text


def settings_of(config: Any) -> MegaBlocksSettings:
    """The settings stored on a TransformerConfig (attribute `megablocks`), else those of the environment."""
    stored = getattr(config, "megablocks", None)
    return stored if stored is not None else MegaBlocksSettings.from_env()
