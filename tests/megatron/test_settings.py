"""Settings, the mapping of Megatron's config to ours, and refusals in one line that names field, value and fix."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megablocks.config import ConfigError
from megablocks.megatron.settings import MegaBlocksSettings, settings_of


def _config(**fields: Any) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    values: dict[str, Any] = dict(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        ffn_hidden_size=64,
        num_moe_experts=8,
        moe_router_topk=2,
        add_bias_linear=False,
        moe_router_load_balancing_type="none",
    )
    return TransformerConfig(**(values | fields))


def test_settings_come_from_the_environment() -> None:
    environ = {
        "MEGABLOCKS_CAPACITY_FACTOR": "-1.25",
        "MEGABLOCKS_CAPACITY_RULE": "tutel",
        "MEGABLOCKS_RECOMPUTE_ACTIVATION": "1",
        "MEGABLOCKS_NORMALIZE_TOP_K": "none",
        "MEGABLOCKS_MAX_TOKENS": "",
        "MEGABLOCKS_UNIFORM_ASSIGNMENT": "True",
        "MEGABLOCKS_TOKEN_ROUNDING": "balanced",
        "MEGABLOCKS_TOKEN_ROUNDING_TILE": "64",
        "MEGABLOCKS_HOME": "/somewhere",
    }
    expected = MegaBlocksSettings(
        capacity_factor=-1.25, capacity_rule="tutel", recompute_activation=True,
        token_rounding="balanced", token_rounding_tile=64, uniform_assignment=True,
    )  # fmt: skip
    assert MegaBlocksSettings.from_env(environ) == expected
    assert MegaBlocksSettings.from_env({}) == MegaBlocksSettings()


def test_stored_settings_come_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGABLOCKS_ROUTER_TYPE", "expert_choice")
    config = _config()
    assert settings_of(config).router_type == "expert_choice"
    config.megablocks = MegaBlocksSettings()
    assert settings_of(config).router_type == "topk"


@pytest.mark.parametrize(
    "name, value, message",
    [
        ("CAPACITY_FACTOR", "much", "MEGABLOCKS_CAPACITY_FACTOR='much': must be a number"),
        ("RECOMPUTE_ACTIVATION", "maybe", "MEGABLOCKS_RECOMPUTE_ACTIVATION='maybe': must be 0, 1, true or false"),
        ("QUANTIZE_INPUTS_NUM_BITS", "5", "quantize_inputs_num_bits=5: must be one of -1, 4, 8"),
        ("QUANTIZE_SCATTER_NUM_BITS", "4.0", "MEGABLOCKS_QUANTIZE_SCATTER_NUM_BITS='4.0': must be an integer"),
        ("TOKEN_ROUNDING_TILE", "0", "token_rounding_tile=0: must be >= 1"),
        ("DISPATCH_ROWS_FACTOR", "inf", "dispatch_rows_factor=inf: must be >= 0 and finite"),
        ("TOKEN_ROUNDING_TILE", "half", "MEGABLOCKS_TOKEN_ROUNDING_TILE='half': must be an integer"),
        (
            "GRADIENT_ACCUMULATION_FUSION",
            "often",
            "MEGABLOCKS_GRADIENT_ACCUMULATION_FUSION='often': must be 0, 1, true or false",
        ),
        ("LAYER", "mine", "layer='mine': must be one of megablocks, experts, megatron, tutel"),
        ("CAPACITY_FACTOR", "-1", r"capacity_factor=-1.0: must be >= 0, or use capacity_rule='tutel'"),
    ],
)
def test_L2_bad_settings_are_named(name: str, value: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        MegaBlocksSettings.from_env({f"MEGABLOCKS_{name}": value})
    assert str(error.value) == message


def test_quantizers_reach_the_layers_config() -> None:
    from megablocks.megatron.model_config import moe_config

    environ = {"MEGABLOCKS_QUANTIZE_INPUTS_NUM_BITS": "8", "MEGABLOCKS_QUANTIZE_REMATERIALIZE_NUM_BITS": "4"}
    config = moe_config(_config(), MegaBlocksSettings.from_env(environ))
    assert (config.quantize_inputs_num_bits, config.quantize_rematerialize_num_bits) == (8, 4)
    assert config.quantize_scatter_num_bits == -1


def test_main_gradients_follow_the_device_and_megatrons_flag_until_ours_is_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from megablocks.megatron.model_config import moe_config

    of_flags = (None, True, True), (None, False, False), ("0", True, False), ("1", False, True)
    cases = [(False, *case) for case in of_flags] + [(True, None, False, True), (True, "0", True, False)]
    for on_gpu, given, megatrons, expected in cases:
        monkeypatch.setattr(torch.cuda, "is_available", lambda on_gpu=on_gpu: on_gpu)
        environ = {} if given is None else {"MEGABLOCKS_GRADIENT_ACCUMULATION_FUSION": given}
        config = moe_config(_config(gradient_accumulation_fusion=megatrons), MegaBlocksSettings.from_env(environ))
        assert config.gradient_accumulation_fusion is expected


@pytest.mark.parametrize(
    "layer, name, value",
    [
        ("experts", "QUANTIZE_SCATTER_NUM_BITS", "8"),  # Megatron weights the experts' output
        ("experts", "NORMALIZE_TOP_K", "1"),
        ("megatron", "RECOMPUTE_ACTIVATION", "1"),
        ("megatron", "GRADIENT_ACCUMULATION_FUSION", "0"),
        ("tutel", "GRADIENT_ACCUMULATION_FUSION", "1"),
        ("megatron", "CAPACITY_FACTOR", "1.25"),
        ("megatron", "CAPACITY_RULE", "tutel"),
        ("experts", "CAPACITY_RULE", "tutel"),
        ("megatron", "TOKEN_ROUNDING_TILE", "64"),
        ("tutel", "ROUTER_TYPE", "expert_choice"),
        ("megatron", "DISPATCHER", "all_to_all"),
        ("experts", "MAX_TOKENS", "64"),
    ],
)
def test_L2_a_setting_that_the_layer_does_not_read_is_refused(layer: str, name: str, value: str) -> None:
    environ = {"MEGABLOCKS_LAYER": layer, f"MEGABLOCKS_{name}": value}
    with pytest.raises(
        ConfigError, match=f"^{name.lower()}=.*: must be .* with layer='{layer}', which does not read it"
    ):
        MegaBlocksSettings.from_env(environ)
    factor = {"MEGABLOCKS_CAPACITY_FACTOR": "1"} if name == "CAPACITY_RULE" else {}
    MegaBlocksSettings.from_env({**environ, **factor, "MEGABLOCKS_LAYER": "megablocks"})


def test_token_rounding_needs_our_routing() -> None:
    from megablocks.megatron.model_config import moe_config

    for field, value in (("moe_router_load_balancing_type", "sinkhorn"), ("moe_expert_capacity_factor", 1.0)):
        with pytest.raises(ConfigError, match="token_rounding='up': needs our routing"):
            moe_config(_config(**{field: value}), MegaBlocksSettings(token_rounding="up"))


@pytest.mark.parametrize(
    "name, value", [("router_type", "expert_choice"), ("uniform_assignment", True), ("normalize_top_k", 2.0)]
)
def test_L2_a_setting_that_megatrons_routing_does_not_read_is_refused(name: str, value: Any) -> None:
    from megablocks.megatron.model_config import moe_config

    settings = MegaBlocksSettings(**{name: value})
    with pytest.raises(ConfigError, match=f"{name}={value!r}: needs our routing"):
        moe_config(_config(moe_router_score_function="sqrtsoftplus"), settings)
    moe_config(_config(moe_router_pre_softmax=True), settings)


def test_experts_choose_by_sigmoid_scores_too() -> None:
    """Megatron divides a token's sigmoid scores by their sum, which experts that choose tokens have not."""
    from megablocks.megatron.model_config import moe_config

    config = _config(moe_router_score_function="sigmoid")
    chosen = moe_config(config, MegaBlocksSettings(router_type="expert_choice"))
    assert (chosen.score_function, chosen.normalize_top_k) == ("sigmoid", None)
    assert moe_config(config, MegaBlocksSettings()).normalize_top_k == 1.0


