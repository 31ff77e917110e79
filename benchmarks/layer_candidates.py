"""Whole layers that compute the same function: our layers, our padded layer, other packages, and the float32 truth.

    y[t] = Σ_k p[t,k] · w2_eᵀ · act(w1_e · x[t]) [⊙ (v1_e · x[t]) if gated],   e = ids[t,k], p from the router's softmax

T tokens, H hidden, I expert width, E experts, K top-k. The experts of each token are given (`ids`): every candidate
adds a constant to the logits of these experts. The router's product, softmax and top-k still run and are timed.
Auxiliary losses are off. All candidates share one set of expert weights if their layouts allow it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import math
import re
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from measure import on_gpu, relative_error

OURS = ("auto", "sparse", "grouped", "scatter", "fused")
GRAPHED = "auto graphed"
PEERS = ("torch", "scattermoe", "sonicmoe")
PEER_LAYERS = (*PEERS, "sonicmoe compiled")
FUSED_MODES = {
    "fused recompute": {"recompute_activation": True},
    "fused 8 bits": {"quantize_rematerialize_num_bits": 8},
}
"""The fused experts with less saved for backward: only x, or the pre-activations in 8 bits."""
SIZES = {  # T, H, I, E: the FFNs of Transformer-XS, -Small and -Medium
    "XS": (65536, 512, 2048, 64),
    "Small": (32768, 768, 3072, 64),
    "Medium": (8192, 1024, 4096, 64),
    "toy": (128, 32, 128, 4),
}
GOAL_FROM, GOAL, LEAST_AT_ONE = 2.0, 1.38, 0.95
"""Goals over padding: speed-up from this skew on (the paper's smallest, at XS), and the least speed at skew 1."""
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
        return self.activation == "swiglu"

    @property
    def forward_flops(self) -> int:
        """FLOPs of the experts' products in forward, two per multiply-add. Backward takes twice as many."""
        return (6 if self.gated else 4) * self.tokens * self.top_k * self.hidden * self.width

    @property
    def label(self) -> str:
        """The name of the shape in peers_h200.json."""
        return f"{self.tokens},{self.hidden}; {self.width}/{self.experts}/{self.top_k}"


def shape_of(size: str) -> Shape:
    tokens, hidden, width, experts = SIZES[size]
    return Shape(tokens, hidden, width, experts, 1, "gelu")


def labelled(label: str) -> Shape:
    """The SwiGLU shape with the label "T,H; I/E/K". Its routing weights are a softmax over the chosen logits."""
    tokens, hidden, width, experts, top_k = map(int, re.split(r"[,;/ ]+", label))
    return Shape(tokens, hidden, width, experts, top_k, "swiglu", "after_topk")


def random_ids(shape: Shape, device: str) -> Any:
    """(T, K) ids. Each token has K different experts, all equally likely."""
    import torch

    generator = torch.Generator(device).manual_seed(3)
    return torch.rand(shape.tokens, shape.experts, device=device, generator=generator).topk(shape.top_k, dim=1).indices


def skewed_loads(num_pairs: int, num_experts: int, skew: float) -> list[int]:
    """Number of pairs of each expert, the fullest first, with max/mean = skew. Skew 1 is balance.

    The loads follow 1/(e+1)^s for a suitable s. The fullest expert has exactly round(skew · num_pairs / E) pairs, and
    the other experts share the rest by largest remainder.

    Raises:
        ValueError: skew is outside [1, E].
    """
    if not 1 <= skew <= num_experts:
        raise ValueError(f"skew={skew}: max/mean load must be in [1, {num_experts}], the number of experts")

    def shares(s: float) -> list[float]:
        powers = [(e + 1) ** -s for e in range(num_experts)]
        return [p / math.fsum(powers) for p in powers]

    low, high = 0.0, 64.0  # at s = 64 the fullest expert has all but 2^-64 of the pairs
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if shares(middle)[0] * num_experts < skew else (low, middle)
    fullest = min(num_pairs, math.floor(skew * num_pairs / num_experts + 0.5))
    if num_experts == 1:
        return [num_pairs]
    _, *tail = shares(low)
    wanted = [t / max(math.fsum(tail), 1e-300) * (num_pairs - fullest) for t in tail]
    loads = [math.floor(w) for w in wanted]
    by_remainder = sorted(range(len(tail)), key=lambda i: loads[i] - wanted[i])
    for i in by_remainder[: num_pairs - fullest - sum(loads)]:
        loads[i] += 1
    return [fullest, *loads]


def skewed(num_tokens: int, num_experts: int, top_k: int, skew: float, seed: int = 0) -> Any:
    """Expert ids (T, K) int64 with the loads of `skewed_loads`: the fullest expert holds exactly skew times the mean.

    The K ids of a token differ as long as no expert holds more than T pairs (skew <= E/K). `seed` decides which expert
    is the fullest and which tokens it gets.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    loads = torch.tensor(skewed_loads(num_tokens * top_k, num_experts, skew))
    expert = torch.randperm(num_experts, generator=generator).repeat_interleave(loads)
    # Pair i goes to token i mod T. So up to T consecutive pairs, which have the same expert, go to different tokens.
    return expert.view(top_k, num_tokens).t()[torch.randperm(num_tokens, generator=generator)]


def kind(name: str) -> str:
    """The first word of a candidate's name: one of OURS or PEERS, or bmm. The rest says how the candidate runs."""
    return name.split()[0]


@dataclass
class Step:
    """One candidate that is ready to run. `leaves`: x, the router's weight, and the experts' weights."""

    forward: Callable[[], Any]
    leaves: list[Any]
    dy: Any

    def total(self) -> Any:
        """Runs forward and backward. Returns (y, gradients of the leaves) and accumulates nothing."""
        import torch

        y = self.forward()
        return y, torch.autograd.grad(y, self.leaves, self.dy)


class Problem:
    """Inputs, weights, the given routing and the float32 truth of one shape."""

    def __init__(self, shape: Shape, ids: Any, *, device: str, dtype: Any = None, **settings: Any) -> None:
        """settings: options of the MoEConfig of every layer, also of the truth."""
        import torch

        dtype = torch.bfloat16 if dtype is None else dtype
        T, H, I, E = shape.tokens, shape.hidden, shape.width, shape.experts  # noqa: E741
        self.shape, self.ids, self.device, self.dtype = shape, ids.to(device), device, dtype
        self.settings = settings
        generator = torch.Generator(device).manual_seed(0)

        def rand(*size: int, std: float) -> Any:
            return (torch.randn(*size, device=device, generator=generator) * std).to(dtype)

        self.x, self.dy = rand(T, H, std=1.0), rand(T, H, std=1.0)
        self.router = rand(E, H, std=0.5 * H**-0.5)
        self.w1, self.w2 = rand(E * I, H, std=H**-0.5), rand(E * I, H, std=I**-0.5)
        self.v1 = rand(E * I, H, std=H**-0.5) if shape.gated else None
        self.constant = torch.zeros(T, E, device=device, dtype=dtype).scatter_(1, self.ids, STRENGTH)
        self._truth: dict[str, dict[str, Any]] = {}

    def experts(self, weight: Any) -> Any:
        return weight.view(self.shape.experts, self.shape.width, self.shape.hidden)

    def config(self, **changes: Any) -> Any:
        from megablocks import MoEConfig

        s = self.shape
        return MoEConfig(
            hidden_size=s.hidden, ffn_hidden_size=s.width, num_experts=s.experts, top_k=s.top_k,
            activation=s.activation, softmax_order=s.softmax_order, **self.settings, **changes,
        )  # fmt: skip

    def module(self, config: Any, experts_dtype: Any = None) -> Any:
        """One of our layers over the shared weights. experts_dtype: of the experts only, for the truth."""
        import torch

        from megablocks import MoE, dMoE
        from megablocks.testing.routings import steer

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

    def layer(self, config: Any, *, experts_dtype: Any = None, graphed: bool = False) -> Step:
        """A step of `module`. graphed: through torch.cuda.make_graphed_callables."""
        import torch

        made = self.module(config, experts_dtype)
        dtype = self.dtype if experts_dtype is None else experts_dtype
        x = self.x.to(dtype).requires_grad_()
        leaves = [x, made.router.layer.weight, *(p for n, p in made.named_parameters() if n.startswith("experts."))]
        if graphed:
            made = torch.cuda.make_graphed_callables(made, (torch.zeros_like(x, requires_grad=True),))
        return Step(lambda: made(x), leaves, self.dy.to(dtype))

    def maker(self, **changes: Any) -> Callable[[], Step]:
        """Makes the layer with these changes of its config when it is called."""
        return lambda: self.layer(self.config(**changes))

    def routing(self) -> Any:
        """The routing of these tokens in training. It differs from `ids` only if the settings round the loads."""
        import torch

        router = self.module(self.config()).router
        with torch.no_grad():
            return router.route(router.logits(self.x))

    @property
    def names(self) -> tuple[str, ...]:
        """The names of our layers' gradients, in the order of `Step.leaves`."""
        return ("dx", "d_router", "dw1", "dw2") if self.v1 is None else ("dx", "d_router", "dw1", "dv1", "dw2")

    def forget_truth(self) -> None:
        self._truth = {}

    def truth(self) -> dict[str, Any]:
        """Output and gradients of the loop over experts in float32, rounded to the dtype."""
        import torch

        if not self._truth:
            y, grads = self.layer(self.config(mlp_impl="reference"), experts_dtype=torch.float32).total()
            values = {"y": y.detach()} | dict(zip(self.names, grads, strict=True))
            self._truth = {name: value.to(self.dtype) for name, value in values.items()}
        return self._truth

    def error(self, step: Step, *, weights: bool, slack: float = 1.0) -> float:
        """Largest relative error of y and the gradients. Each must be within its tolerance times `slack`.

        weights: also compare the gradients of router and experts, and run in memory that holds NaN. Off for peers,
        because their weights have other layouts.

        Raises:
            ArithmeticError: an error exceeds its tolerance. The message names the tensor.
        """
        import torch

        from megablocks.testing.poison import poisoned_empty

        with poisoned_empty() if weights else contextlib.nullcontext():
            y, grads = step.total()
        got = {"y": y.detach(), "dx": grads[0]}
        if weights:
            got |= dict(zip(self.names, grads, strict=True))
        worst = 0.0
        for name, value in got.items():
            limit = slack * (ROUTER_TOLERANCE if name == "d_router" else TOLERANCE)
            off = relative_error(value, self.truth()[name])
            if off > limit:
                raise ArithmeticError(f"{name}: relative error {off:.1e}, at most {limit:.0e}")
            worst = max(worst, off)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return worst

    def ours(self) -> dict[str, Callable[[], Step]]:
        """dMoE with each mlp_impl except "reference"."""
        return {impl: self.maker(mlp_impl=impl) for impl in OURS}

    def fused_modes(self) -> dict[str, Callable[[], Step]]:
        return {name: self.maker(mlp_impl="fused", **changes) for name, changes in FUSED_MODES.items()}

    # ---- peers

    def peers(self) -> dict[str, Callable[[], Step]]:
        """The peers that are installed."""
        made = {"torch": self.torch_grouped, "scattermoe": self.scattermoe, "sonicmoe": self.sonicmoe}
        made["sonicmoe compiled"] = lambda: self.sonicmoe(compiled=True)
        return {name: make for name, make in made.items() if importlib.util.find_spec(kind(name))}

    def _route(self, logits: Any) -> tuple[Any, Any]:
        """(T, K) float32 weights and ids of our router, for peers without a router.

        torch's operators would be an unfair choice: their top-k alone takes longer than the rest of a router.
        """
        from megablocks.ops.routing.topk import RouterOptions, route_topk

        s = self.shape
        out = route_topk(logits + self.constant, RouterOptions(s.top_k, after=s.softmax_order == "after_topk"))
        return out.weight.view(s.tokens, s.top_k), out.expert.view(s.tokens, s.top_k).long()

    def _leaf(self, weight: Any) -> Any:
        return weight.detach().requires_grad_()

    def _up_weight(self, *, gate_first: bool = True) -> Any:
        """(E, I, H), or (E, 2I, H)."""
        import torch

        if self.v1 is None:
            return self._leaf(self.experts(self.w1))
        halves = [self.experts(self.w1), self.experts(self.v1)]
        return self._leaf(torch.cat(halves if gate_first else halves[::-1], dim=1))

    def torch_grouped(self) -> Step:
        """torch's grouped_mm between a gather and a scatter whose backwards are gathers. SwiGLU is compiled."""
        import torch
        import torch.nn.functional as F

        s = self.shape
        x, router, up = self._leaf(self.x), self._leaf(self.router), self._up_weight()
        down = self._leaf(self.experts(self.w2))
        every = torch.arange(s.experts, device=self.device)

        def activate(z: Any) -> Any:
            if not s.gated:
                return F.gelu(z, approximate="tanh")
            gate, linear = z.chunk(2, dim=1)
            return F.silu(gate) * linear

        if self.device == "cuda" and s.gated:
            activate = torch.compile(activate, dynamic=False)
        gather, permute = _torch_moves()

        def forward() -> Any:
            weight, ids = self._route(F.linear(x, router))
            sorted_ids, order = ids.flatten().sort(stable=True)
            ends = torch.searchsorted(sorted_ids, every, right=True).int()
            row_of_slot = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=self.device))
            rows = gather.apply(x, order, row_of_slot, s.top_k)
            z = torch._grouped_mm(rows, up.transpose(1, 2), offs=ends)
            rows = torch._grouped_mm(activate(z), down, offs=ends)
            slots = permute.apply(rows, row_of_slot, order).view(s.tokens, s.top_k, s.hidden)
            return torch.bmm(weight.to(x.dtype).unsqueeze(1), slots).squeeze(1)

        return Step(forward, [x, router, up, down], self.dy)

    def scattermoe(self) -> Step:
        import torch
        import torch.nn.functional as F
        from scattermoe.mlp import GLUMLP, MLP

        s = self.shape
        kind = GLUMLP if s.gated else MLP
        act = F.silu if s.gated else (lambda z: F.gelu(z, approximate="tanh"))
        with torch.device("meta"):
            made = kind(s.hidden, s.width, s.experts, s.top_k, activation=act)
        up = self._up_weight(gate_first=False)
        down = self._leaf(self.experts(self.w2).transpose(1, 2).contiguous())
        # plain attributes, because a Parameter would be another leaf
        for experts, weight in ((made.experts, up), (made.output_experts, down)):
            del experts.weight
            experts.weight = weight
        x, router = self._leaf(self.x), self._leaf(self.router)

        def forward() -> Any:
            weight, ids = self._route(F.linear(x, router))
            return made(x, weight.to(x.dtype), ids)

        return Step(forward, [x, router, up, down], self.dy)

    def sonicmoe(self, compiled: bool = False) -> Step:
        """SonicMoE's layer function. Its gated weights interleave gate and up, and its softmax comes after the top-k.

        compiled: through torch.compile, as in SonicMoE's own benchmark. A CUDA graph is not possible, because it counts
        tokens with a launch into the default stream. A process runs one shape only, because SonicMoE reuses kernels
        that it compiled for an earlier shape.
        """
        import torch
        import torch.nn.functional as F
        from sonicmoe import functional
        from sonicmoe.enums import ActivationType

        s = self.shape
        if s.softmax_order != "after_topk" and s.top_k > 1:
            raise ValueError("SonicMoE's weights are a softmax over the chosen logits")
        if self.v1 is None:
            up = self._leaf(self.experts(self.w1))
        else:
            pair = torch.stack([self.experts(self.w1), self.experts(self.v1)], dim=2)
            up = self._leaf(pair.view(s.experts, 2 * s.width, s.hidden))
        down = self._leaf(self.experts(self.w2).transpose(1, 2).contiguous())
        x, router = self._leaf(self.x), self._leaf(self.router)
        stream = torch.cuda.current_stream().cuda_stream
        steered = types.SimpleNamespace(linear=lambda x, w: F.linear(x, w) + self.constant)
        activation = ActivationType.SWIGLU if s.gated else ActivationType.GELU

        def layer() -> Any:
            weights = up.permute(1, 2, 0), None, down.permute(1, 2, 0), None
            return functional.moe_TC_softmax_topk_layer(x, router, *weights, s.top_k, stream, activation, False)[0]

        call = torch.compile(layer) if compiled else layer

        def forward() -> Any:
            functional.F = steered  # the module calls F.linear only for its router
            return call()

        return Step(forward, [x, router, up, down], self.dy)

    def bmm(self) -> Step:
        """Only cuBLAS's batched products, with the same FLOPs and T·K/E rows for every expert."""
        import torch

        s = self.shape
        per = s.tokens * s.top_k // s.experts
        generator = torch.Generator(self.device).manual_seed(1)

        def rand(*size: int) -> Any:
            return torch.randn(s.experts, *size, device=self.device, generator=generator, dtype=self.dtype)

        outer = (2 if s.gated else 1) * s.width
        x, a, dy, dz = rand(per, s.hidden), rand(per, s.width), rand(per, s.hidden), rand(per, outer)
        up, down = self._up_weight().detach(), self.experts(self.w2)

        def forward() -> Any:
            return torch.bmm(x, up.mT), torch.bmm(a, down)

        class Products(Step):
            def total(self) -> Any:
                dx, da = torch.bmm(dz, up), torch.bmm(dy, down.mT)
                return self.forward(), (dx, da, torch.bmm(dz.mT, x), torch.bmm(a.mT, dy))

        return Products(forward, [], dy)


