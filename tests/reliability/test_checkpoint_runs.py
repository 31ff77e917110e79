"""Checkpoints of the real driver: runs resume exactly, and torn or damaged checkpoints are not loaded.

One history serves several tests. A run of 100 steps saves at 50 and 100. A second run starts from the save at 50. It is
stopped by SIGTERM and resumed; killed while it saves; meets a NaN on one rank; finds the disk full; its pointer is
garbled; and it is resumed to the end. Its last checkpoint must be bit-identical to the first run's.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from driver import EXPERTS, PATIENCE_S, ROOT, TINY, Driver, Run, free_port

pytest.importorskip("megatron.training")

from megablocks.checkpoint import atomic  # noqa: E402

# Everything with a state: dropout and router jitter draw random numbers, the expert bias is a buffer, the optimizer is
# sharded, the learning rate is scheduled, and the order of the samples spans several passes over the data.
MODEL = (
    *TINY,
    *EXPERTS,
    *"--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-2".split(),
    *"--moe-input-jitter-eps 0.05 --hidden-dropout 0.1 --attention-dropout 0.1 --use-distributed-optimizer".split(),
    *"--train-iters 100 --lr-decay-iters 100 --min-lr 1e-3 --lr-warmup-iters 10".split(),
)


def contents(folder: Path) -> dict[str, Any]:
    """All that a checkpoint holds: whole tensors (NaN where there is no shard), other objects by rank."""
    import torch
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    state: dict[str, Any] = {}
    torch.use_deterministic_algorithms(True)  # fills torch.empty, as no shard holds the padding of optimizer buckets
    try:
        _load_state_dict(
            state, storage_reader=FileSystemReader(folder), planner=_EmptyStateDictLoadPlanner(), no_dist=True
        )
    finally:
        torch.use_deterministic_algorithms(False)
    return state


def plain(value: Any) -> Any:
    """`value` in a form that == compares: tensors and arrays as their type, shape and bytes."""
    if hasattr(value, "detach"):
        return (str(value.dtype), tuple(value.shape), value.detach().contiguous().numpy().tobytes())
    if isinstance(value, np.ndarray):
        return (str(value.dtype), value.shape, value.tobytes())
    if isinstance(value, dict):
        return {key: plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(entry) for entry in value]
    return value


def save_at(source: Path, target: Path, *iterations: int) -> Path:
    """A folder with copies of some checkpoints of another, as if the run had stopped at the last of them."""
    target.mkdir()
    for iteration in iterations:
        shutil.copytree(atomic.folder_of(source, iteration), atomic.folder_of(target, iteration))
    atomic.write_pointer(target, iterations[-1])
    return target


@dataclasses.dataclass
class History:
    """The runs and what they left. `resumed`: the second folder; `stopped_at`: the iteration at which SIGTERM came.

    killed_at: that whose save was torn by a kill.
    kept: the iterations with a folder after the last run, which keeps two.
    """

    straight: Path
    resumed: Path
    full: Run
    terminated: Run
    killed: Run
    nan: Run
    full_disk: Run
    last: Run
    terminated_codes: list[int | None]
    killed_codes: list[int | None]
    stopped_at: int
    killed_at: int
    after_kill: atomic.Latest
    torn: list[str]
    kept: list[int]


@pytest.fixture(scope="module")
def history(zygote, tiny_data, tmp_path_factory) -> History:
    folder = tmp_path_factory.mktemp("history")
    driver = Driver(zygote, tiny_data, folder)
    straight, resumed = folder / "straight", folder / "resumed"
    full = driver.run("--save", straight, "--save-interval", 50, ranks=2, model=MODEL)

    save_at(straight, resumed, 50)
    resume = ("--load", resumed, "--save", resumed, "--save-interval")
    with driver.start(*resume, 1000, ranks=2, model=MODEL) as terminated:
        terminated.wait_for(r"iteration +5[3-9]/")
        terminated.signal(1, signal.SIGTERM)
        terminated_codes = terminated.wait()
    stopped_at = atomic.iterations(resumed)[-1]

    killed_at = stopped_at + 3
    fault = ("kill_while_writing", {"rank": 1, "step": killed_at})
    with driver.start(*resume, killed_at, ranks=2, model=MODEL, faults=[fault]) as killed:
        killed_codes = killed.wait()
    after_kill = atomic.find_latest_complete(resumed)
    torn = atomic.files_of(atomic.folder_of(resumed, killed_at))

    fault = ("nan_in_loss", {"rank": 1, "step": stopped_at + 2})
    nan = driver.run(*resume, 1000, ranks=2, model=MODEL, faults=[fault], expect=1)
    limit = ("file_size_limit", {"size": 100_000})
    flags = (*resume, stopped_at + 2, "--megablocks-keep-checkpoints", 1)
    full_disk = driver.run(*flags, ranks=2, model=MODEL, faults=[limit], expect=None)

    (resumed / atomic.POINTER).write_bytes(b"\0\0\0\0")
    last = driver.run(*resume, 100, "--megablocks-keep-checkpoints", 2, ranks=2, model=MODEL, expect=None)
    codes, kept = (terminated_codes, killed_codes), atomic.iterations(resumed)
    runs = (full, terminated, killed, nan, full_disk, last)
    return History(straight, resumed, *runs, *codes, stopped_at, killed_at, after_kill, torn, kept)


def assert_bit_identical(first: Path, second: Path) -> tuple[dict[str, Any], Any]:
    """Compare two checkpoints. Returns the tensors of the first, and the flags of its run."""
    one, two = contents(first), contents(second)
    assert one.keys() == two.keys()
    common = [key for key in one if key.startswith("common_state")]
    assert len(common) == 1
    for key in one.keys() - set(common):
        assert plain(one[key]) == plain(two[key]), key
    (one_common,), (two_common,) = one[common[0]], two[common[0]]
    assert one_common.keys() == two_common.keys()
    for key in one_common.keys() - {"args"}:
        assert plain(one_common[key]) == plain(two_common[key]), key
    position = ("consumed_train_samples", "consumed_valid_samples", "skipped_train_samples", "curr_iteration")
    for name in position:
        assert getattr(one_common["args"], name) == getattr(two_common["args"], name), name
    return one, one_common["args"]


def test_K1_resumed_run_equals_the_straight_one_bit_for_bit(history: History) -> None:
    assert history.last.codes() == [0, 0], history.last.text()[-3000:]
    one, args = assert_bit_identical(atomic.folder_of(history.straight, 100), atomic.folder_of(history.resumed, 100))
    for name in ("exp_avg.", "exp_avg_sq.", "rng_state", "expert_bias", "experts.w1", "word_embeddings"):
        assert any(name in key for key in one), f"no {name} among {sorted(one)}"
    bias = next(value for key, value in one.items() if key.endswith("expert_bias"))
    assert bias.abs().max() > 0.005, "the expert bias moved"
    assert args.consumed_train_samples == 400


def test_K1_losses_continue_as_if_nothing_had_happened(history: History) -> None:
    losses = history.full.losses()
    assert sorted(losses) == list(range(1, 101)) and losses[100] < losses[1]
    for run, first, end in (
        (history.terminated, 51, history.stopped_at),
        (history.killed, history.stopped_at + 1, history.killed_at),
        (history.last, history.stopped_at + 1, 100),
    ):
        again = run.losses()
        assert sorted(again) == list(range(first, end + 1))
        assert again == {step: losses[step] for step in again}


def test_K3_kill_in_mid_save_leaves_a_torn_checkpoint_that_is_ignored(history: History) -> None:
    assert history.killed_codes[1] == -signal.SIGKILL and history.killed_codes[0] not in (0, None)
    shards = [name for name in history.torn if name.endswith(".distcp")]
    assert shards and not {atomic.MARKER, ".metadata"} & set(history.torn), history.torn
    assert history.after_kill.iteration == history.stopped_at
    assert "without verification" not in "".join(history.after_kill.warnings)
    assert re.search(rf"iter_0*{history.killed_at}: torn \(no {atomic.MARKER}\), ignored", history.last.text())
    assert min(history.last.losses()) == history.stopped_at + 1


def test_K8_a_failed_save_removes_nothing_and_a_whole_one_leaves_as_many_as_asked(history: History) -> None:
    assert 75 in history.full_disk.codes() or history.full_disk.codes() == [1, 1]
    newest = f"iteration {history.stopped_at} is the newest complete checkpoint"
    assert "File too large" in history.full_disk.text() and newest in history.full_disk.text()
    assert min(history.last.losses()) == history.stopped_at + 1
    complete = [i for i in history.kept if (atomic.folder_of(history.resumed, i) / atomic.MARKER).is_file()]
    assert complete == [history.stopped_at, 100] and 50 not in history.kept


def test_F3_a_nan_leaves_what_the_next_run_needs(history: History) -> None:
    assert f"step {history.stopped_at + 2}: NaN or Inf on rank 1 in the loss" in history.nan.text()
    assert sorted(history.nan.losses()) == [history.stopped_at + 1]
    assert min(history.full_disk.losses()) == history.stopped_at + 1


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_F1_a_run_with_a_stopped_rank_goes_on_bit_for_bit(driver: Driver, history: History, rank: int) -> None:
    folder = save_at(history.straight, driver.folder / "run", 50)
    resume = ("--load", folder, "--save", folder, "--save-interval", 100, "--megablocks-hang-timeout", 20)
    stop = ("signal_self", {"rank": rank, "step": 53, "number": int(signal.SIGSTOP)})
    with driver.start(*resume, ranks=2, model=MODEL, faults=[stop]) as run:
        run.wait_for(r"iteration +52/")
        started = time.monotonic()
        codes = run.wait(timeout=300, ranks=[1 - rank])  # not PATIENCE_S: a mutant hangs here
    assert codes[1 - rank] == 75 and time.monotonic() - started < 120
    assert f"rank {rank} (" in run.text() if rank else "the launcher or rank 0 is stopped" in run.text()
    driver.run(*resume, ranks=2, model=MODEL)
    assert_bit_identical(atomic.folder_of(history.straight, 100), atomic.folder_of(folder, 100))


def test_K4_garbled_pointer_falls_back_with_a_warning(history: History) -> None:
    said = f"WARNING: {history.resumed / atomic.POINTER}: '\\x00\\x00\\x00\\x00'; "
    used = f"using the newest complete checkpoint, iteration {history.stopped_at}"
    assert said + used in history.last.text()
    assert (history.resumed / atomic.POINTER).read_text() == "100"


def test_K7_sigterm_saves_and_exits_zero(history: History) -> None:
    assert history.terminated_codes == [0, 0]
    assert 53 <= history.stopped_at < 95 and max(history.terminated.losses()) == history.stopped_at
    folder = atomic.folder_of(history.resumed, history.stopped_at)
    assert atomic.read_marker(folder) and "__0_0.distcp" in atomic.files_of(folder)
    atomic.verify(folder)


@pytest.mark.parametrize("pointer", [b"", b"what?", None])
def test_K4_empty_garbled_or_missing_pointer(history: History, tmp_path: Path, pointer: bytes | None) -> None:
    folder = save_at(history.straight, tmp_path / "run", 50, 100)
    (folder / atomic.POINTER).unlink()
    if pointer is not None:
        (folder / atomic.POINTER).write_bytes(pointer)
    latest = atomic.find_latest_complete(folder)
    assert latest.iteration == 100 and len(latest.warnings) == 1 and atomic.POINTER in latest.warnings[0]
    (atomic.folder_of(folder, 100) / atomic.MARKER).unlink()
    latest = atomic.find_latest_complete(folder)
    assert latest.iteration == 50 and any("iter_0000100: torn" in warning for warning in latest.warnings)


def refused(driver: Driver, *flags: Any, faults=()) -> str:
    """The one line with which a run on one rank ends before its first step."""
    run = driver.run(*flags, model=MODEL, faults=faults, expect=1)
    assert run.losses() == {}
    lines = [line for line in run.text().splitlines() if line.startswith("pretrain_gpt: ")]
    assert len(lines) == 1 and "Traceback" not in run.text(), run.text()[-3000:]
    return lines[0]


def test_K5_flipped_byte_names_the_file(driver: Driver, history: History) -> None:
    folder = save_at(history.straight, driver.folder / "run", 50)
    shard = atomic.folder_of(folder, 50) / "__1_0.distcp"
    raw = bytearray(shard.read_bytes())
    raw[len(raw) // 2] ^= 1
    shard.write_bytes(raw)
    assert f"{shard}: sha256 differs from what was saved" in refused(driver, "--load", folder)


@pytest.mark.parametrize("name", ["__1_0.distcp", ".metadata"])
def test_K5_missing_file_names_it(driver: Driver, history: History, name: str) -> None:
    folder = save_at(history.straight, driver.folder / "run", 50)
    shard = atomic.folder_of(folder, 50) / name
    shard.unlink()
    assert f"{shard}: missing" in refused(driver, "--load", folder)


def test_K6_full_disk_keeps_the_previous_checkpoint(driver: Driver, history: History) -> None:
    folder = save_at(history.straight, driver.folder / "run", 50)
    before = {name: (folder / name).read_bytes() for name in _files(folder)}
    flags = ("--load", folder, "--save", folder, "--save-interval", 52)
    run = driver.run(*flags, model=MODEL, faults=[("file_size_limit", {"size": 200_000})], expect=1)
    assert sorted(run.losses()) == [51, 52]
    message = f"{atomic.folder_of(folder, 52)}: could not be saved by rank 0: "
    line = next(line for line in run.text().splitlines() if message in line)
    assert "File too large" in line and "iteration 50 is the newest complete checkpoint" in line
    assert "Traceback" not in run.text()
    for name, raw in before.items():
        assert (folder / name).read_bytes() == raw, name
    assert atomic.find_latest_complete(folder).iteration == 50
    atomic.verify(atomic.folder_of(folder, 50))


def _files(folder: Path) -> list[str]:
    return [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]


@pytest.fixture(scope="module")
def other_data(tiny_data: Path, tmp_path_factory) -> Path:
    """The same tokenizer, one more document."""
    from megablocks.data.prepare import main

    folder = tmp_path_factory.mktemp("other")
    shutil.copytree(tiny_data.parent / "text", folder / "text")
    (folder / "text" / "more.txt").write_text("the cat sleeps in a warm house. " * 50)
    model = str(tiny_data / "tokenizer.model")
    arguments = ["--input", str(folder / "text"), "--tokenizer-model", model, "--workers", "1"]
    assert main([*arguments, "--out", str(folder / "prepared"), "--valid-fraction", "0.25"]) == 0
    return folder / "prepared"


def test_D5_changed_data_is_refused_at_resume(
    zygote, history: History, other_data: Path, tiny_data: Path, tmp_path: Path
) -> None:
    from megablocks.data.manifest import read_manifest

    folder = save_at(history.straight, tmp_path / "run", 50)
    state = json.loads((atomic.folder_of(folder, 50) / "megablocks.json").read_text())
    saved, other = (read_manifest(folder).fingerprint for folder in (tiny_data, other_data))
    assert state["data_fingerprint"] == saved != other
    line = refused(Driver(zygote, other_data, tmp_path), "--load", folder)
    assert "megablocks.json: saved with data " + saved[:12] in line
    assert other[:12] in line and "the data changed" in line


def test_D1_truncated_data_is_refused_at_start(zygote, tiny_data: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    shutil.copytree(tiny_data, data)
    (data / "train.bin").write_bytes((data / "train.bin").read_bytes()[:-2])
    run = Driver(zygote, data, tmp_path).run(model=MODEL, expect=2)
    line = run.text().strip().splitlines()[-1]
    assert line.startswith(f"pretrain_gpt: {data / 'train.bin'}: truncated") and "Traceback" not in run.text()


@pytest.mark.slow
def test_K7_sigterm_to_torchrun_saves(tiny_data: Path, tmp_path: Path) -> None:
    """torchrun passes the signal on and waits 30 s. Then it exits with 1 and a traceback of its own."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--master-port", str(free_port()), "-m", "megablocks.megatron.pretrain_gpt", *MODEL]
    command += ["--train-iters", "5000", "--lr-decay-iters", "5000", "--data-prefix", str(tiny_data)]
    command += ["--save", str(tmp_path / "run"), "--save-interval", "100000"]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    with open(tmp_path / "log", "w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
        try:
            end = time.monotonic() + PATIENCE_S
            while not re.search(r"iteration +\d*5/", (tmp_path / "log").read_text()):
                assert process.poll() is None and time.monotonic() < end, (tmp_path / "log").read_text()[-3000:]
                time.sleep(0.1)
            process.terminate()
            process.wait(PATIENCE_S)
        finally:
            process.kill()
    saved = atomic.find_latest_complete(tmp_path / "run")
    assert saved.iteration and not saved.warnings
    atomic.verify(atomic.folder_of(tmp_path / "run", saved.iteration))


@pytest.mark.slow
def test_K6_full_tmpfs(driver: Driver, history: History) -> None:
    """As above, with a disk that is really full."""
    disk = driver.folder / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", disk], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a tmpfs needs root")
    try:
        folder = save_at(history.straight, disk / "run", 50)
        room = os.statvfs(disk).f_bavail * os.statvfs(disk).f_bsize
        (disk / "filler").write_bytes(b"\0" * max(0, room - 400_000))
        flags = ("--load", folder, "--save", folder, "--save-interval", 52, "--megablocks-run-dir", driver.folder / "r")
        run = driver.run(*flags, model=MODEL, expect=1)
        assert "could not be saved by rank 0" in run.text() and "No space left on device" in run.text()
        assert atomic.find_latest_complete(folder).iteration == 50
        atomic.verify(atomic.folder_of(folder, 50))
    finally:
        subprocess.run(["umount", disk], check=True)
