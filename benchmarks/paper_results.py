"""The results of a comparison: one record of all its runs, and what is computed from it.

`record_of` reads run folders; `summarize` reads the record alone, so tables and pictures can be made anywhere. Times
are those of training: Megatron's clock leaves out evaluations and saves, and the first log interval of each process,
which compiles kernels, counts at the median speed.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from paper_arms import ARMS, BASE, LARGER, MODELS, Schedule, Settings, read_written

from megablocks.config import ConfigError
from megablocks.monitor.history import History

FORMAT = 1
SAME = ("gpu", "torch", "torch CUDA", "triton", "megatron-core", "commit")
"""What all runs of a record must share."""
EQUAL_LOSS = (BASE, LARGER, "dmoe")
"""The arms of the paper's comparison at equal loss."""
_LEFT_OUT = 0.1
"""The first part of a run's log intervals that its step time leaves out."""
_START = "[before the start of training step]"
_CURVE = ("tokens", "train_loss", "tokens_per_second", "expert_load_max_over_mean", "empty_experts", "tokens_dropped")


class Span(NamedTuple):
    """Mean, smallest and largest value over the seeds; NaN where no seed has a value."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Span:
        values = list(values) or [math.nan]
        return cls(statistics.fmean(values), min(values), max(values))


class Summary(NamedTuple):
    """An arm's figures.

    losses: final ones, by seed; stopped: in words, which of the seeds have none. half_losses: of the same runs, at
        the evaluation in the middle.
    times: seconds of a whole run, by seed. to_base_s: until the dense run's final loss with the same seed; None: a seed
        has not reached it. faster: the dense run's time over it, by the seed that reached it. missed: whole runs that
        never do. beyond: of a stopped run that had not, its time until then and the dense run's time over it; the least
        of such seeds.
    over_dmoe: its step time over dMoE's of the same steps. tokens_per_second: the median in place of the mean.
    dropped: share of all pairs. load: of the fullest expert over the mean, in the last quarter.
    """

    arm: str
    label: str
    losses: Mapping[int, float]
    seeds: int
    stopped: str
    half_losses: Mapping[int, float]
    step_ms: float
    over_dmoe: float | None
    tokens_per_second: Span
    peak_gib: float | None
    times: Mapping[int, float]
    to_base_s: Span | None
    faster: Mapping[int, float]
    missed: int
    beyond: tuple[float, float] | None
    dropped: float | None
    load: float | None
    micro_batch: int | None
    learning_rate: float

    @property
    def loss(self) -> Span:
        return Span.of(self.losses.values())

    @property
    def time_s(self) -> Span:
        return Span.of(self.times.values())

    @property
    def sooner(self) -> Span | None:
        """The dense run's time over the arm's until its loss; None: a seed has not reached it."""
        return None if self.to_base_s is None else Span.of(self.faster.values())

    def below(self, other: Summary, at: str = "losses") -> Span:
        """How far its loss is below the other arm's, seed by seed: runs of one seed share data and initialization."""
        mine, theirs = getattr(self, at), getattr(other, at)
        return Span.of(theirs[seed] - mine[seed] for seed in mine if seed in theirs)


def shared(*arms: Summary) -> list[Summary]:
    """The arms with their losses and times of those seeds alone that all of them have."""
    seeds = [seed for seed in arms[0].losses if all(seed in one.losses for one in arms)]
    return [
        one._replace(losses={seed: one.losses[seed] for seed in seeds}, times={seed: one.times[seed] for seed in seeds})
        for one in arms
    ]


def first_intervals(log: str) -> set[int]:
    """Iterations of the first two lines that each process of a run logged.

    Megatron logs a process's first step by itself and counts its time again in the next line's mean.
    """
    starts: set[int] = set()
    left = 0
    for line in log.splitlines():
        if _START in line:
            left = 2
        elif left and "elapsed time per iteration" in line and (at := re.search(r"\biteration\s+(\d+)", line)):
            starts.add(int(at.group(1)))
            left -= 1
    return starts


