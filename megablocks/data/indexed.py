"""Megatron's indexed data set: `<prefix>.bin` (token ids) and `<prefix>.idx` (where each sequence starts).

    .idx   magic (9 bytes) · version u64 = 1 · dtype code u8 · S u64 · D+1 u64
           lengths i32 (S) · pointers i64 (S), bytes into .bin · documents i64 (D+1), the first sequence of each, then S

S sequences, D documents; little-endian. We write one sequence for each document. Our writer needs only numpy. Our
reader checks the file, which Megatron's does not: with mmap off it returns uninitialized memory for a truncated .bin,
and it never checks the pointers. Source: megatron.core.datasets.indexed_dataset (0.19.2).
"""

from __future__ import annotations

import hashlib
import math
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megablocks.files import sha256_of, sync, write_durably

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
_CODES = {name: code for code, name in DTYPES.items()}
_CHUNK = 1 << 24


class DataError(ValueError):
    """A data file is missing or invalid. The message is one line that names the file."""


def token_dtype(vocab_size: int) -> np.dtype:
    """Return the dtype that Megatron uses for a vocabulary: uint16 below 65500 ids, otherwise int32."""
    return np.dtype("<u2") if vocab_size < 65500 else np.dtype("<i4")


def bin_path(prefix: str | Path) -> Path:
    return Path(f"{prefix}.bin")


def idx_path(prefix: str | Path) -> Path:
    return Path(f"{prefix}.idx")


class IndexedWriter:
    """Writes one data set. `add` appends a document; `close` writes the index and flushes both files to disk."""

    def __init__(self, prefix: str | Path, dtype: np.dtype) -> None:
        self.prefix = prefix
        self.dtype = np.dtype(dtype)
        self.lengths: list[int] = []
        self._bin = open(bin_path(prefix), "wb")

    def add(self, tokens: np.ndarray) -> None:
        """Append one document, `tokens` (n,) of any integer dtype; the values must fit."""
        self._bin.write(np.ascontiguousarray(tokens, dtype=self.dtype).tobytes())
        self.lengths.append(int(tokens.size))

    def close(self) -> None:
        """Flush the .bin to disk, then write the .idx: if it exists, both files are complete."""
        self._bin.close()
        sync(bin_path(self.prefix))
        lengths = np.asarray(self.lengths, dtype="<i4")
        header = HEADER.pack(MAGIC, VERSION, _CODES[self.dtype.name], lengths.size, lengths.size + 1)
        arrays = lengths, _starts(lengths, self.dtype.itemsize), np.arange(lengths.size + 1, dtype="<i8")
        write_durably(idx_path(self.prefix), b"".join((header, *arrays)))


def _starts(lengths: np.ndarray, itemsize: int) -> np.ndarray:
    """Return the byte offset (S,) of each sequence. There are no gaps, because Megatron writes no other layout."""
    starts = np.zeros(lengths.size, dtype="<i8")
    np.cumsum(lengths[:-1], dtype=np.int64, out=starts[1:])
    return starts * itemsize


@dataclass(frozen=True)
class Index:
    """A valid `.idx`: dtype of the tokens, lengths (S,) int32 in tokens, documents (D+1,) int64."""

    dtype: np.dtype
    lengths: np.ndarray
    documents: np.ndarray

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum(dtype=np.int64))


@dataclass(frozen=True)
class Report:
    """The result of a full pass over one data set: counts, and the SHA-256 of both files."""

    documents: int
    tokens: int
    dtype: str
    sha256: dict[str, str]


def read_index(prefix: str | Path) -> Index:
    """Read the index in `<prefix>.idx`, and check its structure and the size of `<prefix>.bin`.

    Raises:
        DataError: the index is missing, truncated or garbled; its version or dtype is unknown; a length is negative;
            the pointers are not the running sum of the lengths; or .bin is shorter or longer than the index says.
    """
    path, data = idx_path(prefix), bin_path(prefix)
    for file in (path, data):
        if not file.is_file():
            raise DataError(f"{file}: no such file")
    raw = path.read_bytes()
    if len(raw) < HEADER.size:
        raise DataError(f"{path}: truncated: {len(raw)} bytes, but the header has {HEADER.size}")
    magic, version, code, sequences, boundaries = HEADER.unpack_from(raw)
    if magic != MAGIC:
        raise DataError(f"{path}: not a Megatron index: it starts with {magic!r} instead of {MAGIC!r}")
    if version != VERSION:
        raise DataError(f"{path}: index version {version}, must be {VERSION}")
    if code not in DTYPES:
        raise DataError(f"{path}: token dtype code {code}, must be one of {', '.join(map(str, DTYPES))}")
    expected = HEADER.size + 12 * sequences + 8 * boundaries
    if len(raw) != expected:
        kind = "truncated" if len(raw) < expected else "garbled"
        raise DataError(f"{path}: {kind}: {len(raw)} bytes, but {sequences} sequences need {expected}")
    dtype = np.dtype(DTYPES[code])
    lengths = np.frombuffer(raw, "<i4", sequences, HEADER.size)
    pointers = np.frombuffer(raw, "<i8", sequences, HEADER.size + 4 * sequences)
    documents = np.frombuffer(raw, "<i8", boundaries, HEADER.size + 12 * sequences)
    if sequences and int(lengths.min()) < 0:
        at = int(lengths.argmin())
        raise DataError(f"{path}: sequence {at} has the negative length {int(lengths[at])}")
    wrong = np.flatnonzero(pointers != _starts(lengths, dtype.itemsize))
    if wrong.size:
        at = int(wrong[0])
        raise DataError(
            f"{path}: the pointer of sequence {at} is {int(pointers[at])}, "
            f"but the lengths before it give {int(_starts(lengths, dtype.itemsize)[at])}"
        )
    ends = boundaries and documents[0] == 0 and documents[-1] == sequences
    if not ends or np.any(np.diff(documents) < 0):
        raise DataError(f"{path}: document boundaries must rise from 0 to {sequences}, the number of sequences")
    index = Index(dtype, lengths, documents)
    have, need = data.stat().st_size, index.tokens * dtype.itemsize
    if have != need:
        kind = "truncated" if have < need else "longer than its index"
        raise DataError(f"{data}: {kind}: {have} bytes, but {path.name} describes {need}")
    return index


def check_dataset(prefix: str | Path, vocab_size: int | None = None) -> Report:
    """Return counts and hashes of one data set, after the checks of `read_index` and the check ids < `vocab_size`.

    Raises:
        DataError: as `read_index`, and for an empty data set or a token id outside the vocabulary.
    """
    index = read_index(prefix)
    path = bin_path(prefix)
    if not index.tokens:
        raise DataError(f"{path}: holds no tokens")
    digest, position, limit = hashlib.sha256(), 0, math.inf if vocab_size is None else vocab_size
    with open(path, "rb") as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
            ids = np.frombuffer(chunk, index.dtype)
            low, high = int(ids.min()), int(ids.max())
            if low < 0 or high >= limit:
                at = int(np.flatnonzero((ids < 0) | (ids >= limit))[0])
                raise DataError(f"{path}: token {position + at} has the id {int(ids[at])}, must be in [0, {limit})")
            position += ids.size
    hashes = {path.name: digest.hexdigest(), idx_path(prefix).name: sha256_of(idx_path(prefix))}
    return Report(index.documents.size - 1, index.tokens, index.dtype.name, hashes)
