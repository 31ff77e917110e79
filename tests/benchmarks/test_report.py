"""RESULTS.md from records alone: its figures, the paper's beside them, limits, and what it refuses."""

from __future__ import annotations

import copy
import json
import shlex
from pathlib import Path

import paper_plots
import pytest
import report
from paper_arms import Settings
from paper_results import Span, summarize

from .conftest import BENCHMARKS
from .paper_runs import write_runs


@pytest.fixture(autouse=True)
def _blank_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """A report asks only which pictures there are, and each takes 0.1 s. Here one is drawn, elsewhere the others."""
    monkeypatch.setattr(paper_plots, "save_figure", lambda figure, path: path.touch())


def _text(folder: Path, *arguments: str) -> str:
    assert report.main([str(folder), *arguments]) == 0
    return (folder / "RESULTS.md").read_text()


def test_the_report_has_the_figures_of_the_record(tmp_path: Path) -> None:
    write_runs(tmp_path, model="small")
    text = _text(tmp_path)
    assert "| dMoE | 3.5100 (3.5000 to 3.5200) | +0.5000 | – | +0.26 | 2 | 1,000 | 0.00% | 2.00 | 0.0006 |" in text
    assert "| dense | 4.0100 (4.0000 to 4.0200) | – | +0.5000 | – | 2 | 1,000 | – | – | 0.0006 |" in text
    assert "losses, dMoE below ours, capacity 1 below dense, holds in 2 of 2 seeds." in text
    assert "in each of 2 seeds (+0.3000 to +0.3000); the losses of the two do not overlap." in text
    # 8 sequences of 1024 tokens at 1000 tokens/s are 8.192 s a step; dMoE's loss falls by 0.1 a step to 3.51.
    whole, sooner = 20 * 8.192, (20 - 5) * 8.192
    assert f"| dMoE | {sooner / 60:.2f}" in text and f"| dense | {whole / 60:.2f} | 1.00 |" in text
    assert "| dense over dMoE, time to the dense loss | 1.33 | 1.5 | – |" in text
    assert "Every evaluation of every run reads the same samples" in text and "reads other samples" not in text
    assert "8 × " not in text and "runs at the same time" not in text and "AT_ONCE" not in text
    assert "Learning rate: 6e-4 for every arm, a warm-up over 2 steps, cosine decay to a tenth." in text
    assert "torch 2.13.0" in text and "commit abc" in text and "bash exp/dmoe/dmoe_125m_8gpu.sh" in text
    assert "| drops tokens and computes the padding |" in text
    assert "this Pareto front of training time and final loss: dMoE. Every other arm takes at least as long" in text
    assert "A step of dMoE takes 1.00 times as long as a dense step here." in text


def test_the_commands_have_the_settings_of_the_record(tmp_path: Path) -> None:
    """What a reader copies is read back as compare.sh reads it: only data and commit are not in it."""
    record = write_runs(tmp_path)
    changed = {"save_every": "200M", "rates": "tuned", "ngpu": 2, "flags": "--moe-z-loss-coeff 0.1 --name 'a b'"}
    for settings in (record["settings"], {**record["settings"], **changed}):
        (tmp_path / "record.json").write_text(json.dumps({**record, "settings": settings}))
        text = _text(tmp_path)
        [line] = [line for line in text.splitlines() if line.endswith("compare.sh OUT toy")]
        *words, bash, script, out, model = shlex.split(line)
        given = dict(word.split("=", 1) for word in words)
        assert given.pop("DATA_PREFIX") == "DATA"
        read = Settings.from_environment(model, given, data=settings["data"], commit=settings["commit"])
        assert read == Settings.from_dict(settings) and (bash, script, out) == ("bash", "exp/paper/compare.sh", "OUT")
        _, below = text.split("### Commands\n")
        launches = [line.strip() for line in below.splitlines() if line.startswith("    ")]
        assert launches == [f"DATA_PREFIX=DATA {run['launch']}" for run in record["runs"] if run["seed"] == 1234]


