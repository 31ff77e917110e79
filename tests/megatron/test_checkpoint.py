"""Distributed checkpoints: saved in one layout and loaded in others, with the optimizer state and every expert."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import harness
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import Layout, Trained, Trainer

from megablocks.testing.launcher import run_distributed_test

BASE = Layout(model=(("activation_func", F.silu), ("gated_linear_unit", True)), distributed_optimizer=True)
LONG = BASE.but(layers=2, global_batch=8, model=(*BASE.model, ("num_moe_experts", 8)))
NARROW = BASE.but(layers=2, model=(*BASE.model, ("hidden_size", 40)))
PADDED = {  # name: (layout whose buckets of gradients end with padding, ranks)
    "a bucket of the tied embedding": (NARROW.but(pp=2), 2),
    "many buckets": (NARROW.but(overlap=True), 1),
}
STAGES: dict[str, Layout] = {  # two layers on two stages, one of them without experts
    f"{'no experts first' if first == 0 else 'no experts last'}, {name}": BASE.but(
        layers=2, pp=2, model=(("moe_layer_freq", [first, 1 - first]),), **how
    )
    for first in (0, 1)
    for name, how in {
        "distributed": {},
        "float32": {"distributed_optimizer": False},
        "bfloat16": {"distributed_optimizer": False, "dtype": "bfloat16"},
    }.items()
}
METADATA = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
BEFORE, AFTER = 3, 2


def _state(trainer: Trainer, loading: bool) -> dict[str, Any]:
    from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group

    metadata = ensure_metadata_has_dp_cp_group(dict(METADATA))
    chunks = trainer.chunks
    names = [f"model{i}" for i in range(len(chunks))] if trainer.layout.vpp else ["model"]
    state: dict[str, Any] = {
        name: chunk.module.sharded_state_dict(metadata=metadata) for name, chunk in zip(names, chunks, strict=True)
    }
    model_state = dict(state) if trainer.layout.vpp else state["model"]
    state["optimizer"] = trainer.optimizer.sharded_state_dict(model_state, is_loading=loading, metadata=metadata)
    return state


def _moments(trainer: Trainer) -> list[tuple]:
    """The distributed optimizer's first moments as pieces of global tensors, gathered over data-parallel ranks."""
    if not trainer.layout.distributed_optimizer:
        return []
    from megatron.core import parallel_state as mpu

    def of(parameter: torch.nn.Parameter) -> torch.Tensor:
        total = torch.zeros_like(parameter, dtype=torch.float32)
        expert = not getattr(parameter, "allreduce", True)
        group = mpu.get_expert_data_parallel_group() if expert else mpu.get_data_parallel_group()
        for part in trainer.optimizer.chained_optimizers:
            if parameter in part.model_param_group_index_map:
                span = part._get_model_param_range_map(parameter)["param"]
                moment = part._get_main_param_and_optimizer_states(parameter)["exp_avg"]
                total.view(-1)[span.start : span.end] = moment
        dist.all_reduce(total, group=group)
        return total

    return harness.global_pieces(trainer.chunks, of)


def save(layout: Layout, folder: str) -> dict[str, Any]:
    """Train, save, and continue to train."""
    from megatron.core import dist_checkpointing

    from megablocks.megatron.checkpoint_io import write_in_process

    write_in_process()

    trainer, result = Trainer(layout), Trained()
    for _ in range(BEFORE):
        trainer.step(result)
    out = {"weights": harness.global_pieces(trainer.chunks, lambda p: p.data), "moments": _moments(trainer)}
    dist_checkpointing.save(_state(trainer, loading=False), folder)
    for _ in range(AFTER):
        trainer.step(result)
    out |= {"losses": result.losses[BEFORE:], "norms": result.norms[BEFORE:]}
    return out


def resume(layouts: list[tuple[str, Layout]], folder: str) -> dict[str, Any]:
    """In each layout, load into a model with other weights, and continue to train."""
    from megatron.core import dist_checkpointing

    runs = {}
    for name, layout in layouts:
        trainer, result = Trainer(layout), Trained()
        with torch.no_grad():
            for chunk in trainer.chunks:
                for parameter in chunk.parameters():
                    parameter.fill_(float("nan"))  # a value that the checkpoint does not set stays NaN
        loaded = dist_checkpointing.load(_state(trainer, loading=True), folder, strict="raise_all")
        for i, chunk in enumerate(trainer.chunks):
            chunk.module.load_state_dict(loaded[f"model{i}" if layout.vpp else "model"])
        trainer.optimizer.load_state_dict(loaded["optimizer"])
        trainer.done = BEFORE
        out = {"weights": harness.global_pieces(trainer.chunks, lambda p: p.data), "moments": _moments(trainer)}
        for _ in range(AFTER):
            trainer.step(result)
        runs[name] = out | {"losses": result.losses, "norms": result.norms}
    return runs


