"""Find the complete checkpoints of a folder, and check that their files are those that were saved.

Megatron writes `iter_0000020/…` and then `latest_checkpointed_iteration.txt`, but not atomically. Here a checkpoint is
complete if its folder contains the marker `complete.json`: the size and sha256 of every file. The marker is written
last, to a temporary file that is renamed after it is on disk. A save that was killed, or that filled the disk, leaves a
folder without a marker: it is torn and ignored. If there is a marker but a file differs from it, the checkpoint is
damaged: that is an error.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megablocks.files import hash_files as hash_files
from megablocks.files import sync
from megablocks.files import write_durably as write_durably

MARKER = "complete.json"
POINTER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
"""Megatron's folder, and the text of its pointer, for weights alone: a run starts from them at iteration 0."""
_FORMAT = 1
_ITERATION = re.compile(r"iter_(\d{7,})")


class CheckpointError(RuntimeError):
    """A checkpoint cannot be saved, or must not be loaded. The message is one line that names the file."""


class SaveError(CheckpointError):
    """This rank could not save."""


@dataclass(frozen=True)
class Latest:
    """What `find_latest_complete` chose.

    iteration: of the checkpoint to load, or None.
    warnings: one line for each folder or pointer that was ignored, and for a checkpoint without a marker.
    """

    iteration: int | None
    warnings: list[str] = field(default_factory=list)


def folder_of(root: Path | str, iteration: int) -> Path:
    """Return Megatron's folder for an iteration."""
    return Path(root) / f"iter_{iteration:07d}"


def iterations(root: Path | str) -> list[int]:
    """Return the iterations that have a folder, complete or not, in ascending order."""
    names = os.listdir(root) if os.path.isdir(root) else []
    found = map(_ITERATION.fullmatch, names)
    return sorted(int(match.group(1)) for match in found if match)


def files_of(folder: Path) -> list[str]:
    """Return every file below `folder` except the marker, as sorted relative paths.

    To share the work of `hash_files`, rank r hashes `files_of(folder)[r::ranks]`.
    """
    found = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return sorted(name for name in found if name != MARKER and not Path(name).name.startswith(f".{MARKER}"))


def mark_complete(folder: Path, iteration: int, files: Mapping[str, Mapping[str, Any]]) -> None:
    """Write the marker. Call it last and on one rank, after every file is written and hashed."""
    content = {"format": _FORMAT, "iteration": iteration, "files": dict(sorted(files.items()))}
    for name in files:
        sync(folder / name)
    write_durably(folder / MARKER, json.dumps(content, indent=1) + "\n")


def read_marker(folder: Path) -> dict[str, dict[str, Any]] | None:
    """Return the files that a complete checkpoint must have, by name; None if it has no marker.

    The folder can have any name except that of another iteration.
    """
    path = folder / MARKER
    if not path.is_file():
        return None
    name = folder.name if folder.name.startswith("iter_") else folder.resolve().name  # for "." or a link
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        files = content["files"]
        moved = _ITERATION.fullmatch(name) and name != folder_of("", content["iteration"]).name
        if content["format"] != _FORMAT or not files or moved:
            raise ValueError("not of this folder")
        return {str(name): {"bytes": int(f["bytes"]), "sha256": str(f["sha256"])} for name, f in files.items()}
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise CheckpointError(f"{path}: damaged ({error}); {_instead(folder)}") from None


def _instead(folder: Path) -> str:
    """Return what a user can do about a damaged checkpoint."""
    return "convert again" if folder.name == RELEASE else f"remove {folder} to use an older checkpoint"


def check_sizes(folder: Path, files: Mapping[str, Mapping[str, Any]]) -> None:
    """Check that every file in the marker exists with its size. Raises CheckpointError, which names the file."""
    for name, expected in files.items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{path}: missing; {_instead(folder)}")
        if path.stat().st_size != expected["bytes"]:
            size = path.stat().st_size
            raise CheckpointError(f"{path}: {size} bytes, {expected['bytes']} were saved; {_instead(folder)}")


