"""Megatron's gradient accumulation fusion: a parameter's gradients are added to its `main_grad` while backward runs.

Megatron's DistributedDataParallel gives each parameter `main_grad`, a view of its gradient buffer, in float32 by
default, and `grad_added_to_main_grad`. If a layer sets the latter, the parameter's hook adds nothing more. Autograd
then passes on a placeholder as the gradient, only to call the hook.
Source: LinearWithGradAccumulationAndAsyncCommunication in megatron.core.tensor_parallel.layers, 0.19.2.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def main_grad_of(parameter: nn.Parameter | None) -> Tensor | None:
    """Return the tensor to which the parameter's gradients must be added, or None.

    A compiled layer leaves its gradients to autograd, and Megatron's hook adds them. zero_out_wgrad tells the hook to
    do so even if another micro-batch of the step ran eagerly, as after torch.compile's limit of recompilations.
    Megatron's FSDP always takes gradients from autograd, because it creates main_grad only when they are complete.
    """
    if parameter is None or not parameter.requires_grad or hasattr(parameter, "__fsdp_param__"):
        return None
    if torch.compiler.is_compiling():
        if hasattr(parameter, "main_grad"):
            parameter.zero_out_wgrad = True  # type: ignore[attr-defined]
        return None
    return getattr(parameter, "main_grad", None)


def is_split(parameter: Tensor) -> bool:
    """Whether FSDP, Megatron's or torch's, splits the parameter over ranks."""
    from torch.distributed.tensor import DTensor

    return hasattr(parameter, "__fsdp_param__") or isinstance(parameter, DTensor)


class _ToMainGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: nn.Parameter, main_grad: Tensor) -> Tensor:
        # Not save_for_backward, which raises if main_grad changed: other micro-batches add to it before this backward.
        ctx.parameter, ctx.main_grad = parameter, main_grad
        ctx.set_materialize_grads(False)
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None]:
        (grad,), parameter = grads, ctx.parameter
        if grad is not None:
            ctx.main_grad.add_(grad)
        if not hasattr(parameter, "grad_added_to_main_grad"):
            return None, None
        parameter.grad_added_to_main_grad = True
        # Megatron adds the placeholder if the parameter gets its gradient from several places.
        allocate = torch.zeros_like if getattr(parameter, "zero_out_wgrad", False) else torch.empty_like
        return allocate(parameter), None


def to_main_grad(parameter: nn.Parameter) -> Tensor:
    """Return the parameter. If it has a main_grad, its gradient is added to that.

    An op that adds the gradient itself returns None as the gradient.
    """
    main_grad = main_grad_of(parameter)
    wanted = main_grad is not None and torch.is_grad_enabled()
    return _ToMainGrad.apply(parameter, main_grad) if wanted else parameter
