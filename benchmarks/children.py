"""Jobs in child processes with deadlines: a candidate that hangs or breaks the CUDA context is struck off.

A job is a string. Its child (the same script with `--child JOB,JOB… --struck KEY,KEY…`) prints JSON lines:

    {"job": JOB}                   it begins
    {"start": KEY}                 candidate KEY runs from here on
    {"good": KEY, "error": …}      … and was right
    {"bad": KEY, "why": …}         … or was not; the child may go on
    {"finished": JOB}              all of the job's candidates are done
    {…}                            anything else is a record for the parent

KEY is JOB/…/NAME. When a child dies or says nothing for too long, the candidate that was running is struck off, by name
everywhere after the second time, and the job starts again without it.

A child with `--wait` first compiles what its one job runs, says {"prepared": JOB} and waits for a line on its stdin.
Compiling keeps one core busy, so the children of several jobs compile beside each other, and then run one by one.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from measure import emit

STARTUP_S, QUIET_S, JOB_S = 40, 10, 20
MOST_DEATHS = 3
"""How often a job may take its process along before it is left out."""

LOST_CONTEXT = ("CUDA error", "illegal", "launch failure")
"""What an exception says after which no kernel runs in this process any more."""


@contextlib.contextmanager
def candidate(key: str) -> Iterator[None]:
    """In the child: what `key` does; an exception is reported and ends the candidate, and the process if it must."""
    emit(start=key)
    try:
        yield
    except Exception as e:  # a peer may raise anything, and must not take the others along
        emit(bad=key, why=f"{type(e).__name__}: {str(e)[-300:]}")
        if any(words in str(e) for words in LOST_CONTEXT):
            os._exit(3)


def guarded(key: str, timer: Callable[[], float]) -> Callable[[], float]:
    """In the child: `timer`, reported as it starts. Its exception ends the process: rounds must stay aligned."""

    def run() -> float:
        emit(start=key)
        try:
            return timer()
        except Exception as e:
            emit(bad=key, why=f"{type(e).__name__}: {str(e)[-300:]}")
            raise

    return run


def run_child(jobs: str, run_job: Callable[[str], None], prepare: Callable[[str], None] | None = None) -> None:
    """The child's main: `jobs` as --child gives them. prepare: for --wait, run before the parent is waited for."""
    import torch

    torch.backends.cuda.matmul.allow_tf32 = False  # float32 is the truth here
    if prepare is not None:
        prepare(jobs)
        emit(prepared=jobs)
        if not sys.stdin.readline():  # the parent is gone
            return
    for job in jobs.split(","):
        emit(job=job)
        run_job(job)
        emit(finished=job)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


class Child:
    """A child process and its lines."""

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
        """Its lines until it ends; None, once, when it says nothing for `wait()` seconds."""
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
        with contextlib.suppress(BrokenPipeError):  # it is dead, which its lines tell
            self.process.stdin.write("go\n")
            self.process.stdin.flush()

    def end(self) -> int:
        self.process.kill()
        return self.process.wait()


@dataclass
class Runner:
    """Runs the jobs of `script` in child processes; remembers what broke over all of them.

    end: time.monotonic() when everything must have ended. flags: of every child.
    """

    script: str
    flags: list[str]
    end: float
    struck: set[str] = field(default_factory=set)
    deaths: Counter[str] = field(default_factory=Counter)
    records: list[dict[str, Any]] = field(default_factory=list)
    finished: set[str] = field(default_factory=set)
    prepared: dict[str, Child] = field(default_factory=dict)

    def start(self, jobs: list[str], *more: str) -> Child:
        job_flags = ["--child", ",".join(jobs), "--struck", ",".join(sorted(self.struck))]
        return Child([sys.executable, self.script, *job_flags, *self.flags, *more])

    def prepare(self, jobs: list[str], *, seconds: float, at_once: int) -> None:
        """Start a waiting child for each job, so many compiling at once; `run` takes them. Failures show up there."""
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

    def run(self, jobs: list[str], *more: str, quiet: float = QUIET_S, budget: float = JOB_S) -> None:
        """Run `jobs` in one child after another. quiet: seconds a job may be silent; budget: seconds it may take."""
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
                elif "start" in record:
                    running = record["start"]
                else:  # what failed may have left the process unfit to go on, so it stays the suspect
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

    def settle(self, jobs: list[str]) -> None:
        """Record those of `jobs` that were not reached as bad, so that a run cut short does not pass as whole."""
        for child in self.prepared.values():
            child.end()
        told = self.finished | {record["bad"] for record in self.records if "bad" in record}
        self.records += [{"bad": job, "why": "no time left"} for job in jobs if job not in told]
