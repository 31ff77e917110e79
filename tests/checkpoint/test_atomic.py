"""Which checkpoint is chosen and which is refused, with folders made by hand."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from megablocks.checkpoint import atomic
from megablocks.checkpoint.atomic import CheckpointError, Latest


def make(root: Path, iteration: int, complete: bool = True) -> Path:
    folder = atomic.folder_of(root, iteration)
    (folder / "deep").mkdir(parents=True)
    (folder / "__0_0.distcp").write_bytes(bytes(range(256)) * 8)
    (folder / "deep" / "__1_0.distcp").write_bytes(b"shard" * iteration)
    (folder / ".metadata").write_bytes(b"meta")
    if complete:
        atomic.mark_complete(folder, iteration, atomic.hash_files(folder, atomic.files_of(folder)))
    return folder


def test_K3_the_newest_complete_checkpoint_is_chosen_over_a_torn_one(tmp_path: Path) -> None:
    for iteration in (2, 4):
        make(tmp_path, iteration)
    for iteration in (3, 6):
        make(tmp_path, iteration, complete=False)
    atomic.write_pointer(tmp_path, 4)
    latest = atomic.find_latest_complete(tmp_path)
    assert latest.iteration == 4
    assert latest.warnings == [f"{tmp_path}/iter_0000006: torn (no complete.json), ignored"]
    atomic.write_pointer(tmp_path, 6)  # Megatron writes its pointer before our marker
    assert atomic.find_latest_complete(tmp_path).iteration == 4
    atomic.folder_of(tmp_path, 10**7).mkdir()
    assert atomic.iterations(tmp_path) == [2, 3, 4, 6, 10**7]


@pytest.mark.parametrize("text", ["", "garbage\n", "\x00\x00", "12 13", "-3", "999", "1" * 5000], ids=range(7))
def test_K4_a_bad_pointer_falls_back_with_a_warning(tmp_path: Path, text: str) -> None:
    for iteration in (2, 4):
        make(tmp_path, iteration)
    (tmp_path / atomic.POINTER).write_text(text)
    latest = atomic.find_latest_complete(tmp_path)
    assert latest.iteration == 4
    assert len(latest.warnings) == 1 and "using the newest complete checkpoint, iteration 4" in latest.warnings[0]


def test_K4_a_missing_pointer_falls_back_and_a_valid_older_one_is_obeyed(tmp_path: Path) -> None:
    for iteration in (2, 4):
        make(tmp_path, iteration)
    assert atomic.find_latest_complete(tmp_path).iteration == 4
    atomic.write_pointer(tmp_path, 2)
    assert atomic.find_latest_complete(tmp_path) == Latest(2)


def test_K4_nothing_complete_starts_anew_or_refuses(tmp_path: Path) -> None:
    assert atomic.find_latest_complete(tmp_path / "absent") == Latest(None)
    torn = make(tmp_path, 2, complete=False)
    assert atomic.find_latest_complete(tmp_path).iteration is None  # the first save was torn
    atomic.write_pointer(tmp_path, 2)
    latest = atomic.find_latest_complete(tmp_path)  # another program's: it has no markers
    assert latest.iteration == 2 and "without verification" in latest.warnings[0]
    (torn / ".metadata").unlink()
    with pytest.raises(CheckpointError, match="torn"):
        atomic.find_latest_complete(tmp_path)
    atomic.write_pointer(tmp_path, 8)
    with pytest.raises(CheckpointError, match="names iteration 8"):
        atomic.find_latest_complete(tmp_path)


def test_K5_a_missing_short_or_changed_file_is_named(tmp_path: Path) -> None:
    folder = make(tmp_path, 4)
    shard = folder / "deep" / "__1_0.distcp"
    atomic.verify(folder)
    good = shard.read_bytes()
    shard.write_bytes(bytes([good[0] ^ 1]) + good[1:])
    assert atomic.find_latest_complete(tmp_path).iteration == 4  # sizes are right
    with pytest.raises(CheckpointError, match="deep/__1_0.distcp: sha256 differs"):
        atomic.verify(folder)
    shard.write_bytes(good[:-1])
    with pytest.raises(CheckpointError, match=r"deep/__1_0.distcp: 19 bytes, 20 were saved"):
        atomic.find_latest_complete(tmp_path)
    shard.unlink()
    with pytest.raises(CheckpointError, match="deep/__1_0.distcp: missing"):
        atomic.verify(folder)


def test_K5_every_file_is_in_some_rank_s_share(tmp_path: Path) -> None:
    folder = make(tmp_path, 4)
    (folder / f".{atomic.MARKER}.17").touch()  # of a save that was killed while it wrote the marker
    assert atomic.files_of(folder) == [".metadata", "__0_0.distcp", "deep/__1_0.distcp"]
    for name in atomic.files_of(folder):
        path = folder / name
        good = path.read_bytes()
        path.write_bytes(bytes([good[0] ^ 0x80]) + good[1:])
        failed = []
        for rank in range(2):
            try:
                atomic.verify(folder, rank, 2)
            except CheckpointError as error:
                failed.append(str(error))
        assert len(failed) == 1 and name in failed[0]
        path.write_bytes(good)


def test_K5_a_marker_is_read_from_within_and_by_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint that is whole was called damaged, with the advice to remove it."""
    folder = make(tmp_path, 4)
    (tmp_path / "link").symlink_to(folder)
    (tmp_path / "iter_0000005").symlink_to(folder)
    monkeypatch.chdir(folder)
    for path in (Path("."), tmp_path / "link"):
        assert atomic.read_marker(path) == atomic.read_marker(folder)
        atomic.verify(path)
    with pytest.raises(CheckpointError, match="complete.json: damaged .not of this folder"):
        atomic.read_marker(tmp_path / "iter_0000005")


