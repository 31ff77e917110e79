"""A GPT for Megatron's `pretrain()`: model config with our layers, batches, forward step and loss.

It follows Megatron-LM's pretrain_gpt.py (tag core_v0.19.0), which is not part of the wheel, without fine-tuning,
distillation and fill-in-the-middle; `arguments.UNSUPPORTED` refuses their flags.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.transformer.multi_token_prediction import get_mtp_ranks
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_attr_wrapped_model, get_batch_on_this_cp_rank, get_batch_on_this_tp_rank
from megatron.training import get_args, get_timers
from megatron.training.argument_utils import gpt_config_from_args
from megatron.training.arguments import core_transformer_config_from_args
from megatron.training.utils import is_first_or_last_pipeline_stage
from torch import Tensor

from megablocks.config import ConfigError, refuse
from megablocks.megatron import data
from megablocks.megatron.arguments import settings_from
from megablocks.megatron.loss import loss_arguments
from megablocks.megatron.model_config import check_config, moe_config
from megablocks.megatron.settings import PREFIX, MegaBlocksSettings
from megablocks.megatron.specs import block_spec

_KEYS = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")
_SPIKE_FACTOR = 10
"""Megatron's --check-for-spiky-loss reports a loss above this many times the largest loss so far."""

Observer = Callable[[Tensor, Tensor], None]
"""Called with a micro-batch's summed loss () and its token count ()."""


def model_config(args: argparse.Namespace) -> Any:
    """Megatron's GPTModelConfig with our settings and, unless `--spec` names others, our layer specs.

    Raises ConfigError if our layers refuse a value.
    """
    on_gpu = torch.cuda.is_available()
    if args.cuda_graph_impl == "full_iteration" and not on_gpu:
        refuse("cuda_graph_impl", args.cuda_graph_impl, "must be 'none' without a GPU")
    shares = args.expert_model_parallel_size * args.expert_tensor_parallel_size  # of the experts
    if args.megablocks_dispatcher == "symmetric" and shares > 1 and not on_gpu:
        refuse("megablocks_dispatcher", "symmetric", "must be 'auto' or 'all_to_all' without a GPU")
    if args.profile and not (on_gpu or args.use_pytorch_profiler):
        refuse("profile", True, "needs a GPU, or --use-pytorch-profiler")
    if args.log_device_memory_used and not (on_gpu and find_spec("pynvml")):
        refuse("log_device_memory_used", True, "needs a GPU and the package nvidia-ml-py")
    if args.moe_routing_trace_path and not on_gpu:
        refuse("moe_routing_trace_path", args.moe_routing_trace_path, "needs a GPU")
    config = gpt_config_from_args(args)
    config.transformer.megablocks = settings = settings_from(args, MegaBlocksSettings)
    if args.spec is None:
        config.transformer_layer_spec = block_spec
        if args.num_experts and settings.layer in ("megablocks", "experts"):
            check_config(config.transformer, dispatches=settings.layer == "megablocks")
            _check_experts(config.transformer, settings)
    elif config.transformer_layer_spec is None:
        refuse("spec", args.spec, f"{args.spec[0]} cannot be imported; give a module and a name in it")
    return config


_FLAGS = {
    "ffn_hidden_size": "moe_ffn_hidden_size",
    "top_k": "moe_router_topk",
    "num_groups": "moe_router_num_groups",
    "group_top_k": "moe_router_group_topk",
    "expert_score_bias": "moe_router_enable_expert_bias",
}
"""Fields of MoEConfig, and Megatron's flags that set them."""


def _check_experts(config: TransformerConfig, settings: MegaBlocksSettings) -> None:
    try:
        moe_config(config, settings)
    except ConfigError as error:  # it names fields of MoEConfig, not the flags
        text = re.sub(rf"\b({'|'.join(_FLAGS)})\b", lambda found: _FLAGS[found[0]], str(error))
        prefix = PREFIX if hasattr(settings, text.split("=")[0]) else ""
        raise ConfigError(f"{prefix}{text}") from None


