"""The commands of `python -m megablocks`, and the code that calls them. This file does not load torch; a command can.

Exit codes: 0 no error; 1 a check failed, the model does not fit, or a file cannot be read or written; 2 bad arguments,
in one line on stderr; 130 after Ctrl-C; 141 if the reader of the output has exited, for example `| head -1`.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import io
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from megablocks.checkpoint import atomic
from megablocks.config import ConfigError
from megablocks.kinds import load

PROGRAM = "python -m megablocks"


COMMANDS = {
    "env": "versions, GPUs, and which kernel each op uses here and why",
    "doctor": "run every kernel family and compare it with float64",
    "bench": "time every implementation, and other packages, at your shape",
    "plan": "memory and step time of a model before you rent GPUs",
    "convert": "a model between Hugging Face, our layers and Megatron",
    "verify": "check a prepared data set or a checkpoint, byte by byte",
}
"""Modules of megablocks.tool. The function `main` of each gets the command's arguments and returns the exit code."""


def unfit(folder: Path, holds: str, wanted: str) -> ConfigError:
    """Return the error for a path that is not a folder, or that contains neither of two things, "this nor that"."""
    what = f"holds neither {holds}" if folder.is_dir() else "is a file" if folder.exists() else "no such folder"
    inner = folder / "checkpoints"  # a run folder of exp/
    return ConfigError(f"{folder}: {what}; give {inner if atomic.iterations(inner) else wanted}")


def named_path(text: str) -> Path:
    """Return the path that an argument names. Raises ArgumentTypeError for "", for example from an unset variable.

    Python reads "" as the current folder.
    """
    if not text:
        raise argparse.ArgumentTypeError("'' is empty: must be a path; . is the current folder")
    return Path(text)


class Parser(argparse.ArgumentParser):
    """A command's parser. Its errors are ConfigErrors of one line, and flags cannot be shortened.

    An argument of type Path must not be empty.
    """

    def __init__(self, command: str, **options: Any) -> None:
        super().__init__(
            prog=f"{PROGRAM} {command}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
            **options,
        )
        self.register("type", Path, named_path)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def need_megatron() -> None:
    """Call this before Megatron's import. If packages are missing, it raises ConfigError and says what to install."""
    from megablocks.megatron.pretrain_gpt import missing

    if (problem := missing()) is not None:
        raise ConfigError(problem)
    # torch warns at Megatron's import if a CUDA toolkit is installed but there is no GPU
    log = logging.getLogger("torch.utils.cpp_extension")
    log.addFilter(lambda record: not record.getMessage().startswith("No CUDA runtime is found"))


def check_switches() -> None:
    """Call this before kernels run. Raises ConfigError if a switch in the environment is neither 0 nor 1."""
    from megablocks.ops.hopper import SWITCHES, switch

    try:
        for name in SWITCHES:
            switch(name)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def progress(text: str) -> None:
    """Show on a terminal what runs now, instead of the last text: the first run of a kernel compiles it."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def in_one_line(error: Exception) -> str:
    """Return the class of an exception, and the first line of its message."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"


def usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {summary}" for name, summary in COMMANDS.items()]
    return "\n".join([f"usage: {PROGRAM} COMMAND [--help | ARGUMENTS]", "", *lines])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that argv names. Returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if words else 2
    name, *arguments = words
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        meant = f", did you mean {near[0]}?" if near else ""
        print(f"megablocks: {name}: no such command{meant}; one of {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    try:
        run: Callable[[list[str]], int] = load(f"megablocks.tool.{name}:main")
        return run(arguments)
    except ConfigError as error:
        print(f"megablocks {name}: {error}", file=sys.stderr)
    except ModuleNotFoundError as error:
        package, _, inner = (error.name or "").partition(".")
        if not package or package.startswith("megablocks"):
            raise
        problem = f"{package} is not installed: pip install {package}"
        if inner:  # a module of a package that is installed
            problem = f"the {package} that is installed has no module {error.name}; install another release"
        print(f"megablocks {name}: {problem}", file=sys.stderr)
    return 2


def print_in_any_locale() -> None:
    """Let print write the number of a character that the locale lacks (LC_ALL=C), instead of raising an error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # None if it is closed
            stream.reconfigure(errors="backslashreplace")


def program() -> int:
    """Run `main` as a program: after Ctrl-C, or if output cannot be written, it prints at most one line and ends."""
    print_in_any_locale()
    try:
        try:
            return main()
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except BrokenPipeError:
        code = 141
    except OSError as error:
        if error.errno is None:  # not from the system; Python raises one if it cannot find a function's source
            raise
        print(f"megablocks: {error.filename or 'output'}: {error.strerror}", file=sys.stderr)
        code = 1
    except KeyboardInterrupt:
        print("megablocks: interrupted", file=sys.stderr)
        code = 130
    with contextlib.suppress(OSError, AttributeError):  # Python flushes once more at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code
