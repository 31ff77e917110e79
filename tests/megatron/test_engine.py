"""Our layer in a block of Transformer Engine's layers. What needs Transformer Engine itself needs a GPU.

Weights are bf16, so Transformer Engine's kernels and ours round differently: the loss of the first step may differ by
0.5 %, the norm of all gradients by 5 %, and the losses of twelve steps by 3 %. A gradient of a dense model may differ
by 5 % of its norm. Where a router chooses between two almost equal experts, rounding may decide, and of some dozen
tokens one makes much of an expert's gradient: there the limit only finds what is added twice or not at all.
"""

from __future__ import annotations

import argparse
import importlib.machinery
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import harness
import numpy as np
import pytest
import test_checkpoint
import torch
import torch.nn.functional as F
from harness import Layout, Trained, Trainer

from megablocks.config import ConfigError
from megablocks.megatron import cpu, engine
from megablocks.testing.launcher import run_distributed_test

with_engine = pytest.mark.skipif(
    importlib.machinery.PathFinder.find_spec("transformer_engine") is None, reason="needs Transformer Engine"
)
STEPS = 12
FIRST, NORM, LOSSES = 5e-3, 5e-2, 3e-2
DENSE_GRADIENTS, ROUTED_GRADIENTS = 5e-2, 0.6
TE = ("transformer_impl", "transformer_engine")
SWIGLU = (("gated_linear_unit", True), ("activation_func", F.silu))
EXPERTS = 8  # as many as products of 16 bits like
WIDE = (("hidden_size", 64), ("moe_ffn_hidden_size", 128), ("ffn_hidden_size", 128), ("num_moe_experts", EXPERTS))
LOCAL = Layout(layers=2, dtype="bfloat16", model=(*SWIGLU, *WIDE))
DENSE = LOCAL.but(model=(*LOCAL.model, ("num_moe_experts", None), ("moe_ffn_hidden_size", None),
                         ("moe_aux_loss_coeff", 0.0), ("moe_z_loss_coeff", None)))  # fmt: skip


def engines(layout: Layout, *model: tuple[str, Any]) -> Layout:
    return layout.but(model=(*layout.model, TE, *model))


def both(layout: Layout, *model: tuple[str, Any]) -> tuple[Layout, Layout]:
    """The layout with Transformer Engine and without."""
    layout = layout.but(model=(*layout.model, *model))
    return engines(layout), layout


FUSION = ("gradient_accumulation_fusion", True)
PAIRS = {
    "experts": both(LOCAL),
    "dense": both(DENSE),
    "shared expert": both(LOCAL, ("moe_shared_expert_intermediate_size", 64)),
    "RMSNorm, norms of queries and keys": both(LOCAL, ("normalization", "RMSNorm"), ("qk_layernorm", True)),
    "biases": both(LOCAL, ("add_bias_linear", True), ("bias_activation_fusion", False)),
    "our experts in Megatron's layer": both(LOCAL.but(settings=(("layer", "experts"),))),
    "recomputed": both(LOCAL.but(recompute="full")),
    "fused loss": both(LOCAL.but(loss_kept_gib=1.0)),
    "distributed optimizer": both(LOCAL.but(distributed_optimizer=True, overlap=True)),
    "accumulated in the product": (engines(LOCAL, FUSION), LOCAL),
    "dense, accumulated in the product": (engines(DENSE, FUSION), DENSE),
    "untied, accumulated in the product, fused loss": (
        engines(LOCAL.but(loss_kept_gib=1.0, tied=False), FUSION), LOCAL.but(tied=False)
    ),
    "fused router": (engines(LOCAL, ("moe_router_fusion", True)), LOCAL),
    "its Adam": (engines(LOCAL).but(engine_adam=True), LOCAL),
    "its Adam, distributed optimizer": (
        engines(LOCAL).but(engine_adam=True, distributed_optimizer=True), LOCAL.but(distributed_optimizer=True)
    ),
}  # fmt: skip
"""A layout with Transformer Engine and what it is compared with: the same weights and data."""


