"""Setup of all tests: Triton is interpreted without a GPU, and some tests run one at a time under xdist."""

from __future__ import annotations

import dataclasses
import functools
import os
import signal
import subprocess
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parent
MULTI_PROCESS = ("megatron", "reliability")
"""Folders whose tests start several processes. They run on one xdist worker, so that they do not compete for cores.

A machine with a GPU has cores for more: there each file is a group of its own, which its module's fixtures need.
"""
OF_RANKS = {
    "megatron": ("megablocks.megatron.specs", "megatron.training.training", "torch.distributed.checkpoint"),
    "hf": (
        "megablocks.hf.experts",
        "transformers.models.gpt_oss.modeling_gpt_oss",
        "transformers.models.mixtral.modeling_mixtral",
    ),
}
"""What the ranks of a folder's tests would each import: Megatron takes 3 s, and 8 s without byte code."""

COMPILER = ("torch._functorch.aot_autograd", "torch._inductor.lowering")
"""What a rank's first torch.compile would import, which takes 1.7 s. With a GPU the second starts CUDA."""


def _has_gpu() -> bool:
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":  # the GPU is hidden to test the CPU path
        return False
    # nvidia-smi instead of torch, because the import of torch would cost tests without torch several seconds.
    try:
        return b"GPU" in subprocess.run(["nvidia-smi", "-L"], capture_output=True).stdout
    except FileNotFoundError:
        return False


HAS_GPU = _has_gpu()
if not HAS_GPU:
    # Triton reads it once, so it must be set before the first import of triton.
    os.environ.setdefault("TRITON_INTERPRET", "1")
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    # A job in the background of a script ignores Ctrl-C, and so would every process that a test interrupts.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _folder(item: pytest.Item) -> str:
    return _folder_of(item.path)


@functools.cache
def _folder_of(path: Path) -> str:
    return path.relative_to(TESTS).parts[0] if path.is_relative_to(TESTS) else ""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _folder(item) in MULTI_PROCESS:
            item.add_marker(pytest.mark.xdist_group("ranks"))
        if HAS_GPU and item.get_closest_marker("xdist_group"):
            item.add_marker(pytest.mark.xdist_group(item.path.stem))  # xdist joins the names of an item's groups
        elif HAS_GPU and "_N4_" in item.name:
            item.add_marker(pytest.mark.xdist_group("memory"))  # up to 100 GiB each
        if item.get_closest_marker("gpu") and not HAS_GPU:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def _patch_once_a_launch(interpreter: Any) -> None:
    """Triton's interpreter patches its language anew at each call of a device function, a fifth of its time."""
    patch_lang, launch, tl = interpreter._patch_lang, interpreter.GridExecutor.__call__, interpreter.tl
    patched: set[Any] = set()

    @functools.cache
    def languages(fn: Any) -> frozenset[str]:
        return frozenset(value.__name__ for value in fn.__globals__.values() if value is tl or value is tl.core)

    def patch(fn: Any) -> Any:
        if languages(fn) <= patched:
            return interpreter._LangPatchScope()
        patched.update(languages(fn))
        return patch_lang(fn)

    def launch_anew(self: Any, *args: Any, **kwargs: Any) -> None:
        patched.clear()
        launch(self, *args, **kwargs)
        patched.clear()  # the launch restored the language

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch, launch_anew


def _interpret_quickly(interpreter: Any) -> None:
    """The same results. Kernels that sort take a third of the time, others nine tenths."""
    find, known, builder = interpreter._get_np_dtype, {}, interpreter.interpreter_builder
    reduce, standard, xor = interpreter.ReduceOps.generic_reduce, interpreter.tl.standard, interpreter.np.bitwise_xor

    def numpy_type(kind: Any) -> Any:
        """From a table that is made once, not at each call."""
        if kind.name not in known:
            known[kind.name] = find(kind)
        return known[kind.name]

    def reduce_xor(self: Any, values: Any) -> Any:
        """The reduction of a sort in one call, not in one for each element."""
        if self.combine_fn != standard._xor_combine or self.axis is None:
            return reduce(self, values)
        (value,) = values
        return [self.to_tensor(xor.reduce(value.handle.data, axis=self.axis, keepdims=self.keep_dims), value.dtype)]

    interpreter._get_np_dtype, interpreter.ReduceOps.generic_reduce = numpy_type, reduce_xor
    if not builder.options.debug:  # without it no assertion reads what the check for overflows computes
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def _mend_interpreter() -> None:
    """Triton 3.9 interprets a block of a compared scalar as int32, no mask to it. Compiled kernels are right."""
    triton, interpreter = (sys.modules.get(name) for name in ("triton", "triton.runtime.interpreter"))
    if interpreter is not None and interpreter.GridExecutor.__call__.__name__ == "__call__":
        _patch_once_a_launch(interpreter)
        _interpret_quickly(interpreter)
    if interpreter is not None and triton is not None and triton.__version__.startswith("3.9."):
        numpy = sys.modules["numpy"]
        interpreter.InterpreterBuilder.create_splat = lambda _, kind, value: interpreter.TensorHandle(
            numpy.full(kind.shape, value.data.flat[0]), value.dtype.scalar
        )


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if "torch" in sys.modules:  # a test draws the same numbers, whichever tests its xdist worker ran before it
        sys.modules["torch"].manual_seed(0)
    _mend_interpreter()
    launcher = sys.modules.get("megablocks.testing.launcher")
    if launcher is not None and not HAS_GPU:  # with a GPU an import may start CUDA, and then no fork works
        launcher.preload(*COMPILER, *OF_RANKS.get(_folder(item), ()))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Generator[None]:
    """Refuse a test that leaves torch patched, and free much GPU memory, because the xdist workers share the GPU."""
    yield
    cpu = sys.modules.get("megablocks.megatron.cpu")
    assert cpu is None or not cpu._installed, "megablocks.megatron.specs patches torch: import it in another process"
    cuda = sys.modules["torch"].cuda if HAS_GPU and "torch" in sys.modules else None
    if cuda is not None and cuda.is_initialized() and cuda.memory_reserved() > 2**30:
        cuda.empty_cache()


@pytest.fixture
def poison() -> Iterator[None]:
    """torch.empty and similar functions return NaN, so that tests see elements nobody wrote."""
    from megablocks.testing.poison import poisoned_empty

    with poisoned_empty():
        yield
