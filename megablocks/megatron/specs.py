"""Layer specs: Megatron's GPT block with our mixture-of-experts layer, and our attention and norms where needed.

`block_spec` is a callable for `GPTModelConfig.transformer_layer_spec` and for Megatron-LM's own
`--spec megablocks.megatron.specs block_spec`. `moe_layer_spec` and `dense_layer_spec` are ready objects for a model
whose layers are all alike and that has no Transformer Engine, no sequence parallelism and LayerNorm at its end.

Importing this module makes a machine without CUDA usable (see `cpu`).
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib.util
import logging
import os
from typing import Any

import torch
from packaging.version import Version

from megablocks.megatron import cpu

cpu.install()  # before Megatron imports Transformer Engine
import megatron.core  # noqa: E402

if Version(megatron.core.__version__).public != cpu.TESTED_MEGATRON and os.environ.get("RANK", "0") == "0":
    logging.getLogger(__name__).warning(
        "megatron-core %s in %s: untested, our layers are tested with %s; a checkout's own megatron/ hides the package",
        megatron.core.__version__, os.path.dirname(megatron.core.__file__), cpu.TESTED_MEGATRON,
    )  # fmt: skip

from megablocks.megatron import optimizer_state  # noqa: E402

optimizer_state.install()

from megatron.core.extensions.transformer_engine import HAVE_TE  # noqa: E402
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import (  # noqa: E402
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
)
from megatron.core.tensor_parallel import ColumnParallelLinear  # noqa: E402
from megatron.core.transformer.dot_product_attention import DotProductAttention  # noqa: E402
from megatron.core.transformer.identity_op import IdentityOp  # noqa: E402
from megatron.core.transformer.moe.moe_layer import MoELayer  # noqa: E402
from megatron.core.transformer.torch_norm import L2Norm, WrappedTorchNorm  # noqa: E402
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402
from megatron.core.utils import log_single_rank  # noqa: E402

from megablocks.config import refuse  # noqa: E402
from megablocks.megatron import add_norm, attention, engine, rope  # noqa: E402
from megablocks.megatron.add_norm import AddNorm  # noqa: E402
from megablocks.megatron.attention import SDPAttention  # noqa: E402
from megablocks.megatron.linear import BiasInProduct  # noqa: E402
from megablocks.megatron.local_experts import MegaBlocksExperts  # noqa: E402
from megablocks.megatron.model_config import OWN_EXCHANGE, check_engine  # noqa: E402
from megablocks.megatron.moe_layer import MegaBlocksMoELayer  # noqa: E402
from megablocks.megatron.norm import AllHeadsNorm, Norm  # noqa: E402
from megablocks.megatron.settings import MegaBlocksSettings, settings_of  # noqa: E402
from megablocks.megatron.topk_router import CountingTopKRouter, MegaBlocksRouter  # noqa: E402


def block_spec(config: Any, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """The specs of the layers that this pipeline stage builds; dense layers and dense models included.

    Args:
        config: a TransformerConfig, or a GPTModelConfig that holds one as `transformer`.
        vp_stage: the virtual pipeline stage, None without virtual pipeline.
    """
    config = getattr(config, "transformer", config)
    settings = settings_of(config)
    check_engine(config)
    with_engine = config.transformer_impl == "transformer_engine" and HAVE_TE
    if settings.rope == "fused" and torch.cuda.is_available():
        rope.install()
    if settings.norm == "fused" and torch.cuda.is_available():
        add_norm.install()
    block = get_gpt_decoder_block_spec(
        config,
        use_transformer_engine=with_engine,
        normalization=config.normalization,
        qk_l2_norm=config.qk_l2_norm,
        vp_stage=vp_stage,
    )
    if config.num_moe_experts is not None and settings.layer in ("megablocks", "tutel"):
        if config.moe_token_dispatcher_type == "allgather":  # the default of Megatron's config, so it cannot be refused
            _log(f"moe_token_dispatcher_type='allgather' is not read: {OWN_EXCHANGE}", logging.WARNING)
    kinds = {id(layer): layer for layer in block.layer_specs}  # layers of one kind share one spec object
    ours = {kind: _our_layer(layer, config, settings) for kind, layer in kinds.items()}
    norm = Norm if block.layer_norm is WrappedTorchNorm else block.layer_norm
    if with_engine:
        norm = engine.without_extra_state(norm)
        if config.gradient_accumulation_fusion:
            engine.accumulate_without_apex()
    return TransformerBlockSubmodules(layer_specs=[ours[id(layer)] for layer in block.layer_specs], layer_norm=norm)


def _our_layer(layer: Any, config: Any, settings: MegaBlocksSettings) -> Any:
    """A copy of Megatron's layer spec, with our parts instead of its own where they are supported."""
    layer = copy.copy(layer)
    layer.submodules = parts = copy.copy(layer.submodules)
    parts.self_attention = copy.copy(parts.self_attention)
    heads = parts.self_attention.submodules = copy.copy(parts.self_attention.submodules)
    for owner, name in _norms(parts):
        if getattr(owner, name) is WrappedTorchNorm:
            setattr(owner, name, Norm)
    for name in ("self_attn_bda", "mlp_bda"):
        if settings.norm == "fused" and getattr(parts, name) is get_bias_dropout_add:
            setattr(parts, name, AddNorm)
    if settings.qk_norm == "all":
        if not config.qk_layernorm or config.multi_latent_attention:
            rule = "needs --qk-layernorm, and must be 'head' with --multi-latent-attention"
            refuse("megablocks_qk_norm", "all", rule)
        if heads.q_layernorm is not Norm:
            refuse("megablocks_qk_norm", "all", "must be 'head' with Transformer Engine, or --transformer-impl local")
        heads.q_layernorm = functools.partial(AllHeadsNorm, of_keys=False)
        heads.k_layernorm = functools.partial(AllHeadsNorm, of_keys=True)
    if heads.core_attention is DotProductAttention and settings.attention == "sdpa" and attention.supports(config):
        heads.core_attention = SDPAttention
    if settings.qkv_bias == "fused" and torch.cuda.is_available():
        if getattr(heads, "linear_qkv", None) is ColumnParallelLinear:
            heads.linear_qkv = BiasInProduct
    if isinstance(parts.mlp, functools.partial) and parts.mlp.func is MoELayer:
        parts.mlp = _moe_layer(parts.mlp, settings)
    if config.transformer_impl == "transformer_engine" and HAVE_TE:
        _save_as_local(parts, settings, config.multi_latent_attention)
    return layer


