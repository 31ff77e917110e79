"""Run jobs in child processes with deadlines. A candidate that hangs or breaks the CUDA context is excluded.

A job is a string. Its child is the same script with `--child JOB,JOB… --struck KEY,KEY…`. It prints JSON lines:

    {"job": JOB}                   the job begins
    {"start": KEY}                 candidate KEY runs from here on
    {"good": KEY, "error": …}      … and its result is right
    {"bad": KEY, "why": …}         … or it failed; the child may continue
    {"finished": JOB}              all candidates of the job are done
    {…}                            any other line is a record for the parent

KEY is JOB/…/NAME. When a child dies or is silent for too long, the parent excludes the candidate that was running and
starts the job again. After the second time it excludes every candidate with this name.

A benchmark takes its options from `parser_of`. Its main ends in `run_benchmark`, which writes the result after every
job. So an interrupted run loses only the job that was running.

A child with `--wait` first compiles the kernels of its one job, prints {"prepared": JOB} and waits for a line on stdin.
Compilation uses one core, so the children of several jobs compile at the same time and then run one after another.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from measure import ROUNDS, Gate, emit, need_gpu, option_parser, write_result

STARTUP_S, QUIET_S, JOB_S = 40, 10, 20
MOST_DEATHS = 3
"""The parent gives up a job after this number of dead children."""

LOST_CONTEXT = ("CUDA error", "illegal", "launch failure")
"""Words of an exception after which no kernel can run in the process."""


def parser_of(doc: str | None, *, seconds: float, rounds: int = ROUNDS) -> argparse.ArgumentParser:
    """A parser with the options of every benchmark that runs jobs. `seconds` and `rounds` are defaults."""
    parser = option_parser(doc)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--seconds", type=float, default=seconds, help="for the whole run")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="result file")
    for of_a_child in ("--child", "--struck"):
        parser.add_argument(of_a_child, default="", help=argparse.SUPPRESS)
    for of_a_child in ("--wait", "--compile-only"):
        parser.add_argument(of_a_child, action="store_true", help=argparse.SUPPRESS)
    return parser


def chosen(parser: argparse.ArgumentParser, option: str, given: str, known: Collection[str]) -> list[str]:
    """The comma-separated names in `given`; "" means all of `known`. An unknown name ends the program."""
    names = given.split(",") if given else list(known)
    if unknown := set(names) - set(known):
        parser.error(f"{option}={given}: {', '.join(sorted(unknown))} must be one of {', '.join(known)}")
    return names


def add_names(
    parser: argparse.ArgumentParser, option: str, known: Collection[str], default: str = "", help: str | None = None
) -> None:
    """Add an option whose value is a list, as in `chosen`."""
    parser.add_argument(option, default=default, help=help, type=lambda given: chosen(parser, option, given, known))


def struck_off(key: str, struck: Collection[str]) -> bool:
    """In the child: whether `key` must not run. If only its name is excluded, reports `key` as failed to the parent."""
    if key not in struck and key.rsplit("/", 1)[1] in struck:
        emit(bad=key, why="excluded: a candidate of this name hung or died twice")
        return True
    return key in struck


@contextlib.contextmanager
def candidate(key: str) -> Iterator[None]:
    """In the child: the body runs candidate `key`. Exceptions are reported. A lost CUDA context ends the process."""
    emit(start=key)
    try:
        yield
    except Exception as e:  # a peer may raise anything; the other candidates go on
        emit(bad=key, why=f"{type(e).__name__}: {str(e)[-300:]}")
        if any(words in str(e) for words in LOST_CONTEXT):
            os._exit(3)


def guarded(key: str, timer: Callable[[], float]) -> Callable[[], float]:
    """In the child: `timer` that reports its start. Its exception ends the process, so that all have equal rounds."""

    def run() -> float:
        emit(start=key)
        try:
            return timer()
        except Exception as e:
            emit(bad=key, why=f"{type(e).__name__}: {str(e)[-300:]}")
            raise

    return run


def run_child(
    args: argparse.Namespace,
    run_job: Callable[[str, set[str], argparse.Namespace], None],
    prepare: Callable[[str, argparse.Namespace], None] | None = None,
) -> int:
    """The main of a child; returns its exit status.

    run_job: takes a job, the excluded keys and names, and args. prepare: runs before the child waits for the parent.
    """
    import torch

    torch.backends.cuda.matmul.allow_tf32 = False  # float32 is the reference
    if prepare is not None:
        prepare(args.child, args)
        emit(prepared=args.child)
        if not sys.stdin.readline():  # the parent has ended
            return 0
    for job in args.child.split(","):
        emit(job=job)
        run_job(job, set(args.struck.split(",")), args)
        emit(finished=job)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return 0


class Child:
    """A child process and the lines that it prints."""

    def __init__(self, command: list[str]) -> None:
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, text=True)
        self._lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def lines(self, wait: Callable[[], float]) -> Iterator[str | None]:
        """The child's lines until it ends. After `wait()` seconds of silence a final None."""
        while True:
            try:
                line = self._lines.get(timeout=max(0.01, wait()))
            except queue.Empty:
                yield None
                return
            if line is None:
                return
            yield line

    def go(self) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the child is dead; `lines` ends then
            self.process.stdin.write("go\n")
            self.process.stdin.flush()

    def end(self) -> int:
        self.process.kill()
        return self.process.wait()


