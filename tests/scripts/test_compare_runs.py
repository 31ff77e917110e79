"""Comparison of runs: distances, verdicts, launches, and one real comparison at toy size."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import compare_runs
import pytest

from megablocks.monitor.history import History

ROOT = Path(__file__).parents[2]


def _run(folder: Path, losses: list[float], every: int = 1, rate: float = 1000.0, seed: int = 1234) -> None:
    """Write a folder as a launch leaves it. The folder is named after its mlp_impl."""
    history = History(folder)
    for i, loss in enumerate(losses):
        history.add((i + 1) * every, {"train_loss": loss, "tokens_per_second": rate if i else 1.0})
    history.save()
    (arm,) = compare_runs.arms_of([folder.name.split("-")[0]], [], "").values()
    command, flags = compare_runs._command(compare_runs.EXPERIMENT, Path("/elsewhere", folder.name), 20, arm, seed)
    environment = {**os.environ, "FLAGS": flags, "DRY_RUN": "1"}
    printed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    before, after = printed.split(" -m megablocks.megatron.pretrain_gpt --load ")
    (folder / "command.txt").write_text(f"'-m' 'megablocks.megatron.pretrain_gpt' {after.split(' ', 1)[1]}\n")


def _curve(offset: float = 0.0, wobble: float = 0.0) -> list[float]:
    return [5 - 0.1 * i + offset + wobble * (-1) ** i for i in range(20)]


def test_distance_uses_the_iterations_that_both_curves_have(tmp_path: Path) -> None:
    _run(tmp_path / "a", [4.0, 3.0, 2.0, 1.0])
    _run(tmp_path / "b", [4.3, 2.6, 2.0])
    a, b = History.of_run(tmp_path / "a"), History.of_run(tmp_path / "b")
    assert compare_runs.distance(a, b) == pytest.approx((math.sqrt((0.09 + 0.16) / 3), 0.3, 0.4))
    _run(tmp_path / "nan", [4.0, math.nan, 2.0])
    _run(tmp_path / "later", [4.0], every=100)
    for name in ("nan", "later"):
        assert compare_runs.distance(a, History.of_run(tmp_path / name)) == (math.inf, math.inf, math.inf)


@pytest.mark.parametrize("offset, status", [(0.01, 0), (0.2, 1), (math.nan, 1)])
def test_runs_within_and_beyond_the_noise(
    offset: float, status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _run(tmp_path / "sparse", _curve(), rate=1000, seed=7)
    _run(tmp_path / "fused", _curve(offset), rate=1500, seed=7)
    _run(tmp_path / "sparse-seed8", _curve(wobble=0.05), seed=8)
    assert compare_runs.main([str(tmp_path), "--steps", "20", "--seeds", "7", "8"]) == status
    text = capsys.readouterr().out
    assert ("NOT within" in text) == bool(status)
    assert "two seeds of sparse: rms 0.05000, median 0.05000, largest 0.05000" in text
    lines = {line.split()[0]: line.split()[-1] for line in text.splitlines()[1:4]}
    assert lines == {"sparse": "1,000", "fused": "1,500", "sparse-seed8": "1,000"}
    assert (tmp_path / "runs.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("offset, status", [(0.04, 0), (0.06, 1)])
def test_a_loss_spike_of_the_first_run_does_not_count_as_noise(offset: float, status: int, tmp_path: Path) -> None:
    """The spike is part of both distances, so by the rms alone every other run would be within the noise."""
    for name, curve in (("sparse", _curve()), ("fused", _curve(offset)), ("sparse-seed1235", _curve(wobble=0.05))):
        curve[3] += 5 * (name == "sparse")
        _run(tmp_path / name, curve, seed=1235 if "seed" in name else 1234)
    assert compare_runs.main([str(tmp_path), "--steps", "20"]) == status


@pytest.mark.parametrize("broken", ["sparse", "fused", "sparse-seed1235"])
def test_a_run_with_a_nan_loss_is_not_within_the_noise(broken: str, tmp_path: Path) -> None:
    for name in ("sparse", "fused", "sparse-seed1235"):
        _run(tmp_path / name, _curve(math.nan if name == broken else 0.0), seed=1235 if "seed" in name else 1234)
    assert compare_runs.main([str(tmp_path), "--steps", "20"]) == 1


def test_runs_that_are_missing_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("sparse", "fused"):
        _run(tmp_path / name, _curve())
    _run(tmp_path / "sparse-seed1235", _curve()[:10], seed=1235)  # stopped half way
    assert compare_runs.main([str(tmp_path), "--steps", "20", "--only", "sparse"]) == 2
    assert capsys.readouterr().out.strip().endswith("still to run: sparse-seed1235")


@pytest.mark.parametrize(
    "what", ["stopped", "of another seed", "of other flags", "of another experiment", "of other data", "cut off"]
)
def test_L2_an_unfinished_or_different_run_is_refused(
    what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _run(tmp_path / "sparse", _curve()[: 10 if what == "stopped" else 20], seed=9 if "seed" in what else 1234)
    if "flags" in what:
        monkeypatch.setenv("FLAGS", "--lr 1e-3")
    if "data" in what:
        monkeypatch.setenv("DATA_PREFIX", "/other/linux")
    if what == "cut off":
        (tmp_path / "sparse/command.txt").write_text("'-m' 'mega")
    experiment = ROOT / f"exp/dmoe/dmoe_{'125m' if 'experiment' in what else '46m'}_8gpu.sh"
    assert compare_runs.main([str(tmp_path), "--steps", "20", "--experiment", str(experiment)]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"{tmp_path}/sparse: holds another run or an unfinished one") and said.count("\n") == 1


def test_the_last_step_is_logged() -> None:
    for steps, every in ((500, 10), (12, 1), (515, 5), (101, 1)):
        _, flags = compare_runs._command(compare_runs.EXPERIMENT, Path(), steps, compare_runs.Arm(""), 1)
        assert f" --log-interval {every} " in flags


def test_a_launch_that_ends_early_is_a_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    experiment = tmp_path / "exp.sh"
    experiment.write_text("exit 0\n")  # as a driver that got a signal to stop
    assert compare_runs.main([str(tmp_path / "out"), "--steps", "20", "--experiment", str(experiment)]) == 1
    assert capsys.readouterr().err == "sparse: ended with 0 before step 20\n"


def test_L2_a_comparison_of_one_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    both = ["--impls", "sparse", "fused", "--layouts", "PP2"]
    for flags, said in (
        (both, "not allowed with argument"),
        (["--impls", "fused", "fused"], "--impls fused fused: must be two different ones"),
        (["--seeds", "3", "3"], "--seeds 3 3: must differ"),
        (["--steps", "1"], "--steps 1: must be at least 2"),
        (["--only", "grouped"], "--only grouped: must be one of sparse, fused, sparse-seed1235"),
    ):
        with pytest.raises(SystemExit) as stop:
            compare_runs.main([str(tmp_path), *flags])
        assert stop.value.code == 2 and said in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--seed 5", "--seed=5", "--train-iters 9", "--log-interval 7"])
def test_flags_that_would_replace_those_of_each_run_are_refused(
    flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one seed for all runs the noise is zero; with other steps no run is ever complete."""
    monkeypatch.setenv("DRY_RUN", "1")
    for flags, words in ((f"--bf16 {flag}", []), ("", [f"--flags={flag}"])):
        monkeypatch.setenv("FLAGS", flags)
        with pytest.raises(SystemExit) as stop:
            compare_runs.main([str(tmp_path), *words])
        assert stop.value.code == 2
        assert f"{flag.replace('=', ' ').split()[0]}: is set for each run; leave it out" in capsys.readouterr().err


