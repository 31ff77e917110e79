"""Routers: tokens to (token, expert, weight) pairs, with their auxiliary losses. Names are imported on first use."""

from __future__ import annotations

import importlib
from typing import Any

_PUBLIC = {
    "TopKRouter": "megablocks.routers.router",
    "ExpertChoiceRouter": "megablocks.routers.router",
    "make_router": "megablocks.routers.router",
    "route": "megablocks.routers.functional",
    "load_balancing_loss": "megablocks.routers.losses",
    "z_loss": "megablocks.routers.losses",
}

__all__ = [*_PUBLIC]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'megablocks.routers' has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)
