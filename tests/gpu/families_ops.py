"""Families of the single ops: routing, movement, activations, quantizers, grouped and block-sparse products."""

from __future__ import annotations

from itertools import product

import torch
from torch import Tensor

from gpu.family import (
    WIDTH,
    E,
    H,
    K,
    Step,
    T,
    chosen,
    draws,
    family,
    launching_on,
    offsets_of,
    with_gradients,
    without_hopper,
)


@family
def routing(device: torch.device) -> Step:
    from megablocks.ops.routing.capacity import apply_capacity
    from megablocks.ops.routing.dispatch import Routing, build_dispatch, make_routing
    from megablocks.ops.routing.topk import RouterOptions, route_topk

    logits, ids = draws(device, torch.float32)(T, E), chosen(device)
    lengths = torch.arange(T, device=device) % 4  # 0 to 3 pairs per token
    token = torch.repeat_interleave(torch.arange(T, device=device), lengths).int()
    expert = (torch.arange(len(token), device=device) * 7 % (E + 2) - 1).int()

    def step() -> list[Tensor]:
        top = route_topk(logits, RouterOptions(K))
        best, weight = top.expert, top.weight.view(T, K)
        fixed = make_routing(ids, weight, E)
        ragged = Routing(token, expert, token.float(), T, E, metrics={})
        kept = apply_capacity(fixed, 20)
        indices = [*build_dispatch(fixed)[:5], *build_dispatch(ragged)[:5]]
        return [best, *indices, kept.expert, *with_gradients(weight, [logits])]

    return step


@family
def permute(device: torch.device) -> Step:
    from megablocks.ops.permute.rows import combine, gather
    from megablocks.ops.routing.dispatch import bin_dispatch, build_dispatch, make_routing

    weight, ids = draws(device, torch.float32)(T, K), chosen(device)
    inputs = [(draws(device)(T, h), draws(device)(T * K, h)) for h in (H, 4200)]  # one and several blocks of features

    def step() -> list[Tensor]:
        d = build_dispatch(make_routing(ids, weight, E))
        live = (torch.arange(T * K, device=device) < d.expert_offsets[E])[:, None]
        out = []
        for x, rows in inputs:
            kept = torch.where(live, rows, 0)  # the gradient of unused rows is unspecified
            results = [torch.where(live, gather(x, d), 0), combine(kept, weight.flatten(), d), combine(kept, None, d)]
            bins = bin_dispatch(d, 20)
            binned = combine(gather(x, bins), weight.flatten(), bins)
            out += with_gradients([*results, binned], [x, rows, weight])
        return out

    return step


@family
def padded(device: torch.device) -> Step:
    from megablocks.ops.permute.rows import combine, gather
    from megablocks.ops.routing.dispatch import build_dispatch, make_routing, pad_dispatch
    from megablocks.ops.sparse import topology

    weight, ids = draws(device, torch.float32)(T, K), chosen(device)
    inputs = [draws(device)(T, h) for h in (H, 4200)]

    def step() -> list[Tensor]:
        d = build_dispatch(make_routing(ids, weight, E))
        ends = topology(d.expert_offsets, 128, max_rows=T * K)
        rows = pad_dispatch(d, ends.padded_offsets, ends.pattern.shape[0])
        out = [*rows[:5]]
        for x in inputs:
            here = gather(x, rows)
            results = [here, combine(here, weight.flatten(), rows), combine(here, None, rows)]
            out += with_gradients(results, [x, weight])
        return out

    return step


@family
def activation(device: torch.device) -> Step:
    from megablocks.ops.activation import activate, activate_halves
    from megablocks.ops.activation_table import GATED, UNARY, Activation
    from megablocks.ops.clamp import Clamp, clamped_gate

    inputs = [[draws(device, dtype)(T, WIDTH + 1) for _ in range(2)] for dtype in (torch.bfloat16, torch.float32)]

    def step() -> list[Tensor]:
        out = []
        for z, gate in inputs:
            for name in UNARY:
                out += with_gradients(activate(z, None, Activation(name, "none" if name == "gelu" else "tanh")), [z])
            for name in GATED:
                out += with_gradients(activate(z, gate, Activation(name)), [z, gate])
                h = torch.cat([z, gate], dim=1).detach().requires_grad_()
                out += with_gradients(activate_halves(h, Activation(name)), [h])
            for interleaved in (False, True):
                out += with_gradients(clamped_gate(h, Clamp(0.5, 1.702, 1.0, interleaved)), [h])
        return out

    return step


