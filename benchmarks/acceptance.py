"""Run the benchmarks whose figures decide whether the kernels are accepted, and print one table of goals and figures.

    python benchmarks/acceptance.py --out DIR [--seconds 570] [--only block_sparse,layers] [--table]

Each benchmark runs in a process of its own with a deadline. It writes DIR/<name>.json after each of its cases, and
DIR/<name>.log. If a benchmark fails or hangs, the others still run. Several calls with --only can fill one DIR. The
table is written to DIR/acceptance.md after each benchmark. --table runs nothing and prints it.

A line of the table is "met" if all of this holds:

- its result file is complete, the gate is green, and no peer was more than 15 % below its earlier figure;
- the GPU is an H200;
- every candidate that runs in turn with others has at least 7 rounds;
- every case of the line was measured;
- the figure reaches the goal. The goal "a figure" asks only for a measurement.

A line is "not run" if its file or one of its cases is missing. Otherwise it is "missed". Below the table is a list of
what tests and training runs prove. The exit status is 1 unless all lines are met. DRY_RUN=1 prints the commands and
their deadlines.

grouped_gemm uses QuACK as a peer if it is installed. peers_* need SonicMoE, which needs another version of QuACK, and
peers_7b also needs ScatterMoE. The shapes of peers.py may be split over any DIR/peers_*.json with the same commit, GPU
and versions.
"""

from __future__ import annotations

import math
import os
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from children import add_names, end_session
from first_call import ACTIVATIONS
from grouped_gemm_cases import SHAPES as PRODUCT_SHAPES
from growth import EXPERTS, TOKENS, flatness, over_model
from layer_candidates import GOAL, GOAL_FROM, GRAPHED, LEAST_AT_ONE
from measure import dry_run, need_gpu, option_parser, read_result, speed
from peers import PAPER, SONICMOE, against_sonicmoe, geometric_mean, merged
from token_rounding import GOALS as ROUNDING_GOALS
from token_rounding import TILE

from megablocks.files import write_durably

HERE = Path(__file__).parent
SIZES = ("XS", "Small", "Medium")
PERMUTATION_RECORDS = 7 * 12
"""Shapes times ops of permutation.py."""
QUANT_RECORDS = 32
MANY_EXPERTS = 128
PATIENCE_S = 8.0
"""Time for a benchmark to write its results after it is told to stop."""
SCATTERMOE_SHAPE = "24576,1536; 256/128/8"
FIRST_IMPLS = ("grouped", "sparse", "scatter", "fused")
FIRST_CALLS = [(impl, activation, "Small") for impl in FIRST_IMPLS for activation in ACTIVATIONS]
FIRST_STEP = [("fused", "swiglu", SCATTERMOE_SHAPE)]
"""The layers whose first call is timed, with an empty and with a full cache."""
GPU = "NVIDIA H200"
"""The GPU of the goals."""
FEWEST_ROUNDS = 7
UNTIMED = ("bookkeeping", "quant", "first_call", "first_step")
"""Steps without rounds: their figures come from the profiler, from memory sizes, or from single processes."""
Result = dict[str, Any]
Judged = tuple[str, bool]


class NotMeasured(ValueError):
    """The result file lacks a case of the line."""


class Step(NamedTuple):
    """A benchmark with its options, where {out} stands for DIR, and its deadline in seconds."""

    command: str
    seconds: int
    environment: dict[str, str] = {}


def peers_of(name: str, shapes: str, *more: str) -> Step:
    candidates = ",".join(("fused", "fused recompute", "fused 8 bits", "sonicmoe", "sonicmoe compiled", *more))
    return Step(f"peers.py --shapes {shapes} --candidates '{candidates}' --rounds 7 --seconds 280 "
                f"--out {{out}}/{name}.json", 290)  # fmt: skip


