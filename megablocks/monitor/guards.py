"""Guards of a training step: a loss window that spots spikes, and sentinels that say in which layer a NaN was born.

Sentinels cost one reduction over each layer's output and over its gradient, and no synchronisation: they raise flags on
the device. Only when a step has gone wrong are the flags read.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor


class NonFiniteError(RuntimeError):
    """A NaN or Inf in loss or gradients. The message is one line: step, rank, layer."""


class LossWindow:
    """The median of the last finite losses, against which a spike is measured.

    A spike enters the window too, so a loss that stays high is accepted once it is the median, and an update is never
    skipped for ever. A NaN or Inf never enters. Nothing is a spike before `minimum` losses are known.
    """

    def __init__(self, size: int, factor: float) -> None:
        self.factor = factor
        self.minimum = max(4, size // 4)
        self._losses: deque[float] = deque(maxlen=size)

    def is_spike(self, loss: float) -> bool:
        """Whether `loss` exceeds factor × median of the past; then it is remembered. factor 0: never."""
        median = self.median()
        if math.isfinite(loss):
            self._losses.append(loss)
        return self.factor > 0 and median is not None and loss > self.factor * median

    def median(self) -> float | None:
        """Median of the window, None while it holds fewer than `minimum` losses."""
        return statistics.median(self._losses) if len(self._losses) >= self.minimum else None

    def state_dict(self) -> dict[str, Any]:
        """JSON-serialisable; `load_state_dict` reads it back, into a window of any size."""
        return {"losses": list(self._losses)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._losses.clear()
        self._losses.extend(float(loss) for loss in state["losses"] if math.isfinite(loss))


def is_bad(tensor: Tensor) -> Tensor:
    """() bool on the tensor's device: whether any element is NaN or Inf. No copy of the tensor, no synchronisation."""
    if tensor.numel() == 0:
        return torch.zeros((), dtype=torch.bool, device=tensor.device)
    return ~torch.isfinite(torch.linalg.vector_norm(tensor.detach(), ord=math.inf))


class LayerSentinels:
    """One flag a layer for its output and one for the gradient of its output, raised at the first NaN or Inf.

    Args:
        layers: modules in the order of computation; an output may be a tensor or a tuple that starts with one.
        names: what to call them.
    """

    def __init__(self, layers: Iterable[torch.nn.Module], names: Sequence[str], device: torch.device | str) -> None:
        self.names = list(names)
        self._forward = torch.zeros(len(self.names), dtype=torch.bool, device=device)
        self._backward = torch.zeros_like(self._forward)
        for index, layer in enumerate(layers):
            layer.register_forward_hook(self._hook(index))

    def _hook(self, index: int) -> Any:
        def watch(module: torch.nn.Module, args: Any, output: Any) -> None:
            out = output[0] if isinstance(output, tuple) else output
            if not module.training or not isinstance(out, Tensor):
                return
            self._forward[index].logical_or_(is_bad(out))
            if out.requires_grad:
                out.register_hook(watch_gradient)

        def watch_gradient(grad: Tensor) -> None:
            self._backward[index].logical_or_(is_bad(grad))

        return watch

    def reset(self) -> None:
        """Lower all flags; once a step."""
        self._forward.zero_()
        self._backward.zero_()

    def first_bad(self) -> tuple[str, str] | tuple[None, None]:
        """("forward" or "backward", where) of the step's first NaN or Inf, (None, None) if no flag is up. Synchronises.

        Forward: the first layer whose output is bad. Backward only: the gradient of a layer's output is the work of
        the layers after it, so the last layer with a bad one lies just before the culprit.
        """
        forward, backward = self._forward.tolist(), self._backward.tolist()
        if any(forward):
            return "forward", f"the output of {self.names[forward.index(True)]}"
        if any(backward):
            last = len(backward) - 1 - backward[::-1].index(True)
            after = self.names[last + 1] if last + 1 < len(self.names) else "the output layer"
            return "backward", f"the backward of {after}"
        return None, None


def first_bad_parameter(named_gradients: Iterable[tuple[str, Tensor | None]]) -> str | None:
    """Name of the first parameter whose gradient holds a NaN or Inf. Synchronises once a parameter."""
    for name, grad in named_gradients:
        if grad is not None and bool(is_bad(grad)):
            return name
    return None
