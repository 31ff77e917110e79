"""Every family of kernels once, at one small and odd size: what compute-sanitizer watches and the tests here repeat.

    python tests/gpu/sanitize.py [FAMILY…]

A family is a function of a device that makes its inputs and returns a step: step() computes the same list of tensors
at each call. A new kernel joins a family or brings a function of its own; test_sanitize.py fails while one is missing.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

Step = Callable[[], list[Tensor]]
FAMILIES: dict[str, Callable[[torch.device], Step]] = {}
T, H, WIDTH, E, K = 201, 72, 136, 5, 2
"""Tokens, hidden, width, experts, top-k: TMA can read them (multiples of 8 in memory), and they fill no tile."""


def family(make: Callable[[torch.device], Step]) -> Callable[[torch.device], Step]:
    FAMILIES[make.__name__] = make
    return make


def draws(device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Callable[..., Tensor]:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).div_(shape[-1] ** 0.25).to(device, dtype).requires_grad_()

    return draw


def chosen(device: torch.device) -> Tensor:
    """(T, K) ids: a long tail, an expert without tokens, and pairs without an expert."""
    odds = torch.tensor([8.0, 0.0, 2.0, 1.0, 1.0])
    ids = torch.multinomial(odds.expand(T, E), K, generator=torch.Generator().manual_seed(0))
    ids[::7, 1] = -1
    return ids.to(device)


def offsets_of(counts: list[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *counts], device=device).cumsum(0).int()


def with_gradients(outputs: Tensor | list[Tensor], inputs: list[Tensor]) -> list[Tensor]:
    outputs = [outputs] if isinstance(outputs, Tensor) else outputs
    loss = sum(out.float().square().sum() for out in outputs)
    return [out.detach() for out in outputs] + list(torch.autograd.grad(loss, inputs))


@contextlib.contextmanager
def without_hopper() -> Iterator[None]:
    before = os.environ.get("MEGABLOCKS_HOPPER")
    os.environ["MEGABLOCKS_HOPPER"] = "0"
    try:
        yield
    finally:
        os.environ.pop("MEGABLOCKS_HOPPER")
        if before is not None:
            os.environ["MEGABLOCKS_HOPPER"] = before


@family
def routing(device: torch.device) -> Step:
    from megablocks.ops.routing.capacity import apply_capacity
    from megablocks.ops.routing.dispatch import Routing, build_dispatch, make_routing
    from megablocks.ops.routing.topk import topk_weights

    logits, ids = draws(device, torch.float32)(T, E), chosen(device)
    lengths = torch.arange(T, device=device) % 4  # from none to three pairs a token
    token = torch.repeat_interleave(torch.arange(T, device=device), lengths).int()
    expert = (torch.arange(len(token), device=device) * 7 % (E + 2) - 1).int()

    def step() -> list[Tensor]:
        best, weight = topk_weights(logits, K)
        fixed = make_routing(ids, weight, E)
        ragged = Routing(token, expert, token.float(), T, E, metrics={})
        kept = apply_capacity(fixed, 20)
        return [best, *build_dispatch(fixed), *build_dispatch(ragged), kept.expert, *with_gradients(weight, [logits])]

    return step


@family
def permute(device: torch.device) -> Step:
    from megablocks.ops.permute.binned import binned_gather, binned_scatter
    from megablocks.ops.permute.combine import combine
    from megablocks.ops.permute.gather import gather
    from megablocks.ops.routing.dispatch import build_dispatch, make_routing

    weight, ids = draws(device, torch.float32)(T, K), chosen(device)
    inputs = [(draws(device)(T, h), draws(device)(T * K, h)) for h in (H, 4200)]  # one block of features, and several

    def step() -> list[Tensor]:
        d = build_dispatch(make_routing(ids, weight, E))
        live = (torch.arange(T * K, device=device) < d.expert_offsets[E])[:, None]
        out = []
        for x, rows in inputs:
            kept = torch.where(live, rows, 0)  # the gradient of unused rows is unspecified
            results = [torch.where(live, gather(x, d), 0), combine(kept, weight.flatten(), d), combine(kept, None, d)]
            binned = binned_scatter(binned_gather(x, d, 20), weight.flatten(), d)
            out += with_gradients([*results, binned], [x, rows, weight])
        return out

    return step


@family
def padded(device: torch.device) -> Step:
    from megablocks.ops.permute.padded import pad_dispatch, padded_gather, padded_scatter
    from megablocks.ops.routing.dispatch import build_dispatch, make_routing
    from megablocks.ops.sparse import topology

    weight, ids = draws(device, torch.float32)(T, K), chosen(device)
    inputs = [draws(device)(T, h) for h in (H, 4200)]

    def step() -> list[Tensor]:
        d = build_dispatch(make_routing(ids, weight, E))
        ends = topology(d.expert_offsets, 128, max_rows=T * K)
        rows = pad_dispatch(d, ends.padded_offsets, ends.pattern.shape[0])
        out = [*rows]
        for x in inputs:
            here = padded_gather(x, rows)
            results = [here, padded_scatter(here, weight.flatten(), rows), padded_scatter(here, None, rows)]
            out += with_gradients(results, [x, weight])
        return out

    return step


@family
def activation(device: torch.device) -> Step:
    from megablocks.ops.activation import GATED, UNARY, activate

    inputs = [[draws(device, dtype)(T, WIDTH + 1) for _ in range(2)] for dtype in (torch.bfloat16, torch.float32)]

    def step() -> list[Tensor]:
        out = []
        for z, gate in inputs:
            for name in UNARY:
                out += with_gradients(activate(z, None, name, "none" if name == "gelu" else "tanh"), [z])
            for name in GATED:
                out += with_gradients(activate(z, gate, name), [z, gate])
        return out

    return step


@family
def quant(device: torch.device) -> Step:
    from megablocks.ops.quant.quant import dequantize, quantize

    x = draws(device)(T, 2 * H + 1).detach()

    def step() -> list[Tensor]:
        out = []
        for num_bits in (8, 4):
            packed = quantize(x, num_bits)
            out += [*packed, dequantize(*packed, num_bits, x.shape[1], x.dtype)]
        return out

    return step


def grouped_step(device: torch.device, dtype: torch.dtype, *, used: int = T) -> Step:
    from megablocks.ops.fused.down import activate_and_project
    from megablocks.ops.grouped.bias import add_expert_bias
    from megablocks.ops.grouped.grouped_mm import grouped_mm

    draw = draws(device, dtype)
    x, w1, w2, bias = draw(T, H), draw(E, WIDTH, H), draw(E, WIDTH, H), draw(E, WIDTH)
    offsets = offsets_of([130, 0, 1, used - 135, 4], device)
    live = (torch.arange(T, device=device) < used)[:, None]

    def step() -> list[Tensor]:
        pre = add_expert_bias(grouped_mm(x, w1.transpose(1, 2), offsets), bias, offsets)
        y = activate_and_project(pre, None, w2, offsets, "gelu")
        return with_gradients(torch.where(live, y, 0), [x, w1, w2, bias])

    return step


@family
def grouped(device: torch.device) -> Step:
    return grouped_step(device, torch.bfloat16)


@family
def gathered(device: torch.device) -> Step:
    from megablocks.ops.grouped.gathered_mm import gathered_mm, gathered_mm_pair
    from megablocks.ops.routing.dispatch import build_dispatch, make_routing

    ids, draw = chosen(device), draws(device)
    x, w, v = draw(T, H), draw(E, WIDTH, H), draw(E, WIDTH, H)
    weight = torch.ones(T, K, device=device)

    def step() -> list[Tensor]:
        d = build_dispatch(make_routing(ids, weight, E))
        live = (torch.arange(T * K, device=device) < d.expert_offsets[E])[:, None]
        one = gathered_mm(x, w.transpose(1, 2), d)
        two = gathered_mm_pair(x, w.transpose(1, 2), v.transpose(1, 2), d)
        return with_gradients([torch.where(live, y, 0) for y in (one, *two)], [x, w, v])

    return step


@family
def grouped_twin(device: torch.device) -> Step:
    from megablocks.ops.grouped.grouped_mm_triton import ragged_k, ragged_m

    steps = [grouped_step(device, torch.float32), grouped_step(device, torch.float16)]
    draw = draws(device)
    x, dy, w = draw(T, H).detach(), draw(T, WIDTH).detach(), draw(E, H, WIDTH).detach()
    offsets, order = offsets_of([130, 0, 1, 66, 4], device), torch.arange(T, device=device).flip(0).int()

    def step() -> list[Tensor]:
        with without_hopper():
            out = [t for one in steps for t in one()]
            for gather in (None, order):
                out += [ragged_m(x, w, offsets, gather), ragged_k(x, dy, offsets, gather)]
            return out

    return step


@family
def grouped_hopper(device: torch.device) -> Step:
    from megablocks.ops.grouped import grouped_mm_hopper as hopper

    draw = draws(device)
    offsets, order = offsets_of([130, 0, 1, 66, 4], device), torch.arange(T, device=device).flip(0).int()
    x, w = draw(T, 520).detach(), draw(E, 520, 264).detach()
    across = w.mT.contiguous().mT
    shapes = ((128, 64, False), (264, 1024, True), (264, 4096, True))  # N, K, gathered
    tiles = [hopper.choose_m(*shape) for shape in shapes]

    dy = draw(T, 264).detach()

    def step() -> list[Tensor]:
        if not hopper.supports_m(x, w, offsets):
            return []
        out = [hopper.ragged_m(x, m, offsets, g, tile=t) for m in (w, across) for g in (None, order) for t in tiles]
        out += [hopper.ragged_k(dy, x, offsets, g) for g in (None, order)]
        return [*out, hopper.ragged_m_sum(x, w, x, w, offsets)]

    return step


def sparse_step(device: torch.device, dtype: torch.dtype, block: int, hidden: int = H) -> Step:
    from megablocks.ops.sparse import dds, dsd, sdd, sparse_mlp, topology

    draw = draws(device, dtype)
    offsets = offsets_of([130, 0, 1, 66, 4], device)
    first = topology(offsets, 2 * block, max_rows=T, block_size=block).pattern
    x, g = draw(first.shape[0], hidden), draw(first.shape[0], hidden)
    w1, w2, bias = draw(hidden, first.shape[1]), draw(first.shape[1], hidden), draw(first.shape[1])

    def step() -> list[Tensor]:
        p = topology(offsets, 2 * block, max_rows=T, block_size=block).pattern
        used = (p.row_indices >= 0)[:, None, None]
        s = sdd(x, w1, p)
        s = s.with_data(torch.where(used, s.data, 0))
        y = sparse_mlp(x, w1, w2, p, bias=bias, activation="silu")
        return with_gradients([s.data, dsd(s, w2), dsd(s.t(), g), dds(x.t(), s), y], [x, w1, w2, bias, g])

    return step


@family
def sparse(device: torch.device) -> Step:
    steps = [sparse_step(device, torch.bfloat16, 128, hidden) for hidden in (H, 1032)]  # either tile of sdd
    return lambda: [t for one in steps for t in one()]


@family
def sparse_twin(device: torch.device) -> Step:
    steps = [
        sparse_step(device, torch.bfloat16, 128),
        sparse_step(device, torch.bfloat16, 64, 67),
        sparse_step(device, torch.float32, 64),
        sparse_step(device, torch.float16, 256),
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


@contextlib.contextmanager
def launches() -> Iterator[set[str]]:
    """Within it, module and name of every Triton kernel that is launched."""
    from triton.runtime.jit import JITFunction

    launched: set[str] = set()
    run = JITFunction.run

    def noted(self: JITFunction, *args: object, **options: object) -> object:
        launched.add(f"{self.fn.__module__}.{self.fn.__name__}")
        return run(self, *args, **options)

    JITFunction.run = noted
    try:
        yield launched
    finally:
        JITFunction.run = run


def main() -> None:
    for name in sys.argv[1:] or FAMILIES:
        for t in FAMILIES[name](torch.device("cuda", 0))():
            assert not t.is_floating_point() or bool(t.isfinite().all()), f"{name}: a result is not finite"
        print(name, "done", flush=True)


if __name__ == "__main__":
    main()
