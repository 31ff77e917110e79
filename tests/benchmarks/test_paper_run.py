"""A comparison's runs: resumed and never repeated, stopped, refused, shared out by a budget in minutes."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import importlib.util
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import paper_run
import psutil
import pytest
import report
from paper_arms import MODELS, ROOT, Launch, Schedule, Settings
from paper_places import Failed, Places, Stopped
from paper_results import first_intervals, record_of, summarize
from paper_run import Comparison, Job

from megablocks.config import ConfigError

from . import paper_runs

VARIABLES = {"BUDGET": "10k", "ARMS": "dense,dmoe,capacity-1", "BATCH": "8", "MICRO_BATCH": "8"}


def _comparison(out: Path, at_once: int = 1, **variables: str) -> Comparison:
    settings = Settings.from_environment("toy", {**VARIABLES, **variables}, data="0", commit="abc")
    comparison = Comparison(out, settings, out, 10**6, Places(at_once, 1, os.environ))
    comparison.open()
    os.close(comparison._lock)  # as at its end
    return comparison


@pytest.fixture(autouse=True)
def _same_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGABLOCKS_COMMIT", "abc")


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Launches write a finished run at once instead of training; the list names them."""
    calls: list[str] = []

    def call(self: Comparison, launch: Launch) -> str:
        folder = Path(launch.command[2])
        arm, seed = folder.parent.name, int(folder.name) if folder.name.isdecimal() else 1234
        calls.append(f"{arm} {folder.name}")
        paper_runs.write_run(folder, arm, seed, self.settings, paper_runs.FINAL[arm])
        (folder / "done.json").unlink()
        (folder / "checkpoints").mkdir()
        return ""

    monkeypatch.setattr(Comparison, "_call", call)
    return calls