def problem_of(job: str) -> Problem:
    """The problem of SIZE/SKEW, such as Medium/2."""
    size, skew = job.split("/")
    shape = shape_of(size)
    ids = skewed(shape.tokens, shape.experts, shape.top_k, float(skew))
    return Problem(shape, ids, device="cuda" if on_gpu() else "cpu")


@functools.cache
def _torch_moves() -> tuple[Any, Any]:
    """A gather (T, H) → (T·K, H) and a permutation of rows. torch's own backwards would use atomics or a sort."""
    import torch

    class Gather(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, order: Any, row_of_slot: Any, top_k: int) -> Any:
            ctx.save_for_backward(row_of_slot)
            ctx.shape = x.shape[0], top_k, x.shape[1]
            return x.index_select(0, order // top_k)

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return grad.index_select(0, *ctx.saved_tensors).view(ctx.shape).sum(1), None, None, None

    class Permute(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, rows: Any, index: Any, inverse: Any) -> Any:
            ctx.save_for_backward(inverse)
            return rows.index_select(0, index)

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return grad.index_select(0, *ctx.saved_tensors), None, None

    return Gather, Permute


def select(makers: Mapping[str, Callable[[], Step]], wanted: str) -> dict[str, Callable[[], Step]]:
    """The makers whose names are in the comma-separated `wanted`; "" means all."""
    return {name: make for name, make in makers.items() if not wanted or name in wanted.split(",")}
