"""Routing on a GPU: the CPU's choices and losses, without a host synchronisation."""

import pytest
import torch

from megablocks.config import MoEConfig
from megablocks.routers import make_router, route

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"softmax_order": "after_topk", "normalize_top_k": 2.0, "top_k_scaling": 1.5},
        {"score_function": "sigmoid", "num_groups": 4, "group_top_k": 2, "expert_score_bias": True},
        {"router_type": "expert_choice"},
        {"uniform_assignment": True},
    ],
)
@pytest.mark.parametrize("padded", [False, True])
def test_route_equals_the_cpus_without_a_synchronisation(changes, padded):
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
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = route(on_device, cfg, training=True, padding_mask=mask)
        (got.weight.sum() + sum(got.losses.values())).backward()
        router(x, padding_mask=mask).weight.sum().backward()
        if cfg.expert_score_bias:
            router.update_expert_score_bias()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    if cfg.router_type == "topk":  # softmax may tell equal columns apart by a rounding
        assert torch.equal(got.expert.cpu(), expected.expert)
        assert torch.allclose(got.weight.cpu(), expected.weight, rtol=1e-5)
    assert torch.equal(got.metrics["tokens_per_expert"].cpu(), expected.metrics["tokens_per_expert"])
    for name, loss in expected.losses.items():
        assert torch.allclose(got.losses[name].cpu(), loss, rtol=1e-5)
