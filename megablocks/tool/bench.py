"""`bench`: time a whole layer at your shape with every implementation and every installed peer.

    python -m megablocks bench --tokens 4096 --hidden-size 1024 --ffn-hidden-size 512 --num-experts 64 --top-k 8

Each candidate's output and gradients are first compared with float32. Then all candidates run in turn, round by round:
forward alone, and forward with backward. Each token has K different experts, all equally likely, and the routing
weights are a softmax over the chosen logits. Peers are torch's grouped GEMM, ScatterMoE and SonicMoE, if installed.
Exit code 0: no error. 1: one of our implementations failed or is wrong. 2: bad arguments.
"""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from megablocks.config import ConfigError, check_integers, refuse
from megablocks.files import write_durably
from megablocks.megatron.settings import flag_of
from megablocks.monitor.plots import new_figure, save_figure
from megablocks.ops.activation_table import ACTIVATIONS
from megablocks.tool import peers
from megablocks.tool.commands import Parser, check_switches, in_one_line, progress
from megablocks.tool.problem import OURS, PEERS, Problem, Shape, Step, memory_of, random_ids
from megablocks.tool.timing import ROUNDS, calls_for, host_milliseconds, interleave, milliseconds, on_gpu, speed

DTYPES = ("bfloat16", "float16", "float32")
ORDER = "after_topk"
"""SonicMoE supports no other order of softmax and top-k."""
_IN_QUEUE = 5  # the GPU's queue holds about a thousand launches


def timers_of(name: str, step: Step) -> Mapping[str, Callable[[], float]]:
    """Return timers in ms per call: `forward/NAME`, `step/NAME`, on a GPU without the host; `python/NAME` with it."""
    step.total()
    calls = calls_for(step.total)
    parts: dict[str, Callable[[], Any]] = {"forward": step.forward, "step": step.total}
    if not on_gpu():
        return {f"{part}/{name}": partial(milliseconds, fn, calls) for part, fn in parts.items()}
    few = min(calls, _IN_QUEUE)
    waits = {part: 1.2 * host_milliseconds(fn, few) for part, fn in parts.items()}
    timers = {f"{part}/{name}": partial(milliseconds, parts[part], few, head_start_ms=ms) for part, ms in waits.items()}
    return timers | {f"python/{name}": partial(milliseconds, step.total, calls)}


def measure(problem: Problem, makers: Mapping[str, Callable[[], Step]], rounds: int) -> dict[str, Any]:
    """Return results by candidate, the failed candidates with reasons, and those that do not support this shape."""
    timers: dict[str, Callable[[], float]] = {}
    found: dict[str, dict[str, Any]] = {}
    failed: dict[str, str] = {}
    left_out: dict[str, str] = {}
    for number, (name, make) in enumerate(makers.items(), 1):
        progress(f"{number} of {len(makers)}: compiling and checking {name}")
        try:
            step = make()
            row: dict[str, Any] = {"error": problem.error(step, weights=name not in PEERS), **memory_of(step)}
            timers |= timers_of(name, step)
            found[name] = row
        except Exception as error:  # a candidate that raises is a finding; the others are still timed
            refused = isinstance(error, (ConfigError, ImportError)) or (name in PEERS and isinstance(error, ValueError))
            (left_out if refused else failed)[name] = in_one_line(error)
    progress(f"timing {len(found)} candidates, {rounds} rounds")
    times = interleave(timers, rounds)
    for name, row in found.items():
        for part in ("forward", "step", "python"):
            if times.get(f"{part}/{name}"):
                row[f"{part}_ms"] = median(times[f"{part}/{name}"])
        row["tflops"] = 3 * problem.shape.forward_flops / row["step_ms"] / 1e9
        row["speed"] = speed(times, f"step/{name}", "step/auto")
    progress("")
    return {"candidates": found, "failed": failed, "left_out": left_out}


def report(shape: Shape, dtype: str, only: Sequence[str], rounds: int) -> dict[str, Any]:
    """Return everything that `bench` prints, as the dict that --json prints."""
    device = "cuda" if on_gpu() else "cpu"
    try:
        problem = Problem(shape, random_ids(shape, device), device=device, dtype=getattr(torch, dtype))
    except (RuntimeError, TypeError) as error:  # torch's, if memory is too small or a size exceeds 63 bits
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"tokens={shape.tokens}, hidden_size={shape.hidden}, ffn_hidden_size={shape.width}, "
            f"num_experts={shape.experts}: tokens or weights cannot be allocated ({reason}); use fewer"
        ) from error
    makers = problem.ours() | peers.peers(problem)
    found = measure(problem, {name: make for name, make in makers.items() if not only or name in only}, rounds)
    auto = problem.module(problem.config()).experts.mlp_impl_for()
    return {
        "device": torch.cuda.get_device_name() if on_gpu() else "cpu",
        "torch": torch.__version__,
        "shape": vars(shape),
        "dtype": dtype,
        "auto": auto,
        **found,
        "not_installed": [name for name in PEERS if name not in makers and (not only or name in only)],
    }


