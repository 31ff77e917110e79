"""Hugging Face transformers: our kernels compute the experts of its models. No other folder imports transformers.

import megablocks.hf
megablocks.hf.register()
model = AutoModelForCausalLM.from_pretrained(name, experts_implementation="megablocks")
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from packaging.version import Version

if TYPE_CHECKING:
    from megablocks.hf.replace import Replaced

NAME = "megablocks"
"""The value of `experts_implementation` that selects our kernels."""
OLDEST = "5.17"
"""The oldest release of transformers that these functions were tested with."""

__all__ = ["NAME", "OLDEST", "check_transformers", "register", "replace_moe"]


def check_transformers() -> None:
    """Raise an error if the installed transformers has no interface for experts.

    Raises:
        ImportError: transformers is missing, or older than `OLDEST`.
    """
    fix = f"pip install --upgrade 'transformers>={OLDEST}'"
    try:
        found = version("transformers")
    except PackageNotFoundError:
        raise ImportError(f"transformers is not installed, and megablocks.hf needs it: {fix}") from None
    if Version(found) < Version(OLDEST):
        raise ImportError(f"transformers {found} is installed, and megablocks.hf needs {OLDEST} or newer: {fix}")


def register() -> None:
    """Register `experts_implementation="megablocks"` with transformers. A second call changes nothing.

    It covers every class that transformers decorates with `use_experts_implementation`. Other implementations do not
    change. A model uses ours only if you name it: in `from_pretrained`, `from_config` or
    `model.set_experts_implementation("megablocks")`. If transformers has an interface for expert parallelism (5.23),
    `DistributedConfig(ep_implementation="megablocks")` selects our exchange of tokens.

    Raises:
        ImportError: transformers is missing or too old.
    """
    check_transformers()
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    from megablocks.hf.experts import experts_forward

    ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
    if find_spec("transformers.distributed.expert_parallel") is not None:  # from 5.23 on
        from transformers.distributed.expert_parallel import EPImplementationInterface

        from megablocks.hf.expert_parallel import ExpertParallel

        EPImplementationInterface.register(NAME, ExpertParallel)


def replace_moe(model: Any) -> Replaced:
    """Let our kernels compute every experts module of `model` that transformers decorates, and return which they are.

    `model.set_experts_implementation` does the same for a model of transformers. This function also accepts any other
    `torch.nn.Module` that contains such experts: remote code, wrappers, a part of a model. transformers stores the
    choice in the experts' config. So modules that share a config object change together, like all layers of a model.

    Args:
        model: any `torch.nn.Module`.

    Returns:
        What was replaced and what was not, with the reasons; its `undo()` restores the model.

    Raises:
        ImportError: transformers is missing or too old.
        ValueError: the model contains no experts that can be replaced, or it is not a module.
    """
    register()
    from megablocks.hf.replace import replace

    return replace(model)
