"""What whole-layer benchmarks do with their candidates: check, measure memory, time in turn, and profile."""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Mapping
from statistics import median
from typing import Any

from children import candidate, guarded, struck_off
from layer_candidates import GRAPHED, PEERS, Problem, Step, kind
from measure import calls_for, emit, graph_of, host_milliseconds, interleave, milliseconds, on_gpu

GRAPH_LAUNCH_MS = 2.0
"""What the GPU waits before a graph is timed: more than the host takes to launch one."""


def memory_of(step: Step) -> dict[str, int]:
    """Bytes alive after the forward that were not before, and the most alive in a step; nothing on a CPU."""
    import torch

    if not on_gpu():
        return {}
    gc.collect()  # what a cycle still holds may otherwise be freed in between
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    y = step.forward()
    held = torch.cuda.memory_allocated() - before
    grads = torch.autograd.grad(y, step.leaves, step.dy)
    peak = torch.cuda.max_memory_allocated() - before
    del y, grads
    return {"held": held, "peak": peak}


def timers_of(
    job: str, problem: Problem, name: str, make: Callable[[], Step], *, graph: bool = False, queued: bool = False,
    one_thread: bool = False,
) -> tuple[dict[str, Callable[[], float]], dict[str, int]]:  # fmt: skip
    """Check a candidate; what times it, in µs: `eager/NAME`, `forward/NAME`, with `graph` `graph/NAME`; its memory.

    queued: the forward alone and one more of the whole step, `queued/NAME`, with their launches already in the queue.
    one_thread: `one thread/NAME`, eager with backward in the caller's thread.

    One that is wrong or raises has no timers, and is reported to the parent.
    """
    timers: dict[str, Callable[[], float]] = {}
    key = f"{job}/{name}"

    def timer(how: str, fn: Callable[[], Any], calls: int, inside: int = 1, wait: float = 0.0) -> None:
        timers[f"{how}/{name}"] = guarded(key, lambda: 1e3 * milliseconds(fn, calls, head_start_ms=wait) / inside)

    with candidate(key):
        step = make()
        slack = 2.0 if name.endswith("8 bits") else 1.0  # 8 bits alone are 9e-3 off
        error = 0.0 if name == "bmm" else problem.error(step, weights=kind(name) not in PEERS, slack=slack)
        memory = {} if name in ("bmm", GRAPHED) else memory_of(step)  # a graph holds its own all the time
        milliseconds(step.total)
        calls = calls_for(step.total)
        timer("eager", step.total, calls)  # holds the step, and so all that the graph reads
        if queued:
            few = min(calls, 5)  # more than a thousand launches do not fit into the queue
            timer("forward", step.forward, few, wait=1.2 * host_milliseconds(step.forward, few))
            timer("queued", step.total, few, wait=1.2 * host_milliseconds(step.total, few))
        else:
            timer("forward", step.forward, calls)
        if one_thread:
            timer("one thread", lambda: _in_one_thread(step), calls)
        if on_gpu() and graph:
            timer("graph", graph_of(step.total, calls), 1, calls, wait=GRAPH_LAUNCH_MS)
        emit(good=key, error=error)
        return timers, memory
    return {}, {}


def _in_one_thread(step: Step) -> None:
    import torch

    with torch.autograd.set_multithreading_enabled(False):
        step.total()


def check_and_time(
    job: str,
    problem: Problem,
    makers: Mapping[str, Callable[[], Step]],
    struck: Collection[str],
    rounds: int,
    *,
    graphs: Collection[str] = (),
    queued: bool = False,
    one_thread: bool = False,
) -> tuple[dict[str, list[float]], dict[str, dict[str, int]]]:
    """Times of all that `timers_of` says, interleaved, but for those struck off, and memory by name."""
    timers: dict[str, Callable[[], float]] = {}
    memory: dict[str, dict[str, int]] = {}
    for name, make in makers.items():
        if struck_off(f"{job}/{name}", struck):
            continue
        how = {"graph": name in graphs, "queued": queued, "one_thread": one_thread}
        mine, kept = timers_of(job, problem, name, make, **how)
        if mine:
            timers |= mine
            memory[name] = kept
    return interleave(timers, rounds), memory


def profile(job: str, makers: Mapping[str, Callable[[], Step]], rows: int, steps: int = 3) -> None:
    """Print where a step's time goes: each kernel's time and count, beside the step's own, eager."""
    import torch
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    for name, make in makers.items():
        try:
            step = make()
            for _ in range(3):
                step.total()
        except Exception as e:  # a peer may raise anything
            print(f"{job} {name}: {type(e).__name__}: {str(e)[-200:]}")
            continue
        wall = median(milliseconds(step.total, 5) for _ in range(5))
        with record(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
            for _ in range(steps):
                step.total()
            torch.cuda.synchronize()
        kernels = [e for e in profiler.key_averages() if str(e.device_type).endswith("CUDA")]
        total = sum(e.self_device_time_total for e in kernels) / steps
        launches = sum(e.count for e in kernels) / steps
        print(f"\n{job} {name}: {1e3 * wall:.0f} µs a step, {total:.0f} µs of kernels, {launches:.0f} launches")
        for e in sorted(kernels, key=lambda e: -e.self_device_time_total)[:rows]:
            print(f"  {e.self_device_time_total / steps:8.1f} µs {e.count / steps:5.1f} × {e.key[:110]}")
