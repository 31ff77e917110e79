"""Shared parts of the benchmarks: interleaved timing, the correctness gate, earlier figures of peers, result files.

The speed of a GPU at its power limit drifts by 5 to 10 %. So the candidates run in turn, round by round, and two
candidates are compared by the median of the ratios of their rounds, never by the ratio of their medians.

The result of a candidate is compared with float32 before the candidate counts. No speed-up is printed while one of our
results is wrong ("the gate is red"). If a peer is far slower than it was before on the same GPU, the run is void:
something is wrong with the machine or with the call of the peer.

All of this also runs on a CPU at toy sizes. There times come from the host's clock.
"""

from __future__ import annotations

import json
import os
import platform
import random
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

FORMAT = 1
REQUIRED = ("format", "benchmark", "environment", "gate", "void", "summary", "records")
RESULTS = Path(__file__).parent / "results"
PEER_FIGURES = Path(__file__).parent / "peers_h200.json"

ROUNDS = 9
ROUND_MS = 10.0
CLOCK_KHZ = 1.98e6
"""The fastest clock of an H100 or H200. A slower clock only makes a wait in cycles longer."""
TOLERANCE = 1e-2
"""Largest relative Frobenius error against float32. Correct bf16 and fp16 results are 1e-3 to 5e-3 off."""
PEER_SLACK = 0.15


def emit(**record: Any) -> None:
    """Print one JSON line. A child process sends records to its parent this way."""
    print(json.dumps(record), flush=True)


# ---- timing


def on_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def need_gpu(toy: bool = False) -> None:
    """End the program with one line if there is no GPU. A toy run needs none."""
    if not toy and not on_gpu():
        raise SystemExit(
            f"{Path(sys.argv[0]).name}: torch sees no GPU; run it on a machine with one. DRY_RUN=1 prints the cases"
        )


def dry_run() -> bool:
    return os.environ.get("DRY_RUN", "0") == "1"


def milliseconds(fn: Callable[[], Any], calls: int = 1, *, head_start_ms: float = 0.0) -> float:
    """Milliseconds per call of `fn`, over `calls` calls: by CUDA events on a GPU, by the host's clock elsewhere.

    head_start_ms: the GPU first waits this long, so that the launches are already in its queue when it starts. Then a
    slow host does not count: the time is that of the kernels. A call that synchronizes gains nothing from this.
    """
    if not on_gpu():
        start = time.perf_counter()
        for _ in range(calls):
            fn()
        return (time.perf_counter() - start) * 1e3 / calls
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
    """Milliseconds that the host needs to launch `calls` calls."""
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


def graph_of(fn: Callable[[], Any], calls: int = 1) -> Callable[[], None]:
    """Replays `calls` calls as one CUDA graph, so that the time contains no launch overhead.

    A graph does not keep its operands alive. The caller must keep `fn`, whose closure holds them, as long as the graph.
    """
    import torch

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        fn()  # the first call may allocate, compile or load, which a capture does not allow
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            fn()
    return graph.replay


def calls_for(fn: Callable[[], Any], round_ms: float = ROUND_MS) -> int:
    """The number of calls of `fn` that fill a round. `fn` must have run before."""
    return max(1, round(round_ms / max(milliseconds(fn), 1e-3)))


