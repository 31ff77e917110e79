"""The kernels of routing, of movement and of activations compile once for all token counts.

No GPU is needed: a process of its own compiles for a GPU that is not there. Shared memory: see test_compile.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import torch
from megablocks.testing.compile_only import compiling_for
from megablocks.ops import activation_triton
from megablocks.ops.activation_table import Activation
from megablocks.ops.permute import padded_triton, permute_triton
from megablocks.ops.routing import dispatch_triton, topk_triton
from megablocks.ops.routing.dispatch import Dispatch
from megablocks.ops.routing.topk import RouterGradients, RouterOptions, RouterSaved

MODULES = (activation_triton, padded_triton, permute_triton, dispatch_triton, topk_triton)
KERNELS = [v for m in MODULES for n, v in vars(m).items() if n.endswith("_kernel")]

def ints(*shape):
    return torch.zeros(shape, dtype=torch.int32)

def launch(T, hidden, E, K, dtype):
    R, N = T * K, T * K + 7
    x, rows, weight = torch.empty(T, hidden, dtype=dtype), torch.empty(N, hidden, dtype=dtype), torch.empty(R)
    token_offsets, scatter = ints(T + 1), ints(R)
    for padded in (False, True):
        d = Dispatch(ints(E + 1), token_offsets, ints(N), scatter, ints(N), padded)
        permute_triton.expand_launch(x, d)
        permute_triton.combine_backward_launch(x, rows, weight, d)
        permute_triton.combine_backward_launch(x, None, weight, d)
    for gate in (rows, None):
        activation_triton.activation_launch(rows, gate, Activation("silu"))
        activation_triton.activation_backward_launch(rows, rows, gate, Activation("silu"))
    for w in (weight, None):
        permute_triton.combine_launch(rows, w, d)
    d = Dispatch(ints(E + 1), token_offsets, ints(R), scatter, ints(R))
    padded_triton.pad_launch(d, ints(E + 1)[1:], 0, N)
    padded_triton.pad_launch(d, None, T, E * T)
    dispatch_triton.dispatch_launch(ints(R), ints(R), T, E)
    one, logits = torch.ones(()), torch.empty(T, E, dtype=dtype)
    for mask, bias, options in (
        (None, None, RouterOptions(K, False, False, 0, 1.0, 0.1, 0.1)),
        (torch.zeros(T, dtype=torch.bool), torch.zeros(E), RouterOptions(K, True, False, 2, 2.5, 0.1, 0.1)),
        (None, torch.zeros(E), RouterOptions(K, False, True, 1, 1.0, 0.1, 0.1)),
    ):
        topk_triton.route_launch(logits, bias, mask, options)
        saved = RouterSaved(ints(R), ints(E).long(), ints(3).long())
        grads = RouterGradients(weight, one, one, torch.ones(E))
        topk_triton.route_backward_launch(logits, mask, saved, grads, options)
    topk_triton.weight_backward_launch(torch.ones(R), ints(R), torch.ones(R), E, dtype, options)

def kernels_made():
    return [sum(len(c[0]) for c in kernel.device_caches.values()) for kernel in KERNELS]

hidden, E, K, dtype = CASE
with compiling_for(90):
    launch(64, hidden, E, K, dtype)
    before = kernels_made()
    for T in (1, 63, 100):
        launch(T, hidden, E, K, dtype)
    assert before == kernels_made(), "compiled again"
assert all(kernels_made()), "a kernel was never launched"
"""


@pytest.mark.slow  # tests/gpu/test_token_counts.py asks the same of whole layers without compiling
@pytest.mark.parametrize("case", ["1000, 60, 1, torch.float32", "1536, 128, 8, torch.bfloat16"])
def test_new_token_counts_compile_nothing(case: str, tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.replace("CASE", case)],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
