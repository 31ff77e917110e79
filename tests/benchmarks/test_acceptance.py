"""The table of acceptance. Only complete, green, valid results of the right GPU meet its lines."""

import argparse
import copy
import fcntl
import importlib
import json
import math
import signal
import subprocess
import sys
import time

import pytest

from .conftest import BENCHMARKS

acceptance = importlib.import_module("acceptance")
first_call = importlib.import_module("first_call")
grouped_gemm = importlib.import_module("grouped_gemm")
SHAPES = acceptance.PRODUCT_SHAPES


def over_padding(sizes, skews, speed=2.0):
    row = {"speed": speed, "one_thread_speed": speed, "graph_speed": speed}
    cases = [{"skew": s, "candidates": {"auto": dict(row), "auto graphed": dict(row)}} for s in skews]
    return {"sizes": {size: {"skews": copy.deepcopy(cases)} for size in sizes}}


def quantized():
    cases = [(impl, act, bits, name) for impl in "gs" for act in "ab" for bits in (8, 4)
             for name in ("inputs", "rematerialize", "scatter", "all three")]  # fmt: skip
    return [
        {"impl": i, "activation": a, "bits": b, "quantised": n, "saved": 100,
         "errors": {"w1": 0.005 if b == 8 else 0.05}, "predicted": None if n == "all three" else 100}
        for i, a, b, n in cases
    ]  # fmt: skip


def seven():
    """A record with seven rounds and no other content."""
    return [{"times": {"auto": [1.0] * 7}}]


def starts(cases):
    return [
        {"impl": impl, "activation": activation, "size": size, "cache": cache, "first_s": seconds,
         "new_counts": {"5": []}, "compiled": ["_up"], "from_disk": 1}
        for impl, activation, size in cases for cache, seconds in (("cold", 5.0), ("warm", 0.9))
    ]  # fmt: skip


def grown():
    tokens = [{"tokens": n, "ns_per_token": 100.0} for n in acceptance.TOKENS]
    experts = [{"experts": n, "graph_us": 98.0, "predicted_us": 100.0} for n in acceptance.EXPERTS]
    return {"tokens": {"fused": tokens}, "experts": {"fused": experts}}


def good():
    """{name: (summary, records)} with results that reach every goal."""
    over = {"quack-pp192": 1.0, "bmm": 1.05, "torch": 0.5, "torch-take": 0.6}
    auto = {"case": "XS", "auto": "fused", "graph_ms": {"fused": 1.0, "sparse": 1.2}}
    auto["times"] = {"graph/fused": [1.0] * 7, "graph/sparse": [1.2] * 7}
    return {
        "bookkeeping": ({}, [{"shape": [24576, 128, 8], "name": "indices", "us": 15.0, "launches": 3}]),
        "permutation": ({"rounds": 7}, [{"of_copy": 0.9, "op": "gather", "shape": [1, 2, 3]} for _ in range(84)]),
        "block_sparse": ({"cases": 18, "mean": 1.06, "least": 0.99, "least per block under Zipf": 0.97}, seven()),
        "layers": (over_padding(("XS", "Small", "Medium"), (1.0, 1.5, 2.0, 4.0, 8.0)), seven()),
        "layers_off": (over_padding(("XS", "Medium"), (2.0,)), seven()),
        "quant": ({}, quantized()),
        "grouped_gemm": ({"products": [{"shape": s, "op": op, "time_of_ours_over": dict(over)} for s in SHAPES
                                   for op in ("up", "down", "dx", "dw1", "dw2", "layer")]}, seven()),
        "first_call": ({}, starts(acceptance.FIRST_CALLS)),
        "mlp_impls": ({"missing": []}, [auto]),
        **{name: ({}, [peers_record(shape) for shape in acceptance.PAPER[3 * i : 3 * i + 3]])
           for i, name in enumerate(("peers_1b", "peers_7b", "peers_30b", "peers_120b"))},
        "token_rounding": ({"shapes": rounded()}, seven()),
        "growth": ({"curves": grown()}, seven()),
        "first_step": ({}, starts(acceptance.FIRST_STEP)),
    }  # fmt: skip