def end_session(process: subprocess.Popen[Any], number: int, patience: float) -> None:
    """End a process that leads a session of its own, and its children: by this signal, then by SIGKILL."""
    with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
        os.killpg(process.pid, number)
        process.wait(patience)
    with contextlib.suppress(ProcessLookupError):  # no process is left
        os.killpg(process.pid, signal.SIGKILL)  # a child that hangs outlives its parent and keeps the GPU busy
    process.wait()


@dataclass
class Runner:
    """Runs the jobs of `script` in child processes and remembers the candidates that failed.

    flags: of every child. end: the time.monotonic() at which everything must have ended. after_job: called after a job.
    """

    script: str
    flags: list[str]
    end: float
    struck: set[str] = field(default_factory=set)
    deaths: Counter[str] = field(default_factory=Counter)
    records: list[dict[str, Any]] = field(default_factory=list)
    finished: set[str] = field(default_factory=set)
    prepared: dict[str, Child] = field(default_factory=dict)
    after_job: Callable[[], None] | None = None

    def start(self, jobs: list[str], *more: str) -> Child:
        job_flags = ["--child", ",".join(jobs), "--struck", ",".join(sorted(self.struck))]
        return Child([sys.executable, self.script, *job_flags, *self.flags, *more])

    def prepare(self, jobs: list[str], *, seconds: float, at_once: int) -> None:
        """Start a child with --wait for each job, `at_once` at a time. `run` uses the children that got ready."""
        end = min(self.end, time.monotonic() + seconds)

        def work(job: str) -> None:
            if time.monotonic() > end:
                return
            child = self.start([job], "--wait")
            lines = child.lines(lambda: end - time.monotonic())
            if any(line is not None and line.startswith('{"prepared"') for line in lines):
                self.prepared[job] = child
            else:
                child.end()

        with ThreadPoolExecutor(at_once) as pool:
            list(pool.map(work, jobs))

    def compile(self, groups: Sequence[list[str]], *, seconds: float) -> None:
        """Run each group of jobs with --compile-only in its own child, all at the same time, for at most `seconds`.

        A failure is printed here. It counts only if the candidate fails again at full size.
        """
        began = time.monotonic()

        def work(jobs: list[str]) -> list[dict[str, Any]]:
            warm = Runner(self.script, self.flags, min(self.end, began + seconds))
            warm.run(jobs, "--compile-only", quiet=60.0, budget=seconds)
            return warm.records

        with ThreadPoolExecutor(len(groups)) as pool:
            for record in (record for records in pool.map(work, groups) for record in records if "bad" in record):
                print(f"on few tokens: {record['bad']}: {record['why']}", flush=True)
        print(f"compiled in {time.monotonic() - began:.0f} s", flush=True)

    def run(self, jobs: list[str], *more: str, quiet: float = QUIET_S, budget: float = JOB_S) -> None:
        """Run `jobs`, one child after another. A job may be silent for `quiet` seconds and take `budget` seconds."""
        todo, broken = list(jobs), Counter[str]()
        while todo and time.monotonic() < self.end:
            mine = todo[:1] if self.prepared else list(todo)  # a prepared child has one job
            if child := self.prepared.pop(todo[0], None):
                child.go()
            else:
                child = self.start(mine, *more)
            job, running, noise, why = "", "", [], ""
            job_end = last = time.monotonic() + STARTUP_S

            def wait() -> float:
                now = time.monotonic()
                return min(job_end, self.end, last + quiet if job else self.end) - now  # noqa: B023

            for line in child.lines(wait):
                last = time.monotonic()
                if line is None:
                    why = "silent" if last < min(job_end, self.end) else "out of time"
                    break
                try:
                    record = json.loads(line) if line.startswith('{"') else None
                except json.JSONDecodeError:
                    record = None
                if record is None:
                    noise.append(line)
                    continue
                if "job" in record:
                    job, job_end, running = record["job"], last + budget, ""
                elif "finished" in record:
                    todo.remove(record["finished"])
                    self.finished.add(record["finished"])
                    if self.after_job:
                        self.after_job()
                elif "start" in record:
                    running = record["start"]
                else:  # a failed candidate may have damaged the process, so it is still the suspect
                    running = record.get("bad", "")
                    self.records.append(record)
                    self.struck |= {running} - {""}
            code = child.end()
            if not set(mine) & set(todo):
                continue
            job = job if job in todo else todo[0]
            why = f"{why or f'died ({code})'}: {' '.join(''.join(noise[-3:]).split())[-300:]}"
            print(f"{running or job} {why}", flush=True)
            broken[job] += 1
            if running and not why.startswith("out of time"):
                name = running.rsplit("/", 1)[1]
                self.deaths[name] += 1
                if running not in self.struck:
                    self.records.append({"bad": running, "why": why})
                self.struck |= {running} | ({name} if self.deaths[name] > 1 else set())
            if broken[job] >= MOST_DEATHS or not running or why.startswith("out of time"):
                self.records.append({"bad": job, "why": why})
                todo.remove(job)

    def settled(self, jobs: list[str]) -> list[dict[str, Any]]:
        """The records, and a "bad" record for each of `jobs` that did not run. A partial run must not look complete."""
        told = self.finished | {record["bad"] for record in self.records if "bad" in record}
        return self.records + [{"bad": job, "why": "no time left"} for job in jobs if job not in told]

    def end_prepared(self) -> None:
        while self.prepared:
            self.prepared.popitem()[1].end()


