"""exp/megatron_lm/dmoe_spec.sh holds every flag that Megatron-LM's own pretrain_gpt.py needs with our layers."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "exp/megatron_lm/dmoe_spec.sh"


def _run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1", **environment}
    for name in ("NGPU", "STEPS", "FLAGS", "MEGATRON_LM_PATH"):
        if name not in environment:
            variables.pop(name, None)
    return subprocess.run(["bash", str(SCRIPT), *arguments], env=variables, capture_output=True, text=True)


def _with_gpus(folder: Path, count: int) -> dict[str, str]:
    """A PATH on which nvidia-smi lists so many GPUs."""
    lines = "".join(f"echo 'GPU {i}: a GPU'\n" for i in range(count))
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\n{lines}")
    (folder / "nvidia-smi").chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


@pytest.mark.parametrize("gpus", (0, 1))
def test_dry_run_names_every_flag(tmp_path: Path, gpus: int) -> None:
    from megablocks.megatron.cpu import REQUIRED_FLAGS

    done = _run("runs/x", "7", DRY_RUN="1", FLAGS="--seed 5", **_with_gpus(tmp_path, gpus))
    assert done.returncode == 0 and done.stderr == "", done.stderr
    (line,) = done.stdout.splitlines()
    words = shlex.split(line)
    assert words[words.index("--train-iters") + 1] == "7" and words[-2:] == ["--seed", "5"]
    assert words[words.index("--spec") + 1 :][:2] == ["megablocks.megatron.specs", "block_spec"]
    on_cpu, anywhere = REQUIRED_FLAGS[:2], REQUIRED_FLAGS[2:]
    assert all(flag in line for flag in (*anywhere, "--max-position-embeddings", "--eval-interval"))
    assert [flag in line for flag in on_cpu] == [not gpus] * 2
    assert ("--bf16" in words) == bool(gpus)
    processes = "1" if gpus else "2"
    assert words[words.index("--nproc-per-node") + 1] == processes
    assert words[words.index("--expert-model-parallel-size") + 1] == processes


def test_a_checkout_that_cannot_serve_is_one_line(tmp_path: Path) -> None:
    done = _run(str(tmp_path / "run"), MEGATRON_LM_PATH=str(tmp_path))
    assert done.returncode == 1
    assert done.stderr == f"dmoe_spec.sh: MEGATRON_LM_PATH={tmp_path} holds no pretrain_gpt.py: set it to a checkout\n"
    (tmp_path / "pretrain_gpt.py").touch()
    (tmp_path / "megatron").mkdir()
    done = _run(str(tmp_path / "run"), MEGATRON_LM_PATH=str(tmp_path))
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert "hides the installed megatron-core" in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.xdist_group("ranks")
def test_a_wrong_setting_is_one_line_before_anything_is_fetched(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder, environment, message in (
        ("run", {"NGPU": "x"}, "NGPU=x: must be a whole number from 1 to 1024"),
        ("file", {}, f"EXP_DIR={tmp_path}/file is a file: choose another folder"),
    ):
        done = _run(str(tmp_path / folder), MEGATRON_LM_PATH=str(tmp_path), **environment)
        assert (done.returncode, done.stdout, done.stderr) == (1, "", f"dmoe_spec.sh: {message}\n")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_it_trains_and_leaves_the_data_set_as_it_was(tmp_path: Path) -> None:
    checkout = Path(os.environ.get("MEGATRON_LM_PATH") or ROOT / "third_party/Megatron-LM")
    if not (checkout / "pretrain_gpt.py").is_file():
        pytest.skip("needs Megatron-LM: run third_party/fetch.sh Megatron-LM, or set MEGATRON_LM_PATH to a checkout")
    data, environment = tmp_path / "set", {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    prepare = [sys.executable, str(ROOT / "scripts/prepare_data.py")]
    small = ["--vocab-size", "600", "--max-bytes", "300000", "--valid-fraction", "0.3", "--workers", "1"]
    subprocess.run([*prepare, "--out", str(data), *small], env=environment, check=True, capture_output=True)
    before = {path.name: path.stat().st_mtime_ns for path in data.iterdir()}

    flags = "--log-interval 1 --eval-iters 1 --micro-batch-size 2 --global-batch-size 4"
    given = {"MEGATRON_LM_PATH": str(checkout), "DATA_PREFIX": str(data), "NGPU": "2", "CUDA_VISIBLE_DEVICES": ""}
    done = _run(str(tmp_path / "run"), "8", FLAGS=flags, **given, **_with_gpus(tmp_path, 0))
    output = done.stdout + done.stderr
    assert done.returncode == 0, output[-3000:]
    losses = [float(x) for x in re.findall(r"\| lm loss: (\S+) \|", output)]
    assert len(losses) == 8 and losses[-1] < losses[0] - 0.5, losses
    assert "load_balancing_loss" in output and "validation loss at iteration 8" in output
    assert (tmp_path / "run/train.log").read_text().count("lm loss:") == 8
    assert {path.name: path.stat().st_mtime_ns for path in data.iterdir()} == before
