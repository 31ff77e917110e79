"""The driver's flags in addition to Megatron's: `--megablocks-*`, `--data-prefix`, the old fork's names, and defaults.

All flags of Megatron-LM work, except those of `UNSUPPORTED`. `add_arguments` is the `extra_args_provider` of Megatron's
`parse_and_validate_args`. Its parser first parses; then it maps the old names to Megatron's, fills defaults that depend
on the machine (no GPU, no Transformer Engine) and refuses bad values in one line. Megatron's own validation follows.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import importlib.util
import math
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from megatron.core.extensions.transformer_engine import HAVE_TE
from torch.distributed.checkpoint.metadata import TensorProperties

from megablocks.config import ConfigError, refuse
from megablocks.megatron import cuda_graph, data, engine
from megablocks.megatron.model_config import OWN_EXCHANGE, check_fields
from megablocks.megatron.settings import (
    EXPERTS_ONLY,
    PREFIX,
    DriverSettings,
    MegaBlocksSettings,
    add_flags,
    check_heads,
    flag_of,
)
from megablocks.ops.hopper import SWITCHES, switch

ALIASES: dict[str, tuple[str, type]] = {
    "moe_num_experts": ("num_experts", int),
    "moe_top_k": ("moe_router_topk", int),
    "moe_loss_weight": ("moe_aux_loss_coeff", float),
    "moe_zloss_weight": ("moe_z_loss_coeff", float),
    "moe_jitter_eps": ("moe_input_jitter_eps", float),
    "moe_capacity_factor": (PREFIX + "capacity_factor", float),
    "moe_normalize_expert_weights": (PREFIX + "normalize_top_k", float),
}
"""The old fork's flags, with the present name and the type. The old loss is averaged over layers, so
--moe-loss-weight is divided by their number."""
_PARTS_LEFT_OUT = (
    "sft", "logits_load_dir", "hybrid_context_parallel", "dataloader_inter_document_masking", "fim_data",
    "hybrid_layer_pattern", "hybrid_override_pattern",
)  # fmt: skip
UNSUPPORTED = dict.fromkeys(_PARTS_LEFT_OUT, "must be left out; this driver pretrains GPT models only") | {
    "yaml_cfg": "must be left out; Megatron's YAML file would replace all flags, this driver's too",
    "async_save": "must be left out; this driver's saves are synchronous, so that each is complete or absent",
    "optimizer_cuda_graph": "must be left out; the optimizer's step is a few launches, and the guard reads before it",
    **dict.fromkeys(("enable_cuda_graph", "external_cuda_graph"), "must be left out; use --cuda-graph-impl"),
    **dict.fromkeys(
        ("heterogeneous_layers_config_path", "heterogeneous_layers_config_encoded_json"),
        "must be left out; this driver builds and counts layers of one size",
    ),
    "freeze_all_layers": "must be left out, because Megatron does not freeze the model of this driver",
    "rampup_batch_size": "must be left out, because Megatron does not read it; use --step-batch-size-schedule",
    "save_retain_interval": "must be left out, because it removes a checkpoint before the next one is whole; use "
    "--megablocks-keep-checkpoints",
}
"""Megatron's flags that this driver does not accept, and why."""
UNSUPPORTED_BY_EXPERTS = (
    "moe_use_upcycling", "expert_tensor_parallel_num_weight_shards", "save_tokens_per_expert_interval",
)  # fmt: skip
"""Megatron's flags that only its own experts read and that its config lacks; `model_config` refuses the others."""
_WHOLE_MATRICES = ("muon", "dist_muon", "adaptive_muon", "soap")
"""Optimizers that treat each matrix as a whole."""
WITHOUT_ENGINE = ("attention", "norm", "qkv_bias", "rope")
"""Our settings that Transformer Engine's layers do not read."""
_NEEDED_BY = {
    "moe_router_bias_update_rate": "moe_router_enable_expert_bias",
    "moe_shared_expert_gate": "moe_shared_expert_intermediate_size",
    "moe_token_drop_policy": "moe_expert_capacity_factor",
}
"""Flags that are read only with another one."""
POSITIVE = {
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels", "num_query_groups",
    "seq_length", "make_vocab_size_divisible_by", "moe_ffn_hidden_size", "micro_batch_size", "global_batch_size",
    "train_iters", "train_samples", "log_interval", "log_memory_interval", "tensorboard_log_interval", "eval_interval",
    "save_interval", "lr", "lr_decay_iters", "lr_decay_samples", "tensor_model_parallel_size",
    "pipeline_model_parallel_size", "context_parallel_size", "expert_model_parallel_size",
    "expert_tensor_parallel_size", "vocab_size", "padded_vocab_size", "max_position_embeddings",
    "eval_micro_batch_size", "rotary_base", "check_weight_hash_across_dp_replicas_interval", "save_params_interval",
    "rope_scaling_factor", "rotary_seq_len_interpolation_factor", PREFIX + "dispatch_rows_factor",
    "save_activations_interval", "save_tokens_per_expert_interval", "save_wgrads_interval", "save_dgrads_interval",
}  # fmt: skip
"""Flags whose value must be > 0."""
NOT_NEGATIVE = {
    "weight_decay", "start_weight_decay", "end_weight_decay", "clip_grad", "min_lr", "decoupled_lr", "decoupled_min_lr",
    "lr_warmup_init", "lr_warmup_iters", "layernorm_epsilon", "init_method_std", "embedding_init_method_std",
    "moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_router_bias_update_rate", "moe_shared_expert_intermediate_size",
    "non_persistent_save_interval", "exit_interval", "exit_duration_in_mins",
}  # fmt: skip
"""Flags whose value must be >= 0, or each value if there are several."""
FRACTIONS = {"hidden_dropout", "attention_dropout", "rotary_percent"}


