"""Megatron's distributed checkpoints for `python -m megablocks convert`: read and written tensor by tensor.

A checkpoint with only weights is in the folder `release`, Megatron's name for a checkpoint without an optimizer.
`--load` starts from it at iteration 0. One process reads and writes it through torch.distributed.checkpoint; it needs
no GPU and builds no Megatron model.
"""

from __future__ import annotations

import argparse
import io
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject
from torch import Tensor
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_global_save_plan,
)
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult

from megablocks.checkpoint import atomic
from megablocks.checkpoint.journal import Journal
from megablocks.checkpoint.layout import Block, Model, Rule, Stored, Units
from megablocks.config import ConfigError, refuse
from megablocks.megatron import checkpoint_io, planned
from megablocks.megatron.failures import line_of
from megablocks.megatron.reporting import moe_layers
from megablocks.megatron.settings import flag_of

_UNIT = "model.layers.{l}."
_HEADS = (
    Rule("self_attention.linear_qkv.layer_norm_weight", ("input_layernorm.weight",)),
    Rule("self_attention.linear_qkv.weight", tuple(f"self_attn.{one}_proj.weight" for one in "qkv"), "qkv"),
    Rule("self_attention.q_layernorm.weight", ("self_attn.q_norm.weight",)),
    Rule("self_attention.k_layernorm.weight", ("self_attn.k_norm.weight",)),
    Rule("mlp.linear_fc1.layer_norm_weight", ("post_attention_layernorm.weight",)),
)
_LATENT = (
    Rule("input_layernorm.weight", ("input_layernorm.weight",)),
    Rule("self_attention.linear_q_down_proj.weight", ("self_attn.q_a_proj.weight",)),
    Rule("self_attention.q_layernorm.weight", ("self_attn.q_a_layernorm.weight",)),
    Rule("self_attention.linear_q_up_proj.weight", ("self_attn.q_b_proj.weight",)),
    Rule("self_attention.linear_kv_down_proj.weight", ("self_attn.kv_a_proj_with_mqa.weight",)),
    Rule("self_attention.kv_layernorm.weight", ("self_attn.kv_a_layernorm.weight",)),
    Rule("self_attention.linear_kv_up_proj.weight", ("self_attn.kv_b_proj.weight",)),
    Rule("pre_mlp_layernorm.weight", ("post_attention_layernorm.weight",)),
)
_BOTH = (
    Rule("self_attention.linear_proj.weight", ("self_attn.o_proj.weight",)),
    Rule("mlp.linear_fc1.weight", ("mlp.gate_proj.weight", "mlp.up_proj.weight"), "rows"),
    Rule("mlp.linear_fc2.weight", ("mlp.down_proj.weight",)),
    Rule("mlp.router.weight", ("mlp.router.layer.weight",)),
    Rule("mlp.router.expert_bias", ("mlp.router.expert_score_bias",)),
    *(Rule(f"mlp.experts.{name}", (f"mlp.experts.{{e}}.{name}",)) for name in ("w1", "v1", "w2")),
    Rule(
        "mlp.shared_experts.linear_fc1.weight",
        ("mlp.shared_expert.gate_proj.weight", "mlp.shared_expert.up_proj.weight"), "rows",
    ),
    Rule("mlp.shared_experts.linear_fc2.weight", ("mlp.shared_expert.down_proj.weight",)),
)  # fmt: skip
_OF_GPT_OSS = (
    Rule("self_attention.linear_qkv.bias", tuple(f"self_attn.{one}_proj.bias" for one in "qkv"), "qkv"),
    Rule("self_attention.linear_proj.bias", ("self_attn.o_proj.bias",)),
    Rule("self_attention.core_attention.softmax_offset", ("self_attn.sinks",)),
    Rule("mlp.router.bias", ("mlp.router.layer.bias",)),
    Rule("mlp.experts.experts.linear_fc1.weight", ("mlp.experts.{e}.w1", "mlp.experts.{e}.v1"), "rows"),
    Rule("mlp.experts.experts.linear_fc1.bias", ("mlp.experts.{e}.b1", "mlp.experts.{e}.c1"), "rows"),
    Rule("mlp.experts.experts.linear_fc2.weight", ("mlp.experts.{e}.w2",), "transposed"),
    Rule("mlp.experts.experts.linear_fc2.bias", ("mlp.experts.{e}.b2",)),
)
_OUTSIDE = (
    Rule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",)),
    Rule("decoder.final_layernorm.weight", ("model.norm.weight",)),
    Rule("output_layer.weight", ("lm_head.weight",)),
)


