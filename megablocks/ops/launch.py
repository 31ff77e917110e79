"""Launches of Triton kernels: without the look-up of their compiled form, and compiled before a layer's first step.

Both lean on private parts of Triton and torch. Other releases of Triton than `_RELEASES` get Triton's own launch.

`quick`. `kernel[grid](…)` of Triton describes every argument in a string, hashes all of them and looks the compiled
kernel up, at each launch. That is 9 of the 23 µs of a launch of four arguments on an H200's host, and 27 of the 51 µs
of a launch with four TMA descriptors. Triton specializes on little: dtypes, which pointers and sizes are multiples of
16, sizes of 1, the compile-time values, and its switches for debugging and profiling. `quick` keeps the compiled
kernels by these, and calls them as Triton offers: `kernel[grid](…)` returns the compiled kernel, and
`compiled[grid](…)` launches it.

`compile_first_call`. One after the other, the kernels of a layer's first step compile in 13 to 17 s on an H200's host;
beside each other in 6 to 10 s. So before its first call a module runs a step in which launches compile and do not run.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import logging
import os
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
import triton
from packaging.version import Version
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from triton import knobs
from triton.runtime import driver

from megablocks.ops.hopper import switch

_RELEASES = Version("3.6"), Version("3.10")  # whose rules of specialization these are
_MOST = 1024  # compiled forms kept a kernel
_MOST_THREADS = 16
_EMPTY = (torch.empty, torch.empty_like, torch.empty_strided, Tensor.new_empty, Tensor.new_empty_strided)
_PLAIN = (Tensor, nn.Parameter, type(None))
_here = threading.local()
_seen: weakref.WeakKeyDictionary[nn.Module, set[Hashable]] = weakref.WeakKeyDictionary()
_done: set[Hashable] = set()
logger = logging.getLogger(__name__)


class _Places(NamedTuple):
    """The arguments, by type, that Triton specializes on."""

    tensors: list[int]
    sizes: list[tuple[int, bool]]  # and whether it is specialized
    descriptors: list[int]


class QuickLaunch:
    """A JIT function, launched as one: kernel[grid](*arguments, **compile-time values and options)."""

    def __init__(self, kernel: Any) -> None:
        constexprs = [p.is_constexpr for p in kernel.params]
        assert constexprs == sorted(constexprs), f"{kernel.fn.__name__}: compile-time parameters must come last"
        assert not any(p.has_default for p in kernel.params), f"{kernel.fn.__name__}: parameters must have no default"
        self._kernel = kernel
        self._specialized = [not p.do_not_specialize for p in kernel.params if not p.is_constexpr]
        self._constexprs = [p.name for p in kernel.params if p.is_constexpr]
        self._places: dict[tuple[type, ...], _Places | None] = {}
        self._compiled: dict[tuple[Any, ...], tuple[Any, list[Any]]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernel, name)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return functools.partial(self._launch, grid)

    def _places_of(self, types: tuple[type, ...]) -> _Places | None:
        """Which arguments are tensors, sizes and descriptors; None where one is of another kind."""
        assert len(types) == len(self._specialized), f"{self._kernel.fn.__name__}: pass runtime arguments by position"
        made = _Places([], [], [])
        for i, kind in enumerate(types):
            if issubclass(kind, Tensor):
                made.tensors.append(i)
            elif kind is int:
                made.sizes.append((i, self._specialized[i]))
            elif "block_shape" in getattr(kind, "__dataclass_fields__", ()):
                made.descriptors.append(i)
            elif kind not in (float, type(None)):
                self._places[types] = None
                return None
        self._places[types] = made
        return made

    def _launch(self, grid: tuple[int, ...], /, *args: Any, **options: Any) -> None:
        if is_compiling_ahead():
            self._kernel.run(*args, grid=grid, warmup=True, **options)
            return
        types = tuple(map(type, args))
        places = self._places[types] if types in self._places else self._places_of(types)
        if places is None:
            self._kernel[grid](*args, **options)
            return
        device = torch.cuda.current_device()
        # 1, 1.0 and True are equal, and compile differently
        key: list[Any] = [device, types, *options, *map(type, options.values()), *options.values()]
        key += knobs.runtime.debug, knobs.compilation.instrumentation_mode
        values = list(args)
        misaligned = 0
        for i in places.tensors:
            a = args[i]
            if not a.is_cuda:  # Triton refuses it by name; as an address it would be read all the same
                self._kernel[grid](*args, **options)
                return
            # by its address: of a tensor the launcher asks it, and the driver where that is
            values[i] = address = a.data_ptr()
            key.append(a.dtype)
            if address % 16:
                misaligned |= 1 << i
        key.append(misaligned)
        for i, specialized in places.sizes:
            a = args[i]
            if not -(2**31) <= a < 2**31:
                self._kernel[grid](*args, **options)
                return
            if specialized:
                key.append(1 if a == 1 else 16 if a % 16 == 0 else 0)
        for i in places.descriptors:
            a = args[i]
            key += a.base.dtype, *a.block_shape, id(a.layout)
        found = self._compiled.get(made_of := tuple(key))
        if found is None:
            compiled = self._kernel[grid](*args, **options)
            # an AsyncCompileMode of the caller's returns a promise of it, which cannot be launched
            if compiled is not None and not hasattr(compiled, "result"):
                if len(self._compiled) >= _MOST:
                    self._compiled.clear()
                # with the layouts, so that no other one is given the id of one in a key
                self._compiled[made_of] = compiled, [args[i].layout for i in places.descriptors]
            return
        x, y, z = (*grid, 1, 1)[:3]
        stream = driver.active.get_current_stream(device)  # without it Triton asks for the device again
        found[0][x, y, z](*values, *[options[name] for name in self._constexprs], stream=stream)


class _ZerosForEmpty(TorchFunctionMode):
    """torch.empty gives zeros, so that an index which no kernel has computed is one that exists."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        return out.zero_() if func in _EMPTY else out


