"""Fill the memory that torch.empty returns with NaN or huge integers, so that tests see elements nobody wrote.

Meanwhile kernels are not compiled ahead, because that does not write the kernels' outputs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from megablocks.ops import launch


def _poisoned(fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def allocate(*args: Any, **kwargs: Any) -> Tensor:
        tensor = fn(*args, **kwargs)
        if not (tensor.is_meta or isinstance(tensor, FakeTensor) or tensor.dtype == torch.bool):
            with torch.no_grad():
                tensor.fill_(float("nan") if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max)
        return tensor

    return allocate


@contextlib.contextmanager
def poisoned_empty() -> Iterator[None]:
    """Inside the context torch.empty, torch.empty_like and Tensor.new_empty return poisoned memory."""
    with (
        mock.patch.object(torch, "empty", _poisoned(torch.empty)),
        mock.patch.object(torch, "empty_like", _poisoned(torch.empty_like)),
        mock.patch.object(Tensor, "new_empty", _poisoned(Tensor.new_empty)),
        mock.patch.object(launch, "can_compile_ahead", lambda: False),
    ):
        yield
