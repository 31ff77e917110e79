"""compute-sanitizer on every family of kernels: no access out of bounds, no two threads at one place unordered."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megablocks.testing.compile_only import kernels_of_the_package

from .sanitize import FAMILIES, launches

TOOL = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
HERE = Path(__file__).parent
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not Path(TOOL).exists(), reason="needs compute-sanitizer, which comes with the CUDA toolkit"),
]


def watched(tool: str, *program: str) -> tuple[int, str]:
    """Exit status (9: something was found) and output of a Python program under compute-sanitizer."""
    command = [TOOL, "--tool", tool, "--error-exitcode", "9", "--print-limit", "10", sys.executable, *program]
    # each tensor an allocation of its own, or an overrun would land in torch's pool unseen
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
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
    status, said = watched("racecheck", str(HERE / "sanitize.py"), name)
    assert f"{name} done" in said, said[-3000:]
    assert re.search(r"RACECHECK SUMMARY: 0 hazards displayed \(0 errors, 0 warnings\)", said) and status == 0, said


OVERRUN = """
__global__ void wrong(float* x, int n) { x[n + threadIdx.x] = 1; }
"""
RACE = """
__global__ void wrong(float* x, int n) {
    __shared__ float s[64];
    s[threadIdx.x] = x[threadIdx.x];
    x[threadIdx.x] = s[63 - threadIdx.x];
}
"""


@pytest.mark.parametrize(
    "tool,source,words", [("memcheck", OVERRUN, "Invalid __global__ write"), ("racecheck", RACE, "Race")]
)
def test_the_tool_sees_what_it_is_asked_for(tool: str, source: str, words: str, tmp_path: Path) -> None:
    compile_kernel = getattr(torch.cuda, "_compile_kernel", None)
    if compile_kernel is None:
        pytest.skip("needs a torch that compiles CUDA source")
    program = tmp_path / "wrong.py"
    program.write_text(
        f"import torch\nkernel = torch.cuda._compile_kernel({source!r}, 'wrong')\nx = torch.zeros(64, device='cuda')\n"
        "kernel((1, 1, 1), (64, 1, 1), (x, 64))\ntorch.cuda.synchronize()\n"
    )
    status, said = watched(tool, str(program))
    assert status != 0 and words in said, said[-3000:]
