"""scripts/torchrun.py saves and stops its ranks at a signal and starts dead ones again; so does the launcher."""

from __future__ import annotations

import contextlib
import csv
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from megablocks.checkpoint import atomic

ROOT = Path(__file__).parents[2]
PATIENCE_S = 120.0
RANK = """
import os, signal, sys, time
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))


def say(line):  # in one write: print() writes the end of a line by itself, and another rank may write between
    os.write(1, f"{line}\\n".encode())


say("rank " + os.environ["RANK"])
while not asked:
    time.sleep(0.05)
say("asked")
time.sleep(float(sys.argv[1]))
say("saved")
sys.exit(int(sys.argv[2]) if len(sys.argv) > 2 else 0)
"""
RANKS = """
import datetime, os, pathlib, signal
import torch
import torch.distributed as dist
from megablocks.files import write_durably
from megablocks.monitor.heartbeat import Heartbeat

saved = pathlib.Path("saved")
beat = Heartbeat.from_environment(20)
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=30))
first = int(saved.read_text()) if saved.exists() else 0
os.write(1, f"from {first}\\n".encode())  # whole, whoever else writes


def once(name, *pids):
    if os.environ["MACHINE"] == "1" and not os.path.exists(name):
        pathlib.Path(name).touch()
        for pid in pids:
            os.kill(pid, signal.SIGKILL)


try:
    for step in range(first + 1, 9):
        if step == 3:
            once("a dead rank", os.getpid())
        if step == 6:
            once("a dead machine", os.getppid(), os.getpid())
        total = torch.tensor(step)
        dist.all_reduce(total)
        assert total == 2 * step, "the ranks are at different steps"
        if dist.get_rank() == 0 and step % 2 == 0:
            write_durably(saved, str(step))
        dist.barrier()
except RuntimeError:
    os._exit(75)
beat.stop()
dist.barrier()
"""


def heed_signals() -> None:
    """Within a new process: a background job of a shell ignores signals, and bash can trap none that it ignores."""
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts a command in a session of its own with its output in the file `log`; kills it on leaving."""
    started = []

    def run(*command: str, **environment: str) -> subprocess.Popen[bytes]:
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **environment}
        with open(tmp_path / "log", "ab") as log:
            options = {"start_new_session": True, "preexec_fn": heed_signals, "cwd": tmp_path}
            started.append(subprocess.Popen(command, env=variables, stdout=log, stderr=log, **options))
        return started[-1]

    yield run
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait_for(pattern: str, log: Path, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not re.search(pattern, log.read_text()):
        assert process.poll() is None and time.monotonic() < end, log.read_text()[-3000:]
        time.sleep(0.1)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def _torchrun(tmp_path: Path, *arguments: str) -> list[str]:
    (tmp_path / "rank.py").write_text(RANK)
    return [sys.executable, str(ROOT / "scripts/torchrun.py"), *arguments, str(tmp_path / "rank.py")]


@pytest.mark.parametrize("words", [[""], ["--nproc-per-node", "2", "-m", "", "1"]])
def test_an_empty_program_is_one_line(words: list[str]) -> None:
    command = [sys.executable, str(ROOT / "scripts/torchrun.py"), *words]
    done = subprocess.run(command, capture_output=True, text=True)
    expected = "torchrun.py: training_script='': must be a file, or with -m a module\n"
    assert (done.returncode, done.stderr) == (2, expected)


# after SIGTERM the rank of test_after_a_signal_no_rank_is_started_again saves too
@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGHUP]
)
def test_a_signal_to_torchrun_lets_the_ranks_save(start, tmp_path: Path, number: signal.Signals) -> None:
    process = start(*_torchrun(tmp_path, "--standalone", "--nproc-per-node", "2"), "0.5")
    _wait_for(r"(?s)rank.*rank", tmp_path / "log", process)
    os.killpg(process.pid, number)
    assert process.wait(PATIENCE_S) == 0
    lines = (tmp_path / "log").read_text().splitlines()
    assert sorted(lines) == ["asked", "asked", "rank 0", "rank 1", "saved", "saved"]


def test_sigquit_kills_ranks_that_do_not_end(start, tmp_path: Path) -> None:
    process = start(*_torchrun(tmp_path, "--standalone", "--nproc-per-node", "1"), "1000")
    _wait_for("rank 0", tmp_path / "log", process)
    process.terminate()
    _wait_for("asked", tmp_path / "log", process)  # signals that arrive together have no order
    process.send_signal(signal.SIGQUIT)
    assert process.wait(PATIENCE_S) == 1
    assert "Traceback" not in (tmp_path / "log").read_text()


def test_after_a_signal_no_rank_is_started_again(start, tmp_path: Path) -> None:
    process = start(*_torchrun(tmp_path, "--standalone", "--max-restarts", "2", "--nproc-per-node", "1"), "0", "1")
    _wait_for("rank 0", tmp_path / "log", process)
    process.terminate()
    assert process.wait(PATIENCE_S) == 1
    assert (tmp_path / "log").read_text().count("saved\n") == 1


ENDS = """
import os, subprocess
late = "while kill -0 $0; do :; done; kill -TERM $1"
subprocess.Popen(["sh", "-c", late, str(os.getpid()), str(os.getppid())], stderr=subprocess.DEVNULL)
"""
LATE = """
import os, signal, sys


