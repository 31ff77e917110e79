"""MoEConfig: what it refuses, and that every refusal is one line that names field, value and what is allowed."""

import dataclasses
import json

import pytest

from megablocks.config import ConfigError, MoEConfig
from megablocks.kinds import IMPLS, MLP_IMPLS, QUANTIZED, ROUTERS, load
from megablocks.ops.activation_table import ACTIVATIONS, GATED

BASE = dict(hidden_size=16, ffn_hidden_size=32, num_experts=8)

BAD = [
    ({"hidden_size": 0}, "hidden_size=0: must be an integer >= 1"),
    ({"hidden_size": 16.0}, "hidden_size=16.0: must be an integer >= 1"),
    ({"hidden_size": True}, "hidden_size=True: must be an integer >= 1"),
    ({"num_experts": -1}, "num_experts=-1: must be an integer >= 1"),
    ({"top_k": 9}, "top_k=9: must be at most num_experts=8"),
    ({"top_k": None}, "top_k=None: must be an integer >= 1"),
    ({"activation": "swish"}, f"activation='swish': must be one of {', '.join(ACTIVATIONS)}"),
    ({"gelu_approximate": "erf"}, "gelu_approximate='erf': must be one of tanh, none"),
    ({"mlp_impl": "dense"}, f"mlp_impl='dense': must be one of {', '.join(MLP_IMPLS)}"),
    (
        {"mlp_impl": "sparse", "ffn_hidden_size": 100},
        "ffn_hidden_size=100: must be a multiple of 64 with mlp_impl='sparse', or use mlp_impl='auto'",
    ),
    ({"router_type": "hash"}, f"router_type='hash': must be one of {', '.join(ROUTERS)}"),
    ({"score_function": "relu"}, "score_function='relu': must be one of softmax, sigmoid"),
    ({"softmax_order": "before"}, "softmax_order='before': must be one of before_topk, after_topk"),
    ({"load_balancing_scope": "dp"}, "load_balancing_scope='dp': must be one of local, global"),
    ({"capacity_rule": "gshard"}, "capacity_rule='gshard': must be one of megablocks, tutel"),
    ({"mlp_bias": 1}, "mlp_bias=1: must be True or False"),
    ({"output_bias": "no"}, "output_bias='no': must be True or False"),
    ({"recompute_activation": None}, "recompute_activation=None: must be True or False"),
    ({"quantize_inputs_num_bits": 2}, "quantize_inputs_num_bits=2: must be one of -1, 4, 8"),
    ({"quantize_rematerialize_num_bits": 8.0}, "quantize_rematerialize_num_bits=8.0: must be one of -1, 4, 8"),
    ({"quantize_scatter_num_bits": None}, "quantize_scatter_num_bits=None: must be one of -1, 4, 8"),
    (
        {"mlp_impl": "reference", "quantize_inputs_num_bits": 8},
        "quantize_inputs_num_bits=8: must be -1 with mlp_impl='reference', or use 'auto', 'grouped', 'fused', 'sparse'",
    ),
    (
        {"mlp_impl": "fused", "recompute_activation": True, "quantize_rematerialize_num_bits": 8},
        "quantize_rematerialize_num_bits=8: must be -1 with mlp_impl='fused' and recompute_activation=True, "
        "which save no pre-activations",
    ),
    (
        {"mlp_impl": "reference", "quantize_rematerialize_num_bits": 4},
        "quantize_rematerialize_num_bits=4: must be -1 with mlp_impl='reference', "
        "or use 'auto', 'grouped', 'fused', 'sparse'",
    ),
    (
        {"mlp_impl": "scatter", "quantize_inputs_num_bits": 4},
        "quantize_inputs_num_bits=4: must be -1 with mlp_impl='scatter', or use 'auto', 'grouped', 'fused', 'sparse'",
    ),
    (
        {"mlp_impl": "scatter", "quantize_rematerialize_num_bits": 8},
        "quantize_rematerialize_num_bits=8: must be -1 with mlp_impl='scatter', "
        "or use 'auto', 'grouped', 'fused', 'sparse'",
    ),
    (
        {"mlp_impl": "scatter", "quantize_scatter_num_bits": 8},
        "quantize_scatter_num_bits=8: must be -1 with mlp_impl='scatter', "
        "or use 'auto', 'grouped', 'sparse', 'reference'",
    ),
    (
        {"mlp_impl": "fused", "quantize_scatter_num_bits": 8},
        "quantize_scatter_num_bits=8: must be -1 with mlp_impl='fused', "
        "or use 'auto', 'grouped', 'sparse', 'reference'",
    ),
    ({"uniform_assignment": 0}, "uniform_assignment=0: must be True or False"),
    ({"expert_score_bias": 1}, "expert_score_bias=1: must be True or False"),
    ({"shared_expert_gate": 1}, "shared_expert_gate=1: must be True or False"),
    ({"load_balancing_loss_weight": -0.1}, "load_balancing_loss_weight=-0.1: must be a finite number >= 0"),
    ({"z_loss_weight": float("nan")}, "z_loss_weight=nan: must be a finite number >= 0"),
    ({"init_std": float("inf")}, "init_std=inf: must be a finite number >= 0"),
    ({"output_init_std": "0.1"}, "output_init_std='0.1': must be a finite number >= 0"),
    ({"expert_score_bias_rate": -1}, "expert_score_bias_rate=-1: must be a finite number >= 0"),
    ({"top_k_scaling": 0}, "top_k_scaling=0: must be a finite number > 0"),
    ({"normalize_top_k": 0}, "normalize_top_k=0: must be a finite number > 0"),
    (
        {"dispatcher": "symmetric"},
        "max_tokens=None: must be given with dispatcher='symmetric', which sizes its buffers by it",
    ),
    ({"jitter_eps": 1.0}, "jitter_eps=1.0: must be below 1, or the router's input may change sign"),
    ({"jitter_eps": -0.1}, "jitter_eps=-0.1: must be a finite number >= 0"),
    ({"capacity_factor": -1.0}, "capacity_factor=-1.0: must be >= 0, or use capacity_rule='tutel'"),
    ({"capacity_factor": 10**400}, f"capacity_factor={10**400}: must be a finite number"),
    ({"capacity_factor": 1e308}, "capacity_factor=1e+308: must be within ±2**31"),
    ({"capacity_factor": -1e308, "capacity_rule": "tutel"}, "capacity_factor=-1e+308: must be within ±2**31"),
    ({"capacity_factor": "1"}, "capacity_factor='1': must be a finite number"),
    ({"num_groups": 4}, "group_top_k=None: num_groups and group_top_k are given together or not at all"),
    ({"group_top_k": 1}, "num_groups=None: num_groups and group_top_k are given together or not at all"),
    ({"num_groups": 3, "group_top_k": 1}, "num_groups=3: must divide num_experts=8"),
    ({"num_groups": 4, "group_top_k": 5}, "group_top_k=5: must be at most num_groups=4"),
    (
        {"num_groups": 4, "group_top_k": 1, "top_k": 3},
        "top_k=3: must be at most 2, the experts in group_top_k=1 groups",
    ),
    (
        {"num_groups": 4, "group_top_k": 2, "router_type": "expert_choice"},
        "num_groups=4: must be None with router_type='expert_choice': "
        "each token chooses K experts only with router_type='topk'",
    ),
    (
        {"router_type": "expert_choice", "expert_score_bias": True},
        "expert_score_bias=True: must be False with router_type='expert_choice': "
        "expert choice is balanced by construction",
    ),
    (
        {"router_type": "expert_choice", "uniform_assignment": True},
        "uniform_assignment=True: must be False with router_type='expert_choice': "
        "expert choice is balanced by construction",
    ),
    (
        {"router_type": "expert_choice", "normalize_top_k": 1.0},
        "normalize_top_k=1.0: must be None with router_type='expert_choice': "
        "each token chooses K experts only with router_type='topk'",
    ),
    ({"shared_expert_gate": True}, "shared_expert_gate=True: needs shared_expert_hidden_size"),
    ({"shared_expert_hidden_size": 0}, "shared_expert_hidden_size=0: must be an integer >= 1"),
]


