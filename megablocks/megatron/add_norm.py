"""Bias, dropout and residual of Megatron's layers, computed together with the norm that follows.

Megatron's layer adds a part's output to the residual (`bias_dropout_add`), and then calls the norm of the next part.
`AddNorm` replaces the addition: it calls this norm with the terms. The norm computes their sum and the sum's norm by
one op, and returns the sum. When Megatron then calls it with this sum, it returns the norm that it has. Where no norm
of the same pipeline stage follows, and where `_fits` or the norm's `takes` says no, Megatron's own function adds.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
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
        terms = Terms(*x_with_bias, residual, prob if training else 0.0)
        if self.norm is None or not self.norm.takes(terms):
            return plain(x_with_bias, residual, prob)
        return self.norm(terms)


def install() -> None:
    """Let each TransformerBlock that is built from now on tell its additions which norm follows."""
    wrap(TransformerBlock, _build_layers=_build_layers)


def _fits(config: TransformerConfig) -> bool:
    """Whether norms are used as they are computed with a sum, and sums stay in memory for backward.

    Recomputed norms, and layers that Megatron's overlapped schedule separates, would compute them again.
    """
    again = config.recompute_granularity == "full" or "layernorm" in (config.recompute_modules or ())
    moved = config.fine_grained_activation_offloading or config.cpu_offloading
    return not (again or moved or config.overlap_moe_expert_parallel_comm)


def _build_layers(original: Callable[..., None], block: TransformerBlock) -> None:
    """Wraps `TransformerBlock._build_layers`."""
    original(block)
    layers: list[Any] = list(block.layers)
    if not _fits(block.config) or not all(isinstance(layer, TransformerLayer) for layer in layers):
        return
    norms = [*(layer.input_layernorm for layer in layers), block.final_layernorm]
    for layer, next_norm in zip(layers, norms[1:], strict=True):  # a pipeline stage may have no layer
        for addition, norm in ((layer.self_attn_bda, layer.pre_mlp_layernorm), (layer.mlp_bda, next_norm)):
            if isinstance(addition, AddNorm) and isinstance(norm, Norm):
                addition.norm = norm
                # Megatron adds under torch.enable_grad, which makes a graph in evaluation and fails in inference mode.
                layer.bias_dropout_add_exec_handler = contextlib.nullcontext