def rules_of(model: Model, per_layer: bool) -> tuple[Rule, ...]:
    """The rules for Megatron's names. per_layer: each layer has its own tensors, as when only some have experts."""
    prefix = "decoder.layers.{l}." if per_layer else "decoder.layers."
    inside = (_HEADS if model.kv_lora_rank is None else _LATENT) + _BOTH
    if model.clamp is not None:  # the last rule of a unit counts
        inside += _OF_GPT_OSS
    layers = (Rule(prefix + rule.stored, tuple(_UNIT + unit for unit in rule.units), rule.packing) for rule in inside)
    return (*_OUTSIDE, *layers)


_MUST: dict[str, tuple[Any, ...]] = {
    "normalization": ("RMSNorm",),
    "swiglu": (True,),
    "position_embedding_type": ("rope",),
    "rotary_percent": (1.0,),
    "glu_linear_offset": (0.0,),
    "softmax_type": ("vanilla",),
    "moe_router_load_balancing_type": ("aux_loss", "seq_aux_loss", "global_aux_loss", "none"),
    "moe_router_score_function": ("softmax", "sigmoid"),
    "moe_apply_probs_on_input": (False, None),
    "mtp_num_layers": (None, 0),
    "megablocks_layer": ("megablocks", "experts"),
    "megablocks_router_type": ("topk",),
    "megablocks_normalize_top_k": (None, 1.0),
    **dict.fromkeys(
        ("quick_geglu", "add_bias_linear", "add_qkv_bias", "rotary_interleaved", "use_rope_scaling",
         "layernorm_zero_centered_gamma", "qk_l2_norm", "apply_residual_connection_post_layernorm", "use_mup",
         "moe_shared_expert_gate", "moe_router_force_load_balancing", "megablocks_uniform_assignment"),
        (False,),
    ),
    **dict.fromkeys(
        ("rotary_seq_len_interpolation_factor", "no_rope_freq", "window_size", "moe_latent_size",
         "moe_mlp_glu_interleave_size", "moe_shared_expert_glu_interleave_size", "moe_router_force_biased"),
        (None,),
    ),
}  # fmt: skip
"""The flags with which a model computes the same as a Hugging Face family. A capacity and token rounding drop tokens in
training; the converted model drops none."""
_MUST_GPT_OSS = _MUST | {
    "swiglu": (False,),
    "quick_geglu": (True,),
    "bias_gelu_fusion": (False,),
    "glu_linear_offset": (1.0,),
    "add_bias_linear": (True,),
    "add_qkv_bias": (False, True),
    "position_embedding_type": ("rope", "yarn"),
    "yarn_beta_fast": (None, 32),
    "yarn_beta_slow": (None, 1),
    "yarn_original_max_position_embeddings": (None, 4096),
    "yarn_correction_range_round_to_int": (False,),
    "window_attn_skip_freq": (2,),
    "softmax_type": ("learnable",),
    "megablocks_layer": ("megatron",),
    "transformer_impl": ("local",),
}
"""The same for a clamped gate."""
_SIZES = {
    "num_layers": "num_layers",
    "hidden_size": "hidden_size",
    "num_heads": "num_attention_heads",
    "expert_width": "moe_ffn_hidden_size",
    "num_experts": "num_experts",
    "top_k": "moe_router_topk",
    "vocab_size": "padded_vocab_size",
    "max_positions": "max_position_embeddings",
}
"""Fields of Model, and Megatron's arguments that hold the same."""
_LATENT_SIZES = {
    "kv_lora_rank": "kv_lora_rank",
    "q_lora_rank": "q_lora_rank",
    "nope_dim": "qk_head_dim",
    "rope_dim": "qk_pos_emb_head_dim",
    "v_dim": "v_head_dim",
}
"""The same with latent attention."""


