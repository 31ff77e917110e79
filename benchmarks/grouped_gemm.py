"""Grouped GEMM on one GPU: what the layers take, undecided tiles of the Hopper kernel and the peers, interleaved.

    python benchmarks/grouped_gemm.py [--shapes S1,S2] [--ops up,dw1] [--out FILE.json] [--seconds 330]

Products of an expert layer (T tokens, H hidden, I expert width, E experts, K top-k, R = T·K rows; Z has 2I columns):

    up    Z  = X[gather] · W1ᵀ   (R, H)·(H, 2I)    W1 (E, 2I, H)
    down  Y  = A · W2            (R, I)·(I, H)     W2 (E, I, H)
    dx    dX = dZ · W1           (R, 2I)·(2I, H)
    dw1   dW1 = dZᵀ · X[gather]  per expert (2I, H)
    dw2   dW2 = Aᵀ · dO[gather]  per expert (I, H)

Up, down and dX are the Hopper kernel's, which gathers rows as it reads them; dW is `grouped_mm_dw_op`'s, whatever that
takes, on rows gathered beforehand. A candidate is timed only after its result has been compared with float32 and found
free of NaN in memory that held NaN. Times are medians over rounds in which every candidate runs in turn, because the
chip is power-limited and drifts. Peers run if they import: torch._grouped_mm and cuBLAS's bmm get rows gathered
beforehand, bmm also perfectly even experts.
With `--peers bmm,torch,quack,triton` the plain Triton kernels run, too.

Each shape runs in a process of its own with a deadline; a candidate that hangs or breaks the CUDA context is struck off
and the shape resumed without it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

SHAPES = {  # T, H, I, E, K
    "S0": (40960, 768, 256, 128, 8),
    "S1": (24576, 1536, 256, 128, 8),
    "S3": (24576, 1536, 1024, 32, 2),
    "S4": (32768, 4096, 256, 256, 16),
    "S2": (32768, 4096, 512, 128, 8),
    "S5": (32768, 4096, 1024, 128, 8),
    "S6": (16384, 4096, 14336, 8, 2),
}
OPS = ("up", "down", "dx", "dw1", "dw2")
PRODUCTS = ("up", "down", "dx")
PEERS = ("bmm", "torch", "quack")
ROUNDS = 7
ROUND_MS = 12.0


def candidates(op: str, shape: str) -> dict[str, Any]:
    """What the layers take, and up to two tiles of the Hopper kernel that measurements have not decided about."""
    from megablocks.ops.grouped.grouped_mm_hopper import Tile

    # A store in four parts, two in flight: a part's way to memory hides under the next one's conversion.
    parts = Tile(64, 256, 4, out_parts=4, out_buffers=2, group_m=8)
    wide = Tile(64, 256, 5, pingpong=True, out_parts=4)
    undecided: dict[str, Any] = {}
    if op == "up":
        undecided["parts"] = parts
        if shape == "S2":
            undecided["columns-first"] = Tile(64, 256, 4)
        elif shape == "S3":
            undecided["wide"] = wide
    return {"ours": None} | undecided


def quack_tiles() -> dict[str, tuple[int, int, bool, int, int]]:
    """tile_M, tile_N, pingpong, cluster_M, cluster_N: the neighbourhood of QuACK's default on Hopper."""
    return {
        "quack-pp192": (128, 192, True, 2, 1),
        "quack-pp128": (128, 128, True, 2, 1),
        "quack-c256x128": (256, 128, False, 2, 1),
        "quack-c256x192": (256, 192, False, 2, 1),
    }


