"""compute-sanitizer on every family of kernels: no access out of bounds, and no data race."""

from __future__ import annotations

import ast
import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import megablocks.ops
from megablocks.testing.compile_only import kernels_of_the_package

from .sanitize import FAMILIES, accesses, launches

TOOL = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
HERE = Path(__file__).parent
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not Path(TOOL).exists(), reason="needs compute-sanitizer, which comes with the CUDA toolkit"),
]


def watched(tool: str, *program: str) -> tuple[int, str]:
    """Exit status (9: the tool found an error) and output of a Python program under compute-sanitizer."""
    # Do not watch Triton's assembler. Use own ports, otherwise all runs of the tool on a machine share ten ports.
    port = 49152 + 10 * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    watch = [TOOL, "--tool", tool, "--target-processes", "application-only", "--port", str(port)]
    command = [*watch, "--error-exitcode", "9", "--print-limit", "1000", sys.executable, *program]
    # Each tensor is an allocation of its own, otherwise an overrun would stay inside torch's memory pool.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def test_every_kernel_of_the_package_is_in_a_family() -> None:
    with launches() as launched:
        for make in FAMILIES.values():
            make(torch.device("cuda"))()
    missing = kernels_of_the_package() - launched
    if torch.cuda.get_device_capability() != (9, 0):
        missing = {name for name in missing if "hopper" not in name}
    assert not missing


@pytest.mark.parametrize("name", FAMILIES)
def test_N12_memcheck(name: str) -> None:
    status, said = watched("memcheck", str(HERE / "sanitize.py"), name)
    assert f"{name} done" in said and "ERROR SUMMARY: 0 errors" in said and status == 0, said[-3000:]


@pytest.mark.parametrize("name", FAMILIES)
def test_N12_racecheck(name: str) -> None:
    """No hazards in the package's kernels, except in two hand-overs between warps: benchmarks/notes/sanitizers.md."""
    _, said = watched("racecheck", str(HERE / "sanitize.py"), name)
    assert f"{name} done" in said and "RACECHECK SUMMARY" in said, said[-3000:]
    ours = {kernel.rsplit(".", 1)[1] for kernel in kernels_of_the_package()}
    found = [access for access in accesses(said) if access[0] in ours or access[1].endswith(".py")]
    others = [access for access in found if place(*access[1:]) not in ("announce", "announced", "warp_specialize")]
    assert not others


@functools.cache
def place(file: str, line: int) -> str:
    """The function of the package that holds the line; "warp_specialize" if the line starts the roles of a kernel.

    The compiler gives the code that starts the roles the line of the kernel's decorator or of the call.
    """
    if not file:
        return "no line"
    (path,) = Path(megablocks.ops.__path__[0]).rglob(file)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef):
            first = min(d.lineno for d in node.decorator_list) if node.decorator_list else node.lineno
            if first <= line <= (node.end_lineno or first):
                calls = [
                    n for n in ast.walk(node) if isinstance(n, ast.Call) and "warp_specialize" in ast.unparse(n.func)
                ]
                is_start = calls and (line <= node.lineno or line == calls[0].lineno)
                return "warp_specialize" if is_start else node.name
    return f"{file}:{line}"


OVERRUN = """
__global__ void kernel(float* x, int n) { x[n + threadIdx.x] = 1; }
"""
RACE = """
__global__ void kernel(float* x, int n) {
    __shared__ float s[64];
    s[threadIdx.x] = x[threadIdx.x];
    x[threadIdx.x] = s[63 - threadIdx.x];
}
"""
# A warp writes and then hands over through an mbarrier. Either its first lane arrives there, or every lane. __syncwarp
# and the release of the arrival order the writes of the other lanes before it.
HAND_OVER = """
__global__ void kernel(float* x, int n) {
    __shared__ float s[32];
    __shared__ __align__(8) unsigned long long bar;
    unsigned b = (unsigned)__cvta_generic_to_shared(&bar);
    if (threadIdx.x == 0) asm volatile("mbarrier.init.shared.b64 [%0], %1;" :: "r"(b), "r"(ARRIVALS) : "memory");
    __syncthreads();
    if (threadIdx.x < 32) {
        s[threadIdx.x] = x[threadIdx.x];
        __syncwarp();
        if (ARRIVALS == 32 || threadIdx.x == 0)
            asm volatile("mbarrier.arrive.shared.b64 _, [%0];" :: "r"(b) : "memory");
    } else {
        unsigned done = 0;
        while (!done)
            asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], 0; selp.u32 %0, 1, 0, p;}"
                         : "=r"(done) : "r"(b) : "memory");
        x[threadIdx.x] = s[63 - threadIdx.x];
    }
}
"""


def control(tool: str, source: str, folder: Path) -> tuple[int, str]:
    """Run a CUDA kernel of one block under the tool."""
    if not hasattr(torch.cuda, "_compile_kernel"):
        pytest.skip("needs a torch that compiles CUDA source")
    program = folder / "program.py"
    program.write_text(
        f"import torch\nkernel = torch.cuda._compile_kernel({source!r}, 'kernel')\n"
        f"x = torch.zeros(64, device='cuda')\nkernel((1, 1, 1), (64, 1, 1), (x, 64))\n"
        "torch.cuda.synchronize()\n"
    )
    return watched(tool, str(program))


@pytest.mark.parametrize(
    "tool,source,words", [("memcheck", OVERRUN, "Invalid __global__ write"), ("racecheck", RACE, "Race reported")]
)
def test_the_tool_sees_what_it_is_asked_for(tool: str, source: str, words: str, tmp_path: Path) -> None:
    status, said = control(tool, source, tmp_path)
    assert status == 9 and words in said, said[-3000:]


@pytest.mark.parametrize("arrivals,hazards", [(32, False), (1, True)])
def test_racecheck_orders_by_an_mbarrier_only_who_arrives_at_it(arrivals: int, hazards: bool, tmp_path: Path) -> None:
    """Why racecheck reports `announce` and `announced`: in Gluon one thread arrives, after a barrier of its warps."""
    _, said = control("racecheck", HAND_OVER.replace("ARRIVALS", str(arrivals)), tmp_path)
    assert "RACECHECK SUMMARY" in said and ("Race reported" in said) == hazards, said[-3000:]