def verify(folder: Path, rank: int = 0, ranks: int = 1) -> None:
    """Compare this rank's share of the files with the marker, if there is one. Raises CheckpointError at a bad file."""
    files = read_marker(folder) or {}
    mine = sorted(files)[rank::ranks]
    check_sizes(folder, {name: files[name] for name in mine})
    for name, found in hash_files(folder, mine).items():
        if found["sha256"] != files[name]["sha256"]:
            raise CheckpointError(f"{folder / name}: sha256 differs from what was saved; {_instead(folder)}")


def find_latest_complete(root: Path | str) -> Latest:
    """Return the checkpoint to resume from: the pointer's if it is complete, otherwise the newest complete one.

    Torn folders are ignored with a warning. Raises CheckpointError if the chosen checkpoint is damaged (a file is
    missing or has another size), or if the pointer names a checkpoint but no complete one is left.
    """
    root = Path(root)
    pointer, text = _read_pointer(root)
    if text == RELEASE:
        return Latest(None)
    found = iterations(root)
    complete = [i for i in found if (folder_of(root, i) / MARKER).is_file()]
    if not complete and pointer in found:
        folder = folder_of(root, pointer)
        if not (folder / "metadata.json").is_file() and not (folder / ".metadata").is_file():
            if any(folder.glob("mp_rank_*/model_optim_rng.pt")):
                raise CheckpointError(f"{folder}: has another format; give --ckpt-format torch")
            raise CheckpointError(f"{folder}: torn (no {MARKER}), and {root} holds no complete checkpoint")
        return Latest(pointer, [f"{folder}: no {MARKER}, loaded without verification"])
    if not complete and pointer is not None:
        raise CheckpointError(f"{root / POINTER}: names iteration {pointer}, which {root} does not hold")
    chosen = pointer if pointer in complete else max(complete, default=-1)
    torn = [folder_of(root, i) for i in found if i not in complete and i > chosen]
    warnings = [f"{folder}: torn (no {MARKER}), ignored" for folder in torn]
    if not complete:
        if text is not None:
            warnings.append(f"{root / POINTER}: {text!r} is not an iteration, and there is no complete checkpoint")
        return Latest(None, warnings)
    if chosen != pointer:
        said = "missing" if text is None else repr(text)
        warnings.append(f"{root / POINTER}: {said}; using the newest complete checkpoint, iteration {chosen}")
    folder = folder_of(root, chosen)
    check_sizes(folder, read_marker(folder) or {})
    return Latest(chosen, warnings)


def _read_pointer(root: Path) -> tuple[int | None, str | None]:
    """Return the pointer's iteration, None if it names no iteration, and its text, None without a pointer."""
    try:
        text = (root / POINTER).read_text(encoding="utf-8", errors="replace").strip()
    except FileNotFoundError:
        return None, None
    return (int(text), text) if re.fullmatch(r"\d{1,18}", text) else (None, text[:40])


def write_pointer(root: Path | str, iteration: int) -> None:
    """Write `iteration` to Megatron's pointer. The file is never half-written."""
    write_durably(Path(root) / POINTER, str(iteration))


@contextlib.contextmanager
def room_for(root: Path | str, iteration: int) -> Iterator[None]:
    """Clear the folder that the block will save to.

    A torn checkpoint in it is removed. A complete one is renamed, and removed after the block; if the block raises, it
    gets its name back.
    """
    folder = folder_of(root, iteration)
    aside, replaces = folder.with_name(f"{folder.name}.replaced"), (folder / MARKER).is_file()
    _remove(aside if replaces else folder)
    if replaces:
        folder.rename(aside)
    try:
        yield
    except BaseException:
        if replaces:
            _remove(folder)
            aside.rename(folder)
        raise
    if replaces:
        _remove(aside)


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)


def prune(root: Path | str, saved: int, keep: int) -> None:
    """Keep `saved` and the newest `keep - 1` complete checkpoints before it; remove the older complete ones.

    Call it after `saved` is complete. It keeps torn folders, links and later iterations. It removes a folder's marker
    first, so that an interrupted removal leaves a torn checkpoint, not a damaged one.
    """
    folders = [folder_of(root, i) for i in iterations(root) if i < saved]
    complete = [folder for folder in folders if (folder / MARKER).is_file() and not folder.is_symlink()]
    for folder in complete[: max(0, len(complete) - keep + 1)]:
        (folder / MARKER).unlink()
        sync(folder)
        shutil.rmtree(folder)
