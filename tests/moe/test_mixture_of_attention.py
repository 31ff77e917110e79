"""Mixture of attention against dense attention with every expert's heads, masked by the router's choice."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megablocks.config import ConfigError, MoEConfig
from megablocks.moe.mixture_of_attention import MixtureOfAttention, rotate
from megablocks.ops import library
from megablocks.ops.grouped.grouped_mm_triton import interpreted
from megablocks.testing.oracle import relative_error
from megablocks.testing.poison import poisoned_empty

B, S, H, E, K, HEADS, D = 2, 9, 12, 5, 2, 4, 6


def config_of(**changes) -> MoEConfig:
    values = dict(hidden_size=H, ffn_hidden_size=HEADS * D, num_experts=E, top_k=K, init_std=0.4, mlp_bias=True)
    return MoEConfig(**{**values, "normalize_top_k": 1.0, "load_balancing_loss_weight": 0.1, **changes})


def layer_of(dtype: torch.dtype = torch.float64, seed: int = 0, config: MoEConfig | None = None, **options):
    torch.manual_seed(seed)
    layer = MixtureOfAttention(config or config_of(), num_heads=HEADS, dtype=dtype, **options)
    with torch.no_grad():
        for name, p in layer.named_parameters():
            if name.endswith("bias"):
                p.normal_()
    return layer


def rotated(x: Tensor, base: float) -> Tensor:
    """x (B, S, heads, D), each pair (d, d + D/2) as a complex number times e^(i·position·base^(-2d/D))."""
    half = x.shape[-1] // 2
    position = torch.arange(x.shape[1], dtype=torch.float64)
    angle = position[:, None] * base ** (-torch.arange(half, dtype=torch.float64) / half)
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)[:, None]
    return torch.cat((turned.real, turned.imag), -1)


def dense(layer: MixtureOfAttention, parameters: dict[str, Tensor], x: Tensor) -> Tensor:
    """Every expert's heads for every token, an explicit softmax over an explicit mask, then the chosen ones' sum."""
    scores = (x @ parameters["router.layer.weight"].t()).softmax(-1)
    weight, ids = scores.topk(K, dim=-1)
    weight = weight / weight.sum(-1, keepdim=True)
    gates = torch.zeros_like(scores).scatter(-1, ids, weight)
    kv = F.linear(x, parameters["key_value.weight"], parameters.get("key_value.bias"))
    key, value = kv.view(*x.shape[:2], 2, layer.num_kv_heads, -1).unbind(2)
    base, size = layer.rope_base, layer.head_size
    key = key if base is None else rotated(key, base)
    key, value = (t.repeat_interleave(HEADS // layer.num_kv_heads, dim=2) for t in (key, value))
    allowed = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool)
    allowed = allowed.tril() if layer.causal else allowed
    y = torch.zeros_like(x)
    for e in range(E):
        bias = {n: parameters[f"{n}.bias"][e] if f"{n}.bias" in parameters else None for n in ("query", "output")}
        query = F.linear(x, parameters["query.weight"][e], bias["query"]).view(*x.shape[:2], HEADS, size)
        query = query if base is None else rotated(query, base)
        logits = torch.einsum("bqhd,bkhd->bhqk", query, key) / size**0.5
        attention = logits.masked_fill(~allowed, float("-inf")).softmax(-1)
        out = torch.einsum("bhqk,bkhd->bqhd", attention, value).flatten(2)
        y = y + gates[..., e : e + 1] * F.linear(out, parameters["output.weight"][e], bias["output"])
    return y


@pytest.mark.parametrize("options", [
    {}, {"num_kv_heads": 2}, {"num_kv_heads": 1, "rope_base": None}, {"causal": False, "rope_base": 100.0},
], ids=str)  # fmt: skip
def test_N6_attention_equals_a_dense_masked_one(options):
    """Output, and gradients of the input and of every parameter."""
    layer = layer_of(**options)
    x, dy = torch.randn(B, S, H, dtype=torch.float64, requires_grad=True), torch.randn(B, S, H, dtype=torch.float64)
    parameters = dict(layer.named_parameters())
    expected = dense(layer, parameters, x)
    with poisoned_empty():
        y, aux = layer.forward_with_aux(x)
        got = torch.autograd.grad(y, [x, *parameters.values()], dy)
    assert relative_error(y, expected) < 1e-6, "rotary angles are float32"
    for name, a, b in zip(
        ["x", *parameters], got, torch.autograd.grad(expected, [x, *parameters.values()], dy), strict=True
    ):
        assert relative_error(a, b) < 1e-5, name
    assert aux.metrics["tokens_per_expert"].sum() == B * S * K and aux.losses.keys() == {"load_balancing_loss"}


@pytest.mark.skipif(not interpreted(), reason="needs TRITON_INTERPRET=1")
def test_N6_attention_equals_a_dense_masked_one_through_the_kernels(monkeypatch):
    monkeypatch.setattr(library, "runs_triton", lambda t: True)
    layer = layer_of(torch.float32, num_kv_heads=2)
    x = torch.randn(B, S, H, requires_grad=True)
    wide = {n: p.detach().double().requires_grad_() for n, p in layer.named_parameters()}
    y, expected = layer(x), dense(layer, wide, x.double())
    assert relative_error(y, expected) < 1e-5
    got = torch.autograd.grad(y.sin().sum(), list(layer.parameters()))
    for name, a, b in zip(wide, got, torch.autograd.grad(expected.sin().sum(), list(wide.values())), strict=True):
        assert relative_error(a, b) < 1e-4, name


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-4), (torch.bfloat16, 0.04)], ids=str)
@pytest.mark.parametrize("options", [{}, {"num_kv_heads": 2}, {"causal": False, "num_kv_heads": 1}], ids=str)
def test_N6_attention_equals_a_dense_masked_one_on_a_gpu(options, dtype, tolerance):
    """Output, dx and every parameter's gradient, against float64 on the CPU."""
    layer = layer_of(dtype, **options)
    x, dy = (torch.randn(B, S, H).to(dtype) for _ in range(2))
    wide = {n: p.detach().double().requires_grad_() for n, p in layer.named_parameters()}
    wide_x = x.double().requires_grad_()
    expected = dense(layer, wide, wide_x)
    expected.backward(dy.double())
    layer.cuda()
    x = x.cuda().requires_grad_()
    ids = (wide_x @ wide["router.layer.weight"].t()).topk(K, dim=-1).indices.view(-1, K)
    assert torch.equal(layer.router(x.flatten(0, 1)).expert.view(-1, K).sort(1)[0].cpu().long(), ids.sort(1)[0])
    with poisoned_empty():
        y = layer(x)
        y.backward(dy.cuda())
    assert relative_error(y.detach().cpu(), expected.detach()) < tolerance
    assert relative_error(x.grad.cpu(), wide_x.grad) < tolerance
    for name, p in layer.named_parameters():
        assert relative_error(p.grad.cpu(), wide[name].grad) < tolerance, name


