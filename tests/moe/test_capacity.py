"""The capacity layer: which pairs drop, in what order, and that padding counts for nothing."""

import pytest
import torch

from megablocks.config import ConfigError
from megablocks.layers import MoE
from megablocks.testing.oracle import relative_error

from .harness import assert_equals_oracle, batch, build, capacity, config_of


@pytest.mark.parametrize(
    "rule, factor",
    [
        ("megablocks", 0),
        ("megablocks", 0.5),
        ("megablocks", 1.0),
        ("megablocks", 1.25),
        ("megablocks", 4.0),
        ("megablocks", 0.01),
        ("tutel", 0),
        ("tutel", 0.5),
        ("tutel", 1.0),
        ("tutel", 1.3),
        ("tutel", -1.0),
        ("tutel", -9.0),
    ],
)
@pytest.mark.parametrize("tokens", [1, 13])
def test_R9_the_earliest_pairs_keep_their_place(rule, factor, tokens):
    """Values and gradients against a loop that hands out places in token order; mlp_bias makes padding visible."""
    config = config_of(capacity_rule=rule, capacity_factor=factor)
    layer, (x, dy) = build("batched", config), batch(config, tokens, seed=4)
    aux, ids = assert_equals_oracle(layer, x, dy)
    load = aux.metrics["tokens_per_expert"].tolist()
    assert sum(load) == tokens * config.top_k, "load before the drop, without padding"
    assert aux.metrics["dropped"] == (ids < 0).sum()
    places = capacity(config, tokens, load)
    assert aux.metrics["capacity"] == (max(load) if places is None else places)
    if places is not None:
        assert aux.metrics["dropped"] == sum(max(0, n - places) for n in load)


def test_R9_a_dropped_token_yields_zeros_and_no_gradient():
    config = config_of(top_k=1, capacity_factor=1.0, load_balancing_loss_weight=0.0, z_loss_weight=0.0)
    layer, (x, dy) = build("batched", config), batch(config, 8)
    with torch.no_grad():
        layer.router.layer.weight[:, 0] = torch.tensor([0.0, 0.0, 60.0, 0.0])
        x[:, 0] = 1.0
    x.requires_grad_()
    y, aux = layer.forward_with_aux(x)
    y.backward(dy)
    assert aux.metrics["capacity"] == 2 and aux.metrics["dropped"] == 6
    assert (y[:2] != 0).all() and (y[2:] == 0).all()
    assert (x.grad[:2] != 0).any(dim=1).all() and (x.grad[2:] == 0).all()


def test_R9_padding_gives_no_gradient_to_biases():
    config = config_of(top_k=1, capacity_factor=0, load_balancing_loss_weight=0.0, z_loss_weight=0.0)
    layer, (x, _) = build("batched", config), batch(config, 6)
    with torch.no_grad():
        layer.router.layer.weight[:, 0] = torch.tensor([60.0, 0.0, 0.0, 0.0])
        x[:, 0] = 1.0
    y, _ = layer.forward_with_aux(x)
    y.sum().backward()
    assert torch.allclose(layer.experts.b2.grad[0], torch.full((12,), 6.0), atol=1e-5)
    assert (layer.experts.b2.grad[1:] == 0).all() and (layer.experts.b1.grad[1:] == 0).all()


def test_a_capacity_is_required():
    with pytest.raises(ConfigError, match=r"capacity_factor=None: must be a number for MoE, or use dMoE"):
        MoE(config_of())


def test_expert_choice_fits_into_capacity_one():
    config = config_of(router_type="expert_choice", capacity_factor=1.0, top_k=1)
    layer, (x, _) = build("batched", config), batch(config, 8)
    _, aux = layer.forward_with_aux(x)
    assert aux.metrics["dropped"] == 0 and aux.metrics["capacity"] == 2


def test_N6_every_mlp_impl_multiplies_bins_alike(monkeypatch):
    """Only the reference has a way of its own; sparse and grouped name ways to compute rows that bins do not have."""
    from megablocks.moe import experts

    config = config_of("sparse", capacity_factor=1.0)
    x, dy = batch(config, 13)
    results = {}
    for impl in ("grouped", "sparse", "auto", "reference"):
        if impl == "reference":
            monkeypatch.setattr(experts, "batched", None)
        layer = build("batched", config.replace(mlp_impl=impl))
        y, _ = layer.forward_with_aux(x)
        (y * dy).sum().backward()
        results[impl] = [y.detach(), *(p.grad for p in layer.parameters())]
    for impl in ("sparse", "auto"):
        assert all(torch.equal(a, b) for a, b in zip(results[impl], results["grouped"], strict=True)), impl
    for a, b in zip(results["reference"], results["grouped"], strict=True):
        assert relative_error(a, b) < 1e-6


@pytest.mark.parametrize(
    ("rule", "marked"),
    [
        pytest.param("megablocks", False, id="megablocks-dynamic=True"),
        pytest.param("tutel", True, id="tutel-mark_dynamic"),
        pytest.param("megablocks", True, id="megablocks-mark_dynamic", marks=pytest.mark.slow),
        pytest.param("tutel", False, id="tutel-dynamic=True", marks=pytest.mark.slow),
    ],
)
def test_N9_one_graph_for_every_number_of_tokens(rule, marked):
    """Equal to eager forward and backward; a second number of tokens compiles nothing."""
    config = config_of(capacity_factor=1.25, capacity_rule=rule, activation="swiglu")
    plain, layer = build("batched", config), build("batched", config)

    def run(x):
        y, aux = layer.forward_with_aux(x)
        return y, sum(aux.losses.values()), aux.metrics

    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, dynamic=None if marked else True, backend="aot_eager")
    for tokens in (9, 14, 40):
        x, dy = batch(config, tokens)
        expected, aux = plain.forward_with_aux(x)
        ((expected * dy).sum() + sum(aux.losses.values())).backward()
        if marked:
            torch._dynamo.mark_dynamic(x, 0)
        with torch._dynamo.config.patch(error_on_recompile=tokens != 9):
            y, losses, metrics = compiled(x)
        ((y * dy).sum() + losses).backward()
        assert torch.equal(y, expected)
        assert metrics["capacity"] == aux.metrics["capacity"] and metrics["dropped"] == aux.metrics["dropped"]
        for (name, p), q in zip(plain.named_parameters(), layer.parameters(), strict=True):
            assert torch.allclose(p.grad, q.grad, rtol=1e-6, atol=1e-6), name


@pytest.mark.parametrize("rule", ["megablocks", "tutel"])
def test_an_exported_layer_takes_every_number_of_tokens(rule):
    config = config_of(capacity_factor=1.25, capacity_rule=rule)
    layer = build("batched", config).eval()
    tokens = ({0: torch.export.Dim.DYNAMIC},)
    exported = torch.export.export(layer, (batch(config, 9)[0],), dynamic_shapes=tokens, strict=False).module()
    x, _ = batch(config, 14)
    torch.testing.assert_close(exported(x), layer(x))
