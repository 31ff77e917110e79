"""Block-sparse products: MegaBlocks' 18 products compared with cuBLAS's batched product, and under skewed routing.

    python benchmarks/block_sparse.py [--sizes XS,Small,Medium] [--products sdd,…] [--out FILE.json]

The six products of a two-layer expert MLP (T tokens, H hidden, F width, E experts; S is block-sparse, T × E·F):

    sdd    S  = X · W1     dsd    Y  = S · W2                                    forward   W1 (H, E·F), W2 (E·F, H)
    sdd_t  dS = dY · W2ᵀ   dst_d  dW2 = Sᵀ · dY   dsd_t  dX = S · W1ᵀ   ddt_s  dW1 = Xᵀ · S     backward

With uniform routing every expert has T / E tokens, and the reference is torch.bmm with the same FLOPs. Zipf routing
(s = 1, fixed seed) spreads the same T tokens unevenly. Its speed is per nonzero block, relative to uniform routing.

The whole result of a candidate, computed in memory that held NaN, is first compared with float32. The candidates of a
case run in turn, round by round, as CUDA graphs, because the GPU is at its power limit and drifts. All of this runs in
a child process: a candidate that hangs or breaks the CUDA context is excluded, and the rest goes on.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from statistics import mean, median
from typing import Any

import torch
from block_sparse_cases import FEW_TOKENS, PRODUCTS, SIZES, Case
from children import add_names, candidate, guarded, parser_of, run_benchmark, struck_off
from measure import Gate, calls_for, dry_run, emit, graph_of, interleave, milliseconds, speed

from megablocks.testing.poison import poisoned_empty

ROUND_MS = 8.0
COMPILE_S = 90.0


def time_job(job: str, struck: set[str], args: argparse.Namespace) -> None:
    """Check, then time every candidate of a product and size. compile_only: only check them, on few tokens."""
    product, size = job.split("/")
    # A graph reads the operands in its function's closure, so the function must live as long as the graph. The capture
    # of the next graph returns freed memory to the device.
    ready: dict[str, tuple[Callable[[], Any], Callable[[], None], int]] = {}
    cases: dict[str, Case] = {}

    for routing in ("uniform", "zipf"):
        case = cases[routing] = Case(product, FEW_TOKENS if args.compile_only else SIZES[size], routing)
        for name, make in case.candidates().items():
            key = f"{job}/{routing}/{name}"
            if struck_off(key, struck):
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
        emit(product=product, size=size, times=times, **numbers)


def report(records: list[dict[str, Any]], gate: Gate) -> dict[str, Any]:
    """Print the table and return the summary, unless the gate is red."""
    if not gate.report():
        return {}
    print("\nµs, TFLOP/s, share of cuBLAS's speed; Zipf: speed per nonzero block over uniform, in the same rounds")
    ratios, skews = [], []
    for r in records:
        times, uniform = r["times"], r["uniform"]
        print(f"{r['product']:6s} {r['size']:7s} {uniform['flops'] / 1e9:.0f} GFLOP, {uniform['bytes'] / 1e6:.0f} MB "
              f"({uniform['bytes'] / 4.2e6:.0f} µs at 4.2 TB/s)")  # fmt: skip
        for name in sorted(times, key=lambda name: median(times[name])):
            routing, us = name.split("/")[0], median(times[name])
            line = f"    {name:16s} {us:7.1f} µs {r[routing]['flops'] / us / 1e6:5.0f} TFLOP/s"
            if name == "uniform/ours" and (ratio := speed(times, name, "uniform/bmm")) is not None:
                line += f"   {ratio:6.1%} of bmm"
                ratios.append(ratio)
            if routing == "zipf" and (ratio := speed(times, name, "uniform/ours")) is not None:
                per_block = ratio * r["zipf"]["blocks"] / uniform["blocks"]
                line += f"   {per_block:6.1%} of uniform per block"
                skews.append(per_block)
            print(line)
    if not ratios:
        return {}
    average, least, skew = mean(ratios), min(ratios), min(skews, default=0.0)
    print(f"{len(ratios)} of 18 products: mean {average:.1%} of bmm, least {least:.1%}, least per block under Zipf "
          f"{skew:.1%}")  # fmt: skip
    return {"cases": len(ratios), "mean": average, "least": least, "least per block under Zipf": skew}


def main() -> int:
    parser = parser_of(__doc__, seconds=280.0)
    add_names(parser, "--sizes", SIZES)
    add_names(parser, "--products", PRODUCTS)
    args = parser.parse_args()
    if dry_run():
        for size in args.sizes:
            for product in args.products:
                print(f"{product:6} {size:7} T, H, F, E = {SIZES[size]}")
        return 0
    compiled = [[f"{product}/{args.sizes[0]}"] for product in args.products]
    return run_benchmark(
        args, "block_sparse", [f"{product}/{size}" for size in args.sizes for product in args.products], time_job,
        first=lambda runner: runner.compile(compiled, seconds=COMPILE_S),
        ours=lambda key: key.endswith("/ours") or key.count("/") < 3,  # a lost job is ours, too
        summarise=report, out=args.out,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
