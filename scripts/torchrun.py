"""torchrun for exp/common.sh: a signal lets every rank save its state and exit, however long the save takes.

SIGINT, SIGTERM and SIGHUP send SIGTERM to each rank: the training driver saves after its step, or with several ranks
after the next one, and exits 0. SIGQUIT kills the ranks. After a signal no rank is started again. Plain torchrun passes
its own signal on to the ranks, kills them 30 s later and ends with a traceback.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import FrameType

import psutil

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_GRACE_S = 3.0
"""How long torchrun may take to end after a signal that found no rank. After every rank has saved it needs less."""
_is_stopping = False
_deadline = math.inf
_asked: set[int] = set()
"""Ranks that were asked to end. A rank that starts after the signal is not among them."""


def _stop(number: int, _frame: FrameType | None) -> None:
    global _is_stopping, _deadline
    _is_stopping = True
    ranks = psutil.Process().children()
    if not ranks:  # they have ended, or torchrun waits for the other machines of the rendezvous
        _deadline = min(_deadline, time.monotonic() + _GRACE_S)
    _send(ranks, signal.SIGKILL if number == signal.SIGQUIT else signal.SIGTERM)
    _asked.update(rank.pid for rank in ranks)


def _send(ranks: list[psutil.Process], number: int) -> None:
    for rank in ranks:
        with suppress(psutil.Error):
            rank.send_signal(number)


def _end_if_it_goes_on() -> None:
    """After a signal torchrun must not wait for machines or start ranks, which it does if a rank failed to save."""
    restarted = [rank for rank in psutil.Process().children() if rank.pid not in _asked]
    if restarted:
        _send(restarted, signal.SIGKILL)
        os._exit(1)
    if time.monotonic() > _deadline:
        os._exit(128 + signal.SIGTERM)  # a normal exit would wait for the other machines


def main() -> int:
    """Returns 0 if every rank exited with 0, 2 without a program, else 1. torchrun reports failed ranks on stderr."""
    for number in _SIGNALS:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup stays effective
            signal.signal(number, _stop)
    if any(argument.startswith(("--max-restarts", "--max_restarts")) for argument in sys.argv):
        # Otherwise torch 2.13 keeps one store for all restarts, and restarted ranks read the addresses of dead ranks.
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun
    from torch.distributed.run import parse_args

    if not parse_args(sys.argv[1:]).training_script:
        print("torchrun.py: training_script='': must be a file, or with -m a module", file=sys.stderr)
        return 2
    # In a thread torchrun sets no handlers of its own. It warns about that.
    logger = logging.getLogger("torch.distributed.elastic.multiprocessing.api")
    logger.addFilter(lambda record: not record.getMessage().startswith("Failed to register signal handlers"))
    try:
        with ThreadPoolExecutor(1) as pool:
            ended = pool.submit(torchrun)
            while not ended.done():
                time.sleep(0.2)  # short, because a signal that another thread got does not end it
                if _is_stopping:
                    _end_if_it_goes_on()
            for number in _SIGNALS:  # the exit code is known; a late signal would change it
                signal.signal(number, signal.SIG_IGN)
            ended.result()
    except ChildFailedError as error:
        if not _is_stopping:
            print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
