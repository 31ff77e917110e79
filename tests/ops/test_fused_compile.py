"""The Hopper kernels of the fused MLP compile once for all token counts.

No GPU is needed: a process of its own compiles for a GPU that is not there. Shared memory: see test_compile.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import torch
from megablocks.ops.activation_table import Activation
from megablocks.ops.fused.gradient_hopper import down_gradient
from megablocks.ops.fused.up_hopper import up
from megablocks.ops.routing.dispatch import Dispatch
from megablocks.testing.compile_only import compiling_for

E, I, H = 5, 136, 72
counts = []
with compiling_for(90) as compiled:
    for rows in (4000, 512, 513, 20):
        offsets, index = torch.zeros(E + 1, dtype=torch.int32), torch.zeros(rows, dtype=torch.int32)
        d = Dispatch(offsets, torch.zeros(rows // 2 + 1, dtype=torch.int32), index, index, index)
        x, w = torch.zeros(rows // 2, H, dtype=torch.bfloat16), torch.zeros(E, I, H, dtype=torch.bfloat16)
        for v, name in ((None, "gelu"), (w, "swiglu")):
            pre, gate, _ = up(x, w, v, None, None, d, Activation(name))
            down_gradient(x, w, pre, gate, torch.zeros(rows), d, Activation(name))
        counts.append({name: len(made) for name, made in compiled.items()})
assert sorted(counts[0].values()) == [2, 2] and counts == [counts[0]] * 4, f"{counts} after each number of tokens"
"""


def test_fused_kernels_compile_once_for_all_token_counts(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