def peers_record(shape):
    names = ("fused", "sonicmoe", "sonicmoe compiled", "scattermoe")
    times = {f"{how}/{name}": [us] * 7 for how in ("queued", "eager", "forward")
             for name, us in zip(names, (1.0, 1.3, 1.2, 2.1), strict=True)}  # fmt: skip
    held = {"fused": 90, "fused recompute": 30, "fused 8 bits": 60, "sonicmoe": 100, "sonicmoe compiled": 120,
            "sparse": 150, "scattermoe": 200}  # fmt: skip
    memory = {name: {"held": n} for name, n in held.items()}
    return {"shape": shape, "flops": 1e9, "times": times, "memory": memory}


def rounded():
    row = {"nearest": {"queued_speed": 1.13, "wasted": 0.0, "deviation": 127}}
    return {
        shape: copy.deepcopy(row | {"whole": {"queued_speed": 1.2, "wasted": 0.0, "deviation": 0}})
        for shape in acceptance.ROUNDING_GOALS
    }


def write(folder, results, changes=None):
    for name, (summary, records) in results.items():
        gate = {"green": True, "red": [], "failures": {}, "largest_error": 1e-3}
        result = {
            "format": 1, "benchmark": name, "environment": {"gpu": "NVIDIA H200", "commit": "0123abc"}, "gate": gate,
            "void": [], "summary": summary, "records": records,
        }  # fmt: skip
        (folder / f"{name}.json").write_text(json.dumps(result | (changes or {})))


def rows(folder):
    return {line.name: acceptance.judge(line, folder) for line in acceptance.LINES}


def test_every_line_can_be_met(tmp_path):
    write(tmp_path, good())
    got = rows(tmp_path)
    assert {row.verdict for row in got.values()} == {"met"}, [row for row in got.values() if row.verdict != "met"]
    assert {row.gate for row in got.values()} == {"green"}
    judged = {line.step for line in acceptance.LINES}
    assert {step.split("_")[0] if step.startswith("peers") else step for step in acceptance.STEPS} == judged
    assert set(acceptance.STEPS) == set(good())
    table = acceptance.table(list(got.values()))
    assert f"{len(got)} met, 0 missed, 0 not run, of {len(got)}" in table
    assert all(row.file == "peers_*.json" or (tmp_path / row.file).exists() for row in got.values())


def test_quack_that_fails_is_not_replaced_by_an_easier_peer(tmp_path):
    results = good()
    without_quack(results["grouped_gemm"][0]["products"])
    why = {"S1/up/quack-pp192": "ModuleNotFoundError: No module named 'cutlass'"}
    write(tmp_path, results, {"gate": {"green": True, "red": [], "failures": why, "largest_error": 1e-3}})
    row = rows(tmp_path)["grouped dX"]
    assert row.verdict == "not run" and "No module named 'cutlass'" in row.measured


def test_the_proofs_outside_the_table_exist():
    for what, where in acceptance.ELSEWHERE:
        assert (BENCHMARKS.parent / where.split(",")[0]).exists() and what in acceptance.table([])


@pytest.mark.parametrize(
    "changes,said,gate",
    [
        ({"gate": {"green": False, "red": ["XS/ours"]}}, "red: XS/ours", "RED"),
        ({"gate": {"green": False, "red": []}}, "red: nothing checked", "RED"),
        ({"gate": {}}, "KeyError", "–"),
        ({"void": ["sonicmoe forward at S1"]}, "void: sonicmoe", "green"),
        ({"environment": {"gpu": None}}, "measured on None", "green"),
        ({"environment": {"gpu": "NVIDIA H100"}}, "measured on NVIDIA H100", "green"),
        ({"environment": {"gpu": "NVIDIA H200 NVL"}}, "measured on NVIDIA H200 NVL", "green"),
        ({"format": 0}, "not a result of format 1", "–"),
        ({"summary": {}, "records": []}, "", "green"),
    ],
)
def test_an_invalid_result_meets_no_line(tmp_path, changes, said, gate):
    write(tmp_path, good(), changes)
    for row in rows(tmp_path).values():
        assert row.verdict in ("missed", "not run") and row.gate == gate, row
        assert all(part in row.measured for part in said.split(": ")), row  # the line of peers also names the file


