"""Around Megatron's checkpoints: saving without a helper process, errors that say why, the very same random state.

For every save, asynchronous or not, megatron-core 0.19.2 hands the results of writing from the writer to the trainer
through a queue of `multiprocessing.Manager`, a process of its own that starts by importing torch: 3 to 10 seconds
before the first save of each rank, and a process that outlives a rank killed by SIGKILL. Where writer and trainer are
one process, a plain queue does.
"""

from __future__ import annotations

import functools
import queue
from typing import Any

import torch
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.training import training


def write_in_process(args: Any) -> bool:
    """Give synchronous saves a plain queue, once, before the first save. Returns whether the run's saves are such."""
    if args.async_save:
        return False
    if filesystem_async._results_queue is None:
        filesystem_async._results_queue = queue.Queue()
    return True


def keep_random_state() -> None:
    """Let the building of data iterators leave the random state as it was, once a process.

    Every torch DataLoader iterator draws a seed for its workers when it is built: at the start of a run, and again when
    the run is resumed, after the checkpoint has put the generator back. From there on a resumed run would drop other
    activations than the run it continues (on a CPU, where dropout draws from that same generator).
    """
    original = training.build_train_valid_test_data_iterators
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def build(*args: Any, **kwargs: Any) -> Any:
        with torch.random.fork_rng(devices=[]):
            return original(*args, **kwargs)

    training.build_train_valid_test_data_iterators = build


def name_write_errors() -> None:
    """Let a write that fails (a full disk) say why, once a process: Megatron passes on nothing but the error's type."""
    writer = filesystem_async.FileSystemWriterAsync
    original = writer.write_preloaded_data
    if hasattr(original, "names_write_errors"):
        return

    @functools.wraps(original)
    def write(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        error = result[1] if result is not None else None
        if not isinstance(error, Exception):
            return result
        # torch.save, in the middle of a tensor, replaces the error of the file by one of its own.
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, OSError):
            cause = cause.__cause__ or cause.__context__
        raise error if cause is None else cause

    write.names_write_errors = True  # type: ignore[attr-defined]
    writer.write_preloaded_data = staticmethod(write)
