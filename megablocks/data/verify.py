"""Does a data set hold what it says? The checks of `prepare_data.py verify` and of the training driver's start.

Every byte is read and hashed each time (about a second for 10^9 bytes). Remembering that a file passed, by its size
and times, was considered and left out: a page written through a memory map updates the times late, and `touch -d`
sets them at will, so an edit in place could pass.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from megablocks.data.indexed import DataError, Report, check_dataset, sha256_of
from megablocks.data.manifest import Manifest, read_manifest


def verify_folder(folder: str | os.PathLike[str]) -> tuple[Manifest, list[str]]:
    """Check a prepared folder against its manifest; returns the manifest and one line for each thing checked.

    Raises:
        DataError: the first thing that is wrong, in one line that names the file.
    """
    manifest = read_manifest(folder)
    done = [f"manifest.json: format, checksum, fingerprint {manifest.fingerprint[:16]}"]
    for name, entry in manifest.files.items():
        path = manifest.folder / name
        if not path.is_file():
            raise DataError(f"{path}: missing, the manifest lists it")
        size = path.stat().st_size
        if size != entry["bytes"]:
            raise DataError(f"{path}: truncated or edited: {size} bytes, the manifest says {entry['bytes']}")
    hashes: dict[str, str] = {}
    for split, counts in manifest.splits.items():
        report = check_dataset(manifest.prefix(split), manifest.vocab_size)
        hashes |= report.sha256
        for key, found in (("documents", report.documents), ("tokens", report.tokens)):
            if found != counts[key]:
                raise DataError(f"{manifest.folder / split}.idx: {found} {key}, the manifest says {counts[key]}")
        if report.dtype != manifest.dtype:
            raise DataError(f"{manifest.folder / split}.idx: dtype {report.dtype}, the manifest says {manifest.dtype}")
        done.append(
            f"{split}.bin, {split}.idx: {report.documents:,} documents, {report.tokens:,} tokens as {report.dtype}, "
            f"pointers and lengths, ids below {manifest.vocab_size:,}"
        )
    for name, entry in manifest.files.items():
        if hashes.get(name) is None:
            hashes[name] = sha256_of(manifest.folder / name)
        if hashes[name] != entry["sha256"]:
            raise DataError(f"{manifest.folder / name}: SHA-256 differs from the manifest's: it was edited or damaged")
    done.append(f"size and SHA-256 of {len(manifest.files)} files")
    return manifest, done


def verify_prefix(prefix: str | os.PathLike[str], vocab_size: int | None = None) -> Report:
    """The structural checks alone, for a `.bin/.idx` pair that no manifest describes."""
    return check_dataset(Path(prefix), vocab_size)


def prefix_fingerprint(reports: list[Report]) -> str:
    """The identity of data sets without a manifest: their files' hashes in the order given, whatever their names."""
    lines = [digest for report in reports for _, digest in sorted(report.sha256.items())]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
