"""What a prepared folder refuses to be: truncated, edited, changed, or pointing outside itself."""

import dataclasses
import json
import os

import pytest

from megablocks.data.indexed import DataError, check_dataset
from megablocks.data.manifest import _digest, read_manifest
from megablocks.data.verify import prefix_fingerprint, verify_folder


def refusal(folder):
    with pytest.raises(DataError) as caught:
        verify_folder(folder)
    message = str(caught.value)
    assert "\n" not in message and str(folder) in message
    return message


def rewrite(folder, **changes):
    """Change the manifest and make it consistent with itself again, as somebody who means it would."""
    path = folder / "manifest.json"
    content = json.loads(path.read_text())
    content.update(changes)
    keys = ("format", "files", "splits", "dtype", "vocab_size", "eod", "tokenizer")
    content["fingerprint"] = _digest({key: content[key] for key in keys})
    content["checksum"] = _digest({key: value for key, value in content.items() if key != "checksum"})
    path.write_text(json.dumps(content))


def test_D1_truncated_bin_in_a_folder(folder):
    path = folder / "train.bin"
    path.write_bytes(path.read_bytes()[:-100])
    assert "train.bin: truncated or edited" in refusal(folder)


@pytest.mark.parametrize("name", ["train.bin", "train.idx", "valid.bin", "valid.idx", "tokenizer.model"])
def test_D1_one_edited_byte(folder, name):
    """Same size and, by os.utime, the same times: only the contents differ."""
    path = folder / name
    raw, times = bytearray(path.read_bytes()), path.stat()
    raw[len(raw) // 2 & ~1] ^= 1
    path.write_bytes(raw)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert f"{name}: " in refusal(folder)


def test_D2_wrong_version_in_a_folder(folder):
    path = folder / "valid.idx"
    raw = bytearray(path.read_bytes())
    raw[9] = 2
    path.write_bytes(raw)
    assert "valid.idx: index version 2" in refusal(folder)


def test_D3_vocabulary_smaller_than_the_tokens(folder):
    rewrite(folder, vocab_size=300)
    assert "must be in [0, 300)" in refusal(folder)


@pytest.mark.parametrize("name", ["train.bin", "valid.idx", "tokenizer.model"])
def test_D4_missing_file(folder, name):
    (folder / name).unlink()
    assert f"{name}: missing, but the manifest lists it" in refusal(folder)


def test_D5_fingerprint_changes_with_the_data_and_not_with_the_versions(folder, prepared):
    before = read_manifest(folder).fingerprint
    assert before == read_manifest(prepared).fingerprint and len(before) == 64
    content = json.loads((folder / "manifest.json").read_text())
    rewrite(folder, versions={"python": "0.0"}, recipe={})
    assert read_manifest(folder).fingerprint == before
    files = content["files"]
    rewrite(folder, files={**files, "train.bin": {**files["train.bin"], "sha256": "0" * 64}})
    assert read_manifest(folder).fingerprint != before


def test_D5_fingerprint_of_bare_prefixes(folder):
    reports = [check_dataset(folder / split) for split in ("train", "valid")]
    before = prefix_fingerprint(reports)
    assert prefix_fingerprint(reports[::-1]) != before
    path = folder / "valid.bin"
    raw = bytearray(path.read_bytes())
    raw[2] ^= 1
    path.write_bytes(raw)
    assert prefix_fingerprint([reports[0], check_dataset(folder / "valid")]) != before
    other = dataclasses.replace(reports[1], sha256={**reports[1].sha256, "valid.idx": "0" * 64})
    assert prefix_fingerprint([reports[0], other]) != before


def test_D6_no_manifest_no_data_set(folder):
    (folder / "manifest.json").unlink()
    assert "manifest.json: missing: this is no data set, or its preparation was interrupted" in refusal(folder)
    assert "no such data folder" in refusal(folder / "nowhere")


@pytest.mark.parametrize("keep", [0, 1, 100])
def test_D6_truncated_manifest(folder, keep):
    path = folder / "manifest.json"
    path.write_bytes(path.read_bytes()[:keep])
    assert "manifest.json: not valid JSON" in refusal(folder)


def test_an_edited_manifest_is_refused(folder):
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace('"eod": 1', '"eod": 2'))
    assert "do not match the checksum" in refusal(folder)
    content = json.loads(path.read_text().replace('"eod": 2', '"eod": 1')) | {"fingerprint": "0" * 64}
    content["checksum"] = _digest({key: value for key, value in content.items() if key != "checksum"})
    path.write_text(json.dumps(content))
    assert "do not match the checksum" in refusal(folder)
    path.write_text(json.dumps({"format": 99}))
    assert "format 99, must be 1" in refusal(folder)
    path.write_text("[]")
    assert "format 'list'" in refusal(folder)
    path.write_text('{"format": 1}')
    assert "'files' is missing" in refusal(folder)
    for unreadable in ("[" * 100_000, "1" * 5000):
        path.write_text(unreadable)
        assert "manifest.json: not valid JSON" in refusal(folder)


def test_counts_are_compared(folder):
    splits = json.loads((folder / "manifest.json").read_text())["splits"]
    for key in ("tokens", "documents"):
        rewrite(folder, splits={**splits, "train": {**splits["train"], key: splits["train"][key] + 1}})
        assert f"train.idx: {key}=" in refusal(folder) and ", but the manifest says" in refusal(folder)
    rewrite(folder, splits=splits, dtype="int32")
    assert "train.idx: dtype=uint16, but the manifest says int32" in refusal(folder)


@pytest.mark.parametrize("name", ["../outside.bin", "/etc/passwd", "link.bin"])
def test_files_stay_inside_the_folder(folder, name):
    (folder.parent / "outside.bin").write_bytes(b"12")
    (folder / "link.bin").symlink_to(folder.parent / "outside.bin")
    files = json.loads((folder / "manifest.json").read_text())["files"]
    rewrite(folder, files={**files, name: {"bytes": 2, "sha256": "0" * 64}})
    assert f"names the file {name!r}, which is outside the folder" in refusal(folder)
    tokenizer = json.loads((folder / "manifest.json").read_text())["tokenizer"]
    rewrite(folder, files=files, tokenizer={**tokenizer, "path": name})
    assert f"names the file {name!r}, which is outside the folder" in refusal(folder)


def test_a_linked_folder_is_fine(folder, tmp_path):
    (tmp_path / "alias").symlink_to(folder)
    assert verify_folder(tmp_path / "alias")[0].fingerprint == read_manifest(folder).fingerprint