def test_missing_and_incomplete_files_meet_no_line(tmp_path):
    got = {(row.verdict, row.measured, row.gate) for row in rows(tmp_path).values()}
    assert got == {("not run", "no result", "–")}
    write(tmp_path, good())
    for path in tmp_path.iterdir():
        path.write_text(path.read_text()[:-20])
    assert {row.verdict for row in rows(tmp_path).values()} == {"missed"}


def worse(results, name, change):
    change(*results[name])
    return results


def nan_where_whole_tiles_win_little(shapes):
    rows = next(iter(shapes.values()))
    rows["nearest"]["queued_speed"], rows["whole"]["queued_speed"] = math.nan, 1.01


def without_quack(products):
    for r in products:
        r["time_of_ours_over"] = {"bmm": 1.1, "torch": 0.5, "torch-take": 0.6}


@pytest.mark.parametrize(
    "name,change,missed",
    [
        ("bookkeeping", lambda s, r: r[0].update(us=25.1), 1),
        ("bookkeeping", lambda s, r: r[0].update(launches=5), 1),
        ("permutation", lambda s, r: r[7].update(of_copy=0.84), 1),
        ("permutation", lambda s, r: r[7].update(of_copy=float("nan")), 1),
        ("permutation", lambda s, r: r.pop(), 1),
        ("block_sparse", lambda s, r: s.update(cases=17), 3),
        ("block_sparse", lambda s, r: s.update(least=0.90), 1),
        ("block_sparse", lambda s, r: s.update(mean=float("nan")), 1),
        ("layers", lambda s, r: s["sizes"].pop("Medium"), 6),
        ("layers", lambda s, r: s["sizes"]["XS"]["skews"].pop(2), 4),
        ("layers", lambda s, r: s["sizes"]["XS"]["skews"][4]["candidates"]["auto"].update(graph_speed=1.37), 1),
        ("layers", lambda s, r: s["sizes"]["XS"]["skews"][3]["candidates"]["auto graphed"].update(speed=1.37), 1),
        ("layers", lambda s, r: s["sizes"]["XS"]["skews"][0]["candidates"]["auto"].update(speed=None), 1),
        ("layers_off", lambda s, r: s["sizes"]["XS"]["skews"][0]["candidates"].clear(), 1),
        ("quant", lambda s, r: r[0]["errors"].update(w2=0.011), 1),
        ("bookkeeping", lambda s, r: r[0].update(us=0.0, launches=0), 1),  # the profiler had no access
        ("bookkeeping", lambda s, r: r.clear(), 1),
        ("quant", lambda s, r: r[0].update(saved=98), 1),
        ("quant", lambda s, r: r.pop(), 4),
        ("grouped_gemm", lambda s, r: s["products"][1]["time_of_ours_over"].update({"quack-pp192": 1.04}), 1),
        ("grouped_gemm", lambda s, r: s["products"][5]["time_of_ours_over"].update({"torch-take": 0.8}), 1),
        ("grouped_gemm", lambda s, r: s["products"][-1]["time_of_ours_over"].update({"torch": 0.99}), 0),  # 8 experts
        ("grouped_gemm", lambda s, r: s["products"].pop(2), 1),
        ("grouped_gemm", lambda s, r: s["products"].pop(0), 2),
        ("grouped_gemm", lambda s, r: without_quack(s["products"]), 0),
        ("grouped_gemm", lambda s, r: without_quack(s["products"][2:3]), 1),  # dx at one shape
        ("grouped_gemm", lambda s, r: r[0]["times"].update(auto=[1.0] * 5), 5),
        ("permutation", lambda s, r: s.clear(), 1),
        ("layers", lambda s, r: r[0]["times"].update(auto=[1.0] * 6), 6),
        ("first_call", lambda s, r: r[0].update(first_s=10.5), 1),
        ("first_call", lambda s, r: r[1]["new_counts"].update({"7": ["_up"]}), 1),
        ("first_call", lambda s, r: r[0].update(compiled=[], from_disk=0), 1),  # no kernel was counted
        ("first_call", lambda s, r: r.pop(), 1),  # a warm start, which the line of cold starts does not use
        ("first_call", lambda s, r: r.pop(-2), 2),
        ("first_call", lambda s, r: r[0].update(new_counts={}), 1),
        ("mlp_impls", lambda s, r: r[0].update(auto="sparse"), 1),
        ("mlp_impls", lambda s, r: r[0].update(auto="scatter"), 1),  # not measured
        ("mlp_impls", lambda s, r: s.update(missing=["Small"]), 1),
        ("peers_30b", lambda s, r: r[1]["times"].update({"queued/fused": [1.25] * 7}), 1),  # the mean stays
        ("peers_30b", lambda s, r: r[1]["times"].update({"queued/fused": [9.0] * 7}), 2),
        ("peers_30b", lambda s, r: r[1]["times"].update({"queued/fused": [float("nan")] * 7}), 2),
        ("peers_30b", lambda s, r: r.pop(), 5),
        ("peers_30b", lambda s, r: r[1]["times"].pop("queued/sonicmoe"), 5),
        ("peers_30b", lambda s, r: r[1]["times"].pop("queued/sonicmoe compiled"), 5),
        ("peers_30b", lambda s, r: r[1].update(times={n: t[:5] for n, t in r[1]["times"].items()}), 7),
        ("peers_30b", lambda s, r: r[1]["memory"]["fused"].update(held=101), 1),
        ("peers_30b", lambda s, r: r[1]["memory"]["fused"].update(held=-1), 1),
        ("peers_30b", lambda s, r: r[1]["memory"].pop("fused 8 bits"), 1),
        ("peers_7b", lambda s, r: r[0]["times"].update({"queued/scattermoe": [1.9] * 7}), 1),
        ("peers_7b", lambda s, r: r[0]["times"].pop("queued/scattermoe"), 1),
        ("peers_7b", lambda s, r: r[0]["memory"].pop("sparse"), 1),
        ("token_rounding", lambda s, r: next(iter(s["shapes"].values()))["nearest"].update(queued_speed=1.0), 1),
        ("token_rounding", lambda s, r: next(iter(s["shapes"].values()))["nearest"].update(queued_speed=math.nan), 1),
        ("token_rounding", lambda s, r: next(iter(s["shapes"].values()))["nearest"].update(deviation=129), 1),
        ("token_rounding", lambda s, r: s["shapes"].popitem(), 2),
        ("token_rounding", lambda s, r: next(iter(s["shapes"].values())).pop("nearest"), 2),
        ("token_rounding", lambda s, r: nan_where_whole_tiles_win_little(s["shapes"]), 1),
        ("token_rounding", lambda s, r: next(iter(s["shapes"].values()))["whole"].update(queued_speed=1.0), 0),
        ("growth", lambda s, r: s["curves"]["tokens"]["fused"][-1].update(ns_per_token=111.0), 1),
        ("growth", lambda s, r: s["curves"]["tokens"]["fused"].pop(0), 1),
        ("growth", lambda s, r: s["curves"]["experts"]["fused"][-1].update(graph_us=111.0), 1),
        ("growth", lambda s, r: s["curves"]["experts"]["fused"][2].update(graph_us=None), 1),
        ("growth", lambda s, r: s["curves"]["experts"]["fused"].pop(), 1),
        ("growth", lambda s, r: s["curves"].clear(), 2),
        ("first_step", lambda s, r: r[0].update(first_s=15.5), 1),
        ("first_step", lambda s, r: r[0].update(size="Small"), 2),
        ("first_step", lambda s, r: r[0].update(impl="scatter"), 2),
        ("first_step", lambda s, r: r[1].update(first_s=1.1), 1),
    ],
)
def test_low_figures_and_missing_cases_meet_no_line(tmp_path, name, change, missed):
    write(tmp_path, worse(good(), name, change))
    short = [row for row in rows(tmp_path).values() if row.verdict != "met"]
    assert len(short) == missed, short
    assert all((row.verdict == "not run") == ("measured" in row.measured) for row in short), short


