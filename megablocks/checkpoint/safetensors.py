"""Read and write folders of safetensors files, block by block: only one block is in memory.

A file contains the length of its header (8 bytes), the header in JSON, and the tensors' bytes in the header's order.
A folder contains model.safetensors, or several files and model.safetensors.index.json, which names each tensor's file.
If it contains both, model.safetensors is read, as in transformers.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megablocks.checkpoint.atomic import CheckpointError
from megablocks.checkpoint.journal import Journal
from megablocks.checkpoint.layout import Block, Stored

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD_BYTES = 5 * 10**9
"""A file is closed before it exceeds this size; only a file with a single tensor can be larger."""

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class _Entry(NamedTuple):
    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int


class SafetensorsFolder:
    """The tensors of a folder, a `layout.Source`.

    Raises CheckpointError, which names the file, if one is missing, truncated or not a safetensors file.
    """

    def __init__(self, folder: Path) -> None:
        self.entries: dict[str, _Entry] = {}
        for file, names in _files_of(folder).items():
            found = _read_header(file)
            if names is not None and (different := names ^ found.keys()):
                where = INDEX if names - found.keys() else file.name
                raise CheckpointError(
                    f"{folder}: {min(different)}: only {where} has it; {file.name} and {INDEX} differ"
                )
            self.entries |= found

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: entry.shape for name, entry in self.entries.items()}

    def dtype(self, name: str) -> torch.dtype:
        return self.entries[name].dtype

    def read_block(self, stored: Stored, block: Block) -> Tensor:
        number = stored.blocks.index(block)
        return self.read(stored.name, number * math.prod(stored.block_shape), stored.block_shape)

    def read(self, name: str, first: int, shape: Sequence[int]) -> Tensor:
        """Return values of shape `shape`, which follow the first `first` values of a tensor."""
        entry = self.entries[name]
        data = bytearray(math.prod(shape) * entry.dtype.itemsize)
        with open(entry.file, "rb") as file:
            file.seek(entry.start + first * entry.dtype.itemsize)
            if file.readinto(data) != len(data):
                raise CheckpointError(f"{entry.file}: ends within {name}")
        return torch.frombuffer(data, dtype=entry.dtype).view(*shape)


def _files_of(folder: Path) -> Mapping[Path, set[str] | None]:
    """Return each file of a folder with the names that it must contain; None for the one file of `WHOLE`."""
    whole, index = folder / WHOLE, folder / INDEX
    if whole.is_file():
        return {whole: None}
    if not index.is_file():
        raise CheckpointError(f"{folder}: holds neither {WHOLE} nor {INDEX}")
    try:
        weight_map = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
        weight_map = {name: folder / file for name, file in weight_map.items()}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{index}: damaged ({error})") from None
    files: dict[Path, set[str]] = {}
    for name, file in weight_map.items():
        files.setdefault(file, set()).add(name)
    for path in files:
        if path.parent != folder or not path.is_file():
            raise CheckpointError(f"{path}: missing; {INDEX} names it")
    return files


def _read_header(path: Path) -> dict[str, _Entry]:
    """Return a file's tensors by name. Raises CheckpointError for a header that does not describe the whole file."""
    size = path.stat().st_size
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > size - 8:
                raise ValueError(f"it ends within its header of {length} bytes")
            header: dict[str, Any] = json.loads(file.read(length))
        header.pop("__metadata__", None)
        entries, spans = {}, []
        for name, tensor in header.items():
            if tensor["dtype"] not in _DTYPES:
                raise ValueError(f"{name} has dtype {tensor['dtype']}; known are {', '.join(_DTYPES)}")
            first, last = tensor["data_offsets"]
            dtype, shape = _DTYPES[tensor["dtype"]], tuple(tensor["shape"])
            if not all(type(number) is int and number >= 0 for number in (first, last, *shape)):
                raise ValueError(f"{name} has shape {list(shape)} and offsets {[first, last]}, not all of them sizes")
            if last - first != math.prod(shape) * dtype.itemsize:
                raise ValueError(f"{name} has {last - first} bytes, but another shape: {list(shape)}")
            entries[name] = _Entry(path, dtype, shape, 8 + length + first)
            spans.append((first, last, name))
        end = 0
        for first, last, name in sorted(spans):
            if first != end:
                raise ValueError(f"{name} starts at byte {first}, but the tensor before it ends at {end}")
            end = last
        if 8 + length + end != size:
            raise ValueError(f"it has {size} bytes, but its header describes {8 + length + end}")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path}: no whole safetensors file: {error}") from None
    return entries


class NewTensor(NamedTuple):
    """A tensor to write. blocks: returns its values in order, one part after another."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    blocks: Callable[[], Iterable[Tensor]]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write_folder(
    journal: Journal, tensors: Iterable[NewTensor], shard_bytes: int, skipped: Callable[[int], None]
) -> None:
    """Write the tensors into the journal's folder, in files of at most `shard_bytes`; several files get an index.

    Args:
        journal: a file that it lists as finished is not written. skipped: called with the bytes of such a file.
    """
    shards: list[list[NewTensor]] = []
    room = 0
    for tensor in tensors:
        if not shards or tensor.nbytes > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(tensor)
        room -= tensor.nbytes
    one = len(shards) == 1
    names = [WHOLE if one else f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    for name, shard in zip(names, shards, strict=True):
        if journal.finished(name):
            skipped(sum(tensor.nbytes for tensor in shard))
            continue
        _write_file(journal.folder / name, shard)
        journal.finish(name)
    if not one:
        total = sum(tensor.nbytes for shard in shards for tensor in shard)
        weight_map = {tensor.name: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        content = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (journal.folder / INDEX).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _write_file(path: Path, tensors: list[NewTensor]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        header[tensor.name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [end, end + tensor.nbytes],
        }
        end += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the format requires aligned data
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            before = file.tell()
            for block in tensor.blocks():
                assert block.dtype == tensor.dtype, tensor.name
                file.write(block.contiguous().flatten().view(torch.uint8).numpy().data)
            assert file.tell() - before == tensor.nbytes, tensor.name
        file.flush()
        os.fsync(file.fileno())
