"""The block-sparse Triton kernels compile for every architecture, within its shared memory, without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SHARED_BYTES = {80: 166_912, 86: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}

# In a process of its own: here Triton is interpreted where there is no GPU.
PROGRAM = """
import sys
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from megablocks.ops.sparse import kernels

def shared(kernel, pointers, options, **given):
    constants = options | given
    warps, stages = constants.pop("num_warps"), constants.pop("num_stages")
    names = kernel.arg_names
    kinds = {n: pointers.get(n, "constexpr" if n in constants else "i32") for n in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n in pointers or n in ALIGNED}
    source = ASTSource(kernel, kinds, {(names.index(n),): v for n, v in constants.items()}, aligned)
    target = GPUTarget("cuda", int(sys.argv[1]), 32)
    return triton.compile(source, target=target, options={"num_warps": warps, "num_stages": stages}).metadata.shared

ALIGNED = ("a_m", "b_k", "k_size", "size", "dense_k", "out_l")
worst = 0
for dtype, name in ((torch.bfloat16, "*bf16"), (torch.float32, "*fp32")):
    for size in (64, 128):
        options = kernels._settings(torch.empty(1, dtype=dtype), size) | {"UPCAST": False}
        data = dict.fromkeys(("a_ptr", "b_ptr", "out_ptr", "data_ptr", "dense_ptr"), name)
        data |= dict.fromkeys(("rows_ptr", "cols_ptr", "offsets_ptr", "work_ptr", "index_ptr", "block_ptr"), "*i32")
        epilogues = {"": {}, "activate": {"bias_ptr": name, "act_ptr": name}, "slope": {"pre_ptr": name}}
        for kind, pointers in epilogues.items():
            none = {n: None for n in ("bias_ptr", "pre_ptr", "act_ptr") if n not in pointers}
            act = {"KIND": kind, "NAME": "gelu", "EXACT": True, "a_k": 1, "b_n": 1}
            worst = max(worst, shared(kernels._sdd_kernel, data | pointers, options, **act, **none))
        for left, by_column in ((True, False), (False, True)):
            how = {"D": 128, "LEFT": left, "BY_COLUMN": by_column, "dense_d": 1, "out_d": 1}
            worst = max(worst, shared(kernels._spmm_kernel, data, options, **how))
print(worst)
"""


@pytest.mark.slow
@pytest.mark.parametrize("architecture", SHARED_BYTES)
def test_kernels_compile_within_shared_memory(architecture: int, tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(architecture)],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert 0 < int(done.stdout) <= SHARED_BYTES[architecture]