def text_of(found: Mapping[str, Any]) -> str:
    shape, host = Shape(**found["shape"]), any("python_ms" in row for row in found["candidates"].values())
    times = ("forward", 13), ("step", 13), *([("python", 13)] if host else [])
    columns = *times, ("TFLOP/s", 10), ("speed", 10), ("kept", 12)
    lines = [
        f"{found['device']}, torch {found['torch']}, {found['dtype']}, {shape.activation}; auto is {found['auto']}",
        f"T,H; I/E/K = {shape.label}",
        "",
        " " * 18 + "".join(f"{title:>{width}}" for title, width in (*columns, ("error", 9))),
    ]
    for name, row in sorted(found["candidates"].items(), key=lambda item: item[1]["step_ms"]):
        python = f"{row['python_ms']:>10.2f} ms" if "python_ms" in row else ""
        over = f"{row['speed']:>9.2f}×" if row["speed"] else "–".rjust(10)
        kept = f"{row['held'] / 2**20:>8.0f} MiB" if "held" in row else "–".rjust(12)
        lines.append(f"{name:<18}{row['forward_ms']:>10.2f} ms{row['step_ms']:>10.2f} ms{python}{row['tflops']:>10.3g}"
                     f"{over}{kept}{row['error']:>9.0e}")  # fmt: skip
    lines += [f"FAILED {name}: {why}" for name, why in found["failed"].items()]
    lines += [f"left out: {name}: {why}" for name, why in found["left_out"].items()]
    if found["not_installed"]:
        lines.append(f"not installed: {', '.join(found['not_installed'])}")
    lines += [
        "",
        "step: forward and backward" + (", in the GPU; python: the same with the host's time" if host else ""),
        "speed: over auto; kept: what forward leaves for backward; error: relative, against float32",
    ]
    return "\n".join(lines)


def plot(found: Mapping[str, Any], path: Path) -> None:
    """Plot horizontal bars of the candidates, the fastest on top: forward, and the whole step behind it."""
    rows = sorted(found["candidates"].items(), key=lambda item: item[1]["step_ms"])
    figure = new_figure(8, 1.4 + 0.42 * len(rows))
    axes = figure.add_subplot()
    for part, color, label in (("step_ms", "tab:blue", "forward and backward"), ("forward_ms", "tab:cyan", "forward")):
        axes.barh([name for name, _ in rows], [row[part] for _, row in rows], color=color, label=label)
    for at, (_, row) in enumerate(rows):
        axes.text(row["step_ms"], at, f" {row['step_ms']:.2f}", va="center", fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.1)
    shape = Shape(**found["shape"])
    axes.set(xlabel="ms", title=f"T,H; I/E/K = {shape.label}, {shape.activation}, {found['dtype']}, {found['device']}")
    axes.grid(alpha=0.3, axis="x")
    axes.legend()
    save_figure(figure, path)


def _check_folder(out: Path) -> None:
    """Make the folder. Raise ConfigError if it cannot be made or written to."""
    what = "made"
    try:
        out.mkdir(parents=True, exist_ok=True)
        what = "written to"
        tempfile.TemporaryFile(dir=out).close()
    except OSError as error:
        refuse("out", str(out), f"cannot be {what} ({error.strerror}); choose another folder")


def main(argv: Sequence[str]) -> int:
    parser = Parser("bench", description=__doc__)
    sizes = ("tokens", "hidden_size", "ffn_hidden_size", "num_experts", "top_k")
    for name in sizes:
        parser.add_argument(flag_of(name), type=int, required=True)
    parser.add_argument("--activation", choices=ACTIVATIONS, default="swiglu")
    parser.add_argument("--dtype", choices=DTYPES, help="default: bfloat16 on a GPU, float32 elsewhere")
    parser.add_argument("--only", help=f"these candidates, with commas: {', '.join((*OURS, *PEERS))}")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="how often each is timed (default: %(default)s)")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write bench.json, bench.txt and bench.png there")
    options = parser.parse_args(argv)
    check_integers(options, "tokens", "rounds")
    tokens, hidden, width, experts, top_k = (getattr(options, name) for name in sizes)
    shape = Shape(tokens, hidden, width, experts, top_k, options.activation, ORDER)
    shape.config()  # refuses sizes that no layer has
    only = [] if options.only is None else options.only.split(",")
    for name in only:
        if name not in (*OURS, *PEERS):
            refuse("only", name, f"must be of {', '.join((*OURS, *PEERS))}")
    check_switches()
    if options.out:  # check what can fail, before minutes of timing
        importlib.import_module("matplotlib")
        _check_folder(options.out)
    found = report(shape, options.dtype or ("bfloat16" if on_gpu() else "float32"), only, options.rounds)
    if not found["candidates"] and not found["failed"]:
        why = [f"{name}: {said}" for name, said in found["left_out"].items()]
        why += [f"{name} is not installed" for name in found["not_installed"]]
        refuse("only", options.only, f"leaves nothing to time; {'; '.join(why)}")
    whole, text = json.dumps(found, indent=1), text_of(found)
    print(whole if options.json else text)
    if options.out:
        write_durably(options.out / "bench.json", whole + "\n")
        write_durably(options.out / "bench.txt", text + "\n")
        plot(found, options.out / "bench.png")
    wrong = {name: why for name, why in found["failed"].items() if name not in PEERS}
    for name, why in wrong.items():
        print(f"megablocks bench: {name}: {why}", file=sys.stderr)
    return 1 if wrong else 0
