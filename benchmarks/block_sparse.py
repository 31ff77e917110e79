"""Block-sparse products on one GPU: MegaBlocks' 18 products against cuBLAS's batched product, and skewed routing.

    python benchmarks/block_sparse.py [--sizes XS,Small,Medium] [--products sdd,…] [--sweep] [--stk] [--out FILE.json]

The six products of a two-layer expert MLP (T tokens, H hidden, F width, E experts; S is block-sparse, T × E·F):

    sdd    S  = X · W1     dsd    Y  = S · W2                                    forward   W1 (H, E·F), W2 (E·F, H)
    sdd_t  dS = dY · W2ᵀ   dst_d  dW2 = Sᵀ · dY   dsd_t  dX = S · W1ᵀ   ddt_s  dW1 = Xᵀ · S     backward

Uniform routing gives every expert T / E tokens and is compared with torch.bmm of the same floating-point operations;
Zipf (s = 1, fixed seed) routes the same T tokens, and its speed is per nonzero block, relative to uniform's.

A candidate is timed only after its whole result has been compared with float32 in memory that held NaN. Times are
medians over rounds in which every candidate of a case runs in turn, as one CUDA graph each, because the chip is
power-limited and drifts. All of it runs in a child process: a candidate that hangs or breaks the CUDA context is named
and struck off, everywhere after the second time, and the rest goes on without it. Every product is timed with the tile
that the ops choose before any other tile is tried.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean, median
from typing import Any

from block_sparse_cases import FEW_TOKENS, PRODUCTS, SIZES, Case
from children import Runner, candidate, chosen, guarded, parser_of, run_benchmark, run_child, struck_off
from measure import Gate, calls_for, dry_run, emit, graph_of, interleave, milliseconds, need_gpu, speed

ROUND_MS = 8.0
COMPILE_S = 90.0
# The paper's own figures, on its own GPU: what a run is held against.
MEAN_GOAL, LEAST_GOAL, SKEW_GOAL = 0.986, 0.91, 0.90


def time_job(job: str, struck: set[str], args: argparse.Namespace) -> None:
    """Check, then time every candidate of a product and size; with compile_only just check them, on few tokens."""
    import torch

    from megablocks.testing.poison import poisoned_empty

    product, size = job.split("/")
    # The graphs read what their function's closure holds, so it must live as long: capturing the next graph gives the
    # memory of anything freed back to the device.
    ready: dict[str, tuple[Callable[[], Any], Callable[[], None], int]] = {}
    cases: dict[str, Case] = {}

    for routing in ("uniform", "zipf"):
        case = cases[routing] = Case(product, FEW_TOKENS if args.compile_only else SIZES[size], routing)
        for name, make in case.candidates(args.sweep, args.stk).items():
            key = f"{job}/{routing}/{name}"
            if (args.candidates and name not in args.candidates.split(",")) or struck_off(key, struck):
                continue
            with candidate(key):
                fn = make()
                with poisoned_empty():
                    out = fn()
                torch.cuda.synchronize()
                error = 0.0 if name == "bmm" else case.error(out)
                del out
                if error >= 5e-3:
                    raise ArithmeticError(f"relative error {error:.1e}")
                if not args.compile_only:
                    milliseconds(fn)
                    calls = calls_for(fn, ROUND_MS)
                    ready[f"{routing}/{name}"] = fn, graph_of(fn, calls), calls
                emit(good=key, error=error)

    def timer(name: str) -> Callable[[], float]:
        _, replay, calls = ready[name]
        return guarded(f"{job}/{name}", lambda: 1e3 * milliseconds(replay) / calls)

    times = interleave({name: timer(name) for name in ready}, args.rounds)
    if ready:
        numbers = {r: {"flops": c.flops, "bytes": c.bytes, "blocks": c.blocks} for r, c in cases.items()}
        emit(product=product, size=size, sweep=args.sweep, times=times, **numbers)


def sanitize(runner: Runner) -> None:
    """compute-sanitizer's view of the first candidate that took its process along."""
    tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    broke = [r["bad"] for r in runner.records if r.get("bad", "").rsplit("/", 1)[-1] in runner.deaths]
    if not broke or not Path(tool).exists():
        return
    product, size, _, name = broke[0].split("/")
    command = [tool, "--tool", "memcheck", "--print-limit", "4", sys.executable, __file__, *runner.flags, "--sweep"]
    command += ["--child", f"{product}/{size}", "--candidates", name, "--rounds", "1"]
    print(f"compute-sanitizer on {broke[0]}:", flush=True)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        print("\n".join((done.stdout + done.stderr).splitlines()[-60:]), flush=True)
    except subprocess.TimeoutExpired as e:
        print(f"nothing within 60 s: {(e.stdout or b'')[-2000:]!r}", flush=True)


