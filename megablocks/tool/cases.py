"""The cases of `doctor`: each family of kernels at small odd sizes, and the same by plain formulas in float64.

A case calls the package's public function, and a float64 truth that shares no code with it. Autograd computes the
gradients of both.

Legend: T tokens, H hidden, I expert width, E experts, K top-k. No size fills a tile. Rows have multiples of 8 values,
as TMA requires, so that Hopper's kernels run if they can.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megablocks.config import MoEConfig
from megablocks.kinds import IMPLS, load
from megablocks.moe.impls import ExpertCall
from megablocks.ops.adam import FusedAdam
from megablocks.ops.add_norm import add_norm
from megablocks.ops.fused.mlp import ExpertParameters
from megablocks.ops.loss import linear_cross_entropy
from megablocks.ops.norm import norm
from megablocks.ops.permute.rows import combine, gather
from megablocks.ops.quant.quant import dequantize, quantize
from megablocks.ops.rope import rope
from megablocks.ops.routing.dispatch import build_dispatch, make_routing
from megablocks.ops.routing.topk import route_topk
from megablocks.ops.routing.values import RouterOptions
from megablocks.testing.oracle import experts_oracle, relative_error

T, H, I, E, K, V = 201, 72, 128, 5, 2, 1001  # noqa: E741  the legend's letters
Outputs = list[Tensor]


class Case(NamedTuple):
    """inputs: shapes of the float inputs, drawn from a normal. run, truth: from the inputs to the outputs.

    exact: inputs that stay in float32 on every device, such as routing weights.
    differentiable: whether gradients of the inputs are compared too.
    limit: of the relative error, instead of the limit of the dtype.
    """

    inputs: dict[str, tuple[int, ...]]
    run: Callable[..., Outputs]
    truth: Callable[..., Outputs]
    exact: tuple[str, ...] = ()
    differentiable: bool = True
    limit: float | None = None


def _chosen() -> Tensor:
    """Return (T, K) ids with a long tail of loads, an expert without tokens, and pairs without an expert."""
    odds = torch.tensor([8.0, 0.0, 2.0, 1.0, 1.0]).expand(T, E)
    ids = torch.multinomial(odds, K, generator=torch.Generator().manual_seed(0))
    ids[::7, 1] = -1
    return ids


def _dispatch(weight: Tensor) -> Any:
    return build_dispatch(make_routing(_chosen().to(weight.device), weight.detach(), E))


def _experts(impl: str) -> Case:
    def run(x: Tensor, weight: Tensor, w1: Tensor, v1: Tensor, w2: Tensor) -> Outputs:
        config = MoEConfig(hidden_size=H, ffn_hidden_size=I, num_experts=E, top_k=K, activation="swiglu", mlp_impl=impl)
        call = ExpertCall(ExpertParameters(w1, v1, w2), x, _dispatch(weight), weight.flatten(), config)
        return [load(IMPLS[impl].function)(call)]

    def truth(x: Tensor, weight: Tensor, w1: Tensor, v1: Tensor, w2: Tensor) -> Outputs:
        token = torch.arange(T).repeat_interleave(K)
        matrices = {name: w.flatten(0, 1) for name, w in (("w1", w1), ("v1", v1), ("w2", w2))}
        return [experts_oracle(x, token, _chosen().flatten(), weight.flatten(), matrices, E, "swiglu")]

    shapes = {"x": (T, H), "weight": (T, K), "w1": (E, I, H), "v1": (E, I, H), "w2": (E, I, H)}
    return Case(shapes, run, truth, exact=("weight",))


def _router(logits: Tensor) -> Outputs:
    out = route_topk(logits, RouterOptions(K))
    return [torch.zeros(T, E, device=logits.device, dtype=out.weight.dtype).scatter(
        1, out.expert.long().view(T, K), out.weight.view(T, K))]  # fmt: skip


def _router_truth(logits: Tensor) -> Outputs:
    scores = logits.softmax(1)
    return [scores * torch.zeros_like(scores).scatter(1, scores.topk(K, dim=1).indices, 1.0)]


def _permute(x: Tensor, weight: Tensor) -> Outputs:
    d = _dispatch(weight)
    live = (torch.arange(T * K, device=x.device) < d.expert_offsets[E])[:, None]
    rows = torch.where(live, gather(x, d), 0)  # rows that no expert owns are unspecified
    return [combine(rows, weight.flatten(), d), rows.float().sum(0)]


def _permute_truth(x: Tensor, weight: Tensor) -> Outputs:
    valid = (_chosen() >= 0).to(x.dtype)
    return [x * (weight * valid).sum(1, keepdim=True), (x * valid.sum(1, keepdim=True)).sum(0)]


def _labels(device: torch.device) -> Tensor:
    return torch.arange(T, device=device) * 31 % V


def _norm_truth(x: Tensor, weight: Tensor, bias: Tensor) -> Outputs:
    total = x / 2 + bias
    normed = [t * (t.square().mean(1, keepdim=True) + 1e-5).rsqrt() * weight for t in (x, total)]
    return [F.layer_norm(x, (H,), weight, bias, 1e-5), normed[0], total, normed[1]]


def _angles(device: torch.device) -> Tensor:
    """Return angles (T, 10) for the 20 rotated entries of each of 3 heads."""
    return (torch.arange(T)[:, None] * 1e4 ** (-torch.arange(10) / 10)).to(device)


def _rope(x: Tensor) -> Outputs:
    heads, angles = x.view(T, 1, 3, H // 3), _angles(x.device)
    neighbors = angles.repeat_interleave(2, 1)
    return [rope(heads, torch.cat((angles, angles), 1)), rope(heads, neighbors, interleaved=True)]


def _rope_truth(x: Tensor) -> Outputs:
    """Rotation by complex numbers."""
    rotated, rest = x.view(T, 1, 3, H // 3).split((20, H // 3 - 20), -1)
    angles = _angles(x.device).double()[:, None, None]
    turn = torch.polar(torch.ones_like(angles), angles)
    halves = turn * torch.complex(*rotated.chunk(2, -1))
    neighbors = turn * torch.complex(rotated[..., 0::2], rotated[..., 1::2])
    return [
        torch.cat((halves.real, halves.imag, rest), -1),
        torch.cat((torch.view_as_real(neighbors).flatten(-2), rest), -1),
    ]


def _steps(kind: Callable[..., torch.optim.Optimizer], p: Tensor, grad: Tensor, **options: bool) -> Outputs:
    parameter = p.detach().clone()
    optimizer = kind([parameter], lr=1e-1, weight_decay=0.1, **options)
    for sign in (1, -0.5):
        parameter.grad = sign * grad.detach()
        optimizer.step()
    return [parameter]


CASES: dict[str, Case] = {
    **{impl: _experts(impl) for impl in ("fused", "grouped", "sparse", "scatter")},
    "router": Case({"logits": (T, E)}, _router, _router_truth, exact=("logits",)),  # no ties
    "permute": Case({"x": (T, H), "weight": (T, K)}, _permute, _permute_truth, exact=("weight",)),
    "quant": Case(
        {"x": (T, H)},
        lambda x: [dequantize(*quantize(x, 8), 8, H, x.dtype)],
        lambda x: [x],
        differentiable=False,
        limit=0.02,  # 0.53 % on normal draws
    ),
    "loss": Case(
        {"x": (T, H), "weight": (V, H)},
        lambda x, weight: [linear_cross_entropy(x, weight, _labels(x.device))],
        lambda x, weight: [F.cross_entropy(x @ weight.t(), _labels(x.device), reduction="none")],
    ),
    "norm": Case(
        {"x": (T, H), "weight": (H,), "bias": (H,)},
        lambda x, weight, bias: [
            norm(x, weight, bias, eps=1e-5),
            norm(x, weight, None, eps=1e-5),
            *add_norm(x, -0.5 * x, weight, None, x_bias=bias, eps=1e-5)[:2],
        ],
        _norm_truth,
    ),
    "rope": Case({"x": (T, H)}, _rope, _rope_truth),
    "adam": Case(
        {"p": (4099,), "grad": (4099,)},
        lambda p, grad: _steps(FusedAdam, p, grad, decoupled_weight_decay=True),
        lambda p, grad: _steps(torch.optim.AdamW, p, grad),
        exact=("p", "grad"),
        differentiable=False,
    ),
}
"""The cases, by the names in `megablocks.tool.env.kernels`."""

LIMITS = {torch.bfloat16: 0.02, torch.float32: 2e-5}
"""Largest relative error, ‖result − truth‖ / ‖truth‖, by dtype. In bfloat16 a product has 0.2 to 0.6 %; one wrong row
of 201 causes 7 %."""


def errors(case: Case, device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """Return the relative error of each output and gradient, by name. It is infinite for a wrong shape or a NaN."""
    generator = torch.Generator().manual_seed(0)
    drawn = {name: torch.randn(shape, generator=generator) / max(1, shape[-1]) ** 0.25
             for name, shape in case.inputs.items()}  # fmt: skip
    given = {name: t.to(torch.float32 if name in case.exact else dtype) for name, t in drawn.items()}
    here = [t.to(device).requires_grad_(case.differentiable) for t in given.values()]
    true = [t.double().requires_grad_(case.differentiable) for t in given.values()]
    results, truths = case.run(*here), case.truth(*true)
    pairs = {f"output {i}": pair for i, pair in enumerate(zip(results, truths, strict=True))}
    if case.differentiable:
        factors = [torch.randn(t.shape, generator=generator) for t in truths]
        loss = sum((r.float() * f.to(device)).sum() for r, f in zip(results, factors, strict=True))
        true_loss = sum((t * f.double()).sum() for t, f in zip(truths, factors, strict=True))
        assert isinstance(loss, Tensor) and isinstance(true_loss, Tensor)
        gradients = zip(torch.autograd.grad(loss, here), torch.autograd.grad(true_loss, true), strict=True)
        pairs |= {f"gradient of {name}": pair for name, pair in zip(case.inputs, gradients, strict=True)}
    return {
        name: relative_error(r.detach().cpu(), t.detach()) if r.shape == t.shape else float("inf")
        for name, (r, t) in pairs.items()
    }
