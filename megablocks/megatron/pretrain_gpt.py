"""Pretrain a GPT, dense or mixture-of-experts: Megatron's `pretrain()` with our layers, guards and reports.

    torchrun --nproc-per-node 2 -m megablocks.megatron.pretrain_gpt --data-prefix data/stdlib --num-layers 4 …

Every flag of Megatron-LM holds; `arguments` lists ours. One process needs no torchrun. Exit codes: 0 done, or stopped
by SIGTERM after a save; 1 stopped by a guard or a checkpoint that cannot be read or written; 2 bad arguments or data;
75 another rank died. Each of them says why in one line.

Nothing heavy is imported before it is known to be there, so that what is missing is said in one line too.
"""

from __future__ import annotations

import importlib.util
import io
import os
import re
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Any

_STARTED = time.time()
_WAIT_TO_BE_ENDED_S = 20.0
_NEEDED = ("torch", "triton", "psutil", "six", "regex", "yaml", "pydantic", "omegaconf", "tqdm", "matplotlib")


def missing() -> str | None:
    """One line that says what to install, None if everything is there."""
    if sys.version_info < (3, 12):  # noqa: UP036  the rest of this package supports older ones
        return f"Python {sys.version.split()[0]}: the Megatron plug-in needs Python >= 3.12"
    lacking = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.training") is None:
        lacking.append("megatron-core")
    if not lacking:
        return None
    return f"not installed: {', '.join(lacking)}; run: pip install 'megablocks[megatron]'  (or -e '.[megatron]' here)"


def single_process_environment() -> None:
    """Without torchrun: the variables it would set for one process."""
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    values = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in values.items()}, MASTER_ADDR="localhost")


def print_whole_lines() -> None:
    """torchrun runs Python unbuffered, where print writes a line's end by itself: lines of two ranks run together."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)


def one_line(error: BaseException, args: Any) -> str:
    """What was wrong with the arguments; a bare assertion of Megatron's is told by its source and the values in it."""
    text = " ".join(str(error).split())
    if not isinstance(error, AssertionError):
        return text or type(error).__name__
    source = traceback.extract_tb(error.__traceback__)[-1].line or ""
    names = dict.fromkeys(re.findall(r"\bargs\.(\w+)", source))
    values = ", ".join(f"{name}={getattr(args, name)!r}" for name in names if hasattr(args, name))
    rule = text or source.removeprefix("assert ").rstrip(", \\(")
    return f"{values}: Megatron asks for: {rule}" if values else f"Megatron asks for: {rule}"


def main() -> int:
    """Returns the exit code."""
    print_whole_lines()
    single_process_environment()
    first = int(os.environ["RANK"]) == 0
    if (lacking := missing()) is not None:
        return _fail(lacking, 2, first)
    from megablocks.checkpoint.atomic import CheckpointError, SaveError
    from megablocks.monitor.guards import NonFiniteError

    try:
        prepared = prepare()
    except SystemExit as exit_:  # --help
        return int(exit_.code or 0)
    except ArgumentError as error:
        return _fail(str(error), 2, first)
    except CheckpointError as error:
        return _fail(str(error), 1, first)
    try:
        return train(*prepared)
    except (NonFiniteError, CheckpointError) as error:  # the same on every rank, but for a save that one rank failed
        return _fail(str(error), 1, first or isinstance(error, SaveError))


class ArgumentError(Exception):
    """Bad flags or data; the message is one line."""


