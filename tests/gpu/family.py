"""Shared parts of the kernel families: their registry, their inputs, and the kernels that a step launches.

A family is a function that takes a device, makes its inputs and returns a step. Each call of step() computes the same
list of tensors. A new kernel joins a family or gets a family of its own. test_families.py fails if a kernel has none.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

Step = Callable[[], list[Tensor]]
FAMILIES: dict[str, Callable[[torch.device], Step]] = {}
T, H, WIDTH, E, K = 201, 72, 136, 5, 2
"""Tokens, hidden, width, experts, top-k. Rows have multiples of 8 values, as TMA requires. No size fills a tile."""


def family(make: Callable[[torch.device], Step]) -> Callable[[torch.device], Step]:
    FAMILIES[make.__name__] = make
    return make


def draws(device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Callable[..., Tensor]:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).div_(shape[-1] ** 0.25).to(device, dtype).requires_grad_()

    return draw


def chosen(device: torch.device, k: int = K) -> Tensor:
    """(T, k) ids with a long tail of loads, an expert without tokens, and pairs without an expert."""
    odds = torch.tensor([8.0, 0.0, 2.0, 1.0, 1.0])
    ids = torch.multinomial(odds.expand(T, E), k, generator=torch.Generator().manual_seed(0))
    ids[::7, 1] = -1
    return ids.to(device)


def offsets_of(counts: list[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *counts], device=device).cumsum(0).int()


def with_gradients(outputs: Tensor | list[Tensor], inputs: list[Tensor]) -> list[Tensor]:
    outputs = [outputs] if isinstance(outputs, Tensor) else outputs
    loss = sum(out.float().square().sum() for out in outputs)
    return [out.detach() for out in outputs] + list(torch.autograd.grad(loss, inputs))


def launching_on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """For steps that call launchers directly. Only the ops select the device of their tensors themselves."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


@contextlib.contextmanager
def without_hopper() -> Iterator[None]:
    before = os.environ.get("MEGABLOCKS_HOPPER")
    os.environ["MEGABLOCKS_HOPPER"] = "0"
    try:
        yield
    finally:
        os.environ.pop("MEGABLOCKS_HOPPER")
        if before is not None:
            os.environ["MEGABLOCKS_HOPPER"] = before


@contextlib.contextmanager
def launches() -> Iterator[set[str]]:
    """Yields a set of module and name of every Triton kernel that is launched inside the context."""
    from triton.runtime.jit import JITFunction

    from megablocks.ops.launch import QuickLaunch, is_compiling_ahead

    launched: set[str] = set()

    def noting(launch: Callable[..., object]) -> Callable[..., object]:
        def noted(self: Any, *args: object, **options: object) -> object:
            if not is_compiling_ahead():
                launched.add(f"{self.fn.__module__}.{self.fn.__name__}")
            return launch(self, *args, **options)

        return noted

    with (
        mock.patch.object(JITFunction, "run", noting(JITFunction.run)),
        mock.patch.object(QuickLaunch, "_launch", noting(QuickLaunch._launch)),
    ):
        yield launched
