"""The table of a step: it adds up, in ms of one step, and its files."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from test_bounds import SMALL
from test_trace import Trace, one_step

from megablocks.monitor import profile_step
from megablocks.monitor.trace import read_step


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


def test_table_figures_and_picture(tmp_path: Path) -> None:
    pixels = pytest.importorskip("matplotlib.image")
    step = read_step(one_step().save(tmp_path / "rank-0.json.gz"))
    sizes = dataclasses.replace(SMALL, tokens_per_second=245_000.0, peak_memory_bytes=2**36)
    text = profile_step.write(profile_step.profile_of(step, sizes), tmp_path / "out", "dMoE-Small")
    assert text == (tmp_path / "out/profile.md").read_text()
    assert text.startswith(
        "# A training step by parts: dMoE-Small\n\n1.0 ms a step, 131,072,000 tokens/s in the profile"
    )
    assert "245,000 tokens/s after it" in text and "peak memory 64.0 GiB" in text and "MFU 17.8% after it" in text
    lines = {line.split(" | ")[0][2:]: line for line in text.splitlines() if line.startswith("| ")}
    assert lines["optimizer"] == "| optimizer | 0.1 | 15.0 | 1 | 0.0 | 23.0 | 0.01 |"
    assert lines["copies"] == "| copies | 0.1 | 5.0 | 1 | – | – | – |"
    assert lines["step"] == "| step | 1.0 | 100.0 | 7 | | | 0.01 |"
    assert "times its bound |\n|---|---|---|---|---|---|---|\n| " in text
    found = json.loads((tmp_path / "out/profile.json").read_text())
    assert sum(row["ms"] for row in found["parts"]) == pytest.approx(found["step_ms"]) == pytest.approx(1)
    assert found["longest_kernels"][0]["kernel"] == "nvjet_hsh"
    image = pixels.imread(tmp_path / "out/profile.png")
    colors = {tuple(int(255 * v) for v in pixel[:3]) for row in image[::3] for pixel in row[::3]}
    assert {(31, 119, 180), (255, 127, 14), (44, 160, 44)} <= colors, "measured, arithmetic, bytes"