def test_N6_attention_trains_as_a_dense_masked_one():
    """Ten steps of both from the same weights: losses and weights stay together, and the loss falls."""
    ours, theirs = layer_of(num_kv_heads=2), layer_of(num_kv_heads=2)
    parameters = dict(theirs.named_parameters())
    steps = [torch.optim.Adam(m.parameters(), lr=1e-2) for m in (ours, theirs)]
    x = torch.randn(B, S, H, dtype=torch.float64)
    target, losses = x.roll(1, dims=1), []
    for _ in range(10):
        for y, optimizer in ((ours(x), steps[0]), (dense(theirs, parameters, x), steps[1])):
            losses.append(F.mse_loss(y, target))
            optimizer.zero_grad()
            losses[-1].backward()
            optimizer.step()
        assert losses[-2].item() == pytest.approx(losses[-1].item(), rel=1e-5)
    assert losses[-1] < 0.7 * losses[0]
    for name, p in ours.named_parameters():
        assert relative_error(p.detach(), parameters[name].detach()) < 1e-3, name


def test_a_token_does_not_see_those_after_it():
    layer = layer_of()
    x = torch.randn(1, S, H, dtype=torch.float64)
    y = layer(x)
    later = x.clone()
    later[:, 5:] += 1
    assert torch.equal(layer(later)[:, :5], y[:, :5])
    assert not torch.allclose(layer(later)[:, 5:], y[:, 5:])


