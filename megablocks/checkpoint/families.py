"""Families of Hugging Face models: what their config.json says, and where their files store router and experts.

A family is one entry of `FAMILIES`. Tensors without a rule have the names of Hugging Face's Llama in every family.
`OURS` is the format of our own layers: the same folder with the state dict of a `dMoE` at model.layers.N.mlp.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from megablocks.checkpoint.layout import Model, Rule
from megablocks.config import ConfigError, MoEConfig, refuse

_LAYER = "model.layers.{l}."
_ROUTER = _LAYER + "mlp.router.layer.weight"
_EXPERT = _LAYER + "mlp.experts.{e}."

OURS = tuple(Rule(f"{_LAYER}mlp.experts.{name}", (_EXPERT + name,), merged=True) for name in ("w1", "v1", "w2"))


def _one_tensor_an_expert(block: str, gate: str, up: str, down: str) -> tuple[Rule, ...]:
    """Return the rules of a family that stores three matrices of each expert under `block`."""
    experts = f"{_LAYER}{block}.experts.{{e}}."
    return (
        Rule(f"{_LAYER}{block}.gate.weight", (_ROUTER,)),
        Rule(f"{experts}{gate}.weight", (_EXPERT + "w1",)),
        Rule(f"{experts}{up}.weight", (_EXPERT + "v1",)),
        Rule(f"{experts}{down}.weight", (_EXPERT + "w2",), "transposed"),
    )


_LLAMA_EXPERTS = _one_tensor_an_expert("mlp", "gate_proj", "up_proj", "down_proj")
_FIELDS = {
    "num_layers": ("num_hidden_layers",),
    "hidden_size": ("hidden_size",),
    "num_heads": ("num_attention_heads",),
    "num_kv_heads": ("num_key_value_heads",),
    "vocab_size": ("vocab_size",),
    "top_k": ("num_experts_per_tok",),
    "norm_eps": ("rms_norm_eps",),
    "max_positions": ("max_position_embeddings",),
    "activation": ("hidden_act",),
}
_LARGEST, _MOST_EXPERTS = 2**31 - 1, 2**20
"""Upper limits on a size, and on the experts of all layers: a mistyped number would otherwise fill the memory."""

Kind = Callable[[Any], str]
"""Checks a value of config.json: returns "" if it is valid, otherwise what it must be."""


def _size(value: Any, least: int = 1) -> str:
    if type(value) is not int or value < least:
        return f"must be an integer >= {least}"
    return "" if value <= _LARGEST else f"must be at most {_LARGEST}"


def _kind(what: str, fits: Callable[[Any], bool]) -> Kind:
    return lambda value: "" if fits(value) else f"must be {what}"


def _only(allowed: str) -> Kind:
    """Return the check of a field that transformers ignores."""
    return _kind(f"{allowed!r}, as transformers computes it", lambda value: value == allowed)


_COUNT = functools.partial(_size, least=0)
_NUMBER = _kind("a number > 0", lambda value: type(value) in (int, float) and 0 < value <= sys.float_info.max)
_FACTOR = _kind("a number >= 0", lambda value: type(value) in (int, float) and 0 <= value <= sys.float_info.max)
_TEXT = _kind("a string", lambda value: isinstance(value, str))
_FLAG = _kind("true or false", lambda value: isinstance(value, bool))
_OBJECT = _kind("an object", lambda value: isinstance(value, dict))
_LAYERS = _kind(
    "a list of the layers' numbers", lambda value: isinstance(value, list) and all(type(one) is int for one in value)
)
_KINDS: dict[Any, Kind] = {"str": _TEXT, "int": _size, "float": _NUMBER, "bool": _FLAG}
_FIELD_KINDS = {f.name: kind for f in dataclasses.fields(Model) if (kind := _KINDS.get(f.type.removesuffix(" | None")))}


class Family(NamedTuple):
    """A family of models.

    architecture: the class in transformers.
    fields: fields of `Model` in addition to `_FIELDS`, and their names in config.json; the first name is written.
    has: fields of `Model` that config.json does not contain.
    must: fields that config.json must set to this value, or leave out, if Megatron computes the model.
    rules: where its files store the tensors with names that differ from Llama's.
    derived: computes fields of `Model` that depend on several fields of config.json.
    written: further fields of a new config.json.
    yarn: Megatron's values for scaled rotary positions; empty if it cannot scale them in this family.
    reads: further fields that `derived` reads, and their checks.
    """

    architecture: str
    fields: Mapping[str, tuple[str, ...]]
    has: Mapping[str, Any]
    must: Mapping[str, Any]
    rules: tuple[Rule, ...]
    derived: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda config: {}
    written: Callable[[Model], Mapping[str, Any]] = lambda model: {}
    yarn: Mapping[str, Any] = {}
    reads: Mapping[str, Kind] = {}


_YARN_FACTORS = ("factor", "mscale", "mscale_all_dim")
_OF_ANY: Mapping[str, Any] = {"is_causal": True}
"""Like `Family.must`, for every family. A new config.json does not contain these fields."""
_YARN = {"beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 4096}


def _dense_of_qwen(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the layers without experts: the listed ones, and those between the sparse steps."""
    step, listed = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or ()
    layers = range(config["num_hidden_layers"])
    return {"dense_layers": tuple(layer for layer in layers if layer in listed or (layer + 1) % step)}


