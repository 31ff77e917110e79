"""Interleaving and medians, the gate, the void rule, whole results, and pictures."""

import importlib
import json
import runpy
import signal
import sys
import time
from itertools import pairwise

import pytest
import torch

from .conftest import BENCHMARKS

measure = importlib.import_module("measure")
children = importlib.import_module("children")


def test_rounds_take_turns_and_the_first_is_dropped():
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
    # nobody always follows the same neighbour
    assert {first + second for first, second in pairwise("".join(rounds))} >= {"ab", "ac", "ba", "bc", "ca", "cb"}
    assert measure.interleave({}) == {}


def test_speed_is_the_median_of_the_rounds_ratios():
    # a chip that slows down: medians taken apart would say 2/2, every round says 2x
    times = {"ours": [1.0, 2.0, 4.0], "base": [2.0, 4.0, 8.0], "none": []}
    assert measure.speed(times, "ours", "base") == 2.0
    assert measure.speed({"ours": [1.0, 3.0, 2.0], "base": [4.0, 6.0, 2.0]}, "ours", "base") == 2.0
    assert measure.speed(times, "ours", "none") is None and measure.speed(times, "ours", "absent") is None


def test_milliseconds_on_a_cpu():
    if torch.cuda.is_available():
        pytest.skip("times by events there")
    assert 2.0 <= measure.milliseconds(lambda: time.sleep(0.002), 3) < 2000.0


def test_calls_fill_a_round(monkeypatch):
    monkeypatch.setattr(measure, "milliseconds", lambda fn: 4.0)
    assert [measure.calls_for(print, round_ms=ms) for ms in (1.0, 20.0, 21.0)] == [1, 5, 5]


def test_relative_error_refuses_nan_and_other_shapes():
    want = torch.tensor([3.0, 4.0])
    assert measure.relative_error(want, want) == 0
    assert measure.relative_error(torch.tensor([3.0, 4.5]), want) == pytest.approx(0.1)
    assert measure.relative_error(torch.tensor([3.0, float("nan")]), want) == float("inf")
    assert measure.relative_error(want[:1], want) == float("inf")


def test_the_gate_is_red_for_ours_and_for_nothing_measured():
    gate = measure.Gate(lambda key: key.endswith("/ours"))
    assert not gate.green
    assert gate.take({"good": "case/ours", "error": 1e-3}) and gate.take({"bad": "case/peer", "why": "broke"})
    assert not gate.take({"times": {}})
    assert gate.green and gate.to_dict()["largest_error"] == 1e-3
    gate.take({"bad": "other/ours", "why": "wrong"})
    assert not gate.green and gate.to_dict()["red"] == ["other/ours"]


FIGURES = {"gpu": "NVIDIA H200", "when": "earlier", "shapes": {"s": {"tflops": {"peer": {"total": 100}}}}}


@pytest.mark.parametrize("got, void", [(84.9, True), (85.1, False), (120.0, False)])
def test_a_peer_far_below_its_earlier_figure_voids_the_run(got, void):
    reasons = measure.void_reasons([("s", "peer", "total", got)], FIGURES, "NVIDIA H200")
    assert bool(reasons) == void
    if void:
        assert "peer total at s" in reasons[0] and "100" in reasons[0]


def test_other_gpus_and_unknown_cases_void_nothing():
    slow = [("s", "peer", "total", 1.0), ("s", "peer", "forward", 1.0), ("other", "peer", "total", 1.0)]
    assert measure.void_reasons(slow, FIGURES, None) == []
    assert len(measure.void_reasons(slow, FIGURES, "NVIDIA H200")) == 1


def test_the_peers_figures_are_whole():
    figures = measure.peer_figures()
    assert figures["gpu"] == "NVIDIA H200" and len(figures["shapes"]) == 7 and figures["source"]
    for label, row in figures["shapes"].items():
        assert {"bmm", "scattermoe", "torch"} <= set(row["tflops"]), label
        assert all(0 < value < 989 for phases in row["tflops"].values() for value in phases.values())


def write(path, **changes):
    gate = measure.Gate(lambda key: True)
    gate.take({"good": "a/ours", "error": 0.001})
    values = dict(gate=gate, summary={"x": 1}, records=[{"r": 1}, {"r": 2}], void=())
    measure.write_result(path, "sample", **{**values, **changes})


def test_a_result_is_read_back_with_where_it_was_taken(tmp_path, monkeypatch):
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


def test_half_a_file_is_never_a_result(tmp_path):
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


def test_a_write_that_fails_leaves_the_old_result(tmp_path):
    path = tmp_path / "sample.json"
    write(path)
    before = path.read_bytes()
    with pytest.raises(TypeError):
        write(path, records=[{"not json": object()}])
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["sample.json"]


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


