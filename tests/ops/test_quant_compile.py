"""The quantising kernels compile for every architecture, within its shared memory, without a GPU."""

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
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from megablocks.ops.quant import quant_triton
from megablocks.ops.quant.quant import TINY

POINTERS = {"codes_ptr": "*u8", "scales_ptr": "*i16"}
worst = -1
for num_bits in (8, 4):
    for dtype in ("*bf16", "*fp16", "*fp32"):
        for width in (20, 1024):
            quantizing = {"TINY": TINY, "SLACK": 1.03, "LARGEST": 0x47700000}
            for kernel, extra in ((quant_triton._quantize_kernel, quantizing), (quant_triton._dequantize_kernel, {})):
                constants = quant_triton._blocks(num_bits, width) | extra
                warps = constants.pop("num_warps")
                names = kernel.arg_names
                pointers = POINTERS | {"x_ptr": dtype, "out_ptr": dtype}
                kinds = {n: pointers.get(n, "constexpr" if n in constants else "i32") for n in names}
                aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n in pointers}
                source = ASTSource(kernel, kinds, {(names.index(n),): v for n, v in constants.items()}, aligned)
                target = GPUTarget("cuda", int(sys.argv[1]), 32)
                compiled = triton.compile(source, target=target, options={"num_warps": warps})
                worst = max(worst, compiled.metadata.shared)
print(worst)
"""


@pytest.mark.slow
@pytest.mark.parametrize("architecture", SHARED_BYTES)
def test_quantising_kernels_compile_within_shared_memory(architecture: int, tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(architecture)],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert 0 <= int(done.stdout) <= SHARED_BYTES[architecture]