def test_the_kept_report_is_that_of_its_records() -> None:
    names = (
        "h200/paper_xs_1600m", "h200/paper_xs_1600m_9cb6d47", "h200/paper_xs_150m", "h200/paper_xs_150m_tuned",
        "h200/paper_small_60m", "h100/paper_xs_800m", "h100/paper_xs_300m",
    )  # fmt: skip
    folders = [f"results/{name}" for name in names]
    text = report.report([(report.read_record(BENCHMARKS / one), f"{one}/") for one in folders])
    assert (BENCHMARKS / "RESULTS.md").read_text() == text
    titles = (
        "XS, 1.612B tokens, warm-up 200 steps, one seed",
        "XS, 1.612B tokens, warm-up 200 steps, one seed, again at 9cb6d47",
        "XS, 157.3M tokens, warm-up 120 steps, up to 3 seeds an arm",
        "XS, 157.3M tokens, warm-up 120 steps, one seed, tuned learning rates", "Small",
        "XS, 812.6M tokens, warm-up 200 steps, one seed", "XS, 301.5M tokens, warm-up 200 steps, one seed",
    )  # fmt: skip
    for title in titles:
        assert f"\n## {title}\n\n### Set-up\n" in text
    assert text.count("Tutel 0.4") == 2  # of some runs of a record, and of all
    assert "tuning, each after 26.21M tokens: dense: 0.0003 → 4.5255, 0.0006 → 4.4194, 0.0012 → 4.6938; dMoE" in text


def test_two_comparisons_are_one_report_with_pictures_beside_their_records(tmp_path: Path) -> None:
    for name in ("xs", "small"):
        write_runs(tmp_path / name, model=name)
    out = tmp_path / "RESULTS.md"
    assert report.main([str(tmp_path / "xs"), str(tmp_path / "small/record.json"), "--out", str(out)]) == 0
    text = out.read_text()
    xs, small = text.index("\n## XS\n"), text.index("\n## Small\n")
    assert xs < text.index("\n### Quality at equal tokens\n") < small < text.rindex("\n### Limits\n")
    row = "CPU | +0.5000 | 1.33 | 1.11 (ours, capacity 1) | 1.00 | – | – |"
    assert f"| XS | {row}\n| Small | {row}\n" in text[:xs]
    assert "](xs/loss_time.png)" in text and "](small/pareto.png)" in text


def test_a_comparison_that_was_repeated_is_a_row_of_its_own(tmp_path: Path) -> None:
    record = write_runs(tmp_path, model="xs")
    text = report.report([(record, "first/"), (record, "again/")])
    again = f", again at {record['runs'][0]['environment']['commit'][:7]}"
    first, second = (line.split(" | ") for line in text.splitlines() if line.startswith("| XS, ") and "| CPU |" in line)
    assert (second[0], second[1:]) == (first[0] + again, first[1:])
    assert "](first/loss_time.png)" in text and "](again/loss_time.png)" in text


def test_the_best_arm_of_a_comparison_is_one_whose_loss_counts(tmp_path: Path) -> None:
    """With a forced load the router learns nothing, so a low loss there says nothing of the method."""
    record = write_runs(tmp_path)
    for run in [run for run in record["runs"] if run["arm"] == "dmoe"]:
        record["runs"].append(copy.deepcopy(run) | {"arm": "capacity-0-uniform"})
    summaries = summarize(record)
    assert summaries["capacity-0-uniform"].sooner.mean > summaries["capacity-1"].sooner.mean
    assert "| 1.11 (ours, capacity 1) |" in report.overview([("toy", record, summaries)])


def test_an_order_that_does_not_hold_is_said_with_what_the_runs_show(tmp_path: Path) -> None:
    record = write_runs(tmp_path)
    for run in record["runs"]:
        if run["arm"] == "dmoe":
            run["validation"]["loss"] = [loss + 1.0 for loss in run["validation"]["loss"]]
    (first, line, _) = report.orders(summarize(record))
    assert first.endswith("holds in 0 of 2 seeds.")
    assert line.startswith("- dMoE is 0.7000 above ours, capacity 1, so the paper's order does not hold here.")
    assert (
        "ours, capacity 1 drops 10.00% of the pairs" in line and "At half of the tokens dMoE was 0.7000 above" in line
    )


