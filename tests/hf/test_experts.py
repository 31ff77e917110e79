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
from torch._subclasses.fake_tensor import FakeTensorMode

from megablocks.hf import NAME, OLDEST, register
from megablocks.testing.tolerances import assert_as_exact_as

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


WAYS = ("few", *ours.WAYS)
MIXTRAL = ("transformers.models.mixtral.modeling_mixtral", "MixtralExperts")
ARIA = ("transformers.models.aria.modeling_aria", "AriaExperts")
GPT_OSS = ("transformers.models.gpt_oss.modeling_gpt_oss", "GptOssExperts")
MIXTRAL_AND_NEMOTRON = [MIXTRAL, ("transformers.models.nemotron_h.modeling_nemotron_h", "NemotronHExperts")]
DECORATED = list(_decorated())
CLASSES = [pytest.param(*names, id=names[1]) for names in DECORATED]
ON_HOPPER = ((MIXTRAL, "fused"), (ARIA, "grouped"), (GPT_OSS, "grouped"))


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
        index[1] = 2**32 + torch.arange(K)  # in 32 bits these are experts
    return x, index, weight


Results = dict[str, Tensor]


def _results(module: nn.Module, compute: Any, x: Tensor, index: Tensor, weight: Tensor) -> Results:
    module.zero_grad()
    inputs = x.detach().requires_grad_(), weight.detach().requires_grad_()
    y = compute(inputs[0], index, inputs[1])
    if not y.requires_grad:
        return {"y": y}
    y.backward(torch.linspace(-1, 1, y.numel()).view_as(y).to(y.dtype))
    grads = {name: p.grad for name, p in module.named_parameters()}
    return {"y": y.detach(), "x": inputs[0].grad, "weight": inputs[1].grad, **grads}  # type: ignore[dict-item]


def _eager(module: nn.Module, x: Tensor, index: Tensor, weight: Tensor) -> Results:
    """The model's own loop, where a sentinel is a pair of weight 0."""
    used = index < E
    return _results(module, lambda x, i, w: module(x, torch.where(used, i, 0), w * used), x, index, weight)


def _ours(module: nn.Module, way: str, x: Tensor, index: Tensor, weight: Tensor) -> Results:
    def compute(x: Tensor, ids: Tensor, weight: Tensor) -> Tensor:
        call = ours.read_call(module, x)
        if way == "few":
            with torch.no_grad():
                return ours.few(call, ids, weight).to(x.dtype)
        routing = ours.routing_of(ids, weight, E)
        return ours.WAYS[way](call, ours.build_dispatch(routing), routing.weight).to(x.dtype)

    return _results(module, compute, x, index, weight)


def _assert_equal(actual: Results, expected: Results) -> None:
    assert actual.keys() in (expected.keys(), {"y"})  # "few" gives no gradients
    for name, value in actual.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def _ways(module: nn.Module) -> list[str]:
    """The ways that can compute `module`."""
    plain = ours.activation_of(module) is not None and not getattr(module, "has_post_expert_norm", False)
    return [way for way in WAYS if way != "fused" or plain]


def test_transformers_has_decorated_classes() -> None:
    names = {param.id for param in CLASSES}
    assert len(names) >= 50
    assert {"MixtralExperts", "GptOssExperts", "NemotronHExperts", "OlmoeExperts", "DeepseekV3Experts"} <= names


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize(("module", "name"), CLASSES)
def test_H1_values_and_gradients_equal_the_models_own(module: str, name: str) -> None:
    experts, inputs = _make(module, name), _inputs()
    expected = _eager(experts, *inputs)
    for way in _ways(experts):
        _assert_equal(_ours(experts, way, *inputs), expected)


@pytest.mark.parametrize(("module", "name"), [p for p in CLASSES if str(p.id).startswith(CLAMPED)])
def test_H1_a_clamp_is_never_dropped(module: str, name: str) -> None:
    experts, inputs = _make(module, name), _inputs()
    assert ours.clamp_of(experts) is not None  # by our kernel
    y = _ours(experts, "grouped", *inputs)["y"]
    for limit in ("limit", "swiglu_limit"):
        if hasattr(experts, limit):
            setattr(experts, limit, 1e9)
    assert (y - _ours(experts, "grouped", *inputs)["y"]).abs().max() > 0.1


@pytest.mark.parametrize("way", ours.WAYS)
@pytest.mark.parametrize(("module", "name"), MIXTRAL_AND_NEMOTRON)
def test_gradients_of_the_parameters_are_kept_as_they_are_computed(module: str, name: str, way: str) -> None:
    """A gradient in another layout than its parameter's is copied by autograd."""
    experts, given = _make(module, name), {}
    for key, parameter in experts.named_parameters():
        parameter.register_hook(lambda grad, key=key: given.__setitem__(key, grad.data_ptr()))
    x, ids, weight = _inputs()
    routing = ours.routing_of(ids, weight, E)
    call = ours.read_call(experts, x)
    ours.WAYS[way](call, ours.build_dispatch(routing), routing.weight).sum().backward()
    assert len(given) == 2 and given == {key: p.grad.data_ptr() for key, p in experts.named_parameters()}


