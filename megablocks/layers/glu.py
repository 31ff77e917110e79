"""Gated experts by the names of megablocks 0.10: (act(x·w1ᵀ) ⊙ (x·v1ᵀ))·w2; see mlp.py for shapes and calls."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from megablocks.layers.mlp import SharedMLP, SparseMLP, _Grouped, grouped_recomputing


class SparseGLU(SparseMLP):
    """Gated experts by block-sparse products; memory_optimized_mlp works too, which 0.10 refuses here."""

    _gated = True


class GroupedGLU(_Grouped, SparseGLU):
    """Gated experts by grouped GEMMs."""


def memory_optimized_grouped_glu(
    x: Tensor, w1: Tensor, v1: Tensor, w2: Tensor, batch_sizes: Tensor, activation_fn: Callable[..., Tensor] | str
) -> Tensor:
    """The GLU of rows sorted by expert, keeping the pre-activations only for backward.

    Args:
        x: (R, H). w1, v1, w2: (E, I, H). batch_sizes: (E,) integer on any device. activation_fn: gelu, silu or relu.

    Returns:
        (R, H).
    """
    return grouped_recomputing(x, w1, v1, w2, batch_sizes, activation_fn)


class MemoryOptimizedGroupedGLU:
    """0.10's autograd function, of which `apply` is called; see `memory_optimized_grouped_glu`."""

    apply = staticmethod(memory_optimized_grouped_glu)


class SharedGLU(SharedMLP):
    """The gated shared expert."""

    _gated = True
