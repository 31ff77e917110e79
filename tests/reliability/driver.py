"""Runs of the training driver for tests: a tiny model, ranks forked from one process that has Megatron loaded."""

from __future__ import annotations

import csv
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
TINY = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 64 --seq-length 32 "
    "--micro-batch-size 2 --global-batch-size 4 --lr 1e-2 --lr-decay-iters 100 --log-interval 1 "
    "--eval-interval 100 --eval-iters 1 "
    "--log-memory-interval 1000000"
).split()
PATIENCE_S = 900.0
"""Seconds after which a wait fails. Only a hang takes so long, even on a machine that is a hundred times slower."""
EXPERTS = "--moe-num-experts 4 --moe-top-k 2 --moe-loss-weight 0.1 --moe-expert-model-parallelism".split()


def rank_environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """The variables that torchrun would set."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT")
    values = (rank, rank, ranks, ranks, port)
    return {**{n: str(v) for n, v in zip(names, values, strict=True)}, "MASTER_ADDR": "127.0.0.1"}


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


class Zygote:
    """The process from which ranks are forked."""

    def __init__(self) -> None:
        path = os.pathsep.join([str(ROOT), str(HERE), os.environ.get("PYTHONPATH", "")])
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "zygote.py")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, text=True
        )
        self._answer(PATIENCE_S)

    def _answer(self, timeout: float) -> dict:
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], timeout)
        assert ready, f"no answer within {timeout} s"
        return json.loads(self.process.stdout.readline())

    def ask(self, command: dict) -> dict:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        return self._answer(PATIENCE_S)

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(PATIENCE_S)


@dataclass
class Run:
    """The ranks of one launch. `out` has one file for each."""

    zygote: Zygote
    pids: list[int]
    out: list[Path]
    started: float

    def codes(self) -> list[int | None]:
        return [self.zygote.ask({"poll": pid})["code"] for pid in self.pids]

    def wait(self, timeout: float = PATIENCE_S, ranks: Sequence[int] | None = None) -> list[int | None]:
        """Wait until all `ranks` (default: every one) end. Returns the exit codes. After `timeout`, kill and fail."""
        wanted = range(len(self.pids)) if ranks is None else ranks
        end = time.monotonic() + timeout
        while any(self.codes()[rank] is None for rank in wanted):
            if time.monotonic() > end:
                self.kill()
                raise AssertionError(f"ranks {list(wanted)} did not end within {timeout} s:\n{self.text()[-3000:]}")
            time.sleep(0.05)
        return self.codes()

    def wait_for(self, pattern: str, timeout: float = PATIENCE_S) -> None:
        """Wait until the output of some rank matches."""
        end = time.monotonic() + timeout
        while not re.search(pattern, self.text()):
            ended = all(code is not None for code in self.codes())
            assert not ended and time.monotonic() < end, f"no {pattern!r} in:\n{self.text()[-3000:]}"
            time.sleep(0.05)

    def signal(self, rank: int, number: int) -> None:
        os.kill(self.pids[rank], number)

    def kill(self) -> None:
        for pid, code in zip(self.pids, self.codes(), strict=True):
            if code is None:
                os.kill(pid, signal.SIGKILL)

    def text(self, rank: int | None = None) -> str:
        files = self.out if rank is None else [self.out[rank]]
        return "".join(path.read_text() for path in files if path.exists())

    def losses(self) -> dict[int, float]:
        """Iteration → training loss, from the log lines."""
        lines = re.findall(r"iteration +(\d+)/.*? lm loss: (\S+) \|", self.text())
        return {int(iteration): float(loss) for iteration, loss in lines}


class Driver:
    """Launches runs, whose logs lie in `folder`."""

    def __init__(self, zygote: Zygote, data: Path, folder: Path) -> None:
        self.zygote, self.data, self.folder = zygote, data, folder
        self._launches = 0

    @contextmanager
    def start(
        self,
        *flags: str,
        ranks: int = 1,
        model: Sequence[str] = (*TINY, *EXPERTS),
        faults: Sequence[tuple[str, dict]] = (),
        env: dict[str, str] | None = None,
        data: bool = True,
        torchrun: bool = True,
    ) -> Iterator[Run]:
        """A run in the background, which is killed at the end. Without `torchrun`, its variables are not set."""
        self._launches += 1
        port = free_port()
        argv = [*model, *(["--data-prefix", str(self.data)] if data else []), *map(str, flags)]
        run = Run(self.zygote, [], [], time.monotonic())
        for rank in range(ranks):
            out = self.folder / f"run{self._launches}.rank{rank}.log"
            request = {
                "argv": argv,
                "env": {**(rank_environment(rank, ranks, port) if torchrun else {}), **(env or {})},
                "out": str(out),
                "faults": list(faults),
            }
            run.pids.append(self.zygote.ask({"spawn": request})["pid"])
            run.out.append(out)
        try:
            yield run
        finally:
            run.kill()

    def run(self, *flags: str, timeout: float = PATIENCE_S, expect: int | None = 0, **kwargs) -> Run:
        """Run to the end. expect: the exit code that every rank must have, None for any."""
        with self.start(*flags, **kwargs) as run:
            codes = run.wait(timeout)
        assert expect is None or codes == [expect] * len(codes), f"exit codes {codes}:\n{run.text()[-4000:]}"
        return run


def read_csv(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))