STEPS = {
    "bookkeeping": Step("bookkeeping.py --out {out}", 90),
    "permutation": Step("permutation.py --out {out}", 90),
    "block_sparse": Step("block_sparse.py --rounds 7 --seconds 150 --out {out}/block_sparse.json", 160),
    "layers": Step(
        "layers.py --rounds 7 --seconds 150 --candidates 'auto,auto graphed,padded,padded known' "
        "--out {out}/layers.json",
        160,
    ),
    "layers_off": Step(
        "layers.py --rounds 7 --seconds 80 --sizes XS,Medium --skews 2 --candidates 'auto,padded,padded known' "
        "--out {out}/layers_off.json",
        90,
        {"MEGABLOCKS_HOPPER": "0"},
    ),
    "grouped_gemm": Step(
        "grouped_gemm.py --ops up,down,dx,dw1,dw2,layer --peers bmm,torch,quack --seconds 300 "
        "--out {out}/grouped_gemm.json",
        310,
    ),
    "mlp_impls": Step("mlp_impls.py --out {out}/mlp_impls.json", 180),
    "peers_1b": peers_of("peers_1b", "0,1,2"),
    "peers_7b": peers_of("peers_7b", "3,4,5", "scattermoe", "sparse"),
    "peers_30b": peers_of("peers_30b", "6,7,8"),
    "peers_120b": peers_of("peers_120b", "9,10,11"),
    "token_rounding": Step("token_rounding.py --rounds 7 --seconds 150 --out {out}/token_rounding.json", 160),
    "growth": Step("growth.py --rounds 7 --seconds 150 --out {out}/growth.json", 160),
    "quant": Step("quant.py --repeats 3 --out {out}", 120),
    "first_call": Step(f"first_call.py --impls {','.join(FIRST_IMPLS)} --out {{out}}/first_call.json", 200),
    "first_step": Step(
        f"first_call.py --impls fused --activations swiglu --size '{SCATTERMOE_SHAPE}' --out {{out}}/first_step.json",
        100,
    ),
}


class Line(NamedTuple):
    name: str
    goal: str
    step: str
    judge: Callable[[Result], Judged]


def outermost(pick: Callable[..., Any], found: Iterable[tuple[float, str]]) -> tuple[float, str]:
    """The smallest or largest figure, with its case. NaN and inf are errors."""
    found = list(found)
    for value, where in found:
        if not math.isfinite(value):
            raise ValueError(f"{value} at {where}")
    return pick(found)


def products(key: str, goal: float) -> Callable[[Result], Judged]:
    def judge(result: Result) -> Judged:
        s = result["summary"]
        if s["cases"] != 18:
            raise NotMeasured(f"{s['cases']} of 18 products measured")
        return f"{s[key]:.1%}", s[key] >= goal

    return judge


def over_peers(result: Result, shape: str, op: str) -> dict[str, float]:
    """The time of ours over the time of each peer."""
    found = next((r for r in result["summary"]["products"] if (r["shape"], r["op"]) == (shape, op)), None)
    if found is None:
        raise NotMeasured(f"{shape} {op} not measured")
    return found["time_of_ours_over"]


def grouped(*ops: str) -> Callable[[Result], Judged]:
    """The lowest speed relative to QuACK's or, if QuACK did not run, to cuBLAS's, each with its own goal."""

    def judge(result: Result) -> Judged:
        shares, peers = [], set()
        products = result["summary"]["products"]
        ran = {name for r in products for name in r["time_of_ours_over"] if name.startswith("quack")}
        failed = next((why for name, why in result["gate"]["failures"].items() if "/quack" in name), None)
        if failed and not ran:
            raise NotMeasured(f"QuACK is installed but failed: {failed}")
        for shape, op in ((shape, op) for shape in PRODUCT_SHAPES for op in ops):
            over = over_peers(result, shape, op)
            if ran and not ran & set(over):
                raise NotMeasured(f"QuACK not measured at {shape} {op}")  # if it ran, it sets the goal
            peer = next((name for name in over if name.startswith("quack")), "bmm")
            peers.add("QuACK" if peer != "bmm" else "bmm")
            speed, goal = 1 / over[peer], 0.97 if peer != "bmm" else 0.90
            shares.append((speed / goal, f"{speed:.3f} of {peer} at {shape} {op}"))
        worst = outermost(min, shares)
        return f"{worst[1]} ({', '.join(sorted(peers))})", worst[0] >= 1

    return judge


MANY = [name for name, (*_, experts, _) in PRODUCT_SHAPES.items() if experts >= MANY_EXPERTS]


