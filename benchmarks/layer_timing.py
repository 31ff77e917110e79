"""Checks, memory and interleaved times of the candidates of whole-layer benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from children import candidate, guarded, struck_off
from layer_candidates import GRAPHED, PEERS, Problem, Step, kind
from measure import calls_for, emit, graph_of, host_milliseconds, interleave, milliseconds, on_gpu

from megablocks.tool.problem import memory_of

GRAPH_LAUNCH_MS = 2.0
"""The GPU waits this long before a graph is timed. The host needs less to launch a graph."""


def timers_of(
    job: str, problem: Problem, name: str, make: Callable[[], Step], *, graph: bool = False, queued: bool = False,
    one_thread: bool = False,
) -> tuple[dict[str, Callable[[], float]], dict[str, int]]:  # fmt: skip
    """Check a candidate. Returns its timers in µs, `eager/NAME` and `forward/NAME` and those below, and its memory.

    graph: also `graph/NAME`, the step as a CUDA graph.
    queued: also `queued/NAME`, the step with its launches already in the GPU's queue. `forward/NAME` is queued, too.
    one_thread: also `one thread/NAME`, eager with backward in the caller's thread.

    A candidate that is wrong or raises has no timers. The parent gets a report.
    """
    timers: dict[str, Callable[[], float]] = {}
    key = f"{job}/{name}"

    def timer(how: str, fn: Callable[[], Any], calls: int, inside: int = 1, wait: float = 0.0) -> None:
        timers[f"{how}/{name}"] = guarded(key, lambda: 1e3 * milliseconds(fn, calls, head_start_ms=wait) / inside)

    with candidate(key):
        step = make()
        slack = 2.0 if name.endswith("8 bits") else 1.0  # the error of 8 bits alone is 9e-3
        error = 0.0 if name == "bmm" else problem.error(step, weights=kind(name) not in PEERS, slack=slack)
        memory = {} if name in ("bmm", GRAPHED) else memory_of(step)  # a graph holds its memory all the time
        milliseconds(step.total)
        calls = calls_for(step.total)
        timer("eager", step.total, calls)  # keeps the step alive, and with it all operands of the graph
        if queued:
            few = min(calls, 5)  # the queue holds about a thousand launches
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
    """Interleaved times of all timers of all candidates that are not excluded, and memory by candidate."""
    timers: dict[str, Callable[[], float]] = {}
    memory: dict[str, dict[str, int]] = {}
    for name, make in makers.items():
        if struck_off(f"{job}/{name}", struck):
            continue
        mine, kept = timers_of(job, problem, name, make, graph=name in graphs, queued=queued, one_thread=one_thread)
        if mine:
            timers |= mine
            memory[name] = kept
    return interleave(timers, rounds), memory