def model_of(args: argparse.Namespace, where: object) -> Model:
    """The model that a run's flags define. Raises ConfigError, which names the flag, for what no family has."""
    clamp = getattr(args, "activation_func_clamp_value", None)
    must = _MUST if clamp is None else _MUST_GPT_OSS | {"window_size": ((*(args.window_size or (127,))[:1], 0),)}
    for name, allowed in must.items():
        value = getattr(args, name, allowed[0])
        value = value[0] if isinstance(value, list) and len(value) == 1 else value
        if any(one not in allowed for one in (value if isinstance(value, list) else [value])):  # several losses
            raise ConfigError(f"{where}: {name}={value!r}: must be {' or '.join(map(repr, allowed))} to be converted")
    if not args.num_experts:
        raise ConfigError(f"{where}: num_experts={args.num_experts!r}: only models with experts are converted")
    sigmoid, latent = args.moe_router_score_function == "sigmoid", args.multi_latent_attention
    sums_to_one = args.moe_router_topk > 1 if sigmoid else not args.moe_router_pre_softmax
    sums_to_one = sums_to_one or getattr(args, "megablocks_normalize_top_k", None) == 1
    qk_norm = getattr(args, "megablocks_qk_norm", "head") if args.qk_layernorm else None
    if latent and qk_norm != "head":
        raise ConfigError(f"{where}: qk_layernorm={args.qk_layernorm}: must be True with multi_latent_attention")
    names = _SIZES | (_LATENT_SIZES if latent else {})
    more: dict[str, Any] = {field: getattr(args, name) for field, name in names.items()}
    if clamp is not None:
        more |= {"clamp": clamp, "window": args.window_size[0] + 1}
    rope_type = args.rope_type if latent else args.position_embedding_type
    if rope_type is None and args.rotary_scaling_factor != 1:
        rope_type = "yarn"  # Megatron's default with latent attention; with a factor of 1 it is plain
    if latent and rope_type == "rope" and args.rotary_scaling_factor != 1 and args.mscale_all_dim:
        raise ConfigError(f"{where}: mscale_all_dim={args.mscale_all_dim}: must be 0 with rope_type='rope'")
    if rope_type == "yarn":
        more["yarn"] = (float(args.rotary_scaling_factor), float(args.mscale), float(args.mscale_all_dim))
    return Model(
        num_kv_heads=args.num_query_groups if args.group_query_attention else args.num_attention_heads,
        head_dim=args.qk_head_dim + args.qk_pos_emb_head_dim if latent else args.kv_channels,
        rope_theta=float(args.rotary_base),
        norm_eps=args.layernorm_epsilon,
        dense_width=args.ffn_hidden_size,
        dense_layers=tuple(sorted(set(range(args.num_layers)) - {number - 1 for number in moe_layers(args)})),
        qk_norm=None if latent else qk_norm,
        normalize_top_k=sums_to_one,
        tied=not args.untie_embeddings_and_output_weights,
        score_function=args.moe_router_score_function,
        score_bias=args.moe_router_enable_expert_bias,
        top_k_scaling=args.moe_router_topk_scaling_factor or 1.0,
        num_groups=args.moe_router_num_groups,
        group_top_k=args.moe_router_group_topk,
        shared_width=args.moe_shared_expert_intermediate_size or None,
        **more,
    )


