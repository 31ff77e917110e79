"""A whole layer written out in float64, and the comparison of a layer with it: output, dx, dW, d-router, losses."""

import math

import torch

from megablocks.config import MoEConfig
from megablocks.kinds import IMPLS
from megablocks.moe import MoE, dMoE
from megablocks.testing.oracle import experts_oracle, relative_error
from megablocks.testing.poison import poisoned_empty

TOLERANCE = 1e-5
KINDS = (*IMPLS, "batched")


def config_of(kind=None, **changes):
    """A small layer; for the block-sparse kind, of a width that it takes."""
    width = 64 if kind == "sparse" else 20
    values = dict(hidden_size=12, ffn_hidden_size=width, num_experts=4, top_k=2, activation="swiglu", mlp_bias=True)
    values |= dict(load_balancing_loss_weight=0.1, z_loss_weight=0.01, init_std=0.3)
    return MoEConfig(**{**values, **changes})


def build(kind, config, **kwargs):
    """`kind`: an mlp_impl of dMoE, or "batched" for MoE with room for the fullest expert."""
    if kind == "batched":
        factor = 0 if config.capacity_factor is None else config.capacity_factor
        layer = MoE(config.replace(capacity_factor=factor), seed=5, **kwargs)
    else:
        layer = dMoE(config.replace(mlp_impl=kind), seed=5, **kwargs)
    return fill(layer)


def fill(layer):
    """Draw the router and every bias anew, equal on every rank and for every kind."""
    config, draw = layer.config, torch.Generator().manual_seed(11)
    with torch.no_grad():
        weight = layer.router.layer.weight
        weight.copy_(torch.randn(weight.shape, generator=draw))
        for name, width in (("b1", config.ffn_hidden_size), ("c1", config.ffn_hidden_size), ("b2", config.hidden_size)):
            full = torch.randn(config.num_experts, width, generator=draw)
            bias, start = getattr(layer.experts, name), layer.experts.shard.expert_offset
            if bias is not None:
                bias.copy_(full[start : start + bias.shape[0]])
        if layer.output_bias is not None:
            layer.output_bias.copy_(torch.randn(config.hidden_size, generator=draw))
    return layer


def batch(config, tokens, seed=0):
    """x (T, H) and the gradient of the output."""
    draw = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(tokens, config.hidden_size, generator=draw) for _ in range(2))


def capacity(config, tokens, load, ranks=1):
    """The rules as their formulas read; None drops nothing."""
    factor = config.capacity_factor
    if factor is None or factor == 0:
        return None
    if config.capacity_rule == "megablocks":
        return int(factor * config.top_k * tokens * ranks / config.num_experts)
    bound = config.top_k * int(abs(factor) * math.ceil(tokens / config.num_experts))
    return bound if factor > 0 else min(bound, max(load))


def oracle(config, parameters, x):
    """(y, losses, (T, K) expert ids with -1 for dropped) of a top-k softmax layer in float64."""
    tokens, experts, top_k = x.shape[0], config.num_experts, config.top_k
    logits = x @ parameters["router.layer.weight"].t()
    scores = logits.softmax(1)
    weight, ids = scores.topk(top_k, dim=1)
    load = [int((ids == e).sum()) for e in range(experts)]
    if config.normalize_top_k is not None:
        weight = weight / weight.norm(p=config.normalize_top_k, dim=1, keepdim=True)
    places, taken = capacity(config, tokens, load), [0] * experts
    ids = ids.clone()
    for t in range(tokens):
        for k in range(top_k):
            e = int(ids[t, k])
            if places is not None and taken[e] >= places:
                ids[t, k] = -1
            else:
                taken[e] += 1
    token = torch.arange(tokens).repeat_interleave(top_k)
    inner = {name.removeprefix("experts."): p for name, p in parameters.items() if name.startswith("experts.")}
    y = experts_oracle(
        x, token, ids.flatten(), weight.flatten(), inner, experts, config.activation, config.gelu_approximate
    )
    if "output_bias" in parameters:
        y = y + parameters["output_bias"]
    counts = torch.tensor(load, dtype=torch.float64)
    losses = {}
    if config.load_balancing_loss_weight:
        scale = config.load_balancing_loss_weight * experts / (top_k * max(tokens, 1) ** 2)
        losses["load_balancing_loss"] = scale * (counts * scores.sum(0)).sum()
    if config.z_loss_weight:
        losses["z_loss"] = config.z_loss_weight * logits.logsumexp(1).square().sum() / max(tokens, 1)
    return y, losses, ids


def parameters_of(layer):
    return {name: p.detach().double().requires_grad_() for name, p in layer.named_parameters()}


def assert_equals_oracle(layer, x, dy, tol=TOLERANCE):
    """Compare y, every loss, dx and every parameter's gradient; returns (aux, oracle's ids)."""
    parameters = parameters_of(layer)
    wide = x.detach().double().reshape(-1, x.shape[-1]).requires_grad_()
    expected, expected_losses, ids = oracle(layer.config, parameters, wide)
    total = (expected * dy.double().reshape(expected.shape)).sum() + sum(expected_losses.values())
    total.backward()

    x = x.detach().requires_grad_()
    with poisoned_empty():
        y, aux = layer.forward_with_aux(x)
        ((y * dy).sum() + sum(aux.losses.values())).backward()
    assert relative_error(y.reshape(expected.shape), expected.detach()) < tol, "y"
    assert aux.losses.keys() == expected_losses.keys()
    for name, loss in expected_losses.items():
        assert relative_error(aux.losses[name], loss.detach()) < tol, name
    assert relative_error(x.grad.reshape(wide.shape), wide.grad) < tol, "dx"
    for name, p in layer.named_parameters():
        assert p.grad is not None, f"{name} was not touched"
        wanted = parameters[name].grad
        assert relative_error(p.grad, torch.zeros_like(p) if wanted is None else wanted) < tol, f"d {name}"
    return aux, ids
