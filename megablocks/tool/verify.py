"""`verify FOLDER`: check every byte of a prepared data set or of checkpoints against what was recorded.

A data set has a manifest.json (scripts/prepare_data.py). For checkpoints, FOLDER is one folder iter_0000020, a copy of
it with another name, the folder that contains several, or the output of `convert --to megatron`. Exit code 0: all files
are as recorded. 1: one is not; the line names it. 2: the folder is neither.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from megablocks.checkpoint import atomic
from megablocks.tool.commands import Parser, unfit


def verify_checkpoints(folder: Path) -> list[str]:
    """Return a line for each checkpoint in or at `folder`. Raises CheckpointError, which names the first bad file."""
    folders = [atomic.folder_of(folder, step) for step in atomic.iterations(folder)]
    if (folder / atomic.RELEASE / atomic.MARKER).is_file():
        folders.append(folder / atomic.RELEASE)
    folders = folders or [folder]
    markers = {one: atomic.read_marker(one) for one in folders}
    done = []
    for one, files in markers.items():
        if files is None and any(markers.values()):
            done.append(f"{one.name}: an unfinished save, which a resumed run ignores")
            continue
        if files is None:
            raise atomic.CheckpointError(
                f"{one / atomic.MARKER}: missing; the save did not finish, or another program saved; nothing to compare"
            )
        atomic.verify(one)
        size = sum(file["bytes"] for file in files.values())
        done.append(f"{one.name}: size and SHA-256 of {len(files)} files, {size / 2**30:.2f} GiB")
    return done


def verify(folder: Path, trust_remote_code: bool = False) -> list[str]:
    """Check the folder, and return what was checked, one line each.

    Raises:
        DataError, CheckpointError: a file is missing or damaged; the message names it.
        ConfigError: the folder is neither a data set nor a checkpoint.
    """
    if (folder / "manifest.json").is_file():
        from megablocks.data.verify import verify_folder

        return verify_folder(folder, trust_remote_code)[1]
    if atomic.iterations(folder) or (folder / atomic.RELEASE / atomic.MARKER).is_file():
        return verify_checkpoints(folder)
    one = folder if folder.name.startswith("iter_") else Path(os.path.realpath(folder))  # for "." or a link
    if (one / atomic.MARKER).is_file() or (one.name.startswith("iter_") and atomic.iterations(one.parent)):
        return verify_checkpoints(one)
    raise unfit(folder, "manifest.json nor iter_* folders", "a data set or a checkpoint folder")


def main(argv: Sequence[str]) -> int:
    parser = Parser("verify", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--trust-remote-code", action=argparse.BooleanOptionalAction, default=False,
                        help="allow a tokenizer that runs its own Python code")  # fmt: skip
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    from megablocks.data.indexed import DataError

    lines, problem = [], None
    try:
        lines = verify(options.folder, options.trust_remote_code)
    except (DataError, atomic.CheckpointError) as error:
        problem = str(error)
    if options.json:
        print(json.dumps({"folder": str(options.folder), "ok": problem is None, "checked": lines, "problem": problem}))
    else:
        print("\n".join(f"ok: {line}" for line in lines), end="\n" if lines else "")
    if problem is not None:
        print(f"megablocks verify: {problem}", file=sys.stderr)
    return 0 if problem is None else 1