def _norms(parts: Any) -> list[tuple[Any, str]]:
    """The modules of a layer and of its attention that may be norms, each as its owner and name."""
    owners = (parts, parts.self_attention.submodules)
    return [(owner, field) for owner in owners for field in vars(owner) if field.endswith("layernorm")]


def _save_as_local(parts: Any, settings: MegaBlocksSettings, multi_latent: bool) -> None:
    """Let a layer of Transformer Engine save the same tensors, by the same names, as Megatron's layer without it.

    A block around Megatron's own expert layer keeps the names that Megatron uses with Transformer Engine.
    """
    for owner, name in _norms(parts):
        if getattr(owner, name) not in (None, IdentityOp, L2Norm):
            setattr(owner, name, engine.without_extra_state(getattr(owner, name)))
    if settings.layer != "megatron":
        names = _LATENT_NAMES if multi_latent else {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}
        parts.sharded_state_dict_keys_map = {**parts.sharded_state_dict_keys_map, **names}


_LATENT_NAMES = {
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
    "self_attention.linear_q_up_proj.layer_norm_": "self_attention.q_layernorm.",
    "self_attention.linear_kv_up_proj.layer_norm_": "self_attention.kv_layernorm.",
}
"""Norms inside Transformer Engine's linear layers, and the modules that latent attention has for them without it."""


def _moe_layer(megatron_layer: functools.partial, settings: MegaBlocksSettings) -> Any:
    """The builder of the mixture-of-experts layer that `settings.layer` names, made from Megatron's builder."""
    parts = megatron_layer.keywords["submodules"]
    layer = settings.layer
    if layer == "tutel" and importlib.util.find_spec("tutel") is not None:
        from megablocks.megatron.tutel_layer import TutelMoELayer

        _log("mixture-of-experts layer: Tutel's own")
        return functools.partial(TutelMoELayer, submodules=parts)
    if layer == "tutel":
        _log("mixture-of-experts layer: ours with Tutel's capacity rule, because the package tutel is not installed")
        layer = "megablocks"
    if layer == "megablocks":
        parts = dataclasses.replace(parts, router=MegaBlocksRouter, experts=MegaBlocksExperts)
        return functools.partial(MegaBlocksMoELayer, submodules=parts)
    if layer == "experts":
        parts = dataclasses.replace(parts, experts=MegaBlocksExperts)
    return functools.partial(MoELayer, submodules=dataclasses.replace(parts, router=CountingTopKRouter))


def _log(message: str, level: int = logging.INFO) -> None:
    log_single_rank(logging.getLogger(__name__), level, message)


_PLAIN = TransformerConfig(num_layers=1, hidden_size=1, num_attention_heads=1, transformer_impl="local")


def _ready_layer(num_experts: int | None) -> Any:
    """The spec of a layer with our parts at their default settings."""
    layer = get_gpt_layer_local_spec(num_experts=num_experts)
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = WrappedTorchNorm  # apex's has no RMSNorm
    return _our_layer(layer, _PLAIN, MegaBlocksSettings())


moe_layer_spec = _ready_layer(num_experts=1)  # Megatron checks only whether there are any; the config has their number
dense_layer_spec = _ready_layer(num_experts=None)
