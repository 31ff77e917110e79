"""How long a layer's first training step takes at a new shape, cold and warm; what new token counts compile.

    python benchmarks/first_call.py [--impls auto,fused] [--size Small | "24576,1536; 256/128/8"] [--out FILE.json]

Each case is a process of its own, timed from the first forward's start to the end of its backward and AdamW step;
importing, building the layer, CUDA's own start and AdamW's are before that. "cold" has an empty Triton cache, "warm"
the cache that the cold one left. Afterwards the same process runs other token counts, odd ones among them, during which
nothing may compile: the kernels that Triton makes ready are counted, those found in its disk cache too.

Compiling keeps one core busy, so several cases run at once. Goals: cold at most 10 s; no kernel at a new token count.
Writes results/<gpu>/first_call.json, after each case. DRY_RUN=1 prints the cases.
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

from children import candidate, chosen
from layer_candidates import OURS, SIZES, Shape, labelled, shape_of
from measure import Gate, dry_run, emit, gpu_name, need_gpu, result_path, write_result

COLD_GOAL_S = 10.0
ACTIVATIONS = ("gelu", "swiglu")


def shape_named(size: str) -> Shape:
    return shape_of(size) if size in SIZES else labelled(size)


def new_token_counts(tokens: int) -> list[int]:
    """Fewer, more, many fewer, and no multiple of 16, which Triton would compile for apart if a kernel let it."""
    return [tokens // 2, tokens + 128, tokens - 1, tokens // 2 + 8, tokens // 8 + 13]


def count_compilations() -> list[tuple[str, bool]]:
    """(name, whether Triton's disk cache had it) of the kernels made ready from now on; grows as they are.

    Through the compiler's listener: the hooks of a JIT function write its constants as JSON, which the Gluon kernels'
    tile plans are not.
    """
    ready: list[tuple[str, bool]] = []
    from triton import knobs

    def listener(*, src: Any, cache_hit: bool, **_: Any) -> None:
        ready.append((src.name, cache_hit))

    knobs.compilation.listener = listener
    return ready


def run_case(impl: str, activation: str, size: str) -> None:
    """The child: one first call and several new token counts."""
    import torch

    from megablocks import MoEConfig, dMoE

    shape = shape_named(size)

    def adamw(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-4, fused=True)

    a = torch.nn.Parameter(torch.randn(256, 256, device="cuda", dtype=torch.bfloat16))
    (a @ a).sum().backward()  # CUDA's, cuBLAS's and the optimizer's own start
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
    """A case in two processes, one after the other: what each said for the gate, and its record.

    The second one runs only if the first has left it a whole cache.
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


def summarise(records: list[dict[str, Any]], gate: Gate) -> dict[str, Any]:
    """Print the table; the gate is red where a case did not run."""
    gate.report()
    print("\nseconds: first step cold, warm disk cache, second step; kernels compiled first, then at new token counts")
    short = [f"{key}: did not run" for key in gate.failures]
    for r in records:
        late = sorted({name for names in r["new_counts"].values() for name in names})
        print(f"  {r['cache']:4} {r['impl']:8} {r['activation']:7} first {r['first_s']:6.2f}, second "
              f"{r['second_s']:6.3f}, slowest new count {r['slowest_new_s']:6.3f}; {len(r['compiled'])} kernels "
              f"compiled and {r['from_disk']} from disk, then "
              f"{', '.join(late) or 'none'}")  # fmt: skip
        case = f"{r['impl']} {r['activation']} {r['cache']}"
        if r["cache"] == "cold" and r["first_s"] > COLD_GOAL_S:
            short.append(f"{case}: {r['first_s']:.1f} s")
        if late:
            short.append(f"{case}: compiled {', '.join(late)} at a new token count")
    print(f"goal (cold <= {COLD_GOAL_S:g} s, none at a new count): {'met' if not short else '; '.join(short)}")
    return {"missed": short}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--impls", default=",".join(OURS))
    parser.add_argument("--activations", default=",".join(ACTIVATIONS))
    parser.add_argument("--size", default="Small", help=f"of {', '.join(SIZES)}, or T,H; I/E/K")
    parser.add_argument("--at-once", type=int, default=4, help="cases")
    parser.add_argument("--seconds", type=float, default=90.0, help="a case may take")
    parser.add_argument("--out", type=Path, help="default results/<gpu>/first_call.json")
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    impls = chosen(parser, "--impls", args.impls, OURS)
    cases = [(impl, activation) for impl in impls for activation in args.activations.split(",")]
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
        except BaseException:  # the pool would run what waits
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    write_result(out, "first_call", gate=gate, summary=summarise(records, gate), records=records)
    print(f"wrote {out}")
    return 0 if gate.green else 1


if __name__ == "__main__":
    sys.exit(main())
