"""Bias, dropout and residual of Megatron's layers, computed together with the norm that follows.

Megatron's layer adds a part's output to the residual (`bias_dropout_add`), and then calls the norm of the next part.
`AddNorm` replaces the addition: it calls this norm with the terms. The norm computes their sum and the sum's norm by
one op, and returns the sum. When Megatron then calls it with this sum, it returns the norm that it has. Megatron's own
function adds what no norm of the same pipeline stage follows, and in layers that backward computes again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.transformer.transformer_block import TransformerBlock
from torch import Tensor

from megablocks.megatron.norm import Norm, Terms
from megablocks.megatron.wrap import wrap


class AddNorm:
    """Takes the place of `get_bias_dropout_add` in a layer's spec. norm: what Megatron calls with the sum, or None."""

    norm: Norm | None = None

    def __call__(self, training: bool, fused: bool) -> Callable[..., Tensor]:
        """A function of (x, bias), residual and the probability of dropout, as Megatron's layer calls it."""
        plain = get_bias_dropout_add(training, fused)
        return plain if self.norm is None or not fused else functools.partial(self._add, plain, training)

    def _add(
        self, plain: Callable[..., Tensor], training: bool, x_with_bias: tuple[Tensor, Tensor | None],
        residual: Tensor, prob: float,
    ) -> Tensor:  # fmt: skip
        x, bias = x_with_bias
        if self.norm is None or not self.norm.is_fused(x) or x.dtype != residual.dtype or not prob < 1:
            return plain(x_with_bias, residual, prob)
        return self.norm(Terms(x, bias, residual, prob if training else 0.0))


def install() -> None:
    """Let each TransformerBlock that is built from now on tell its additions which norm follows."""
    wrap(TransformerBlock, _build_layers=_build_layers)


def _build_layers(original: Callable[..., None], block: TransformerBlock) -> None:
    """Wraps `TransformerBlock._build_layers`."""
    original(block)
    if block.config.recompute_granularity == "full":  # the norms would be computed in vain
        return
    following: list[Any] = [layer.input_layernorm for layer in block.layers[1:]]
    for layer, norm in zip(block.layers, [*following, block.final_layernorm], strict=True):
        for addition, then in ((layer.self_attn_bda, layer.pre_mlp_layernorm), (layer.mlp_bda, norm)):
            if isinstance(addition, AddNorm) and isinstance(then, Norm):
                addition.norm = then