def _of_deepseek(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Check that K/topk_group is 2: Hugging Face scores a group by its best 2 experts, our router by K/topk_group."""
    top_k, groups, chosen = config["num_experts_per_tok"], config["n_group"], config["topk_group"]
    if chosen < groups and top_k // chosen != 2:
        raise ConfigError(f"topk_group={chosen}: must be half of num_experts_per_tok={top_k}, or n_group={groups}")
    return {
        "dense_layers": tuple(range(min(config.get("first_k_dense_replace", 0), config["num_hidden_layers"]))),
        "shared_width": config.get("n_shared_experts", 0) * config["moe_intermediate_size"] or None,
        "q_lora_rank": config.get("q_lora_rank"),
        "num_kv_heads": config["num_attention_heads"],
        "head_dim": config["qk_nope_head_dim"] + config["qk_rope_head_dim"],
    }


def _written_for_deepseek(model: Model) -> Mapping[str, Any]:
    """Return fields of config.json that follow from other fields of the model."""
    return {
        "first_k_dense_replace": len(model.dense_layers),
        "n_shared_experts": (model.shared_width or 0) // model.expert_width,
        "q_lora_rank": model.q_lora_rank,
        "num_nextn_predict_layers": 0,
    }


def _windows(layers: int) -> list[str]:
    """Return the alternating layer types, starting with the first layer."""
    return ["full_attention" if layer % 2 else "sliding_attention" for layer in range(layers)]


def _of_gpt_oss(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return no fields. Refuse a config.json without YaRN's settings, or with windows that do not alternate."""
    if "rope_parameters" not in config and not config.get("rope_scaling"):
        raise ConfigError("rope_parameters is missing: transformers would use YaRN with factor=32; set it explicitly")
    types, allowed = config.get("layer_types"), _windows(config["num_hidden_layers"])
    if types not in (None, allowed):
        raise ConfigError(f"layer_types={types}: must alternate, {allowed[:2]} …, over all {len(allowed)} layers")
    return {}


FAMILIES = {
    "mixtral": Family(
        "MixtralForCausalLM",
        {"num_experts": ("num_local_experts",), "expert_width": ("intermediate_size",), "head_dim": ("head_dim",)},
        {"normalize_top_k": True},
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
        {"qk_norm": "all"},
        {"hidden_act": "silu", "attention_bias": False, "clip_qkv": None, "sliding_window": None},
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
        _dense_of_qwen,
        lambda model: {"mlp_only_layers": list(model.dense_layers), "decoder_sparse_step": 1},
        reads={"mlp_only_layers": _LAYERS, "decoder_sparse_step": _size},
    ),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM",
        {
            "num_experts": ("n_routed_experts", "num_local_experts"),
            "expert_width": ("moe_intermediate_size",),
            "dense_width": ("intermediate_size",),
            "normalize_top_k": ("norm_topk_prob",),
            "top_k_scaling": ("routed_scaling_factor",),
            "num_groups": ("n_group",),
            "group_top_k": ("topk_group",),
            "kv_lora_rank": ("kv_lora_rank",),
            "nope_dim": ("qk_nope_head_dim",),
            "rope_dim": ("qk_rope_head_dim",),
            "v_dim": ("v_head_dim",),
        },
        {"score_function": "sigmoid", "score_bias": True},
        # the norms of its latent attention always have this epsilon, even if config.json differs
        {
            "hidden_act": "silu",
            "attention_bias": False,
            "rope_interleave": True,
            "norm_topk_prob": True,
            "rms_norm_eps": 1e-6,
        },
        (
            *_LLAMA_EXPERTS,
            Rule(f"{_LAYER}mlp.gate.e_score_correction_bias", (f"{_LAYER}mlp.router.expert_score_bias",)),
            *(
                Rule(f"{_LAYER}mlp.shared_experts.{name}.weight", (f"{_LAYER}mlp.shared_expert.{name}.weight",))
                for name in ("gate_proj", "up_proj", "down_proj")
            ),
        ),
        _of_deepseek,
        _written_for_deepseek,
        {**_YARN, "truncate": True},
        {
            "scoring_func": _only("sigmoid"),
            "topk_method": _only("noaux_tc"),
            "first_k_dense_replace": _COUNT,
            "n_shared_experts": _COUNT,
            "q_lora_rank": _size,
        },
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        {
            "num_experts": ("num_local_experts",),
            "expert_width": ("intermediate_size",),
            "head_dim": ("head_dim",),
            "clamp": ("swiglu_limit",),
            "window": ("sliding_window",),
        },
        {"normalize_top_k": True},
        {"hidden_act": "silu", "attention_bias": True, "swiglu_alpha": 1.702},
        (
            Rule(f"{_LAYER}mlp.router.weight", (_ROUTER,)),
            Rule(f"{_LAYER}mlp.router.bias", (f"{_LAYER}mlp.router.layer.bias",)),
            Rule(f"{_LAYER}mlp.experts.gate_up_proj", (_EXPERT + "w1", _EXPERT + "v1"), "alternating"),
            Rule(f"{_LAYER}mlp.experts.gate_up_proj_bias", (_EXPERT + "b1", _EXPERT + "c1"), "alternating"),
            Rule(f"{_LAYER}mlp.experts.down_proj", (_EXPERT + "w2",)),
            Rule(f"{_LAYER}mlp.experts.down_proj_bias", (_EXPERT + "b2",)),
        ),
        _of_gpt_oss,
        lambda model: {"layer_types": _windows(model.num_layers)},
        {**_YARN, "truncate": False},
    ),
}


