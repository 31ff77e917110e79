"""What a run reports: fields added to Megatron's log line, CSV files, pictures, a summary.

`Reporter.install` wraps globals of `megatron.training.training`: `training_log`, to read the experts' load once per log
interval and nothing in between, and `print_rank_last`, which prints the log lines. The files hold the numbers of these
lines.
"""

from __future__ import annotations

import argparse
import errno
import math
import re
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.training import get_tensorboard_writer, training
from megatron.training.global_vars import get_wandb_writer
from megatron.training.utils import is_last_rank

from megablocks.data.manifest import read_manifest
from megablocks.files import write_durably
from megablocks.megatron.wrap import wrap
from megablocks.monitor.expert_load import LoadSummary, check_load, gather_load
from megablocks.monitor.flops import GPTShape, mfu
from megablocks.monitor.history import History, parse_log_line
from megablocks.monitor.plots import plot_expert_load, plot_loss

FULL_DISK = (errno.ENOSPC, errno.EDQUOT)
_SAVE_EVERY_S = 20.0


def moe_layers(args: argparse.Namespace) -> Sequence[int]:
    """Numbers (from 1) of the layers that hold experts."""
    if not args.num_experts:
        return []
    frequency = args.moe_layer_freq
    if isinstance(frequency, int):
        return range(1, args.num_layers + 1, frequency)  # no list: for `plan` and the check of memory it can be huge
    return [number for number, has_experts in enumerate(frequency, start=1) if has_experts]


def shape_of(args: argparse.Namespace) -> GPTShape:
    """The sizes that decide the model's FLOPs, from Megatron's validated arguments."""
    layers, ahead = moe_layers(args), args.mtp_num_layers or 0
    return GPTShape.of(
        args,
        num_layers=args.num_layers + ahead,
        vocab_size=args.padded_vocab_size,
        num_query_groups=args.num_query_groups if args.group_query_attention else None,
        gated=args.swiglu or args.quick_geglu,
        num_moe_layers=len(layers) + ahead * (args.num_layers in layers),  # they predict ahead by layers like the last
    )


