"""Choose the class that computes a dropless layer's experts, with megablocks 0.10's function."""

from __future__ import annotations

from megablocks.layers.arguments import Arguments
from megablocks.layers.glu import GroupedGLU, SparseGLU
from megablocks.layers.mlp import GroupedMLP, SparseMLP

MlpType = SparseMLP | SparseGLU

# mlp_type → "sparse" or "grouped". The grouped class computes every other mlp_impl too.
_REGISTRY: dict[str, dict[str, type[SparseMLP]]] = {
    "mlp": {"grouped": GroupedMLP, "sparse": SparseMLP},
    "glu": {"grouped": GroupedGLU, "sparse": SparseGLU},
}


def get(args: Arguments) -> MlpType:
    """Create the experts of a dropless layer.

    Raises:
        ConfigError: an unknown mlp_type or mlp_impl.
    """
    args.validate()
    return _REGISTRY[args.mlp_type]["sparse" if args.mlp_impl == "sparse" else "grouped"](args)
