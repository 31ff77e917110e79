"""Megatron's TransformerConfig → our MoEConfig, and the checks of values that our layer refuses.

Every refusal is one line that names the field, its value and what is allowed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.activations import fast_gelu, squared_relu
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.transformer.transformer_config import TransformerConfig

from megablocks.config import MoEConfig, check_width, refuse
from megablocks.kinds import QUANTIZED
from megablocks.megatron.settings import MegaBlocksSettings, settings_of
from megablocks.ops.activation_table import Activation

Table = dict[str, tuple[tuple[Any, ...], str]]
"""Fields: the allowed values, and why no other value is allowed."""
_OF_ENGINE = "or use Megatron's own layer (--megablocks-layer megatron) with Transformer Engine"
_OF_MEGATRON = "or use Megatron's own layer (--megablocks-layer megatron)"
_SPLITS = "the all-to-all's split sizes change every step"
_UNSUPPORTED: Table = {
    "fp8": ((None,), "the expert layer computes in bf16, fp16 or fp32"),
    "fp4": ((None,), "the expert layer computes in bf16, fp16 or fp32"),
    "moe_latent_size": ((None,), f"the experts have the model's width, {_OF_MEGATRON}"),
    "moe_shared_expert_overlap": ((False,), "the shared expert runs before the dispatch"),
    "overlap_moe_expert_parallel_comm": ((False,), f"it calls Megatron's layer stage by stage, {_OF_ENGINE}"),
    "ep_overlap_early_attn_memory_release": ((False,), "needs overlap_moe_expert_parallel_comm"),
    "overlap_dispatch_backward_with_experts_wgrad": ((False,), f"backward computes both together, {_OF_ENGINE}"),
    "delay_wgrad_compute": ((False,), f"the experts' backward computes all gradients, {_OF_ENGINE}"),
    "high_priority_a2a_comm_stream": ((False,), "the all-to-all runs in the stream of the layer"),
    "moe_pad_expert_input_to_capacity": (
        (False,),
        "the layer pads with --megablocks-pad-to-capacity and --megablocks-capacity-factor",
    ),
    "moe_pad_experts_for_cuda_graph_inference": ((False,), _SPLITS),
    "moe_expert_rank_capacity_factor": ((None,), "needs Megatron's flex dispatcher"),
    "moe_mlp_glu_interleave_size": ((None,), "gate and up-projection are two tensors"),
    "moe_single_grouped_weight": ((False,), f"each matrix of the experts is one parameter already, {_OF_ENGINE}"),
    "moe_single_grouped_bias": ((False,), f"each bias of the experts is one parameter already, {_OF_ENGINE}"),
    "expert_gtp_weight_remat_size": ((1,), f"each rank keeps its share of the experts whole, {_OF_ENGINE}"),
    "moe_paged_stash": ((False,), "needs Megatron's flex dispatcher"),
    "moe_apply_probs_on_input": ((False, None), "weights multiply the experts' output"),
    "glu_linear_offset": ((0.0,), "not part of the supported activations"),
    "activation_func_clamp_value": ((None,), "not part of the supported activations"),
    "use_te_activation_func": ((False,), "activations are part of the experts"),
    "mtp_num_layers": ((None, 0), "multi-token prediction needs Megatron's own layer"),
    "cuda_graph_impl": (("none", "full_iteration"), "a graph of one layer would run without the guard's hooks"),
    "cuda_graph_modules": (([], "full"), "they belong to graphs of one layer"),
}
"""Fields that our experts refuse."""
OWN_EXCHANGE = "our layer exchanges the tokens itself; --megablocks-layer experts is our experts in Megatron's layer"
"""Why our layer reads nothing of Megatron's dispatchers."""
_OF_DISPATCHERS = (
    "moe_flex_dispatcher_backend", "moe_flex_dispatcher_num_sms", "moe_enable_deepep", "moe_deepep_num_sms",
    "moe_hybridep_num_sms", "moe_hybridep_num_sms_preprocessing", "moe_hybridep_num_blocks_permute",
    "moe_hybridep_num_blocks_unpermute", "moe_hybridep_pad_uneven_dispatch_inputs", "moe_permute_fusion_into_hybridep",
    "moe_ncclep_static_shape", "moe_ncclep_zero_copy",
)  # fmt: skip
_DISPATCHER: Table = {
    "moe_token_dispatcher_type": (("alltoall", "allgather"), OWN_EXCHANGE),  # the latter is the config's default
    **{name: ((getattr(TransformerConfig, name),), OWN_EXCHANGE) for name in _OF_DISPATCHERS},
}
"""Fields of Megatron's dispatchers, which only its own layer has, with their defaults."""
_AS_SET = (*QUANTIZED, "mlp_impl", "router_type", "uniform_assignment", "token_rounding", "token_rounding_tile",
           "capacity_factor", "capacity_rule")  # fmt: skip
