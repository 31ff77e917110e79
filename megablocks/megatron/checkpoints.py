"""A run's checkpoints: which one it resumes from, what is compared before a load, and saves that are whole or absent.

`Checkpoints.install` replaces `load_checkpoint` and `save_checkpoint` of `megatron.training.training`, and Megatron's
comparison of flags, by wrappers that call the original.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import re
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.training import checkpointing, training
from megatron.training.utils import print_rank_0
from torch.distributed.checkpoint.api import CheckpointException

from megablocks.checkpoint import atomic
from megablocks.checkpoint.atomic import CheckpointError, SaveError
from megablocks.config import refuse
from megablocks.megatron import checkpoint_io
from megablocks.megatron.failures import cause_of, explain, out_of_memory
from megablocks.megatron.wrap import wrap
from megablocks.monitor.guards import LossWindow

_RATES = {"max_lr": "lr", "min_lr": "min_lr"}
"""Learning rates of a group of parameters, and the flags that they come from unless they are decoupled."""
_MISFITS = (
    (
        "OptimizerParamScheduler", checkpoint_io.SCHEDULE, "another learning-rate schedule",
        "give --override-opt-param-scheduler for this run's, or --use-checkpoint-opt-param-scheduler for the saved one",
    ),
    ("not in state dict", ("megablocks_layer",), "other weights", "give the saved value"),
    (
        "parameter group|flattened_range", ("use_distributed_optimizer",), "another optimizer",
        "give the saved value, or --no-load-optim to start the optimizer's state anew",
    ),
)  # fmt: skip
"""Words of an error in which Megatron does not name the flags that differ, these flags, what they define, and a fix."""
STATE = "megablocks.json"
"""File of a checkpoint that holds what Megatron does not save: the loss window and the data's fingerprint."""


