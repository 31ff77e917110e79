"""A CUDA graph of the whole training step: Megatron's `--cuda-graph-impl full_iteration`, without Transformer Engine.

Megatron runs the first `--cuda-graph-warmup-steps` steps as usual and captures the next one: forward, loss and backward
of all micro-batches, and the reduction of their gradients over the ranks. After that it copies each step's data to the
memory that the captured step reads, and replays. Reading the data, the optimizer, the guard's decision and the log stay
outside. Evaluation has a graph of its own. Megatron's generators can be captured without Transformer Engine, so every
replay draws new random numbers.

A replay runs no Python. So the results of a step stay at one place in memory (`guards`, `load`), `check` refuses what
would act between layers, and `install` fixes two things of Megatron: a dynamic loss scale moves to other memory when it
changes, and a checkpoint would hold generators as objects, which no run could read.
"""

from __future__ import annotations

import argparse
import functools
from typing import Any

from megatron.core.full_cuda_graph import FullCudaGraphWrapper
from megatron.core.tensor_parallel import convert_cuda_rng_state, get_cuda_rng_tracker
from megatron.training import checkpointing, training
from megatron.training.utils import print_rank_0
from torch import Tensor

from megablocks.config import refuse
from megablocks.megatron.model_config import Table, check_table, needs_megatron_routing
from megablocks.megatron.wrap import wrap

_WITH = " with --cuda-graph-impl full_iteration"
_PYTHON = "a replayed step runs no Python"
_NEEDS: Table = {
    **dict.fromkeys(
        ("pipeline_model_parallel_size", "tensor_model_parallel_size", "context_parallel_size"),
        ((1,), "other layouts than data and expert parallelism are untested"),
    ),
    "step_batch_size_schedule": ((None,), "the captured step has one size"),
    **dict.fromkeys(
        ("save_activations_interval", "save_dgrads_interval", "save_tokens_per_expert_interval",
         "save_wgrads_interval", "moe_routing_trace_path"), ((None,), _PYTHON),
    ),
    **dict.fromkeys(
        ("overlap_param_gather", "use_megatron_fsdp", "use_torch_fsdp2", "fine_grained_activation_offloading",
         "inprocess_restart"), ((False,), _PYTHON),
    ),
    **dict.fromkeys(
        ("check_for_spiky_loss", "check_for_large_grads", "qk_clip", "log_max_attention_logit"),
        ((False,), "the host reads it in the middle of the step"),
    ),
    "cpu_offloading_num_layers": ((0,), _PYTHON),
    "rerun_mode": (("disabled",), "it saves random states, to repeat a step"),
    "timing_log_level": ((0,), "its timers wait for the GPU within the step"),
    "recompute_granularity": ((None,), "the second forward would draw other random numbers than the first"),
    "spec": ((None,), "layers that are not ours may read from the GPU"),
}  # fmt: skip
"""Flags of every model: the values that a captured step allows, and why no other value is allowed."""
_EXPERTS_NEED: Table = {
    "megablocks_layer": (("megablocks",), "the other layers read from the GPU"),
    "megablocks_router_type": (("topk",), "another router is untested"),
    "megablocks_token_rounding": ((None,), "it is untested"),
    "megablocks_pad_to_capacity": ((False,), "the host reads the number of places"),
}
"""The same with experts."""


def check(args: argparse.Namespace) -> None:
    """Refuse, with a ConfigError, what cannot be captured or would be left out of a replay. Needs no GPU."""
    impl = args.cuda_graph_impl
    if impl != "full_iteration":
        if args.transformer_impl == "transformer_engine":
            return
        why = "graphs of single layers run without the guard's hooks, and need Transformer Engine here"
        refuse("cuda_graph_impl", impl, f"must be 'none' or 'full_iteration'; {why}")
    check_table(args, _NEEDS, _WITH)
    if args.cuda_graph_warmup_steps < 1:
        refuse("cuda_graph_warmup_steps", args.cuda_graph_warmup_steps, "must be >= 1, to compile kernels")
    if not args.num_experts:
        return
    check_table(args, _EXPERTS_NEED, _WITH)
    if needs_megatron_routing(args):
        refuse("cuda_graph_impl", impl, "needs our routing, and the router's flags Megatron's")
    if max(args.expert_model_parallel_size, args.expert_tensor_parallel_size or 1) > 1:
        symmetric = {"megablocks_dispatcher": (("symmetric",), "the all-to-all reads its sizes on the host")}
        check_table(args, symmetric, _WITH + " and experts on several ranks")


def install(args: argparse.Namespace) -> None:
    """Let the training loop capture its steps, if the flag is set. Call it once per process, before `pretrain`."""
    if args.cuda_graph_impl != "full_iteration":
        return
    training.FullCudaGraphWrapper = _Captured
    wrap(training, train_step=functools.partial(_train_step, {}))
    wrap(checkpointing, get_rng_state=_with_plain_states)


def release() -> None:
    """Drop the graphs. When NCCL destroys its groups, it would wait forever for graphs that hold its kernels."""
    FullCudaGraphWrapper.cuda_graph.update(training=None, validation=None)


class _Captured(FullCudaGraphWrapper):
    """Megatron's wrapper of forward and backward, which also logs what it captured."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        stage = "validation" if kwargs["forward_only"] else "training"
        before, number = self.cuda_graph[stage], self.curr_iter(stage) + 1
        try:
            result = super().__call__(*args, **kwargs)
        except Exception as error:
            if number > self.cuda_graph_warmup_steps and before is None:
                error.add_note(f"CUDA graph: {stage} step {number} could not be captured; leave --cuda-graph-impl out")
            raise
        if before is None and self.cuda_graph[stage] is not None:
            steps, size = f"{stage} step {number} of this run", kwargs["num_microbatches"]
            what = "forward and loss" if stage == "validation" else "forward, loss, backward and reduction of gradients"
            rest = "reading the data, optimizer, guard, log" if stage == "training" else "reading the data"
            print_rank_0(f"CUDA graph: captured at {steps}: {what}, {size} micro-batches; not captured: {rest}")
        return result


def _train_step(
    places: dict[int, Tensor], original: Any, forward: Any, data: Any, model: Any, optimizer: Any, *args: Any, **kw: Any
) -> Any:
    """Wraps `train_step`. places: where the captured step reads the loss scale of each scaler."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        scaler = getattr(part, "grad_scaler", None)
        if scaler is not None:
            place = places.setdefault(id(scaler), scaler._scale)
            if scaler._scale is not place:
                place.copy_(scaler._scale)
                scaler._scale = place
    return original(forward, data, model, optimizer, *args, **kw)


def _with_plain_states(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Wraps `get_rng_state`: the tracker's states are tensors, as in every run without graphs."""
    tracker = get_cuda_rng_tracker()
    generators = tracker.states_
    tracker.states_ = {name: convert_cuda_rng_state(state) for name, state in generators.items()}
    try:
        return original(*args, **kwargs)
    finally:
        tracker.states_ = generators