def test_L1_dry_run_prints_launches_that_differ_in_one_flag(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "scripts/compare_runs.py"), str(tmp_path / "out")]
    environment = {**os.environ, "DRY_RUN": "1", "FLAGS": "--bf16"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and not (tmp_path / "out").exists(), done.stderr
    flags = "--megablocks-mlp-impl {} --seed {} --log-interval 10 --no-save-optim --bf16"
    launch = f"bash {ROOT}/exp/dmoe/dmoe_46m_8gpu.sh {tmp_path}/out/"
    assert done.stdout.splitlines() == [
        f"FLAGS='{flags.format(impl, seed)}' {launch}{name} 500"
        for name, impl, seed in (("sparse", "sparse", 1234), ("fused", "fused", 1234),
                                 ("sparse-seed1235", "sparse", 1235))
    ]  # fmt: skip


def test_L1_dry_run_of_layouts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRY_RUN", "1")
    monkeypatch.setenv("FLAGS", "--bf16")
    assert compare_runs.main([str(tmp_path), "--layouts", "EP2", "PP2"]) == 0
    common = "--seed {} --log-interval 10 --no-save-optim --bf16"
    arms = (("one-gpu", 1, "", 1234), ("EP2", 2, "", 1234), ("PP2", 2, f"{compare_runs.LAYOUTS['PP2']} ", 1234),
            ("one-gpu-seed1235", 1, "", 1235))  # fmt: skip
    assert capsys.readouterr().out.splitlines() == [
        f"FLAGS='{flags}{common.format(seed)}' NGPU={gpus} bash {compare_runs.EXPERIMENT} {tmp_path}/{name} 500"
        for name, gpus, flags, seed in arms
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{tmp}/new", "--experiment", "nope.sh"], "--experiment nope.sh: must be a script of exp/, such as "),
        (["{tmp}/new", "--experiment", "{tmp}/file"], "/file: must be a script of exp/, such as "),
        (["{tmp}/new", "--experiment", ""], "argument --experiment: '' is empty: must be a path"),
        (["{tmp}/file"], "/file: is a file; choose another folder\n"),
        ([""], "argument out: '' is empty: must be a path; . is the current folder\n"),
    ],
)
def test_a_wrong_path_is_one_line(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as stop:
        compare_runs.main([word.format(tmp=tmp_path) for word in words])
    assert stop.value.code == 2 and message in capsys.readouterr().err


def test_another_dry_run_than_0_and_1_launches_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRY_RUN", "on")
    with pytest.raises(SystemExit) as stop:
        compare_runs.main([str(tmp_path)])
    assert stop.value.code == 2 and capsys.readouterr().err.endswith("error: DRY_RUN='on': must be 0 or 1\n")
    assert list(tmp_path.iterdir()) == []


def test_L1_dry_run_with_and_without_flags(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRY_RUN", "1")
    monkeypatch.delenv("FLAGS", raising=False)
    assert compare_runs.main([str(tmp_path), "--flags=--megablocks-norm torch"]) == 0
    common = "--seed {} --log-interval 10 --no-save-optim"
    arms = (("as-it-is", "", 1234), ("with-flags", "--megablocks-norm torch ", 1234), ("as-it-is-seed1235", "", 1235))
    assert capsys.readouterr().out.splitlines() == [
        f"FLAGS='{flags}{common.format(seed)}' bash {compare_runs.EXPERIMENT} {tmp_path}/{name} 500"
        for name, flags, seed in arms
    ]


@pytest.mark.slow
def test_a_real_comparison_at_toy_size(tmp_path: Path) -> None:
    """On a CPU fused and block-sparse experts give nearly the same losses with one seed. A second seed does not."""
    command = [sys.executable, str(ROOT / "scripts/compare_runs.py"), str(tmp_path / "out"), "--steps", "12"]
    command += ["--experiment", str(ROOT / "exp/smoke/dmoe.sh")]
    flags = "--num-layers 2 --hidden-size 64 --ffn-hidden-size 64 --seq-length 64 --eval-iters 1 --eval-interval 50"
    environment = {**os.environ, "PYTHON": sys.executable, "NGPU": "1", "DATA_PREFIX": str(_data(tmp_path))}
    environment["FLAGS"] = flags
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("fused against sparse: "))
    rms, noise = (float(part.split("rms ")[1].split(",")[0]) for part in line.split(";"))
    assert rms < 1e-4 < noise


def _data(tmp_path: Path) -> Path:
    prepare = [sys.executable, str(ROOT / "scripts/prepare_data.py"), "--out", str(tmp_path / "set")]
    prepare += ["--vocab-size", "600", "--max-bytes", "300000", "--valid-fraction", "0.3", "--workers", "1"]
    subprocess.run(prepare, check=True, capture_output=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    return tmp_path / "set"