def add_arguments(
    parser: argparse.ArgumentParser, parsed: list[argparse.Namespace] | None = None, *, needs_data: bool = False
) -> argparse.ArgumentParser:
    """Megatron's `extra_args_provider`: returns a parser of Megatron's flags and ours.

    Args:
        parsed: a list that gets the namespace before Megatron validates it, so that an error can name its values.
        needs_data: refuse flags that name no data or no tokenizer.
    """
    driver = DriverParser(
        parents=[parser], formatter_class=_HelpFormatter, add_help=False, allow_abbrev=False,
        description="Megatron-LM + MegaBlocks",
    )  # fmt: skip
    driver.parsed, driver.needs_data = parsed, needs_data
    group = driver.add_argument_group("megablocks")
    group.add_argument("--data-prefix", help="folder made by scripts/prepare_data.py: data, tokenizer, vocabulary")
    for settings in (MegaBlocksSettings, DriverSettings):
        add_flags(group, settings, PREFIX)
    group = driver.add_argument_group("names of the old Megatron fork")
    for name, (dest, kind) in ALIASES.items():
        by_layer = " times the number of layers" if name == "moe_loss_weight" else ""
        group.add_argument(flag_of(name), type=kind, help=f"old name of {flag_of(dest)}{by_layer}")
    group.add_argument(
        "--moe-expert-model-parallelism", action=argparse.BooleanOptionalAction, default=False,
        help="spread experts over as many data-parallel ranks as there are experts, or over all of them",
    )  # fmt: skip
    return driver


class _HelpFormatter(argparse.HelpFormatter):
    """Prints a help text with a stray % as it is, such as "10%)" in Megatron 0.19.2, instead of failing."""

    def _expand_help(self, action: argparse.Action) -> str:
        try:
            return super()._expand_help(action)
        except (ValueError, TypeError, KeyError):
            return action.help or ""


