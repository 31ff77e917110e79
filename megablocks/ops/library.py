"""How an op is registered with torch: `torch.library.custom_op`, run on the device of its tensors, and called past it.

Triton launches on the current device, whatever its arguments are; torch's own operators go where their tensors are.
With two GPUs in one process an op must do so too.

A call of a custom op passes torch's dispatcher three times in Python. A layer's forward and backward make some thirty
calls, nested ones included, and that took longer than their kernels at 8,192 tokens. In eager mode nothing on
that way has a part in the result but autograd, so there an op is an `autograd.Function` of the same two functions, or
where no input needs a gradient the implementation itself. Everything that looks at ops from the dispatcher, such as
torch.compile, fake tensors and modes, gets the custom op.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch._library.custom_ops import CustomOpDef

_PLAIN = (Tensor, torch.nn.Parameter)


class Op:
    """A custom op, callable with positional arguments.

    definition: as torch knows it, for `torch.library.opcheck`.
    """

    def __init__(self, definition: CustomOpDef, implementation: Callable[..., Any]) -> None:
        functools.update_wrapper(self, implementation)
        self.definition = definition
        self._implementation = implementation
        self._defaults = [p.default for p in inspect.signature(implementation).parameters.values()]
        self._function: type[torch.autograd.Function] | None = None

    def register_fake(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """As `CustomOpDef.register_fake`."""
        return self.definition.register_fake(function)

    def register_autograd(self, backward: Callable[..., Any], *, setup_context: Callable[..., None]) -> None:
        """As `CustomOpDef.register_autograd`."""
        self.definition.register_autograd(backward, setup_context=setup_context)
        implementation = self._implementation

        def forward(ctx: Any, *args: Any) -> Any:
            output = implementation(*args)
            setup_context(ctx, args, output)
            return output

        def backward_of_lists(ctx: Any, *grads: Any) -> Any:
            given = backward(ctx, *grads)
            if not isinstance(given, tuple):
                return given
            assert not any(isinstance(g, list) and any(t is not None for t in g) for g in given), "lists are indices"
            return tuple(None if isinstance(g, list) else g for g in given)

        members = {"forward": staticmethod(forward), "backward": staticmethod(backward_of_lists)}
        self._function = type(self.definition._name, (torch.autograd.Function,), members)

    def __call__(self, *args: Any) -> Any:
        if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() or not _are_plain(args):
            return self.definition(*args)
        if torch.is_grad_enabled() and _need_gradients(args):
            if self._function is None:  # torch's op raises where a kernel's result would pass for a constant
                return self.definition(*args)
            return self._function.apply(*args, *self._defaults[len(args) :])
        return self._implementation(*args)


def _are_plain(args: Iterable[Any]) -> bool:
    """Whether no argument is of a subclass of Tensor, which may want to see the op, and no torch.func is at work."""
    if torch._C._are_functorch_transforms_active():
        return False
    for a in args:  # a loop, as in the next one: a generator takes longer than what it looks at
        if isinstance(a, Tensor) and type(a) not in _PLAIN:
            return False
    return True


def _need_gradients(args: Iterable[Any]) -> bool:
    for a in args:
        if isinstance(a, Tensor) and a.requires_grad:
            return True
    return False


def _device_of(args: Iterable[Any]) -> contextlib.AbstractContextManager[Any]:
    tensor = next((a for a in args if isinstance(a, Tensor)), None)
    if tensor is None or not tensor.is_cuda or tensor.device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(tensor.device)


def custom_op(name: str, *, mutates_args: Iterable[str]) -> Callable[[Callable[..., Any]], Op]:
    """`torch.library.custom_op` whose implementation runs with the device of its first tensor argument current."""

    def register(implementation: Callable[..., Any]) -> Op:
        @functools.wraps(implementation)
        def on_its_device(*args: Any, **kwargs: Any) -> Any:
            with _device_of((*args, *kwargs.values())):
                return implementation(*args, **kwargs)

        schema = torch.library.infer_schema(implementation, mutates_args=tuple(mutates_args))
        definition = torch.library.custom_op(name, on_its_device, mutates_args=tuple(mutates_args), schema=schema)
        return Op(definition, on_its_device)

    return register