def test_what_hangs_or_dies_is_struck_off_and_the_rest_runs(tmp_path, capsys):
    script = tmp_path / "child.py"
    script.write_text(CHILD)
    runner = children.Runner(str(script), [], time.monotonic() + 900)
    runner.run(["a", "b", "c"], quiet=5.0, budget=900.0)
    results = [r["result"] for r in runner.records if "result" in r]
    assert results == ["a", "b", "c"]
    bad = {r["bad"]: r["why"] for r in runner.records if "bad" in r}
    assert bad["a/hangs"].startswith("silent") and bad["a/dies"].startswith("died (7)") and bad["a/wrong"] == "off"
    # the second time it is struck off everywhere
    assert {"hangs", "dies"} <= runner.struck and "c/hangs" not in bad and "c/dies" not in bad
    assert "a/hangs silent" in capsys.readouterr().out
    settled = runner.settled(["a", "late"])
    assert settled[-1] == {"bad": "late", "why": "no time left"}
    assert not any(r.get("bad") == "a" for r in settled)


def test_what_was_struck_off_by_name_is_told_as_lost(capsys):
    struck = {"a/hangs", "hangs"}
    assert children.struck_off("a/hangs", struck) and not children.struck_off("b/ours", struck)
    assert capsys.readouterr().out == ""  # the parent knows
    assert children.struck_off("b/hangs", struck)
    assert json.loads(capsys.readouterr().out)["bad"] == "b/hangs"


LOOKS = """
import json, pathlib, sys, time
jobs, flags = sys.argv[sys.argv.index("--child") + 1].split(","), sys.argv[1:]
path = pathlib.Path(flags[-1])
say = lambda **r: print(json.dumps(r), flush=True)
for job in jobs:
    say(job=job)
    if job == "b":  # what the parent wrote of a
        while not path.exists():
            time.sleep(0.01)
        path.with_name("so_far.json").write_text(path.read_text())
    say(start=f"{job}/ours")
    say(**{"bad" if job in flags else "good": f"{job}/ours", "error": 0.0, "why": "wrong"})
    say(times=job)
    say(finished=job)
"""


@pytest.mark.parametrize("wrong, void, status", [("", [], 0), ("b", [], 1), ("", ["a peer is slow"], 1)])
def test_a_result_is_written_after_each_job_and_fails_the_run_where_it_must(tmp_path, wrong, void, status):
    script, out = tmp_path / "child.py", tmp_path / "out.json"
    script.write_text(LOOKS)
    runner = children.Runner(str(script), [wrong, str(out)], time.monotonic() + 900)
    judged = []

    def summarise(records, gate):
        judged.append((len(records), gate.green))
        return {"jobs": len(records)}, void

    jobs = ["a", "b"]
    ended = children.run_benchmark(
        runner,
        "sample",
        jobs,
        lambda: runner.run(jobs, quiet=300.0),
        ours=lambda key: True,
        summarise=summarise,
        out=out,
    )
    assert ended == status and judged == [(2, not wrong)]
    so_far, result = measure.read_result(tmp_path / "so_far.json"), measure.read_result(out)
    assert so_far["records"] == [{"times": "a"}] and so_far["gate"]["red"] == ["b"] and so_far["summary"] == {}
    assert result["summary"] == {"jobs": 2} and result["void"] == void
    assert result["gate"]["red"] == ([f"{wrong}/ours"] if wrong else [])


def test_an_interrupted_run_writes_what_it_has(tmp_path):
    runner, out = children.Runner("none.py", [], time.monotonic() + 900), tmp_path / "out.json"

    def run():
        runner.records.append({"good": "a/ours", "error": 0.0})
        runner.finished.add("a")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        children.run_benchmark(runner, "sample", ["a", "b"], run, ours=lambda key: True,
                               summarise=lambda records, gate: ({}, []), out=out)  # fmt: skip
    assert measure.read_result(out)["gate"]["red"] == ["b"]


def test_a_result_is_written_though_its_time_is_up_meanwhile(tmp_path):
    runner, out = children.Runner("none.py", [], time.monotonic() + 900), tmp_path / "out.json"
    runner.records, runner.finished = [{"good": "a/ours", "error": 0.0}], {"a"}
    heeded = signal.getsignal(signal.SIGINT)

    def summarise(records, gate):
        signal.raise_signal(signal.SIGINT)
        return {"whole": True}, []

    assert children.run_benchmark(runner, "sample", ["a"], lambda: None, ours=lambda key: True,
                                  summarise=summarise, out=out) == 0  # fmt: skip
    assert measure.read_result(out)["summary"] == {"whole": True} and signal.getsignal(signal.SIGINT) is heeded


