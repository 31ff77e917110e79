"""What every op file needs: registration with torch, the choice between kernel and reference, and autocast.

`custom_op` registers an op as `torch.library.custom_op` does, with five additions.

- It can name a kernel's launcher, which runs instead of the function if it supports the arguments.
- A NamedTuple among the parameters, such as a `Dispatch`, is one argument in Python. In torch's schema each of its
  fields is an argument, because schemas have no structures. A NamedTuple is also allowed as the result.
- The op runs with the device of its tensors as the current device, because Triton launches on the current device.
  Autocast is off in it: the public functions cast their arguments, and torch would narrow a reference's own products.
- None among the results becomes an empty tensor, because schemas have no optional results.
- In eager mode a call bypasses torch's dispatcher, which a custom op enters three times in Python. There only autograd
  affects the result, so the op is an `autograd.Function` of the same functions. torch.compile, torch.jit.trace, fake
  tensors, modes and tensor subclasses get the custom op.
  Gain on an H200's host: a router's forward takes 147 µs instead of 219, and a layer calls some thirty ops per step.
  It reads private state of torch, so versions of torch outside `_DIRECT` always call the custom op.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import inspect
import typing
from collections.abc import Callable, Iterable
from itertools import islice
from types import SimpleNamespace
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor
from torch._library.custom_ops import CustomOpDef
from torch.autograd import forward_ad

_DIRECT = Version("2.8") <= Version(torch.__version__) < Version("2.16")
_PLAIN = (Tensor, torch.nn.Parameter)
_HAS_TRITON = importlib.util.find_spec("triton") is not None  # checked once: torch.compile cannot trace the check


def runs_triton(t: Tensor) -> bool:
    """Whether Triton kernels compute on `t`: it is on a GPU, Triton is installed, and it is not float64."""
    return t.is_cuda and t.dtype != torch.float64 and _HAS_TRITON


def under_autocast(first: Tensor, *others: Tensor | None) -> tuple[Any, ...]:
    """The tensors, cast to autocast's dtype if it is on for their device; float64 is not cast, as in torch.

    Autocast does not know the device "meta": torch raises if it is asked about that one.
    """
    tensors, kind = (first, *others), first.device.type
    if first.is_meta or not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(t if t is None or t.dtype == torch.float64 else t.to(dtype) for t in tensors)


class _Signature:
    """The parameters of an op's implementation, and the schema arguments that represent them.

    A "flat" argument list has one value for each schema argument. A "nested" one has one value for each parameter.
    """

    def __init__(self, implementation: Callable[..., Any]) -> None:
        signature = inspect.signature(implementation, eval_str=True)
        parameters = list(signature.parameters.values())
        self.names = list(signature.parameters)
        self.kinds = [p.annotation if hasattr(p.annotation, "_fields") else None for p in parameters]
        self.defaults = [p.default for p in parameters]
        # Positions and lengths of the NamedTuples. The last one is first, so that replacing one moves no other.
        self.places = [(i, len(kind._fields)) for i, kind in enumerate(self.kinds) if kind is not None][::-1]
        flat: list[inspect.Parameter] = []
        for parameter, kind in zip(parameters, self.kinds, strict=True):
            hints = {parameter.name: parameter.annotation} if kind is None else typing.get_type_hints(kind)
            flat += [parameter.replace(name=name, annotation=hint) for name, hint in hints.items()]
        self.flat_defaults = [p.default for p in flat]
        result = signature.return_annotation
        self.result = result if hasattr(result, "_fields") else None
        if self.result is not None:
            result = tuple[tuple(typing.get_type_hints(self.result).values())]  # type: ignore[misc]
        self.optional = typing.get_origin(result) is tuple and Tensor | None in typing.get_args(result)
        if self.optional:
            result = tuple[tuple(Tensor if hint == Tensor | None else hint for hint in typing.get_args(result))]  # type: ignore[misc]
        self.of_schema = signature.replace(parameters=flat, return_annotation=result)

    def flat(self, args: Iterable[Any]) -> tuple[Any, ...]:
        """Nested arguments, or their gradients, by field. None for a NamedTuple becomes None for each field."""
        flat = [*args]
        for place, fields in self.places:
            value = flat[place]
            # tuple(): torch.compile of torch 2.11 cannot add a NamedTuple to a list
            flat[place : place + 1] = (None,) * fields if value is None else tuple(value)
        return tuple(flat)

    def nested(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Flat arguments by parameter, with defaults for those that are missing at the end."""
        values = iter((*args, *self.flat_defaults[len(args) :]))
        return tuple(next(values) if k is None else k(*islice(values, len(k._fields))) for k in self.kinds)


