"""Compile the package's kernels for any NVIDIA architecture on a machine without a GPU, through their own launchers.

    with compiling_for(86) as compiled:
        launch(torch.empty(…))                 # a CPU tensor replaces a GPU tensor; no kernel runs
    compiled["megablocks.ops.….kernel_name"]   # the binaries of the launch: metadata.shared, asm["cubin"]

TRITON_INTERPRET must be unset before the process imports triton. A process can compile for one architecture only,
because the launchers cache the properties of the device.
"""

from __future__ import annotations

import ast
import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import megablocks

SHARED_BYTES = {80: 166_912, 86: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
"""Largest shared memory of a program, by compute capability (CUDA programming guide 12.9, table 21)."""
MULTIPROCESSORS = 132


def _stub(architecture: int) -> Any:
    """A Triton driver with a target and device properties, but without a device."""
    from triton.backends.compiler import GPUTarget

    properties = {
        "max_shared_mem": SHARED_BYTES[architecture],
        "multiprocessor_count": MULTIPROCESSORS,
        "max_num_regs": 65536,
        "warpSize": 32,
    }
    return SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", architecture, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device=0: 0,
        utils=SimpleNamespace(get_device_properties=lambda device: properties),
    )


@contextlib.contextmanager
def compiling_for(architecture: int, most: int = sys.maxsize) -> Iterator[dict[str, list[Any]]]:
    """Inside the context a launch only compiles. Yields the compiled kernels by module and name of the kernel.

    A kernel that already has `most` binaries is not compiled again.
    """
    import torch
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    from megablocks.ops.launch import interpreted

    assert not interpreted(), "kernels are interpreted here: unset TRITON_INTERPRET before the import"
    compiled: dict[str, list[Any]] = {}
    run = JITFunction.run

    def compile_instead(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        binaries = compiled.setdefault(f"{self.fn.__module__}.{self.fn.__name__}", [])
        if len(binaries) >= most:
            return
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        if not any(kernel is other for other in binaries):
            binaries.append(kernel)

    properties = SimpleNamespace(multi_processor_count=MULTIPROCESSORS)
    driver.set_active(_stub(architecture))
    try:
        with (
            mock.patch.object(JITFunction, "run", compile_instead),
            mock.patch.object(torch.cuda, "get_device_properties", lambda device=None: properties),
            mock.patch.object(torch.cuda, "get_device_capability", lambda device=None: divmod(architecture, 10)),
            mock.patch.object(torch.cuda, "current_device", lambda: -1),  # get_device() of a CPU tensor
        ):
            yield compiled
    finally:
        driver.set_active(None)  # Triton searches for a driver at the next use


def kernels_of_the_package() -> set[str]:
    """Return module and name of every kernel: JIT functions with a name ending in _kernel, or launched by name."""
    root = Path(megablocks.__file__).parent
    found: set[tuple[str, str]] = set()
    launched: set[str] = set()
    for path in root.rglob("*.py"):
        module = ".".join(("megablocks", *path.relative_to(root).with_suffix("").parts))
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(d) for d in node.decorator_list):
                found.add((module, node.name))
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
                launched.add(ast.unparse(node.func.value).rsplit(".", 1)[-1])
    return {f"{module}.{name}" for module, name in found if name.endswith("_kernel") or name in launched}
