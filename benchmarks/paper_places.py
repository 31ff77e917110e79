"""Where the launches of a comparison run: several at once on one machine, each on GPUs and CPUs of its own.

Every launch blocks a thread, so that what follows it is ordinary code. The main thread starts them, takes their results
and gets the signals.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeVar

from paper_arms import Launch

from megablocks.config import ConfigError

J = TypeVar("J")
R = TypeVar("R")


class Stopped(Exception):
    """A signal ended the comparison."""


class Failed(Exception):
    """A launch failed; the message is one line, and `output` all that the launch printed."""

    def __init__(self, message: str, output: str = "") -> None:
        super().__init__(message)
        self.output = output


class Place(NamedTuple):
    """The GPUs and CPUs of a launch. Without CPUs it takes any."""

    number: int
    gpus: list[str]
    cpus: list[int]


class Places:
    """Places of a machine, each for one launch at a time.

    Args:
        at_once: number of places.
        ngpu: GPUs of a place.
        environ: CUDA_VISIBLE_DEVICES names the GPUs that the places share out; without it they have none. Several
            places share out the CPUs too.

    Raises:
        ConfigError: there are fewer GPUs.
    """

    def __init__(self, at_once: int, ngpu: int, environ: Mapping[str, str]) -> None:
        gpus = [name for name in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        if gpus and at_once * ngpu > len(gpus):
            raise ConfigError(
                f"AT_ONCE={at_once}: with NGPU={ngpu} needs {at_once * ngpu} GPUs, there are {len(gpus)}; use fewer"
            )
        self.at_once, self._environ = at_once, dict(environ)
        if at_once > 1:  # else each machine of a run needs it; here every run finds a port of its own
            self._environ.pop("MASTER_PORT", None)
        cpus = sorted(os.sched_getaffinity(0)) if at_once > 1 else []
        share = len(cpus) // at_once
        self._free: SimpleQueue[Place] = SimpleQueue()
        for i in range(at_once):
            self._free.put(Place(i, gpus[i * ngpu : (i + 1) * ngpu], cpus[i * share : (i + 1) * share]))
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        self._stops = 0

    def stop(self, _number: int = 0, _frame: Any = None) -> None:
        """Handler of signals: let the runs save what they save, and end. The third one kills them."""
        self._stops += 1
        for child in list(self._children.values()):
            self._signal(child)

    def _signal(self, child: subprocess.Popen[bytes]) -> None:
        if child.poll() is None:
            with suppress(ProcessLookupError):  # its thread has just seen its end
                os.killpg(child.pid, signal.SIGTERM if self._stops < 3 else signal.SIGKILL)

    def call(self, launch: Launch, data: Path, logs: Path, lock: int) -> str:
        """Run `launch` in a free place and return what it printed, which is in launch-N.log of the folder `logs` too.

        Args:
            lock: a file descriptor that the launch inherits.

        Raises:
            Stopped: a signal came.
            Failed: it failed; the message is its last line.
        """
        place = self._free.get()
        try:
            log = logs / f"launch-{place.number + 1}.log"
            variables = {**self._environ, "DATA_PREFIX": str(data), "PYTHON": sys.executable, **launch.variables}
            if place.gpus:
                variables["CUDA_VISIBLE_DEVICES"] = ",".join(place.gpus)
            pinned = ["taskset", "-c", ",".join(map(str, place.cpus))] if place.cpus else []
            with open(log, "wb") as file:
                # A session of its own: Ctrl-C reaches it once, through `stop`.
                child = subprocess.Popen(
                    [*pinned, *launch.command], env=variables, stdin=subprocess.DEVNULL, stdout=file,
                    stderr=subprocess.STDOUT, start_new_session=True, pass_fds=(lock,),
                )  # fmt: skip
                self._children[place.number] = child
                if self._stops:
                    self._signal(child)
                status = child.wait()
            text = log.read_text(errors="replace")
        finally:
            self._free.put(place)
        if self._stops:
            raise Stopped
        if status:
            lines = [line for line in text.splitlines() if line.strip()]
            raise Failed(lines[-1] if lines else f"{shlex.join(launch.command)} ended with {status}", text)
        return text

    def each(
        self,
        following: Callable[[], J | None],
        work: Callable[[J], R],
        ended: Callable[[J, Future[R]], None],
    ) -> None:
        """Do all jobs, as many at once as there are places. Only `work` runs in other threads.

        Args:
            following: the next job; None: none before another one has ended.
            ended: gets each job that has ended. What it raises ends everything, once the running jobs have ended.
        """
        running: dict[Future[R], J] = {}
        with ThreadPoolExecutor(self.at_once) as pool:
            while True:
                while len(running) < self.at_once and not self._stops and (job := following()) is not None:
                    running[pool.submit(work, job)] = job
                if not running:
                    break
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    ended(running.pop(future), future)
        if self._stops:
            raise Stopped