@pytest.mark.parametrize("act", ["silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "relu2", "gelu_10", "mish"])
@pytest.mark.parametrize(("module", "name"), MIXTRAL_AND_NEMOTRON)
def test_H1_every_activation(module: str, name: str, act: str) -> None:
    experts, inputs = _make(module, name, hidden_act=act, mlp_hidden_act=act), _inputs()
    ways, gated = _ways(experts), name == "MixtralExperts"
    known = act not in ("gelu_10", "mish") and not (gated and act == "relu2")
    assert ("fused" in ways) == known
    expected = _eager(experts, *inputs)
    for way in ways:
        _assert_equal(_ours(experts, way, *inputs), expected)


def test_H1_an_instance_with_a_gate_of_its_own() -> None:
    experts, inputs = _make(*MIXTRAL), _inputs()
    plain = _ours(experts, "grouped", *inputs)["y"]
    experts._apply_gate = lambda h: h.chunk(2, dim=-1)[1].clamp(max=0.1)
    assert _ways(experts) == ["few", "grouped"]
    few, grouped = (_ours(experts, way, *inputs) for way in ("few", "grouped"))
    _assert_equal(few, grouped)
    assert not torch.allclose(plain, grouped["y"], atol=0.1)


def test_H1_a_clamped_family_with_another_gate_keeps_it() -> None:
    experts, inputs = _make(*GPT_OSS), _inputs()
    clamped = _ours(experts, "grouped", *inputs)["y"]
    other = type(experts.__class__.__name__, (type(experts),), {"_apply_gate": lambda self, h: h[..., ::2].tanh()})
    for change in (lambda: setattr(experts, "_apply_gate", lambda h: h[..., ::2].tanh()),
                   lambda: (delattr(experts, "_apply_gate"), setattr(experts, "__class__", other))):  # fmt: skip
        change()
        assert ours.clamp_of(experts) is None
        assert not torch.allclose(clamped, _ours(experts, "grouped", *inputs)["y"], atol=0.1)


def test_H1_alternating_halves_without_a_gate_of_their_own() -> None:
    experts, inputs = _make(*MIXTRAL), _inputs()
    expected = _eager(experts, *inputs)
    alternate = torch.arange(2 * I).view(2, I).t().flatten()
    with torch.no_grad():
        experts.gate_up_proj.copy_(experts.gate_up_proj[:, alternate])
    experts.is_concatenated = False
    for act_fn in (experts.act_fn, nn.SiLU(), lambda z: z * torch.sigmoid(z)):
        del experts.act_fn
        experts.act_fn = act_fn
        for way in ("few", "grouped"):
            actual = _ours(experts, way, *inputs)
            if way == "grouped":
                actual["gate_up_proj"] = actual["gate_up_proj"][:, alternate.argsort()]
            _assert_equal(actual, expected)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize(("module", "name"), CLASSES)
def test_H2_ids_outside_are_skipped(module: str, name: str) -> None:
    experts, inputs = _make(module, name), _inputs(sentinels=True)
    expected = _eager(experts, *inputs)
    assert not expected["y"][:2].any() and not expected["x"][:2].any()
    for way in _ways(experts):
        actual = _ours(experts, way, *inputs)
        _assert_equal(actual, expected)
        assert way == "few" or not actual["weight"][inputs[1] >= E].any()


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("way", WAYS)
def test_H2_nothing_but_ids_outside_and_no_token(way: str) -> None:
    experts = _make(*MIXTRAL)
    x, ids, weight = _inputs()
    for tokens, chosen in ((T, torch.full_like(ids, -1)), (0, ids[:0])):
        results = _ours(experts, way, x[:tokens], chosen, weight[:tokens])
        assert results["y"].shape == (tokens, H)
        assert not any(value.any() for value in results.values())


def test_the_way_follows_the_gradient_and_the_number_of_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    experts, calls = _make(*MIXTRAL), []
    few = ours.few
    monkeypatch.setattr(ours, "few", lambda call, ids, weights: calls.append(len(ids)) or few(call, ids, weights))
    fits = ours.FEW_PAIRS["cpu"] // K
    for tokens in (fits, fits + 1):
        ours.experts_forward(experts, *_inputs(tokens))
        with torch.no_grad():
            ours.experts_forward(experts, *_inputs(tokens))
    assert calls == [fits]


@pytest.mark.usefixtures("poison")
def test_H1_plain_experts_with_biases() -> None:
    """No class of transformers has biases and a plain gate, so Mixtral's get biases here."""
    experts, inputs = _make(*MIXTRAL), _inputs()
    experts.has_bias = True
    for name in ("gate_up_proj", "down_proj"):
        experts.register_parameter(f"{name}_bias", nn.Parameter(torch.empty_like(getattr(experts, name)[..., 0])))
    _draw(experts)
    grouped = _ours(experts, "grouped", *inputs)
    for way in ("few", "fused"):
        _assert_equal(_ours(experts, way, *inputs), grouped)
    experts.requires_grad_(False).gate_up_proj_bias.zero_()
    assert not torch.allclose(_ours(experts, "fused", *inputs)["y"], grouped["y"], atol=0.1)


@pytest.mark.parametrize(
    ("module", "name", "way"), [(*names, way) for names, way in ON_HOPPER if names in DECORATED], ids=str
)
@pytest.mark.parametrize("has_bias", [False, True])
def test_the_way_on_hopper(module: str, name: str, way: str, has_bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fused with biases and without; grouped where weights lie transposed or the gate is the model's own."""
    monkeypatch.setattr(ours, "runs_on_hopper", lambda device: True)
    experts = _make(module, name, hidden_size=16, intermediate_size=8).bfloat16()
    call = ours.read_call(experts, torch.zeros(T, 16, dtype=torch.bfloat16))
    bias = torch.zeros(E, 16) if has_bias else None
    assert ours.choose_way(call._replace(up_bias=bias, down_bias=bias)) == way


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("module", "name"), [MIXTRAL, GPT_OSS])
def test_H1_half_types_are_as_exact_as_the_models_own(module: str, name: str, dtype: torch.dtype) -> None:
    experts = _make(module, name)
    with torch.no_grad():
        for tensor in experts.parameters():
            tensor.copy_(tensor.to(dtype))
    inputs = [t.to(dtype).float() if t.is_floating_point() else t for t in _inputs()]
    truth = _eager(experts.double(), *(t.double() if t.is_floating_point() else t for t in inputs))
    experts.to(dtype)
    plain = _eager(experts, inputs[0].to(dtype), *inputs[1:])
    for way in _ways(experts):
        actual = _ours(experts, way, inputs[0].to(dtype), *inputs[1:])
        for key, value in actual.items():
            assert value.dtype == plain[key].dtype
            assert_as_exact_as(value, plain[key], truth[key], 2.5)


def test_H1_autocast_and_other_dtypes_of_the_input() -> None:
    experts = _make(*MIXTRAL)
    x, ids, weight = _inputs()
    with torch.autocast("cpu", torch.bfloat16):
        y = ours.experts_forward(experts, x, ids, weight)
        y.sum().backward()
    assert y.dtype == torch.float32 and experts.down_proj.grad.dtype == torch.float32
    expected = _eager(experts, x, ids, weight)["y"]
    torch.testing.assert_close(y, expected, rtol=5e-2, atol=5e-2)
    y = ours.experts_forward(experts.bfloat16(), x, ids, weight)  # as after a norm in float32
    assert y.dtype == torch.float32
    torch.testing.assert_close(y, expected, rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("few", [False, True], ids=["", "few"])
@pytest.mark.parametrize(("module", "name"), [MIXTRAL, GPT_OSS])
def test_N9_compiles_in_one_graph(module: str, name: str, few: bool) -> None:
    experts = _make(module, name).requires_grad_(not few)
    inputs = [t.detach().requires_grad_(t.is_floating_point() and not few) for t in _inputs(5 if few else T)]
    compiled = torch.compile(ours.experts_forward, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(experts, *inputs), ours.experts_forward(experts, *inputs))


@pytest.mark.parametrize("gradient", [False, True], ids=["", "gradient"])
@pytest.mark.parametrize("example", [T, 2], ids=["", "few"])
def test_an_exported_program_takes_other_numbers_of_tokens(example: int, gradient: bool) -> None:
    register()
    experts, tokens = _make(*MIXTRAL), torch.export.Dim.DYNAMIC
    experts.config._experts_implementation = NAME
    with torch.set_grad_enabled(gradient):
        inputs = tuple(t.detach() for t in _inputs(example))
        program = torch.export.export(experts, inputs, dynamic_shapes=[{0: tokens}] * 3).module()
        for count in (2, T):  # on both sides of FEW_PAIRS
            inputs = _inputs(count)
            torch.testing.assert_close(program(*inputs), experts(*inputs), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("module", "name"), [*MIXTRAL_AND_NEMOTRON, GPT_OSS])
def test_no_host_synchronization(module: str, name: str, way: str) -> None:
    """A fake tensor has no values, so whatever reads one on the host raises."""
    with FakeTensorMode():
        experts = _make(module, name)
        if way in _ways(experts):
            inputs = torch.randn(T, H), torch.zeros(T, K, dtype=torch.int64), torch.rand(T, K)
            assert _ours(experts, way, *inputs)["y"].shape == (T, H)
