"""Whole models of transformers, small and random: logits and gradients equal those of their own experts."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from packaging.version import Version
from torch import Tensor, nn

import megablocks.hf

transformers = pytest.importorskip("transformers", minversion=megablocks.hf.OLDEST)

megablocks.hf.register()

VOCABULARY, TOKENS = 61, 9
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZES |= {"num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1}
SIZES |= {"eos_token_id": None}
MLA = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
QWEN = {"num_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 20, "moe_intermediate_size": 14}
MODELS: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 20},
    "Olmoe": {"num_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 20},
    "Qwen2Moe": {**QWEN, "shared_expert_intermediate_size": 12, "decoder_sparse_step": 1},
    "Qwen3Moe": {**QWEN, "head_dim": 12, "decoder_sparse_step": 1},
    "DeepseekV3": {
        **MLA, "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 14, "intermediate_size": 20,
        "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1,
    },
    "GptOss": {
        "num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 20, "head_dim": 12, "swiglu_limit": 0.3,
    },
    "NemotronH": {
        "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 14, "intermediate_size": 20,
        "moe_shared_expert_intermediate_size": 12, "layers_block_type": ["attention", "moe", "attention", "moe"],
        "num_hidden_layers": 4, "head_dim": 12, "n_group": 1, "topk_group": 1,
    },
    "GraniteMoe": {"num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 20},
    "Jamba": {
        "num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 20, "attn_layer_period": 1,
        "attn_layer_offset": 0, "expert_layer_period": 1, "expert_layer_offset": 0, "use_mamba_kernels": False,
    },
    "OpenAIPrivacyFilter": {
        "num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 20, "head_dim": 12, "swiglu_limit": 0.3,
    },
    "AriaText": {"moe_num_experts": 5, "moe_topk": 2, "intermediate_size": 20},
    "MuseSparkText": {
        "num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 20, "moe_intermediate_size": 14,
        "head_dim": 12, "moe_hidden_size": 16,
    },
}  # fmt: skip
if Version(transformers.__version__) < Version("5.23"):  # without those flags of the decorator
    del MODELS["AriaText"], MODELS["MuseSparkText"]
CLASSES = {"OpenAIPrivacyFilter": "OpenAIPrivacyFilterForTokenClassification", "MuseSparkText": "MuseSparkTextModel"}
GENERATING = [name for name in MODELS if name not in CLASSES]


def _model(name: str, **changed: Any) -> Any:
    module = importlib.import_module(
        getattr(transformers, f"{name}Config").__module__.replace("configuration", "modeling")
    )
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **MODELS[name], **changed})
    torch.manual_seed(0)
    model = getattr(module, CLASSES.get(name, f"{name}ForCausalLM"))(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.2)
    return model.eval()  # no dropout


def _tokens(rows: int = 2) -> Tensor:
    return torch.randint(2, VOCABULARY, (rows, TOKENS), generator=torch.Generator().manual_seed(0))


def _step(model: Any, implementation: str) -> dict[str, Tensor]:
    model.set_experts_implementation(implementation)
    model.zero_grad()
    if type(model).__name__ in CLASSES.values():
        logits = model(_tokens())[0]
        loss = (logits * torch.linspace(-1, 1, logits.numel()).view_as(logits)).mean()
    else:
        out = model(_tokens(), labels=_tokens())
        logits, loss = out.logits, out.loss
    loss.backward()
    return {"logits": logits.detach(), **{n: p.grad for n, p in model.named_parameters() if p.grad is not None}}


@pytest.mark.parametrize("name", MODELS)
def test_H1_logits_and_gradients_of_a_model(name: str) -> None:
    model = _model(name)
    expected, actual = _step(model, "eager"), _step(model, "megablocks")
    assert actual.keys() == expected.keys()
    assert any("experts.down_proj" in key for key in expected)
    for key, value in expected.items():
        torch.testing.assert_close(actual[key], value, rtol=1e-5, atol=1e-5, msg=lambda m, n=key: f"{n}: {m}")


@pytest.mark.parametrize("name", GENERATING)
def test_H1_generation_gives_the_same_tokens(name: str) -> None:
    model = _model(name)
    outs = []
    for implementation in ("eager", "megablocks"):
        model.set_experts_implementation(implementation)
        outs.append(model.generate(_tokens(1), max_new_tokens=12, do_sample=False))
    assert torch.equal(*outs)
    assert outs[0].shape == (1, TOKENS + 12)


def test_H1_a_model_takes_the_name_when_it_is_built_and_keeps_its_files(tmp_path: Any) -> None:
    model = _model("Mixtral")
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation="megablocks")
    assert again.config._experts_implementation == megablocks.hf.NAME
    model.set_experts_implementation("eager")
    torch.testing.assert_close(again.eval()(_tokens()).logits, model(_tokens()).logits, rtol=1e-4, atol=1e-5)
