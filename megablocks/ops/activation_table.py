"""The table of activations: each one's formula in torch. It loads no torch, so that a config can read the names.

    gelu(z), silu(z) = z·σ(z), relu(z), relu2(z) = relu(z)²
    swiglu(z, g) = silu(z)·g, geglu(z, g) = gelu(z)·g, reglu(z, g) = relu(z)·g

gelu comes in two forms (Hendrycks and Gimpel, arXiv 1606.08415): "tanh", 0.5·z·(1 + tanh(√(2/π)·(z + 0.044715·z³))),
and "none", the exact z·Φ(z). The gated forms are Shazeer's (arXiv 2002.05202); relu² is Primer's (arXiv 2109.08668).

A new activation is an entry here and its value and derivative in `activation_triton.unary`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

APPROXIMATIONS = ("tanh", "none")
"""The forms of gelu."""


class Formula(NamedTuple):
    """An activation of one argument, in torch. Half types are computed in float32 and rounded once.

    value: (z, approximate) → act(z).
    backward: (grad, z, approximate) → grad ⊙ act'(z).
    """

    value: Callable[[Tensor, str], Tensor]
    backward: Callable[[Tensor, Tensor, str], Tensor]


def _torch() -> Any:
    import torch  # here, so that a config reads the names without it

    return torch


UNARY = {
    "gelu": Formula(
        lambda z, approximate: _torch().nn.functional.gelu(z, approximate=approximate),
        lambda grad, z, approximate: _torch().ops.aten.gelu_backward(grad, z, approximate=approximate),
    ),
    "silu": Formula(
        lambda z, approximate: _torch().nn.functional.silu(z),
        lambda grad, z, approximate: _torch().ops.aten.silu_backward(grad, z),
    ),
    "relu": Formula(
        lambda z, approximate: z.relu(),
        lambda grad, z, approximate: _torch().ops.aten.threshold_backward(grad, z, 0),
    ),
    # doubling is exact, so this rounds once
    "relu2": Formula(lambda z, approximate: z.relu().square(), lambda grad, z, approximate: grad * (2 * z.relu())),
}
GATED = {"swiglu": "silu", "geglu": "gelu", "reglu": "relu"}
"""Gated activations, and the unary one that is applied to the pre-activation."""
ACTIVATIONS = (*UNARY, *GATED)


class Activation(NamedTuple):
    """Which activation an op applies.

    name: one of `ACTIVATIONS`.
    approximate: form of gelu, one of `APPROXIMATIONS`; the others ignore it.
    """

    name: str
    approximate: str = "tanh"

    @property
    def gated(self) -> bool:
        """Whether it has a second factor, the gate."""
        return self.name in GATED

    @property
    def unary(self) -> str:
        """The activation of one argument that is applied to the pre-activation."""
        return GATED.get(self.name, self.name)

    @property
    def exact(self) -> bool:
        """Whether gelu is in its exact form."""
        return self.approximate == "none"