def against_torch(result: Result) -> Judged:
    ratios = [(1 / over_peers(result, name, "layer")[how], f"{name} {how}")
              for name in MANY for how in ("torch", "torch-take")]  # fmt: skip
    least = outermost(min, ratios)
    return f"{least[0]:.2f}x ({least[1]})", least[0] >= 1.3


def bare_products(result: Result) -> Judged:
    """torch's rows are gathered beforehand. Ours gathers while it reads."""
    ratios = [(1 / over_peers(result, name, op)["torch"], f"{name} {op}") for name in MANY for op in ("up", "down")]
    least, most = outermost(min, ratios), outermost(max, ratios)
    return f"{least[0]:.2f}x ({least[1]}) to {most[0]:.2f}x ({most[1]})", True


def moves(result: Result) -> Judged:
    records = result["records"]
    if len(records) != PERMUTATION_RECORDS:
        raise NotMeasured(f"{len(records)} of {PERMUTATION_RECORDS} cases measured")
    least = outermost(min, ((r["of_copy"], f"{r['op']}, {r['shape']}") for r in records))
    return f"{least[0]:.2f} ({least[1]})", least[0] >= 0.85


def indices(result: Result) -> Judged:
    found = (r for r in result["records"] if r["shape"] == [24576, 128, 8] and r["name"] == "indices")
    first = next(found, None)
    if first is None or not first["launches"]:  # the profiler has no access to the GPU
        raise NotMeasured("no launch measured")
    return f"{first['us']:.1f} us, {first['launches']} launches", first["us"] <= 25 and first["launches"] <= 4


def over_padding(
    kind: str, wanted: Callable[[float], bool], goal: float, count: int, candidate: str = "auto"
) -> Callable[[Result], Judged]:
    """kind: "speed" (called from Python), "one_thread_speed" or "graph_speed"."""

    def judge(result: Result) -> Judged:
        found = []
        for size in SIZES:
            cases = [case for case in result["summary"]["sizes"][size]["skews"] if wanted(case["skew"])]
            if len(cases) != count:
                raise NotMeasured(f"{len(cases)} of {count} skews measured at {size}")
            found += [(case["candidates"][candidate][kind], f"{size} skew {case['skew']:g}") for case in cases]
        least = outermost(min, found)
        return f"{least[0]:.2f}x ({least[1]})", least[0] >= goal

    return judge


def quantized(result: Result, *, alone: bool) -> list[Result]:
    if len(result["records"]) != QUANT_RECORDS:
        raise NotMeasured(f"{len(result['records'])} of {QUANT_RECORDS} cases measured")
    return [r for r in result["records"] if alone == (r["quantised"] != "all three")]


def errors(bits: int, goal: float) -> Callable[[Result], Judged]:
    def judge(result: Result) -> Judged:
        cases = (r for r in quantized(result, alone=True) if r["bits"] == bits)
        worst = outermost(max, ((error, f"{r['quantised']} {w}") for r in cases for w, error in r["errors"].items()))
        return f"{worst[0]:.4f} ({worst[1]})", worst[0] <= goal

    return judge


def all_three(result: Result) -> Judged:
    found = []
    for bits in (8, 4):
        cases = [r for r in quantized(result, alone=False) if r["bits"] == bits]
        found.append(outermost(max, ((error, w) for r in cases for w, error in r["errors"].items())))
    return ", ".join(f"{bits} bits {e:.4f} ({w})" for bits, (e, w) in zip((8, 4), found, strict=True)), True


def saved(result: Result) -> Judged:
    off = max(abs(r["saved"] - r["predicted"]) / abs(r["predicted"]) for r in quantized(result, alone=True))
    return f"off by {off:.2%}", off <= 0.01


def starts(result: Result, cache: str, cases: list[tuple[str, str, str]]) -> list[Result]:
    found = [r for r in result["records"] if r["cache"] == cache]
    if sorted((r["impl"], r["activation"], r["size"]) for r in found) != sorted(cases):
        raise NotMeasured(f"{len(found)} {cache} starts measured, not the {len(cases)} asked for")
    return found


def first(cache: str, goal: float, cases: list[tuple[str, str, str]]) -> Callable[[Result], Judged]:
    def judge(result: Result) -> Judged:
        found = starts(result, cache, cases)
        slowest = outermost(max, ((r["first_s"], f"{r['impl']} {r['activation']}") for r in found))
        return f"{slowest[0]:.2f} s ({slowest[1]})", slowest[0] <= goal

    return judge