def _check(saved: list[dict[str, Any]], resumed: list[dict[str, Any]]) -> None:
    for kind in ("weights", "moments"):
        reference = harness.assemble([rank[kind] for rank in saved])
        mine = harness.assemble([rank[kind] for rank in resumed])
        assert mine.keys() == reference.keys()
        for key in reference:
            assert np.array_equal(mine[key], reference[key]), f"{kind} of {key}"
        experts = [key for key in reference if ".experts." in key]
        assert len(experts) == 3  # w1, v1, w2
        for key in experts:  # (layers, experts, width, hidden)
            rows = mine[key].reshape(-1, *mine[key].shape[2:])
            flat = {row.tobytes() for row in rows}
            assert len(flat) == len(rows), f"{kind} of {key}: two experts are the same"
    assert resumed[0]["losses"] == pytest.approx(saved[0]["losses"], rel=1e-5)
    assert resumed[0]["norms"] == pytest.approx(saved[0]["norms"], rel=1e-4)


SPREAD = {
    "ep4": BASE.but(ep=4),
    "pp2 ep2": BASE.but(pp=2, ep=2),
    "tp2 etp2 ep2": BASE.but(tp=2, etp=2, ep=2),
}
MORE = {
    "ep2 dp2": BASE.but(ep=2),
    "pp2 vpp2 ep2": BASE.but(pp=2, vpp=2, ep=2),
    "pp4": BASE.but(pp=4),
    "tp2 etp1 ep4": BASE.but(tp=2, etp=1, ep=4),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("ep2dp2")
    return folder, run_distributed_test(save, 4, BASE.but(ep=2), str(folder))


@pytest.fixture(scope="module")
def resumed(checkpoint: tuple[Path, list[dict[str, Any]]]) -> dict[str, list[dict[str, Any]]]:
    return harness.on_ranks(resume, 4, list(SPREAD.items()), str(checkpoint[0]))


@pytest.fixture(scope="module")
def resumed_alone(checkpoint: tuple[Path, list[dict[str, Any]]]) -> dict[str, list[dict[str, Any]]]:
    return harness.on_ranks(resume, 1, [("ep1", BASE)], str(checkpoint[0]))


@pytest.mark.parametrize("name", SPREAD)
def test_K2_saved_at_ep2_dp2_loads_in_any_layout(
    checkpoint: tuple[Path, list[dict[str, Any]]], resumed: dict[str, list[dict[str, Any]]], name: str
) -> None:
    _check(checkpoint[1], resumed[name])


def test_K2_saved_at_ep2_dp2_loads_in_one_process(
    checkpoint: tuple[Path, list[dict[str, Any]]], resumed_alone: dict[str, list[dict[str, Any]]]
) -> None:
    _check(checkpoint[1], resumed_alone["ep1"])


@pytest.mark.parametrize("name", PADDED)
def test_K2_padding_after_a_bucket_does_not_shift_the_optimizers_state(name: str, tmp_path: Path) -> None:
    """Megatron left it out of the saved state of all buckets, but counted it where the next bucket begins."""
    layout, ranks = PADDED[name]
    saved = run_distributed_test(save, ranks, layout, str(tmp_path))
    _check(saved, [rank["same"] for rank in run_distributed_test(resume, ranks, [("same", layout)], str(tmp_path))])
    _check(saved, [run_distributed_test(resume, 1, [("alone", NARROW)], str(tmp_path))[0]["alone"]])


def _save_and_resume(layouts: dict[str, Layout], folder: str) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    found = {}
    for number, (name, layout) in enumerate(layouts.items()):
        where = f"{folder}/{number}"
        Path(where).mkdir(exist_ok=True)
        found[name] = save(layout, where), resume([(name, layout)], where)[name]
    return found


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    return harness.on_ranks(_save_and_resume, 2, STAGES, str(tmp_path_factory.mktemp("stages")))


@pytest.mark.parametrize("name", STAGES)
def test_K1_a_pipeline_stage_without_experts_resumes(stages: dict[str, list[Any]], name: str) -> None:
    """Its optimizer of experts has no parameters: it could not be saved or not be loaded, or the step was lost."""
    for saved, resumed in stages[name]:
        assert resumed["losses"] == saved["losses"] and resumed["norms"] == saved["norms"]


@pytest.mark.slow
def test_K2_saved_at_ep2_dp2_loads_in_more_layouts(checkpoint: tuple[Path, list[dict[str, Any]]]) -> None:
    ranks = run_distributed_test(resume, 4, list(MORE.items()), str(checkpoint[0]))
    for name in MORE:
        _check(checkpoint[1], [rank[name] for rank in ranks])


@pytest.mark.slow
def test_K2_saved_at_ep4_dp2_loads_in_any_layout(tmp_path: Path) -> None:
    saved = run_distributed_test(save, 8, LONG.but(ep=4), str(tmp_path))
    layouts = {
        "ep8": LONG.but(ep=8),
        "ep2 dp4": LONG.but(ep=2),
        "pp2 ep4": LONG.but(pp=2, ep=4),
        "tp2 pp2 ep2 etp2": LONG.but(tp=2, pp=2, ep=2, etp=2),
    }
    ranks = run_distributed_test(resume, 8, list(layouts.items()), str(tmp_path))
    for name in layouts:
        _check(saved, [rank[name] for rank in ranks])
    _check(saved, [run_distributed_test(resume, 1, [("ep1", LONG)], str(tmp_path))[0]["ep1"]])