class Reporter:
    """One run's report. run_dir: folder of the files; None writes no files."""

    def __init__(self, args: argparse.Namespace, run_dir: Path | None) -> None:
        self.args, self.run_dir = args, run_dir
        self.entropy: float | None = None  # of the validation tokens, in nats a token
        if args.data_prefix is not None:
            self.entropy = read_manifest(args.data_prefix).unigram["valid_entropy"]
        self.layers = moe_layers(args)
        self.shape = shape_of(args)
        self.model: list[torch.nn.Module] = []
        self.summary: LoadSummary | None = None
        self._load: torch.Tensor | None = None  # since the last row, as far as it was read
        self._is_extra = False
        self._is_quiet = False  # whether Megatron logs a step for which nothing is read from the GPU
        self.dropped = 0
        self.history = History(run_dir or Path())
        self._rates: list[float] = []
        self._saved_at = time.monotonic()
        self._retries = 0
        self._board_error: OSError | None = None

    def install(self) -> None:
        """Wrap Megatron's functions. Call it once per process, before `pretrain`."""
        wrap(
            training,
            setup_model_and_optimizer=self._setup,
            training_log=self._training_log,
            get_tensorboard_writer=self._board,
            get_wandb_writer=self._board,
            reduce_max_stat_across_model_parallel_group=self._max_over_ranks,
            print_rank_last=self._print,
            save_checkpoint=self._save_checkpoint,
        )
        wrap(threading, excepthook=self._thread_failed)

    def _setup(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Wraps `setup_model_and_optimizer`: reads a resumed run's rows, or sets an earlier run's file aside."""
        model, optimizer, scheduler = original(*args, **kwargs)
        self.model = model
        if self.layers:
            check_load(model, self.args.num_experts)
        if self._is_writer:
            self.history.load(up_to=self.args.iteration)
            if kept := self.history.set_aside():
                print(f"{kept}: the losses of an earlier run in this folder", flush=True)
            past = self.history.series("tokens_dropped")[1]
            self.dropped = int(past[-1]) if past else 0
        return model, optimizer, scheduler

    @property
    def _is_writer(self) -> bool:
        return self.run_dir is not None and is_last_rank()

    def _training_log(
        self, original: Any, losses: dict[str, Any], totals: dict[str, Any], rate: Any, iteration: int, scale: Any,
        memory: bool, skipped: int, *args: Any, **kwargs: Any,
    ) -> Any:  # fmt: skip
        """Wraps `training_log`: reads the loads, and does not wait for kernels if nothing is printed."""
        first = kwargs.get("is_first_iteration", False)
        ends, resumed = iteration % self.args.log_interval == 0, first and iteration > 1
        # Megatron also logs the first step of each process, and counts it in the next line too. A resumed run gets the
        # same rows as a run without a stop: its first step is a row only if it ends an interval, and counts only there.
        self._is_extra = resumed and not ends
        if resumed and ends:
            kwargs["is_first_iteration"] = False
        if self.layers and (ends or first):
            table = self._read_load()
            if table.any():  # the layers of another --spec do not count
                self.summary = LoadSummary.from_table(table, self.layers)
            if not self._is_extra:
                self._load = None
        self._is_quiet = not (ends or first or skipped) and iteration % self.args.tensorboard_log_interval != 0
        if self._is_quiet:
            # Megatron adds each loss to a zero that it makes on the host. Copying it waits for all queued kernels.
            for name, loss in losses.items():
                totals[name] = totals.get(name, 0) + loss
            losses = {}
        try:
            return original(losses, totals, rate, iteration, scale, memory, skipped, *args, **kwargs)
        finally:
            self._is_quiet = False

    def _board(self, original: Any) -> Any:
        """Wraps both getters of a writer, to which Megatron would write the experts' losses in every step."""
        return None if self._is_quiet else original()

    def _thread_failed(self, original: Any, failed: threading.ExceptHookArgs) -> None:
        """Wraps `threading.excepthook`: if TensorBoard's disk is full, names the folder in its thread's error.

        The writer raises the same error at its next call, which ends the run in one line.
        """
        error = failed.exc_value
        if isinstance(error, OSError) and error.errno in FULL_DISK and "tensorboard" in type(failed.thread).__module__:
            error.filename, self._board_error = self.args.tensorboard_dir, error
        else:
            original(failed)

    def _max_over_ranks(self, original: Any, stat: Any, *args: Any, **kwargs: Any) -> Any:
        """Skips a reduction that the host would read: a quiet step needs no learning rate of other ranks."""
        return stat if self._is_quiet else original(stat, *args, **kwargs)

    def _read_load(self) -> torch.Tensor:
        """The load since the last row. Counts the pairs that were dropped since the last call."""
        table = gather_load(self.model, self.args.num_layers, self.args.num_experts)
        self.dropped += int(table[:, -1].sum())
        self._load = table if self._load is None else self._load + table
        return self._load

    def _print(self, original: Any, message: str) -> None:
        """Wraps `print_rank_last`: adds our fields to a training line, and keeps the validation loss."""
        if is_last_rank():
            if "elapsed time per iteration" in message:
                message += self._train_fields(message)
            elif match := re.search(r"validation(?:-0)? loss at iteration (\d+)( on test set)?", message):
                loss = parse_log_line(message).get("lm loss value")
                if loss is not None and not match.group(2):
                    self.history.add(int(match.group(1)), {"validation_loss": loss})
                    self._save(force=True)
        original(message)

    def _train_fields(self, line: str) -> str:
        """Add our fields of a training line to the history and the boards. Returns their text."""
        values = parse_log_line(line)
        iteration = int(values["iteration"])
        seconds = values["elapsed time per iteration (ms)"] / 1000
        rate = values["global batch size"] * self.args.seq_length / seconds if seconds > 0 else math.nan
        self._rates.append(rate)
        row = {
            "tokens": self.args.consumed_train_samples * self.args.seq_length,
            "tokens_per_second": rate,
        }
        for name, column in (("lm loss", "train_loss"), ("grad norm", "grad_norm"), ("learning rate", "learning_rate")):
            if name in values:
                row[column] = values[name]
        if values.get("number of skipped iterations") and not row.get("train_loss"):
            row.pop("train_loss", None)  # Megatron prints 0 if every update of the interval was skipped
        text = f" tokens/s: {rate:.0f} |"
        device_name = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        used = mfu(rate, self.shape, device_name, dist.get_world_size())
        if used is not None:
            row["mfu"] = used
            text += f" MFU: {100 * used:.1f}% |"
        if retries := self._new_retries():
            text += f" allocator retries: {retries} |"
        if self.summary is not None:
            row["expert_load_max_over_mean"] = float(self.summary.max_over_mean.mean())
            row["empty_experts"] = int(self.summary.empty.sum())
            row["tokens_dropped"] = self.dropped
            text += str(self.summary)
        if not self._is_extra:
            self.history.add(iteration, row)
            self._to_boards(iteration, row)
            self._save()
        return text

    def _new_retries(self) -> int:
        """How often this GPU's allocator waited for it and emptied its cache to find room, since the last call."""
        if not torch.cuda.is_available():
            return 0
        before, self._retries = self._retries, torch.cuda.memory_stats().get("num_alloc_retries", 0)
        return self._retries - before

    def _to_boards(self, iteration: int, row: dict[str, float]) -> None:
        names = ("tokens_per_second", "mfu", "expert_load_max_over_mean", "empty_experts", "tokens_dropped")
        chosen = {name: row[name] for name in names if name in row}
        if writer := get_tensorboard_writer():
            for name, value in chosen.items():
                writer.add_scalar(name, value, iteration)
        if wandb := get_wandb_writer():
            wandb.log(chosen, iteration)

    def _save(self, force: bool = False) -> None:
        if self._is_writer and (force or time.monotonic() - self._saved_at > _SAVE_EVERY_S):
            self.history.save()
            self._saved_at = time.monotonic()

    def _save_checkpoint(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if self.layers and self._read_load().any() and self._is_writer:
            self.history.add(args[0], {"tokens_dropped": self.dropped})  # a save need not end a log interval
        self._save(force=True)  # a run that is killed and resumes from here has the rows up to here
        return result

    def finish(self) -> None:
        """Write the files and pictures and print the summary, on the rank that has the losses."""
        if not is_last_rank():
            return
        if self._board_error is not None:  # the writer was not called after the point that failed
            print(f"{self._board_error.filename}: {self._board_error.strerror}; the last points are lost", flush=True)
        if self.run_dir is not None and self.history.rows:
            self.history.save()
            plot_loss(self.history, self.run_dir / "loss.png", unigram_entropy=self.entropy)
            if self.summary is not None:
                self._expert_load_files(self.run_dir, self.summary)
            print(f"pictures and tables: {self.run_dir}", flush=True)
        print(self.summary_line(), flush=True)

    def _expert_load_files(self, run_dir: Path, summary: LoadSummary) -> None:
        lines = ["layer,expert,tokens,tokens_over_mean"]
        rows = summary.tokens.tolist()
        for number, row in zip(self.layers, rows, strict=True):
            mean = max(sum(row), 1) / len(row)
            lines += [f"{number},{expert},{count},{count / mean:.4f}" for expert, count in enumerate(row)]
        write_durably(run_dir / "expert_load.csv", "\n".join(lines) + "\n")
        last = max((i for i, row in self.history.rows.items() if "empty_experts" in row), default=0)
        title = f"expert load, log interval that ends at iteration {last}"
        plot_expert_load(rows, run_dir / "expert_load.png", title=title, layers=list(self.layers))

    def summary_line(self) -> str:
        """validation loss | unigram entropy | below by | tokens dropped | tokens/s, without those that are unknown."""
        parts = []
        _, losses = self.history.series("validation_loss")
        if losses:
            parts.append(f"validation loss {losses[-1]:.4f} nats")
        if self.entropy is not None:
            parts.append(f"unigram entropy {self.entropy:.4f} nats")
        if losses and self.entropy is not None:
            below = self.entropy - losses[-1]
            parts.append(f"{'below' if below >= 0 else 'above'} by {abs(below):.4f} nats")
        if self.layers:
            parts.append(f"tokens dropped: {self.dropped}")
        rates = sorted(self._rates[1:] or self._rates)
        if rates:
            parts.append(f"tokens/s {rates[len(rates) // 2]:.0f}")
        return " | ".join(parts) if parts else "nothing was trained"