def test_layer_tutel_implies_tutels_rule_and_default_factor() -> None:
    settings = MegaBlocksSettings(layer="tutel")
    assert (settings.capacity_rule, settings.capacity_factor) == ("tutel", 1.0)
    assert MegaBlocksSettings(layer="tutel", capacity_factor=2.0).capacity_factor == 2.0


@pytest.mark.parametrize(
    "function, gated, expected",
    [
        (F.gelu, False, ("gelu", "none")),
        (functools.partial(F.gelu, approximate="tanh"), False, ("gelu", "tanh")),
        (F.gelu, True, ("geglu", "none")),
        (F.silu, True, ("swiglu", "none")),
        (F.silu, False, ("silu", "none")),
        (F.relu, True, ("reglu", "none")),
        (torch.relu, False, ("relu", "none")),
    ],
)
def test_activations_map(function: Any, gated: bool, expected: tuple[str, str]) -> None:
    from megablocks.megatron.model_config import activation_of

    assert activation_of(function, gated) == expected


def test_squared_relu_maps_and_others_are_refused() -> None:
    from megatron.core.activations import fast_gelu, quick_gelu, squared_relu

    from megablocks.megatron.model_config import activation_of

    assert activation_of(squared_relu, False) == ("relu2", "none")
    assert activation_of(fast_gelu, True) == ("geglu", "tanh")
    message = r"activation_func='\w+', gated_linear_unit=.*: must be one of gelu, silu"
    for function, gated in ((quick_gelu, False), (squared_relu, True), (torch.tanh, False)):
        with pytest.raises(ConfigError, match=message):
            activation_of(function, gated)


