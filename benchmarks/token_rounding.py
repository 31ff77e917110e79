"""Token rounding compared with plain top-k: time of the fused layer, and the rows that partial tiles waste.

    python benchmarks/token_rounding.py [--rules nearest,…] [--out FILE.json]

SwiGLU, bf16, random routing, forward and backward with router and rounding. A product computes whole tiles of 128 rows,
so the last tile of an expert holds rows without a token, unless the load is a multiple of 128. Rounding makes each load
a multiple and changes it by at most one tile.

Plain top-k and each rule run in turn in one process per shape: with their launches in the GPU's queue, as CUDA graphs,
and called from Python. Each is first compared with float32 under its own routing. Rounding adds and drops tokens, so
the number of `rows` differs. The comparison is per step, not per row.

`whole` is plain top-k over other ids, with which all loads are equal and a multiple of 128. It shows how much time
partial tiles cost, which is the most that rounding could win with as many rows.

Writes results/<gpu>/token_rounding.json. DRY_RUN=1 prints the cases.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from children import add_names, parser_of, run_benchmark, struck_off
from layer_candidates import Problem, Shape, labelled, random_ids
from layer_timing import timers_of
from measure import Gate, cells, dry_run, emit, gpu_name, interleave, on_gpu, result_path, speed

from megablocks.ops.grouped import TILE_ROWS as TILE

GOALS = {"16384,1536; 1024/128/2": 1.08, "16384,4096; 1024/256/4": 1.12}
"""Shapes, and the queued speed over plain top-k that `nearest` must reach, unless `whole` does not reach it either."""
TOY = "512,32; 64/4/2"
RULES = ("nearest", "balanced", "up", "down")
"""The rules without random draws. With these a layer and its truth have the same routing."""
PLAIN, WHOLE = "plain", "whole"
HOW = ("queued", "graph", "eager")


def labels(toy: bool) -> list[str]:
    return [TOY] if toy else list(GOALS)


def even_ids(shape: Shape, device: str) -> Any:
    """(T, K) ids. Each token has K different experts, and all loads are equal. E must divide T, and K divide E."""
    tokens, experts, top_k = shape.tokens, shape.experts, shape.top_k
    assert tokens % experts == 0 and experts % top_k == 0 and tokens // experts * top_k % TILE == 0, shape.label
    generator = torch.Generator(device).manual_seed(3)
    first = torch.randperm(tokens, device=device, generator=generator) % experts
    return (first.unsqueeze(1) + torch.arange(top_k, device=device) * (experts // top_k)) % experts


def loads(problem: Problem) -> tuple[Any, Any]:
    """(E,) the rows that each expert computes, and (E,) the tokens that chose it."""
    metrics = problem.routing().metrics
    return metrics.get("rounded_per_expert", metrics["tokens_per_expert"]), metrics["tokens_per_expert"]


def wasted(load: Any) -> float:
    """The share of rows without a token in the whole tiles that the products compute."""
    rows = int(((load + TILE - 1) // TILE * TILE).sum())
    return 1 - int(load.sum()) / rows


def run_job(job: str, struck: set[str], args: argparse.Namespace) -> None:
    shape, device = labelled(labels(args.toy)[int(job)]), "cuda" if on_gpu() else "cpu"
    timers: dict[str, Callable[[], float]] = {}
    rows: dict[str, dict[str, Any]] = {}
    for rule in (PLAIN, WHOLE, *args.rules):
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
    """Print and return the table, unless the gate is red."""
    if not gate.report():
        return {}
    shapes: dict[str, Any] = {}
    print("\nµs and speed over plain top-k, queued, as a graph, eager; rows computed, share wasted in partial tiles")
    for r in records:
        print(r["shape"])
        rows = shapes.setdefault(r["shape"], {})
        for rule, of_rule in r["rules"].items():
            row = rows[rule] = dict(of_rule)
            shown = []
            for how in HOW:
                name = f"{how}/fused {rule}"
                row[f"{how}_us"] = us = median(r["times"][name]) if name in r["times"] else None
                row[f"{how}_speed"] = ratio = speed(r["times"], name, f"{how}/fused {PLAIN}")
                shown.append(f"{cells([us], '8.0f')} {cells([ratio], '7.3f', '×')}")
            print(f"  {rule:9s}{''.join(shown)}  {row['rows']:8d} rows, {row['wasted']:6.1%} wasted, at most "
                  f"{row['deviation']} rows changed per expert")  # fmt: skip
    return {"shapes": shapes}


def main() -> int:
    parser = parser_of(__doc__, seconds=120.0)
    add_names(parser, "--rules", RULES, "nearest", help=f"of {', '.join(RULES)}")
    parser.add_argument("--toy", action="store_true", help="one small shape, for a CPU")
    args = parser.parse_args()
    jobs = [str(i) for i in range(len(labels(args.toy)))]
    if dry_run():
        for job in jobs:
            print(f"{job}: T,H; I/E/K = {labels(args.toy)[int(job)]}: {PLAIN}, {WHOLE}, {','.join(args.rules)}")
        return 0
    return run_benchmark(
        args, "token_rounding", jobs, run_job, quiet=60.0, budget=90.0, ours=lambda key: True, summarise=summarise,
        out=args.out or result_path("token_rounding", gpu_name()), toy=args.toy,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
