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
    "sliding window": Layout(layers=2, model=(FREQUENCY, ("window_size", (4, 0)), ("qk_l2_norm", True))),
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


def _recomputed(modules: str) -> tuple[int, int]:
    """How often a step runs the router and the shared expert of a layer that recomputes these modules."""
    sizes = (("moe_shared_expert_intermediate_size", 32),)
    layer = _model(Layout(layers=2, recompute=modules, model=sizes)).decoder.layers[0].mlp
    calls: list[Any] = []
    for part in (layer.router, layer.shared_experts):
        part.register_forward_hook(lambda module, *_: calls.append(module))
    layer(torch.randn(3, 2, 32, requires_grad=True))[0].sum().backward()
    return calls.count(layer.router), calls.count(layer.shared_experts)


def _dispatcher_options() -> dict[str, Any]:
    """What a layer asks of its dispatcher."""
    from megablocks.megatron import moe_layer

    settings = (("dispatcher", "all_to_all"), ("max_tokens", 96), ("dispatch_rows_factor", 3.0))
    with mock.patch.object(moe_layer, "make_dispatcher") as made:
        _model(Layout(layers=1, settings=settings))
    return {name: made.call_args.kwargs[name] for name in ("kind", "max_tokens", "rows_factor")}


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
    out["recomputed"] = [_recomputed(modules) for modules in ("moe", "shared_experts", "core_attn")]
    out["asked of the dispatcher"] = _dispatcher_options()
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


def _decays() -> list[dict[str, set[float]]]:
    """The multiplier of the weight decay of each of our experts' parameters, by name, of all layers.

    First with Megatron's own exceptions from the decay, then without any.
    """
    from megatron.core.optimizer import get_megatron_optimizer
    from megatron.core.optimizer.optimizer_config import OptimizerConfig

    biased = (("add_bias_linear", True), ("bias_activation_fusion", False), ("gated_linear_unit", True))
    layout = Layout(layers=2, model=biased)
    harness.initialize(layout)
    _, chunks = harness.build_model(layout)
    names = {parameter: name for name, parameter in chunks[0].named_parameters() if ".experts.core." in name}
    config = OptimizerConfig(optimizer="adam", lr=1e-3, weight_decay=0.1)
    found: list[dict[str, set[float]]] = []
    for exceptions in (None, {}):
        found.append({})
        for group in get_megatron_optimizer(config, chunks, exceptions).param_groups:
            for parameter in names.keys() & set(group["params"]):
                found[-1].setdefault(names[parameter].rpartition(".")[2], set()).add(group["wd_mult"])
    return found


def test_biases_of_experts_are_not_decayed_as_no_other_bias_is() -> None:
    """They have two dimensions, and Megatron knows biases by having one."""
    names = ("w1", "v1", "w2", "b1", "c1", "b2")
    without = {name: {0.0 if name[0] in "bc" else 1.0} for name in names}
    assert run_distributed_test(_decays, 1)[0] == [without, {name: {1.0} for name in names}]


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


def test_what_is_recomputed_runs_twice(built: dict[str, Any]) -> None:
    assert built["recomputed"] == [(2, 2), (1, 2), (1, 1)]


def test_the_settings_of_the_dispatcher_reach_it(built: dict[str, Any]) -> None:
    assert built["asked of the dispatcher"] == {"kind": "all_to_all", "max_tokens": 96, "rows_factor": 3.0}


def _drawn() -> list[Any]:
    """The standard deviations of a rank's new experts, and one of their weights."""
    from megablocks.megatron.specs import block_spec

    layout = Layout(layers=2, ep=2)
    harness.initialize(layout)
    config = harness.transformer_config(layout)
    experts = block_spec(config).layer_specs[0].submodules.mlp(config=config).experts
    w1, w2 = experts.core.w1.detach(), experts.core.w2.detach()
    return [float(w1.std()), float(w2.std()), float(w1[0, 0])]


def test_new_experts_are_drawn_as_megatron_draws_and_differ_between_ranks() -> None:
    first, second = run_distributed_test(_drawn, 2)
    assert first[:2] == pytest.approx([0.02, 0.02 / 2], rel=0.05)  # over the root of twice the layers
    assert first[2] != second[2]


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
    assert built["sliding window"][3] == "DotProductAttention" and built["sliding window"][5] == "L2Norm"


def test_ready_objects_are_the_same_model(built: dict[str, Any]) -> None:
    assert built["ready moe"] and built["ready dense"]
    assert built["takes a GPTModelConfig"] == 2


def test_F5_the_layer_names_sizes_and_changes(built: dict[str, Any]) -> None:
    said = built["out of memory"]
    assert said.startswith("out of memory in a mixture-of-experts layer on cpu: 6 tokens, hidden_size=")
    assert "Try fewer tokens a micro-batch, recompute_activation=True" in said
    assert said.endswith("CUDA out of memory. Tried to allocate 2.00 GiB.")