class Checkpoints:
    """One run's checkpoints.

    Args:
        args: validated, after `choose_checkpoint`.
        data_fingerprint: of the run's data; None if this process does not know it, or with mock data.
        window: the losses of the run, which a checkpoint keeps.
        before_save: every rank calls it first. It raises if what would be saved is not to be kept.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        data_fingerprint: str | None,
        window: LossWindow,
        before_save: Callable[[], object],
    ) -> None:
        self.args, self.fingerprint = args, data_fingerprint
        self.window, self.before_save = window, before_save

    def install(self) -> None:
        """Wrap Megatron's functions. Call it once per process, before `pretrain`."""
        wrap(training, load_checkpoint=self._load, save_checkpoint=self._save)
        if self.args.ckpt_format != "torch_dist":  # whose flags can be read before the rest
            wrap(checkpointing, check_checkpoint_args=self._compare_loaded)

    def _load(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Wraps Megatron's `load_checkpoint`: verifies the checkpoint first, and reports each failure in one line."""
        folder, saved = Path(self.args.load or self.args.pretrained_checkpoint), None
        if self.args.load and self.args.ckpt_step and self.args.ckpt_format == "torch_dist":
            folder = atomic.folder_of(self.args.load, self.args.ckpt_step)
            _together(functools.partial(self._open, folder))
            saved = checkpoint_io.saved_args(folder)
            if not self.args.finetune:
                self._compare(folder, saved)
        elif (folder / atomic.RELEASE / atomic.MARKER).is_file():  # only weights, written by `convert`
            _together(functools.partial(self._open, folder / atomic.RELEASE))
        try:
            with self._saved_rates(saved, *args[1:3]):
                loaded = original(*args, **kwargs)
            if self.args.load and self.args.ckpt_format != "torch_dist":  # whose iteration Megatron finds
                _together(functools.partial(self._read_state, atomic.folder_of(self.args.load, loaded[0])))
            return loaded
        except (Exception, SystemExit, CheckpointException) as error:
            cause = cause_of(error)
            if out_of_memory(cause, self.args) or isinstance(cause, CheckpointError):
                raise cause from error
            raise CheckpointError(f"{folder}: {self._load_failure(saved, cause)}") from error

    def _load_failure(self, saved: argparse.Namespace | None, cause: BaseException) -> str:
        """Why a checkpoint could not be loaded: a row of `_MISFITS`, or what Megatron says."""
        for said, names, what, fix in _MISFITS:
            changed = "" if saved is None else checkpoint_io.differences(self.args, saved, names)
            if changed and re.search(said, str(cause)):
                return f"saved with {what}: {changed}; {fix}"
        return f"cannot be loaded: {explain(cause, self.args)}"

    @contextlib.contextmanager
    def _saved_rates(self, saved: argparse.Namespace | None, optimizer: Any, scheduler: Any) -> Iterator[None]:
        """Give the optimizer's groups the saved learning rates, by which Megatron finds them in the checkpoint.

        After the load, --override-opt-param-scheduler gives them this run's rates again. The schedule continues where
        the saved one stopped; with --no-load-optim Megatron would start it again.
        """
        if saved is None or optimizer is None or self.args.finetune:
            yield
            return
        if self.args.no_load_optim:
            yield
            scheduler.step(increment=self.args.consumed_train_samples)
            return
        given = [{key: group[key] for key in _RATES} for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            for key, flag in _RATES.items():
                if group[key] == getattr(self.args, flag):
                    group[key] = getattr(saved, flag)
        yield
        if self.args.override_opt_param_scheduler:
            for group, rates in zip(optimizer.param_groups, given, strict=True):
                group.update(rates)
        scheduler.step(increment=0)  # Megatron sets the weight decay before it reads the saved one

    def _open(self, folder: Path) -> None:
        """Verify a checkpoint that has a marker, and read its state."""
        if self.args.megablocks_verify_checkpoint:
            atomic.verify(folder, dist.get_rank(), dist.get_world_size())
        self._read_state(folder)

    def _read_state(self, folder: Path) -> None:
        """Load the loss window and compare the fingerprint of the data, unless this run starts at iteration 0."""
        path = folder / STATE
        if self.args.finetune or not path.is_file():
            return
        state = json.loads(path.read_text(encoding="utf-8"))
        self.window.load_state_dict(state["loss_window"])
        saved = state["data_fingerprint"]
        if saved is not None and self.fingerprint is not None and saved != self.fingerprint:
            raise CheckpointError(
                f"{path}: saved with data {saved[:12]}, this run's are {self.fingerprint[:12]}: the data changed; "
                "use the same data, or --finetune to start at iteration 0 with the saved weights"
            )

    def _compare_loaded(self, original: Any, saved: argparse.Namespace, **options: Any) -> None:
        """Wraps Megatron's comparison of few flags with the loaded ones, before it loads weights: compares all."""
        self._compare(Path(self.args.load), saved)
        original(saved, **options)

    def _compare(self, folder: Path, saved: argparse.Namespace | None) -> None:
        """Refuse to resume without a part of the state, or as another model, unless the flags allow it."""
        if saved is None:
            print_rank_0(f"WARNING: {folder}: holds no flags, so its model is not compared with this run's")
            return
        random = "the random number generators' state"
        for part, what, them in (("optim", "the optimizer's state", "it"), ("rng", random, "them")):
            if getattr(saved, f"no_save_{part}", None) and not getattr(self.args, f"no_load_{part}"):
                raise CheckpointError(
                    f"{folder}: saved without {what} (--no-save-{part}); give --no-load-{part} to start {them} anew, "
                    "or --finetune to start at iteration 0 with the saved weights"
                )
        schedule = () if self.args.override_opt_param_scheduler else checkpoint_io.UNSAVED
        for names, what, instead in (
            (schedule, "learning-rate schedule", "--override-opt-param-scheduler for this run's"),
            (checkpoint_io.KEPT, "optimizer", "--no-load-optim to start its state anew"),
        ):
            changed = checkpoint_io.differences(self.args, saved, names)
            if changed and not self.args.no_load_optim:
                fix = f"give the saved values, or {instead}"
                raise CheckpointError(f"{folder}: saved with another {what}: {changed}; {fix}")
        changed = checkpoint_io.differences(self.args, saved, checkpoint_io.MODEL)
        if changed and not self.args.megablocks_allow_other_model:
            raise CheckpointError(
                f"{folder}: saved as another model: {changed}; give the saved values, or --finetune to start at "
                "iteration 0 with the saved weights, or --megablocks-allow-other-model to continue as this run's model"
            )
        if changed:
            print_rank_0(f"WARNING: {folder}: saved as another model: {changed}")
        if changed := checkpoint_io.differences(self.args, saved, checkpoint_io.ORDER):
            print_rank_0(
                f"WARNING: {folder}: saved with {changed}: the samples come in another order, so this run reads some "
                "a second time and leaves others out"
            )
        rows, given = getattr(saved, "padded_vocab_size", None), self.args.padded_vocab_size
        if rows and rows != given:
            shards = self.args.tensor_model_parallel_size
            advice = f"; --make-vocab-size-divisible-by {rows // shards} keeps it" if rows % shards == 0 else ""
            print_rank_0(
                f"WARNING: {folder}: saved with padded_vocab_size={rows}, this run has {given}: the loss counts other "
                f"empty rows of the vocabulary, and jumps{advice}"
            )

    def _save(self, original: Any, iteration: int, *args: Any, **kwargs: Any) -> Any:
        self.before_save()
        if not self.args.save:  # Megatron's own check of a step saves before it exits, in any run
            return None
        if kwargs.get("non_persistent_ckpt"):
            return original(iteration, *args, **kwargs)
        root, rank, ranks = Path(self.args.save), dist.get_rank(), dist.get_world_size()
        folder = atomic.folder_of(root, iteration)
        if self.args.ckpt_format != "torch_dist":
            original(iteration, *args, **kwargs)
            self._write_state(folder)
            return None
        try:
            with atomic.room_for(root, iteration) if rank == 0 else contextlib.nullcontext():
                dist.barrier()
                original(iteration, *args, **kwargs)
                self._write_state(folder)
                dist.barrier()
                hashes = of_all_ranks(atomic.hash_files(folder, atomic.files_of(folder)[rank::ranks]))
                if rank == 0:
                    merged = {name: entry for part in hashes for name, entry in part.items()}
                    atomic.mark_complete(folder, iteration, merged)
            if rank == 0:
                self._prune(root, iteration)
            dist.barrier()
        except (Exception, CheckpointException) as error:  # CheckpointException is not an Exception
            raise SaveError(self._save_failure(root, folder, error)) from error

    def _write_state(self, folder: Path) -> None:
        if dist.get_rank() == 0:
            state = {"loss_window": self.window.state_dict(), "data_fingerprint": self.fingerprint}
            atomic.write_durably(folder / STATE, json.dumps(state) + "\n")

    def _prune(self, root: Path, saved: int) -> None:
        try:
            if self.args.megablocks_keep_checkpoints:
                atomic.prune(root, saved, self.args.megablocks_keep_checkpoints)
        except OSError as error:  # the new checkpoint is complete, so the run continues
            print_rank_0(f"WARNING: an older checkpoint could not be removed: {error}")

    def _save_failure(self, root: Path, folder: Path, error: BaseException) -> str:
        """One line for a failed save: the reason, and the checkpoint that is left to resume from."""
        complete = [i for i in atomic.iterations(root) if (atomic.folder_of(root, i) / atomic.MARKER).is_file()]
        survives = f"iteration {complete[-1]} is the newest complete checkpoint" if complete else "none is complete"
        lines = str(error).strip().splitlines() or [type(error).__name__]  # torch puts the cause last
        reason = " ".join(lines[-1].split())
        return f"{folder}: could not be saved by rank {dist.get_rank()}: {reason[:300]}; {survives}"


def choose_checkpoint(args: argparse.Namespace) -> None:
    """Make Megatron load the newest complete checkpoint of --load: set `ckpt_step`; without one, set `load` to None.

    Then --pretrained-checkpoint, if given, becomes --load with --finetune, as in Megatron. Call it before Megatron
    looks for a checkpoint. A second call changes nothing.

    Raises:
        ConfigError: --save holds checkpoints that this run does not resume from.
        CheckpointError: the checkpoint is missing or damaged.
    """
    if args.save and not _resumes(args) and (found := atomic.iterations(args.save)):
        what = f"holds a run's checkpoints up to iteration {found[-1]}"
        refuse("save", args.save, f"{what}; resume it with --load {args.save}, or choose an empty folder")
    if args.ckpt_format != "torch_dist":
        return
    if args.load:
        _choose(args)
    if not args.load and args.pretrained_checkpoint:
        args.load, args.finetune = args.pretrained_checkpoint, True
        _choose(args)


def _resumes(args: argparse.Namespace) -> bool:
    """Return whether --load is the folder of --save, which holds no checkpoint at the first start."""
    return bool(args.save and args.load) and os.path.realpath(args.save) == os.path.realpath(args.load)


def _choose(args: argparse.Namespace) -> None:
    """Do for a given --load what `choose_checkpoint` says."""
    first = int(os.environ.get("RANK", 0)) == 0
    if args.ckpt_step:
        folder = atomic.folder_of(args.load, args.ckpt_step)
        if not folder.is_dir():
            there = ", ".join(map(str, atomic.iterations(args.load))) or "none"
            raise CheckpointError(f"{folder}: no such checkpoint; {args.load} holds those of iterations: {there}")
        atomic.read_marker(folder)  # refuses a damaged one
        return
    latest = atomic.find_latest_complete(args.load)
    for warning in latest.warnings if first else ():
        print(f"WARNING: {warning}", flush=True)
    if latest.iteration is not None:
        args.ckpt_step = latest.iteration
        if latest.warnings and first:  # Megatron reads the pointer too, and exits with 0 if it is garbled
            atomic.write_pointer(args.load, latest.iteration)
    elif latest.warnings or not (Path(args.load) / atomic.POINTER).exists():
        if (Path(args.load) / ".metadata").is_file():
            root, name = os.path.split(os.path.abspath(args.load))
            number = name.removeprefix("iter_")
            flags = f"--load {root}" + (f" --ckpt-step {int(number)}" if number.isdecimal() else "")
            raise CheckpointError(f"{args.load}: is a checkpoint itself; give the folder around it: {flags}")
        if args.exit_on_missing_checkpoint:
            raise CheckpointError(f"{args.load}: no checkpoint to resume from (--exit-on-missing-checkpoint)")
        if args.load == args.pretrained_checkpoint:
            raise CheckpointError(f"{args.load}: no complete checkpoint to start with (--pretrained-checkpoint)")
        saves_nothing = args.save == ""  # --save=, after a --load of exp/common.sh
        if not (_resumes(args) or saves_nothing or args.pretrained_checkpoint):
            advice = "correct --load, or leave it out to start at iteration 0 (only the folder of --save may be empty)"
            raise CheckpointError(f"{args.load}: holds no checkpoint; {advice}")
        if first:
            print(f"{args.load}: no checkpoint to resume from, starting at iteration 0", flush=True)
        args.load = None


def choose_before_reading_args() -> None:
    """Let --use-checkpoint-args read the checkpoint that `choose_checkpoint` chooses."""
    wrap(checkpointing, load_args_from_checkpoint=_load_args)


def _load_args(original: Any, args: argparse.Namespace, *rest: Any, **options: Any) -> Any:
    """Wraps Megatron's `load_args_from_checkpoint`: chooses the checkpoint first, and takes all flags of the model.

    Megatron leaves many out, such as --qk-layernorm, and cannot know ours. Of those, what is given stays.
    """
    choose_checkpoint(args)
    if args.load and args.ckpt_step:
        if args.ckpt_format == "torch_dist":
            checkpoint_io.saved_args(atomic.folder_of(args.load, args.ckpt_step))  # a failure is one line
        if options.get("load_arg") == "pretrained_checkpoint":  # the step belongs to --load, which Megatron reads next
            return args
    result = original(args, *rest, **options)
    saved = result[1] if isinstance(result, tuple) else None  # of the checkpoint, if it has any
    for name in checkpoint_io.TAKEN:
        value = getattr(saved, name, getattr(args, name))
        if name not in args.megablocks_explicit and value != getattr(args, name):
            setattr(args, name, value)
            if args.rank == 0:
                print(f"Setting {name} to {value} from checkpoint", flush=True)
    return result


def of_all_ranks(value: Any) -> list[Any]:
    """The values that the ranks pass, in the order of the ranks. Every rank must call it."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _together(check: Any) -> None:
    """Run `check` on every rank. If it fails on one or more, every rank raises the first failure."""
    try:
        check()
        failure = None
    except (CheckpointError, OSError) as error:
        failure = str(error)
    for message in of_all_ranks(failure):
        if message is not None:
            raise CheckpointError(message)


def check_same_checkpoint(args: argparse.Namespace) -> None:
    """Refuse to start if ranks found different checkpoints to resume from, for example without a shared folder."""
    found = of_all_ranks((socket.gethostname(), args.ckpt_step if args.load else None))
    for rank, (host, iteration) in enumerate(found):
        if iteration != found[0][1]:
            raise CheckpointError(
                f"{args.load or args.save}: rank 0 on {found[0][0]} resumes from iteration {found[0][1]}, rank {rank} "
                f"on {host} from {iteration}: every machine must see one shared folder"
            )
