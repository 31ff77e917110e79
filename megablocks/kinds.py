"""Tables of the kinds that a config can name: ways to compute the experts (`IMPLS`), `ROUTERS` and `DISPATCHERS`.

Config, flags, help texts, errors, advice about memory, and tests read them. They do not import torch: an entry names
its function or class as "module:name", and `load` imports it. To add a kind, add an entry and the code that it names.
Activations are in another table, `megablocks.ops.activation_table`.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

QUANTIZED = ("quantize_inputs_num_bits", "quantize_rematerialize_num_bits", "quantize_scatter_num_bits")
"""The config's fields that save a tensor for backward in quantized form; -1 saves it unquantized."""


@functools.cache
def load(path: str) -> Any:
    """Import and return the object that "module:name" names."""
    module, name = path.split(":")
    return getattr(importlib.import_module(module), name)


def on_first_use(
    package: str, public: Mapping[str, str], submodules: Iterable[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` for a package that imports its names on first use.

    Args:
        public: maps each public name to the module that defines it.
        submodules: submodules that a user can reach as attributes without importing them.
    """

    def get(name: str) -> Any:
        if name in submodules:
            return importlib.import_module(f"{package}.{name}")
        if name not in public:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(public[name]), name)

    return get, lambda: sorted({*vars(sys.modules[package]), *public})


class Impl(NamedTuple):
    """A way to compute the experts.

    function: from a `megablocks.moe.impls.ExpertCall` to (T, H).
    summary: one clause for help texts.
    keeps: tensors that it saves for backward in addition to the weights, by their names in `megablocks.tool.memory`.
        With recompute_activation it does not save "activation".
    not_quantized: fields of `QUANTIZED` that it refuses, because it does not save the tensor or cannot quantize it.
    recomputes_pre: whether recompute_activation also drops the pre-activations, not only the activation.
    width_multiple: the expert width on a rank must be a multiple of this.
    pads: whether it computes rows of padding.
    batch_invariant: whether it can make a token's output independent of the other tokens, bit for bit.
    """

    function: str
    summary: str
    keeps: tuple[str, ...]
    not_quantized: tuple[str, ...] = ()
    recomputes_pre: bool = False
    width_multiple: int = 1
    pads: bool = False
    batch_invariant: bool = False


IMPLS = {
    "grouped": Impl(
        "megablocks.moe.impls:grouped",
        "grouped GEMMs that gather the tokens themselves; any width, no padding",
        keeps=("tokens", "pre", "activation", "output"),
        batch_invariant=True,
    ),
    "fused": Impl(
        "megablocks.moe.impls:fused",
        "the whole MLP in one op that saves the least (SonicMoE)",
        keeps=("tokens", "pre"),
        not_quantized=("quantize_scatter_num_bits",),
        recomputes_pre=True,
        batch_invariant=True,
    ),
    "sparse": Impl(
        "megablocks.moe.impls:sparse",
        "block-sparse products (MegaBlocks); each expert's rows are padded to whole blocks",
        keeps=("tokens", "rows", "pre", "activation", "output"),
        width_multiple=64,
        pads=True,
    ),
    "scatter": Impl(
        "megablocks.moe.impls:scatter",
        "products that gather, weight and scatter rows in their own loads and stores (ScatterMoE)",
        keeps=("tokens", "pre", "activation"),
        not_quantized=QUANTIZED,
        batch_invariant=True,
    ),
    "reference": Impl(
        "megablocks.moe.impls:reference",
        "a float32 loop over the experts, for comparison; it synchronizes with the host",
        keeps=("tokens", "rows", "pre", "activation", "output"),
        not_quantized=QUANTIZED[:2],
    ),
}
MLP_IMPLS = ("auto", *IMPLS)
"""Values of mlp_impl. "auto" is grouped or fused, by device and shape: `megablocks.moe.impls.choose_impl`. It is
scatter if batch_invariant allows no other."""


class RouterKind(NamedTuple):
    """A kind of router.

    module: the class, called as (config, *, loss_group, init_method, device, dtype).
    summary: one clause for help texts.
    needs: fields of the config, the values that they must have, and why.
    """

    module: str
    summary: str
    needs: tuple[tuple[str, object, str], ...] = ()


_PER_TOKEN = "each token chooses K experts only with router_type='topk'"
_BALANCED = "expert choice is balanced by construction"
ROUTERS = {
    "topk": RouterKind("megablocks.moe.router:TopKRouter", "each token chooses its K best experts"),
    "expert_choice": RouterKind(
        "megablocks.moe.router:ExpertChoiceRouter",
        "each expert chooses its T·K/E best tokens",
        needs=(
            ("token_rounding", None, _PER_TOKEN),
            ("num_groups", None, _PER_TOKEN),
            ("normalize_top_k", None, _PER_TOKEN),
            ("expert_score_bias", False, _BALANCED),
            ("uniform_assignment", False, _BALANCED),
            ("batch_invariant", False, "an expert compares all tokens"),
        ),
    ),
}

DISPATCHERS = {
    "local": "megablocks.moe.dispatchers:LocalDispatcher",
    "all_to_all": "megablocks.moe.dispatchers:AllToAllDispatcher",
    "symmetric": "megablocks.moe.symmetric:SymmetricDispatcher",
}
"""Every kind of dispatcher as "module:class". The class accepts the arguments of `AllToAllDispatcher` and its own."""
DISPATCHER_CHOICES = ("auto", *(name for name in DISPATCHERS if name != "local"))
"""Values of the field and flag `dispatcher`; on one rank each of them means "local"."""
