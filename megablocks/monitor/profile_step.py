"""A training step as a table of parts, from a trace of torch's profiler, with the bound of each part.

    write(profile_of(read_step(trace), RunSizes.read(trace.with_name("run.json"))), folder, title)

The times of the parts add up to the step, see `exclusive_times`. The command line is scripts/profile_step.py.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any, NamedTuple

from megablocks.files import write_durably
from megablocks.monitor.bounds import Bound, RunSizes, bounds
from megablocks.monitor.flops import mfu
from megablocks.monitor.parts import COMMUNICATION, IDLE, PARTS, part_of
from megablocks.monitor.plots import plot_parts
from megablocks.monitor.trace import Step, exclusive_times

LONGEST = 10
TEXTS = {
    "step_ms": "{:.1f} ms a step",
    "tokens_per_second_profiled": "{:,.0f} tokens/s in the profile",
    "mfu_profiled": "MFU {:.1%} in the profile",
    "tokens_per_second_after": "{:,.0f} tokens/s after it",
    "mfu_after": "MFU {:.1%} after it",
    "idle_after": "idle {:.1%} after it",
    "peak_memory_gib": "peak memory {:.1f} GiB",
}
"""The figures of `summary`, as the table shows them."""


class Row(NamedTuple):
    """One part of a step. bound: None if it has none."""

    part: str
    ms: float
    launches: float
    bound: Bound | None


class Profile(NamedTuple):
    """A step by parts.

    ms: of the whole step; on_gpu: True for the time of a GPU, False for a CPU.
    rows: one per part.
    longest: the kernels with the most time: (kernel, the op that launched it, part, ms per step, launches per step).
    run: the sizes of the run, from which the bounds in `rows` come; None if unknown.
    """

    ms: float
    rows: list[Row]
    longest: list[tuple[str, str, str, float, float]]
    on_gpu: bool
    run: RunSizes | None


def profile_of(step: Step, run: RunSizes | None) -> Profile:
    """The table of a step, in the order of PARTS, without parts that have neither time nor a bound."""
    parts = [part_of(kernel) for kernel in step.kernels]
    is_last = [part == COMMUNICATION for part in parts]
    times = exclusive_times(step.kernels, is_last)
    names = [(k.name, k.callers[0] if k.callers else "", part) for k, part in zip(step.kernels, parts, strict=True)]
    launches, of_name = Counter(parts), Counter(names)
    ms, by_name = defaultdict[str, float](float), defaultdict[tuple[str, str, str], float](float)
    for name, part, time in zip(names, parts, times, strict=True):
        ms[part] += time / 1e3
        by_name[name] += time / 1e3
    whole = (step.end - step.start) / 1e3
    ms[IDLE] = whole - sum(ms.values())
    known = bounds(run) if run is not None else {}
    count = step.count
    rows = [Row(p, ms[p] / count, launches[p] / count, known.get(p)) for p in PARTS if ms[p] or p in known]
    longest = sorted(by_name, key=lambda name: -by_name[name])[:LONGEST]
    kernels = [(*name, by_name[name] / count, of_name[name] / count) for name in longest]
    return Profile(whole / count, rows, kernels, step.on_gpu, run)


def summary(profile: Profile) -> dict[str, float]:
    """The step's figures: ms, tokens/s, MFU in the profile and after it, peak memory. Unknown ones are left out."""
    run = profile.run
    out: dict[str, float] = {"step_ms": profile.ms}
    if run is None:
        return out
    rates = {"profiled": run.tokens / profile.ms * 1e3, "after": run.tokens_per_second}
    for name, rate in rates.items():
        if rate is not None:
            out[f"tokens_per_second_{name}"] = rate
            if (used := mfu(rate, run.shape, run.device, run.world_size)) is not None:
                out[f"mfu_{name}"] = used
    if run.tokens_per_second is not None and profile.on_gpu:  # the profiler slows the host, but not the kernels
        busy = sum(row.ms for row in profile.rows if row.part != IDLE)
        out["idle_after"] = max(0.0, 1 - busy / (run.tokens / run.tokens_per_second * 1e3))
    if run.peak_memory_bytes is not None:
        out["peak_memory_gib"] = run.peak_memory_bytes / 2**30
    return out


def short(name: str) -> str:
    """A kernel's name without return type, namespaces and template arguments, at most 70 characters."""
    plain = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    return re.split(r"[<(]", plain)[0].split("::")[-1].strip()[:70]


def markdown(profile: Profile, title: str) -> str:
    """The table, the figures above it and the longest kernels below it."""
    lines = [f"# A training step by parts: {title}", ""]
    lines += [", ".join(TEXTS[key].format(value) for key, value in summary(profile).items()) + ".", ""]
    if not profile.on_gpu:
        lines += ["No GPU: the times are those of the CPU's ops.", ""]
    lines += ["| part | ms | % of step | launches | arithmetic, ms | bytes, ms | times its bound |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for part, ms, launches, bound in profile.rows:
        limits = "| – | – | –"
        if bound is not None:
            limits = f"| {bound.arithmetic:.1f} | {bound.bytes:.1f} | {ms / bound.least:.2f}"
        lines += [f"| {part} | {ms:.1f} | {100 * ms / profile.ms:.1f} | {launches:.0f} {limits} |"]
    least = sum(row.bound.least for row in profile.rows if row.bound is not None)
    limits = f"| | | {profile.ms / least:.2f}" if least else "| | |"
    lines += [f"| step | {profile.ms:.1f} | 100.0 | {sum(row.launches for row in profile.rows):.0f} {limits} |", ""]
    lines += ["| longest kernels | op | part | ms | launches |", "|---|---|---|---|---|"]
    lines += [
        f"| `{short(name)}` | {op[:50]} | {part} | {ms:.1f} | {n:.0f} |" for name, op, part, ms, n in profile.longest
    ]
    return "\n".join(lines) + "\n"


def to_json(profile: Profile) -> dict[str, Any]:
    """Everything in the table, with the kernels' whole names."""
    rows = [
        {"part": part, "ms": ms, "launches": launches, **({} if bound is None else {"bound_ms": bound._asdict()})}
        for part, ms, launches, bound in profile.rows
    ]
    longest = [dict(zip(("kernel", "op", "part", "ms", "launches"), entry, strict=True)) for entry in profile.longest]
    return {**summary(profile), "on_gpu": profile.on_gpu, "parts": rows, "longest_kernels": longest}


def write(profile: Profile, out: Path, title: str) -> str:
    """Write profile.md, profile.json and profile.png into the folder `out`. Returns the text of the first."""
    text = markdown(profile, title)
    write_durably(out / "profile.md", text)
    write_durably(out / "profile.json", json.dumps(to_json(profile), indent=1) + "\n")
    bars = [(r.part, r.ms, *(r.bound or (0.0, 0.0))) for r in profile.rows]
    plot_parts(bars, out / "profile.png", title=f"{title}: {profile.ms:.0f} ms a step")
    return text
