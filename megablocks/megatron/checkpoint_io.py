"""Saving checkpoints in the training process itself.

For every save, asynchronous or not, megatron-core 0.19.2 hands the results of writing from the writer to the trainer
through a queue of `multiprocessing.Manager`, a process of its own that starts by importing torch: 3 to 10 seconds
before the first save of each rank, and a process that outlives a rank killed by SIGKILL. Where writer and trainer are
one process, a plain queue does.
"""

from __future__ import annotations

import queue
from typing import Any

from megatron.core.dist_checkpointing.strategies import filesystem_async


def write_in_process(args: Any) -> bool:
    """Give synchronous saves a plain queue, once, before the first save. Returns whether the run's saves are such."""
    if args.async_save:
        return False
    if filesystem_async._results_queue is None:
        filesystem_async._results_queue = queue.Queue()
    return True
