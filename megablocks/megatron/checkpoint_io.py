"""Additions to Megatron's checkpoints: safe reading, a comparison with the run's flags, fast and exact saving.

A torch_dist checkpoint is a folder of files: `.metadata` (a pickle that says where each tensor is) and `*.distcp`
(tensors, and pickled objects such as the flags of the run).
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import io
import pickle
import queue
import re
import types
from collections import defaultdict
from pathlib import Path
from typing import IO, Any

import torch
from megatron.core import dist_checkpointing, safe_globals
from megatron.core.dist_checkpointing.strategies import filesystem_async
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader

from megablocks.checkpoint.atomic import CheckpointError
from megablocks.megatron.failures import cause_of, line_of
from megablocks.megatron.settings import PREFIX, MegaBlocksSettings
from megablocks.megatron.wrap import wrap

MODEL = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels", "group_query_attention",
    "attention_output_gate", "multi_latent_attention", "q_lora_rank", "kv_lora_rank", "qk_head_dim",
    "qk_pos_emb_head_dim", "v_head_dim",
    "seq_length", "max_position_embeddings", "vocab_size", "bf16", "fp16",
    "swiglu", "squared_relu", "quick_geglu", "openai_gelu", "activation_func_clamp_value", "glu_linear_offset",
    "softmax_type", "window_size", "window_attn_skip_freq", "add_bias_linear", "add_qkv_bias", "normalization",
    "layernorm_epsilon", "layernorm_zero_centered_gamma", "qk_layernorm", "qk_l2_norm",
    "apply_residual_connection_post_layernorm", "position_embedding_type", "rotary_base", "rotary_percent",
    "rotary_interleaved", "rotary_seq_len_interpolation_factor", "no_rope_freq", "use_rope_scaling",
    "rope_scaling_factor", "rope_type", "rotary_scaling_factor", "mscale", "mscale_all_dim",
    "yarn_original_max_position_embeddings", "yarn_beta_fast", "yarn_beta_slow", "yarn_correction_range_round_to_int",
    "use_mup", "untie_embeddings_and_output_weights",
    "num_experts", "moe_layer_freq", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size",
    "moe_shared_expert_gate", "moe_router_topk",
    "moe_router_score_function", "moe_router_pre_softmax", "moe_router_topk_scaling_factor", "moe_router_num_groups",
    "moe_router_group_topk", "moe_router_enable_expert_bias", "moe_expert_capacity_factor",
    "megablocks_router_type", "megablocks_token_rounding", "megablocks_normalize_top_k",
    "megablocks_uniform_assignment", "megablocks_capacity_factor", "megablocks_capacity_rule", "megablocks_qk_norm",
)  # fmt: skip
"""Flags that define the model: with other values, the same weights compute something else or do not fit."""
TAKEN = (*(name for name in MODEL if name not in ("vocab_size", "bf16", "fp16")), "megablocks_layer")
"""Flags that --use-checkpoint-args takes from the checkpoint: the model, not the data's vocabulary or the dtype."""
ORDER = ("seed", "split", "dataloader_type")
"""Flags that decide which sample comes when."""
SCHEDULE = (
    "train_iters", "train_samples", "global_batch_size", "lr", "min_lr", "lr_decay_style", "lr_decay_iters",
    "lr_decay_samples", "lr_warmup_iters", "lr_warmup_samples", "lr_warmup_fraction", "lr_wsd_decay_iters",
    "lr_wsd_decay_samples", "start_weight_decay", "end_weight_decay", "weight_decay_incr_style",
)  # fmt: skip
"""Flags that define the learning rate and the weight decay of each step."""
UNSAVED = ("lr_warmup_init", "lr_wsd_decay_iters", "lr_wsd_decay_samples", "lr_wsd_decay_style")
"""Flags of the schedule that Megatron does not save with the schedule's state and does not compare."""
KEPT = ("optimizer", "adam_beta1", "adam_beta2", "adam_eps", "sgd_momentum", "decoupled_lr", "decoupled_min_lr")
"""The optimizer, whose state fits no other one, and flags that the values saved in this state override."""

_OF_DATACLASSES = tuple(f"torch.distributed.checkpoint.{name}" for name in ("metadata", "planner", "filesystem"))
"""Modules whose dataclasses and enums `.metadata` may hold."""
_OTHERS = {
    "torch": ("Size", *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))),
    "torch.serialization": ("_get_layout",),
    "pathlib": ("PosixPath",),
    "pathlib._local": ("PosixPath",),
    "megatron.core.dist_checkpointing.strategies.torch": ("MCoreMetadata", "MCoreSavePlan"),
}
"""Other classes that `.metadata` may hold, by module. Megatron before 0.19 wrote the last two classes."""
_TRUST = "; for a file that you trust, set TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1"


def saved_args(folder: Path) -> argparse.Namespace | None:
    """The flags of the run that saved a torch_dist checkpoint, None if it holds none.

    Raises CheckpointError if a file cannot be read, or holds a class that may run code.
    """
    try:
        FileSystemReader(folder).read_metadata()  # the next line reads it too, but hides its errors
        return dist_checkpointing.load_common_state_dict(folder).get("args")
    except (Exception, CheckpointException) as error:
        cause = cause_of(error)
        if isinstance(cause, CheckpointError):
            raise cause from error
        raise CheckpointError(f"{folder}: cannot be read: {line_of(cause)}") from error


