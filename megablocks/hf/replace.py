"""Which experts modules of a model can be ours, and the change over that can be undone."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn

from megablocks.hf import NAME
from megablocks.hf.weights import check_weight


@dataclass
class Replaced:
    """What `replace_moe` did. Its repr prints it.

    names: the experts modules that are ours now.
    left: experts that were left alone, and why.
    """

    names: list[str] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)
    _before: list[tuple[Any, Any]] = field(default_factory=list, repr=False)

    def undo(self) -> None:
        """Restore what computed the experts before. A second call changes nothing."""
        for config, implementation in self._before:
            config._experts_implementation = implementation
        self._before.clear()


def _why_not(module: nn.Module) -> str | None:
    """Why the experts of `module` cannot be ours, None if they can."""
    if not all(
        hasattr(module, name) for name in ("has_gate", "has_bias", "is_transposed", "is_concatenated", "config")
    ):
        return f"{type(module).__name__} is not decorated with transformers' use_experts_implementation"
    try:
        for name in ("gate_up_proj" if module.has_gate else "up_proj", "down_proj"):
            check_weight(module, name, getattr(module, name))
    except ValueError as error:
        return str(error)
    return None


def replace(model: nn.Module) -> Replaced:
    """Like `megablocks.hf.replace_moe`, once `register` was called."""
    done = Replaced()
    for name, module in model.named_modules():
        if name.rpartition(".")[2] != "experts" and not hasattr(module, "is_transposed"):
            continue
        why = _why_not(module)
        if why is not None:
            done.left[name] = why
            continue
        done.names.append(name)
        config: Any = module.config
        if all(config is not known for known, _ in done._before):  # the modules of a model share one
            done._before.append((config, config._experts_implementation))
            config._experts_implementation = NAME
    if not done.names:
        found = "; ".join(f"{name}: {why}" for name, why in done.left.items()) or "it holds no experts"
        raise ValueError(f"{type(model).__name__}: no experts can be replaced: {found}")
    return done
