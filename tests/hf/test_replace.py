"""One call replaces the experts of a module, says which, and can be undone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import megablocks.hf

pytest.importorskip("transformers", minversion=megablocks.hf.OLDEST)

from .test_models import _model, _tokens  # noqa: E402


class _Wrapper(nn.Module):
    """Not a model of transformers, so it has no set_experts_implementation."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = _model("Mixtral"), _model("Qwen3Moe")
        self.experts = nn.ModuleList([nn.Linear(2, 2)])


def test_it_says_what_it_replaced_and_what_it_left() -> None:
    model = _Wrapper()
    for part in (model.first, model.second):
        part.set_experts_implementation("eager")  # the default refuses sizes like these
    before = [m.config._experts_implementation for m in (model.first, model.second)]
    expected = model.second(_tokens()).logits
    done = megablocks.hf.replace_moe(model)
    names = [f"{place}.model.layers.{i}.mlp.experts" for place in ("first", "second") for i in (0, 1)]
    assert done.names == names
    assert done.left == {"experts": "ModuleList is not decorated with transformers' use_experts_implementation"}
    assert all(name in repr(done) for name in (*names, "ModuleList"))
    assert [m.config._experts_implementation for m in (model.first, model.second)] == [megablocks.hf.NAME] * 2
    torch.testing.assert_close(model.second(_tokens()).logits, expected, rtol=1e-4, atol=1e-5)
    for _ in range(2):
        done.undo()
        assert [m.config._experts_implementation for m in (model.first, model.second)] == before


def test_what_is_no_module_is_refused_by_name() -> None:
    """Such as the name of a model, which from_pretrained takes."""
    with pytest.raises(ValueError, match="^model is a str: must be a torch.nn.Module, as from_pretrained returns$"):
        megablocks.hf.replace_moe("mistralai/Mixtral-8x7B-v0.1")


def test_nothing_to_replace_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="^Linear: no experts can be replaced: it holds no experts$"):
        megablocks.hf.replace_moe(nn.Linear(2, 2))
    model = _model("Mixtral").requires_grad_(False)
    before = model.config._experts_implementation
    for layer in model.model.layers:
        weight = layer.mlp.experts.gate_up_proj
        layer.mlp.experts.gate_up_proj = nn.Parameter(weight.to(torch.float8_e5m2), requires_grad=False)
    with pytest.raises(ValueError, match=r"layers.1.mlp.experts: MixtralExperts.gate_up_proj is torch.float8_e5m2"):
        megablocks.hf.replace_moe(model)
    assert model.config._experts_implementation == before


def test_adapters_around_the_experts_are_not_left_alone() -> None:
    peft = pytest.importorskip("peft", minversion="0.21")
    config = peft.LoraConfig(r=2, target_modules=[], target_parameters=["mlp.experts.gate_up_proj"])
    done = megablocks.hf.replace_moe(peft.get_peft_model(_model("Mixtral"), config))
    assert len(done.names) == 2 and not done.left


def test_experts_that_share_a_config_with_refused_ones_are_left_too() -> None:
    model = _Wrapper()
    weight = model.first.model.layers[1].mlp.experts.requires_grad_(False).gate_up_proj
    weight.data = weight.to(torch.float8_e4m3fn)
    before = model.first.config._experts_implementation
    done = megablocks.hf.replace_moe(model)
    assert done.names == [f"second.model.layers.{i}.mlp.experts" for i in (0, 1)]
    first = [f"first.model.layers.{i}.mlp.experts" for i in (0, 1)]
    assert done.left.keys() == {"experts", *first}
    assert done.left[first[0]] == f"its config is also that of {first[1]}, which cannot be replaced"
    assert "float8_e4m3fn" in done.left[first[1]]
    assert model.first.config._experts_implementation == before


def test_modules_of_one_config_change_together() -> None:
    model = _model("Mixtral")
    twin = type(model)(model.config)
    before = model.config._experts_implementation
    done = megablocks.hf.replace_moe(model.model.layers[0])
    experts = [layer.mlp.experts for part in (model, twin) for layer in part.model.layers]
    assert {module.config._experts_implementation for module in experts} == {megablocks.hf.NAME}
    done.undo()
    assert {module.config._experts_implementation for module in experts} == {before}


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_replacements_are_undone_in_any_order(order: tuple[int, int]) -> None:
    model = _model("Mixtral")
    before = model.config._experts_implementation
    done = [megablocks.hf.replace_moe(model), megablocks.hf.replace_moe(model.model.layers[0])]
    assert done[1].names == ["mlp.experts"]
    for i in order:
        done[i].undo()
    assert model.config._experts_implementation == before != megablocks.hf.NAME
