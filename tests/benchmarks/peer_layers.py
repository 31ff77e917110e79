"""Our layer over the ranks, and how far a peer's layer with copies of its weights is from it."""

from typing import Any

import torch
import torch.distributed as dist

from megablocks import MoEConfig, dMoE
from megablocks.testing.oracle import relative_error

HIDDEN, TOKENS, TOP_K = 16, 24, 2


def our_layer(experts: int) -> dMoE:
    config = MoEConfig(
        hidden_size=HIDDEN, ffn_hidden_size=24, num_experts=experts, top_k=TOP_K, activation="swiglu", init_std=0.3,
        load_balancing_loss_weight=0.0,
    )  # fmt: skip
    torch.manual_seed(0)
    return dMoE(config, expert_parallel_group=dist.group.WORLD, seed=1)


def errors_of(ours: dMoE, theirs: Any, step: int = 0) -> dict[str, float]:
    """Relative errors of y, dx and the gradients of all weights, on this rank's tokens of that step."""
    draw = torch.Generator().manual_seed(dist.get_world_size() * step + dist.get_rank())
    x = torch.randn(TOKENS, HIDDEN, generator=draw).requires_grad_()
    dy = torch.randn(TOKENS, HIDDEN, generator=draw)
    results = []
    for layer in (ours, theirs):
        layer.zero_grad()
        x.grad = None
        y = layer(x)
        y.backward(dy)
        results.append({"y": y.detach(), "dx": x.grad})
    want, got = results
    got |= theirs.gradients()
    want |= {name: getattr(ours.experts, name).grad for name in ("w1", "v1", "w2")}
    want["router"] = ours.router.layer.weight.grad
    assert got.keys() == want.keys()
    return {name: relative_error(got[name], value) for name, value in want.items()}
