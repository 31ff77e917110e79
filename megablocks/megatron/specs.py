"""Layer specs: Megatron's GPT block with our mixture-of-experts layer, and our attention and norms where needed.

`block_spec` is a callable for `GPTModelConfig.transformer_layer_spec` and for Megatron-LM's own
`--spec megablocks.megatron.specs block_spec`. Importing this module makes a machine without CUDA usable (see `cpu`).
"""

from __future__ import annotations

import copy
import functools
from typing import Any

from megablocks.megatron import cpu

cpu.install()
cpu.skip_compile_helpers()

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec  # noqa: E402
from megatron.core.transformer.dot_product_attention import DotProductAttention  # noqa: E402
from megatron.core.transformer.moe.moe_layer import MoELayer  # noqa: E402
from megatron.core.transformer.torch_norm import WrappedTorchNorm  # noqa: E402
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules  # noqa: E402

from megablocks.megatron import attention  # noqa: E402
from megablocks.megatron.attention import SDPAttention  # noqa: E402
from megablocks.megatron.norm import Norm  # noqa: E402
from megablocks.megatron.settings import MegaBlocksSettings, settings_of  # noqa: E402


def block_spec(config: Any, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """The specs of the layers that this pipeline stage builds; dense layers and dense models included.

    Args:
        config: a TransformerConfig, or a GPTModelConfig that holds one as `transformer`.
        vp_stage: the virtual pipeline stage, None without virtual pipeline.
    """
    config = getattr(config, "transformer", config)
    settings = settings_of(config)
    block = get_gpt_decoder_block_spec(
        config,
        use_transformer_engine=config.transformer_impl == "transformer_engine",
        normalization=config.normalization,
        qk_l2_norm=config.qk_l2_norm,
        vp_stage=vp_stage,
    )
    replaced: dict[int, Any] = {}  # layers of one kind share one spec object
    layers = []
    for layer in block.layer_specs:
        if id(layer) not in replaced:
            replaced[id(layer)] = _our_layer(layer, config, settings)
        layers.append(replaced[id(layer)])
    norm = Norm if block.layer_norm is WrappedTorchNorm else block.layer_norm
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=norm)


def _our_layer(layer: Any, config: Any, settings: MegaBlocksSettings) -> Any:
    layer = copy.copy(layer)
    layer.submodules = parts = copy.copy(layer.submodules)
    for name in ("input_layernorm", "pre_cross_attn_layernorm", "pre_mlp_layernorm"):
        if getattr(parts, name) is WrappedTorchNorm:
            setattr(parts, name, Norm)
    parts.self_attention = copy.copy(parts.self_attention)
    heads = parts.self_attention.submodules = copy.copy(parts.self_attention.submodules)
    for name in ("q_layernorm", "k_layernorm", "kv_layernorm"):
        if getattr(heads, name, None) is WrappedTorchNorm:
            setattr(heads, name, Norm)
    if heads.core_attention is DotProductAttention and settings.attention == "sdpa" and attention.supports(config):
        heads.core_attention = SDPAttention
    if isinstance(parts.mlp, functools.partial) and parts.mlp.func is MoELayer:
        parts.mlp = _moe_layer(parts.mlp, settings)
    return layer


def _moe_layer(megatron_layer: functools.partial, settings: MegaBlocksSettings) -> Any:
    return megatron_layer
