"""The input of `plan`: a model, its layout over GPUs and its batch.

Names, meanings and defaults equal those of the driver's arguments (Megatron's and `--megablocks-*`), so that a driver's
command line and `plan`'s own flags fill the same fields.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from megablocks.config import QUANTIZE_NUM_BITS, ConfigError, MoEConfig, check_width, refuse
from megablocks.kinds import DISPATCHER_CHOICES, MLP_IMPLS
from megablocks.megatron.settings import PREFIX, check_heads, check_options, flag_of, option
from megablocks.monitor.flops import GPTShape, memory_gib

VOCABULARY = 50257
"""The vocabulary of GPT-2, if none is given."""
HOST_GPUS = 8  # GPUs of a host, connected by NVLink
_UNEQUAL = "stages of unequal numbers of layers are not counted"
_NOT_PLANNED = {
    "spec": "the layers of a spec are not known",
    "multi_latent_attention": "latent attention has other products and saves other tensors than those that are counted",
    "mtp_num_layers": "the layers of multi-token prediction are not counted",
    "attention_output_gate": "the gate of attention's output is not counted",
    "use_checkpoint_args": "the sizes of a checkpoint are not read; give them as flags",
    "decoder_first_pipeline_num_layers": _UNEQUAL,
    "decoder_last_pipeline_num_layers": _UNEQUAL,
    "account_for_embedding_in_pipeline_split": _UNEQUAL,
    "account_for_loss_in_pipeline_split": _UNEQUAL,
    "pipeline_model_parallel_layout": _UNEQUAL,
    "use_precision_aware_optimizer": "its states have other dtypes than those that are counted",
    "optimizer_cpu_offload": "states in the host's memory are not counted",
    "cpu_offloading_num_layers": "activations in the host's memory are not counted",
    "fine_grained_activation_offloading": "activations in the host's memory are not counted",
}
"""Flags of the driver that the plan does not count, so it refuses them."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """A planned training run. `__post_init__` fills fields that are unset, which means None."""

    num_layers: int = option(..., "Transformer layers")
    hidden_size: int = option(..., "H")
    num_attention_heads: int = option(..., "attention heads")
    seq_length: int = option(..., "tokens of a sequence")
    micro_batch_size: int = option(..., "sequences of a micro-batch on a data-parallel rank")
    global_batch_size: int = option(None, "sequences of a step; unset: one micro-batch on each rank")
    vocab_size: int = option(VOCABULARY, "rows of the embedding, padding included")
    kv_channels: int = option(None, "width of a head; unset: H / heads")
    num_query_groups: int = option(None, "heads of keys and values; unset: as many as attention heads")
    ffn_hidden_size: int = option(None, "width of dense layers; unset: 4·H, gated 8/3·H")
    num_experts: int = option(0, "experts of a layer; 0: a dense model", least=0)
    moe_router_topk: int = option(1, "experts of a token")
    moe_ffn_hidden_size: int = option(None, "width of an expert; unset: as dense layers")
    moe_shared_expert_intermediate_size: int = option(0, "width of the shared expert; 0: none", least=0)
    num_moe_layers: int = option(None, "layers with experts; unset: all of a model with experts", least=0)
    swiglu: bool = option(False, "gated activation: two up-projections")
    normalization: str = option("LayerNorm", "kind of norm", ("LayerNorm", "RMSNorm"))
    position_embedding_type: str = option(
        "learned_absolute", "positions", ("learned_absolute", "rope", "none", "yarn", "mrope", "relative")
    )
    add_bias_linear: bool = option(False, "biases in dense products")
    qk_layernorm: bool = option(False, "norms of queries and keys")
    qk_norm: str = option("head", "what they normalize: each head, or all heads of a token together", ("head", "all"))
    untie_embeddings_and_output_weights: bool = option(False, "a separate weight for the output layer")
    hidden_dropout: float = option(0.1, "dropout after attention and MLP; its masks take memory", most=1)
    attention_dropout: float = option(0.1, "dropout of attention weights; its random numbers take time", most=1)
    bf16: bool = option(True, "16-bit weights and activations (float16 counts the same); off: all float32")
    tensor_model_parallel_size: int = option(1, "TP")
    pipeline_model_parallel_size: int = option(1, "PP")
    expert_model_parallel_size: int = option(1, "EP")
    expert_tensor_parallel_size: int = option(None, "TP of experts; unset: as TP")
    context_parallel_size: int = option(1, "CP")
    sequence_parallel: bool = option(False, "norms and dropout on a part of the sequence for each TP rank")
    use_distributed_optimizer: bool = option(False, "optimizer state is spread over the data-parallel ranks")
    recompute_granularity: str | None = option(None, "full: keep only each layer's input", ("selective", "full"))
    mlp_impl: str = option("auto", "how the experts are computed", MLP_IMPLS)
    recompute_activation: bool = option(False, "recompute the experts' activation in backward")
    quantize_rematerialize_num_bits: int = option(-1, "bits of the saved pre-activations", QUANTIZE_NUM_BITS)
    dispatcher: str = option("auto", "how rows reach the experts of other ranks", DISPATCHER_CHOICES)
    dispatch_rows_factor: float = option(2.0, "rows that symmetric has room for, as a multiple of an even load's")
    fused_loss: bool = option(True, "projection and loss in one op, without float32 logits")
    fused_loss_kept_gib: float | None = option(
        None, "GiB of logits that it keeps for backward; unset: a tenth of the GPU's memory"
    )
    cuda_graph_impl: str = option(
        "none", "full_iteration: a step is one CUDA graph, so the host does not limit it", ("none", "full_iteration")
    )
    gpus: int = option(1, "GPUs of the run")
    gpu: str = option("NVIDIA H200", "name of the GPU, as in torch")

    def __post_init__(self) -> None:
        check_options(Model, vars(self))
        if not self.gpu.strip():
            refuse("gpu", self.gpu, f"must be a GPU's name, such as {Model.gpu!r}")
        if self.num_experts and self.moe_router_topk > self.num_experts:
            refuse("moe_router_topk", self.moe_router_topk, f"must be 1 to num_experts={self.num_experts}")
        if self.mlp_impl == "reference":
            refuse("mlp_impl", "reference", "is for tests; nothing is known about its time")
        width, capacity = 4 * self.hidden_size, memory_gib(self.gpu)
        check_heads(self, self.num_query_groups)
        self._fill("kv_channels", self.hidden_size // self.num_attention_heads)
        self._fill("num_query_groups", self.num_attention_heads)
        self._fill("ffn_hidden_size", width * 2 // 3 // 64 * 64 if self.swiglu else width)
        self._fill("moe_ffn_hidden_size", self.ffn_hidden_size)
        self._fill("num_moe_layers", self.num_layers if self.num_experts else 0)
        self._fill("expert_tensor_parallel_size", self.tensor_model_parallel_size)
        self._fill("fused_loss_kept_gib", None if capacity is None else capacity / 10)
        check_options(Model, vars(self))  # again: a width that was filled in can be 0
        self._check_layout()
        if self.num_experts:
            self._check_experts()
        share = self.micro_batch_size * self.data_parallel_size
        self._fill("global_batch_size", share)
        if self.global_batch_size % share:
            ranks = f"times the {self.data_parallel_size} data-parallel ranks"
            allowed = f"must be a multiple of micro_batch_size={self.micro_batch_size} {ranks}"
            refuse("global_batch_size", self.global_batch_size, allowed)

    def _fill(self, name: str, value: Any) -> None:
        if getattr(self, name) is None:
            object.__setattr__(self, name, value)

    def _check_experts(self) -> None:
        """Raise the errors that the layer would raise."""
        check_width(self.mlp_impl, self.moe_ffn_hidden_size, self.etp, "moe_ffn_hidden_size")
        MoEConfig(
            hidden_size=self.hidden_size,
            ffn_hidden_size=self.moe_ffn_hidden_size,
            num_experts=self.num_experts,
            top_k=self.moe_router_topk,
            mlp_impl=self.mlp_impl,
            recompute_activation=self.recompute_activation,
            quantize_rematerialize_num_bits=self.quantize_rematerialize_num_bits,
            dispatch_rows_factor=self.dispatch_rows_factor,
        )

    def _check_layout(self) -> None:
        heads, shards = self.num_attention_heads, self.tensor_model_parallel_size
        if heads % shards:
            refuse("tensor_model_parallel_size", shards, f"must divide num_attention_heads={heads}")
        if self.qk_norm == "all" and not (self.qk_layernorm and shards == 1):
            refuse("qk_norm", "all", f"needs qk_layernorm=True and TP 1, not {self.qk_layernorm} and {shards}")
        ranks = self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size
        if self.gpus % ranks:
            refuse("gpus", self.gpus, f"must be a multiple of TP · PP · CP = {ranks}")
        name, most = ("num_layers", self.num_layers) if self.num_experts else ("num_experts", 0)
        if self.num_moe_layers > most:
            refuse("num_moe_layers", self.num_moe_layers, f"must be <= {most}, for {name}={most}")
        spread = max(self.expert_model_parallel_size, self.etp) > 1
        if self.captured and (ranks > 1 or self.recompute_granularity or (spread and not self.symmetric)):
            # the rules of megablocks.megatron.cuda_graph
            allowed = "needs TP, PP and CP of 1, no recompute_granularity, and dispatcher='symmetric' for several ranks"
            refuse("cuda_graph_impl", self.cuda_graph_impl, allowed)
        stages = self.pipeline_model_parallel_size
        if self.num_layers % stages:
            refuse("pipeline_model_parallel_size", stages, f"must divide num_layers={self.num_layers}")
        ranks = self.expert_model_parallel_size * self.etp * self.pipeline_model_parallel_size
        if self.gpus % ranks or self.num_experts % self.expert_model_parallel_size:
            product = f"EP · expert TP · PP = {ranks} must divide gpus={self.gpus}"
            allowed = f"must divide num_experts={self.num_experts}, and {product}"
            refuse("expert_model_parallel_size", self.expert_model_parallel_size, allowed)

    @property
    def kept_logits(self) -> float:
        """Bytes of logits that the fused loss keeps at most; infinite (all logits) if the GPU's memory is unknown."""
        return math.inf if self.fused_loss_kept_gib is None else self.fused_loss_kept_gib * 2**30

    @property
    def etp(self) -> int:
        """Ranks over which each expert's width is split."""
        return self.expert_tensor_parallel_size

    @property
    def data_parallel_size(self) -> int:
        """Ranks that hold the same part of the dense layers."""
        model = self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size
        return self.gpus // model

    @property
    def expert_data_parallel_size(self) -> int:
        """Ranks that hold the same experts."""
        return self.gpus // (self.expert_model_parallel_size * self.etp * self.pipeline_model_parallel_size)

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a rank in a step."""
        return self.global_batch_size // (self.micro_batch_size * self.data_parallel_size)

    @property
    def symmetric(self) -> bool:
        """Whether experts exchange rows through symmetric memory, by the rule of `megablocks.moe.dispatchers`."""
        ep = self.expert_model_parallel_size
        if ep * self.etp > HOST_GPUS or ep == 1 or self.etp > 1 or self.dispatcher == "all_to_all":
            return False
        return self.dispatcher == "symmetric" or self.dispatch_rows_factor >= ep

    @property
    def captured(self) -> bool:
        """Whether a step is a CUDA graph."""
        return self.cuda_graph_impl != "none"

    @property
    def measured_layout(self) -> bool:
        """Whether steps with this layout were measured: one GPU, or two with data or expert parallelism."""
        return self.gpus == self.data_parallel_size <= 2 and self.etp == 1

    @property
    def tokens(self) -> int:
        """Tokens of a step, over all ranks."""
        return self.global_batch_size * self.seq_length

    @property
    def element_bytes(self) -> int:
        return 2 if self.bf16 else 4

    @property
    def shape(self) -> GPTShape:
        """The sizes that determine the model's FLOPs."""
        return GPTShape.of(self, gated=self.swiglu, mtp_num_layers=0, attention_output_gate=False)

    @property
    def impl(self) -> str:
        """mlp_impl, or what "auto" means on this GPU, chosen as in the layer."""
        if self.mlp_impl != "auto":
            return self.mlp_impl
        import torch

        from megablocks.moe.impls import choose_impl

        return choose_impl(
            on_hopper=any(name in self.gpu for name in ("H100", "H200", "H800", "H20")),
            dtype=torch.bfloat16 if self.bf16 else torch.float32,
            saves_less=self.recompute_activation or self.quantize_rematerialize_num_bits != -1,
            num_experts=self.num_experts // self.expert_model_parallel_size,
            hidden_size=self.hidden_size,
            ffn_hidden_size=self.moe_ffn_hidden_size // self.etp,
        )


