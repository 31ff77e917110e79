"""Whole dMoE layers against our own capacity layer padded to the fullest expert, over load skew.

    python benchmarks/layers.py [--sizes XS,Small,Medium] [--skews 1,1.5,2,4,8] [--candidates …] [--profile XS/2]

Forward and backward, top-1, 64 experts, bf16, gelu, no auxiliary loss. Skew is max/mean load: the fullest expert has
exactly skew times the mean, the others fall off as a power law (`megablocks.testing.routings.skewed`).

    padded        MoE(capacity_factor=0): asks the device for the fullest expert's load, which waits for it
    padded known  MoE(capacity_factor=skew): the same places without asking, so that a CUDA graph can hold it
    auto, sparse, grouped, scatter, fused   dMoE with that mlp_impl
    auto graphed  dMoE through torch.cuda.make_graphed_callables, which takes what never asks the device
    torch, scattermoe, sonicmoe   peers, if they import; see layer_candidates.py

Each is timed as a user runs it (`eager`), the same with backward in the caller's thread (`one thread`, as the training
driver asks by torch.autograd.set_multithreading_enabled(False)), and as a CUDA graph (`graph`), which leaves out what
launching costs: the eager ratios are against `padded`, the graph's against `padded known`. `held` is what the forward
leaves allocated, output included, `peak` the most in a step, weights and inputs excluded. Every candidate's output and
gradients are compared with float32 first. Writes results/<gpu>/layers.json; benchmarks/plot.py draws it. DRY_RUN=1
prints the cases.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from children import Runner, chosen, parser_of, run_benchmark, run_child
from layer_candidates import (
    GOAL,
    GOAL_FROM,
    GRAPHED,
    LEAST_AT_ONE,
    OURS,
    PEER_LAYERS,
    PEERS,
    SIZES,
    Problem,
    Shape,
    Step,
    kind,
    select,
    shape_of,
)
from layer_timing import check_and_time, profile
from measure import Gate, dry_run, emit, gpu_name, need_gpu, on_gpu, result_path, speed

SKEWS = (1.0, 1.5, 2.0, 4.0, 8.0)
PADDED, KNOWN = "padded", "padded known"
TRAINED_LOAD = Path(__file__).parent / "results/h200/dmoe_46m/expert_load.csv"


def trained_skews() -> list[float]:
    """max/mean load of each layer of the trained dMoE-XS."""
    import csv

    fullest: dict[str, float] = {}
    with open(TRAINED_LOAD, newline="") as file:
        for row in csv.DictReader(file):
            fullest[row["layer"]] = max(fullest.get(row["layer"], 0.0), float(row["tokens_over_mean"]))
    return list(fullest.values())


def problem_of(job: str) -> Problem:
    from megablocks.testing.routings import skewed

    size, skew = job.split("/")
    shape = shape_of(size)
    ids = skewed(shape.tokens, shape.experts, shape.top_k, float(skew))
    return Problem(shape, ids, device="cuda" if on_gpu() else "cpu")


def makers(problem: Problem, skew: float, wanted: str) -> dict[str, Callable[[], Step]]:
    def ours(**changes: Any) -> Callable[[], Step]:
        return lambda: problem.layer(problem.config(**changes))

    made = {PADDED: ours(capacity_factor=0), KNOWN: ours(capacity_factor=skew)}
    made |= problem.ours()
    if on_gpu():
        made[GRAPHED] = lambda: problem.layer(problem.config(), graphed=True)
    return select(made | problem.peers(), wanted)


def fresh_skew(shape: Shape, device: str) -> float:
    """max/mean load of a freshly initialised router on random data."""
    import torch

    from megablocks import MoEConfig
    from megablocks.routers import make_router

    torch.manual_seed(0)
    config = MoEConfig(
        hidden_size=shape.hidden, ffn_hidden_size=shape.width, num_experts=shape.experts, top_k=shape.top_k
    )
    router = make_router(config, device=device)
    with torch.no_grad():
        load = router(torch.randn(shape.tokens, shape.hidden, device=device)).metrics["tokens_per_expert"]
    return float(load.max() / load.double().mean())


def run_job(job: str, struck: set[str], args: argparse.Namespace) -> None:
    import torch

    size, skew = job.split("/")
    problem = problem_of(job)
    load = torch.bincount(problem.ids.flatten(), minlength=problem.shape.experts)
    made = makers(problem, float(skew), args.candidates)
    times, memory = check_and_time(job, problem, made, struck, args.rounds, graphs=(KNOWN, *OURS), one_thread=True)
    if not times:
        return
    flops = 3 * problem.shape.forward_flops
    skew_given = float(load.max() / load.double().mean())
    fresh = fresh_skew(problem.shape, problem.device)
    emit(size=size, skew=skew_given, fresh_skew=fresh, flops=flops, fullest=int(load.max()), least=int(load.min()),
         memory=memory, times=times)  # fmt: skip


def summarise(records: list[dict[str, Any]], gate: Gate) -> dict[str, Any]:
    """Print the curves; return ratios by size, candidate and skew. A red gate prints no speed-up."""
    gate.report()
    if not gate.green:
        return {}
    print("\nms a step, TFLOP/s; speed over padding eager, in one thread, as a graph; MiB held, peak")
    sizes: dict[str, Any] = {}
    for r in records:
        times = r["times"]
        print(f"{r['size']} skew {r['skew']:.2f} (fullest {r['fullest']}, least {r['least']} tokens)")
        case: dict[str, Any] = {}
        for name in [n.removeprefix("eager/") for n in times if n.startswith("eager/")]:
            eager = median(times[f"eager/{name}"]) / 1e3
            row: dict[str, Any] = {
                "ms": eager,
                "forward_ms": median(times[f"forward/{name}"]) / 1e3,
                "speed": speed(times, f"eager/{name}", f"eager/{PADDED}"),
                "one_thread_ms": median(times[f"one thread/{name}"]) / 1e3 if f"one thread/{name}" in times else None,
                "one_thread_speed": speed(times, f"one thread/{name}", f"one thread/{PADDED}"),
                "graph_ms": median(times[f"graph/{name}"]) / 1e3 if f"graph/{name}" in times else None,
                "graph_speed": speed(times, f"graph/{name}", f"graph/{KNOWN}"),
                **r["memory"].get(name, {}),
            }
            case[name] = row
            ratios = ("speed", "one_thread_speed", "graph_speed")
            shown = [f"{row[key]:5.2f}×" if row[key] else "     –" for key in ratios]
            space = [f"{row[key] / 2**20:6.0f}" if key in row else "     –" for key in ("held", "peak")]
            ms = [f"{row[key]:7.3f}" if row[key] else "      –" for key in ("one_thread_ms", "graph_ms", "forward_ms")]
            print(f"  {name:13s} {eager:7.3f} (one thread {ms[0]}, graph {ms[1]}, forward {ms[2]}) "
                  f"{r['flops'] / eager / 1e9:5.0f} TFLOP/s {' '.join(shown)} {' '.join(space)}")  # fmt: skip
        entry = sizes.setdefault(r["size"], {"fresh_skew": r["fresh_skew"], "skews": []})
        entry["skews"].append({"skew": r["skew"], "candidates": case})
    short = shortfalls(sizes)
    print(f"goal, auto as a graph and {GRAPHED}: >= {GOAL}x from skew {GOAL_FROM:g}, >= {LEAST_AT_ONE}x at 1: "
          f"{'met' if not short else 'missed: ' + '; '.join(short)}")  # fmt: skip
    return {"sizes": sizes, "trained_skews": trained_skews(), "missed": short}


def shortfalls(sizes: dict[str, Any]) -> list[str]:
    """Where dMoE falls short of the goals, as a graph or called from Python; a case without it counts as short."""
    short = []
    for size, entry in sizes.items():
        for case in entry["skews"]:
            goal = GOAL if case["skew"] >= GOAL_FROM else LEAST_AT_ONE if case["skew"] == 1 else 0.0
            for name, how in (("auto", "graph_speed"), (GRAPHED, "speed")):
                got = case["candidates"].get(name, {}).get(how)
                if got is None or got < goal:
                    short.append(f"{size} skew {case['skew']:g} {name} {'none' if got is None else f'{got:.2f}'}")
    return short


def main() -> int:
    parser = parser_of(__doc__, seconds=300.0)
    parser.add_argument("--sizes", default="XS,Small,Medium", help=f"of {', '.join(SIZES)}")
    parser.add_argument("--skews", default=",".join(f"{skew:g}" for skew in SKEWS))
    parser.add_argument("--candidates", default="", help="these alone, by name")
    parser.add_argument("--profile", default="", metavar="SIZE/SKEW,…", help="kernel times of these cases instead")
    parser.add_argument("--rows", type=int, default=24, help="of a profile's table")
    args = parser.parse_args()
    sizes = chosen(parser, "--sizes", args.sizes, SIZES)
    chosen(parser, "--candidates", args.candidates, (PADDED, KNOWN, *OURS, GRAPHED, *PEER_LAYERS))
    jobs = [f"{size}/{skew}" for size in sizes for skew in args.skews.split(",")]
    if dry_run():
        for job in jobs:
            size, skew = job.split("/")
            print(f"{size:7} skew {skew:4} T, H, I, E = {SIZES[size]}")
        return 0
    if args.child:
        return run_child(args, run_job)
    need_gpu(toy=sizes == ["toy"] and not args.profile)
    if args.profile:
        for job in args.profile.split(","):
            problem = problem_of(job)
            profile(job, makers(problem, float(job.split("/")[1]), args.candidates), args.rows)
        return 0
    flags = ["--rounds", str(args.rounds), "--candidates", args.candidates]
    runner = Runner(__file__, flags, time.monotonic() + args.seconds)
    return run_benchmark(
        runner, "layers", jobs,
        lambda: runner.run(jobs, quiet=120.0, budget=240.0),  # quiet: a peer may build a CUDA extension on first use
        # A lost job is ours as well: something of it was not measured.
        ours=lambda key: key.count("/") < 2 or kind(key.rsplit("/", 1)[1]) not in PEERS,
        summarise=lambda records, gate: (summarise(records, gate), []),
        out=args.out or result_path("layers", gpu_name()),
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