"""Fields of MoEConfig that are our settings of the same names."""
_OFFLOADED = {"expert_fc1", "moe_act", "fused_group_mlp"}
_OF_ENGINE_ALONE = ("moe_router_fusion", "use_transformer_engine_op_fuser", "use_grouped_gemm_for_dense_mlp")


def check_table(values: Any, table: Table, where: str = "") -> None:
    """Refuse, with a ConfigError, a value that the table does not allow. A field that `values` lacks is allowed."""
    for name, (allowed, why) in table.items():
        value = getattr(values, name, allowed[0])
        if value not in allowed:
            refuse(name, value, f"must be {allowed[0]!r}{where}; {why}")


def check_fields(values: Any, *, dispatches: bool) -> None:
    """Refuse, with a ConfigError, values of single fields that our experts or our layer do not support.

    Args:
        values: a TransformerConfig, or the driver's flags, which have its names.
        dispatches: True for our layer, False for our experts in Megatron's layer.
    """
    check_table(values, _UNSUPPORTED | (_DISPATCHER if dispatches else {}))
    inside = _OFFLOADED.intersection(getattr(values, "offload_modules", None) or ())
    if inside:
        rule = "must not name the experts' modules; their activations stay on the GPU"
        refuse("offload_modules", sorted(inside), rule)


def check_config(config: TransformerConfig, *, dispatches: bool = True) -> None:
    """Refuse, with a ConfigError, combinations that our layer does not support or that Megatron trains wrongly.

    dispatches: as in `check_fields`.
    """
    check_fields(config, dispatches=dispatches)
    if config.num_moe_experts is not None:
        _check_experts(config)
    check_engine(config)


def _check_experts(config: TransformerConfig) -> None:
    assert config.num_moe_experts is not None
    experts, ranks = config.num_moe_experts, config.expert_model_parallel_size
    if experts % ranks:
        refuse("num_moe_experts", experts, f"must be divisible by expert_model_parallel_size={ranks}")
    shards = config.expert_tensor_parallel_size or 1
    width = config.moe_ffn_hidden_size  # which Megatron fills in
    assert width is not None
    if width % shards:
        refuse("moe_ffn_hidden_size", width, f"must be divisible by expert_tensor_parallel_size={shards}")
    tensor = config.tensor_model_parallel_size
    if tensor > 1 and not config.sequence_parallel:
        layout = f"experts and tensor_model_parallel_size={tensor}"
        refuse("sequence_parallel", False, f"must be True with {layout}, or every rank computes the same tokens")


