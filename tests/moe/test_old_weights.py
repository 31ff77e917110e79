"""Weights and losses of megablocks 0.10: its state dicts load, and give what its formulas give."""

import pytest
import torch
import torch.nn.functional as F

from megablocks.layers import Arguments, MoE, dMoE


def _arguments(**changes):
    values = dict(hidden_size=12, ffn_hidden_size=20, moe_num_experts=4, moe_top_k=2, fp16=False, device="cpu")
    return Arguments(**{**values, **changes})


def _old_state(gated, capacity_layout):
    """Tensors as 0.10 makes them: (E, ffn, hidden) draws, flattened for dMoE, w1 transposed for the capacity layer."""
    draw = torch.Generator().manual_seed(0)
    w1, v1, w2 = (torch.randn(4, 20, 12, generator=draw) * 0.3 for _ in range(3))
    state = {
        "router.layer.weight": torch.randn(4, 12, generator=draw),
        "experts.bias": torch.randn(12, generator=draw),
        "experts.mlp.w1": w1.transpose(1, 2).contiguous() if capacity_layout else w1.view(-1, 12),
        "experts.mlp.w2": w2 if capacity_layout else w2.view(-1, 12),
    }
    if gated:
        state["experts.mlp.v1"] = v1.view(-1, 12)
    return state, (w1, v1, w2)


def _old_output(state, weights, x, gated):
    """0.10's forward for K=2, expert by expert; without its bias."""
    w1, v1, w2 = weights
    scores = (x @ state["router.layer.weight"].t()).softmax(-1)
    weight, ids = scores.topk(2, dim=-1)
    y = torch.zeros_like(x)
    for e in range(4):
        hidden = F.gelu(x @ w1[e].t(), approximate="tanh")
        hidden = hidden * (x @ v1[e].t()) if gated else hidden
        y += (hidden @ w2[e]) * (weight * (ids == e)).sum(-1, keepdim=True)
    return y


@pytest.mark.parametrize("described_by", ["Arguments", "MoEConfig"])
@pytest.mark.parametrize("gated", [False, True])
def test_K9_dropless_weights_load(gated, described_by):
    state, weights = _old_state(gated, capacity_layout=False)
    arguments = _arguments(mlp_type="glu" if gated else "mlp")
    layer = dMoE(arguments if described_by == "Arguments" else arguments.to_config().replace(capacity_factor=None))
    layer.load_state_dict({name: t.clone() for name, t in state.items()}, strict=True)
    x = torch.randn(5, 3, 12, generator=torch.Generator().manual_seed(1))
    expected = _old_output(state, weights, x, gated)
    if described_by == "Arguments":
        y, bias = layer(x)
        assert torch.equal(bias, state["experts.bias"])
        saved = layer.state_dict()  # as 0.10 would save it
        assert saved.keys() == state.keys() and all(torch.equal(saved[name], t) for name, t in state.items())
    else:
        y, bias = layer.forward_with_aux(x)[0], state["experts.bias"]
        expected = expected + bias
    assert torch.allclose(y, expected, atol=1e-5)


@pytest.mark.parametrize("described_by", ["Arguments", "MoEConfig"])
def test_K9_capacity_weights_load(described_by):
    state, weights = _old_state(gated=False, capacity_layout=True)
    arguments = _arguments(moe_capacity_factor=0)
    layer = MoE(arguments if described_by == "Arguments" else arguments.to_config())
    layer.load_state_dict(dict(state), strict=True)
    x = torch.randn(7, 12, generator=torch.Generator().manual_seed(1))
    expected = _old_output(state, weights, x, gated=False) + state["experts.bias"]
    y = layer(x)
    y = y[0] + y[1] if described_by == "Arguments" else y
    assert torch.allclose(y, expected, atol=1e-5)
    if described_by == "Arguments":
        saved = layer.state_dict()
        assert saved.keys() == state.keys() and all(torch.equal(saved[name], t) for name, t in state.items())
    else:
        assert torch.equal(layer.experts.w1.view(4, 20, 12), weights[0])


