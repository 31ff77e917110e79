"""scaling.py: the page holds what it computes, its inputs are what was measured, its flags are the driver's."""

import dataclasses
import importlib
import json
import shlex
from pathlib import Path

import pytest

from megablocks.tool import memory, plan, step_time

from .conftest import BENCHMARKS

scaling = importlib.import_module("scaling")
INPUTS = scaling.read_inputs(BENCHMARKS / "scaling_inputs.json")


def test_the_pages_tables_are_what_is_computed() -> None:
    page = (BENCHMARKS / "notes/scaling.md").read_text()
    for name in INPUTS["models"]:
        points = [one for gpus in scaling.GPUS if (one := scaling.best(INPUTS, name, gpus)) is not None]
        table = "\n".join(scaling.table(points))
        assert f"\n\n## {name}\n" in page and f"\n{table}\n\n" in page, name
        ranks = "\n".join(scaling.table(scaling.by_ranks(INPUTS, name)))
        assert f"\n{ranks}\n\n" in page, name
        for one in points:
            assert sum(one.parts.values()) == pytest.approx(one.time.milliseconds)
            assert max(one.lost, key=one.lost.__getitem__) == one.limit
            assert one.lost["memory"] >= 0
    assert f"\n{chr(10).join(scaling.check_rows(INPUTS))}\n\n" in page


def test_links_give_the_measured_times() -> None:
    """NCCL's all-to-all on four GPUs: microseconds by MiB a rank."""
    links = INPUTS["links"]
    for mib, measured in ((16, 67), (128, 352)):
        predicted = links["host_us"] + mib * 2**20 * 3 / 4 / links["host_gb"] / 1e3
        assert predicted == pytest.approx(measured, rel=0.06)
        assert f"{predicted:.0f}" in links["source"]


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
    for m, *_ in (scaling.checked(INPUTS)[2], scaling.checked(INPUTS)[3]):
        words = [*shlex.split(scaling.driver_flags(m)), "--mock-data", "--tokenizer-type", "NullTokenizer"]
        found, _ = plan.model_of(["--gpus", str(m.gpus), "--", *words])
        assert step_time.step_time(found) == step_time.step_time(m)
        assert memory.memory(found) == memory.memory(m)
        assert dataclasses.replace(found, ffn_hidden_size=m.ffn_hidden_size) == m


@pytest.mark.parametrize("times, status", [(1.14, 0), (1.2, 1), (0.8, 1)])
def test_a_prediction_that_is_off_ends_with_1(
    times: float, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(scaling, "GPUS", (64,))
    monkeypatch.setattr(scaling, "RANKS", (4,))
    (_, time, _), entry = scaling.checked(INPUTS)[1], INPUTS["measured"][1]
    inputs = {**INPUTS, "measured": [{**entry, "ms": time.milliseconds / times}]}
    path = tmp_path / "inputs.json"
    path.write_text(json.dumps(inputs))
    out = ["--out", str(tmp_path)] if status == 0 else []
    assert scaling.main(["--inputs", str(path), *out]) == status
    assert f"| {times - 1:+.0%} |" in capsys.readouterr().out
    assert not out or (tmp_path / "scaling.png").stat().st_size > 10_000