def new_counts(cases: list[tuple[str, str, str]]) -> Callable[[Result], Judged]:
    def judge(result: Result) -> Judged:
        found = starts(result, "cold", cases) + starts(result, "warm", cases)
        for r in found:
            if not len(r["compiled"]) + r["from_disk"]:
                raise ValueError(f"no kernel counted in the first step of {r['impl']} {r['activation']}")
            if not r["new_counts"]:
                raise NotMeasured(f"no other token count measured with {r['impl']} {r['activation']}")
        late = sorted({name for r in found for names in r["new_counts"].values() for name in names})
        return ", ".join(late) or "none", not late

    return judge


def picks(result: Result) -> Judged:
    if result["summary"]["missing"]:
        raise NotMeasured(f"not measured: {', '.join(result['summary']['missing'])}")
    ratios = [
        (speed(r["times"], f"graph/{impl}", f"graph/{r['auto']}"), f"{impl} at {r['case']}")
        for r in result["records"] for impl in r["graph_ms"]
    ]  # fmt: skip
    worst = outermost(max, ratios)
    return f"{worst[0]:.2f} of the fastest's time ({worst[1]})", worst[0] <= 1.03


def every_shape(result: Result) -> dict[str, dict[str, float]]:
    """fused compared with SonicMoE, by shape of the paper. Both candidates of SonicMoE must have been measured."""
    both = [r for r in result["records"] if all(r["times"].get(f"queued/{name}") for name in SONICMOE)]
    found = {r["shape"]: against_sonicmoe(r) for r in both}
    if missing := [shape for shape in PAPER if "queued" not in found.get(shape, {})]:
        raise NotMeasured(f"{len(missing)} of {len(PAPER)} shapes not measured: {', '.join(missing)}")
    return {shape: found[shape] for shape in PAPER}


def least_over_sonicmoe(result: Result) -> Judged:
    least = outermost(min, ((row["queued"], shape) for shape, row in every_shape(result).items()))
    return f"{least[0]:.3f}x ({least[1]})", least[0] >= 0.98


def mean_over_sonicmoe(result: Result) -> Judged:
    shapes = every_shape(result).values()
    queued, eager = (geometric_mean([row[how] for row in shapes]) for how in ("queued", "eager"))
    return f"{queued:.3f}x, eager {eager:.3f}x", queued >= 1.10


def held_over_sonicmoe(name: str, goal: float) -> Callable[[Result], Judged]:
    def judge(result: Result) -> Judged:
        held = {shape: row.get(f"held, {name}", 0.0) for shape, row in every_shape(result).items()}
        if missing := [shape for shape, ratio in held.items() if ratio <= 0]:  # it freed other memory
            raise NotMeasured(f"not measured at {', '.join(missing)}")
        most = outermost(max, ((ratio, shape) for shape, ratio in held.items()))
        return f"{most[0]:.2f} ({most[1]})", most[0] <= goal

    return judge


def beside_scattermoe(result: Result) -> Result:
    found = next((r for r in result["records"] if r["shape"] == SCATTERMOE_SHAPE), None)
    if found is None:
        raise NotMeasured(f"{SCATTERMOE_SHAPE} not measured")
    return found


def held_beside_scattermoe(result: Result) -> Judged:
    memory = beside_scattermoe(result)["memory"]
    names = ("fused", "sparse", "scattermoe", "sonicmoe")
    if missing := [name for name in names if "held" not in memory.get(name, {})]:
        raise NotMeasured(f"not measured: {', '.join(missing)}")
    return ", ".join(f"{name} {memory[name]['held'] / 2**20:.0f}" for name in names) + " MiB", True


def over_scattermoe(result: Result) -> Judged:
    ratio = speed(beside_scattermoe(result)["times"], "queued/fused", "queued/scattermoe")
    if ratio is None:
        raise NotMeasured("not measured")
    return f"{ratio:.2f}x", ratio >= 2.0


def rounding(shape: str) -> Callable[[Result], Judged]:
    def judge(result: Result) -> Judged:
        rows = result["summary"]["shapes"][shape]
        ratio, most = rows["nearest"]["queued_speed"], rows.get("whole", {}).get("queued_speed")
        goal = ROUNDING_GOALS[shape]  # whole tiles alone may win less than the goal
        met = ratio >= goal or (math.isfinite(ratio) and most is not None and most < goal)
        return f"{ratio:.3f}x, whole tiles alone {'not measured' if most is None else f'{most:.3f}x'}", met

    return judge


