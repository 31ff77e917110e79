"""Families of Hugging Face models: what their config.json says, and where their files keep router and experts.

A family is one entry of `FAMILIES`. Tensors that no rule names have the names of Hugging Face's Llama in every family.
`OURS` is the format of our own layers: the same folder with the state dict of a `dMoE` at model.layers.N.mlp.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from megablocks.checkpoint.layout import Model, Rule
from megablocks.config import ConfigError, MoEConfig

_LAYER = "model.layers.{l}."
_ROUTER = _LAYER + "mlp.router.layer.weight"
_EXPERT = _LAYER + "mlp.experts.{e}."

OURS = tuple(Rule(f"{_LAYER}mlp.experts.{name}", (_EXPERT + name,), merged=True) for name in ("w1", "v1", "w2"))


def _one_tensor_an_expert(block: str, gate: str, up: str, down: str) -> tuple[Rule, ...]:
    """The rules of a family that keeps three matrices of each expert under `block`."""
    experts = f"{_LAYER}{block}.experts.{{e}}."
    return (
        Rule(f"{_LAYER}{block}.gate.weight", (_ROUTER,)),
        Rule(f"{experts}{gate}.weight", (_EXPERT + "w1",)),
        Rule(f"{experts}{up}.weight", (_EXPERT + "v1",)),
        Rule(f"{experts}{down}.weight", (_EXPERT + "w2",), "transposed"),
    )


_LLAMA_EXPERTS = _one_tensor_an_expert("mlp", "gate_proj", "up_proj", "down_proj")
_FIELDS = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "vocab_size": "vocab_size",
    "top_k": "num_experts_per_tok",
    "norm_eps": "rms_norm_eps",
    "max_positions": "max_position_embeddings",
}


class Family(NamedTuple):
    """A family of models.

    architecture: the class in transformers.
    fields: fields of `Model` beside `_FIELDS`, and the names that config.json has for them; the first is written.
    has: fields of `Model` that config.json does not say.
    must: what config.json must say, or leave out, where the model is computed by Megatron.
    rules: where its files keep what is not named as in Llama.
    dense_layers: the layers without experts, of a config.
    written: what a new config.json says beside all these.
    """

    architecture: str
    fields: Mapping[str, tuple[str, ...]]
    has: Mapping[str, Any]
    must: Mapping[str, Any]
    rules: tuple[Rule, ...]
    dense_layers: Callable[[Mapping[str, Any], int], tuple[int, ...]] = lambda config, layers: ()
    written: Callable[[Model], Mapping[str, Any]] = lambda model: {}


def _qwen_dense_layers(config: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    step, listed = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or ()
    return tuple(layer for layer in range(layers) if layer in listed or (layer + 1) % step)


FAMILIES = {
    "mixtral": Family(
        "MixtralForCausalLM",
        {"num_experts": ("num_local_experts",), "expert_width": ("intermediate_size",), "head_dim": ("head_dim",)},
        {"normalize_top_k": True, "qk_norm": None, "dense_layers": ()},
        {"hidden_act": "silu", "sliding_window": None},
        _one_tensor_an_expert("block_sparse_moe", "w1", "w3", "w2"),
    ),
    "olmoe": Family(
        "OlmoeForCausalLM",
        {
            "num_experts": ("num_experts", "num_local_experts"),
            "expert_width": ("intermediate_size",),
            "normalize_top_k": ("norm_topk_prob",),
        },
        {"qk_norm": "all", "dense_layers": ()},
        {"hidden_act": "silu", "attention_bias": False, "clip_qkv": None},
        _LLAMA_EXPERTS,
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        {
            "num_experts": ("num_experts", "num_local_experts"),
            "expert_width": ("moe_intermediate_size",),
            "dense_width": ("intermediate_size",),
            "normalize_top_k": ("norm_topk_prob",),
            "head_dim": ("head_dim",),
        },
        {"qk_norm": "head"},
        {"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False},
        _LLAMA_EXPERTS,
        _qwen_dense_layers,
        lambda model: {"mlp_only_layers": list(model.dense_layers), "decoder_sparse_step": 1},
    ),
}


def family_of(config: Mapping[str, Any], where: object) -> str:
    """The entry of `FAMILIES` for a config.json. Raises ConfigError, which names the family."""
    name = config.get("model_type")
    if name not in FAMILIES:
        raise ConfigError(f"{where}: model_type={name!r}: must be one of {', '.join(FAMILIES)}")
    return str(name)


def model_of(config: Mapping[str, Any], where: object) -> Model:
    """What a config.json says of its model. Raises ConfigError, which names a field that is missing."""
    family = FAMILIES[family_of(config, where)]

    def value(names: tuple[str, ...]) -> Any:
        found = next((config[name] for name in names if config.get(name) is not None), None)
        if found is None:
            raise ConfigError(f"{where}: {names[0]} is missing")
        return found

    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    heads = value(("num_attention_heads",))
    defaults = {
        "num_key_value_heads": heads,
        "head_dim": value(("hidden_size",)) // heads,
        "rope_theta": rope.get("rope_theta"),
        "norm_topk_prob": False,
    }
    config = {**defaults, **{name: given for name, given in config.items() if given is not None}}
    names = {**{field: (name,) for field, name in _FIELDS.items()}, "head_dim": ("head_dim",), **family.fields}
    values: dict[str, Any] = {field: value(options) for field, options in names.items()}
    values["rope_theta"] = float(value(("rope_theta",)))
    values["tied"] = bool(config.get("tie_word_embeddings", False))
    values["dense_layers"] = family.dense_layers(config, values["num_layers"])
    return Model(**{**values, **family.has})


def check_computable(config: Mapping[str, Any], where: object) -> None:
    """Refuse a config whose model Megatron would compute differently. Raises ConfigError, which names the field."""
    for name, allowed in FAMILIES[family_of(config, where)].must.items():
        if config.get(name, allowed) != allowed:
            raise ConfigError(f"{where}: {name}={config[name]!r}: must be {allowed!r} for Megatron")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise ConfigError(f"{where}: rope_type={kind!r}: must be 'default' for Megatron")


def family_for(model: Model) -> str:
    """The family that computes what `model` says. Raises ConfigError, which says what each family would need."""
    reasons = []
    for name, family in FAMILIES.items():
        differs = [field for field, value in family.has.items() if getattr(model, field) != value]
        if "head_dim" not in family.fields and model.head_dim * model.num_heads != model.hidden_size:
            differs.append("head_dim")
        if not differs:
            return name
        field = differs[0]
        wanted = family.has.get(field, f"{model.hidden_size // model.num_heads}")
        reasons.append(f"{name} has {field}={wanted!r}")
    raise ConfigError(
        f"no family of Hugging Face computes this model (qk_norm={model.qk_norm!r}, "
        f"normalize_top_k={model.normalize_top_k}, dense_layers={model.dense_layers}): {'; '.join(reasons)}"
    )


def config_of(model: Model, name: str) -> dict[str, Any]:
    """A config.json for a model of the family `name`, without dtype and with no ids of special tokens."""
    family = FAMILIES[name]
    names = {**{field: (one,) for field, one in _FIELDS.items()}, **family.fields}
    return {
        "architectures": [family.architecture],
        "model_type": name,
        **{options[0]: getattr(model, field) for field, options in names.items()},
        **family.must,
        **family.written(model),
        "tie_word_embeddings": model.tied,
        "rope_theta": model.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_theta},
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    }


def layer_config(model: Model) -> MoEConfig:
    """The config of the `dMoE` whose state dict the format `OURS` holds."""
    return MoEConfig(
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.expert_width,
        num_experts=model.num_experts,
        top_k=model.top_k,
        activation="swiglu",
        normalize_top_k=1.0 if model.normalize_top_k else None,
    )


def differences(model: Model, other: Model) -> str:
    """The fields in which two models of the same weights may not differ, as "field=value (other: value), …"."""
    unused = {"max_positions"} | (set() if model.dense_layers else {"dense_width"})
    names = [field.name for field in dataclasses.fields(model) if field.name not in unused]
    pairs = [(name, getattr(model, name), getattr(other, name)) for name in names]
    return ", ".join(f"{name}={a!r} (other: {b!r})" for name, a, b in pairs if a != b)
