"""Check that a data set contains what its manifest says, for `prepare_data.py verify` and the training driver's start.

Every call reads and hashes every byte (about a second for 10^9 bytes). It does not use sizes and times to skip files
that passed before: a write through a memory map updates the times late, and `touch -d` sets them to any value.
"""

from __future__ import annotations

import hashlib
import os

from megablocks.data.indexed import DataError, Report, check_dataset
from megablocks.data.manifest import Manifest, read_manifest
from megablocks.data.tokenizers import NEEDS_TRUST
from megablocks.files import sha256_of


def verify_folder(folder: str | os.PathLike[str], trust_remote_code: bool = False) -> tuple[Manifest, list[str]]:
    """Check a prepared folder against its manifest. Returns the manifest and one line for each check that passed.

    Raises DataError, which names the first file that is wrong, or a tokenizer with Python code that
    `trust_remote_code` does not allow.
    """
    manifest = read_manifest(folder)
    if manifest.tokenizer_runs_code and not trust_remote_code:
        raise DataError(f"{manifest.tokenizer_path}: {NEEDS_TRUST}")
    done = [f"manifest.json: format, checksum, fingerprint {manifest.fingerprint[:16]}"]
    for name, entry in manifest.files.items():
        path = manifest.folder / name
        if not path.is_file():
            raise DataError(f"{path}: missing, but the manifest lists it")
        size = path.stat().st_size
        if size != entry["bytes"]:
            raise DataError(f"{path}: truncated or edited: {size} bytes, but the manifest says {entry['bytes']}")
    hashes: dict[str, str] = {}
    for split, counts in manifest.splits.items():
        report = check_dataset(manifest.prefix(split), manifest.vocab_size)
        hashes |= report.sha256
        expected = {**counts, "dtype": manifest.dtype}
        for key, found in (("documents", report.documents), ("tokens", report.tokens), ("dtype", report.dtype)):
            if found != expected[key]:
                raise DataError(f"{manifest.prefix(split)}.idx: {key}={found}, but the manifest says {expected[key]}")
        done.append(
            f"{split}.bin, {split}.idx: {report.documents:,} documents, {report.tokens:,} tokens as {report.dtype}, "
            f"pointers and lengths, ids below {manifest.vocab_size:,}"
        )
    for name, entry in manifest.files.items():
        path = manifest.folder / name
        if (hashes.get(name) or sha256_of(path)) != entry["sha256"]:
            raise DataError(f"{path}: SHA-256 differs from the manifest: the file was edited or damaged")
    done.append(f"size and SHA-256 of {len(manifest.files)} files")
    return manifest, done


def prefix_fingerprint(reports: list[Report]) -> str:
    """Return the identity of data sets without a manifest: a hash of their files' hashes in order, without names."""
    lines = [digest for report in reports for _, digest in sorted(report.sha256.items())]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