def test_K9_dropless_weights_load_into_a_capacity_layer():
    state, weights = _old_state(gated=True, capacity_layout=False)
    layer = MoE(_arguments(moe_capacity_factor=0, mlp_type="glu"))
    layer.load_state_dict(dict(state), strict=True)
    x = torch.randn(7, 12, generator=torch.Generator().manual_seed(1))
    assert torch.allclose(layer(x)[0], _old_output(state, weights, x, gated=True), atol=1e-5)


def test_K9_shared_expert_weights_load():
    state, _ = _old_state(gated=True, capacity_layout=False)
    shapes = {"up_proj": (16, 12), "gate_proj": (16, 12), "down_proj": (12, 16)}
    for name, shape in shapes.items():
        state[f"shared_expert.{name}.weight"] = torch.randn(shape)
        state[f"shared_expert.{name}.bias"] = torch.randn(shape[0])
    arguments = _arguments(mlp_type="glu", shared_expert=True, shared_expert_hidden_size=16)
    layer = dMoE(arguments)
    layer.load_state_dict(dict(state), strict=True)
    arguments.shared_expert_weighted_sum = True
    weighted = dMoE(arguments)
    weighted.load_state_dict(dict(state), strict=True)
    x = torch.randn(5, 12)
    shared = layer.shared_expert(x)

    def linear(name, inputs):
        return F.linear(inputs, state[f"shared_expert.{name}.weight"], state[f"shared_expert.{name}.bias"])

    hidden = F.gelu(linear("gate_proj", x), approximate="tanh") * linear("up_proj", x)
    assert torch.allclose(shared, linear("down_proj", hidden), atol=1e-5)
    routed = layer(x)[0] - shared
    assert torch.allclose(weighted(x)[0], shared / 3 + routed * 2 / 3, atol=1e-5)


def test_K9_a_whole_state_is_cut_to_the_experts_held_here():
    from megablocks.moe import Experts
    from megablocks.moe.groups import ExpertShard

    state, weights = _old_state(gated=True, capacity_layout=False)
    part = Experts(_arguments(mlp_type="glu").to_config(), shard=ExpertShard(2, 2, 1, 2))
    part.load_state_dict({n.removeprefix("experts.mlp."): t for n, t in state.items() if ".mlp." in n}, strict=True)
    for name, full in zip(("w1", "v1", "w2"), weights, strict=True):
        assert torch.equal(getattr(part, name).view(2, 10, 12), full[2:, 10:])


@pytest.mark.parametrize("ffn_size", [1, 2])
def test_K9_biases_are_cut_as_their_matrices_are(ffn_size):
    """0.10's experts have none; a layer with `mlp_bias` on one process has those of all experts."""
    from megablocks import MoEConfig
    from megablocks.moe import Experts
    from megablocks.moe.groups import ExpertShard

    config = MoEConfig(hidden_size=12, ffn_hidden_size=20, num_experts=4, activation="swiglu", mlp_bias=True)
    whole = Experts(config)
    state = {name: torch.randn_like(p) for name, p in whole.named_parameters()}
    part = Experts(config, shard=ExpertShard(2, 2, ffn_size - 1, ffn_size))
    part.load_state_dict(dict(state), strict=True)
    start = 10 if ffn_size == 2 else 0
    for name in ("b1", "c1"):
        assert torch.equal(getattr(part, name), state[name][2:, start:])
    assert torch.equal(part.b2, state["b2"][2:])
    whole.load_state_dict(dict(state), strict=True)
    assert torch.equal(whole.b1, state["b1"])
    with pytest.raises(RuntimeError, match="size mismatch for b1"):
        part.load_state_dict({**state, "b1": torch.zeros(4, 30)})


def test_K9_wrong_sizes_are_refused():
    state, _ = _old_state(gated=False, capacity_layout=False)
    state["experts.mlp.w1"] = torch.zeros(80, 13)
    with pytest.raises(RuntimeError, match=r"size mismatch for experts.mlp.w1"):
        dMoE(_arguments()).load_state_dict(state)
