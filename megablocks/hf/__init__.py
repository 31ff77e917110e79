"""Hugging Face transformers: our kernels compute the experts of its models. Only this folder imports transformers.

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
"""What `experts_implementation` must be."""
OLDEST = "5.17"
"""The first release of transformers with whose experts these functions were tested."""

__all__ = ["NAME", "OLDEST", "check_transformers", "register", "replace_moe"]


def check_transformers() -> None:
    """Refuse an environment whose transformers has no seam for the experts.

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
    """Let models of transformers name `experts_implementation="megablocks"`. A second call changes nothing.

    It covers every class that transformers decorates with `use_experts_implementation`. Other implementations stay as
    they are, and a model uses ours only where it is named: in `from_pretrained`, `from_config` or
    `model.set_experts_implementation("megablocks")`. Where transformers has a seam for expert parallelism (5.23),
    `DistributedConfig(ep_implementation="megablocks")` takes our exchange of tokens.

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
    """Let our products compute every experts module of `model` that transformers decorates, and say which those are.

    `model.set_experts_implementation` does the same for a model of transformers. This also takes any other
    `torch.nn.Module` that holds such experts: remote code, wrappers, a part of a model. transformers keeps the choice
    in the config of the experts, so modules with the same config object change together, as all layers of a model.

    Args:
        model: any `torch.nn.Module`.

    Returns:
        What was replaced and what was left alone, with the reasons; its `undo()` restores the model.

    Raises:
        ImportError: transformers is missing or too old.
        ValueError: the model holds no experts that can be replaced, or is no module.
    """
    register()
    from megablocks.hf.replace import replace

    return replace(model)