def prepare() -> tuple[Any, ...]:
    """Parse, validate and verify. Returns what `train` takes. Raises ArgumentError or CheckpointError."""
    import warnings

    if int(os.environ["RANK"]) != 0:
        warnings.filterwarnings("ignore")
    # Said once, and better, by "set automatically".
    for text in ("Transformer Engine and Apex are not", "Apex is not installed", "Only transformer-engine"):
        warnings.filterwarnings("ignore", message=text)
    from megablocks.checkpoint.atomic import CheckpointError
    from megablocks.megatron import cpu

    cpu.install()
    cpu.skip_compile_helpers()
    from megatron.training.argument_utils import pretrain_cfg_container_from_args
    from megatron.training.arguments import parse_and_validate_args

    from megablocks.megatron import arguments, data, gpt
    from megablocks.megatron.guards import Guards

    parsed: list[Any] = []
    try:
        args = parse_and_validate_args(
            extra_args_provider=lambda parser: arguments.add_arguments(parser, parsed),
            args_defaults={"tokenizer_type": "GPT2BPETokenizer"},
        )
        settings = arguments.settings_from(args, arguments.DriverSettings)
        config = pretrain_cfg_container_from_args(args, gpt.model_config(args))
        guards = Guards(args, settings, data.open_data(args))
        guards.choose_checkpoint()
    except CheckpointError:
        raise
    except (AssertionError, ValueError, RuntimeError, NotImplementedError, OSError, ImportError) as error:
        raise ArgumentError(one_line(error, parsed[0] if parsed else None)) from error
    return args, settings, config, guards


def train(args: Any, settings: Any, config: Any, guards: Any) -> int:
    """Run Megatron's `pretrain`. Returns the exit code."""
    import torch
    import torch.distributed as dist
    from megatron.core.enums import ModelType
    from megatron.training import inprocess_restart, pretrain, set_startup_timestamps
    from megatron.training.utils import print_rank_0

    from megablocks.megatron import checkpoint_io, data, gpt, optimizer_state
    from megablocks.megatron.reporting import Reporter
    from megablocks.monitor.heartbeat import Heartbeat

    run_dir = settings.run_dir or args.save
    reporter = Reporter(args, Path(run_dir) if run_dir else None, _unigram_entropy(args))
    _announce(args, run_dir)
    optimizer_state.install()
    checkpoint_io.write_in_process(args)
    checkpoint_io.name_write_errors()
    checkpoint_io.keep_random_state()
    guards.install()
    reporter.install()
    heartbeat = None
    if args.world_size > 1 and settings.hang_timeout > 0:
        heartbeat = guards.heartbeat = Heartbeat.from_environment(settings.hang_timeout)
    set_startup_timestamps(program_start=_STARTED, main_entry=time.time())
    wrapped, store = inprocess_restart.maybe_wrap_for_inprocess_restart(pretrain)
    code, failure = 0, None
    try:
        # A rank has one GPU, whose thread of autograd's own would only wait for this one, and this one for it.
        with torch.autograd.set_multithreading_enabled(False):
            wrapped(
                config,
                data.datasets_provider,
                ModelType.encoder_or_decoder,
                gpt.forward_step_with(guards.observe),
                store=store,
                get_embedding_ranks=gpt.embedding_ranks,
            )
    except SystemExit as exit_:  # --exit-interval, --exit-duration-in-mins, SIGTERM
        code = int(exit_.code or 0)
    except Exception as error:
        failure = error
        raise
    finally:
        if heartbeat is not None and failure is not None:
            heartbeat.fail(failure)
    reporter.finish()
    if not args.skip_train:
        print_rank_0(f"done at iteration {args.curr_iteration + 1}")
    if heartbeat is not None:
        heartbeat.stop()
    dist.barrier()
    dist.destroy_process_group()
    return code


def _announce(args: Any, run_dir: str | None) -> None:
    from megablocks.monitor.env_report import env_report
    from megablocks.monitor.history import write_atomically

    if args.rank != 0:
        return
    if run_dir:
        write_atomically(Path(run_dir) / "env.txt", env_report())
    for dest, value in args.megablocks_automatic.items():
        print(f"set automatically: {dest} = {value}", flush=True)


def _unigram_entropy(args: Any) -> float | None:
    if args.data_prefix is None:
        return None
    from megablocks.data.manifest import read_manifest

    return read_manifest(args.data_prefix).unigram["valid_entropy"]


def _fail(message: str, code: int, speak: bool) -> int:
    if not speak and "TORCHELASTIC_RUN_ID" in os.environ:
        # torchrun ends every rank once one has ended, which must be one that has spoken. Whoever is still here after
        # the wait met this error alone.
        time.sleep(_WAIT_TO_BE_ENDED_S)
        speak = True
    if speak:
        print(f"pretrain_gpt: {message}", file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
