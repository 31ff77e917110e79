"""Grouped GEMM: the products of an expert layer, compared with cuBLAS, torch and QuACK.

    python benchmarks/grouped_gemm.py [--shapes S1,S2] [--ops up,dw1] [--out FILE.json] [--seconds 330]

The products (T tokens, H hidden, I expert width, E experts, K top-k, R = T·K rows; Z has 2I columns):

    up     Z  = X[gather] · W1ᵀ             (R, H)·(H, 2I)    W1 (E, 2I, H)
    down   Y  = A · W2                      (R, I)·(I, H)     W2 (E, I, H)
    dx     dX = dZ · W1                     (R, 2I)·(2I, H)
    dx2    dX = dZ · W1 + dG · V1           (R, I)·(I, H)     twice
    dw1    dW1 = dZᵀ · X[gather]            per expert (2I, H)
    dw2    dW2 = Aᵀ · dO[gather]            per expert (I, H)
    layer  out = weighted sum over a token's rows of (Z's first I columns) · W2, Z = X[gather] · W1ᵀ

Ours gathers while it reads. Candidates beside ours:

    bmm         cuBLAS's batched product, on rows gathered beforehand and with equal loads
    torch       torch._grouped_mm on rows gathered beforehand; in `layer` with index_select and index_add
    torch-take  in `layer`: the same, but it reads each token's rows instead of index_add
    quack       QuACK with several tiles, if it is installed
    apart       dx2 as two products and a sum

The result of a candidate, computed in memory that held NaN, is first compared with float32. Candidates run in turn,
round by round, because the GPU is at its power limit and drifts. The launches are already in the GPU's queue when they
are timed, so a slow host does not count. One process per op first compiles the kernels on a few tokens. Then all runs
in a child process with deadlines: a candidate that hangs or breaks the CUDA context is excluded, and the rest goes on.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import sys
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from children import add_names, candidate, guarded, parser_of, run_benchmark, struck_off
from grouped_gemm_cases import OPS, SHAPES, Problem
from measure import Gate, calls_for, dry_run, emit, host_milliseconds, interleave, milliseconds

from megablocks.testing.poison import poisoned_empty

PEERS = ("bmm", "torch", "quack")
NOT_OURS = (*PEERS, "torch-take", "apart")
ROUNDS = 7
ROUND_MS = 10.0
COMPILE_S = 120.0


def time_job(job: str, struck: set[str], args: argparse.Namespace) -> None:
    """Check, then time every candidate of a shape and op. compile_only: only check them, on few tokens."""
    shape, op = job.split("/")
    problem = Problem(shape, op, tokens=512 if args.compile_only else None)
    timers: dict[str, Callable[[], float]] = {}
    for name, make in problem.all(args.peers).items():
        key = f"{job}/{name}"
        if struck_off(key, struck):
            continue
        with candidate(key):
            fn = make()
            with poisoned_empty() if name in ("ours", "apart") else contextlib.nullcontext():
                out = fn()
            torch.cuda.synchronize()
            error = 0.0 if name == "bmm" else problem.check(out)
            del out
            if error >= (1e-2 if op == "layer" else 5e-3):  # a layer rounds intermediate results to bfloat16
                raise ArithmeticError(f"relative error {error:.1e}")
            if not args.compile_only:
                milliseconds(fn)
                timers[name] = timer(key, fn)
            emit(good=key, error=error)
    if timers:
        emit(shape=shape, op=op, flops=problem.flops, times=interleave(timers, args.rounds))


def timer(key: str, fn: Callable[[], Any]) -> Callable[[], float]:
    """A timer of `fn`, in µs."""
    calls = calls_for(fn, ROUND_MS)
    wait = 1.2 * host_milliseconds(fn, calls)
    return guarded(key, lambda: 1e3 * milliseconds(fn, calls, head_start_ms=wait))


def ours(key: str) -> bool:
    """Whether a failure of SHAPE/OP/NAME, or of a whole job SHAPE/OP, turns the gate red."""
    name = key.rsplit("/", 1)[1]
    return key.count("/") < 2 or (name not in NOT_OURS and not name.startswith("quack"))


def medians(record: dict[str, Any]) -> dict[str, Any]:
    """µs and TFLOP/s of each candidate, and the time of ours over each peer's: medians over the rounds."""
    times = record["times"]
    best = min((n for n in times if n.startswith("quack")), key=lambda n: median(times[n]), default=None)
    peers = [peer for peer in ("bmm", best, "torch", "torch-take", "apart") if peer in times and "ours" in times]
    over = {peer: round(median(a / b for a, b in zip(times["ours"], times[peer], strict=True)), 3) for peer in peers}
    return {
        "shape": record["shape"],
        "sizes": SHAPES[record["shape"]],
        "op": record["op"],
        "us": {name: round(median(values), 1) for name, values in times.items()},
        "tflops": {name: round(record["flops"] / median(values) / 1e6, 1) for name, values in times.items()},
        "time_of_ours_over": over,
    }


def summarise(records: list[dict[str, Any]], gate: Gate) -> dict[str, Any]:
    """Print and return the table, unless the gate is red."""
    if not gate.report():
        return {}
    products = [medians(record) for record in records]
    print("\nµs (TFLOP/s); time of ours over that of a peer, QuACK's best tile alone")
    for row in products:
        print(f"\n{row['shape']} {row['sizes']} {row['op']}")
        for name in sorted(row["us"], key=row["us"].__getitem__):
            over = row["time_of_ours_over"].get(name)
            shown = "" if over is None else f" {over:6.2f}"
            print(f"  {name:15s} {row['us'][name]:8.0f} ({row['tflops'][name]:4.0f}){shown}")
    return {"products": products}


def main() -> int:
    parser = parser_of(__doc__, seconds=330.0, rounds=ROUNDS)
    add_names(parser, "--shapes", SHAPES, "S1,S2,S0,S3,S5,S4,S6")
    add_names(parser, "--ops", OPS)
    add_names(parser, "--peers", PEERS)
    args = parser.parse_args()
    if importlib.util.find_spec("quack") is None:
        args.peers = [peer for peer in args.peers if peer != "quack"]
    jobs = [f"{shape}/{op}" for shape in args.shapes for op in args.ops]
    if dry_run():
        for job in jobs:
            print(f"{job:9} T, H, I, E, K = {SHAPES[job.split('/')[0]]}: ours, {','.join(args.peers)}")
        return 0
    compiled = [[f"{shape}/{op}" for shape in args.shapes] for op in args.ops]
    return run_benchmark(
        args, "grouped_gemm", jobs, time_job, first=lambda runner: runner.compile(compiled, seconds=COMPILE_S),
        quiet=40.0, budget=60.0, ours=ours, summarise=summarise, out=args.out,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