class DriverParser(argparse.ArgumentParser):
    """A parser that resolves aliases, `--data-prefix` and defaults. Errors are ConfigErrors of one line."""

    parsed: list[argparse.Namespace] | None = None
    needs_data = False

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        try:
            return super()._get_value(action, arg_string)
        except Exception as error:
            if isinstance(error, argparse.ArgumentError) and isinstance(action.type, type):
                raise  # argparse names the type, such as int; a function's name would say nothing
            text = (action.help or "").split(". ")[0]
            raise argparse.ArgumentError(action, f"invalid value {arg_string!r}; it takes: {text}") from error

    def error(self, message: str) -> NoReturn:
        if message.startswith("unrecognized arguments: "):
            unknown = message.split(": ", 1)[1].split()[0]
            near = difflib.get_close_matches(unknown.split("=")[0], self._option_string_actions, n=1)
            message = f"{unknown}: no such flag" + (f", did you mean {near[0]}?" if near else "")
        raise ConfigError(message)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        argv: Sequence[str] = sys.argv[1:] if args is None else args
        parsed, unknown = super().parse_known_args(argv, namespace)
        if not unknown:
            given = {word.split("=")[0] for word in argv if word.startswith("--")}
            actions = self._option_string_actions
            if self.parsed is not None:
                self.parsed.append(parsed)
            parsed.megablocks_explicit = {actions[flag].dest for flag in given if flag in actions}
            resolve(parsed)
            if self.needs_data:
                data.check_named(parsed)
        return parsed, unknown


def settings_from[S: (MegaBlocksSettings, DriverSettings)](args: argparse.Namespace, kind: type[S]) -> S:
    """The settings dataclass `kind` from parsed flags. Its ConfigError names the flag."""
    try:
        return kind(**{f.name: getattr(args, PREFIX + f.name) for f in dataclasses.fields(kind)})
    except ConfigError as error:
        raise ConfigError(f"{PREFIX}{error}") from None


def resolve(args: argparse.Namespace) -> None:
    """Set Megatron's own arguments from aliases, data folder and defaults. Raises ConfigError for a bad value."""
    explicit: set[str] = args.megablocks_explicit
    _resolve_aliases(args, explicit)
    if args.data_prefix is not None:
        for dest, value in data.flags_of_folder(args.data_prefix).items():
            if dest in explicit and getattr(args, dest) != value:
                rule = f"must be left out with --data-prefix {args.data_prefix}, which sets {value!r}"
                refuse(dest, getattr(args, dest), rule)
            setattr(args, dest, value)
    chosen = {k: v for k, v in machine_defaults(args).items() if k not in explicit and getattr(args, k) != v[0]}
    for dest, (value, _) in chosen.items():
        setattr(args, dest, value)
    args.megablocks_automatic = {dest: f"{value} ({why})" for dest, (value, why) in chosen.items()}
    if args.tensor_model_parallel_size * args.context_parallel_size > 1:
        variable = "CUDA_DEVICE_MAX_CONNECTIONS"
        if os.environ.setdefault(variable, "1") == "1":
            args.megablocks_automatic[variable] = "1 (kernels start in the order of their launch)"
    check(args)
    args.moe_z_loss_coeff = args.moe_z_loss_coeff or None  # at 0 Megatron would log the loss as 0 / 0


def _resolve_aliases(args: argparse.Namespace, explicit: set[str]) -> None:
    """Set Megatron's flags from the old fork's names; refuse a flag given under both names with different values."""
    for name, (dest, _) in ALIASES.items():
        value = getattr(args, name)
        if value is None:
            continue
        if name == "moe_loss_weight":
            if not args.num_layers:
                refuse(name, value, "needs --num-layers, over which it is averaged")
            value = value / args.num_layers
        twin = getattr(args, dest)
        if isinstance(twin, list) and len(twin) == 1:
            twin = twin[0]
        if dest in explicit and not (isinstance(twin, (int, float)) and math.isclose(twin, value)):
            rule = f"sets {dest}={value:g}, but {flag_of(dest)} {twin} is given too; leave one of them out"
            refuse(name, getattr(args, name), rule)
        setattr(args, dest, value)
        explicit.add(dest)
    if args.moe_expert_model_parallelism:
        size, given = _expert_parallel_size(args), args.expert_model_parallel_size
        if "expert_model_parallel_size" in explicit and given != size:
            twin = f"--expert-model-parallel-size {given} is given too; leave one of them out"
            refuse("moe_expert_model_parallelism", True, f"spreads experts over {size} ranks, but {twin}")
        args.expert_model_parallel_size = size
        explicit.add("expert_model_parallel_size")


