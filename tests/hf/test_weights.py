"""LoRA on experts and frozen experts: the gradients of the trained part, and no work for the frozen one."""

from __future__ import annotations

import copy
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from megablocks.hf import OLDEST

transformers = pytest.importorskip("transformers", minversion=OLDEST)

import megablocks.ops.grouped.gathered_mm as products  # noqa: E402
from megablocks.hf import experts as experts_module  # noqa: E402
from megablocks.hf import weights as ours  # noqa: E402

from .test_models import _model, _step, _tokens  # noqa: E402

NAMES = ("Mixtral", "GptOss")  # (E, N, K) and (E, K, N)


class _Delta(nn.Module):
    """W + B · A, as a parametrization that we do not know."""

    def __init__(self, w: Tensor, rank: int = 2) -> None:
        super().__init__()
        self.b, self.a = (
            nn.Parameter(torch.randn(s) * 0.1) for s in ((*w.shape[:2], rank), (w.shape[0], rank, w.shape[2]))
        )

    def forward(self, w: Tensor) -> Tensor:
        return w + self.b @ self.a


def _experts(model: Any) -> list[nn.Module]:
    return [m for m in model.modules() if hasattr(m, "down_proj") and hasattr(m, "is_transposed")]


def _assert_close(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(actual[key], value, rtol=1e-5, atol=1e-5, msg=lambda m, n=key: f"{n}: {m}")


@pytest.mark.parametrize("name", NAMES)
def test_H3_an_unknown_parametrization_gets_its_gradients(name: str) -> None:
    model = _model(name).requires_grad_(False)
    for experts in _experts(model):
        for parameter in ("gate_up_proj", "down_proj"):
            parametrize.register_parametrization(experts, parameter, _Delta(getattr(experts, parameter)))
    expected, actual = _step(model, "eager"), _step(model, "megablocks")
    _assert_close(actual, expected)
    assert sum(".a" in key for key in actual) == 4


def _matrix_gradients(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """A list to which each dW that a product computes adds its shape."""
    shapes: list[tuple[int, ...]] = []

    def recorded(function: Any) -> Any:
        def record(*args: Any, **kwargs: Any) -> Any:
            out = function(*args, **kwargs)
            shapes.append(tuple(out.shape))
            return out

        return record

    from megablocks.ops.grouped import grouped_mm

    for module in (products, grouped_mm):
        monkeypatch.setattr(module, "grouped_mm_dw_op", recorded(module.grouped_mm_dw_op))
    return shapes


@pytest.mark.parametrize("name", NAMES)
def test_N5_frozen_experts_cost_no_weight_gradient(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = _model(name)
    shapes = _matrix_gradients(monkeypatch)
    _step(model, "megablocks")
    assert len(shapes) == 4  # up and down in two layers
    shapes.clear()
    for experts in _experts(model):
        experts.requires_grad_(False)
    expected = _step(model, "eager")
    _assert_close(_step(model, "megablocks"), expected)
    assert shapes == []


class _LoraFactorsProxy(nn.Module):
    """As PEFT 0.21 has it."""

    def __init__(self, w: Tensor, scaling: float) -> None:
        super().__init__()
        self.lhs = nn.Parameter(torch.randn(*w.shape[:2], 3) * 0.2)
        self.rhs = nn.Parameter(torch.randn(w.shape[0], 3, w.shape[2]) * 0.2)
        self.scaling = scaling

    def forward(self, w: Tensor) -> Tensor:
        return torch.baddbmm(w, self.lhs, self.rhs, alpha=self.scaling)


def _with_factors(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A frozen model whose experts have LoRA's factors behind their parameters, as PEFT makes them."""
    layer = ModuleType("layer")
    layer._LoraFactorsProxy = _LoraFactorsProxy  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "peft.tuners.lora.layer", layer)
    model = _model(name).requires_grad_(False)
    for experts in _experts(model):
        for parameter in ("gate_up_proj", "down_proj"):
            proxy = _LoraFactorsProxy(getattr(experts, parameter), scaling=0.7)
            parametrize.register_parametrization(experts, parameter, proxy)
    return model


@pytest.mark.parametrize("name", NAMES)
def test_H3_factors_kept_apart_enter_the_products(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = _with_factors(name, monkeypatch)
    expected = _step(model, "eager")
    shapes = _matrix_gradients(monkeypatch)
    _assert_close(_step(model, "megablocks"), expected)
    assert sum(".lhs" in key for key in expected) == 4
    assert len(shapes) == 8 and all(3 in shape for shape in shapes), shapes


@pytest.mark.parametrize("name", NAMES)
def test_H3_factors_enter_the_products_of_a_few_tokens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, outputs, calls = _with_factors(name, monkeypatch), [], []
    few = experts_module.few
    monkeypatch.setattr(experts_module, "few", lambda *args: calls.append(args) or few(*args))
    monkeypatch.setitem(experts_module.FEW_PAIRS, "cpu", 1000)
    for implementation in ("eager", "megablocks"):
        model.set_experts_implementation(implementation)
        with torch.no_grad():
            outputs.append({"logits": model(_tokens())[0]})
    _assert_close(outputs[1], outputs[0])
    assert len(calls) == 2  # once in each layer


@pytest.mark.parametrize("name", NAMES)
def test_H3_peft_factors_enter_the_products(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    peft = pytest.importorskip("peft", minversion="0.21")
    rank = 3
    parameters = [f"{place}.{p}" for place in ("mlp.experts",) for p in ("gate_up_proj", "down_proj")]
    config = peft.LoraConfig(r=rank, target_modules=[], target_parameters=parameters)
    model = peft.get_peft_model(_model(name), config)
    for key, parameter in model.named_parameters():
        if "lora_B" in key:
            nn.init.normal_(parameter, std=0.2)  # zeros at first, which would hide A's gradient
    base = model.get_base_model()
    expected = _step(base, "eager")
    assert sum("lora_" in key for key in expected) == 8
    shapes = _matrix_gradients(monkeypatch)
    _assert_close(_step(base, "megablocks"), expected)
    assert len(shapes) == 8 and all(rank in shape for shape in shapes), shapes
    model.eval()
    outs = [base.generate(_tokens(1), max_new_tokens=6, do_sample=False)]
    base.set_experts_implementation("eager")
    outs.append(base.generate(_tokens(1), max_new_tokens=6, do_sample=False))
    assert torch.equal(*outs)


@pytest.mark.parametrize("name", NAMES)
def test_H3_a_lora_fine_tune_lowers_the_loss_as_pefts_own(name: str) -> None:
    peft = pytest.importorskip("peft", minversion="0.21")
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    torch.manual_seed(1)
    first = peft.get_peft_model(_model(name), peft.LoraConfig(r=4, target_modules=[], target_parameters=parameters))
    losses = []
    for implementation in ("eager", "megablocks"):
        model = copy.deepcopy(first).get_base_model()
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        seen = []
        for _ in range(6):
            model.set_experts_implementation(implementation)
            optimizer.zero_grad()
            loss = model(_tokens(), labels=_tokens()).loss
            loss.backward()
            optimizer.step()
            seen.append(loss.item())
        losses.append(seen)
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-4, atol=1e-4)
    assert losses[1][-1] < losses[1][0]


def test_quantized_weights_are_refused_by_name() -> None:
    module = _experts(_model("Mixtral"))[0].requires_grad_(False)
    module.down_proj = nn.Parameter(module.down_proj.to(torch.float8_e4m3fn), requires_grad=False)
    with pytest.raises(ValueError, match=r"MixtralExperts.down_proj is torch.float8_e4m3fn: .* without quantization"):
        ours.read_weight(module, "down_proj")