def within_a_tile(result: Result) -> Judged:
    shapes = result["summary"]["shapes"]
    if missing := set(ROUNDING_GOALS) - set(shapes):
        raise NotMeasured(f"not measured: {', '.join(missing)}")
    if missing := [shape for shape, rows in shapes.items() if "nearest" not in rows]:
        raise NotMeasured(f"nearest not measured at {', '.join(missing)}")
    most = outermost(max, ((row["deviation"], f"{shape} {rule}") for shape, rows in shapes.items()
                           for rule, row in rows.items()))  # fmt: skip
    return f"{most[0]} rows ({most[1]})", most[0] <= TILE


def growth(
    series: str, points: tuple[int, ...], stray: Callable[[list[Result]], float | None]
) -> Callable[..., Judged]:
    def judge(result: Result) -> Judged:
        rows = result["summary"]["curves"].get(series, {}).get("fused", [])
        value = stray(rows) if tuple(row[series] for row in rows) == points else None
        if value is None:
            raise NotMeasured("not all points measured")
        return f"{value:.1%}", value <= 0.10

    return judge


def without_hopper(result: Result) -> Judged:
    sizes = result["summary"]["sizes"]
    speeds = {size: sizes[size]["skews"][0]["candidates"]["auto"]["graph_speed"] for size in ("XS", "Medium")}
    return ", ".join(f"{size} {value:.2f}x" for size, value in speeds.items()), True


LINES = (
    Line("18 products, mean of cuBLAS's speed", ">= 98.6 %", "block_sparse", products("mean", 0.986)),
    Line("18 products, least", ">= 91 %", "block_sparse", products("least", 0.91)),
    Line("Zipf, per block, of uniform", ">= 90 %", "block_sparse", products("least per block under Zipf", 0.90)),
    Line("grouped forward of QuACK's speed", ">= 0.97, bmm 0.90", "grouped_gemm", grouped("up", "down")),
    Line("grouped dX", ">= 0.97, bmm 0.90", "grouped_gemm", grouped("dx")),
    Line("grouped dW", ">= 0.97, bmm 0.90", "grouped_gemm", grouped("dw1", "dw2")),
    Line("gather, products, scatter over torch's, E >= 128", ">= 1.3x", "grouped_gemm", against_torch),
    Line("the same products alone, rows gathered before", "a figure", "grouped_gemm", bare_products),
    Line("gather, scatter and gradients, of a copy", ">= 0.85", "permutation", moves),
    Line("indices of 196,608 ids, 128 experts", "<= 25 us, 4 launches", "bookkeeping", indices),
    Line("dMoE over padded, skew >= 2, GPU", ">= 1.38x", "layers",
         over_padding("graph_speed", lambda skew: skew >= GOAL_FROM, GOAL, 3)),
    Line("dMoE over padded, skew >= 2, graphed callables", ">= 1.38x", "layers",
         over_padding("speed", lambda skew: skew >= GOAL_FROM, GOAL, 3, GRAPHED)),
    Line("the same, eager, which the host bounds", "a figure", "layers",
         over_padding("speed", lambda skew: skew >= GOAL_FROM, -math.inf, 3)),
    Line("the same, backward in the caller's thread", "a figure", "layers",
         over_padding("one_thread_speed", lambda skew: skew >= GOAL_FROM, -math.inf, 3)),
    Line("dMoE over padded, skew 1, GPU", ">= 0.95x", "layers",
         over_padding("graph_speed", lambda skew: skew == 1, LEAST_AT_ONE, 1)),
    Line("dMoE over padded, skew 1, eager", ">= 0.95x", "layers",
         over_padding("speed", lambda skew: skew == 1, LEAST_AT_ONE, 1)),
    Line("one quantizer's gradient errors, 8 bits", "<= 0.01", "quant", errors(8, 1e-2)),
    Line("one quantizer's gradient errors, 4 bits", "<= 0.1", "quant", errors(4, 1e-1)),
    Line("all three quantizers' together", "a figure", "quant", all_three),
    Line("bytes saved, of those predicted", "within 1 %", "quant", saved),
    Line("first call at a new shape, cold", "<= 10 s", "first_call", first("cold", 10, FIRST_CALLS)),
    Line("kernels compiled at a new token count", "none", "first_call", new_counts(FIRST_CALLS)),
    Line("mlp_impl=auto of the fastest impl's time", "<= 1.03", "mlp_impls", picks),
    Line("Hopper's kernels off, over padded at skew 2", "a figure", "layers_off", without_hopper),
    Line("fused over SonicMoE, least of its paper's 12 shapes", ">= 0.98x", "peers", least_over_sonicmoe),
    Line("fused over SonicMoE, geometric mean", ">= 1.10x", "peers", mean_over_sonicmoe),
    Line(f"fused over ScatterMoE at {SCATTERMOE_SHAPE}", ">= 2.0x", "peers", over_scattermoe),
    Line("bytes kept for backward, of SonicMoE's", "<= 1", "peers", held_over_sonicmoe("fused", 1.0)),
    Line("the same, up-projection recomputed", "a figure", "peers", held_over_sonicmoe("fused recompute", math.inf)),
    Line("the same, pre-activations in 8 bits", "a figure", "peers", held_over_sonicmoe("fused 8 bits", math.inf)),
    Line("bytes kept there, sparse and ScatterMoE beside", "a figure", "peers", held_beside_scattermoe),
    *(Line(f"token rounding over top-k at {shape}", f">= {goal}x or less to win", "token_rounding", rounding(shape))
      for shape, goal in ROUNDING_GOALS.items()),
    Line("token rounding moves an expert by at most", f"{TILE} rows", "token_rounding", within_a_tile),
    Line("time per token from 32,768 to 262,144", "within 10 %", "growth", growth("tokens", TOKENS, flatness)),
    Line("16 to 512 experts, above tiles and traffic of 8's", "<= 10 %", "growth",
         growth("experts", EXPERTS, over_model)),
    Line("first training step at a new shape, cold", "<= 15 s", "first_step", first("cold", 15, FIRST_STEP)),
    Line("the same, warm cache", "<= 1 s", "first_step", first("warm", 1, FIRST_STEP)),
    Line("kernels compiled by it at a new token count", "none", "first_step", new_counts(FIRST_STEP)),
)  # fmt: skip

