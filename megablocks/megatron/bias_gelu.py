"""Bias and gelu of Megatron's dense layers as one kernel each way, `megablocks.ops.biased_activation`.

Megatron compiles both with torch.compile. Then autograd sums the gradient over the tokens for the bias, which is a pass
over memory of its own. `install` makes Megatron's MLP call `apply` instead, and changes no file.
"""

from __future__ import annotations

from typing import Any

from megatron.core.transformer import mlp
from torch import Tensor

from megablocks.megatron.wrap import wrap
from megablocks.ops.activation_table import Activation
from megablocks.ops.biased_activation import activate_biased
from megablocks.ops.library import runs_triton

_GELU = Activation("gelu", "tanh")


def install() -> None:
    """Let Megatron's MLP call `apply`, in every model of the process. It may be called again."""
    wrap(mlp, bias_gelu_impl=apply)


def apply(original: Any, x: Tensor, bias: Tensor) -> Tensor:
    """Wraps Megatron's `bias_gelu_impl`: x (S, B, I), bias (I,) → gelu(x + bias) (S, B, I), in the tanh form.

    The original computes where no kernel runs, and for a bias of another dtype: its result has the wider dtype.
    """
    if runs_triton(x) and x.dtype == bias.dtype:
        return activate_biased(x, bias, _GELU)
    return original(x, bias)
