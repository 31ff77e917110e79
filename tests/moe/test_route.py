"""Routings and auxiliary losses from given logits."""

import math

import pytest
import torch
import torch.distributed as dist
from torch.autograd import gradcheck

from megablocks.config import MoEConfig
from megablocks.moe.router import route
from megablocks.ops.routing.dispatch import check_routing, make_routing
from megablocks.testing.launcher import run_distributed_test

NAN = float("nan")


def config(**changes):
    base = dict(hidden_size=4, ffn_hidden_size=8, num_experts=6, top_k=2)
    return MoEConfig(**{**base, **changes})


def logits_of(num_tokens=11, num_experts=6, seed=0):
    return torch.randn(num_tokens, num_experts, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def balance_loop(logits, expert, top_k, weight, padding=None):
    """E/(K·T²) · Σ_e tokens_e · Σ_t score_te, written out."""
    num_experts = logits.shape[1]
    alive = [t for t in range(len(logits)) if padding is None or not padding[t]]
    total = 0.0
    for e in range(num_experts):
        tokens = sum(int(expert[t, k]) == e for t in alive for k in range(top_k))
        total += tokens * sum(float(logits[t].softmax(0)[e]) for t in alive)
    return weight * num_experts / (top_k * len(alive) ** 2) * total


@pytest.mark.parametrize("router_type", ["topk", "expert_choice"])
@pytest.mark.parametrize("num_tokens", [0, 1, 11])
@pytest.mark.parametrize("top_k", [1, 2, 6])
def test_routing_keeps_its_contract(router_type, num_tokens, top_k):
    cfg = config(router_type=router_type, top_k=top_k, load_balancing_loss_weight=0.1, z_loss_weight=0.1)
    logits = logits_of(num_tokens).float().requires_grad_()
    routing = route(logits, cfg, training=True)
    check_routing(routing)
    assert routing.weight.dtype == torch.float32
    assert routing.top_k == (top_k if router_type == "topk" else None)
    assert routing.metrics["tokens_per_expert"].sum().item() == routing.num_pairs
    assert routing.metrics["invalid"].item() == routing.metrics["nonfinite_tokens"].item() == 0
    total = routing.weight.sum() + sum(routing.losses.values())
    total.backward()
    assert logits.grad.isfinite().all()
    if num_tokens == 0:
        assert [loss.item() for loss in routing.losses.values()] == [0.0, 0.0]


def test_losses_only_in_training_and_when_weighed():
    cfg = config(load_balancing_loss_weight=0.1, z_loss_weight=0.1)
    assert route(logits_of(), cfg, training=False).losses == {}
    assert route(logits_of(), config(), training=True).losses == {}
    assert set(route(logits_of(), config(z_loss_weight=1.0), training=True).losses) == {"z_loss"}


@pytest.mark.parametrize("top_k", [1, 2])
def test_load_balancing_loss_equals_its_formula(top_k):
    cfg = config(top_k=top_k, load_balancing_loss_weight=0.3)
    logits = logits_of()
    routing = route(logits, cfg, training=True)
    expected = balance_loop(logits, routing.expert.view(-1, top_k), top_k, 0.3)
    assert routing.losses["load_balancing_loss"].item() == pytest.approx(expected, rel=1e-12)


def test_load_balancing_loss_is_its_weight_when_balanced():
    routing = route(torch.zeros(6, 6), config(load_balancing_loss_weight=0.3, uniform_assignment=True), training=True)
    assert routing.losses["load_balancing_loss"].item() == pytest.approx(0.3)


def test_sigmoid_scores_are_normalized_for_the_loss():
    cfg = config(score_function="sigmoid", load_balancing_loss_weight=0.3)
    logits = logits_of()
    routing = route(logits, cfg, training=True)
    scores = logits.sigmoid() / logits.sigmoid().sum(1, keepdim=True)
    tokens = routing.metrics["tokens_per_expert"].double()
    assert routing.losses["load_balancing_loss"].item() == pytest.approx(
        0.3 * 6 / (2 * 11**2) * float(tokens @ scores.sum(0)), rel=1e-12
    )


def test_z_loss_equals_its_formula():
    logits = logits_of()
    expected = sum(math.log(sum(math.exp(v) for v in row)) ** 2 for row in logits.tolist()) / 11
    routing = route(logits, config(z_loss_weight=0.2), training=True)
    assert routing.losses["z_loss"].item() == pytest.approx(0.2 * expected, rel=1e-12)


@pytest.mark.parametrize("name", ["load_balancing_loss", "z_loss"])
@pytest.mark.parametrize("padded", [False, True])
def test_gradients_of_the_losses(name, padded):
    cfg = config(**{f"{name}_weight": 0.5})
    padding = torch.arange(11) % 3 == 0 if padded else None
    logits = logits_of().requires_grad_()
    assert gradcheck(lambda x: route(x, cfg, training=True, padding_mask=padding).losses[name], (logits,))


@pytest.mark.parametrize("router_type", ["topk", "expert_choice"])
def test_R9_padding_is_no_load_and_enters_no_loss(router_type):
    """Whatever stands in the padding, NaN too, the rest is routed as if it were alone."""
    cfg = config(router_type=router_type, load_balancing_loss_weight=0.3, z_loss_weight=0.2, top_k=1)
    padding = torch.arange(12) % 2 == 1
    alone = logits_of(6).requires_grad_()
    mixed = torch.full((12, 6), NAN, dtype=torch.float64)
    mixed[~padding] = alone.detach()
    mixed.requires_grad_()
    a = route(alone, cfg, training=True)
    b = route(mixed, cfg, training=True, padding_mask=padding)
    assert b.metrics["nonfinite_tokens"].item() == 0
    assert b.metrics["invalid"].item() == 0
    kept = b.expert >= 0
    assert not padding[b.token[kept].long()].any()
    if router_type == "topk":  # expert choice picks by the whole static length
        assert b.expert[kept].tolist() == a.expert.tolist()
        assert torch.equal(b.weight[kept], a.weight)
        assert torch.equal(a.metrics["tokens_per_expert"], b.metrics["tokens_per_expert"])
        for name, loss in a.losses.items():
            assert b.losses[name].item() == pytest.approx(loss.item(), rel=1e-12)
        sum(a.losses.values()).backward()
        sum(b.losses.values()).backward()
        assert torch.allclose(mixed.grad[~padding], alone.grad, atol=1e-14)
    else:
        (b.weight.sum() + sum(b.losses.values())).backward()
    assert (mixed.grad[padding] == 0).all()


@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
@pytest.mark.parametrize("order", ["before_topk", "after_topk"])
def test_N3_nan_logits_stay_in_their_token(score_function, order):
    cfg = config(
        score_function=score_function,
        softmax_order=order,
        normalize_top_k=1.0,
        load_balancing_loss_weight=0.1,
        z_loss_weight=0.1,
    )
    clean = logits_of()
    dirty = clean.clone()
    dirty[4] = NAN
    dirty.requires_grad_()
    expected, got = route(clean, cfg, training=True), route(dirty, cfg, training=True)
    check_routing(got)
    others = got.token != 4
    assert torch.equal(got.expert[others], expected.expert[others])
    assert torch.equal(got.weight[others], expected.weight[others])
    assert got.weight[~others].isnan().all()
    assert got.metrics["nonfinite_tokens"].item() == 1
    assert all(loss.isnan() for loss in got.losses.values())  # never hidden
    (got.weight.sum() + sum(got.losses.values())).backward()
    rest = torch.arange(11) != 4
    assert dirty.grad[rest].isfinite().all()


def test_N3_expert_choice_picks_a_nan_token_last():
    cfg = config(router_type="expert_choice")
    logits = logits_of(12)
    logits[5] = NAN
    routing = route(logits, cfg, training=False)
    check_routing(routing)
    assert 5 not in routing.token.tolist()
    assert routing.weight.isfinite().all()
    assert routing.metrics["nonfinite_tokens"].item() == 1


def test_uniform_assignment_is_round_robin_with_the_routers_weights():
    logits = logits_of()
    plain = route(logits, config(), training=False)
    uniform = route(logits, config(uniform_assignment=True), training=False)
    assert uniform.expert.tolist() == [i % 6 for i in range(22)]
    assert torch.equal(uniform.weight, plain.weight)


@pytest.mark.parametrize(("num_tokens", "top_k", "each"), [(12, 2, 4), (11, 2, 4), (2, 1, 1), (5, 6, 5)])
def test_expert_choice_equals_the_loop(num_tokens, top_k, each):
    logits = (logits_of(num_tokens) * 2).round() / 2  # with ties
    routing = route(logits, config(router_type="expert_choice", top_k=top_k, top_k_scaling=2.0), training=False)
    scores = logits.softmax(1)
    chosen = []
    for e in range(6):
        order = sorted(range(num_tokens), key=lambda t, e=e: -float(scores[t, e]))
        chosen += [(t, e) for t in order[:each]]
    chosen.sort()
    assert list(zip(routing.token.tolist(), routing.expert.tolist(), strict=True)) == chosen
    assert torch.allclose(routing.weight, 2 * torch.stack([scores[t, e] for t, e in chosen]))
    assert routing.metrics["tokens_per_expert"].tolist() == [each] * 6


def test_expert_choice_gradient():
    logits = logits_of(7).requires_grad_()
    cfg = config(router_type="expert_choice")
    assert gradcheck(lambda x: route(x, cfg, training=False).weight, (logits,))


def test_bad_shapes_are_named():
    with pytest.raises(ValueError, match=r"^logits is \(3, 5\): must be \(T, 6\)"):
        route(torch.ones(3, 5), config(), training=False)
    with pytest.raises(ValueError, match=r"^padding_mask is \(2,\): must be \(3,\)"):
        route(torch.ones(3, 6), config(), training=False, padding_mask=torch.zeros(2).bool())


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"softmax_order": "after_topk", "normalize_top_k": 1.0},
        {"score_function": "sigmoid", "num_groups": 3, "group_top_k": 2},
        {"router_type": "expert_choice"},
    ],
)
def test_N9_route_compiles_whole(changes):
    cfg = config(load_balancing_loss_weight=0.1, z_loss_weight=0.1, **changes)

    def run(logits):
        routing = route(logits, cfg, training=True)
        return routing.expert, routing.weight, sum(routing.losses.values())

    logits = logits_of().float().requires_grad_()
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for a, b in zip(run(logits), compiled(logits), strict=True):
        assert torch.allclose(a, b)
    (a,) = torch.autograd.grad(run(logits)[2], (logits,))
    (b,) = torch.autograd.grad(compiled(logits)[2], (logits,))
    assert torch.allclose(a, b, atol=1e-6)


