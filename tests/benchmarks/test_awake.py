"""Loops that keep cores awake: idle priority, one on each core, and gone with whoever wanted them."""

import contextlib
import importlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from .conftest import BENCHMARKS

awake = importlib.import_module("awake")

pytestmark = pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="this platform has no SCHED_IDLE")


def stat_of(pid):
    """State, parent and user time in ticks; None if there is no such process any more, or no more than its status."""
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        if fields[0] not in "ZX":
            return fields[0], int(fields[1]), int(fields[11])
    return None


def children_of(parent):
    pids = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
    return {pid for pid in pids if (stat := stat_of(pid)) and stat[1] == parent}


def eventually(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.fixture
def cores(monkeypatch):
    """Two at most, since the tests beside this one need theirs."""
    few = set(sorted(os.sched_getaffinity(0))[:2])
    monkeypatch.setattr(awake.os, "sched_getaffinity", lambda _: few)
    return few


def test_every_core_has_a_loop_of_idle_priority(cores, monkeypatch):
    before = children_of(os.getpid())
    with awake.cores_awake(True):
        loops = children_of(os.getpid()) - before
        monkeypatch.undo()  # what follows asks for theirs
        assert [os.sched_getscheduler(pid) for pid in loops] == [os.SCHED_IDLE] * len(cores)
        assert sorted(map(os.sched_getaffinity, loops), key=sorted) == [{core} for core in sorted(cores)]
        assert os.sched_getscheduler(0) == os.SCHED_OTHER
        eventually(lambda: all((stat := stat_of(pid)) and stat[0] == "R" and stat[2] >= 10 for pid in loops))
    assert not any(map(stat_of, loops))


def test_loops_end_where_the_measurement_fails(cores):
    before = children_of(os.getpid())
    with pytest.raises(ValueError, match="broke"), awake.cores_awake(True):  # noqa: PT012
        loops = children_of(os.getpid()) - before
        assert len(loops) == len(cores)
        raise ValueError("broke")
    assert not any(map(stat_of, loops))


CALLER = f"""
import os, sys, time
sys.path.append({str(BENCHMARKS)!r})
import awake
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
with awake.cores_awake(True):
    print("awake", flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_loops_end_with_who_started_them(how):
    caller = subprocess.Popen([sys.executable, "-c", CALLER], stdout=subprocess.PIPE, text=True)
    assert caller.stdout.readline() == "awake\n"
    (loop,) = children_of(caller.pid)
    eventually(lambda: (stat := stat_of(loop)) and stat[2] >= 10)
    caller.send_signal(how)
    caller.communicate(timeout=60)
    eventually(lambda: stat_of(loop) is None)


def test_ctrl_c_ends_loops_without_a_word_of_theirs():
    command = [sys.executable, "-c", CALLER]
    pipe = subprocess.PIPE
    caller = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
    assert caller.stdout.readline() == "awake\n"
    (loop,) = children_of(caller.pid)
    eventually(lambda: (stat := stat_of(loop)) and stat[2] >= 10)
    os.killpg(caller.pid, signal.SIGINT)  # as a terminal does
    said = caller.communicate(timeout=60)[1]
    assert said.count("Traceback") == 1 and stat_of(loop) is None


def test_without_idle_priority_one_line_says_so(cores, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/some/where/layers.py"])
    before = children_of(os.getpid())

    def refuse(*_):
        raise PermissionError(1, "Operation not permitted")

    with monkeypatch.context() as patch, pytest.raises(SystemExit) as refused:
        patch.setattr(awake.os, "sched_setscheduler", refuse)
        with awake.cores_awake(True):
            pass
    assert str(refused.value).startswith("layers.py: --awake cannot set a loop's priority or core ([Errno 1]")
    assert children_of(os.getpid()) == before
    monkeypatch.delattr(awake.os, "SCHED_IDLE")
    with pytest.raises(SystemExit) as missing, awake.cores_awake(True):
        pass
    assert str(missing.value).startswith("layers.py: --awake needs SCHED_IDLE") and "\n" not in str(missing.value)
    monkeypatch.delattr(awake.os, "sched_getaffinity")  # a platform without one has not the other
    with awake.cores_awake(False):
        assert children_of(os.getpid()) == before