def test_rotation_keeps_lengths_and_sees_only_distances():
    q, k = torch.randn(1, 1, 1, 8).expand(1, 20, 1, 8), torch.randn(1, 1, 1, 8).expand(1, 20, 1, 8)
    a, b = rotate(q, 10000.0)[0, :, 0], rotate(k, 10000.0)[0, :, 0]
    assert torch.allclose(a.norm(dim=-1), q[0, :, 0].norm(dim=-1), atol=1e-5)
    assert torch.allclose(a[3] @ b[1], a[13] @ b[11], atol=1e-5)
    assert not torch.allclose(a[3] @ b[1], a[3] @ b[2], atol=1e-3)


def test_dropout_only_in_training():
    layer, x = layer_of(attention_dropout=0.5), torch.randn(B, S, H, dtype=torch.float64)
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))


def test_R3_attention_without_tokens():
    layer = layer_of(torch.float32)
    for shape in ((0, S, H), (B, 0, H)):
        y, aux = layer.forward_with_aux(torch.zeros(shape))
        (y.sum() + sum(aux.losses.values())).backward()
        assert y.shape == shape and all((p.grad == 0).all() for p in layer.parameters())


def test_N3_a_nan_token_stays_in_its_sequence():
    """Within it torch's attention spreads it: a masked probability of 0 times a NaN value is NaN."""
    layer, x = layer_of(), torch.randn(B, S, H, dtype=torch.float64)
    y = layer(x)
    x[0, 6] = float("nan")
    dirty, aux = layer.forward_with_aux(x)
    assert torch.allclose(dirty[1], y[1], rtol=1e-12) and dirty[0, 6].isnan().all()
    assert aux.metrics["nonfinite_tokens"] == 1


def test_N5_attention_under_autocast():
    layer, x = layer_of(torch.float32, num_kv_heads=2), torch.randn(B, S, H)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    wide = {n: p.detach().double() for n, p in layer.named_parameters()}
    chosen = layer.router(x).expert
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(layer.router(x).expert, chosen), "bfloat16 logits chose other experts: draw another x"
    assert relative_error(y, dense(layer, wide, x.double())) < 3e-2


def test_N9_attention_compiles_in_one_graph():
    layer, x = layer_of(torch.float32), torch.randn(B, S, H)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.allclose(compiled(x), layer(x), atol=1e-5)
    parameters = list(layer.parameters())
    for a, b in zip(
        torch.autograd.grad(compiled(x).sin().sum(), parameters),
        torch.autograd.grad(layer(x).sin().sum(), parameters),
        strict=True,
    ):
        assert torch.allclose(a, b, atol=1e-5)


def test_a_small_model_learns_to_look_one_token_back():
    """30 steps: each token is to be predicted from the one before the last; only attention can carry it."""
    words, width = 8, 16
    config = MoEConfig(
        hidden_size=width, ffn_hidden_size=16, num_experts=4, top_k=2, init_std=0.3, load_balancing_loss_weight=0.01
    )
    embed, head = nn.Embedding(words, width), nn.Linear(width, words)
    attention = MixtureOfAttention(config, num_heads=2, num_kv_heads=1)
    model = nn.ModuleList([embed, attention, head])
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
    losses = []
    for _ in range(30):
        text = torch.randint(words, (16, 12))
        y, aux = attention.forward_with_aux(embed(text))
        loss = F.cross_entropy(head(y)[:, 1:].flatten(0, 1), text[:, :-1].flatten())
        losses.append(loss.item())
        optimizer.zero_grad()
        (loss + sum(aux.losses.values())).backward()
        optimizer.step()
    assert losses[0] > 1.9 and sum(losses[-5:]) / 5 < 0.6 * losses[0], losses