def _data_parallel_size(args: argparse.Namespace) -> int:
    """Ranks of WORLD_SIZE that hold the same part of the model."""
    world = int(os.environ.get("WORLD_SIZE", 1))
    model = args.tensor_model_parallel_size * args.pipeline_model_parallel_size * args.context_parallel_size
    if model < 1 or world % model:
        others = (
            f"pipeline_model_parallel_size={args.pipeline_model_parallel_size} and "
            f"context_parallel_size={args.context_parallel_size}"
        )
        rule = f"times {others} must divide the number of processes, {world}"
        refuse("tensor_model_parallel_size", args.tensor_model_parallel_size, rule)
    return world // model


def _expert_parallel_size(args: argparse.Namespace) -> int:
    """Ranks over which --moe-expert-model-parallelism spreads the experts."""
    ranks, experts = _data_parallel_size(args), args.num_experts or 0
    size = min(ranks, experts)
    if size < 1 or experts % size or ranks % size:
        rule = f"must be a multiple or a divisor of the {ranks} data-parallel ranks with --moe-expert-model-parallelism"
        refuse("num_experts", args.num_experts, rule)
    return size


def machine_defaults(args: argparse.Namespace) -> dict[str, tuple[Any, str]]:
    """Defaults that depend on the machine and the other flags: dest → (value, why)."""
    out: dict[str, tuple[Any, str]] = {"exit_signal_handler": (True, "SIGTERM saves and exits 0")}
    no_engine = engine.why_not()
    with_engine = no_engine is None and args.transformer_impl == "transformer_engine"
    if no_engine is not None:
        out["transformer_impl"] = ("local", no_engine)
    if not with_engine:
        out["apply_rope_fusion"] = (False, no_engine or "--transformer-impl local")
    if importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is None:
        why = "apex is not installed"
        if not with_engine:
            out["gradient_accumulation_fusion"] = (False, why)
        out["no_persist_layer_norm"] = (True, why)
        out["masked_softmax_fusion"] = (False, why)
    if importlib.util.find_spec("one_logger") is None:
        out["enable_one_logger"] = (False, "one_logger is not installed")
    if not torch.cuda.is_available():
        out["distributed_backend"] = ("gloo", "no GPU")
        out["use_cpu_initialization"] = (True, "no GPU")
        out["num_workers"] = (0, "no GPU to keep busy")
        out[PREFIX + "fused_loss"] = (False, "no GPU")
    out["eval_interval"] = (1000, "Megatron divides by it")
    out["tensorboard_log_interval"] = (args.log_interval, "a point of every step would wait for the GPU")
    if args.use_distributed_optimizer:
        out["dist_ckpt_optim_fully_reshardable"] = (True, "checkpoints load on any number of processes")
    if args.num_experts:
        if not args.quick_geglu:  # gpt-oss's gate, whose experts have biases
            out["add_bias_linear"] = (False, "experts without bias")
        out["moe_token_dispatcher_type"] = ("alltoall", "dropless")
        if args.moe_router_score_function == "softmax" and (args.moe_router_topk == 1 or args.moe_num_experts):
            # As in the old fork. With top-1 a softmax after top-k would make every weight 1.
            out["moe_router_pre_softmax"] = (True, "softmax over all experts")
    if args.num_experts and torch.cuda.is_available() and args.megablocks_layer in ("megablocks", "tutel"):
        if args.seq_length and args.micro_batch_size:
            out[PREFIX + "max_tokens"] = (_tokens_of_micro_batch(args), "a micro-batch's")
    if with_engine:
        out["create_attention_mask_in_dataloader"] = (False, "Transformer Engine's attention reads no mask")
    elif args.megablocks_attention == "sdpa" and not (args.reset_attention_mask or args.window_size):
        if args.context_parallel_size == 1:
            out["create_attention_mask_in_dataloader"] = (False, "attention is causal without a mask")
    if args.seq_length is not None:
        out["max_position_embeddings"] = (args.seq_length, "as seq_length")
    if args.megablocks_nonfinite_guard and "rerun_mode" not in args.megablocks_explicit:
        out["rerun_mode"] = ("disabled", "the non-finite guard stops first")
        out["check_for_nan_in_loss_and_grad"] = (False, "the non-finite guard checks")
    return out


