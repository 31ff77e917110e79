"""Time of a layer's first training step at a new shape, and the kernels that new token counts compile.

    python benchmarks/first_call.py [--impls auto,fused] [--size Small | "24576,1536; 256/128/8"] [--out FILE.json]

Each case is a process of its own. The time starts with the first forward and ends after its backward and AdamW step. It
does not contain imports, the construction of the layer, or the start of CUDA and AdamW. "cold" starts with an empty
Triton cache, "warm" with the cache that the cold process left. Then the same process runs other token counts, some of
them odd, and counts the kernels that Triton prepares, also those from its disk cache. No kernel should be prepared.

Compilation uses one core, so several cases run at the same time. Writes results/<gpu>/first_call.json after each case.
DRY_RUN=1 prints the cases.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch
from children import add_names, candidate
from layer_candidates import OURS, SIZES, Shape, labelled, shape_of
from measure import Gate, dry_run, emit, gpu_name, need_gpu, option_parser, result_path, write_result

from megablocks import MoEConfig, dMoE

ACTIVATIONS = ("gelu", "swiglu")


def shape_named(size: str) -> Shape:
    return shape_of(size) if size in SIZES else labelled(size)


def new_token_counts(tokens: int) -> list[int]:
    """Fewer, more, and far fewer tokens. Some are not multiples of 16, for which Triton could compile other kernels."""
    return [tokens // 2, tokens + 128, tokens - 1, tokens // 2 + 8, tokens // 8 + 13]


def count_compilations() -> list[tuple[str, bool]]:
    """A list that grows by (name, from disk cache) for each kernel that Triton prepares from now on.

    It uses the compiler's listener. The hooks of a JIT function write its constants as JSON, which fails for the tile
    plans of the Gluon kernels.
    """
    ready: list[tuple[str, bool]] = []
    from triton import knobs

    def listener(*, src: Any, cache_hit: bool, **_: Any) -> None:
        ready.append((src.name, cache_hit))

    knobs.compilation.listener = listener
    return ready


def run_case(impl: str, activation: str, size: str) -> None:
    """In the child: the first step, then steps with new token counts."""
    shape = shape_named(size)

    def adamw(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-4, fused=True)

    a = torch.nn.Parameter(torch.randn(256, 256, device="cuda", dtype=torch.bfloat16))
    (a @ a).sum().backward()  # starts CUDA, cuBLAS and the optimizer
    adamw([a]).step()
    float(a.sum())
    names = count_compilations()
    config = MoEConfig(hidden_size=shape.hidden, ffn_hidden_size=shape.width, num_experts=shape.experts,
                       top_k=shape.top_k, activation=activation, mlp_impl=impl)  # fmt: skip
    tokens = {count: torch.randn(count, shape.hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True)
              for count in [shape.tokens, *new_token_counts(shape.tokens)]}  # fmt: skip

    def step(count: int) -> float:
        start = time.perf_counter()
        optimizer.zero_grad()
        layer(tokens[count]).square().mean().backward()
        optimizer.step()
        torch.cuda.synchronize()
        return time.perf_counter() - start

    start = time.perf_counter()
    layer = dMoE(config, device="cuda", dtype=torch.bfloat16, seed=0)
    optimizer = adamw(layer.parameters())
    built = time.perf_counter() - start
    first, made = step(shape.tokens), list(names)
    second = step(shape.tokens)
    later: dict[str, list[str]] = {}
    slowest = 0.0
    for count in new_token_counts(shape.tokens):
        before = len(names)
        slowest = max(slowest, step(count))
        later[str(count)] = [name for name, _ in names[before:]]
    emit(impl=impl, activation=activation, size=size, build_s=built, first_s=first, second_s=second,
         compiled=sorted(name for name, found in made if not found), from_disk=sum(found for _, found in made),
         new_counts=later, slowest_new_s=slowest)  # fmt: skip


def run_cold_and_warm(impl: str, activation: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Run a case cold and then warm. Returns the gate's records and one record per process.

    The warm process runs only if the cold one succeeded and so left a complete cache.
    """
    said: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="triton-") as cache:
        for state in ("cold", "warm"):
            key = f"{impl}/{activation}/{state}"
            command = [sys.executable, __file__, "--size", args.size, "--child", f"{impl}/{activation}"]
            env = {**os.environ, "TRITON_CACHE_DIR": cache}
            try:
                done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=args.seconds)
            except subprocess.TimeoutExpired:
                said.append({"bad": key, "why": f"not done after {args.seconds:g} s"})
                break
            lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"')]
            result = next((line for line in lines if "impl" in line), None)
            if result is None:
                why = next((line["why"] for line in lines if "bad" in line), done.stderr[-300:])
                said.append({"bad": key, "why": why})
                break
            said += [{"good": key, "error": 0.0}, {"cache": state, **result}]
    return said


def report(records: list[dict[str, Any]], gate: Gate) -> None:
    """Print the table."""
    gate.report()
    print("\nseconds of the first step, the second one and the slowest one at a new token count; kernels prepared")
    for r in records:
        late = sorted({name for names in r["new_counts"].values() for name in names})
        print(f"  {r['cache']:4} {r['impl']:8} {r['activation']:7} first {r['first_s']:6.2f}, second "
              f"{r['second_s']:6.3f}, slowest new count {r['slowest_new_s']:6.3f}; {len(r['compiled'])} kernels "
              f"compiled and {r['from_disk']} from disk, then {', '.join(late) or 'none'}")  # fmt: skip


def main() -> int:
    parser = option_parser(__doc__)
    add_names(parser, "--impls", OURS)
    parser.add_argument("--activations", default=",".join(ACTIVATIONS))
    parser.add_argument("--size", default="Small", help=f"of {', '.join(SIZES)}, or T,H; I/E/K")
    parser.add_argument("--at-once", type=int, default=4, help="number of cases that run at the same time")
    parser.add_argument("--seconds", type=float, default=90.0, help="longest time of a process")
    parser.add_argument("--out", type=Path, help="default: results/<gpu>/first_call.json")
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    cases = [(impl, activation) for impl in args.impls for activation in args.activations.split(",")]
    if dry_run():
        for impl, activation in cases:
            print(f"{impl:8} {activation:7} T,H; I/E/K = {shape_named(args.size).label}: cold, warm, new token counts "
                  f"{new_token_counts(shape_named(args.size).tokens)}")  # fmt: skip
        return 0
    if args.child:
        impl, activation = args.child.split("/")
        with candidate(args.child):
            run_case(impl, activation, args.size)
        return 0
    need_gpu()
    gate, records = Gate(lambda key: True), []
    out = args.out or result_path("first_call", gpu_name())
    lost = {f"{impl}/{activation}": "no time left" for impl, activation in cases}
    with ThreadPoolExecutor(args.at_once) as pool:
        runs = {pool.submit(run_cold_and_warm, *case, args): "/".join(case) for case in cases}
        try:
            for done in as_completed(runs):
                records += [record for record in done.result() if not gate.take(record)]
                del lost[runs[done]]
                so_far = Gate(gate.ours, gate.errors, gate.failures | lost)  # red until all have run
                write_result(out, "first_call", gate=so_far, summary={}, records=records)
        except BaseException:  # otherwise the pool would still run the waiting cases
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    report(records, gate)
    write_result(out, "first_call", gate=gate, summary={}, records=records)
    print(f"wrote {out}")
    return 0 if gate.green else 1


if __name__ == "__main__":
    sys.exit(main())
