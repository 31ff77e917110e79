"""`convert` between Hugging Face, our layers and Megatron: the same logits, the same bytes back, nothing left unset."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version
from torch import Tensor

import megablocks.hf
from megablocks.checkpoint.atomic import MARKER, CheckpointError
from megablocks.config import ConfigError
from megablocks.testing.launcher import RankFailed, run_distributed_test
from megablocks.tool.convert import convert
from megablocks.tool.verify import main as verify

transformers = pytest.importorskip("transformers", minversion=megablocks.hf.OLDEST)

VOCAB, TOKENS = 61, 11
# No size equals another one and nothing has its default, so that nothing is right by chance.
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_experts_per_tok": 2, "max_position_embeddings": 40, "rms_norm_eps": 1e-3, "pad_token_id": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 50.0},
}  # fmt: skip
QWEN = {"num_experts": 5, "moe_intermediate_size": 28, "intermediate_size": 36, "head_dim": 10}
DEEPSEEK = {
    "n_routed_experts": 6, "moe_intermediate_size": 28, "intermediate_size": 36, "n_shared_experts": 2, "n_group": 3,
    "topk_group": 2, "num_experts_per_tok": 4, "first_k_dense_replace": 1, "routed_scaling_factor": 1.7,
    "num_attention_heads": 8, "num_key_value_heads": 8,
    "q_lora_rank": 18, "kv_lora_rank": 14, "qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "v_head_dim": 8,
    "num_nextn_predict_layers": 0, "rms_norm_eps": 1e-6,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 50.0, "factor": 4.0, "mscale": 0.8, "mscale_all_dim": 0.6, "beta_fast": 32,
        "beta_slow": 1, "original_max_position_embeddings": 4096}  # fmt: skip
GPT_OSS: dict[str, Any] = {
    "num_local_experts": 5, "intermediate_size": 28, "head_dim": 10, "sliding_window": 4, "swiglu_limit": 0.7,
    "rope_parameters": {"rope_type": "yarn", "rope_theta": 50.0, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0,
                        "original_max_position_embeddings": 4096, "truncate": False},
}  # fmt: skip
if Version(transformers.__version__) < Version("5.19"):  # it clamps at 7, whatever config.json says
    GPT_OSS["swiglu_limit"] = 7.0
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {"num_local_experts": 5, "intermediate_size": 28, "head_dim": 10}),
    "mixtral_top1": ("Mixtral", {"num_local_experts": 5, "intermediate_size": 28, "num_experts_per_tok": 1}),
    "olmoe": ("Olmoe", {"num_experts": 5, "intermediate_size": 28}),
    "olmoe_normalized": ("Olmoe", {"num_experts": 5, "intermediate_size": 28, "norm_topk_prob": True}),
    "qwen3_moe": ("Qwen3Moe", {**QWEN, "norm_topk_prob": True}),
    "deepseek_v3": ("DeepseekV3", DEEPSEEK),
    "deepseek_v3_yarn": ("DeepseekV3", {**DEEPSEEK, "rope_parameters": YARN, "first_k_dense_replace": 0,
                                         "num_attention_heads": 5, "num_key_value_heads": 5}),
    "gpt_oss": ("GptOss", GPT_OSS),
    "qwen3_moe_dense": ("Qwen3Moe", {**QWEN, "mlp_only_layers": [1], "tie_word_embeddings": True}),
}  # fmt: skip
WITHOUT_OURS = ("gpt_oss",)


def _tokens() -> Tensor:
    return torch.randint(VOCAB, (2, TOKENS), generator=torch.Generator().manual_seed(0))


def _model(name: str) -> Any:
    family, changed = MODELS[name]
    model = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**SIZES | changed))
    return _fill(model)


def _fill(model: Any) -> Any:
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        mean = 1.0 if parameter.dim() == 1 else 0.0
        parameter.data.normal_(mean, 0.3, generator=generator)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(0.0, 0.3, generator=generator)
    return model.eval()


@torch.no_grad()
def _logits_of_folder(folder: Path) -> Tensor:
    model, unset = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(unset.values()), unset
    return model(_tokens()).logits


@torch.no_grad()
def _logits_of_ours(folder: Path) -> Tensor:
    """The model with a `dMoE` in the place of each mixture, and of its file what has our names."""
    from safetensors.torch import load_file

    from megablocks.config import MoEConfig
    from megablocks.moe.layer import dMoE

    config = MoEConfig.from_dict(json.loads((folder / "moe_config.json").read_text()))
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder))
    for layer in model.model.layers:
        if hasattr(layer.mlp, "experts"):
            layer.mlp = dMoE(config)
    for parameter in model.parameters():
        parameter.fill_(torch.nan)
    state = load_file(folder / "model.safetensors")
    if model.config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, strict=True)
    return model.eval()(_tokens()).logits


@torch.no_grad()
def _logits_of_megatron(folder: Path) -> Tensor:
    """Of the model that the driver builds from flags.txt, which held NaN before the checkpoint was loaded."""
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    from megablocks.megatron import gpt, planned
    from megablocks.megatron.specs import block_spec

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
        model_parallel_cuda_manual_seed(1)  # Megatron's own attention asks for it
    run = ["--seq-length", "16", "--micro-batch-size", "1", "--tokenizer-type", "NullTokenizer"]
    args = planned.parse(shlex.split((folder / "flags.txt").read_text()) + run, 1)
    config = gpt.model_config(args).transformer
    config.perform_initialization = False
    model = GPTModel(
        config,
        block_spec(config),
        args.padded_vocab_size,
        args.max_position_embeddings,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_base=args.rotary_base,
    ).eval()
    biases = [buffer for name, buffer in model.named_buffers() if name.endswith("expert_bias")]
    for tensor in (*model.parameters(), *biases):
        tensor.fill_(torch.nan)
    state = {"model": model.sharded_state_dict(metadata={})}
    loaded, unused, missing = dist_checkpointing.load(state, str(folder / "release"), strict="return_all")
    assert not unused and not missing, (unused, missing)
    model.load_state_dict(loaded["model"])
    tokens = _tokens()
    return model(tokens, torch.arange(TOKENS).expand_as(tokens), None)


def _convert_in_two_starts(source: Path, target: Path) -> None:
    """Interrupted in layer 1; the second start reads nothing that lies in the complete files."""
    from megablocks.checkpoint import layout

    read, units = layout.Units.read, []
    last = "model.layers.1.mlp.experts.2.w1"

    def counted(self: Any, unit: str) -> Tensor:
        units.append(unit)
        if unit == last and units.count(last) == 1:
            raise KeyboardInterrupt
        return read(self, unit)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout.Units, "read", counted)
        with pytest.raises(KeyboardInterrupt):
            convert(source, target, "megatron")
        assert not target.exists() and any(".layers.0." in unit for unit in units)
        units[:] = [last]
        convert(source, target, "megatron")
    assert units[1].startswith("model.layers.1.") and not any(".layers.0." in unit for unit in units)


def _through_megatron(folder: Path) -> dict[str, Tensor]:
    """The logits of each model in Megatron; writes beside the model what Megatron's checkpoint is converted to."""
    from megablocks.megatron import cpu

    cpu.install()
    logits = {}
    for name in MODELS:
        at = folder / name
        if name == "olmoe":
            _convert_in_two_starts(at / "hf", at / "megatron")
        else:
            convert(at / "hf", at / "megatron", "megatron")
        convert(at / "megatron", at / "hf_again", "hf")
        if name not in WITHOUT_OURS:
            convert(at / "megatron", at / "ours_again", "ours")
        convert(at / ("hf_again" if name in WITHOUT_OURS else "ours"), at / "megatron_again", "megatron")
        convert(at / "megatron_again", at / "hf_thrice", "hf", like=at / "hf")
        logits[name] = _logits_of_megatron(at / "megatron")
    return logits


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each model: hf, and what it was converted to."""
    root = tmp_path_factory.mktemp("models")
    for name in MODELS:
        _model(name).save_pretrained(root / name / "hf")
        if name in WITHOUT_OURS:
            continue
        convert(root / name / "hf", root / name / "ours", "ours")
        convert(root / name / "ours", root / name / "hf_of_ours", "hf")
    return root


@pytest.fixture(scope="module")
def megatron(folder: Path) -> dict[str, Tensor]:
    return run_distributed_test(_through_megatron, 1, folder)[0]


def _state(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def _assert_same(folder: Path, other: Path) -> None:
    one, two = _state(folder), _state(other)
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        assert tensor.dtype == two[name].dtype and torch.equal(tensor, two[name]), name


@pytest.mark.parametrize("name", MODELS)
def test_K10_hugging_face_ours_and_megatron_compute_the_same(
    name: str, folder: Path, megatron: dict[str, Tensor]
) -> None:
    at = folder / name
    with torch.no_grad():
        expected = _model(name)(_tokens()).logits
    assert expected.std() > 0.1
    logits = {"megatron": megatron[name], "hf of megatron": _logits_of_folder(at / "hf_again")}
    if name not in WITHOUT_OURS:
        logits |= {"ours": _logits_of_ours(at / "ours"), "hf of ours": _logits_of_folder(at / "hf_of_ours")}
    for what, found in logits.items():
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5, msg=lambda text, what=what: f"{what}: {text}")
    for again in ("hf_again", "hf_thrice"):
        _assert_same(at / "hf", at / again)
    if name not in WITHOUT_OURS:
        _assert_same(at / "hf", at / "hf_of_ours")
        _assert_same(at / "ours", at / "ours_again")
    assert (at / "hf_thrice/config.json").read_text() == json.dumps(
        json.loads((at / "hf/config.json").read_text()), indent=2
    ) + "\n"


TRAINED = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --group-query-attention --num-query-groups 2 "
    "--ffn-hidden-size 64 --moe-ffn-hidden-size 48 --num-experts 4 --moe-router-topk 2 "
    "--moe-router-pre-softmax --qk-layernorm --megablocks-qk-norm all --normalization RMSNorm --norm-epsilon 1e-3 "
    "--swiglu --position-embedding-type rope --rotary-base 500 --untie-embeddings-and-output-weights "
).split()
TRAINED_GPT_OSS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --group-query-attention --num-query-groups 2 "
    "--ffn-hidden-size 48 --num-experts 4 --moe-router-topk 2 --megablocks-layer megatron --normalization RMSNorm "
    "--quick-geglu --no-bias-gelu-fusion --activation-func-clamp-value 0.7 --glu-linear-offset 1 "
    "--softmax-type learnable --window-size 7,0 --window-attn-skip-freq 2 --position-embedding-type yarn "
    "--rotary-base 500 --rotary-scaling-factor 4 --no-yarn-correction-range-round-to-int "
    "--untie-embeddings-and-output-weights "
).split()
RUN = (
    "--seq-length 32 --micro-batch-size 2 --global-batch-size 8 --lr 1e-2 --train-iters 2 --log-interval 1 "
    "--eval-interval 100 --eval-iters 1"
).split()


def _validation_loss(text: str) -> float:
    return float(text.split("on validation set | lm loss value: ")[1].split()[0])


@pytest.mark.parametrize(
    ("model", "family"), [(TRAINED, "olmoe"), pytest.param(TRAINED_GPT_OSS, "gpt_oss", marks=pytest.mark.slow)]
)
def test_K10_a_model_that_the_driver_trained(model: list[str], family: str, driver: Any, tmp_path: Path) -> None:
    """Two ranks trained it; as a folder of Hugging Face and back in Megatron it has the same validation loss."""
    run = tmp_path / "run"
    trained = driver.run("--save", run, "--save-interval", "2", "--expert-model-parallel-size", "2", *RUN,
                         model=model, ranks=2)  # fmt: skip
    run_distributed_test(_to_and_back, 1, run, tmp_path)
    config = json.loads((tmp_path / "hf/config.json").read_text())
    assert config["model_type"] == family and config["dtype"] == "float32"
    assert torch.isfinite(_logits_of_folder(tmp_path / "hf")).all()
    flags = (tmp_path / "megatron/flags.txt").read_text().split()
    again = driver.run("--load", tmp_path / "megatron", "--skip-train", *RUN, model=flags)
    # One rank adds in another order than two.
    assert _validation_loss(again.text()) == pytest.approx(_validation_loss(trained.text()), rel=1e-6)
    from_checkpoint = ("--use-checkpoint-args", "--skip-train", *RUN)
    without_flags = driver.run("--load", tmp_path / "megatron", *from_checkpoint, model=())
    assert _validation_loss(without_flags.text()) == _validation_loss(again.text())
    path = tmp_path / "megatron/release/__1_0.distcp"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    refused = driver.run("--load", tmp_path / "megatron", "--skip-train", *RUN, model=flags, expect=1)
    assert f"pretrain_gpt: {path}: sha256 differs from what was saved; convert again\n" in refused.text()


def _to_and_back(run: Path, folder: Path) -> None:
    convert(run, folder / "hf", "hf")
    convert(folder / "hf", folder / "megatron", "megatron")


BASE = {
    "normalization": "RMSNorm", "swiglu": True, "add_bias_linear": False, "add_qkv_bias": False,
    "position_embedding_type": "rope", "rotary_percent": 1.0, "num_experts": 4, "moe_layer_freq": 1, "num_layers": 2,
    "moe_router_pre_softmax": False, "qk_layernorm": False, "hidden_size": 32, "num_attention_heads": 4,
    "group_query_attention": False, "kv_channels": 8, "padded_vocab_size": 64, "moe_router_topk": 2,
    "moe_ffn_hidden_size": 48, "rotary_base": 10000, "layernorm_epsilon": 1e-5, "max_position_embeddings": 32,
    "ffn_hidden_size": 48, "moe_router_score_function": "softmax", "multi_latent_attention": False,
    "moe_router_enable_expert_bias": False, "moe_router_topk_scaling_factor": None, "moe_router_num_groups": None,
    "moe_router_group_topk": None, "moe_shared_expert_intermediate_size": None,
    "untie_embeddings_and_output_weights": True, "rope_type": "rope",
}  # fmt: skip
BASE_GPT_OSS = {
    **BASE, "swiglu": False, "quick_geglu": True, "bias_gelu_fusion": False, "glu_linear_offset": 1.0,
    "activation_func_clamp_value": 7.0, "add_bias_linear": True, "window_size": (7, 0), "window_attn_skip_freq": 2,
    "softmax_type": "learnable", "yarn_correction_range_round_to_int": False, "megablocks_layer": "megatron",
}  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"position_embedding_type": "learned_absolute"}, "position_embedding_type='learned_absolute': must be 'rope'"),
        ({"moe_router_score_function": "sigmoid"}, "no family .*deepseek_v3: .* is missing"),
        ({"num_experts": None}, "num_experts=None: only models with experts"),
        (
            {"moe_router_pre_softmax": True},
            "no family .*mixtral: normalize_top_k=False, not True; olmoe: qk_norm=None, not 'all'",
        ),
        (
            {"qk_layernorm": True, "megablocks_qk_norm": "all", "kv_channels": 10},
            "no family .*olmoe: head_dim=10, not 8",
        ),
        ({"megablocks_layer": "tutel"}, "megablocks_layer='tutel': must be 'megablocks' or 'experts'"),
        ({"rotary_seq_len_interpolation_factor": 4}, "rotary_seq_len_interpolation_factor=4: must be None"),
        ({"no_rope_freq": 4}, "no_rope_freq=4: must be None"),
        ({"apply_residual_connection_post_layernorm": True}, "apply_residual_.*=True: must be False"),
        ({"use_mup": True}, "use_mup=True: must be False"),
        ({"moe_shared_expert_glu_interleave_size": 8}, "moe_shared_expert_glu_interleave_size=8: must be None"),
        (
            {"moe_router_load_balancing_type": ["aux_loss", "sinkhorn"]},
            "balancing_type=.*'sinkhorn'.*: must be 'aux_loss'",
        ),
        ({"moe_router_force_load_balancing": True}, "moe_router_force_load_balancing=True: must be False"),
    ],
)
def test_a_run_that_no_family_computes_is_refused(changed: dict[str, Any], message: str) -> None:
    from megablocks.checkpoint.families import family_for
    from megablocks.megatron import conversion

    for kinds in ("aux_loss", ["aux_loss"], ["aux_loss", "seq_aux_loss"]):  # which only training reads
        allowed = argparse.Namespace(**BASE, moe_router_load_balancing_type=kinds)
        assert family_for(conversion.model_of(allowed, "run")) == "mixtral"
    with pytest.raises(ConfigError, match=message):
        family_for(conversion.model_of(argparse.Namespace(**{**BASE, **changed}), "run"))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"window_size": (7, 1)}, r"window_size=\(7, 1\): must be \(7, 0\)"),
        ({"bias_gelu_fusion": True}, "bias_gelu_fusion=True: must be False"),
        ({"softmax_type": "vanilla"}, "softmax_type='vanilla': must be 'learnable'"),
        ({"moe_apply_probs_on_input": True}, "moe_apply_probs_on_input=True: must be False"),
        ({"moe_mlp_glu_interleave_size": 8}, "moe_mlp_glu_interleave_size=8: must be None"),
    ],
)
def test_a_run_like_gpt_oss_that_computes_otherwise_is_refused(changed: dict[str, Any], message: str) -> None:
    from megablocks.checkpoint.families import family_for
    from megablocks.megatron import conversion

    assert family_for(conversion.model_of(argparse.Namespace(**BASE_GPT_OSS), "run")) == "gpt_oss"
    with pytest.raises(ConfigError, match=message):
        conversion.model_of(argparse.Namespace(**{**BASE_GPT_OSS, **changed}), "run")


@pytest.mark.parametrize(
    ("name", "changed", "message"),
    [
        ("mixtral", {"sliding_window": 8}, "sliding_window=8: must be None for Megatron"),
        ("olmoe", {"sliding_window": 8}, "sliding_window=8: must be None for Megatron"),  # of flash attention alone
        ("mixtral", {"rope_parameters": YARN}, "rope_type='yarn': must be 'default'"),
        ("mixtral", {"rope_scaling": YARN}, "rope_type='yarn': must be 'default'"),
        (
            "mixtral",
            {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 50.0},
            "rope_type='linear': must be 'default'",
        ),
        ("mixtral", {"rope_parameters": {"rope_theta": 50.5}}, "rope_theta=50.5: must be a whole number"),
        ("gpt_oss", {"swiglu_alpha": 1.5}, "swiglu_alpha=1.5: must be 1.702 for Megatron"),
        ("gpt_oss", {"num_experts_per_tok": 1}, "num_experts_per_tok=1: must be > 1 with gpt-oss's router"),
        ("gpt_oss", {"layer_types": ["full_attention"] * 3}, r"layer_types=.*: must alternate, \['sliding_attention'"),
        ("gpt_oss", {"quantization_config": {"quant_method": "mxfp4"}}, "quantization_config: must be left out; save"),
        ("gpt_oss", {"rope_parameters": YARN}, "truncate=True: must be False for Megatron"),
        ("deepseek_v3", {"rms_norm_eps": 1e-5}, "rms_norm_eps=1e-05: must be 1e-06 for Megatron"),
        ("deepseek_v3", {"topk_group": 1}, "topk_group=1: must be half of num_experts_per_tok=4, or n_group=3"),
        ("deepseek_v3_yarn", {"rope_parameters": {**YARN, "beta_fast": 16}}, "beta_fast=16: must be 32 for Megatron"),
        (
            "deepseek_v3_yarn",
            {"rope_parameters": {k: v for k, v in YARN.items() if not k.startswith("original")}},
            "original_max_position_embeddings=40: must be 4096 for Megatron",
        ),
        ("deepseek_v3_yarn", {"rope_parameters": {**YARN, "mscale": None}}, "mscale of YaRN is missing"),
        ("deepseek_v3_yarn", {"rope_parameters": {**YARN, "factor": None}}, "factor of YaRN is missing"),
    ],
)
def test_a_model_that_megatron_computes_otherwise_is_refused(
    name: str, changed: dict[str, Any], message: str, folder: Path, tmp_path: Path
) -> None:
    source = tmp_path / "hf"
    shutil.copytree(folder / name / "hf", source)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, **changed}))
    with pytest.raises(ConfigError, match=message):
        convert(source, tmp_path / "megatron", "megatron")
    assert not (tmp_path / "megatron").exists()


SAME = ""
NOT_OURS = "--to=ours: .* has a clamped gate and a router's bias"
LEFT_OUT = "left out"
FIELDS: list[tuple[str, dict[str, Any], str, str]] = [
    ("mixtral", {"hidden_act": "gelu"}, SAME, "hidden_act='gelu': must be 'silu' for Megatron"),
    ("mixtral", {"hidden_act": "gelu_pytorch_tanh"}, SAME, "hidden_act='gelu_pytorch_tanh': must be 'silu'"),
    ("mixtral", {"hidden_act": "relu"}, SAME, "hidden_act='relu': must be 'silu'"),
    ("mixtral", {"hidden_act": "quick_gelu"}, "hidden_act='quick_gelu': must be one of silu, .* for our layer",
     "hidden_act='quick_gelu': must be 'silu'"),
    ("mixtral", {"num_experts_per_tok": 3}, SAME, SAME),
    ("mixtral", {"rms_norm_eps": 0.2}, SAME, SAME),
    ("mixtral", {"tie_word_embeddings": True}, SAME, SAME),
    ("mixtral", {"sliding_window": 4}, SAME, "sliding_window=4: must be None"),
    ("mixtral", {"is_causal": False}, SAME, "is_causal=False: must be True for Megatron"),
    ("mixtral", {"rope_parameters": {"rope_theta": 9.0}}, SAME, SAME),
    ("mixtral", {"rope_parameters": YARN}, SAME, "rope_type='yarn': must be 'default'"),
    ("olmoe", {"hidden_act": "gelu"}, SAME, "hidden_act='gelu': must be 'silu'"),
    ("olmoe", {"norm_topk_prob": True}, SAME, SAME),
    ("olmoe", {"clip_qkv": 0.1}, SAME, "clip_qkv=0.1: must be None"),
    ("olmoe", {"attention_bias": True}, "k_proj.bias: unknown key", "k_proj.bias: unknown key"),
    ("qwen3_moe", {"hidden_act": "gelu"}, SAME, "hidden_act='gelu': must be 'silu'"),
    ("qwen3_moe", {"norm_topk_prob": False}, SAME, SAME),
    ("qwen3_moe", {"norm_topk_prob": LEFT_OUT}, SAME, SAME),
    ("qwen3_moe", {"decoder_sparse_step": 2}, SAME, SAME),
    ("qwen3_moe", {"mlp_only_layers": [0, 2], "hidden_act": "relu"}, SAME, "hidden_act='relu': must be 'silu'"),
    ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 4}, SAME, "use_sliding_window=True: must be False"),
    ("qwen3_moe", {"attention_bias": True}, "k_proj.bias: unknown key", "k_proj.bias: unknown key"),
    ("deepseek_v3", {"hidden_act": "gelu"}, SAME, "hidden_act='gelu': must be 'silu'"),
    ("deepseek_v3", {"norm_topk_prob": False}, SAME, "norm_topk_prob=False: must be True for Megatron"),
    ("deepseek_v3", {"norm_topk_prob": None}, "norm_topk_prob is missing", "norm_topk_prob is missing"),
    ("deepseek_v3", {"routed_scaling_factor": 0.6}, SAME, SAME),
    ("deepseek_v3", {"topk_group": 1}, "topk_group=1: must be half of", "topk_group=1: must be half of"),
    ("deepseek_v3", {"topk_group": 3}, SAME, SAME),
    ("deepseek_v3", {"n_group": 1, "topk_group": 1}, SAME, SAME),
    ("deepseek_v3", {"n_shared_experts": 1}, SAME, SAME),
    ("deepseek_v3", {"first_k_dense_replace": 2}, SAME, SAME),
    ("deepseek_v3", {"rope_interleave": False}, SAME, "rope_interleave=False: must be True"),
    ("deepseek_v3", {"rms_norm_eps": 0.2}, SAME, "rms_norm_eps=0.2: must be 1e-06"),
    ("deepseek_v3", {"attention_bias": True, "q_lora_rank": None}, "bias: unknown key", "bias: unknown key"),
    ("deepseek_v3_yarn", {"rope_parameters": {**YARN, "rope_theta": 5000.0, "truncate": False}}, SAME,
     "truncate=False: must be True for Megatron"),
    ("deepseek_v3_yarn", {"rope_parameters": {**YARN, "attention_factor": 0.5}}, SAME,
     "attention_factor=0.5: must be None"),
    ("gpt_oss", {"num_experts_per_tok": 3}, NOT_OURS, SAME),
    ("gpt_oss", {"sliding_window": 2}, NOT_OURS, SAME),
    ("gpt_oss", {"tie_word_embeddings": True}, NOT_OURS, SAME),
    ("gpt_oss", {"rope_parameters": {"rope_theta": 50.0}}, NOT_OURS, SAME),
    ("gpt_oss", {"rope_parameters": LEFT_OUT, "rope_theta": 50.0}, "rope_parameters is missing: transformers",
     "rope_parameters is missing: transformers"),
    ("gpt_oss", {"rope_parameters": {**GPT_OSS["rope_parameters"], "truncate": True}}, NOT_OURS,
     "truncate=True: must be False"),
    ("gpt_oss", {"swiglu_alpha": 1.5}, NOT_OURS, "swiglu_alpha=1.5: must be 1.702"),
    ("gpt_oss", {"layer_types": ["full_attention"] * 3}, "layer_types=.*: must alternate",
     "layer_types=.*: must alternate"),
    ("gpt_oss", {"attention_bias": False}, "bias: missing key", "bias: missing key"),
]  # fmt: skip
"""A model, fields of its config.json that change what transformers computes, and what becomes of them to ours and to
Megatron: the same logits, or a refusal."""


def _folder_with(name: str, changed: dict[str, Any], folder: Path) -> Path:
    """A model of random weights whose config.json says `changed`."""
    family, sizes = MODELS[name]
    saved = getattr(transformers, f"{family}Config")(**SIZES | sizes).to_dict()
    config = {field: value for field, value in (saved | changed).items() if value != LEFT_OUT}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder))
    _fill(model)
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def changed_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each entry of `FIELDS`, by its number, and in it the model as hf."""
    root = tmp_path_factory.mktemp("changed")
    for number, (name, changed, *_) in enumerate(FIELDS):
        (root / str(number)).mkdir()
        _folder_with(name, changed, root / str(number) / "hf")
    return root