def test_config_maps() -> None:
    from megablocks.megatron.model_config import moe_config

    config = _config(
        moe_ffn_hidden_size=48,
        moe_router_score_function="sigmoid",
        moe_router_topk_scaling_factor=2.5,
        moe_router_num_groups=4,
        moe_router_group_topk=2,
        moe_router_enable_expert_bias=True,
        activation_func=F.silu,
        gated_linear_unit=True,
    )
    ours = moe_config(config, MegaBlocksSettings(recompute_activation=True))
    assert (ours.hidden_size, ours.ffn_hidden_size, ours.num_experts, ours.top_k) == (32, 48, 8, 2)
    assert (ours.activation, ours.score_function, ours.top_k_scaling) == ("swiglu", "sigmoid", 2.5)
    assert (ours.num_groups, ours.group_top_k, ours.expert_score_bias) == (4, 2, True)
    assert ours.normalize_top_k == 1.0, "Megatron divides sigmoid scores by their sum"
    assert ours.recompute_activation and not ours.mlp_bias
    assert ours.load_balancing_loss_weight == ours.z_loss_weight == 0, "Megatron's router attaches the losses"
    assert moe_config(_config(moe_router_pre_softmax=True), MegaBlocksSettings()).softmax_order == "before_topk"
    plain = moe_config(_config(), MegaBlocksSettings())
    assert (plain.softmax_order, plain.token_rounding) == ("after_topk", None)
    rounded = moe_config(_config(), MegaBlocksSettings(token_rounding="up", token_rounding_tile=64))
    assert (rounded.token_rounding, rounded.token_rounding_tile) == ("up", 64)