def _tokens_of_micro_batch(args: argparse.Namespace) -> int:
    """The most tokens that a rank brings to a layer at once."""
    ranks = args.context_parallel_size * (args.tensor_model_parallel_size if args.sequence_parallel else 1)
    return max(args.micro_batch_size, args.eval_micro_batch_size or 0) * args.seq_length // ranks


def check(args: argparse.Namespace) -> None:
    """Refuse values that cannot train, in one line. Megatron's own validation follows."""
    for name in SWITCHES:
        switch(name)
    for dest, why in UNSUPPORTED.items():
        if getattr(args, dest, None):
            refuse(dest, getattr(args, dest), why)
    for dest in ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "micro_batch_size", "lr"):
        if getattr(args, dest) is None and not (args.use_checkpoint_args and dest != "micro_batch_size"):
            refuse(dest, None, f"{flag_of(dest)} is required")
    if args.train_iters is None and args.train_samples is None:
        refuse("train_iters", None, "--train-iters or --train-samples is required")
    for dest, value in vars(args).items():
        if dest in POSITIVE and value is not None and not value > 0:
            refuse(dest, value, "must be > 0")
        values = value if isinstance(value, list) else [value]
        numbers = [one for one in values if isinstance(one, float)]
        if dest in args.megablocks_explicit and not all(map(math.isfinite, numbers)):
            refuse(dest, value, "must be a finite number")
        if dest in NOT_NEGATIVE and any(one is not None and one < 0 for one in values):
            refuse(dest, value, "must be >= 0")
        if dest in FRACTIONS and not 0 <= value <= 1:
            refuse(dest, value, "must be 0 to 1")
    jitter = args.moe_input_jitter_eps
    if jitter is not None and not 0 <= jitter < 1:
        refuse("moe_input_jitter_eps", jitter, "must be >= 0 and < 1, or the router's input may change sign")
    if args.full_validation and args.megablocks_fixed_validation:
        refuse("megablocks_fixed_validation", True, "must be left out with --full-validation, which reads all")
    if args.dataloader_type == "cyclic" and args.megablocks_fixed_validation:
        refuse("dataloader_type", "cyclic", "must be 'single' with --megablocks-fixed-validation: it shuffles")
    if args.full_validation and not args.multiple_validation_sets:
        refuse("full_validation", True, "needs --multiple-validation-sets, also for one set, or Megatron fails")
    if args.dataloader_type == "external":
        refuse("dataloader_type", "external", "must be 'single' or 'cyclic'; this driver has no loader of its own")
    strictness = args.dist_ckpt_strictness
    if strictness != "assume_ok_unexpected" and hasattr(TensorProperties, "strides"):  # unknown to megatron-core 0.19.2
        refuse("dist_ckpt_strictness", strictness, "must be assume_ok_unexpected; with torch 2.15 Megatron fails")
    _check_sizes(args)
    _check_schedule(args)
    _check_folders(args)
    ranks = _data_parallel_size(args)
    if args.global_batch_size and args.global_batch_size % (args.micro_batch_size * ranks):
        rule = f"must be a multiple of micro_batch_size={args.micro_batch_size} times the {ranks} data-parallel ranks"
        refuse("global_batch_size", args.global_batch_size, rule)
    if args.train_samples and not args.skip_train and args.step_batch_size_schedule is None:
        batch = args.global_batch_size or args.micro_batch_size * ranks
        if args.train_samples < batch:  # Megatron would train no step
            rule = f"must be at least global_batch_size={batch}, the samples of one step"
            refuse("train_samples", args.train_samples, rule)
    if args.profile and args.use_pytorch_profiler and args.tensorboard_dir is None:
        refuse("tensorboard_dir", None, "--use-pytorch-profiler writes beside it; give --tensorboard-dir")
    if args.megablocks_keep_checkpoints and args.ckpt_format != "torch_dist":
        rule = f"must be 0 with --ckpt-format {args.ckpt_format}; only checkpoints of torch_dist are removed"
        refuse("megablocks_keep_checkpoints", args.megablocks_keep_checkpoints, rule)
    kept = PREFIX + "fused_loss_kept_gib"
    if not args.megablocks_fused_loss and {kept, PREFIX + "fused_loss"} <= args.megablocks_explicit:
        refuse(kept, getattr(args, kept), "must be left out without the fused loss, which alone reads it")
    if args.init_model_with_meta_device and not args.use_megatron_fsdp:
        rule = "needs --use-megatron-fsdp; without it Megatron leaves the weights unset"
        refuse("init_model_with_meta_device", True, rule)
    if args.use_torch_fsdp2 and not torch.cuda.is_available():
        refuse("use_torch_fsdp2", True, "needs a GPU; leave it out")
    if args.transformer_impl == "transformer_engine":
        _check_engine(args)
    elif args.reset_attention_mask and not args.create_attention_mask_in_dataloader:
        refuse("create_attention_mask_in_dataloader", False, "must be True with --reset-attention-mask, which needs it")
    settings_from(args, DriverSettings)
    settings_from(args, MegaBlocksSettings)
    if args.cuda_graph_impl != "none":
        cuda_graph.check(args)
    _check_saves(args)
    if args.num_experts:
        _check_experts(args, ranks)
        _check_layer(args)
    else:
        _check_dense(args)


