"""What a MegaBlocks layer needs to know that Megatron's TransformerConfig does not say.

The training driver makes one `--megablocks-*` flag of each field and stores the settings on the TransformerConfig as
attribute `megablocks`; under Megatron-LM's own pretrain_gpt.py (`--spec`), which takes no flags of ours, the same names
are read from the environment: `MEGABLOCKS_CAPACITY_FACTOR=1.5`.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megablocks.config import CAPACITY_RULES, LOSS_SCOPES, MLP_IMPLS, ROUTER_TYPES, ConfigError

LAYERS = ("megablocks", "megatron", "tutel")


def _setting(default: Any, help: str, choices: tuple[str, ...] | None = None) -> Any:
    return field(default=default, metadata={"help": help, "choices": choices})


@dataclass(frozen=True, kw_only=True)
class MegaBlocksSettings:
    """Frozen; checked by `from_env`, by the driver's flags and, as part of a `MoEConfig`, by its own rules."""

    layer: str = _setting("megablocks", "whose expert layer: ours, Megatron's own, or Tutel's (if installed)", LAYERS)
    mlp_impl: str = _setting("auto", "how the experts are computed", MLP_IMPLS)
    router_type: str = _setting("topk", "who chooses: the token its experts, or the expert its tokens", ROUTER_TYPES)
    normalize_top_k: float | None = _setting(None, "p of the p-norm by which a token's top-k weights are divided")
    load_balancing_scope: str = _setting(
        "local", "load-balancing loss over a rank's micro-batch, or over all data-parallel ranks", LOSS_SCOPES
    )
    uniform_assignment: bool = _setting(False, "replace the router's choice by round robin, for benchmarks")
    capacity_factor: float | None = _setting(
        None, "expert capacity; unset: dropless; 0: the fullest expert's load; < 0 (tutel): the smaller of both"
    )
    capacity_rule: str = _setting("megablocks", "whose capacity formula", CAPACITY_RULES)
    recompute_activation: bool = _setting(False, "recompute the expert activation in backward instead of saving it")
    output_bias: bool = _setting(False, "one bias added after the experts are combined (megablocks 0.10's `bias`)")

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            choices = f.metadata["choices"]
            if choices and getattr(self, f.name) not in choices:
                raise ConfigError(f"{f.name}={getattr(self, f.name)!r}: must be one of {', '.join(choices)}")

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> MegaBlocksSettings:
        """Read `MEGABLOCKS_<FIELD>` variables; absent ones keep their default, malformed ones are a ConfigError."""
        environ = os.environ if environ is None else environ
        values = {}
        for f in dataclasses.fields(cls):
            name = f"MEGABLOCKS_{f.name.upper()}"
            if name in environ:
                values[f.name] = _parse(name, environ[name], str(f.type))
        return cls(**values)


def _parse(name: str, text: str, annotation: str) -> Any:
    if annotation == "bool":
        if text.lower() not in ("0", "1", "true", "false"):
            raise ConfigError(f"{name}={text!r}: must be 0, 1, true or false")
        return text.lower() in ("1", "true")
    if annotation.startswith("float"):
        try:
            return float(text)
        except ValueError:
            raise ConfigError(f"{name}={text!r}: must be a number") from None
    return text