def family_of(config: Mapping[str, Any], where: object) -> str:
    """Return the key in `FAMILIES` of a config.json. Raises ConfigError, which names the family."""
    name = config.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        raise ConfigError(f"{where}: model_type={name!r}: must be one of {', '.join(FAMILIES)}")
    return name


def _check_kinds(config: Mapping[str, Any], family: Family, where: object) -> None:
    """Raise ConfigError for an invalid value. A null or missing field has a default, or is refused later."""
    fields = {**_FIELDS, "head_dim": ("head_dim",), **family.fields}
    kinds = {name: _FIELD_KINDS[field] for field, names in fields.items() for name in names}
    kinds |= {"rope_theta": _NUMBER, "rope_scaling": _OBJECT, "rope_parameters": _OBJECT}
    kinds |= {"tie_word_embeddings": _FLAG, **family.reads}

    def check(values: Mapping[str, Any], kinds: Mapping[str, Kind], of: str) -> None:
        for name, kind in kinds.items():
            if values.get(name) is not None and (problem := kind(values[name])):
                raise ConfigError(f"{where}: {of}{name}={values[name]!r}: {problem}")

    check(config, kinds, "")
    for name in ("rope_scaling", "rope_parameters"):
        check(config.get(name) or {}, {"rope_theta": _NUMBER, **dict.fromkeys(_YARN_FACTORS, _FACTOR)}, f"{name}.")