SPLITS = [(0, 5, 11), (0, 0, 11)]


def _losses_of_my_part(bounds):
    rank = dist.get_rank()
    cfg = config(load_balancing_loss_weight=0.3, load_balancing_scope="global")
    padding = torch.arange(11) % 4 == 3
    part = slice(bounds[rank], bounds[rank + 1])
    logits = logits_of()[part].requires_grad_()
    routing = route(logits, cfg, training=True, loss_group=dist.group.WORLD, padding_mask=padding[part])
    loss = routing.losses["load_balancing_loss"]
    loss.backward()
    return loss.detach(), logits.grad


@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize("bounds", SPLITS)
def test_N7_global_load_balancing_loss_equals_one_process(bounds):
    """However the tokens are split, even with none on a rank, the ranks' mean is the loss of all tokens."""
    padding = torch.arange(11) % 4 == 3
    logits = logits_of().requires_grad_()
    whole = route(logits, config(load_balancing_loss_weight=0.3), training=True, padding_mask=padding)
    whole.losses["load_balancing_loss"].backward()
    parts = run_distributed_test(_losses_of_my_part, 2, bounds)
    mean = sum(loss for loss, _ in parts) / 2
    assert mean.item() == pytest.approx(whole.losses["load_balancing_loss"].item(), rel=1e-12)
    assert torch.allclose(torch.cat([grad for _, grad in parts]) / 2, logits.grad, atol=1e-15)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
@pytest.mark.parametrize("settings", [{}, {"router_type": "expert_choice"}, {"token_rounding": "up"}])
def test_a_padding_mask_of_numbers_is_refused(settings, dtype):
    mask = torch.tensor([0, 1, 0]).to(dtype)
    with pytest.raises(ValueError, match=rf"^padding_mask is {dtype}: must be torch.bool, True for padding"):
        route(torch.ones(3, 6), config(**settings), training=True, padding_mask=mask)
    with pytest.raises(ValueError, match=rf"^padding_mask is {dtype}: must be torch.bool, True for padding"):
        make_routing(torch.zeros(3, 1).int(), torch.ones(3, 1), 6, padding_mask=mask)
