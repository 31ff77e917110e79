"""The router modules: gate, jitter, selection bias and what is counted for it."""

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from megablocks.config import ConfigError, MoEConfig
from megablocks.moe.router import ExpertChoiceRouter, TopKRouter, make_router, route
from megablocks.testing.launcher import run_distributed_test


def config(**changes):
    base = dict(hidden_size=4, ffn_hidden_size=8, num_experts=6, top_k=2)
    return MoEConfig(**{**base, **changes})


def biased(**changes):
    torch.manual_seed(0)
    cfg = config(score_function="sigmoid", expert_score_bias=True, expert_score_bias_rate=0.25, **changes)
    return TopKRouter(cfg)


X = torch.randn(11, 4, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("kind", ["topk", "expert_choice"])
def test_forward_is_gate_and_route(kind):
    router = make_router(config(router_type=kind, z_loss_weight=0.1))
    assert isinstance(router, TopKRouter if kind == "topk" else ExpertChoiceRouter)
    assert list(router.state_dict()) == ["layer.weight"]
    got = router(X.view(1, 11, 4))
    expected = route(X @ router.layer.weight.t(), router.config, training=True)
    assert torch.equal(got.expert, expected.expert)
    assert torch.allclose(got.weight, expected.weight)
    assert torch.allclose(got.losses["z_loss"], expected.losses["z_loss"])
    assert router.eval()(X).losses == {}


def test_a_router_refuses_the_others_config():
    with pytest.raises(ConfigError, match="^router_type='expert_choice': must be 'topk' for this router"):
        TopKRouter(config(router_type="expert_choice"))


def test_initialization():
    weight = TopKRouter(config(hidden_size=400, num_experts=50, init_std=0.5)).layer.weight
    assert weight.std().item() == pytest.approx(0.5, rel=0.05)
    assert (TopKRouter(config(), init_method=torch.nn.init.ones_).layer.weight == 1).all()
    router = TopKRouter(config(), device="meta", dtype=torch.bfloat16)
    assert router.layer.weight.is_meta and router.layer.weight.dtype == torch.bfloat16


def test_jitter_only_in_training_and_within_its_bounds():
    router = TopKRouter(config(jitter_eps=0.1))
    with torch.no_grad():
        router.layer.weight.copy_(torch.eye(6, 4))
    factor = router.logits(torch.ones(1000, 4))[:, :4]
    assert 0.9 <= factor.min() < 0.91 and 1.09 < factor.max() <= 1.1
    assert torch.equal(router.eval().logits(X), X @ router.layer.weight.t())


def test_router_of_another_dtype_than_its_input():
    router = TopKRouter(config(), dtype=torch.float32)
    routing = router(X.bfloat16())
    assert routing.weight.dtype == torch.float32
    assert torch.equal(routing.weight, router(X.bfloat16().float()).weight)


def test_frozen_router_still_passes_the_gradient_on():
    router = TopKRouter(config()).requires_grad_(False)
    x = X.clone().requires_grad_()
    router(x).weight.sum().backward()
    assert router.layer.weight.grad is None and x.grad.abs().sum() > 0


def test_the_choice_follows_the_bias_and_the_weight_does_not():
    router = biased()
    plain = router(X)
    with torch.no_grad():
        router.expert_score_bias[4] = 10.0
    routing = router(X)
    assert (routing.expert.view(11, 2)[:, 0] == 4).all()
    scores = (X @ router.layer.weight.t()).sigmoid()
    assert torch.allclose(routing.weight.view(11, 2)[:, 0], scores[:, 4])
    assert plain.weight.shape == routing.weight.shape


def test_update_moves_by_the_rate_towards_balance():
    router = biased(num_groups=None)
    router.tokens_since_update.copy_(torch.tensor([9, 1, 4, 4, 3, 3]))  # mean 4
    router.update_expert_score_bias()
    assert router.expert_score_bias.tolist() == [-0.25, 0.25, 0.0, 0.0, 0.25, 0.25]
    assert router.tokens_since_update.sum().item() == 0
    router.update_expert_score_bias()  # nothing seen, nothing moved
    assert router.expert_score_bias.tolist() == [-0.25, 0.25, 0.0, 0.0, 0.25, 0.25]


def test_updates_balance_a_skewed_router():
    router = TopKRouter(
        config(score_function="sigmoid", expert_score_bias=True, expert_score_bias_rate=0.02, init_std=1.0)
    )
    torch.manual_seed(0)
    x = torch.randn(300, 4)
    x[:, 0] = 1.0  # a direction that all tokens share, which one expert likes
    with torch.no_grad():
        router.layer.weight[0, 0] += 3.0
    before = router(x).metrics["tokens_per_expert"].max().item()
    for _ in range(60):
        router.update_expert_score_bias()
        after = router(x).metrics["tokens_per_expert"].max().item()
    assert before > 200 and after < 130  # the mean is 100


def test_update_without_bias_is_refused():
    with pytest.raises(ConfigError, match="^expert_score_bias=False: must be True"):
        TopKRouter(config()).update_expert_score_bias()


def test_load_is_counted_in_training_with_gradients_alone():
    router = biased()
    counts = router.tokens_since_update
    with torch.no_grad():
        router(X)
    router.eval()(X)
    assert counts.sum().item() == 0
    router.train()(X)
    router(X, padding_mask=torch.arange(11) < 4)
    assert counts.sum().item() == 22 + 14


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("router_frozen", [True, False])
def test_N5_checkpointing_counts_the_load_once(use_reentrant, router_frozen):
    router = biased(load_balancing_loss_weight=0.1)
    router.requires_grad_(not router_frozen)
    x = X.clone().requires_grad_()

    def run(x):
        routing = router(x)
        return routing.weight, routing.losses["load_balancing_loss"]

    weight, loss = checkpoint(run, x, use_reentrant=use_reentrant)
    (weight.square().sum() + loss).backward()
    assert router.tokens_since_update.sum().item() == 22
    got = x.grad.clone()
    x.grad = None
    weight, loss = run(x)
    (weight.square().sum() + loss).backward()
    assert torch.equal(got, x.grad)  # the loss entered once


@pytest.mark.parametrize("compiled", ["inside", "outside"])
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_N5_checkpointing_counts_the_load_of_a_compiled_router_once(use_reentrant, compiled):
    """compiled: inside of what is checkpointed, or around it."""
    router, x = biased(), X.clone().requires_grad_()

    def weight(x):
        return router(x).weight

    inner = torch.compile(weight, backend="aot_eager", fullgraph=True) if compiled == "inside" else weight

    def run(x):
        return checkpoint(inner, x, use_reentrant=use_reentrant)

    if compiled == "outside":
        run = torch.compile(run, backend="aot_eager")
    for step in (1, 2):
        run(x).square().sum().backward()
        assert router.tokens_since_update.sum().item() == 22 * step


def test_bias_stays_float32_when_the_module_is_cast():
    router = biased()
    with torch.no_grad():
        router.expert_score_bias += 1 + 1e-3
    bias = router.expert_score_bias.clone()
    for cast in (router.bfloat16, router.half, router.double, lambda: router.to(torch.bfloat16)):
        cast()
        assert router.expert_score_bias.dtype == torch.float32
        assert torch.equal(router.expert_score_bias, bias)
    assert router.layer.weight.dtype == torch.bfloat16
    assert router.tokens_since_update.dtype == torch.int64
    assert "expert_score_bias" in dict(router.named_buffers())


def test_bias_is_saved_and_the_counts_are_not():
    router = biased()
    assert set(router.state_dict()) == {"layer.weight", "expert_score_bias"}
    with torch.no_grad():
        router.expert_score_bias += 0.5
    other = biased()
    other.load_state_dict(router.state_dict())
    assert torch.equal(other.expert_score_bias, router.expert_score_bias)


def _update_with_my_counts():
    router = biased()
    router.tokens_since_update.copy_(torch.tensor([[9, 0, 0, 0, 0, 3], [0, 2, 2, 2, 2, 4]][dist.get_rank()]))
    router.update_expert_score_bias(dist.group.WORLD)
    return router.expert_score_bias.tolist()


@pytest.mark.xdist_group("ranks")
def test_update_over_ranks_sees_their_sum():
    # sums 9, 2, 2, 2, 2, 7; mean 4
    assert run_distributed_test(_update_with_my_counts, 2) == [[-0.25, 0.25, 0.25, 0.25, 0.25, -0.25]] * 2


@pytest.mark.parametrize("weighed", [None, "load_balancing_loss_weight", "z_loss_weight"])
@pytest.mark.parametrize("training", [False, True])
def test_logits_are_kept_only_while_a_loss_is_weighed(weighed, training):
    weights = {"load_balancing_loss_weight": 0.0, "z_loss_weight": 0.0} | ({weighed: 0.1} if weighed else {})
    logits, kept = torch.randn(7, 6, requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        routing = route(logits, config(softmax_order="after_topk", **weights), training=training)
    assert kept and (logits.shape in kept) == bool(weighed and training)
    assert len(routing.losses) == bool(weighed and training)
    assert all(loss.requires_grad for loss in routing.losses.values())
