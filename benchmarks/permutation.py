"""Token movement compared with copies: gather, combine and their gradients, also into padded rows and into bins.

    python benchmarks/permutation.py [--shapes T,H,K …] [--out DIR]

Each op runs in the same interleaved rounds as copies that read and write as many bytes. The faster copy counts: torch's
copy_ or an elementwise kernel. (In a CUDA graph copy_ is a memcpy node. Above 1 GB it reads 2.7 TB/s on an H200, and
the kernel 4.2.) The op is also compared with the fastest copy of the run. The bytes of an op are those of each row that
it reads or writes, once. A token's row of x or dy counts once for all K.

Every result, computed in memory that held NaN, is first compared with the plain torch reference. A wrong result ends
the run. Random tokens and routing, bf16, 128 experts, blocks of 128, bins of the mean load. DRY_RUN=1 prints the cases.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from measure import (
    Gate,
    calls_for,
    dry_run,
    graph_of,
    interleave,
    milliseconds,
    need_gpu,
    option_parser,
    relative_error,
    speed,
    write_result,
)

from megablocks.testing.poison import poisoned_empty

SHAPES = (
    (24576, 1536, 8), (40960, 768, 8), (32768, 4096, 8), (16384, 4096, 2),
    (65536, 512, 1), (32768, 768, 1), (16384, 1024, 2),
)  # fmt: skip
EXPERTS, BLOCK = 128, 128
ROUND_MS, MOST_CALLS = 4.0, 50


class Case:
    """The ops of one shape: {name: (call, reference, bytes)}."""

    def __init__(self, tokens: int, hidden: int, top_k: int) -> None:
        from megablocks.ops.permute import rows as r
        from megablocks.ops.routing import dispatch as p

        torch.manual_seed(0)
        ids = torch.rand(tokens, EXPERTS, device="cuda").topk(top_k, dim=1).indices
        routing = p.make_routing(ids, torch.rand(tokens, top_k, device="cuda"), EXPERTS)
        d, weight = p.build_dispatch(routing), routing.weight
        loads = routing.metrics["tokens_per_expert"]
        padded_offsets = torch.zeros(EXPERTS + 1, dtype=torch.int32, device="cuda")
        padded_offsets[1:] = ((loads + BLOCK - 1) // BLOCK * BLOCK).cumsum(0)
        pairs = routing.num_pairs
        room, capacity = int(padded_offsets[-1]), -(-pairs // EXPERTS)
        kept = int(loads.clamp(max=capacity).sum())

        def rand(*shape: int) -> Any:
            return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

        x, dy = rand(tokens, hidden), rand(tokens, hidden)
        self.ops: dict[str, tuple[Callable[[], Any], Callable[[], Any], int]] = {}
        kinds = {
            "": (d, pairs, pairs, pairs),
            "padded ": (p.pad_dispatch(d, padded_offsets, room), pairs, room, room),
            "binned ": (p.bin_dispatch(d, capacity), kept, EXPERTS * capacity, EXPERTS * capacity),
        }
        for kind, (to, read, written, num_rows) in kinds.items():
            rows = rand(num_rows, hidden)
            calls: dict[str, tuple[str, tuple[Any, ...], int]] = {
                "gather": ("gather", (x, to), tokens + written),
                "gather backward": ("combine", (rows, None, to), tokens + read),
                "combine": ("combine", (rows, weight, to), tokens + read),
                "combine backward": ("combine_backward", (dy, rows, weight, to), tokens + read + written),
            }
            for name, (op, operands, moved) in calls.items():
                run, reference = (partial(getattr(r, f"{op}_{end}"), *operands) for end in ("op", "ref"))
                self.ops[kind + name] = run, reference, 2 * hidden * moved

    def wrong(self) -> list[str]:
        """The ops whose result differs from the reference by more than roundings of bf16."""
        bad = []
        self.errors: dict[str, float] = {}
        for name, (call, reference, _) in self.ops.items():
            with poisoned_empty():
                got = call()
            expected = reference()
            if isinstance(got, torch.Tensor):
                got, expected = (got,), (expected,)
            self.errors[name] = max(relative_error(a, b) for a, b in zip(got, expected, strict=True))
            for a, b in zip(got, expected, strict=True):
                tolerance = 2**-7 if a.dtype == torch.bfloat16 else 1e-3  # float32: a dot product over H
                if not torch.allclose(a.float(), b.float(), rtol=tolerance, atol=tolerance):
                    bad.append(f"{name}: off by {float((a.float() - b.float()).abs().max()):.2e}")
        return bad


def copies_of(num_bytes: int) -> dict[str, Callable[[], Any]]:
    """Two ways of torch to read and write num_bytes in all: copy_, and an elementwise kernel."""
    x = torch.randn(num_bytes // 4, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(x)
    return {f"copy {num_bytes}": lambda: out.copy_(x), f"neg {num_bytes}": lambda: torch.neg(x, out=out)}


def timer(fn: Callable[[], Any]) -> Callable[[], float]:
    """A timer of `fn`, in µs per call, that replays a CUDA graph of several calls."""
    milliseconds(fn)
    calls = min(MOST_CALLS, calls_for(fn, ROUND_MS))
    replay = graph_of(fn, calls)
    return lambda: 1e3 * milliseconds(replay) / calls


def measure(shape: tuple[int, int, int], rounds: int, gate: Gate) -> list[dict[str, Any]]:
    case = Case(*shape)
    if bad := case.wrong():
        raise SystemExit(f"permutation: wrong at {shape}: {'; '.join(bad)}")
    for name, error in case.errors.items():
        gate.take({"good": f"{shape}/{name}", "error": error})
    functions = copies_of(2**31)
    for name, (call, _, num_bytes) in case.ops.items():
        functions[name] = call
        if f"copy {num_bytes}" not in functions:
            functions |= copies_of(num_bytes)
    times = interleave({name: timer(fn) for name, fn in functions.items()}, rounds)
    return rows_of(shape, {name: num_bytes for name, (*_, num_bytes) in case.ops.items()}, times)


def rows_of(
    shape: tuple[int, int, int], bytes_of: Mapping[str, int], times: Mapping[str, Sequence[float]]
) -> list[dict[str, Any]]:
    """One row an op. The shares are medians of the ratios of the rounds. times: of the ops and of all copies, in µs."""
    spent = {name: median(values) for name, values in times.items()}
    sizes = {2**31, *bytes_of.values()}
    fastest = {size: min((f"copy {size}", f"neg {size}"), key=spent.__getitem__) for size in sizes}
    best = max(sizes, key=lambda size: size / spent[fastest[size]])
    peak, out = best / spent[fastest[best]], []
    for name, num_bytes in bytes_of.items():
        of_copy, of_best = (speed(times, name, copy) for copy in (fastest[num_bytes], fastest[best]))
        assert of_copy is not None and of_best is not None
        out.append(
            {
                "shape": shape, "op": name, "bytes": num_bytes, "us": spent[name],
                "gb_per_s": num_bytes / spent[name] / 1e3, "of_copy": of_copy, "of_peak": of_best * num_bytes / best,
                "peak_gb_per_s": peak / 1e3,
            }
        )  # fmt: skip
    return out


def main() -> int:
    parser = option_parser(__doc__)
    parser.add_argument("--shapes", nargs="*", default=[",".join(map(str, shape)) for shape in SHAPES])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, help="folder for permutation.json")
    options = parser.parse_args()
    shapes = [tuple(map(int, shape.split(","))) for shape in options.shapes]
    if any(len(shape) != 3 for shape in shapes):
        parser.error(f"--shapes={' '.join(options.shapes)}: each must be T,H,K")
    if dry_run():
        for tokens, hidden, top_k in shapes:
            print(f"T={tokens} H={hidden} K={top_k} rows={tokens * top_k}")
        return 0
    need_gpu()

    print("speed as a share of a copy of as many bytes | of the best copy, µs")
    records: list[dict[str, Any]] = []
    gate = Gate(lambda key: True)
    for shape in shapes:
        records += (found := measure(shape, options.rounds, gate))
        print(f"T,H,K = {shape}, best copy {found[0]['peak_gb_per_s']:.0f} GB/s")
        for r in found:
            print(f"  {r['op']:24} {r['of_copy']:.2f} | {r['of_peak']:.2f} {r['us']:8.1f}", flush=True)
        if options.out:  # after each shape, so that an interrupted run leaves its results
            summary = {"rounds": options.rounds}
            write_result(options.out / "permutation.json", "permutation", gate=gate, summary=summary, records=records)
    least = min(records, key=lambda r: r["of_copy"])
    print(f"least: {least['of_copy']:.2f} ({least['op']}, {least['shape']})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
