"""exp/paper/compare.sh prints its launches."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMPARE = ROOT / "exp/paper/compare.sh"


def _dry(out: Path, model: str, **variables: str) -> list[str]:
    kept = {k: v for k, v in os.environ.items() if k not in ("DATA_PREFIX", "FLAGS", "NGPU", "BUDGET", "ARMS")}
    environment = {**kept, "PYTHON": sys.executable, "DRY_RUN": "1", **variables}
    done = subprocess.run(["bash", str(COMPARE), str(out), model], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not out.exists()
    return done.stdout.splitlines()


@pytest.mark.skipif(importlib.util.find_spec("tutel") is not None, reason="Tutel is installed")
def test_L1_dry_run_prints_every_launch(tmp_path: Path) -> None:
    lines = _dry(tmp_path / "out", "xs", BUDGET="100M", ARMS="dense,dmoe,tutel-0", SEEDS="2", RATES="tuned", NGPU="2")
    assert lines[0] == "# tutel-0: not run: tutel is not installed"
    assert sum("find_micro_batch.py" in line for line in lines) == 2
    assert sum("/tuning/" in line for line in lines) == 6
    runs = [line for line in lines if "/runs/" in line]
    assert len(runs) == 4 and all(line.startswith("NGPU=2 FLAGS='") for line in runs)
    assert f"{tmp_path}/out/runs/dmoe/1235 800 64" in runs[-1]


def test_L1_runs_at_once_share_the_gpus(tmp_path: Path) -> None:
    smi = tmp_path / "bin/nvidia-smi"
    smi.parent.mkdir()
    smi.write_text("#!/bin/sh\nprintf 'GPU 0: one\\nGPU 1: one\\nGPU 2: one\\nGPU 3: one\\n'\n")
    smi.chmod(0o755)
    path = f"{smi.parent}:{os.environ['PATH']}"
    settings = {"BUDGET": "100M", "ARMS": "dense,dmoe", "MICRO_BATCH": "128,dmoe:64", "PATH": path}
    for at_once, ngpu in ((1, 4), (2, 2), (3, 1), (4, 1)):
        lines = _dry(tmp_path / "out", "xs", **settings, AT_ONCE=str(at_once))
        assert [line.split()[0] for line in lines] == [f"NGPU={ngpu}"] * 2
        assert "--micro-batch-size 128" in lines[0] and "--micro-batch-size 64" in lines[1]
    environment = {**os.environ, "PYTHON": sys.executable, "DRY_RUN": "1", **settings}
    refused = (
        ({"AT_ONCE": "5", "NGPU": "1"}, "paper: AT_ONCE=5: with NGPU=1 needs 5 GPUs, there are 4; use fewer"),
        ({"AT_ONCE": "2", "CUDA_VISIBLE_DEVICES": "3"}, "paper: AT_ONCE=2: with NGPU=1 needs 2 GPUs, there are 1"),
        ({"AT_ONCE": "two"}, "compare.sh: AT_ONCE=two: must be a whole number from 1 to 1024"),
    )
    for variables, said in refused:
        command = ["bash", str(COMPARE), str(tmp_path / "out"), "xs"]
        done = subprocess.run(command, env=environment | variables, capture_output=True, text=True)
        assert done.returncode and done.stderr.startswith(said) and done.stderr.count("\n") == 1, done.stderr