class Op:
    """A custom op, called with positional arguments as its implementation declares them.

    definition: the op as torch knows it, with flat arguments (`flat`), for `torch.library.opcheck`.
    implementation: the plain function, which the implementation of another op can call without this class's checks.
    """

    def __init__(self, definition: CustomOpDef, implementation: Callable[..., Any]) -> None:
        functools.update_wrapper(self, implementation)
        self.definition = definition
        self.implementation = implementation
        self._signature = _Signature(implementation)
        arguments = definition._opoverload._schema.arguments
        self._written = [i for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write]
        self._function: type[torch.autograd.Function] | None = None

    def flat(self, *args: Any) -> tuple[Any, ...]:
        """The arguments by field, as `definition` accepts them."""
        return self._signature.flat((*args, *self._signature.defaults[len(args) :]))

    def register_autograd(self, backward: Callable[..., Any], *, setup_context: Callable[..., None]) -> None:
        """Like `CustomOpDef.register_autograd`.

        Args:
            backward: returns one gradient for each parameter of the implementation, which autograd casts to its dtype.
                For a NamedTuple that is None, or one gradient for each field.
            setup_context: gets the arguments by parameter.
        """
        signature, implementation = self._signature, self.implementation

        def flat_backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
            return signature.flat(backward(ctx, *grads))

        def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            setup_context(ctx, signature.nested(inputs), output)

        def forward(ctx: Any, *flat_and_args: Any) -> Any:
            args = flat_and_args[-1]  # by parameter; autograd needs the flat ones before
            output = implementation(*args)
            setup_context(ctx, args, output)
            return output

        def backward_of_function(ctx: Any, *grads: Any) -> tuple[Any, ...]:
            return *signature.flat(backward(ctx, *grads)), None

        self.definition.register_autograd(flat_backward, setup_context=setup)
        members = {"forward": staticmethod(forward), "backward": staticmethod(backward_of_function)}
        self._function = type(self.definition._name, (torch.autograd.Function,), members)

    def __call__(self, *args: Any) -> Any:
        signature = self._signature
        args = (*args, *signature.defaults[len(args) :])
        flat = signature.flat(args) if signature.places else args
        first, needs_gradient, direct = None, False, _DIRECT and not torch.compiler.is_compiling()
        if direct and forward_ad._current_level >= 0:
            _refuse_tangents(self.definition, flat)
        if direct and (
            torch._C._len_torch_dispatch_stack()
            or torch._C._are_functorch_transforms_active()
            or torch._C._get_tracing_state()  # torch.jit.trace would freeze what a reference reads on the host
        ):
            direct = False
        if direct:
            for a in flat:  # one loop for all checks of the tensors: three loops took longer than a launch
                if isinstance(a, Tensor):
                    direct = direct and type(a) in _PLAIN  # a subclass may handle the op itself
                    needs_gradient = needs_gradient or a.requires_grad
                    first = a if first is None else first
            needs_gradient = needs_gradient and torch.is_grad_enabled()
            direct = direct and (first is None or not first.is_meta)  # the custom op computes only shapes
        if not direct or (needs_gradient and self._function is None):
            result = self.definition(*flat)  # if the op has no gradient, it raises when one is needed
        else:
            for i in self._written:  # as torch's op does, so that autograd detects writes to a saved tensor
                torch.autograd.graph.increment_version(flat[i])
            call, given = self.implementation, args
            if needs_gradient and self._function is not None:
                call, given = self._function.apply, (*flat, args)
            if first is None or (
                (not first.is_cuda or first.get_device() == torch.cuda.current_device())
                and not torch.is_autocast_enabled(first.device.type)
            ):
                result = call(*given)
            else:
                with _device_of((first,)), torch.autocast(first.device.type, enabled=False):
                    result = call(*given)
        return result if signature.result is None else signature.result(*result)