@pytest.fixture(scope="module")
def trained() -> dict[Layout, Any]:
    layouts = list(dict.fromkeys(layout for pair in PAIRS.values() for layout in pair))
    return dict(zip(layouts, run_distributed_test(train_each, 1, layouts, backend="nccl")[0], strict=True))


def train_each(layouts: list[Layout]) -> list[Any]:
    """The result of each. What fails is its error, so that one layout does not hide the others."""
    out: list[Any] = []
    for layout in layouts:
        try:
            out.append(harness.train(layout, STEPS))
        except Exception as error:
            out.append(f"{type(error).__name__}: {error}")
    return out


@with_engine
@pytest.mark.gpu
@pytest.mark.parametrize("name", PAIRS)
def test_trains_with_the_engine_as_without(trained: dict[Layout, Any], name: str) -> None:
    mine, theirs = (trained[layout] for layout in PAIRS[name])
    assert isinstance(theirs, Trained), theirs
    assert isinstance(mine, Trained), mine
    assert np.isfinite(mine.losses).all() and mine.losses[-1] < mine.losses[0] - 0.1
    assert mine.losses[0] == pytest.approx(theirs.losses[0], rel=FIRST)
    assert mine.norms[0] == pytest.approx(theirs.norms[0], rel=NORM)
    error, tensor = harness.worst_difference(harness.assemble([mine.grads]), harness.assemble([theirs.grads]))
    assert error <= (DENSE_GRADIENTS if name.startswith("dense") else ROUTED_GRADIENTS), f"gradient of {tensor}"
    assert mine.losses == pytest.approx(theirs.losses, rel=LOSSES)


GROUPED = (("moe_grouped_gemm", True), FUSION)
PEERS = {
    "grouped": GROUPED,
    "grouped, fused permutation": (*GROUPED, ("moe_permute_fusion", True)),
    "grouped, fused permutation and router": (*GROUPED, ("moe_permute_fusion", True), ("moe_router_fusion", True)),
}
"""Megatron's layer with Transformer Engine's grouped linear layers."""


def peers() -> dict[str, Any]:
    """The losses of our layer, and of Megatron's from the same weights; what fails is its error."""
    ours = Trainer(engines(LOCAL, FUSION))
    start = {name: p.detach().clone() for name, p in ours.chunks[0].named_parameters()}
    out: dict[str, Any] = {"ours": _steps(ours)}
    for name, model in PEERS.items():
        try:
            theirs = Trainer(engines(LOCAL, *model).but(settings=(("layer", "megatron"),)))
            kind = type(theirs.chunks[0].module.module.decoder.layers[0].mlp.experts).__name__
            assert kind == "TEGroupedMLP", kind
            _copy(start, theirs)
            out[name] = _steps(theirs)
        except Exception as error:
            out[name] = f"{type(error).__name__}: {error}"
    return out


@pytest.fixture(scope="module")
def beside_peers() -> dict[str, Any]:
    return run_distributed_test(peers, 1, backend="nccl")[0]


def _steps(trainer: Trainer) -> list[float]:
    result = Trained()
    for _ in range(STEPS):
        trainer.step(result)
    return result.losses


@torch.no_grad()
def _copy(start: dict[str, torch.Tensor], theirs: Trainer) -> None:
    """Our weights into Megatron's grouped experts, (2I, H) and (H, I) an expert, and all others as they are."""
    for name, parameter in theirs.chunks[0].named_parameters():
        if match := re.fullmatch(r"(.*experts\.)linear_fc([12])\.weight(\d+)", name):
            prefix, layer, expert = match[1], match[2], int(match[3])
            of = [start[f"{prefix}core.{matrix}"] for matrix in (("w1", "v1") if layer == "1" else ("w2",))]
            mine = [one.view(EXPERTS, -1, one.shape[-1])[expert] for one in of]
            parameter.copy_(torch.cat(mine) if layer == "1" else mine[0].t())
        else:
            parameter.copy_(start[name])
    theirs.optimizer.reload_model_params()


