"""The mixture-of-experts layer and its parts. Names are imported on first use."""

from __future__ import annotations

from megablocks.kinds import on_first_use

_NAMES = {
    "experts": ("Experts",),
    "layer": ("AuxOutput", "MoE", "MoELayer", "dMoE"),
    "mixture_of_attention": ("MixtureOfAttention",),
    "router": ("ExpertChoiceRouter", "TopKRouter", "make_router"),
    "shared_expert": ("SharedExpert",),
}
_PUBLIC = {name: f"megablocks.moe.{module}" for module, names in _NAMES.items() for name in names}

__all__ = [*_PUBLIC]
__getattr__, __dir__ = on_first_use("megablocks.moe", _PUBLIC)