def train_seconds(history: History, first: set[int]) -> dict[int, float]:
    """Seconds of training until each logged iteration. The intervals that end at `first` count at the median speed."""
    at, rates = history.series("tokens_per_second")
    steady = [rate for i, rate in zip(at, rates, strict=True) if i not in first] or rates
    usual = statistics.median(steady)
    seconds, out, before = 0.0, {}, 0.0
    for i, rate in zip(at, rates, strict=True):
        tokens = history.rows[i]["tokens"]
        seconds += (tokens - before) / (usual if i in first else rate)
        out[i], before = seconds, tokens
    return out


def between(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    """y at x, linear between the points (ascending xs) and from (0, 0) to the first one."""
    return float(np.interp(x, [0.0, *xs], [0.0, *ys]))


def time_to_loss(seconds: Sequence[float], losses: Sequence[float], target: float) -> float | None:
    """When the loss first reaches `target`, linear between evaluations; None if it never does."""
    if losses and losses[0] <= target:
        return seconds[0]
    for (t0, l0), (t1, l1) in itertools.pairwise(zip(seconds, losses, strict=True)):
        if l1 <= target:
            return t0 + (t1 - t0) * (l0 - target) / (l0 - l1)
    return None


# ---- from folders to a record


def _environment(folder: Path) -> dict[str, str]:
    values = dict(line.split(": ", 1) for line in (folder / "env.txt").read_text().splitlines() if ": " in line)
    values["gpu"] = values.get("GPU 0", "CPU").split(",")[0]
    return {name: values.get(name, "unknown") for name in (*SAME, "python", "tutel", "transformer-engine", "apex")}


def run_of(folder: Path, settings: Settings, stopped: dict[str, Any] | None = None) -> dict[str, Any]:
    """The record of one run: of a finished one, or with the facts `stopped` of one without done.json.

    Raises:
        ConfigError: there is no such run, or it stopped too early.
    """
    if stopped is None and not (folder / "done.json").is_file():
        raise ConfigError(f"{folder}: is no finished run; start the comparison again with the same command")
    facts = stopped or read_written(folder / "done.json", "arm", "seed", "steps", "batch", "launch")
    history = History.of_run(folder)
    log = (folder / "train.log").read_text(errors="replace")
    first = first_intervals(log)
    at, _ = history.series("tokens_per_second")
    evaluated, losses = history.series("validation_loss")
    counted = [i for i in at if i not in first and i > _LEFT_OUT * facts["steps"]]
    if stopped and not (counted and evaluated):
        raise ConfigError(f"{folder}: stopped before it had a loss and a step time; leave it out by ARMS or SEEDS")
    seconds = train_seconds(history, first)
    rate = statistics.median(history.rows[i]["tokens_per_second"] for i in counted or at)
    model = MODELS[settings.model]
    passed = [between(at, list(seconds.values()), i) for i in evaluated]
    environment = _environment(folder)
    if environment["commit"] == "unknown":
        environment["commit"] = settings.commit
    peaks = [float(mib) / 1024 for mib in re.findall(r"max allocated: ([\d.]+)", log)]
    return {
        **facts,
        "environment": environment,
        "tokens_per_second": rate,
        "step_ms": 1e3 * facts["batch"] * model.sequence / rate,
        "peak_gib": max(peaks) if any(peaks) else None,
        "pairs_a_token": ARMS[facts["arm"]].top_k * model.layers,
        "validation": {
            "iteration": evaluated,
            "tokens": [i * facts["batch"] * model.sequence for i in evaluated],
            "seconds": [round(value, 3) for value in passed],
            "loss": losses,
        },
        "curve": {
            "iteration": at,
            "seconds": [round(value, 3) for value in seconds.values()],
            **{name: [history.rows[i].get(name) for i in at] for name in _CURVE},
        },
    }


def record_of(
    out: Path,
    settings: Settings,
    not_run: dict[str, str],
    failed: dict[str, str],
    stopped: Mapping[Path, dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """The record of a comparison. Raises ConfigError for a run that is not finished and has no facts in `stopped`."""
    arms = [arm for arm in settings.arms if arm not in not_run and arm not in failed]
    folders = [out / "runs" / arm / str(seed) for arm in arms for seed in settings.seeds_of(arm)]
    runs = [run_of(folder, settings, (stopped or {}).get(folder)) for folder in folders]
    return {
        "format": FORMAT, "settings": settings.to_dict(), "not_run": not_run, "failed": failed,
        "tuning": {arm: _tried(folder, settings) for arm in arms if (folder := out / "tuning" / arm).is_dir()},
        "runs": runs,
    }  # fmt: skip


def trial_loss(folder: Path) -> float:
    """The final validation loss of a trial of a learning rate; infinite if the trial diverged."""
    if read_written(folder / "done.json").get("diverged"):
        return math.inf
    loss = History.of_run(folder).series("validation_loss")[1][-1]
    return loss if math.isfinite(loss) else math.inf


def _tried(folder: Path, settings: Settings) -> dict[str, dict[str, float | None]]:
    """Tokens and final validation loss of an arm's trials, by learning rate. A trial that diverged has no loss."""
    tried: dict[str, dict[str, float | None]] = {}
    for run in sorted(folder.iterdir(), key=lambda path: float(path.name)):
        batch, loss = read_written(run / "done.json", "batch")["batch"], trial_loss(run)
        tokens = max(History.of_run(run).rows, default=0) * batch * MODELS[settings.model].sequence
        tried[run.name] = {"tokens": tokens, "loss": loss if math.isfinite(loss) else None}
    return tried


# ---- from a record to figures


def read_record(path: Path) -> dict[str, Any]:
    """The record in `path`, or in the folder `path`. Raises ConfigError unless it is complete and unmixed."""
    path = path / "record.json" if path.is_dir() else path
    try:
        record = json.loads(path.read_text())
    except (OSError, ValueError):
        raise ConfigError(f"{path}: holds no record of a comparison; run exp/paper/compare.sh") from None
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise ConfigError(f"{path}: is no record of format {FORMAT}; run exp/paper/compare.sh")
    check(record, path)
    return record


def check(record: dict[str, Any], path: Path) -> None:
    """Raises ConfigError if runs are missing, differ in what must be equal, or have a wrong mark of a stop."""
    settings, again = Settings.from_dict(record["settings"]), "start exp/paper/compare.sh again with the same settings"
    for arm, why in record["failed"].items():
        raise ConfigError(f"{path}: {arm} failed ({why}); {again}")
    there = {(run["arm"], run["seed"]): run for run in record["runs"]}
    for arm in settings.arms:
        for seed in settings.seeds_of(arm):
            why = record["not_run"].get(arm)
            if (arm == BASE or why is None) and (arm, seed) not in there:
                raise ConfigError(f"{path}: {arm}, seed {seed}, is missing{f' ({why})' if why else ''}; {again}")
    first = record["runs"][0]
    for run in record["runs"]:
        values = [("steps", run["steps"], first["steps"]), ("batch", run["batch"], first["batch"])]
        values += [(name, run["environment"][name], first["environment"][name]) for name in SAME]
        for name, value, other in values:
            if value != other:
                raise ConfigError(
                    f"{path}: {run['arm']}, seed {run['seed']}, has {name}={value}, {first['arm']} has {other}; "
                    "make all runs of a comparison with the same code and machine"
                )
        at, last, mark = run["curve"]["iteration"][-1], last_step(run), run.get("stopped_at")
        if mark != (None if run["validation"]["iteration"][-1] >= last else at) or (mark and run["arm"] == BASE):
            ends = f"ends at step {at} of {last} with stopped_at={mark}"
            why = f"a run that stopped must have its last step there; {again}"
            if run["arm"] == BASE:
                why = f"{BASE} must be whole, for all arms are compared with it; finish it, or use fewer SEEDS"
            raise ConfigError(f"{path}: {run['arm']}, seed {run['seed']}, {ends}; {why}")


def last_step(run: dict[str, Any]) -> int:
    """The step at which a run ends if nothing stops it."""
    every = run["validation"]["iteration"][0]
    return Schedule(run["steps"], run["batch"], every, every, 0, 0).last_step(run["arm"])


def stop_of(run: dict[str, Any]) -> str:
    """Where a run stopped, and its last loss; empty for a finished one."""
    if "stopped_at" not in run:
        return ""
    step, loss = (run["validation"][name][-1] for name in ("iteration", "loss"))
    stop = f"stopped at step {run['stopped_at']:,} of {last_step(run):,}"
    return f"{stop}; its last evaluation, at step {step:,}: {loss:.4f}"


def drop_shares(run: dict[str, Any]) -> tuple[list[int], list[float]]:
    """Tokens, and the share of the pairs (token, expert) that each log interval dropped. Empty for a dense model."""
    curve, pairs = run["curve"], run["pairs_a_token"]
    points = [(tokens, dropped) for tokens, dropped in zip(curve["tokens"], curve["tokens_dropped"], strict=True)
              if pairs and dropped is not None]  # fmt: skip
    steps = itertools.pairwise([(0, 0), *points])
    return [int(tokens) for tokens, _ in points], [(d1 - d0) / ((t1 - t0) * pairs) for (t0, d0), (t1, d1) in steps]


def summarize(record: dict[str, Any]) -> dict[str, Summary]:
    """Every arm's figures, in the order of the table of arms."""
    runs: dict[str, dict[int, dict[str, Any]]] = {}
    for run in record["runs"]:
        runs.setdefault(run["arm"], {})[run["seed"]] = run
    dense = runs[BASE]
    out = {}
    for arm, by_seed in runs.items():
        those = list(by_seed.values())
        stops = [f"seed {seed} {stop_of(run)}" for seed, run in by_seed.items() if stop_of(run)]
        whole = {seed: run for seed, run in by_seed.items() if not stop_of(run)}
        losses = {seed: run["validation"]["loss"] for seed, run in whole.items()}
        mark = " (stopped)" if not whole else f" ({len(stops)} of {len(those)} stopped)" if stops else ""
        times = {seed: _to_dense_loss(run, dense[seed]) for seed, run in by_seed.items()}
        reached = {seed: time for seed, time in times.items() if time is not None}
        until = {seed: run["validation"]["seconds"][-1] for seed, run in by_seed.items() if seed not in whole}
        beyond = [(time, _seconds(dense[seed]) / time) for seed, time in until.items() if seed not in reached]
        drops = [run["curve"]["tokens_dropped"][-1] for run in those]
        counted = [run["pairs_a_token"] * run["curve"]["tokens"][-1] for run in those]
        loads = [value for run in those for value in _last_quarter(run["curve"]["expert_load_max_over_mean"])]
        peaks = [run["peak_gib"] for run in those if run["peak_gib"] is not None]
        step_ms = statistics.median(run["step_ms"] for run in those)
        rates = [run["tokens_per_second"] for run in those]
        last = max(run["curve"]["iteration"][-1] for run in those)
        out[arm] = Summary(
            arm=arm,
            label=ARMS[arm].label + mark,
            losses={seed: one[-1] for seed, one in losses.items()},
            seeds=len(those),
            stopped="; ".join(stops),
            half_losses={seed: one[(len(one) - 1) // 2] for seed, one in losses.items()},
            step_ms=step_ms,
            over_dmoe=step_ms / _step_ms(runs["dmoe"], last) if "dmoe" in runs else None,
            tokens_per_second=Span(statistics.median(rates), min(rates), max(rates)),
            peak_gib=max(peaks) if peaks else None,
            times={seed: _seconds(run) for seed, run in whole.items()},
            to_base_s=Span.of(reached.values()) if len(reached) == len(times) else None,
            faster={seed: _seconds(dense[seed]) / time for seed, time in reached.items()},
            missed=len(times) - len(reached) - len(beyond),
            beyond=min(beyond, default=None),
            dropped=sum(drops) / sum(counted) if counted[0] and None not in drops else None,
            load=statistics.fmean(loads) if loads else None,
            micro_batch=those[0]["micro_batch"],
            learning_rate=those[0]["learning_rate"],
        )
    return out


def _seconds(run: dict[str, Any]) -> float:
    return run["curve"]["seconds"][-1]


def _to_dense_loss(run: dict[str, Any], dense: dict[str, Any]) -> float | None:
    """Seconds until the final loss of the dense run; a dense run reaches its own at its end."""
    if run is dense:
        return _seconds(run)
    validation = run["validation"]
    return time_to_loss(validation["seconds"], validation["loss"], dense["validation"]["loss"][-1])


def _step_ms(runs: Mapping[int, dict[str, Any]], last: int) -> float:
    """Median over the runs of a step's time until step `last`, without the first tenth of the schedule."""
    out = []
    for run in runs.values():
        curve, step_ms = run["curve"], run["step_ms"]
        if last < curve["iteration"][-1]:
            begin = _LEFT_OUT * run["steps"]
            pairs = zip(curve["iteration"], curve["tokens_per_second"], strict=True)
            step_ms *= run["tokens_per_second"] / statistics.median(rate for i, rate in pairs if begin < i <= last)
        out.append(step_ms)
    return statistics.median(out)


def _last_quarter(values: Sequence[float | None]) -> list[float]:
    known = [value for value in values if value is not None]
    return known[-max(1, len(known) // 4) :] if known else []


def dense_time(summaries: dict[str, Summary]) -> tuple[str, float, float] | None:
    """The training time of a dense model whose final loss is dMoE's, on as many tokens: ("", seconds, over dMoE's).

    It lies on the straight line between the time and loss of the dense model and of the larger one, over the seeds that
    all three have. A worse dMoE takes the word "less than" and the time of the dense one; a better one "more than" and
    that of the better of both. None without such seeds.
    """
    if not all(arm in summaries for arm in EQUAL_LOSS):
        return None
    base, larger, dmoe = shared(*(summaries[arm] for arm in EQUAL_LOSS))
    if not dmoe.losses:
        return None
    (t0, l0), (t1, l1) = ((one.time_s.mean, one.loss.mean) for one in (base, larger))
    loss, word = dmoe.loss.mean, ""
    if loss >= l0:
        word, seconds = "less than" if loss > l0 else "", t0
    elif loss < l1:
        word, seconds = "more than", t1 if l1 < l0 else t0
    else:
        seconds = t0 + (t1 - t0) * (l0 - loss) / (l0 - l1)
    return word, seconds, seconds / dmoe.time_s.mean


def capacity_front(summaries: dict[str, Summary]) -> tuple[dict[str, tuple[float, float]], list[str]]:
    """(seconds of a whole run, final loss) of dMoE and of every arm with a capacity, and the front's names, by seconds.

    On the front is an arm if no other one is better in one of both and no worse in the other, over the seeds that the
    two have. Nothing is compared without a seed that all arms have.
    """
    arms = {arm: one for arm, one in summaries.items()
            if one.losses and (arm == "dmoe" or ARMS[arm].has_quality and arm.startswith(("capacity-", "tutel-")))
            }  # fmt: skip
    if not arms or not shared(*arms.values())[0].losses:
        return {}, []
    points = {arm: (one.time_s.mean, one.loss.mean) for arm, one in arms.items()}
    front = [arm for arm, one in arms.items() if not any(_beats(other, one) for other in arms.values())]
    return points, sorted(front, key=points.__getitem__)


def _beats(one: Summary, other: Summary) -> bool:
    (t0, l0), (t1, l1) = ((arm.time_s.mean, arm.loss.mean) for arm in shared(one, other))
    return t0 <= t1 and l0 <= l1 and (t0, l0) != (t1, l1)
