"""Time candidates that run in turn, and compute how much two results differ.

The speed of a GPU at its power limit drifts by 5 to 10 %. So candidates run in turn, round by round. Two candidates are
compared by the median of the ratios of their rounds, never by the ratio of their medians.
On a CPU times come from the host's clock.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

ROUNDS = 9
ROUND_MS = 10.0
CLOCK_KHZ = 1.98e6
"""The fastest clock of an H100 or H200. A slower clock only makes a wait in cycles longer."""


def on_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def milliseconds(fn: Callable[[], Any], calls: int = 1, *, head_start_ms: float = 0.0) -> float:
    """Return milliseconds per call of `fn`, over `calls` calls: by CUDA events on a GPU, otherwise by the host's clock.

    head_start_ms: the GPU first waits this long, so that the launches are already in its queue when it starts. Then a
    slow host does not count, only the kernels do. This does not help if `fn` synchronizes.
    """
    if not on_gpu():
        return host_milliseconds(fn, calls) / calls
    import torch

    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    if head_start_ms:
        torch.cuda._sleep(int(head_start_ms * CLOCK_KHZ))
    begin.record()
    for _ in range(calls):
        fn()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / calls


def host_milliseconds(fn: Callable[[], Any], calls: int) -> float:
    """Return the milliseconds that the host needs to launch `calls` calls."""
    import torch

    if on_gpu():
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        fn()
    spent = (time.perf_counter() - start) * 1e3
    if on_gpu():
        torch.cuda.synchronize()
    return spent


def calls_for(fn: Callable[[], Any], round_ms: float = ROUND_MS) -> int:
    """Return the number of calls of `fn` that fill a round. `fn` must have run before."""
    return max(1, round(round_ms / max(milliseconds(fn), 1e-3)))


def interleave(
    timers: Mapping[str, Callable[[], float]], rounds: int = ROUNDS, *, warm_up: int = 1
) -> dict[str, list[float]]:
    """Return the times of every candidate in each round, without the warm-up rounds.

    The order of the candidates is shuffled in each round, because at the power limit the time of a candidate depends on
    the candidate before it. The seed is fixed, so that every run has the same orders.
    """
    order = random.Random(0)
    times: dict[str, list[float]] = {name: [] for name in timers}
    for i in range(-warm_up, rounds):
        for name in order.sample(list(timers), len(timers)):
            spent = timers[name]()
            if i >= 0:
                times[name].append(spent)
    return times


def speed(times: Mapping[str, Sequence[float]], name: str, base: str) -> float | None:
    """Return the speed of `name` relative to `base`: the median of the rounds' ratios. None unless both were timed."""
    if not times.get(name) or not times.get(base):
        return None
    return median(b / n for n, b in zip(times[name], times[base], strict=True))


def relative_error(got: Any, want: Any) -> float:
    """‖got − want‖ / ‖want‖ in float32; infinite for NaN or if the shapes differ."""
    if got.shape != want.shape:
        return float("inf")
    want = want.float()
    error = float((got.float() - want).norm() / want.norm().clamp_min(1e-20))
    return error if error == error else float("inf")
