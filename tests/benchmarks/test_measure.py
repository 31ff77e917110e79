"""Interleaved rounds, the gate, void runs, result files, child processes, and dry runs of all scripts."""

import importlib
import json
import os
import runpy
import subprocess
import sys
import time
from itertools import pairwise

import pytest
import torch

from .conftest import BENCHMARKS

measure = importlib.import_module("measure")
children = importlib.import_module("children")


def test_candidates_take_turns_and_the_first_round_is_dropped():
    order = []

    def timer(name):
        def run():
            order.append(name)
            return float(len(order))

        return run

    times = measure.interleave({name: timer(name) for name in "abc"}, rounds=20)
    rounds = ["".join(order[i : i + 3]) for i in range(0, len(order), 3)]
    assert len(rounds) == 21 and all(sorted(names) == ["a", "b", "c"] for names in rounds)
    assert times == {name: [3.0 * i + names.index(name) + 1 for i, names in enumerate(rounds) if i] for name in "abc"}
    # no candidate always runs after the same one
    assert {first + second for first, second in pairwise("".join(rounds))} >= {"ab", "ac", "ba", "bc", "ca", "cb"}
    assert measure.interleave({}) == {}


def test_speed_is_the_median_of_the_rounds_ratios():
    # a GPU that slows down
    times = {"ours": [1.0, 2.0, 4.0], "base": [2.0, 4.0, 8.0], "none": []}
    assert measure.speed(times, "ours", "base") == 2.0
    assert measure.speed({"ours": [1.0, 3.0, 2.0], "base": [4.0, 6.0, 2.0]}, "ours", "base") == 2.0
    assert measure.speed(times, "ours", "none") is None and measure.speed(times, "ours", "absent") is None


def test_relative_error_of_nan_and_of_other_shapes_is_infinite():
    want = torch.tensor([3.0, 4.0])
    assert measure.relative_error(want, want) == 0
    assert measure.relative_error(torch.tensor([3.0, 4.5]), want) == pytest.approx(0.1)
    assert measure.relative_error(torch.tensor([3.0, float("nan")]), want) == float("inf")
    assert measure.relative_error(want[:1], want) == float("inf")


def test_the_gate_is_red_if_ours_failed_or_nothing_was_measured():
    gate = measure.Gate(lambda key: key.endswith("/ours"))
    assert not gate.green
    assert gate.take({"good": "case/ours", "error": 1e-3}) and gate.take({"bad": "case/peer", "why": "broke"})
    assert not gate.take({"times": {}})
    assert gate.green and gate.to_dict()["largest_error"] == 1e-3
    assert gate.judge("near/ours", 1e-3, 1e-3) and not gate.judge("nan/peer", float("nan"), 1e-3)
    assert gate.failures["nan/peer"] == "relative error nan" and gate.green
    gate.take({"bad": "other/ours", "why": "wrong"})
    assert not gate.green and gate.to_dict()["red"] == ["other/ours"]


FIGURES = {"gpu": "NVIDIA H200", "when": "earlier", "shapes": {"s": {"tflops": {"peer": {"total": 100}}}}}


@pytest.mark.parametrize("got, void", [(84.9, True), (85.1, False), (120.0, False)])
def test_a_peer_far_below_its_earlier_figure_voids_the_run(got, void):
    reasons = measure.void_reasons([("s", "peer", "total", got)], FIGURES, "NVIDIA H200")
    assert bool(reasons) == void
    if void:
        assert "peer total at s" in reasons[0] and "100" in reasons[0]


def test_other_gpus_and_unknown_cases_do_not_void_a_run():
    slow = [("s", "peer", "total", 1.0), ("s", "peer", "forward", 1.0), ("other", "peer", "total", 1.0)]
    assert measure.void_reasons(slow, FIGURES, None) == []
    assert len(measure.void_reasons(slow, FIGURES, "NVIDIA H200")) == 1