def _check_engine(args: argparse.Namespace) -> None:
    """Refuse what Transformer Engine's layers would not read."""
    if (why := engine.why_not()) is not None:
        refuse("transformer_impl", args.transformer_impl, f"must be 'local'; {why}")
    if args.reset_attention_mask:
        rule = "must be False with Transformer Engine, whose causal attention reads no mask"
        refuse("reset_attention_mask", True, f"{rule}; leave it out or give --transformer-impl local")
    for name in WITHOUT_ENGINE:
        dest = PREFIX + name
        if dest in args.megablocks_explicit and not (name == "rope" and not args.apply_rope_fusion):
            rule = "must be left out with Transformer Engine, which does not read it, or give --transformer-impl local"
            refuse(dest, getattr(args, dest), rule)


def _check_sizes(args: argparse.Namespace) -> None:
    if args.hidden_size and args.num_attention_heads:  # both come later with --use-checkpoint-args
        check_heads(args, args.num_query_groups if args.group_query_attention else None)
    ranks = args.tensor_model_parallel_size * args.context_parallel_size
    if args.sequence_parallel and args.seq_length and args.seq_length % ranks:
        refuse("seq_length", args.seq_length, f"must be a multiple of {ranks}, its ranks with --sequence-parallel")
    if args.padded_vocab_size and args.vocab_size and args.padded_vocab_size < args.vocab_size:
        refuse("padded_vocab_size", args.padded_vocab_size, f"must be at least vocab_size={args.vocab_size}")
    frequency = args.moe_layer_freq
    if isinstance(frequency, int) and frequency < 1:
        refuse("moe_layer_freq", frequency, "must be >= 1; 2 puts experts into every second layer")
    if isinstance(frequency, list) and args.num_layers and len(frequency) != args.num_layers:
        refuse("moe_layer_freq", frequency, f"must have one entry for each of num_layers={args.num_layers}")


