"""Routing on a GPU: the CPU's choices and losses, without a host synchronization."""

import pytest
import torch

from megablocks.config import TOKEN_ROUNDINGS, MoEConfig
from megablocks.moe.router import make_router, route
from megablocks.ops.routing.dispatch import count_valid
from megablocks.testing.syncs import no_sync

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"softmax_order": "after_topk", "normalize_top_k": 2.0, "top_k_scaling": 1.5},
        {"score_function": "sigmoid", "num_groups": 4, "group_top_k": 2, "expert_score_bias": True},
        {"normalize_top_k": 3.0},  # computed by the reference, there as here
        {"router_type": "expert_choice"},
        {"uniform_assignment": True},
        {"token_rounding": "nearest", "token_rounding_tile": 8},
        {"token_rounding": "balanced", "token_rounding_tile": 8},
    ],
)
@pytest.mark.parametrize("padded", [False, True])
def test_route_equals_the_cpus_without_a_synchronization(changes, padded):
    cfg = MoEConfig(
        hidden_size=4,
        ffn_hidden_size=8,
        num_experts=16,
        top_k=3,
        load_balancing_loss_weight=0.1,
        z_loss_weight=0.1,
        **changes,
    )
    # few distinct values: many ties, and exact on both devices
    logits = torch.randint(-3, 4, (200, 16), generator=torch.Generator().manual_seed(0)).float()
    padding = torch.arange(200) % 7 == 0 if padded else None
    expected = route(logits, cfg, training=True, padding_mask=padding)
    on_device, mask = logits.cuda().requires_grad_(), padding.cuda() if padded else None
    router = make_router(cfg, device="cuda")
    x = torch.randn(200, 4, device="cuda")
    with no_sync():
        got = route(on_device, cfg, training=True, padding_mask=mask)
        (got.weight.sum() + sum(got.losses.values())).backward()
        router(x, padding_mask=mask).weight.sum().backward()
        if cfg.expert_score_bias:
            router.update_expert_score_bias()
    if cfg.token_rounding is not None:  # which of equal tokens are kept depends on a rounding, too
        loads = got.metrics["rounded_per_expert"].cpu()
        assert torch.equal(loads, expected.metrics["rounded_per_expert"])
        assert torch.equal(loads, count_valid(got.expert, 16).cpu())
    elif cfg.router_type == "topk":  # softmax may tell equal columns apart by a rounding
        assert torch.equal(got.expert.cpu(), expected.expert)
        assert torch.allclose(got.weight.cpu(), expected.weight, rtol=1e-5)
    assert torch.equal(got.metrics["tokens_per_expert"].cpu(), expected.metrics["tokens_per_expert"])
    for name, loss in expected.losses.items():
        assert torch.allclose(got.losses[name].cpu(), loss, rtol=1e-5)


@pytest.mark.parametrize("rule", TOKEN_ROUNDINGS)
def test_N2_every_rounding_repeats_under_a_seed_without_a_synchronization(rule):
    cfg = MoEConfig(hidden_size=4, ffn_hidden_size=8, num_experts=24, top_k=2, token_rounding=rule)
    logits = torch.randn(9000, 24, device="cuda", requires_grad=True)
    runs = []
    for _ in range(10):
        torch.manual_seed(1)
        with no_sync():
            routing = route(logits, cfg, training=True)
            (grad,) = torch.autograd.grad(routing.weight.square().sum(), [logits])
        runs.append((routing.token, routing.expert, routing.weight, grad))
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run, strict=True))
    loads, counts = (routing.metrics[f"{name}_per_expert"] for name in ("rounded", "tokens"))
    assert bool((loads % 128 == 0).all()) and bool(((loads - counts).abs() < 128).all())
    assert torch.equal(count_valid(routing.expert, 24), loads)


@pytest.mark.parametrize(("num_experts", "top_k"), [(1025, 3), (64, 33)])
@pytest.mark.parametrize("rule", [None, "nearest"])
def test_more_experts_or_choices_than_the_kernel_holds(num_experts, top_k, rule):
    cfg = MoEConfig(
        hidden_size=4, ffn_hidden_size=8, num_experts=num_experts, top_k=top_k, load_balancing_loss_weight=0.1,
        token_rounding=rule, token_rounding_tile=8,
    )  # fmt: skip
    logits = torch.randn(300, num_experts, generator=torch.Generator().manual_seed(0))
    results = []
    for device in ("cpu", "cuda"):
        leaf = logits.to(device).requires_grad_()
        with no_sync():
            routing = route(leaf, cfg, training=True)
            total = routing.weight.sin().sum() + routing.losses["load_balancing_loss"]
            (grad,) = torch.autograd.grad(total, leaf)
        results.append([t.cpu() for t in (routing.expert, routing.token, routing.weight, grad)])
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-7)
