"""Runs a comparison of `exp/paper`: the micro-batch of every arm, learning rates, every arm and seed, then the record.

    OUT/settings.json           what decides the results; a folder holds one set of settings
    OUT/micro_batch/ARM/        the search for the largest micro-batch
    OUT/tuning/ARM/RATE/        runs of RATES=tuned
    OUT/runs/ARM/SEED/          a run: an EXP_DIR of exp/common.sh, and done.json once it is whole
    OUT/record.json, OUT/*.png  the results of all runs

A run with done.json is not repeated. One that was stopped resumes from its checkpoint; without a checkpoint it starts
again in an empty folder, and with the same seed it is the same run.
"""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megablocks.config import ConfigError
from megablocks.files import write_durably
from megablocks.monitor.env_report import commit
from megablocks.monitor.history import History
from megablocks.monitor.micro_batch import divisors
from megablocks.monitor.paper_arms import (
    ARMS,
    MODELS,
    ROOT,
    TRIED_RATES,
    TUNING_SHARE,
    Launch,
    Schedule,
    Settings,
    amount,
    is_dry_run,
    launch_of,
    rates_of,
    time_unit,
)

START_S = 25.0
"""First estimate of what a run takes beside its steps: imports, compilation, evaluations."""
LEAST_STEPS = 20
_OUT_OF_MEMORY = re.compile(r"^(\S+: failed: )?pretrain_gpt: .*(out of memory|ALLOC_FAILED)", re.MULTILINE)
_CRASHED = re.compile(r"illegal memory access")
"""What another package's layer also does at a micro-batch that is too large: Tutel's kernels have 32-bit indices."""


class Stopped(Exception):
    """A signal ended the comparison."""


class Failed(Exception):
    """A launch failed; the message is one line, and `output` all that the launch printed."""

    def __init__(self, message: str, output: str = "") -> None:
        super().__init__(message)
        self.output = output


