"""How the step of a layer grows with the number of tokens and with the number of experts.

    python benchmarks/growth.py [--candidates fused] [--out FILE.json]

SwiGLU, bf16, random routing, router included, forward and backward. Each series runs in one process, with all points in
turn, as CUDA graphs and called from Python. Every result is first compared with float32.

tokens   1536; 256/128/8 with 64 to 262,144 tokens. The figure is how far the time per token from 32,768 tokens on
         differs from that at 32,768.
experts  32768,1536; 256/E/8 with E = 8 to 512 experts. The products keep their size, and the weights grow. The figure
         is how far the time exceeds this model, which assumes that nothing overlaps:

             t(E) = t(E₀) · tiles(E)/tiles(E₀) + (w(E) − w(E₀))/bandwidth

         E₀ is the smallest E. tiles: of 128 rows, over all experts, partial tiles included. w = 3 · 3·E·I·H · 2 bytes:
         forward and backward read each weight, and backward writes its gradient. The bandwidth is that of a kernel
         that reads and writes 2 GiB in all, in the same rounds.

Writes results/<gpu>/growth.json, which plot.py draws. DRY_RUN=1 prints the points.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from children import add_names, parser_of, run_benchmark, struck_off
from layer_candidates import OURS, Problem, Shape, labelled, random_ids
from layer_timing import timers_of
from measure import Gate, cells, dry_run, emit, gpu_name, interleave, milliseconds, on_gpu, result_path
from permutation import copies_of

TOKENS = tuple(2**i for i in range(6, 19))
EXPERTS = tuple(2**i for i in range(3, 10))
SERIES = {
    "tokens": [f"{tokens},1536; 256/128/8" for tokens in TOKENS],
    "experts": [f"32768,1536; 256/{experts}/8" for experts in EXPERTS],
}
TOYS = {"tokens": ["16,32; 64/8/2", "64,32; 64/8/2"], "experts": ["64,32; 64/2/2", "64,32; 64/8/2"]}
FLAT_FROM = 32768
TILE = 128
COPY_BYTES = 2**31


def points(series: str, toy: bool) -> list[Shape]:
    return [labelled(label) for label in (TOYS if toy else SERIES)[series]]


def weight_bytes(shape: Shape) -> int:
    """Bytes of a step: gate, up and down of every expert are read twice, and their gradients written."""
    return 3 * 3 * shape.experts * shape.width * shape.hidden * 2


def copy_timer() -> Callable[[], float]:
    """A timer, in µs, of an elementwise kernel that reads and writes COPY_BYTES in all.

    torch's copy_ may be slower (permutation.py), and a bandwidth that is too low would hide a slow layer.
    """
    neg = copies_of(COPY_BYTES)[f"neg {COPY_BYTES}"]
    return lambda: 1e3 * milliseconds(neg, 10)


def run_job(series: str, struck: set[str], args: argparse.Namespace) -> None:
    device = "cuda" if on_gpu() else "cpu"
    timers: dict[str, Callable[[], float]] = {"copy": copy_timer()} if on_gpu() else {}
    tiles: dict[int, int] = {}
    for shape in points(series, args.toy):
        problem = Problem(shape, random_ids(shape, device), device=device)
        load = torch.bincount(problem.ids.flatten(), minlength=shape.experts)
        point = getattr(shape, series)
        tiles[point] = int(((load + TILE - 1) // TILE).sum())
        for impl in args.candidates:
            name = f"{impl} {point}"
            if not struck_off(f"{series}/{name}", struck):
                timers |= timers_of(series, problem, name, problem.ours()[impl], graph=True)[0]
        problem.forget_truth()  # the operands must stay until all points are timed, but the truth need not
    emit(series=series, tiles=tiles, times=interleave(timers, args.rounds))


def microseconds(record: dict[str, Any], impl: str, shape: Shape, how: str) -> float | None:
    times = record["times"].get(f"{how}/{impl} {getattr(shape, record['series'])}")
    return median(times) if times else None


def rows_of(record: dict[str, Any], impl: str, toy: bool) -> list[dict[str, Any]]:
    """One row per point: µs eager and as a graph, ns per token, and the prediction of the model for the graph."""
    shapes = points(record["series"], toy)
    copy = record["times"].get("copy")
    first, rows = shapes[0], []
    for shape in shapes:
        graph = microseconds(record, impl, shape, "graph")
        row: dict[str, Any] = {
            "tokens": shape.tokens, "experts": shape.experts, "eager_us": microseconds(record, impl, shape, "eager"),
            "graph_us": graph, "ns_per_token": None if graph is None else 1e3 * graph / shape.tokens,
            "weight_bytes": weight_bytes(shape),
        }  # fmt: skip
        base = microseconds(record, impl, first, "graph")
        if record["series"] == "experts" and copy and base:
            tiles = record["tiles"]  # the keys are strings, because the record comes from JSON
            more_tiles = tiles[str(shape.experts)] / tiles[str(first.experts)]
            bandwidth = COPY_BYTES / median(copy)  # bytes per µs
            row["predicted_us"] = base * more_tiles + (weight_bytes(shape) - weight_bytes(first)) / bandwidth
        rows.append(row)
    return rows


def flatness(rows: list[dict[str, Any]]) -> float | None:
    """Largest relative difference of the time per token to that at FLAT_FROM; None unless all points were measured."""
    far = [row["ns_per_token"] for row in rows if row["tokens"] >= FLAT_FROM]
    return max(abs(ns / far[0] - 1) for ns in far) if far and None not in far else None


def over_model(rows: list[dict[str, Any]]) -> float | None:
    """Largest relative excess over the model, without the first point; None unless all points were measured."""
    pairs = [(row["graph_us"], row.get("predicted_us")) for row in rows]
    measured = len(pairs) > 1 and all(got and want for got, want in pairs)
    return max(got / want - 1 for got, want in pairs[1:]) if measured else None


def summarise(records: list[dict[str, Any]], gate: Gate, impls: list[str], toy: bool) -> dict[str, Any]:
    """Print and return the curves, unless the gate is red."""
    if not gate.report():
        return {}
    curves: dict[str, Any] = {}
    for record in records:
        for impl in impls:
            rows = curves.setdefault(record["series"], {}).setdefault(impl, rows_of(record, impl, toy))
            print(f"\n{impl} over {record['series']}: µs as a graph, eager; ns per token; predicted µs")
            for row in rows:
                shown = [row["graph_us"], row["eager_us"], row["ns_per_token"], row.get("predicted_us")]
                print(f"  {row[record['series']]:7} {cells(shown, '8.1f')}")
            value = (flatness if record["series"] == "tokens" else over_model)(rows)
            what = f"change per token from {FLAT_FROM} on" if record["series"] == "tokens" else "excess over the model"
            print(f"  largest {what}: {'not measured' if value is None else f'{value:.1%}'}")
    return {"curves": curves}


def main() -> int:
    parser = parser_of(__doc__, seconds=180.0)
    add_names(parser, "--series", SERIES)
    add_names(parser, "--candidates", OURS, "fused", help="mlp_impls")
    parser.add_argument("--toy", action="store_true", help="two small points per series, for a CPU")
    args = parser.parse_args()
    if dry_run():
        for series in args.series:
            for shape in points(series, args.toy):
                print(f"{series:7} T,H; I/E/K = {shape.label}, weights {weight_bytes(shape) / 1e9:.2f} GB per step")
        return 0
    return run_benchmark(
        args, "growth", args.series, run_job, quiet=60.0, budget=120.0, ours=lambda key: True,
        summarise=lambda records, gate: summarise(records, gate, args.candidates, args.toy),
        out=args.out or result_path("growth", gpu_name()), toy=args.toy,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
