"""The Hopper kernels of the grouped products compile once for all token counts, and load each tile's bounds.

No GPU is needed: a process of its own compiles for a GPU that is not there. Shared memory: see test_compile.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import re
import torch
from megablocks.ops.grouped import grouped_mm_hopper as hopper, grouped_mm_hopper_dw as hopper_dw
from megablocks.ops.hopper import descriptor
from megablocks.testing.compile_only import compiling_for

for t, box in ((torch.empty(6, 64).bfloat16(), [2, 64]), (torch.empty(1, 3, 64).half()[:, :1, :8], [1, 1, 8])):
    made = descriptor(t, box)  # Triton's own constructor, which checks, makes the same of its fields
    assert made == type(made)(t, made.shape, made.strides, made.block_shape, made.layout), made
    assert made.shape == list(t.shape), made

E, K, N = 5, 192, 384
counts = []
with compiling_for(90) as compiled:
    for rows in (4000, 512, 513, 20):
        offsets, gather = torch.zeros(E + 1, dtype=torch.int32), torch.zeros(rows, dtype=torch.int32)
        x, x2, dy = (torch.empty(rows, size, dtype=torch.bfloat16) for size in (K, K, N))
        w = torch.empty(E, N, K, dtype=torch.bfloat16).transpose(1, 2)
        hopper.ragged_m(x, w, offsets)
        hopper.ragged_m(x, w, offsets, gather)
        hopper.ragged_m_sum(x, w, x2, w, offsets)
        hopper_dw.ragged_k(dy, x, offsets)
        hopper_dw.ragged_k(dy, x, offsets, gather)
        key = None, E, N, K, False, True, 0, False
        assert hopper._plan(*key) is hopper._plan(*key)
        counts.append({name: len(made) for name, made in compiled.items()})
    ops = "megablocks.ops.grouped"
    dw, *pieces = (
        f"{ops}.{name}_kernel"
        for name in ("grouped_mm_hopper_dw.ragged_k", "pieces_triton.list_pieces", "pieces_triton.add_pieces")
    )
    assert counts[0] == {f"{ops}.grouped_mm_hopper.ragged_m_kernel": 3, dw: 2} | dict.fromkeys(pieces, 1), counts
    assert counts == [counts[0]] * 4, f"{counts} kernels after each number of tokens"
    for made in compiled[dw]:
        text = re.sub(r"loc\\([^)]*\\)", "", made.asm["ttgir"])
        for role in re.split(r"\\n    (?=default|partition[0-9])", text)[1:]:
            before, inside = role.split("scf.for", 1)
            assert before.count("tt.load") >= 2 and inside.count("tt.load") >= 2, "a tile's bounds are not loaded"
"""


SERIALIZED = """
import re, subprocess, sys, tempfile
import torch
from triton.backends.nvidia.compiler import get_ptxas
from megablocks.ops.activation_table import Activation
from megablocks.ops.fused import gradient_hopper, up_hopper
from megablocks.ops.grouped import grouped_mm_hopper as hopper, grouped_mm_hopper_dw as hopper_dw
from megablocks.ops.routing.dispatch import Dispatch
from megablocks.testing.compile_only import compiling_for

def serialized(ptx):
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [get_ptxas(90).path, "-v", "--gpu-name=sm_90a", file.name, "-o", "/dev/null"]
        done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    # From CUDA 12.9 on ptxas adds one wait in place of one behind each product.
    said = ("wgmma.mma_async instructions are serialized", "is injected in around line")
    return any(text in done.stdout + done.stderr for text in said)

E, H, I, R = 9, 1536, 256, 4000
offsets, rows = torch.zeros(E + 1, dtype=torch.int32), torch.zeros(R, dtype=torch.int32)
x, z, w = (torch.empty(*shape, dtype=torch.bfloat16) for shape in ((512, H), (R, I), (E, I, H)))
d, swiglu = Dispatch(offsets, torch.zeros(513, dtype=torch.int32), rows, rows, rows), Activation("swiglu")
with compiling_for(90) as compiled:
    up_hopper.up(x, w, w, None, None, d, swiglu)
    gradient_hopper.down_gradient(x, w, z, z, torch.empty(R), d, swiglu)
    hopper.ragged_m_sum(z, w, z, w, offsets)
    hopper_dw.ragged_k(z, x, offsets, rows)
texts = [made.asm["ptx"] for kind in compiled.values() for made in kind if "wgmma" in made.asm["ptx"]]
assert len(texts) == 4
for ptx in texts:
    first = re.search(r"wgmma\\.mma_async[^{]*\\{(%\\w+)", ptx)
    end = ptx.index(";", ptx.index("wgmma.commit_group", first.start())) + 1
    assert serialized(ptx[:end] + f" add.rn.f32 {first[1]}, {first[1]}, {first[1]};" + ptx[end:]), "not told"
    assert not serialized(ptx), ptx[:2000]
"""


def run(program: str, tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]


def test_hopper_kernels_compile_once_for_all_token_counts_and_load_each_tiles_bounds(tmp_path: Path) -> None:
    """Triton drops a value carried around a loop whose only use is to bound an inner one; that kernel hangs."""
    run(PROGRAM, tmp_path)


def test_ptxas_leaves_products_of_hopper_kernels_in_flight(tmp_path: Path) -> None:
    """Where it finds sums read among them, as the one that is put there, it adds waits."""
    run(SERIALIZED, tmp_path)
