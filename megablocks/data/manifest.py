"""`manifest.json` describes a prepared folder. It is written last, so a folder that has one is complete."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from megablocks.data.indexed import DataError
from megablocks.files import write_durably

NAME = "manifest.json"
FORMAT = 1
# These values decide which tokens a model sees. Folders in which they are equal are the same data set, even if
# different machines or package versions made them.
_IDENTITY = ("format", "files", "splits", "dtype", "vocab_size", "eod", "tokenizer")
_TYPES: dict[str, type] = {
    **dict.fromkeys(("files", "splits", "tokenizer", "unigram", "source", "recipe", "versions"), dict),
    **dict.fromkeys(("format", "vocab_size", "eod"), int),
    **dict.fromkeys(("dtype", "fingerprint", "checksum"), str),
}


@dataclass(frozen=True)
class Manifest:
    """A manifest with a correct checksum. The files that it names are not checked yet.

    fingerprint: the identity of the data (files, splits, vocabulary, tokenizer) in 64 hexadecimal digits. A checkpoint
    stores it, and a resumed run compares it.
    """

    folder: Path
    files: dict[str, dict[str, Any]]
    splits: dict[str, dict[str, int]]
    dtype: str
    vocab_size: int
    eod: int
    tokenizer_type: str
    tokenizer_path: Path
    tokenizer_runs_code: bool
    unigram: dict[str, float]
    fingerprint: str

    def prefix(self, split: str) -> Path:
        """Path of a split's data set without the .bin/.idx ending."""
        return self.folder / split


def write_manifest(folder: Path, content: dict[str, Any]) -> str:
    """Add the fingerprint and the checksum to `content`, and write it to disk. Returns the fingerprint."""
    content = {"format": FORMAT, **content}
    content["fingerprint"] = _digest({key: content[key] for key in _IDENTITY})
    content["checksum"] = _digest(content)
    write_durably(folder / NAME, json.dumps(content, indent=1, sort_keys=True) + "\n")
    return content["fingerprint"]


def read_manifest(folder: str | os.PathLike[str]) -> Manifest:
    """Read and check the manifest in `folder/manifest.json`.

    Raises:
        DataError: the folder or the manifest is missing (the preparation was interrupted, or this is no data set); or
            the manifest is not JSON, has another format, was edited, or names files outside its folder.
    """
    if not os.fspath(folder):
        raise DataError("'' is no data folder; give its path, . for the current folder")
    root = Path(folder)
    path = root / NAME
    if not root.is_dir():
        raise DataError(f"{root}: no such data folder: make one with scripts/prepare_data.py")
    if not path.is_file():
        raise DataError(f"{path}: missing: this is no data set, or its preparation was interrupted")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # json raises more than its own error class
        raise DataError(f"{path}: not valid JSON ({str(error).splitlines()[0]})") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        found = content.get("format") if isinstance(content, dict) else type(content).__name__
        raise DataError(f"{path}: format {found!r}, must be {FORMAT}")
    for key, kind in _TYPES.items():
        if not isinstance(content.get(key), kind):
            raise DataError(f"{path}: {key!r} is missing or is no {kind.__name__}")
    rest = {key: value for key, value in content.items() if key != "checksum"}
    fingerprint = _digest({key: content[key] for key in _IDENTITY})
    if content["checksum"] != _digest(rest) or content["fingerprint"] != fingerprint:
        raise DataError(f"{path}: the contents do not match the checksum: the file was edited or damaged")
    for name in (*content["files"], content["tokenizer"]["path"]):
        _check_inside(path, root, name)
    return Manifest(
        folder=root,
        files=content["files"],
        splits=content["splits"],
        dtype=content["dtype"],
        vocab_size=content["vocab_size"],
        eod=content["eod"],
        tokenizer_type=content["tokenizer"]["type"],
        tokenizer_path=root / content["tokenizer"]["path"],
        tokenizer_runs_code=content["tokenizer"].get("runs_code", False),
        unigram=content["unigram"],
        fingerprint=fingerprint,
    )


def _check_inside(path: Path, root: Path, name: str) -> None:
    parts = PurePosixPath(name)
    escapes = parts.is_absolute() or ".." in parts.parts or not parts.parts
    if escapes or not (root / name).resolve().is_relative_to(root.resolve()):
        raise DataError(f"{path}: names the file {name!r}, which is outside the folder")


def _digest(value: Any) -> str:
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()
