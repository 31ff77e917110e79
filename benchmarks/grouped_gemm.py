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

Each shape runs in a process of its own with a deadline; a candidate that hangs or breaks the CUDA context is struck off
and the shape resumed without it.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

from grouped_gemm_cases import OPS, SHAPES, Problem
from measure import Gate, write_result

PEERS = ("bmm", "torch", "quack", "off")
ROUNDS = 7
ROUND_MS = 12.0


def emit(**record: Any) -> None:
    print(json.dumps(record), flush=True)


def milliseconds(fn: Callable[[], Any], calls: int) -> float:
    import torch

    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(calls):
        fn()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / calls


def child(mode: str, shape: str, ops: list[str], struck: set[str], peers: tuple[str, ...]) -> None:
    """Check and time every candidate of a shape; with mode "compile" only compile them, on a few tokens."""
    import torch

    from megablocks.testing.poison import poisoned_empty

    torch.backends.cuda.matmul.allow_tf32 = False
    for op in ops:
        problem = Problem(shape, op, tokens=512 if mode == "compile" else None)
        mine = ("ours", "apart", "off", "triton")
        ready: dict[str, Callable[[], Any]] = {}
        for name, make in problem.all(shape, peers).items():
            if f"{op}/{name}" in struck:
                continue
            emit(op=op, start=name)
            try:
                fn = make()
                with poisoned_empty() if name in mine else contextlib.nullcontext():
                    out = fn()
                torch.cuda.synchronize()
                error = 0.0 if name == "bmm" else problem.check(out)
                del out
                # a layer rounds to bfloat16 on the way
                if error < (1e-2 if op == "layer" else 5e-3):
                    ready[name] = fn
                    emit(op=op, good=name, error=error)
                else:
                    emit(op=op, bad=name, why=f"relative error {error:.1e}")
            except Exception as e:  # a peer may raise anything, and must not take the others along
                emit(op=op, bad=name, why=f"{type(e).__name__}: {str(e)[-300:]}")
                if "CUDA error" in str(e) or "illegal" in str(e) or "launch failure" in str(e):
                    os._exit(3)
        if mode == "time" and ready:
            emit(op=op, start="timing")
            calls = {name: max(1, round(ROUND_MS / milliseconds(fn, 2))) for name, fn in ready.items()}
            hot: dict[str, list[float]] = {name: [] for name in ready}
            cool: dict[str, list[float]] = {name: [] for name in ready}
            names = list(ready)
            for i in range(ROUNDS):
                for name in names[i % len(names) :] + names[: i % len(names)]:
                    hot[name].append(1e3 * milliseconds(ready[name], calls[name]))
            for _ in range(2):
                for name in names:
                    torch.cuda.synchronize()
                    time.sleep(0.07)
                    cool[name].append(1e3 * milliseconds(ready[name], 2))
            emit(op=op, flops=problem.flops, hot=hot, cool=cool)
        emit(op=op, finished=True)
        del problem, ready
        torch.cuda.empty_cache()


def lines_of(process: subprocess.Popen[str], end: float, quiet: float) -> Iterator[str | None]:
    """Lines of a process until it ends; None, once, when `end` passes or it says nothing for `quiet` seconds."""
    box: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            box.put(line)
        box.put(None)

    threading.Thread(target=read, daemon=True).start()
    while True:
        try:
            line = box.get(timeout=max(0.01, min(quiet, end - time.monotonic())))
        except queue.Empty:
            yield None
            return
        if line is None:
            return
        yield line


def run_shape(
    mode: str, shape: str, ops: list[str], struck: set[str], peers: str, seconds: float
) -> list[dict[str, Any]]:
    """Run a shape's child, again without the candidate that broke it, until its ops are done or time is up."""
    records: list[dict[str, Any]] = []
    todo, end = list(ops), time.monotonic() + seconds
    while todo and time.monotonic() < end:
        command = [sys.executable, __file__, "--child", mode, "--shapes", shape, "--ops", ",".join(todo)]
        command += ["--struck", ",".join(sorted(struck)), "--peers", peers]
        errors = subprocess.DEVNULL if mode == "compile" else None
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        running, hung, before = "", False, len(todo)
        for line in lines_of(process, end, 60 if mode == "compile" else 40):
            if line is None:
                hung = True
                break
            if not line.startswith("{"):
                continue
            record = json.loads(line) | {"shape": shape}
            if "start" in record:
                running = f"{record['op']}/{record['start']}"
                continue
            if "bad" in record:
                struck.add(f"{record['op']}/{record['bad']}")
                running = ""
            elif "good" in record:
                running = ""
            if record.get("finished"):
                todo.remove(record["op"])
            else:
                records.append(record)
        if hung:
            process.kill()
        code = process.wait()
        if not todo:
            break
        if running and running not in struck:
            struck.add(running)
            op, name = running.split("/")
            records.append({"shape": shape, "op": op, "bad": name, "why": f"hung or died ({code})"})
        elif len(todo) == before and not running:
            records.append({"shape": shape, "op": todo[0], "bad": "process", "why": f"exit {code}"})
            todo.pop(0)
    return records


