"""What each kernel of a layer's step takes: forward and backward of a dMoE layer, by torch's profiler.

    python benchmarks/kernel_times.py [--impl fused] [--shapes 'T,H; I/E/K' …] [--steps N]

SwiGLU, bf16, random routing, router included, as peers.py times whole layers. µs by the GPU's clock, medians over the
steps, in the order of a step's launches; torch's own kernels are the router's products and what lies between. Launches
overlap nothing, so that their sum is what a step takes on a host that is fast enough. DRY_RUN=1 prints the cases.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from statistics import median

from layer_candidates import OURS, Problem, labelled, random_ids
from measure import dry_run, need_gpu
from peers import PAPER


def short(name: str) -> str:
    """A kernel's name without its namespaces, template arguments and return type."""
    return re.split(r"[<(]", re.sub(r"^void ", "", name))[0].split("::")[-1].strip()[:40]


def by_launch(kernels: Sequence[tuple[str, float]], steps: int) -> list[tuple[str, float]]:
    """(name, median µs) of each launch of a step, from those of `steps` equal steps in order.

    Raises:
        ValueError: the steps did not launch the same kernels.
    """
    per_step, left = divmod(len(kernels), steps)
    chunks = [kernels[i * per_step : (i + 1) * per_step] for i in range(steps)]
    if left or any([name for name, _ in c] != [name for name, _ in chunks[0]] for c in chunks):
        raise ValueError(f"{len(kernels)} kernels in {steps} steps: the steps differ; raise --steps, or run again")
    return [(launch[0][0], median(time for _, time in launch)) for launch in zip(*chunks, strict=True)]


def measure(label: str, impl: str, steps: int) -> list[tuple[str, float]]:
    import torch
    from torch.profiler import ProfilerActivity, profile

    shape = labelled(label)
    problem = Problem(shape, random_ids(shape, "cuda"), device="cuda")
    step = problem.layer(problem.config(mlp_impl=impl))
    for _ in range(2):
        step.total()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(steps):
            step.total()
        torch.cuda.synchronize()
    events = [e for e in profiled.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    events.sort(key=lambda e: e.time_range.start)
    return by_launch([(short(e.name), e.time_range.elapsed_us()) for e in events], steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--impl", choices=OURS, default="fused")
    parser.add_argument("--shapes", nargs="+", default=list(PAPER), metavar="'T,H; I/E/K'")
    parser.add_argument("--steps", type=int, default=4)
    args = parser.parse_args()
    if args.steps < 1:
        parser.error(f"--steps {args.steps}: must be at least 1")
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
        launches = measure(label, args.impl, args.steps)
        total, flops = sum(time for _, time in launches), 3 * labelled(label).forward_flops
        print(f"{label} {args.impl}: {total:.0f} µs, {flops / total / 1e6:.0f} TFLOP/s", flush=True)
        for name, time in launches:
            print(f"  {name:40} {time:8.1f}")
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
