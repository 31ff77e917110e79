"""Run a function on several ranks of a process group inside one test.

The rank processes are forked from one server process that has already imported torch. So each call gets fresh
processes, and a rank starts in milliseconds instead of the seconds that `import torch` takes.
"""

from __future__ import annotations

import datetime
import gc
import multiprocessing
import multiprocessing.forkserver
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

_PRELOAD = [
    "torch",
    "torch.distributed",
    "pytest",
    "megablocks.layers.dmoe",
    "megablocks.layers.moe",
    "megablocks.moe.layer",
    "megablocks.moe.dispatchers",
    "megablocks.testing.oracle",
    "megablocks.testing.poison",
    "torch._dynamo",  # the first call of a custom op imports it, which takes 1.7 s
]
_more: tuple[str, ...] = ()


def preload(*modules: str) -> None:
    """Import `modules` in a new server, for all ranks from the next call on, instead of those of earlier calls.

    If an import changes something, as megablocks.megatron.specs changes torch, it changes it in all these ranks.
    """
    global _more
    if modules != _more:
        multiprocessing.forkserver._forkserver._stop()  # type: ignore[attr-defined]  # nothing public ends the server
        _more = modules


class RankFailed(RuntimeError):
    """A rank raised, died or hung. The message names the rank and contains its traceback if there is one."""


def _rank_main(
    connection: Connection,
    call: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]],
    rank: int,
    world_size: int,
    backend: str,
    store: str,
    timeout: float,
) -> None:
    """Run in a rank's process: join the group, call the function, and send the result or the error."""
    if backend == "gloo":  # these ranks use the CPU only
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import torch
    import torch.distributed as dist

    gc.freeze()  # the modules' objects stay, and a collection that looks at them takes half a second
    try:
        torch.set_num_threads(1)
        if backend == "nccl":
            torch.cuda.set_device(rank)
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
        limit = datetime.timedelta(seconds=timeout)
        dist.init_process_group(backend, f"file://{store}", timeout=limit, world_size=world_size, rank=rank)
        fn, args, kwargs = call
        result = fn(*args, **kwargs)
        dist.barrier()  # no rank closes its connections while another rank still uses them
        dist.destroy_process_group()
        connection.send_bytes(pickle.dumps((True, result)))
    except BaseException:
        # No destroy_process_group here: it can wait for ranks that wait for this rank.
        connection.send_bytes(pickle.dumps((False, traceback.format_exc())))
    finally:
        connection.close()


def run_distributed_test(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    backend: str = "gloo",
    timeout: float = 900.0,
    **kwargs: Any,
) -> list[Any]:
    """Call `fn(*args, **kwargs)` on `world_size` processes that form the default process group.

    Args:
        fn: a module-level function that the ranks can import. It can use torch.distributed freely.
        world_size: number of ranks, all on this machine.
        args, kwargs: picklable, the same on every rank.
        backend: "gloo" or "nccl" (one GPU per rank).
        timeout: seconds for the whole call and for each collective.

    Returns:
        The results of the ranks, by rank.

    Raises:
        RankFailed: with the traceback of the rank that failed first. The other ranks are killed.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*_more, *_PRELOAD])
    deadline = time.monotonic() + timeout
    processes, readers = [], []
    with tempfile.TemporaryDirectory(prefix="megablocks-ranks-") as folder:
        try:
            for rank in range(world_size):
                reader, writer = context.Pipe(duplex=False)
                arguments = (writer, (fn, args, kwargs), rank, world_size, backend, f"{folder}/store", timeout)
                process = context.Process(target=_rank_main, args=arguments, daemon=True)
                process.start()
                writer.close()
                processes.append(process)
                readers.append(reader)
            results = _collect(readers, deadline, timeout)
            for process in processes:
                process.join(timeout=5)
            return results
        finally:
            for process, reader in zip(processes, readers, strict=True):
                process.kill()
                process.join()
                reader.close()


def _collect(readers: list[Connection], deadline: float, timeout: float) -> list[Any]:
    """Return the results of all ranks. Raises RankFailed for the first rank that failed, died, or is late."""
    results: list[Any] = [None] * len(readers)
    pending = {reader: rank for rank, reader in enumerate(readers)}
    while pending:
        ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RankFailed(f"rank {', '.join(map(str, pending.values()))} did not finish within {timeout:g} s")
        for reader in [reader for reader in pending if reader in ready]:  # the lowest failed rank is named
            rank = pending.pop(reader)
            try:
                succeeded, result = pickle.loads(reader.recv_bytes())
            except EOFError:
                raise RankFailed(f"rank {rank} died without an exception: killed, or crashed in native code") from None
            if not succeeded:
                raise RankFailed(f"rank {rank} failed:\n{result}")
            results[rank] = result
    return results
