"""Documents out of folders, text files, jsonl and tar archives, in an order that depends on nothing but their names.

A source is read in passes: `entries` lists the documents (key, bytes), `read` yields the raw bytes of those asked for.
An archive is streamed each time, so nothing is unpacked to the disk. Keys are paths relative to the input, hence
equal on every machine; the held-out split and the choice of a subset go by their hashes.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import lzma
import sysconfig
import tarfile
import zlib
from collections.abc import Iterator, Set
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from megablocks.config import ConfigError
from megablocks.data.indexed import DataError

STDLIB = "stdlib"
_ARCHIVES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".txz")
# Test suites are half of the standard library's bytes, mostly tables of literals, and Debian ships Python without them.
_STDLIB_SKIP = ("test", "tests", "idle_test", "site-packages", "dist-packages")


@dataclass(frozen=True, slots=True)
class Entry:
    """One document: its key, and its size in bytes as it lies in the source."""

    key: str
    size: int


class FolderSource:
    """Every file below a folder, sorted by path; hidden files and folders are left out."""

    def __init__(self, root: Path, name: str, skip: tuple[str, ...] = ()) -> None:
        self.root, self.name, self._skip = root, name, set(skip)

    def entries(self) -> Iterator[Entry]:
        found = []
        for path in self.root.rglob("*"):
            key = path.relative_to(self.root)
            if any(part.startswith(".") or part in self._skip for part in key.parts):
                continue
            if path.is_file() and not path.is_symlink():
                found.append(Entry(key.as_posix(), path.stat().st_size))
        yield from sorted(found, key=lambda entry: entry.key)

    def read(self, wanted: Set[str]) -> Iterator[tuple[str, bytes]]:
        for key in sorted(wanted):
            yield key, (self.root / key).read_bytes()

    def text(self, key: str, raw: bytes) -> str:
        return _decode(raw)


class TarSource:
    """The regular files of a tar archive, compressed or not, in the archive's order."""

    def __init__(self, path: Path) -> None:
        self.path, self.name = path, path.name

    def _members(self) -> Iterator[tuple[tarfile.TarFile, tarfile.TarInfo]]:
        try:
            with tarfile.open(self.path, "r|*") as archive:
                for member in archive:
                    if member.isfile():
                        yield archive, member
        except (tarfile.TarError, EOFError, lzma.LZMAError, zlib.error) as error:
            raise DataError(f"{self.path}: not a whole tar archive ({str(error).splitlines()[0]})") from None

    def entries(self) -> Iterator[Entry]:
        for _, member in self._members():
            yield Entry(PurePosixPath(member.name).as_posix(), member.size)

    def read(self, wanted: Set[str]) -> Iterator[tuple[str, bytes]]:
        for archive, member in self._members():
            key = PurePosixPath(member.name).as_posix()
            if key in wanted:
                stream = archive.extractfile(member)
                assert stream is not None, "a regular file has contents"
                yield key, stream.read()

    def text(self, key: str, raw: bytes) -> str:
        return _decode(raw)


class JsonlSource:
    """One document a line, the text under `field`."""

    def __init__(self, path: Path, field: str) -> None:
        self.path, self.name, self.field = path, path.name, field

    def _lines(self) -> Iterator[tuple[str, bytes]]:
        with open(self.path, "rb") as stream:
            for number, line in enumerate(stream, 1):
                if line.strip():
                    yield f"{self.name}:{number}", line

    def entries(self) -> Iterator[Entry]:
        for key, line in self._lines():
            yield Entry(key, len(line))

    def read(self, wanted: Set[str]) -> Iterator[tuple[str, bytes]]:
        for key, line in self._lines():
            if key in wanted:
                yield key, line

    def text(self, key: str, raw: bytes) -> str:
        try:
            record = json.loads(raw)
        except (UnicodeDecodeError, json.JSONDecodeError) as error:
            raise DataError(f"{self.path}: line {key.rpartition(':')[2]}: not valid JSON ({error})") from None
        value = record.get(self.field) if isinstance(record, dict) else None
        if not isinstance(value, str):
            raise DataError(f"{self.path}: line {key.rpartition(':')[2]}: no text under the field {self.field!r}")
        return value


class FileSource:
    """One text file, one document."""

    def __init__(self, path: Path) -> None:
        self.path, self.name = path, path.name

    def entries(self) -> Iterator[Entry]:
        yield Entry(self.name, self.path.stat().st_size)

    def read(self, wanted: Set[str]) -> Iterator[tuple[str, bytes]]:
        if self.name in wanted:
            yield self.name, self.path.read_bytes()

    def text(self, key: str, raw: bytes) -> str:
        return _decode(raw)


Source = FolderSource | TarSource | JsonlSource | FileSource


def open_source(text: str, jsonl_field: str) -> Source:
    """The source that an `--input` names: the word stdlib, a folder, a .jsonl, a tar archive or a text file."""
    if text == STDLIB:
        return FolderSource(Path(sysconfig.get_path("stdlib")), STDLIB, _STDLIB_SKIP)
    path = Path(text)
    if path.is_dir():
        return FolderSource(path, path.resolve().name)
    if not path.is_file():
        raise ConfigError(f"--input={text!r}: must be the word {STDLIB}, a folder or a file, and no such path exists")
    if path.name.endswith(_ARCHIVES):
        return TarSource(path)
    if path.suffix in (".jsonl", ".ndjson"):
        return JsonlSource(path, jsonl_field)
    return FileSource(path)


def is_text(raw: bytes) -> bool:
    """Whether the bytes hold no NUL, which no text encoding of source code has and nearly every binary has."""
    return b"\0" not in raw


def _decode(raw: bytes) -> str:
    # Old sources hold a few names in Latin-1; every byte is a letter there, so nothing is lost or replaced.
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return raw.decode("latin-1")


def matches(key: str, include: list[str], exclude: list[str]) -> bool:
    """Shell patterns against the whole key; `*` also matches `/`."""
    if include and not any(fnmatch.fnmatchcase(key, pattern) for pattern in include):
        return False
    return not any(fnmatch.fnmatchcase(key, pattern) for pattern in exclude)


def rank(key: str, purpose: str) -> float:
    """A number in [0, 1) from the key's hash: the same everywhere, independent between purposes."""
    digest = hashlib.sha256(f"{purpose}\0{key}".encode("utf-8", "surrogateescape")).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def choose(entries: list[Entry], max_documents: int | None, max_bytes: int | None) -> list[Entry]:
    """The documents with the lowest hashes until a limit is met, in their original order.

    A smaller limit thus gives a subset of a larger one, whatever the order of the source.
    """
    if max_documents is None and max_bytes is None:
        return entries
    kept: set[str] = set()
    total = 0
    for entry in sorted(entries, key=lambda entry: (rank(entry.key, "subset"), entry.key)):
        over = max_bytes is not None and total + entry.size > max_bytes
        if over or (max_documents is not None and len(kept) >= max_documents):
            break
        kept.add(entry.key)
        total += entry.size
    return [entry for entry in entries if entry.key in kept]


def held_out(entries: list[Entry], fraction: float) -> set[str]:
    """Keys of the validation split: those whose hash falls below `fraction`, at least one and never all."""
    ranked = sorted(entries, key=lambda entry: (rank(entry.key, "split"), entry.key))
    count = sum(rank(entry.key, "split") < fraction for entry in ranked)
    return {entry.key for entry in ranked[: min(max(count, 1), len(ranked) - 1)]}
