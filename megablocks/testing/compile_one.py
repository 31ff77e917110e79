"""Compile Triton and Gluon kernels for a GPU that is not there.

`install(capability)` makes Triton believe in a GPU of that capability for the rest of the process; `compiled` then
takes what a launcher would have launched, on tensors that may be a CPU's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

SHARED_BYTES = {80: 166_912, 86: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
"""Shared memory that one program may have, by capability."""


class _Driver:
    def __init__(self, capability: int) -> None:
        self.capability = capability

    @property
    def utils(self) -> _Driver:
        return self

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_device_capability(self, device: int = 0) -> tuple[int, int]:
        return divmod(self.capability, 10)

    def get_device_properties(self, device: int) -> dict[str, int]:
        shared = SHARED_BYTES[self.capability]
        return {"max_shared_mem": shared, "multiprocessor_count": 132, "max_num_regs": 65536, "warpSize": 32}

    def map_python_to_cpp_type(self, ty: str) -> str:
        return "void*"


def install(capability: int) -> None:
    """Make a GPU of this capability (90 for 9.0) the one that Triton compiles for."""
    from triton.runtime import driver

    driver.set_active(_Driver(capability))


def compiled(kernel: Any, launch: Callable[[], Any]) -> Any:
    """What `kernel` compiles to for the arguments that `launch` gives it: `.asm`, `.metadata.shared` in bytes."""
    made = []
    run = kernel.run

    def warmup(*args: Any, warmup: bool, **options: Any) -> None:
        made.append(run(*args, warmup=True, **options))

    with mock.patch.object(kernel, "run", warmup):
        launch()
    return made[-1]