def get_batch(data_iterator: Iterator[dict[str, Tensor]], vp_stage: int | None) -> dict[str, Tensor | None]:
    """This rank's part of the next micro-batch, on its device. All values are None if its stage reads no data."""
    args, predicts_ahead = get_args(), data.predicts_ahead(vp_stage)
    if not is_first_or_last_pipeline_stage(vp_stage) and not predicts_ahead:
        return dict.fromkeys(_KEYS)
    tp_rank = mpu.get_tensor_model_parallel_rank()
    batch: dict[str, Any] = {}
    if tp_rank == 0:
        device = torch.cuda.current_device()
        batch = {k: v.to(device, non_blocking=True) for k, v in next(data_iterator).items() if torch.is_tensor(v)}
    batch = get_batch_on_this_tp_rank(
        {**dict.fromkeys(_KEYS), **batch} if tp_rank == 0 else {},
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        has_cu_seqlens=False,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        cp_size=args.context_parallel_size,
        tp_rank=tp_rank,
        micro_batch_size=args.micro_batch_size if torch.is_grad_enabled() else args.eval_micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=predicts_ahead,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(),
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(),
    )
    batch = get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=mpu.get_context_parallel_group())
    return {key: batch.get(key) for key in _KEYS}


def loss_func(loss_mask: Tensor | None, output: Tensor, observe: Observer) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The summed loss of a micro-batch, in the form that Megatron's schedules need.

    Args:
        loss_mask: (B, S), 1 for a token that counts, otherwise 0. output: (B, S) floating, the loss of each token.
        observe: called in training with the sum () float32 and the number of tokens () int32, both detached.

    Returns:
        the sum () float32, the number of tokens () int32, and {"lm loss": (2,)} with both, for the log.
    """
    assert loss_mask is not None, "only the last pipeline stage computes a loss"
    args = get_args()
    mask = loss_mask.reshape(-1).float()
    loss = torch.sum(output.reshape(-1).float() * mask)
    tokens = mask.sum().detach().to(torch.int)
    if torch.is_grad_enabled():
        observe(loss.detach(), tokens)
    rerun = get_rerun_state_machine()
    if args.check_for_nan_in_loss_and_grad:
        for rejects, what in ((torch.isnan, "NaN"), (torch.isinf, "Inf")):
            message = f"found {what} in local forward loss calculation"
            rerun.validate_result(result=loss, rejection_func=rejects, message=message, tolerance=0.0, fatal=True)
    if args.check_for_spiky_loss:
        spiky = partial(rerun.is_unexpectedly_large, threshold=_SPIKE_FACTOR, context="loss")
        rerun.validate_result(result=loss, rejection_func=spiky, message="Spiky loss", tolerance=0.0, fatal=False)
    return loss, tokens, {"lm loss": torch.cat([loss.detach().view(1), tokens.view(1)])}


def forward_step(
    data_iterator: Iterator[dict[str, Tensor]],
    model: torch.nn.Module,
    return_schedule_plan: bool = False,
    *,
    observe: Observer,
) -> tuple[Any, Any]:
    """Megatron's `forward_step_func`: run the next micro-batch. Returns the output and the loss function.

    observe: called with the loss of each training micro-batch.
    """
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    batch = get_batch(data_iterator, get_attr_wrapped_model(model, "vp_stage"))
    timers("batch-generator").stop()
    inputs = (batch["tokens"], batch["position_ids"], batch["attention_mask"])
    args = get_args()
    fused = loss_arguments(args.megablocks_fused_loss_kept_gib) if args.megablocks_fused_loss else {}
    run = model.build_schedule_plan if return_schedule_plan else model
    output = run(*inputs, labels=batch["labels"], loss_mask=batch["loss_mask"], **fused)  # type: ignore[operator]
    return output, partial(loss_func, batch["loss_mask"], observe=observe)


def embedding_ranks(pipeline_ranks: list[int]) -> list[int]:
    """Ranks of a pipeline group that hold the word embedding: the first, the last if tied, those that predict ahead."""
    args = get_args()
    ranks = {pipeline_ranks[0], *get_mtp_ranks(pipeline_ranks, core_transformer_config_from_args(args))}
    if not args.untie_embeddings_and_output_weights:
        ranks.add(pipeline_ranks[-1])
    return sorted(ranks)
