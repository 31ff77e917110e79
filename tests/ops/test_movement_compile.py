"""The routing and movement kernels compile for every architecture within its shared memory, once for all token counts.

No GPU is needed: each case runs in a process of its own, in which Triton compiles for a GPU that is not there.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megablocks.testing.compile_only import SHARED_BYTES

PROGRAM = """
import contextlib, sys
from unittest import mock
import torch
from megablocks.testing.compile_only import install

install(int(sys.argv[1]))
from megablocks.ops.permute import padded_triton, permute_triton
from megablocks.ops.routing import dispatch_triton, router_triton

MODULES = (padded_triton, permute_triton, dispatch_triton, router_triton)
KERNELS = [v for m in MODULES for n, v in vars(m).items() if n.endswith("_kernel")]
made = {}

def record(kernel):
    run = kernel.run
    def warmup(*args, warmup, **options):
        made.setdefault(kernel.__name__, []).append(run(*args, warmup=True, **options))
    return mock.patch.object(kernel, "run", warmup)

def ints(*shape):
    return torch.zeros(shape, dtype=torch.int32)

def launch(T, hidden, E, K, dtype):
    R, N = T * K, T * K + 7
    x, rows, weight = torch.empty(T, hidden, dtype=dtype), torch.empty(N, hidden, dtype=dtype), torch.empty(R)
    token_offsets, scatter, ends = ints(T + 1), ints(R), ints(E + 1)[1:]
    for padded in (False, True):
        pair = ints(N)
        permute_triton.expand_launch(x, scatter, token_offsets, pair, padded)
        permute_triton.combine_backward_launch(x, rows, weight, pair, scatter, token_offsets, padded)
        permute_triton.combine_backward_launch(x, None, weight, pair, scatter, token_offsets, padded)
    for w in (weight, None):
        permute_triton.combine_launch(rows, w, ints(N), scatter, token_offsets)
    padded_triton.pad_launch(ends, ints(E + 1)[1:], 0, N, ints(R), ints(R), scatter, 1)
    padded_triton.pad_launch(ends, None, T, E * T, ints(R), None, None, K)
    padded_triton.replicate_launch(torch.empty(2, E, dtype=dtype), ends, N)
    padded_triton.bin_sum_launch(torch.empty(2, N, dtype=dtype), ends)
    for top_k in (K, None):
        dispatch_triton.dispatch_launch(ints(R), ints(R), T, E, top_k)
    one, logits = torch.ones(()), torch.empty(T, E, dtype=dtype)
    for mask, bias, options in (
        (None, None, (K, False, False, 0, 1.0, 0.1, 0.1)),
        (torch.zeros(T, dtype=torch.bool), torch.zeros(E), (K, True, False, 2, 2.5, 0.1, 0.1)),
        (None, torch.zeros(E), (K, False, True, 1, 1.0, 0.1, 0.1)),
    ):
        router_triton.route_launch(logits, bias, mask, *options)
        saved = (logits, mask, ints(R), ints(E).long(), ints(3).long())
        router_triton.route_backward_launch(*saved, weight, one, one, torch.ones(E), *options)

with contextlib.ExitStack() as stack:
    for kernel in KERNELS:
        stack.enter_context(record(kernel))
    for hidden, E, K, dtype in ((1536, 128, 8, torch.bfloat16), (1000, 60, 1, torch.float32)):
        launch(64, hidden, E, K, dtype)
        sizes = [sum(len(c[0]) for c in kernel.device_caches.values()) for kernel in KERNELS]
        for T in (1, 63, 100):
            launch(T, hidden, E, K, dtype)
        assert sizes == [sum(len(c[0]) for c in kernel.device_caches.values()) for kernel in KERNELS], "compiled again"
assert {k.__name__ for k in KERNELS} == set(made), {k.__name__ for k in KERNELS} - set(made)
print(max(c.metadata.shared for all in made.values() for c in all))
"""


@pytest.mark.parametrize(
    "architecture", [90, *(pytest.param(a, marks=pytest.mark.slow) for a in SHARED_BYTES if a != 90)]
)
def test_kernels_compile_once_within_shared_memory(architecture: int, tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(architecture)],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)}, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert 0 < int(done.stdout) <= SHARED_BYTES[architecture]
