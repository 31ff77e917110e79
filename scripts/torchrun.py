"""torchrun for exp/common.sh: a signal lets every rank save its state and exit, however long the save takes.

SIGINT, SIGTERM and SIGHUP send SIGTERM to each rank: the training driver saves after its step and exits 0. SIGQUIT
kills the ranks. Plain torchrun passes its own signal on to the ranks, kills them 30 s later and ends with a traceback.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import FrameType

import psutil

_is_stopping = False


def _stop(number: int, _frame: FrameType | None) -> None:
    global _is_stopping
    _is_stopping = True
    ranks = psutil.Process().children()
    if not ranks:
        os._exit(128 + number)  # a normal exit would wait for the other machines of the rendezvous
    for rank in ranks:
        with suppress(psutil.Error):
            rank.send_signal(signal.SIGKILL if number == signal.SIGQUIT else signal.SIGTERM)


def main() -> int:
    """Returns 0 if every rank exited with 0, else 1; torchrun's report of the failed ranks goes to stderr."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup stays in force
            signal.signal(number, _stop)
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    # In a thread torchrun sets no handlers of its own. It warns about that.
    logger = logging.getLogger("torch.distributed.elastic.multiprocessing.api")
    logger.addFilter(lambda record: not record.getMessage().startswith("Failed to register signal handlers"))
    try:
        with ThreadPoolExecutor(1) as pool:
            ended = pool.submit(torchrun)
            while not ended.done():
                time.sleep(0.2)  # short, because a signal that another thread got does not end it
            ended.result()
    except ChildFailedError as error:
        if not _is_stopping:
            print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