def test_the_kept_table_equals_that_of_the_kept_results():
    folder = BENCHMARKS / "results" / "h200"
    assert (folder / "acceptance.md").read_text() == acceptance.table(list(rows(folder).values())) + "\n"


def test_peers_of_different_commits_meet_no_line(tmp_path):
    write(tmp_path, good())
    path = tmp_path / "peers_7b.json"
    path.write_text(path.read_text().replace("0123abc", "4567def"))
    told = [row for row in rows(tmp_path).values() if row.file == "peers_*.json"]
    assert {row.verdict for row in told} == {"missed"}
    assert all("4567def in peers_7b.json" in row.measured for row in told), told


def test_a_benchmark_that_fails_or_hangs_does_not_stop_the_others(tmp_path, monkeypatch, capsys):
    """Its old result does not count. A benchmark that hangs first gets time to write its results. Then it is killed
    with its children."""
    child = (
        "import fcntl, signal, sys, time; signal.signal(signal.SIGINT, signal.SIG_IGN);"
        "f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX); print('held', flush=True); time.sleep(300)"
    )
    scripts = {
        "fails": "import sys; sys.exit(3)",
        "hangs": "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(60)",
        "yields": "import subprocess, sys, time\n"
        f"subprocess.Popen([sys.executable, '-c', {child!r}, sys.argv[1] + '.lock'])\n"
        "try:\n    time.sleep(60)\nexcept KeyboardInterrupt:\n"
        "    open(sys.argv[1], 'w').write('{}')",
    }
    for name, text in scripts.items():
        (tmp_path / f"{name}.py").write_text(text)
        (tmp_path / f"{name}.json").write_text("old")
    monkeypatch.setattr(acceptance, "HERE", tmp_path)
    steps = {name: acceptance.Step(f"{name}.py {{out}}/{name}.json", 4) for name in scripts}
    monkeypatch.setattr(acceptance, "STEPS", steps)
    monkeypatch.setattr(acceptance, "PATIENCE_S", 2.0)
    monkeypatch.setattr(acceptance, "need_gpu", lambda: None)
    monkeypatch.setattr(sys, "argv", ["acceptance.py", "--out", str(tmp_path), "--seconds", "60"])
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in a background job of a shell
    try:
        assert acceptance.main() == 1
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    said = capsys.readouterr().out
    assert "fails: exit 3" in said and said.count("stopped after 4 s") == 2
    assert not (tmp_path / "fails.json").exists() and not (tmp_path / "hangs.json").exists()
    assert (tmp_path / "yields.json").read_text() == "{}" and (tmp_path / "yields.log").read_text() == "held\n"
    began = time.monotonic()
    with open(tmp_path / "yields.json.lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the child holds it until it is dead
    assert time.monotonic() - began < 150
    lines = len(acceptance.LINES)
    assert f"0 met, 0 missed, {lines} not run, of {lines}" in (tmp_path / "acceptance.md").read_text()


def test_the_commands_name_scripts_that_exist(monkeypatch, capsys):
    monkeypatch.setenv("DRY_RUN", "1")
    monkeypatch.setattr(sys, "argv", ["acceptance.py", "--out", "DIR"])
    assert acceptance.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(acceptance.STEPS) and all((BENCHMARKS / line.split("benchmarks/")[1].split()[0]).exists()
                                                       for line in lines)  # fmt: skip


def test_a_failed_cold_start_has_no_warm_start(monkeypatch):
    calls = []
    monkeypatch.setattr(first_call.subprocess, "run",
                        lambda *a, **_: calls.append(a) or subprocess.CompletedProcess(a, 1, "", "broke"))  # fmt: skip
    options = argparse.Namespace(size="XS", seconds=1.0)
    assert first_call.run_cold_and_warm("fused", "gelu", options) == [{"bad": "fused/gelu/cold", "why": "broke"}]
    assert len(calls) == 1


def test_only_our_own_grouped_products_turn_the_gate_red():
    assert grouped_gemm.ours("S1/down/ours") and grouped_gemm.ours("S1/down")
    assert not any(grouped_gemm.ours(f"S1/up/{peer}") for peer in ("quack-pp192", "apart", "torch-take", "bmm"))