class Problem:
    """The operands of one product and its truth on a few experts."""

    def __init__(self, shape: str, op: str, tokens: int | None = None) -> None:
        import torch

        T, H, inner, E, K = SHAPES[shape]
        T = tokens or T
        self.op, self.E, self.R = op, E, T * K
        generator = torch.Generator("cuda").manual_seed(0)
        score = torch.rand(T, E, device="cuda", generator=generator)
        expert = score.topk(K, dim=1).indices.flatten()
        order = torch.argsort(expert, stable=True)
        self.offsets = torch.zeros(E + 1, dtype=torch.int32, device="cuda")
        self.offsets[1:] = torch.bincount(expert, minlength=E).cumsum(0)
        self.gather = (order // K).int()

        def rand(*size: int) -> Any:
            return torch.randn(*size, device="cuda", dtype=torch.bfloat16, generator=generator) * 0.1

        R = self.R
        self.gathered = op in ("up", "dw1", "dw2")
        if op == "up":
            self.a, self.w = rand(T, H), rand(E, 2 * inner, H).transpose(1, 2)
        elif op == "down":
            self.a, self.w = rand(R, inner), rand(E, inner, H)
        elif op == "dx":
            self.a, self.w = rand(R, 2 * inner), rand(E, 2 * inner, H)
        elif op == "dw1":
            self.a, self.b = rand(R, 2 * inner), rand(T, H)
        else:
            self.a, self.b = rand(R, inner), rand(T, H)
        self.flops = 2 * R * (self.w.shape[1] * self.w.shape[2] if op in PRODUCTS else self.a.shape[1] * H)

    def check(self, out: Any) -> float:
        """Largest relative error over a few experts; inf when any value is NaN."""
        if bool(out.isnan().any()):
            return float("inf")
        worst = 0.0
        bounds = self.offsets.tolist()
        for e in sorted({0, 1, self.E // 2, self.E - 1}):
            lo, hi = bounds[e], bounds[e + 1]
            if self.op in PRODUCTS:
                rows = self.a[self.gather[lo:hi].long()] if self.gathered else self.a[lo:hi]
                truth, got = rows.float() @ self.w[e].float(), out[lo:hi]
            else:
                truth, got = self.a[lo:hi].float().T @ self.b[self.gather[lo:hi].long()].float(), out[e]
            worst = max(worst, float((got.float() - truth).norm() / truth.norm().clamp_min(1e-20)))
        return worst

    def ours(self, tile: Any) -> Callable[[], Any]:
        from megablocks.ops.grouped.grouped_mm import grouped_mm_dw_op
        from megablocks.ops.grouped.grouped_mm_hopper import ragged_m

        if self.op in PRODUCTS:
            gather = self.gather if self.gathered else None
            return lambda: ragged_m(self.a, self.w, self.offsets, gather, tile=tile)
        rows = self.b[self.gather.long()]
        return lambda: grouped_mm_dw_op(self.a, rows, self.offsets)

    def twin(self) -> Callable[[], Any]:
        from megablocks.ops.grouped import grouped_mm_triton

        if self.op in PRODUCTS:
            gather = self.gather if self.gathered else None
            return lambda: grouped_mm_triton.ragged_m(self.a, self.w, self.offsets, gather)
        return lambda: grouped_mm_triton.ragged_k(self.a, self.b, self.offsets, self.gather)

    def torch_grouped(self) -> Callable[[], Any]:
        import torch

        ends = self.offsets[1:]
        if self.op in PRODUCTS:
            rows = self.a[self.gather.long()] if self.gathered else self.a
            return lambda: torch._grouped_mm(rows, self.w, offs=ends)
        rows = self.b[self.gather.long()]
        return lambda: torch._grouped_mm(self.a.t(), rows, offs=ends)

    def bmm(self) -> Callable[[], Any]:
        """The same floating-point operations with every expert holding R / E rows; its result is not comparable."""
        import torch

        per = self.R // self.E
        if self.op in PRODUCTS:
            rows = torch.randn(self.E, per, self.w.shape[1], device="cuda", dtype=torch.bfloat16) * 0.1
            return lambda: torch.bmm(rows, self.w)
        a = self.a[: per * self.E].view(self.E, per, -1).transpose(1, 2)
        b = torch.randn(self.E, per, self.b.shape[1], device="cuda", dtype=torch.bfloat16) * 0.1
        return lambda: torch.bmm(a, b)

    def quack(self, tile: tuple[int, int, bool, int, int]) -> Callable[[], Any]:
        import torch
        from quack.gemm import gemm

        m, n, pingpong, cluster_m, cluster_n = tile
        common = dict(tile_M=m, tile_N=n, cluster_M=cluster_m, cluster_N=cluster_n, pingpong=pingpong, persistent=True)
        if self.op in PRODUCTS:
            index = self.gather if self.gathered else None

            def product() -> Any:
                out = torch.empty(self.R, self.w.shape[2], device="cuda", dtype=torch.bfloat16)
                gemm(self.a, self.w.mT, out, None, None, cu_seqlens_m=self.offsets, A_idx=index, **common)
                return out

            return product

        def gradient() -> Any:
            out = torch.empty(self.E, self.a.shape[1], self.b.shape[1], device="cuda", dtype=torch.bfloat16)
            gemm(self.b.T, self.a.T, out.mT, None, None, cu_seqlens_k=self.offsets, A_idx=self.gather, **common)
            return out

        return gradient

    def all(self, shape: str, peers: tuple[str, ...]) -> dict[str, Callable[[], Callable[[], Any]]]:
        made: dict[str, Callable[[], Callable[[], Any]]] = {}
        if "bmm" in peers:
            made["bmm"] = self.bmm
        if "torch" in peers:
            made["torch"] = self.torch_grouped
        for name, tile in candidates(self.op, shape).items():
            made[name] = lambda tile=tile: self.ours(tile)
        if "triton" in peers:
            made["triton"] = self.twin
        if "quack" in peers and shape in ("S1", "S2"):
            for name, tile in quack_tiles().items():
                made[name] = lambda tile=tile: self.quack(tile)
        return made


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
        mine = candidates(op, shape) | {"triton": None}
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
                if error < 5e-3:
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
    from statistics import median

    print("\nµs hot / cool (hot TFLOP/s); × = time over the best of bmm, over the best of QuACK, in the same rounds")
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
                for peer in ("bmm", quack or "–")
            ]
            rate = record["flops"] / mid[name] / 1e6
            print(f"  {name:15s} {mid[name]:8.0f} / {median(cool[name]):7.0f} ({rate:4.0f})  × {' '.join(against)}")
    struck = [r for r in records if "bad" in r]
    for record in struck:
        print(f"FAILED {record['shape']} {record['op']} {record['bad']}: {record['why']}")
    errors = [r["error"] for r in records if "good" in r]
    if errors:
        print(f"{len(errors)} results checked, largest relative error {max(errors):.1e}, no NaN; {len(struck)} failed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="S1,S2,S0,S3,S5,S4,S6")
    parser.add_argument("--ops", default=",".join(OPS))
    parser.add_argument("--peers", default=",".join(PEERS))
    parser.add_argument("--seconds", type=float, default=330, help="for everything")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", choices=["compile", "time"], help=argparse.SUPPRESS)
    parser.add_argument("--struck", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    shapes, ops, peers = args.shapes.split(","), args.ops.split(","), tuple(args.peers.split(","))
    if args.child:
        child(args.child, shapes[0], ops, set(args.struck.split(",")), peers)
        return
    import importlib.util

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
                args.out.write_text(json.dumps(records))
    finally:
        table(records)


if __name__ == "__main__":
    main()
