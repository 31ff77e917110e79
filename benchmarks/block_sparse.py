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
import json
import os
import queue
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median
from typing import Any

from block_sparse_cases import FEW_TOKENS, PRODUCTS, SIZES, Case

ROUNDS = 9
ROUND_MS = 8.0
# The paper's own figures, on its own GPU: what a run is held against.
MEAN_GOAL, LEAST_GOAL, SKEW_GOAL = 0.986, 0.91, 0.90
STARTUP_S, QUIET_S, PRODUCT_S = 40, 10, 20
MOST_DEATHS = 3
"""How often a product may take its process along before it is left out."""


def emit(**record: Any) -> None:
    print(json.dumps(record), flush=True)


def graph_of(fn: Callable[[], Any], calls: int) -> Callable[[], None]:
    """`calls` calls as one CUDA graph, so that no launch overhead is timed."""
    import torch

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            fn()
    return graph.replay


def milliseconds(fn: Callable[[], Any]) -> float:
    import torch

    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    fn()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def child(jobs: list[str], struck: set[str], args: argparse.Namespace) -> None:
    """Check, then time every candidate of each product/size; with compile_only just check them, on few tokens."""
    import torch

    torch.backends.cuda.matmul.allow_tf32 = False
    torch.cuda.init()
    for job in jobs:
        emit(job=job)
        time_job(job, struck, args)
        emit(finished=job)
        torch.cuda.empty_cache()


def time_job(job: str, struck: set[str], args: argparse.Namespace) -> None:
    import torch

    from megablocks.testing.poison import poisoned_empty

    product, size = job.split("/")
    # The graphs read what their function's closure holds, so it must live as long: capturing the next graph gives the
    # memory of anything freed back to the device.
    ready: dict[str, tuple[Callable[[], Any], Callable[[], None], int]] = {}
    cases: dict[str, Case] = {}

    def is_struck(routing: str, name: str) -> bool:
        left_out = args.candidates and name not in args.candidates.split(",")
        return bool(left_out) or name in struck or f"{job}/{routing}/{name}" in struck

    def failed(key: str, e: Exception) -> None:
        emit(bad=key, why=f"{type(e).__name__}: {str(e)[-300:]}")
        if any(word in str(e) for word in ("CUDA error", "illegal", "launch failure")):
            os._exit(3)  # the context is gone

    for routing in ("uniform", "zipf"):
        case = cases[routing] = Case(product, FEW_TOKENS if args.compile_only else SIZES[size], routing)
        for name, make in case.candidates(args.sweep, args.stk).items():
            if is_struck(routing, name):
                continue
            key = f"{job}/{routing}/{name}"
            emit(start=key)
            try:
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
                    calls = max(1, round(ROUND_MS / max(milliseconds(fn), 1e-2)))
                    ready[f"{routing}/{name}"] = fn, graph_of(fn, calls), calls
                emit(good=key, error=error)
            except Exception as e:  # a peer may raise anything, and must not take the others along
                failed(key, e)
    times: dict[str, list[float]] = {name: [] for name in ready}
    names = list(ready)
    for i in range(-1, args.rounds) if ready else ():
        for name in names[i % len(names) :] + names[: i % len(names)]:
            emit(start=f"{job}/{name}", round=i)
            try:
                _, replay, calls = ready[name]
                spent = 1e3 * milliseconds(replay) / calls
            except Exception as e:
                failed(f"{job}/{name}", e)
                raise
            if i >= 0:  # the first round warms up
                times[name].append(spent)
    if ready:
        numbers = {r: {"flops": c.flops, "bytes": c.bytes, "blocks": c.blocks} for r, c in cases.items()}
        emit(product=product, size=size, sweep=args.sweep, times=times, **numbers)


def lines_of(process: subprocess.Popen[str], wait: Callable[[], float]) -> Iterator[str | None]:
    """Lines of a process until it ends; None, once, when it says nothing for `wait()` seconds."""
    box: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            box.put(line)
        box.put(None)

    threading.Thread(target=read, daemon=True).start()
    while True:
        try:
            line = box.get(timeout=max(0.01, wait()))
        except queue.Empty:
            yield None
            return
        if line is None:
            return
        yield line


