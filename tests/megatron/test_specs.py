"""What the specs build: the module of each layer, and that the ready objects give the same model."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any
from unittest import mock

import harness
import megatron.core
import pytest
import torch
from harness import Layout
from packaging.version import Version

from megablocks.config import ConfigError
from megablocks.testing.launcher import run_distributed_test

FREQUENCY = ("moe_layer_freq", [0, 1])
CASES: dict[str, Layout] = {
    "default": Layout(layers=2, model=(FREQUENCY, ("qk_layernorm", True))),
    "megatron's attention": Layout(layers=2, model=(FREQUENCY,), settings=(("attention", "megatron"),)),
    "experts": Layout(layers=2, model=(FREQUENCY,), settings=(("layer", "experts"),)),
    "megatron": Layout(layers=2, model=(FREQUENCY,), settings=(("layer", "megatron"),)),
    "sliding window": Layout(layers=2, model=(FREQUENCY, ("window_size", (4, 0)))),
}


def _model(layout: Layout, spec: Any = None) -> Any:
    from megatron.core.models.gpt.gpt_model import GPTModel

    from megablocks.megatron.specs import block_spec

    config = harness.transformer_config(layout)
    spec = block_spec(config) if spec is None else spec
    torch.manual_seed(2)
    model = GPTModel(config, spec, harness.VOCAB, harness.SEQ, position_embedding_type="rope")
    harness.fill_weights(model)
    return model


def _exhausted(*_: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


INSTALLATIONS: tuple[tuple[bool, dict[str, str]], ...] = (
    (True, {}), (True, {"norm": "torch"}), (True, {"rope": "megatron"}), (False, {}),
)  # fmt: skip


def _installed(gpu: bool, **settings: str) -> list[str]:
    """Which functions of Megatron a spec replaces, on a machine with or without a GPU."""
    from megablocks.megatron import specs

    config = harness.transformer_config(Layout(settings=tuple(settings.items())))
    with (
        mock.patch.object(torch.cuda, "is_available", lambda: gpu),
        mock.patch.object(specs.add_norm, "install") as additions,
        mock.patch.object(specs.rope, "install") as rotation,
    ):
        specs.block_spec(config)
    return [name for name, one in (("additions", additions), ("rotation", rotation)) if one.called]


def _inspect() -> dict[str, Any]:
    from megablocks.megatron.specs import block_spec, dense_layer_spec, moe_layer_spec

    harness.initialize(Layout())
    out: dict[str, Any] = {"installed": [_installed(gpu, **settings) for gpu, settings in INSTALLATIONS]}
    for name, layout in CASES.items():
        model = _model(layout)
        dense, sparse = model.decoder.layers
        names = [dense.mlp, sparse.mlp, sparse.input_layernorm, sparse.self_attention.core_attention]
        names += [model.decoder.final_layernorm, sparse.self_attention.q_layernorm]
        names += [sparse.mlp.router, sparse.mlp.experts]
        out[name] = [type(module).__name__ for module in names]
        out[f"{name}, dispatcher"] = type(sparse.mlp.token_dispatcher).__name__
    tokens = harness.sample(0)[None, :-1]
    position = torch.arange(harness.SEQ)[None]
    alike = Layout(layers=2)
    dense_layout = Layout(
        layers=2,
        model=(("num_moe_experts", None), ("moe_ffn_hidden_size", None), ("moe_aux_loss_coeff", 0.0)),
    )
    for name, layout, spec in (("moe", alike, moe_layer_spec), ("dense", dense_layout, dense_layer_spec)):
        ready, called = _model(layout, spec), _model(layout)
        out[f"ready {name}"] = torch.equal(ready(tokens, position, None), called(tokens, position, None))
    layer = _model(alike).decoder.layers[0].mlp
    layer.dispatcher.run = _exhausted
    try:
        layer(torch.zeros(3, 2, harness.transformer_config(alike).hidden_size))
    except torch.OutOfMemoryError as error:
        out["out of memory"] = str(error)
    config = harness.transformer_config(alike)
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("megablocks.megatron.specs").addHandler(handler)
    block_spec(config)
    block_spec(dataclasses.replace(config, moe_token_dispatcher_type="allgather"))
    out["said"] = said
    out["refused"] = []
    for field, value in (("qk_layernorm", False), ("multi_latent_attention", True)):
        other = dataclasses.replace(config, qk_layernorm=True)
        other.megablocks = dataclasses.replace(config.megablocks, qk_norm="all")
        setattr(other, field, value)
        try:
            block_spec(other)
        except ConfigError as error:
            out["refused"].append(str(error))
    holder = type("GPTModelConfig", (), {"transformer": config})()
    out["takes a GPTModelConfig"] = len(block_spec(holder, vp_stage=None).layer_specs)
    return out


def _decays() -> dict[str, set[float]]:
    """The multiplier of the weight decay of each of our experts' parameters, by name, of all layers."""
    from megatron.core.optimizer import get_megatron_optimizer
    from megatron.core.optimizer.optimizer_config import OptimizerConfig

    biased = (("add_bias_linear", True), ("bias_activation_fusion", False), ("gated_linear_unit", True))
    layout = Layout(layers=2, model=biased)
    harness.initialize(layout)
    _, chunks = harness.build_model(layout)
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-3, weight_decay=0.1), chunks)
    names = {parameter: name for name, parameter in chunks[0].named_parameters() if ".experts.core." in name}
    out: dict[str, set[float]] = {}
    for group in optimizer.param_groups:
        for parameter in names.keys() & set(group["params"]):
            out.setdefault(names[parameter].rpartition(".")[2], set()).add(group["wd_mult"])
    return out


