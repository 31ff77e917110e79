"""Shared parts of the benchmarks: interleaved timing, the correctness gate, earlier figures of peers, result files.

`megablocks.tool.timing` has the timers, which `python -m megablocks bench` shares.

The result of a candidate is compared with float32 before the candidate counts. No speed-up is printed while one of our
results is wrong ("the gate is red"). If a peer is far slower than it was before on the same GPU, the run is void:
something is wrong with the machine or with the call of the peer.

All of this also runs on a CPU at toy sizes. There times come from the host's clock.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megablocks.config import ConfigError, is_dry_run
from megablocks.files import write_durably
from megablocks.monitor.env_report import commit, version
from megablocks.tool.commands import print_in_any_locale

# What `python -m megablocks bench` needs too; the benchmarks have it from here.
from megablocks.tool.timing import (  # noqa: F401
    ROUND_MS,
    ROUNDS,
    calls_for,
    host_milliseconds,
    interleave,
    milliseconds,
    on_gpu,
    relative_error,
    speed,
)

print_in_any_locale()  # every benchmark imports this file

FORMAT = 1
REQUIRED = ("format", "benchmark", "environment", "gate", "void", "summary", "records")
PACKAGES = ("triton", "megatron-core", "transformer-engine", "scattermoe", "sonicmoe", "sonic-moe",
            "quack-kernels", "nvidia-cutlass-dsl")  # fmt: skip
"""SonicMoE's tree calls itself sonicmoe, its releases on PyPI sonic-moe."""
RESULTS = Path(__file__).parent / "results"
PEER_FIGURES = Path(__file__).parent / "peers_h200.json"

TOLERANCE = 1e-2
"""Largest relative Frobenius error against float32. Correct bf16 and fp16 results are 1e-3 to 5e-3 off."""
PEER_SLACK = 0.15


def emit(**record: Any) -> None:
    """Print one JSON line. A child process sends records to its parent this way."""
    print(json.dumps(record), flush=True)


def option_parser(doc: str | None) -> argparse.ArgumentParser:
    """A parser whose help is the docstring of the benchmark, in its own lines."""
    return argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


def need_gpu(toy: bool = False) -> None:
    """End the program with one line if there is no GPU. A toy run needs none."""
    if not toy and not on_gpu():
        raise SystemExit(
            f"{Path(sys.argv[0]).name}: torch sees no GPU; run it on a machine with one. DRY_RUN=1 prints the cases"
        )


def dry_run() -> bool:
    """Whether DRY_RUN=1 asks to print the cases. Ends the program with one line at any value but 0, 1 and none."""
    try:
        return is_dry_run()
    except ConfigError as error:
        raise SystemExit(f"{Path(sys.argv[0]).name}: {error}") from None


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


def cells(values: Iterable[float | None], form: str, unit: str = "") -> str:
    """The numbers in columns of one width, with a dash for None."""
    width = int(form.split(".")[0]) + len(unit)
    return " ".join("–".rjust(width) if v is None else f"{v:{form}}{unit}" for v in values)


# ---- correctness


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

    def judge(self, key: str, error: float, limit: float, why: str = "") -> bool:
        """Whether a relative error is within the limit, which NaN is not. Notes the result, or that it failed."""
        good = error <= limit
        self.take({"good": key, "error": error} if good else {"bad": key, "why": why or f"relative error {error:.1e}"})
        return good

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

    def report(self) -> bool:
        """Print the failures and the verdict. Returns whether the gate is green."""
        for key, why in self.failures.items():
            print(f"FAILED {key}: {why}")
        worst = max(self.errors.values(), default=0.0)
        print(f"gate {'green' if self.green else 'RED, no speed-up'}: {len(self.errors)} results checked, largest "
              f"relative error {worst:.1e}, {len(self.failures)} failed")  # fmt: skip
        return self.green


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
    """GPU, versions, commit and command of this run."""
    import torch

    found = {package: version(package) for package in PACKAGES}
    return {
        "gpu": gpu_name(),
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        **{package: None if known == "not installed" else known for package, known in found.items()},
        "python": platform.python_version(),
        "processor": platform.processor() or platform.machine(),
        "commit": commit(),
        "command": shlex.join(["python", *sys.argv]),
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
    }


def result_path(name: str, gpu: str | None = None, root: Path = RESULTS) -> Path:
    """results/<gpu>/<name>.json. The folder of "NVIDIA H200" is h200; without a GPU it is cpu."""
    folder = "cpu" if gpu is None else gpu.lower().removeprefix("nvidia ").replace(" ", "-")
    return root / folder / f"{name}.json"


def one_a_line(result: Mapping[str, Any], name: str) -> str:
    """JSON with the list `name` last and one of its elements per line, so that a diff shows which of them changed."""
    head = json.dumps({key: value for key, value in result.items() if key != name}, indent=1)
    lines = ",\n".join(map(json.dumps, result[name]))
    return f'{head[:-2]},\n "{name}": [\n{lines}\n]\n}}\n'


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
    write_durably(path, one_a_line(result, "records"))


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
