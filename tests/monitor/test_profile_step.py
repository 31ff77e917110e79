"""The table of a step: it adds up, in ms of one step, and its files, launches and refusals."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_bounds import SMALL
from test_trace import Trace, one_step

from megablocks.monitor import profile_step
from megablocks.monitor.trace import read_step

ROOT = Path(__file__).parents[2]


def test_the_parts_add_up_to_the_step(tmp_path: Path) -> None:
    profile = profile_step.profile_of(read_step(one_step().save(tmp_path / "trace.json")), None)
    ms = {row.part: (row.ms, row.launches) for row in profile.rows}
    assert ms == {
        "dense products": (pytest.approx(0.25), 2), "elementwise": (pytest.approx(0.05), 1),
        "gradients": (pytest.approx(0.1), 2), "optimizer": (pytest.approx(0.15), 1),
        "copies": (pytest.approx(0.05), 1), "idle": (pytest.approx(0.4), 0),
    }  # fmt: skip
    assert profile.ms == pytest.approx(1) == pytest.approx(sum(row.ms for row in profile.rows))
    assert profile.longest[0] == (
        "nvjet_hsh",
        "autograd::engine::evaluate_function: LinearBackward",
        "dense products",
        pytest.approx(0.15),
        1,
    )


def test_times_are_of_one_step(tmp_path: Path) -> None:
    trace = Trace()
    for i in range(3):
        trace.range(f"ProfilerStep#{i}", 1000 * i, 1000 * i + 1000)
        trace.kernel("flash_fwd", 1000 * i + 1, 1000 * i + 10, 1000 * i + 210 + 100 * i)
    profile = profile_step.profile_of(read_step(trace.save(tmp_path / "trace.json")), SMALL)
    times = {row.part: row.ms for row in profile.rows}
    assert (profile.ms, times["attention"], times["idle"]) == pytest.approx((1, 0.25, 0.75))
    assert times["experts"] == 0, "a part with a bound has a line"
    assert profile_step.summary(profile)["tokens_per_second_profiled"] == pytest.approx(131072e3)
    faster = profile._replace(run=dataclasses.replace(SMALL, tokens_per_second=2 * 131072e3))
    assert profile_step.summary(faster)["idle_after"] == pytest.approx(0.5), "0.25 ms of 0.5"


def test_table_figures_and_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pixels = pytest.importorskip("matplotlib.image")
    trace = one_step().save(tmp_path / "rank-0.json.gz")
    sizes = json.loads(SMALL.to_json()) | {"tokens_per_second": 245_000.0, "peak_memory_bytes": 2**36}
    (tmp_path / "run.json").write_text(json.dumps(sizes))
    assert profile_step.main([str(tmp_path / "out"), "--trace", str(trace), "--title", "dMoE-Small"]) == 0
    text = capsys.readouterr().out
    assert text == (tmp_path / "out/profile.md").read_text()
    assert text.startswith(
        "# A training step by parts: dMoE-Small\n\n1.0 ms a step, 131,072,000 tokens/s in the profile"
    )
    assert "245,000 tokens/s after it" in text and "peak memory 64.0 GiB" in text and "MFU 17.8% after it" in text
    lines = {line.split(" | ")[0][2:]: line for line in text.splitlines() if line.startswith("| ")}
    assert lines["optimizer"] == "| optimizer | 0.1 | 15.0 | 1 | 0.0 | 23.0 | 0.01 |"
    assert lines["copies"] == "| copies | 0.1 | 5.0 | 1 | – | – | – |"
    found = json.loads((tmp_path / "out/profile.json").read_text())
    assert sum(row["ms"] for row in found["parts"]) == pytest.approx(found["step_ms"]) == pytest.approx(1)
    assert found["longest_kernels"][0]["kernel"] == "nvjet_hsh"
    image = pixels.imread(tmp_path / "out/profile.png")
    colors = {tuple(int(255 * v) for v in pixel[:3]) for row in image[::3] for pixel in row[::3]}
    assert {(31, 119, 180), (255, 127, 14), (44, 160, 44)} <= colors, "measured, arithmetic, bytes"


def test_without_sizes_there_are_no_bounds_and_a_line_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = one_step().save(tmp_path / "rank-0.json")
    assert profile_step.main([str(tmp_path / "out"), "--trace", str(trace)]) == 0
    assert capsys.readouterr().out.endswith(f"no bounds: {tmp_path}/run.json does not exist; give --run FILE\n")


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
    assert "ended with 3; see" in capsys.readouterr().err


def test_L1_dry_run_prints_the_launch(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "scripts/profile_step.py"), str(tmp_path / "out"), "--"]
    command += ["bash", "exp/dmoe/dmoe_125m_8gpu.sh", "20000"]
    environment = {**os.environ, "DRY_RUN": "1", "FLAGS": "--seed 7"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0 and not (tmp_path / "out").exists(), done.stderr
    assert done.stdout == (
        f"FLAGS='{profile_step.FLAGS} --seed 7' bash exp/dmoe/dmoe_125m_8gpu.sh {tmp_path}/out/run 20000\n"
    )
