"""Guards around Megatron's training loop: non-finite steps, loss spikes, dead ranks.

`Guards.install` replaces globals of `megatron.training.training`, and later `optimizer.step`, by wrappers that call the
original.

A step's loss and flags stay on the device until the host reads them, before an update. An optimizer with the attribute
`skips_nonfinite` changes nothing in a step whose gradient norm is not finite; it decides by a flag on the device. With
it, and without a guard against spikes, the host reads once per log interval and before every save. Otherwise it reads
in every step. All ranks read in the same steps, so they all stop in the same step.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import os
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import mpu
from megatron.core.utils import get_attr_wrapped_model
from megatron.training import training
from megatron.training.dist_signal_handler import DistributedSignalHandler
from megatron.training.utils import print_rank_0
from torch import Tensor

from megablocks.config import ConfigError
from megablocks.megatron.checkpoints import check_same_checkpoint, of_all_ranks
from megablocks.megatron.failures import sizes_of
from megablocks.megatron.reporting import shape_of
from megablocks.megatron.wrap import wrap
from megablocks.monitor.flops import forward_flops_per_token
from megablocks.monitor.guards import LayerSentinels, LossWindow, NonFiniteError, first_bad_parameter, is_bad
from megablocks.monitor.heartbeat import Heartbeat


class Guards:
    """One run's guards. args: validated."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.window = LossWindow(args.megablocks_loss_spike_window, args.megablocks_loss_spike_factor)
        self.is_training = False
        self.heartbeat: Heartbeat | None = None
        # (4,) of this rank since the last step: loss, tokens, micro-batches whose loss was bad, bad gradient buffers
        self._sums = torch.zeros(4, dtype=torch.float64)
        self._unread: list[tuple[int, Tensor]] = []  # the numbers and sums of steps that the host has not read
        self._bad = torch.zeros((), dtype=torch.bool)  # whether a step of this rank was bad, on its device
        self._defers = False
        self._sentinels: LayerSentinels | None = None
        self._model: list[torch.nn.Module] = []
        self._exit: tuple[Tensor, torch.cuda.Event | None] | None = None  # the last step's signals, on their way

    def install(self) -> None:
        """Wrap Megatron's functions. Call it once per process, before `pretrain`."""
        wrap(training, setup_model_and_optimizer=self._setup, train_step=self._train_step)
        wrap(DistributedSignalHandler, signals_received=self._signals)

    def _train_step(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Wraps Megatron's `train_step`: announces the first step, which compiles."""
        if not self.is_training and torch.cuda.is_available():
            print_rank_0("first step: compiling kernels, 10 to 20 s unless Triton's and torch's caches hold them")
        self.is_training = True
        return original(*args, **kwargs)

    # A step.

    def observe(self, loss: Tensor, tokens: Tensor) -> None:
        """Add a micro-batch's summed loss () and token count (), without a synchronization."""
        self._sums[0] += torch.nan_to_num(loss, nan=0.0, posinf=0.0, neginf=0.0)
        self._sums[1] += tokens
        self._sums[2] += ~torch.isfinite(loss)

    def _setup(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Wraps `setup_model_and_optimizer`: checks what can fail before it, and wraps the optimizer's step."""
        if self.heartbeat is not None:
            self.heartbeat.wait_until_known()
        check_same_checkpoint(self.args)
        _check_memory(self.args)
        model, optimizer, scheduler = original(*args, **kwargs)
        device = torch.cuda.current_device() if torch.cuda.is_available() else "cpu"
        self._model, self._sums, self._bad = model, self._sums.to(device), self._bad.to(device)
        if optimizer is not None and (self.args.megablocks_nonfinite_guard or self.args.megablocks_loss_spike_factor):
            parts = getattr(optimizer, "chained_optimizers", [optimizer])
            skips = all(getattr(part, "skips_nonfinite", False) for part in parts)
            self._defers = skips and not self.args.megablocks_loss_spike_factor
            if self.args.megablocks_nonfinite_guard:
                layers = [layer for chunk in model for layer in get_attr_wrapped_model(chunk, "decoder").layers]
                names = [f"layer {layer.layer_number}" for layer in layers]
                if layers and not mpu.is_pipeline_last_stage():
                    names.append(f"layer {layers[-1].layer_number + 1}")  # in the next stage
                self._sentinels = LayerSentinels(layers, names, self._bad.device)
            optimizer.step = functools.wraps(optimizer.step)(functools.partial(self._step, optimizer.step))
        return model, optimizer, scheduler

    def _step(self, original: Any) -> Any:
        """Wraps `optimizer.step`. A step that the host does not read costs no synchronization and no collective."""
        number, sums = self.args.curr_iteration + 1, self._sums.clone()
        self._sums.zero_()  # in place: a replayed step adds to the memory that it was captured with
        reads = self._reads_in(number)
        # With fp16 the loss scaler expects overflows.
        guards = self.args.megablocks_nonfinite_guard and not self.args.fp16
        if guards and (reads or not self.args.clip_grad > 0):  # otherwise the gradient norm, read later, shows it
            for buffer in self._gradient_buffers():
                sums[3] += is_bad(buffer)
        if self._sentinels is not None:
            self._sentinels.end_step(self._bad)
        self._bad.logical_or_(sums[2:].any())
        self._unread.append((number, sums))
        if reads:
            return (False, None, None) if self.read(before_update=True) else original()
        result = original()
        norm = result[1]
        if guards and norm is not None:
            sums[3] += ~torch.isfinite(norm.squeeze()) if isinstance(norm, Tensor) else not math.isfinite(norm)
            self._bad.logical_or_(sums[2:].any())
        return result

    def _reads_in(self, step: int) -> bool:
        """Whether the host reads the guard in this step, before the update."""
        intervals = (self.args.log_interval, self.args.save_interval, self.args.exit_interval)
        ends = step == self.args.train_iters or any(step % interval == 0 for interval in intervals if interval)
        return ends or not self._defers

    def read(self, before_update: bool = False) -> bool:
        """Read the steps since the last call. Every rank must call it. Synchronizes.

        Returns whether the loss of the last step is a spike, so that its update must be skipped. Raises NonFiniteError
        on every rank if one of these steps had a NaN or Inf.
        """
        steps, self._unread = self._unread, []
        if not steps:
            return False
        table = torch.stack([sums for _, sums in steps])
        here = table[:, 2:].tolist()
        dist.all_reduce(table)
        last, is_spike = steps[-1][0], False
        for (step, _), bad_here, (loss, tokens, *bad) in zip(steps, here, table.tolist(), strict=True):
            if any(bad) and self.args.megablocks_nonfinite_guard:
                raise NonFiniteError(self._describe(step, bad_here, last, before_update and step == last))
            mean = loss / tokens if tokens and not any(bad) else math.nan
            median = self.window.median()
            is_spike = self.window.is_spike(mean)
            if is_spike:
                print_rank_0(
                    f"step {step}: loss {mean:.4f} exceeds {self.args.megablocks_loss_spike_factor:g} times "
                    f"{median:.4f}, the median of the last {self.args.megablocks_loss_spike_window}: update skipped"
                )
        return is_spike

    def _signals(self, original: Any, handler: DistributedSignalHandler) -> list[bool]:
        """Replaces `signals_received`, which gathers the ranks' exit signals and waits for the GPU in every step.

        Here all ranks learn one step later that one of them has a signal. The host then waits for the step before the
        one that the GPU computes, so the GPU does not wait for the host.
        """
        if dist.get_world_size() == 1:
            return [handler._signal_received]
        here = torch.full((), float(handler._signal_received), device=self._bad.device)
        dist.all_reduce(here, dist.ReduceOp.MAX)
        before, on_host = self._exit, here.to("cpu", non_blocking=True)
        self._exit = on_host, torch.cuda.Event() if here.is_cuda else None
        if self._exit[1] is not None:
            self._exit[1].record()
        if before is None:
            return [False]
        signals, copied = before
        if copied is not None:
            copied.synchronize()
        return [bool(signals)]

    def _gradient_buffers(self) -> list[Tensor]:
        chunks: list[Any] = [chunk for chunk in self._model if hasattr(chunk, "expert_parallel_buffers")]
        return [buffer.grad_data for c in chunks for buffer in (*c.buffers, *c.expert_parallel_buffers)]

    def _describe(self, step: int, here: list[float], last: int, before_update: bool) -> str:
        """One line: on which rank the first NaN or Inf arose, and where. Every rank must call it; all get the same.

        here: how many losses and gradient buffers of this rank were bad.
        """
        bad_losses, bad_buffers = here
        born, where = self._sentinels.first_bad() if self._sentinels is not None else (None, None)
        if born != "forward" and bad_losses:
            born, where = "loss", "the loss"
        if born is None and bad_buffers:
            named = (
                (name, getattr(parameter, "main_grad", parameter.grad))
                for chunk in self._model
                for name, parameter in chunk.named_parameters()
            )
            parameter = first_bad_parameter(named) if before_update else None  # later steps have overwritten them
            born, where = "gradient", f"the gradient of {parameter or 'some parameter'}"
        order = ("forward", "loss", "backward", "gradient", None).index(born)
        stage = mpu.get_pipeline_model_parallel_rank()  # a NaN spreads to later stages, in backward to earlier ones
        reports = of_all_ranks((order, -stage if born == "backward" else stage, dist.get_rank(), where))
        *_, rank, where = min(report for report in reports if report[-1] is not None)
        kept = f"; {self.args.save} is as the last save left it" if self.args.save else ""
        when = "before the update" if before_update else f"at step {last}, where the guard was read"
        return f"step {step}: NaN or Inf on rank {rank} in {where}: stopped {when}{kept}"


def _check_memory(args: argparse.Namespace) -> None:
    """Refuse a model whose parameters alone do not fit the memory of all ranks together."""
    shape = shape_of(args)
    parts = forward_flops_per_token(dataclasses.replace(shape, top_k=shape.num_experts, mtp_num_layers=0))
    parameters = (sum(parts.values()) - parts["attention"]) / 2  # a token costs 2 FLOPs for each
    wanted = parameters * args.params_dtype.itemsize / dist.get_world_size()
    if torch.cuda.is_available():
        there = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    else:
        there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if wanted > there:
        raise ConfigError(
            f"{sizes_of(args)}: {parameters:.3g} parameters need {wanted / 2**30:.0f} GiB or more on each rank, which "
            f"has {there / 2**30:.0f} GiB; take a smaller model or more ranks"
        )
