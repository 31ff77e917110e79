"""One line for a failure that flags or the machine cause: the flags concerned, their values, and what is required.

Megatron checks many flags with assertions that have no text, and others not at all: a zero becomes a ZeroDivisionError
in some constructor. `explain` walks back from the end of the traceback. It stops at the first statement that reads a
flag of the command line, or that comes shortly after such a statement.
"""

from __future__ import annotations

import argparse
import linecache
import os
import re
import textwrap
import traceback
from types import FrameType
from typing import NamedTuple

import torch
from torch.distributed import DistNetworkError, DistStoreError
from torch.distributed.checkpoint.api import CheckpointException

_SIZES = ("micro_batch_size", "seq_length", "num_layers", "hidden_size", "ffn_hidden_size", "num_experts")
_ALLOCATORS = ("can't allocate memory", "out of memory")
_PARTS = re.compile(r"megatron\.|megablocks\.(?!megatron\.(?:pretrain_gpt|cpu)$)")
_SHOWN = 6
"""Most flags that one line names."""
_NEAR = 12
"""Number of lines before a statement that are searched for its flag, because they hold the condition for it."""
_LONGEST = 400


class _Step(NamedTuple):
    """One call of a traceback: its frame, and the line and text of the statement that failed in it."""

    frame: FrameType
    line: int
    statement: str


def line_of(error: BaseException) -> str:
    """The error's own words in one line, or its type where it has none."""
    return " ".join(str(error).split()) or type(error).__name__


def cause_of(error: BaseException) -> BaseException:
    """The error of the first rank in a CheckpointException, which collects those of all ranks; otherwise `error`."""
    while isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    return error


def explain(error: BaseException, args: argparse.Namespace | None) -> str:
    """What was wrong with the flags, in one line.

    args: the parsed flags; `megablocks_explicit` names those of the command line. None if parsing failed.
    """
    text = line_of(error)
    if args is None or type(error).__module__.startswith("megablocks."):
        return text
    if isinstance(error, (DistNetworkError, DistStoreError)):  # about no flag
        where = ", ".join(f"{name}={os.environ.get(name)}" for name in ("MASTER_ADDR", "MASTER_PORT"))
        return f"{where}: {text[:_LONGEST]}{'; choose a free port' if 'EADDRINUSE' in text else ''}"
    if isinstance(error, OSError) and error.filename is not None:
        return _with_flags(_flags_of_path(str(error.filename), args), args, f"{error.strerror}: {error.filename}")
    steps = _steps(error)
    if not steps:
        return text
    flags, statement = _flags(steps, args, text), steps[-1].statement
    if isinstance(error, AssertionError):
        rule = text if str(error) else statement.removeprefix("assert ").rstrip(", \\(")
        text = f"Megatron asks for: {rule}"
    elif isinstance(error, SystemExit):
        text = "Megatron ended, for the reason that it printed above"
    elif not statement.startswith("raise"):
        text = f"{type(error).__name__}: {text} in `{textwrap.shorten(statement, 80)}`"
    return _with_flags(flags, args, text[:_LONGEST])


def out_of_memory(error: BaseException, args: argparse.Namespace) -> str | None:
    """What did not fit and what to do, in one line; None if the error does not come from an allocator."""
    text = line_of(error)
    known = isinstance(error, (MemoryError, torch.OutOfMemoryError))
    if not known and not (isinstance(error, RuntimeError) and any(words in text for words in _ALLOCATORS)):
        return None
    wanted = re.search(r"(?:tried to|unable to) allocate ([\d.]+ \w+)", text, re.IGNORECASE)
    piece = f" at a tensor of {wanted[1]}" if wanted else ""
    ranks = "spread the model over more ranks (--expert-model-parallel-size, --pipeline-model-parallel-size)"
    return f"{sizes_of(args)}: out of memory{piece}; take smaller sizes, {ranks}, or --recompute-granularity"


def sizes_of(args: argparse.Namespace) -> str:
    """The flags that decide how much memory the model takes, with their values."""
    return ", ".join(f"{name}={getattr(args, name)}" for name in _SIZES if getattr(args, name) is not None)


def _with_flags(names: list[str], args: argparse.Namespace, text: str) -> str:
    values = ", ".join(f"{name}={getattr(args, name)!r}" for name in names[:_SHOWN])
    return f"{values}: {text}" if values else text


def _steps(error: BaseException) -> list[_Step]:
    """The calls of Megatron and of this package, the outermost first."""
    walked = traceback.walk_tb(error.__traceback__)
    steps = []
    for (frame, line), place in zip(walked, traceback.extract_tb(error.__traceback__), strict=True):
        if _PARTS.match(frame.f_globals.get("__name__", "")):
            lines = range(line, (place.end_lineno or line) + 1)
            statement = " ".join(linecache.getline(place.filename, number).strip() for number in lines)
            steps.append(_Step(frame, line, statement))
    return steps


def _flags(steps: list[_Step], args: argparse.Namespace, text: str) -> list[str]:
    """The flags of the command line that the failure is about; if the text quotes the value of some, only those."""
    explicit = [name for name in sorted(args.megablocks_explicit) if hasattr(args, name)]  # Megatron deletes some
    quoted = [name for name in explicit if _is_quoted(getattr(args, name), text)]
    for frame, line, statement in reversed(steps):
        above = range(line - 1, max(frame.f_code.co_firstlineno, line - _NEAR), -1)
        if re.search(r"\(args[,)]", statement):  # a call that reads all flags, whatever was read before it
            above = range(0)
        texts = [statement, *(linecache.getline(frame.f_code.co_filename, number) for number in above)]
        read = [re.findall(r"\b(?:args|config|cfg|self)(?:\.|, ['\"])(\w+)", text) for text in texts]
        variables = [name for name in re.findall(r"\b\w+\b", statement) if name in frame.f_locals]
        read[0] += [flag for name in variables for flag in explicit if _holds(frame, name, flag, args)]
        for names in read:
            if found := [name for name in dict.fromkeys(names) if name in explicit]:
                return [name for name in found if name in quoted] or found
    return quoted if len(quoted) == 1 else []


def _is_quoted(value: object, text: str) -> bool:
    shown = {str(value), f"{value:g}" if isinstance(value, float) else str(value)}
    return any(re.search(rf"(?<![\w.-]){re.escape(one)}(?!\w|\.\d)", text) for one in shown)


def _holds(frame: FrameType, variable: str, flag: str, args: argparse.Namespace) -> bool:
    """Whether a variable of a frame is a flag's value. Equal numbers of two flags are one object; texts are not."""
    value = getattr(args, flag)
    return frame.f_locals[variable] is value and (variable == flag or isinstance(value, str))


def _flags_of_path(path: str, args: argparse.Namespace) -> list[str]:
    values = {name: str(getattr(args, name, None)) for name in sorted(args.megablocks_explicit)}
    return [name for name, value in values.items() if value and (path + "/").startswith(value.rstrip("/") + "/")]
