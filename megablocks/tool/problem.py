"""Layers that compute the same function: our layers and the float32 truth. peers.py contains those of other packages.

    y[t] = Σ_k p[t,k] · w2_eᵀ · act(w1_e · x[t]) [⊙ (v1_e · x[t]) if gated],   e = ids[t,k], p from the router's softmax

T tokens, H hidden, I expert width, E experts, K top-k. The experts of each token are given (`ids`): every candidate
adds a constant to the logits of these experts. The router's product, softmax and top-k still run and are timed.
Auxiliary losses are off. All candidates share one set of expert weights if their layouts allow it.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megablocks import MoE, dMoE
from megablocks.config import MoEConfig
from megablocks.ops.activation_table import Activation
from megablocks.ops.routing.topk import route_topk
from megablocks.ops.routing.values import RouterOptions
from megablocks.testing.poison import poisoned_empty
from megablocks.testing.routings import steer
from megablocks.tool.timing import on_gpu, relative_error

OURS = ("auto", "sparse", "grouped", "scatter", "fused")
PEERS = ("torch", "scattermoe", "sonicmoe", "sonicmoe compiled")
"""Candidates of other packages. The first word is the package."""
STRENGTH = 8.0
"""The constant that is added to the chosen logits. Logits have a standard deviation of 0.5, so the difference of two
logits would have to be 11 standard deviations to change a choice."""
ROUTER_TOLERANCE, TOLERANCE = 2e-2, 1e-2
"""Largest relative Frobenius errors. If p is near 1, its slope p·(1−p) is small, so d_router has fewer exact digits."""


@dataclass(frozen=True)
class Shape:
    tokens: int
    hidden: int
    width: int
    experts: int
    top_k: int
    activation: str
    softmax_order: str = "before_topk"

    @property
    def gated(self) -> bool:
        return Activation(self.activation).gated

    @property
    def forward_flops(self) -> int:
        """FLOPs of the experts' products in forward, two per multiply-add. Backward takes twice as many."""
        return (6 if self.gated else 4) * self.tokens * self.top_k * self.hidden * self.width

    @property
    def label(self) -> str:
        """The name of the shape in peers_h200.json."""
        return f"{self.tokens},{self.hidden}; {self.width}/{self.experts}/{self.top_k}"

    def config(self, **settings: Any) -> MoEConfig:
        """Return the config of a layer with this shape."""
        return MoEConfig(
            hidden_size=self.hidden, ffn_hidden_size=self.width, num_experts=self.experts, top_k=self.top_k,
            activation=self.activation, softmax_order=self.softmax_order, **settings,
        )  # fmt: skip


def random_ids(shape: Shape, device: str) -> Any:
    """Return (T, K) ids. Each token has K different experts, all equally likely."""
    generator = torch.Generator(device).manual_seed(3)
    return torch.rand(shape.tokens, shape.experts, device=device, generator=generator).topk(shape.top_k, dim=1).indices


@dataclass
class Step:
    """One candidate that is ready to run. `leaves`: x, the router's weight, and the experts' weights."""

    forward: Callable[[], Any]
    leaves: list[Any]
    dy: Any

    def total(self) -> Any:
        """Run forward and backward. Returns (y, gradients of the leaves) and accumulates nothing."""
        y = self.forward()
        return y, torch.autograd.grad(y, self.leaves, self.dy)


def memory_of(step: Step) -> dict[str, int]:
    """Return the bytes that forward leaves allocated, and the most bytes allocated in a step. Empty on a CPU."""
    if not on_gpu():
        return {}
    gc.collect()  # otherwise memory of reference cycles could be freed during the measurement
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    y = step.forward()
    held = torch.cuda.memory_allocated() - before
    grads = torch.autograd.grad(y, step.leaves, step.dy)
    peak = torch.cuda.max_memory_allocated() - before
    del y, grads
    return {"held": held, "peak": peak}


def error_of(got: Mapping[str, Any], want: Mapping[str, Any], slack: float = 1.0) -> float:
    """Return the largest relative error of the tensors in `got`, whose truths `want` has by the same names.

    Raises ArithmeticError, which names the tensor, if an error exceeds its tolerance times `slack`.
    """
    worst = 0.0
    for name, value in got.items():
        limit = slack * (ROUTER_TOLERANCE if "router" in name else TOLERANCE)
        off = relative_error(value, want[name])
        if off > limit:
            raise ArithmeticError(f"{name}: relative error {off:.1e}, at most {limit:.0e}")
        worst = max(worst, off)
    return worst