def _plain(result: Any) -> Any:
    """A NamedTuple as the tuple that torch's schema declares, with an empty tensor for None."""
    return tuple([result[0].new_empty(0) if t is None else t for t in result]) if isinstance(result, tuple) else result


def unknown_to_autograd(t: Tensor, what: str) -> Tensor:
    """`t`, which depends on tensors in a way that autograd does not see. With create_graph its derivative raises."""
    if not torch.is_grad_enabled():
        return t
    refuse = torch._C._functions.DelayedError(f"{what}: no second derivative is known", 1)
    return refuse(t.requires_grad_())


def save_inputs(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """The setup_context of an op whose last argument is not a tensor. That argument becomes `ctx.option`."""
    *tensors, ctx.option = inputs
    ctx.save_for_backward(*tensors)


def once_differentiable(backward: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """`backward` of an op that saves some of its own results. With create_graph, a derivative of its gradients raises.

    torch's decorator of this name checks whether the incoming gradients have a graph. The gradient of a sum has none.
    """

    @functools.wraps(backward)
    def refusing(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        return tuple(
            unknown_to_autograd(g, backward.__module__) if isinstance(g, Tensor) and not g.requires_grad else g
            for g in backward(ctx, *grads)
        )

    return refusing


def _refuse_tangents(op: CustomOpDef, args: Iterable[Any]) -> None:
    """Raise for an input of forward-mode AD: kernels and torch's custom ops lose its tangent without a message."""
    for a in args:
        if isinstance(a, Tensor) and forward_ad.unpack_dual(a).tangent is not None:
            raise RuntimeError(f"{op._qualname}: an input has a tangent, and no forward-mode derivative is known")


def _device_of(args: Iterable[Any]) -> contextlib.AbstractContextManager[Any]:
    """A block in which the device of the first tensor is the current one."""
    tensor = next((a for a in args if isinstance(a, Tensor)), None)
    if tensor is None or not tensor.is_cuda or tensor.device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(tensor.device)


@functools.cache
def _load(path: str) -> Any:
    """The object that "module:name" names. Kernels are imported at their first launch, since a CPU needs no Triton."""
    module, name = path.split(":")
    return getattr(importlib.import_module(module), name)


def custom_op(
    name: str,
    *,
    mutates_args: tuple[str, ...] = (),
    fake: Callable[[Any], Any],
    kernel: str | None = None,
    takes: Callable[..., bool] = lambda first, *_: runs_triton(first),
) -> Callable[[Callable[..., Any]], Op]:
    """`torch.library.custom_op` with the additions that this file's docstring lists. It decorates the reference.

    fake: returns unset results of the right shapes, from one object with the implementation's parameters by name.
    kernel: "module:launcher" with the same parameters. It runs if `takes` is true of the arguments: by default if the
        first one is a tensor on which Triton runs.
    """

    def register(reference: Callable[..., Any]) -> Op:
        @functools.wraps(reference)
        def kernel_or_reference(*args: Any) -> Any:
            result = _load(kernel)(*args) if kernel is not None and takes(*args) else reference(*args)
            # not by `_plain`, to save a call in each op
            return tuple([result[0].new_empty(0) if t is None else t for t in result]) if signature.optional else result

        signature = _Signature(reference)
        implementation = reference if kernel is None and not signature.optional else kernel_or_reference

        def of_schema(*args: Any) -> Any:
            kind = next(a.device.type for a in args if isinstance(a, Tensor))
            with _device_of(args), torch.autocast(kind, enabled=False):
                return _plain(implementation(*signature.nested(args)))

        of_schema.__signature__ = signature.of_schema  # type: ignore[attr-defined]
        schema = torch.library.infer_schema(of_schema, mutates_args=mutates_args)
        definition = torch.library.custom_op(name, of_schema, mutates_args=mutates_args, schema=schema)

        @definition.register_fake
        def of_shapes(*args: Any) -> Any:
            return _plain(fake(SimpleNamespace(**dict(zip(signature.names, signature.nested(args), strict=True)))))

        return Op(definition, implementation)

    return register
