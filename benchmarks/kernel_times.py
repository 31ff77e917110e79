"""What each kernel of a layer's step takes: forward and backward of a dMoE layer, by torch's profiler.

    python benchmarks/kernel_times.py [--impl fused] [--shapes 'T,H; I/E/K' …]

SwiGLU, bf16, random routing, router included, as peers.py times whole layers. µs by the GPU's clock, medians over five
steps, in the order of a step's launches, without what lies between them; torch's own kernels are the router's products.
layers.py --profile adds up a step's kernels by name instead, peers' too. DRY_RUN=1 prints the cases.
"""

from __future__ import annotations

import argparse
import re

from bookkeeping import launches
from layer_candidates import OURS, Problem, Step, labelled, random_ids
from measure import dry_run, need_gpu
from peers import PAPER


def short(name: str) -> str:
    """A kernel's name without its namespaces, template arguments and return type."""
    return re.split(r"[<(]", re.sub(r"^void ", "", name))[0].split("::")[-1].strip()[:40]


def step_of(label: str, impl: str) -> Step:
    shape = labelled(label)
    problem = Problem(shape, random_ids(shape, "cuda"), device="cuda")
    return problem.layer(problem.config(mlp_impl=impl))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--impl", choices=OURS, default="fused")
    parser.add_argument("--shapes", nargs="+", default=list(PAPER), metavar="'T,H; I/E/K'")
    args = parser.parse_args()
    for label in args.shapes:
        if not re.fullmatch(r"\d+,\d+; \d+/\d+/\d+", label):
            parser.error(f"--shapes {label!r}: must be 'T,H; I/E/K', as '{PAPER[0]}'")
    if dry_run():
        for label in args.shapes:
            print(f"{label} {args.impl}")
        return
    need_gpu()
    import torch

    for label in args.shapes:
        times = launches(step_of(label, args.impl).total)
        total, flops = sum(time for _, time in times), 3 * labelled(label).forward_flops
        print(f"{label} {args.impl}: {total:.0f} µs, {flops / total / 1e6:.0f} TFLOP/s", flush=True)
        for name, time in times:
            print(f"  {short(name):40} {time:8.1f}")
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