def check_engine(config: TransformerConfig) -> None:
    """Refuse values that Megatron accepts but handles wrongly or ignores, with or without Transformer Engine.

    It checks dense models too. The ConfigError names the field, its value and the reason.
    """
    if config.virtual_pipeline_model_parallel_size is not None and config.pipeline_model_parallel_size == 2:
        if config.batch_p2p_comm or not config.overlap_p2p_comm:
            names = f"overlap_p2p_comm={config.overlap_p2p_comm}, batch_p2p_comm"
            why = "with 2 pipeline stages and virtual stages, where batched messages are matched to the wrong stage"
            refuse(names, config.batch_p2p_comm, f"must be True and False {why}")
    if config.activation_func_clamp_value is not None:
        _check_clamp(config)
    if config.cuda_graph_impl == "full_iteration" and not hasattr(config, "megablocks"):
        driver = "megablocks.megatron.pretrain_gpt, which does not move the memory that a captured step writes"
        refuse("cuda_graph_impl", config.cuda_graph_impl, f"must be 'none' outside of {driver}")
    if not HAVE_TE or config.transformer_impl != "transformer_engine":
        if config.fp32_residual_connection and config.params_dtype != torch.float32:
            rule = f"needs Transformer Engine's norms with {config.params_dtype}; others keep the residual's dtype"
            refuse("fp32_residual_connection", True, rule)
        if config.multi_latent_attention:
            _check_latent(config)
    if config.recompute_granularity == "selective" and "mlp" in (config.recompute_modules or ()):
        frequency = config.moe_layer_freq
        is_dense = 0 in frequency if isinstance(frequency, list) else frequency > 1
        if config.add_bias_linear and (is_dense or config.num_moe_experts is None):
            # The checkpoint returns the bias and makes itself its origin, so the next backward calls itself forever.
            rule = "must be without 'mlp' in dense layers with biases, where backward would not end; or give "
            refuse("recompute_modules", config.recompute_modules, f"{rule}--disable-bias-linear")
    if HAVE_TE:
        _check_fuser(config)
        return
    for name in _OF_ENGINE_ALONE:
        if getattr(config, name):
            refuse(name, True, "needs Transformer Engine, which is not installed")
    if config.recompute_granularity == "selective":
        for module in ("layernorm", "mla_up_proj"):
            if module in (config.recompute_modules or ()):
                refuse("recompute_modules", module, "needs Transformer Engine, which is not installed")


def _check_latent(config: TransformerConfig) -> None:
    """Refuse latent attention that Megatron computes wrongly, or not at all, without Transformer Engine's layers."""
    without = "with multi_latent_attention without Transformer Engine's layers"
    if (size := config.tensor_model_parallel_size) > 1:
        # Each rank would keep only its own heads' part of the gradient of the keys' positions.
        refuse("tensor_model_parallel_size", size, f"must be 1 {without}, or gradients are wrong")
    if config.qk_layernorm and getattr(config, "q_lora_rank", 0) is None:
        refuse("qk_layernorm", True, f"needs q_lora_rank {without}, whose norm it is")
    if settings_of(config).attention == "megatron":
        refuse("megablocks_attention", "megatron", f"must be 'sdpa' {without}")


def _check_clamp(config: TransformerConfig) -> None:
    """Refuse a clamp that Megatron would not apply, or would apply before the bias."""
    name, value = "activation_func_clamp_value", config.activation_func_clamp_value
    if not config.gated_linear_unit:
        refuse(name, value, "needs --swiglu or --quick-geglu; without a gate Megatron does not clamp")
    if not config.bias_activation_fusion:
        return
    if config.activation_func is not quick_gelu:
        rule = f"must be False (--no-bias-swiglu-fusion) with {name}={value}, which the fused gate ignores"
        refuse("bias_activation_fusion", True, rule)
    if config.add_bias_linear and not HAVE_TE:
        rule = f"must be False (--no-bias-gelu-fusion) with biases and {name}={value}"
        refuse("bias_activation_fusion", True, f"{rule}, or the gate is clamped before its bias is added")


def _check_fuser(config: TransformerConfig) -> None:
    """Refuse flags of Transformer Engine's fused operations that nothing reads. Megatron's grouped experts read one."""
    grouped = config.num_moe_experts is not None and settings_of(config).layer == "megatron"
    for name, is_read in (("use_transformer_engine_op_fuser", grouped), ("use_grouped_gemm_for_dense_mlp", False)):
        if getattr(config, name) and not is_read:
            refuse(name, True, "must be False; a block with our layers or dense layers does not read it")