def test_losses_at_half_of_the_tokens_are_compared_seed_by_seed(tmp_path: Path) -> None:
    """Dense has a seed more, with a higher loss than the others: 3.8 and 4.0 of the first seed differ by 0.2."""
    record = write_runs(tmp_path, seeds=3)
    record["runs"] = [run for run in record["runs"] if run["arm"] == "dense" or run["seed"] == 1234]
    for run in record["runs"]:
        if run["seed"] == 1236:
            run["validation"]["loss"] = [loss + 1.0 for loss in run["validation"]["loss"]]
        if run["arm"] == "capacity-1":
            run["validation"]["loss"][-1] += 0.5
    line = report.orders(summarize(record))[-1]
    assert line.startswith("- ours, capacity 1 is 0.3000 above dense,")
    assert line.endswith("At half of the tokens ours, capacity 1 was 0.2000 below.")


def test_loss_and_speed_with_their_spreads_stand_in_one_table(tmp_path: Path) -> None:
    record = write_runs(tmp_path, seeds=3)
    for run, rate in zip([run for run in record["runs"] if run["arm"] == "dmoe"], (900.0, 2100.0, 1200.0), strict=True):
        run["tokens_per_second"] = rate
    text = report.quality(record, summarize(record))
    (row,) = (line for line in text.splitlines() if line.startswith("| dMoE |"))
    assert "| tokens/s |" in text and "| 1,200 (900 to 2,100) |" in row and "| 3.5" in row


def test_an_order_that_holds_in_some_seeds_is_no_order(tmp_path: Path) -> None:
    record = write_runs(tmp_path)
    next(run for run in record["runs"] if run["arm"] == "dmoe" and run["seed"] == 1235)["validation"]["loss"][-1] = 3.9
    (first, line, last) = report.orders(summarize(record))
    assert first.endswith("holds in 1 of 2 seeds.")
    assert "dMoE is 0.1100 below ours, capacity 1, but not in each of 2 seeds (-0.0800 to +0.3000)." in line
    assert last.startswith("- ours, capacity 1 is 0.2000 below dense, in each of 2 seeds (+0.2000 to +0.2000);")


def test_goals_of_steps_and_runs_beside_each_other(tmp_path: Path) -> None:
    """Tutel's arms stand beside dMoE's step time of the same steps; the report says how many runs went on at once."""
    record = write_runs(tmp_path, model="xs")
    for arm, rate in (("tutel-1", 800.0), ("tutel-0-short", 500.0)):
        run = copy.deepcopy(next(run for run in record["runs"] if run["arm"] == "dmoe"))
        run |= {"arm": arm, "step_ms": run["step_ms"] * 1000 / rate, "tokens_per_second": rate, "micro_batch": 4}
        run["at_once"] = 2
        if arm == "tutel-0-short":
            run["curve"] = {name: values[:3] for name, values in run["curve"].items()}
        record["runs"].append(run)
    for run in record["runs"]:
        if run["arm"] == "dmoe":  # its last steps, which the short run does not have, are slower
            run["curve"]["tokens_per_second"][3:] = [250.0, 250.0]
            run["step_ms"], run["tokens_per_second"] = run["step_ms"] * 4, 250.0
    record["settings"]["arms"] += ["tutel-1", "tutel-0-short"]
    record["settings"]["seeds"], record["runs"] = 1, [run for run in record["runs"] if run["seed"] == 1234]
    (tmp_path / "record.json").write_text(json.dumps(record))
    text = _text(tmp_path)
    assert "| Tutel, capacity 1 over dMoE, step time | 0.31 | 1.0 | – |" in text
    assert "| Tutel, dynamic capacity (0), short run over dMoE, step time | 2.00 | 1.38 | 1.38 |" in text
    assert "1 × CPU for each run, 2 runs at the same time on one host, torch" in text and "AT_ONCE=2 " in text
    assert "got the next smaller one" in text and "its run ends after 30% of the steps" in text


