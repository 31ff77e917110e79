"""The layers of other packages, called as in their own benchmarks. Each function turns a `Problem` into a `Step`.

A peer is imported only when it is called. A peer without a router uses ours.
"""

from __future__ import annotations

import importlib.util
import types
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from megablocks.tool.problem import PEERS, Problem, Step

ACTIVATIONS = ("swiglu", "gelu")
"""Activations with which the peers are called."""


def peers(problem: Problem) -> dict[str, Callable[[], Step]]:
    """Return the peers that are installed, by name. The first word of a name is its package."""

    def checked(call: Callable[[Problem], Step]) -> Step:
        if problem.shape.activation not in ACTIVATIONS:
            raise ValueError(
                f"activation={problem.shape.activation!r}: must be one of {', '.join(ACTIVATIONS)} for a peer"
            )
        return call(problem)

    calls: Sequence[Callable[[Problem], Step]] = torch_grouped, scattermoe, sonicmoe, partial(sonicmoe, compiled=True)
    made = {name: partial(checked, call) for name, call in zip(PEERS, calls, strict=True)}
    return {name: make for name, make in made.items() if importlib.util.find_spec(name.split()[0])}


def torch_grouped(problem: Problem) -> Step:
    """torch's grouped_mm between a gather and a scatter; the backward of both is a gather. SwiGLU is compiled."""
    s = problem.shape
    x, router, up = problem.leaf(problem.x), problem.leaf(problem.router), problem.up_weight()
    down = problem.leaf(problem.experts(problem.w2))
    every = torch.arange(s.experts, device=problem.device)

    def activate(z: Any) -> Any:
        if not s.gated:
            return F.gelu(z, approximate="tanh")
        gate, linear = z.chunk(2, dim=1)
        return F.silu(gate) * linear

    if problem.device == "cuda" and s.gated:
        activate = torch.compile(activate, dynamic=False)
    gather = _Gather.apply

    def forward() -> Any:
        weight, ids = problem.route(F.linear(x, router))
        sorted_ids, order = ids.flatten().sort(stable=True)
        ends = torch.searchsorted(sorted_ids, every, right=True).int()
        row_of_slot = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=problem.device))
        rows = gather(x, order, row_of_slot, s.top_k)
        z = torch._grouped_mm(rows, up.transpose(1, 2), offs=ends)
        rows = torch._grouped_mm(activate(z), down, offs=ends)
        slots = gather(rows, row_of_slot, order, None).view(s.tokens, s.top_k, s.hidden)
        return torch.bmm(weight.to(x.dtype).unsqueeze(1), slots).squeeze(1)

    return Step(forward, [x, router, up, down], problem.dy)


def scattermoe(problem: Problem) -> Step:
    from scattermoe.mlp import GLUMLP, MLP

    s = problem.shape
    kind = GLUMLP if s.gated else MLP
    act = F.silu if s.gated else (lambda z: F.gelu(z, approximate="tanh"))
    with torch.device("meta"):
        made = kind(s.hidden, s.width, s.experts, s.top_k, activation=act)
    up = problem.up_weight(gate_first=False)
    down = problem.leaf(problem.experts(problem.w2).transpose(1, 2).contiguous())
    # plain attributes, because a Parameter would be another leaf
    for experts, weight in ((made.experts, up), (made.output_experts, down)):
        del experts.weight
        experts.weight = weight
    x, router = problem.leaf(problem.x), problem.leaf(problem.router)

    def forward() -> Any:
        weight, ids = problem.route(F.linear(x, router))
        return made(x, weight.to(x.dtype), ids)

    return Step(forward, [x, router, up, down], problem.dy)


def sonicmoe(problem: Problem, compiled: bool = False) -> Step:
    """SonicMoE's layer function. Its gated weights interleave gate and up, and its softmax comes after the top-k.

    compiled: through torch.compile, as in SonicMoE's own benchmark. A CUDA graph is not possible, because SonicMoE
    counts tokens with a launch into the default stream. A process runs only one shape, because SonicMoE reuses kernels
    that it compiled for an earlier shape.
    """
    from sonicmoe import functional
    from sonicmoe.enums import ActivationType

    s = problem.shape
    if s.softmax_order != "after_topk" and s.top_k > 1:
        raise ValueError("SonicMoE's weights are a softmax over the chosen logits")
    if problem.v1 is None:
        up = problem.leaf(problem.experts(problem.w1))
    else:
        pair = torch.stack([problem.experts(problem.w1), problem.experts(problem.v1)], dim=2)
        up = problem.leaf(pair.view(s.experts, 2 * s.width, s.hidden))
    down = problem.leaf(problem.experts(problem.w2).transpose(1, 2).contiguous())
    x, router = problem.leaf(problem.x), problem.leaf(problem.router)
    stream = torch.cuda.current_stream().cuda_stream
    steered = types.SimpleNamespace(linear=lambda x, w: F.linear(x, w) + problem.constant)
    activation = ActivationType.SWIGLU if s.gated else ActivationType.GELU

    def layer() -> Any:
        weights = up.permute(1, 2, 0), None, down.permute(1, 2, 0), None
        return functional.moe_TC_softmax_topk_layer(x, router, *weights, s.top_k, stream, activation, False)[0]

    call = torch.compile(layer) if compiled else layer

    def forward() -> Any:
        functional.F = steered  # the module calls F.linear only for its router
        return call()

    return Step(forward, [x, router, up, down], problem.dy)


class _Gather(torch.autograd.Function):
    """A gather (T, H) → (T·K, H), or a permutation if K is None. torch's backward would use atomics or a sort."""

    @staticmethod
    def forward(ctx: Any, x: Any, order: Any, row_of_slot: Any, top_k: int | None) -> Any:
        ctx.save_for_backward(row_of_slot)
        ctx.top_k = top_k
        return x.index_select(0, order if top_k is None else order // top_k)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        slots = grads[0].index_select(0, *ctx.saved_tensors)
        dx = slots if ctx.top_k is None else slots.unflatten(0, (-1, ctx.top_k)).sum(1)
        return dx, None, None, None
