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
import typing
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch._library.custom_ops import CustomOpDef
from torch.autograd import forward_ad

_PLAIN = (Tensor, torch.nn.Parameter)


class Op:
    """A custom op, callable with positional arguments.

    definition: as torch knows it, for `torch.library.opcheck`.
    """

    def __init__(self, definition: CustomOpDef, implementation: Callable[..., Any], schema: str) -> None:
        functools.update_wrapper(self, implementation)
        self.definition = definition
        self._implementation = implementation
        self._has_lists = "Tensor[]" in schema
        arguments = definition._opoverload._schema.arguments
        self._written = [i for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write]
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
            assert not any(isinstance(g, list) and any(t is not None for t in g) for g in given), "lists are indices"
            return tuple(None if isinstance(g, list) else g for g in given)

        backward_of_function = backward_of_lists if self._has_lists else backward
        members = {"forward": staticmethod(forward), "backward": staticmethod(backward_of_function)}
        self._function = type(self.definition._name, (torch.autograd.Function,), members)

    def __call__(self, *args: Any) -> Any:
        if torch.compiler.is_compiling():
            return self.definition(*args)
        if forward_ad._current_level >= 0:
            _refuse_tangents(self.definition, args)
        if torch._C._len_torch_dispatch_stack() or torch._C._are_functorch_transforms_active():
            return self.definition(*args)
        first, wants_gradient = None, False
        for a in args:  # one loop over all that is asked of the tensors: three took longer than a launch
            if isinstance(a, Tensor):
                if type(a) not in _PLAIN:  # a subclass may want to see the op
                    return self.definition(*args)
                wants_gradient = wants_gradient or a.requires_grad
                first = a if first is None else first
        for i in self._written:  # as torch's op does: or autograd would use it, saved before, as if it were unchanged
            torch.autograd.graph.increment_version(args[i])
        call = self._implementation
        if wants_gradient and torch.is_grad_enabled():
            if self._function is None:  # torch's op raises where a kernel's result would pass for a constant
                return self.definition(*args)
            call, args = self._function.apply, (*args, *self._defaults[len(args) :])
        if first is None or not first.is_cuda or first.get_device() == torch.cuda.current_device():
            return call(*args)
        with torch.cuda.device(first.device):
            return call(*args)


def unknown_to_autograd(t: Tensor, what: str) -> Tensor:
    """t, which would pass for a constant; where backward is itself to be differentiated, a derivative of it raises."""
    if not torch.is_grad_enabled():
        return t
    refuse = torch._C._functions.DelayedError(f"{what}: no second derivative is known", 1)
    refused: Tensor = refuse(t.requires_grad_())
    return refused


def once_differentiable(backward: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """`backward` of an op that keeps what is no node of autograd: results of its own.

    Under create_graph a gradient that came out without a graph would pass for a constant: a derivative of it raises.
    torch's decorator of this name asks whether the incoming gradients have a graph, which that of a sum has not.
    """

    @functools.wraps(backward)
    def refusing(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        return tuple(
            unknown_to_autograd(g, backward.__module__) if isinstance(g, Tensor) and not g.requires_grad else g
            for g in backward(ctx, *grads)
        )

    return refusing


def _refuse_tangents(op: CustomOpDef, args: Iterable[Any]) -> None:
    """Raise for an input of forward-mode AD: kernels, and torch's own custom ops, lose its tangent without a word."""
    for a in args:
        if isinstance(a, Tensor) and forward_ad.unpack_dual(a).tangent is not None:
            raise RuntimeError(f"{op._qualname}: an input has a tangent, and no forward-mode derivative is known")


def _device_of(args: Iterable[Any]) -> contextlib.AbstractContextManager[Any]:
    tensor = next((a for a in args if isinstance(a, Tensor)), None)
    if tensor is None or not tensor.is_cuda or tensor.device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(tensor.device)


def _with_fields_as_arguments(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`; where its last parameter is a NamedTuple, with a parameter for each field in its place."""
    signature = inspect.signature(function, eval_str=True)
    *others, last = signature.parameters.values()
    options = last.annotation
    if not hasattr(options, "_fields"):
        return function
    fields = [last.replace(name=name, annotation=kind) for name, kind in typing.get_type_hints(options).items()]

    @functools.wraps(function)
    def flat(*args: Any) -> Any:
        return function(*args[: len(others)], options(*args[len(others) :]))

    flat.__signature__ = signature.replace(parameters=[*others, *fields])  # type: ignore[attr-defined]
    return flat


def custom_op(name: str, *, mutates_args: Iterable[str]) -> Callable[[Callable[..., Any]], Op]:
    """`torch.library.custom_op` whose implementation runs with the device of its first tensor argument current.

    A NamedTuple as the implementation's last parameter is an argument for each field in the schema and in calls.
    """

    def register(implementation: Callable[..., Any]) -> Op:
        implementation = _with_fields_as_arguments(implementation)

        @functools.wraps(implementation)
        def on_its_device(*args: Any, **kwargs: Any) -> Any:
            with _device_of((*args, *kwargs.values())):
                return implementation(*args, **kwargs)

        schema = torch.library.infer_schema(implementation, mutates_args=tuple(mutates_args))
        definition = torch.library.custom_op(name, on_its_device, mutates_args=tuple(mutates_args), schema=schema)
        return Op(definition, implementation, schema)

    return register