def test_names_that_no_option_takes_are_refused(capsys):
    parser = children.parser_of("doc", seconds=1.0)
    assert children.chosen(parser, "--ops", "b,a", ("a", "b", "c")) == ["b", "a"]
    assert children.chosen(parser, "--ops", "", ("a", "b")) == ["a", "b"]
    with pytest.raises(SystemExit):
        children.chosen(parser, "--ops", "a,x", ("a", "b"))
    assert "--ops=a,x: x is none of a, b" in capsys.readouterr().err


PREPARED = """
import json, pathlib, sys, time
job, wait = sys.argv[sys.argv.index("--child") + 1], "--wait" in sys.argv
here = pathlib.Path(sys.argv[0]).parent
say = lambda **record: print(json.dumps(record), flush=True)
(here / (job + (".ahead" if wait else ".anew"))).touch()
if wait:
    if job == "breaks":
        sys.exit(9)
    say(prepared=job)
    sys.stdin.readline()
for one in job.split(","):
    say(job=one)
    say(result=one, others=sorted(path.name for path in here.glob("*.ahead")))
    say(finished=one)
"""


def test_jobs_are_prepared_beside_each_other_and_run_one_by_one(tmp_path):
    script = tmp_path / "child.py"
    script.write_text(PREPARED)
    runner = children.Runner(str(script), [], time.monotonic() + 900)
    jobs = ["a", "breaks", "c", "d"]
    runner.prepare(jobs[:3], seconds=300.0, at_once=2)
    assert set(runner.prepared) == {"a", "c"} and runner.records == []
    runner.run(jobs, quiet=300.0, budget=900.0)
    assert [r["result"] for r in runner.records] == jobs and runner.prepared == {}
    # all were ahead of the first; what broke then, and what was not prepared, ran anew
    assert runner.records[0]["others"] == ["a.ahead", "breaks.ahead", "c.ahead"]
    assert {path.name for path in tmp_path.glob("*.anew")} == {"breaks.anew", "d.anew"}
    runner.prepare(["late"], seconds=300.0, at_once=1)
    child = runner.prepared["late"]
    runner.end_prepared()
    assert child.process.poll() is not None and runner.settled(["late"])[-1]["why"] == "no time left"


CASES = {
    "block_sparse": 18, "first_call": 10, "grouped_gemm": 49, "growth": 20, "kernel_times": 12, "layer_cost": 8,
    "layers": 15, "peers": 13, "token_rounding": 2,
}  # fmt: skip
SCRIPTS = sorted(path.stem for path in BENCHMARKS.glob("*.py") if "if dry_run()" in path.read_text())
NO_GPU_NEEDED = {"layer_cost", "quant"}
"""They have cases for a CPU."""


def run_script(script, monkeypatch, *flags):
    """As `python benchmarks/SCRIPT.py`, without another process; how it ended."""
    path = str(BENCHMARKS / f"{script}.py")
    monkeypatch.setattr(sys, "argv", [path, *flags])
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as e:
        return e.code
    return None


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_dry_run_prints_the_cases_and_runs_none(script, monkeypatch, capsys):
    monkeypatch.setenv("DRY_RUN", "1")
    assert run_script(script, monkeypatch) in (None, 0)
    said = capsys.readouterr()
    printed = len(said.out.splitlines())
    assert printed == CASES.get(script, printed) and printed and not said.err


@pytest.mark.parametrize("script", sorted(set(SCRIPTS) - NO_GPU_NEEDED))
def test_without_a_gpu_one_line_says_so(script, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run_script(script, monkeypatch) == (
        f"{script}.py: torch sees no GPU; run it where there is one, DRY_RUN=1 prints the cases"
    )
    assert capsys.readouterr().out == "" and not any(tmp_path.iterdir())


def test_a_kernels_name_is_told_without_what_surrounds_it():
    short = importlib.import_module("kernel_times").short
    names = "void at::native::vectorized_elementwise_kernel<8, at::native::Add>(int)", "up_kernel", "Memset (Device)"
    assert [short(n) for n in names] == ["vectorized_elementwise_kernel", "up_kernel", "Memset"]


def test_a_bad_shape_of_kernel_times_is_named(monkeypatch, capsys):
    monkeypatch.setenv("DRY_RUN", "1")
    assert run_script("kernel_times", monkeypatch, "--shapes", "1536") == 2
    assert "error: --shapes '1536': must be 'T,H; I/E/K', as '40960,768; 256/128/8'" in capsys.readouterr().err


def test_those_scripts_are_there():
    assert set(CASES) | NO_GPU_NEEDED <= set(SCRIPTS)
