"""Gated experts by the names of megablocks 0.10: (act(x·w1ᵀ) ⊙ (x·v1ᵀ))·w2; see mlp.py for shapes and calls.

Called as in 0.10 they compute as it does, to the bit where the products do: torch's activation, rounded before it is
multiplied by the gate. The layers, which give them a Dispatch, use ours, whose gelu keeps its digits in the negative
tail where torch's cancels, and round the product once; so do those whose saved activations are quantised, and
mlp_impl "fused", "scatter" and "reference", which 0.10 does not have.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megablocks.layers.arguments import GATED, activation_of
from megablocks.layers.expert_mlp import ExpertWeights
from megablocks.layers.mlp import SharedMLP, SparseMLP, _Grouped, offsets_of
from megablocks.ops.activation import activation_ref
from megablocks.ops.grouped.grouped_mm import grouped_mm
from megablocks.ops.quant.saved import OFF
from megablocks.ops.sparse.matrix import Matrix
from megablocks.ops.sparse.products import dsd, sdd


def _gate_and_project(
    pre: Tensor,
    gate: Tensor,
    w2: Tensor,
    product: Callable[[Tensor, Tensor], Tensor],
    activation: tuple[str, str],
    recompute: bool,
) -> Tensor:
    """product(act(pre) ⊙ gate, w2), with `recompute` keeping pre and gate only for backward."""

    def project(pre: Tensor, gate: Tensor, w2: Tensor) -> Tensor:
        return product(activation_ref(pre, None, *activation) * gate, w2)

    if not recompute:
        return project(pre, gate, w2)
    return checkpoint(project, pre, gate, w2, use_reentrant=False, preserve_rng_state=False)


class SparseGLU(SparseMLP):
    """Gated experts by block-sparse products; memory_optimized_mlp works too, which 0.10 refuses here."""

    _gated = True

    def _multiply_blocks(self, x: Tensor, weights: ExpertWeights, pattern: Matrix) -> Tensor:
        if self._quantised():
            return super()._multiply_blocks(x, weights, pattern)
        assert weights.v1 is not None
        pre, gate = (sdd(x, w.flatten(0, 1).t(), pattern).data for w in (weights.w1, weights.v1))
        assert pre is not None and gate is not None

        def product(values: Tensor, w2: Tensor) -> Tensor:
            return dsd(pattern.with_data(values), w2)

        recompute = self.config.recompute_activation
        return _gate_and_project(pre, gate, weights.w2.flatten(0, 1), product, self._activation(), recompute)

    def _activation(self) -> tuple[str, str]:
        return activation_of(self.args.activation_fn)

    def _quantised(self) -> bool:
        config = self.config
        return not config.quantize_inputs_num_bits == config.quantize_rematerialize_num_bits == OFF


class GroupedGLU(_Grouped, SparseGLU):
    """Gated experts by grouped GEMMs."""

    def _multiply_rows(self, x: Tensor, offsets: Tensor) -> Tensor:
        if self.config.mlp_impl not in ("auto", "grouped") or self._quantised():
            return self.forward_sorted(x, offsets)
        x = self._prepare(x)
        with torch.autocast(x.device.type, enabled=False):
            w = self._weights(x.dtype)
            assert w.v1 is not None
            return _grouped(x, w.w1, w.v1, w.w2, offsets, self._activation(), self.config.recompute_activation)


def _grouped(
    x: Tensor, w1: Tensor, v1: Tensor, w2: Tensor, offsets: Tensor, activation: tuple[str, str], recompute: bool
) -> Tensor:
    def product(values: Tensor, w2: Tensor) -> Tensor:
        return grouped_mm(values, w2, offsets)

    pre, gate = (grouped_mm(x, w.transpose(1, 2), offsets) for w in (w1, v1))
    return _gate_and_project(pre, gate, w2, product, activation, recompute)


def memory_optimized_grouped_glu(
    x: Tensor, w1: Tensor, v1: Tensor, w2: Tensor, batch_sizes: Tensor, activation_fn: Callable[..., Tensor] | str
) -> Tensor:
    """The GLU of rows sorted by expert, keeping the pre-activations only for backward.

    Args:
        x: (R, H). w1, v1, w2: (E, I, H). batch_sizes: (E,) integer on any device. activation_fn: gelu, silu or relu.

    Returns:
        (R, H).

    Raises:
        ValueError: another activation, or shapes or dtypes that do not fit.
    """
    activation = activation_of(activation_fn)
    if activation[0] not in GATED:
        raise ValueError(f"activation_fn={activation[0]!r}: must be one of {', '.join(GATED)} in a GLU")
    return _grouped(x, w1, v1, w2, offsets_of(batch_sizes, x.device), activation, True)


class MemoryOptimizedGroupedGLU:
    """0.10's autograd function, of which `apply` is called; see `memory_optimized_grouped_glu`."""

    apply = staticmethod(memory_optimized_grouped_glu)


class SharedGLU(SharedMLP):
    """The gated shared expert."""

    _gated = True
