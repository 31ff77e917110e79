"""How an op is registered with torch: `torch.library.custom_op`, run on the device of its tensors.

Triton launches on the current device, whatever its arguments are; torch's own operators go where their tensors are.
With two GPUs in one process an op must do so too.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch._library.custom_ops import CustomOpDef


def _device_of(args: Iterable[Any]) -> contextlib.AbstractContextManager[Any]:
    tensor = next((a for a in args if isinstance(a, Tensor)), None)
    if tensor is None or not tensor.is_cuda or tensor.device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(tensor.device)


def custom_op(name: str, *, mutates_args: Iterable[str]) -> Callable[[Callable[..., Any]], CustomOpDef]:
    """`torch.library.custom_op` whose implementation runs with the device of its first tensor argument current."""

    def register(implementation: Callable[..., Any]) -> CustomOpDef:
        @functools.wraps(implementation)
        def on_its_device(*args: Any, **kwargs: Any) -> Any:
            with _device_of((*args, *kwargs.values())):
                return implementation(*args, **kwargs)

        schema = torch.library.infer_schema(implementation, mutates_args=tuple(mutates_args))
        return torch.library.custom_op(name, on_its_device, mutates_args=tuple(mutates_args), schema=schema)

    return register