class Comparison:
    """One folder's comparison. `main` is its only user; tests drive the parts."""

    def __init__(self, out: Path, settings: Settings, data: Path, valid_tokens: int) -> None:
        self.out, self.settings, self.data, self.valid_tokens = out, settings, data, valid_tokens
        self.model = MODELS[settings.model]
        self.not_run = {name: f"{arm.needs} is not installed" for name in settings.arms
                        if (arm := ARMS[name]).needs and importlib.util.find_spec(arm.needs) is None
                        and not all(self._is_done(name, seed) for seed in settings.seeds_of(name))}  # fmt: skip
        self.arms = [name for name in settings.arms if name not in self.not_run]
        self.failed: dict[str, str] = {}
        self._child: subprocess.Popen[bytes] | None = None
        self._stops = 0
        self._lock = -1
        self._took: list[tuple[float, float]] = []  # of the runs of this process: estimated and real seconds

    # ---- the folder

    def _is_done(self, arm: str, seed: int) -> bool:
        return (self.out / "runs" / arm / str(seed) / "done.json").is_file()

    def open(self) -> None:
        """Make and lock the folder. Raises ConfigError if it is in use or holds a comparison of other settings."""
        path = self.out / "settings.json"
        if self.out.is_dir() and any(self.out.iterdir()) and not path.is_file():
            raise ConfigError(f"OUT={self.out}: is not empty and holds no comparison; choose another folder")
        if path.is_file():
            self.settings.refuse_change(Settings.from_dict(json.loads(path.read_text())), self.out)
        self.out.mkdir(parents=True, exist_ok=True)
        # A run inherits the lock, so the folder stays locked while a run outlives a comparison that was killed.
        self._lock = os.open(self.out / "lock", os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            why = "is in use by a comparison or by its last run; wait until it ends"
            raise ConfigError(f"OUT={self.out}: {why}") from None
        write_durably(path, json.dumps(self.settings.to_dict(), indent=1) + "\n")

    # ---- launches

    def stop(self, _number: int = 0, _frame: Any = None) -> None:
        """Handler of signals: let the run save what it saves, and end. The third one kills it."""
        self._stops += 1
        if self._child is not None and self._child.poll() is None:
            os.killpg(self._child.pid, signal.SIGTERM if self._stops < 3 else signal.SIGKILL)

    def _call(self, launch: Launch) -> str:
        """Start it, wait, and return what it printed. Raises Stopped, or Failed with its last line."""
        log = self.out / "launch.log"
        variables = {**os.environ, "DATA_PREFIX": str(self.data), "PYTHON": sys.executable, **launch.variables}
        with open(log, "wb") as file:
            # A session of its own: Ctrl-C reaches it once, through `stop`.
            self._child = subprocess.Popen(
                launch.command, env=variables, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
                start_new_session=True, pass_fds=(self._lock,),
            )  # fmt: skip
            if self._stops:
                self.stop()
            status = self._child.wait()
        text = log.read_text(errors="replace")
        if self._stops:
            raise Stopped
        if status:
            lines = [line for line in text.splitlines() if line.strip()]
            raise Failed(lines[-1] if lines else f"{shlex.join(launch.command)} ended with {status}", text)
        return text

    def search(self, arm: str, schedule: Schedule) -> Launch:
        """The search for the largest micro-batch; with MICRO_BATCH, a trial of that size."""
        launch = launch_of(self.settings, arm, schedule, Path())
        script, *rest = launch.command[1:]
        size = ["--size", str(self.settings.micro_batch)] if self.settings.micro_batch else []
        out = str(self.out / "micro_batch" / arm)
        command = [sys.executable, str(ROOT / "scripts/find_micro_batch.py"), out, *size, "--", "bash", script]
        return launch._replace(command=[*command, *rest[1:]])

    def found(self, arm: str) -> dict[str, Any]:
        """What the search wrote: micro_batch_size (None: none fits) and trials. With MICRO_BATCH there may be none."""
        path = self.out / "micro_batch" / arm / "micro_batch.json"
        given: dict[str, Any] = {"micro_batch_size": self.settings.micro_batch or None, "trials": []}
        return json.loads(path.read_text()) if path.is_file() else given

    def find_micro_batches(self, schedule: Schedule, rates: bool) -> None:
        """The micro-batch of every arm, once. rates: also where MICRO_BATCH gives it, because tokens/s are wanted."""
        for arm in list(self.arms) if rates or not self.settings.micro_batch else ():
            folder = self.out / "micro_batch" / arm
            if not (folder / "micro_batch.json").is_file():
                shutil.rmtree(folder, ignore_errors=True)
                _say(f"micro-batch of {arm}")
                try:
                    self._call(self.search(arm, schedule))
                except Failed as error:
                    if not (folder / "micro_batch.json").is_file():
                        self._give_up(arm, f"the search for a micro-batch failed: {error}")
                        continue
            if self.found(arm)["micro_batch_size"] is None:
                self._leave_out(arm, "no micro-batch fits into memory")

    def _leave_out(self, arm: str, why: str) -> None:
        self.not_run[arm] = why
        self.arms.remove(arm)
        _say(f"{arm}: not run: {why}")

    def _give_up(self, arm: str, why: str) -> None:
        self.failed[arm] = why
        self.arms.remove(arm)
        _say(f"{arm}: {why}")

    # ---- budget and time

    def rate(self, arm: str) -> float:
        """Tokens/s of an arm: the fastest trial of the search, else the table's guess."""
        rates = [trial["tokens_per_second"] for trial in self.found(arm)["trials"] if trial["tokens_per_second"]]
        return max(rates, default=self.model.rate * self.settings.ngpu)

    def tokens(self, spent_s: float) -> float:
        """Tokens of a run. A budget in minutes is shared once, by the arms' rates, and written down.

        Raises:
            ConfigError: the minutes do not suffice.
        """
        value, is_time = amount("BUDGET", self.settings.budget)
        path = self.out / "tokens.json"
        if not is_time:
            return value
        if path.is_file():
            return json.loads(path.read_text())["tokens"]
        tries = len(TRIED_RATES) if self.settings.rates == "tuned" else 0
        runs = {arm: len(self.settings.seeds_of(arm)) for arm in self.arms}
        starts = (sum(runs.values()) + tries * len(runs)) * START_S
        per_token = sum((count + tries * TUNING_SHARE) / self.rate(arm) for arm, count in runs.items())
        batch = Schedule.of(self.settings, 1, self.valid_tokens).batch
        least = LEAST_STEPS * batch * self.model.sequence
        tokens = (value - spent_s - starts) / per_token
        if tokens < least:
            need = (spent_s + starts + least * per_token) / 60
            raise ConfigError(
                f"BUDGET={self.settings.budget}: leaves less than {LEAST_STEPS} steps to each of {sum(runs.values())} "
                f"runs; give at least {need:.0f}min, or fewer ARMS, SEEDS or tokens a step (BATCH)"
            )
        write_durably(path, json.dumps({"tokens": tokens}) + "\n")
        return tokens

    def _estimate(self, arm: str, tokens: float) -> float:
        seconds = START_S + tokens / self.rate(arm)
        expected, real = (sum(column) for column in zip(*self._took, strict=True)) if self._took else (1.0, 1.0)
        return seconds * real / expected

    # ---- runs

    def run(self, arm: str, folder: Path, schedule: Schedule, *, seed: int, rate: tuple[str, str]) -> History:
        """The run in `folder`, now or before. Raises Stopped or Failed."""
        size = self.found(arm)["micro_batch_size"]
        launch = launch_of(self.settings, arm, schedule, folder, seed=seed, rate=rate, micro_batch=size)
        done = folder / "done.json"
        if done.is_file():
            if json.loads(done.read_text())["launch"] != launch.portable(folder):
                raise Failed(f"{folder}: holds a run of another command; remove it or choose another OUT")
        else:
            if folder.is_dir() and not any(folder.glob("checkpoints/iter_*")):
                shutil.rmtree(folder)
            began = time.time()
            self._call(launch)
            if "validation_loss" not in History.of_run(folder).rows.get(schedule.steps, {}):
                raise Failed(f"{folder}: ended before step {schedule.steps}; see its train.log")
            if ARMS[arm].log not in (folder / "train.log").read_text(errors="replace"):
                raise Failed(f"{folder}: its log lacks {ARMS[arm].log!r}: another layer ran; see its train.log")
            for name in ("checkpoints", "data_cache", "tensorboard"):
                shutil.rmtree(folder / name, ignore_errors=True)
            facts = {
                "launch": launch.portable(folder), "arm": arm, "seed": seed, "steps": schedule.steps,
                "batch": schedule.batch,
                "micro_batch": size, "learning_rate": float(rate[0]), "wall_s": time.time() - began,
            }  # fmt: skip
            write_durably(done, json.dumps(facts, indent=1) + "\n")
        return History.of_run(folder)

    def _tuning_schedule(self, tokens: float) -> Schedule:
        batch = Schedule.of(self.settings, tokens, self.valid_tokens).batch
        return Schedule.of(self.settings, tokens * TUNING_SHARE, self.valid_tokens, batch)

    def tune(self, arm: str, tokens: float) -> float:
        """The learning rate of TRIED_RATES with the lowest validation loss of a tenth of the budget."""
        schedule, losses = self._tuning_schedule(tokens), {}
        for rate in TRIED_RATES:
            folder = self.out / "tuning" / arm / f"{rate:g}"
            seed = self.settings.seeds_of(arm)[0]
            history = self.run(arm, folder, schedule, seed=seed, rate=rates_of(self.settings, arm, rate))
            losses[rate] = history.rows[schedule.steps]["validation_loss"]
            _say(f"{arm}, learning rate {rate:g}: validation loss {losses[rate]:.4f}")
        return min(losses, key=losses.__getitem__)

    def plan(self) -> list[tuple[str, int]]:
        """(arm, seed) of every run. All arms run with a seed before the next one, so a part of them compares too."""
        pairs = [(arm, seed) for arm in self.arms for seed in self.settings.seeds_of(arm)]
        return sorted(pairs, key=lambda pair: pair[1])

    def train(self, tokens: float) -> None:
        """Every run that is not done. An arm that fails is left, the others go on."""
        schedule, plan = Schedule.of(self.settings, tokens, self.valid_tokens), self.plan()
        tuned: dict[str, float] = {}
        waiting = list(plan)
        while waiting:
            arm, seed = waiting[0]
            folder = self.out / "runs" / arm / str(seed)
            is_new, began = not self._is_done(arm, seed), time.time()
            open_ones = [a for a, s in waiting if not self._is_done(a, s)]
            left, number = sum(self._estimate(one, tokens) for one in open_ones), len(plan) - len(waiting) + 1
            if self.settings.rates == "tuned":
                untuned = set(open_ones) - set(tuned)
                left += len(TRIED_RATES) * sum(self._estimate(one, tokens * TUNING_SHARE) for one in untuned)
            if is_new:
                _say(f"run {number} of {len(plan)}: {arm}, seed {seed}: about {_span(self._estimate(arm, tokens))}; "
                     f"about {_span(left)} left")  # fmt: skip
            try:
                if self.settings.rates == "tuned" and arm not in tuned:
                    tuned[arm] = self.tune(arm, tokens)
                    began = time.time()
                rate = rates_of(self.settings, arm, tuned.get(arm))
                history = self.run(arm, folder, schedule, seed=seed, rate=rate)
            except Failed as error:
                if self._lower_micro_batch(arm, error.output):
                    tuned.pop(arm, None)  # its runs went with the larger micro-batch
                    plan = self.plan()
                    waiting = list(plan)
                else:
                    self._give_up(arm, f"seed {seed} failed: {error}")
                    waiting = [pair for pair in waiting if pair[0] != arm]
                continue
            waiting.pop(0)
            if is_new:
                self._took.append((START_S + tokens / self.rate(arm), time.time() - began))
                rates = sorted(history.series("tokens_per_second")[1])
                _say(f"run {number} of {len(plan)}: {arm}, seed {seed}: validation loss "
                     f"{history.rows[schedule.steps]['validation_loss']:.4f}, {rates[len(rates) // 2]:,.0f} tokens/s, "
                     f"{_span(time.time() - began)}")  # fmt: skip

    def _lower_micro_batch(self, arm: str, output: str) -> bool:
        """If a run's micro-batch was too large: the next smaller one, for all runs of the arm, which start again."""
        found = self.found(arm)
        size = found["micro_batch_size"]
        smaller = [one for one in divisors(size) if one < size] if size else []
        reason = _OUT_OF_MEMORY.search(output) or (_CRASHED.search(output) if ARMS[arm].needs else None)
        if reason is None or not smaller:
            return False
        why = reason.group(reason.lastindex or 0)
        found |= {
            "micro_batch_size": smaller[-1],
            "failed": {**found.get("failed", {}), str(size): why},
        }
        path = self.out / "micro_batch" / arm / "micro_batch.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_durably(path, json.dumps(found, indent=1) + "\n")
        for kind in ("runs", "tuning"):
            shutil.rmtree(self.out / kind / arm, ignore_errors=True)
        _say(f"{arm}: {why} with a micro-batch of {size}; all its runs start again with {smaller[-1]}")
        return True

    def dry_run(self) -> None:
        """Print every command. Tokens of a budget in minutes are guessed."""
        value, is_time = amount("BUDGET", self.settings.budget)
        if is_time:
            runs = len(self.plan())
            value = max(value - runs * START_S, runs) * self.model.rate * self.settings.ngpu / runs
        schedule = Schedule.of(self.settings, value, self.valid_tokens)
        for arm, why in self.not_run.items():
            print(f"# {arm}: not run: {why}")
        for arm in () if self.settings.micro_batch and not is_time else self.arms:
            print(self.search(arm, schedule))
        size = self.settings.micro_batch or None
        if self.settings.rates == "tuned":
            shorter = self._tuning_schedule(value)
            for arm in self.arms:
                for tried in TRIED_RATES:
                    rate, folder = rates_of(self.settings, arm, tried), self.out / "tuning" / arm / f"{tried:g}"
                    print(launch_of(self.settings, arm, shorter, folder, rate=rate, micro_batch=size))
        for arm, seed in self.plan():
            folder = self.out / "runs" / arm / str(seed)
            print(launch_of(self.settings, arm, schedule, folder, seed=seed, micro_batch=size))


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


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0: all arms are recorded. 1: an arm failed. 2: a bad setting. 130: stopped by a signal."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not 1 <= len(words) <= 2 or words[0].startswith("-"):
        print("usage: bash exp/paper/compare.sh OUT [MODEL]     (docs/comparing_methods.md)", file=sys.stderr)
        return 2
    out, model = Path(words[0]).resolve(), words[1] if len(words) > 1 else "xs"
    began = time.time()
    try:
        data = Path(os.environ.get("DATA_PREFIX") or ROOT / "data/stdlib").resolve()
        fingerprint, valid_tokens = _data(data)
        code = os.environ.get("MEGABLOCKS_COMMIT") or commit()
        settings = Settings.from_environment(model, os.environ, data=fingerprint, commit=code)
        comparison = Comparison(out, settings, data, valid_tokens)
        if is_dry_run():
            comparison.dry_run()
            return 0
        comparison.open()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, comparison.stop)
        for arm, why in comparison.not_run.items():
            _say(f"{arm}: not run: {why}")
        value, is_time = amount("BUDGET", settings.budget)
        comparison.find_micro_batches(Schedule.of(settings, 1 if is_time else value, valid_tokens), is_time)
        comparison.train(comparison.tokens(time.time() - began))
        from megablocks.monitor import paper_plots, paper_results

        record = paper_results.record_of(out, settings, comparison.not_run, comparison.failed)
        write_durably(out / "record.json", paper_results.dump(record))
        if comparison.failed:
            for arm, why in comparison.failed.items():
                print(f"paper: {arm}: {why}; the same command tries it again", file=sys.stderr)
            return 1
        for path in paper_plots.draw(record, out):
            _say(f"drew {path}")
    except Stopped:
        print(f"paper: stopped; the same command with OUT={out} goes on", file=sys.stderr)
        return 130
    except (ConfigError, OSError) as error:
        print(f"paper: {error}", file=sys.stderr)
        return 2
    return 0
