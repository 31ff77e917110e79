"""A Chrome trace of torch's profiler → what ran on the device, and for each kernel the names of its callers.

A kernel's names are its own, then those of the CPU events around its launch, the innermost first. Backward continues at
the forward op of the same sequence number, so a gradient's kernels have the names of their forward op. The list ends at
the innermost range "part: NAME" of the driver. Without a GPU each op of the CPU counts as a kernel.
"""

from __future__ import annotations

import gzip
import heapq
import json
import zlib
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from megablocks.config import ConfigError

RANGE_PREFIX = "part: "
STEP_PREFIX = "ProfilerStep#"
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCH = ("cuda_runtime", "cuda_driver")
_NAMED = ("cpu_op", "user_annotation")
_HOST = (*_NAMED, *_LAUNCH)
_BACKWARD = "autograd::engine::evaluate_function: "
_HOW = "record it with --profile --use-pytorch-profiler --profile-step-start 4 --profile-step-end 7"


class Kernel(NamedTuple):
    """One interval of the device, in µs. part: the driver's range around it, "" without one."""

    name: str
    start: float
    end: float
    callers: tuple[str, ...]
    part: str


@dataclass
class Step:
    """The kernels of `count` whole steps, which last from `start` to `end`, in µs."""

    kernels: list[Kernel]
    start: float
    end: float
    count: int
    on_gpu: bool


class _Event:
    """An event of a CPU thread."""

    __slots__ = ("name", "category", "start", "end", "sequence", "is_forward", "parent")

    def __init__(self, raw: dict[str, Any]) -> None:
        self.name, self.category = str(raw["name"]), raw["cat"]
        self.start = float(raw["ts"])
        self.end = self.start + float(raw.get("dur", 0))
        arguments = raw.get("args", {})
        self.sequence = arguments.get("Sequence number", -1)
        self.is_forward = self.sequence >= 0 and not arguments.get("Fwd thread id")
        self.parent: _Event | None = None


def read_events(path: Path) -> list[dict[str, Any]]:
    """The complete events of a trace, `.json` or `.json.gz`. Raises ConfigError, which names the file and the fix."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
            events = json.load(file)["traceEvents"]
        return [event for event in events if event.get("ph") == "X" and "cat" in event]
    except (OSError, EOFError, zlib.error, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{path}: must be a Chrome trace of torch's profiler ({error}); {_HOW}") from None


def read_step(path: Path) -> Step:
    """The recorded steps of a trace.

    The kernels of N steps cover N - 1 whole steps, from the first kernel of the first step to the first kernel of the
    last one, because the host can run ahead of the device. For a single step the host's time counts. Raises
    ConfigError if the file is not a trace, or contains no step or no kernel.
    """
    events = read_events(path)
    hosts, launches = _host_events(events)
    # In order of time, so that the last one counts: ops without a node have the number of the next op with a node.
    forward = {event.sequence: event for event in hosts if event.is_forward}
    steps = [event for event in hosts if event.name.startswith(STEP_PREFIX)]
    if not steps:
        raise ConfigError(f"{path}: holds no {STEP_PREFIX} range; {_HOW}")
    on_gpu = any(raw["cat"] in _DEVICE for raw in events)
    by_step: list[list[Kernel]] = [[] for _ in steps]
    for asked, kernel in _device_kernels(events, launches, forward) if on_gpu else _host_kernels(hosts, forward):
        if (number := bisect_right(steps, asked, key=lambda step: step.start) - 1) >= 0 and asked < steps[number].end:
            by_step[number].append(kernel)
    filled = [(step, kernels) for step, kernels in zip(steps, by_step, strict=True) if kernels]
    if not filled:
        raise ConfigError(f"{path}: its steps hold no kernel; {_HOW}")
    if len(filled) == 1:
        ((step, kernels),) = filled
        return Step(kernels, step.start, max(step.end, max(k.end for k in kernels)), 1, on_gpu)
    first, last = (min(k.start for k in kernels) for _, kernels in (filled[0], filled[-1]))
    return Step([k for _, kernels in filled[:-1] for k in kernels], first, last, len(filled) - 1, on_gpu)


def _host_events(events: list[dict[str, Any]]) -> tuple[list[_Event], dict[int, _Event]]:
    """The CPU's events in order of time, with their parents; and the events that launch kernels, by correlation."""
    threads: dict[Any, list[_Event]] = {}
    launches: dict[int, _Event] = {}
    for raw in events:
        if raw["cat"] not in _HOST:
            continue
        event = _Event(raw)
        threads.setdefault((raw.get("pid"), raw.get("tid")), []).append(event)
        if raw["cat"] in _LAUNCH and "correlation" in raw.get("args", {}):
            launches[raw["args"]["correlation"]] = event
    for of_thread in threads.values():  # the events of one thread nest in time
        of_thread.sort(key=lambda event: (event.start, -event.end))
        around: list[_Event] = []
        for event in of_thread:
            while around and around[-1].end <= event.start:
                around.pop()
            event.parent = around[-1] if around else None
            around.append(event)
    return sorted((e for of_thread in threads.values() for e in of_thread), key=lambda e: e.start), launches


