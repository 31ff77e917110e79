"""Pretrain a GPT, dense or mixture-of-experts: Megatron's `pretrain()` with our layers, guards and reports.

    torchrun --nproc-per-node 2 -m megablocks.megatron.pretrain_gpt --data-prefix data/stdlib --num-layers 4 …

The flags are Megatron-LM's and those of `arguments`. A single process needs no torchrun. Every failure that the user
can fix is reported in one line. Exit codes: 0 done, or saved and stopped by SIGTERM or SIGINT; 1 stopped by a guard, by
a checkpoint that cannot be read or written, or out of memory; 2 bad arguments or data; 75 another rank died; 130
interrupted before training.

Modules that need other packages are imported late, so that a missing package is reported in one line too.
"""

from __future__ import annotations

import atexit
import errno
import fcntl
import functools
import importlib.util
import io
import multiprocessing
import os
import signal
import sys
import time
import warnings
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megablocks.checkpoint.atomic import CheckpointError, SaveError
from megablocks.files import write_durably
from megablocks.monitor.env_report import env_report
from megablocks.monitor.heartbeat import Heartbeat

if TYPE_CHECKING:
    from megablocks.megatron.checkpoints import Checkpoints
    from megablocks.megatron.guards import Guards

_STARTED = time.time()
_WAIT_TO_BE_ENDED_S = 20.0
_NEEDED = ("torch", "triton", "psutil", "six", "regex", "yaml", "pydantic", "omegaconf", "tqdm", "matplotlib")


def missing() -> str | None:
    """One line that says what to install, None if nothing is missing."""
    if sys.version_info < (3, 12):  # noqa: UP036  the rest of this package supports older ones
        return f"Python {sys.version.split()[0]}: the Megatron plug-in needs Python >= 3.12"
    lacking = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.training") is None:
        lacking.append("megatron-core")
    if not lacking:
        return None
    # Not 'megablocks[megatron]': in a checkout that is not installed, pip would take 0.10 from PyPI.
    return f"not installed: {', '.join(lacking)}; run in a checkout: pip install '.[megatron]'"