@pytest.mark.parametrize(
    "name, value, words",
    [
        ("fp8", "hybrid", "must be None"),
        ("moe_latent_size", 16, "must be None"),
        ("moe_shared_expert_overlap", True, "must be False"),
        ("overlap_moe_expert_parallel_comm", True, "must be False"),
        ("delay_wgrad_compute", True, "must be False"),
        ("moe_pad_expert_input_to_capacity", True, "must be False"),
        ("moe_apply_probs_on_input", True, "must be False"),
        ("glu_linear_offset", 1.0, "must be 0.0"),
        ("activation_func_clamp_value", 7.0, "must be None"),
        ("cuda_graph_impl", "local", "must be 'none'"),
        ("mtp_num_layers", 1, "must be None"),
        ("cuda_graph_modules", ["attn"], "must be []"),
        ("offload_modules", ["moe_act"], "must not name the experts"),
        ("moe_single_grouped_weight", True, "must be False"),
        ("expert_gtp_weight_remat_size", 2, "must be 1"),
        ("moe_token_dispatcher_type", "flex", "must be 'alltoall'"),
        ("moe_flex_dispatcher_num_sms", 20, "must be None"),
        ("expert_model_parallel_size", 3, "num_moe_experts=8: must be divisible by expert_model_parallel_size=3"),
        ("expert_tensor_parallel_size", 5, "moe_ffn_hidden_size=64: must be divisible by expert_tensor_parallel_size"),
        ("tensor_model_parallel_size", 2, "sequence_parallel=False: must be True"),
    ],
)
def test_L2_unsupported_config_is_named(name: str, value: Any, words: str) -> None:
    from megablocks.megatron.model_config import check_config

    config = _config()
    check_config(config)
    setattr(config, name, value)
    with pytest.raises(ConfigError) as error:
        check_config(config)
    message = str(error.value)
    assert "\n" not in message and words in message
    assert name in message and (f"{name}={value!r}" in message or f"={value}" in message)


_READ = {
    "sizes and placement": """
        expert_model_parallel_size expert_tensor_parallel_size expert_tensor_parallel_num_weight_shards
        num_moe_experts moe_layer_freq moe_ffn_hidden_size
    """,
    "Megatron's router": """
        moe_router_load_balancing_type moe_router_topk moe_enable_routing_replay moe_router_dtype
        moe_router_num_groups moe_router_group_topk moe_router_topk_limited_devices moe_router_pre_softmax
        moe_router_topk_scaling_factor moe_router_score_function moe_router_enable_expert_bias
        moe_router_bias_update_rate moe_router_quantile_balancing_ema moe_router_force_load_balancing
        moe_router_force_biased moe_router_fusion moe_aux_loss_coeff moe_z_loss_coeff moe_input_jitter_eps
        moe_per_layer_logging moe_grad_scale_func moe_expert_capacity_factor moe_token_drop_policy
    """,
    "Megatron's shared expert": """
        moe_shared_expert_intermediate_size moe_shared_expert_gate use_grouped_gemm_for_shared_expert
        moe_shared_expert_glu_interleave_size
    """,
    "recomputing": """
        recompute_granularity recompute_method recompute_num_layers recompute_modules moe_layer_recompute
    """,
    "our experts do so anyway": """
        moe_grouped_gemm moe_permute_fusion
    """,
    "Megatron wants fp8 with it": """
        moe_router_padding_for_quantization moe_router_padding_for_fp8 fp8_wgrad
    """,
    "of something refused": """
        moe_paged_stash_page_size moe_paged_stash_buffer_size_factor_cuda wgrad_deferral_limit
        moe_paged_stash_buffer_size_factor_cpu enable_cuda_graph external_cuda_graph cuda_graph_scope
        cuda_graph_retain_backward_graph delay_offload_until_cuda_graph
    """,
    "inference": """
        inference_cuda_graph_scope inference_moe_disable_fused_quant_kernels
        inference_moe_token_dispatcher_type
    """,
    "deprecated in Megatron, without an effect": """
        moe_token_dropping
    """,
    "the other layers and the training loop": """
        defer_embedding_wgrad_compute overlap_p2p_comm overlap_p2p_comm_warmup_flush
        cuda_graph_use_single_mempool cuda_graph_warmup_steps
    """,
}
"""Fields about experts that our layer takes, by what becomes of them."""


