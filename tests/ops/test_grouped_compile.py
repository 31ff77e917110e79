"""The Hopper kernels of the grouped products as compiled: they load each tile's bounds, and their products overlap.

No GPU is needed: a process of its own compiles for a GPU that is not there. Shared memory: see test_compile.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.xdist_group("hopper_compile")  # one worker compiles, not two

PROGRAM = """
import re
import torch
from megablocks.ops.grouped import grouped_mm_hopper_dw as hopper_dw
from megablocks.ops.hopper import descriptor
from megablocks.testing.compile_only import compiling_for

for t, box in ((torch.empty(6, 64).bfloat16(), [2, 64]), (torch.empty(1, 3, 64).half()[:, :1, :8], [1, 1, 8])):
    made = descriptor(t, box)  # Triton's own constructor, which checks, makes the same of its fields
    assert made == type(made)(t, made.shape, made.strides, made.block_shape, made.layout), made
    assert made.shape == list(t.shape), made

E, K, N, R = 5, 192, 384, 4000
offsets, gather = torch.zeros(E + 1, dtype=torch.int32), torch.zeros(R, dtype=torch.int32)
with compiling_for(90) as compiled:
    dy, x = torch.empty(R, N, dtype=torch.bfloat16), torch.empty(R, K, dtype=torch.bfloat16)
    hopper_dw.ragged_k(dy, x, offsets, gather)
(made,) = compiled["megablocks.ops.grouped.grouped_mm_hopper_dw.ragged_k_kernel"]
text = re.sub(r"loc\\([^)]*\\)", "", made.asm["ttgir"])
roles = re.split(r"\\n    (?=default|partition[0-9])", text)[1:]
assert roles
for role in roles:
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
    hopper.ragged_m(z, w, offsets, x2=z, v=w)
    hopper_dw.ragged_k(z, x, offsets, rows)
texts = [made.asm["ptx"] for kind in compiled.values() for made in kind if "wgmma" in made.asm["ptx"]]
assert len(texts) == 4
for ptx in texts:
    first = re.search(r"wgmma\\.mma_async[^{]*\\{(%\\w+)", ptx)
    end = ptx.index(";", ptx.index("wgmma.commit_group", first.start())) + 1
    assert serialized(ptx[:end] + f" add.rn.f32 {first[1]}, {first[1]}, {first[1]};" + ptx[end:]), "not told"
    assert not serialized(ptx), ptx[:2000]
"""


BOTH = """
import json, sys, traceback
verdicts = []
for program in json.load(sys.stdin):
    try:
        exec(program, {})
        verdicts.append("")
    except Exception:
        verdicts.append(traceback.format_exc())
print(json.dumps(verdicts))
"""


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What went wrong in each program, by one process that imports torch and Triton once."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("cache"))
    given = json.dumps([PROGRAM, SERIALIZED])
    done = subprocess.run([sys.executable, "-c", BOTH], input=given, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_hopper_kernels_load_each_tiles_bounds(verdicts: list[str]) -> None:
    """Triton drops a value carried around a loop whose only use is to bound an inner one; that kernel hangs."""
    assert not verdicts[0], verdicts[0]


def test_ptxas_leaves_products_of_hopper_kernels_in_flight(verdicts: list[str]) -> None:
    """Where it finds sums read among them, as the one that is put there, it adds waits."""
    assert not verdicts[1], verdicts[1]