def test_one_seed_is_a_limit_and_arms_that_did_not_run_are_named(tmp_path: Path) -> None:
    record = write_runs(tmp_path, seeds=1)
    record["settings"]["arms"].append("tutel-0")
    record["not_run"] = {"tutel-0": "tutel is not installed"}
    (tmp_path / "record.json").write_text(json.dumps(record))
    text = _text(tmp_path)
    assert "One seed, so no spread: every arm." in text
    assert "Tutel, dynamic capacity (0): not run: tutel is not installed." in text
    assert "which may be chance with one seed." in text
    assert "mean of the seeds" not in text


def test_one_missed_loss_is_not_reached_and_one_point_is_no_front(tmp_path: Path) -> None:
    record = write_runs(tmp_path, seeds=1)
    record["runs"] = [run for run in record["runs"] if run["arm"] != "capacity-1"]
    record["settings"]["arms"].remove("capacity-1")
    for run in record["runs"]:
        if run["arm"] == "dmoe":
            run["validation"]["loss"] = [loss + 1.0 for loss in run["validation"]["loss"]]
    (tmp_path / "record.json").write_text(json.dumps(record))
    text = _text(tmp_path)
    assert "| dMoE | not reached | not reached |" in text and "seeds miss it" not in text
    assert "Pareto" not in text and "pareto.png" not in text
    left = {path.stem for path in paper_plots.draw(record, tmp_path)}
    assert left == set(paper_plots.PICTURES) - {"pareto", "equal_loss"}


LARGER = {  # final losses of dMoE and of the larger dense model, which trains three times as long; what is said then
    (3.5, 3.0): ("3.0100 (3.0000 to 3.0200)", "trains for 5.46 min, 2.00 times as long as dMoE", "2.00"),
    (3.5, 3.8): (
        "3.8100 (3.8000 to 3.8200)",
        "trains for more than 8.19 min, more than 3.00 times as long",
        "more than 3.00",
    ),
    (3.5, 4.2): (
        "4.2100 (4.2000 to 4.2200)",
        "trains for more than 2.73 min, more than 1.00 times as long",
        "more than 1.00",
    ),
    (4.0, 4.0): ("4.0100 (4.0000 to 4.0200)", "trains for 2.73 min, 1.00 times as long", "1.00"),
    (4.1, 3.0): (
        "3.0100 (3.0000 to 3.0200)",
        "trains for less than 2.73 min, less than 1.00 times as long",
        "less than 1.00",
    ),
}


@pytest.mark.parametrize(("dmoe", "larger"), LARGER)
def test_dmoe_is_compared_with_a_dense_model_of_the_same_loss(tmp_path: Path, dmoe: float, larger: float) -> None:
    record = write_runs(tmp_path, model="small")
    record["settings"]["arms"].insert(1, "dense-larger")
    for run in [run for run in record["runs"] if run["arm"] == "dense"]:
        slow = copy.deepcopy(run) | {"arm": "dense-larger"}
        slow["validation"]["loss"] = [loss + larger - 4.0 for loss in run["validation"]["loss"]]
        for part in (slow["validation"], slow["curve"]):
            part["seconds"] = [3 * seconds for seconds in part["seconds"]]
        record["runs"].append(slow)
    for run in record["runs"]:
        if run["arm"] == "dmoe":
            run["validation"]["loss"] = [loss + dmoe - 3.5 for loss in run["validation"]["loss"]]
    (tmp_path / "record.json").write_text(json.dumps(record))
    text, (loss, time, ratio) = _text(tmp_path), LARGER[dmoe, larger]
    assert f"The larger dense model ends with {loss} after 8.19 min." in text and time in text
    assert f"| dense of another size with dMoE's loss over dMoE, training time | {ratio} | – | 1.8 to 2.4 |" in text
    assert "](equal_loss.png)" in text
    assert tmp_path / "equal_loss.png" in paper_plots.draw(record, tmp_path)


