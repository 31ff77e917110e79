"""The heartbeat alone. Ranks are processes that only run a heartbeat, forked from one that has imported torch."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

from megablocks.monitor import heartbeat

pytestmark = pytest.mark.xdist_group("heartbeat")

_PARENT = """
import json, os, signal, sys, time
from torch.distributed import TCPStore
from megablocks.monitor.heartbeat import Heartbeat
timeout, lives, frozen, folder = json.loads(sys.argv[1])
pids, ways = [], []
for rank, life in enumerate(lives):
    reading, writing = os.pipe()
    pid = os.fork()  # before the store starts threads: a child forked later may wait for a lock for ever
    if pid == 0:
        port = int(os.read(reading, 16))
        os.dup2(os.open(f"{folder}/{rank}", os.O_WRONLY | os.O_CREAT), 2)
        beat = Heartbeat("127.0.0.1", port, rank, len(lives), timeout)
        assert beat.wait_until_known()
        time.sleep(life)
        beat.stop()
        os._exit(0)
    pids.append(pid)
    ways.append(writing)
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
for way in ways:
    os.write(way, str(store.port).encode())
while not all(store.check([f"heartbeat/{rank}"]) for rank in range(len(lives))):
    time.sleep(0.05)
if frozen is not None:
    os.kill(pids[frozen], signal.SIGSTOP)
codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for rank, pid in enumerate(pids) if rank != frozen]
for pid in pids[frozen:] if frozen is not None else []:
    os.kill(pid, signal.SIGKILL)
print(json.dumps([pids, codes]))
"""


_STOPPED_STORE = """
import os, signal, time
from torch.distributed import TCPStore
from megablocks.monitor.heartbeat import Heartbeat
reading, writing = os.pipe()
host = os.fork()
if host == 0:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.write(writing, str(store.port).encode())
    time.sleep(900)
    os._exit(0)
print(host, flush=True)
beat = Heartbeat("127.0.0.1", int(os.read(reading, 16)), 1, 2, 4.0)
assert beat.wait_until_known()
os.kill(host, signal.SIGSTOP)
time.sleep(90)
"""


STOPPED_RANK: dict[str, Any] = {"timeout": 6.0, "lives": [90, 90, 90], "frozen": 2}
NORMAL_ENDS: dict[str, Any] = {"timeout": 4.0, "lives": [0.2, 9.0, 5.0], "frozen": None}


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[tuple[subprocess.Popen[str], Path]]]:
    """Those of the tests and their folders, all at once, for they wait most of their time."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with ExitStack() as stack:
        started = []
        for case in (STOPPED_RANK, NORMAL_ENDS, None):
            folder = tmp_path_factory.mktemp("heartbeat")
            argument = [json.dumps([*case.values(), str(folder)])] if case else []
            command = [sys.executable, "-c", _PARENT if case else _STOPPED_STORE, *argument]
            pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": None if case else subprocess.PIPE}
            program = subprocess.Popen(command, **pipes, text=True, env=env, start_new_session=True)
            stack.enter_context(program)
            stack.callback(_kill_all, program.pid)
            started.append((program, folder))
        yield started


def _kill_all(group: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def _result(program: subprocess.Popen[str], folder: Path) -> tuple[list[int], list[int], list[str]]:
    """Process ids, exit codes of the ranks that were not frozen, and the stderr of each rank."""
    out, _ = program.communicate()
    assert program.returncode == 0
    pids, codes = json.loads(out.splitlines()[-1])
    return pids, codes, [(folder / str(rank)).read_text() for rank in range(len(pids))]


def test_F1_all_other_ranks_name_a_stopped_rank(programs: list[tuple[subprocess.Popen[str], Path]]) -> None:
    pids, codes, said = _result(*programs[0])
    assert codes == [heartbeat.EXIT_CODE] * 2
    for rank in (0, 1):
        assert said[rank].startswith(f"rank {rank}: rank 2 (") and f"pid {pids[2]}) has been silent" in said[rank]
        assert len(said[rank].strip().splitlines()) == 1


def test_F1_ranks_that_end_normally_at_different_times_raise_no_alarm(
    programs: list[tuple[subprocess.Popen[str], Path]],
) -> None:
    _, codes, said = _result(*programs[1])
    assert codes == [0, 0, 0]
    assert said == ["", "", ""]


def test_F1_a_rank_ends_when_the_process_with_the_store_is_stopped(
    programs: list[tuple[subprocess.Popen[str], Path]],
) -> None:
    """A request to it never returns."""
    rank, _ = programs[2]
    assert rank.stdout is not None and rank.stderr is not None
    host = int(rank.stdout.readline())
    try:
        assert rank.wait() == heartbeat.EXIT_CODE
    finally:
        os.kill(host, signal.SIGKILL)
    said = rank.stderr.read()
    assert said.startswith("rank 1: the rendezvous store at 127.0.0.1:") and said.count("\n") == 1
    assert said.endswith(" s: the launcher or rank 0 is stopped or cut off; this rank ends\n")


@pytest.mark.parametrize("timeout", [1e10, math.inf])
def test_no_timeout_is_too_long(timeout: float) -> None:
    """One that the store cannot count ended the thread, and the run went on without a heartbeat."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    beat = heartbeat.Heartbeat("127.0.0.1", store.port, 0, 1, timeout)
    beat.stop()
    assert store.check(["heartbeat/0"]) and store.get("heartbeat/0") == b"done"