def test_a_copy_under_a_name_of_no_iteration_is_verified(tmp_path: Path) -> None:
    """It was called damaged, with the advice to remove it."""
    for name in ("final", "iter_0000004_best"):
        copy = Path(shutil.copytree(make(tmp_path / name, 4), tmp_path / "kept" / name))
        atomic.verify(copy)
        next(path for path in copy.iterdir() if path.name != atomic.MARKER).write_bytes(b"changed")
        with pytest.raises(CheckpointError, match="were saved"):
            atomic.verify(copy)


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", '{"format": 1, "iteration": 5, "files": {"a": {}}}', '{"format": 9}', "[" * 100_000,
        '{"format": 1, "iteration": 4, "files": {"a": {"bytes": 1e400, "sha256": ""}}}', "1" * 5000,
        '{"format": 1, "iteration": 4, "files": {}}',
    ],
    ids=range(9),
)  # fmt: skip
def test_K5_a_damaged_marker_is_named(tmp_path: Path, text: str) -> None:
    folder = make(tmp_path, 4)
    (folder / atomic.MARKER).write_text(text)
    with pytest.raises(CheckpointError, match="complete.json: damaged"):
        atomic.find_latest_complete(tmp_path)


def test_K6_a_marker_that_cannot_be_written_leaves_the_checkpoint_torn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path, 2)
    folder = make(tmp_path, 4, complete=False)
    hashes = atomic.hash_files(folder, atomic.files_of(folder))

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        atomic.mark_complete(folder, 4, hashes)
    monkeypatch.undo()
    assert sorted(p.name for p in folder.iterdir()) == [".metadata", "__0_0.distcp", "deep"]
    assert atomic.find_latest_complete(tmp_path).iteration == 2
    synced: list[tuple[Path, bool]] = []
    monkeypatch.setattr(atomic, "sync", lambda path: synced.append((path, (folder / atomic.MARKER).exists())))
    atomic.mark_complete(folder, 4, hashes)
    assert sorted(synced) == [(folder / name, False) for name in hashes], "the files are on disk before the marker"


def test_K8_older_checkpoints_go_and_the_saved_the_torn_and_the_later_stay(tmp_path: Path) -> None:
    for iteration in (2, 4, 6, 8, 10):
        make(tmp_path, iteration, complete=iteration != 4)
    linked = make(tmp_path / "kept", 1)
    atomic.folder_of(tmp_path, 1).symlink_to(linked)
    atomic.prune(tmp_path, 8, 5)
    assert atomic.iterations(tmp_path) == [1, 2, 4, 6, 8, 10]
    atomic.prune(tmp_path, 8, 2)
    assert atomic.iterations(tmp_path) == [1, 4, 6, 8, 10]
    atomic.prune(tmp_path, 8, 1)
    assert atomic.iterations(tmp_path) == [1, 4, 8, 10] and (linked / atomic.MARKER).exists()
    atomic.verify(atomic.folder_of(tmp_path, 8))


def test_K8_a_removal_that_is_interrupted_leaves_a_torn_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for iteration in (2, 4):
        make(tmp_path, iteration)

    def interrupted(folder: Path) -> None:
        raise OSError(5, "Input/output error")

    synced: list[Path] = []
    monkeypatch.setattr("shutil.rmtree", interrupted)
    monkeypatch.setattr(atomic, "sync", synced.append)
    with pytest.raises(OSError, match="Input/output"):
        atomic.prune(tmp_path, 4, 1)
    assert synced == [atomic.folder_of(tmp_path, 2)], "the marker is gone from the disk before the first file"
    monkeypatch.undo()
    assert atomic.find_latest_complete(tmp_path).iteration == 4
    (atomic.folder_of(tmp_path, 4) / atomic.MARKER).unlink()
    assert atomic.find_latest_complete(tmp_path).iteration is None, "a folder without a marker is not loaded"


def test_K3_room_is_made_for_a_save_and_a_complete_checkpoint_kept_until_it_is_replaced(tmp_path: Path) -> None:
    torn, whole = make(tmp_path, 2, complete=False), make(tmp_path, 4)
    with atomic.room_for(tmp_path, 2):
        assert not torn.exists()
    with atomic.room_for(tmp_path, 3):
        pass
    aside = whole.with_name(f"{whole.name}.replaced")
    (aside / "of a save that was killed").mkdir(parents=True)
    with pytest.raises(KeyboardInterrupt), atomic.room_for(tmp_path, 4):
        assert (aside / atomic.MARKER).is_file() and not whole.exists()
        assert atomic.iterations(tmp_path) == []
        make(tmp_path, 4, complete=False)
        raise KeyboardInterrupt  # the new save failed
    assert (whole / atomic.MARKER).is_file() and not aside.exists()
    with atomic.room_for(tmp_path, 4):
        make(tmp_path, 4)
    assert (whole / atomic.MARKER).is_file() and not aside.exists()


def test_a_checkpoint_of_megatrons_legacy_format_is_not_called_torn(tmp_path: Path) -> None:
    (tmp_path / "iter_0000002/mp_rank_00_001").mkdir(parents=True)
    (tmp_path / "iter_0000002/mp_rank_00_001/model_optim_rng.pt").write_bytes(b"")
    atomic.write_pointer(tmp_path, 2)
    with pytest.raises(CheckpointError, match="iter_0000002: has another format; give --ckpt-format torch"):
        atomic.find_latest_complete(tmp_path)
