"""Read documents from folders, text files, jsonl files and tar archives, always in the same order.

`entries` lists the documents of a source (key, bytes); `read` yields the raw bytes of some of them. Each pass streams
an archive again, so nothing is unpacked to disk. Keys are paths relative to the input, so they are equal on every
machine. Their hashes decide which documents belong to a subset, and which are held out.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import lzma
import os
import sysconfig
import tarfile
import zlib
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from megablocks.config import ConfigError
from megablocks.data.indexed import DataError

STDLIB = "stdlib"
JSONL = (".jsonl", ".ndjson")
_ARCHIVES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".txz")
# Test suites are half of the standard library, mostly tables of literals, and Debian packages Python without them.
_STDLIB_SKIP = ("test", "tests", "idle_test", "site-packages", "dist-packages")


@dataclass(frozen=True, slots=True)
class Entry:
    """One document: its key, and its size in the source in bytes."""

    key: str
    size: int


class Source:
    """One text file, which is one document. The other sources override `_walk`."""

    def __init__(self, path: Path, name: str | None = None) -> None:
        self.path, self.name = path, path.name if name is None else name

    def _walk(self) -> Iterator[tuple[str, int, Callable[[], bytes]]]:
        """Yield each document's key, size and reader, in a fixed order. Call a reader before the next document."""
        yield self.name, self.path.stat().st_size, self.path.read_bytes

    def entries(self) -> Iterator[Entry]:
        """Yield the documents of the source, without their contents."""
        for key, size, _ in self._walk():
            yield Entry(key, size)

    def read(self, wanted: Set[str]) -> Iterator[tuple[str, bytes]]:
        """Yield key and contents of the wanted documents."""
        for key, _, contents in self._walk():
            if key in wanted:
                yield key, contents()

    def text(self, key: str, raw: bytes) -> str:
        """Decode the text of a document from its bytes."""
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:  # old sources contain names in Latin-1, where every byte is a character
            return raw.decode("latin-1")


class FolderSource(Source):
    """Every file below a folder, sorted by path, except hidden files and files in hidden folders."""

    def __init__(self, path: Path, name: str, skip: tuple[str, ...] = ()) -> None:
        super().__init__(path, name)
        self._skip = set(skip)

    def _is_read(self, name: str) -> bool:
        return not name.startswith(".") and name not in self._skip

    def _walk(self) -> Iterator[tuple[str, int, Callable[[], bytes]]]:
        def fail(error: OSError) -> None:  # otherwise os.walk leaves out a folder that it cannot read
            raise error

        found = []
        for folder, inner, names in os.walk(self.path, onerror=fail):
            inner[:] = filter(self._is_read, inner)
            for path in (Path(folder, name) for name in filter(self._is_read, names)):
                if path.is_file() and not path.is_symlink():
                    found.append((path.relative_to(self.path).as_posix(), path))
        for name, path in sorted(found):
            yield name, path.stat().st_size, path.read_bytes

    def read(self, wanted: Set[str]) -> Iterator[tuple[str, bytes]]:
        for key in sorted(wanted):  # no walk here: a file that is gone by now must be an error
            yield key, (self.path / key).read_bytes()


class _Member(tarfile.TarInfo):
    """A member of an archive. By itself, tarfile treats a truncated, damaged or missing header as the archive's end."""

    @classmethod
    def fromtarfile(cls, archive: tarfile.TarFile) -> Any:
        try:
            return super().fromtarfile(archive)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]  # the true end
            raise
        except tarfile.HeaderError as error:
            raise tarfile.ReadError(str(error)) from None


