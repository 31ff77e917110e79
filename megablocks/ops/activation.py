"""The one enum of expert activations.

    gelu(z), silu(z) = z·σ(z), relu(z), relu2(z) = relu(z)²
    swiglu(z, g) = silu(z)·g, geglu(z, g) = gelu(z)·g, reglu(z, g) = relu(z)·g

gelu comes in two forms (Hendrycks and Gimpel, arXiv 1606.08415): "tanh", 0.5·z·(1 + tanh(√(2/π)·(z + 0.044715·z³))),
and "none", the exact z·Φ(z). The gated forms are Shazeer's (arXiv 2002.05202); relu² is Primer's (arXiv 2109.08668).

Shapes: z and g (..., I), result (..., I). Computed in float32 (float64 for float64) and rounded once. Only z and g are
kept for backward. Elementwise, so unused rows that hold NaN stay where they are.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megablocks.ops.backend import runs_triton
from megablocks.ops.dtypes import accumulation_dtype
from megablocks.ops.library import custom_op

UNARY = ("gelu", "silu", "relu", "relu2")
GATED = {"swiglu": "silu", "geglu": "gelu", "reglu": "relu"}
_aten = torch.ops.aten


def _unary(z: Tensor, name: str, approximate: str) -> Tensor:
    # aten's kernels compute half types in float32 and round the result once
    if name == "gelu":
        return F.gelu(z, approximate=approximate)
    if name == "silu":
        return F.silu(z)
    return F.relu(z) if name == "relu" else F.relu(z).square()


def _unary_backward(grad: Tensor, z: Tensor, name: str, approximate: str) -> Tensor:
    if name == "gelu":
        return _aten.gelu_backward(grad, z, approximate=approximate)
    if name == "silu":
        return _aten.silu_backward(grad, z)
    if name == "relu":
        return _aten.threshold_backward(grad, z, 0)
    return grad * (2 * F.relu(z))  # doubling is exact, so this rounds once


def activation_ref(pre: Tensor, gate_pre: Tensor | None, name: str, approximate: str) -> Tensor:
    """`pre` (..., I), `gate_pre` (..., I) for a gated `name`, else None → (..., I)."""
    if gate_pre is None:
        return _unary(pre, name, approximate)
    acc = accumulation_dtype(pre.dtype)
    return (_unary(pre.to(acc), GATED[name], approximate) * gate_pre).to(pre.dtype)


def activation_backward_ref(
    grad: Tensor, pre: Tensor, gate_pre: Tensor | None, name: str, approximate: str
) -> tuple[Tensor, Tensor | None]:
    """Gradients of `pre` and of `gate_pre` (None without one), from `grad` (..., I) of any stride."""
    if gate_pre is None:
        return _unary_backward(grad, pre, name, approximate), None
    acc = accumulation_dtype(pre.dtype)
    z, wide_grad = pre.to(acc), grad.to(acc)
    d_pre = _unary_backward(wide_grad * gate_pre, z, GATED[name], approximate)
    d_gate = wide_grad * _unary(z, GATED[name], approximate)
    return d_pre.to(pre.dtype), d_gate.to(gate_pre.dtype)


@custom_op("megablocks::activation", mutates_args=())
def activation_op(pre: Tensor, gate_pre: Tensor | None, name: str, approximate: str) -> Tensor:
    if runs_triton(pre):
        from megablocks.ops.activation_triton import activation_launch

        return activation_launch(pre, gate_pre, name, approximate)
    return activation_ref(pre, gate_pre, name, approximate).contiguous()


@activation_op.register_fake
def _(pre: Tensor, gate_pre: Tensor | None, name: str, approximate: str) -> Tensor:
    return torch.empty(pre.shape, dtype=pre.dtype, device=pre.device)


@custom_op("megablocks::activation_backward", mutates_args=())
def activation_backward_op(
    grad: Tensor, pre: Tensor, gate_pre: Tensor | None, name: str, approximate: str
) -> tuple[Tensor, Tensor]:
    if runs_triton(pre):
        from megablocks.ops.activation_triton import activation_backward_launch

        d_pre, d_gate = activation_backward_launch(grad, pre, gate_pre, name, approximate)
    else:
        d_pre, d_gate = activation_backward_ref(grad, pre, gate_pre, name, approximate)
    return d_pre.contiguous(), pre.new_empty(0) if d_gate is None else d_gate.contiguous()


@activation_backward_op.register_fake
def _(grad: Tensor, pre: Tensor, gate_pre: Tensor | None, name: str, approximate: str) -> tuple[Tensor, Tensor]:
    d_pre = torch.empty(pre.shape, dtype=pre.dtype, device=pre.device)
    return d_pre, pre.new_empty(0) if gate_pre is None else torch.empty_like(d_pre)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    pre, gate_pre, ctx.name, ctx.approximate = inputs
    ctx.save_for_backward(pre, gate_pre)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    pre, gate_pre = ctx.saved_tensors
    d_pre, d_gate = activation_backward_op(grad, pre, gate_pre, ctx.name, ctx.approximate)
    return d_pre, (None if gate_pre is None else d_gate), None, None


activation_op.register_autograd(_backward, setup_context=_setup_context)


def activate(pre: Tensor, gate_pre: Tensor | None, name: str, approximate: str = "tanh") -> Tensor:
    """Apply the activation `name`.

    Args:
        pre: (..., I) floating, the pre-activation x·w1ᵀ.
        gate_pre: (..., I), same dtype, x·v1ᵀ for "swiglu", "geglu" and "reglu"; None for the others.
        name: one of "gelu", "silu", "relu", "relu2", "swiglu", "geglu", "reglu".
        approximate: gelu's form, "tanh" or "none".

    Returns:
        (..., I) in pre's dtype.

    Raises:
        ValueError: an unknown name or approximate, a gate missing, unwanted or of another shape or dtype.
    """
    check_activation(pre, gate_pre, name, approximate)
    return activation_op(pre, gate_pre, name, approximate)


def check_activation(pre: Tensor, gate_pre: Tensor | None, name: str, approximate: str) -> None:
    """The ValueErrors of `activate`."""
    if name not in UNARY and name not in GATED:
        raise ValueError(f"name={name!r}: must be one of {', '.join((*UNARY, *GATED))}")
    if approximate not in ("tanh", "none"):
        raise ValueError(f"approximate={approximate!r}: must be 'tanh' or 'none'")
    if (gate_pre is None) == (name in GATED):
        raise ValueError(f"gate_pre is {'missing' if gate_pre is None else 'given'} for name={name!r}")
    if gate_pre is not None and (gate_pre.shape != pre.shape or gate_pre.dtype != pre.dtype):
        raise ValueError(
            f"gate_pre is {tuple(gate_pre.shape)} {gate_pre.dtype}, must be {tuple(pre.shape)} {pre.dtype} as pre is"
        )
