"""Which files of unfinished work are complete, so that the same command goes on where it stopped."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from megablocks.files import hash_files, write_durably

_NOTES = ".journal"


class Journal:
    """Notes on the complete files of a folder, one note a file, in a folder beside them.

    Args:
        folder: is made, and emptied first if its notes are of other work.
        work: says what is written into the folder, and from what.
    """

    def __init__(self, folder: Path, work: dict[str, str]) -> None:
        self.folder, self._notes = folder, folder / _NOTES
        if begun(folder) == work:
            return
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        self._write("work", work)

    def finished(self, name: str) -> Any:
        """What `finish` was given for a file, or None if the file must be written: its hash is compared."""
        note = _read(self.folder, name)
        if note is None or not (self.folder / name).is_file():
            return None
        return note["more"] if note["file"] == hash_files(self.folder, [name])[name] else None

    def finish(self, name: str, more: Any = True) -> None:
        """Note that a file is complete and on disk. more: anything of JSON but null."""
        self._write(name, {"file": hash_files(self.folder, [name])[name], "more": more})

    def hash_of(self, name: str) -> Any:
        """Size and SHA-256 of a file, as noted by `finish` or else computed."""
        note = _read(self.folder, name)
        return hash_files(self.folder, [name])[name] if note is None else note["file"]

    def close(self) -> None:
        """Remove the notes, when the folder is complete."""
        shutil.rmtree(self._notes)

    def _write(self, name: str, content: Any) -> None:
        write_durably(_note(self.folder, name), json.dumps(content))


def begun(folder: Path) -> dict[str, str]:
    """What an unfinished folder is being written from: the `work` of its `Journal`, or empty without a journal."""
    found = _read(folder, "work")
    return found if isinstance(found, dict) else {}


def _note(folder: Path, name: str) -> Path:
    return folder / _NOTES / f"{name}.json"


def _read(folder: Path, name: str) -> Any:
    try:
        return json.loads(_note(folder, name).read_text(encoding="utf-8"))
    except (OSError, ValueError):  # absent or damaged: the file is written again
        return None