def _convert_each_to_megatron(root: Path) -> dict[int, Tensor | str]:
    """Logits of Megatron, or why the model was refused, by the number of the entry."""
    from megablocks.megatron import cpu

    cpu.install()
    found: dict[int, Tensor | str] = {}
    for number in range(len(FIELDS)):
        at = root / str(number)
        try:
            convert(at / "hf", at / "megatron", "megatron")
            found[number] = _logits_of_megatron(at / "megatron")
        except (ConfigError, CheckpointError) as error:
            found[number] = str(error)
    return found


@pytest.fixture(scope="module")
def changed_in_megatron(changed_models: Path) -> dict[int, Tensor | str]:
    return run_distributed_test(_convert_each_to_megatron, 1, changed_models)[0]


def _check_outcome(found: Tensor | str, wanted: str, expected: Tensor) -> None:
    if wanted or isinstance(found, str):
        assert isinstance(found, str), "converted without a word"
        assert wanted and re.search(wanted, found) and "\n" not in found, found
    else:
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("number", range(len(FIELDS)), ids=[f"{name}-{'-'.join(c)}" for name, c, *_ in FIELDS])
def test_K10_a_field_of_config_json_is_honored_or_refused(
    number: int, changed_models: Path, changed_in_megatron: dict[int, Tensor | str], tmp_path: Path
) -> None:
    name, _, ours, megatron = FIELDS[number]
    source = changed_models / str(number) / "hf"
    expected = _logits_of_folder(source)
    with torch.no_grad():
        assert not torch.allclose(expected, _model(name)(_tokens()).logits, atol=1e-3), "the field changes nothing"
    _check_outcome(changed_in_megatron[number], megatron, expected)
    found: Tensor | str
    try:
        convert(source, tmp_path / "ours", "ours")
        found = _logits_of_ours(tmp_path / "ours")
    except (ConfigError, CheckpointError) as error:
        found = str(error)
    _check_outcome(found, ours, expected)