def flags_of(model: Model) -> dict[str, Any]:
    """The flags of the driver that define this model, True for one that takes no value.

    Raises ConfigError if Megatron has no flag for something in it.
    """
    if model.rope_theta != int(model.rope_theta):
        refuse("rope_theta", model.rope_theta, "must be a whole number for Megatron")
    flags: dict[str, Any] = _values(model, _SIZES) | {
        "--ffn-hidden-size": model.dense_width or model.expert_width,
        "--position-embedding-type": "rope",
        "--rotary-base": int(model.rope_theta),
        "--normalization": "RMSNorm",
        "--norm-epsilon": model.norm_eps,
        "--hidden-dropout": 0,
        "--attention-dropout": 0,
    }
    if model.dense_layers:
        pattern = ",".join("0" if layer in model.dense_layers else "1" for layer in range(model.num_layers))
        flags["--moe-layer-freq"] = f"[{pattern}]"
    if model.kv_lora_rank is None:
        flags |= {"--num-query-groups": model.num_kv_heads, "--kv-channels": model.head_dim}
        flags["--group-query-attention"] = True
    else:
        if model.q_lora_rank is None:
            refuse("q_lora_rank", None, "must be a number for Megatron, which norms the queries' low rank")
        flags |= _values(model, _LATENT_SIZES) | {"--rope-type": "rope" if model.yarn is None else "yarn"}
        flags |= {"--multi-latent-attention": True, "--qk-layernorm": True}
        if model.hidden_size % model.num_heads:  # Megatron asks for the quotient, but latent attention reads none
            flags["--kv-channels"] = model.head_dim
    if model.yarn is not None:
        flags |= dict(zip(("--rotary-scaling-factor", "--mscale", "--mscale-all-dim"), model.yarn, strict=True))
    if model.clamp is None:
        flags |= {"--swiglu": True, "--disable-bias-linear": True}
    else:  # our experts have no clamp, our attention no window and no sinks
        if model.top_k == 1:  # a single expert's weight: 1 in gpt-oss, its probability in Megatron's layer
            refuse("num_experts_per_tok", 1, "must be > 1 with gpt-oss's router for Megatron")
        flags |= {"--megablocks-layer": "megatron", "--megablocks-attention": "megatron", "--transformer-impl": "local"}
        flags |= {"--activation-func-clamp-value": model.clamp, "--glu-linear-offset": 1, "--softmax-type": "learnable"}
        flags |= {"--window-size": f"{(model.window or 0) - 1},0", "--window-attn-skip-freq": 2}
        flags["--position-embedding-type"] = "rope" if model.yarn is None else "yarn"
        flags["--no-yarn-correction-range-round-to-int"] = True
        flags |= {"--quick-geglu": True, "--no-bias-gelu-fusion": True}  # the fused gate clamps before it adds the bias
    if model.score_function == "sigmoid":
        if model.top_k == 1:
            refuse("num_experts_per_tok", 1, "must be > 1 with a sigmoid router for Megatron")
        flags |= {"--moe-router-score-function": "sigmoid", "--moe-router-topk-scaling-factor": model.top_k_scaling}
    if model.num_groups is not None:
        flags |= {"--moe-router-num-groups": model.num_groups, "--moe-router-group-topk": model.group_top_k}
    if model.score_bias:
        flags["--moe-router-enable-expert-bias"] = True
    if model.shared_width:
        flags["--moe-shared-expert-intermediate-size"] = model.shared_width
    if not model.tied:
        flags["--untie-embeddings-and-output-weights"] = True
    if model.qk_norm is not None:
        flags |= {"--qk-layernorm": True, "--megablocks-qk-norm": model.qk_norm}
    if model.qk_norm == "all":
        flags["--transformer-impl"] = "local"
    if model.score_function == "softmax" and (not model.normalize_top_k or model.top_k == 1):
        flags["--moe-router-pre-softmax"] = True
    if model.normalize_top_k and model.top_k == 1:  # a softmax after top-1 would be 1 without a gradient
        flags["--megablocks-normalize-top-k"] = 1
    return flags


def _values(model: Model, names: Mapping[str, str]) -> dict[str, Any]:
    """The model's fields as flags. names: the flag of each field."""
    return {flag_of(name): getattr(model, field) for field, name in names.items()}


def choose_checkpoint(folder: Path) -> tuple[Path, list[str]]:
    """Choose and verify the checkpoint in a run's folder. Returns the folder of its weights, and warnings.

    Raises CheckpointError if no checkpoint is complete, or a file differs from what was saved.
    """
    release = folder / atomic.RELEASE
    warnings: list[str] = []
    if (folder / ".metadata").is_file():
        chosen = folder
    elif (release / ".metadata").is_file() and not atomic.iterations(folder):
        chosen = release
    else:
        latest = atomic.find_latest_complete(folder)
        if latest.iteration is None:
            raise atomic.CheckpointError(f"{folder}: holds no complete checkpoint")
        chosen, warnings = atomic.folder_of(folder, latest.iteration), latest.warnings
    atomic.verify(chosen)
    return chosen, warnings