class TarSource(Source):
    """The regular files of a tar archive, compressed or not, in the order of the archive."""

    def _walk(self) -> Iterator[tuple[str, int, Callable[[], bytes]]]:
        try:
            with tarfile.open(self.path, tarinfo=_Member) as archive:
                for member in archive:
                    if member.isfile():
                        stream = archive.extractfile(member)
                        assert stream is not None, "a regular file has contents"
                        yield PurePosixPath(member.name).as_posix(), member.size, stream.read
        except (tarfile.TarError, EOFError, OSError, lzma.LZMAError, zlib.error) as error:
            if isinstance(error, OSError) and error.errno is not None:  # from the system; gzip and bz2 set no errno
                raise
            raise DataError(f"{self.path}: not a complete tar archive ({' '.join(str(error).split())})") from None


class JsonlSource(Source):
    """A file with one document per line, and its text under `field`."""

    def __init__(self, path: Path, field: str) -> None:
        super().__init__(path)
        self.field = field

    def _walk(self) -> Iterator[tuple[str, int, Callable[[], bytes]]]:
        with open(self.path, "rb") as stream:
            for number, line in enumerate(stream, 1):
                if line.strip():
                    yield f"{self.name}:{number}", len(line), partial(bytes, line)

    def text(self, key: str, raw: bytes) -> str:
        try:
            record = json.loads(raw)
        except (ValueError, RecursionError) as error:  # json raises more than its own error class
            raise DataError(f"{self.path}: line {key.rpartition(':')[2]}: not valid JSON ({error})") from None
        value = record.get(self.field) if isinstance(record, dict) else None
        if not isinstance(value, str):
            raise DataError(f"{self.path}: line {key.rpartition(':')[2]}: the field {self.field!r} holds no text")
        return value.encode("utf-8", "replace").decode("utf-8")  # the tokenizers refuse half a surrogate pair


def open_source(text: str, jsonl_field: str) -> Source:
    """Return the source for an `--input`: the word stdlib, a folder, a .jsonl file, a tar archive or a text file."""
    if text == STDLIB:
        return FolderSource(Path(sysconfig.get_path("stdlib")), STDLIB, _STDLIB_SKIP)
    path = Path(text)
    if path.is_dir():
        return FolderSource(path, path.resolve().name)
    if not path.is_file():
        raise ConfigError(f"--input={text!r}: must be the word {STDLIB}, or an existing folder or file")
    if path.name.endswith(_ARCHIVES):
        return TarSource(path)
    if path.suffix in JSONL:
        return JsonlSource(path, jsonl_field)
    with open(path, "rb") as file:
        if not is_text(file.read(1 << 20)):
            raise ConfigError(f"--input={text!r}: is no text, because it has NUL bytes; unpack or convert it first")
    return Source(path)


def is_text(raw: bytes) -> bool:
    """Return whether the bytes contain no NUL. Nearly every binary file has one, and UTF-8 or Latin-1 text has none."""
    return b"\0" not in raw


def matches(key: str, include: list[str], exclude: list[str]) -> bool:
    """Return whether a key matches an include and no exclude pattern: shell patterns, where `*` also matches `/`."""
    if include and not any(fnmatch.fnmatchcase(key, pattern) for pattern in include):
        return False
    return not any(fnmatch.fnmatchcase(key, pattern) for pattern in exclude)


def rank(key: str, purpose: str) -> float:
    """Return a number in [0, 1) from the hash of the key. It is equal on every machine; purposes are independent."""
    digest = hashlib.sha256(f"{purpose}\0{key}".encode("utf-8", "surrogateescape")).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def choose(entries: list[Entry], max_documents: int | None, max_bytes: int | None) -> list[Entry]:
    """Return the documents with the lowest hashes, up to a limit, in their original order.

    So a smaller limit selects a subset of what a larger limit selects.
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
    """Return the keys of the validation split: those with a hash below `fraction`, at least one and never all."""
    ranked = sorted(entries, key=lambda entry: (rank(entry.key, "split"), entry.key))
    count = sum(rank(entry.key, "split") < fraction for entry in ranked)
    return {entry.key for entry in ranked[: min(max(count, 1), len(ranked) - 1)]}
