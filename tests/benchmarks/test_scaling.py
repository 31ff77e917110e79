"""scaling.py: the page holds what it computes, its inputs are what was measured, its flags are the driver's."""

import dataclasses
import importlib
import json
import shlex
from pathlib import Path

import pytest

from megablocks.monitor import flops
from megablocks.tool import memory, plan, step_time

from .conftest import BENCHMARKS

scaling = importlib.import_module("scaling")
INPUTS = scaling.read_inputs(BENCHMARKS / "scaling_inputs.json")


def test_the_pages_tables_are_what_is_computed() -> None:
    page = (BENCHMARKS / "notes/scaling.md").read_text()
    for name in INPUTS["scaled"]["models"]:
        points = [one for gpus in scaling.GPUS if (one := scaling.best(INPUTS, name, gpus)) is not None]
        table = "\n".join(scaling.table(points))
        assert f"\n\n## {name}\n" in page and f"\n{table}\n\n" in page, name
        ranks = "\n".join(scaling.table(scaling.by_ranks(INPUTS, name)))
        assert f"\n{ranks}\n\n" in page, name
        for one in points:
            assert sum(one.parts.values()) == pytest.approx(one.time.milliseconds)
            assert max(one.lost, key=one.lost.__getitem__) == one.limit
            assert one.lost["memory"] >= 0
    page = (BENCHMARKS.parent / "docs/tool.md").read_text()
    assert f"\n{chr(10).join(scaling.check_rows(INPUTS))}\n\n" in page


def test_the_kept_steps_agree_with_themselves() -> None:
    """MFU follows from tokens/s, and tokens/s from the milliseconds."""
    compared = 0
    for entry in INPUTS["steps"]:
        m = scaling.model_of(INPUTS, entry)
        for record in scaling.runs_of(entry):
            rate = record["tokens_per_second"]
            assert record["mfu"] == pytest.approx(flops.mfu(rate, m.shape, m.gpu, m.gpus), abs=1e-3), entry["arm"]
            assert m.tokens / record["ms"] * 1e3 == pytest.approx(rate, rel=5e-3)
            compared += 1
    assert compared > 12


def test_load_of_ranks_is_that_of_their_experts() -> None:
    assert scaling.rank_skew(1) == 1
    skews = [scaling.rank_skew(ranks) for ranks in scaling.RANKS]
    assert skews == sorted(skews)
    rows = (scaling.RESULTS / "dmoe_46m/expert_load.csv").read_text().splitlines()[1:]
    layers = [[float(row.split(",")[3]) for row in rows if row.startswith(f"{layer},")] for layer in range(1, 7)]
    assert skews[-1] == pytest.approx(sum(map(max, layers)) / 6, rel=1e-3)
    halves = [max(sum(one[:32]), sum(one[32:])) / 32 for one in layers]
    assert skews[1] == pytest.approx(sum(halves) / 6, rel=1e-3)


def test_a_layout_that_does_not_fit_is_not_chosen() -> None:
    assert scaling.best(INPUTS, "120B", 16) is None
    one = scaling.best(INPUTS, "120B", 32)
    assert scaling.fits(one.model, 1.0) and not scaling.fits(one.model, 5.0)


@pytest.mark.slow
def test_the_flags_are_the_drivers() -> None:
    pytest.importorskip("megatron.training")
    found_steps = [one for one in scaling.steps(INPUTS) if one.ms is None]
    for one in (found_steps[2], found_steps[3]):
        m, gpus = one.model, str(one.model.gpus)
        words = [*shlex.split(scaling.driver_flags(m)), "--mock-data", "--tokenizer-type", "NullTokenizer"]
        found, _ = plan.model_of(["--gpus", gpus, "--", *words])
        assert step_time.step_time(found) == one.time
        assert memory.memory(found) == memory.memory(m)
        assert dataclasses.replace(found, ffn_hidden_size=m.ffn_hidden_size) == m


@pytest.mark.parametrize("times, sets, status", [(1.14, "", 0), (1.2, "", 1), (0.8, "", 1), (1.2, "parts", 0)])
def test_a_prediction_that_is_off_ends_with_1(
    times: float, sets: str, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(scaling, "GPUS", (64,))
    monkeypatch.setattr(scaling, "RANKS", (4,))
    entry = {**INPUTS["steps"][4], "file": "steps", "sets": sets}
    time = step_time.step_time(scaling.model_of(INPUTS, entry))
    (results := tmp_path / "results").mkdir()
    (results / "dmoe_46m").symlink_to(scaling.RESULTS / "dmoe_46m")
    record = {"arm": entry["arm"], "ms": time.milliseconds * times, "peak_gib": 80.0}
    (results / "steps.json").write_text(json.dumps({"records": [record]}))
    monkeypatch.setattr(scaling, "RESULTS", results)
    path = tmp_path / "inputs.json"
    path.write_text(json.dumps({**INPUTS, "steps": [entry]}))
    out = ["--out", str(tmp_path)] if times == 1.14 else []
    assert scaling.main(["--inputs", str(path), *out]) == status
    assert f"| {times:.2f} | {sets} |" in capsys.readouterr().out
    assert not out or (tmp_path / "scaling.png").stat().st_size > 10_000