def _uneven(out: Path, arms: tuple[str, ...]) -> dict:
    """A record of two seeds, the second 1.0 above the first, which `arms` lack. Larger dense takes thrice as long."""
    record = write_runs(out, model="small")
    record["settings"]["arms"].insert(1, "dense-larger")
    for run in [run for run in record["runs"] if run["arm"] == "dense"]:
        slow = copy.deepcopy(run) | {"arm": "dense-larger"}
        slow["validation"]["loss"] = [loss - 1.0 for loss in run["validation"]["loss"]]
        for part in (slow["validation"], slow["curve"]):
            part["seconds"] = [3 * seconds for seconds in part["seconds"]]
        record["runs"].append(slow)
    record["runs"] = [run for run in record["runs"] if run["seed"] == 1234 or run["arm"] not in arms]
    for run in record["runs"]:
        if run["seed"] == 1235:
            run["validation"]["loss"] = [loss + 1.0 for loss in run["validation"]["loss"]]
    record["settings"]["seeds"] = ",".join(["2", *(f"{arm}:1" for arm in arms)])
    (out / "record.json").write_text(json.dumps(record))
    return record


def test_a_dense_model_of_dmoes_loss_is_found_over_the_seeds_that_all_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the first seed alone dMoE's 3.5 is in the middle of 4.0 and 3.0. Over all seeds they are 4.0, 4.5, 3.0."""
    record = _uneven(tmp_path, ("dense-larger",))
    text = _text(tmp_path)
    over = "over the 1 seed that the three arms share, a dense model with dMoE's final loss trains for 5.46 min, 2.00"
    assert f"both dense models, {over}" in text
    assert "dense of another size with dMoE's loss over dMoE, training time | 2.00 | – |" in text
    monkeypatch.undo()
    assert tmp_path / "equal_loss.png" in paper_plots.draw(record, tmp_path)
    assert (tmp_path / "equal_loss.png").read_bytes().startswith(b"\x89PNG")


def test_the_front_compares_arms_over_the_seeds_that_both_have(tmp_path: Path) -> None:
    """Capacity 1 has the easy seed alone, in which its loss is 0.3 above dMoE's."""
    _uneven(tmp_path, ("capacity-1",))
    text = _text(tmp_path)
    assert "training time and final loss: dMoE. Every other arm takes at least as long as one of these" in text
    assert "and its loss is not lower, over the seeds that both have." in text


def _stop(record: dict, arm: str, *seeds: int) -> None:
    for run in record["runs"]:
        if run["arm"] == arm and run["seed"] in seeds:
            run["stopped_at"] = 15
            for part in (run["validation"], run["curve"]):
                part.update({name: values[:-1] for name, values in part.items()})


def test_an_arm_that_stopped_has_figures_but_no_final_loss(tmp_path: Path) -> None:
    record = write_runs(tmp_path, model="small")
    whole = _text(tmp_path)
    _stop(record, "dmoe", 1234, 1235)
    (tmp_path / "record.json").write_text(json.dumps(record))
    text = _text(tmp_path)
    stops = [f"seed {seed} stopped at step 15 of 20; its last evaluation, at step 15: {loss}"
             for seed, loss in ((1234, "4.0000"), (1235, "4.0200"))]  # fmt: skip
    assert f"| dMoE (stopped) | {'; '.join(stops)} | – | – | +0.26 | 2 | 1,000 | 0.00% | 2.00 | 0.0006 |" in text
    assert f"These runs are not finished: dMoE, {'; '.join(stops)}. They have no final loss" in text
    assert "not finished" not in whole and "stopped" not in whole
    # Its time to the dense loss, its step time and load are those of the whole runs.
    [time, step] = [line for line in whole.splitlines() if line.startswith("| dMoE |")][1:]
    assert f"| dMoE (stopped) | {time.split(' | ')[1]} | {time.split(' | ')[2]} | – | 1,000 |" in text
    assert step.replace("dMoE", "dMoE (stopped)", 1) in text
    assert "The paper's order of losses, ours, capacity 1 below dense, holds in 2 of 2 seeds." in text
    assert "Pareto" not in text and "dMoE (stopped): loss below dense" not in text and "final loss, minutes" in text
    assert not [line for line in text.splitlines() if line.startswith("| dMoE") and "final loss" in line]
    assert "nan" not in text
    assert "pareto" not in {path.stem for path in paper_plots.draw(record, tmp_path)}


