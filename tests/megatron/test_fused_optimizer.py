"""Megatron with the fused optimizer beside Megatron with torch's: losses, norms, weights, skipped steps, checkpoints.

On the CPU the kernels run in Triton's interpreter, except with a bf16 or fp16 copy: those ranks take the reference,
because the interpreter truncates to bf16.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import io
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import harness
import pytest
import test_checkpoint
import torch
import torch.nn.functional as F
from driver import EXPERTS, ROOT, TINY
from harness import Layout, Trained, Trainer

from megablocks.testing.launcher import run_distributed_test

STEPS = 3
TOLERANCES = {"float32": (1e-6, 1e-6), "bf16": (1e-4, 1e-3), "fp16": (1e-4, 1e-3)}
"""Of losses and weights. A main weight that differs in its last bit may round to the next weight of 16 bits."""
SMALL = Layout(layers=2)
HALF = (("activation_func", F.silu), ("gated_linear_unit", True))
LAYOUTS = {
    "float32": SMALL,
    "bf16": SMALL.but(dtype="bfloat16", model=HALF),
    "fp16": SMALL.but(dtype="float16", model=HALF),
}
SPREAD = {
    "float32, distributed optimizer": SMALL.but(distributed_optimizer=True),
    "bf16, distributed optimizer, overlapped": SMALL.but(
        dtype="bfloat16", model=HALF, distributed_optimizer=True, overlap=True
    ),
    "bf16, expert parallel": SMALL.but(dtype="bfloat16", model=HALF, ep=2),
    "bf16, tensor parallel": SMALL.but(dtype="bfloat16", model=HALF, tp=2, etp=2),
}


def fused(trainer: Trainer) -> Trainer:
    from megablocks.megatron.fused_optimizer import fuse, why_not, why_not_parts

    assert why_not(trainer.optimizer.config, trainer.chunks) is None
    assert why_not_parts(trainer.optimizer) is None
    fuse(trainer.optimizer)
    assert all(part.skips_nonfinite for part in trainer.optimizer.chained_optimizers)  # so that the guard can wait
    return trainer


def kernels(layout: Layout) -> Any:
    """On the CPU, let the interpreter take float32."""
    from megablocks.ops import adam

    return mock.patch.object(adam, "runs_triton", lambda t: t.is_cuda or layout.dtype == "float32")


def _state(trainer: Trainer) -> list[torch.Tensor]:
    """Everything that a step may change: parameters, main parameters and moments."""
    out = [p.detach() for chunk in trainer.chunks for p in chunk.parameters()]
    for part in trainer.optimizer.chained_optimizers:
        for group in part.optimizer.param_groups:
            for p in group["params"]:
                out += [p.detach(), *(v for v in part.optimizer.state[p].values())]
    return out


def skipped_step_changes_nothing(trainer: Trainer) -> bool:
    """Overflow one gradient, step, and compare all bits."""
    before = [t.clone() for t in _state(trainer)]
    next(trainer.chunks[0].parameters()).main_grad.view(-1)[0] = torch.inf
    result = trainer.optimizer.step()
    after = _state(trainer)
    same = len(before) == len(after) and all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    return result == (False, None, None) and same


def train_both(layouts: dict[str, Layout]) -> dict[str, Any]:
    """Results by (layout, fused or not); "skipped" by layout."""
    out: dict[str, Any] = {}
    for name, layout in layouts.items():
        for is_fused in (False, True):
            with kernels(layout):
                trainer, result = Trainer(layout), Trained()
                if is_fused:
                    fused(trainer)
                for step in range(STEPS):
                    trainer.step(result, grads=step == 0)
                result.weights = harness.global_pieces(trainer.chunks, lambda p: p.data)
                out[f"{name}, fused: {is_fused}"] = dataclasses.asdict(result)
                trainer.optimizer.config.log_num_zeros_in_grad = True
                out[f"{name}, zeros, fused: {is_fused}"] = trainer.optimizer.step()[2]
                if layout.dtype == "float16" and is_fused:
                    out["skipped"] = skipped_step_changes_nothing(trainer)
    return out


@pytest.fixture(scope="module")
def one() -> list[dict[str, Any]]:
    return run_distributed_test(train_both, 1, LAYOUTS)


@pytest.fixture(scope="module")
def two() -> list[dict[str, Any]]:
    return run_distributed_test(train_both, 2, SPREAD)


def compare(ranks: list[dict[str, Any]], name: str, losses: float, weights: float) -> None:
    ours, theirs = ([rank[f"{name}, fused: {is_fused}"] for rank in ranks] for is_fused in (True, False))
    assert ours[0]["losses"] == pytest.approx(theirs[0]["losses"], rel=losses)
    assert ours[0]["norms"] == pytest.approx(theirs[0]["norms"], rel=10 * losses)
    assert ours[0]["norms"][0] > 1, "nothing was clipped"
    assert ranks[0][f"{name}, zeros, fused: True"] == ranks[0][f"{name}, zeros, fused: False"]
    assert ours[0]["losses"][-1] < ours[0]["losses"][0]
    if "overlapped" in name:  # the ranks exchange the last step's weights in the next forward
        return
    got, want = (harness.assemble([rank["weights"] for rank in run], 1e-2) for run in (ours, theirs))
    error, tensor = harness.worst_difference(got, want)
    assert error <= weights, tensor


@pytest.mark.parametrize("name", LAYOUTS)
def test_S3_one_rank_trains_as_with_torchs_optimizer(one: list[dict[str, Any]], name: str) -> None:
    compare(one, name, *TOLERANCES[name.split(",")[0]])


@pytest.mark.parametrize("name", SPREAD)
def test_S3_two_ranks_train_as_with_torchs_optimizer(two: list[dict[str, Any]], name: str) -> None:
    compare(two, name, *TOLERANCES[name.split(",")[0]])


def test_S3_a_skipped_step_changes_nothing(one: list[dict[str, Any]]) -> None:
    assert one[0]["skipped"] is True


def crosswise(folders: dict[bool, str]) -> dict[str, Any]:
    """Save with one optimizer, resume with the other, and with the same. Losses by (first, then)."""
    from megatron.core import dist_checkpointing

    from megablocks.megatron.checkpoint_io import write_in_process

    write_in_process()
    layout, out = test_checkpoint.BASE.but(layers=2), {}
    with kernels(layout):
        for first, folder in folders.items():
            trainer, result = Trainer(layout), Trained()
            if first:
                fused(trainer)
            for _ in range(2):
                trainer.step(result)
            dist_checkpointing.save(test_checkpoint._state(trainer, loading=False), folder)
            for then in (first, not first):
                trainer, result = Trainer(layout), Trained()
                if then:
                    fused(trainer)
                loaded = dist_checkpointing.load(test_checkpoint._state(trainer, loading=True), folder)
                trainer.chunks[0].module.load_state_dict(loaded["model"])
                trainer.optimizer.load_state_dict(loaded["optimizer"])
                trainer.done = 2
                for _ in range(2):
                    trainer.step(result)
                weights = harness.global_pieces(trainer.chunks, lambda p: p.data)
                steps = [float(s["step"]) for part in trainer.optimizer.chained_optimizers
                         for s in part.optimizer.state.values()]  # fmt: skip
                out[f"{first}, {then}"] = {"losses": result.losses, "weights": weights, "steps": set(steps)}
    return out


def test_S3_checkpoints_load_in_either(tmp_path: Path) -> None:
    folders = {first: str(tmp_path / str(first)) for first in (True, False)}
    for folder in folders.values():
        os.mkdir(folder)
    ranks = run_distributed_test(crosswise, 2, folders)
    want = harness.assemble([rank["False, False"]["weights"] for rank in ranks])
    for pair in ("True, True", "True, False", "False, True"):
        assert ranks[0][pair]["losses"] == pytest.approx(ranks[0]["False, False"]["losses"], rel=1e-6)
        error, tensor = harness.worst_difference(harness.assemble([r[pair]["weights"] for r in ranks]), want)
        assert error <= 2e-6, f"{pair}: {tensor}"
        assert all(rank[pair]["steps"] == {4.0} for rank in ranks)


def refusals() -> dict[str, str | None]:
    from megatron.core import optimizer as megatron_optimizer
    from megatron.core.optimizer import distrib_optimizer

    from megablocks.megatron.fused_optimizer import _build, engine, why_not, why_not_parts

    trainer = Trainer(SMALL)
    optimizer, config, model = trainer.optimizer, trainer.optimizer.config, trainer.chunks
    out = {"none": why_not(config, model) or why_not_parts(optimizer)}
    for name, value in (("optimizer", "sgd"), ("optimizer_cpu_offload", True), ("grad_norm_skip_threshold", 2.0)):
        out[name] = why_not(dataclasses.replace(config, **{name: value}), model)
    other = SimpleNamespace(ddp_config=SimpleNamespace(use_megatron_fsdp=True), config=model[0].config)
    out["fsdp"] = why_not(config, [other])
    other = SimpleNamespace(ddp_config=model[0].ddp_config, config=SimpleNamespace(mtp_num_layers=1))
    out["mtp"] = why_not(config, [other])
    part = optimizer.chained_optimizers[0]
    out["class"] = why_not_parts(part)
    mixed = copy.copy(optimizer)
    mixed.chained_optimizers = [part, object()]
    out["part"] = why_not_parts(mixed)
    built: list[bool] = []

    def build(*args: Any, **kwargs: Any) -> Any:
        built.append(megatron_optimizer.USING_PYTORCH_OPTIMIZER)
        return optimizer

    with (
        contextlib.redirect_stdout(io.StringIO()) as log,
        mock.patch.object(megatron_optimizer, "USING_PYTORCH_OPTIMIZER", False),
        mock.patch.object(distrib_optimizer, "HAVE_APEX_OR_TE", True),
        mock.patch.object(megatron_optimizer.Adam, "__module__", "transformer_engine.pytorch.optimizers"),
        mock.patch.object(engine, "take_any_state") as helped,
    ):
        _build(build, dataclasses.replace(config, optimizer="sgd"), model, wanted=True)
        assert not helped.called
        _build(build, config, model, wanted=False)
        assert [call.args[0] for call in helped.call_args_list] == [p.optimizer for p in optimizer.chained_optimizers]
        assert _build(lambda *_: part, config, model, wanted=True) is part
        assert _build(build, config, model, wanted=True) is optimizer
        assert not distrib_optimizer.HAVE_APEX_OR_TE
    out["log"], out["built"] = log.getvalue(), built
    return out


def test_what_cannot_be_fused_is_named() -> None:
    why = run_distributed_test(refusals, 1)[0]
    assert why.pop("none") is None
    assert why.pop("log").splitlines() == [
        "optimizer: not fused: --optimizer sgd",
        "optimizer: not fused: --no-megablocks-fused-optimizer; transformer_engine's FusedAdam",
        "optimizer: not fused: a part of FP32Optimizer is of an unknown class",
        "optimizer: one fused pass over each parameter",
    ]
    assert why.pop("built") == [False, False, True]  # torch's Adam, not Transformer Engine's, is what can be fused
    assert why == {
        "optimizer": "--optimizer sgd",
        "optimizer_cpu_offload": "optimizer_cpu_offload is set",
        "grad_norm_skip_threshold": "grad_norm_skip_threshold is set",
        "fsdp": "use_megatron_fsdp is set",
        "mtp": "multi-token prediction clips its own gradients",
        "class": "a part of FP32Optimizer is of an unknown class",
        "part": "a part of ChainedOptimizer is of an unknown class",
    }


def test_a_cpu_run_is_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.training import training

    from megablocks.megatron import fused_optimizer

    before = training.get_megatron_optimizer
    args = argparse.Namespace(fp16=False, loss_scale=None, megablocks_fused_optimizer=True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    fused_optimizer.install(args)
    assert training.get_megatron_optimizer is before


def test_clip_factor_is_megatrons_for_a_finite_norm() -> None:
    from megablocks.megatron.fused_optimizer import clip_factor

    norms = (0.0, 0.5, 1.0, 4.0, 1e30, torch.inf, torch.nan)
    for limit, wanted in ((1.0, [1, 1, 1 / (1 + 1e-6), 1 / (4 + 1e-6), 1e-30]), (0.0, [1, 1, 1, 1, 1])):
        got = [float(clip_factor(torch.tensor(n, dtype=torch.float64), limit)) for n in norms]
        assert got[:5] == pytest.approx(wanted, rel=1e-6)
        assert all(math.isnan(factor) for factor in got[5:])  # the step changes nothing


def reduced() -> list[Any]:
    """What the training loop gets on two model-parallel ranks: a norm each, one without, a flag each."""
    import torch.distributed as dist

    from megablocks.megatron.fused_optimizer import _logical_and, _reduce_max

    rank, group = dist.get_rank(), dist.group.WORLD
    largest = _reduce_max(None, torch.tensor(float(rank + 1)), group)
    assert isinstance(largest, torch.Tensor)
    calls: list[Any] = []
    _reduce_max(lambda stat, group: calls.append(stat), None, group)
    _logical_and(lambda flag, group: calls.append(flag), True, group, agreed=False)
    return [float(largest), calls, _logical_and(None, rank == 0, group, agreed=True)]


def test_what_the_training_loop_reduces() -> None:
    assert run_distributed_test(reduced, 2) == [[2.0, [None, True], True], [2.0, [None, True], False]]


GPU_LAYOUTS = LAYOUTS | {
    "bf16, distributed optimizer": SMALL.but(dtype="bfloat16", model=HALF, distributed_optimizer=True)
}


@pytest.mark.gpu
def test_S3_trains_as_with_torchs_optimizer_on_a_gpu() -> None:
    ranks = run_distributed_test(train_both, 1, GPU_LAYOUTS, backend="nccl")
    for name in GPU_LAYOUTS:
        compare(ranks, name, 1e-5 if name == "float32" else 2e-3, 1e-4 if name == "float32" else 1e-2)
    assert ranks[0]["skipped"] is True


@pytest.mark.gpu
@pytest.mark.parametrize("flags", [["--bf16"], ["--bf16", "--use-distributed-optimizer"], ["--fp16"], []], ids=" ".join)
def test_S3_the_driver_on_a_gpu_trains_as_without(tiny_data: Path, flags: list[str]) -> None:
    runs = []
    for choice in ("--megablocks-fused-optimizer", "--no-megablocks-fused-optimizer"):
        command = [sys.executable, "-m", "megablocks.megatron.pretrain_gpt", *TINY, *EXPERTS, *flags, choice]
        command += ["--data-prefix", str(tiny_data), "--train-iters", "10", "--initial-loss-scale", "65536"]
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path})
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        said = "optimizer: one fused pass over each parameter" in done.stdout
        assert said == (choice == "--megablocks-fused-optimizer")
        lines = [line for line in done.stdout.splitlines() if "elapsed time per iteration" in line]
        kinds = ("lm loss", "grad norm", "number of skipped iterations")
        runs.append([[float(re.search(rf"{k}: *(\S+)", line)[1]) for k in kinds if k in line] for line in lines])
    assert len(runs[0]) == len(runs[1]) == 10
    for ours, theirs in zip(*runs, strict=True):
        assert ours == pytest.approx(theirs, rel=2e-2, abs=2e-3)
