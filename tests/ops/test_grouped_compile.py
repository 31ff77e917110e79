"""The kernels of the grouped products compile without a GPU: for every architecture, within its shared memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megablocks.testing.compile_only import SHARED_BYTES

COMMON = """
import sys
import torch
from megablocks.testing.compile_one import compiled, install
install(int(sys.argv[1]))
E, K, N = 5, 192, 384

def indices(rows):
    return torch.zeros(E + 1, dtype=torch.int32), torch.zeros(rows, dtype=torch.int32)
"""

TWIN = """
from megablocks.ops.grouped import grouped_mm_triton as twin
worst = 0
for dtype in (torch.bfloat16, torch.float16, torch.float32):
    for rows in (100, 200, 4000):  # 20, 40 and many an expert
        for n in (64, 128, 384):
            offsets, gather = indices(rows)
            x, w, y = (torch.empty(size, dtype=dtype) for size in ((rows, K), (E, K, n), (rows, n)))
            for index in (None, gather):
                m = compiled(twin._ragged_m_kernel, lambda: twin.ragged_m(x, w, offsets, index))
                k = compiled(twin._ragged_k_kernel, lambda: twin.ragged_k(x, y, offsets, index))
                worst = max(worst, m.metadata.shared, k.metadata.shared)
print(worst)
"""

HOPPER = """
import re
from megablocks.ops.grouped import grouped_mm_hopper as hopper
from megablocks.ops.grouped.grouped_mm_hopper_dw import ragged_k_kernel
from megablocks.ops.grouped.grouped_mm_hopper_kernel import ragged_m_kernel
hopper.multiprocessors = lambda device: 132
worst, counts = 0, []
for rows in (4000, 512, 513):
    offsets, gather = indices(rows)
    x, x2, dy = (torch.empty(rows, size, dtype=torch.bfloat16) for size in (K, K, N))
    w = torch.empty(E, N, K, dtype=torch.bfloat16).transpose(1, 2)
    tile = hopper.choose_m(N, K, 1000, False)
    launches = [
        (ragged_m_kernel, lambda: hopper.ragged_m(x, w, offsets, tile=tile)),
        (ragged_m_kernel, lambda: hopper.ragged_m(x, w, offsets, gather, tile=tile)),
        (ragged_m_kernel, lambda: hopper.ragged_m_sum(x, w, x2, w, offsets, tile=tile)),
        (ragged_k_kernel, lambda: hopper.ragged_k(dy, x, offsets)),
        (ragged_k_kernel, lambda: hopper.ragged_k(dy, x, offsets, gather)),
    ]
    for kernel, launch in launches:
        made = compiled(kernel, launch)
        worst = max(worst, made.metadata.shared)
        if kernel is ragged_k_kernel:
            text = re.sub(r"loc\\([^)]*\\)", "", made.asm["ttgir"])
            for role in re.split(r"\\n    (?=default|partition[0-9])", text)[1:]:
                before, inside = role.split("scf.for", 1)
                assert before.count("tt.load") >= 2 and inside.count("tt.load") >= 2, "a tile's bounds are not loaded"
    counts.append(sum(len(cache[0]) for k in (ragged_m_kernel, ragged_k_kernel) for cache in k.device_caches.values()))
assert counts[0] == len(launches) and counts == [counts[0]] * 3, f"{counts} kernels after each number of tokens"
print(worst)
"""


def shared_bytes(program: str, architecture: int, cache: Path) -> int:
    """The most shared memory that a kernel of the program takes. It runs alone: here Triton may be interpreted."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMMON + program, str(architecture)],
        env=environment | {"TRITON_CACHE_DIR": str(cache)}, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return int(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", SHARED_BYTES)
def test_twin_compiles_within_shared_memory(architecture: int, tmp_path: Path) -> None:
    assert 0 < shared_bytes(TWIN, architecture, tmp_path) <= SHARED_BYTES[architecture]


def test_hopper_kernels_compile_once_for_all_token_counts_and_load_each_tiles_bounds(tmp_path: Path) -> None:
    """Triton drops a value carried around a loop whose only use is to bound an inner one; that kernel hangs."""
    assert 0 < shared_bytes(HOPPER, 90, tmp_path) <= SHARED_BYTES[90]
