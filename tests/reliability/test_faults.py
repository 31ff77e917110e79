"""A rank that dies, freezes or computes a NaN, and a loss that spikes, in runs of the real driver."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("megatron.training")

from driver import EXPERTS, TINY, Driver, Run, read_csv  # noqa: E402

from megablocks.checkpoint import atomic  # noqa: E402

TIMEOUT = 20
"""Seconds of silence after which a rank counts as dead. Eight were too few on a busy machine."""


def said(run: Run, pattern: str) -> list[str]:
    return [line for line in run.text().splitlines() if re.search(pattern, line)]


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGKILL, id="killed"),
        pytest.param(signal.SIGSTOP, id="stopped", marks=pytest.mark.slow),  # tests/monitor does it without a model
    ],
)
def test_F1_the_others_end_within_the_timeout_and_name_the_rank(driver: Driver, number: int) -> None:
    faults = [("signal_self", {"rank": 1, "step": 3, "number": int(number)})]
    with driver.start("--train-iters", "10000", "--megablocks-hang-timeout", TIMEOUT, ranks=2, faults=faults) as run:
        run.wait_for(r"iteration +2/")
        codes = run.wait(ranks=[0])
    assert codes[0] == 75
    named = said(run, r"^rank \d+: ")
    assert len(named) == 1
    assert named[0].startswith("rank 0: rank 1 (") and f"pid {run.pids[1]}" in named[0]
    (silence,) = re.findall(r"silent for (\d+) s", named[0])
    assert int(silence) < 5 * TIMEOUT, "the flag's default is 600 s"


def test_F3_a_nan_loss_on_one_rank_stops_all_ranks_at_the_same_step(driver: Driver, tmp_path: Path) -> None:
    save = tmp_path / "save"
    flags = ("--train-iters", "100", "--save", save, "--save-interval", "2")
    run = driver.run(*flags, ranks=2, faults=[("nan_in_loss", {"rank": 1, "step": 4})], expect=1)
    assert said(run, "NaN or Inf") == [
        "pretrain_gpt: step 4: NaN or Inf on rank 1 in the loss: stopped before the update; "
        f"{save} is as the last save left it"
    ]
    assert sorted(run.losses()) == [1, 2, 3]
    latest = atomic.find_latest_complete(save)
    assert latest.iteration == 2 and not latest.warnings
    atomic.verify(atomic.folder_of(save, 2))
    assert "Traceback" not in run.text()


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_N3_the_guard_names_step_rank_and_layer_before_the_update(driver: Driver, backward: bool) -> None:
    fault = {"rank": 1, "step": 2, "layer": 2, "backward": backward}
    run = driver.run("--train-iters", "100", ranks=2, faults=[("nan_in_layer", fault)], expect=1)
    where = "the backward of layer 2" if backward else "the output of layer 2"
    assert said(run, "NaN or Inf") == [
        f"pretrain_gpt: step 2: NaN or Inf on rank 1 in {where}: stopped before the update"
    ]
    assert sorted(run.losses()) == [1]


@pytest.mark.parametrize(("layer", "rank"), [(4, 1), (3, 0), (2, 0)])
def test_N3_the_guard_names_the_stage_whose_backward_was_first(driver: Driver, layer: int, rank: int) -> None:
    """A NaN of a late stage reaches the stages before it. Of its first layer they see it first."""
    model = (*TINY, "--num-layers", "4", "--pipeline-model-parallel-size", "2")
    faults = [("nan_in_layer", {"rank": (layer - 1) // 2, "step": 2, "layer": layer, "backward": True})]
    run = driver.run("--train-iters", "9", ranks=2, model=model, faults=faults, expect=1)
    where = f"rank {rank} in the backward of layer {layer}"
    assert said(run, "NaN or Inf") == [f"pretrain_gpt: step 2: NaN or Inf on {where}: stopped before the update"]


@pytest.mark.parametrize(
    "flags, read", [(("--log-interval", "4"), 4), (("--log-interval", "100", "--train-iters", "3"), 3)]
)
def test_N3_a_guard_that_is_read_later_names_the_step_and_its_layer(
    driver: Driver, flags: tuple[str, ...], read: int
) -> None:
    faults = [("guard_defers", {}), ("nan_in_layer", {"rank": 1, "step": 2, "layer": 2})]
    run = driver.run("--train-iters", "100", *flags, ranks=2, faults=faults, expect=1)
    assert said(run, "NaN or Inf") == [
        "pretrain_gpt: step 2: NaN or Inf on rank 1 in the output of layer 2: "
        f"stopped at step {read}, where the guard was read"
    ]
    assert sorted(run.losses()) == [1]  # Megatron logs the first step in any case


def test_F3_no_checkpoint_holds_a_nan_where_the_guard_is_read_later(driver: Driver, tmp_path: Path) -> None:
    save = ("--save", tmp_path / "save", "--save-interval", "2", "--log-interval", "100", "--train-iters", "100")
    faults = [("guard_defers", {}), ("nan_in_loss", {"rank": 0, "step": 3})]
    run = driver.run(*save, faults=faults, expect=1)
    assert len(said(run, "step 3: NaN or Inf on rank 0 in the loss: stopped at step 4")) == 1
    assert atomic.find_latest_complete(tmp_path / "save").iteration == 2


def test_F4_a_spike_is_skipped_and_logged_also_right_after_a_resume(driver: Driver, tmp_path: Path) -> None:
    save = tmp_path / "save"
    flags = ("--train-iters", "100", "--save", save, "--save-interval", "100")
    flags += ("--megablocks-loss-spike-factor", "3", "--megablocks-loss-spike-window", "4")
    first = driver.run(*flags, "--exit-interval", "5", faults=[("loss_times", {"factor": 10.0, "steps": [5]})])
    resumed = [*flags, "--load", save, "--exit-interval", "7"]
    second = driver.run(*resumed, faults=[("loss_times", {"factor": 10.0, "steps": [6]})])
    for run, step in ((first, 5), (second, 6)):
        (line,) = said(run, "update skipped")
        assert line.startswith(f"step {step}: loss ") and "exceeds 3 times" in line
        (logged,) = said(run, rf"iteration +{step}/")
        assert "number of skipped iterations:   1 |" in logged
    # Both updates were skipped: step 7 starts from the weights that step 4 left.
    assert first.losses()[4] * 0.7 < second.losses()[7] < first.losses()[4] * 1.1
    rows = {int(row["iteration"]): row for row in read_csv(save / "loss.csv")}
    assert sorted(rows) == [1, 2, 3, 4, 5, 6, 7]
    assert rows[5]["train_loss"] == rows[6]["train_loss"] == "" and rows[7]["train_loss"]


def test_F4_the_older_format_keeps_the_losses_too_and_another_run_starts_without_them(
    driver: Driver, tmp_path: Path
) -> None:
    """A run resumed from the older format did not know a spike; a fine-tuned one took its first losses for spikes."""
    flags = ("--train-iters", "6", "--exit-interval", "5", "--eval-iters", "0")
    flags += ("--megablocks-loss-spike-factor", "3", "--megablocks-loss-spike-window", "4")
    spikes = [("loss_times", {"factor": 10.0, "steps": [1, 6]})]
    for kind in ("torch", "torch_dist"):
        load = (*flags, "--ckpt-format", kind, "--load", tmp_path / kind)
        save = (*load, "--save", tmp_path / kind, "--save-interval", "5")
        driver.run(*save, ranks=1)
        assert not said(driver.run(*load, "--finetune", ranks=1, faults=spikes), "step 1: .* update skipped"), kind
        assert said(driver.run(*save, ranks=1, faults=spikes), "step 6: .* update skipped"), kind


@pytest.mark.slow
def test_F3_the_guard_can_be_left_to_megatron(driver: Driver) -> None:
    faults = [("nan_in_loss", {"rank": 0, "step": 2})]
    run = driver.run("--train-iters", "3", "--rerun-mode", "validate_results", ranks=1, faults=faults, expect=None)
    assert run.codes() != [0]
    assert said(run, "NaN in local forward loss|NaN or Inf")


def test_F3_megatrons_check_of_a_step_ends_a_run_that_saves_nothing(driver: Driver) -> None:
    """It saves before it exits, so that another machine can repeat the step."""
    faults = [("nan_in_loss", {"rank": 0, "step": 2})]
    run = driver.run("--train-iters", "3", "--no-megablocks-nonfinite-guard", faults=faults, expect=16)
    assert said(run, "found NaN in local forward loss") and "Traceback" not in run.text()


def test_K6_a_disk_that_fills_up_between_saves_is_one_line(driver: Driver) -> None:
    folder, flags = driver.folder / "run", ("--train-iters", "4", "--eval-interval", "2", "--eval-iters", "1")
    run = driver.run(*flags, "--megablocks-run-dir", folder, ranks=1, faults=[("full_disk", {})], expect=1)
    assert run.losses() and "Traceback" not in run.text()
    assert said(run, f"^pretrain_gpt: {folder}/loss.csv: No space left on device; make room; the newest checkpoint")


def test_K6_a_full_disk_of_tensorboard_is_one_line(driver: Driver) -> None:
    board = driver.folder / "board"
    flags = ("--train-iters", "4", "--tensorboard-dir", board)
    run = driver.run(*flags, ranks=1, faults=[("full_disk_of_tensorboard", {})], expect=1)
    assert "Traceback" not in run.text()
    assert said(run, f"^pretrain_gpt: {board}: No space left on device; make room; the newest checkpoint")


FAILING = """
import sys
from megablocks.megatron import gpt, pretrain_gpt

def loss_func(*args, **kwargs):
    raise RuntimeError("a mistake in the user's code")

gpt.loss_func = loss_func
sys.exit(pretrain_gpt.main())
"""


def test_F6_an_error_ends_a_rank_that_has_data_workers(driver: Driver) -> None:
    """In an interpreter of its own, for those of the other tests end without Python's own exit."""
    flags = ["--data-prefix", str(driver.data), "--train-iters", "4", "--num-workers", "2"]
    command = [sys.executable, "-c", FAILING, *TINY, *EXPERTS, *flags]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=300)
    assert done.returncode == 1 and "a mistake in the user's code" in done.stderr.splitlines()[-1], done.stderr[-3000:]
