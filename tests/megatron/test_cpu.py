"""The CPU path: it changes nothing with CUDA, maps devices, and needs each of its patches."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megablocks.megatron import cpu

ROOT = Path(__file__).parents[2]

SCRIPT = """
import sys
from megablocks.megatron import cpu
left_out = sys.argv.pop(1)
cpu.PATCHES.pop(left_out, None)
if left_out == "skip_compile_helpers":
    cpu.skip_compile_helpers = lambda: None
from megablocks.megatron.pretrain_gpt import main
sys.exit(main())
"""

FLAGS = """--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1
--global-batch-size 4 --train-iters 2 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 127
--eval-iters 0 --eval-interval 1000 --log-interval 1 --num-experts 4 --moe-router-topk 2 --split 99,1,0
--expert-model-parallel-size 2 --use-distributed-optimizer --megablocks-layer megatron
--log-memory-to-tensorboard""".split()
NEEDED_ONLY_WITH = {"device_properties": ["--tensor-model-parallel-size", "2", "--sequence-parallel"]}


def test_nothing_changes_where_there_is_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(cpu, "PATCHES", {"any": lambda: pytest.fail("patched")})
    assert cpu.install() is False


def test_cuda_devices_mean_the_cpu_inside_the_mode_only() -> None:
    x = torch.ones(3, dtype=torch.bfloat16)
    with cpu._CudaMeansCpu():
        for made in (
            torch.zeros(2, device="cuda"),
            torch.tensor([1], device=torch.device("cuda", 0)),
            torch.empty_like(x, device="cuda:1"),
            x.to("cuda"),
            x.to(device="cuda"),
            x.cuda(non_blocking=True),
        ):
            assert made.device.type == "cpu"
        assert x.cuda() is x
        assert x.type() == "torch.cuda.BFloat16Tensor" and x.long().type() == "torch.LongTensor"
        assert torch.zeros(1, device="meta").device.type == "meta"
        assert x.type(torch.float32).dtype is torch.float32
    assert x.type() == "torch.BFloat16Tensor"


def _run(tmp_path: Path, skip: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "run.py"
    script.write_text(SCRIPT)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", f"--master_port={port}"]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    if skip == "no_compiler":  # as on a machine without one
        env |= {"CXX": "/nonexistent/c++", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    command += [
        str(script),
        skip,
        *FLAGS,
        *NEEDED_ONLY_WITH.get(skip, []),
        "--megablocks-run-dir",
        str(tmp_path / "run"),
        "--tensorboard-dir",
        str(tmp_path),
    ]
    return subprocess.run(command, env=env, capture_output=True, text=True)


_OF_CHECKOUT = """
from megablocks.megatron import cpu
cpu.skip_compile_helpers()
from megatron.core.datasets import helpers_cpp, utils
utils.compile_helpers()
print(utils.__file__, helpers_cpp.__file__)
"""


@pytest.mark.slow
def test_a_checkout_that_hides_the_wheel_gets_its_helpers(tmp_path: Path) -> None:
    """A checkout has the helpers' source and a Makefile, which needs pybind11; here it has neither."""
    import megatron.core

    wheel = Path(megatron.core.__file__).parents[1]
    shutil.copytree(wheel, tmp_path / "megatron", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    path = os.pathsep.join([str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", _OF_CHECKOUT]
    run = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    utils, helpers = run.stdout.split()
    assert utils.startswith(str(tmp_path)) and helpers.startswith(str(wheel))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nothing", "skip_compile_helpers", *cpu.PATCHES])
def test_each_patch_is_needed(tmp_path: Path, name: str) -> None:
    run = _run(tmp_path, name)
    output = run.stdout + run.stderr
    if name == "nothing":
        assert run.returncode == 0, output[-3000:]
        assert len(re.findall(r"\| lm loss: ", output)) == 2
    else:
        assert run.returncode != 0, f"trains without {name}"