def moe_config(config: TransformerConfig, settings: MegaBlocksSettings) -> MoEConfig:
    """The config of a mixture-of-experts layer of the model. Losses, jitter and shared experts stay Megatron's."""
    assert config.num_moe_experts is not None and config.moe_ffn_hidden_size is not None
    shards = config.expert_tensor_parallel_size or 1
    check_width(settings.mlp_impl, config.moe_ffn_hidden_size, shards, "moe_ffn_hidden_size")
    activation = activation_of(config.activation_func, config.gated_linear_unit)
    sigmoid = config.moe_router_score_function == "sigmoid"
    recompute = settings.recompute_activation or (
        config.recompute_granularity == "selective" and "moe_act" in (config.recompute_modules or ())
    )
    normalize = settings.normalize_top_k
    if normalize is None and sigmoid and config.moe_router_topk > 1 and settings.router_type == "topk":
        normalize = 1.0  # Megatron divides sigmoid scores by their sum
    fusion = settings.gradient_accumulation_fusion
    if fusion is None:
        fusion = config.gradient_accumulation_fusion or torch.cuda.is_available()
    coeffs = config.moe_aux_loss_coeff if isinstance(config.moe_aux_loss_coeff, list) else [config.moe_aux_loss_coeff]
    if settings.router_type == "expert_choice" and any(coeff > 0 for coeff in coeffs):
        rule = "must be 0 with router_type='expert_choice', which is balanced by construction"
        refuse("moe_aux_loss_coeff", config.moe_aux_loss_coeff, rule)
    if needs_megatron_routing(config):
        for name in ("token_rounding", "router_type", "uniform_assignment", "normalize_top_k"):
            if (value := getattr(settings, name)) != getattr(MegaBlocksSettings, name):
                refuse(name, value, "needs our routing, not Megatron's (see its router)")
    return MoEConfig(
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.moe_ffn_hidden_size,
        num_experts=config.num_moe_experts,
        top_k=config.moe_router_topk,
        activation=activation.name,
        gelu_approximate=activation.approximate,
        mlp_bias=config.add_bias_linear,
        recompute_activation=recompute,
        gradient_accumulation_fusion=fusion,
        score_function="sigmoid" if sigmoid else "softmax",
        softmax_order="before_topk" if config.moe_router_pre_softmax else "after_topk",
        normalize_top_k=normalize,
        top_k_scaling=config.moe_router_topk_scaling_factor or 1.0,
        num_groups=config.moe_router_num_groups,
        group_top_k=config.moe_router_group_topk,
        expert_score_bias=config.moe_router_enable_expert_bias,
        **{name: getattr(settings, name) for name in _AS_SET},
    )


def needs_megatron_routing(config: TransformerConfig) -> bool:
    """Whether the router has settings that our functional routing lacks."""
    return (
        config.moe_router_load_balancing_type in ("sinkhorn", "quantile_balancing")
        or config.moe_enable_routing_replay
        or config.moe_router_score_function not in ("softmax", "sigmoid")
        or config.moe_expert_capacity_factor is not None
        or bool(config.moe_router_fusion)
    )


def activation_of(function: Callable[[torch.Tensor], torch.Tensor], gated: bool) -> Activation:
    """Megatron's (activation_func, gated_linear_unit) → our activation."""
    approximate = "none"
    if isinstance(function, functools.partial) and function.func is F.gelu:
        approximate = function.keywords.get("approximate", "none")
        function = F.gelu
    if function is fast_gelu:
        approximate, function = "tanh", F.gelu
    plain = {F.gelu: "gelu", F.silu: "silu", F.relu: "relu", torch.relu: "relu", squared_relu: "relu2"}
    glu = {F.gelu: "geglu", F.silu: "swiglu", F.relu: "reglu", torch.relu: "reglu"}
    table = glu if gated else plain
    if function not in table:
        name = getattr(function, "__name__", repr(function))
        allowed = "gelu, silu, relu" if gated else "gelu, silu, relu, squared_relu"
        refuse(f"activation_func={name!r}, gated_linear_unit", gated, f"must be one of {allowed}")
    return Activation(table[function], approximate)
