"""What a layer spends on indices: from expert ids to offsets, gather and scatter indices; and the router before that.

    python benchmarks/bookkeeping.py [--out DIR]

Kernels and their µs are the profiler's, each call first under torch's guard against host synchronisation, then captured
as a CUDA graph whose replay must give the same indices; every index is compared with the plain torch reference, and a
wrong one ends the run. "host" is the µs that a call keeps the host busy. Goal at 196,608 ids and 128 experts: at most
25 µs of kernels in 4 launches. DRY_RUN=1 prints the cases alone.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from measure import Gate, dry_run, need_gpu, write_result

CASES = ((24576, 128, 8), (65536, 64, 1), (32768, 256, 16), (16384, 512, 10))
ROUNDED = ((16384, 128, 2), (16384, 256, 4))
"""Shapes of token_rounding.py: the router alone, with the tokens of an expert rounded to the nearest tile."""
WIDTH = 512
STEPS = 10
MOST_US, MOST_LAUNCHES = 25.0, 4


def indices(tokens: int, experts: int, top_k: int) -> dict[str, tuple[Callable[[], Any], Callable[[], Any]]]:
    """{name: (call, reference)} that give tuples of index tensors."""
    import torch

    from megablocks.ops.permute.padded import pad_dispatch, pad_indices_ref
    from megablocks.ops.routing.dispatch import build_dispatch, build_dispatch_ref, make_routing
    from megablocks.ops.sparse.topology import max_block_rows, topology, topology_ref

    torch.manual_seed(0)
    ids = torch.rand(tokens, experts, device="cuda").topk(top_k, dim=1).indices
    routing = make_routing(ids, torch.rand(tokens, top_k, device="cuda"), experts)
    pairs = routing.num_pairs
    block_rows = max_block_rows(pairs, experts)

    def plain() -> tuple[Any, ...]:
        return tuple(build_dispatch(routing))

    def padded() -> tuple[Any, ...]:
        d = build_dispatch(routing)
        built = topology(d.expert_offsets, WIDTH, max_rows=pairs)
        return (
            *d,
            built.padded_offsets,
            *built.pattern.indices,
            *pad_dispatch(d, built.padded_offsets, 128 * block_rows),
        )

    def plain_ref() -> tuple[Any, ...]:
        return tuple(build_dispatch_ref(routing.token, routing.expert, tokens, experts))

    def padded_ref() -> tuple[Any, ...]:
        d = build_dispatch_ref(routing.token, routing.expert, tokens, experts)
        offsets, *pattern = topology_ref(d.expert_offsets, WIDTH // 128, block_rows, 128)
        moves = (d.pair, d.gather, d.scatter, 1)
        _, *rows = pad_indices_ref(d.expert_offsets[1:], offsets[1:], 0, 128 * block_rows, *moves)
        return *d, offsets, *pattern, d.token_offsets, *rows

    return {"indices": (plain, plain_ref), "with topology and padded rows": (padded, padded_ref)}


def launches(fn: Callable[[], Any], calls: int = 5) -> list[tuple[str, float]]:
    """(name, µs) of what one call runs on the device, in order: kernels, copies and fills, by the profiler.

    Raises:
        RuntimeError: the call waits for the device (checked by torch's synchronisation guard in another call), or the
            profiler saw nothing of it.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile

    fn()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        fn()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as run:
        for _ in range(calls):
            fn()
        torch.cuda.synchronize()
    events = [e for e in run.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    events.sort(key=lambda e: e.time_range.start)
    events = [e for e in events if "Sync" not in e.name]
    if not events:
        raise RuntimeError("the profiler saw no kernel: it needs CUPTI and the right to use it")
    each = len(events) // calls
    assert each * calls == len(events), f"{len(events)} launches in {calls} equal calls"
    by_place = [[events[c * each + i] for c in range(calls)] for i in range(each)]
    return [(group[0].name, median(e.time_range.elapsed_us() for e in group)) for group in by_place]


def host_microseconds(fn: Callable[[], Any], calls: int = 200) -> float:
    """Median wall time of a call on the host alone: the device works off what was queued between the rounds."""
    import torch

    times = []
    for _ in range(calls):
        start = time.perf_counter()
        fn()
        times.append(time.perf_counter() - start)
        if len(times) % 20 == 0:
            torch.cuda.synchronize()
    return 1e6 * median(times)


def check(name: str, call: Callable[[], Any], reference: Callable[[], Any]) -> None:
    """End the run unless the call, in poisoned memory and replayed from a graph, gives the reference's tensors."""
    import torch

    from megablocks.testing.poison import poisoned_empty

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
    """(forward, forward and backward, STEPS forwards and one backward) from logits to a Routing with both losses."""
    from unittest import mock

    import torch

    from megablocks.config import MoEConfig
    from megablocks.routers import functional

    config = MoEConfig(
        hidden_size=64, ffn_hidden_size=64, num_experts=experts, top_k=top_k, normalize_top_k=1.0,
        load_balancing_loss_weight=0.01, z_loss_weight=0.001, token_rounding=rounding,
    )  # fmt: skip
    torch.manual_seed(0)
    logits = torch.randn(tokens, experts, device="cuda", dtype=torch.bfloat16).requires_grad_()

    def forward() -> Any:
        if fused:
            return functional.route(logits, config, training=True)
        with mock.patch.object(functional, "router_kernel_takes", lambda *_, **__: False):
            return functional.route(logits, config, training=True)

    d_weight = torch.randn_like(forward().weight)  # rounding has room for more pairs than T·K
    one = torch.ones((), device="cuda")

    def both() -> Any:
        routing = forward()
        outputs = [routing.weight, *routing.losses.values()]
        return torch.autograd.grad(outputs, logits, [d_weight, one, one])

    def many() -> Any:  # as in a model, where one backward pass, with its change of threads, serves all layers
        outputs = []
        for _ in range(STEPS):
            routing = forward()
            outputs += [routing.weight, *routing.losses.values()]
        return torch.autograd.grad(outputs, logits, [d_weight, one, one] * STEPS)

    return forward, both, many


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for bookkeeping.json, e.g. benchmarks/results/h200")
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

    def note(shape: tuple[int, int, int], name: str, call: Callable[[], Any]) -> dict[str, Any]:
        kernels = launches(call)
        spent, host = sum(us for _, us in kernels), host_microseconds(call)
        print(f"  {name:32} {len(kernels):3d} launches, {spent:7.1f} us of kernels, {host:6.0f} us host", flush=True)
        record = {"shape": shape, "name": name, "launches": len(kernels), "us": spent, "host_us": host}
        by_name: dict[str, list[float]] = {}
        for kernel, us in kernels:
            by_name.setdefault(kernel[:60], []).append(round(us, 2))
        records.append(record | {"kernels": by_name})
        return record

    def write() -> None:  # after each shape, so that a run cut short leaves what it has
        if options.out:
            summary = {"us": goal["us"], "launches": goal["launches"], "met": met}
            write_result(options.out / "bookkeeping.json", "bookkeeping", gate=gate, summary=summary, records=records)

    for shape in CASES:
        print(f"T,E,K = {shape}: {shape[0] * shape[2]} ids")
        for name, (call, reference) in indices(*shape).items():
            check(name, call, reference)
            gate.take({"good": f"{shape}/{name}", "error": 0.0})  # indices are equal or the run ends
            note(shape, name, call)
        for fused in (True, False):
            forward, both, many = router_step(*shape, fused)
            how = "fused" if fused else "unfused"
            note(shape, f"router forward, {how}", forward)
            note(shape, f"router forward + backward, {how}", both)
            host = host_microseconds(many, calls=40) / STEPS
            print(f"  {STEPS} routers and one backward: {host:.0f} us host a router")
            records[-1]["host_us_of_many"] = host
        goal = records[0]
        met = goal["us"] <= MOST_US and goal["launches"] <= MOST_LAUNCHES
        write()
    for shape in ROUNDED:
        print(f"T,E,K = {shape}")
        for rule in (None, "nearest"):
            forward, both, _ = router_step(*shape, True, rule)
            note(shape, f"router forward, {rule or 'plain'}", forward)
            note(shape, f"router forward + backward, {rule or 'plain'}", both)
        write()
    print(f"goal at {goal['shape']}: {MOST_US} us, {MOST_LAUNCHES} launches: {'met' if met else 'missed'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