def _check_schedule(args: argparse.Namespace) -> None:
    """Refuse a warm-up that is not shorter than the schedule, which Megatron asserts without a message.

    Also a decay of WSD that is missing, or longer than the schedule: the rate would begin somewhere below --lr.
    """
    unit = "iters" if args.train_iters else "samples"
    total = getattr(args, f"lr_decay_{unit}") or getattr(args, f"train_{unit}")
    warmup = getattr(args, f"lr_warmup_{unit}")
    if args.lr_warmup_fraction is not None and not 0 <= args.lr_warmup_fraction < 1:
        refuse("lr_warmup_fraction", args.lr_warmup_fraction, "must be >= 0 and < 1")
    whole = f"the {unit} of the whole schedule (--lr-decay-{unit}, or --train-{unit})"
    if warmup >= total:
        refuse(f"lr_warmup_{unit}", warmup, f"must be smaller than {total}, {whole}")
    if args.lr_decay_style == "WSD":
        dest = f"lr_wsd_decay_{unit}"
        decay = getattr(args, dest)
        if decay is None:
            refuse(dest, None, f"{flag_of(dest)} is required with --lr-decay-style WSD")
        if not 0 < decay <= total:
            refuse(dest, decay, f"must be at most {total}, {whole}, and > 0")


def _check_folders(args: argparse.Namespace) -> None:
    """Refuse a folder that this user can neither write nor create."""
    for dest in ("save", "tensorboard_dir", "data_cache_path", PREFIX + "run_dir"):
        path = getattr(args, dest)
        if path is None or "://" in path:
            continue
        there = next(parent for parent in (Path(path), *Path(path).absolute().parents) if os.path.lexists(parent))
        if not there.is_dir():
            refuse(dest, path, f"{there} is not a folder; choose another path")
        is_read = dest == "data_cache_path" and there == Path(path) and any(there.iterdir())  # a cache that is complete
        if not is_read and not os.access(there, os.W_OK | os.X_OK):
            refuse(dest, path, f"{there} cannot be written by this user; choose another path")


def _check_saves(args: argparse.Namespace) -> None:
    """Refuse intervals of saves that would keep nothing, or at which Megatron would fail."""
    if args.save and args.save_interval is None:
        refuse("save", args.save, "needs --save-interval")
    for dest, interval in vars(args).items():
        if not re.fullmatch(r"(non_persistent_)?save_(\w+_)?interval", dest) or not interval:
            continue
        if args.save is None:
            refuse(dest, interval, "needs --save; without it nothing is kept")
        of_engine = ("save_activations_interval", "save_dgrads_interval", "save_tokens_per_expert_interval")
        if dest in of_engine and not HAVE_TE:
            refuse(dest, interval, "needs Transformer Engine, which is not installed")
        if dest == "non_persistent_save_interval" and args.non_persistent_ckpt_type is None:
            refuse(dest, interval, "needs --non-persistent-ckpt-type")


def _check_dense(args: argparse.Namespace) -> None:
    if args.use_checkpoint_args:  # the checkpoint's flags can add experts
        return
    for dest in (*(name for name in ALIASES if name != "moe_num_experts"), *(PREFIX + name for name in EXPERTS_ONLY)):
        if dest in args.megablocks_explicit:
            refuse(dest, getattr(args, dest), "needs --num-experts; a dense model does not read it")


def _check_layer(args: argparse.Namespace) -> None:
    """Refuse flags that the chosen layer would not read, before Megatron checks what they need."""
    layer = args.megablocks_layer
    if layer == "megatron" or args.spec is not None:
        return
    for dest in UNSUPPORTED_BY_EXPERTS:
        if value := getattr(args, dest, None):
            refuse(dest, value, "must be left out, or use Megatron's own layer (--megablocks-layer megatron)")
    if args.optimizer in _WHOLE_MATRICES:
        why = "which would treat all experts of a rank as one matrix"
        refuse("optimizer", args.optimizer, f"must be adam, sgd or lion with our experts, {why}")
    if layer != "experts" and args.moe_routing_trace_path:
        rule = "must be left out, or use Megatron's own router (--megablocks-layer experts)"
        refuse("moe_routing_trace_path", args.moe_routing_trace_path, rule)
    if layer != "experts" and args.moe_token_dispatcher_type == "allgather":  # given, because our default is another
        refuse("moe_token_dispatcher_type", "allgather", f"must be 'alltoall'; {OWN_EXCHANGE}")
    check_fields(args, dispatches=layer != "experts")