def run_benchmark(
    args: argparse.Namespace,
    name: str,
    jobs: list[str],
    run_job: Callable[[str, set[str], argparse.Namespace], None],
    *,
    ours: Callable[[str], bool],
    summarise: Callable[[list[dict[str, Any]], Gate], dict[str, Any]],
    out: Path | None,
    quiet: float = QUIET_S,
    budget: float = JOB_S,
    first: Callable[[Runner], None] = lambda runner: None,
    prepare: Callable[[str, argparse.Namespace], None] | None = None,
    toy: bool = False,
) -> int:
    """The main of a child, or of the parent: it runs the jobs, then prints the table and writes the result.

    After each job it writes the records so far, without a summary. The gate is red for the jobs that are missing. After
    Ctrl-C it prints and writes too.

    Args:
        args: of `parser_of`.
        run_job, prepare: as in `run_child`.
        ours: which keys turn the gate red, as in Gate.
        summarise: from (records, gate) to the summary. Prints the table and may add to gate.void.
        out: the result file, or None.
        quiet, budget: as in `Runner.run`.
        first: compiles or prepares before the jobs run.
        toy: whether it runs without a GPU.

    Returns:
        The exit status: 1 if the gate is red or the run is void.
    """
    if args.child:
        return run_child(args, run_job, prepare if args.wait else None)
    need_gpu(toy)
    runner = Runner(sys.argv[0], sys.argv[1:], time.monotonic() + args.seconds)

    def judged() -> tuple[Gate, list[dict[str, Any]]]:
        gate = Gate(ours)
        return gate, [record for record in runner.settled(jobs) if not gate.take(record)]

    def write_so_far() -> None:
        gate, records = judged()
        if out:
            write_result(out, name, gate=gate, summary={}, records=records)

    runner.after_job = write_so_far
    try:
        first(runner)
        runner.run(jobs, quiet=quiet, budget=budget)
    finally:
        runner.end_prepared()
        gate, records = judged()
        summary = summarise(records, gate)
        if out:
            write_result(out, name, gate=gate, summary=summary, records=records)
            print(f"wrote {out}")
    return 0 if gate.green and not gate.void else 1
