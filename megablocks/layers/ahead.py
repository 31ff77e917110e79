"""Compile the kernels of a module's first step before it, beside each other, by a step that launches nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor, nn

from megablocks.ops import launch

logger = logging.getLogger(__name__)
_done: set[Hashable] = set()


class Ahead:
    """Compiles ahead of a module's first calls.

    Args:
        identity: what the module's kernels hang on; modules alike in it share what was compiled.
    """

    def __init__(self, *identity: Hashable) -> None:
        self._identity = identity
        self._seen: set[Hashable] = set()

    def __call__(self, call: Hashable, x: Tensor, parameter: Tensor, step: Callable[[], list[Tensor]]) -> None:
        """Before the first such call: `step` and its backward, in which launches compile and do not run.

        Args:
            call: what tells kinds of calls apart, but for what x is and whether gradients are on.
            x: on a GPU.
            parameter: one of the module's; nothing is done where it is sharded (a DTensor).
            step: computes with leaves of its own (`leaf`); what it returns gets zeros as gradients.

        Nothing is raised: what fails here fails in the call too, where it is handled.
        """
        key = (call, x.dtype, x.device, x.requires_grad, torch.is_grad_enabled())
        if key in self._seen:
            return
        if launch.is_compiling_ahead():  # by the module around this one
            self._seen.add(key)
            return
        if type(x) is not Tensor or type(parameter) is not nn.Parameter or not launch.can_compile_ahead():
            return
        self._seen.add(key)
        try:
            shared = (*self._identity, key, parameter.dtype, parameter.requires_grad)
            if shared not in _done:
                _done.add(shared)
                _compile(x.device, step)
        except Exception as error:
            logger.debug("compiling ahead ended early: %s", error)

    def __reduce__(self) -> tuple[Any, ...]:
        return Ahead, self._identity  # a copy may be called in another process, where nothing is compiled


def _compile(device: torch.device, step: Callable[[], list[Tensor]]) -> None:
    with (
        torch.random.fork_rng(devices=[device]),
        torch.autograd.set_multithreading_enabled(False),
        torch.autograd.graph.saved_tensors_hooks(_same, _same),  # a checkpoint around the call counts what it saves
        torch.cuda.device(device),
    ):
        launch.compile_ahead(lambda: launch.backward_ahead(step()))


def _same(t: Tensor) -> Tensor:
    return t


def leaf(t: Any) -> Any:
    """A tensor without its history, wanting a gradient if it did."""
    return t.detach().requires_grad_(t.requires_grad) if isinstance(t, Tensor) else t
