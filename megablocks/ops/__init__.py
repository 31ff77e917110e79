"""Functional ops of a mixture-of-experts layer. They import torch, triton and this folder only.

Legend: T tokens, H hidden, I expert width, E experts, K top-k, R pairs or rows, V <= R valid ones.

Each op has a plain torch reference `<op>_ref` (the CPU path and the oracle) behind a `torch.library` custom op, so a
faster kernel can replace it without a change for its callers. A public function refuses shapes, dtypes and names that
do not fit with a ValueError that names the argument, its value and what is allowed. Each public name is imported on
first use. The names of megablocks 0.10 are its functions; `permute` has ours with the same names, over a Dispatch.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

# module → its public names
_NAMES = {
    "routing.dispatch": ("Routing", "Dispatch", "build_dispatch", "make_routing", "check_routing", "pad_dispatch"),
    "routing.topk": ("route_topk",),
    "routing.values": ("RouterOptions",),
    "routing.rounding": ("route_rounded",),
    "routing.capacity": ("apply_capacity", "capacity_of"),
    "activation_table": ("Activation",),
    "activation": ("activate",),
    "clamp": ("Clamp", "clamped_gate"),
    "loss": ("linear_cross_entropy",),
    "permute.rows": ("combine",),
    "grouped.grouped_mm": ("grouped_mm",),
    "grouped.gathered_mm": ("gathered_mm", "gathered_mm_gated"),
    "grouped.bias": ("add_expert_bias",),
    "fused.mlp": ("ExpertParameters", "MainGrads", "fused_mlp"),
    "fused.down": ("activate_and_project",),
    "scattered.parallel_linear": ("flatten_sort_count", "parallel_linear"),
    "scattered.dispatched": ("gathered_linear", "linear_combine"),
    "quant.quant": ("quantize", "dequantize"),
    # the functions of megablocks 0.10
    "upstream.movement": (
        "gather", "scatter", "padded_gather", "padded_scatter", "binned_gather", "binned_scatter",
    ),
    "upstream.bookkeeping": (
        "sort", "histogram", "exclusive_cumsum", "inclusive_cumsum", "round_up", "repeat", "sum", "replicate",
        "topology",
    ),
}  # fmt: skip
_PUBLIC = {name: f"megablocks.ops.{module}" for module, names in _NAMES.items() for name in names}

# 0.10 has a module of its own for each of its functions, but one for both cumulative sums.
_OF_0_10: dict[str, tuple[str, ...]] = {
    name: (name,) for name in (*_NAMES["upstream.movement"], *_NAMES["upstream.bookkeeping"])
}
_OF_0_10["cumsum"] = _OF_0_10.pop("exclusive_cumsum") + _OF_0_10.pop("inclusive_cumsum")

__all__ = [*_PUBLIC]


class _ModuleOf010(ModuleType):
    """`megablocks.ops.<module>` for imports from it; a file of that name would hide the function of that name here."""

    def __getattr__(self, name: str) -> Any:
        for function in _OF_0_10[self.__name__.rpartition(".")[2]]:
            if name == function:
                return __getattr__(name)
            if name == f"{function.title().replace('_', '')}Op":  # the autograd function: `GatherOp` of `gather`
                function_class = importlib.import_module("megablocks.ops.upstream").function_class
                setattr(self, name, function_class(name, __getattr__(function)))
                return getattr(self, name)
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")


for _name in _OF_0_10:
    sys.modules[f"{__name__}.{_name}"] = _ModuleOf010(f"{__name__}.{_name}")
cumsum = sys.modules[f"{__name__}.cumsum"]  # the only one that has no function of its name


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'megablocks.ops' has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
