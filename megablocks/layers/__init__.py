"""The layers of megablocks 0.10 by its names, imported on first use; `megablocks.moe` computes them."""

from __future__ import annotations

import importlib
from typing import Any

_PUBLIC = {
    "Arguments": "megablocks.layers.arguments",
    "MoE": "megablocks.layers.moe",
    "dMoE": "megablocks.layers.dmoe",
}

# megablocks 0.10 imports these modules with the package, so programs reach them as attributes.
_SUBMODULES = (
    "activation_fn", "all_to_all", "arguments", "common", "dmlp_registry", "dmoe", "gelu", "glu", "mlp", "moe", "mpu",
    "router", "sharedexpert_registry",
)  # fmt: skip

__all__ = list(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"megablocks.layers.{name}")
    if name not in _PUBLIC:
        raise AttributeError(f"module 'megablocks.layers' has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