@family
def linear_cross_entropy(device: torch.device) -> Step:
    from megablocks.ops.loss import linear_cross_entropy

    inputs = [[draws(device, dtype)(T, H), draws(device, dtype)(5001, H)] for dtype in (torch.bfloat16, torch.float32)]
    labels = torch.arange(-1, T - 1, device=device) * 31

    def step() -> list[Tensor]:
        out = []
        for x, weight in inputs:
            for keep_bytes in (0, 2**30):
                loss = linear_cross_entropy(x, weight, labels, keep_bytes=keep_bytes, chunk_bytes=2**20)
                out += with_gradients(loss, [x, weight])
        return out

    return step


@family
def norm(device: torch.device) -> Step:
    from megablocks.ops.add_norm import AddNormOptions, add_norm_op
    from megablocks.ops.norm import norm

    seed = torch.tensor(3, device=device)
    inputs = [[draws(device, dtype)(T, H), *(draws(device, dtype)(H) for _ in range(2))]
              for dtype in (torch.bfloat16, torch.float32)]  # fmt: skip

    def step() -> list[Tensor]:
        out = []
        for x, weight, bias in inputs:
            out += with_gradients(norm(x, weight, bias, eps=1e-5), [x, weight, bias])
            out += with_gradients(norm(x, weight, None, eps=1e-5, zero_centered=True), [x, weight])
            total, y, *_ = add_norm_op(x, bias, x, seed, weight, bias, AddNormOptions(6554, 1e-5, 0.0))
            out += with_gradients(total + y, [x, weight, bias])
        return out

    return step


@family
def pair_mm(device: torch.device) -> Step:
    from megablocks.ops.activation_table import Activation
    from megablocks.ops.grouped.pair_mm import pair_mlp_op, pair_mm

    x, ids = draws(device)(T, H).detach(), chosen(device)[:, :2].flatten()
    matrices = [draws(device)(E, H, WIDTH).detach(), draws(device)(E, WIDTH, H).detach().transpose(1, 2)]
    bias, scale = draws(device)(E, WIDTH).detach(), draws(device, torch.float32)(len(ids)).detach()
    up, down = draws(device)(E, 2 * WIDTH, H).detach().mT, draws(device)(E, H, WIDTH).detach().mT
    up_bias = draws(device)(E, 2 * WIDTH).detach()

    def step() -> list[Tensor]:
        few = slice(0, 48)
        every = [pair_mm(x, w, ids, bias, scale) for w in matrices]
        every += [pair_mm(x[:24], w, ids[few]) for w in matrices]
        for some in (slice(0, 24), slice(0, T)):
            chosen_ids, weights = (t.view(T, 2)[some] for t in (ids, scale))
            every.append(pair_mlp_op(x[some], chosen_ids, weights, up, down, up_bias, None, Activation("swiglu")))
        return every

    return step


@family
def rope(device: torch.device) -> Step:
    from megablocks.ops.rope import rope

    qkv = [draws(device, dtype)(T, 2, 5, 3 * 40) for dtype in (torch.bfloat16, torch.float32)]
    angles = 100 * draws(device, torch.float32)(T, 36).detach()

    def step() -> list[Tensor]:
        out = []
        for x, interleaved in product(qkv, (False, True)):
            out += with_gradients(rope(x[..., 40:80], angles, interleaved=interleaved, scale=1.5), [x])
        return out

    return step