@dataclass
class Runner:
    """Runs jobs (product/size) in child processes; remembers what broke over all of them."""

    flags: list[str]
    end: float
    struck: set[str] = field(default_factory=set)
    deaths: Counter[str] = field(default_factory=Counter)
    records: list[dict[str, Any]] = field(default_factory=list)

    def run(self, jobs: list[str], *more: str, quiet: float = QUIET_S, budget: float = PRODUCT_S) -> None:
        todo, broken = list(jobs), Counter[str]()
        while todo and time.monotonic() < self.end:
            command = [sys.executable, __file__, "--child", ",".join(todo), "--struck", ",".join(sorted(self.struck))]
            process = subprocess.Popen(
                [*command, *self.flags, *more], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
            job, running, noise, why = "", "", [], ""
            job_end = last = time.monotonic() + STARTUP_S

            def wait() -> float:
                now = time.monotonic()
                return min(job_end, self.end, last + quiet if job else self.end) - now  # noqa: B023

            for line in lines_of(process, wait):
                last = time.monotonic()
                if line is None:
                    why = "silent" if last < min(job_end, self.end) else "out of time"
                    break
                if not line.startswith("{"):
                    noise.append(line)
                    continue
                record = json.loads(line)
                if "job" in record:
                    job, job_end, running = record["job"], last + budget, ""
                elif "finished" in record:
                    todo.remove(record["finished"])
                elif "start" in record:
                    running = record["start"]
                else:  # what failed may have left the process unfit to go on, so it stays the suspect
                    running = record.get("bad", "")
                    self.records.append(record)
                    self.struck |= {running} - {""}
            process.kill()
            code = process.wait()
            if not todo:
                return
            job = job if job in todo else todo[0]
            why = f"{why or f'died ({code})'}: {' '.join(''.join(noise[-3:]).split())[-300:]}"
            print(f"{running or job} {why}", flush=True)
            broken[job] += 1
            if running and not why.startswith("out of time"):
                name = running.rsplit("/", 1)[1]
                self.deaths[name] += 1
                if running not in self.struck:
                    self.records.append({"bad": running, "why": why})
                self.struck |= {running} | ({name} if self.deaths[name] > 1 else set())
            if broken[job] >= MOST_DEATHS or not running or why.startswith("out of time"):
                self.records.append({"bad": job, "why": why})
                todo.remove(job)

    def sanitize(self) -> None:
        """compute-sanitizer's view of the first candidate that took its process along."""
        tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
        broke = [r["bad"] for r in self.records if r.get("bad", "").rsplit("/", 1)[-1] in self.deaths]
        if not broke or not Path(tool).exists():
            return
        product, size, _, name = broke[0].split("/")
        command = [tool, "--tool", "memcheck", "--print-limit", "4", sys.executable, __file__, *self.flags, "--sweep"]
        command += ["--child", f"{product}/{size}", "--candidates", name, "--rounds", "1"]
        print(f"compute-sanitizer on {broke[0]}:", flush=True)
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=60)
            print("\n".join((done.stdout + done.stderr).splitlines()[-60:]), flush=True)
        except subprocess.TimeoutExpired as e:
            print(f"nothing within 60 s: {(e.stdout or b'')[-2000:]!r}", flush=True)


def against(times: dict[str, list[float]], name: str, base: str) -> float | None:
    """Speed of `name` relative to `base`: the median over rounds that ran both."""
    if name not in times or base not in times:
        return None
    return median([y / x for x, y in zip(times[name], times[base], strict=True)])