def _check_sizes(sizes: Mapping[str, int], names: Mapping[str, str], where: object) -> None:
    """Raise ConfigError for sizes that do not fit together. sizes: fields of `Model`. names: those in config.json."""

    def said(field: str) -> str:
        return f"{names[field]}={sizes[field]}"

    def check(fits: bool, field: str, allowed: str) -> None:
        if not fits:
            raise ConfigError(f"{where}: {said(field)}: must {allowed}")

    layers, experts, rotated = sizes["num_layers"], sizes["num_experts"], "rope_dim"
    most = f"be at most {_MOST_EXPERTS} divided by {said('num_experts')}"
    check(layers * experts <= _MOST_EXPERTS, "num_layers", most)
    if rotated not in sizes:  # no latent attention, which has other widths and no groups of queries
        rotated = "head_dim"
        check(sizes[rotated] > 0, "num_heads", f"be at most {said('hidden_size')} where head_dim is missing")
        check(sizes["num_heads"] % sizes["num_kv_heads"] == 0, "num_kv_heads", f"divide {said('num_heads')}")
    check(sizes[rotated] % 2 == 0, rotated, "be even, because positions rotate it")
    check(sizes["top_k"] <= experts, "top_k", f"be at most {said('num_experts')}")
    if "num_groups" in sizes:
        check(experts % sizes["num_groups"] == 0, "num_groups", f"divide {said('num_experts')}")
        check(sizes["group_top_k"] <= sizes["num_groups"], "group_top_k", f"be at most {said('num_groups')}")


def model_of(config: Mapping[str, Any], where: object) -> Model:
    """Return the model that a config.json describes. Raises ConfigError, which names a missing or invalid field."""
    family = FAMILIES[family_of(config, where)]
    _check_kinds(config, family, where)
    if config.get("quantization_config"):
        fix = "must be left out; save the model in bf16 first, of MXFP4 by Mxfp4Config(dequantize=True)"
        raise ConfigError(f"{where}: quantization_config: {fix}")

    def named(names: tuple[str, ...]) -> str:
        name = next((name for name in names if config.get(name) is not None), None)
        if name is None:
            raise ConfigError(f"{where}: {names[0]} is missing")
        return name

    rope = _rope_of(config)
    heads = config[named(("num_attention_heads",))]
    defaults = {
        "num_key_value_heads": heads,
        "head_dim": config[named(("hidden_size",))] // heads,
        "norm_topk_prob": family.must.get("norm_topk_prob", False),
        "hidden_act": "silu",
    }
    # transformers reads a null norm_topk_prob as false, so it gets no default here and is refused
    given = {name: found for name, found in config.items() if found is not None or name == "norm_topk_prob"}
    config = {**defaults, **given, "rope_theta": rope["rope_theta"]}
    fields = {**_FIELDS, "head_dim": ("head_dim",), **family.fields}
    names = {field: named(options) for field, options in fields.items()}
    values: dict[str, Any] = {field: config[name] for field, name in names.items()}
    _check_sizes(values, names, where)
    values["rope_theta"] = float(config[named(("rope_theta",))])
    values["tied"] = config.get("tie_word_embeddings", False)
    if rope["rope_type"] == "yarn":
        values["yarn"] = _yarn_of(rope, where)
    return Model(**{**values, **family.has, **family.derived(config)})


def _rope_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotary settings, with the precedence and the defaults of transformers."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    return {
        "rope_type": rope.get("type", "default"),
        "rope_theta": config.get("rope_theta"),
        "original_max_position_embeddings": config.get("max_position_embeddings"),
        **rope,
    }


def _yarn_of(rope: Mapping[str, Any], where: object) -> tuple[float, float, float]:
    """Return `Model.yarn`. transformers reads mscale only together with mscale_all_dim."""
    factor, mscale, all_dim = (float(rope.get(name) or 0) for name in _YARN_FACTORS)
    if not factor or (all_dim and not mscale):
        raise ConfigError(f"{where}: {'mscale' if factor else 'factor'} of YaRN is missing")
    return (factor, mscale, all_dim) if all_dim else (factor, 1.0, 0.0)


def check_computable(config: Mapping[str, Any], where: object) -> None:
    """Raise ConfigError, which names the field, if Megatron would compute the config's model differently."""
    family = FAMILIES[family_of(config, where)]
    said, needed = _beside_model(config), {**_OF_ANY, **family.must}
    if said["rope_type"] == "yarn":
        needed |= {**family.yarn, "attention_factor": None}
    rope_types = ("default", "yarn") if family.yarn else ("default",)
    for name, allowed in {"rope_type": rope_types, **{name: (value,) for name, value in needed.items()}}.items():
        if said.get(name) not in allowed:
            rule = f"must be {' or '.join(map(repr, allowed))} for Megatron"
            raise ConfigError(f"{where}: {name}={said.get(name)!r}: {rule}")