ELSEWHERE = (
    ("sdd, dsd, dds on random patterns, every transposition", "tests/ops/test_sparse_products.py"),
    ("each mlp_impl launches its own kernels; no host synchronization; far rows", "tests/moe/test_gpu.py"),
    ("every kernel compiles for sm_80 to sm_120 within shared memory", "tests/ops/test_compile.py"),
    ("memcheck and racecheck", "tests/gpu/test_sanitize.py"),
    ("every rule of token rounding within one tile an expert", "tests/moe/test_token_rounding.py"),
    ("Mixture of Attention trains and equals its dense reference", "tests/moe/test_mixture_of_attention.py"),
    ("500 steps of the XS dMoE, fused and sparse: loss curves, tokens/s", "scripts/compare_runs.py"),
    ("memory of whole layers over load skew, and routers' skews", "benchmarks/layers.py, drawn by plot.py"),
    ("time per token below 32,768 tokens", "benchmarks/growth.py, drawn by plot.py"),
)
"""What the kernels must also do, and the test or script that proves it."""


class Row(NamedTuple):
    name: str
    goal: str
    measured: str
    verdict: str
    gate: str
    file: str


def result_of(step: str, folder: Path) -> Result:
    """The result of a step. The step "peers" merges the shapes of all DIR/peers_*.json."""
    if step != "peers":
        return read_result(folder / f"{step}.json")
    parts = {path.name: read_result(path) for path in sorted(folder.glob("peers_*.json"))}
    if not parts:
        raise FileNotFoundError(folder)
    one = merged(parts)
    return one | {"gate": one["gate"].to_dict(), "void": one["gate"].void, "summary": {}}


def fewest_rounds(result: Result) -> int:
    """The fewest rounds of a candidate, from its times or, if the records hold only medians, from the summary."""
    rounds = [len(times) for r in result["records"] for times in r.get("times", {}).values()]
    return min(rounds, default=result["summary"].get("rounds", 0))


