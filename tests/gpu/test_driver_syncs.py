"""S1: between log intervals a training step reads nothing from the GPU."""

import os
import signal
import subprocess
import sys

import pytest
import torch

PROGRAM = """
import functools
import sys
import torch
from megablocks.megatron import pretrain_gpt
import megatron.training.training as training

steps, step = [], training.train_step

@functools.wraps(step)
def watched(*args, **kwargs):
    steps.append(1)
    # From the start of step 4 to the start of step 7, so what the loop does after steps 4 to 6 is in it.
    torch.cuda.set_sync_debug_mode("error" if 4 <= len(steps) < 7 else "default")
    return step(*args, **kwargs)

training.train_step = watched
code = pretrain_gpt.main()
print("steps", len(steps))
sys.exit(code)
"""
DRIVER = (
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 500 --num-layers 2 --hidden-size 128 "
    "--num-attention-heads 4 --seq-length 128 --max-position-embeddings 128 --micro-batch-size 2 "
    "--global-batch-size 4 --train-iters 8 --lr 1e-3 --lr-decay-iters 8 --log-interval 8 --eval-iters 0 --bf16"
).split()
EXPERTS = "--moe-num-experts 8 --moe-top-k 2 --moe-loss-weight 0.1 --moe-zloss-weight 0.001".split()


def run(*flags, program=("-c", PROGRAM)):
    """Its exit status and what it printed. A run that hangs is aborted, and prints the stack of each of its threads."""
    command = [sys.executable, "-X", "faulthandler", *program, *DRIVER, *flags]
    child = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )  # fmt: skip
    try:
        said, _ = child.communicate(timeout=300)
    except subprocess.TimeoutExpired:
        child.send_signal(signal.SIGABRT)
        child.wait(timeout=30)
        os.killpg(child.pid, signal.SIGKILL)  # what it started may hold the pipe open
        said, _ = child.communicate()
    return child.returncode, said


@pytest.mark.gpu
@pytest.mark.parametrize("flags", [[], EXPERTS], ids=["dense", "experts"])
def test_S1_three_steps_without_a_synchronization(flags, tmp_path):
    pytest.importorskip("megatron.training")
    status, said = run(*flags, "--tensorboard-dir", str(tmp_path))
    assert status == 0 and "steps 8" in said, said[-4000:]


@pytest.mark.gpu
def test_S1_two_ranks_exchange_their_exit_signals_without_a_synchronization(tmp_path):
    pytest.importorskip("megatron.training")
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    status, said = run(program=("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(file)))
    assert status == 0 and said.count("steps 8") == 2, said[-4000:]


@pytest.mark.gpu
def test_a_synchronization_would_be_seen():
    """Megatron's own optimizer reads the gradient norm in each step."""
    pytest.importorskip("megatron.training")
    status, said = run("--no-megablocks-fused-optimizer")
    assert status != 0 and "called a synchronizing CUDA operation" in said, said[-4000:]
