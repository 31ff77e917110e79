"""Runs a comparison of `exp/paper`: the micro-batch of every arm, learning rates, every arm and seed, then the report.

    OUT/settings.json           what decides the results; a folder holds one set of settings
    OUT/micro_batch/ARM/        the search for the largest micro-batch
    OUT/tuning/ARM/RATE/        runs of RATES=tuned
    OUT/runs/ARM/SEED/          a run: an EXP_DIR of exp/common.sh, and done.json once it is whole
    OUT/launch-N.log            what the last launch in place N printed
    OUT/record.json, OUT/*.png  the results of all runs
    OUT/RESULTS.md              the report on them

AT_ONCE runs go on side by side. A run with done.json is not repeated. One that was stopped resumes from its checkpoint;
without a checkpoint it starts again in an empty folder, and with the same seed it is the same run. With
UNFINISHED=record nothing runs, and the record has each such run up to the step at which it stopped.
"""

from __future__ import annotations

import fcntl
import importlib.util
import json
import math
import os
import re
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import paper_plots
import paper_results
import report
from measure import one_a_line
from paper_arms import (
    ARMS,
    BASE,
    MODELS,
    ROOT,
    TRIED_RATES,
    TUNING_SHARE,
    Launch,
    Schedule,
    Settings,
    amount,
    launch_of,
    rates_of,
    read_written,
    time_unit,
    whole,
)
from paper_places import Failed, Places, Stopped

from megablocks.config import ConfigError, is_dry_run
from megablocks.files import write_durably
from megablocks.monitor.env_report import commit
from megablocks.monitor.history import History

START_S = 25.0
"""First estimate of what a run takes beside its steps: imports, compilation, evaluations."""
LEAST_STEPS = 20
_OUT_OF_MEMORY = re.compile(r"^(\S+: failed: )?pretrain_gpt: .*(out of memory|ALLOC_FAILED)", re.MULTILINE)
_CRASHED = re.compile(r"illegal memory access")
"""What another package's layer also does at a micro-batch that is too large: Tutel's kernels have 32-bit indices."""
_DIVERGED = re.compile(r"^(\S+: failed: )?pretrain_gpt: step \d+: NaN or Inf", re.MULTILINE)


class Job(NamedTuple):
    """A run of an arm with a seed. rate: of a trial of RATES=tuned; None: a run of the comparison."""

    arm: str
    seed: int
    rate: float | None = None

    def __str__(self) -> str:
        return f"{self.arm}, seed {self.seed}" + (f", learning rate {self.rate:g}" if self.rate else "")


class Started(NamedTuple):
    """A job that runs: its micro-batch, whether it was not made before, and the time of its start."""

    size: int | None
    is_new: bool
    began: float


