"""Choose the class that computes the shared expert, with megablocks 0.10's function."""

from __future__ import annotations

from megablocks.layers.arguments import Arguments
from megablocks.layers.glu import SharedGLU
from megablocks.layers.mlp import SharedMLP

_REGISTRY: dict[str, type[SharedMLP]] = {"mlp": SharedMLP, "glu": SharedGLU}


def get(args: Arguments) -> SharedMLP | SharedGLU:
    """Create the shared expert.

    Raises:
        ConfigError: an unknown mlp_type.
    """
    args.validate()
    return _REGISTRY[args.mlp_type](args)
