"""Functional ops of a mixture-of-experts layer: torch and triton only, nothing of the package but this folder.

Legend: T tokens, H hidden, I expert width, E experts, K top-k, R pairs or rows, V <= R valid ones.

Each op has a plain torch reference `<op>_ref` (the CPU path and the oracle) behind a `torch.library` custom op, so a
faster kernel takes its place without a change for its callers. Each public name is imported on first use.
"""

from __future__ import annotations

import importlib
from typing import Any

_PUBLIC = {
    "Routing": "megablocks.ops.routing.dispatch",
    "Dispatch": "megablocks.ops.routing.dispatch",
    "build_dispatch": "megablocks.ops.routing.dispatch",
    "make_routing": "megablocks.ops.routing.dispatch",
    "check_routing": "megablocks.ops.routing.dispatch",
    "apply_capacity": "megablocks.ops.routing.capacity",
    "capacity_of": "megablocks.ops.routing.capacity",
    "activate": "megablocks.ops.activation",
    "gather": "megablocks.ops.permute.gather",
    "combine": "megablocks.ops.permute.combine",
    "binned_gather": "megablocks.ops.permute.binned",
    "binned_scatter": "megablocks.ops.permute.binned",
    "pad_dispatch": "megablocks.ops.permute.padded",
    "padded_gather": "megablocks.ops.permute.padded",
    "padded_scatter": "megablocks.ops.permute.padded",
    "grouped_mm": "megablocks.ops.grouped.grouped_mm",
    "add_expert_bias": "megablocks.ops.grouped.bias",
    "activate_and_project": "megablocks.ops.fused.down",
}

__all__ = [*_PUBLIC]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'megablocks.ops' has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)