def test_biases_of_experts_are_not_decayed_as_no_other_bias_is() -> None:
    """They have two dimensions, and Megatron knows biases by having one."""
    names = {name: {0.0 if name[0] in "bc" else 1.0} for name in ("w1", "v1", "w2", "b1", "c1", "b2")}
    assert run_distributed_test(_decays, 1)[0] == names


@pytest.fixture(scope="module")
def built() -> dict[str, Any]:
    return run_distributed_test(_inspect, 1)[0]


@pytest.mark.parametrize(
    "case, expected",
    [
        (
            "default",
            [
                "MLP",
                "MegaBlocksMoELayer",
                "Norm",
                "SDPAttention",
                "Norm",
                "Norm",
                "MegaBlocksRouter",
                "MegaBlocksExperts",
            ],
        ),
        (
            "megatron's attention",
            [
                "MLP",
                "MegaBlocksMoELayer",
                "Norm",
                "DotProductAttention",
                "Norm",
                "NoneType",
                "MegaBlocksRouter",
                "MegaBlocksExperts",
            ],
        ),
        (
            "experts",
            [
                "MLP",
                "MoELayer",
                "Norm",
                "SDPAttention",
                "Norm",
                "NoneType",
                "CountingTopKRouter",
                "MegaBlocksExperts",
            ],
        ),
        (
            "megatron",
            ["MLP", "MoELayer", "Norm", "SDPAttention", "Norm", "NoneType", "CountingTopKRouter", "SequentialMLP"],
        ),
    ],
)
def test_each_layer_is_what_the_settings_say(built: dict[str, Any], case: str, expected: list[str]) -> None:
    assert built[case] == expected


def test_on_a_gpu_additions_and_rotation_are_ours_unless_a_setting_says_no(built: dict[str, Any]) -> None:
    assert built["installed"] == [["additions", "rotation"], ["rotation"], ["additions"], []]


def test_our_layer_builds_no_dispatcher_of_megatrons(built: dict[str, Any]) -> None:
    assert built["default, dispatcher"] == "NoneType"
    assert built["megatron, dispatcher"] == "MoEAlltoAllTokenDispatcher"


def test_a_dispatcher_type_that_is_not_read_is_said(built: dict[str, Any]) -> None:
    (line,) = built["said"]
    assert line.startswith("moe_token_dispatcher_type='allgather' is not read: our layer exchanges the tokens itself;")


def test_L2_a_norm_over_all_heads_that_would_not_be_there_is_refused(built: dict[str, Any]) -> None:
    line = "megablocks_qk_norm='all': needs --qk-layernorm, and must be 'head' with --multi-latent-attention"
    assert built["refused"] == [line, line]


def test_the_tested_megatron_is_the_one_that_is_installed() -> None:
    """Another version is said in the log, so this must be the pinned one."""
    from megablocks.megatron.cpu import TESTED_MEGATRON

    pinned = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert f'"megatron-core=={TESTED_MEGATRON}; ' in pinned
    assert Version(megatron.core.__version__).public == TESTED_MEGATRON


def test_attention_that_ours_lacks_stays_megatrons(built: dict[str, Any]) -> None:
    assert built["sliding window"][3] == "DotProductAttention"


def test_ready_objects_are_the_same_model(built: dict[str, Any]) -> None:
    assert built["ready moe"] and built["ready dense"]
    assert built["takes a GPTModelConfig"] == 2


def test_F5_the_layer_names_sizes_and_changes(built: dict[str, Any]) -> None:
    said = built["out of memory"]
    assert said.startswith("out of memory in a mixture-of-experts layer on cpu: 6 tokens, hidden_size=")
    assert "Try fewer tokens a micro-batch, recompute_activation=True" in said
    assert said.endswith("CUDA out of memory. Tried to allocate 2.00 GiB.")