@pytest.mark.parametrize(
    "changes,options,message",
    [
        ({}, {"num_heads": 5}, "num_heads=5: must divide ffn_hidden_size=24, the width of an expert's queries"),
        ({}, {"num_heads": 4, "num_kv_heads": 3}, "num_kv_heads=3: must divide num_heads=4"),
        ({}, {"num_heads": 8}, "rope_base=10000.0: must be > 0 and the head size 3 even, or None"),
        ({}, {"num_heads": 4, "attention_dropout": 1.0}, "attention_dropout=1.0: must be in [0, 1)"),
        ({}, {"num_heads": 0}, "num_heads=0: must be an integer >= 1"),
        ({}, {"num_heads": 4, "num_kv_heads": 0}, "num_kv_heads=0: must be an integer >= 1"),
        *(({}, {"num_heads": value}, f"num_heads={value!r}: must be an integer >= 1") for value in ("8", 8.0, True)),
        *(
            ({}, {"num_heads": 4, "num_kv_heads": value}, f"num_kv_heads={value!r}: must be an integer >= 1")
            for value in ("2", 2.0, True)
        ),
        ({}, {"num_heads": 4, "rope_base": "1e4"}, "rope_base='1e4': must be a finite number > 0, or None"),
        ({}, {"num_heads": 4, "attention_dropout": "0.1"}, "attention_dropout='0.1': must be in [0, 1)"),
        ({}, {"num_heads": 4, "attention_dropout": None}, "attention_dropout=None: must be in [0, 1)"),
        ({}, {"num_heads": 4, "causal": 1}, "causal=1: must be True or False"),
        ({}, {"num_heads": 4, "rope_base": math.nan}, "rope_base=nan: must be a finite number > 0, or None"),
        ({}, {"num_heads": 4, "rope_base": math.inf}, "rope_base=inf: must be a finite number > 0, or None"),
        ({}, {"num_heads": 4, "attention_dropout": math.nan}, "attention_dropout=nan: must be in [0, 1)"),
        ({}, {"num_heads": 4, "rope_base": 0.0}, "rope_base=0.0: must be > 0 and the head size 6 even, or None"),
        ({}, {"num_heads": 4, "attention_dropout": -0.1}, "attention_dropout=-0.1: must be in [0, 1)"),
        *(
            (
                {name: value, "normalize_top_k": None},
                {"num_heads": 4},
                f"{name}={value!r}: must be {needed!r} for a mixture of attention",
            )
            for name, value, needed in (
                ("router_type", "expert_choice", "topk"),
                ("token_rounding", "up", None),
                ("capacity_factor", 1.0, None),
                ("output_bias", True, False),
                ("shared_expert_hidden_size", 8, None),
                ("recompute_activation", True, False),
                ("quantize_inputs_num_bits", 8, -1),
                ("quantize_rematerialize_num_bits", 4, -1),
                ("quantize_scatter_num_bits", 8, -1),
                ("gradient_accumulation_fusion", True, False),
                ("batch_invariant", True, False),
            )
        ),
    ],
)
def test_L2_attention_refuses(changes, options, message):
    with pytest.raises(ConfigError) as error:
        MixtureOfAttention(config_of(**changes), **options)
    assert str(error.value) == message


def test_L2_attention_refuses_what_is_no_config():
    with pytest.raises(ConfigError, match=r"^config is a dict: must be a MoEConfig; MoEConfig.from_dict converts"):
        MixtureOfAttention({"hidden_size": H}, num_heads=2)


def test_L2_attention_refuses_other_shapes():
    with pytest.raises(ValueError, match=r"^x is \(9, 12\): must be \(B, S, 12\)$"):
        layer_of()(torch.zeros(S, H, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool], ids=str)
def test_L2_attention_refuses_tokens_that_are_not_floating(dtype):
    with pytest.raises(ValueError, match=f"^x: has dtype {dtype}, must be the layer's torch.float64$"):
        layer_of()(torch.zeros(B, S, H, dtype=dtype))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_reset_parameters_draws_every_parameter(device):
    """Also after `to_empty`, which leaves what was in memory."""
    layer = MixtureOfAttention(config_of(), num_heads=HEADS, device=device).to_empty(device="cpu")
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.fill_(float("nan"))
    layer.reset_parameters()
    for name, parameter in layer.named_parameters():
        std = 0.0 if name.endswith("bias") else 0.4
        assert parameter.std().item() == pytest.approx(std, rel=0.25), name