def _check_experts(args: argparse.Namespace, ranks: int) -> None:
    if args.num_experts < 1:
        refuse("num_experts", args.num_experts, "must be > 0, or 0 for a dense model")
    if not 1 <= args.moe_router_topk <= args.num_experts:
        refuse("moe_router_topk", args.moe_router_topk, f"must be 1 to num_experts={args.num_experts}")
    for dest, needed in _NEEDED_BY.items():
        value = getattr(args, dest)
        if value == "probs" and args.megablocks_capacity_factor is None:  # the default; dropless scripts give it
            continue
        if dest in args.megablocks_explicit and not getattr(args, needed) and not args.use_checkpoint_args:
            refuse(dest, value, f"needs {flag_of(needed)}, without which nothing reads it")
    if "sinkhorn" in args.moe_router_load_balancing_type and args.moe_aux_loss_coeff not in (0, [0]):
        rule = "must be 0 with moe_router_load_balancing_type='sinkhorn'"
        refuse("moe_aux_loss_coeff", args.moe_aux_loss_coeff, rule)
    coefficients, kinds = args.moe_aux_loss_coeff, args.moe_router_load_balancing_type
    count = 1 if isinstance(kinds, str) else len(kinds)
    if isinstance(coefficients, list) and len(coefficients) != count:
        rule = f"must be one number for each of --moe-router-load-balancing-type, which has {count}"
        refuse("moe_aux_loss_coeff", coefficients, rule)
    if "quantile_balancing" in kinds:
        _check_quantile_balancing(args, count)
    tile, rounding = PREFIX + "token_rounding_tile", PREFIX + "token_rounding"
    if getattr(args, tile) is not None and getattr(args, rounding) is None:
        refuse(tile, getattr(args, tile), f"needs {flag_of(rounding)}, which alone reads it")
    if args.megablocks_max_tokens is not None and args.seq_length and args.micro_batch_size:
        if args.megablocks_max_tokens < (tokens := _tokens_of_micro_batch(args)):
            rule = f"must be at least {tokens}, the tokens of a micro-batch on a rank"
            refuse("megablocks_max_tokens", args.megablocks_max_tokens, rule)
    size = args.expert_model_parallel_size
    stage = ranks * args.tensor_model_parallel_size * args.context_parallel_size
    shards = args.expert_tensor_parallel_size
    if shards and stage % (size * shards):
        rule = f"times expert_model_parallel_size={size} must divide the {stage} ranks of a pipeline stage"
        refuse("expert_tensor_parallel_size", shards, rule)
    if stage % (size * (shards or args.tensor_model_parallel_size)):
        refuse("expert_model_parallel_size", size, f"must divide the {ranks} data-parallel ranks")
    if args.tensor_model_parallel_size > 1 and not args.sequence_parallel:
        refuse("tensor_model_parallel_size", args.tensor_model_parallel_size, "needs --sequence-parallel with experts")


def _check_quantile_balancing(args: argparse.Namespace, kinds: int) -> None:
    """Refuse what Megatron ignores with this balancing, or at which its first step fails. kinds: of balancing."""
    field, balancing = "moe_router_load_balancing_type", "with moe_router_load_balancing_type='quantile_balancing'"
    if kinds > 1:
        refuse(field, args.moe_router_load_balancing_type, "must be 'quantile_balancing' alone, or not contain it")
    if args.moe_router_topk == args.num_experts:
        refuse("moe_router_topk", args.moe_router_topk, f"must be less than num_experts={args.num_experts} {balancing}")
    pairs = args.micro_batch_size * (args.seq_length or 0) * args.moe_router_topk
    if pairs % args.num_experts:
        rule = f"must divide the {pairs} pairs of a micro-batch's tokens and their experts {balancing}"
        refuse("num_experts", args.num_experts, rule)
    for dest in ("moe_router_num_groups", "moe_router_fusion"):
        if value := getattr(args, dest):
            refuse(dest, value, f"must be left out {balancing}")
