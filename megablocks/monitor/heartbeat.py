"""A thread that notices dead or frozen ranks while the main thread waits in a collective, names them and ends the rank.

Each rank counts up a key of the rendezvous store and watches the counters of others (all, or in a large world the next
few) with its own clock, so no clocks are compared; who finds one dead says so in a key that all read. A killed rank, a
stopped one (SIGSTOP), a machine that is gone: their counters stand still. The thread has its own connection to the
store, since the main thread may hold the default one, and ends the process with `os._exit`, since the main thread may
never return from its collective.

A launcher that finds a dead worker sends SIGTERM to the rest and kills them later. Handlers in Python need the main
thread, so the C-level wake-up pipe is watched here: after a SIGTERM a few silent beats are enough to call a rank dead.
"""

from __future__ import annotations

import datetime
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

EXIT_CODE = 75
"""Exit code of a rank that ended itself because another was dead."""

_GRACE_BEATS = 10
_WATCHED = 8
"""Ranks that each rank watches: the store's load grows with the world, not with its square."""
_START_S = 120.0
"""A rank that has never beaten may still be importing, however short the timeout."""


def _say(message: str) -> None:
    os.write(sys.stderr.fileno(), f"{message}\n".encode())


class Heartbeat:
    """Beats from construction until `stop`.

    Args:
        host, port: the TCP store that torch.distributed.init_process_group used (MASTER_ADDR, MASTER_PORT).
        rank, world_size: of this process.
        timeout: seconds of a rank's silence after which it counts as dead.
        on_dead: called with the one-line message instead of printing it and ending the process (tests).
    """

    def __init__(
        self,
        host: str,
        port: int,
        rank: int,
        world_size: int,
        timeout: float,
        on_dead: Callable[[str], None] | None = None,
    ) -> None:
        self.rank, self.timeout = rank, timeout
        self.interval = min(1.0, timeout / 5)
        self._watched = [(rank + 1 + i) % world_size for i in range(min(_WATCHED, world_size - 1))]
        self._prefix = f"heartbeat/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"  # a restart shares the store
        self._address = (host, port)
        self._on_dead = on_dead or self._exit
        self._stopped = threading.Event()
        self._connected = threading.Event()
        self._terminated: float | None = None
        self._failure: str | None = None
        self._read_end, self._write_end = os.pipe()
        for end in (self._read_end, self._write_end):
            os.set_blocking(end, False)
        self._old_wakeup = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    @classmethod
    def from_environment(cls, timeout: float) -> Heartbeat:
        """By torchrun's variables."""
        env = os.environ
        return cls(env["MASTER_ADDR"], int(env["MASTER_PORT"]), int(env["RANK"]), int(env["WORLD_SIZE"]), timeout)

    def wait_until_known(self, timeout: float = 60.0) -> bool:
        """Wait until this rank's first beat is in the store, as it must be before the rank can be missed."""
        return self._connected.wait(timeout)

    def fail(self, error: BaseException) -> None:
        """This rank ends with `error`: tell the others, which end too; but if one of them is dead, name it and exit.

        A collective of gloo fails at once when a peer dies, long before its silence counts, so a failure here makes
        this rank as impatient as a SIGTERM does.
        """
        reason = (str(error).splitlines() or [""])[0] or type(error).__name__
        if type(error).__module__.startswith("torch") or isinstance(error, RuntimeError) and "onnection" in str(error):
            self._terminated = time.monotonic()
            self._thread.join((_GRACE_BEATS + 3) * self.interval)
        self._failure = reason
        self.stop()

    def stop(self) -> None:
        """End the thread; tell the others that silence from now on is no death."""
        if not self._stopped.is_set():
            self._stopped.set()
            self._thread.join(self.interval + 5)
            signal.set_wakeup_fd(self._old_wakeup)

    def _run(self) -> None:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        host, port = self._address
        wait = datetime.timedelta(seconds=max(self.timeout, 30.0))
        try:
            store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=wait)
            store.set(f"{self._prefix}/{self.rank}/host", f"{socket.gethostname()} pid {os.getpid()}")
        except RuntimeError as error:
            _say(f"rank {self.rank}: no heartbeat, the store at {host}:{port} does not answer ({error})")
            return
        now = time.monotonic()
        seen = {rank: (-1, now) for rank in self._watched}
        beat = 0
        while True:
            stopped = self._stopped.is_set()
            try:
                if stopped:
                    last = "done" if self._failure is None else f"failed {self._failure}"
                    store.set(f"{self._prefix}/{self.rank}", last)
                    return
                store.set(f"{self._prefix}/{self.rank}", str(beat))
                self._connected.set()
                self._look(store, seen)
            except RuntimeError as error:  # the store's host is gone
                if not self._stopped.is_set():
                    self._lost_store(error)
                return
            beat += 1
            self._sleep(self.interval)

    def _look(self, store: Any, seen: dict[int, tuple[int, float]]) -> None:
        if store.check([f"{self._prefix}/dead"]):
            self._end(store.get(f"{self._prefix}/dead").decode())
        for rank in list(seen):
            key = f"{self._prefix}/{rank}"
            value = store.get(key).decode() if store.check([key]) else "-1"
            if value == "done":
                del seen[rank]
            elif value.startswith("failed"):
                self._sleep(2 * self.interval)  # it may have failed on all ranks, which then say so themselves
                self._end(f"rank {rank} ended ({value[7:]})")
                del seen[rank]
            elif int(value) != seen[rank][0]:
                seen[rank] = (int(value), time.monotonic())
            elif (silence := time.monotonic() - seen[rank][1]) > self._limit(started=seen[rank][0] >= 0):
                where = store.get(f"{key}/host").decode() if store.check([f"{key}/host"]) else "never seen"
                message = f"rank {rank} ({where}) has been silent for {silence:.0f} s: killed, stopped or cut off"
                store.set(f"{self._prefix}/dead", message)
                self._end(message)
                del seen[rank]

    def _limit(self, started: bool) -> float:
        if not started:
            return max(self.timeout, _START_S)
        return self.timeout if self._terminated is None else min(self.timeout, _GRACE_BEATS * self.interval)

    def _end(self, message: str) -> None:
        if not self._stopped.is_set():
            self._on_dead(f"rank {self.rank}: {message}; this rank ends")

    def _lost_store(self, error: Exception) -> None:
        self._sleep(2 * self.interval)  # rank 0 may have ended because all ranks do
        host, port = self._address
        reason = str(error).splitlines()[0]
        self._end(f"the rendezvous store at {host}:{port} is gone, and with it the launcher or rank 0 ({reason})")

    def _sleep(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0 and not self._stopped.is_set():
            if select.select([self._read_end], [], [], min(left, 0.2))[0]:
                if signal.SIGTERM in os.read(self._read_end, 512):
                    self._terminated = time.monotonic()

    def _exit(self, message: str) -> None:
        _say(message)
        os._exit(EXIT_CODE)
