"""Launches of Triton kernels: faster, with a cache of compiled kernels; and compilation before a layer's first step.

Both use private parts of Triton and torch. Releases of Triton outside `_RELEASES` get Triton's own launch.

`quick`. At each launch, Triton's `kernel[grid](…)` describes every argument in a string, hashes all of them and looks
up the compiled kernel. That is 9 of the 23 µs of a launch with four arguments on an H200's host, and 27 of the 51 µs
of a launch with four TMA descriptors. Triton specializes on little: dtypes, which pointers and sizes are multiples of
16, sizes of 1, the compile-time values, and its switches for debugging and profiling. `quick` caches the compiled
kernels by these. It calls them through Triton's own interface: `kernel[grid](…)` returns the compiled kernel, and
`compiled[grid](…)` launches it.

`compile_first_call`. On an H200's host the kernels of a layer's first step compile in 13 to 17 s one after the other,
and in 6 to 10 s in parallel. So before its first call a module runs a step in which launches compile and do not run.
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

_RELEASES = Version("3.6"), Version("3.10")  # the first release with these rules of specialization, the first without
_MOST = 1024  # compiled forms that are kept per kernel
_MOST_THREADS = 16
_EMPTY = (torch.empty, torch.empty_like, torch.empty_strided, Tensor.new_empty, Tensor.new_empty_strided)
_PLAIN = (Tensor, nn.Parameter, type(None))
_here = threading.local()
_seen: weakref.WeakKeyDictionary[nn.Module, set[Hashable]] = weakref.WeakKeyDictionary()
_done: set[Hashable] = set()
logger = logging.getLogger(__name__)


class _Places(NamedTuple):
    """The positions of the arguments that Triton specializes on, by type."""

    tensors: list[int]
    sizes: list[tuple[int, bool]]  # and whether it is specialized
    descriptors: list[int]


class QuickLaunch:
    """A JIT function with the same launch syntax: kernel[grid](*arguments, **compile-time values and options)."""

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
        """Which arguments are tensors, sizes and descriptors; None if one is of another kind."""
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
            if not a.is_cuda:  # Triton refuses it by name; by its address a kernel would read it anyway
                self._kernel[grid](*args, **options)
                return
            # pass the address: for a tensor the launcher would look it up, and ask the driver where it is
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
            # with an AsyncCompileMode of the caller this is a future, which cannot be launched
            if compiled is not None and not hasattr(compiled, "result"):
                if len(self._compiled) >= _MOST:
                    self._compiled.clear()
                # keep the layouts alive, so that no other layout gets the id of one in a key
                self._compiled[made_of] = compiled, [args[i].layout for i in places.descriptors]
            return
        x, y, z = (*grid, 1, 1)[:3]
        stream = driver.active.get_current_stream(device)  # without it Triton looks up the device again
        found[0][x, y, z](*values, *[options[name] for name in self._constexprs], stream=stream)


class _ZerosForEmpty(TorchFunctionMode):
    """Makes torch.empty return zeros, so that indices which no kernel has computed are in range."""

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

    With MEGABLOCKS_COMPILE_AHEAD=0 in the environment each kernel compiles at its first launch.
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
    """Before the first such call of `module`, compile the kernels of `step` and of its backward in parallel.

    The step runs with stand-ins for the module's parameters and buffers, and with zeros for what kernels would compute.
    So it changes no gradient, count or random state. A failure here is only logged, because it recurs in the call.

    Args:
        module: the module whose kernels are compiled. Modules of the same type, `config` and parameter sizes share the
            compiled kernels. If a parameter is sharded (a DTensor), nothing is done.
        call: names the kind of call, in addition to the inputs' dtypes and whether they need gradients.
        step: computes the results of the call from the inputs.
        inputs: on a GPU; stand-ins are passed to `step`.
    """
    if torch.compiler.is_compiling():  # torch.compile cannot trace what follows
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
            # hide what this saves from an activation checkpoint around the call, which counts it
            torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t),
            torch.cuda.device(device),
            _stand_ins(module),
        ):
            leaves = [None if t is None else t.detach().requires_grad_(t.requires_grad) for t in inputs]
            compile_ahead(lambda: _backward_ahead(step(*leaves)))
    except Exception as error:
        logger.debug("compiling ahead ended early: %s", error)


def compile_ahead(step: Callable[[], object]) -> None:
    """Run `step`; in it launches of quick kernels compile, in parallel, and do not run.

    Their results are zeros, which torch.empty returns meanwhile. At the end all kernels are compiled. If one does not
    compile, its first launch raises the error. A backward must run in this thread (see
    `torch.autograd.set_multithreading_enabled`) and through `_backward_ahead`.
    """

    def run() -> None:
        with ThreadPoolExecutor(threads) as pool, triton.AsyncCompileMode(pool, ignore_errors=True), _ZerosForEmpty():
            step()

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 4
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # of torchrun; each compiles the same kernels
    threads = min(_MOST_THREADS, max(1, cores // processes))
    _here.ahead = True
    try:
        # in a context of its own, because AsyncCompileMode stays on if the wait for the compilations was interrupted
        contextvars.copy_context().run(run)
    finally:
        _here.ahead = False


def _backward_ahead(results: Iterable[Tensor]) -> None:
    """Backward of a step that `compile_ahead` runs, with zeros as gradients; torch.empty returns zeros in it too.

    `_ZerosForEmpty` is off inside the functions that it intercepts. torch.autograd.backward is one, so it is not used.
    """
    wanted = tuple(t for t in results if t.requires_grad)
    if wanted:
        zeros = tuple(torch.zeros_like(t) for t in wanted)
        torch.autograd.Variable._execution_engine.run_backward(
            wanted, zeros, False, False, (), allow_unreachable=True, accumulate_grad=True
        )


@contextlib.contextmanager
def _stand_ins(module: nn.Module) -> Iterator[None]:
    """Replace the module's parameters by others with the same memory and attributes, and its buffers by copies."""
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
    """Whether Triton interprets kernels on the CPU (TRITON_INTERPRET=1)."""
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