@with_engine
@pytest.mark.gpu
@pytest.mark.parametrize("name", PEERS)
def test_trains_as_megatrons_grouped_experts(beside_peers: dict[str, Any], name: str) -> None:
    assert isinstance(beside_peers[name], list), beside_peers[name]
    assert beside_peers[name][0] == pytest.approx(beside_peers["ours"][0], rel=FIRST)
    assert beside_peers[name] == pytest.approx(beside_peers["ours"], rel=LOSSES)


KINDS = {
    "engine": engines(LOCAL, FUSION),
    "engine, its Adam": engines(LOCAL, FUSION).but(engine_adam=True),
    "local": LOCAL,
}


def crosswise(folder: str, distributed: bool) -> dict[str, Any]:
    """Save each of KINDS after three steps and go on; resume it as each of KINDS. By "first > then"."""
    from megatron.core import dist_checkpointing

    from megablocks.megatron.checkpoint_io import restrict_unpickling, write_in_process

    restrict_unpickling()
    write_in_process()
    out: dict[str, Any] = {}
    for first in KINDS:
        trainer, result = _trainer(first, distributed), Trained()
        for _ in range(3):
            trainer.step(result)
        place = Path(folder) / first.replace(" ", "_")
        place.mkdir()
        dist_checkpointing.save(test_checkpoint._state(trainer, loading=False), str(place))
        weights = harness.assemble([harness.global_pieces(trainer.chunks, lambda p: p.data)])
        for _ in range(2):
            trainer.step(result)
        out[first] = result.losses[3:]
        for then in KINDS:
            try:
                out[f"{first} > {then}"] = _resume(then, distributed, str(place), weights)
            except Exception as error:
                out[f"{first} > {then}"] = f"{type(error).__name__}: {error}"
    return out


def _trainer(kind: str, distributed: bool) -> Trainer:
    from megablocks.megatron.fused_optimizer import fuse

    trainer = Trainer(KINDS[kind].but(distributed_optimizer=distributed))
    for part in trainer.optimizer.chained_optimizers:
        if KINDS[kind].engine_adam:
            engine.take_any_state(part.optimizer)
    if not KINDS[kind].engine_adam:
        fuse(trainer.optimizer)
    return trainer


def _resume(kind: str, distributed: bool, place: str, weights: dict[str, np.ndarray]) -> dict[str, Any]:
    from megatron.core import dist_checkpointing

    trainer, result = _trainer(kind, distributed), Trained()
    loaded = dist_checkpointing.load(test_checkpoint._state(trainer, loading=True), place, strict="raise_all")
    trainer.chunks[0].module.load_state_dict(loaded["model"])
    trainer.optimizer.load_state_dict(loaded["optimizer"])
    mine = harness.assemble([harness.global_pieces(trainer.chunks, lambda p: p.data)])
    other = [name for name in weights if not np.array_equal(mine[name], weights[name])]
    trainer.done = 3
    for _ in range(2):
        trainer.step(result)
    steps = set()
    for part in trainer.optimizer.chained_optimizers:
        for group in part.optimizer.param_groups:
            counts = [part.optimizer.state[p].get("step", group.get("step")) for p in group["params"]]
            steps |= set(map(float, counts))
    return {"losses": result.losses, "other": other, "steps": steps}


@with_engine
@pytest.mark.gpu
@pytest.mark.parametrize("distributed", [True, False], ids=["distributed optimizer", "plain optimizer"])
def test_a_checkpoint_resumes_with_and_without_the_engine(tmp_path: Path, distributed: bool) -> None:
    found = run_distributed_test(crosswise, 1, str(tmp_path), distributed, backend="nccl")[0]
    failed = {key: value for key, value in found.items() if isinstance(value, str)}
    assert not failed
    for first in KINDS:
        for then in KINDS:
            resumed = found[f"{first} > {then}"]
            assert not resumed["other"], f"{first} > {then}: other weights: {resumed['other']}"
            assert resumed["steps"] == {5.0}, f"{first} > {then}"
            assert resumed["losses"] == pytest.approx(found[first], rel=LOSSES), f"{first} > {then}"