class Checkpoint:
    """The weights of a distributed checkpoint. Its other contents (optimizer, random states) are not read.

    args: the flags of the run. per_layer: as in `rules_of`. Raises CheckpointError if a file cannot be read, or the
    checkpoint holds no flags.
    """

    def __init__(self, folder: Path) -> None:
        checkpoint_io.restrict_unpickling()
        self.folder = folder
        args = checkpoint_io.saved_args(folder)
        if args is None:
            raise atomic.CheckpointError(f"{folder}: holds no flags of a run, so the sizes of its model are unknown")
        self.args = args
        self._reader = FileSystemReader(folder)
        metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(metadata, is_coordinator=True)
        self._tensors = {
            name: found
            for name, found in metadata.state_dict_metadata.items()
            if isinstance(found, TensorStorageMetadata) and not name.startswith("optimizer.")
        }
        self.per_layer = any(name.startswith("decoder.layers.0.") for name in self._tensors)
        self._last: tuple[tuple[str, int | None], Tensor] | None = None

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(found.size) for name, found in self._tensors.items()}

    def dtype(self, name: str) -> torch.dtype:
        return self._tensors[name].properties.dtype

    def read_block(self, stored: Stored, block: Block) -> Tensor:
        """Read a block. A run saves all experts of a layer together, so they are read together and kept."""
        layer = block.at[0] if block.at and not self.per_layer else None
        key = (stored.name, layer)
        if self._last is None or self._last[0] != key:
            self._last = None  # before the next one is read
            self._last = key, self._read(stored.name, layer)
        return self._last[1][block.at if layer is None else block.at[1:]]

    def _read(self, name: str, layer: int | None) -> Tensor:
        """A tensor of the checkpoint; with `layer`, that layer's part of one that holds all layers."""
        size = tuple(self._tensors[name].size)
        first = (0,) * len(size) if layer is None else (layer, *(0,) * (len(size) - 1))
        lengths = size if layer is None else (1, *size[1:])
        target = torch.empty(lengths, dtype=self.dtype(name))
        chunk = ChunkStorageMetadata(torch.Size(first), torch.Size(lengths))
        items = create_read_items_for_chunk_list(name, self._tensors[name], [chunk])
        if sum(item.lengths.numel() for item in items) != target.numel():
            raise atomic.CheckpointError(f"{self.folder}: {name}: the files hold only a part of it")
        try:
            self._reader.read_data(LoadPlan(items), _Into(target)).wait()
        except Exception as error:  # torch.load raises many kinds
            raise atomic.CheckpointError(f"{self.folder}: {name} cannot be read: {line_of(error)}") from error
        return target if layer is None else target[0]


class _Into(DefaultLoadPlanner):
    """Lets the reader write into a tensor."""

    def __init__(self, target: Tensor) -> None:
        super().__init__()
        self.target = target

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.target


class _FromUnits(DefaultSavePlanner):
    """Lets the writer request one block at a time."""

    def __init__(self, read: Callable[[MetadataIndex], Tensor], objects: Mapping[str, Any]) -> None:
        super().__init__()
        self.read, self.objects = read, objects

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        if write_item.type is not WriteItemType.BYTE_IO:
            return self.read(write_item.index)
        data = io.BytesIO()
        torch.save([self.objects[write_item.index.fqn]], data)
        return data


