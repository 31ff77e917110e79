"""scripts/profile_step.py: what it reads and launches, and its refusals. Its table has tests in tests/monitor."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import profile_step
import pytest

from megablocks.monitor.bounds import RunSizes
from megablocks.monitor.flops import GPTShape

ROOT = Path(__file__).parents[2]
STEP = {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#3", "pid": 1, "tid": 1, "ts": 0, "dur": 1000}


def test_a_trace_with_and_without_the_sizes_of_its_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    trace, sizes = tmp_path / "rank-0.json", tmp_path / "run.json"
    product = {**STEP, "cat": "cpu_op", "name": "aten::mm", "ts": 100, "dur": 250}
    trace.write_text(json.dumps({"traceEvents": [STEP, product]}))
    assert profile_step.main([str(tmp_path / "out"), "--trace", str(trace)]) == 0
    text = capsys.readouterr().out
    assert text.startswith("# A training step by parts: rank-0\n\n1.0 ms a step.\n")
    assert text.endswith(f"no bounds: {sizes} does not exist; give --run FILE\n")

    shape = GPTShape(
        num_layers=1, hidden_size=8, seq_length=8, vocab_size=8, num_attention_heads=1, head_dim=8, ffn_hidden_size=8
    )
    run = RunSizes(shape=shape, tokens=64, micro_batches=1, parameters=1, expert_parameters=0, device="cpu")
    sizes.write_text(run.to_json())
    assert profile_step.main([str(tmp_path / "out"), "--trace", str(trace), "--title", "small"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("# A training step by parts: small\n\n1.0 ms a step, 64,000 tokens/s in the profile")
    assert text == (tmp_path / "out/profile.md").read_text()


@pytest.mark.parametrize(
    "words, said",
    [
        ([], "profile_step: trace=None: give either --trace FILE or a command after --: -- bash exp/dmoe/"),
        (["--trace", "x", "--", "bash"], "profile_step: trace=x: give either --trace FILE or a command"),
        (
            ["--", "bash", "none.sh"],
            "profile_step: command='bash none.sh': must name a script of exp/, such as -- bash",
        ),
        (["--trace", "none.json"], "profile_step: none.json: must be a Chrome trace of torch's profiler"),
        (["--trace", "x", "--run", "none.json"], "profile_step: none.json: must be a run.json of the driver, with"),
    ],
)
def test_L2_refusals_are_one_line(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert profile_step.main([str(tmp_path / "out"), *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith(said) and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_launch_that_fails_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "exp.sh").write_text("exit 3\n")
    assert profile_step.main([str(tmp_path / "out"), "--", "bash", str(tmp_path / "exp.sh")]) == 2
    assert capsys.readouterr().err.endswith("ended with 3; the line above says why\n")
    (tmp_path / "exp.sh").write_text('mkdir -p "$1" && touch "$1/train.log" && exit 3\n')
    assert profile_step.main([str(tmp_path / "out"), "--", "bash", str(tmp_path / "exp.sh")]) == 2
    assert capsys.readouterr().err.endswith(f"ended with 3; see {tmp_path}/out/run/train.log\n")


def test_a_folder_with_a_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its checkpoint has no optimizer, so the run would not resume."""
    (tmp_path / "exp.sh").write_text("exit 3\n")
    (tmp_path / "out/run/checkpoints").mkdir(parents=True)
    assert profile_step.main([str(tmp_path / "out"), "--", "bash", str(tmp_path / "exp.sh")]) == 2
    folder = tmp_path / "out/run"
    assert capsys.readouterr().err == f"profile_step: {folder}: holds an earlier run: remove it or choose another out\n"


def test_L1_dry_run_prints_the_launch(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "scripts/profile_step.py"), str(tmp_path / "out"), "--"]
    command += ["bash", "exp/dmoe/dmoe_125m_8gpu.sh", "20000"]
    environment = {**os.environ, "DRY_RUN": "1", "FLAGS": "--seed 7"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0 and not (tmp_path / "out").exists(), done.stderr
    assert done.stdout == (
        f"FLAGS='{profile_step.FLAGS} --seed 7' bash exp/dmoe/dmoe_125m_8gpu.sh {tmp_path}/out/run 20000\n"
    )


@pytest.mark.parametrize(
    ("words", "name"),
    [(["", "--", "bash", "exp.sh"], "out"), (["o", "--trace", ""], "--trace"), (["o", "--run", ""], "--run")],
)
def test_an_empty_path_is_not_the_current_folder(
    words: list[str], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        profile_step.main(words)
    assert stop.value.code == 2
    assert capsys.readouterr().err.endswith(f"argument {name}: '' is empty: must be a path; . is the current folder\n")
