"""Whole layers beside the field's: forward, backward and total TFLOP/s, and the bytes a forward leaves allocated.

    python benchmarks/peers.py [--shapes 0,1,…] [--candidates …] [--out FILE.json]

The shapes are those of peers_h200.json (T,H; I/E/K; SwiGLU, bf16, random routing), and its figures, measured earlier on
an H200, are what a peer has to come near: one that reads more than 15 % below voids the run. In turn, in one process a
shape: `auto`, `grouped`, `sparse`, `scatter`, `fused` are dMoE with that mlp_impl; `torch`, `scattermoe`, `sonicmoe`
run if they import; `bmm` is cuBLAS's batched products of the same FLOPs on even experts, nothing else of a layer.
Router included, auxiliary losses off. TFLOP/s count 6·T·H·I·K forward and 12·T·H·I·K backward; backward is total less
forward. They are timed with their launches already in the GPU's queue, so that a slow host does not count; `eager` is
the total without. Every result but bmm's is compared with float32 first. Writes results/<gpu>/peers.json. DRY_RUN=1
prints the cases.
"""

from __future__ import annotations

import argparse
import os
import re
import time
from pathlib import Path
from statistics import median
from typing import Any

from children import Runner, run_child
from layer_candidates import OURS, PEERS, Problem, Shape, select
from layer_timing import check_and_time
from measure import ROUNDS, Gate, emit, gpu_name, on_gpu, peer_figures, result_path, speed, void_reasons, write_result

TOY = "64,32; 64/8/2"


def shape_of(label: str) -> Shape:
    tokens, hidden, width, experts, top_k = map(int, re.split(r"[,;/ ]+", label))
    return Shape(tokens, hidden, width, experts, top_k, "swiglu", "after_topk")


def run_job(job: str, struck: set[str], args: argparse.Namespace) -> None:
    import torch

    shape = shape_of(labels(args)[int(job)])
    device = "cuda" if on_gpu() else "cpu"
    score = torch.rand(shape.tokens, shape.experts, device=device, generator=torch.Generator(device).manual_seed(3))
    problem = Problem(shape, score.topk(shape.top_k, dim=1).indices, device=device)
    made = select(problem.ours() | problem.peers() | {"bmm": problem.bmm}, args.candidates)
    times, memory = check_and_time(job, problem, made, struck, args.rounds, queued=True)
    if times:
        emit(shape=shape.label, flops=shape.forward_flops, memory=memory, times=times)


def rates(record: dict[str, Any]) -> dict[str, dict[str, float]]:
    """TFLOP/s of forward, backward, total and the eager total by candidate."""
    out = {}
    for name in [n.removeprefix("queued/") for n in record["times"] if n.startswith("queued/")]:
        total, forward = record["times"][f"queued/{name}"], record["times"][f"forward/{name}"]
        backward = [t - f for t, f in zip(total, forward, strict=True)]
        flops = record["flops"] / 1e6
        out[name] = {
            "forward": flops / median(forward),
            "backward": 2 * flops / max(median(backward), 1e-9),
            "total": 3 * flops / median(total),
            "eager": 3 * flops / median(record["times"][f"eager/{name}"]),
        }
    return out


def summarise(records: list[dict[str, Any]], gate: Gate) -> tuple[dict[str, Any], list[str]]:
    """Print the table; return it and why the run is void. A red gate or a void run prints no speed-up."""
    gate.report()
    by_shape = {r["shape"]: rates(r) for r in records}
    measured = [
        (shape, name, phase, value)
        for shape, table in by_shape.items()
        for name in (*PEERS, "bmm")
        for phase, value in table.get(name, {}).items()
    ]
    void = void_reasons(measured, peer_figures(), gpu_name())
    for reason in void:
        print(f"VOID, no speed-up: {reason}")
    if not gate.green or void:
        return {}, void
    shapes = {}
    print("\nTFLOP/s forward / backward / total, MiB held; then auto's and fused's speed over each")
    for r in records:
        table = by_shape[r["shape"]]
        print(f"{r['shape']}")
        rows = {}
        for name, row in table.items():
            held = r["memory"].get(name, {}).get("held")
            ratios = [speed(r["times"], f"queued/{mine}", f"queued/{name}") for mine in ("auto", "fused")]
            rows[name] = {**row, "held": held, "auto_speed": ratios[0], "fused_speed": ratios[1]}
            space = "     –" if held is None else f"{held / 2**20:6.0f}"
            print(f"  {name:11s} {row['forward']:5.0f} / {row['backward']:5.0f} / {row['total']:5.0f} "
                  f"(eager {row['eager']:5.0f}) {space} MiB"
                  + "".join("       –" if ratio is None else f"   {ratio:.2f}×" for ratio in ratios))  # fmt: skip
        shapes[r["shape"]] = rows
    return {"shapes": shapes}, void


def labels(args: argparse.Namespace) -> list[str]:
    return [TOY] if args.toy else list(peer_figures()["shapes"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="", help="numbers of the shapes, from 0; default all")
    parser.add_argument("--candidates", default="", help="these alone, by name")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument(
        "--seconds", type=float, default=900.0, help="for everything; SonicMoE takes over a minute a shape to compile"
    )
    parser.add_argument("--out", type=Path, help="default results/<gpu>/peers.json")
    parser.add_argument("--toy", action="store_true", help="one small shape, for a CPU")
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    parser.add_argument("--struck", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    jobs = args.shapes.split(",") if args.shapes else [str(i) for i in range(len(labels(args)))]
    if os.environ.get("DRY_RUN", "0") == "1":
        for job in jobs:
            print(f"{job}: T,H; I/E/K = {labels(args)[int(job)]}")
        return
    if args.child:
        run_child(args.child, lambda job: run_job(job, set(args.struck.split(",")), args))
        return
    flags = ["--rounds", str(args.rounds), "--candidates", args.candidates, *["--toy"] * args.toy]
    runner = Runner(__file__, flags, time.monotonic() + args.seconds)
    # A lost job is ours as well: something of it was not measured.
    gate = Gate(lambda key: "/" not in key or key.rsplit("/", 1)[1] in OURS)
    records: list[dict[str, Any]] = []
    try:
        # quiet: a peer may build a CUDA extension on first use
        runner.run(jobs, quiet=150.0, budget=300.0)
    finally:
        runner.settle(jobs)
        records = [record for record in runner.records if not gate.take(record)]
        summary, void = summarise(records, gate)
        out = args.out or result_path("peers", gpu_name())
        write_result(out, "peers", gate=gate, summary=summary, records=records, void=void)


if __name__ == "__main__":
    main()
