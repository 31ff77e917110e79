"""The heartbeat alone: ranks are processes that do nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from megablocks.monitor import heartbeat

_RANK = """
import datetime, sys, time
from torch.distributed import TCPStore
from megablocks.monitor.heartbeat import Heartbeat
rank, port, timeout = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
beat = Heartbeat("127.0.0.1", port, rank, 3, timeout)
time.sleep(float(sys.argv[4]))
beat.stop()
print("ended well", flush=True)
"""


@pytest.fixture
def store():  # type: ignore[no-untyped-def]
    from torch.distributed import TCPStore

    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def start(port: int, *, timeout: float, lives: tuple[float, float, float]) -> list[subprocess.Popen]:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return [
        subprocess.Popen(
            [sys.executable, "-c", _RANK, str(rank), str(port), str(timeout), str(life)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env,
        )
        for rank, life in enumerate(lives)
    ]  # fmt: skip


def until_all_beat(store, ranks: int) -> None:  # type: ignore[no-untyped-def]
    end = time.monotonic() + 60
    while not all(store.check([f"heartbeat/{rank}"]) for rank in range(ranks)):
        assert time.monotonic() < end, "the ranks did not start"
        time.sleep(0.1)


def test_F1_killed_and_stopped_ranks_are_named_by_the_others(store) -> None:  # type: ignore[no-untyped-def]
    ranks = start(store.port, timeout=3.0, lives=(90, 90, 90))
    try:
        until_all_beat(store, 3)
        ranks[2].send_signal(signal.SIGSTOP)
        out = [process.communicate(timeout=60)[0] for process in ranks[:2]]
        assert [process.returncode for process in ranks[:2]] == [heartbeat.EXIT_CODE] * 2
        for rank, text in enumerate(out):
            assert f"rank {rank}: rank 2 (" in text and f"pid {ranks[2].pid}) has been silent" in text
            assert len(text.strip().splitlines()) == 1
    finally:
        for process in ranks:
            process.kill()


def test_F1_ranks_that_end_well_at_different_times_alarm_nobody(store) -> None:  # type: ignore[no-untyped-def]
    ranks = start(store.port, timeout=2.0, lives=(1, 6, 4))
    out = [process.communicate(timeout=60)[0] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0, 0], out
    assert out == ["ended well\n"] * 3
