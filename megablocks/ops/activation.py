"""The activation of an expert's MLP, plain or gated.

    act = f(pre)      or, gated, act = f(pre) ⊙ gate          f and its derivative: activation_table.py

Shapes: pre and gate (..., I), result (..., I). Computed in float32 (float64 for float64) and rounded once. Only pre and
gate are saved for backward. The op is elementwise, so NaN in unused rows stays in those rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megablocks.ops.activation_table import ACTIVATIONS, APPROXIMATIONS, GATED, UNARY, Activation
from megablocks.ops.library import custom_op, runs_triton, save_inputs


def halves(pre: Tensor, gate: Tensor | None, activation: Activation) -> tuple[Tensor, Tensor | None]:
    """pre and gate, as views of a `pre` (R, 2·I) that holds both."""
    return pre.chunk(2, dim=1) if gate is None and activation.gated else (pre, gate)  # type: ignore[return-value]


def activation_ref(pre: Tensor, gate: Tensor | None, activation: Activation) -> Tensor:
    """`pre` (..., I), `gate` (..., I) or None → (..., I), contiguous.

    A gated activation without a gate takes `pre` (R, 2·I), whose second half is the gate.
    """
    pre, gate = halves(pre, gate, activation)
    value = UNARY[activation.unary].value
    if gate is None:
        return value(pre, activation.approximate).contiguous()
    wide = pre.to(torch.promote_types(pre.dtype, torch.float32))
    return (value(wide, activation.approximate) * gate).to(pre.dtype).contiguous()


def activation_backward_ref(
    grad: Tensor, pre: Tensor, gate: Tensor | None, activation: Activation
) -> tuple[Tensor, Tensor | None]:
    """Contiguous gradients of `pre` and of `gate` (None without one), from `grad` (..., I) of any stride."""
    if gate is None and activation.gated:
        d_halves = activation_backward_ref(grad, *halves(pre, gate, activation), activation)
        return torch.cat(d_halves, dim=1), None  # type: ignore[arg-type]
    form, approximate = UNARY[activation.unary], activation.approximate
    if gate is None:
        return form.backward(grad, pre, approximate).contiguous(), None
    acc = torch.promote_types(pre.dtype, torch.float32)
    wide, wide_grad = pre.to(acc), grad.to(acc)
    d_pre = form.backward(wide_grad * gate, wide, approximate)
    d_gate = wide_grad * form.value(wide, approximate)
    return d_pre.to(pre.dtype).contiguous(), d_gate.to(gate.dtype).contiguous()


def _fake_activation(a: Any) -> Tensor:
    pre, _ = halves(a.pre, a.gate, a.activation)
    return torch.empty(pre.shape, dtype=pre.dtype, device=pre.device)


activation_op = custom_op(
    "megablocks::activation",
    fake=_fake_activation,
    kernel="megablocks.ops.activation_triton:activation_launch",
)(activation_ref)
activation_backward_op = custom_op(
    "megablocks::activation_backward",
    fake=lambda a: (a.pre.new_empty(a.pre.shape), None if a.gate is None else a.pre.new_empty(a.pre.shape)),
    kernel="megablocks.ops.activation_triton:activation_backward_launch",
    takes=lambda grad, pre, *_: runs_triton(pre),
)(activation_backward_ref)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    pre, gate = ctx.saved_tensors
    d_pre, d_gate = activation_backward_op(grad, pre, gate, ctx.option)
    return d_pre, (None if gate is None else d_gate), None


activation_op.register_autograd(_backward, setup_context=save_inputs)


def activate_halves(h: Tensor, activation: Activation) -> Tensor:
    """`activate` of the two halves of h (R, 2·I), as one product with both matrices leaves them.

    The kernel reads both halves in place and writes their gradients side by side. Halves that torch cuts would be
    copied for the kernel, and their gradients copied into one tensor.

    Args:
        h: (R, 2·I) floating: the pre-activation, then the gate.
        activation: a gated one.

    Returns:
        (R, I) in h's dtype.

    Raises:
        ValueError: an activation without a gate, or h without two equal halves.
    """
    if h.dim() != 2 or h.shape[1] % 2:
        raise ValueError(f"h is {tuple(h.shape)}: must be (R, 2·I)")
    check_activation(h, h, activation)
    return activation_op(h, None, activation)


def activate(pre: Tensor, gate: Tensor | None, activation: Activation) -> Tensor:
    """Apply an activation.

    Args:
        pre: (..., I) floating, the pre-activation x·w1ᵀ.
        gate: (..., I), same dtype, x·v1ᵀ if the activation is gated, otherwise None.
        activation: one of `ACTIVATIONS`, and the form of gelu.

    Returns:
        (..., I) in pre's dtype.

    Raises:
        ValueError: an unknown activation, a gate that is missing, unwanted or of another shape or dtype.
    """
    check_activation(pre, gate, activation)
    return activation_op(pre, gate, activation)


def check_activation(pre: Tensor, gate: Tensor | None, activation: Activation, what: str = "gate") -> None:
    """The ValueErrors of `activate`. `what` names the gate, or the matrix that computes it."""
    name, approximate = activation
    if name not in ACTIVATIONS:
        raise ValueError(f"activation={name!r}: must be one of {', '.join(ACTIVATIONS)}")
    if approximate not in APPROXIMATIONS:
        raise ValueError(f"approximate={approximate!r}: must be 'tanh' or 'none'")
    if (gate is None) == (name in GATED):
        raise ValueError(f"{what} is {'missing' if gate is None else 'given'} for activation={name!r}")
    if gate is not None and (gate.shape != pre.shape or gate.dtype != pre.dtype):
        given = f"{what} is {tuple(gate.shape)} {gate.dtype}"
        raise ValueError(f"{given}, must be {tuple(pre.shape)} {pre.dtype} as pre is")
