"""Megatron's Adam in one pass over each parameter, without a read from the GPU.

megatron-core 0.19.2 uses Transformer Engine's or apex's Adam, one pass over each parameter, or torch's AdamW, which
reads and writes each state in passes of its own. Before the step Megatron reads the gradient norm on the host and
scales the gradients; after it, Megatron copies master weights into the model. `install` changes four places, and no
file of Megatron:

1. `get_megatron_optimizer`: Megatron builds torch's optimizer, as on a machine without Transformer Engine and apex, and
   the optimizer in each part of the result becomes a `FusedAdam` with the same state.
2. `step` of the result, a ChainedOptimizer: the norm stays on the device, and the kernel gets the clipping factor. The
   gradients keep their values. Megatron still copies them and handles the loss scale of fp16, found-inf included.
3. `_copy_main_params_to_model_params` of each part does nothing, because the step has written the copies.
4. `reduce_max_stat_…` and `logical_and_across_model_parallel_group` of the training loop: a norm on the device is
   reduced there, and a single rank skips both. The constant loss scale 1 is on the host, where each step reads it.

Two things still wait for the GPU: fp16 and --loss-scale, whose scaler needs found-inf and the scale on the host; and,
with several model-parallel ranks, Megatron's reduction of the learning rate for its log.
"""

from __future__ import annotations

import argparse
import functools
import math
from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import optimizer as megatron_optimizer
from megatron.core.optimizer import ChainedOptimizer, DistributedOptimizer, FP32Optimizer, distrib_optimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from megatron.training import training
from megatron.training.utils import print_rank_0
from torch import Tensor

from megablocks.megatron import engine
from megablocks.megatron.wrap import wrap
from megablocks.ops.adam import FusedAdam, Tables, square_sum

_PARTS = (Float16OptimizerWithFloat16Params, FP32Optimizer, DistributedOptimizer)
_REFUSED = ("optimizer_cpu_offload", "use_precision_aware_optimizer", "optimizer_cuda_graph",
            "reuse_grad_buf_for_mxfp8_param_ag", "use_layer_wise_distributed_optimizer")  # fmt: skip
_REFUSED_BY_DDP = ("use_megatron_fsdp", "fp8_param_gather", "fp4_param_gather")


def install(args: argparse.Namespace) -> None:
    """Let the training loop build and use fused optimizers, on a machine with a GPU. Call it once per process.

    Without --megablocks-fused-optimizer it only names Megatron's optimizer in the log.
    """
    if not torch.cuda.is_available():
        return
    wanted = args.megablocks_fused_optimizer
    wrap(training, get_megatron_optimizer=functools.partial(_build, wanted=wanted))
    if wanted:
        agreed = not args.fp16 and not args.loss_scale
        wrap(
            training,
            reduce_max_stat_across_model_parallel_group=_reduce_max,
            logical_and_across_model_parallel_group=functools.partial(_logical_and, agreed=agreed),
        )


def _build(original: Any, config: Any, model: list[Any], *args: Any, wanted: bool, **options: Any) -> Any:
    """Wraps Megatron's `get_megatron_optimizer`: fuses the optimizer's step, or says why it cannot."""
    why = why_not(config, model) if wanted else "--no-megablocks-fused-optimizer"
    if why is None:  # build torch's Adam and treat its state as such, even with Transformer Engine or apex
        megatron_optimizer.USING_PYTORCH_OPTIMIZER = True
        distrib_optimizer.HAVE_APEX_OR_TE = False
    optimizer = original(config, model, *args, **options)
    why = why or why_not_parts(optimizer)
    if why is None:
        fuse(optimizer)
    elif not megatron_optimizer.USING_PYTORCH_OPTIMIZER and config.optimizer == "adam":
        for part in getattr(optimizer, "chained_optimizers", ()):
            if getattr(part, "optimizer", None) is not None:
                engine.take_any_state(part.optimizer)
        why += f"; {megatron_optimizer.Adam.__module__.split('.')[0]}'s FusedAdam"
    print_rank_0("optimizer: one fused pass over each parameter" if why is None else f"optimizer: not fused: {why}")
    return optimizer


def why_not(config: Any, model: list[Any]) -> str | None:
    """Why Megatron's optimizer is not fused, None if it can be. Every rank returns the same."""
    if config.optimizer != "adam":
        return f"--optimizer {config.optimizer}"
    for source, names in ((config, _REFUSED), (model[0].ddp_config, _REFUSED_BY_DDP)):
        for name in names:
            if getattr(source, name, False):
                return f"{name} is set"
    if math.isfinite(config.grad_norm_skip_threshold):
        return "grad_norm_skip_threshold is set"
    if getattr(model[0].config, "mtp_num_layers", None):
        return "multi-token prediction clips its own gradients"
    return None


