"""Grouped GEMM on one GPU: what the layers take and the peers, interleaved.

    python benchmarks/grouped_gemm.py [--shapes S1,S2] [--ops up,dw1] [--out FILE.json] [--seconds 330]

Products of an expert layer (T tokens, H hidden, I expert width, E experts, K top-k, R = T·K rows; Z has 2I columns):

    up     Z  = X[gather] · W1ᵀ             (R, H)·(H, 2I)    W1 (E, 2I, H)
    down   Y  = A · W2                      (R, I)·(I, H)     W2 (E, I, H)
    dx     dX = dZ · W1                     (R, 2I)·(2I, H)
    dx2    dX = dZ · W1 + dG · V1           (R, I)·(I, H)     twice
    dw1    dW1 = dZᵀ · X[gather]            per expert (2I, H)
    dw2    dW2 = Aᵀ · dO[gather]            per expert (I, H)
    layer  out = weighted sum over a token's rows of (Z's first I columns) · W2, Z = X[gather] · W1ᵀ

Ours gathers as it reads. A candidate is timed only after its result has been compared with float32 and found free of
NaN in memory that held NaN. Times are medians over rounds in which every candidate runs in turn, because the chip is
power-limited and drifts. Peers run if they import. cuBLAS's bmm and torch._grouped_mm get rows gathered beforehand, bmm
also perfectly even experts; in `layer` torch gathers by index_select and scatters by index_add ("torch") or by
reading each token's rows ("torch-take"). "apart" is dx2 as two products and a sum, "off" the op under
MEGABLOCKS_HOPPER=0. `--peers` picks among bmm, torch, quack, off and triton (the plain kernels).

Kernels are compiled first, one process an op, on a few tokens. Then all runs in a child process with deadlines: a
candidate that hangs or breaks the CUDA context is struck off and the rest goes on without it. Launches stand in the
GPU's queue when they are timed, so that a slow host does not count.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from children import Runner, candidate, guarded, run_child
from grouped_gemm_cases import OPS, SHAPES, Problem
from measure import Gate, calls_for, emit, host_milliseconds, interleave, milliseconds, write_result

PEERS = ("bmm", "torch", "quack", "off")
NOT_OURS = (*PEERS, "torch-take", "triton", "apart")
ROUNDS = 7
ROUND_MS = 10.0
COMPILE_S = 120.0


def time_job(job: str, struck: set[str], args: argparse.Namespace) -> None:
    """Check, then time every candidate of a shape's op; with compile_only just check them, on few tokens."""
    import torch

    from megablocks.testing.poison import poisoned_empty

    shape, op = job.split("/")
    problem = Problem(shape, op, tokens=512 if args.compile_only else None)
    timers: dict[str, Callable[[], float]] = {}
    for name, make in problem.all(shape, tuple(args.peers.split(","))).items():
        key = f"{job}/{name}"
        if key in struck or name in struck:
            continue
        with candidate(key):
            fn = make()
            with poisoned_empty() if name in ("ours", "apart", "off", "triton") else contextlib.nullcontext():
                out = fn()
            torch.cuda.synchronize()
            error = 0.0 if name == "bmm" else problem.check(out)
            del out
            if error >= (1e-2 if op == "layer" else 5e-3):  # a layer rounds to bfloat16 on the way
                raise ArithmeticError(f"relative error {error:.1e}")
            if not args.compile_only:
                milliseconds(fn)
                timers[name] = timer(key, fn)
            emit(good=key, error=error)
    if timers:
        emit(shape=shape, op=op, flops=problem.flops, times=interleave(timers, args.rounds))


def timer(key: str, fn: Callable[[], Any]) -> Callable[[], float]:
    """µs of a call."""
    calls = calls_for(fn, ROUND_MS)
    wait = 1.2 * host_milliseconds(fn, calls)
    return guarded(key, lambda: 1e3 * milliseconds(fn, calls, head_start_ms=wait))