def test_the_earlier_figures_of_peers_are_complete():
    figures = measure.peer_figures()
    assert figures["gpu"] == "NVIDIA H200" and len(figures["shapes"]) == 7 and figures["source"]
    for label, row in figures["shapes"].items():
        assert {"bmm", "scattermoe", "torch"} <= set(row["tflops"]), label
        assert all(0 < value < 989 for phases in row["tflops"].values() for value in phases.values())


def write(path, **changes):
    gate = measure.Gate(lambda key: True)
    gate.take({"good": "a/ours", "error": 0.001})
    values = dict(gate=gate, summary={"x": 1}, records=[{"r": 1}, {"r": 2}])
    measure.write_result(path, "sample", **{**values, **changes})


def test_a_result_is_read_back_with_its_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("MEGABLOCKS_COMMIT", "0123abc")
    path = measure.result_path("sample", "NVIDIA H200", tmp_path)
    assert path == tmp_path / "h200" / "sample.json"
    assert measure.result_path("sample", None, tmp_path).parent.name == "cpu"
    write(path)
    result = measure.read_result(path)
    assert result["records"] == [{"r": 1}, {"r": 2}] and result["summary"] == {"x": 1} and result["gate"]["green"]
    environment = result["environment"]
    assert environment["commit"] == "0123abc" and environment["torch"] == torch.__version__
    assert environment["command"].startswith("python ") and environment["date"].endswith("UTC")
    write(path, records=[])
    assert measure.read_result(path)["records"] == []


def test_an_incomplete_file_is_no_result(tmp_path):
    path = tmp_path / "sample.json"
    write(path)
    whole = path.read_text()
    for cut in range(0, len(whole) - 2, 97):
        path.write_text(whole[:cut])
        with pytest.raises(ValueError, match="sample.json"):
            measure.read_result(path)
    partial = json.loads(whole)
    del partial["gate"]
    path.write_text(json.dumps(partial))
    with pytest.raises(ValueError, match="missing: gate"):
        measure.read_result(path)
    path.write_text("[1]")
    with pytest.raises(ValueError, match="not a result"):
        measure.read_result(path)


CHILD = """
import json, sys, time
jobs, struck = sys.argv[sys.argv.index("--child") + 1], sys.argv[sys.argv.index("--struck") + 1].split(",")
say = lambda **r: print(json.dumps(r), flush=True)
for job in jobs.split(","):
    say(job=job)
    for name in ("ours", "hangs", "dies", "wrong"):
        key = f"{job}/{name}"
        if key in struck or name in struck:
            continue
        say(start=key)
        if name == "hangs":
            time.sleep(900)
        if name == "dies":
            sys.exit(7)
        say(bad=key, why="off") if name == "wrong" else say(good=key, error=0.0)
    print("{noise that is no JSON", flush=True)
    say(result=job)
    say(finished=job)
"""


def test_a_candidate_that_hangs_or_dies_is_excluded_and_the_rest_runs(tmp_path, capsys):
    script = tmp_path / "child.py"
    script.write_text(CHILD)
    runner = children.Runner(str(script), [], time.monotonic() + 900)
    runner.run(["a", "b", "c"], quiet=5.0, budget=900.0)
    results = [r["result"] for r in runner.records if "result" in r]
    assert results == ["a", "b", "c"]
    bad = {r["bad"]: r["why"] for r in runner.records if "bad" in r}
    assert bad["a/hangs"].startswith("silent") and bad["a/dies"].startswith("died (7)") and bad["a/wrong"] == "off"
    # after the second time the name is excluded everywhere
    assert {"hangs", "dies"} <= runner.struck and "c/hangs" not in bad and "c/dies" not in bad
    assert "a/hangs silent" in capsys.readouterr().out
    settled = runner.settled(["a", "late"])
    assert settled[-1] == {"bad": "late", "why": "no time left"}
    assert not any(r.get("bad") == "a" for r in settled)


def test_a_candidate_that_is_excluded_by_name_is_reported(capsys):
    struck = {"a/hangs", "hangs"}
    assert children.struck_off("a/hangs", struck) and not children.struck_off("b/ours", struck)
    assert capsys.readouterr().out == ""  # the parent excluded this key itself
    assert children.struck_off("b/hangs", struck)
    assert json.loads(capsys.readouterr().out)["bad"] == "b/hangs"


