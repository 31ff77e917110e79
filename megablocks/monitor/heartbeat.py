"""A thread that detects dead or frozen ranks while the main thread waits in a collective, and then ends this rank.

Each rank increments a key of the rendezvous store and watches the keys of other ranks. If a key no longer changes, its
rank is dead: it was killed or stopped (SIGSTOP), or its machine is gone. The watcher measures silence with its own
clock; clocks of machines are not compared. A rank that finds a dead rank writes a message to a key that all ranks read.

The thread opens its own connection to the store, because the main thread may hold the default one. It ends the process
with `os._exit`, because the main thread may never return from its collective.

A launcher that finds a dead worker sends SIGTERM to the others and kills them later. Python runs signal handlers in the
main thread only, so this thread reads the pipe that Python writes signal numbers to. After a SIGTERM a rank counts as
dead after a few silent beats.
"""

from __future__ import annotations

import datetime
import itertools
import os
import select
import signal
import socket
import sys
import threading
import time
from typing import Any

EXIT_CODE = 75
"""Exit code of a rank that ends itself because another rank is dead."""

_GRACE_BEATS = 10
_WATCHED = 8
"""Number of ranks that each rank watches. It is fixed, so that the store's load grows linearly with the world."""
_START_S = 120.0
"""Shortest timeout of a rank before its first beat, because it may still be importing."""

_LONGEST_WAIT_S = 1e9
"""A request to the store waits no longer than this: torch counts nanoseconds in 64 bits."""


def _say(message: str) -> None:
    os.write(sys.stderr.fileno(), f"{message}\n".encode())


class Heartbeat:
    """Beats and watches other ranks from construction until `stop`.

    Args:
        host, port: the TCP store of torch.distributed.init_process_group (MASTER_ADDR, MASTER_PORT).
        rank, world_size: of this process.
        timeout: seconds of silence after which a rank counts as dead.
    """

    def __init__(self, host: str, port: int, rank: int, world_size: int, timeout: float) -> None:
        self.rank, self.timeout = rank, timeout
        self.interval = min(1.0, timeout / 5)
        self._watched = [(rank + 1 + i) % world_size for i in range(min(_WATCHED, world_size - 1))]
        self._address = (host, port)
        self._stopped = threading.Event()
        self._connected = threading.Event()
        self._impatient = False
        self._beats = 0
        self._last_word = "done"
        self._read_end, self._write_end = os.pipe()
        for end in (self._read_end, self._write_end):
            os.set_blocking(end, False)
        self._old_wakeup = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    @classmethod
    def from_environment(cls, timeout: float) -> Heartbeat:
        """A heartbeat that takes its other arguments from torchrun's environment variables."""
        env = os.environ
        return cls(env["MASTER_ADDR"], int(env["MASTER_PORT"]), int(env["RANK"]), int(env["WORLD_SIZE"]), timeout)

    def wait_until_known(self) -> bool:
        """Wait, at most a minute, until the store has this rank's first beat. Before that no rank can miss it."""
        return self._connected.wait(60.0)

    def fail(self, error: BaseException) -> None:
        """End because of `error`, and make the other ranks end too. If a watched rank is dead, name it and exit.

        When a peer dies, gloo's collectives fail at once, long before the timeout. So after such a failure a rank
        counts as dead after a few silent beats, as after a SIGTERM.
        """
        reason = (str(error).splitlines() or [""])[0] or type(error).__name__
        if type(error).__module__.startswith("torch") or isinstance(error, RuntimeError) and "onnection" in str(error):
            self._impatient = True
            self._thread.join((_GRACE_BEATS + 3) * self.interval)
        self._last_word = f"failed {reason}"
        self.stop()

    def stop(self) -> None:
        """End the thread, and tell the other ranks that this rank ends on purpose."""
        if not self._stopped.is_set():
            self._stopped.set()
            self._thread.join(self.interval + 5)
            signal.set_wakeup_fd(self._old_wakeup)

    def _run(self) -> None:
        """The thread: tell the store that this rank is alive, and check the watched ranks."""
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        host, port = self._address
        own = f"heartbeat/{self.rank}"
        wait = datetime.timedelta(seconds=min(max(self.timeout, 30.0), _LONGEST_WAIT_S))
        try:
            store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=wait)
            store.set(f"{own}/host", f"{socket.gethostname()} pid {os.getpid()}")
        except RuntimeError as error:
            _say(f"rank {self.rank}: no heartbeat, the store at {host}:{port} does not answer ({error})")
            return
        threading.Thread(target=self._watch_store, name="heartbeat of the store", daemon=True).start()
        now = time.monotonic()
        seen = {rank: (-1, now) for rank in self._watched}
        try:
            for beat in itertools.count():
                if self._stopped.is_set():
                    store.set(own, self._last_word)
                    return
                store.set(own, str(beat))
                self._connected.set()
                self._beats = beat
                self._look(store, seen)
                self._sleep(self.interval)
        except RuntimeError as error:  # the process that hosts the store has ended
            self._sleep(2 * self.interval)  # it may have ended because all ranks end
            reason = str(error).splitlines()[0]
            self._end(f"the rendezvous store at {host}:{port} is gone: the launcher or rank 0 has ended ({reason})")

    def _watch_store(self) -> None:
        """End this rank if the store is silent: a request to a stopped process, or to a lost machine, never returns."""
        seen, silence = -1, 0.0  # not the clock, which continues while this process is stopped
        while not self._stopped.wait(self.interval):
            silence = silence + self.interval if seen == self._beats else 0.0
            seen = self._beats
            if silence > self._limit(started=True):
                host, port = self._address
                where = f"the rendezvous store at {host}:{port} has been silent for {silence:.0f} s"
                self._end(f"{where}: the launcher or rank 0 is stopped or cut off")

    def _look(self, store: Any, seen: dict[int, tuple[int, float]]) -> None:
        """End the process if a watched rank failed or is silent. seen: rank → its last beat, and the time of it."""
        if store.check(["heartbeat/dead"]):
            self._end(store.get("heartbeat/dead").decode())
        for rank in list(seen):
            key = f"heartbeat/{rank}"
            value = store.get(key).decode() if store.check([key]) else "-1"
            if value == "done":
                del seen[rank]
            elif value.startswith("failed"):
                self._sleep(2 * self.interval)  # if it failed on all ranks, this rank says so itself
                self._end(f"rank {rank} ended ({value[7:]})")
            elif int(value) != seen[rank][0]:
                seen[rank] = (int(value), time.monotonic())
            elif (silence := time.monotonic() - seen[rank][1]) > self._limit(started=seen[rank][0] >= 0):
                where = store.get(f"{key}/host").decode() if store.check([f"{key}/host"]) else "never seen"
                message = f"rank {rank} ({where}) has been silent for {silence:.0f} s: killed, stopped or cut off"
                store.set("heartbeat/dead", message)
                self._end(message)

    def _limit(self, started: bool) -> float:
        if not started:
            return max(self.timeout, _START_S)
        return min(self.timeout, _GRACE_BEATS * self.interval) if self._impatient else self.timeout

    def _end(self, message: str) -> None:
        """End this process, unless `stop` was called meanwhile."""
        if not self._stopped.is_set():
            _say(f"rank {self.rank}: {message}; this rank ends")
            os._exit(EXIT_CODE)

    def _sleep(self, seconds: float) -> None:
        """Wait, unless stopped. Records a SIGTERM that arrives meanwhile."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0 and not self._stopped.is_set():
            if select.select([self._read_end], [], [], min(left, 0.2))[0]:
                if signal.SIGTERM in os.read(self._read_end, 512):
                    self._impatient = True