@family
def exchange(device: torch.device) -> Step:
    """Two ranks whose buffers are on one device; the second brings fewer tokens, and its rows are limited."""
    from megablocks.ops.exchange import Exchange, Layout

    layout = Layout(2, T, H, K, torch.bfloat16)
    buffers = [torch.zeros(layout.num_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
    addresses = [buffer.data_ptr() for buffer in buffers]
    limits = (None, 2 * T - 7)
    ranks = [Exchange(layout, r, addresses, device, 3, max_rows=limits[r]) for r in range(2)]
    ids = [chosen(device).int(), chosen(device).int()[: T // 2].contiguous()]
    x = [draws(device)(*i.shape[:1], H).detach() for i in ids]
    weight = [draws(device, torch.float32)(*i.shape).detach() for i in ids]

    def step() -> list[Tensor]:
        out = []
        with launching_on(device):
            for r, rank in enumerate(ranks):
                rank.to_experts(x[r], ids[r], weight[r], part="push")
            taken = [rank.to_experts(x[r], ids[r], weight[r], part="read") for r, rank in enumerate(ranks)]
            for rank, (rows, local, values) in zip(ranks, taken, strict=True):
                rows.masked_fill_((local < 0).all(1, keepdim=True), 0)  # nobody writes those
                out += [local, values, *rank.dispatch(local)[:2], rows]
            for r, (rank, (rows, local, values)) in enumerate(zip(ranks, taken, strict=True)):
                rank.to_home(rows, local, ids[r], values, part="push")
            for r, (rank, (rows, local, values)) in enumerate(zip(ranks, taken, strict=True)):
                out += rank.to_home(rows, local, ids[r], values, part="read")
            built = [rank.dispatch(local) for rank, (_, local, _) in zip(ranks, taken, strict=True)]
            by_expert = [rows.index_select(0, d.gather) for d, (rows, _, _) in zip(built, taken, strict=True)]
            for part in ("push", "read"):
                for r, rank in enumerate(ranks):
                    y, _ = rank.to_home(by_expert[r], taken[r][1], ids[r], None, built[r], taken[r][2], part=part)
                    out += [y] if part == "read" else []
        return out

    step.buffers = buffers  # type: ignore[attr-defined]
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
    from megablocks.ops.activation_table import Activation
    from megablocks.ops.fused.down import activate_and_project
    from megablocks.ops.grouped.bias import add_expert_bias
    from megablocks.ops.grouped.grouped_mm import grouped_mm

    draw = draws(device, dtype)
    x, w1, w2, bias = draw(T, H), draw(E, WIDTH, H), draw(E, WIDTH, H), draw(E, WIDTH)
    offsets = offsets_of([130, 0, 1, used - 135, 4], device)
    live = (torch.arange(T, device=device) < used)[:, None]

    def step() -> list[Tensor]:
        pre = add_expert_bias(grouped_mm(x, w1.transpose(1, 2), offsets), bias, offsets)
        y = activate_and_project(pre, None, w2, offsets, Activation("gelu"))
        return with_gradients(torch.where(live, y, 0), [x, w1, w2, bias])

    return step


@family
def grouped(device: torch.device) -> Step:
    return grouped_step(device, torch.bfloat16)


@family
def gathered(device: torch.device) -> Step:
    from megablocks.ops.grouped.gathered_mm import gathered_mm, gathered_mm_gated
    from megablocks.ops.routing.dispatch import build_dispatch, make_routing

    ids, draw = chosen(device), draws(device)
    x, w, v = draw(T, H), draw(E, WIDTH, H), draw(E, WIDTH, H)
    weight = torch.ones(T, K, device=device)

    def step() -> list[Tensor]:
        d = build_dispatch(make_routing(ids, weight, E))
        live = (torch.arange(T * K, device=device) < d.expert_offsets[E])[:, None]
        one = gathered_mm(x, w.transpose(1, 2), d)
        two = gathered_mm_gated(x, w.transpose(1, 2), v.transpose(1, 2), d)
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
        with without_hopper(), launching_on(device):
            out = [t for one in steps for t in one()]
            for gather in (None, order):
                out += [ragged_m(x, w, offsets, gather), ragged_k(x, dy, offsets, gather)]
            return out

    return step


@family
def grouped_hopper(device: torch.device) -> Step:
    from megablocks.ops.grouped import grouped_mm_hopper as hopper
    from megablocks.ops.grouped import grouped_mm_hopper_dw as hopper_dw
    from megablocks.ops.grouped.grouped_mm import hopper_ragged_m

    draw = draws(device)
    offsets, order = offsets_of([130, 0, 1, 66, 4], device), torch.arange(T, device=device).flip(0).int()
    x, w = draw(T, 520).detach(), draw(E, 520, 264).detach()
    across = w.mT.contiguous().mT
    shapes = ((128, 64, False), (128, 512, False), (264, 1024, True), (264, 4096, True))  # N, K, gathered
    tiles = [hopper.choose_m(*shape) for shape in shapes]

    dy = draw(T, 264).detach()

    def step() -> list[Tensor]:
        if hopper_ragged_m(x) is None:
            return []
        with launching_on(device):
            return launches()

    def launches() -> list[Tensor]:
        out = [hopper.ragged_m(x, m, offsets, g, tile=t) for m in (w, across) for g in (None, order) for t in tiles]
        out += [hopper_dw.ragged_k(dy, x, offsets, g) for g in (None, order)]
        halves = dy.new_empty(offsets.shape[0] - 1, 2 * dy.shape[1], x.shape[1]).chunk(2, dim=1)
        out += [hopper_dw.ragged_k(dy, x, offsets, g, out=half) for g in (None, order) for half in halves]
        for tile in tiles:  # no expert has rows, so no element of `order` may be read, not even prefetched
            hopper.ragged_m(x, w, torch.zeros_like(offsets), order, tile=tile)
        return [*out, hopper.ragged_m(x, w, offsets, x2=x, v=w)]

    return step


@family
def adam(device: torch.device) -> Step:
    """Aligned and misaligned parameters, with and without copies; each step starts from the same values."""
    from megablocks.ops.adam import FusedAdam, square_sum

    draw = draws(device, torch.float32)
    start = [draw(n).detach() for n in (1, 13, 4096, 40000)]
    grads = [draw(len(p)).detach() for p in start]
    dtypes = (torch.bfloat16, torch.float16, torch.float32, None)

    def step() -> list[Tensor]:
        parameters = [p.clone() for p in start]
        optimizer = FusedAdam(parameters, lr=1e-2, weight_decay=0.1, decoupled_weight_decay=True)
        copies = {p: p.to(d) for p, d in zip(parameters, dtypes, strict=True) if d is not None}
        optimizer.copies = copies
        for p, grad in zip(parameters, grads, strict=True):
            p.grad = grad
        norm = square_sum(grads, device)
        optimizer.grad_scale = (1 / (1 + norm)).float()
        optimizer.step()
        return [*parameters, *copies.values(), norm]

    return step


def sparse_step(device: torch.device, dtype: torch.dtype, block: int, hidden: int = H) -> Step:
    from megablocks.ops.activation_table import Activation
    from megablocks.ops.sparse import dds, dsd, sdd, sparse_mlp, topology

    draw = draws(device, dtype)
    offsets = offsets_of([130, 0, 1, 66, 4], device)
    first = topology(offsets, 2 * block, max_rows=T, block_size=block).pattern
    x, g = draw(first.shape[0], hidden), draw(first.shape[0], hidden)
    w1, w2, bias = draw(hidden, first.shape[1]), draw(first.shape[1], hidden), draw(first.shape[1])

    def step() -> list[Tensor]:
        p = topology(offsets, 2 * block, max_rows=T, block_size=block).pattern
        used = (p.blocks.row_indices >= 0)[:, None, None]
        s = sdd(x, w1, p)
        s = s.with_data(torch.where(used, s.data, 0))
        y = sparse_mlp(x, w1, w2, p, bias=bias, activation=Activation("silu"))
        return with_gradients([s.data, dsd(s, w2), dsd(s.t(), g), dds(x.t(), s), y], [x, w1, w2, bias, g])

    return step


@family
def sparse(device: torch.device) -> Step:
    steps = [sparse_step(device, torch.bfloat16, 128, hidden) for hidden in (H, 1032)]  # both tiles of sdd
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
