"""Whole dMoE layers over load skew, compared with our own capacity layer that pads to the fullest expert.

    python benchmarks/layers.py [--sizes XS,Small,Medium] [--skews 1,1.5,2,4,8] [--candidates …]

Forward and backward, top-1, 64 experts, bf16, gelu, no auxiliary loss. Skew is max/mean load: the fullest expert has
exactly skew times the mean, and the loads of the others follow a power law (`skewed`).

    padded        MoE(capacity_factor=0); it reads the load of the fullest expert from the GPU, which synchronizes
    padded known  MoE(capacity_factor=skew); the same capacity without a synchronization, so a CUDA graph can hold it
    auto, sparse, grouped, scatter, fused   dMoE with that mlp_impl
    auto graphed  dMoE through torch.cuda.make_graphed_callables
    torch, scattermoe, sonicmoe   peers, if they are installed; see megablocks/tool/peers.py

Each candidate is timed in three ways. `eager` is a call from Python, compared with `padded`. `one thread` is the same
with backward in the caller's thread, as in the training driver (torch.autograd.set_multithreading_enabled(False)).
`graph` replays a CUDA graph, which has no launch overhead, and is compared with `padded known`. `held` is the memory
that the forward leaves allocated, output included. `peak` is the largest memory in a step, without weights and inputs.
The output and the gradients of every candidate are first compared with float32. Writes results/<gpu>/layers.json, which
benchmarks/plot.py draws. DRY_RUN=1 prints the cases.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from statistics import median
from typing import Any

import torch
from children import add_names, parser_of, run_benchmark
from layer_candidates import GRAPHED, OURS, PEER_LAYERS, PEERS, SIZES, Problem, Shape, Step, kind, problem_of, select
from layer_timing import check_and_time
from measure import Gate, cells, dry_run, emit, gpu_name, on_gpu, result_path, speed

from megablocks.moe.router import make_router

SKEWS = (1.0, 1.5, 2.0, 4.0, 8.0)
PADDED, KNOWN = "padded", "padded known"
TRAINED_LOAD = Path(__file__).parent / "results/h200/dmoe_46m/expert_load.csv"


def trained_skews() -> list[float]:
    """max/mean load of each layer of a trained dMoE-XS."""
    fullest: dict[str, float] = {}
    with open(TRAINED_LOAD, newline="") as file:
        for row in csv.DictReader(file):
            fullest[row["layer"]] = max(fullest.get(row["layer"], 0.0), float(row["tokens_over_mean"]))
    return list(fullest.values())


def makers(problem: Problem, skew: float, wanted: Collection[str]) -> dict[str, Callable[[], Step]]:
    made = {PADDED: problem.maker(capacity_factor=0), KNOWN: problem.maker(capacity_factor=skew)}
    made |= problem.ours()
    if on_gpu():
        made[GRAPHED] = lambda: problem.layer(problem.config(), graphed=True)
    return select(made | problem.peers(), wanted)


def fresh_skew(shape: Shape, device: str) -> float:
    """max/mean load of a freshly initialized router on random data."""
    torch.manual_seed(0)
    router = make_router(shape.config(), device=device)
    with torch.no_grad():
        load = router(torch.randn(shape.tokens, shape.hidden, device=device)).metrics["tokens_per_expert"]
    return float(load.max() / load.double().mean())


def run_job(job: str, struck: set[str], args: argparse.Namespace) -> None:
    size, skew = job.split("/")
    problem = problem_of(job)
    load = torch.bincount(problem.ids.flatten(), minlength=problem.shape.experts)
    made = makers(problem, float(skew), args.candidates)
    times, memory = check_and_time(job, problem, made, struck, args.rounds, graphs=(KNOWN, *OURS), one_thread=True)
    if not times:
        return
    emit(size=size, skew=float(load.max() / load.double().mean()), fresh_skew=fresh_skew(problem.shape, problem.device),
         flops=3 * problem.shape.forward_flops, fullest=int(load.max()), least=int(load.min()), memory=memory,
         times=times)  # fmt: skip


def row_of(record: dict[str, Any], name: str) -> dict[str, Any]:
    """Milliseconds, speeds over padding and memory of one candidate; None if a time is missing."""
    times = record["times"]
    row: dict[str, Any] = {"forward_ms": median(times[f"forward/{name}"]) / 1e3}
    for how, base in (("eager", PADDED), ("one thread", PADDED), ("graph", KNOWN)):
        prefix = "" if how == "eager" else how.replace(" ", "_") + "_"
        taken = times.get(f"{how}/{name}")
        row[f"{prefix}ms"] = median(taken) / 1e3 if taken else None
        row[f"{prefix}speed"] = speed(times, f"{how}/{name}", f"{how}/{base}")
    return row | record["memory"].get(name, {})


def summarise(records: list[dict[str, Any]], gate: Gate) -> dict[str, Any]:
    """Print the table. Returns the rows by size, skew and candidate; nothing if the gate is red."""
    if not gate.report():
        return {}
    print("\nms eager, one thread, graph, forward; TFLOP/s; speed over padding, likewise; MiB held, peak")
    sizes: dict[str, Any] = {}
    for r in records:
        print(f"{r['size']} skew {r['skew']:.2f} (fullest {r['fullest']}, least {r['least']} tokens)")
        names = [n.removeprefix("eager/") for n in r["times"] if n.startswith("eager/")]
        case = {name: row_of(r, name) for name in names}
        for name, row in case.items():
            ms = [row[key] for key in ("ms", "one_thread_ms", "graph_ms", "forward_ms")]
            ratios = [row[key] for key in ("speed", "one_thread_speed", "graph_speed")]
            space = [row[key] / 2**20 if key in row else None for key in ("held", "peak")]
            print(f"  {name:13s} {cells(ms, '8.3f')} {r['flops'] / row['ms'] / 1e9:5.0f} TFLOP/s "
                  f"{cells(ratios, '5.2f', '×')} {cells(space, '6.0f')}")  # fmt: skip
        entry = sizes.setdefault(r["size"], {"fresh_skew": r["fresh_skew"], "skews": []})
        entry["skews"].append({"skew": r["skew"], "candidates": case})
    return {"sizes": sizes, "trained_skews": trained_skews()}


def main() -> int:
    parser = parser_of(__doc__, seconds=300.0)
    add_names(parser, "--sizes", SIZES, "XS,Small,Medium", help=f"of {', '.join(SIZES)}")
    parser.add_argument("--skews", default=",".join(f"{skew:g}" for skew in SKEWS))
    known = (PADDED, KNOWN, *OURS, GRAPHED, *PEER_LAYERS)
    add_names(parser, "--candidates", known, help="only these, by name")
    args = parser.parse_args()
    jobs = [f"{size}/{skew}" for size in args.sizes for skew in args.skews.split(",")]
    if dry_run():
        for job in jobs:
            size, skew = job.split("/")
            print(f"{size:7} skew {skew:4} T, H, I, E = {SIZES[size]}")
        return 0
    return run_benchmark(
        args, "layers", jobs, run_job, toy=args.sizes == ["toy"],
        quiet=120.0, budget=240.0,  # quiet: a peer may build a CUDA extension on first use
        ours=lambda key: key.count("/") < 2 or kind(key.rsplit("/", 1)[1]) not in PEERS,  # a lost job is ours, too
        summarise=summarise, out=args.out or result_path("layers", gpu_name()),
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
