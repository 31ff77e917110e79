"""The mixture-of-experts layer and its parts. Names are imported on first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megablocks.moe.experts import Experts as Experts
    from megablocks.moe.layer import AuxOutput as AuxOutput
    from megablocks.moe.layer import MoE as MoE
    from megablocks.moe.layer import MoELayer as MoELayer
    from megablocks.moe.layer import dMoE as dMoE
    from megablocks.moe.mixture_of_attention import MixtureOfAttention as MixtureOfAttention
    from megablocks.moe.router import ExpertChoiceRouter as ExpertChoiceRouter
    from megablocks.moe.router import TopKRouter as TopKRouter
    from megablocks.moe.router import make_router as make_router
    from megablocks.moe.shared_expert import SharedExpert as SharedExpert

_PUBLIC = {
    "AuxOutput": "layer",
    "ExpertChoiceRouter": "router",
    "Experts": "experts",
    "MixtureOfAttention": "mixture_of_attention",
    "MoE": "layer",
    "MoELayer": "layer",
    "SharedExpert": "shared_expert",
    "TopKRouter": "router",
    "dMoE": "layer",
    "make_router": "router",
}

__all__ = [*_PUBLIC]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'megablocks.moe' has no attribute {name!r}")
    return getattr(importlib.import_module(f"megablocks.moe.{_PUBLIC[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
