"""Find the experts modules of a model that our kernels can compute, and switch them; `undo` switches them back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from megablocks.hf import NAME
from megablocks.hf.weights import check_weight


@dataclass
class Replaced:
    """What `replace_moe` did. Its repr prints it.

    names: the experts modules that our kernels compute now.
    left: experts that were not changed, and why.
    """

    names: list[str] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)
    _before: list[tuple[Any, Any]] = field(default_factory=list, repr=False)

    def undo(self) -> None:
        """Restore the previous implementation of the experts. A second call changes nothing.

        It does not change experts that an earlier call replaced. So several calls can be undone in any order.
        """
        for config, implementation in self._before:
            config._experts_implementation = implementation
        self._before.clear()


_SAYS = ("has_gate", "has_bias", "is_transposed", "is_concatenated", "config")
"""Attributes that the decorator of transformers sets on an experts module."""


def _is_decorated(module: nn.Module) -> bool:
    return all(hasattr(module, name) for name in _SAYS)


def _experts(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield every experts module of `model` with its name, but no module that only contains one, such as an adapter."""
    for name, module in model.named_modules():
        is_named_so = name.rpartition(".")[2] == "experts"
        if _is_decorated(module) or (is_named_so and not any(map(_is_decorated, module.modules()))):
            yield name, module


def _why_not(module: Any) -> str | None:
    """Return why our kernels cannot compute the experts of `module`; None if they can."""
    if not _is_decorated(module):
        return f"{type(module).__name__} is not decorated with transformers' use_experts_implementation"
    try:
        for name in ("gate_up_proj" if module.has_gate else "up_proj", "down_proj"):
            check_weight(module, name, getattr(module, name))
    except ValueError as error:
        return str(error)
    return None


def replace(model: nn.Module) -> Replaced:
    """Like `megablocks.hf.replace_moe`, after a call of `register`.

    Raises:
        ValueError: no experts of the model can be replaced, or it is not a module.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is a {type(model).__name__}: must be a torch.nn.Module, as from_pretrained returns")
    done, experts = Replaced(), dict[str, Any](_experts(model))
    done.left = {name: why for name, module in experts.items() if (why := _why_not(module)) is not None}
    refused = [(name, experts[name].config) for name in done.left if _is_decorated(experts[name])]
    done.names = [name for name in experts if name not in done.left]
    for name in list(done.names):
        config = experts[name].config
        other = next((other for other, shared in refused if shared is config), None)
        if other is not None:  # both share one setting
            done.names.remove(name)
            done.left[name] = f"its config is also that of {other}, which cannot be replaced"
        elif config._experts_implementation != NAME:
            done._before.append((config, config._experts_implementation))
            config._experts_implementation = NAME
    if not done.names:
        found = "; ".join(f"{name}: {why}" for name, why in done.left.items()) or "it holds no experts"
        raise ValueError(f"{type(model).__name__}: no experts can be replaced: {found}")
    return done
