"""Train one experiment with several `mlp_impl`s, on several layouts of two GPUs, or with and without some flags, and
compare the loss curves.

Runs with the same seed have the same initial weights and the same data, so only rounding makes their losses differ; on
two GPUs dropout masks differ too. The first run is repeated with a second seed. The distance between these two runs is
the noise, and every other run must be within this distance of the first one.

A run is a launch of a script of exp/ into its own folder. A run of the same command whose loss.csv reaches the last
step is not repeated, so the runs can be spread over several calls or machines (`--only`). A run that stopped early
starts again in an empty folder, because no optimizer state is saved. The environment variables are those of
exp/common.sh: NGPU, DATA_PREFIX, FLAGS (added to every run), DRY_RUN=1, ….
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

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from profile_step import launch

from megablocks.config import ConfigError, is_dry_run
from megablocks.kinds import MLP_IMPLS
from megablocks.monitor.history import History
from megablocks.monitor.plots import plot_runs
from megablocks.tool.commands import named_path, print_in_any_locale

ROOT = Path(__file__).resolve().parent.parent
EXPERIMENT = ROOT / "exp" / "dmoe" / "dmoe_46m_8gpu.sh"
OWN = {"--seed": "--seeds", "--train-iters": "--steps", "--log-interval": "--steps"}
"""The driver's flags that are set for each run, and the option that decides them. FLAGS would override them."""
LAYOUTS = {
    "DP2": "--no-moe-expert-model-parallelism",
    "EP2": "",
    "TP2-SP-EP2": "--no-moe-expert-model-parallelism --tensor-model-parallel-size 2 --sequence-parallel "
    "--expert-tensor-parallel-size 1 --expert-model-parallel-size 2",
    "PP2": "--pipeline-model-parallel-size 2",
}
"""Flags of a layout of two GPUs. Without any, the published scripts spread the experts over the data-parallel ranks."""


class Arm(NamedTuple):
    """What the runs of an arm have in common. gpus: NGPU, None for the value in the environment."""

    flags: str
    gpus: int | None = None


def arms_of(impls: Sequence[str], layouts: Sequence[str], flags: str) -> dict[str, Arm]:
    """The arms by name. The others are compared with the first: the first impl, one GPU, or the run without flags."""
    if flags:
        return {"as-it-is": Arm(""), "with-flags": Arm(flags)}
    if layouts:
        return {"one-gpu": Arm("", 1)} | {name: Arm(LAYOUTS[name], 2) for name in layouts}
    return {impl: Arm(f"--megablocks-mlp-impl {impl}") for impl in impls}


class Distance(NamedTuple):
    """Differences between two loss curves, in nats per token, over the iterations that both curves have."""

    rms: float
    median: float
    largest: float

    def __str__(self) -> str:
        return f"rms {self.rms:.5f}, median {self.median:.5f}, largest {self.largest:.5f}"


def distance(a: History, b: History) -> Distance:
    """The distance between two training losses; inf if a loss is not finite or if they share no iteration."""
    (at_a, losses_a), (at_b, losses_b) = a.series("train_loss"), b.series("train_loss")
    other = dict(zip(at_b, losses_b, strict=True))
    apart = [abs(loss - other[i]) for i, loss in zip(at_a, losses_a, strict=True) if i in other]
    if not apart or not all(map(math.isfinite, apart)):
        return Distance(math.inf, math.inf, math.inf)
    return Distance(math.sqrt(statistics.fmean(d * d for d in apart)), statistics.median(apart), max(apart))


