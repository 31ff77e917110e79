"""Token rounding: loads, choices, weights, losses and gradients, against loops over experts."""

import pytest
import torch
from torch.autograd import gradcheck

from megablocks.config import TOKEN_ROUNDINGS, ConfigError, MoEConfig
from megablocks.layers import dMoE
from megablocks.moe.router import route
from megablocks.ops.grouped import TILE_ROWS
from megablocks.ops.routing.dispatch import check_routing
from megablocks.ops.routing.rounding import (
    STOCHASTIC,
    Rounding,
    max_pairs,
    rounded_loads,
    rounded_router_ref,
    route_rounded,
)
from megablocks.ops.routing.topk import RouterOptions
from megablocks.testing.oracle import experts_oracle, relative_error

NAN = float("nan")
T, E, K, TILE = 61, 5, 2, 8


def config_of(**changes):
    base = dict(hidden_size=8, ffn_hidden_size=6, num_experts=E, top_k=K, token_rounding="nearest")
    return MoEConfig(**{**base, "token_rounding_tile": TILE, **changes})


def logits_of(num_tokens=T, num_experts=E, seed=0):
    draw = torch.randn(num_tokens, num_experts, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return draw + torch.arange(num_experts) * 0.3  # uneven loads


def pairs_of(routing):
    """{(token, expert): weight} of the pairs that have an expert."""
    check_routing(routing)
    found = zip(routing.token.tolist(), routing.expert.tolist(), routing.weight.tolist(), strict=True)
    pairs = [((t, e), w) for t, e, w in found if e >= 0]
    assert len(dict(pairs)) == len(pairs), "a pair stands twice"
    return dict(pairs)


def plain_topk(logits, config):
    return route(logits, config.replace(token_rounding=None), training=False)


def expected_pairs(logits, loads, config):
    """The rule written out: of each expert's column first its choices, then the others, by falling weight."""
    top = pairs_of(plain_topk(logits, config))
    scores = (logits.softmax(1) if config.score_function == "softmax" else logits.sigmoid()) * config.top_k_scaling
    chosen = {}
    for e, load in enumerate(loads):
        first = sorted((-w, t) for (t, other), w in top.items() if other == e)
        rest = sorted((-float(scores[t, e]), t) for t in range(len(logits)) if (t, e) not in top)
        for weight, t in (first + rest)[:load]:
            chosen[t, e] = -weight
    return chosen


@pytest.mark.parametrize("rule", TOKEN_ROUNDINGS)
@pytest.mark.parametrize(
    "order,score", [("before_topk", "softmax"), ("after_topk", "softmax"), ("before_topk", "sigmoid")]
)
@pytest.mark.parametrize("norm", [None, 1.0])
def test_each_rule_keeps_the_first_of_every_experts_order(rule, order, score, norm):
    cfg = config_of(
        token_rounding=rule, softmax_order=order, score_function=score, normalize_top_k=norm, top_k_scaling=2.5
    )
    logits = logits_of()
    torch.manual_seed(3)
    routing = route(logits, cfg, training=True)
    counts = plain_topk(logits, cfg).metrics["tokens_per_expert"]
    loads = routing.metrics["rounded_per_expert"]
    assert routing.metrics["tokens_per_expert"].tolist() == counts.tolist()
    assert (loads % TILE == 0).all() and ((loads - counts).abs() < TILE).all()
    pairs, expected = pairs_of(routing), expected_pairs(logits, loads.tolist(), cfg)
    assert pairs.keys() == expected.keys()
    assert all(pairs[pair] == pytest.approx(expected[pair], rel=1e-12) for pair in pairs)
    assert routing.num_pairs == max_pairs(rule, T, E, K, TILE) and routing.top_k is None


def test_up_and_down_and_nearest_round_as_their_names_say():
    counts = torch.tensor([0, 1, 7, 8, 11, 12, 13, 100])
    assert rounded_loads(counts, "up", 8).tolist() == [0, 8, 8, 8, 16, 16, 16, 104]
    assert rounded_loads(counts, "down", 8).tolist() == [0, 0, 0, 8, 8, 8, 8, 96]
    assert rounded_loads(counts, "nearest", 8).tolist() == [0, 0, 8, 8, 8, 16, 16, 104]
    assert rounded_loads(torch.tensor([3, 4, 5, 2]), "nearest", 7).tolist() == [0, 7, 7, 0]


@pytest.mark.parametrize("tile", [1, 7, 8])
def test_balanced_is_the_running_accumulator(tile):
    """Expert by expert the multiple that brings the total so far nearest to the truth, within half a tile of it."""
    counts = torch.randint(0, 50, (200,), generator=torch.Generator().manual_seed(1))
    loads, error = rounded_loads(counts, "balanced", tile), 0
    for count, load in zip(counts.tolist(), loads.tolist(), strict=True):
        down, up = count // tile * tile, -(-count // tile) * tile
        wanted = down if abs(error + down - count) < abs(error + up - count) else up
        assert load == wanted
        error += load - count
        assert abs(error) <= tile / 2


@pytest.mark.parametrize("rule", ["stochastic_frequency", "stochastic_score"])
def test_stochastic_rules_follow_their_odds_and_their_generator(rule):
    counts = torch.tensor([3, 8, 0, 13, 6]).repeat(4000)
    odds = None
    chance = torch.tensor([3 / 8, 0, 0, 5 / 8, 6 / 8])
    if rule == "stochastic_score":
        a, b = torch.tensor([1.0, 0.0, 0.0, 3.0, 0.5]), torch.tensor([4.0, 0.0, 0.0, 3.0, 2.0])
        odds, chance = (a.repeat(4000), b.repeat(4000)), torch.tensor([0.25, 0, 0, 1.0, 0.25])
    loads = rounded_loads(counts, rule, 8, torch.rand(20000, generator=torch.Generator().manual_seed(5)), odds)
    again = rounded_loads(counts, rule, 8, torch.rand(20000, generator=torch.Generator().manual_seed(5)), odds)
    assert torch.equal(loads, again)
    ups = (loads > counts // 8 * 8).view(4000, 5).float().mean(0)
    assert ((ups - chance).abs() < 0.04).all(), ups  # five standard deviations
    assert ups[1] == ups[2] == 0


def test_odds_by_score_are_the_weight_of_the_partial_tile():
    """Tile 2, one expert with three choices of weights .9 .8 .3 and the next-best score .1: up with .3/(.3 + .1)."""
    logits = torch.tensor([[0.8, 0.2], [0.3, 0.2], [0.1, 0.9], [0.9, 0.1], [0.05, 0.95]]).logit()
    ups = 0
    for seed in range(400):
        draw = torch.Generator().manual_seed(seed)
        out = route_rounded(logits, RouterOptions(1, sigmoid=True), "stochastic_score", 2, generator=draw)
        load = out.rounded.tolist()
        assert load[0] in (2, 4) and load[1] == 2
        ups += load[0] == 4
    assert abs(ups / 400 - 0.75) < 0.1


def test_stochastic_routing_repeats_under_a_seed():
    cfg, logits = config_of(token_rounding="stochastic_frequency"), logits_of()

    def loads(seed):
        torch.manual_seed(seed)
        return route(logits, cfg, training=True).metrics["rounded_per_expert"].tolist()

    assert loads(1) == loads(1)
    assert len({tuple(loads(seed)) for seed in range(10)}) > 1


@pytest.mark.parametrize("rule", TOKEN_ROUNDINGS)
@pytest.mark.parametrize("num_tokens,num_experts,top_k,tile", [
    (0, 5, 2, 8), (1, 5, 2, 8), (1, 1, 1, 128), (33, 1, 1, 8), (13, 4, 4, 8), (13, 5, 2, 128), (40, 6, 1, 1),
    (9, 7, 3, 7),
])  # fmt: skip
def test_R5_sizes_at_the_edge(rule, num_tokens, num_experts, top_k, tile):
    """A multiple of the tile for each expert, or all T tokens where there are no more; under the static bound."""
    cfg = config_of(num_experts=num_experts, top_k=top_k, token_rounding=rule, token_rounding_tile=tile)
    logits = logits_of(num_tokens, num_experts).float().requires_grad_()
    routing = route(logits, cfg, training=True)
    pairs = pairs_of(routing)
    loads, counts = routing.metrics["rounded_per_expert"], routing.metrics["tokens_per_expert"]
    assert [sum(e == other for _, other in pairs) for e in range(num_experts)] == loads.tolist()
    assert all(load % tile == 0 or load == num_tokens for load in loads.tolist())
    assert ((loads - counts).abs() < tile).all() and (loads[counts == 0] == 0).all()
    assert len(pairs) <= routing.num_pairs <= min(num_tokens * num_experts, num_tokens * top_k + num_experts * tile)
    routing.weight.sum().backward()
    assert logits.grad.isfinite().all()


@pytest.mark.parametrize("rule", TOKEN_ROUNDINGS)
def test_R2_all_tokens_to_one_expert(rule):
    """The others stay empty; the one gets whole tiles, or every token there is."""
    logits = torch.zeros(T, E).index_fill(1, torch.tensor([3]), 9.0)
    loads = route(logits, config_of(token_rounding=rule, top_k=1), training=True).metrics["rounded_per_expert"]
    assert loads.tolist()[:3] + loads.tolist()[4:] == [0] * (E - 1)
    assert int(loads[3]) in (T // TILE * TILE, T)


@pytest.mark.parametrize("rule", ["balanced", "nearest", "up"])
def test_static_bound_is_reached(rule):
    """The worst loads fill R exactly, so no smaller bound would do."""
    if rule == "balanced":
        counts = torch.tensor([TILE // 2])
    else:
        counts = torch.full((E,), TILE // 2 if rule == "nearest" else 1)
    tokens = int(counts.sum())
    ids = torch.repeat_interleave(torch.arange(len(counts)), counts).unsqueeze(1)
    filler = max(0, TILE - tokens)  # tokens enough for a full tile
    experts = len(counts) + (1 if filler else 0)
    ids = torch.cat((ids, torch.full((filler, 1), experts - 1)))
    logits = torch.rand(len(ids), experts).scatter(1, ids, 2.0)
    routing = route(logits, config_of(num_experts=experts, top_k=1, token_rounding=rule), training=True)
    check_routing(routing)
    assert routing.metrics["tokens_per_expert"].tolist()[: len(counts)] == counts.tolist()
    assert int((routing.expert >= 0).sum()) == routing.metrics["rounded_per_expert"].sum() <= routing.num_pairs
    if not filler:
        assert int((routing.expert >= 0).sum()) == routing.num_pairs


@pytest.mark.parametrize("rule", TOKEN_ROUNDINGS)
def test_R9_padding_gets_no_expert_and_is_no_load(rule):
    cfg = config_of(token_rounding=rule, load_balancing_loss_weight=0.3, z_loss_weight=0.2)
    padding = torch.arange(2 * T) % 2 == 1
    alone = logits_of().requires_grad_()
    mixed = torch.full((2 * T, E), NAN, dtype=torch.float64)
    mixed[~padding] = alone.detach()
    mixed.requires_grad_()
    torch.manual_seed(0)
    a = route(alone, cfg, training=True)
    torch.manual_seed(0)
    b = route(mixed, cfg, training=True, padding_mask=padding)
    assert {(2 * t, e): w for (t, e), w in pairs_of(a).items()} == pairs_of(b)
    assert b.metrics["nonfinite_tokens"].item() == 0
    for name, loss in a.losses.items():
        assert b.losses[name].item() == pytest.approx(loss.item(), rel=1e-12)
    (a.weight.square().sum() + sum(a.losses.values())).backward()
    (b.weight.square().sum() + sum(b.losses.values())).backward()
    assert torch.allclose(mixed.grad[~padding], alone.grad, atol=1e-14)
    assert (mixed.grad[padding] == 0).all()


@pytest.mark.parametrize("rule", TOKEN_ROUNDINGS)
def test_N3_a_nan_token_goes_last_and_stays_alone(rule):
    cfg, dirty = config_of(token_rounding=rule), logits_of()
    dirty[4] = NAN
    dirty.requires_grad_()
    torch.manual_seed(0)
    routing = route(dirty, cfg, training=True)
    check_routing(routing)
    assert routing.metrics["nonfinite_tokens"].item() == 1
    others = routing.token != 4
    assert routing.weight[others].isfinite().all()
    loads, counts = routing.metrics["rounded_per_expert"], routing.metrics["tokens_per_expert"]
    assert (loads % TILE == 0).all()
    kept = [e for t, e in pairs_of(routing) if t == 4]
    assert all(loads[e] >= counts[e] for e in kept), "an expert that drops must drop the NaN first"
    routing.weight[others].sum().backward()
    assert dirty.grad[[t for t in range(T) if t != 4]].isfinite().all()


@pytest.mark.parametrize("order,norm", [("before_topk", None), ("before_topk", 1.0), ("after_topk", None)])
def test_gradient_of_the_weights(order, norm):
    cfg = config_of(softmax_order=order, normalize_top_k=norm)
    logits = logits_of(24).requires_grad_()
    assert gradcheck(lambda x: route(x, cfg, training=True).weight, (logits,))


def test_balancing_loss_and_bias_see_the_choice_before_rounding():
    cfg = config_of(load_balancing_loss_weight=0.3, z_loss_weight=0.1)
    logits = logits_of()
    rounded, plain = route(logits, cfg, training=True), route(logits, cfg.replace(token_rounding=None), training=True)
    assert rounded.losses.keys() == plain.losses.keys() == {"load_balancing_loss", "z_loss"}
    for name in plain.losses:
        assert rounded.losses[name].item() == plain.losses[name].item()
    assert torch.equal(rounded.metrics["tokens_per_expert"], plain.metrics["tokens_per_expert"])


def test_the_default_tile_is_the_grouped_products():
    cfg, logits = config_of(token_rounding_tile=None, token_rounding="up"), logits_of(300)
    loads = route(logits, cfg, training=True).metrics["rounded_per_expert"]
    assert (loads % TILE_ROWS == 0).all() and loads.any()


def test_small_weights_are_ranked_apart():
    """float32 weights of 1e-9 and 2e-9 are equal once 1 is taken from them; the larger must be the one added."""
    logits = torch.tensor([[0.9, 1e-9], [0.8, 3e-9], [0.7, 2e-9], [1e-10, 0.6]]).logit()
    cfg = config_of(num_experts=2, top_k=1, score_function="sigmoid", token_rounding="up", token_rounding_tile=3)
    pairs = pairs_of(route(logits, cfg, training=True))
    assert {(1, 1), (2, 1), (3, 1)} <= pairs.keys() and (0, 1) not in pairs


def test_evaluation_is_plain_top_k():
    cfg, logits = config_of(), logits_of()
    a, b = route(logits, cfg, training=False), plain_topk(logits, cfg)
    assert a.top_k == K and torch.equal(a.expert, b.expert) and torch.equal(a.weight, b.weight)


@pytest.mark.parametrize("rule", ["nearest", "down"])
def test_R1_layer_computes_the_rounded_pairs(rule):
    """The layer's output and gradients are those of its pairs; a token that rounding left without experts gives 0."""
    cfg = config_of(token_rounding=rule, num_experts=7, init_std=0.5)
    layer = dMoE(cfg, dtype=torch.float64, seed=1).train()
    x = torch.randn(T, 8, dtype=torch.float64, requires_grad=True)
    routing = layer.router(x)
    y, aux = layer.forward_with_aux(x)
    names = {"w1", "w2"}
    parameters = {n: p for n, p in layer.experts.named_parameters() if n in names}
    expected = experts_oracle(x, routing.token, routing.expert, routing.weight, parameters, 7, "gelu")
    assert relative_error(y, expected) < 1e-12
    assert torch.equal(aux.metrics["rounded_per_expert"], routing.metrics["rounded_per_expert"])
    chosen = set(pairs_of(route(layer.router.logits(x), cfg, training=False)))
    assert aux.metrics["dropped"].item() == len(chosen - set(pairs_of(routing))) > 0
    inputs = [x, layer.router.layer.weight, *parameters.values()]
    for got, want in zip(
        torch.autograd.grad(y.sin().sum(), inputs), torch.autograd.grad(expected.sin().sum(), inputs), strict=True
    ):
        assert relative_error(got, want) < 1e-10
    layer.eval()
    assert "rounded_per_expert" not in layer.forward_with_aux(x)[1].metrics


@pytest.mark.parametrize("rule", TOKEN_ROUNDINGS)
@pytest.mark.parametrize("score,norm", [("softmax", None), ("sigmoid", 1.0), ("sigmoid", 3.0)])
def test_the_op_routes_as_autograd_of_the_formulas_does(rule, score, norm):
    """The same pairs, losses, gradient and draws."""
    weights = dict(load_balancing_loss_weight=0.3, z_loss_weight=0.2)
    cfg = config_of(token_rounding=rule, score_function=score, normalize_top_k=norm, top_k_scaling=2.5, **weights)
    padding, logits = torch.arange(T) % 5 == 2, logits_of().requires_grad_()
    torch.manual_seed(4)
    routing = route(logits, cfg, training=True, padding_mask=padding)
    torch.manual_seed(4)
    draw = torch.rand(E) if rule in STOCHASTIC else None
    rounding = Rounding(rule, TILE, max_pairs(rule, T, E, K, TILE))
    options = RouterOptions(K, score == "sigmoid", False, norm or 0.0, 2.5, 0.3, 0.2)
    out = rounded_router_ref(logits, None, padding, draw, rounding, options)
    assert torch.equal(routing.token, out.token) and torch.equal(routing.expert, out.expert) and routing.top_k is None
    for name, value in (("tokens_per_expert", out.load), ("rounded_per_expert", out.rounded), ("dropped", out.dropped)):
        assert torch.equal(routing.metrics[name], value)
    assert routing.losses == {"load_balancing_loss": out.balance, "z_loss": out.z}
    assert torch.equal(routing.weight, out.weight)
    total = routing.weight.sin().sum() + sum(routing.losses.values())
    expected = torch.autograd.grad(out.weight.sin().sum() + out.balance + out.z, logits)
    torch.testing.assert_close(torch.autograd.grad(total, logits), expected, rtol=1e-12, atol=1e-14)


def test_N9_compiles_in_one_graph():
    cfg, logits = config_of(), logits_of().float().requires_grad_()

    def step(x):
        routing = route(x, cfg, training=True)
        return routing.weight, routing.expert

    eager, compiled = step(logits), torch.compile(step, fullgraph=True, backend="aot_eager")(logits)
    assert torch.equal(eager[0], compiled[0]) and torch.equal(eager[1], compiled[1])


@pytest.mark.parametrize(
    "changes,message",
    [
        ({"token_rounding": "middle"}, "token_rounding='middle': must be None or one of nearest, "),
        ({"token_rounding_tile": 0}, "token_rounding_tile=0: must be an integer >= 1"),
        ({"router_type": "expert_choice"}, "token_rounding='nearest': must be None with router_type='expert_choice': "),
        ({"capacity_factor": 1.0}, "token_rounding='nearest': needs capacity_factor=None, not 1.0"),
        ({"uniform_assignment": True}, "token_rounding='nearest': needs uniform_assignment=False, not True"),
    ],
)
def test_L2_config_refuses(changes, message):
    with pytest.raises(ConfigError) as error:
        config_of(**changes)
    assert str(error.value).startswith(message)
