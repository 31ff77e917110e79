"""What the GPU benchmarks share: CUDA-graph timing in interleaved rounds, launches by the profiler, environment."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

ROUND_MS = 4.0


def milliseconds(fn: Callable[[], Any]) -> float:
    import torch

    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    fn()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def interleaved(functions: dict[str, Callable[[], Any]], rounds: int = 7) -> dict[str, float]:
    """Median µs of each, as CUDA graphs of many calls that take turns, so that all see the same clocks.

    A graph reads what its function's closure holds: keep `functions` until this returns.
    """
    import torch

    replays: dict[str, tuple[Callable[[], None], int]] = {}
    for name, fn in functions.items():
        fn()
        once = min(milliseconds(fn) for _ in range(2))
        calls = max(1, min(50, round(ROUND_MS / max(once, 1e-2))))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(calls):
                fn()
        replays[name] = graph.replay, calls
    times: dict[str, list[float]] = {name: [] for name in functions}
    names = list(functions)
    for i in range(-1, rounds):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            replay, calls = replays[name]
            spent = 1e3 * milliseconds(replay) / calls
            if i >= 0:  # the first round warms up
                times[name].append(spent)
    return {name: median(spent) for name, spent in times.items()}


def launches(fn: Callable[[], Any], calls: int = 5) -> list[tuple[str, float]]:
    """(name, µs) of what one call runs on the device, in order: kernels, copies and fills, by the profiler.

    Raises:
        RuntimeError: the call waits for the device (checked by torch's synchronisation guard in another call).
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


def environment() -> dict[str, str]:
    """GPU, versions and commit; $COMMIT names the commit where there is no repository."""
    import torch
    import triton

    where = Path(__file__).parent
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=where, capture_output=True, text=True)
    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": str(torch.version.cuda),
        "commit": os.environ.get("COMMIT") or done.stdout.strip() or "unknown",
    }
