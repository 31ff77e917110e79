"""Families of the routers, the scattered and fused experts, and whole layers."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from gpu.family import WIDTH, E, H, K, Step, T, chosen, draws, family, offsets_of, with_gradients, without_hopper


@family
def router(device: torch.device) -> Step:
    from megablocks.ops.routing.topk import RouterOptions, route_topk

    mask = torch.arange(T, device=device) % 7 == 0
    inputs = [
        (draws(device, dtype)(T, experts), torch.linspace(-1, 1, experts, device=device), k)
        for dtype, experts, k in ((torch.bfloat16, E, K), (torch.float32, 130, 8))
    ]

    def step() -> list[Tensor]:
        out = []
        for logits, bias, k in inputs:
            plain = RouterOptions(k, balance_weight=0.1, z_weight=0.1)
            for options, given in (
                (plain, {}),
                (plain._replace(sigmoid=True, norm_p=1.0, scaling=2.5), {"bias": bias, "padding_mask": mask}),
                (plain._replace(after=True, norm_p=2.0), {}),
                (plain._replace(norm_p=3.0, num_groups=5, group_top_k=2), {"bias": bias, "padding_mask": mask}),
            ):
                r = route_topk(logits, options, **given)
                out += [r.expert, r.token, r.load, r.stats]
                out += with_gradients([r.weight, r.balance, r.z, r.sums], [logits])
            r = route_topk(logits, RouterOptions(k, after=True))
            out += with_gradients(r.weight, [logits])
        return out

    return step


@family
def rounding(device: torch.device) -> Step:
    from megablocks.ops.routing.rounding import ROUNDINGS, route_rounded
    from megablocks.ops.routing.topk import RouterOptions

    mask = torch.arange(T, device=device) % 7 == 0
    logits = [(draws(device, dtype)(T, n), k) for dtype, n, k in ((torch.bfloat16, E, K), (torch.float32, 130, 8))]

    def step() -> list[Tensor]:
        out = []
        for (x, k), padding, rule in itertools.product(logits, (mask, None), ROUNDINGS):
            options = RouterOptions(k, norm_p=1.0, balance_weight=0.1, z_weight=0.1)
            generator = torch.Generator(device).manual_seed(0)
            r = route_rounded(x, options, rule, 16, padding_mask=padding, generator=generator)
            out += [r.expert, r.token, r.load, r.stats, r.rounded, r.dropped]
            out += with_gradients([r.weight, r.balance, r.z, r.sums], [x])
        return out

    return step


@family
def replicate(device: torch.device) -> Step:
    from megablocks.ops.upstream.bookkeeping import replicate

    inputs = [draws(device, dtype)(3, E) for dtype in (torch.bfloat16, torch.float32)]
    ends = offsets_of([130, 0, 1, 66, 4], device)[1:]

    def step() -> list[Tensor]:
        return [t for x in inputs for t in with_gradients(replicate(x, ends, T + 9), [x])]

    return step


@family
def scattered(device: torch.device) -> Step:
    from megablocks.ops.activation_table import Activation
    from megablocks.ops.routing.dispatch import build_dispatch, make_routing
    from megablocks.ops.scattered.dispatched import gathered_linear, linear_combine
    from megablocks.ops.scattered.parallel_linear import flatten_sort_count, parallel_linear

    ids, steps = chosen(device), []
    for dtype, width in ((torch.bfloat16, WIDTH), (torch.float16, WIDTH + 1), (torch.float32, WIDTH)):
        draw, draw32 = draws(device, dtype), draws(device, torch.float32)
        steps.append((draw(T, H), draw(T * K, H), draw(E, H, width), draw(E, width), draw32(T, K), draw(E, width, H)))

    def step() -> list[Tensor]:
        order, out = flatten_sort_count(ids, E), []
        for x, rows, w, bias, gates, w2 in steps:
            for grouped_out in (False, True):
                out += with_gradients(
                    [
                        parallel_linear(x, w, K, *order, bias, grouped_out=grouped_out),
                        parallel_linear(rows, w, 1, *order, grouped_in=True, grouped_out=grouped_out),
                    ],
                    [x, rows, w, bias],
                )
            out += with_gradients(
                parallel_linear(rows, w, 1, *order, bias, gates, grouped_in=True), [rows, bias, gates]
            )
            d = build_dispatch(make_routing(ids, gates, E))
            z = gathered_linear(x, w, bias, d)
            y = linear_combine(z, z, w2, bias @ w2.detach()[0], gates.flatten(), d, Activation("swiglu"))
            out += with_gradients(y, [x, w, bias, gates, w2])
        return out

    return step


def fused_step(device: torch.device, dtype: torch.dtype, hidden: int = H, width: int = WIDTH) -> Step:
    from megablocks.ops.activation_table import Activation
    from megablocks.ops.fused.mlp import ExpertParameters, MainGrads, fused_mlp
    from megablocks.ops.routing.dispatch import build_dispatch, make_routing

    draw = draws(device, dtype)
    x, w1, v1, w2 = draw(T, hidden), *(draw(E, width, hidden) for _ in range(3))
    b1, c1, b2 = draw(E, width), draw(E, width), draw(E, hidden)
    gated, plain = ExpertParameters(w1, v1, w2), ExpertParameters(w1, None, w2)
    biased, swiglu = gated._replace(b1=b1, c1=c1, b2=b2), Activation("swiglu")
    routes = [(chosen(device, k), draws(device, torch.float32)(T, k)) for k in (2, 3)]

    def step() -> list[Tensor]:
        out = []
        for ids, weight in routes:
            d = build_dispatch(make_routing(ids, weight, E))
            y = fused_mlp(x, weight.flatten(), d, biased, swiglu)
            out += with_gradients(y, [x, weight, w1, v1, w2, b1, c1, b2])
            y = fused_mlp(x, weight.flatten(), d, plain, Activation("gelu", "none"), recompute=True)
            out += with_gradients(y, [x, weight, w1, w2])
            y = fused_mlp(x, None, d, gated, Activation("geglu"), input_bits=8, pre_bits=4)
            out += with_gradients(y, [x, w1, v1, w2])
            mains = [torch.ones_like(w, dtype=torch.float32) for w in (w1, v1, w2)]
            y = fused_mlp(x, None, d, gated, swiglu, main_grads=MainGrads(*mains))
            out += with_gradients(y, [x]) + mains
        return out

    return step


@family
def fused(device: torch.device) -> Step:
    steps = [fused_step(device, dtype) for dtype in (torch.bfloat16, torch.float16)]
    steps.append(fused_step(device, torch.bfloat16, 2056, 264))  # other tile of the activation gradient
    return lambda: [t for one in steps for t in one()]


@family
def fused_twin(device: torch.device) -> Step:
    steps = [
        fused_step(device, torch.bfloat16),
        fused_step(device, torch.float16, 60, 67),
        fused_step(device, torch.float32),
    ]

    def step() -> list[Tensor]:
        with without_hopper():
            return [t for one in steps for t in one()]

    return step


@family
def layer(device: torch.device) -> Step:
    from megablocks import MoEConfig, dMoE
    from megablocks.layers.moe import MoE

    sizes = dict(hidden_size=H, num_experts=E, top_k=K, load_balancing_loss_weight=0.1)
    layers = []
    for kind, options in (
        (dMoE, {"activation": "swiglu", "ffn_hidden_size": WIDTH, "mlp_impl": "grouped"}),
        (dMoE, {"activation": "geglu", "ffn_hidden_size": 128, "mlp_impl": "sparse"}),
        (dMoE, {"mlp_bias": True, "ffn_hidden_size": 256, "mlp_impl": "sparse", "recompute_activation": True}),
        (dMoE, {"activation": "reglu", "mlp_bias": True, "ffn_hidden_size": WIDTH, "mlp_impl": "scatter"}),
        (dMoE, {"activation": "swiglu", "mlp_bias": True, "ffn_hidden_size": WIDTH, "mlp_impl": "fused"}),
        (dMoE, {"ffn_hidden_size": WIDTH, "mlp_impl": "fused", "token_rounding": "nearest", "token_rounding_tile": 16}),
        (MoE, {"capacity_factor": 1.0, "mlp_bias": True, "ffn_hidden_size": WIDTH}),
    ):
        torch.manual_seed(0)
        layers.append(kind(MoEConfig(**sizes, **options), device=device, dtype=torch.bfloat16))
    x = draws(device)(T, H)

    def step() -> list[Tensor]:
        out = []
        for one in layers:
            y, aux = one.forward_with_aux(x)
            out += with_gradients([y, *aux.losses.values()], [x, *one.parameters()])
        return out

    return step
