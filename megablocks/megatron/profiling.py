"""Names for the parts of a training step in torch's trace, and the run's sizes next to the trace.

With `--profile --use-pytorch-profiler` Megatron writes `torch_profile/rank-N.json.gz` next to `--tensorboard-dir`. Here
every module of `MODULES` and the steps of the optimizer run inside a range "part: NAME", so that
`monitor.profile_step` can say to which part of the model a kernel belongs. Without these flags nothing is wrapped.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.pipeline_parallel import schedules
from megatron.training import training
from torch.profiler import record_function

from megablocks.files import write_durably
from megablocks.megatron.reporting import shape_of
from megablocks.megatron.wrap import wrap
from megablocks.monitor.bounds import RunSizes
from megablocks.monitor.history import History
from megablocks.monitor.trace import RANGE_PREFIX

MODULES = (
    # "": the model itself runs the loss and its output layer, which the fused loss accepts only unwrapped
    (r"^$|embedding$", "embedding and loss"),
    (r"rotary_pos_emb$|decoder$", "elementwise"),  # what a layer itself runs: residuals, dropout, activations
    (r"norm$", "norms"),
    (r"core_attention$", "attention"),
    (r"\.experts(\.|$)", "experts"),
    (r"linear_\w+$|shared_experts$", "dense products"),
    (r"\.router$", "routing"),
)
"""A pattern for a module's name, and the part that its forward and backward belong to. The first match counts."""


def is_on(args: argparse.Namespace) -> bool:
    """Whether torch's profiler runs and this is the first rank that it runs on."""
    return args.profile and args.use_pytorch_profiler and args.rank == min(args.profile_ranks or [0])


def part_of(name: str, module: torch.nn.Module) -> str | None:
    """The part of the module with this dotted name; None if it belongs to the module around it."""
    if hasattr(module, "router"):
        return "experts"  # a whole mixture-of-experts layer
    return next((part for pattern, part in MODULES if re.search(pattern, name)), None)


def _ranged(call: Callable[..., Any], part: str) -> Any:
    """`call` inside a range of this part, which the trace records."""
    return record_function(RANGE_PREFIX + part)(call)


def install() -> None:
    """Wrap Megatron's functions. Call it once per process, before `pretrain`."""
    wrap(training, setup_model_and_optimizer=_setup)
    training.finalize_model_grads = _ranged(training.finalize_model_grads, "gradients")
    # The mask, sum and scale of the loss belong to no module.
    schedules.forward_step_calc_loss = _ranged(schedules.forward_step_calc_loss, "embedding and loss")


def _setup(original: Any, *args: Any, **kwargs: Any) -> Any:
    model, optimizer, scheduler = original(*args, **kwargs)
    for chunk in model:
        for name, module in chunk.named_modules():
            if (part := part_of(name, module)) is not None:
                module.forward = _ranged(module.forward, part)
        chunk.zero_grad_buffer = _ranged(chunk.zero_grad_buffer, "gradients")
    # A step prepares and clips the gradients, then it calls the second method only for the update.
    optimizer.step = _ranged(optimizer.step, "gradients")
    optimizer.step_with_ready_grads = _ranged(optimizer.step_with_ready_grads, "optimizer")
    return model, optimizer, scheduler


def write(args: argparse.Namespace, model: Sequence[torch.nn.Module], history: History) -> None:
    """Write `run.json` next to the trace.

    model: this rank's chunks. history: for the tokens/s of the iterations after the profile.
    """
    # Iteration profile_step_end + 1, counted from 1, writes the trace.
    pairs = zip(*history.series("tokens_per_second"), strict=True)
    rates = [rate for i, rate in pairs if i > args.profile_step_end + 1]
    parameters = [parameter for chunk in model for parameter in chunk.parameters()]
    on_gpu = torch.cuda.is_available()
    sizes = RunSizes.of(
        args,
        world_size=args.world_size,
        shape=shape_of(args),
        micro_batches=get_num_microbatches(),
        parameters=sum(one.numel() for one in parameters),
        expert_parameters=sum(one.numel() for one in parameters if not getattr(one, "allreduce", True)),
        element_bytes=2 if args.bf16 or args.fp16 else 4,
        qk_norms=args.qk_layernorm or args.qk_l2_norm,
        device=torch.cuda.get_device_name() if on_gpu else "cpu",
        peak_memory_bytes=torch.cuda.max_memory_allocated() if on_gpu else None,
        tokens_per_second=median(rates) if rates else None,
    )
    folder = Path(args.tensorboard_dir).parent / "torch_profile"
    write_durably(folder / "run.json", sizes.to_json())
    print(f"profile: {folder}; scripts/profile_step.py OUT --trace FILE makes a table of it", flush=True)