def report(records: list[dict[str, Any]]) -> dict[str, Any]:
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
            if routing == "uniform" and (ratio := against(times, name, "uniform/bmm")) is not None:
                line += f"   {ratio:6.1%} of bmm"
                if kind == "ours" and not r["sweep"]:
                    ratios[case] = ratio
                if kind not in ("bmm", "triton", "stk", "act fused", "act apart"):
                    best[case] = max(best.get(case, 0.0), ratio)
            if routing == "zipf" and (ratio := against(times, name, f"uniform/{kind}")) is not None:
                per_block = ratio * r["zipf"]["blocks"] / r["uniform"]["blocks"]
                line += f"   {per_block:6.1%} of uniform per block"
                if not r["sweep"]:
                    skews[case] = per_block
            print(line)
    failed = [r for r in records if "bad" in r]
    for r in failed:
        print(f"FAILED {r['bad']}: {r['why']}")
    checked = [r["error"] for r in records if "good" in r and not r["good"].endswith("/bmm")]
    red = sorted({r["bad"] for r in failed if r["bad"].endswith("/ours") or r["bad"].count("/") < 3})
    print(f"{len(checked)} results checked, largest relative error {max(checked, default=0):.1e}; {len(failed)} failed")
    if red or not ratios:
        print(f"gate red, no speed-up: {', '.join(red) or 'nothing was measured'}")
        return {"gate": "red", "failed": red}
    average, least, skew = mean(ratios.values()), min(ratios.values()), min(skews.values(), default=0.0)
    met = len(ratios) == 18 and average >= MEAN_GOAL and least >= LEAST_GOAL and skew >= SKEW_GOAL
    print(f"{len(ratios)} of 18 products: mean {average:.1%} of bmm (goal {MEAN_GOAL:.1%}), least {least:.1%} "
          f"(goal {LEAST_GOAL:.0%}), least per block under Zipf {skew:.1%} (goal {SKEW_GOAL:.0%}); mean with each "
          f"case's best tile {mean(best.values()):.1%}; goals {'met' if met else 'not met'}")  # fmt: skip
    return {
        "gate": "green", "cases": len(ratios), "mean": average, "least": least, "least per block under Zipf": skew,
        "best tile's mean": mean(best.values()), "met": met,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default=",".join(SIZES))
    parser.add_argument("--products", default=",".join(PRODUCTS))
    parser.add_argument("--candidates", default="", help="time these alone, by name: ours,bmm,pp6,…")
    parser.add_argument(
        "--sweep", action="store_true", help="afterwards every tile, the Triton kernels and fused activations too"
    )
    parser.add_argument("--stk", action="store_true", help="time stanford-stk's kernels too")
    parser.add_argument("--seconds", type=float, help="for everything; default 200, with --sweep 280")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    parser.add_argument("--compile-only", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--struck", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    sizes, products = args.sizes.split(","), args.products.split(",")
    if args.child:
        child(args.child.split(","), set(args.struck.split(",")), args)
        return
    began = time.monotonic()
    end = began + (args.seconds or (280 if args.sweep else 200))
    flags = ["--stk"] * args.stk + ["--rounds", str(args.rounds), "--candidates", args.candidates]
    sweep = ["--sweep"] * args.sweep

    # Compile in parallel on few tokens; whatever fails here is tried again, and counted, at full size.
    warm = [Runner(flags, min(end, began + 90)) for _ in products]
    workers = [
        threading.Thread(
            target=runner.run,
            args=([f"{product}/{sizes[0]}"], "--compile-only", *sweep),
            kwargs={"quiet": 60.0, "budget": 90.0},
        )
        for runner, product in zip(warm, products, strict=True)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for r in (r for runner in warm for r in runner.records if "bad" in r):
        print(f"on few tokens: {r['bad']}: {r['why']}", flush=True)
    print(f"compiled in {time.monotonic() - began:.0f} s", flush=True)
    jobs = [f"{product}/{size}" for size in sizes for product in products]
    runner, summary = Runner(flags, end), {}
    try:
        runner.run(jobs)
        print(f"products timed by {time.monotonic() - began:.0f} s", flush=True)
        if args.sweep:
            runner.run(jobs, *sweep)
            print(f"sweep timed by {time.monotonic() - began:.0f} s", flush=True)
    finally:
        summary = report(runner.records)
        if args.out:
            args.out.write_text(
                json.dumps({"environment": environment(), "summary": summary, "records": runner.records})
            )
        runner.sanitize()


def environment() -> dict[str, str]:
    import torch
    import triton

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {"gpu": gpu, "torch": torch.__version__, "triton": triton.__version__, "cuda": str(torch.version.cuda)}


if __name__ == "__main__":
    main()