def is_compiling_ahead() -> bool:
    """Whether this thread runs a step in which launches compile and do not run."""
    return getattr(_here, "ahead", False)


def can_compile_ahead() -> bool:
    """Whether kernels are launched by `QuickLaunch`, outside of any transform or capture.

    MEGABLOCKS_COMPILE_AHEAD=0 in the environment leaves each kernel to its first launch.
    """
    return (
        _launches_quickly()
        and switch("MEGABLOCKS_COMPILE_AHEAD")
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._are_functorch_transforms_active()
        and not torch.cuda.is_current_stream_capturing()
    )


def compile_first_call(
    module: nn.Module, call: Hashable, step: Callable[..., Iterable[Tensor]], *inputs: Tensor | None
) -> None:
    """Before the first such call of `module`: compile the kernels of `step` and of its backward beside each other.

    The step runs with stand-ins for the module's parameters and buffers, and with zeros for what kernels would compute.
    So it leaves no gradient, count or random number behind. What fails here is only logged: it fails in the call, too.

    Args:
        module: whose kernels are compiled. Modules of one type, `config` and parameter sizes share what was compiled.
            Nothing is done where a parameter is sharded (a DTensor).
        call: names the kind of call, beside the inputs' dtypes and whether they need gradients.
        step: computes the results of the call from the inputs.
        inputs: on a GPU; stand-ins are passed to `step`.
    """
    if torch.compiler.is_compiling():  # torch.compile can trace nothing of what follows
        return
    kinds = [None if t is None else (t.dtype, t.device, t.requires_grad) for t in inputs]
    key = (call, torch.is_grad_enabled(), *kinds)
    seen = _seen.setdefault(module, set())
    if key in seen:
        return
    if is_compiling_ahead():  # within the first call of a module around this one
        seen.add(key)
        return
    plain = all(type(p) is nn.Parameter for p in module.parameters()) and all(type(t) in _PLAIN for t in inputs)
    if not plain or not can_compile_ahead():
        return
    seen.add(key)
    sizes = tuple((p.shape, p.dtype, p.requires_grad) for p in module.parameters())
    shared = (type(module), getattr(module, "config", None), key, sizes)
    if shared in _done:
        return
    _done.add(shared)
    device = next(t.device for t in inputs if t is not None)
    try:
        with (
            torch.random.fork_rng(devices=[device]),
            torch.autograd.set_multithreading_enabled(False),
            # a checkpoint around the call counts what it saves
            torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t),
            torch.cuda.device(device),
            _stand_ins(module),
        ):
            leaves = [None if t is None else t.detach().requires_grad_(t.requires_grad) for t in inputs]
            compile_ahead(lambda: _backward_ahead(step(*leaves)))
    except Exception as error:
        logger.debug("compiling ahead ended early: %s", error)


