"""The search for the largest micro-batch: sizes, trials with a launcher that runs out of memory, refusals."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import find_micro_batch
import pytest
from find_micro_batch import Trial

from megablocks.config import ConfigError

ROOT = Path(__file__).parents[2]
LAUNCHER = """
flags="--nproc-per-node 2 -m driver --global-batch-size 48 $FLAGS"
if [ "${DRY_RUN:-0}" = 1 ]; then echo "python torchrun.py $flags"; exit; fi
size=${FLAGS##* }
{
    retries=""
    [ "$size" -le "${EASY:-99}" ] || retries=" allocator retries: 2 |"
    echo " iteration 2/ 3 | elapsed time per iteration (ms): 9.0 | tokens/s: 1 | allocator retries: 9 |"
    echo " iteration 3/ 3 | elapsed time per iteration (ms): 9.0 | tokens/s: ${size}00 |$retries"
    echo "[Rank 0] memory (MB) | allocated: 1.00 | max allocated: $((size * 1024)).00 | reserved: 2.00"
    [ "$size" -le "$FITS" ] || echo "pretrain_gpt: rank 0: micro_batch_size=$size: $WHY; take smaller sizes"
} >"$1/train.log"
[ "$size" -le "$FITS" ]
"""


@pytest.fixture
def launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A script that fits up to the micro-batch FITS and fails with WHY beyond."""
    for name, value in {"FITS": "8", "WHY": "out of memory at a tensor of 1 GiB", "FLAGS": "--seed 7"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("DRY_RUN", raising=False)
    path = tmp_path / "exp.sh"
    path.write_text(LAUNCHER)
    return path


def test_divisors_only() -> None:
    assert find_micro_batch.divisors(24) == [1, 2, 3, 4, 6, 8, 12, 24]
    assert find_micro_batch.divisors(1) == [1]


@pytest.mark.parametrize("sizes", [[1], [1, 2], [1, 2, 3, 6], find_micro_batch.divisors(96)])
def test_the_largest_size_that_fits_is_found(sizes: list[int]) -> None:
    for fitting in (0, *sizes):
        trials = find_micro_batch.largest_that_fits(sizes, lambda size, most=fitting: Trial(size, size <= most))
        assert max((t.micro_batch_size for t in trials if t.fits), default=0) == fitting
        tried = [t.micro_batch_size for t in trials]
        assert len(set(tried)) == len(tried) <= 2 + len(sizes).bit_length()


@pytest.mark.parametrize(
    "flags, share",
    [
        ("--nproc-per-node 8 --global-batch-size 512", 64),
        ("--nnodes 2 --nproc-per-node 8 --global-batch-size 512 --tensor-model-parallel-size 4", 128),
        ("--nproc-per-node 1 --global-batch-size 512 --bf16 --global-batch-size 128", 128),
        ("--nproc-per-node=2 --global-batch-size 512 --lr=1e-3 --global-batch-size=64", 32),
    ],
)
def test_share_of_a_data_parallel_rank(flags: str, share: int) -> None:
    assert find_micro_batch.share_of(flags.split()) == share


def test_L2_a_share_that_is_none_is_one_line() -> None:
    for flags, said in (
        ("--nproc-per-node 3 --global-batch-size 32", "--global-batch-size 32: must be a multiple of the data-par"),
        ("--nproc-per-node 3", "--global-batch-size is missing"),
        ("--nproc-per-node 3 --global-batch-size x", "--global-batch-size x: must be a whole number"),
    ):
        with pytest.raises(ConfigError, match=said):
            find_micro_batch.share_of(flags.split())


def test_trials_are_recorded(launcher: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert find_micro_batch.main([str(out), "--", "bash", str(launcher), "20000"]) == 0
    found = json.loads((out / "micro_batch.json").read_text())
    assert found["micro_batch_size"] == 8
    assert {trial["micro_batch_size"]: trial["fits"] for trial in found["trials"]} == {
        24: False, 4: True, 8: True, 12: False
    }  # fmt: skip
    best = next(trial for trial in found["trials"] if trial["micro_batch_size"] == 8)
    assert (best["peak_memory_gib"], best["tokens_per_second"]) == (8, 800)
    assert capsys.readouterr().out.startswith("--micro-batch-size 8 fits, peak memory 8.0 GiB; add it to FLAGS")
    assert {path.name for path in out.iterdir()} == {
        "micro_batch.json", *(f"micro_batch_{size}.log" for size in (24, 4, 8, 12))
    }  # fmt: skip


@pytest.mark.parametrize(
    "easy, chosen", [(4, 4), (2, 2), (0, 4)], ids=["half has room", "a quarter has room", "none has room"]
)
def test_a_size_that_empties_the_cache_is_too_large(
    launcher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, easy: int, chosen: int
) -> None:
    monkeypatch.setenv("EASY", str(easy))
    out = tmp_path / "out"
    assert find_micro_batch.main([str(out), "--", "bash", str(launcher)]) == 0
    found = json.loads((out / "micro_batch.json").read_text())
    assert found["micro_batch_size"] == chosen  # 4 is the largest one that was tried and did not run out of memory
    assert all(trial["retries"] == (2 if trial["micro_batch_size"] > easy else 0)
               for trial in found["trials"] if trial["fits"])  # fmt: skip


def test_nothing_fits(
    launcher: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FITS", "0")
    assert find_micro_batch.main([str(tmp_path / "out"), "--", "bash", str(launcher)]) == 1
    assert capsys.readouterr().err.startswith("find_micro_batch: not even --micro-batch-size 1 fits")
    assert json.loads((tmp_path / "out/micro_batch.json").read_text())["micro_batch_size"] is None


def test_another_failure_is_no_lack_of_memory(
    launcher: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WHY", "lr=None")
    assert find_micro_batch.main([str(tmp_path / "out"), "--", "bash", str(launcher)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("find_micro_batch: micro-batch 24: pretrain_gpt: rank 0: micro_batch_size=24: lr=None")
    assert said.count("\n") == 1 and not (tmp_path / "out/micro_batch.json").exists()


@pytest.mark.parametrize(
    "words, said",
    [([], "command is missing: give a script"), (["--", "bash", "no.sh"], "command='bash no.sh': must name")],
)
def test_L2_bad_commands_are_one_line(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert find_micro_batch.main([str(tmp_path / "out"), *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"find_micro_batch: {said}") and error.count("\n") == 1


def test_L1_dry_run_prints_the_trials(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "scripts/find_micro_batch.py"), str(tmp_path / "out"), "--"]
    command += ["bash", "exp/dmoe/dmoe_125m_8gpu.sh"]
    environment = {**os.environ, "DRY_RUN": "1", "FLAGS": "--global-batch-size 32"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0 and not (tmp_path / "out").exists(), done.stderr
    launch = f"bash exp/dmoe/dmoe_125m_8gpu.sh {tmp_path}/out/trial"
    assert done.stdout.splitlines() == [
        f"FLAGS='--global-batch-size 32 {find_micro_batch.FLAGS} {size}' {launch}" for size in (4, 2, 1)
    ]


def test_an_empty_path_is_not_the_current_folder(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        find_micro_batch.main(["", "--", "bash", "exp.sh"])
    assert stop.value.code == 2
    assert capsys.readouterr().err.endswith("argument out: '' is empty: must be a path; . is the current folder\n")