def why_not_parts(optimizer: Any) -> str | None:
    """Like `why_not`, for the optimizer that Megatron has built."""
    parts = getattr(optimizer, "chained_optimizers", ())
    if type(optimizer) is not ChainedOptimizer or any(type(part) not in _PARTS for part in parts):
        return f"a part of {type(optimizer).__name__} is of an unknown class"
    return None


def fuse(optimizer: Any) -> None:
    """Fuse a ChainedOptimizer for which `why_not` and `why_not_parts` return None, before or after a load."""
    for part in optimizer.chained_optimizers:
        # 0-dimensional on the host: the loop's .item() waits for nothing, and a loss on the GPU can be multiplied by it
        for name in ("_scale_one", "_scale"):
            if hasattr(part, name):
                setattr(part, name, torch.ones(()))
        if not part.is_stub_optimizer:
            part.optimizer = FusedAdam.of(part.optimizer)
            part.optimizer.copies = dict(_copies(part))
            part._copy_main_params_to_model_params = lambda: None  # the step has written the copies
        part.skips_nonfinite = True  # read by `guards`
    optimizer.step = functools.partial(_step, optimizer, _Norm(optimizer))


def _copies(part: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Each main parameter of a part, and the model's memory for its copy in the model's dtype."""
    if isinstance(part, DistributedOptimizer):
        mains = chain(*part.shard_fp32_from_float16_groups, *part.shard_fp32_groups)
        models = chain(*part.model_float16_groups, *part.model_fp32_groups)
        for main, model in zip(mains, models, strict=True):
            span = part._get_model_param_range_map(model)["gbuf_world_in_bucket"]
            index, _, bucket = part.model_param_gbuf_map[model]
            yield main, part.buffers[index].buckets[bucket].param_data.view(-1)[span.start : span.end]
    elif isinstance(part, Float16OptimizerWithFloat16Params):
        yield from zip(chain(*part.fp32_from_float16_groups), chain(*part.float16_groups), strict=True)


class _Norm:
    """The norm of all gradients of a ChainedOptimizer, as its `get_grad_norm` defines it, but () float64 on the GPU."""

    def __init__(self, optimizer: Any) -> None:
        self.parts = optimizer.chained_optimizers
        self.shared = optimizer.grads_states_parallel_group_is_shared()
        self.tables = [Tables() for _ in self.parts]

    def __call__(self) -> Tensor:
        cuda = torch.cuda.is_available()
        device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
        grads = [part.get_grads_for_grad_norm() for part in self.parts]
        if self.shared:
            grads = [[grad for part in grads for grad in part]]
        total = torch.zeros((), dtype=torch.float64, device=device)
        for part, mine, tables in zip(self.parts, grads, self.tables, strict=False):
            squares = square_sum(mine, device, tables)
            dist.all_reduce(squares, group=part.get_grad_stats_parallel_group())
            total = total + squares
        return total.sqrt()


def clip_factor(norm: Tensor, limit: float) -> Tensor:
    """The factor () float32 that clips gradients of this norm () to the limit. limit: 0 never clips.

    NaN for a norm that is not finite: then the step changes nothing, and the guard stops the run when it reads.
    """
    factor = (limit / (norm + 1e-6)).clamp(max=1.0) if limit > 0 else torch.ones_like(norm)
    return torch.where(norm.isfinite(), factor, math.nan).float()


@torch.no_grad()
def _step(optimizer: Any, norm_of: _Norm) -> tuple[bool, Tensor | None, Any]:
    """Replaces `ChainedOptimizer.step`, and returns the norm as a () float32 tensor on the device."""
    if optimizer.prepare_grads():  # an overflow of fp16
        return False, None, None
    config, norm = optimizer.config, norm_of()
    zeros = optimizer.count_zeros() if config.log_num_zeros_in_grad else None
    factor = clip_factor(norm, config.clip_grad)
    for part in optimizer.chained_optimizers:
        if not part.is_stub_optimizer:
            part.optimizer.grad_scale = factor
    return optimizer.step_with_ready_grads(), norm.float(), zeros


def _reduce_max(original: Any, stat: Any, group: Any = None) -> Any:
    """The largest `stat`, None if no rank has one. A tensor stays on its device."""
    if group is not None and group.size() == 1:
        return stat
    if not isinstance(stat, Tensor):
        return original(stat, group)
    dist.all_reduce(stat, op=dist.ReduceOp.MAX, group=group)
    return stat


def _logical_and(original: Any, update_successful: bool, group: Any = None, *, agreed: bool) -> bool:
    """Whether all ranks were successful. agreed: all ranks of the group always pass the same value."""
    if agreed or (group is not None and group.size() == 1):
        return update_successful is True
    return original(update_successful, group)
