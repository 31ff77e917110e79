"""`verify`: data sets and checkpoints, by what was recorded when they were made."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from megablocks.checkpoint import atomic
from megablocks.tool.commands import main


def _checkpoint(root: Path, step: int) -> Path:
    folder = atomic.folder_of(root, step)
    folder.mkdir(parents=True)
    (folder / "weights.distcp").write_bytes(bytes(range(step)))
    atomic.mark_complete(folder, step, atomic.hash_files(folder, atomic.files_of(folder)))
    return folder


def test_checkpoints_pass_one_or_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = _checkpoint(tmp_path, 20)
    _checkpoint(tmp_path, 40)
    assert main(["verify", str(folder)]) == 0
    assert capsys.readouterr().out == "ok: iter_0000020: size and SHA-256 of 1 files, 0.00 GiB\n"
    assert main(["verify", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] and [line[:12] for line in found["checked"]] == ["iter_0000020", "iter_0000040"]


def test_a_checkpoint_is_found_from_within_and_by_a_link(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = _checkpoint(tmp_path, 20)
    _checkpoint(tmp_path, 40)
    (tmp_path / "link").symlink_to(folder)
    monkeypatch.chdir(folder)
    for words in (".", str(tmp_path / "link")):
        assert main(["verify", words]) == 0
        assert capsys.readouterr().out == "ok: iter_0000020: size and SHA-256 of 1 files, 0.00 GiB\n"


def test_a_copy_of_a_checkpoint_has_any_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = shutil.copytree(_checkpoint(tmp_path / "checkpoints", 20), tmp_path / "final")
    assert main(["verify", str(copy)]) == 0
    assert capsys.readouterr().out.startswith("ok: final: size and SHA-256 of ")


def test_a_damaged_checkpoint_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = _checkpoint(tmp_path, 20)
    (folder / "weights.distcp").write_bytes(bytes(range(1, 21)))
    assert main(["verify", str(tmp_path), "--json"]) == 1
    out = capsys.readouterr()
    found = json.loads(out.out)
    assert not found["ok"] and "weights.distcp: sha256 differs" in found["problem"]
    assert out.err.startswith("megablocks verify: ") and out.err.count("\n") == 1


def test_a_torn_checkpoint_is_no_success(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (_checkpoint(tmp_path, 20) / atomic.MARKER).unlink()
    assert main(["verify", str(tmp_path / "iter_0000020")]) == 1
    assert "complete.json: missing; the save did not finish" in capsys.readouterr().err
    _checkpoint(tmp_path, 40)
    assert main(["verify", str(tmp_path)]) == 0
    assert "iter_0000020: an unfinished save, which a resumed run ignores\n" in capsys.readouterr().out


def test_a_data_set_passes_and_an_edited_one_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from megablocks.data.prepare import main as prepare

    text = tmp_path / "text"
    text.mkdir()
    for i in range(20):
        (text / f"{i}.txt").write_text("".join(chr(97 + (i * k) % 26) * (k % 5 + 1) + " " for k in range(3000)))
    folder = tmp_path / "data"
    assert prepare(["--out", str(folder), "--input", str(text), "--vocab-size", "387"]) == 0
    capsys.readouterr()
    assert main(["verify", str(folder)]) == 0
    assert "ok: manifest.json" in capsys.readouterr().out
    path = folder / "train.bin"
    data = bytearray(path.read_bytes())
    data[-2] ^= 1
    path.write_bytes(data)
    assert main(["verify", str(folder)]) == 1
    assert "train.bin" in capsys.readouterr().err


def test_what_is_neither_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(tmp_path / "nowhere")]) == 2
    assert "no such folder" in capsys.readouterr().err
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    assert main(["verify", str(tmp_path / "circle")]) == 2
    assert "circle: no such folder" in capsys.readouterr().err
    (tmp_path / "train.log").touch()
    assert main(["verify", str(tmp_path / "train.log")]) == 2
    assert "train.log: is a file; give a data set or a checkpoint folder\n" in capsys.readouterr().err
    assert main(["convert", "--to", "hf", str(tmp_path / "train.log"), str(tmp_path / "to")]) == 2
    assert "train.log: is a file; give a folder of safetensors files" in capsys.readouterr().err
    (tmp_path / "run/checkpoints/iter_0000002").mkdir(parents=True)
    for command in (["verify"], ["convert", "--to", "hf"]):
        assert main([*command, str(tmp_path / "run"), *([str(tmp_path / "to")] if command[1:] else [])]) == 2
        assert capsys.readouterr().err.endswith(f"; give {tmp_path}/run/checkpoints\n")
