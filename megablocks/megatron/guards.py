"""Guards around Megatron's training loop: non-finite steps, loss spikes, dead ranks, torn and damaged checkpoints.

`Guards.install` replaces four names that `megatron.training.training` looks up as globals (`setup_model_and_optimizer`,
`load_checkpoint`, `save_checkpoint`; and `optimizer.step` once it exists), each by a wrapper that calls the original.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.utils import get_attr_wrapped_model
from megatron.training import training
from megatron.training.utils import print_rank_0
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from megablocks.checkpoint import atomic
from megablocks.checkpoint.atomic import CheckpointError, SaveError
from megablocks.config import ConfigError
from megablocks.megatron.arguments import DriverSettings
from megablocks.monitor.guards import LayerSentinels, LossWindow, NonFiniteError, first_bad_parameter, is_bad
from megablocks.monitor.heartbeat import Heartbeat

STATE = "megablocks.json"
"""File of a checkpoint with what Megatron's does not hold: the loss window and the data's fingerprint."""


class Guards:
    """One run's guards.

    Args:
        args: validated; `save`, `load` and `ckpt_step` are read, `load` and `ckpt_step` set by `choose_checkpoint`.
        data_fingerprint: of the run's data (None where this process does not know it or data are mock).
    """

    def __init__(self, args: argparse.Namespace, settings: DriverSettings, data_fingerprint: str | None) -> None:
        self.args, self.settings, self.fingerprint = args, settings, data_fingerprint
        self.window = LossWindow(settings.loss_spike_window, settings.loss_spike_factor)
        self.verifiable = False
        self.heartbeat: Heartbeat | None = None
        self._sums: Tensor | None = None
        self._sentinels: LayerSentinels | None = None
        self._model: list[torch.nn.Module] = []

    def install(self) -> None:
        """Wrap Megatron's functions; once a process, before `pretrain`."""
        for name, wrapper in (
            ("load_checkpoint", self._load),
            ("save_checkpoint", self._save),
            ("setup_model_and_optimizer", self._setup),
        ):
            original = getattr(training, name)
            setattr(training, name, functools.wraps(original)(functools.partial(wrapper, original)))

    # A step.

    def observe(self, loss: Tensor, tokens: Tensor) -> None:
        """Add a micro-batch's summed loss () and token count (), without a synchronisation."""
        if self._sums is None:
            self._sums = torch.zeros(3, dtype=torch.float64, device=loss.device)
        self._sums[0] += torch.nan_to_num(loss, nan=0.0, posinf=0.0, neginf=0.0)
        self._sums[1] += tokens
        self._sums[2] += ~torch.isfinite(loss)

    def _setup(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        if self.heartbeat is not None:
            self.heartbeat.wait_until_known()
        model, optimizer, scheduler = original(*args, **kwargs)
        if optimizer is not None and (self.settings.nonfinite_guard or self.settings.loss_spike_factor):
            self._model = model
            if self.settings.nonfinite_guard:
                layers, names = _layers_of(model)
                self._sentinels = LayerSentinels(layers, names, _device())
            optimizer.step = functools.wraps(optimizer.step)(functools.partial(self._step, optimizer.step))
        return model, optimizer, scheduler

    def _step(self, original: Any) -> Any:
        """In place of `optimizer.step`. Costs one all-reduce of three numbers and one synchronisation a step."""
        sums, self._sums = self._sums, None
        if sums is None:  # a pipeline stage without the loss
            sums = torch.zeros(3, dtype=torch.float64, device=_device())
        loss_is_bad = sums[2].clone()
        if self.settings.nonfinite_guard and not self.args.fp16:  # with fp16 the loss scaler expects overflows
            for buffer in self._gradient_buffers():
                sums[2] += is_bad(buffer)
        is_bad_here = sums[2].clone()
        dist.all_reduce(sums)
        loss, tokens, bad = sums.tolist()
        step = self.args.curr_iteration + 1
        if bad and self.settings.nonfinite_guard:
            raise NonFiniteError(self._describe(step, bool(loss_is_bad), bool(is_bad_here)))
        if self._sentinels is not None:
            self._sentinels.reset()
        mean = loss / tokens if tokens and not bad else math.nan
        median = self.window.median()
        if self.window.is_spike(mean):
            print_rank_0(
                f"step {step}: loss {mean:.4f} exceeds {self.settings.loss_spike_factor:g} times {median:.4f}, the "
                f"median of the last {self.settings.loss_spike_window}: update skipped"
            )
            return False, None, None
        return original()

    def _gradient_buffers(self) -> list[Tensor]:
        chunks: list[Any] = [chunk for chunk in self._model if hasattr(chunk, "expert_parallel_buffers")]
        return [buffer.grad_data for c in chunks for buffer in (*c.buffers, *c.expert_parallel_buffers)]

    def _describe(self, step: int, loss_is_bad: bool, is_bad_here: bool) -> str:
        """One line, the same on every rank: the rank that saw it born earliest, and where. A collective call."""
        born, where = self._sentinels.first_bad() if self._sentinels is not None else (None, None)
        if born != "forward" and loss_is_bad:
            born, where = "loss", "the loss"
        if born is None and is_bad_here:
            named = (
                (name, getattr(parameter, "main_grad", parameter.grad))
                for chunk in self._model
                for name, parameter in chunk.named_parameters()
            )
            born, where = "gradient", f"the gradient of {first_bad_parameter(named) or 'some parameter'}"
        order = ("forward", "loss", "backward", "gradient", None).index(born)
        reports: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(reports, (order, dist.get_rank(), where))
        _, rank, where = min(report for report in reports if report[2] is not None)
        kept = f"; {self.args.save} is as the last save left it" if self.args.save else ""
        return f"step {step}: NaN or Inf on rank {rank} in {where}: stopped before the update{kept}"

    # Checkpoints.

    def choose_checkpoint(self) -> None:
        """Before Megatron looks: point it at the newest complete checkpoint of --load, or at none.

        Raises:
            ConfigError: --save holds checkpoints that this run does not resume from.
            CheckpointError: the chosen checkpoint is damaged.
        """
        args, first = self.args, int(os.environ.get("RANK", 0)) == 0
        resumes = args.save and args.load and os.path.realpath(args.save) == os.path.realpath(args.load)
        if args.save and not resumes and (found := atomic.iterations(args.save)):
            raise ConfigError(
                f"save={args.save!r}: holds a run's checkpoints up to iteration {found[-1]}; "
                f"resume it with --load {args.save}, or choose an empty folder"
            )
        if not args.load or args.ckpt_format != "torch_dist":
            return
        if args.ckpt_step:
            self.verifiable = atomic.read_marker(atomic.folder_of(args.load, args.ckpt_step)) is not None
            return
        latest = atomic.find_latest_complete(args.load)
        for warning in latest.warnings if first else ():
            print(f"WARNING: {warning}", flush=True)
        if latest.iteration is not None:
            args.ckpt_step, self.verifiable = latest.iteration, latest.has_marker
            if latest.warnings and first:  # Megatron reads the pointer all the same, and exits 0 at a garbled one
                atomic.write_pointer(args.load, latest.iteration)
        elif latest.warnings or not (Path(args.load) / atomic.POINTER).exists():
            print_rank_0(f"{args.load}: no checkpoint to resume from, starting at iteration 0")
            args.load = None

    def _load(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        folder = None
        if self.args.load and self.args.ckpt_step:
            folder = atomic.folder_of(self.args.load, self.args.ckpt_step)
            _together(functools.partial(self._open, folder))
        try:
            return original(*args, **kwargs)
        except AssertionError as error:  # Megatron's way to say that flags and checkpoint disagree
            advice = (
                "; give the run's own flags, or --override-opt-param-scheduler" if "ParamSched" in str(error) else ""
            )
            raise CheckpointError(f"{folder or self.args.load}: {' '.join(str(error).split())}{advice}") from error

    def _open(self, folder: Path) -> None:
        if self.verifiable and self.settings.verify_checkpoint:
            atomic.verify(folder, dist.get_rank(), dist.get_world_size())
        path = folder / STATE
        if not path.is_file():
            return
        state = json.loads(path.read_text(encoding="utf-8"))
        self.window.load_state_dict(state["loss_window"])
        saved = state["data_fingerprint"]
        if saved is not None and self.fingerprint is not None and saved != self.fingerprint and not self.args.finetune:
            raise CheckpointError(
                f"{path}: saved with data {saved[:12]}, this run's are {self.fingerprint[:12]}: the data changed; "
                "use the same data, or --finetune to start anew from the weights"
            )

    def _save(self, original: Any, iteration: int, *args: Any, **kwargs: Any) -> Any:
        if self.args.ckpt_format != "torch_dist" or self.args.async_save or kwargs.get("non_persistent_ckpt"):
            return original(iteration, *args, **kwargs)
        root, rank, ranks = Path(self.args.save), dist.get_rank(), dist.get_world_size()
        folder, aside = atomic.folder_of(root, iteration), None
        try:
            if rank == 0:
                aside = atomic.make_room(root, iteration)
            dist.barrier()
            original(iteration, *args, **kwargs)
            if rank == 0:
                state = {"loss_window": self.window.state_dict(), "data_fingerprint": self.fingerprint}
                atomic.write_durably(folder / STATE, json.dumps(state) + "\n")
            dist.barrier()
            hashes: list[Any] = [None] * ranks
            dist.all_gather_object(hashes, atomic.hash_files(folder, atomic.files_of(folder)[rank::ranks]))
            if rank == 0:
                merged = {name: entry for part in hashes for name, entry in part.items()}
                atomic.mark_complete(folder, iteration, merged)
                atomic.drop(aside)
            dist.barrier()
        except (Exception, CheckpointException) as error:  # torch's is no Exception
            if rank == 0:
                atomic.restore(aside)
            raise SaveError(self._save_failure(root, folder, error)) from error

    def _save_failure(self, root: Path, folder: Path, error: BaseException) -> str:
        complete = [i for i in atomic.iterations(root) if (atomic.folder_of(root, i) / atomic.MARKER).is_file()]
        survives = f"iteration {complete[-1]} is the newest complete checkpoint" if complete else "none is complete"
        lines = str(error).strip().splitlines() or [type(error).__name__]  # torch's end with the cause
        reason = " ".join(lines[-1].split())
        return f"{folder}: could not be saved by rank {dist.get_rank()}: {reason[:300]}; {survives}"


def _together(check: Any) -> None:
    """Run `check` on every rank; if it fails on any, all raise the first failure."""
    try:
        check()
        failure = None
    except (CheckpointError, OSError) as error:
        failure = str(error)
    failures: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(failures, failure)
    for message in failures:
        if message is not None:
            raise CheckpointError(message)


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _layers_of(model: list[torch.nn.Module]) -> tuple[list[torch.nn.Module], list[str]]:
    layers, names = [], []
    for chunk in model:
        decoder = get_attr_wrapped_model(chunk, "decoder")
        for layer in decoder.layers:
            layers.append(layer)
            names.append(f"layer {layer.layer_number}")
    return layers, names
