"""Token rounding beside plain top-k: forward and backward of the fused layer, and the rows that partial tiles waste.

    python benchmarks/token_rounding.py [--rules nearest,…] [--out FILE.json]

SwiGLU, bf16, random routing, router and rounding included. A product computes whole tiles of 128 rows: the last one of
an expert is filled with rows that nobody asked for, but where the load is a multiple of 128. Rounding makes it one, by
at most one tile an expert. In turn, in one process a shape: plain top-k and each rule, with their launches in the GPU's
queue, from CUDA graphs, and called from Python; each compared with float32 under its own routing first. Tokens that
rounding adds are computed and those that it drops are not, so `rows` differ: a step is compared, not a row.

`whole` is plain top-k over other ids, by which every expert has equally many rows, a multiple of 128: what partial
tiles cost a step of plain top-k in time, not in rows, and so the most that a rule could win by as many rows.

Goals, queued: 1.08 at 16384,1536; 1024/128/2 and 1.12 at 16384,4096; 1024/256/4, or partial tiles cost less than that.
Writes results/<gpu>/token_rounding.json. DRY_RUN=1 prints the cases.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

from children import Runner, chosen, parser_of, run_benchmark, run_child, struck_off
from layer_candidates import Problem, Shape, labelled, random_ids
from layer_timing import timers_of
from measure import Gate, dry_run, emit, gpu_name, interleave, need_gpu, on_gpu, result_path, speed

from megablocks.ops.grouped import TILE_ROWS as TILE

GOALS = {"16384,1536; 1024/128/2": 1.08, "16384,4096; 1024/256/4": 1.12}
TOY = "512,32; 64/4/2"
RULES = ("nearest", "balanced", "up", "down")
"""Those that draw nothing, so that a layer and its truth route alike."""
PLAIN, WHOLE = "plain", "whole"
HOW = ("queued", "graph", "eager")


def labels(toy: bool) -> list[str]:
    return [TOY] if toy else list(GOALS)


def even_ids(shape: Shape, device: str) -> Any:
    """(T, K) different experts a token in random order, each equally often; E must divide T, and K divide E."""
    import torch

    tokens, experts, top_k = shape.tokens, shape.experts, shape.top_k
    assert tokens % experts == 0 and experts % top_k == 0 and tokens // experts * top_k % TILE == 0, shape.label
    generator = torch.Generator(device).manual_seed(3)
    first = torch.randperm(tokens, device=device, generator=generator) % experts
    return (first.unsqueeze(1) + torch.arange(top_k, device=device) * (experts // top_k)) % experts


def loads(problem: Problem) -> tuple[Any, Any]:
    """(E,) rows that each expert computes, and how many tokens chose it."""
    metrics = problem.routing().metrics
    return metrics.get("rounded_per_expert", metrics["tokens_per_expert"]), metrics["tokens_per_expert"]


def wasted(load: Any) -> float:
    """Share of the computed rows, whole tiles an expert, that hold no token."""
    rows = int(((load + TILE - 1) // TILE * TILE).sum())
    return 1 - int(load.sum()) / rows


def run_job(job: str, struck: set[str], args: argparse.Namespace) -> None:
    shape, device = labelled(labels(args.toy)[int(job)]), "cuda" if on_gpu() else "cpu"
    timers: dict[str, Callable[[], float]] = {}
    rows: dict[str, dict[str, Any]] = {}
    for rule in (PLAIN, WHOLE, *args.rules.split(",")):
        name = f"fused {rule}"
        if struck_off(f"{job}/{name}", struck):
            continue
        ids = even_ids(shape, device) if rule == WHOLE else random_ids(shape, device)
        settings = {} if rule in (PLAIN, WHOLE) else {"token_rounding": rule}
        problem = Problem(shape, ids, device=device, **settings)
        mine, memory = timers_of(job, problem, name, problem.ours()["fused"], graph=True, queued=True)
        problem.forget_truth()
        if mine:
            timers |= mine
            load, chosen = loads(problem)
            rows[rule] = {"rows": int(load.sum()), "wasted": wasted(load), **memory}
            rows[rule]["deviation"] = int((load - chosen).abs().max())
    emit(shape=shape.label, times=interleave(timers, args.rounds), rules=rows)


def summarise(records: list[dict[str, Any]], gate: Gate) -> dict[str, Any]:
    """Print the table. A red gate prints no speed-up."""
    gate.report()
    if not gate.green:
        return {}
    shapes: dict[str, Any] = {}
    print(
        "\nµs queued, as a graph, eager; speed over plain top-k of each; rows computed, of them wasted in partial tiles"
    )
    for r in records:
        print(r["shape"])
        rows = shapes.setdefault(r["shape"], {})
        for rule, of_rule in r["rules"].items():
            row = rows[rule] = dict(of_rule)
            shown = []
            for how in HOW:
                name = f"{how}/fused {rule}"
                row[f"{how}_us"] = median(r["times"][name]) if name in r["times"] else None
                row[f"{how}_speed"] = speed(r["times"], name, f"{how}/fused {PLAIN}")
                shown.append("       –        –" if row[f"{how}_us"] is None
                             else f"{row[f'{how}_us']:8.0f} {row[f'{how}_speed']:7.3f}×")  # fmt: skip
            print(f"  {rule:9s}{''.join(shown)}  {row['rows']:8d} rows, {row['wasted']:6.1%} wasted, an expert off by "
                  f"at most {row['deviation']}")  # fmt: skip
    short = shortfalls(shapes)
    print(f"goals: {'met' if not short else '; '.join(short)}")
    return {"shapes": shapes, "missed": short}


def shortfalls(shapes: dict[str, Any], rule: str = "nearest") -> list[str]:
    """Where `rule` falls short of its goal although whole tiles would reach it."""
    short = []
    for label, goal in GOALS.items():
        rows = shapes.get(label, {})
        got = rows.get(rule, {}).get("queued_speed")
        most = rows.get(WHOLE, {}).get("queued_speed")
        if got is None or not math.isfinite(got) or not (got >= goal or (most is not None and most < goal)):
            short.append(f"{label} {'not measured' if got is None else f'{got:.3f}'}")
    return short


def main() -> int:
    parser = parser_of(__doc__, seconds=120.0)
    parser.add_argument("--rules", default="nearest", help=f"of {', '.join(RULES)}")
    parser.add_argument("--toy", action="store_true", help="one small shape, for a CPU")
    args = parser.parse_args()
    jobs = [str(i) for i in range(len(labels(args.toy)))]
    chosen(parser, "--rules", args.rules, RULES)
    if dry_run():
        for job in jobs:
            print(f"{job}: T,H; I/E/K = {labels(args.toy)[int(job)]}: {PLAIN}, {WHOLE}, {args.rules}")
        return 0
    if args.child:
        return run_child(args, run_job)
    need_gpu(args.toy)
    flags = ["--rounds", str(args.rounds), "--rules", args.rules, *["--toy"] * args.toy]
    runner = Runner(__file__, flags, time.monotonic() + args.seconds)
    return run_benchmark(
        runner, "token_rounding", jobs, lambda: runner.run(jobs, quiet=60.0, budget=90.0), ours=lambda key: True,
        summarise=lambda records, gate: (summarise(records, gate), []),
        out=args.out or result_path("token_rounding", gpu_name()),
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
