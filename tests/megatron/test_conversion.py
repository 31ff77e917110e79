"""`convert` between Hugging Face, our layers and Megatron: the same logits, the same bytes back, no weight left unset."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import megablocks.hf
from megablocks.testing.launcher import run_distributed_test
from megablocks.tool.convert import convert

transformers = pytest.importorskip("transformers", minversion=megablocks.hf.OLDEST)

VOCAB, TOKENS = 61, 11
# No size equals another one and nothing has its default, so that nothing is right by chance.
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_experts_per_tok": 2, "max_position_embeddings": 40, "rms_norm_eps": 1e-3, "pad_token_id": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 50.0},
}  # fmt: skip
QWEN = {"num_experts": 5, "moe_intermediate_size": 28, "intermediate_size": 36, "head_dim": 10}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {"num_local_experts": 5, "intermediate_size": 28, "head_dim": 10}),
    "mixtral_top1": ("Mixtral", {"num_local_experts": 5, "intermediate_size": 28, "num_experts_per_tok": 1}),
    "olmoe": ("Olmoe", {"num_experts": 5, "intermediate_size": 28}),
    "olmoe_normalized": ("Olmoe", {"num_experts": 5, "intermediate_size": 28, "norm_topk_prob": True}),
    "qwen3_moe": ("Qwen3Moe", {**QWEN, "norm_topk_prob": True}),
    "qwen3_moe_dense": ("Qwen3Moe", {**QWEN, "mlp_only_layers": [1], "tie_word_embeddings": True}),
}  # fmt: skip


def _tokens() -> Tensor:
    return torch.randint(VOCAB, (2, TOKENS), generator=torch.Generator().manual_seed(0))


def _model(name: str) -> Any:
    family, changed = MODELS[name]
    model = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**SIZES | changed))
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        mean = 1.0 if parameter.dim() == 1 else 0.0
        parameter.data.normal_(mean, 0.3, generator=generator)
    return model.eval()


@torch.no_grad()
def _logits_of_folder(folder: Path) -> Tensor:
    return transformers.AutoModelForCausalLM.from_pretrained(folder)(_tokens()).logits


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
    import shlex

    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.models.gpt.gpt_model import GPTModel

    from megablocks.megatron import gpt, planned
    from megablocks.megatron.specs import block_spec

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
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
    for parameter in model.parameters():
        parameter.fill_(torch.nan)
    state = {"model": model.sharded_state_dict(metadata={})}
    loaded, unused, missing = dist_checkpointing.load(state, str(folder / "release"), strict="return_all")
    assert not unused and not missing, (unused, missing)
    model.load_state_dict(loaded["model"])
    tokens = _tokens()
    return model(tokens, torch.arange(TOKENS).expand_as(tokens), None)


def _through_megatron(folder: Path) -> dict[str, Tensor]:
    """The logits of each model in Megatron; writes beside the model what Megatron's checkpoint is converted to."""
    from megablocks.megatron import cpu

    cpu.install()
    logits = {}
    for name in MODELS:
        at = folder / name
        convert(at / "hf", at / "megatron", "megatron")
        convert(at / "megatron", at / "hf_again", "hf")
        convert(at / "megatron", at / "ours_again", "ours")
        convert(at / "ours", at / "megatron_again", "megatron")
        convert(at / "megatron_again", at / "hf_thrice", "hf", like=at / "hf")
        logits[name] = _logits_of_megatron(at / "megatron")
    return logits


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each model: hf, and what it was converted to."""
    root = tmp_path_factory.mktemp("models")
    for name in MODELS:
        _model(name).save_pretrained(root / name / "hf")
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
    logits = {
        "ours": _logits_of_ours(at / "ours"),
        "megatron": megatron[name],
        "hf of megatron": _logits_of_folder(at / "hf_again"),
        "hf of ours": _logits_of_folder(at / "hf_of_ours"),
    }
    for what, found in logits.items():
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5, msg=lambda text, what=what: f"{what}: {text}")
    for again in ("hf_again", "hf_of_ours", "hf_thrice"):
        _assert_same(at / "hf", at / again)
    _assert_same(at / "ours", at / "ours_again")
    assert (at / "hf_thrice/config.json").read_text() == json.dumps(
        json.loads((at / "hf/config.json").read_text()), indent=2
    ) + "\n"
