"""One experiment trained with several `mlp_impl`s: their loss curves beside each other, and two seeds as the yardstick.

Runs of one seed see the same weights and data, so that they part by rounding alone; what that may amount to is measured
by the first one again under another seed. A run is a launch of a script of exp/ into a folder of its own; one whose
loss.csv has reached the last step is not run again, so that runs may be spread over calls or machines (`--only`). One
that stopped before begins anew in an empty folder, since no optimizer state is kept. The environment is that of
exp/common.sh: NGPU, DATA_PREFIX, FLAGS (for every run), DRY_RUN=1, ….
"""

from __future__ import annotations

import argparse
import math
import os
import shlex
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from megablocks.config import MLP_IMPLS
from megablocks.monitor.history import LOSS_COLUMNS, History
from megablocks.monitor.plots import plot_runs

ROOT = Path(__file__).parents[2]
EXPERIMENT = ROOT / "exp" / "dmoe" / "dmoe_46m_8gpu.sh"


class Distance(NamedTuple):
    """Of two loss curves, nats a token: root mean square, median and largest difference over the iterations of both."""

    rms: float
    median: float
    largest: float

    def __str__(self) -> str:
        return f"rms {self.rms:.5f}, median {self.median:.5f}, largest {self.largest:.5f}"


def distance(a: History, b: History) -> Distance:
    """Of the training losses; inf where one of them is no number, or where no iteration is in both."""
    (at_a, losses_a), (at_b, losses_b) = a.series("train_loss"), b.series("train_loss")
    other = dict(zip(at_b, losses_b, strict=True))
    apart = [abs(loss - other[i]) for i, loss in zip(at_a, losses_a, strict=True) if i in other]
    if not apart or not all(map(math.isfinite, apart)):
        return Distance(math.inf, math.inf, math.inf)
    return Distance(math.sqrt(statistics.fmean(d * d for d in apart)), statistics.median(apart), max(apart))


def tokens_per_second(history: History) -> float:
    """The median over the log intervals but the first, in which kernels are compiled; NaN without another."""
    _, rates = history.series("tokens_per_second")
    return statistics.median(rates[1:]) if len(rates) > 1 else math.nan


def table(runs: dict[str, History]) -> str:
    """A line a run: the mean loss of its last tenth, tokens/s."""
    lines = [f"{'run':<24}{'last loss':>10}{'tokens/s':>12}"]
    for name, history in runs.items():
        _, losses = history.series("train_loss")
        last = statistics.fmean(losses[-max(1, len(losses) // 10) :])
        lines.append(f"{name:<24}{last:>10.4f}{tokens_per_second(history):>12,.0f}")
    return "\n".join(lines)


def verdict(runs: dict[str, History], noise: Distance) -> tuple[str, bool]:
    """A line for each run after the first: its distance from that, against `noise`; and whether all are within.

    By root mean square and by median: a spike of the first run, which is in both distances, decides the former alone.
    """
    (first, base), *others = runs.items()
    lines, within = [], True
    for name, history in others:
        apart = distance(history, base)
        fits = apart.rms <= noise.rms and apart.median <= noise.median
        fits &= math.isfinite(noise.rms)  # inf where a run or its yardstick is no number
        within &= fits
        lines.append(
            f"{name} against {first}: {apart} nats; two seeds of {first}: {noise}: "
            f"{'within' if fits else 'NOT within'} the noise"
        )
    return "\n".join(lines), within


def _command(experiment: Path, folder: Path, steps: int, impl: str, seed: int) -> tuple[list[str], str]:
    """The launch, and the FLAGS for its environment: those that are there stand behind ours."""
    every = next(n for n in range(max(1, steps // 50), 0, -1) if steps % n == 0)  # so that the last step is logged
    ours = f"--megablocks-mlp-impl {impl} --seed {seed} --log-interval {every} --no-save-optim"
    return ["bash", str(experiment), str(folder), str(steps)], f"{ours} {os.environ.get('FLAGS', '')}".strip()


def _read(folder: Path) -> History:
    history = History(folder / "loss.csv", LOSS_COLUMNS)
    history.load(up_to=sys.maxsize)
    return history


def _is_done(folder: Path, steps: int, flags: str) -> bool:
    """Whether a run of these FLAGS, which end its command, has reached its last step there."""
    command, given = folder / "command.txt", flags.split()
    if not command.is_file() or shlex.split(command.read_text())[-len(given) :] != given:
        return False
    return max(_read(folder).rows, default=0) == steps


def main(argv: Sequence[str] | None = None) -> int:
    """0: every run is within the noise; 1: one is not, or a launch failed; 2: runs are missing that --only left out."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", 1)[0])
    parser.add_argument("out", type=Path, help="a folder: one subfolder a run, runs.png")
    parser.add_argument(
        "--impls", nargs="+", choices=MLP_IMPLS, default=["sparse", "fused"], help="the first is what the others meet"
    )
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seeds", nargs=2, type=int, default=[1234, 1235], help="of the comparison, and of the noise")
    parser.add_argument("--experiment", type=Path, default=EXPERIMENT, help="a script of exp/ (default: dMoE-XS)")
    parser.add_argument("--only", help="launch this run alone, of those that DRY_RUN=1 lists")
    options = parser.parse_args(argv)
    if options.steps < 2 or len(set(options.impls)) < 2 or len(set(options.seeds)) < 2:
        parser.error("--steps must be at least 2, --impls name two or more, --seeds be two different ones")
    first, (seed, other_seed) = options.impls[0], options.seeds
    yardstick = f"{first}-seed{other_seed}"
    plan = {impl: (impl, seed) for impl in options.impls} | {yardstick: (first, other_seed)}
    if options.only is not None and options.only not in plan:
        parser.error(f"--only {options.only}: must be one of {', '.join(plan)}")
    missing = []
    for name, (impl, of_seed) in plan.items():
        folder = options.out / name
        command, flags = _command(options.experiment, folder, options.steps, impl, of_seed)
        if os.environ.get("DRY_RUN") == "1":
            print(f"FLAGS={shlex.quote(flags)} {shlex.join(command)}")
        elif _is_done(folder, options.steps, flags):
            continue
        elif options.only in (None, name):
            if folder.is_dir() and any(folder.iterdir()):
                print(f"{folder}: holds another run, or one that stopped: remove it or choose another", file=sys.stderr)
                return 1
            done = subprocess.run(command, env={**os.environ, "FLAGS": flags})
            if done.returncode or not _is_done(folder, options.steps, flags):
                print(f"{name}: ended with {done.returncode} before step {options.steps}", file=sys.stderr)
                return 1
        else:
            missing.append(name)
    if os.environ.get("DRY_RUN") == "1":
        return 0
    if missing:
        print(f"{options.out}: still to run: {', '.join(missing)}")
        return 2
    runs = {name: _read(options.out / name) for name in plan}
    plot_runs(runs, options.out / "runs.png", title=f"{options.experiment.stem}, {options.steps} steps")
    noise = distance(runs[yardstick], runs[first])
    text, within = verdict({name: runs[name] for name in options.impls}, noise)
    print(table(runs), text, str(options.out / "runs.png"), sep="\n")
    return 0 if within else 1
