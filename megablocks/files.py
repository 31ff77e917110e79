"""Write files so that a crash leaves them complete or absent, and hash files."""

import fcntl
import hashlib
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def exclusive(folder: Path, busy: Exception) -> Iterator[None]:
    """Lock the existing `folder` until the block or this process ends. Raises `busy` if it is locked already."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise busy from None
        yield
    finally:
        os.close(handle)


def write_durably(path: Path, data: str | bytes) -> None:
    """Write a temporary file next to `path`, flush it to disk, rename it to `path`, flush the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "wb") as file:
            file.write(data.encode(errors="surrogateescape") if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync(path.parent)


def sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk, so that a rename survives a power failure."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    digest, block = hashlib.sha256(), memoryview(bytearray(1 << 16))
    with open(path, "rb", buffering=0) as file:
        while size := file.readinto(block):
            digest.update(block[:size])
    return digest.hexdigest()


def hash_files(folder: Path, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return size and SHA-256 of the named files in a folder, by name."""
    return {name: {"bytes": (folder / name).stat().st_size, "sha256": sha256_of(folder / name)} for name in names}