def table(runs: dict[str, History]) -> str:
    """One line per run: the mean loss of its last tenth, and the median tokens/s."""
    lines = [f"{'run':<24}{'last loss':>10}{'tokens/s':>12}"]
    for name, history in runs.items():
        losses, rates = history.series("train_loss")[1], history.series("tokens_per_second")[1]
        last = statistics.fmean(losses[-max(1, len(losses) // 10) :])
        rate = statistics.median(rates[1:]) if len(rates) > 1 else math.nan  # the first interval compiles kernels
        lines.append(f"{name:<24}{last:>10.4f}{rate:>12,.0f}")
    return "\n".join(lines)


def verdict(runs: dict[str, History], noise: Distance) -> tuple[str, bool]:
    """One line per run after the first, with its distance to the first, and whether all distances are within `noise`.

    Both the rms and the median must be within the noise. The rms alone is not enough: a loss spike of the first run is
    part of both distances and can hide every other difference.
    """
    (first, base), *others = runs.items()
    lines, within = [], True
    for name, history in others:
        apart = distance(history, base)
        fits = apart.rms <= noise.rms and apart.median <= noise.median
        fits &= math.isfinite(noise.rms)  # inf: a loss is not finite
        within &= fits
        lines.append(
            f"{name} against {first}: {apart} nats; two seeds of {first}: {noise}: "
            f"{'within' if fits else 'NOT within'} the noise"
        )
    return "\n".join(lines), within


def _command(experiment: Path, folder: Path, steps: int, arm: Arm, seed: int) -> tuple[list[str], str]:
    """The launch, and the FLAGS of its environment. FLAGS that are already set come after ours."""
    every = next(n for n in range(max(1, steps // 50), 0, -1) if steps % n == 0)  # divides `steps`: the last is logged
    words = (arm.flags, f"--seed {seed} --log-interval {every} --no-save-optim", os.environ.get("FLAGS"))
    return ["bash", str(experiment), str(folder), str(steps)], " ".join(filter(None, words))


def _is_done(folder: Path, steps: int, command: list[str], variables: dict[str, str]) -> bool:
    """Whether `folder` holds a run of this launch that reached the last step."""
    if not (folder / "command.txt").is_file() or max(History.of_run(folder).rows, default=0) != steps:
        return False
    environment = {**os.environ, **variables, "DRY_RUN": "1", "LC_ALL": "C.UTF-8"}  # quotes as command.txt does
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    launched = _names(done.stdout.partition(" -m ")[2])[3:]  # without --load, which command.txt lacks
    return bool(launched) and launched == _names((folder / "command.txt").read_text())[2:]


def _names(command: str) -> list[str]:
    """The words of a command, with only the last part of each path, because runs can come from other machines."""
    try:
        return [Path(word).name if word.startswith("/") else word for word in shlex.split(command)]
    except ValueError:  # cut off inside a quote
        return []


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0: every run is within the noise. 1: a run is not, or a launch failed. 2: --only left some runs out."""
    print_in_any_locale()
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", 1)[0])
    parser.add_argument("out", type=named_path, help="folder for runs.png and for one subfolder per run")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--impls", nargs="+", choices=MLP_IMPLS, default=["sparse", "fused"],
                      help="the others are compared with the first one")  # fmt: skip
    what.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=[],
                      help="layouts of two GPUs, each compared with one GPU")  # fmt: skip
    what.add_argument("--flags", default="", help="the experiment without and with these flags")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seeds", nargs=2, type=int, default=[1234, 1235], help="of all runs, and of the noise run")
    parser.add_argument("--experiment", type=named_path, default=EXPERIMENT, help="a script of exp/ (default: dMoE-XS)")
    parser.add_argument("--only", help="launch only this one of the runs that DRY_RUN=1 lists")
    options = parser.parse_args(argv)
    arms = arms_of(options.impls, options.layouts, options.flags)
    if options.steps < 2:
        parser.error(f"--steps {options.steps}: must be at least 2")
    if len(arms) < 2:
        parser.error(f"--impls {' '.join(options.impls)}: must be two different ones or more")
    if len(set(options.seeds)) < 2:
        parser.error(f"--seeds {options.seeds[0]} {options.seeds[1]}: must differ, for their distance is the noise")
    for word in f"{os.environ.get('FLAGS', '')} {options.flags}".split():
        if own := OWN.get(flag := word.split("=")[0]):
            parser.error(f"{flag}: is set for each run; leave it out of FLAGS and --flags, use {own}")
    if options.experiment.suffix != ".sh" or not options.experiment.is_file():
        parser.error(f"--experiment {options.experiment}: must be a script of exp/, such as {EXPERIMENT}")
    if options.out.exists() and not options.out.is_dir():
        parser.error(f"out {options.out}: is a file; choose another folder")
    try:
        dry_run = is_dry_run()
    except ConfigError as error:
        parser.error(str(error))
    first, (seed, other_seed) = next(iter(arms)), options.seeds
    noise_run = f"{first}-seed{other_seed}"
    plan = {name: (arm, seed) for name, arm in arms.items()} | {noise_run: (arms[first], other_seed)}
    if options.only is not None and options.only not in plan:
        parser.error(f"--only {options.only}: must be one of {', '.join(plan)}")
    missing = []
    for name, (arm, of_seed) in plan.items():
        folder = options.out / name
        command, flags = _command(options.experiment, folder, options.steps, arm, of_seed)
        variables = {"FLAGS": flags} | ({} if arm.gpus is None else {"NGPU": str(arm.gpus)})
        if dry_run:
            print(*(f"{key}={shlex.quote(value)}" for key, value in variables.items()), shlex.join(command))
        elif _is_done(folder, options.steps, command, variables):
            continue
        elif options.only in (None, name):
            if folder.is_dir() and any(folder.iterdir()):
                print(f"{folder}: holds another run or an unfinished one: remove it or choose another folder",
                      file=sys.stderr)  # fmt: skip
                return 1
            status = launch(command, **variables)
            if status or not _is_done(folder, options.steps, command, variables):
                print(f"{name}: ended with {status} before step {options.steps}", file=sys.stderr)
                return 1
        else:
            missing.append(name)
    if dry_run:
        return 0
    if missing:
        print(f"{options.out}: still to run: {', '.join(missing)}")
        return 2
    runs = {name: History.of_run(options.out / name) for name in plan}
    plot_runs(runs, options.out / "runs.png", title=f"{options.experiment.stem}, {options.steps} steps")
    noise = distance(runs[noise_run], runs[first])
    text, within = verdict({name: runs[name] for name in arms}, noise)
    print(table(runs), text, str(options.out / "runs.png"), sep="\n")
    return 0 if within else 1


if __name__ == "__main__":
    sys.exit(main())