def _logits_of_each(folders: list[Path]) -> list[Tensor]:
    return [_logits_of_megatron(folder) for folder in folders]


def test_rotary_positions_are_read_as_by_transformers(folder: Path, tmp_path: Path) -> None:
    """mscale counts only beside mscale_all_dim, and rope_theta outside of rope_parameters only without one inside."""
    cases = [("gpt_oss", {"mscale": 0.3}), ("deepseek_v3_yarn", {"mscale_all_dim": 0.0}), ("gpt_oss", {"factor": 2.0})]
    sources = [tmp_path / f"hf{number}" for number in range(len(cases))]
    for source, (name, changed) in zip(sources, cases, strict=True):
        shutil.copytree(folder / name / "hf", source)
        config = json.loads((source / "config.json").read_text())
        config["rope_parameters"] |= changed
        (source / "config.json").write_text(json.dumps({**config, "rope_theta": 60.0}))
        convert(source, source.with_suffix(".megatron"), "megatron")
    found = run_distributed_test(_logits_of_each, 1, [source.with_suffix(".megatron") for source in sources])[0]
    for source, logits in zip(sources, found, strict=True):
        torch.testing.assert_close(logits, _logits_of_folder(source), atol=1e-5, rtol=1e-5)


def test_our_layer_refuses_gpt_oss(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--to=ours: .*hf has a clamped gate and a router's bias, which dMoE lacks"):
        convert(folder / "gpt_oss/hf", tmp_path / "ours", "ours")


def test_latent_attention_without_a_rank_of_queries_is_refused(folder: Path) -> None:
    from megablocks.checkpoint.families import model_of
    from megablocks.megatron import conversion

    model = model_of(json.loads((folder / "deepseek_v3/hf/config.json").read_text()), "test")
    assert "--q-lora-rank" in conversion.flags_of(model)
    with pytest.raises(ConfigError, match="q_lora_rank=None: must be a number for Megatron"):
        conversion.flags_of(dataclasses.replace(model, q_lora_rank=None))


def test_latent_attention_without_a_kind_of_rotary_positions_has_yarn(folder: Path) -> None:
    from megablocks.checkpoint.families import model_of
    from megablocks.megatron import conversion, planned

    model = model_of(json.loads((folder / "deepseek_v3/hf/config.json").read_text()), "test")
    flags = {**conversion.flags_of(model), "--mscale-all-dim": 0.5, "--seq-length": 16, "--micro-batch-size": 1}
    lines = [flag if value is True else f"{flag} {value}" for flag, value in flags.items() if flag != "--rope-type"]

    def yarn(*more: str) -> tuple[float, ...] | None:
        args = planned.parse(" ".join([*lines, "--tokenizer-type NullTokenizer", *more]).split(), 1)
        args.padded_vocab_size = VOCAB
        return conversion.model_of(args, "run").yarn

    assert yarn() is None and yarn("--rotary-scaling-factor 4") == (4.0, 1.0, 0.5)
    with pytest.raises(ConfigError, match="mscale_all_dim=0.5: must be 0 with rope_type='rope'"):
        yarn("--rotary-scaling-factor 4", "--rope-type rope")


def test_a_damaged_checkpoint_is_one_line(
    folder: Path, megatron: dict[str, Tensor], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = tmp_path / "megatron"
    shutil.copytree(folder / "mixtral/megatron", damaged)
    path = damaged / "release/__1_0.distcp"  # of layer 0
    whole = path.read_bytes()
    assert verify([str(damaged)]) == 0
    assert capsys.readouterr().out.startswith("ok: release: size and SHA-256 of 7 files, ")
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert verify([str(damaged)]) == 1
    said = f"{path}: sha256 differs from what was saved; convert again"
    assert capsys.readouterr().err == f"megablocks verify: {said}\n"
    with pytest.raises(RankFailed, match=f"CheckpointError: {re.escape(said)}"):
        run_distributed_test(convert, 1, damaged, tmp_path / "hf", "hf")
    path.write_bytes(whole[: len(whole) // 2] + bytes(len(whole) - len(whole) // 2))
    (damaged / "release" / MARKER).unlink()
    with pytest.raises(RankFailed, match=r"CheckpointError: \S+release: decoder\.layers\.\S+ cannot be read: "):
        run_distributed_test(convert, 1, damaged, tmp_path / "hf", "hf")
    assert not (tmp_path / "hf").exists()


def test_a_norm_over_all_heads_needs_all_heads_on_each_rank() -> None:
    from megablocks.megatron.norm import AllHeadsNorm

    config = argparse.Namespace(tensor_model_parallel_size=2, num_attention_heads=4, num_query_groups=2)
    with pytest.raises(ConfigError, match="tensor_model_parallel_size=2: must be 1 with --megablocks-qk-norm all"):
        AllHeadsNorm(config, 8, of_keys=True)  # type: ignore[arg-type]
