"""Block-sparse products on one GPU: MegaBlocks' 18 products against cuBLAS's batched product, and skewed routing.

    python benchmarks/block_sparse.py [--sizes XS,Small,Medium] [--products sdd,…] [--sweep] [--out FILE.json]

The six products of a two-layer expert MLP (T tokens, H hidden, F width, E experts; S is block-sparse, T × E·F):

    sdd    S  = X · W1     dsd    Y  = S · W2                                    forward   W1 (H, E·F), W2 (E·F, H)
    sdd_t  dS = dY · W2ᵀ   dst_d  dW2 = Sᵀ · dY   dsd_t  dX = S · W1ᵀ   ddt_s  dW1 = Xᵀ · S     backward

Uniform routing gives every expert T / E tokens and is compared with torch.bmm of the same floating-point operations;
Zipf (s = 1, fixed seed) routes the same T tokens, and its speed is per nonzero block, relative to uniform's.

A candidate is timed only after its whole result has been compared with float32 in memory that held NaN. Times are
medians over rounds in which every candidate of a case runs in turn, as one CUDA graph each, because the chip is
power-limited and drifts. Each product runs in a process of its own with a deadline; a candidate that hangs or breaks
the CUDA context is struck off and the product resumed without it.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import mean, median
from typing import Any

SIZES = {"XS": (65536, 512, 2048, 64), "Small": (32768, 768, 3072, 64), "Medium": (8192, 1024, 4096, 64)}
PRODUCTS = ("sdd", "dsd", "sdd_t", "dst_d", "dsd_t", "ddt_s")
ROUNDS = 9
ROUND_MS = 8.0
# The paper's own figures, on its own GPU: what a run is held against.
MEAN_GOAL, LEAST_GOAL, SKEW_GOAL = 0.986, 0.91, 0.90


def candidates(product: str, sweep: bool) -> dict[str, Any]:
    """Tiles to time beside the one that the ops choose by themselves ("ours")."""
    from megablocks.ops.sparse.hopper import Tile

    if not sweep:
        return {}
    tiles = {
        "pp6": Tile(128, 128, 6, pingpong=True, out_parts=4, out_buffers=2),
        "pp6h": Tile(128, 128, 6, pingpong=True, out_parts=2),
        "pp5": Tile(128, 128, 5, pingpong=True, out_parts=2, out_buffers=2),
        "pp3k": Tile(128, 128, 3, pingpong=True, out_parts=4, out_buffers=2, BK=128),
    }
    if product == "ddt_s":
        tiles |= {"tall4": Tile(128, 128, 4, out_parts=2), "tall3": Tile(128, 128, 3)}
    else:
        tiles |= {"wide4": Tile(64, 256, 4, out_parts=2), "wide3": Tile(64, 256, 3)}
    return tiles


def zipf_counts(tokens: int, experts: int) -> Any:
    """Tokens of each expert, drawn with probability ∝ 1 / rank, the ranks shuffled over the experts."""
    import torch

    generator = torch.Generator().manual_seed(0)
    weight = 1 / torch.arange(1, experts + 1, dtype=torch.float64)
    drawn = torch.multinomial(weight, tokens, replacement=True, generator=generator)
    return torch.bincount(drawn, minlength=experts)[torch.randperm(experts, generator=generator)]


class Case:
    """One product at one size and routing: operands, truth and candidates."""

    def __init__(self, product: str, size: tuple[int, int, int, int], routing: str) -> None:
        import torch

        from megablocks.ops.sparse import topology

        self.product, self.routing = product, routing
        self.T, self.H, self.F, self.E = T, H, F, E = size
        counts = torch.full((E,), T // E) if routing == "uniform" else zipf_counts(T, E)
        offsets = torch.zeros(E + 1, dtype=torch.int32)
        offsets[1:] = counts.cumsum(0)
        rows = T // 128 if routing == "uniform" and T // E % 128 == 0 else None
        built = topology(offsets.cuda(), F, max_rows=T, block_rows=rows)
        self.pattern, self.bounds = built.pattern, built.padded_offsets.tolist()
        self.blocks = self.bounds[-1] // 128 * (F // 128)
        self.flops = 2 * 128 * 128 * H * self.blocks
        # each operand read once, the result written once
        self.bytes = 2 * (self.bounds[-1] * H + E * F * H + self.blocks * 128 * 128)
        generator = torch.Generator("cuda").manual_seed(1)

        def rand(*shape: int) -> Any:
            return torch.randn(*shape, device="cuda", dtype=torch.bfloat16, generator=generator) * 0.1

        self.x = rand(self.pattern.shape[0], H)
        self.x[self.bounds[-1] :] = float("nan")  # rows beyond the last expert's are room: nothing may read them
        self.w = rand(H, E * F) if product in ("sdd", "dsd_t") else rand(E * F, H)
        self.s = None
        if not product.startswith("sdd"):
            data = rand(self.pattern.num_blocks, 128, 128)
            data[self.blocks :] = float("nan")
            self.s = self.pattern.with_data(data)

    def ours(self) -> Any:
        from megablocks.ops.sparse import dds, dsd, sdd

        if self.product == "sdd":
            return sdd(self.x, self.w, self.pattern).data
        if self.product == "sdd_t":
            return sdd(self.x, self.w.t(), self.pattern).data
        if self.product == "dsd":
            return dsd(self.s, self.w)
        if self.product == "dsd_t":
            return dsd(self.s, self.w.t())
        return dsd(self.s.t(), self.x) if self.product == "dst_d" else dds(self.x.t(), self.s)

    def launch(self, module: Any, **options: Any) -> Any:
        """The same through hopper.py or kernels.py directly."""
        p = self.pattern
        if self.s is None:
            w = self.w if self.product == "sdd" else self.w.t()
            return module.sdd(self.x, w, p.row_indices, p.column_indices, p.offsets, **options)
        by_row, by_column = (p.row_work, p.column_indices, None), (p.column_work, p.column_indices_t, p.block_offsets_t)
        data = self.s.data
        if self.product in ("dsd", "dsd_t"):
            return module.spmm(data, self.w if self.product == "dsd" else self.w.t(), *by_row, True, **options)
        if self.product == "dst_d":
            return module.spmm(data, self.x, *by_column, True, **options)
        return module.spmm(data, self.x.t(), *by_column, False, **options)

    def hopper(self, tile: Any) -> Callable[[], Any]:
        from megablocks.ops.sparse import hopper

        more = {"run": self.pattern.run} if self.s is None else {}
        return lambda: self.launch(hopper, tile=tile, **more)

    def twin(self) -> Any:
        from megablocks.ops.sparse import kernels

        return self.launch(kernels, **({"block_size": 128} if self.s is None else {}))

    def stk(self) -> Callable[[], Any]:
        import stk

        matrix = (self.s or self.pattern).to_stk()
        x, w, product = self.x[: self.bounds[-1]], self.w, self.product
        if self.s is None:
            return lambda: stk.ops.sdd(x, w if product == "sdd" else w.t(), matrix).data
        if product in ("dsd", "dsd_t"):
            return lambda: stk.ops.dsd(matrix, w if product == "dsd" else w.t())
        return (lambda: stk.ops.dsd(matrix.t(), x)) if product == "dst_d" else (lambda: stk.ops.dds(x.t(), matrix))

    def bmm(self) -> Callable[[], Any]:
        """Every expert's product of the same sizes as one batch; each expert's operands contiguous."""
        import torch

        E, F, H, m = self.E, self.F, self.H, self.T // self.E

        def rand(*shape: int) -> Any:
            return torch.randn(E, *shape, device="cuda", dtype=torch.bfloat16) * 0.1

        left, right = {
            "sdd": lambda: (rand(m, H), rand(H, F)),
            "sdd_t": lambda: (rand(m, H), rand(F, H).mT),
            "dsd": lambda: (rand(m, F), rand(F, H)),
            "dsd_t": lambda: (rand(m, F), rand(H, F).mT),
            "dst_d": lambda: (rand(m, F).mT, rand(m, H)),
            "ddt_s": lambda: (rand(m, H).mT, rand(m, F)),
        }[self.product]()
        return lambda: torch.bmm(left, right)

    def error(self, out: Any) -> float:
        """Largest relative error of an expert's part against float32, over all experts; inf where it is NaN."""
        import torch

        worst, F = 0.0, self.F
        blocks_per_row = F // 128
        for e in range(self.E):
            lo, hi = self.bounds[e], self.bounds[e + 1]
            columns = slice(e * F, (e + 1) * F)
            chunk = slice(lo // 128 * blocks_per_row, hi // 128 * blocks_per_row)
            x = self.x[lo:hi].float()

            def dense(data: Any, chunk: slice = chunk, lo: int = lo, hi: int = hi) -> Any:
                blocks = data[chunk].float().view((hi - lo) // 128, blocks_per_row, 128, 128)
                return blocks.transpose(1, 2).reshape(hi - lo, F)

            w = self.w[:, columns].float() if self.w.shape[0] == self.H else self.w[columns].float()
            if self.product in ("sdd", "sdd_t"):
                got, want = dense(out), x @ (w if self.product == "sdd" else w.t())
            elif self.product in ("dsd", "dsd_t"):
                got, want = out[lo:hi].float(), dense(self.s.data) @ (w if self.product == "dsd" else w.t())
            elif self.product == "dst_d":
                got, want = out[columns].float(), dense(self.s.data).t() @ x
            else:
                got, want = out[:, columns].float(), x.t() @ dense(self.s.data)
            off = float((got - want).norm() / want.norm().clamp_min(1e-20)) if want.numel() else 0.0
            worst = max(worst, off if off == off else float("inf"))
        if self.product in ("dsd", "dsd_t") and not bool((out[self.bounds[-1] :] == 0).all()):
            return float("inf")  # block rows without blocks must come out as zeros
        torch.cuda.synchronize()
        return worst

    def all(self, sweep: bool) -> dict[str, Callable[[], Callable[[], Any]]]:
        made: dict[str, Callable[[], Callable[[], Any]]] = {"ours": lambda: self.ours}
        if self.routing == "uniform":
            made["bmm"] = self.bmm
        for name, tile in candidates(self.product, sweep).items():
            made[name] = lambda tile=tile: self.hopper(tile)
        if sweep and self.routing == "uniform":
            made["triton"] = lambda: self.twin
            made["stk"] = self.stk
        return made


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


def child(product: str, sizes: list[str], struck: set[str], sweep: bool, compile_only: bool) -> None:
    """Check, then time every candidate of a product; with compile_only just compile and check them, on few tokens."""
    import torch

    from megablocks.testing.poison import poisoned_empty

    torch.backends.cuda.matmul.allow_tf32 = False
    for size in sizes:
        ready: dict[str, tuple[Callable[[], None], int]] = {}
        cases: dict[str, Case] = {}
        for routing in ("uniform", "zipf"):
            case = cases[routing] = Case(product, (1024, 512, 256, 8) if compile_only else SIZES[size], routing)
            for name, make in case.all(sweep).items():
                key = f"{product}/{size}/{routing}/{name}"
                if key in struck:
                    continue
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
                    if not compile_only:
                        milliseconds(fn)
                        calls = max(1, round(ROUND_MS / max(milliseconds(fn), 1e-2)))
                        ready[f"{routing}/{name}"] = graph_of(fn, calls), calls
                    emit(good=key, error=error)
                except Exception as e:  # a peer may raise anything, and must not take the others along
                    emit(bad=key, why=f"{type(e).__name__}: {str(e)[-300:]}")
                    if any(word in str(e) for word in ("CUDA error", "illegal", "launch failure")):
                        os._exit(3)
        if ready:
            emit(start=f"{product}/{size}/timing")
            times: dict[str, list[float]] = {name: [] for name in ready}
            names = list(ready)
            for i in range(-1, ROUNDS):
                for name in names[i % len(names) :] + names[: i % len(names)]:
                    replay, calls = ready[name]
                    spent = 1e3 * milliseconds(replay) / calls
                    if i >= 0:  # the first round warms up
                        times[name].append(spent)
            numbers = {r: {"flops": c.flops, "bytes": c.bytes, "blocks": c.blocks} for r, c in cases.items()}
            emit(product=product, size=size, times=times, **numbers)
        emit(finished=size)
        del ready, cases, case
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


def run_product(
    product: str, sizes: list[str], struck: set[str], sweep: bool, compile_only: bool, end: float
) -> list[dict[str, Any]]:
    """Run a product's child, again without the candidate that broke it, until its sizes are done or time is up."""
    records: list[dict[str, Any]] = []
    todo = list(sizes)
    while todo and time.monotonic() < end:
        command = [sys.executable, __file__, "--child", "--products", product, "--sizes", ",".join(todo)]
        command += ["--struck", ",".join(sorted(struck))] + ["--sweep"] * sweep + ["--compile-only"] * compile_only
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        running, hung, before, noise = "", False, (len(todo), len(struck)), []
        for line in lines_of(process, end, 100 if compile_only else 40):
            if line is None:
                hung = True
                break
            if not line.startswith("{"):
                noise.append(line)
                continue
            record = json.loads(line)
            if "start" in record:
                running = record["start"]
            elif "finished" in record:
                todo.remove(record["finished"])
                running = ""
            else:
                running = ""
                if "bad" in record:
                    struck.add(record["bad"])
                records.append(record)
        if hung:
            process.kill()
        code = process.wait()
        if running and todo:
            struck.add(running)
            how = "hung" if hung else f"died ({code})"
            records.append({"bad": running, "why": f"{how} {''.join(noise[-3:])[-300:]}"})
        elif todo and (len(todo), len(struck)) == before:
            records.append({"bad": f"{product}/{todo[0]}", "why": f"exit {code}: {''.join(noise[-3:])[-300:]}"})
            todo.pop(0)
    return records


def report(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Print the table; return the summary. A red gate prints no speed-up."""
    print("\nµs, TFLOP/s, share of cuBLAS's speed; Zipf: speed per nonzero block over uniform's, in the same rounds")
    ratios, skews, best = {}, {}, {}
    for r in records:
        if "times" not in r:
            continue
        times, case = r["times"], f"{r['product']:6s} {r['size']:7s}"
        mid = {name: median(t) for name, t in times.items()}

        def against(a: str, b: str, times: dict[str, list[float]] = times) -> float | None:
            both = zip(times.get(a, []), times.get(b, []), strict=False)
            return median([y / x for x, y in both]) if a in times and b in times else None

        floor = r["uniform"]["bytes"] / 4.2e6
        print(f"{case} {r['uniform']['flops'] / 1e9:.0f} GFLOP, {r['uniform']['bytes'] / 1e6:.0f} MB ({floor:.0f} µs)")
        for name in sorted(mid, key=mid.__getitem__):
            routing, kind = name.split("/")
            rate = r[routing]["flops"] / mid[name] / 1e6
            line = f"    {name:16s} {mid[name]:7.1f} µs {rate:5.0f} TFLOP/s"
            if routing == "uniform" and (ratio := against(name, "uniform/bmm")) is not None:
                line += f"   {ratio:6.1%} of bmm"
                if kind == "ours":
                    ratios[case] = ratio
                if kind not in ("bmm", "triton", "stk"):
                    best[case] = max(best.get(case, 0.0), ratio)
            if routing == "zipf" and (ratio := against(name, f"uniform/{kind}")) is not None:
                per_block = ratio * r["zipf"]["blocks"] / r["uniform"]["blocks"]
                line += f"   {per_block:6.1%} of uniform per block"
                if kind == "ours":
                    skews[case] = per_block
            print(line)
    failed = [r for r in records if "bad" in r]
    for r in failed:
        print(f"FAILED {r['bad']}: {r['why']}")
    checked = [r["error"] for r in records if "good" in r and not r["good"].endswith("/bmm")]
    red = [r["bad"] for r in failed if r["bad"].endswith("/ours") or r["bad"].count("/") < 3]
    print(f"{len(checked)} results checked, largest relative error {max(checked, default=0):.1e}; {len(failed)} failed")
    if red or not ratios:
        print(f"gate red, no speed-up: {', '.join(red) or 'nothing was measured'}")
        return {"gate": "red", "failed": red}
    summary = {
        "gate": "green", "cases": len(ratios), "mean": mean(ratios.values()), "least": min(ratios.values()),
        "best tile's mean": mean(best.values()), "least per block under Zipf": min(skews.values(), default=None),
    }  # fmt: skip
    average, least, skew = mean(ratios.values()), min(ratios.values()), min(skews.values(), default=0.0)
    met = average >= MEAN_GOAL and least >= LEAST_GOAL and skew >= SKEW_GOAL
    print(f"{len(ratios)} of 18 products: mean {average:.1%} of bmm (goal {MEAN_GOAL:.1%}), least {least:.1%} "
          f"(goal {LEAST_GOAL:.0%}), least per block under Zipf {skew:.1%} (goal {SKEW_GOAL:.0%}); mean with each "
          f"case's best tile {mean(best.values()):.1%}; goals {'met' if met else 'not met'}")  # fmt: skip
    return summary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default=",".join(SIZES))
    parser.add_argument("--products", default=",".join(PRODUCTS))
    parser.add_argument("--sweep", action="store_true", help="time every tile, the Triton kernels and stanford-stk too")
    parser.add_argument("--seconds", type=float, default=400, help="for everything")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--compile-only", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--struck", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    sizes, products = args.sizes.split(","), args.products.split(",")
    if args.child:
        child(products[0], sizes, set(args.struck.split(",")), args.sweep, args.compile_only)
        return
    began = time.monotonic()
    end = began + args.seconds

    # Compile in parallel on few tokens; whatever fails here is tried again, and counted, at full size.
    def compile_product(product: str) -> None:
        for r in run_product(product, sizes[:1], set(), args.sweep, True, min(end, time.monotonic() + 100)):
            if "bad" in r and not r["bad"].endswith("stk"):
                print(f"on few tokens: {r['bad']}: {r['why']}", flush=True)

    workers = [threading.Thread(target=compile_product, args=(product,)) for product in products]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    print(f"compiled in {time.monotonic() - began:.0f} s", flush=True)
    records: list[dict[str, Any]] = []
    summary: dict[str, Any] = {}
    try:
        for product in products:
            start = time.monotonic()
            records += run_product(product, sizes, set(), args.sweep, False, end)
            print(f"{product} took {time.monotonic() - start:.0f} s", flush=True)
    finally:
        summary = report(records)
        if args.out:
            args.out.write_text(json.dumps({"environment": environment(), "summary": summary, "records": records}))


def environment() -> dict[str, str]:
    import torch
    import triton

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {"gpu": gpu, "torch": torch.__version__, "triton": triton.__version__, "cuda": str(torch.version.cuda)}


if __name__ == "__main__":
    main()