class Last:
    def __del__(self, kill=os.kill, launcher=os.getpid(), number=signal.SIGTERM):
        kill(launcher, number)


if "RANK" not in os.environ:
    sys.modules["last"] = Last()
"""


def test_a_signal_after_the_ranks_have_saved_is_no_failure(start, tmp_path: Path) -> None:
    """One comes as soon as the rank has ended, one while Python ends."""
    command = _torchrun(tmp_path, "--standalone", "--nproc-per-node", "1")
    (tmp_path / "rank.py").write_text(ENDS)
    (tmp_path / "sitecustomize.py").write_text(LATE)
    assert start(*command, PYTHONPATH=str(tmp_path)).wait(PATIENCE_S) == 0, (tmp_path / "log").read_text()


def test_F2_a_dead_rank_and_a_machine_that_comes_back_resume(start, tmp_path: Path) -> None:
    """Two machines on one host, each a torchrun of its own with one rank."""
    (tmp_path / "ranks.py").write_text(RANKS)
    dry = ["bash", str(ROOT / "exp/smoke/dmoe.sh"), "run"]
    settings = {"NNODES": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "MAX_RESTARTS": "3"}
    machines = []
    for number in ("0", "1"):
        environment = {**os.environ, **settings, "NODE_RANK": number, "NGPU": "1", "DRY_RUN": "1"}
        printed = subprocess.run(dry, env=environment, capture_output=True, text=True, check=True).stdout
        words = shlex.split(printed)
        words[words.index("--rdzv-conf") + 1] += ",keep_alive_interval=1"  # 3 s until a machine counts as dead, not 15
        machines.append([sys.executable, *words[1 : words.index("-m")], str(tmp_path / "ranks.py")])

    def machine(number: int) -> subprocess.Popen[bytes]:
        return start(*machines[number], MACHINE=str(number))

    first, second = machine(0), machine(1)
    assert second.wait(PATIENCE_S) == -signal.SIGKILL, (tmp_path / "log").read_text()[-3000:]
    again = machine(1)
    codes = [first.wait(PATIENCE_S), again.wait(PATIENCE_S)]
    log = (tmp_path / "log").read_text()
    assert codes == [0, 0] and (tmp_path / "saved").read_text() == "8", log[-3000:]
    assert re.findall(r"^from (\d+)$", log, re.M) == ["0", "0", "2", "2", "4", "4"], log[-3000:]


def test_a_signal_ends_the_wait_for_other_machines(start, tmp_path: Path) -> None:
    rendezvous = ("--nnodes", "2", "--node-rank", "1", "--master-addr", "127.0.0.1", "--master-port", "9")
    process = start(*_torchrun(tmp_path, *rendezvous, "--nproc-per-node", "1"), "0", LOGLEVEL="INFO")
    _wait_for("rdzv_endpoint", tmp_path / "log", process)
    process.terminate()
    assert process.wait(20) == 128 + signal.SIGTERM


def _smoke(tmp_path: Path, save_interval: int) -> dict[str, str]:
    """The environment of a tiny run of exp/smoke/dmoe.sh, whose data it makes."""
    pytest.importorskip("megatron.training")
    prepare = [sys.executable, str(ROOT / "scripts/prepare_data.py"), "--out", str(tmp_path / "set"), "--workers", "1"]
    prepare += ["--vocab-size", "600", "--max-bytes", "300000", "--valid-fraction", "0.3"]
    subprocess.run(prepare, check=True, capture_output=True)
    settings = {"PYTHON": sys.executable, "NGPU": "2", "DATA_PREFIX": str(tmp_path / "set"), "CUDA_VISIBLE_DEVICES": ""}
    settings["FLAGS"] = "--num-layers 1 --hidden-size 32 --ffn-hidden-size 32 --seq-length 32 --log-interval 1"
    settings["FLAGS"] += f" --eval-iters 0 --save-interval {save_interval} --lr-decay-iters 100000"
    return settings


def _losses(path: Path) -> dict[int, tuple[str, str]]:
    with open(path, newline="") as file:
        return {int(row["iteration"]): (row["tokens"], row["train_loss"]) for row in csv.DictReader(file)}


@pytest.mark.slow
def test_F2_the_launchers_of_two_machines_train_as_one_through_two_faults(start, tmp_path: Path) -> None:
    """Launchers, torchruns and ranks of the driver: a rank is killed, then a whole machine, which comes back."""
    settings, log, smoke = _smoke(tmp_path, 50), tmp_path / "log", ("bash", str(ROOT / "exp/smoke/dmoe.sh"))
    assert start(*smoke, str(tmp_path / "straight"), "400", **settings).wait(PATIENCE_S) == 0, log.read_text()[-3000:]
    log.unlink()
    settings |= {"NNODES": "2", "NGPU": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}

    def machine(number: int) -> subprocess.Popen[bytes]:
        return start(*smoke, str(tmp_path / "run"), "400", **settings, NODE_RANK=str(number), MAX_RESTARTS="3")

    first, second = machine(0), machine(1)
    _wait_for(r"iteration +6\d/", log, first)
    (rank,) = (p for p in psutil.Process(second.pid).children(recursive=True) if p.cmdline()[1:3] == ["-u", "-m"])
    rank.kill()
    _wait_for(r"(?s)loaded checkpoint.*iteration +18\d/", log, first)
    os.killpg(second.pid, signal.SIGKILL)
    again = machine(1)
    codes = [first.wait(2 * PATIENCE_S), again.wait(PATIENCE_S)]
    assert codes == [0, 0] and log.read_text().count("successfully loaded checkpoint") >= 2, log.read_text()[-3000:]
    rows = [_losses(tmp_path / name / "loss.csv") for name in ("run", "straight")]
    assert rows[0] == rows[1] and rows[0].keys() == set(range(1, 401))


@pytest.mark.slow
def test_ctrl_c_saves_and_the_same_command_resumes(start, tmp_path: Path) -> None:
    """The whole of it: launcher, torchrun and two ranks of the training driver."""
    settings = _smoke(tmp_path, 100000)
    command = ("bash", str(ROOT / "exp/smoke/dmoe.sh"), str(tmp_path / "run"), "100000")
    saved = []
    for number in (signal.SIGINT, signal.SIGTERM):
        process = start(*command, **settings)
        _wait_for(rf"iteration +{saved[-1] + 2 if saved else 2}/", tmp_path / "log", process)
        os.killpg(process.pid, number) if number == signal.SIGINT else process.send_signal(number)
        assert process.wait(PATIENCE_S) == 0, (tmp_path / "log").read_text()[-3000:]
        latest = atomic.find_latest_complete(tmp_path / "run/checkpoints")
        assert latest.iteration and not latest.warnings
        saved.append(latest.iteration)
    assert saved[0] < saved[1] and "Traceback" not in (tmp_path / "log").read_text()
