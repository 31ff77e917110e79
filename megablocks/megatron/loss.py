"""Megatron's output layer and cross entropy in one op, `megablocks.ops.linear_cross_entropy`.

`GPTModel.forward` accepts an `output_processor`, which it calls instead of both. If the logits are needed, Megatron's
own loss runs, and one log line says why.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.utils import log_single_rank
from torch import Tensor

from megablocks.moe.main_grad import is_split, main_grad_of, to_main_grad
from megablocks.ops.loss import linear_cross_entropy

_NEEDS_LOGITS: dict[str, tuple[tuple[Any, ...], str]] = {
    "cross_entropy_loss_fusion": ((False,), "it asks for Megatron's own fused cross entropy"),
    "mtp_num_layers": ((None, 0), "multi-token prediction has losses of its own"),
    "defer_embedding_wgrad_compute": ((False,), "it keeps the gradient of the logits"),
    "config_logger_dir": (("", None), "it writes the logits to a file"),
    "use_mup": ((False,), "it scales the logits"),
}
"""Fields of TransformerConfig: the values that the fused loss supports, and why no other value is supported."""


def loss_arguments(kept_gib: float | None) -> dict[str, Any]:
    """The keyword arguments of `forward` of a GPTModel for the fused loss.

    kept_gib: GiB of logits that stay in memory for backward; None: a tenth of the GPU's memory.
    """
    if kept_gib is None:
        cuda = torch.cuda.is_available()
        kept_gib = torch.cuda.get_device_properties().total_memory / 2**30 / 10 if cuda else 0.0
    return {"output_processor": fused_loss, "output_processor_context": kept_gib}


def fused_loss(
    *,
    hidden_states: Tensor,
    output_layer: torch.nn.Module,
    output_weight: Tensor | None,
    labels: Tensor | None,
    runtime_gather_output: bool | None,
    compute_language_model_loss: Any,
    scale_logits: Any,
    config: Any,
    context: float,
    **_: Any,
) -> Tensor:
    """An `output_processor` of GPTModel: hidden states (S, B, H) and labels (B, S) to the loss of each token (B, S).

    Without labels it returns the logits (B, S, V), as GPTModel does. context: GiB of logits that are kept for backward.
    """
    obstacle = None if labels is None else _obstacle(output_layer, output_weight, runtime_gather_output, config)
    if labels is None or obstacle is not None:
        if obstacle is not None:
            _log(f"fused loss: off, Megatron's own cross entropy instead, because of {obstacle}")
        logits, _bias = output_layer(hidden_states, output_weight, runtime_gather_output=runtime_gather_output)
        logits = scale_logits(logits)
        return logits.transpose(0, 1).contiguous() if labels is None else compute_language_model_loss(labels, logits)
    # Called as a module, because hooks of Megatron's data parallelism wait there for the weight.
    output_layer.forward = functools.partial(_project, output_layer)
    try:
        return output_layer(hidden_states, output_weight, labels, context)
    finally:
        del output_layer.forward


def _obstacle(layer: Any, weight: Tensor | None, gather_output: bool | None, config: Any) -> str | None:
    """Why the fused loss cannot replace this output layer and Megatron's loss; None if it can."""
    for name, (allowed, why) in _NEEDS_LOGITS.items():
        value = getattr(config, name, allowed[0])
        if value not in allowed:
            return f"{name}={value!r}: {why}"
    if type(layer) is not ColumnParallelLinear or "forward" in vars(layer):
        return f"the output layer {type(layer).__name__}, which is not Megatron's plain one"
    if layer.bias is not None:
        return "the bias of the output layer"
    gather = layer.gather_output if gather_output is None else gather_output
    if gather and layer.tp_group.size() > 1:
        return "parallel_output=False: the logits of all ranks are gathered"
    weight = layer.weight if weight is None else weight
    if layer.gtp_remat_size > 1 or is_split(weight):
        return "the output layer's weight, which is split over data-parallel ranks"
    return None


def _project(layer: Any, hidden: Tensor, weight: Tensor | None, labels: Tensor, kept_gib: float) -> Tensor:
    """hidden (S, B, H), labels (B, S) → the loss of each token (B, S), under tensor parallelism too."""
    weight, group = layer.weight if weight is None else weight, layer.tp_group
    if layer.sequence_parallel:  # backward adds the ranks' parts of the gradient
        hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True, group=group)
    else:
        hidden = copy_to_tensor_model_parallel_region(hidden, group=group)
    main_grad = main_grad_of(weight)  # type: ignore[arg-type]
    loss = linear_cross_entropy(
        hidden,
        to_main_grad(weight),  # type: ignore[arg-type]
        labels.t(),
        group=group if group.size() > 1 else None,
        main_grad=main_grad if main_grad is not None and main_grad.dtype == torch.float32 else None,
        keep_bytes=int(kept_gib * 2**30),
    )
    return loss.t().contiguous()


@functools.cache
def _log(message: str) -> None:
    last = dist.get_world_size() - 1 if dist.is_initialized() else 0  # the last pipeline stage has the loss
    log_single_rank(logging.getLogger(__name__), logging.WARNING, message, rank=last)