def interleave(
    timers: Mapping[str, Callable[[], float]], rounds: int = ROUNDS, *, warm_up: int = 1
) -> dict[str, list[float]]:
    """The times of every candidate in each round, without the warm-up rounds.

    The order of the candidates is shuffled in each round, because at the power limit the time of a candidate depends on
    the one before it. The seed is fixed, so that every run has the same orders.
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
    """Speed of `name` relative to `base`: the median of the ratios of the rounds. None unless both were timed."""
    if not times.get(name) or not times.get(base):
        return None
    return median(b / n for n, b in zip(times[name], times[base], strict=True))


def cells(values: Iterable[float | None], form: str, unit: str = "") -> str:
    """The numbers in columns of one width, with a dash for None."""
    width = int(form.split(".")[0]) + len(unit)
    return " ".join("–".rjust(width) if v is None else f"{v:{form}}{unit}" for v in values)


# ---- correctness


def relative_error(got: Any, want: Any) -> float:
    """‖got − want‖ / ‖want‖ in float32; infinite for NaN or if the shapes differ."""
    if got.shape != want.shape:
        return float("inf")
    want = want.float()
    error = float((got.float() - want).norm() / want.norm().clamp_min(1e-20))
    return error if error == error else float("inf")


@dataclass
class Gate:
    """Which candidates were right, which failed, and why the run is void if it is.

    A failure turns the gate red if `ours(key)` holds. The failure of a peer only removes the peer.
    """

    ours: Callable[[str], bool]
    errors: dict[str, float] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    void: list[str] = field(default_factory=list)

    def take(self, record: Mapping[str, Any]) -> bool:
        """Take {"good": key, "error": …} or {"bad": key, "why": …}. False: `record` is neither and was not taken."""
        if "good" in record:
            self.errors[record["good"]] = record["error"]
        elif "bad" in record:
            self.failures[record["bad"]] = record["why"]
        return "good" in record or "bad" in record

    @property
    def red(self) -> list[str]:
        return sorted(key for key in self.failures if self.ours(key))

    @property
    def green(self) -> bool:
        return bool(self.errors) and not self.red

    def to_dict(self) -> dict[str, Any]:
        return {
            "green": self.green,
            "checked": len(self.errors),
            "largest_error": max(self.errors.values(), default=None),
            "red": self.red,
            "failures": self.failures,
        }

    def report(self) -> None:
        for key, why in self.failures.items():
            print(f"FAILED {key}: {why}")
        worst = max(self.errors.values(), default=0.0)
        print(f"gate {'green' if self.green else 'RED, no speed-up'}: {len(self.errors)} results checked, largest "
              f"relative error {worst:.1e}, {len(self.failures)} failed")  # fmt: skip


# ---- earlier figures of peers


def peer_figures(path: Path = PEER_FIGURES) -> dict[str, Any]:
    return json.loads(path.read_text())


def void_reasons(
    measured: Iterable[tuple[str, str, str, float]], figures: Mapping[str, Any], gpu: str | None
) -> list[str]:
    """Why a run does not count: the peers that are more than 15 % below their earlier figure at the same shape.

    Args:
        measured: (shape, peer, phase, TFLOP/s) with phase forward, backward or total.
        figures: the result of `peer_figures`.
        gpu: the GPU of this run. On another GPU than that of `figures` no run is void.
    """
    if gpu != figures["gpu"]:
        return []
    reasons = []
    for shape, peer, phase, got in measured:
        want = figures["shapes"].get(shape, {}).get("tflops", {}).get(peer, {}).get(phase)
        if want is not None and got < (1 - PEER_SLACK) * want:
            reasons.append(f"{peer} {phase} at {shape}: {got:.0f} TFLOP/s, {want:.0f} {figures['when']}")
    return reasons


# ---- results


def gpu_name() -> str | None:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def environment() -> dict[str, Any]:
    """GPU, versions, commit and command of this run. MEGABLOCKS_COMMIT gives the commit of a copy without git."""
    import importlib.metadata

    import torch

    from megablocks.monitor.env_report import commit

    versions: dict[str, str | None] = {}
    for package in ("torch", "triton", "scattermoe", "sonicmoe", "quack-kernels", "nvidia-cutlass-dsl"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return {
        "gpu": gpu_name(),
        "cuda": torch.version.cuda,
        **versions,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": platform.processor() or platform.machine(),
        "commit": os.environ.get("MEGABLOCKS_COMMIT") or commit(),
        "command": shlex.join(["python", *sys.argv]),
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
    }


def result_path(name: str, gpu: str | None = None, root: Path = RESULTS) -> Path:
    """results/<gpu>/<name>.json. The folder of "NVIDIA H200" is h200; without a GPU it is cpu."""
    folder = "cpu" if gpu is None else gpu.lower().removeprefix("nvidia ").replace(" ", "-")
    return root / folder / f"{name}.json"


def write_result(
    path: Path,
    name: str,
    *,
    gate: Gate,
    summary: Mapping[str, Any],
    records: Sequence[Mapping[str, Any]],
    taken_on: Mapping[str, Any] | None = None,
) -> None:
    """Write the result of a run atomically. taken_on: the `environment` of the run, by default this one."""
    from megablocks.monitor.history import write_atomically

    result = {
        "format": FORMAT,
        "benchmark": name,
        "environment": environment() if taken_on is None else dict(taken_on),
        "gate": gate.to_dict(),
        "void": gate.void,
        "summary": dict(summary),
        "records": list(records),
    }
    assert tuple(result) == REQUIRED
    # One record per line, so that a diff shows which case changed.
    head = json.dumps({key: value for key, value in result.items() if key != "records"}, indent=1)
    lines = ",\n".join(json.dumps(record) for record in records)
    write_atomically(path, f'{head[:-2]},\n "records": [\n{lines}\n]\n}}\n')


def read_result(path: Path) -> dict[str, Any]:
    """A result that `write_result` wrote.

    Raises:
        ValueError: the file is incomplete or is not such a result. The message names the file.
    """
    try:
        result = json.loads(path.read_text())
    except json.JSONDecodeError as e:
        raise ValueError(f"{path}: not a whole JSON file ({e}); run the benchmark again") from e
    missing = [key for key in REQUIRED if key not in result] if isinstance(result, dict) else list(REQUIRED)
    if missing or result["format"] != FORMAT:
        raise ValueError(f"{path}: not a result of format {FORMAT} (missing: {', '.join(missing) or 'nothing'})")
    return result
