"""Each experts class that transformers decorates, alone: ours gives the values and gradients of its own forward."""

from __future__ import annotations

import ast
import importlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megablocks.hf import OLDEST

pytest.importorskip("transformers", minversion=OLDEST)

from megablocks.hf import experts as ours  # noqa: E402

DECORATOR = "use_experts_implementation"
E, K, T, H, I = 5, 3, 11, 13, 7  # noqa: E741
CLAMPED = ("GptOss", "DeepseekV4", "Glm5Next", "MiniMaxM3", "OpenAIPrivacyFilter", "HYV4")


def _config(**changed: Any) -> SimpleNamespace:
    """Every name by which a decorated class asks for a size or an activation."""
    experts = dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), E)
    widths = dict.fromkeys(("intermediate_size", "moe_intermediate_size", "expert_ffn_hidden_size"), I)
    hidden = dict.fromkeys(("hidden_size", "moe_hidden_size"), H)
    acts = {"hidden_act": "silu", "hidden_activation": "gelu_pytorch_tanh", "mlp_hidden_act": "relu2"}
    # limits that bite at the values of these tests
    gates = {"swiglu_limit": 0.5, "swiglu_alpha": 1.702, "mlp_gate_softcap": 0.7, "mlp_up_softcap": 0.6}
    others = {"moe_latent_size": None, "post_norm_eps": 1e-6, "_experts_implementation": "eager"}
    values = {**experts, **widths, **hidden, **acts, **gates, **others, **changed}
    # the limits of a class that has one a layer
    return SimpleNamespace(**values, swiglu_limits=[0.5], layer_types=["moe"])


def _decorated() -> Iterator[tuple[str, str]]:
    """(module, class) of every decorated class in the installed transformers, without importing it."""
    spec = importlib.util.find_spec("transformers")
    assert spec is not None and spec.origin is not None
    for path in sorted((Path(spec.origin).parent / "models").glob("*/modeling_*.py")):
        text = path.read_text()
        if f"@{DECORATOR}" not in text:
            continue
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef) and any(DECORATOR in ast.unparse(d) for d in node.decorator_list):
                yield f"transformers.models.{path.parent.name}.{path.stem}", node.name


CLASSES = [pytest.param(*names, id=names[1]) for names in _decorated()]


def _draw(module: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    return module


def _make(module: str, name: str, **changed: Any) -> nn.Module:
    cls = getattr(importlib.import_module(module), name)
    return _draw(cls(_config(**changed)))


def _inputs(tokens: int = T, *, sentinels: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(tokens, H, generator=generator).requires_grad_()
    index = torch.stack([torch.randperm(E - 1, generator=generator)[:K] for _ in range(tokens)])  # the last has none
    weight = torch.rand(tokens, K, generator=generator).requires_grad_()
    if sentinels:
        index[torch.rand(tokens, K, generator=generator) < 0.4] = E
        index[0] = E
    return x, index, weight


Results = dict[str, Tensor]


def _results(module: nn.Module, compute: Any, x: Tensor, index: Tensor, weight: Tensor) -> Results:
    module.zero_grad()
    inputs = x.detach().requires_grad_(), weight.detach().requires_grad_()
    y = compute(inputs[0], index, inputs[1])
    y.backward(torch.linspace(-1, 1, y.numel()).view_as(y).to(y.dtype))
    grads = {name: p.grad for name, p in module.named_parameters()}
    return {"y": y.detach(), "x": inputs[0].grad, "weight": inputs[1].grad, **grads}  # type: ignore[dict-item]


def _eager(module: nn.Module, x: Tensor, index: Tensor, weight: Tensor) -> Results:
    """The model's own loop, where a sentinel is a pair of weight 0."""
    used = index < E
    return _results(module, lambda x, i, w: module(x, torch.where(used, i, 0), w * used), x, index, weight)


def _ours(module: nn.Module, way: str, x: Tensor, index: Tensor, weight: Tensor) -> Results:
    def compute(*inputs: Tensor) -> Tensor:
        return ours.WAYS[way](ours._call(module, *inputs)).to(x.dtype)

    return _results(module, compute, x, index, weight)


def _assert_equal(actual: Results, expected: Results) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def _ways(module: nn.Module) -> list[str]:
    """The ways that can compute `module`."""
    plain = ours.activation_of(module) is not None and not getattr(module, "has_post_expert_norm", False)
    return [way for way in ours.WAYS if way != "fused" or plain]


def test_transformers_has_decorated_classes() -> None:
    names = {param.id for param in CLASSES}
    assert len(names) >= 50
    assert {"MixtralExperts", "GptOssExperts", "NemotronHExperts", "OlmoeExperts", "DeepseekV3Experts"} <= names


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("sentinels", [False, True], ids=["", "sentinels"])
@pytest.mark.parametrize(("module", "name"), CLASSES)
def test_H1_values_and_gradients_equal_the_models_own(module: str, name: str, sentinels: bool) -> None:
    experts = _make(module, name)
    inputs = _inputs(sentinels=sentinels)
    expected = _eager(experts, *inputs)
    for way in _ways(experts):
        _assert_equal(_ours(experts, way, *inputs), expected)


@pytest.mark.parametrize(
    ("module", "name"), [param for param in CLASSES if str(param.id).startswith(CLAMPED)]
)
def test_H1_a_clamp_is_never_dropped(module: str, name: str) -> None:
    experts, inputs = _make(module, name), _inputs()
    y = _ours(experts, "grouped", *inputs)["y"]
    for limit in ("limit", "swiglu_limit"):
        if hasattr(experts, limit):
            setattr(experts, limit, 1e9)
    assert (y - _ours(experts, "grouped", *inputs)["y"]).abs().max() > 0.1