def from_flags(options: argparse.Namespace) -> Model:
    """Create a model from plan's own flags. Raises ConfigError for a flag that is missing or wrong."""
    given = {f.name: getattr(options, f.name) for f in dataclasses.fields(Model)}
    for one in dataclasses.fields(Model):
        if one.default is dataclasses.MISSING and given[one.name] is None:
            raise ConfigError(f"{flag_of(one.name)} is missing; give it, or the driver's flags after --")
    return Model(**{name: value for name, value in given.items() if value is not None})


def from_driver(args: argparse.Namespace, gpu: str) -> Model:
    """Create a model from the validated arguments of a driver's command line.

    Raises ConfigError for a layer that is not ours, a layer with a capacity, or a part that no formula here counts.
    """
    from megablocks.megatron.reporting import moe_layers

    for name, why in _NOT_PLANNED.items():
        if getattr(args, name):
            refuse(name, getattr(args, name), f"is not planned, leave it out; {why}")
    if args.optimizer != "adam":
        refuse("optimizer", args.optimizer, "must be 'adam'; no other optimizer's state is counted")
    if args.recompute_granularity == "full" and args.recompute_method != "uniform":
        allowed = "must be 'uniform'; only a recomputation of all layers is counted"
        refuse("recompute_method", args.recompute_method, allowed)
    if args.recompute_granularity == "full" and args.recompute_num_layers != 1:
        refuse("recompute_num_layers", args.recompute_num_layers, "must be 1; only single layers' inputs are counted")
    layer, factor = args.megablocks_layer, args.megablocks_capacity_factor
    if args.num_experts and (layer not in ("megablocks", "experts") or factor is not None):
        name, value = ("layer", layer) if factor is None else ("capacity_factor", factor)
        refuse(PREFIX + name, value, "must be left out; plan knows only our dropless layers")
    values: dict[str, Any] = {}
    for one in dataclasses.fields(Model):
        dest = one.name if hasattr(args, one.name) else PREFIX + one.name
        if getattr(args, dest, None) is not None:
            values[one.name] = getattr(args, dest)
    check_options(Model, values)
    if not args.group_query_attention:
        values.pop("num_query_groups", None)
    multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
    words = args.padded_vocab_size or math.ceil((args.vocab_size or VOCABULARY) / multiple) * multiple
    values |= {
        "gpu": gpu,
        "gpus": args.world_size,
        "vocab_size": words,
        "bf16": args.bf16 or args.fp16,
        "swiglu": args.swiglu or args.quick_geglu,
        "num_moe_layers": len(moe_layers(args)),
    }
    return Model(**values)
