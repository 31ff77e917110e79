"""The CPU with gloo as a device for megatron-core 0.19.2: every change that Megatron needs without CUDA, and why.

Without CUDA, `install()` applies `PATCHES` once per process. Each entry says what it replaces and what fails
without it; `tests/megatron/test_cpu.py` leaves out each one and checks the failure. No patch changes what a model
computes: devices named "cuda" become the CPU, the CUDA random generator becomes the CPU's, and streams do nothing,
because work on the CPU is in order already.

Importing `megablocks.megatron.specs` calls `install()`. That is early enough for Megatron-LM's own pretrain_gpt.py with
`--spec megablocks.megatron.specs block_spec`, because Megatron imports the spec before `initialize_megatron`. It also
needs `REQUIRED_FLAGS`. With tensor parallelism Megatron uses the GPU before it imports the spec. Then start with
`-m megablocks.megatron.cpu pretrain_gpt.py …` instead of `pretrain_gpt.py …`: it installs first and runs the script.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import importlib.util
import logging
import os
import runpy
import sys
import types
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from megablocks.config import ConfigError

TESTED_MEGATRON = "0.19.2"
"""The megatron-core that our layers are written for and tested with."""
REQUIRED_FLAGS = (
    "--distributed-backend gloo",
    "--use-cpu-initialization",
    "--transformer-impl local",
    "--no-gradient-accumulation-fusion",
    "--no-persist-layer-norm",
    "--no-masked-softmax-fusion",
    "--no-rope-fusion",
)
"""Flags that Megatron's own driver needs on a CPU; without Transformer Engine a GPU needs all but the first two."""

_installed: set[str] = set()
_cuda: Any = torch.cuda  # without types, since the patches write to it


class _NoStream:
    """Replaces torch.cuda.Stream and torch.cuda.Event: the CPU runs work in the order of the calls."""

    device = torch.device("cpu")

    def _nothing(self, *args: Any, **kwargs: Any) -> None:
        pass

    __init__ = wait_stream = wait_event = record = wait = synchronize = _nothing

    def record_event(self, event: Any = None) -> _NoStream:
        return event or _NoStream()

    def elapsed_time(self, other: Any) -> float:
        return 0.0


def _is_cuda(device: Any) -> bool:
    return isinstance(device, (str, torch.device)) and str(device).startswith("cuda")


_CUDA_TYPE_NAMES = {f"torch.{kind}Tensor": f"torch.cuda.{kind}Tensor" for kind in ("Float", "Half", "BFloat16")}


class _CudaMeansCpu(TorchFunctionMode):
    """Calls with the device "cuda" get "cpu"; Tensor.cuda() returns the tensor; Tensor.type() names the CUDA class.

    Costs about one microsecond a torch call. It is active in the thread that installed it.
    """

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            name = func(*args)
            return _CUDA_TYPE_NAMES.get(name, name)
        if "device" in kwargs and _is_cuda(kwargs["device"]):
            kwargs = {**kwargs, "device": "cpu"}
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], "cpu", *args[2:])
        return func(*args, **kwargs)


def _literals() -> None:
    """The literal "cuda" in schedules, optimizers, gradient clipping and the training loop. Also `Tensor.type()`:
    Megatron's mixed-precision and distributed optimizers sort parameters by its result."""
    _CudaMeansCpu().__enter__()