@pytest.mark.parametrize(("changes", "message"), BAD, ids=[next(iter(c)) + str(i) for i, (c, _) in enumerate(BAD)])
def test_L2_refusal_is_one_line(changes, message):
    with pytest.raises(ConfigError) as error:
        MoEConfig(**{**BASE, **changes})
    assert str(error.value) == message
    assert isinstance(error.value, ValueError)


@pytest.mark.parametrize(
    "changes",
    [
        {"top_k": 8},
        {"num_experts": 1},
        {"capacity_factor": 0},
        {"capacity_factor": -1.0, "capacity_rule": "tutel"},
        {"num_groups": 4, "group_top_k": 2, "top_k": 4},
        {"router_type": "expert_choice", "score_function": "sigmoid"},
        {"expert_score_bias": True, "score_function": "softmax"},
        {"shared_expert_hidden_size": 64, "shared_expert_gate": True},
        {"jitter_eps": 0},
    ],
)
def test_accepts(changes):
    config = MoEConfig(**{**BASE, **changes})
    assert all(getattr(config, name) == value for name, value in changes.items())


def test_unknown_and_missing_keys():
    with pytest.raises(ConfigError, match=r"^topk=2: no such field, did you mean 'top_k'\?$"):
        MoEConfig.from_dict({**BASE, "topk": 2})
    with pytest.raises(ConfigError, match="^zzz=2: no such field$"):
        MoEConfig.from_dict({**BASE, "zzz": 2})
    with pytest.raises(ConfigError, match="^num_experts=None: is required$"):
        MoEConfig.from_dict({"hidden_size": 1, "ffn_hidden_size": 1})
    with pytest.raises(ConfigError, match="^1=2: no such field$"):
        MoEConfig.from_dict({**BASE, 1: 2})
    with pytest.raises(ConfigError, match="^values is a list: must be a mapping from field to value$"):
        MoEConfig.from_dict([BASE])


