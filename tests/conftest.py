"""What every test shares: interpreted Triton where there is no GPU, xdist groups of tests that run one at a time."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
MULTI_PROCESS = ("megatron", "parallel", "reliability")
"""Folders whose tests run process groups. On one xdist worker they never compete with each other for the cores."""


def _has_gpu() -> bool:
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":  # hidden: the CPU path is tested on a GPU machine so
        return False
    # Asked of the driver, because importing torch here would cost each run of a torch-free test its seconds.
    try:
        return b"GPU" in subprocess.run(["nvidia-smi", "-L"], capture_output=True).stdout
    except FileNotFoundError:
        return False


HAS_GPU = _has_gpu()
if not HAS_GPU:
    # Before the first import of triton, by anyone: it is read once.
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        folder = item.path.relative_to(TESTS).parts[0] if item.path.is_relative_to(TESTS) else ""
        if folder in MULTI_PROCESS:
            item.add_marker(pytest.mark.xdist_group("ranks"))
        elif HAS_GPU and "_N4_" in item.name:
            item.add_marker(pytest.mark.xdist_group("memory"))  # up to 100 GiB each
        if item.get_closest_marker("gpu") and not HAS_GPU:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Generator[None]:
    """Give the GPU's memory back after a test that held much, since xdist's other workers share it."""
    yield
    cuda = sys.modules["torch"].cuda if HAS_GPU and "torch" in sys.modules else None
    if cuda is not None and cuda.is_initialized() and cuda.memory_reserved() > 2**30:
        cuda.empty_cache()


@pytest.fixture
def poison() -> Iterator[None]:
    """torch.empty and its kin return NaN, so that a result which was never written shows."""
    from megablocks.testing.poison import poisoned_empty

    with poisoned_empty():
        yield
