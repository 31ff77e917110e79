"""Kernels and host time of a layer's indices (from expert ids to offsets, gather and scatter) and of its router.

    python benchmarks/bookkeeping.py [--out DIR]

The profiler gives the kernels and their µs. Each call first runs under torch's guard against synchronization. The calls
that build indices are also captured as a CUDA graph, and the indices of the call and of the replay must equal those of
the plain torch reference, otherwise the run ends. "host" is the host time of a call in µs. DRY_RUN=1 prints the cases.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
from measure import Gate, dry_run, need_gpu, option_parser, write_result
from torch.profiler import ProfilerActivity, profile

from megablocks.config import MoEConfig
from megablocks.moe.router import route
from megablocks.ops.routing import topk
from megablocks.ops.routing.dispatch import (
    Dispatch,
    build_dispatch,
    build_dispatch_ref,
    make_routing,
    pad_dispatch,
    pad_indices_ref,
)
from megablocks.ops.sparse.matrix import max_block_rows, topology, topology_ref
from megablocks.testing.poison import poisoned_empty
from megablocks.testing.syncs import no_sync

CASES = ((24576, 128, 8), (65536, 64, 1), (32768, 256, 16), (16384, 512, 10))
ROUNDED = ((16384, 128, 2), (16384, 256, 4))
"""The shapes of token_rounding.py. Here only the router runs, plain and with loads rounded to the nearest tile."""
WIDTH = 512
STEPS = 10


def indices(tokens: int, experts: int, top_k: int) -> dict[str, tuple[Callable[[], Any], Callable[[], Any]]]:
    """{name: (call, reference)}. Both return a tuple of index tensors."""
    torch.manual_seed(0)
    ids = torch.rand(tokens, experts, device="cuda").topk(top_k, dim=1).indices
    routing = make_routing(ids, torch.rand(tokens, top_k, device="cuda"), experts)
    pairs = routing.num_pairs
    block_rows = max_block_rows(pairs, experts)

    def plain() -> tuple[Any, ...]:
        return build_dispatch(routing)[:5]

    def padded() -> tuple[Any, ...]:
        d = build_dispatch(routing)
        built = topology(d.expert_offsets, WIDTH, max_rows=pairs)
        rows = pad_dispatch(d, built.padded_offsets, 128 * block_rows)
        return *d[:5], built.padded_offsets, *built.pattern.blocks[:-2], *rows[1:5]

    def plain_ref() -> tuple[Any, ...]:
        return build_dispatch_ref(routing.token, routing.expert, tokens, experts)

    def padded_ref() -> tuple[Any, ...]:
        d = Dispatch(*plain_ref())
        offsets, *pattern = topology_ref(d.expert_offsets, WIDTH // 128, block_rows, 128)
        padded = pad_indices_ref(d, offsets[1:], 0, 128 * block_rows)
        return *d[:5], offsets, *pattern, d.token_offsets, *padded

    return {"indices": (plain, plain_ref), "with topology and padded rows": (padded, padded_ref)}


def launches(fn: Callable[[], Any], calls: int = 5) -> list[tuple[str, float]]:
    """(name, µs) of the kernels, copies and fills that one call runs on the GPU, in order, from the profiler.

    Raises:
        RuntimeError: the call synchronizes (torch's guard checks it in a separate call), or the profiler saw no kernel.
    """
    fn()
    torch.cuda.synchronize()
    with no_sync():
        fn()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as run:
        for _ in range(calls):
            fn()
        torch.cuda.synchronize()
    events = [e for e in run.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    events.sort(key=lambda e: e.time_range.start)
    events = [e for e in events if "Sync" not in e.name]
    if not events:
        raise RuntimeError("the profiler saw no kernel: it needs CUPTI and the permission to use it")
    each = len(events) // calls
    assert each * calls == len(events), f"{len(events)} launches in {calls} equal calls"
    by_place = [[events[c * each + i] for c in range(calls)] for i in range(each)]
    return [(group[0].name, median(e.time_range.elapsed_us() for e in group)) for group in by_place]


def host_microseconds(fn: Callable[[], Any], calls: int = 200) -> float:
    """Median host time of a call. Every 20 calls the host waits, outside the measured time, for the GPU."""
    times = []
    for _ in range(calls):
        start = time.perf_counter()
        fn()
        times.append(time.perf_counter() - start)
        if len(times) % 20 == 0:
            torch.cuda.synchronize()
    return 1e6 * median(times)


def check(name: str, call: Callable[[], Any], reference: Callable[[], Any]) -> None:
    """End the run unless the call returns the reference's tensors, in poisoned memory and as a CUDA graph."""
    with poisoned_empty():
        first = call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    for tensor in captured:
        tensor.fill_(-7)
    graph.replay()
    for a, b, c in zip(first, captured, reference(), strict=True):
        if not (torch.equal(a, c) and torch.equal(b, c)):
            raise SystemExit(f"bookkeeping: {name} differs from its reference")


def router_step(
    tokens: int, experts: int, top_k: int, fused: bool, rounding: str | None = None
) -> tuple[Callable[[], Any], ...]:
    """(forward, forward + backward, STEPS forwards + one backward), from logits to a Routing with both losses."""
    config = MoEConfig(
        hidden_size=64, ffn_hidden_size=64, num_experts=experts, top_k=top_k, normalize_top_k=1.0,
        load_balancing_loss_weight=0.01, z_loss_weight=0.001, token_rounding=rounding,
    )  # fmt: skip
    torch.manual_seed(0)
    logits = torch.randn(tokens, experts, device="cuda", dtype=torch.bfloat16).requires_grad_()

    def kernels() -> AbstractContextManager[Any]:
        return nullcontext() if fused else mock.patch.object(topk, "kernels_take", lambda *_: False)

    def forward() -> Any:
        with kernels():
            return route(logits, config, training=True)

    d_weight = torch.randn_like(forward().weight)  # with rounding there may be more than T·K pairs
    one = torch.ones((), device="cuda")

    def both(forwards: int) -> Any:
        outputs = []
        for _ in range(forwards):
            routing = forward()
            outputs += [routing.weight, *routing.losses.values()]
        with kernels():
            return torch.autograd.grad(outputs, logits, [d_weight, one, one] * forwards)

    # many: like a model, where one backward, with one change of threads, serves all layers
    return forward, partial(both, 1), partial(both, STEPS)


def main() -> int:
    parser = option_parser(__doc__)
    parser.add_argument("--out", type=Path, help="folder for bookkeeping.json")
    options = parser.parse_args()
    if dry_run():
        for tokens, experts, top_k in CASES:
            print(f"T={tokens} E={experts} K={top_k} ids={tokens * top_k}")
        for tokens, experts, top_k in ROUNDED:
            print(f"T={tokens} E={experts} K={top_k} router, plain and rounded")
        return 0
    need_gpu()

    records: list[dict[str, Any]] = []
    gate = Gate(lambda key: True)

    def note(shape: tuple[int, int, int], name: str, call: Callable[[], Any]) -> None:
        kernels = launches(call)
        spent, host = sum(us for _, us in kernels), host_microseconds(call)
        print(f"  {name:32} {len(kernels):3d} launches, {spent:7.1f} us of kernels, {host:6.0f} us host", flush=True)
        by_name: dict[str, list[float]] = {}
        for kernel, us in kernels:
            by_name.setdefault(kernel[:60], []).append(round(us, 2))
        record = {"shape": shape, "name": name, "launches": len(kernels), "us": spent, "host_us": host}
        records.append(record | {"kernels": by_name})

    def write() -> None:  # after each shape, so that an interrupted run leaves its results
        if options.out:
            write_result(options.out / "bookkeeping.json", "bookkeeping", gate=gate, summary={}, records=records)

    for shape in CASES:
        print(f"T,E,K = {shape}: {shape[0] * shape[2]} ids")
        for name, (call, reference) in indices(*shape).items():
            check(name, call, reference)
            gate.take({"good": f"{shape}/{name}", "error": 0.0})  # `check` ends the run if an index differs
            note(shape, name, call)
        for fused in (True, False):
            forward, both, many = router_step(*shape, fused)
            how = "fused" if fused else "unfused"
            note(shape, f"router forward, {how}", forward)
            note(shape, f"router forward + backward, {how}", both)
            host = host_microseconds(many, calls=40) / STEPS
            print(f"  {STEPS} routers and one backward: {host:.0f} us host per router")
            records[-1]["host_us_of_many"] = host
        write()
    for shape in ROUNDED:
        print(f"T,E,K = {shape}")
        for rule in (None, "nearest"):
            forward, both, _ = router_step(*shape, True, rule)
            note(shape, f"router forward, {rule or 'plain'}", forward)
            note(shape, f"router forward + backward, {rule or 'plain'}", both)
        write()
    return 0


if __name__ == "__main__":
    sys.exit(main())
