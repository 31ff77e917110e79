"""CPU with gloo as a device for megatron-core 0.19.2: every change that Megatron needs where there is no CUDA, and why.

`install()` does nothing on a machine with CUDA. Without CUDA it applies `PATCHES` once per process; each entry names
what it replaces and what breaks without it (`tests/megatron/test_cpu.py` switches each off and sees the failure).
Nothing here changes what a model computes: devices named "cuda" become the CPU, the CUDA random generator becomes the
CPU generator, and streams, which order work on a GPU, become no-ops, because work on the CPU is ordered already.

Importing `megablocks.megatron.specs` calls `install()`, which is early enough for Megatron-LM's own pretrain_gpt.py
with `--spec megablocks.megatron.specs block_spec`: Megatron imports the spec after parsing its flags and before
`initialize_megatron`. `REQUIRED_FLAGS` lists what must be said on the command line.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections import defaultdict
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

REQUIRED_FLAGS = (
    "--distributed-backend gloo",
    "--use-cpu-initialization",
    "--transformer-impl local",
    "--no-gradient-accumulation-fusion",
    "--no-persist-layer-norm",
    "--no-masked-softmax-fusion",
    "--no-rope-fusion",
)
"""What Megatron's own driver must be told on a CPU; all but the first two also on a GPU without Transformer Engine."""

_installed: set[str] = set()
_cuda: Any = torch.cuda  # what the patches below write to


class _NoStream:
    """Stands for torch.cuda.Stream and torch.cuda.Event: the CPU runs work in the order it is issued."""

    cuda_stream = 0
    device = torch.device("cpu")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def _nothing(self, *args: Any, **kwargs: Any) -> None:
        pass

    wait_stream = wait_event = record = wait = synchronize = _nothing

    def record_event(self, event: Any = None) -> _NoStream:
        return event or _NoStream()

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 0.0


def _is_cuda(device: Any) -> bool:
    return (isinstance(device, str) and device.startswith("cuda")) or (
        isinstance(device, torch.device) and device.type == "cuda"
    )


_CUDA_TYPE_NAMES = {f"torch.{kind}Tensor": f"torch.cuda.{kind}Tensor" for kind in ("Float", "Half", "BFloat16")}


class _CudaMeansCpu(TorchFunctionMode):
    """Calls that name the device "cuda" get "cpu"; Tensor.cuda() is the tensor; Tensor.type() names the CUDA class.

    Costs about one microsecond a torch call. Active in the thread that installed it.
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


def _current_device() -> None:
    """`torch.cuda.current_device`: Megatron passes it as device= to almost every tensor it makes."""
    _cuda.current_device = lambda: torch.device("cpu")


def _literals() -> None:
    """Device literals "cuda" in schedules, optimizers, gradient clipping and the training loop, and `Tensor.type()`,
    by whose name Megatron's mixed-precision and distributed optimizers sort parameters."""
    _CudaMeansCpu().__enter__()


def _random_state() -> None:
    """The CUDA generator, which dropout and weight initialisation fork by name: here the CPU's. Megatron warns when the
    CPU state changes inside such a fork, which is now what has to happen, so that warning is dropped."""
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


def _streams() -> None:
    """Streams and events of DDP construction, Megatron's token dispatchers and its timers."""
    _cuda.Stream = _cuda.Event = _NoStream
    _cuda.current_stream = _cuda.default_stream = lambda device=None: _NoStream()
    _cuda.stream = lambda stream: contextlib.nullcontext()
    _cuda.set_stream = lambda stream: None


def _synchronize() -> None:
    """`torch.cuda.synchronize` after point-to-point communication and in timers; nothing runs ahead on a CPU."""
    _cuda.synchronize = lambda device=None: None


def _device_count() -> None:
    """Megatron builds its process groups and seeds its generators only if it counts a device for each local rank."""
    _cuda.device_count = lambda: int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    _cuda.set_device = lambda device: None


class _NoProperties:
    """Stands for the properties of a CUDA device: compute capability 0.0, which asks Megatron for nothing special."""

    name = "cpu"
    major = minor = 0
    total_memory = 0
    multi_processor_count = os.cpu_count() or 1


def _device_properties() -> None:
    """With tensor parallelism Megatron's argument check asks for the compute capability, by `get_device_properties`."""
    _cuda.get_device_properties = lambda device=None: _NoProperties()


def _memory_statistics() -> None:
    """`--log-memory-to-tensorboard` looks up fields that `torch.cuda.memory_stats` lacks without CUDA: all are 0."""
    _cuda.memory_stats = lambda device=None: defaultdict(int)


def _no_compiler() -> None:
    """Megatron decorates small functions with torch.compile, which on a CPU calls a C++ compiler in every process:
    half a minute of start-up, and an error where there is none. They run eagerly instead."""
    torch.compiler.set_stance("force_eager")


def _dispatcher_splits() -> None:
    """Megatron's own all-to-all dispatcher copies split sizes to the host "if they are on CUDA", and gives tensors,
    not numbers, to the collective otherwise."""
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    def to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.detach().numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    token_dispatcher.maybe_move_tensor_to_cpu = moe_utils.maybe_move_tensor_to_cpu = to_host


def _initialize() -> None:
    """`initialize_megatron` asserts CUDA unless told `allow_no_cuda`, which `pretrain` does not pass on."""
    from megatron.training import training

    original = training.initialize_megatron
    training.initialize_megatron = functools.partial(original, allow_no_cuda=True)


def _prebuilt_helpers() -> None:
    """The wheel ships the built data-set helpers and no Makefile, so Megatron's "make" of them fails, on any device."""
    skip_compile_helpers()


PATCHES: dict[str, Callable[[], None]] = {
    "current_device": _current_device,
    "literals": _literals,
    "random_state": _random_state,
    "streams": _streams,
    "synchronize": _synchronize,
    "device_count": _device_count,
    "device_properties": _device_properties,
    "memory_statistics": _memory_statistics,
    "no_compiler": _no_compiler,
    "dispatcher_splits": _dispatcher_splits,
    "initialize": _initialize,
    "prebuilt_helpers": _prebuilt_helpers,
}
TRAINING_PATCHES = ("initialize",)
"""Those that need Megatron's training package; a program on megatron.core alone can leave them out."""


def skip_compile_helpers() -> bool:
    """Make Megatron's `compile_helpers` a no-op where the built module imports already. Returns whether it does.

    Needed on every device: the wheel of megatron-core holds the built module and no Makefile.
    """
    try:
        from megatron.core.datasets import helpers_cpp  # noqa: F401
    except ImportError:
        return False
    from megatron.core.datasets import utils

    utils.compile_helpers = lambda: None
    return True


def install(*, training: bool | None = None, skip: Collection[str] = ()) -> bool:
    """Apply `PATCHES` where there is no CUDA. Idempotent. Returns whether this process runs on the CPU path.

    Args:
        training: also patch `megatron.training`; None: if it can be imported.
        skip: names in `PATCHES` to leave out (for the tests that show each to be needed).
    """
    if torch.cuda.is_available():
        return False
    if training is None:
        import importlib.util

        training = importlib.util.find_spec("megatron.training") is not None
    for name, patch in PATCHES.items():
        if name in skip or name in _installed or (name in TRAINING_PATCHES and not training):
            continue
        patch()
        _installed.add(name)
    return True