def test_every_field_about_experts_is_read_or_refused() -> None:
    """A field that a newer Megatron adds must be put into one of the tables."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megablocks.megatron.model_config import _DISPATCHER, _UNSUPPORTED

    read = {name for names in _READ.values() for name in names.split()}
    refused = _UNSUPPORTED.keys() | _DISPATCHER.keys()
    words = ("moe_", "expert", "cuda_graph", "recompute", "wgrad")
    about = {f for f in TransformerConfig.__dataclass_fields__ if any(word in f for word in words)}
    about |= {f for f in TransformerConfig.__dataclass_fields__ if f.startswith("overlap_")}
    about -= {f for f in about if f.startswith("tp_comm_")}
    assert about - refused == read


def test_experts_in_megatrons_layer_leave_the_dispatcher_to_it() -> None:
    from megablocks.megatron.model_config import check_config

    config = _config(moe_token_dispatcher_type="flex", moe_flex_dispatcher_backend="hybridep")
    check_config(config, dispatches=False)
    with pytest.raises(ConfigError, match="moe_token_dispatcher_type='flex': must be 'alltoall'; our layer exchanges"):
        check_config(config)


def test_L2_two_stages_with_virtual_stages_need_unbatched_messages() -> None:
    from megablocks.megatron.model_config import check_engine

    config = _config(pipeline_dtype=torch.float32, pipeline_model_parallel_size=2)
    config.virtual_pipeline_model_parallel_size = 2
    with pytest.raises(ConfigError, match=r"overlap_p2p_comm=False, batch_p2p_comm=True: must be True and False"):
        check_engine(config)
    config.overlap_p2p_comm, config.batch_p2p_comm = True, False
    check_engine(config)


def test_L2_a_recomputed_dense_layer_with_biases_is_refused() -> None:
    """Megatron's backward would not end: its checkpoint returns the bias itself."""
    from megablocks.megatron.model_config import check_engine

    recompute = {"recompute_granularity": "selective", "recompute_modules": ["mlp"]}
    for frequency, biased, refused in (([0, 1], True, True), (2, True, True), (1, True, False), ([0, 1], False, False)):
        config = _config(num_layers=2, add_bias_linear=biased, **recompute)
        config.moe_layer_freq = frequency
        if refused:
            with pytest.raises(ConfigError, match=r"^recompute_modules=\['mlp'\]: must be without 'mlp' in"):
                check_engine(config)
        else:
            check_engine(config)


def test_L2_latent_attention_that_megatron_computes_wrongly_or_not_is_refused() -> None:
    """The gradient of the keys' positions had only the heads of one rank: 3 to 11 % of a matrix's gradient."""
    from megablocks.megatron.model_config import check_engine

    config = _config(tensor_model_parallel_size=2, sequence_parallel=True)
    check_engine(config)
    config.multi_latent_attention = True
    with pytest.raises(ConfigError, match="^tensor_model_parallel_size=2: must be 1 with multi_latent_attention"):
        check_engine(config)
    config.tensor_model_parallel_size, config.qk_layernorm, config.q_lora_rank = 1, True, None
    with pytest.raises(ConfigError, match="^qk_layernorm=True: needs q_lora_rank with multi_latent_attention"):
        check_engine(config)
    config.q_lora_rank = 8
    check_engine(config)
    config.megablocks = MegaBlocksSettings(attention="megatron")
    with pytest.raises(ConfigError, match="^megablocks_attention='megatron': must be 'sdpa' with multi"):
        check_engine(config)