def test_every_run_is_made_once_seed_by_seed(
    tmp_path: Path, launches: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    _comparison(tmp_path, SEEDS="2").train(10e3)
    first = [f"{arm} {seed}" for seed in (1234, 1235) for arm in ("dense", "dmoe", "capacity-1")]
    assert launches == first
    assert "run 1 of 6: dense, seed 1234: about " in capsys.readouterr().out
    assert not list(tmp_path.glob("runs/*/*/checkpoints"))
    shutil.rmtree(tmp_path / "runs/dmoe/1235")
    half = tmp_path / "runs/dense/1234/checkpoints/iter_0000010"  # of a comparison that was killed after done.json
    half.mkdir(parents=True)
    _comparison(tmp_path, SEEDS="2").train(10e3)
    assert launches == [*first, "dmoe 1235"], "finished runs are not repeated"
    assert not half.parent.exists()
    assert "run 5 of 6: dmoe" in capsys.readouterr().out


def test_a_run_without_a_checkpoint_starts_in_an_empty_folder(tmp_path: Path, launches: list[str]) -> None:
    folder = tmp_path / "runs/dense/1234"
    comparison = _comparison(tmp_path)
    folder.mkdir(parents=True)
    (folder / "train.log").write_text("half a run")
    schedule = Schedule.of(comparison.settings, 10e3, 10**6)
    comparison.run(Job("dense", 1234), schedule, size=8, rate=("6e-4", "6e-5"))
    assert "half a run" not in (folder / "train.log").read_text()
    with pytest.raises(Failed, match="holds a run of another command"):
        comparison.run(Job("dense", 1234), schedule, size=8, rate=("3e-4", "3e-5"))


def test_a_run_that_ended_early_or_ran_another_layer_fails(tmp_path: Path, launches: list[str]) -> None:
    comparison = _comparison(tmp_path)
    schedule = Schedule.of(comparison.settings, 40e3, 10**6)
    assert schedule.steps > paper_runs.STEPS
    with pytest.raises(Failed, match=f"ended before step {schedule.steps}"):
        comparison.run(Job("dense", 1), schedule, size=8, rate=("1", "1"))
    schedule = Schedule.of(comparison.settings, 10e3, 10**6)
    paper_runs.FINAL["tutel-1"] = 4.0
    with pytest.raises(Failed, match="its log lacks .*Tutel's own.* another layer ran"):
        comparison.run(Job("tutel-1", 1), schedule, size=8, rate=("1", "1"))
    del paper_runs.FINAL["tutel-1"]


def test_tuning_takes_the_best_rate_of_every_arm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {"dense": {}, "dmoe": {}, "capacity-1": {}}
    best = {"dense": "0.0012", "dmoe": "0.0003", "capacity-1": "0.0006"}

    def call(self: Comparison, launch: Launch) -> str:
        folder = Path(launch.command[2])
        arm, rate = folder.parent.name, launch.variables["FLAGS"].split("--lr ")[1].split()[0]
        is_run = folder.parent.parent.name == "runs"
        if is_run:
            rates[arm] = rate
        steps = int(launch.command[3])
        monkeypatch.setattr(paper_runs, "STEPS", steps)
        monkeypatch.setattr(paper_runs, "EVERY", steps // 4)
        paper_runs.write_run(folder, arm, 1234, self.settings, 4.0 - (rate == best[arm]))
        (folder / "done.json").unlink()
        return ""

    monkeypatch.setattr(Comparison, "_call", call)
    comparison = _comparison(tmp_path, RATES="tuned")
    comparison.train(10e3)
    assert rates == best
    assert {path.name for path in (tmp_path / "tuning/dmoe").iterdir()} == {"0.0003", "0.0006", "0.0012"}
    schedule = comparison._schedule(Job("dmoe", 1234, 3e-4), 10e3)
    tokens = schedule.steps * schedule.batch * MODELS["toy"].sequence
    tuning = record_of(tmp_path, comparison.settings, {}, {})["tuning"]
    assert tuning["dmoe"] == {
        rate: {"tokens": tokens, "loss": loss} for rate, loss in (("0.0003", 3.0), ("0.0006", 4.0), ("0.0012", 4.0))
    }


def _tune(out: Path, monkeypatch: pytest.MonkeyPatch, diverging: dict[str, tuple[str, ...]]) -> Comparison:
    """A comparison that tunes its rates. A trial with a rate of `diverging` ends as the driver ends it at a NaN."""

    def call(self: Comparison, launch: Launch) -> str:
        folder, steps = Path(launch.command[2]), int(launch.command[3])
        monkeypatch.setattr(paper_runs, "STEPS", steps)
        monkeypatch.setattr(paper_runs, "EVERY", steps // 4)
        paper_runs.write_run(folder, folder.parent.name, 1234, self.settings, 4.0)
        (folder / "done.json").unlink()
        if folder.name in diverging.get(folder.parent.name, ()):
            (folder / "loss.csv").unlink()
            said = "pretrain_gpt: step 3: NaN or Inf on rank 0 in the loss: stopped before the update"
            raise Failed(f"dmoe.sh: failed: {said}", f"{said}\ndmoe.sh: failed: {said}\n")
        return ""

    monkeypatch.setattr(Comparison, "_call", call)
    comparison = _comparison(out, RATES="tuned")
    comparison.train(10e3)
    return comparison


def test_a_rate_that_diverges_is_the_worst_of_its_arm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    comparison = _tune(tmp_path, monkeypatch, {"dmoe": ("0.0003", "0.0012")})
    assert not comparison.failed and not comparison.not_run
    assert "dmoe, seed 1234, learning rate 0.0012: diverged\n" in capsys.readouterr().out
    record = record_of(tmp_path, comparison.settings, {}, {})
    (run,) = (run for run in record["runs"] if run["arm"] == "dmoe")
    assert run["learning_rate"] == 6e-4
    assert [trial["loss"] for trial in record["tuning"]["dmoe"].values()] == [None, 4.0, None]
    record = json.loads(json.dumps(record))  # as its file has it
    assert "dMoE: 0.0003 → diverged, 0.0006 → 4.0000, 0.0012 → diverged" in report.setup(record, summarize(record))
    monkeypatch.setattr(Comparison, "_call", None)  # nothing is repeated
    _comparison(tmp_path, RATES="tuned").train(10e3)


def test_an_arm_is_left_out_where_every_rate_diverges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    every = ("0.0003", "0.0006", "0.0012")
    comparison = _tune(tmp_path / "dmoe", monkeypatch, {"dmoe": every})
    why = "it diverged with each learning rate of 0.0003, 0.0006, 0.0012"
    assert comparison.not_run == {"dmoe": why} and not comparison.failed
    record = record_of(tmp_path / "dmoe", comparison.settings, comparison.not_run, {})
    assert {run["arm"] for run in record["runs"]} == {"dense", "capacity-1"}
    monkeypatch.setattr(Comparison, "_call", None)
    again = _comparison(tmp_path / "dmoe", RATES="tuned")
    again.train(10e3)
    assert again.not_run == comparison.not_run
    with pytest.raises(ConfigError, match=f"^dense: not run: {why}, and all arms are compared with it; use another "):
        _tune(tmp_path / "dense", monkeypatch, {"dense": every})


def test_a_loss_that_is_no_number_counts_as_diverged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As without the guard, which FLAGS can turn off."""
    comparison = _tune(tmp_path, monkeypatch, {})
    _replace(tmp_path / "tuning/dmoe/0.0003/loss.csv", ",4,4,", ",4,nan,")  # training and validation loss
    assert comparison._rate(Job("dmoe", 1234)) == ("0.0006", "6e-05")


def test_an_arm_that_fails_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launches: list) -> None:
    whole = Comparison._call

    def call(self: Comparison, launch: Launch) -> str:
        if "/dmoe/" in launch.command[2]:
            raise Failed("dmoe.sh: failed: no disk")
        return whole(self, launch)

    monkeypatch.setattr(Comparison, "_call", call)
    comparison = _comparison(tmp_path, SEEDS="2")
    comparison.train(10e3)
    assert comparison.failed == {"dmoe": "seed 1234 failed: dmoe.sh: failed: no disk"}
    assert launches == ["dense 1234", "capacity-1 1234", "dense 1235", "capacity-1 1235"]


def test_two_at_once_keep_the_order_of_seeds_and_go_on_when_one_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launches: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """The first two wait for each other. dMoE fails in its first seed and has no second run."""
    whole, both = Comparison._call, threading.Barrier(2, timeout=60)

    def call(self: Comparison, launch: Launch) -> str:
        if launch.command[2].endswith(("/dense/1234", "/dmoe/1234")):
            both.wait()
        if "/dmoe/" in launch.command[2]:
            raise Failed("no disk")
        return whole(self, launch)

    monkeypatch.setattr(Comparison, "_call", call)
    comparison = _comparison(tmp_path, at_once=2, SEEDS="2", ARMS="dense,dmoe,capacity-1,capacity-2")
    monkeypatch.setitem(paper_runs.FINAL, "capacity-2", 3.6)
    comparison.train(10e3)
    assert comparison.failed == {"dmoe": "seed 1234 failed: no disk"}
    assert sorted(launches) == [f"{arm} {n}" for arm in ("capacity-1", "capacity-2", "dense") for n in (1234, 1235)]
    said = [line.split(": ")[2] for line in capsys.readouterr().out.splitlines() if line.startswith("paper: run ")]
    assert said[:2] == ["dense, seed 1234", "dmoe, seed 1234"] and len(said) == 7
    assert [one[-4:] for one in said] == ["1234"] * 4 + ["1235"] * 3
    facts = [json.loads(path.read_text()) for path in tmp_path.glob("runs/*/*/done.json")]
    assert len(facts) == 6 and {one["at_once"] for one in facts} == {2}


def test_out_of_memory_beside_another_run_of_the_arm_repeats_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launches: list[str]
) -> None:
    whole, both = Comparison._call, threading.Barrier(2, timeout=60)
    failed = threading.Event()

    def call(self: Comparison, launch: Launch) -> str:
        if "/dmoe/" in launch.command[2] and "--micro-batch-size 8" in launch.variables["FLAGS"]:
            both.wait()
            if "/1235" in launch.command[2]:
                failed.set()
                raise Failed("see train.log", "pretrain_gpt: rank 0: out of memory at a tensor\n")
            failed.wait(60)
            while comparison.found("dmoe")["micro_batch_size"] == 8:
                time.sleep(0.01)
        return whole(self, launch)

    monkeypatch.setattr(Comparison, "_call", call)
    comparison = _comparison(tmp_path, at_once=3, SEEDS="2", ARMS="dense,dmoe")
    comparison.train(10e3)
    sizes = [json.loads((tmp_path / f"runs/dmoe/{seed}/done.json").read_text())["micro_batch"] for seed in (1234, 1235)]
    assert sizes == [4, 4] and launches.count("dmoe 1234") == 2 and not comparison.failed


def test_each_place_has_gpus_cpus_and_a_log_of_its_own(tmp_path: Path) -> None:
    cpus = sorted(os.sched_getaffinity(0))
    half = len(cpus) // 2
    if not half:
        pytest.skip("needs two CPUs")
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "4,5,6,7,8", "MASTER_PORT": "6000"}
    places, lock, both = Places(2, 2, environ), os.open(tmp_path, os.O_RDONLY), threading.Barrier(2, timeout=60)

    affinity = f"{sys.executable} -c 'import os; print(sorted(os.sched_getaffinity(0)))'"

    def work(_job: int) -> str:
        both.wait()
        say = "touch $$; while [ $(ls | grep -c '^[0-9]') -lt 2 ]; do sleep 0.02; done; "
        say = f"cd {tmp_path}; {say} echo $CUDA_VISIBLE_DEVICES ${{MASTER_PORT-none}} $({affinity}); exit $FAILS"
        return places.call(Launch(["bash", "-c", say], {"FAILS": "0"}), tmp_path, tmp_path, lock)

    said: list[str] = []
    jobs = [1, 2]
    places.each(lambda: jobs.pop() if jobs else None, work, lambda _job, run: said.append(run.result()))
    assert sorted(said) == [f"4,5 none {cpus[:half]}\n", f"6,7 none {cpus[half : 2 * half]}\n"]
    assert sorted(path.name for path in tmp_path.glob("launch-*.log")) == ["launch-1.log", "launch-2.log"]
    with pytest.raises(ConfigError, match="AT_ONCE=3: with NGPU=2 needs 6 GPUs, there are 5; use fewer"):
        Places(3, 2, environ)


def test_a_signal_ends_all_runs_and_starts_no_other(tmp_path: Path) -> None:
    places, lock = Places(2, 1, os.environ), os.open(tmp_path, os.O_RDONLY)
    script = "cd {}; trap 'touch saved-$$; exit 0' TERM; touch started-$$; while :; do sleep 0.05; done"
    launch = Launch(["bash", "-c", script.format(tmp_path)], {})
    waiter = (
        "import os, pathlib, time\nwhile len(list(pathlib.Path('.').glob('started-*'))) < 2: time.sleep(.05)\n"
        f"os.kill({os.getpid()}, {int(signal.SIGUSR1)})"
    )
    before = signal.signal(signal.SIGUSR1, places.stop)
    with subprocess.Popen([sys.executable, "-c", waiter], cwd=tmp_path):
        try:
            with pytest.raises(Stopped):
                places.each(
                    lambda: 1, lambda _: places.call(launch, tmp_path, tmp_path, lock), lambda _, run: run.result()
                )
        finally:
            signal.signal(signal.SIGUSR1, before)
    assert len(list(tmp_path.glob("started-*"))) == len(list(tmp_path.glob("saved-*"))) == 2


@pytest.mark.parametrize("given", ["8", "0"])
def test_out_of_memory_in_training_lowers_the_micro_batch_of_the_arm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launches: list[str], given: str
) -> None:
    whole = Comparison._call

    def call(self: Comparison, launch: Launch) -> str:
        if "/dmoe/1235" in launch.command[2] and "--micro-batch-size 8" in launch.variables["FLAGS"]:
            raise Failed("dmoe.sh: failed: see train.log", "pretrain_gpt: rank 0: out of memory at a tensor\n")
        return whole(self, launch)

    monkeypatch.setattr(Comparison, "_call", call)
    comparison = _comparison(tmp_path, SEEDS="2", MICRO_BATCH=given)
    for arm in comparison.arms if given == "0" else ():
        folder = tmp_path / "micro_batch" / arm
        folder.mkdir(parents=True)
        (folder / "micro_batch.json").write_text('{"micro_batch_size": 8, "trials": []}')
    comparison.train(10e3)
    found = comparison.found("dmoe")
    assert (found["micro_batch_size"], found["failed"]) == (4, {"8": "out of memory"})
    sizes = [json.loads((tmp_path / f"runs/dmoe/{seed}/done.json").read_text())["micro_batch"] for seed in (1234, 1235)]
    assert sizes == [4, 4] and launches.count("dmoe 1234") == 2 and launches.count("dense 1234") == 1


def test_only_another_packages_crash_lowers_the_micro_batch(tmp_path: Path) -> None:
    comparison, crash = _comparison(tmp_path), "CUDA error: an illegal memory access was encountered"
    assert comparison._lower_micro_batch("tutel-0", crash) and comparison.found("tutel-0")["micro_batch_size"] == 4
    assert not comparison._lower_micro_batch("dmoe", crash)


def test_minutes_are_shared_by_the_arms_rates_and_written_down(tmp_path: Path) -> None:
    comparison = _comparison(tmp_path, BUDGET="10min", SEEDS="2", MICRO_BATCH="0")
    for arm, rate in (("dense", 2000.0), ("dmoe", 1000.0), ("capacity-1", 1000.0)):
        folder = tmp_path / "micro_batch" / arm
        folder.mkdir(parents=True)
        trials = [{"tokens_per_second": None}, {"tokens_per_second": rate}]
        (folder / "micro_batch.json").write_text(json.dumps({"micro_batch_size": 8, "trials": trials}))
    # Six runs with a start each; two seeds take 2/2000 + 2/1000 + 2/1000 s a token.
    expected = (600 - 30 - 6 * paper_run.START_S) / 0.005
    assert comparison.tokens(spent_s=30) == pytest.approx(expected)
    assert comparison.tokens(spent_s=500) == pytest.approx(expected), "a resumed comparison keeps its number of tokens"


def test_too_few_minutes_are_refused(tmp_path: Path) -> None:
    comparison = _comparison(tmp_path, BUDGET="1min")
    with pytest.raises(
        ConfigError, match="BUDGET=1min: leaves less than 20 steps to each of 3 runs; give at least 2min"
    ):
        comparison.tokens(spent_s=30)


@pytest.mark.skipif(importlib.util.find_spec("tutel") is not None, reason="Tutel is installed")
def test_arms_without_their_package_are_named_and_not_replaced(tmp_path: Path) -> None:
    comparison = _comparison(tmp_path, ARMS="dense,dmoe,tutel")
    assert comparison.arms == ["dense", "dmoe"]
    assert set(comparison.not_run.values()) == {"tutel is not installed"} and len(comparison.not_run) == 4


@pytest.mark.skipif(importlib.util.find_spec("tutel") is not None, reason="Tutel is installed")
def test_finished_runs_need_no_package(tmp_path: Path) -> None:
    done = tmp_path / "runs/tutel-1/1234/done.json"
    done.parent.mkdir(parents=True)
    done.touch()
    settings = Settings.from_environment("toy", {**VARIABLES, "ARMS": "dense,tutel-1"}, data="0", commit="abc")
    assert Comparison(tmp_path, settings, tmp_path, 10**6).arms == ["dense", "tutel-1"]


def test_a_folder_of_other_settings_or_content_or_in_use_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    for left in ("lock", ".settings.json.123"):  # of a comparison that was killed at its start
        (out / left).touch()
    _comparison(out)
    with pytest.raises(ConfigError, match=r"BATCH=16: .* was started with 8"):
        _comparison(out, BATCH="16")
    with open(out / "lock") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="is in use by a comparison or by its last run"):
            _comparison(out)
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(ConfigError, match="is not empty and holds no comparison"):
        _comparison(tmp_path)
    with pytest.raises(ConfigError, match="thesis.tex: is a file; choose another folder"):
        _comparison(tmp_path / "thesis.tex")


def test_more_arms_and_seeds_repeat_no_run(tmp_path: Path, launches: list[str]) -> None:
    _comparison(tmp_path, ARMS="dense,dmoe").train(10e3)
    launches.clear()
    _comparison(tmp_path, SEEDS="2").train(10e3)
    assert launches == ["capacity-1 1234", "dense 1235", "dmoe 1235", "capacity-1 1235"]
    assert json.loads((tmp_path / "settings.json").read_text())["seeds"] == "2"


def test_code_that_changed_since_the_start_launches_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    comparison = _comparison(tmp_path)
    monkeypatch.setenv("MEGABLOCKS_COMMIT", "abc+changes")  # as after a git pull
    with pytest.raises(ConfigError, match=r"the code's commit=abc\+changes: .* was started with abc; use that, or"):
        comparison.train(10e3)
    assert not list(tmp_path.glob("launch-*.log"))


def test_a_signal_reaches_the_run_and_ends_the_comparison(tmp_path: Path) -> None:
    comparison = _comparison(tmp_path)
    script = tmp_path / "run.sh"
    script.write_text("trap 'echo saved; exit 0' TERM\ntouch started\nwhile :; do sleep 0.05; done\n")
    pid = os.getpid()
    waiter = f"import os,time,pathlib\nwhile not pathlib.Path('started').exists(): time.sleep(.05)\nos.kill({pid}, 10)"
    before = signal.signal(signal.SIGUSR1, comparison.places.stop)
    with subprocess.Popen([sys.executable, "-c", waiter], cwd=tmp_path):
        try:
            with pytest.raises(Stopped):
                comparison._call(Launch(["bash", "-c", f"cd {tmp_path}; . ./run.sh"], {}))
        finally:
            signal.signal(signal.SIGUSR1, before)
    assert (tmp_path / "launch-1.log").read_text().endswith("saved\n")


def test_a_failed_launch_says_its_last_line(tmp_path: Path) -> None:
    with pytest.raises(Failed, match="^the reason$"):
        _comparison(tmp_path)._call(Launch(["bash", "-c", "echo noise; echo the reason; exit 3"], {}))


def _stopped(out: Path) -> Comparison:
    """A comparison on another machine, which has no such GPUs, code and data set; one run of dMoE stopped."""
    record = paper_runs.write_runs(out)
    paper_runs.stop_run(out / "runs/dmoe/1235", 15)
    return Comparison(out, Settings.from_dict(record["settings"]), out, 0)


def test_an_unfinished_run_is_recorded_on_request_and_resumes_without(tmp_path: Path, launches: list[str]) -> None:
    _stopped(tmp_path)
    record_of, files = (tmp_path / "record.json"), ("record.json", "lock", "RESULTS.md")
    whole = json.loads(record_of.read_text())
    record_of.unlink()
    variables = {"MEGABLOCKS_COMMIT": "another", "AT_ONCE": "3", "CUDA_VISIBLE_DEVICES": "0"}
    environment = _environment(SEEDS="2", UNFINISHED="record", **variables)
    had_data = (ROOT / "data/stdlib").exists()
    for dry, written in (("1", [False] * 3), ("0", [True] * 3)):
        done = subprocess.run(
            [*COMPARE, str(tmp_path), "toy"], env=environment | {"DRY_RUN": dry}, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert "dmoe, seed 1235: stopped at step 15 of 20; its last evaluation, at step 15: 4.0200\n" in done.stdout
        assert "dmoe, seed 1234: finished\n" in done.stdout
        assert [(tmp_path / name).exists() for name in files] == written
    assert (ROOT / "data/stdlib").exists() == had_data
    record = json.loads(record_of.read_text())
    (run,), (before,) = ([run for run in one["runs"] if (run["arm"], run["seed"]) == ("dmoe", 1235)]
                         for one in (record, whole))  # fmt: skip
    assert [one for one in record["runs"] if one is not run] == [one for one in whole["runs"] if one is not before]
    assert run["stopped_at"] == run["curve"]["iteration"][-1] == 15 and "wall_s" not in run
    same = ("launch", "steps", "batch", "micro_batch", "learning_rate", "step_ms", "environment", "pairs_a_token")
    assert [run[name] for name in same] == [before[name] for name in same]
    assert run["validation"]["loss"] == before["validation"]["loss"][:-1]
    Comparison(tmp_path, Settings.from_dict(record["settings"]), tmp_path, 10**6).train(10e3)
    assert launches == ["dmoe 1235"]


def test_a_run_without_done_json_that_did_all_steps_is_whole(tmp_path: Path) -> None:
    comparison = _stopped(tmp_path)
    paper_runs.stop_run(tmp_path / "runs/dmoe/1234", 20)
    runs = {(run["arm"], run["seed"]): run for run in comparison.record_as_it_is()["runs"]}
    assert "stopped_at" not in runs["dmoe", 1234] and "stopped_at" in runs["dmoe", 1235]


@pytest.mark.parametrize(
    ("run", "change", "said"),
    [
        ("dmoe/1234", lambda folder: paper_runs.stop_run(folder, 1), "stopped before it had a loss and a step time"),
        ("dmoe/1235", shutil.rmtree, "holds no run; leave it out by ARMS or SEEDS"),
        ("dmoe/1235", lambda folder: _replace(folder / "command.txt", "--lr 0.0006", "--lr 0.0003"),
         "is a run of other settings"),
        ("dmoe/1235", lambda folder: (folder / "command.txt").write_text("'-m' 'mega"), "its command.txt is damaged"),
        ("dmoe/1235", lambda folder: _replace(folder / "env.txt", "torch: 2.13.0", "torch: 2.12.0"), "has torch=2.12"),
        ("dense/1235", lambda folder: paper_runs.stop_run(folder, 15), "dense must be whole"),
    ],
)  # fmt: skip
def test_an_unfinished_run_of_no_use_is_refused_in_one_line(
    tmp_path: Path, run: str, change: Callable[[Path], None], said: str
) -> None:
    comparison = _stopped(tmp_path)
    change(tmp_path / "runs" / run)
    with pytest.raises(ConfigError) as refused:
        comparison.record_as_it_is()
    line = str(refused.value)
    assert said in line and (run in line or run.replace("/", ", seed ") in line) and "\n" not in line


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("settings.json", "{", "settings.json: is not as a comparison wrote it (JSONDecodeError"),
        ("settings.json", "[]", "settings.json: is not as a comparison wrote it (TypeError"),
        ("settings.json", "{}", "settings.json: is not as a comparison wrote it (KeyError: 'model'); restore the file"),
        ("runs/dmoe/1234/done.json", "{}", "1234/done.json: is not as a comparison wrote it (KeyError: 'arm')"),
        ("tokens.json", None, "tokens.json: is missing, and it holds the tokens of a run of BUDGET=10min; copy it"),
        ("tokens.json", "{}", "tokens.json: is not as a comparison wrote it (KeyError: 'tokens')"),
        ("runs/dmoe/1235/train.log", None, "runs/dmoe/1235: holds no run"),
        ("runs/dmoe/1235/env.txt", None, "runs/dmoe/1235: holds no run"),
        ("settings.json", '"batch": 16', "BATCH=8: "),
    ],
)
def test_a_file_that_is_missing_or_damaged_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    name: str, text: str | None, said: str,
) -> None:  # fmt: skip
    _stopped(tmp_path)
    budget = "10min" if name == "tokens.json" else "10k"
    _replace(tmp_path / "settings.json", '"budget": "10k"', f'"budget": "{budget}"')
    path = tmp_path / name
    if text is None:
        path.unlink(missing_ok=True)
    elif text.startswith('"batch"'):
        _replace(path, '"batch": 8', text)
    else:
        path.write_text(text)
    for variable, value in _environment(SEEDS="2", BUDGET=budget, UNFINISHED="record", DRY_RUN="1").items():
        monkeypatch.setenv(variable, value)
    assert paper_run.main([str(tmp_path), "toy"]) == 2
    line = capsys.readouterr().err
    assert said in line and str(tmp_path) in line and line.count("\n") == 1


def test_a_record_of_many_gpus_is_made_with_fewer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _stopped(tmp_path)
    _replace(tmp_path / "settings.json", '"ngpu": 1', '"ngpu": 2')
    variables = {"NGPU": "2", "CUDA_VISIBLE_DEVICES": "0", "UNFINISHED": "record", "DRY_RUN": "1"}
    for variable, value in _environment(SEEDS="2", **variables).items():
        monkeypatch.setenv(variable, value)
    assert paper_run.main([str(tmp_path), "toy"]) == 0, capsys.readouterr().err


def test_nothing_trains_where_no_micro_batch_of_dense_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    comparison = _comparison(tmp_path, MICRO_BATCH="0")

    def call(self: Comparison, launch: Launch) -> str:
        folder = Path(launch.command[2])
        folder.mkdir(parents=True)
        (folder / "micro_batch.json").write_text('{"micro_batch_size": null, "trials": []}')
        return ""

    monkeypatch.setattr(Comparison, "_call", call)
    with pytest.raises(ConfigError, match="^dense: not run: no micro-batch fits into memory, and all arms are .*; use"):
        comparison.find_micro_batches(Schedule.of(comparison.settings, 10e3, 10**6), rates=False)


def _replace(path: Path, before: str, after: str) -> None:
    assert before in path.read_text()
    path.write_text(path.read_text().replace(before, after))


COMPARE = ["bash", str(ROOT / "exp/paper/compare.sh")]


def _environment(**variables: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if k not in ("DATA_PREFIX", "FLAGS", "NGPU", "DRY_RUN")}
    return {**kept, "PYTHON": sys.executable, "MEGABLOCKS_COMMIT": "abc", "NGPU": "1", **VARIABLES, **variables}


def test_bad_settings_are_one_line(tmp_path: Path) -> None:
    cases = (
        ({"UNFINISHED": "yes"}, "paper: UNFINISHED=yes: must be resume or record"),
        ({"UNFINISHED": "record"}, f"paper: OUT={tmp_path}/out: holds no comparison"),
        ({"SEEDS": "x"}, "paper: SEEDS=x: must be a whole number"),
        ({"BUDGET": "soon"}, "paper: BUDGET=soon: must be tokens or minutes"),
        ({"DATA_PREFIX": str(tmp_path)}, f"paper: DATA_PREFIX={tmp_path}: holds no manifest.json"),
    )
    for variables, said in cases:
        dry = {} if "DATA_PREFIX" in variables else {"DRY_RUN": "1"}
        command = [sys.executable, str(ROOT / "benchmarks/paper_run.py"), str(tmp_path / "out"), "toy"]
        done = subprocess.run(command, env=_environment(**variables, **dry), capture_output=True, text=True)
        assert done.returncode == 2 and done.stderr.startswith(said) and done.stderr.count("\n") == 1, done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("out", "variables", "said"),
    [
        ("", {"DRY_RUN": "1"}, "OUT='': must be a path; . is the current folder"),
        ("out", {"DRY_RUN": "1", "BATCH": "8", "MICRO_BATCH": "3"}, "MICRO_BATCH=3: 3 of dense must divide 8 (BATCH)"),
        ("manifest.json/out", {}, "OUT={folder}/manifest.json/out: cannot be made (Not a directory); choose another"),
    ],
)
def test_what_no_run_can_use_is_refused_before_the_first_one(
    out: str, variables: dict[str, str], said: str, tmp_path: Path
) -> None:
    (tmp_path / "manifest.json").write_text('{"fingerprint": "0", "splits": {"valid": {"tokens": 1000}}}')
    command = [sys.executable, str(ROOT / "benchmarks/paper_run.py"), out, "toy"]
    environment = _environment(DATA_PREFIX=str(tmp_path), **variables)
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith(f"paper: {said.format(folder=tmp_path)}"), done.stderr
    assert done.stderr.count("\n") == 1 and [path.name for path in tmp_path.iterdir()] == ["manifest.json"]


def test_a_full_disk_is_one_line_that_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "manifest.json").write_text('{"fingerprint": "0", "splits": {"valid": {"tokens": 1000}}}')
    monkeypatch.setattr(paper_run, "write_durably", full)
    for name, value in _environment(DATA_PREFIX=str(tmp_path)).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("DRY_RUN", raising=False)
    assert paper_run.main([str(tmp_path / "out"), "toy"]) == 2
    fix = "No space left on device; correct it or make room, and give the same command again"
    assert capsys.readouterr().err == f"paper: {tmp_path}/out: {fix}\n"


def _toy_data(folder: Path) -> str:
    prepare = [sys.executable, str(ROOT / "scripts/prepare_data.py"), "--out", str(folder)]
    prepare += ["--vocab-size", "600", "--max-bytes", "300000", "--valid-fraction", "0.3", "--workers", "1"]
    subprocess.run(prepare, check=True, capture_output=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    return str(folder)


def _lasting(out: Path) -> dict:
    """The record without times, speeds and memory; it holds no paths."""
    record = json.loads((out / "record.json").read_text())
    for run in record["runs"]:
        for name in ("wall_s", "step_ms", "peak_gib"):
            del run[name]
        for part in (run, run["validation"], run["curve"]):
            for name in ("seconds", "tokens_per_second"):
                part.pop(name, None)
    return record


def _report(out: Path) -> list[str]:
    """The sections of RESULTS.md, those of times and speeds without numbers."""
    sections = (out / "RESULTS.md").read_text().split("\n### ")
    timed = ("Time to the dense", "Step time")
    return [re.sub(r"\d[\d,.]*", "#", one) if one.startswith(timed) else one for one in sections]


class _Killed:
    """A comparison that starts again and again. Each time it gets so far, and then all its processes are killed."""

    def __init__(self, out: Path, environment: dict[str, str], whole: Path, draw: random.Random) -> None:
        self.command, self.environment = [*COMPARE, str(out), "toy"], environment
        self.out, self.whole, self.draw = out, whole, draw

    def _kill(self, begin: Callable[[], Any], seconds: float) -> None:
        with subprocess.Popen(self.command, env=self.environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                              start_new_session=True) as comparison:  # fmt: skip
            while not begin():
                assert comparison.poll() is None
                time.sleep(0.002)
            time.sleep(self.draw.uniform(0, seconds))
            assert comparison.poll() is None, "it has ended; draw from a shorter time"
            _kill_all(psutil.Process(comparison.pid))

    def before_training(self) -> None:
        self._kill(lambda: True, 8)

    def in_training(self, arm: str) -> None:
        """After its first save, which does not end its training."""
        folder = self.out / "runs" / arm / "1234"
        (run,) = (run for run in json.loads((self.whole / "record.json").read_text())["runs"] if run["arm"] == arm)
        self._kill(lambda: any(folder.glob("checkpoints/iter_*")), run["curve"]["seconds"][-1] / 2)
        assert any(folder.glob("checkpoints/iter_*")) and not (folder / "done.json").exists()

    def between_runs(self) -> None:
        self._kill((self.out / "runs/dense/1234/done.json").exists, 0.5)
        assert not (self.out / "runs/capacity-1/1234/done.json").exists()

    def in_the_report(self) -> None:
        """While the record, the pictures and RESULTS.md are written, which were never written before."""
        done, report = (self.whole / name for name in ("runs/capacity-1/1234/done.json", "RESULTS.md"))
        took = report.stat().st_mtime - done.stat().st_mtime
        self._kill((self.out / "runs/capacity-1/1234/done.json").exists, 0.9 * took)
        assert not (self.out / "RESULTS.md").exists()


def _kill_all(process: psutil.Process) -> None:
    """The process and its descendants, in whatever sessions they are. A stopped process starts no further one."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process.suspend()
        for child in process.children():
            _kill_all(child)
        process.kill()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """A comparison of two arms that nobody killed, and its environment. It saves at steps that end no log interval."""
    folder = tmp_path_factory.mktemp("undisturbed")
    variables = {"ARMS": "dense,capacity-1", "BUDGET": "40k", "SAVE_EVERY": "6k"}
    environment = _environment(DATA_PREFIX=_toy_data(folder / "set"), **variables)
    command = [*COMPARE, str(folder / "out"), "toy"]
    subprocess.run(command, env=environment, check=True, capture_output=True)
    return folder / "out", environment


@pytest.mark.slow
@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize(
    ("seed", "points"),
    [
        (1, [_Killed.before_training, lambda it: it.in_training("dense"), _Killed.in_the_report]),
        (2, [_Killed.between_runs, lambda it: it.in_training("capacity-1"), _Killed.in_the_report]),
    ],
)
def test_K11_a_comparison_killed_at_three_random_points_gives_the_same_report(
    tmp_path: Path, undisturbed: tuple[Path, dict[str, str]], seed: int, points: list[Callable[[_Killed], None]]
) -> None:
    """Losses, drops and loads are equal in every digit, whether a run resumes or starts again."""
    whole, environment = undisturbed
    out, draw = tmp_path / "out", random.Random(seed)
    killed = _Killed(out, environment, whole, draw)
    for kill in points:
        kill(killed)
    subprocess.run(killed.command, env=environment, check=True, capture_output=True)
    logs = "".join(path.read_text() for path in out.glob("runs/*/*/train.log"))
    assert "successfully loaded checkpoint" in logs, "no run resumed"
    assert _lasting(out) == _lasting(whole)
    assert _report(out) == _report(whole)
    kept = [sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.name[0] != ".")
            for folder in (out, whole)]  # fmt: skip
    assert kept[0] == kept[1], "no checkpoint is left"


def test_a_toy_comparison_end_to_end(tmp_path: Path) -> None:
    """Stopped once in its first run, then completed, then started again: nothing is repeated and the record stays."""
    out = tmp_path / "out"
    environment = _environment(DATA_PREFIX=_toy_data(tmp_path / "set"), ARMS="dense,capacity-1")
    command = [*COMPARE, str(out), "toy"]

    first = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    log = out / "runs/dense/1234/train.log"
    while not log.exists() or "initializ" not in log.read_text():  # its ranks have started
        assert first.poll() is None, first.communicate()
        time.sleep(0.1)
    first.send_signal(signal.SIGINT)
    _, said = first.communicate(timeout=120)
    assert (first.returncode, said.count("\n")) == (130, 1) and "the same command" in said
    assert not list(out.glob("runs/*/*/done.json"))

    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    record = json.loads((out / "record.json").read_text())
    assert [run["arm"] for run in record["runs"]] == ["dense", "capacity-1"]
    for run in record["runs"]:
        assert run["curve"]["tokens"][-1] == 20 * 8 * 64 and run["steps"] == 20 == run["validation"]["iteration"][-1]
        losses = run["validation"]["loss"]
        assert losses[-1] < losses[0] and run["tokens_per_second"] > 0
        log = out / f"runs/{run['arm']}/{run['seed']}/train.log"
        assert first_intervals(log.read_text()) == {1, 5}
    assert record["runs"][1]["curve"]["tokens_dropped"][-1] > 0
    text = (out / "RESULTS.md").read_text()
    assert "| ours, capacity 1 | " in text
    assert [(out / name).exists() for name in ("step.png", "loss_time.png", "pareto.png")] == [True, True, False]

    logs = {path: path.stat().st_mtime_ns for path in out.glob("runs/*/*/train.log")}
    again = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert again.returncode == 0 and "run 1 of" not in again.stdout
    assert {path: path.stat().st_mtime_ns for path in logs} == logs
    assert json.loads((out / "record.json").read_text()) == record and (out / "RESULTS.md").read_text() == text

    changed = subprocess.run(command, env=environment | {"BATCH": "16"}, capture_output=True, text=True)
    assert changed.returncode == 2 and changed.stderr.startswith("paper: BATCH=16: ")