def differences(args: argparse.Namespace, saved: argparse.Namespace, names: tuple[str, ...]) -> str:
    """The flags of `names` that both runs have with different values, as "field=given (saved: value), …"."""
    args, saved = _with_capacity(args), _with_capacity(saved)
    both = [name for name in names if hasattr(args, name) and hasattr(saved, name)]
    pairs = [(name, getattr(args, name), getattr(saved, name)) for name in both]
    return ", ".join(f"{name}={given!r} (saved: {value!r})" for name, given, value in pairs if given != value)


def _with_capacity(args: argparse.Namespace) -> argparse.Namespace:
    """The flags with the capacity that --megablocks-layer tutel implies."""
    if getattr(args, "megablocks_layer", None) != "tutel":
        return args
    implied = MegaBlocksSettings(layer="tutel", capacity_factor=args.megablocks_capacity_factor)
    capacity = {f"{PREFIX}{name}": getattr(implied, name) for name in ("capacity_factor", "capacity_rule")}
    return argparse.Namespace(**(vars(args) | capacity))


def restrict_unpickling() -> None:
    """Let checkpoints hold only the classes that torch and Megatron put there.

    torch.distributed.checkpoint unpickles `.metadata` and objects without a restriction, so a file could run any code.
    After this call `.metadata` may hold only the classes of `_OF_DATACLASSES` and `_OTHERS`. An object may hold only
    those that torch.load(weights_only=True) allows, and those that Megatron adds (megatron.core.safe_globals).
    """
    # A random state is an array of numpy, whose module has one name before numpy 2 and another since.
    names = [f"numpy.{core}.multiarray._reconstruct" for core in ("core", "_core")]
    torch.serialization.add_safe_globals([(safe_globals._reconstruct, name) for name in names])
    filesystem.pickle = types.SimpleNamespace(**{**vars(pickle), "load": _load_metadata})  # type: ignore[assignment, attr-defined]
    wrap(DefaultLoadPlanner, load_bytes=_load_bytes)
    wrap(FileSystemReader, read_data=_read_data)


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Only dataclasses and enums of the modules that a checkpoint's metadata need, and a few named classes."""
        if name in _OTHERS.get(module, ()):
            return super().find_class(module, name)
        found = super().find_class(module, name) if module in _OF_DATACLASSES else None
        is_data = dataclasses.is_dataclass(found) or isinstance(found, enum.EnumType)
        if is_data and getattr(found, "__module__", None) == module:
            return found
        raise pickle.UnpicklingError(f"GLOBAL {module}.{name}")


def _load_metadata(file: IO[bytes]) -> Any:
    """Replaces the unpickling of a checkpoint's `.metadata`. It runs no code of the file."""
    try:
        return _MetadataUnpickler(file).load()
    except pickle.UnpicklingError as error:
        raise _refusal(file.name, error) from error


def _load_bytes(original: Any, planner: DefaultLoadPlanner, read_item: Any, value: io.BytesIO) -> None:
    """Wraps torch's unpickling of an object in a checkpoint. It runs no code of the file."""
    copy = io.BytesIO()
    torch.save(torch.load(value), copy)  # this load is restricted, that of our copy in the original is not
    copy.seek(0)
    original(planner, read_item, copy)


def _read_data(original: Any, reader: FileSystemReader, plan: Any, planner: Any) -> Any:
    """Wraps torch's reader: reads file by file, so that an error names its file."""
    files = defaultdict(list)
    for item in plan.items:
        files[reader.storage_data[item.storage_index].relative_path].append(item)
    done = original(reader, dataclasses.replace(plan, items=[]), planner)
    for name, items in files.items():
        try:
            done = original(reader, dataclasses.replace(plan, items=items), planner)
        except pickle.UnpicklingError as error:
            raise _refusal(f"{reader.path}/{name}", error, _TRUST) from error
    return done


def _refusal(file: str, error: pickle.UnpicklingError, advice: str = "") -> CheckpointError:
    """The error for a file that is damaged, or that holds a class which could run code."""
    named = re.search(r"GLOBAL ([\w.]+)", str(error))
    if named is None:
        return CheckpointError(f"{file}: damaged: {line_of(error)[:200]}")
    return CheckpointError(
        f"{file}: holds {named[1]}, which Megatron does not put there and which could run code; refused before it "
        f"ran{advice}"
    )


def write_in_process() -> None:
    """Let synchronous saves work without a helper process. Call it before the first save.

    megatron-core 0.19.2 passes results from writer to trainer through a `multiprocessing.Manager`, a process that
    imports torch first: 3 to 10 seconds at the first save of each rank. It also outlives a rank that is killed. If
    writer and trainer are one process, a plain queue is enough.
    """
    if filesystem_async._results_queue is None:
        filesystem_async._results_queue = queue.Queue()


def install() -> None:
    """Save fast, and report why a write failed. Call it once per process, before `pretrain`."""
    write_in_process()
    wrap(filesystem_async.FileSystemWriterAsync, write_preloaded_data=_write)


def _write(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Wraps Megatron's write, which reports only the type of an error, for example on a full disk."""
    result = original(*args, **kwargs)
    error = result[1] if result is not None else None
    if not isinstance(error, Exception):
        return result
    # torch.save replaces the file's error by its own if it happens inside a tensor.
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    raise error if cause is None else cause
