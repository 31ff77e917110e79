"""Whole layers that compute the same function: our layers, our padded layer, other packages, and the float32 truth.

`megablocks.tool.problem` says which function, and has our layers and the truth; `megablocks.tool.peers` has the peers.
Here are the shapes and loads that the benchmarks measure, our modes that save less, and bare products.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from measure import on_gpu

from megablocks.tool import problem as shared
from megablocks.tool.peers import peers
from megablocks.tool.problem import OURS, Shape, Step, random_ids  # noqa: F401

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


def shape_of(size: str) -> Shape:
    tokens, hidden, width, experts = SIZES[size]
    return Shape(tokens, hidden, width, experts, 1, "gelu")


def labelled(label: str) -> Shape:
    """The SwiGLU shape with the label "T,H; I/E/K". Its routing weights are a softmax over the chosen logits."""
    tokens, hidden, width, experts, top_k = map(int, re.split(r"[,;/ ]+", label))
    return Shape(tokens, hidden, width, experts, top_k, "swiglu", "after_topk")


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
    generator = torch.Generator().manual_seed(seed)
    loads = torch.tensor(skewed_loads(num_tokens * top_k, num_experts, skew))
    expert = torch.randperm(num_experts, generator=generator).repeat_interleave(loads)
    # Pair i goes to token i mod T. So up to T consecutive pairs, which have the same expert, go to different tokens.
    return expert.view(top_k, num_tokens).t()[torch.randperm(num_tokens, generator=generator)]


def kind(name: str) -> str:
    """The first word of a candidate's name: one of OURS or PEERS, or bmm. The rest says how the candidate runs."""
    return name.split()[0]


class Problem(shared.Problem):
    """A shape with every candidate of the benchmarks."""

    def fused_modes(self) -> dict[str, Callable[[], Step]]:
        return {name: self.maker(mlp_impl="fused", **changes) for name, changes in FUSED_MODES.items()}

    def peers(self) -> dict[str, Callable[[], Step]]:
        """The peers that are installed."""
        return peers(self)

    def routing(self) -> Any:
        """The routing of these tokens in training. It differs from `ids` only if the settings round the loads."""
        router = self.module(self.config()).router
        with torch.no_grad():
            return router.route(router.logits(self.x))

    def forget_truth(self) -> None:
        self._truth = {}

    def bmm(self) -> Step:
        """Only cuBLAS's batched products, with the same FLOPs and T·K/E rows for every expert."""
        s = self.shape
        per = s.tokens * s.top_k // s.experts
        generator = torch.Generator(self.device).manual_seed(1)

        def rand(*size: int) -> Any:
            return torch.randn(s.experts, *size, device=self.device, generator=generator, dtype=self.dtype)

        outer = (2 if s.gated else 1) * s.width
        x, a, dy, dz = rand(per, s.hidden), rand(per, s.width), rand(per, s.hidden), rand(per, outer)
        up, down = self.up_weight().detach(), self.experts(self.w2)

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


def select(makers: Mapping[str, Callable[[], Step]], wanted: Collection[str]) -> dict[str, Callable[[], Step]]:
    return {name: make for name, make in makers.items() if name in wanted}
