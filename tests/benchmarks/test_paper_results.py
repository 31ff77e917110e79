"""What is computed from a comparison's runs: times, time to a loss, spread, fronts, drops; and what is refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import paper_plots
import paper_results
import pytest
from paper_arms import ARMS, ROOT, Settings

from megablocks.config import ConfigError
from megablocks.monitor.history import History

from .paper_runs import write_runs

START = "[before the start of training step] datetime: now"


def _line(iteration: int) -> str:
    return f" [now] iteration {iteration:8d}/ 20 | elapsed time per iteration (ms): 3.0 |"


def test_the_first_interval_of_each_process_is_known() -> None:
    log = [_line(1), START, _line(1), _line(5), _line(10), "a crash", START, "noise", _line(11), _line(15), _line(20)]
    assert paper_results.first_intervals("\n".join(log)) == {1, 5, 11, 15}


def test_compilation_counts_at_the_median_speed() -> None:
    history = History(Path())
    for i, rate in ((1, 1.0), (2, 100.0), (3, 50.0), (4, 100.0)):
        history.add(i, {"tokens": 100 * i, "tokens_per_second": rate})
    assert paper_results.train_seconds(history, {1}) == pytest.approx({1: 1.0, 2: 2.0, 3: 4.0, 4: 5.0})


def test_time_to_a_loss_is_interpolated() -> None:
    seconds, losses = [10.0, 20.0, 30.0], [5.0, 4.0, 3.5]
    assert paper_results.time_to_loss(seconds, losses, 4.25) == pytest.approx(17.5)
    assert paper_results.time_to_loss(seconds, losses, 3.5) == pytest.approx(30.0)
    assert paper_results.time_to_loss(seconds, losses, 6.0) == 10.0
    assert paper_results.time_to_loss(seconds, losses, 3.0) is None
    # A loss that rises in between is reached where it was reached first.
    assert paper_results.time_to_loss([1.0, 2.0, 3.0], [5.0, 4.0, 4.5], 4.5) == pytest.approx(1.5)


def test_between() -> None:
    assert paper_results.between([10, 20], [1.0, 3.0], 5) == pytest.approx(0.5)
    assert paper_results.between([10, 20], [1.0, 3.0], 15) == pytest.approx(2.0)


def test_a_front_has_no_arm_that_another_beats(tmp_path: Path) -> None:
    _, dmoe, capacity = paper_results.summarize(write_runs(tmp_path, seeds=1)).values()
    points = {"tutel-1": (1.0, 5.0), "tutel-2": (2.0, 4.0), "capacity-2": (2.5, 4.5), "dmoe": (3.0, 3.0),
              "capacity-1": (3.0, 3.5)}  # fmt: skip
    arms = {arm: capacity._replace(arm=arm, times={1234: time}, losses={1234: loss})
            for arm, (time, loss) in points.items()}  # fmt: skip
    assert paper_results.capacity_front(arms | {"dense": dmoe}) == (points, ["tutel-1", "tutel-2", "dmoe"])


def test_summaries_have_the_spread_of_the_seeds(tmp_path: Path) -> None:
    record = write_runs(tmp_path)
    dense, dmoe, capacity = paper_results.summarize(record).values()
    # The synthetic runs of paper_runs.py: final loss 4, 3.5 and 3.8, a seed apart by 0.02.
    assert dense.loss == pytest.approx((4.01, 4.0, 4.02)) and dense.to_base_s == dense.time_s
    assert dmoe.loss.mean == pytest.approx(3.51) and dmoe.below(dense) == pytest.approx((0.5, 0.5, 0.5))
    assert dmoe.to_base_s is not None and dmoe.to_base_s.mean < dense.time_s.mean
    assert dmoe.dropped == 0 and capacity.dropped == pytest.approx(0.1) and dense.dropped is None
    assert dmoe.load == pytest.approx(2.0) and dense.load is None
    assert dmoe.step_ms == pytest.approx(1e3 * 8 * 64 / 1000)
    run = next(run for run in record["runs"] if run["arm"] == "capacity-1")
    tokens, shares = paper_results.drop_shares(run)
    assert tokens[-1] == 20 * 8 * 64 and shares == pytest.approx([0.1] * len(shares))
    assert paper_results.drop_shares(record["runs"][0]) == ([], [])


def test_seeds_are_compared_with_themselves(tmp_path: Path) -> None:
    """Each run has the dense loss of its own seed as its target, whatever the seeds differ by."""
    record = write_runs(tmp_path, seeds=3)
    for run in record["runs"]:
        n = run["seed"] - 1234
        moved = 0.7 * n + (0.1 * n if run["arm"] == "dmoe" else 0.0)
        run["validation"]["loss"] = [loss + moved for loss in run["validation"]["loss"]]
    dense, dmoe, capacity = paper_results.summarize(record).values()
    assert dmoe.below(dense) == pytest.approx((0.4, 0.3, 0.5))
    assert dense.below(dmoe) == pytest.approx((-0.4, -0.5, -0.3))
    assert capacity.below(dense) == pytest.approx((0.2, 0.2, 0.2)) and dmoe.missed == 0
    # Of 20 steps of 0.512 s; the loss falls by 0.1 a step, so 0.5, 0.4 and 0.3 below the target are 5, 4 and 3 steps.
    sooner = [20 / (20 - steps) for steps in (5, 4, 3)]
    assert dmoe.to_base_s == pytest.approx((16 * 0.512, 15 * 0.512, 17 * 0.512))
    assert dmoe.sooner == pytest.approx((sum(sooner) / 3, min(sooner), max(sooner)))
    assert dense.sooner == (1, 1, 1) and dense.to_base_s == dense.time_s
    worse = next(run for run in record["runs"] if run["arm"] == "dmoe" and run["seed"] == 1236)
    worse["validation"]["loss"] = [9.0] * 4
    _, dmoe, _ = paper_results.summarize(record).values()
    assert (dmoe.to_base_s, dmoe.sooner, dmoe.missed) == (None, None, 1) and dmoe.below(dense).low < 0


def test_a_record_survives_its_file_and_holds_no_path_of_a_machine(tmp_path: Path) -> None:
    record = write_runs(tmp_path)
    assert paper_results.read_record(tmp_path) == record
    assert str(ROOT) not in (tmp_path / "record.json").read_text()


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [("gpu", "NVIDIA A100", "gpu=NVIDIA A100, dense has CPU"), ("torch", "2.0", "torch=2.0"),
     ("commit", "f" * 40, "commit=fff"), ("steps", 5, "steps=5")],
)  # fmt: skip
def test_mixed_runs_are_refused(tmp_path: Path, name: str, value: object, said: str) -> None:
    record = write_runs(tmp_path)
    run = record["runs"][-1]
    (run if name in run else run["environment"])[name] = value
    _refused(tmp_path, record, f"{run['arm']}, seed {run['seed']}, has {said}")


def test_incomplete_records_are_refused(tmp_path: Path) -> None:
    record = write_runs(tmp_path)
    shorter = copy.deepcopy(record) | {"runs": record["runs"][:-1]}
    _refused(tmp_path, shorter, "capacity-1, seed 1235, is missing")
    _refused(tmp_path, record | {"failed": {"dmoe": "no disk"}}, "dmoe failed (no disk)")
    _refused(tmp_path, record | {"format": 9}, "is no record of format 1")
    (tmp_path / "record.json").write_text("half")
    with pytest.raises(ConfigError, match="holds no record"):
        paper_results.read_record(tmp_path)


def _refused(folder: Path, record: dict, said: str) -> None:
    (folder / "record.json").write_text(json.dumps(record))
    with pytest.raises(ConfigError) as refused:
        paper_results.read_record(folder)
    assert said in str(refused.value) and "\n" not in str(refused.value)


def test_an_unfinished_run_is_refused(tmp_path: Path) -> None:
    record = write_runs(tmp_path)
    (tmp_path / "runs/dmoe/1234/done.json").unlink()
    settings = Settings.from_dict(record["settings"])
    with pytest.raises(ConfigError, match="is no finished run; start the comparison again"):
        paper_results.record_of(tmp_path, settings, {}, {})


@pytest.mark.parametrize(("arm", "marks"), [("dmoe", {}), ("dmoe", {"stopped_at": 10}), ("dense", {"stopped_at": 15})])
def test_a_run_that_stopped_is_refused_without_its_mark_and_if_it_is_dense(
    tmp_path: Path, arm: str, marks: dict[str, int]
) -> None:
    record = write_runs(tmp_path)
    run = next(run for run in record["runs"] if run["arm"] == arm)
    run |= marks
    for part in (run["validation"], run["curve"]):
        for name, values in part.items():
            part[name] = values[:-1]
    _refused(tmp_path, record, f"{arm}, seed 1234, ends at step 15 of 20 with stopped_at={marks.get('stopped_at')};")


def test_a_finished_run_with_the_mark_of_a_stop_is_refused(tmp_path: Path) -> None:
    record = write_runs(tmp_path)
    record["runs"][-1]["stopped_at"] = 20
    _refused(tmp_path, record, "capacity-1, seed 1235, ends at step 20 of 20 with stopped_at=20;")


def test_a_record_without_dense_is_refused(tmp_path: Path) -> None:
    record = write_runs(tmp_path)
    record["runs"] = [run for run in record["runs"] if run["arm"] != "dense"]
    record["not_run"] = {"dense": "no micro-batch fits into memory"}
    _refused(tmp_path, record, "dense, seed 1234, is missing (no micro-batch fits into memory); ")


def test_pictures_are_drawn(tmp_path: Path) -> None:
    paths = paper_plots.draw(write_runs(tmp_path), tmp_path)
    assert {path.stem for path in paths} == set(paper_plots.PICTURES) - {"equal_loss"}  # needs a larger dense one
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)


def test_arms_look_different() -> None:
    assert len({paper_plots._style(arm) for arm in ARMS}) == len(ARMS)