LOOKS = """
import json, pathlib, sys, time
jobs, flags = sys.argv[sys.argv.index("--child") + 1].split(","), sys.argv[1:]
path = pathlib.Path(flags[-1])
say = lambda **r: print(json.dumps(r), flush=True)
for job in jobs:
    say(job=job)
    if job == "b":  # waits for the file that the parent writes after job a
        while not path.exists():
            time.sleep(0.01)
        path.with_name("so_far.json").write_text(path.read_text())
    say(start=f"{job}/ours")
    say(**{"bad" if job in flags else "good": f"{job}/ours", "error": 0.0, "why": "wrong"})
    say(times=job)
    say(finished=job)
"""


@pytest.mark.parametrize("wrong, void, status", [("", [], 0), ("b", [], 1), ("", ["a peer is slow"], 1)])
def test_a_result_is_written_after_each_job_and_gives_the_exit_status(tmp_path, monkeypatch, wrong, void, status):
    script, out = tmp_path / "child.py", tmp_path / "out.json"
    script.write_text(LOOKS)
    monkeypatch.setattr(sys, "argv", [str(script), wrong, str(out)])
    judged = []

    def summarise(records, gate):
        judged.append((len(records), gate.green))
        gate.void += void
        return {"jobs": len(records)}

    args = children.parser_of(None, seconds=900.0).parse_args([])
    ended = children.run_benchmark(args, "sample", ["a", "b"], pytest.fail, quiet=300.0, ours=lambda key: True,
                                   summarise=summarise, out=out, toy=True)  # fmt: skip
    assert ended == status and judged == [(2, not wrong)]
    so_far, result = measure.read_result(tmp_path / "so_far.json"), measure.read_result(out)
    assert so_far["records"] == [{"times": "a"}] and so_far["gate"]["red"] == ["b"] and so_far["summary"] == {}
    assert result["summary"] == {"jobs": 2} and result["void"] == void
    assert result["gate"]["red"] == ([f"{wrong}/ours"] if wrong else [])


CASES = {
    "block_sparse": 18, "first_call": 10, "grouped_gemm": 49, "growth": 20, "kernel_times": 12, "layers": 15, "loss": 4,
    "peers": 13, "token_rounding": 2, "training_step": 22,
}  # fmt: skip
SCRIPTS = sorted(path.stem for path in BENCHMARKS.glob("*.py") if "if dry_run()" in path.read_text())


def run_script(script, monkeypatch, *flags):
    """Run `python benchmarks/SCRIPT.py` in this process. Returns its exit status."""
    path = str(BENCHMARKS / f"{script}.py")
    monkeypatch.setattr(sys, "argv", [path, *flags])
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as e:
        return e.code
    return None


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_dry_run_prints_the_cases(script, monkeypatch, capsys):
    monkeypatch.setenv("DRY_RUN", "1")
    assert run_script(script, monkeypatch) in (None, 0)
    said = capsys.readouterr()
    printed = len(said.out.splitlines())
    assert printed == CASES.get(script, printed) and printed and not said.err


@pytest.mark.parametrize("script", SCRIPTS)
def test_another_value_of_dry_run_is_refused(script, monkeypatch):
    monkeypatch.setenv("DRY_RUN", "true")
    assert run_script(script, monkeypatch) == f"{script}.py: DRY_RUN='true': must be 0 or 1"


@pytest.mark.parametrize(
    "script", ["benchmarks/growth", "benchmarks/report", "scripts/profile_step", "scripts/find_micro_batch"]
)
def test_help_is_printed_in_a_locale_without_its_characters(script):
    path = BENCHMARKS.parent / f"{script}.py"
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONPATH": str(BENCHMARKS.parent)}
    done = subprocess.run([sys.executable, path, "--help"], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and "\\u20" in done.stdout


def test_the_scripts_with_known_cases_exist():
    assert set(CASES) < set(SCRIPTS)
