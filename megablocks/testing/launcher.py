"""Run a function on several ranks of a process group, inside one test.

Processes are forked from one server process that has imported torch already, so that a rank costs milliseconds instead
of the seconds that `import torch` takes, and each call still gets fresh processes.
"""

from __future__ import annotations

import datetime
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

_PRELOAD = [
    "torch",
    "torch.distributed",
    "pytest",
    "megablocks.layers.dmoe",
    "megablocks.layers.moe",
    "megablocks.layers.experts",
    "megablocks.parallel.dispatcher",
    "megablocks.testing.oracle",
    "megablocks.testing.poison",
    "torch._dynamo",  # which the first call of a custom op imports, 1.7 s each time
]


class RankFailed(RuntimeError):
    """A rank raised, died or hung. The message names it and holds its traceback, where it had one."""


def _rank_main(
    connection: Connection,
    rank: int,
    world_size: int,
    backend: str,
    store_path: str,
    timeout: float,
    call: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]],
) -> None:
    if backend == "gloo":  # several ranks on one GPU are none of gloo's business
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import FileStore

    try:
        torch.set_num_threads(1)
        if backend == "nccl":
            torch.cuda.set_device(rank)
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
        dist.init_process_group(
            backend,
            store=FileStore(store_path, world_size),
            rank=rank,
            world_size=world_size,
            timeout=datetime.timedelta(seconds=timeout),
        )
        fn, args, kwargs = call
        result = fn(*args, **kwargs)
        dist.barrier()  # nobody takes its connections down while another rank still uses them
        dist.destroy_process_group()
        connection.send_bytes(pickle.dumps((True, result)))
    except BaseException:
        # Leave without destroy_process_group: it may wait for ranks that wait for this one.
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
        fn: a function of a module, importable by the ranks; may use torch.distributed freely.
        world_size: number of ranks, all on this machine.
        args, kwargs: picklable, the same on every rank.
        backend: "gloo" or "nccl" (one GPU a rank).
        timeout: seconds for the whole call and for each collective.

    Returns:
        What each rank returned, by rank.

    Raises:
        RankFailed: with the traceback of the rank that failed first; the other ranks are killed.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    deadline = time.monotonic() + timeout
    with tempfile.TemporaryDirectory(prefix="megablocks-ranks-") as folder:
        processes, readers = [], []
        try:
            for rank in range(world_size):
                reader, writer = context.Pipe(duplex=False)
                process = context.Process(
                    target=_rank_main,
                    args=(writer, rank, world_size, backend, f"{folder}/store", timeout, (fn, args, kwargs)),
                    daemon=True,
                )
                process.start()
                writer.close()
                processes.append(process)
                readers.append(reader)
            return _collect(readers, deadline, timeout)
        finally:
            for process in processes:
                process.join(timeout=5 if _is_done(readers) else 0)
                if process.is_alive():
                    process.kill()
                    process.join()
            for reader in readers:
                reader.close()


def _is_done(readers: Sequence[Connection]) -> bool:
    return all(reader.closed for reader in readers)


def _collect(readers: list[Connection], deadline: float, timeout: float) -> list[Any]:
    results: list[Any] = [None] * len(readers)
    pending = dict(enumerate(readers))
    while pending:
        ready = wait(list(pending.values()), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RankFailed(f"rank {', '.join(map(str, pending))} did not finish within {timeout:g} s")
        for rank, reader in list(pending.items()):
            if reader not in ready:
                continue
            try:
                succeeded, result = pickle.loads(reader.recv_bytes())
            except EOFError:
                raise RankFailed(f"rank {rank} died without a word (killed, or a crash in native code)") from None
            if not succeeded:
                raise RankFailed(f"rank {rank} failed:\n{result}")
            results[rank] = result
            reader.close()
            del pending[rank]
    return results
