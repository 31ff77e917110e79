"""Time of each kernel of a layer's step: forward and backward of a dMoE layer, from torch's profiler.

    python benchmarks/kernel_times.py [--impl fused] [--shapes 'T,H; I/E/K' …]

SwiGLU, bf16, random routing, router included, as in peers.py. The times are medians over five steps, in µs of the GPU's
clock and in the order of the launches. Gaps between kernels do not count. The kernels of torch are the router's
products. A shape may also be a case of layers.py, such as Medium/2. DRY_RUN=1 prints the cases.
"""

from __future__ import annotations

import re

import torch
from bookkeeping import launches
from layer_candidates import OURS, SIZES, Problem, labelled, problem_of, random_ids
from measure import dry_run, need_gpu, option_parser
from peers import PAPER

from megablocks.monitor.profile_step import short


def problem_named(label: str) -> Problem:
    if label.split("/")[0] in SIZES:
        return problem_of(label)
    shape = labelled(label)
    return Problem(shape, random_ids(shape, "cuda"), device="cuda")


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--impl", choices=OURS, default="fused")
    parser.add_argument("--shapes", nargs="+", default=list(PAPER), metavar="'T,H; I/E/K'")
    args = parser.parse_args()
    for label in args.shapes:
        if not re.fullmatch(rf"\d+,\d+; \d+/\d+/\d+|({'|'.join(SIZES)})/[\d.]+", label):
            parser.error(f"--shapes {label!r}: must be 'T,H; I/E/K', such as '{PAPER[0]}', or SIZE/SKEW of layers.py")
    if dry_run():
        for label in args.shapes:
            print(f"{label} {args.impl}")
        return
    need_gpu()
    for label in args.shapes:
        problem = problem_named(label)
        times = launches(problem.maker(mlp_impl=args.impl)().total)
        total, flops = sum(time for _, time in times), 3 * problem.shape.forward_flops
        print(f"{label} {args.impl}: {total:.0f} µs, {flops / total / 1e6:.0f} TFLOP/s", flush=True)
        for name, time in times:
            print(f"  {short(name)[:40]:40} {time:8.1f}")
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
