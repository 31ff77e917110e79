"""The losses of layers built from `Arguments`, with the functions of megablocks 0.10.

New code does not need them: `forward_with_aux` of a layer built from a `MoEConfig` returns the losses with the output.
A layer built from `Arguments` records what the two batched losses need. The caller adds them and clears, once per step:

    loss = loss + batched_load_balancing_loss(args) + sum(batched_router_zloss(args))
    loss.backward(); clear_load_balancing_loss(); clear_router_zloss()

A layer that runs again in backward (activation checkpointing) is not recorded a second time. Checkpoint with
use_reentrant=False: the reentrant kind runs the recorded forward without a graph, so its losses have no gradient.
"""

from __future__ import annotations

import collections
import warnings
from typing import Generic, TypeVar

import torch
from torch import Tensor

from megablocks.layers.arguments import Arguments

T = TypeVar("T")

# No pipeline stage has this many layers. A program that reaches the limit never clears, and keeps every step's graph.
LIMIT = 1024


class Recorder(Generic[T]):
    """A list of at most `LIMIT` entries. Beyond that it drops the oldest entry, and warns once.

    Args:
        name: what is recorded, for the warning.
        clear: the name of the function that clears it, for the warning.
    """

    def __init__(self, name: str, clear: str) -> None:
        self._entries: collections.deque[T] = collections.deque(maxlen=LIMIT)
        self._name, self._clear, self._warned = name, clear, False

    def record(self, loss: T) -> None:
        """Store `loss`, unless a checkpointed layer runs again in backward."""
        if torch._C._current_graph_task_id() != -1:  # inside a backward pass
            return
        if len(self._entries) == LIMIT and not self._warned:
            self._warned = True
            message = f"{LIMIT} {self._name} recorded and never cleared; call {self._clear}() once a step"
            warnings.warn(message, stacklevel=2)
        self._entries.append(loss)

    def entries(self) -> list[T]:
        """Return what was recorded since the last clear, in order."""
        return list(self._entries)

    def clear(self) -> None:
        """Remove all entries, and free their graphs."""
        self._entries.clear()


# (tokens per expert (E,), scores (T, E)) of each layer, and the logits (T, E) of each router, since the last clear
_load_balancing: Recorder[tuple[Tensor, Tensor]] = Recorder("load-balancing losses", "clear_load_balancing_loss")
_router_logits: Recorder[Tensor] = Recorder("router logits", "clear_router_zloss")

save_load_balancing_loss = _load_balancing.record
get_load_balancing_loss = _load_balancing.entries
clear_load_balancing_loss = _load_balancing.clear
save_router_logits = _router_logits.record
clear_router_zloss = _router_logits.clear


def batched_load_balancing_loss(args: Arguments) -> Tensor | float:
    """E·weight / (layers·tokens·K) · Σ ⟨tokens per expert, mean scores⟩ over the recorded layers; float32 scalar.

    It returns the number 0.0 if moe_loss_weight is 0. Source: megablocks 0.10, layers/moe.py.

    Raises:
        ValueError: the number of recorded layers is not that of this pipeline stage, or shapes disagree.
    """
    if args.moe_loss_weight == 0:
        return 0.0
    recorded = get_load_balancing_loss()
    expected = args.num_layers_per_virtual_pipeline_stage or args.num_layers // args.pipeline_model_parallel_size
    if len(recorded) != expected:
        raise ValueError(
            f"load-balancing losses recorded: {len(recorded)}, must be {expected} with num_layers={args.num_layers}, "
            f"pipeline_model_parallel_size={args.pipeline_model_parallel_size}, "
            f"num_layers_per_virtual_pipeline_stage={args.num_layers_per_virtual_pipeline_stage}; "
            "call clear_load_balancing_loss() once a step"
        )
    tokens = recorded[0][1].shape[0]
    for counts, scores in recorded:
        if counts.shape != (args.moe_num_experts,) or scores.shape != (tokens, args.moe_num_experts):
            raise ValueError(
                f"moe_num_experts={args.moe_num_experts}: a layer recorded tokens_per_expert {tuple(counts.shape)} "
                f"and scores {tuple(scores.shape)}, must be (E,) and ({tokens}, E)"
            )
    # Without tokens the mean and the loss are 0. The sum keeps the graph.
    mean_scores = torch.cat([scores.float().sum(dim=0) for _, scores in recorded]) / max(tokens, 1)
    all_counts = torch.cat([counts for counts, _ in recorded]).to(mean_scores.dtype)
    scale = args.moe_num_experts * args.moe_loss_weight / (args.num_layers * max(tokens, 1) * args.moe_top_k)
    return scale * torch.dot(all_counts, mean_scores)


def batched_router_zloss(args: Arguments) -> Tensor | float:
    """moe_zloss_weight · mean over tokens of logsumexp(logits)², one value per recorded router, (layers,) float32.

    It returns the number 0.0, with a warning, if the weight is 0. Source: megablocks 0.10, layers/router.py.

    Raises:
        ValueError: no router has recorded logits.
    """
    if args.moe_zloss_weight == 0:
        warnings.warn("batched_router_zloss called with moe_zloss_weight=0", stacklevel=2)
        return 0.0
    recorded = _router_logits.entries()
    if not recorded:
        raise ValueError("router logits recorded: 0, must be one a layer; call this after forward and before clearing")
    return args.moe_zloss_weight * torch.stack(
        [torch.logsumexp(logits.float(), dim=1).square().sum() / max(logits.shape[0], 1) for logits in recorded]
    )