def test_an_arm_that_stopped_before_the_dense_loss_has_a_bound(tmp_path: Path) -> None:
    record = write_runs(tmp_path, model="small", seeds=1)
    _stop(record, "capacity-1", 1234)
    (tmp_path / "record.json").write_text(json.dumps(record))
    # 15 of 20 steps of 8.192 s each, after which its loss is 4.3 and the dense one's in the end 4.0
    assert "| ours, capacity 1 (stopped) | more than 2.05 | less than 1.33 | – | 1,000 |" in _text(tmp_path)
    assert "time_to_dense_loss" in {path.stem for path in paper_plots.draw(record, tmp_path)}


def test_of_an_arm_with_a_stopped_seed_the_others_are_compared(tmp_path: Path) -> None:
    record = write_runs(tmp_path, model="small")
    _stop(record, "dmoe", 1235)
    _stop(record, "capacity-1", 1234)
    (tmp_path / "record.json").write_text(json.dumps(record))
    text = _text(tmp_path)
    assert "| dMoE (1 of 2 stopped) | 3.5000; seed 1235 stopped at step 15 of 20; " in text
    assert "at step 15: 4.0200 | +0.5000 | – | +0.26 | 2 |" in text
    assert "at step 15: 4.3000 | +0.2000 | – | +0.15 | 2 |" in text, "no seed of it and dMoE is finished"
    assert "| ours, capacity 1 (1 of 2 stopped) | not reached | 0 of 2 seeds miss it, some stopped before it | " in text
    assert "- dMoE" not in text and "- ours, capacity 1 (1 of 2 stopped) is 0.2000 below dense" in text
    assert "Pareto" not in text and "nan" not in text, "dMoE and capacity 1 share no seed"
    assert "One seed, so no spread: dMoE (1 of 2 stopped), ours, capacity 1 (1 of 2 stopped)." in text
    assert tmp_path / "drops_and_load.png" in paper_plots.draw(record, tmp_path)


def test_no_order_is_claimed_of_dense_alone_or_of_no_seed(tmp_path: Path) -> None:
    whole = write_runs(tmp_path)
    assert "The paper's order of losses" in _text(tmp_path)
    for stopped in ({"dmoe": (1234, 1235), "capacity-1": (1234, 1235)}, {"dmoe": (1234,), "capacity-1": (1235,)}):
        record = copy.deepcopy(whole)
        for arm, seeds in stopped.items():
            _stop(record, arm, *seeds)
        (tmp_path / "record.json").write_text(json.dumps(record))
        text = _text(tmp_path)
        assert "The paper's order of losses" not in text and "\n\n\n" not in text


def test_dmoe_takes_its_own_time_a_step_whichever_seed_stopped(tmp_path: Path) -> None:
    record = write_runs(tmp_path)
    for run in record["runs"]:
        run["curve"]["tokens_per_second"][-2:] = [1000.0, 500.0]  # slower at the end
        run["tokens_per_second"] = 750.0
    _stop(record, "dmoe", 1234)
    assert summarize(record)["dmoe"].over_dmoe == 1


def test_a_mixed_or_missing_record_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = write_runs(tmp_path)
    record["runs"][0]["environment"]["gpu"] = "NVIDIA H200"
    (tmp_path / "record.json").write_text(json.dumps(record))
    for folder, said in ((tmp_path, "has gpu=CPU, dense has NVIDIA H200"), (tmp_path / "none", "holds no record")):
        assert report.main([str(folder)]) == 2
        error = capsys.readouterr().err
        assert error.startswith("report: ") and said in error and error.count("\n") == 1
    assert not (tmp_path / "RESULTS.md").exists()


def test_a_report_that_cannot_be_written_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_runs(tmp_path)
    assert report.main([str(tmp_path), "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("report: ") and str(tmp_path) in error and error.count("\n") == 1
    for words in ([""], [str(tmp_path), "--out", ""]):
        with pytest.raises(SystemExit) as stop:
            report.main(words)
        assert stop.value.code == 2 and "'' is empty: must be a path" in capsys.readouterr().err


def test_spans() -> None:
    assert report.span(Span(1.5, 1.0, 2.0), ".1f") == "1.5 (1.0 to 2.0)"
    assert report.span(Span(60.0, 60.0, 60.0), ".1f", 60) == "1.0"
    assert report.span(None, ".1f") == "not reached"