def test_round_trip_and_replace():
    config = MoEConfig(**BASE, top_k=2, capacity_factor=1.25)
    assert MoEConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    changed = config.replace(top_k=4)
    assert (changed.top_k, config.top_k) == (4, 2)
    with pytest.raises(ConfigError, match="^top_k=9:"):
        config.replace(top_k=9)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.top_k = 3
    assert hash(config) == hash(config.replace())


def test_gated_follows_the_activation():
    gated = tuple(a for a in ACTIVATIONS if MoEConfig(**BASE, activation=a).is_gated)
    assert gated == tuple(GATED)


def test_every_field_is_documented():
    for field in dataclasses.fields(MoEConfig):
        assert field.name in (MoEConfig.__doc__ or ""), field.name


def test_every_kind_names_code_that_exists_and_fields_that_a_config_has():
    fields = {field.name: field.default for field in dataclasses.fields(MoEConfig)}
    for impl in IMPLS.values():
        assert callable(load(impl.function)) and set(impl.not_quantized) <= set(QUANTIZED)
    for name, kind in ROUTERS.items():
        assert load(kind.module).router_type == name
        assert all(field in fields and fields[field] == needed for field, needed, _ in kind.needs)


@pytest.mark.parametrize("impl", MLP_IMPLS)
def test_what_an_implementation_refuses_stands_in_its_table(impl):
    """Each quantized tensor that the table does not refuse is accepted, and the other way round."""
    for name in QUANTIZED:
        refused = impl in IMPLS and name in IMPLS[impl].not_quantized
        if refused:
            with pytest.raises(ConfigError, match=f"^{name}=8: must be -1 with mlp_impl={impl!r}"):
                MoEConfig(**{**BASE, "ffn_hidden_size": 64, "mlp_impl": impl, name: 8})
        else:
            MoEConfig(**{**BASE, "ffn_hidden_size": 64, "mlp_impl": impl, name: 8})
