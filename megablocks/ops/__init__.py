"""Functional ops of a mixture-of-experts layer: torch and triton only, nothing of the package but this folder.

Legend: T tokens, H hidden, I expert width, E experts, K top-k, R pairs or rows, V <= R valid ones.

Each op has a plain torch reference `<op>_ref` (the CPU path and the oracle) behind a `torch.library` custom op, so a
faster kernel takes its place without a change for its callers. A public function refuses shapes, dtypes and names that
do not fit with a ValueError that names the argument, its value and what is allowed. Each public name is imported on
first use. The names of megablocks 0.10 are its functions; ours of the same name, over a Dispatch, are in `permute`.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

_PUBLIC = {
    "Routing": "megablocks.ops.routing.dispatch",
    "Dispatch": "megablocks.ops.routing.dispatch",
    "build_dispatch": "megablocks.ops.routing.dispatch",
    "make_routing": "megablocks.ops.routing.dispatch",
    "check_routing": "megablocks.ops.routing.dispatch",
    "route_topk": "megablocks.ops.routing.topk",
    "route_rounded": "megablocks.ops.routing.rounding",
    "RouterOptions": "megablocks.ops.routing.topk",
    "apply_capacity": "megablocks.ops.routing.capacity",
    "capacity_of": "megablocks.ops.routing.capacity",
    "Activation": "megablocks.ops.activation_table",
    "activate": "megablocks.ops.activation",
    "linear_cross_entropy": "megablocks.ops.linear_cross_entropy",
    "combine": "megablocks.ops.permute.rows",
    "pad_dispatch": "megablocks.ops.routing.dispatch",
    "grouped_mm": "megablocks.ops.grouped.grouped_mm",
    "gathered_mm": "megablocks.ops.grouped.gathered_mm",
    "gathered_mm_gated": "megablocks.ops.grouped.gathered_mm",
    "add_expert_bias": "megablocks.ops.grouped.bias",
    "ExpertParameters": "megablocks.ops.fused.mlp",
    "MainGrads": "megablocks.ops.fused.mlp",
    "fused_mlp": "megablocks.ops.fused.mlp",
    "activate_and_project": "megablocks.ops.fused.down",
    "flatten_sort_count": "megablocks.ops.scattered.parallel_linear",
    "parallel_linear": "megablocks.ops.scattered.parallel_linear",
    "gathered_linear": "megablocks.ops.scattered.dispatched",
    "linear_combine": "megablocks.ops.scattered.dispatched",
    "quantize": "megablocks.ops.quant.quant",
    "dequantize": "megablocks.ops.quant.quant",
}

# The functions of megablocks 0.10, by the module that held them there.
_OF_0_10 = {
    "binned_gather": ("binned_gather",),
    "binned_scatter": ("binned_scatter",),
    "cumsum": ("exclusive_cumsum", "inclusive_cumsum"),
    "gather": ("gather",),
    "histogram": ("histogram",),
    "padded_gather": ("padded_gather",),
    "padded_scatter": ("padded_scatter",),
    "repeat": ("repeat",),
    "replicate": ("replicate",),
    "round_up": ("round_up",),
    "scatter": ("scatter",),
    "sort": ("sort",),
    "sum": ("sum",),
    "topology": ("topology",),
}
for _functions in _OF_0_10.values():
    for _name in _functions:
        _moves = _name.endswith(("gather", "scatter"))
        _PUBLIC[_name] = f"megablocks.ops.upstream.{'movement' if _moves else 'bookkeeping'}"

__all__ = [*_PUBLIC]


class _ModuleOf010(ModuleType):
    """`megablocks.ops.<module>` for imports from it; a file of that name would take the function's place here."""

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


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'megablocks.ops' has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