class Problem:
    """Inputs, weights, the given routing and the float32 truth of one shape."""

    def __init__(
        self, shape: Shape, ids: Tensor, *, device: str, dtype: torch.dtype = torch.bfloat16, **settings: Any
    ) -> None:
        """settings: options of the MoEConfig of every layer, also of the truth."""
        T, H, I, E = shape.tokens, shape.hidden, shape.width, shape.experts  # noqa: E741
        self.shape, self.ids, self.device, self.dtype = shape, ids.to(device), device, dtype
        self.settings = settings
        generator = torch.Generator(device).manual_seed(0)

        def rand(*size: int, std: float) -> Tensor:
            return (torch.randn(*size, device=device, generator=generator) * std).to(dtype)

        self.x, self.dy = rand(T, H, std=1.0), rand(T, H, std=1.0)
        self.router = rand(E, H, std=0.5 * H**-0.5)
        self.w1, self.w2 = rand(E * I, H, std=H**-0.5), rand(E * I, H, std=I**-0.5)
        self.v1 = rand(E * I, H, std=H**-0.5) if shape.gated else None
        self.constant = torch.zeros(T, E, device=device, dtype=dtype).scatter_(1, self.ids, STRENGTH)
        self._truth: dict[str, dict[str, Any]] = {}

    def experts(self, weight: Tensor) -> Tensor:
        """weight (E·I, H) → (E, I, H)."""
        return weight.view(self.shape.experts, self.shape.width, self.shape.hidden)

    def config(self, **changes: Any) -> MoEConfig:
        """Return the config of a layer for this problem."""
        return self.shape.config(**self.settings, **changes)

    def module(self, config: MoEConfig, experts_dtype: torch.dtype | None = None) -> dMoE | MoE:
        """Return one of our layers with the shared weights. experts_dtype: of the experts only, for the truth."""
        made = (dMoE if config.capacity_factor is None else MoE)(config, device="meta", dtype=self.dtype)
        state = {"router.layer.weight": self.router, "experts.w1": self.w1, "experts.w2": self.w2}
        if self.v1 is not None:
            state["experts.v1"] = self.v1
        dtype = self.dtype if experts_dtype is None else experts_dtype
        state = {name: t.to(dtype) if name.startswith("experts.") else t for name, t in state.items()}
        made.load_state_dict(state, assign=True)
        made.requires_grad_(True)
        steer(made.router, self.ids, STRENGTH)
        assert all(isinstance(p, torch.nn.Parameter) and not p.is_meta for p in made.parameters())
        return made

    def layer(self, config: MoEConfig, *, experts_dtype: torch.dtype | None = None, graphed: bool = False) -> Step:
        """Return a step of `module`. graphed: through torch.cuda.make_graphed_callables."""
        made = self.module(config, experts_dtype)
        dtype = self.dtype if experts_dtype is None else experts_dtype
        x = self.x.to(dtype).requires_grad_()
        leaves = [x, made.router.layer.weight, *(p for n, p in made.named_parameters() if n.startswith("experts."))]
        if graphed:
            made = torch.cuda.make_graphed_callables(made, (torch.zeros_like(x, requires_grad=True),))
        return Step(lambda: made(x), leaves, self.dy.to(dtype))

    def maker(self, **changes: Any) -> Callable[[], Step]:
        """Return a function that makes the layer with these changes of its config."""
        return lambda: self.layer(self.config(**changes))

    @property
    def names(self) -> tuple[str, ...]:
        """The names of our layers' gradients, in the order of `Step.leaves`."""
        return ("dx", "d_router", "dw1", "dw2") if self.v1 is None else ("dx", "d_router", "dw1", "dv1", "dw2")

    def truth(self) -> dict[str, Any]:
        """Return output and gradients of the loop over experts in float32, rounded to the dtype."""
        if not self._truth:
            y, grads = self.layer(self.config(mlp_impl="reference"), experts_dtype=torch.float32).total()
            values = {"y": y.detach()} | dict(zip(self.names, grads, strict=True))
            self._truth = {name: value.to(self.dtype) for name, value in values.items()}
        return self._truth

    def error(self, step: Step, *, weights: bool, slack: float = 1.0) -> float:
        """Return `error_of` of y and the gradients.

        weights: also compare the gradients of router and experts, and run in memory filled with NaN. Off for peers,
        because their weights have other layouts.
        """
        with poisoned_empty() if weights else contextlib.nullcontext():
            y, grads = step.total()
        got = {"y": y.detach(), "dx": grads[0]}
        if weights:
            got |= dict(zip(self.names, grads, strict=True))
        return error_of(got, self.truth(), slack)

    def ours(self) -> dict[str, Callable[[], Step]]:
        """Return makers of dMoE with each mlp_impl except "reference"."""
        return {impl: self.maker(mlp_impl=impl) for impl in OURS}

    # ---- what peers need

    def route(self, logits: Any) -> tuple[Any, Any]:
        """Return (T, K) float32 weights and ids of our router, for peers without a router.

        torch's operators would be unfair: their top-k alone takes longer than the rest of a router.
        """
        s = self.shape
        out = route_topk(logits + self.constant, RouterOptions(s.top_k, after=s.softmax_order == "after_topk"))
        return out.weight.view(s.tokens, s.top_k), out.expert.view(s.tokens, s.top_k).long()

    def leaf(self, weight: Any) -> Any:
        return weight.detach().requires_grad_()

    def up_weight(self, *, gate_first: bool = True) -> Any:
        """Return the up-projection (E, I, H), or (E, 2I, H) if gated."""
        if self.v1 is None:
            return self.leaf(self.experts(self.w1))
        halves = [self.experts(self.w1), self.experts(self.v1)]
        return self.leaf(torch.cat(halves if gate_first else halves[::-1], dim=1))