def judge(line: Line, folder: Path) -> Row:
    """The row of a line. Only a complete, green, valid result can meet it; otherwise the row says what is wrong."""
    gate, said, met, verdict = "–", "", False, "missed"
    try:
        result = result_of(line.step, folder)
        gate = "green" if result["gate"]["green"] is True else "RED"
        if gate == "RED":
            said = f"red: {', '.join(result['gate']['red']) or 'nothing checked'}"
        elif (gpu := result["environment"]["gpu"]) != GPU:
            said = f"measured on {gpu}, not on an {GPU}"
        elif result["void"]:
            said = f"void: {'; '.join(result['void'])}"
        elif line.step not in UNTIMED and (rounds := fewest_rounds(result)) < FEWEST_ROUNDS:
            said = f"{rounds} rounds, {FEWEST_ROUNDS} are asked for"
        else:
            said, met = line.judge(result)
    except FileNotFoundError:
        said, verdict = "no result", "not run"
    except NotMeasured as e:
        said, verdict = str(e), "not run"
    except Exception as e:  # any part of a result may be missing
        said = f"{type(e).__name__}: {e}".replace(f"{folder}/", "")
    file = "peers_*.json" if line.step == "peers" else f"{line.step}.json"
    return Row(line.name, line.goal, said[:100], "met" if met is True else verdict, gate, file)


def table(rows: list[Row]) -> str:
    head = Row("line", "goal", "measured", "verdict", "gate", "file")
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    lines = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
             for row in (head, *rows)]  # fmt: skip
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    counts = Counter(row.verdict for row in rows)
    told = ", ".join(f"{counts[verdict]} {verdict}" for verdict in ("met", "missed", "not run"))
    elsewhere = [f"- {what}: {where}" for what, where in ELSEWHERE]
    return "\n".join([lines[0], rule, *lines[1:], f"{told}, of {len(rows)}", "", "Not in the table:", *elsewhere])


def run(name: str, folder: Path, seconds: float) -> str:
    """Run a benchmark for at most `seconds`. Returns how it ended."""
    step = STEPS[name]
    script, *options = shlex.split(step.command.format(out=shlex.quote(str(folder))))
    (folder / f"{name}.json").unlink(missing_ok=True)  # an old result must not count for this run
    with open(folder / f"{name}.log", "w") as log:
        process = subprocess.Popen(
            [sys.executable, str(HERE / script), *options], stdout=log, stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **step.environment}, start_new_session=True,
        )  # fmt: skip
        try:
            return f"exit {process.wait(timeout=seconds)}"
        except subprocess.TimeoutExpired:
            return f"stopped after {seconds:.0f} s"
        finally:
            end_session(process, signal.SIGINT, PATIENCE_S)  # Ctrl-C, at which it writes its results


def main() -> int:
    parser = option_parser(__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/acceptance"), metavar="DIR")
    parser.add_argument("--seconds", type=float, default=570.0, help="for the whole run")
    add_names(parser, "--only", STEPS, help="only these benchmarks")
    parser.add_argument("--table", action="store_true", help="run nothing, judge the results in DIR")
    options = parser.parse_args()
    names = [] if options.table else options.only
    if dry_run():
        for name in names:
            step = STEPS[name]
            setting = "".join(f"{key}={value} " for key, value in step.environment.items())
            print(f"{step.seconds:4d} s  {setting}python benchmarks/{step.command.format(out=options.out)}")
        return 0
    if names:
        need_gpu()
        # A shell without job control starts background processes with SIGINT ignored, which benchmarks would inherit.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # leaves through `run`, which stops its benchmark
    options.out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + options.seconds

    def judged() -> list[Row]:
        rows = [judge(line, options.out) for line in LINES]
        write_durably(options.out / "acceptance.md", table(rows) + "\n")
        return rows

    for name in names:
        began = time.monotonic()
        left = min(STEPS[name].seconds, end - began - 10)  # 10 s are reserved for stopping the benchmark
        ended = run(name, options.out, left) if left > 1 else "no time left"
        print(f"{name}: {ended}, {time.monotonic() - began:.0f} s", flush=True)
        judged()
    rows = judged()
    print(table(rows))
    return 0 if all(row.verdict == "met" for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