def compile_ahead(step: Callable[[], object]) -> None:
    """Run `step`, in which launches of quick kernels compile, beside each other, and do not run.

    Their results are the zeros that torch.empty gives meanwhile. At the end all kernels are compiled. If one does not
    compile, its first launch raises the error. A backward must run in this thread, see
    `torch.autograd.set_multithreading_enabled`, and by `_backward_ahead`.
    """

    def run() -> None:
        with ThreadPoolExecutor(threads) as pool, triton.AsyncCompileMode(pool, ignore_errors=True), _ZerosForEmpty():
            step()

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 4
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # torchrun's, each of which compiles the same
    threads = min(_MOST_THREADS, max(1, cores // processes))
    _here.ahead = True
    try:
        # in a context of its own: AsyncCompileMode stays on where waiting for the compilations was broken off
        contextvars.copy_context().run(run)
    finally:
        _here.ahead = False


def _backward_ahead(results: Iterable[Tensor]) -> None:
    """Backward of a step that `compile_ahead` runs, with zeros as gradients; torch.empty gives zeros in it too.

    To the mode that makes those zeros torch.autograd.backward is a function, so it would run without the mode.
    """
    wanted = tuple(t for t in results if t.requires_grad)
    if wanted:
        zeros = tuple(torch.zeros_like(t) for t in wanted)
        torch.autograd.Variable._execution_engine.run_backward(
            wanted, zeros, False, False, (), allow_unreachable=True, accumulate_grad=True
        )


@contextlib.contextmanager
def _stand_ins(module: nn.Module) -> Iterator[None]:
    """Other parameters of the same memory and marks, and copies of the buffers, in the module's place for them."""
    kept = [(m, dict(m._parameters), dict(m._buffers)) for m in module.modules()]
    try:
        for m, parameters, buffers in kept:
            for name, p in parameters.items():
                if p is not None:
                    m._parameters[name] = stand_in = nn.Parameter(p.detach(), requires_grad=p.requires_grad)
                    vars(stand_in).update(vars(p))
            for name, b in buffers.items():
                m._buffers[name] = None if b is None else b.clone()
        yield
    finally:
        for m, parameters, buffers in kept:
            m._parameters.update(parameters)
            m._buffers.update(buffers)


def interpreted() -> bool:
    """Whether Triton interprets kernels on the CPU, as TRITON_INTERPRET=1 asks."""
    return bool(knobs.runtime.interpret)


def cdiv(a: int, b: int) -> int:
    """⌈a / b⌉. Triton's is a compile-time function, which takes a tenth of a launch on the host."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n >= 1."""
    return 1 << (n - 1).bit_length()


def quick(kernel: Any) -> Any:
    """Decorates a `triton.jit` or `gluon.jit` function whose compile-time parameters come last and by keyword."""
    return QuickLaunch(kernel) if _launches_quickly() else kernel


@functools.cache
def _launches_quickly() -> bool:
    first, beyond = _RELEASES
    ours = first <= Version(triton.__version__) < beyond and torch.version.hip is None  # AMD's rules differ
    return ours and not interpreted()
