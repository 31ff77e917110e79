"""`manifest.json`: what a prepared folder says about itself, written last, so that its presence means completeness."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from megablocks.data.indexed import DataError

NAME = "manifest.json"
FORMAT = 1
# What decides which tokens a model sees: two folders with equal values of these are the same data set,
# whichever machine and package versions prepared them.
_IDENTITY = ("format", "files", "splits", "dtype", "vocab_size", "eod", "tokenizer")
_TYPES: dict[str, type] = {
    "format": int,
    "files": dict,
    "splits": dict,
    "dtype": str,
    "vocab_size": int,
    "eod": int,
    "tokenizer": dict,
    "unigram": dict,
    "source": dict,
    "recipe": dict,
    "versions": dict,
    "fingerprint": str,
    "checksum": str,
}


@dataclass(frozen=True)
class Manifest:
    """A manifest that was read and is consistent with itself; the files it names are not yet looked at."""

    folder: Path
    files: dict[str, dict[str, Any]]
    splits: dict[str, dict[str, int]]
    dtype: str
    vocab_size: int
    eod: int
    tokenizer_type: str
    tokenizer_path: Path
    unigram: dict[str, float]
    fingerprint: str

    def prefix(self, split: str) -> Path:
        """Path of a split's data set without the .bin/.idx ending."""
        return self.folder / split


def write_manifest(folder: Path, content: dict[str, Any]) -> str:
    """Complete `content` with its fingerprint and checksum and write it durably. Returns the fingerprint."""
    content = {"format": FORMAT, **content}
    content["fingerprint"] = _digest({key: content[key] for key in _IDENTITY})
    content["checksum"] = _digest(content)
    temporary = folder / f".{NAME}.partial"
    with open(temporary, "w", encoding="utf-8") as stream:
        json.dump(content, stream, indent=1, sort_keys=True)
        stream.write("\n")
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(temporary, folder / NAME)
    sync_folder(folder)
    return content["fingerprint"]


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable: a rename alone may be lost with the power."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_manifest(folder: str | os.PathLike[str]) -> Manifest:
    """Read `folder/manifest.json`.

    Raises:
        DataError: no folder, no manifest (the preparation was interrupted, or this is something else), or a manifest
            that is no JSON, of another format, edited, or that names files outside its folder.
    """
    root = Path(folder)
    path = root / NAME
    if not root.is_dir():
        raise DataError(f"{root}: no such data folder; scripts/prepare_data.py makes one")
    if not path.is_file():
        raise DataError(f"{path}: missing: not a prepared data set, or one whose preparation was interrupted")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise DataError(f"{path}: not valid JSON ({str(error).splitlines()[0]})") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        found = content.get("format") if isinstance(content, dict) else type(content).__name__
        raise DataError(f"{path}: format {found!r}, this version reads format {FORMAT}")
    for key, kind in _TYPES.items():
        if not isinstance(content.get(key), kind):
            raise DataError(f"{path}: {key!r} is missing or no {kind.__name__}")
    rest = {key: value for key, value in content.items() if key != "checksum"}
    fingerprint = _digest({key: content[key] for key in _IDENTITY})
    if content["checksum"] != _digest(rest) or content["fingerprint"] != fingerprint:
        raise DataError(f"{path}: its contents do not match its checksum: it was edited or damaged")
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
        unigram=content["unigram"],
        fingerprint=fingerprint,
    )


def fingerprint(folder: str | os.PathLike[str]) -> str:
    """The identity of a prepared data set: files, splits, vocabulary and tokenizer, in 64 hexadecimal digits.

    A checkpoint keeps it, and a resumed run compares. It trusts the manifest; `verify_folder` compares the manifest
    with the files.
    """
    return read_manifest(folder).fingerprint


def _check_inside(path: Path, root: Path, name: str) -> None:
    parts = PurePosixPath(name)
    escapes = parts.is_absolute() or ".." in parts.parts or not parts.parts
    if escapes or not (root / name).resolve().is_relative_to(root.resolve()):
        raise DataError(f"{path}: names the file {name!r}, which lies outside the folder")


def _digest(value: Any) -> str:
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()