def _device_kernels(
    events: list[dict[str, Any]], launches: dict[int, _Event], forward: dict[int, _Event]
) -> Iterator[tuple[float, Kernel]]:
    """Each kernel and copy of the device with the time of its launch."""
    for raw in events:
        if raw["cat"] not in _DEVICE:
            continue
        start = float(raw["ts"])
        launch = launches.get(raw.get("args", {}).get("correlation"))
        callers, part = _callers(launch, forward)
        kernel = Kernel(str(raw["name"]), start, start + float(raw["dur"]), callers, part)
        yield (launch.start if launch is not None else start), kernel


def _host_kernels(hosts: list[_Event], forward: dict[int, _Event]) -> Iterator[tuple[float, Kernel]]:
    """Each op of the CPU. Ops nest, and `exclusive_times` gives an op only what its inner ops leave."""
    for event in hosts:
        if event.category == "cpu_op":
            yield event.start, Kernel(event.name, event.start, event.end, *_callers(event, forward))


def _callers(event: _Event | None, forward: dict[int, _Event]) -> tuple[tuple[str, ...], str]:
    """Names of the operations around an event, the innermost first, and the range around them, "" for none."""
    names: list[str] = []
    seen: set[int] = set()
    while event is not None:
        if event.name.startswith(RANGE_PREFIX):
            return tuple(names), event.name.removeprefix(RANGE_PREFIX)
        if event.category in _NAMED and not event.name.startswith(STEP_PREFIX):
            names.append(event.name)
        of_forward = forward.get(event.sequence) if event.name.startswith(_BACKWARD) else None
        if of_forward is not None and id(of_forward) not in seen:
            seen.add(id(of_forward))
            event = of_forward
        else:
            event = event.parent
    return tuple(names), ""


def exclusive_times(kernels: list[Kernel], last: list[bool]) -> list[float]:
    """The time of each kernel, in µs. The times add up to the time in which any kernel runs.

    While several kernels run, the time belongs to the one that started last. last: True for a kernel that gets only the
    time in which no other runs, such as communication.
    """
    order = sorted(range(len(kernels)), key=lambda i: kernels[i].start)
    edges = sorted({edge for kernel in kernels for edge in (kernel.start, kernel.end)})
    times = [0.0] * len(kernels)
    running: list[tuple[bool, float, int]] = []  # the first is the one that gets the time
    at = 0
    for low, high in pairwise(edges):
        while at < len(order) and kernels[order[at]].start <= low:
            i = order[at]
            heapq.heappush(running, (last[i], -kernels[i].start, i))
            at += 1
        while running and kernels[running[0][2]].end <= low:
            heapq.heappop(running)
        if running:
            times[running[0][2]] += high - low
    return times