def _random_state() -> None:
    """The CUDA generator, which dropout and weight initialization fork by name, is the CPU's here. Megatron warns
    when the CPU's state changes inside a fork. Here it must change, so the warning is dropped."""
    from megatron.core.tensor_parallel import random as tp_random

    def get_state(device: Any = None, clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(state: torch.Tensor, device: Any = None, graph_safe: bool = False) -> None:
        torch.set_rng_state(state)

    _cuda.get_rng_state = _cuda.random.get_rng_state = get_state
    _cuda.set_rng_state = _cuda.random.set_rng_state = set_state
    _cuda.manual_seed = _cuda.random.manual_seed = lambda seed: torch.manual_seed(seed)
    tp_random._get_cuda_rng_state = get_state
    tp_random._set_cuda_rng_state = set_state
    logging.getLogger(tp_random.__name__).addFilter(lambda record: "CPU RNG state changed" not in record.getMessage())


def _no_compiler() -> None:
    """Megatron decorates small functions with torch.compile. On a CPU that calls a C++ compiler in every process: half
    a minute at the start, or an error if there is no compiler. Here they run eagerly."""
    torch.compiler.set_stance("force_eager")


def _dispatcher_splits() -> None:
    """Megatron's own all-to-all dispatcher turns split sizes into numbers only if they are on CUDA, but the collective
    needs numbers."""
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    def to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.detach().numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    token_dispatcher.maybe_move_tensor_to_cpu = moe_utils.maybe_move_tensor_to_cpu = to_host


def _initialize() -> None:
    """`initialize_megatron` asserts CUDA unless it gets `allow_no_cuda`, which `pretrain` does not pass on."""
    if importlib.util.find_spec("megatron.training") is None:  # a program that uses only megatron.core
        return
    from megatron.training import training

    original = training.initialize_megatron
    training.initialize_megatron = functools.partial(original, allow_no_cuda=True)


@functools.cache  # it reads a list of files, which takes 0.1 s
def skip_compile_helpers() -> None:
    """Megatron runs "make" for its data-set helpers. Its wheel has them built but no Makefile, so make would fail.

    A checkout whose megatron/ hides the wheel's has a Makefile, which needs pybind11; it gets the wheel's helpers too.
    Every device needs this, so `install` calls it on all devices.
    """
    with contextlib.suppress(ImportError):
        from megatron.core import datasets

        built = [file for file in importlib.metadata.files("megatron-core") or () if "helpers_cpp." in file.name]
        datasets.__path__ += [os.path.dirname(file.locate()) for file in built]
        from megatron.core.datasets import helpers_cpp, utils  # noqa: F401

        utils.compile_helpers = lambda: None


_ATTRIBUTES: dict[str, dict[str, Any]] = {
    # Megatron passes it as device= to almost every tensor that it makes.
    "current_device": {"current_device": lambda: torch.device("cpu")},
    # Data parallelism, Megatron's token dispatchers and its timers make streams and events.
    "streams": {
        **dict.fromkeys(("Stream", "Event"), _NoStream),
        **dict.fromkeys(("current_stream", "default_stream"), lambda device=None: _NoStream()),
        "stream": lambda stream: contextlib.nullcontext(),
        "set_stream": lambda stream: None,
    },
    # It is called after point-to-point communication and in timers; a CPU does not run ahead.
    "synchronize": {"synchronize": lambda device=None: None},
    # Megatron makes process groups and seeds its generators only if there is a device for each local rank.
    "device_count": {
        "device_count": lambda: int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
        "set_device": lambda device: None,
    },
    # With tensor parallelism Megatron's validation reads the compute capability. At 0.0 it uses nothing special.
    "device_properties": {
        "get_device_properties": lambda device=None: types.SimpleNamespace(
            name="cpu", major=0, minor=0, total_memory=0, multi_processor_count=os.cpu_count() or 1
        )
    },
    # --log-memory-to-tensorboard reads its fields. It is empty without CUDA; here each field is 0.
    "memory_statistics": {"memory_stats": lambda device=None: defaultdict(int)},
}
"""New attributes of torch.cuda, by patch."""
_FUNCTIONS = (_literals, _random_state, _no_compiler, _dispatcher_splits, _initialize)
PATCHES: dict[str, Callable[[], None]] = {
    **{name: functools.partial(vars(torch.cuda).update, new) for name, new in _ATTRIBUTES.items()},
    **{patch.__name__.removeprefix("_"): patch for patch in _FUNCTIONS},
}


def hide_engine() -> None:
    """Let Megatron use its own code instead of Transformer Engine's layers and optimizer, which need CUDA.

    Raises ConfigError if Transformer Engine is imported already.
    """
    if sys.modules.setdefault("transformer_engine", None) is not None:  # type: ignore[arg-type]
        raise ConfigError(
            "transformer_engine: needs a GPU; without one start with -m megablocks.megatron.cpu SCRIPT, which hides it"
        )


def install() -> bool:
    """Apply `PATCHES` where there is no CUDA, once per process. Returns whether this process runs on the CPU path."""
    on_cpu = not torch.cuda.is_available()
    if on_cpu:
        hide_engine()
        for name, patch in PATCHES.items():
            if name not in _installed:
                patch()
                _installed.add(name)
    skip_compile_helpers()
    return on_cpu


def run_script() -> None:
    """Run the script that the command line names, with the rest of the command line, after `install`."""
    if len(sys.argv) < 2:
        sys.exit("megablocks.megatron.cpu: give a script and its flags: -m megablocks.megatron.cpu pretrain_gpt.py …")
    if install():
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # which Megatron requires with tensor parallelism
    sys.argv = sys.argv[1:]
    sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))  # as Python does for a script
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    from megablocks.megatron import cpu  # the module that others import, which remembers what is installed

    cpu.run_script()