def family_for(model: Model) -> str:
    """Return the family whose config.json can describe `model`. Raises ConfigError, which says what each lacks."""
    reasons = []
    for name in FAMILIES:
        try:
            changed = differences(model, model_of(config_of(model, name), name))
        except ConfigError as error:
            changed = str(error)
        if not changed:
            return name
        reasons.append(f"{name}: {changed}")
    raise ConfigError(f"no family of Hugging Face computes this model: {'; '.join(reasons)}")


def config_of(model: Model, name: str) -> dict[str, Any]:
    """Return a config.json for a model of the family `name`, without dtype and without ids of special tokens."""
    family = FAMILIES[name]
    names = {**_FIELDS, **family.fields}
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": model.rope_theta}
    if model.yarn is not None:
        rope |= {"rope_type": "yarn", **dict(zip(_YARN_FACTORS, model.yarn, strict=True)), **family.yarn}
    return {
        "architectures": [family.architecture],
        "model_type": name,
        **{options[0]: getattr(model, field) for field, options in names.items()},
        **family.must,
        **family.written(model),
        "tie_word_embeddings": model.tied,
        "rope_theta": model.rope_theta,
        "rope_parameters": rope,
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    }


_GATES = {
    "silu": ("swiglu", "tanh"),
    "swish": ("swiglu", "tanh"),
    "relu": ("reglu", "tanh"),
    "gelu": ("geglu", "none"),
    "gelu_new": ("geglu", "tanh"),
    "gelu_pytorch_tanh": ("geglu", "tanh"),
}
"""transformers' names of activations: `activation` and `gelu_approximate` of `MoEConfig`."""


def layer_config(model: Model) -> MoEConfig:
    """Return the config of the `dMoE` in the format `OURS`. Raises ConfigError if our layer lacks the activation."""
    if model.activation not in _GATES:
        refuse("hidden_act", model.activation, f"must be one of {', '.join(_GATES)} for our layer")
    activation, approximate = _GATES[model.activation]
    return MoEConfig(
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.expert_width,
        num_experts=model.num_experts,
        top_k=model.top_k,
        activation=activation,
        gelu_approximate=approximate,
        score_function=model.score_function,
        normalize_top_k=1.0 if model.normalize_top_k else None,
        top_k_scaling=model.top_k_scaling,
        num_groups=model.num_groups,
        group_top_k=model.group_top_k,
        expert_score_bias=model.score_bias,
        shared_expert_hidden_size=model.shared_width,
    )


def differences(model: Model, other: Model) -> str:
    """Return the fields that differ but must not for the same weights, as "field=value, not value, …"."""
    unused = {"max_positions"} | (set() if model.dense_layers else {"dense_width"})
    return _pairs(*({k: v for k, v in vars(one).items() if k not in unused} for one in (model, other)))


def config_differences(config: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Like `differences`, for two config.json of one family: fields that affect results but are not in `Model`."""
    return _pairs(_beside_model(config), _beside_model(other))


def _beside_model(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of config.json that affect results but are not in `Model`, with defaults filled in."""
    must = {**_OF_ANY, **FAMILIES[config["model_type"]].must}
    rope, said = _rope_of(config), {name: config.get(name, default) for name, default in must.items()}
    kind = said["rope_type"] = rope["rope_type"]
    if kind == "default":
        return said
    if kind == "yarn":  # `Model` contains its factors
        rope = {name: value for name, value in rope.items() if name not in _YARN_FACTORS}
        rope = {"beta_fast": 32, "beta_slow": 1, "truncate": True, **rope}
    return rope | said | {"rope_theta": None, "type": None}


def _pairs(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Return the names with different values, each with both values."""
    names = [name for name in {**one, **other} if one.get(name) != other.get(name)]
    return ", ".join(f"{name}={one.get(name)!r}, not {other.get(name)!r}" for name in names)
