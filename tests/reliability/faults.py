"""Faults that a rank can start with. Each is called in the rank's own process, before the driver's `main()`."""

from __future__ import annotations

import errno
import functools
import os
import resource
import signal


def _rank() -> int:
    return int(os.environ["RANK"])


def _step() -> int:
    from megatron.training import get_args

    return get_args().curr_iteration + 1


def say_whose_thread() -> None:
    """Not a fault: each step prints whether its backward runs in the thread that calls it."""
    import torch

    from megablocks.megatron import gpt

    original = gpt.loss_func

    def loss_func(loss_mask, output, observe=None):
        print(f"backward in its caller's thread: {not torch._C._is_multithreading_enabled()}")
        return original(loss_mask, output, observe)

    gpt.loss_func = loss_func


def nan_in_loss(rank: int, step: int) -> None:
    """The loss of `rank` is NaN at `step`."""
    from megablocks.megatron import gpt

    original = gpt.loss_func

    def loss_func(loss_mask, output, observe=None):
        if _rank() == rank and _step() == step:
            output = output * float("nan")
        return original(loss_mask, output, observe)

    gpt.loss_func = loss_func


def guard_defers() -> None:
    """The optimizer says that it skips non-finite steps on the device, so that the host reads the guard rarely."""
    from megatron.core.optimizer import optimizer

    optimizer.MegatronOptimizer.skips_nonfinite = True


def nan_in_layer(rank: int, step: int, layer: int, backward: bool = False) -> None:
    """The output of `layer` (from 1) holds a NaN at `step` on `rank`; with `backward`, the gradient of that output."""
    from megatron.core.transformer.transformer_layer import TransformerLayer

    original = TransformerLayer.forward

    def forward(self, *args, **kwargs):
        out, context = original(self, *args, **kwargs)
        if _rank() == rank and self.training and _step() == step and self.layer_number == layer:
            if backward:
                out.register_hook(lambda grad: grad * float("nan"))
            out = out.clone()
            if not backward:
                out.view(-1)[5] = float("nan")
        return out, context

    TransformerLayer.forward = forward


def loss_times(factor: float, steps: list[int]) -> None:
    """The loss of every rank is multiplied at `steps`."""
    from megablocks.megatron import gpt

    original = gpt.loss_func

    def loss_func(loss_mask, output, observe=None):
        return original(loss_mask, output * factor if _step() in steps else output, observe)

    gpt.loss_func = loss_func


def signal_self(rank: int, step: int, number: int) -> None:
    """`rank` sends itself the signal in the forward pass of `step`."""
    from megablocks.megatron import gpt

    original = gpt.loss_func

    def loss_func(loss_mask, output, observe=None):
        if _rank() == rank and _step() == step:
            os.kill(os.getpid(), number)
        return original(loss_mask, output, observe)

    gpt.loss_func = loss_func


def kill_while_writing(rank: int, step: int, items: int = 4) -> None:
    """`rank` is killed in the save of `step`, after it wrote `items` tensors of its shard and a part of the next."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    original = filesystem_async._write_item
    written = 0

    @functools.wraps(original)
    def write_item(transforms, stream, *args, **kwargs):
        nonlocal written
        if _rank() == rank and _step() == step:
            if written == items:
                stream.write(b"part of a tensor")
                stream.flush()
                os.kill(os.getpid(), signal.SIGKILL)
            written += 1
        return original(transforms, stream, *args, **kwargs)

    filesystem_async._write_item = write_item


def sees_no_checkpoint(rank: int) -> None:
    """`rank` finds no checkpoint, as on a machine that does not see the others' folder."""
    from megablocks.checkpoint import atomic

    if _rank() == rank:
        atomic.find_latest_complete = lambda root: atomic.Latest(None, warnings=[f"{root}: empty here"])


def full_disk() -> None:
    """The disk is full when loss.csv is written."""
    from megablocks.monitor import history

    def write_durably(path, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    history.write_durably = write_durably


def full_disk_of_tensorboard() -> None:
    """The disk is full when TensorBoard's thread writes an event of the second step. The error names no file."""
    from tensorboard.summary.writer.record_writer import RecordWriter

    original = RecordWriter.write

    def write(self, data):
        if b"lm loss" in data and _step() > 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        original(self, data)

    RecordWriter.write = write


def file_size_limit(size: int) -> None:
    """No file grows beyond `size` bytes. To a process this looks like a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