def single_process_environment() -> None:
    """Without torchrun, set the variables that it would set for one process."""
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return
    here = {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}  # 0: torch's store opens any free port
    os.environ.update(here, RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")


def print_whole_lines() -> None:
    """Write each line at once and whole. Under torchrun Python does not buffer, so the lines of ranks would mix."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)


def bad_environment() -> str | None:
    """One line that names a variable of torchrun that is missing or wrong, None if all are right."""
    advice = "launch with torchrun, or unset RANK and WORLD_SIZE to run one process"
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        value = os.environ.get(name)
        if value is None and name.startswith("LOCAL"):  # Megatron has a default
            continue
        if value is None or not value.isdecimal():
            return f"{name}={value!r}: must be a whole number; {advice}"
    rank, world = os.environ["RANK"], os.environ["WORLD_SIZE"]
    if int(rank) >= int(world):
        return f"RANK={rank}: must be smaller than WORLD_SIZE={world}; {advice}"
    if not os.environ.get("MASTER_ADDR"):
        return f"MASTER_ADDR={os.environ.get('MASTER_ADDR')!r}: must be the host name of rank 0; {advice}"
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    if restarts != "0" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return (
            f"--max-restarts={restarts}: torchrun keeps the addresses of dead ranks, so that restarted ones hang; set "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 with --standalone or --rdzv-backend c10d, or leave it out"
        )
    return None


def main() -> int:
    """Returns the exit code."""
    try:
        return _run()
    except KeyboardInterrupt:  # also in the seconds that imports take
        return _fail("interrupted before training", 130, True)


def _run() -> int:
    print_whole_lines()
    single_process_environment()
    if (problem := bad_environment()) is not None:
        return _fail(problem, 2, True)
    first = int(os.environ["RANK"]) == 0
    if (problem := missing()) is not None:
        return _fail(problem, 2, first)
    from megablocks.monitor.guards import NonFiniteError

    try:
        return train(*prepare())
    except SystemExit as exit_:  # --help
        return int(exit_.code or 0)
    except ArgumentError as error:
        return _fail(str(error), 2, first)
    except (NonFiniteError, CheckpointError, OutOfMemory) as error:
        # A failed save and a full memory concern one rank; the others are the same on every rank.
        return _fail(str(error), 1, first or isinstance(error, (SaveError, OutOfMemory)))


class ArgumentError(Exception):
    """Bad flags or data; the message is one line."""


class OutOfMemory(Exception):
    """A tensor did not fit on this rank; the message is one line."""


def prepare() -> tuple[Namespace, Any, Guards, Checkpoints]:
    """Parse, validate and verify. Returns the arguments of `train`. Raises ArgumentError or CheckpointError."""
    if int(os.environ["RANK"]) != 0:
        warnings.filterwarnings("ignore")
    # The lines "set automatically" say the same as these warnings.
    for text in ("Transformer Engine and Apex are not", "Apex is not installed", "Only transformer-engine"):
        warnings.filterwarnings("ignore", message=text)
    from megablocks.megatron import cpu

    cpu.install()
    from megatron.training.argument_utils import pretrain_cfg_container_from_args
    from megatron.training.arguments import parse_and_validate_args

    from megablocks.megatron import arguments, checkpoint_io, checkpoints, data, failures, gpt
    from megablocks.megatron.guards import Guards

    checkpoint_io.restrict_unpickling()
    checkpoints.choose_before_reading_args()
    parsed: list[Any] = []
    try:
        args = parse_and_validate_args(
            extra_args_provider=lambda parser: arguments.add_arguments(parser, parsed, needs_data=True),
            args_defaults={"tokenizer_type": "GPT2BPETokenizer"},
        )
        config = pretrain_cfg_container_from_args(args, gpt.model_config(args))
        fingerprint = data.open_data(args)
        checkpoints.choose_checkpoint(args)
    except (Exception, SystemExit) as error:
        if isinstance(error, CheckpointError) or (isinstance(error, SystemExit) and not parsed):  # the latter: --help
            raise
        raise ArgumentError(failures.explain(error, parsed[0] if parsed else None)) from error
    guards = Guards(args)
    return args, config, guards, checkpoints.Checkpoints(args, fingerprint, guards.window, guards.read)


def train(args: Namespace, config: Any, guards: Guards, checkpoints: Checkpoints) -> int:
    """Run Megatron's `pretrain`. Returns the exit code. config: Megatron's container of all configs."""
    import torch
    import torch.distributed as dist
    from megatron.core.enums import ModelType
    from megatron.training import inprocess_restart, pretrain, set_startup_timestamps
    from megatron.training.utils import print_rank_0

    from megablocks.megatron import checkpoint_io, cuda_graph, data, failures, fused_optimizer, gpt, profiling
    from megablocks.megatron.reporting import FULL_DISK, Reporter

    run_dir = args.megablocks_run_dir or args.save
    reporter = Reporter(args, Path(run_dir) if run_dir else None)
    try:
        _announce(args, run_dir)
    except OSError as error:  # a full disk, or a folder that the user's rights do not suffice for
        where = error.filename or run_dir
        raise ArgumentError(f"{where}: cannot be written: {error.strerror}; choose another folder") from error
    fused_optimizer.install(args)
    checkpoint_io.install()
    cuda_graph.install(args)
    data.install()
    guards.install()
    checkpoints.install()
    reporter.install()
    if profiling.is_on(args):
        profiling.install()
    if args.exit_signal_handler:
        save_at_interrupt(args.exit_signal)
    atexit.register(end_data_workers)
    if args.world_size > 1 and args.megablocks_hang_timeout > 0:
        guards.heartbeat = Heartbeat.from_environment(args.megablocks_hang_timeout)
    set_startup_timestamps(program_start=_STARTED, main_entry=time.time())
    wrapped, store = inprocess_restart.maybe_wrap_for_inprocess_restart(pretrain)
    code = 0
    try:
        # A rank has one GPU, so autograd's thread for it and the main thread would only wait for each other.
        with torch.autograd.set_multithreading_enabled(False):
            wrapped(
                config,
                data.datasets_provider,
                ModelType.encoder_or_decoder,
                functools.partial(gpt.forward_step, observe=guards.observe),
                store=store,
                get_embedding_ranks=gpt.embedding_ranks,
            )
    except SystemExit as exit_:  # --exit-interval, --exit-duration-in-mins, SIGTERM
        code = int(exit_.code or 0)
    except Exception as error:
        if guards.heartbeat is not None:
            guards.heartbeat.fail(error)
        if (line := failures.out_of_memory(error, args)) is not None:
            raise OutOfMemory(f"rank {args.rank}: {line}") from error
        if guards.is_training and isinstance(error, OSError) and error.errno in FULL_DISK:
            where = error.filename or run_dir
            raise SaveError(f"{where}: {error.strerror}; make room; the newest checkpoint resumes") from error
        if guards.is_training or isinstance(error, CheckpointError):
            raise
        raise ArgumentError(failures.explain(error, args)) from error
    finally:
        cuda_graph.release()
    reporter.finish()
    if profiling.is_on(args):
        profiling.write(args, reporter.model, reporter.history)
    if not args.skip_train:
        print_rank_0(f"done at iteration {max(args.curr_iteration + 1, args.iteration)}")  # the second: it was done
    if guards.heartbeat is not None:
        guards.heartbeat.stop()
    dist.barrier()
    dist.destroy_process_group()
    return code


def save_at_interrupt(exit_signal: int) -> None:
    """Let the first SIGINT (Ctrl-C) save and exit, as `exit_signal` does, and the second end the process at once.

    A terminal also sends it to the data loader's processes, which inherit the handler. There it does nothing.
    """
    rank = os.getpid()

    def interrupt(number: int, frame: Any) -> None:
        if os.getpid() != rank:
            return
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        when = b"this iteration, or with several ranks after the next"
        os.write(2, b"interrupted: saving after %b; interrupt again to end at once\n" % when)
        signal.raise_signal(exit_signal)

    if exit_signal != signal.SIGINT:
        signal.signal(signal.SIGINT, interrupt)


def end_data_workers() -> None:
    """End the data loader's processes that an error left running.

    Python would send them SIGTERM and wait. Megatron makes them ignore it, so the rank would never exit.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler raises when a worker is killed
    for worker in multiprocessing.active_children():
        if worker.daemon:
            worker.kill()


def _hold(folder: str) -> None:
    """Lock a folder against other runs until this process ends, if the file system has locks."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    handle = os.open(Path(folder) / "lock", os.O_RDWR | os.O_CREAT, 0o666)  # stays open
    try:
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the data loader's processes do not inherit this lock
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            line = f"{folder}: is in use by another run; wait until it ends, or choose another folder"
            raise ArgumentError(line) from None


def _announce(args: Namespace, run_dir: str | None) -> None:
    """Hold both folders, write env.txt into the run folder and print what was set automatically, on rank 0."""
    if args.rank != 0:
        return
    for folder in filter(None, {args.save, run_dir}):
        _hold(folder)
    if run_dir:
        write_durably(Path(run_dir) / "env.txt", env_report())
    for dest, value in args.megablocks_automatic.items():
        print(f"set automatically: {dest} = {value}", flush=True)


def _fail(message: str, code: int, speak: bool) -> int:
    """Print the message of a failed run once for all ranks. Returns the exit code."""
    if not speak and "TORCHELASTIC_RUN_ID" in os.environ:
        # The first rank prints for all, and torchrun ends the others after it exits. If this rank still runs after the
        # wait, it alone has the error.
        time.sleep(_WAIT_TO_BE_ENDED_S)
        speak = True
    if speak:
        print(f"pretrain_gpt: {message}", file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    exit_code = main()
    for asks in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        if callable(signal.getsignal(asks)):  # Python drops handlers before it exits; the work is done
            signal.signal(asks, signal.SIG_IGN)
    sys.exit(exit_code)
