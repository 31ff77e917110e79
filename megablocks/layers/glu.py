"""Gated experts under the names of megablocks 0.10: (act(x·w1ᵀ) ⊙ (x·v1ᵀ))·w2; see mlp.py for shapes and calls.

If they are called as in 0.10, they round like 0.10: torch's activation is rounded before it is multiplied by the gate.
So they are bitwise equal to 0.10 if the products are. If they are called with a Dispatch, as by the layers, they round
the product once, and gelu keeps its digits in the negative tail, where torch's gelu cancels. They also do so if saved
activations are quantized, and for mlp_impl "fused", "scatter" and "reference", which 0.10 does not have.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megablocks.layers.arguments import GATED, activation_of
from megablocks.layers.mlp import SharedMLP, SparseMLP, _Grouped, offsets_of
from megablocks.moe.experts import without_autocast
from megablocks.ops.activation import activation_ref
from megablocks.ops.activation_table import Activation
from megablocks.ops.fused.mlp import ExpertParameters
from megablocks.ops.grouped.grouped_mm import grouped_mm
from megablocks.ops.quant.quant import OFF
from megablocks.ops.sparse.matrix import Matrix
from megablocks.ops.sparse.products import dsd, sdd
from megablocks.ops.upstream import function_class


def _gate_and_project(
    pre: Tensor,
    gate: Tensor,
    w2: Tensor,
    product: Callable[[Tensor, Tensor], Tensor],
    activation: Activation,
    recompute: bool,
) -> Tensor:
    """product(act(pre) ⊙ gate, w2). With `recompute` only pre and gate are saved for backward."""

    def project(pre: Tensor, gate: Tensor, w2: Tensor) -> Tensor:
        return product(activation_ref(pre, None, activation) * gate, w2)

    if not recompute:
        return project(pre, gate, w2)
    return checkpoint(project, pre, gate, w2, use_reentrant=False, preserve_rng_state=False)


class SparseGLU(SparseMLP):
    """Gated experts by block-sparse products. memory_optimized_mlp works too; 0.10 refuses it here."""

    _gated = True

    def _multiply_blocks(self, x: Tensor, weights: ExpertParameters, pattern: Matrix) -> Tensor:
        if self._quantized():
            return super()._multiply_blocks(x, weights, pattern)
        assert weights.v1 is not None
        pre, gate = (sdd(x, w.flatten(0, 1).t(), pattern).data for w in (weights.w1, weights.v1))
        assert pre is not None and gate is not None

        options = self._activation(), self.config.recompute_activation
        w2 = weights.w2.flatten(0, 1)
        return _gate_and_project(pre, gate, w2, lambda values, w2: dsd(pattern.with_data(values), w2), *options)

    def _activation(self) -> Activation:
        return Activation(self.config.act.unary, self.config.act.approximate)

    def _quantized(self) -> bool:
        config = self.config
        return not config.quantize_inputs_num_bits == config.quantize_rematerialize_num_bits == OFF


class GroupedGLU(_Grouped, SparseGLU):
    """Gated experts by grouped GEMMs."""

    def _multiply_rows(self, x: Tensor, offsets: Tensor) -> Tensor:
        if self.config.mlp_impl not in ("auto", "grouped") or self._quantized():
            return self.forward_sorted(x, offsets)
        x = self._checked(x)
        with without_autocast(x):
            w = self._parameters_in(x.dtype)
            assert w.v1 is not None
            return _grouped(x, w.w1, w.v1, w.w2, offsets, self._activation(), self.config.recompute_activation)


def _grouped(
    x: Tensor, w1: Tensor, v1: Tensor, w2: Tensor, offsets: Tensor, activation: Activation, recompute: bool
) -> Tensor:
    """The gated MLP by grouped products: x (R, H), w1, v1, w2 (E, I, H), offsets (E+1,) → (R, H)."""
    pre, gate = (grouped_mm(x, w.transpose(1, 2), offsets) for w in (w1, v1))
    return _gate_and_project(pre, gate, w2, lambda act, w2: grouped_mm(act, w2, offsets), activation, recompute)


def memory_optimized_grouped_glu(
    x: Tensor, w1: Tensor, v1: Tensor, w2: Tensor, batch_sizes: Tensor, activation_fn: Callable[..., Tensor] | str
) -> Tensor:
    """Compute the GLU of rows sorted by expert. Only the pre-activations are saved for backward.

    Args:
        x: (R, H). w1, v1, w2: (E, I, H). batch_sizes: (E,) integer on any device. activation_fn: gelu, silu or relu.

    Returns:
        (R, H).

    Raises:
        ValueError: another activation, or shapes or dtypes that do not fit.
    """
    activation = activation_of(activation_fn)
    if activation.name not in GATED:
        raise ValueError(f"activation_fn={activation.name!r}: must be one of {', '.join(GATED)} in a GLU")
    return _grouped(x, w1, v1, w2, offsets_of(batch_sizes, x.device), activation, True)


MemoryOptimizedGroupedGLU = function_class("MemoryOptimizedGroupedGLU", memory_optimized_grouped_glu)


class SharedGLU(SharedMLP):
    """The gated shared expert."""

    _gated = True