def write(
    journal: Journal,
    units: Units,
    layout: Mapping[str, Stored],
    said: Callable[[int], None],
    skipped: Callable[[int], None],
) -> None:
    """Write a checkpoint from which `--load` of the journal's folder starts at iteration 0, and the driver's flags.

    Args:
        journal: files that it lists as finished are kept. layout: of Megatron's tensors.
        said: called with the size in bytes of each written block. skipped: called with that of each kept file.
    """
    folder = journal.folder
    lines = [flag if value is True else f"{flag} {value}" for flag, value in flags_of(units.model).items()]
    run = f"--seq-length {units.model.max_positions} --micro-batch-size 1 --tokenizer-type NullTokenizer"
    args = planned.parse(" ".join([*lines, run]).split(), 1)
    args.padded_vocab_size = units.model.vocab_size
    release = folder / atomic.RELEASE
    release.mkdir(exist_ok=True)
    common = {"args": args, "checkpoint_version": 3.0, "iteration": 0, "content_metadata": {}}
    objects = {_object_key("common_state"): common, **_extra_states(layout)}
    plans, where = _plans(units, layout)
    plans.append(SavePlan([WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO) for name in objects]))
    plans, metadata = create_default_global_save_plan(plans)

    def read(index: MetadataIndex) -> Tensor:
        stored, block = where[index.fqn, tuple(index.offset or ())]
        tensor = units.block(stored, block).contiguous()
        said(tensor.nbytes)
        return tensor.view((1,) * len(block.at) + tuple(tensor.shape))

    planner = _FromUnits(read, objects)
    writer = FileSystemWriter(release, per_thread_copy_ahead=0)
    writer.set_up_storage_writer(True)

    def written(plan: SavePlan) -> list[WriteResult]:
        """Write the plan's file. Returns where its blocks are. A note: name, offset, first byte, length, bytes."""
        name = f"{atomic.RELEASE}/{plan.storage_data.prefix}0.distcp"
        if (notes := journal.finished(name)) is not None:
            skipped(sum(note[-1] for note in notes))
            return [
                WriteResult(MetadataIndex(fqn, offset), size, _StorageInfo(Path(name).name, start, length))
                for fqn, offset, start, length, size in notes
            ]
        # The writer keeps the last block of each of a file's tensors until the file is complete.
        found: list[WriteResult] = writer.write_data(plan, planner).value()
        places = [(one.index, one.storage_data, one.size_in_bytes) for one in found]
        journal.finish(name, [(i.fqn, i.offset, at.offset, at.length, size) for i, at, size in places])
        return found

    done = [written(plan) for plan in writer.prepare_global_plan(plans)]  # a file each
    writer.finish(metadata, done)
    (release / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))
    files = {name: journal.hash_of(f"{atomic.RELEASE}/{name}") for name in atomic.files_of(release)}
    atomic.mark_complete(release, 0, files)
    (folder / atomic.POINTER).write_text(atomic.RELEASE)
    (folder / "flags.txt").write_text("\n".join(lines) + "\n")


def _object_key(name: str, number: tuple[int, ...] = (0,), numbers: tuple[int, ...] = (1,)) -> str:
    return ShardedObject(name, None, numbers, number).unique_key


def _extra_states(layout: Mapping[str, Stored]) -> dict[str, None]:
    """The empty objects that Megatron expects with the weight of each linear layer."""
    return {
        _object_key(f"{stored.name.removesuffix('weight')}_extra_state", block.at or (0,), stored.numbers or (1,)): None
        for stored in layout.values()
        for block in stored.blocks
        if re.search(r"\.linear_\w+\.weight$", stored.name)
    }


def _plans(units: Units, layout: Mapping[str, Stored]) -> tuple[list[SavePlan], dict[Any, tuple[Stored, Block]]]:
    """A save plan for each layer and one for the tensors outside the layers; and the block at each offset."""
    items: dict[str, list[WriteItem]] = {}
    where = {}
    for name, stored in layout.items():
        properties = TensorProperties(dtype=units.dtype_of(stored))
        for block in stored.blocks:
            offset = (*block.at, *(0,) * len(stored.block_shape))
            sizes = (*(1 for _ in block.at), *stored.block_shape)
            chunk = ChunkStorageMetadata(torch.Size(offset), torch.Size(sizes))
            data = TensorWriteData(chunk, properties, torch.Size(stored.shape))
            item = WriteItem(MetadataIndex(name, torch.Size(offset)), WriteItemType.SHARD, tensor_data=data)
            number = block.units[0].split(".")[2] if block.units[0].startswith("model.layers.") else ""
            items.setdefault(number, []).append(item)
            where[name, offset] = stored, block
    return [SavePlan(found) for found in items.values()], where
