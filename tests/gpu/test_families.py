"""Every kernel of the package is in a family. No GPU is needed: launches are recorded, and no kernel runs."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from megablocks.testing.compile_only import kernels_of_the_package

ARCHITECTURE = 90


@contextlib.contextmanager
def tensors_pass_for_cuda() -> Iterator[None]:
    """CPU tensors report that they are on a GPU. Fresh memory holds zeros, because no kernel writes anything.

    Nothing is compiled ahead, because that step would launch kernels of its own.
    """
    import torch
    from torch import Tensor

    from megablocks.ops import launch

    def zeros_of(make: str) -> object:
        return mock.patch.object(torch, make, getattr(torch, make.replace("empty", "zeros")))

    with (
        mock.patch.object(Tensor, "is_cuda", property(lambda self: True)),
        mock.patch.object(launch, "can_compile_ahead", lambda: False),
        mock.patch.object(Tensor, "new_empty", Tensor.new_zeros),
        zeros_of("empty"),
        zeros_of("empty_like"),
    ):
        yield


def launched_by(*names: str, compiled: bool = False) -> set[str]:
    """Kernels that the families launch on sm_90. A launch only compiles, or does nothing. Triton is not interpreted."""
    import torch
    from triton.runtime.jit import JITFunction

    from gpu.sanitize import FAMILIES, launches
    from megablocks.testing.compile_only import compiling_for

    left_out = mock.patch.object(JITFunction, "run", lambda self, *args, **options: None)
    with compiling_for(ARCHITECTURE), contextlib.nullcontext() if compiled else left_out:
        with tensors_pass_for_cuda(), launches() as launched:
            for name in names or FAMILIES:
                FAMILIES[name](torch.device("cpu"))()
    return launched


def in_another_process(program: str, *arguments: str, **switches: str) -> Any:
    """The JSON that a program of these tests prints. It is another process, because Triton may be interpreted here."""
    environment = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "MEGABLOCKS_HOPPER")} | switches
    path = f"{Path(__file__).parents[1]}{os.pathsep}{environment.get('PYTHONPATH', '')}"
    done = subprocess.run(
        [sys.executable, program, *arguments], env=environment | {"PYTHONPATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_every_kernel_of_the_package_is_launched_by_a_family() -> None:
    assert set(in_another_process(__file__)) >= kernels_of_the_package()


@pytest.mark.slow
def test_what_the_families_launch_compiles() -> None:
    assert set(in_another_process(__file__, "--compile")) >= kernels_of_the_package()


def test_accesses_are_read_from_what_racecheck_says() -> None:
    from .sanitize import accesses

    said = """
========= Error: Race reported between Read access at ragged_m_kernel+0x1c0 in grouped_mm_hopper.py:272
=========     and Write access at ragged_m_kernel+0x5ee0 in grouped_mm_hopper.py:284 [8 hazards]
=========     and Write access at spmm_kernel+0x20 [1 hazards]
========= Error: Race reported between Write access at void at::native::sum<int, float>(int)+0x90
layer done
"""
    file = "grouped_mm_hopper.py"
    assert accesses(said) == [
        ("ragged_m_kernel", file, 272),
        ("ragged_m_kernel", file, 284),
        ("spmm_kernel", "", 0),
        ("void at::native::sum<int, float>(int)", "", 0),
    ]
    with pytest.raises(AssertionError, match="could not be parsed"):
        accesses(said + "========= and Write access at 0x90 of no kernel")


if __name__ == "__main__":
    chosen = [name for name in sys.argv[1:] if name != "--compile"]
    print(json.dumps(sorted(launched_by(*chosen, compiled="--compile" in sys.argv))))