def table(records: list[dict[str, Any]]) -> None:
    print("\nµs (TFLOP/s); × = time over bmm's, over that of QuACK's best tile, over torch's, by round")
    for record in records:
        times = record["times"]
        mid = {name: median(values) for name, values in times.items()}
        quack = min((n for n in mid if n.startswith("quack")), key=mid.__getitem__, default=None)
        print(f"\n{record['shape']} {SHAPES[record['shape']]} {record['op']}")
        for name in sorted(mid, key=mid.__getitem__):
            against = [
                f"{median(a / b for a, b in zip(times[name], times[peer], strict=True)):5.2f}"
                if peer in times
                else "    –"
                for peer in ("bmm", quack or "–", "torch")
            ]
            rate = record["flops"] / mid[name] / 1e6
            print(f"  {name:15s} {mid[name]:8.0f} ({rate:4.0f})  × {' '.join(against)}")


def ours(key: str) -> bool:
    """Whether a failure of SHAPE/OP/NAME, or of a whole SHAPE/OP, turns the gate red."""
    name = key.rsplit("/", 1)[1]
    return key.count("/") < 2 or (name not in NOT_OURS and not name.startswith("quack"))


def gate_of(records: list[dict[str, Any]]) -> tuple[Gate, list[dict[str, Any]]]:
    """The gate, red for what was lost too, and the records of times."""
    gate = Gate(ours)
    timed = [record for record in records if not gate.take(record)]
    for record in timed:
        if "ours" not in record["times"]:
            gate.failures.setdefault(f"{record['shape']}/{record['op']}/ours", "not timed")
    return gate, timed


def summary(record: dict[str, Any]) -> dict[str, Any]:
    """A record of rounds as medians: µs, TFLOP/s, and the medians over rounds of the time over each peer's."""
    times = record["times"]
    best = min((n for n in times if n.startswith("quack")), key=lambda n: median(times[n]), default=None)
    peers = [peer for peer in ("bmm", best, "torch", "torch-take", "apart", "off") if peer in times]
    return {
        "shape": record["shape"],
        "sizes": SHAPES[record["shape"]],
        "op": record["op"],
        "us": {name: round(median(values), 1) for name, values in times.items()},
        "tflops": {name: round(record["flops"] / median(values) / 1e6, 1) for name, values in times.items()},
        "time_of_ours_over": {
            peer: round(median(a / b for a, b in zip(times["ours"], times[peer], strict=True)), 3)
            for peer in peers
            if "ours" in times
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="S1,S2,S0,S3,S5,S4,S6")
    parser.add_argument("--ops", default=",".join(OPS))
    parser.add_argument("--peers", default=",".join(PEERS))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--seconds", type=float, default=330, help="for everything")
    parser.add_argument("--out", type=Path, help="JSON with environment, medians and quotients")
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    parser.add_argument("--compile-only", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--struck", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    shapes, ops, peers = args.shapes.split(","), args.ops.split(","), args.peers.split(",")
    if importlib.util.find_spec("quack") is None:
        peers = [peer for peer in peers if peer != "quack"]
    jobs = [f"{shape}/{op}" for shape in shapes for op in ops]
    if os.environ.get("DRY_RUN", "0") == "1":
        for job in jobs:
            print(f"{job:9} T, H, I, E, K = {SHAPES[job.split('/')[0]]}: ours, {', '.join(peers)}")
        return
    if args.child:
        run_child(args.child, lambda job: time_job(job, set(args.struck.split(",")), args))
        return
    began = time.monotonic()
    end = began + args.seconds
    flags = ["--peers", ",".join(peers), "--rounds", str(args.rounds)]

    # Whatever fails here on few tokens is tried again, and counted, at full size.
    def compile_op(op: str) -> None:
        warm = Runner(__file__, flags, min(end, began + COMPILE_S))
        warm.run([f"{shape}/{op}" for shape in shapes], "--compile-only", quiet=60.0, budget=COMPILE_S)

    workers = [threading.Thread(target=compile_op, args=(op,)) for op in ops]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    print(f"compiled in {time.monotonic() - began:.0f} s", flush=True)
    runner = Runner(__file__, flags, end)
    try:
        runner.run(jobs, quiet=40.0, budget=60.0)
    finally:
        runner.settle(jobs)
        gate, records = gate_of(runner.records)
        table(records)
        gate.report()
        if args.out:
            rows = [summary(record) for record in records]
            write_result(args.out, "grouped_gemm", gate=gate, summary={"rounds": args.rounds}, records=rows)


if __name__ == "__main__":
    main()
