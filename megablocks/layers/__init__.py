"""The layers of megablocks 0.10 by its names, imported on first use; `megablocks.moe` computes them."""

from __future__ import annotations

from megablocks.kinds import on_first_use

_PUBLIC = {
    "Arguments": "megablocks.layers.arguments",
    "MoE": "megablocks.layers.moe",
    "dMoE": "megablocks.layers.dmoe",
}

# megablocks 0.10 imports these modules with the package, so programs use them as attributes.
_SUBMODULES = (
    "activation_fn", "all_to_all", "arguments", "common", "dmlp_registry", "dmoe", "gelu", "glu", "mlp", "moe", "mpu",
    "router", "sharedexpert_registry",
)  # fmt: skip

__all__ = [*_PUBLIC]
__getattr__, __dir__ = on_first_use("megablocks.layers", _PUBLIC, _SUBMODULES)
