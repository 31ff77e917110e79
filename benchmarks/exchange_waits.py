"""Where two GPUs lose time in a training step: exchanges, waits in them by cause, and kernels of each rank.

    python benchmarks/exchange_waits.py RUN/torch_profile [--out FILE.json]

The folder has a trace of each rank (`--profile --use-pytorch-profiler --profile-ranks 0 1`). The exchanges of the ranks
are matched by their order. The rank that comes last waits for nobody, so the shortest of the ranks' times is what an
exchange itself takes, and the rest is a wait. A rank is late because its kernels since the exchange before took longer
(more rows), or because it stood idle (its host). DRY_RUN=1 prints what it reads.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from measure import dry_run, option_parser

from megablocks.monitor.trace import exclusive_times, read_step

ROOT = Path(__file__).parents[1]
EXCHANGES = ("to_experts_kernel", "to_home_kernel")
LONGEST = 25


def segments(kernels: list[Any]) -> list[tuple[str, float, float, float]]:
    """Of each exchange: name, its ms, and ms busy and idle since the end of the exchange before."""
    out, busy, edge, last = [], 0.0, None, None
    for kernel in sorted(kernels, key=lambda k: k.start):
        edge = kernel.start if edge is None else edge
        last = edge if last is None else last
        if kernel.name in EXCHANGES:
            gap = max(0.0, kernel.start - last) - busy
            out.append((kernel.name, (kernel.end - kernel.start) / 1e3, busy / 1e3, max(0.0, gap) / 1e3))
            busy, last = 0.0, max(edge, kernel.end)
        else:
            busy += max(0.0, kernel.end - max(edge, kernel.start))
        edge = max(edge, kernel.end)
    return out


def waits(ranks: list[list[tuple[str, float, float, float]]], steps: int) -> dict[str, float]:
    """ms a step: what exchanges take, and the waits of the ranks that came first, by the last one's cause."""
    out: dict[str, float] = defaultdict(float)
    for of_ranks in zip(*ranks, strict=False):
        name = of_ranks[0][0]
        times = [one[1] for one in of_ranks]
        late, early = times.index(min(times)), times.index(max(times))
        out[f"{name}: itself"] += min(times) / steps
        for wait in (f"{name}: wait", f"waits for rank {late}"):
            out[wait] += (max(times) - min(times)) / steps
        for at, cause in ((2, "kernels"), (3, "idle time")):
            more = of_ranks[late][at] - of_ranks[early][at]
            out[f"late rank's {cause} since the exchange before, beyond the other's"] += more / steps
    return dict(out)


def main() -> int:
    parser = option_parser(__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=ROOT)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    paths = sorted(options.folder.glob("rank-*.json.gz"))
    if dry_run():
        print(f"{options.folder}: {len(paths)} traces")
        return 0
    if len(paths) < 2:
        raise SystemExit(
            f"exchange_waits.py: folder={options.folder}: holds {len(paths)} traces, must hold two or more"
        )
    steps = [read_step(path) for path in paths]
    of_ranks = [segments(step.kernels) for step in steps]
    counts = [len(one) for one in of_ranks]
    result: dict[str, Any] = {"step_ms": [(s.end - s.start) / s.count / 1e3 for s in steps], "exchanges": counts}
    if len(set(counts)) > 1:
        print(f"the traces have {counts} exchanges: matched from the first on")
    result["waits"] = waits(of_ranks, steps[0].count)
    tables: list[dict[str, float]] = []
    for step in steps:
        times: dict[str, float] = defaultdict(float)
        for kernel, time in zip(step.kernels, exclusive_times(step.kernels, [False] * len(step.kernels)), strict=True):
            times[kernel.name] += time / step.count / 1e3
        times["idle"] = (step.end - step.start) / step.count / 1e3 - sum(times.values())
        tables.append(dict(times))
    names = sorted({n for table in tables for n in table}, key=lambda n: -max(t.get(n, 0.0) for t in tables))
    result["kernels"] = {name: [table.get(name, 0.0) for table in tables] for name in names[:LONGEST]}
    print("ms a step:", *(f"{ms:.1f}" for ms in result["step_ms"]))
    for name, ms in result["waits"].items():
        print(f"{ms:9.2f}  {name}")
    for name, times_of_ranks in result["kernels"].items():
        print(*(f"{ms:9.2f}" for ms in times_of_ranks), f" {name[:90]}")
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
