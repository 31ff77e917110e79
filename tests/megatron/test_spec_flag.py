"""Megatron-LM's own pretrain_gpt.py, unmodified, trains our layers through `--spec`."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FLAGS = """--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64
--micro-batch-size 1 --global-batch-size 4 --train-iters 10 --lr 2e-3 --min-lr 1e-4 --lr-decay-iters 10 --mock-data
--tokenizer-type NullTokenizer --vocab-size 127 --eval-iters 1 --eval-interval 1000 --log-interval 1 --split 99,1,0
--disable-bias-linear --num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 0.01
--spec megablocks.megatron.specs block_spec""".split()


def _megatron_lm() -> Path:
    for place in (os.environ.get("MEGATRON_LM_PATH"), ROOT / "third_party" / "Megatron-LM"):
        if place and (Path(place) / "pretrain_gpt.py").is_file():
            # A full checkout's own megatron/ would hide the megatron-core that is installed; the scripts are enough.
            assert not (Path(place) / "megatron").exists(), f"remove {place}/megatron, or use third_party/fetch.sh"
            return Path(place)
    pytest.skip("needs Megatron-LM: run third_party/fetch.sh Megatron-LM, or set MEGATRON_LM_PATH to a checkout")


def _losses(
    processes: int, extra: list[str], environment: dict[str, str], script: tuple[str, ...] = ("pretrain_gpt.py",)
) -> tuple[list[float], str]:
    from megablocks.megatron.cpu import REQUIRED_FLAGS

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    cpu_flags = " ".join(REQUIRED_FLAGS).split()
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={processes}", f"--master_port={port}"]
    command += [*script, *FLAGS, *cpu_flags, *extra]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **environment}
    run = subprocess.run(command, cwd=_megatron_lm(), env=env, capture_output=True, text=True)
    output = run.stdout + run.stderr
    assert run.returncode == 0, output[-3000:]
    return [float(x) for x in re.findall(r"\| lm loss: (\S+) \|", output)], output


def test_unmodified_pretrain_gpt_trains_with_our_layers() -> None:
    losses, output = _losses(2, ["--expert-model-parallel-size", "2"], {})
    assert len(losses) == 10
    assert losses[-1] < losses[0] - 0.3
    assert "load_balancing_loss" in output


@pytest.mark.slow
def test_environment_variables_reach_the_layer() -> None:
    dropless, _ = _losses(1, ["--train-iters", "2"], {})
    dropping, _ = _losses(1, ["--train-iters", "2"], {"MEGABLOCKS_CAPACITY_FACTOR": "0.1"})
    assert dropless[1] != dropping[1]


@pytest.mark.slow
def test_a_run_resumes_with_the_distributed_optimizer(tmp_path: Path) -> None:
    flags = ["--expert-model-parallel-size", "2", "--use-distributed-optimizer"]
    flags += ["--hidden-dropout", "0", "--attention-dropout", "0", "--save", str(tmp_path), "--save-interval", "5"]
    whole, _ = _losses(2, flags, {})
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("5")
    resumed, _ = _losses(2, [*flags, "--load", str(tmp_path)], {})
    # Megatron counts a run's first step twice: its second line is the mean of two steps.
    expected = [whole[5], (whole[5] + whole[6]) / 2, *whole[7:]]
    assert resumed == pytest.approx(expected, abs=2e-6)


@pytest.mark.slow
def test_tensor_parallelism_on_a_cpu_needs_the_runner() -> None:
    flags = ["--tensor-model-parallel-size", "2", "--sequence-parallel"]
    losses, _ = _losses(2, flags, {}, ("-m", "megablocks.megatron.cpu", "pretrain_gpt.py"))
    assert len(losses) == 10 and losses[-1] < losses[0] - 0.3