def report(records: list[dict[str, Any]], gate: Gate) -> dict[str, Any]:
    """Print the table; return the summary. A red gate prints no speed-up."""
    print("\nµs, TFLOP/s, share of cuBLAS's speed; Zipf: speed per nonzero block over uniform's, in the same rounds")
    ratios: dict[str, float] = {}
    skews: dict[str, float] = {}
    best: dict[str, float] = {}
    for r in records:
        if "times" not in r:
            continue
        times, case = r["times"], f"{r['product']:6s} {r['size']:7s}"
        mid = {name: median(t) for name, t in times.items()}
        floor = r["uniform"]["bytes"] / 4.2e6
        gflop, mb = r["uniform"]["flops"] / 1e9, r["uniform"]["bytes"] / 1e6
        print(f"{case} {'sweep ' * r['sweep']}{gflop:.0f} GFLOP, {mb:.0f} MB ({floor:.0f} µs at 4.2 TB/s)")
        for name in sorted(mid, key=mid.__getitem__):
            routing, kind = name.split("/")
            line = f"    {name:16s} {mid[name]:7.1f} µs {r[routing]['flops'] / mid[name] / 1e6:5.0f} TFLOP/s"
            if routing == "uniform" and (ratio := speed(times, name, "uniform/bmm")) is not None:
                line += f"   {ratio:6.1%} of bmm"
                if kind == "ours" and not r["sweep"]:
                    ratios[case] = ratio
                if kind not in ("bmm", "triton", "stk", "act fused", "act apart"):
                    best[case] = max(best.get(case, 0.0), ratio)
            if routing == "zipf" and (ratio := speed(times, name, f"uniform/{kind}")) is not None:
                per_block = ratio * r["zipf"]["blocks"] / r["uniform"]["blocks"]
                line += f"   {per_block:6.1%} of uniform per block"
                if not r["sweep"]:
                    skews[case] = per_block
            print(line)
    gate.report()
    if not gate.green or not ratios:
        return {}
    average, least, skew = mean(ratios.values()), min(ratios.values()), min(skews.values(), default=0.0)
    met = len(ratios) == 18 and average >= MEAN_GOAL and least >= LEAST_GOAL and skew >= SKEW_GOAL
    print(f"{len(ratios)} of 18 products: mean {average:.1%} of bmm (goal {MEAN_GOAL:.1%}), least {least:.1%} "
          f"(goal {LEAST_GOAL:.0%}), least per block under Zipf {skew:.1%} (goal {SKEW_GOAL:.0%}); mean with each "
          f"case's best tile {mean(best.values()):.1%}; goals {'met' if met else 'not met'}")  # fmt: skip
    return {
        "cases": len(ratios), "mean": average, "least": least, "least per block under Zipf": skew,
        "best tile's mean": mean(best.values()), "met": met,
    }  # fmt: skip


def main() -> int:
    parser = parser_of(__doc__, seconds=280.0)
    parser.add_argument("--sizes", default=",".join(SIZES))
    parser.add_argument("--products", default=",".join(PRODUCTS))
    parser.add_argument("--candidates", default="", help="time these alone, by name: ours,bmm,pp6,…")
    parser.add_argument(
        "--sweep", action="store_true", help="afterwards every tile, the Triton kernels and fused activations too"
    )
    parser.add_argument("--stk", action="store_true", help="time stanford-stk's kernels too")
    parser.add_argument("--compile-only", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    sizes, products = (
        chosen(parser, "--sizes", args.sizes, SIZES),
        chosen(parser, "--products", args.products, PRODUCTS),
    )
    if dry_run():
        for size in sizes:
            for product in products:
                print(f"{product:6} {size:7} T, H, F, E = {SIZES[size]}")
        return 0
    if args.child:
        return run_child(args, time_job)
    need_gpu()
    flags = ["--stk"] * args.stk + ["--rounds", str(args.rounds), "--candidates", args.candidates]
    sweep = ["--sweep"] * args.sweep
    jobs = [f"{product}/{size}" for size in sizes for product in products]
    runner = Runner(__file__, flags, time.monotonic() + args.seconds)

    def run() -> None:
        runner.compile([[f"{product}/{sizes[0]}"] for product in products], *sweep, seconds=COMPILE_S)
        runner.run(jobs)
        if args.sweep:
            runner.run(jobs, *sweep)

    # A whole job that was lost is ours as well: something of it was not measured.
    status = run_benchmark(
        runner, "block_sparse", jobs, run, ours=lambda key: key.endswith("/ours") or key.count("/") < 3,
        summarise=lambda records, gate: (report(records, gate), []), out=args.out,
    )  # fmt: skip
    sanitize(runner)
    return status


if __name__ == "__main__":
    sys.exit(main())
