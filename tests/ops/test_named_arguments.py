"""An op's NamedTuples: one argument in Python, one of torch's for each field, on every way that an op is called."""

import contextlib
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from megablocks.ops.library import custom_op


class Scale(NamedTuple):
    factor: Tensor
    shift: Tensor | None = None
    times: int = 1


class Choice(NamedTuple):
    flipped: bool
    power: float


class Result(NamedTuple):
    y: Tensor
    count: Tensor


def formula(scale: Scale, x: Tensor, choice: Choice, places: int = 3) -> Tensor:
    y = x.flip(0) if choice.flipped else x
    y = y**choice.power * scale.factor * scale.times
    return torch.round(y if scale.shift is None else y + scale.shift, decimals=places)


def _fake_named(a: SimpleNamespace) -> Result:
    assert type(a.scale) is Scale and type(a.choice) is Choice and isinstance(a.places, int)
    return Result(torch.empty_like(a.x), a.x.new_empty(2, dtype=torch.int32))


@custom_op("megablocks_test::named", fake=_fake_named)
def named_op(scale: Scale, x: Tensor, choice: Choice, places: int = 3) -> Result:
    """A NamedTuple first, one in the middle, and a default behind."""
    assert type(scale) is Scale and type(choice) is Choice
    return Result(formula(scale, x, choice, places), torch.ones(2, dtype=torch.int32))


def _save(ctx, inputs, output) -> None:
    scale, x, ctx.choice, _ = inputs
    assert type(scale) is Scale and len(output) == 2
    ctx.mark_non_differentiable(output[1])
    ctx.times = scale.times
    ctx.save_for_backward(scale.factor, x)


def _backward(ctx, grad, _):
    factor, x = ctx.saved_tensors
    grad = grad * ctx.times
    power = (x.flip(0) if ctx.choice.flipped else x) ** ctx.choice.power
    slope = ctx.choice.power * x ** (ctx.choice.power - 1)
    d_x = (grad * factor).flip(0) * slope if ctx.choice.flipped else grad * factor * slope
    d_shift = grad / ctx.times if ctx.needs_input_grad[1] else None
    return Scale((grad * power).sum(), d_shift, None), d_x, None, None


named_op.register_autograd(_backward, setup_context=_save)


@custom_op("megablocks_test::unnamed_gradient", fake=lambda a: torch.empty_like(a.x))
def constant_op(x: Tensor, scale: Scale) -> Tensor:
    return x * scale.factor


constant_op.register_autograd(
    lambda ctx, grad: (grad * ctx.saved_tensors[0], None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[1].factor),
)


class PlainMode(TorchDispatchMode):
    """Changes nothing; under a mode an op is called as a custom op."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


WAYS = {
    "eager": lambda f: f,
    "custom op": lambda f: f,
    "compiled": lambda f: torch.compile(f, fullgraph=True, backend="aot_eager"),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("with_shift", [False, True])
@pytest.mark.parametrize("flipped", [False, True])
@pytest.mark.parametrize("options", [(), (1,)])
def test_values_and_gradients_on_every_way(way, with_shift, flipped, options) -> None:
    x = torch.rand(4, dtype=torch.float64).add(1).requires_grad_()
    factor = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    shift = torch.rand(4, dtype=torch.float64, requires_grad=True) if with_shift else None
    choice, leaves = Choice(flipped, 2.0), [t for t in (x, factor, shift) if t is not None]

    def call(x, factor, shift):
        result = named_op(Scale(factor, shift, 5), x, choice, *options)
        assert type(result) is Result and not result.count.requires_grad
        return result.y, result.count

    with PlainMode() if way == "custom op" else contextlib.nullcontext():
        y, count = WAYS[way](call)(x, factor, shift)
        grads = torch.autograd.grad((y * torch.arange(4)).sum(), leaves)
    assert torch.equal(y, formula(Scale(factor, shift, 5), x, choice, *options)) and count.tolist() == [1, 1]
    base = x.flip(0) if flipped else x
    smooth = base**2 * factor * 5 + (0 if shift is None else shift)  # the gradients are those of unrounded values
    for got, expected in zip(grads, torch.autograd.grad((smooth * torch.arange(4)).sum(), leaves), strict=True):
        assert torch.allclose(got, expected)


@pytest.mark.parametrize("frozen", ["x", "factor"])
def test_a_gradient_by_field_that_nobody_wants_is_dropped(frozen) -> None:
    x, factor = torch.rand(3, requires_grad=frozen != "x"), torch.tensor(2.0, requires_grad=frozen != "factor")
    y, _ = named_op(Scale(factor), x, Choice(False, 1.0))
    y.sum().backward()
    assert [t.grad is None for t in (x, factor)] == [frozen == "x", frozen == "factor"]


def test_none_for_a_named_tuple_is_none_for_each_field() -> None:
    x, factor = torch.rand(3, requires_grad=True), torch.tensor(2.0, requires_grad=True)
    for mode in (contextlib.nullcontext(), PlainMode()):
        with mode:
            got = torch.autograd.grad(constant_op(x, Scale(factor)).sum(), (x, factor), allow_unused=True)
        assert torch.equal(got[0], torch.full((3,), 2.0)) and got[1] is None


def test_the_schema_has_a_named_argument_for_each_field() -> None:
    schema = "(Tensor factor, Tensor? shift, SymInt times, Tensor x, bool flipped, float power, SymInt places=3)"
    assert schema in str(named_op.definition._opoverload._schema)
    assert str(named_op.definition._opoverload._schema).endswith("-> (Tensor, Tensor)")
    x, factor = torch.rand(3), torch.tensor(2.0)
    by_name = torch.ops.megablocks_test.named(
        x=x, flipped=True, power=3.0, **Scale(factor, None, 2)._asdict(), places=2
    )
    assert torch.equal(by_name[0], named_op(Scale(factor, None, 2), x, Choice(True, 3.0), 2).y)


def test_flat_and_nested_arguments_are_the_same() -> None:
    scale, x, choice = Scale(torch.ones(()), None, 2), torch.ones(3), Choice(True, 1.5)
    assert named_op.flat(scale, x, choice) == (scale.factor, None, 2, x, True, 1.5, 3)
    assert named_op.flat(scale, x, choice, 4)[-1] == 4
    signature = named_op._signature
    assert signature.nested(named_op.flat(scale, x, choice)) == (scale, x, choice, 3)
    assert signature.nested((scale.factor, None, 2, x, True, 1.5)) == (scale, x, choice, 3)  # torch may leave it out
    assert signature.flat((None, x, choice, None)) == (None, None, None, x, True, 1.5, None)


def test_torchs_check_of_the_registrations() -> None:
    scale = Scale(torch.tensor(2.0, requires_grad=True), torch.zeros(3, requires_grad=True), 2)
    x = torch.rand(3).add(1).requires_grad_()
    torch.library.opcheck(named_op.definition, named_op.flat(scale, x, Choice(True, 2.0), 6))


def test_fake_tensors_get_a_named_result() -> None:
    with FakeTensorMode() as mode:
        x, factor = (mode.from_tensor(t) for t in (torch.rand(3), torch.ones(())))
        result = named_op(Scale(factor), x, Choice(True, 2.0))
    assert type(result) is Result and isinstance(result.y, FakeTensor) and result.y.shape == (3,)


def test_two_fields_of_one_name_are_refused() -> None:
    def both(x: Tensor, scale: Scale, other: Scale) -> Tensor:
        return x

    with pytest.raises(ValueError, match="duplicate parameter name: 'factor'"):
        custom_op("megablocks_test::both", fake=lambda a: a.x)(both)
