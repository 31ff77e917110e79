"""Record which files of unfinished work are complete, so that the same command can continue where it stopped."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from megablocks.files import hash_files, write_durably

_NOTES = ".journal"


class Journal:
    """Notes on the complete files of a folder, one note per file, in a subfolder.

    Args:
        folder: it is created. If its notes describe other work, it is emptied first.
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
        """Return what `finish` stored for a file, or None if the file must be written. It compares the file's hash."""
        note = _read(self.folder, name)
        if note is None or not (self.folder / name).is_file():
            return None
        return note["more"] if note["file"] == hash_files(self.folder, [name])[name] else None

    def finish(self, name: str, more: Any = True) -> None:
        """Note that a file is complete and on disk. more: any JSON value except null."""
        self._write(name, {"file": hash_files(self.folder, [name])[name], "more": more})

    def hash_of(self, name: str) -> Any:
        """Return size and SHA-256 of a file, as noted by `finish`, or computed if there is no note."""
        note = _read(self.folder, name)
        return hash_files(self.folder, [name])[name] if note is None else note["file"]

    def close(self) -> None:
        """Remove the notes. Call it when the folder is complete."""
        shutil.rmtree(self._notes)

    def _write(self, name: str, content: Any) -> None:
        write_durably(_note(self.folder, name), json.dumps(content))


def begun(folder: Path) -> dict[str, str]:
    """Return the `work` of an unfinished folder's `Journal`, or an empty dict without a journal."""
    found = _read(folder, "work")
    return found if isinstance(found, dict) else {}


def _note(folder: Path, name: str) -> Path:
    return folder / _NOTES / f"{name}.json"


def _read(folder: Path, name: str) -> Any:
    try:
        return json.loads(_note(folder, name).read_text(encoding="utf-8"))
    except (OSError, ValueError):  # absent or damaged: the file is written again
        return None