def table(records: list[dict[str, Any]]) -> None:
    print("\nµs hot / cool (hot TFLOP/s); × = time over bmm's, over that of QuACK's best tile, over torch's, by round")
    for record in records:
        if "hot" not in record:
            continue
        hot, cool = record["hot"], record["cool"]
        mid = {name: median(values) for name, values in hot.items()}
        quack = min((n for n in mid if n.startswith("quack")), key=mid.__getitem__, default=None)
        print(f"\n{record['shape']} {SHAPES[record['shape']]} {record['op']}")
        for name in sorted(mid, key=mid.__getitem__):
            against = [
                f"{median(a / b for a, b in zip(hot[name], hot[peer], strict=True)):5.2f}" if peer in hot else "    –"
                for peer in ("bmm", quack or "–", "torch")
            ]
            rate = record["flops"] / mid[name] / 1e6
            print(f"  {name:15s} {mid[name]:8.0f} / {median(cool[name]):7.0f} ({rate:4.0f})  × {' '.join(against)}")
    struck = [r for r in records if "bad" in r]
    for record in struck:
        print(f"FAILED {record['shape']} {record['op']} {record['bad']}: {record['why']}")
    errors = [r["error"] for r in records if "good" in r]
    if errors:
        print(f"{len(errors)} results checked, largest relative error {max(errors):.1e}, no NaN; {len(struck)} failed")


def gate_of(records: list[dict[str, Any]], shapes: list[str], ops: list[str]) -> Gate:
    """Ours must be right; so must what was lost, as something of it was not measured."""
    gate = Gate(lambda key: key.rsplit("/", 1)[1] not in (*PEERS, "triton", "apart") and "/quack" not in key)
    for r in records:
        if "good" in r:
            gate.take({"good": f"{r['shape']}/{r['op']}/{r['good']}", "error": r["error"]})
        elif "bad" in r:
            gate.take({"bad": f"{r['shape']}/{r['op']}/{r['bad']}", "why": r["why"]})
    timed = {(r["shape"], r["op"]) for r in records if "hot" in r and "ours" in r["hot"]}
    for shape, op in ((shape, op) for shape in shapes for op in ops if (shape, op) not in timed):
        gate.take({"bad": f"{shape}/{op}/ours", "why": gate.failures.get(f"{shape}/{op}/ours", "not timed")})
    return gate


def summary(record: dict[str, Any]) -> dict[str, Any]:
    """A record of rounds as medians: µs, TFLOP/s, and the medians over rounds of the time over each peer's."""
    hot = record["hot"]
    best = min((n for n in hot if n.startswith("quack")), key=lambda n: median(hot[n]), default=None)
    peers = [peer for peer in ("bmm", best, "torch", "torch-take", "apart", "off") if peer in hot]
    return {
        "shape": record["shape"],
        "sizes": SHAPES[record["shape"]],
        "op": record["op"],
        "us": {name: round(median(times), 1) for name, times in hot.items()},
        "us_cool": {name: round(median(times), 1) for name, times in record["cool"].items()},
        "tflops": {name: round(record["flops"] / median(times) / 1e6, 1) for name, times in hot.items()},
        "time_of_ours_over": {
            peer: round(median(a / b for a, b in zip(hot["ours"], hot[peer], strict=True)), 3)
            for peer in peers
            if "ours" in hot
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="S1,S2,S0,S3,S5,S4,S6")
    parser.add_argument("--ops", default=",".join(OPS))
    parser.add_argument("--peers", default=",".join(PEERS))
    parser.add_argument("--seconds", type=float, default=330, help="for everything")
    parser.add_argument("--out", type=Path, help="JSON with environment, medians and quotients")
    parser.add_argument("--child", choices=["compile", "time"], help=argparse.SUPPRESS)
    parser.add_argument("--struck", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    shapes, ops, peers = args.shapes.split(","), args.ops.split(","), tuple(args.peers.split(","))
    if args.child:
        child(args.child, shapes[0], ops, set(args.struck.split(",")), peers)
        return
    if importlib.util.find_spec("quack") is None:
        peers = tuple(p for p in peers if p != "quack")
    end = time.monotonic() + args.seconds
    struck: dict[str, set[str]] = {shape: set() for shape in shapes}
    records: list[dict[str, Any]] = []

    pairs = [(shape, op) for shape in shapes for op in ops]
    box: queue.Queue[tuple[str, str]] = queue.Queue()
    for pair in pairs:
        box.put(pair)

    def work() -> None:
        while time.monotonic() < end:
            try:
                pair = box.get_nowait()
            except queue.Empty:
                return
            # Whatever fails here on few tokens is tried again, and counted, at full size.
            run_shape("compile", pair[0], [pair[1]], set(), ",".join(peers), 100)

    began = time.monotonic()
    workers = [threading.Thread(target=work) for _ in range(max(1, min(12, (os.cpu_count() or 2) - 2)))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    print(f"compiled in {time.monotonic() - began:.0f} s", flush=True)
    try:
        for shape in shapes:
            left = end - time.monotonic()
            if left < 10:
                print(f"no time left for {shape}")
                continue
            began = time.monotonic()
            got = run_shape("time", shape, ops, struck[shape], ",".join(peers), left)
            records += got
            print(f"{shape} took {time.monotonic() - began:.0f} s", flush=True)
            if args.out:
                results = [summary(r) for r in records if "hot" in r]
                gate = gate_of(records, shapes, ops)
                write_result(args.out, "grouped_gemm", gate=gate, summary={"rounds": ROUNDS}, records=results)
    finally:
        table(records)


if __name__ == "__main__":
    main()
