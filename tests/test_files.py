"""Files that a crash leaves whole or absent."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megablocks import files
from megablocks.files import write_durably


def test_a_rename_is_flushed_to_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[tuple[Path, bool]] = []
    monkeypatch.setattr(files, "sync", lambda path: synced.append((path, (tmp_path / "new").exists())))
    write_durably(tmp_path / "new", "text")
    assert synced == [(tmp_path, True)]


def test_a_text_may_name_a_file_of_another_encoding(tmp_path: Path) -> None:
    """env.txt has the run's folder. A run in a folder with a Latin-1 name ended in a traceback."""
    name = b"caf\xe9"
    write_durably(tmp_path / "env.txt", f"folder: {os.fsdecode(name)}\n")
    assert (tmp_path / "env.txt").read_bytes() == b"folder: caf\xe9\n"
