"""Guards of a training step: a loss window that detects spikes, and sentinels that find the first layer with a NaN.

The sentinels reduce each layer's output and its gradient to one flag on the device. They do not synchronize: the flags
are read only after a step has failed, which may be some steps later.
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
    """The loss or a gradient holds a NaN or Inf. The message is one line with step, rank and layer."""


class LossWindow:
    """The last `size` finite losses. A loss above `factor` times their median is a spike; factor 0 finds no spikes.

    A spike enters the window too. So a loss that stays high becomes the median, and updates are not skipped forever.
    NaN and Inf never enter the window. While the window holds fewer than `minimum` losses, no loss is a spike.
    """

    def __init__(self, size: int, factor: float) -> None:
        self.factor = factor
        self.minimum = max(4, size // 4)
        self._losses: deque[float] = deque(maxlen=size)

    def is_spike(self, loss: float) -> bool:
        """Whether `loss` is a spike. Then adds `loss` to the window if it is finite."""
        median = self.median()
        if math.isfinite(loss):
            self._losses.append(loss)
        return self.factor > 0 and median is not None and loss > self.factor * median

    def median(self) -> float | None:
        """Median of the window; None while the window holds fewer than `minimum` losses."""
        return statistics.median(self._losses) if len(self._losses) >= self.minimum else None

    def state_dict(self) -> dict[str, Any]:
        """A state that JSON can hold. `load_state_dict` reads it into a window of any size."""
        return {"losses": list(self._losses)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._losses.clear()
        self._losses.extend(float(loss) for loss in state["losses"] if math.isfinite(loss))


def is_bad(tensor: Tensor) -> Tensor:
    """() bool on the tensor's device: whether any element is NaN or Inf. Copies nothing and does not synchronize."""
    if tensor.numel() == 0:
        return torch.zeros((), dtype=torch.bool, device=tensor.device)
    return ~torch.isfinite(torch.linalg.vector_norm(tensor.detach(), ord=math.inf))


class LayerSentinels:
    """Two flags per layer: its output, or the gradient of its output, had a NaN or Inf in a step.

    Args:
        layers: modules in the order of computation. Each returns a tensor, or a tuple whose first element is a tensor.
            If the tensor has an attribute `normalized`, one node of the graph computed it and its norm, and the norm's
            factor of each row, `normalized.scale`. The node adds both gradients; the last gradient with more than one
            dimension that it returns is the output's. Then a flag needs no pass over all values: a NaN or Inf in a row
            makes its factor NaN or 0, and the backward of a norm spreads it over the row's whole gradient.
        names: the names of the layers in `first_bad`.
    """

    def __init__(self, layers: Iterable[torch.nn.Module], names: Sequence[str], device: torch.device | str) -> None:
        self.names = list(names)
        self._flags = torch.zeros(2, len(self.names), dtype=torch.bool, device=device)  # forward, backward
        self._forward, self._backward = self._flags.unbind()
        self._kept = torch.zeros_like(self._flags)
        for index, layer in enumerate(layers):
            layer.register_forward_hook(self._hook(index))

    def _hook(self, index: int) -> Any:
        """The forward hook of layer `index`: it records a bad output, and a bad gradient of the output."""

        def watch(module: torch.nn.Module, args: Any, output: Any) -> None:
            out = output[0] if isinstance(output, tuple) else output
            if not module.training or not isinstance(out, Tensor):
                return
            normalized = getattr(out, "normalized", None)
            bad = is_bad(out) if normalized is None else ~(normalized.scale > 0).all()
            self._forward[index].logical_or_(bad)
            if out.grad_fn is not None and normalized is not None:
                out.grad_fn.register_hook(watch_node)
            elif out.requires_grad:
                out.register_hook(watch_gradient)

        def watch_node(grads: Sequence[Tensor | None], _: Any) -> None:
            sums = [grad for grad in grads if grad is not None and grad.dim() > 1]
            if sums:  # otherwise only parameters need a gradient
                watch_gradient(sums[-1][..., 0])

        def watch_gradient(grad: Tensor) -> None:
            self._backward[index].logical_or_(is_bad(grad))

        return watch

    def end_step(self, bad_before: Tensor) -> None:
        """Keep the step's flags for `first_bad`, unless an earlier step was bad, and clear them. Call it once per step.

        bad_before: () bool, on the flags' device.
        """
        self._kept = torch.where(bad_before, self._kept, self._flags)
        self._flags.zero_()

    def first_bad(self) -> tuple[str, str] | tuple[None, None]:
        """("forward" or "backward", where) of the first NaN or Inf in the kept step, or (None, None). Synchronizes.

        In forward the first layer with a bad output is the cause. In backward the later layers compute the gradient of
        a layer's output, so the cause is the layer after the last one with a bad gradient.
        """
        forward, backward = self._kept.tolist()
        if any(forward):
            return "forward", f"the output of {self.names[forward.index(True)]}"
        if any(backward):
            last = len(backward) - 1 - backward[::-1].index(True)
            after = self.names[last + 1] if last + 1 < len(self.names) else "the output layer"
            return "backward", f"the backward of {after}"
        return None, None


def first_bad_parameter(named_gradients: Iterable[tuple[str, Tensor | None]]) -> str | None:
    """Name of the first parameter whose gradient holds a NaN or Inf, or None. Synchronizes once per parameter."""
    for name, grad in named_gradients:
        if grad is not None and bool(is_bad(grad)):
            return name
    return None