LATENT = (
    ("multi_latent_attention", True), ("qk_layernorm", True), ("normalization", "RMSNorm"), ("q_lora_rank", 16),
    ("kv_lora_rank", 16), ("qk_head_dim", 16), ("qk_pos_emb_head_dim", 8), ("v_head_dim", 16), ("rope_type", "rope"),
)  # fmt: skip
NAMED = {
    "experts": LOCAL,
    "dense": DENSE,
    "dense and experts": LOCAL.but(model=(*LOCAL.model, ("moe_layer_freq", [0, 1]), ("normalization", "RMSNorm"))),
    "shared expert, norms of queries and keys": LOCAL.but(
        model=(*LOCAL.model, ("moe_shared_expert_intermediate_size", 64), ("qk_layernorm", True))
    ),
    "our experts in Megatron's layer": LOCAL.but(settings=(("layer", "experts"),)),
    "latent attention": LOCAL.but(model=(*LOCAL.model, *LATENT)),
    "dense, latent attention": DENSE.but(model=(*DENSE.model, *LATENT)),
}


def names_of_tensors() -> dict[str, tuple[list, list]]:
    """What a model of each layout saves with Transformer Engine and without: names, kinds and shapes.

    Transformer Engine builds a model on the CPU where torch says that there is a GPU; it computes nothing there.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import transformer_engine.pytorch  # noqa: F401

    cpu.hide_engine = lambda: None
    out = {}
    for name, layout in NAMED.items():
        harness.initialize(layout)
        out[name] = tuple(_tensors(one) for one in (engines(layout), layout))
    return out


def _tensors(layout: Layout) -> list[tuple[str, str, tuple[int, ...]]]:
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.models.gpt.gpt_model import GPTModel

    from megablocks.megatron.specs import block_spec

    config = harness.transformer_config(layout)
    with mock.patch.object(torch.cuda, "is_available", lambda: True):
        model = GPTModel(config, block_spec(config), harness.VOCAB, harness.SEQ, position_embedding_type="rope")
    entries = nested_values(model.sharded_state_dict(metadata={}))
    return sorted((e.key, type(e).__name__, tuple(getattr(e, "global_shape", ()))) for e in entries)


@with_engine
def test_a_block_saves_the_same_tensors_with_the_engine() -> None:
    found = run_distributed_test(names_of_tensors, 1)[0]
    assert set(found) == set(NAMED)
    for name, (mine, theirs) in found.items():
        assert mine == theirs, name
        assert any("layer_norm" in key or "layernorm" in key for key, _, _ in mine)


DRIVER = (
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 500 --num-layers 2 --hidden-size 128 "
    "--num-attention-heads 4 --seq-length 128 --micro-batch-size 2 --global-batch-size 4 --train-iters 12 --lr 1e-3 "
    "--lr-decay-iters 12 --log-interval 1 --eval-iters 0 --bf16 --num-experts 8 --moe-router-topk 2"
).split()
PEER = "--megablocks-layer megatron --moe-grouped-gemm --moe-permute-fusion --moe-router-fusion"
RUNS = {
    "ours": "",
    "Transformer Engine's Adam": "--no-megablocks-fused-optimizer",
    "local": "--transformer-impl local",
    "Megatron's grouped experts": PEER,
}


@with_engine
@pytest.mark.gpu
def test_the_driver_takes_the_engine_by_itself() -> None:
    losses: dict[str, list[float]] = {}
    for name, flags in RUNS.items():
        command = [sys.executable, "-m", "megablocks.megatron.pretrain_gpt", *DRIVER, *flags.split()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=180)
        assert done.returncode == 0, f"{name}: {(done.stdout + done.stderr)[-4000:]}"
        losses[name] = [float(loss) for loss in re.findall(r"lm loss: ([\d.E+-]+)", done.stdout)]
        assert len(losses[name]) == 12 and np.isfinite(losses[name]).all(), name
        assert losses[name][-1] < losses[name][0], name
        assert "set automatically: transformer_impl" not in done.stdout
        fused = "optimizer: one fused pass over each parameter"
        theirs = "optimizer: not fused: --no-megablocks-fused-optimizer; transformer_engine's FusedAdam"
        assert (theirs if "Adam" in name else fused) in done.stdout, name
    for name in ("Transformer Engine's Adam", "local"):
        assert losses[name] == pytest.approx(losses["ours"], rel=LOSSES), name
    assert losses["Megatron's grouped experts"][0] == pytest.approx(losses["ours"][0], rel=1e-2)  # other random weights


# What needs neither.


@pytest.mark.parametrize("reason", [None, "Transformer Engine is not installed"])
def test_flags_that_the_engine_does_not_read(monkeypatch: pytest.MonkeyPatch, reason: str | None) -> None:
    from megablocks.megatron.arguments import _check_engine

    monkeypatch.setattr(engine, "why_not", lambda: reason)
    args = argparse.Namespace(transformer_impl="transformer_engine", reset_attention_mask=False, apply_rope_fusion=True,
                              megablocks_explicit=set(), megablocks_norm="torch", megablocks_rope="fused")  # fmt: skip
    if reason is not None:
        with pytest.raises(ConfigError, match="^transformer_impl='transformer_engine': must be 'local'; Transformer"):
            _check_engine(args)
        return
    _check_engine(args)
    args.megablocks_explicit = {"megablocks_rope"}
    with pytest.raises(ConfigError, match="^megablocks_rope='fused': must be left out with Transformer Engine"):
        _check_engine(args)
    args.apply_rope_fusion = False  # then ours rotates
    _check_engine(args)
    args.megablocks_explicit = {"megablocks_norm"}
    with pytest.raises(ConfigError, match="^megablocks_norm='torch': must be left out with Transformer Engine"):
        _check_engine(args)
    args.reset_attention_mask = True
    with pytest.raises(ConfigError, match="^reset_attention_mask=True: must be False with Transformer Engine"):
        _check_engine(args)


def test_the_engine_and_torch_need_one_cudnn() -> None:
    """With two, Transformer Engine computes attention unfused, which takes over three times as long."""
    assert engine.cudnn_conflict((9, 19, 0), 91900) is None
    for ours in (91900, None):
        why = engine.cudnn_conflict((9, 14, 0), ours)
        assert why is not None and why.startswith("Transformer Engine has loaded cuDNN 9.14.0 beside torch's; ")
        assert "\n" not in why


def test_without_a_gpu_the_engine_is_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformer_engine", sys)  # which pytest takes back
    del sys.modules["transformer_engine"]
    cpu.hide_engine()
    with pytest.raises(ImportError):
        import transformer_engine  # noqa: F401
    cpu.hide_engine()
    monkeypatch.setitem(sys.modules, "transformer_engine", sys)
    with pytest.raises(ConfigError, match="^transformer_engine: needs a GPU; without one start with"):
        cpu.hide_engine()


class _Normed(torch.nn.LayerNorm):
    def get_extra_state(self) -> torch.Tensor:
        return torch.zeros(1)

    def set_extra_state(self, state: Any) -> None:
        pass


def test_a_norm_saves_its_weights_alone() -> None:
    norm = engine.without_extra_state(_Normed)(4)
    assert isinstance(norm, _Normed)
    assert list(norm.state_dict()) == ["weight", "bias"]
    norm.load_state_dict(torch.nn.LayerNorm(4).state_dict())


def test_steps_move_between_parameters_and_groups() -> None:
    """What the two kinds of Adam have saved, in torch's form."""
    from megablocks.ops.adam import FusedAdam

    weight = torch.nn.Parameter(torch.ones(3))
    ours = FusedAdam([weight])
    for _ in range(3):
        weight.grad = torch.ones(3)
        ours.step()
    theirs = torch.optim.SGD([weight])  # stands for an optimizer that counts in the group
    engine.take_any_state(theirs)
    theirs.defaults["bias_correction"] = True
    theirs.load_state_dict(ours.state_dict())
    (group,) = theirs.param_groups
    assert group["step"] == 3 and type(group["step"]) is int and group["bias_correction"] is True
    assert "step" not in theirs.state[weight]
    again = FusedAdam([weight])
    again.load_state_dict(theirs.state_dict())
    assert float(again.state[weight]["step"]) == 3
    assert "step" not in again.param_groups[0]