def test_L2_recompute_that_needs_transformer_engine_is_named() -> None:
    from megatron.core.extensions.transformer_engine import HAVE_TE

    from megablocks.megatron.model_config import check_engine

    if HAVE_TE:
        pytest.skip("Transformer Engine is installed")
    config = _config(recompute_granularity="selective", recompute_modules=["layernorm"])
    with pytest.raises(ConfigError, match="recompute_modules='layernorm': needs Transformer Engine"):
        check_engine(config)
    config = _config()
    config.moe_router_fusion = True
    with pytest.raises(ConfigError, match="moe_router_fusion=True: needs Transformer Engine, which is not installed"):
        check_engine(config)


def test_L2_a_clamp_that_megatron_would_not_apply_is_refused() -> None:
    """Megatron clamps where it does not fuse, and in the fused quick GeGLU; there before it adds the bias."""
    from megatron.core.activations import squared_relu
    from megatron.core.extensions.transformer_engine import HAVE_TE
    from megatron.core.fusions.fused_bias_geglu import quick_gelu
    from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl

    from megablocks.megatron.model_config import check_engine

    large = torch.full((1, 4), 9.0)
    with torch.compiler.set_stance("force_eager"):  # not compiled, which takes 10 s
        assert bias_swiglu_impl(large, None)[0, 0] > 80, "Megatron's fused SwiGLU clamps now: allow it"
    fused = r"bias_activation_fusion=True: must be False \(--no-bias-{}-fusion\) with {}activation_func_clamp_value=7.0"
    gelu = None if HAVE_TE else fused.format("gelu", "biases and ")
    for function, gated, bias, fusion, message in (
        (F.silu, True, False, True, fused.format("swiglu", "")),
        (F.silu, True, True, True, fused.format("swiglu", "")),
        (F.silu, True, True, False, None),
        (F.gelu, True, False, True, fused.format("swiglu", "")),
        (quick_gelu, True, False, True, None),
        (quick_gelu, True, True, True, gelu),
        (quick_gelu, True, True, False, None),
        (squared_relu, False, False, False, "activation_func_clamp_value=7.0: needs --swiglu or --quick-geglu"),
    ):
        config = _config(activation_func=function, gated_linear_unit=gated, add_bias_linear=bias)
        config.activation_func_clamp_value, config.bias_activation_fusion = 7.0, fusion
        with pytest.raises(ConfigError, match=message) if message else contextlib.nullcontext():
            check_engine(config)


def test_L2_token_rounding_refuses_what_it_cannot_round() -> None:
    from megablocks.megatron.model_config import moe_config

    with pytest.raises(ConfigError, match="token_rounding='up': needs capacity_factor=None, not 1.0"):
        moe_config(_config(), MegaBlocksSettings(token_rounding="up", capacity_factor=1.0))


def test_L2_a_width_that_blocks_do_not_divide() -> None:
    from megablocks.megatron.model_config import moe_config

    settings = MegaBlocksSettings.from_env({"MEGABLOCKS_MLP_IMPL": "sparse"})
    assert moe_config(_config(), settings).mlp_impl == "sparse"
    with pytest.raises(ConfigError, match="moe_ffn_hidden_size=48: must be a multiple of 64 with mlp_impl"):
        moe_config(_config(moe_ffn_hidden_size=48), settings)
    with pytest.raises(
        ConfigError, match="moe_ffn_hidden_size=64: .*on each of 2 shards with mlp_impl='sparse', or use"
    ):
        moe_config(_config(tensor_model_parallel_size=2, expert_tensor_parallel_size=2), settings)


def test_L2_expert_choice_refuses_a_balancing_loss() -> None:
    from megablocks.megatron.model_config import moe_config

    config = _config(moe_router_load_balancing_type="aux_loss", moe_aux_loss_coeff=0.01)
    with pytest.raises(ConfigError, match="moe_aux_loss_coeff=0.01: must be 0 with router_type='expert_choice'"):
        moe_config(config, MegaBlocksSettings(router_type="expert_choice"))