class Comparison:
    """One folder's comparison. `main` is its only user; tests drive the parts."""

    def __init__(
        self, out: Path, settings: Settings, data: Path, valid_tokens: int, places: Places | None = None
    ) -> None:
        self.out, self.settings, self.data, self.valid_tokens = out, settings, data, valid_tokens
        self.places = places or Places(1, settings.ngpu, os.environ)
        self.model = MODELS[settings.model]
        self.not_run = {name: f"{arm.needs} is not installed" for name in settings.arms
                        if (arm := ARMS[name]).needs and importlib.util.find_spec(arm.needs) is None
                        and not all(self._is_done(Job(name, seed)) for seed in settings.seeds_of(name))}  # fmt: skip
        self.arms = [name for name in settings.arms if name not in self.not_run]
        self.failed: dict[str, str] = {}
        self._lock = -1
        self._took: list[tuple[str, float, float]] = []  # of this process's runs: arm, estimated and real seconds

    # ---- the folder

    def folder(self, job: Job) -> Path:
        name = Path("runs", job.arm, str(job.seed)) if job.rate is None else Path("tuning", job.arm, f"{job.rate:g}")
        return self.out / name

    def _is_done(self, job: Job) -> bool:
        return (self.folder(job) / "done.json").is_file()

    def open(self) -> None:
        """Make and lock the folder. Raises ConfigError if it is in use or holds a comparison of other settings."""
        path = self.out / "settings.json"
        there = {one.name for one in self.out.glob("*") if not one.name.startswith(f".{path.name}.")}
        if there - {"lock"} and not path.is_file():  # a comparison that was killed at its start left no more than these
            raise ConfigError(f"OUT={self.out}: is not empty and holds no comparison; choose another folder")
        if path.is_file():
            self.settings.refuse_change(Settings.read(path), self.out)
        if self.out.exists() and not self.out.is_dir():
            raise ConfigError(f"OUT={self.out}: is a file; choose another folder")
        try:
            self.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"OUT={self.out}: cannot be made ({error.strerror}); choose another folder") from None
        # A run inherits the lock, so the folder stays locked while a run outlives a comparison that was killed.
        self._lock = os.open(self.out / "lock", os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            why = "is in use by a comparison or by its last run; wait until it ends"
            raise ConfigError(f"OUT={self.out}: {why}") from None
        write_durably(path, json.dumps(self.settings.to_dict(), indent=1) + "\n")

    # ---- launches

    def _call(self, launch: Launch) -> str:
        # The record refuses runs of other code, but only at the end.
        replace(self.settings, commit=commit()).refuse_change(self.settings, self.out)
        return self.places.call(launch, self.data, self.out, self._lock)

    def search(self, arm: str, schedule: Schedule) -> Launch:
        """The search for the largest micro-batch; with MICRO_BATCH, a trial of that size."""
        launch = launch_of(self.settings, arm, schedule, Path())
        script, *rest = launch.command[1:]
        given = self.settings.micro_batch_of(arm)
        size = ["--size", str(given)] if given else []
        out = str(self.out / "micro_batch" / arm)
        command = [sys.executable, str(ROOT / "scripts/find_micro_batch.py"), out, *size, "--", "bash", script]
        return launch._replace(command=[*command, *rest[1:]])

    def found(self, arm: str) -> dict[str, Any]:
        """What the search wrote: micro_batch_size (None: none fits) and trials. With MICRO_BATCH there may be none."""
        path = self.out / "micro_batch" / arm / "micro_batch.json"
        given: dict[str, Any] = {"micro_batch_size": self.settings.micro_batch_of(arm), "trials": []}
        return read_written(path, *given) if path.is_file() else given

    def find_micro_batches(self, schedule: Schedule, rates: bool) -> None:
        """The micro-batch of every arm, once. rates: also where MICRO_BATCH gives it, because tokens/s are wanted."""
        waiting = [arm for arm in self.arms if rates or not self.settings.micro_batch_of(arm)]

        def find(arm: str) -> None:
            folder = self.out / "micro_batch" / arm
            if not (folder / "micro_batch.json").is_file():
                shutil.rmtree(folder, ignore_errors=True)
                _say(f"micro-batch of {arm}")
                self._call(self.search(arm, schedule))

        def ended(arm: str, search: Future[None]) -> None:
            try:
                search.result()
            except Failed as error:
                if not (self.out / "micro_batch" / arm / "micro_batch.json").is_file():
                    self._give_up(arm, f"the search for a micro-batch failed: {error}")
                    return
            if self.found(arm)["micro_batch_size"] is None:
                change = "a smaller model or MICRO_BATCH, or GPUs with more memory"
                self._leave_out(arm, "no micro-batch fits into memory", change)

        self.places.each(lambda: waiting.pop(0) if waiting else None, find, ended)

    def _leave_out(self, arm: str, why: str, change: str) -> None:
        """An arm that cannot run. The report says why. Raises ConfigError with a remedy if it is dense."""
        self.not_run[arm] = why
        self.arms.remove(arm)
        _say(f"{arm}: not run: {why}")
        if arm == BASE:
            why += f", and all arms are compared with it; use another folder and {change}"
            raise ConfigError(f"{arm}: not run: {why}")

    def _give_up(self, arm: str, why: str) -> None:
        self.failed[arm] = why
        self.arms.remove(arm)
        _say(f"{arm}: {why}")

    # ---- budget and time

    def rate(self, arm: str) -> float:
        """Tokens/s of an arm: the fastest trial of the search, else the table's guess."""
        rates = [trial["tokens_per_second"] for trial in self.found(arm)["trials"] if trial["tokens_per_second"]]
        return max(rates, default=self.model.rate * self.settings.ngpu)

    def tokens(self, spent_s: float | None) -> float:
        """Tokens of a run. A budget in minutes is shared once, by the arms' rates, and written down.

        Args:
            spent_s: seconds of the budget that the searches took; None: it must have been shared before.

        Raises:
            ConfigError: the minutes do not suffice, or tokens.json is missing or damaged.
        """
        value, is_time = amount("BUDGET", self.settings.budget)
        path = self.out / "tokens.json"
        if not is_time:
            return value
        if path.is_file():
            return read_written(path, "tokens")["tokens"]
        if spent_s is None:
            why = f"it holds the tokens of a run of BUDGET={self.settings.budget}"
            raise ConfigError(f"{path}: is missing, and {why}; copy it from where the comparison ran")
        tries = len(TRIED_RATES) if self.settings.rates == "tuned" else 0
        runs = {arm: len(self.settings.seeds_of(arm)) for arm in self.arms}
        starts = (sum(runs.values()) + tries * len(runs)) * START_S
        per_token = sum((count * ARMS[arm].part + tries * TUNING_SHARE) / self.rate(arm) for arm, count in runs.items())
        batch = Schedule.of(self.settings, 1, self.valid_tokens).batch
        least = LEAST_STEPS * batch * self.model.sequence
        tokens = ((value - spent_s) * self.places.at_once - starts) / per_token
        if tokens < least:
            need = (spent_s + (starts + least * per_token) / self.places.at_once) / 60
            raise ConfigError(
                f"BUDGET={self.settings.budget}: leaves less than {LEAST_STEPS} steps to each of {sum(runs.values())} "
                f"runs; give at least {need:.0f}min, or fewer ARMS, SEEDS or tokens a step (BATCH)"
            )
        write_durably(path, json.dumps({"tokens": tokens}) + "\n")
        return tokens

    def _expected(self, job: Job, tokens: float) -> float:
        """Seconds of a job, before anything ran."""
        part = ARMS[job.arm].part if job.rate is None else TUNING_SHARE
        return START_S + tokens * part / self.rate(job.arm)

    def _estimate(self, job: Job, tokens: float) -> float:
        """Seconds of a job, corrected by those that ran: of its arm, else of all."""
        took = [one for one in self._took if one[0] == job.arm] or self._took
        ratio = sum(real for *_, real in took) / sum(expected for _, expected, _ in took) if took else 1.0
        return self._expected(job, tokens) * ratio

    # ---- runs

    def run(self, job: Job, schedule: Schedule, *, size: int | None, rate: tuple[str, str]) -> History:
        """The run of `job`, now or before. A trial that diverges is done, too. Raises Stopped or Failed."""
        arm, seed, folder = job.arm, job.seed, self.folder(job)
        launch = launch_of(self.settings, arm, schedule, folder, seed=seed, rate=rate, micro_batch=size)
        done = folder / "done.json"
        if done.is_file():
            if read_written(done, "launch")["launch"] != launch.portable(folder):
                raise Failed(f"{folder}: holds a run of another command; remove it or choose another OUT")
        else:
            if folder.is_dir() and not any(folder.glob("checkpoints/iter_*")):
                shutil.rmtree(folder)
            began, last = time.time(), schedule.last_step(arm)
            facts = self._facts(job, launch, schedule, size, rate)
            try:
                self._call(launch)
            except Failed as error:
                if job.rate is None or not _DIVERGED.search(error.output):
                    raise
                facts["diverged"] = True
            if not facts.get("diverged") and "validation_loss" not in History.of_run(folder).rows.get(last, {}):
                raise Failed(f"{folder}: ended before step {last}; see its train.log")
            if ARMS[arm].log not in (folder / "train.log").read_text(errors="replace"):
                raise Failed(f"{folder}: its log lacks {ARMS[arm].log!r}: another layer ran; see its train.log")
            facts |= {"at_once": self.places.at_once, "wall_s": time.time() - began}
            write_durably(done, json.dumps(facts, indent=1) + "\n")
        # After done.json: a comparison that is killed here must not resume from half a checkpoint.
        for name in ("checkpoints", "data_cache", "tensorboard"):
            shutil.rmtree(folder / name, ignore_errors=True)
        return History.of_run(folder)

    def _facts(self, job: Job, launch: Launch, schedule: Schedule, size: int | None, rate: tuple[str, str]) -> dict:
        return {
            "launch": launch.portable(self.folder(job)), "arm": job.arm, "seed": job.seed, "steps": schedule.steps,
            "batch": schedule.batch, "micro_batch": size, "learning_rate": float(rate[0]),
        }  # fmt: skip

    def record_as_it_is(self) -> dict[str, Any]:
        """The record with unfinished runs up to their last logged steps. Raises ConfigError for one of no use."""
        runs = [Job(arm, seed) for arm in self.settings.arms for seed in self.settings.seeds_of(arm)]
        stopped = {self.folder(job): self._stopped(job) for job in runs if not self._is_done(job)}
        record = paper_results.record_of(self.out, self.settings, {}, {}, stopped)
        paper_results.check(record, self.out)
        for run in record["runs"]:
            _say(f"{Job(run['arm'], run['seed'])}: {paper_results.stop_of(run) or 'finished'}")
        return record

    def _stopped(self, job: Job) -> dict[str, Any]:
        """What done.json would say of a run, as far as the folder tells it, and where it stopped."""
        folder = self.folder(job)
        files = [folder / name for name in ("command.txt", "train.log", "env.txt")]
        trials = [self.folder(trial) / "done.json" for trial in self._trials(job.arm)]
        if not all(path.is_file() for path in (*files, *trials)):
            raise ConfigError(f"{folder}: holds no run; leave it out by ARMS or SEEDS")
        command, log = (path.read_text(errors="replace") for path in files[:2])
        try:
            words = " ".join(shlex.split(command))
        except ValueError:  # cut inside a quote
            words = ""
        size, rate = self.found(job.arm)["micro_batch_size"], self._rate(job)
        # How long an evaluation is depends on the data set, which need not be here.
        iters = re.findall(r"--eval-iters (\d+)", words) or [0]
        schedule = self._schedule(job, self.tokens(None))._replace(eval_iters=int(iters[-1]))
        launch = launch_of(self.settings, job.arm, schedule, folder, seed=job.seed, rate=rate, micro_batch=size)
        flags = " ".join(launch.variables["FLAGS"].split())
        if not words.endswith(flags) or ARMS[job.arm].log not in log:
            raise ConfigError(
                f"{folder}: is a run of other settings, or its command.txt is damaged; use those settings, or leave it "
                "out by ARMS or SEEDS"
            )
        facts, history = self._facts(job, launch, schedule, size, rate), History.of_run(folder)
        if "validation_loss" not in history.rows.get(schedule.last_step(job.arm), {}):
            facts["stopped_at"] = max(history.series("tokens_per_second")[0], default=0)
        return facts

    def _schedule(self, job: Job, tokens: float) -> Schedule:
        schedule = Schedule.of(self.settings, tokens, self.valid_tokens)
        if job.rate is None:
            return schedule
        return Schedule.of(self.settings, tokens * TUNING_SHARE, self.valid_tokens, schedule.batch)

    def _rate(self, job: Job) -> tuple[str, str]:
        """The learning rate of a job: with RATES=tuned that of the arm's best trial."""
        rate = job.rate
        if rate is None and self.settings.rates == "tuned":
            rate = min(self._trials(job.arm), key=lambda trial: paper_results.trial_loss(self.folder(trial))).rate
        return rates_of(self.settings, job.arm, rate)

    def _diverged(self, trial: Job) -> bool:
        return self._is_done(trial) and math.isinf(paper_results.trial_loss(self.folder(trial)))

    def _trials(self, arm: str) -> list[Job]:
        rates = TRIED_RATES if self.settings.rates == "tuned" else ()
        return [Job(arm, self.settings.seeds_of(arm)[0], rate) for rate in rates]

    def plan(self) -> list[Job]:
        """The trials of every arm. Then every arm with a seed before the next seed, so a part of them compares too."""
        runs = [Job(arm, seed) for arm in self.arms for seed in self.settings.seeds_of(arm)]
        return [trial for arm in self.arms for trial in self._trials(arm)] + sorted(runs, key=lambda job: job.seed)

    def train(self, tokens: float) -> None:
        """Every run that is not done. An arm that fails is left, the others go on."""
        waiting = self.plan()
        total, started = len(waiting), dict[Job, Started]()

        def following() -> Job | None:
            trials = {job.arm for job in (*waiting, *started) if job.rate is not None}
            ready = [job for job in waiting if job.rate is not None or job.arm not in trials]
            if not ready:
                return None
            # Of one seed the arm that took longest first, so that the places end at nearly the same time.
            long = {arm: real for arm, _, real in self._took if self.places.at_once > 1}
            job = min(ready, key=lambda job: (job.rate is None, job.seed, -long.get(job.arm, 0.0)))
            waiting.remove(job)
            is_new = not self._is_done(job)
            if is_new:
                left = sum(self._estimate(one, tokens) for one in (job, *waiting) if not self._is_done(one))
                now = time.time()
                left += sum(max(0.0, self._estimate(one, tokens) - now + its.began) for one, its in started.items())
                _say(f"run {total - len(waiting)} of {total}: {job}: about {_span(self._estimate(job, tokens))}; "
                     f"about {_span(left / self.places.at_once)} left")  # fmt: skip
            started[job] = Started(self.found(job.arm)["micro_batch_size"], is_new, time.time())
            return job

        def work(job: Job) -> History:
            size = started[job].size
            return self.run(job, self._schedule(job, tokens), size=size, rate=self._rate(job))

        def ended(job: Job, run: Future[History]) -> None:
            size, is_new, began = started.pop(job)
            history, failure = None, Failed("")
            try:
                history = run.result()
            except Failed as error:
                failure = error
            if job.arm not in self.arms:
                return  # another run of the arm failed
            if size != self.found(job.arm)["micro_batch_size"]:  # another run of the arm ran out of memory
                shutil.rmtree(self.folder(job), ignore_errors=True)
                waiting.append(job)
            elif history is not None and job.rate is not None and self._diverged(job):
                _say(f"{job}: diverged")
                if all(map(self._diverged, self._trials(job.arm))):
                    why = f"it diverged with each learning rate of {', '.join(f'{rate:g}' for rate in TRIED_RATES)}"
                    self._leave_out(job.arm, why, "a smaller learning rate as RATES")
                    waiting[:] = [one for one in waiting if one.arm != job.arm]
            elif history is not None and is_new:
                self._took.append((job.arm, self._expected(job, tokens), time.time() - began))
                rates = sorted(history.series("tokens_per_second")[1])
                _say(f"{job}: validation loss {history.series('validation_loss')[1][-1]:.4f}, "
                     f"{rates[len(rates) // 2]:,.0f} tokens/s, {_span(time.time() - began)}")  # fmt: skip
            elif history is None and self._lower_micro_batch(job.arm, failure.output, list(started)):
                others = [one for one in waiting if one.arm != job.arm]
                waiting[:] = others + [one for one in self.plan() if one.arm == job.arm and one not in started]
            elif history is None:
                self._give_up(job.arm, f"seed {job.seed} failed: {failure}")
                waiting[:] = [one for one in waiting if one.arm != job.arm]

        self.places.each(following, work, ended)

    def _lower_micro_batch(self, arm: str, output: str, running: Sequence[Job] = ()) -> bool:
        """If a run's micro-batch was too large: the next smaller one, for all runs of the arm, which start again.

        running: jobs whose folders are in use.
        """
        found = self.found(arm)
        size = found["micro_batch_size"]
        smaller = [one for one in range(1, size) if size % one == 0] if size else []
        reason = _OUT_OF_MEMORY.search(output) or (_CRASHED.search(output) if ARMS[arm].needs else None)
        if reason is None or not smaller:
            return False
        why = reason.group(reason.lastindex or 0)
        found |= {
            "micro_batch_size": smaller[-1],
            "failed": {**found.get("failed", {}), str(size): why},
        }
        in_use = [self.folder(job) for job in running]
        for folder in (*self.out.glob(f"runs/{arm}/*"), *self.out.glob(f"tuning/{arm}/*")):
            if folder not in in_use:
                shutil.rmtree(folder, ignore_errors=True)
        path = self.out / "micro_batch" / arm / "micro_batch.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_durably(path, json.dumps(found, indent=1) + "\n")  # after the runs that have the other size are gone
        _say(f"{arm}: {why} with a micro-batch of {size}; all its runs start again with {smaller[-1]}")
        return True

    def dry_run(self) -> None:
        """Print every command. Tokens of a budget in minutes are guessed."""
        value, is_time = amount("BUDGET", self.settings.budget)
        if is_time:
            runs, seconds = len(self.plan()), value * self.places.at_once
            value = max(seconds - runs * START_S, runs) * self.model.rate * self.settings.ngpu / runs
        schedule = Schedule.of(self.settings, value, self.valid_tokens)
        for arm, why in self.not_run.items():
            print(f"# {arm}: not run: {why}")
        for arm in self.arms:
            if is_time or not self.settings.micro_batch_of(arm):
                print(self.search(arm, schedule))
        for job in self.plan():
            size, schedule = self.settings.micro_batch_of(job.arm), self._schedule(job, value)
            rate = None if job.rate is None else rates_of(self.settings, job.arm, job.rate)
            folder = self.folder(job)
            print(launch_of(self.settings, job.arm, schedule, folder, seed=job.seed, rate=rate, micro_batch=size))


def _span(seconds: float) -> str:
    scale, unit = time_unit(seconds)
    return f"{seconds / scale:.{1 if unit == 'h' else 0}f} {unit}"


def _say(text: str) -> None:
    print(f"paper: {text}", flush=True)


def _data(folder: Path) -> tuple[str, int]:
    """Fingerprint and validation tokens of a data set; zeros in a dry run, which needs none."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        return manifest["fingerprint"], manifest["splits"]["valid"]["tokens"]
    except (OSError, ValueError, KeyError):
        if is_dry_run():
            return "", 0
        raise ConfigError(
            f"DATA_PREFIX={folder}: holds no manifest.json; make it with scripts/prepare_data.py --out"
        ) from None


def _report(record: dict[str, Any], out: Path) -> int:
    write_durably(out / "record.json", one_a_line(record, "runs"))
    for arm, why in record["failed"].items():
        print(f"paper: {arm}: {why}; the same command tries it again", file=sys.stderr)
    if record["failed"]:
        return 1
    for path in paper_plots.draw(record, out):
        _say(f"drew {path}")
    return report.main([str(out)])


def _record(out: Path, model: str) -> int:
    """UNFINISHED=record. GPUs, data set and code decide nothing that is left to do, so they may be others."""
    path = out / "settings.json"
    if not path.is_file():
        raise ConfigError(f"OUT={out}: holds no comparison; UNFINISHED=record reports one that has begun")
    before = Settings.read(path)
    settings = Settings.from_environment(model, os.environ, data=before.data, commit=before.commit)
    settings.refuse_change(before, out)
    comparison = Comparison(out, settings, Path(), 0, Places(1, settings.ngpu, {}))
    if not is_dry_run():
        comparison.open()
    record = comparison.record_as_it_is()
    return 0 if is_dry_run() else _report(record, out)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0: all arms are recorded. 1: an arm failed. 2: a bad setting. 130: stopped by a signal."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not 1 <= len(words) <= 2 or words[0].startswith("-"):
        print("usage: bash exp/paper/compare.sh OUT [MODEL]     (docs/comparing_methods.md)", file=sys.stderr)
        return 2
    out, model = Path(words[0]).resolve(), words[1] if len(words) > 1 else "xs"
    began, unfinished = time.time(), os.environ.get("UNFINISHED") or "resume"
    try:
        if not words[0]:
            raise ConfigError("OUT='': must be a path; . is the current folder")
        if unfinished not in ("resume", "record"):
            raise ConfigError(f"UNFINISHED={unfinished}: must be resume or record")
        if unfinished == "record":
            return _record(out, model)
        data = Path(os.environ.get("DATA_PREFIX") or ROOT / "data/stdlib").resolve()
        fingerprint, valid_tokens = _data(data)
        settings = Settings.from_environment(model, os.environ, data=fingerprint, commit=commit())
        places = Places(whole("AT_ONCE", os.environ.get("AT_ONCE") or "1"), settings.ngpu, os.environ)
        comparison = Comparison(out, settings, data, valid_tokens, places)
        value, is_time = amount("BUDGET", settings.budget)
        schedule = Schedule.of(settings, 1 if is_time else value, valid_tokens)
        settings.check_micro_batches(schedule.batch)
        if is_dry_run():
            comparison.dry_run()
            return 0
        comparison.open()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, places.stop)
        for arm, why in comparison.not_run.items():
            _say(f"{arm}: not run: {why}")
        comparison.find_micro_batches(schedule, is_time)
        comparison.train(comparison.tokens(time.time() - began))
        record = paper_results.record_of(out, settings, comparison.not_run, comparison.failed)
        return _report(record, out)
    except Stopped:
        print(f"paper: stopped; the same command with OUT={out} goes on", file=sys.stderr)
        return 130
    except ConfigError as error:
        print(f"paper: {error}", file=sys.stderr)
    except OSError as error:
        why = f"{error.filename or out}: {error.strerror}"
        print(f"paper: {why}; correct it or make room, and give the same command again", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
