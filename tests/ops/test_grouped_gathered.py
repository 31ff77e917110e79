"""Products that gather their tokens themselves, against float64 loops over the pairs; on a GPU through its kernels."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from megablocks.ops.grouped.gathered_mm import gathered_mm, gathered_mm_dw_add_op, gathered_mm_gated
from megablocks.ops.grouped.grouped_mm import grouped_mm
from megablocks.ops.permute.rows import gather
from megablocks.ops.routing.dispatch import Dispatch, Routing, build_dispatch, make_routing
from megablocks.testing.routings import ROUTINGS
from megablocks.testing.tolerances import assert_as_exact_as

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def dispatch_of(routing: Routing, device: str) -> Dispatch:
    return Dispatch(*(t.to(device) for t in build_dispatch(routing)[:5]))


def weights_of(experts: int, hidden: int, width: int, dtype: torch.dtype, device: str, seed: int) -> Tensor:
    """(E, H, N), a view of an (E, N, H) leaf, as layers hold it."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(experts, width, hidden, generator=generator, dtype=torch.float64).to(device, dtype)


def truth_of(x: Tensor, weights: list[Tensor], grads: list[Tensor], routing: Routing) -> tuple[list[Tensor], ...]:
    """Outputs of the valid rows, dX and the weights' gradients (E, N, H), by autograd of a loop in float64."""
    wide = [t.detach().double().cpu().requires_grad_() for t in (x, *weights)]
    valid = [r for r, e in enumerate(routing.expert.tolist()) if 0 <= e < routing.num_experts]
    rows = sorted(valid, key=lambda r: int(routing.expert[r]))
    outs = []
    for w in wide[1:]:
        ys = [w[int(routing.expert[r])] @ wide[0][int(routing.token[r])] for r in rows]
        outs.append(torch.stack(ys) if ys else wide[0].new_zeros(0, w.shape[1]) + 0 * w.sum() + 0 * wide[0].sum())
    total = sum((y * g[: len(rows)].double().cpu()).sum() for y, g in zip(outs, grads, strict=True))
    d = torch.autograd.grad(total, wide)
    return outs, [d[0]], list(d[1:])


def case(
    name: str, tokens: int, hidden: int, width: int, dtype: torch.dtype, device: str, experts: int = 3, k: int = 2
):
    routing = ROUTINGS[name](tokens, experts, k)
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(tokens, hidden, generator=generator, dtype=torch.float64).to(device, dtype)
    weights = [weights_of(experts, hidden, width, dtype, device, seed) for seed in (1, 2)]
    d = dispatch_of(routing, device)
    used = int(d.expert_offsets[-1])
    grads = [torch.randn(routing.num_pairs, width, generator=generator).to(device, dtype) for _ in weights]
    for grad in grads:
        grad[used:] = float("nan")  # what stands behind the last row of an expert reaches nothing
    return routing, d, used, x, weights, grads


def run(d: Dispatch, x: Tensor, weights: list[Tensor], grads: list[Tensor]) -> tuple[list[Tensor], ...]:
    x = x.detach().requires_grad_()
    leaves = [w.detach().requires_grad_() for w in weights]
    views = [w.transpose(1, 2) for w in leaves]
    outs = [gathered_mm(x, views[0], d)] if len(views) == 1 else list(gathered_mm_gated(x, *views, d))
    got = torch.autograd.grad(outs, (x, *leaves), grads[: len(outs)])
    return outs, [got[0]], list(got[1:])


def plain(d: Dispatch, x: Tensor, weights: list[Tensor], grads: list[Tensor]) -> tuple[list[Tensor], ...]:
    """What torch makes of it: rows gathered, one product an expert and autograd, in the tensors' dtype."""
    x = x.detach().cpu().requires_grad_()
    leaves = [w.detach().cpu().requires_grad_() for w in weights]
    bounds, index = d.expert_offsets.tolist(), d.gather.cpu().long()
    used = bounds[-1]
    rows = x[index[:used]]
    outs = [
        torch.cat([rows[a:b] @ w[e].t() for e, (a, b) in enumerate(zip(bounds, bounds[1:], strict=False))])
        for w in leaves
    ]
    got = torch.autograd.grad(outs, (x, *leaves), [g[:used].cpu() for g in grads[: len(outs)]])
    return outs, [got[0]], list(got[1:])


def check(name: str, tokens: int, hidden: int, width: int, dtype: torch.dtype, device: str, **sizes: int) -> None:
    routing, d, used, x, weights, grads = case(name, tokens, hidden, width, dtype, device, **sizes)
    for both in (weights[:1], weights):
        results = run(d, x, both, grads)
        truths = truth_of(x, both, grads[: len(both)], routing)
        for got, naive, truth in zip(results, plain(d, x, both, grads), truths, strict=True):
            for a, b, c in zip(got, naive, truth, strict=True):
                assert a.dtype == dtype
                assert_as_exact_as(a[: c.shape[0]], b, c)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_N1_every_routing(name: str, dtype: torch.dtype, device: str, poison: None) -> None:
    check(name, 13, 8, 16, dtype, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("hidden,width,tokens", [(60, 100, 7), (129, 33, 67), (72, 200, 129)])
def test_R6_sizes_off_the_tiles(
    hidden: int, width: int, tokens: int, dtype: torch.dtype, device: str, poison: None
) -> None:
    check("zipf", tokens, hidden, width, dtype, device, experts=5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tokens,experts,k", [(1, 1, 1), (1, 4, 4), (5, 3, 3), (6, 7, 1)])
def test_R5_smallest_sizes(tokens: int, experts: int, k: int, device: str, poison: None) -> None:
    check("zipf", tokens, 8, 8, torch.bfloat16, device, experts=experts, k=k)


@pytest.mark.parametrize("device", DEVICES)
def test_R1_experts_without_rows_get_exact_zeros(device: str, poison: None) -> None:
    _, d, _, x, weights, grads = case("one_hot", 40, 16, 24, torch.bfloat16, device, experts=4)
    _, _, (dw, dv) = run(d, x, weights, grads)
    for t in (dw, dv):
        assert torch.equal(t[:3], torch.zeros_like(t[:3]))
        assert bool((t[3] != 0).any())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_R2_all_tokens_to_one_expert(dtype: torch.dtype, device: str, poison: None) -> None:
    check("one_hot", 150, 16, 24, dtype, device, experts=4)


@pytest.mark.parametrize("device", DEVICES)
def test_R7_repeated_experts_and_no_expert(device: str, poison: None) -> None:
    ids = torch.tensor([[0, 0], [-1, 1], [2, -1], [1, 1], [-1, -1]])
    d = dispatch_of(make_routing(ids, torch.ones(5, 2), 3), device)
    x = torch.randn(5, 8, dtype=torch.float64, device=device, requires_grad=True)
    w = torch.randn(3, 8, 4, dtype=torch.float64, device=device)
    y = gathered_mm(x, w, d)
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    rows = [(0, 0), (0, 0), (1, 1), (3, 1), (3, 1), (2, 2)]  # token, expert
    assert torch.allclose(y[: len(rows)], torch.stack([x[t] @ w[e] for t, e in rows]))
    expected = torch.zeros_like(x)
    for t, e in rows:
        expected[t] += w[e].sum(1)
    assert torch.allclose(dx, expected)
    assert torch.equal(dx[4], torch.zeros_like(dx[4]))


def test_gradcheck() -> None:
    _, d, _, x, weights, _ = case("zipf", 4, 3, 5, torch.float64, "cpu")
    x, w, v = (t.detach().requires_grad_() for t in (x, *(w.transpose(1, 2) for w in weights)))
    assert gradcheck(lambda x, w: gathered_mm(x, w, d), (x, w))
    assert gradcheck(lambda x, w, v: gathered_mm_gated(x, w, v, d), (x, w, v))


@pytest.mark.parametrize("device", DEVICES)
def test_equals_gather_and_product(device: str, poison: None) -> None:
    _, d, used, x, weights, _ = case("ragged", 50, 64, 48, torch.float32, device)
    w = weights[0].transpose(1, 2)
    assert torch.equal(gathered_mm(x, w, d)[:used], grouped_mm(gather(x, d), w, d.expert_offsets)[:used])


def test_keeps_tokens_and_no_rows() -> None:
    _, d, _, x, weights, _ = case("zipf", 40, 8, 4, torch.float32, "cpu")
    kept: list[tuple[int, ...]] = []
    inputs = [t.detach().requires_grad_() for t in (x, *weights)]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(tuple(t.shape)) or t, lambda t: t):
        gathered_mm_gated(inputs[0], *(w.transpose(1, 2) for w in inputs[1:]), d)
    assert (40, 8) in kept
    assert (80, 8) not in kept


@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_N5_frozen_inputs_get_no_gradient(frozen: int) -> None:
    _, d, used, x, weights, grads = case("balanced", 6, 8, 4, torch.float64, "cpu")
    inputs = [t.detach().requires_grad_() for t in (x, *(w.transpose(1, 2) for w in weights))]
    expected = torch.autograd.grad(gathered_mm_gated(*inputs, d), inputs, grads)
    inputs[frozen].requires_grad_(False)
    live = [i for i in range(3) if i != frozen]
    got = torch.autograd.grad(gathered_mm_gated(*inputs, d), [inputs[i] for i in live], grads)
    for i, g in zip(live, got, strict=True):
        assert torch.equal(g, expected[i])


def test_autocast_and_stride_zero_gradients() -> None:
    _, d, _, x, weights, _ = case("balanced", 6, 8, 4, torch.float32, "cpu")
    inputs = [t.detach().requires_grad_() for t in (x, *weights)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, z = gathered_mm_gated(inputs[0], *(w.transpose(1, 2) for w in inputs[1:]), d)
    assert y.dtype == z.dtype == torch.bfloat16
    (y.sum() + z.sum()).backward()
    assert all(t.grad is not None and t.grad.dtype == torch.float32 for t in inputs)
    ones = torch.ones(12, 4, dtype=torch.bfloat16)
    expected = torch.einsum("rn,rh->nh", ones[:4], x.bfloat16()[d.gather[:4].long()])
    assert torch.allclose(inputs[1].grad[0], expected.float(), rtol=2e-2, atol=1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_N6_hopper_kernels_off(dtype: torch.dtype, poison: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGABLOCKS_HOPPER", "0")
    for name in ("ragged", "nobody", "zipf"):
        check(name, 67, 72, 200, dtype, "cuda", experts=5)


@pytest.mark.gpu
def test_N2_ten_reruns_are_bit_identical(poison: None) -> None:
    _, d, used, x, weights, grads = case("zipf", 700, 256, 320, torch.bfloat16, "cuda", experts=9)
    first = run(d, x, weights, grads)
    for _ in range(9):
        for a, b in zip(first, run(d, x, weights, grads), strict=True):
            for s, t in zip(a, b, strict=True):
                rows = used if s.shape[0] == grads[0].shape[0] else s.shape[0]
                assert torch.equal(s[:rows], t[:rows])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_N1_weight_gradients_added_to_what_is_there(name: str, dtype: torch.dtype, device: str, poison: None) -> None:
    """In float32 the sums of two calls; of bfloat16 operands, too, which a gradient in bfloat16 would round."""
    routing, d, _, x, weights, grads = case(name, 67, 72, 40, dtype, device, experts=5)
    acc = torch.float64 if dtype == torch.float64 else torch.float32
    total = torch.full((5, 40, 72), 0.25, dtype=acc, device=device)
    for _ in range(2):
        gathered_mm_dw_add_op(total, grads[0], x, d)
    truth = 0.25 + 2 * truth_of(x, weights[:1], grads[:1], routing)[2][0]
    torch.testing.assert_close(total.double().cpu(), truth, rtol=1e-5, atol=1e-4 if dtype != torch.float64 else 1e-9)


def test_bad_operands_are_named() -> None:
    _, d, _, x, weights, _ = case("balanced", 6, 8, 4, torch.float32, "cpu")
    w = weights[0].transpose(1, 2)
    with pytest.raises(ValueError, match=r"^x is \(5, 8\): must be \(T, H\) with T=6"):
        gathered_mm(x[:5], w, d)
    with pytest.raises(ValueError, match=r"^v1 is \(3, 8, 3\) torch.float32: must be \(3, 8, 4\) torch.float32, as w1"):
        gathered_mm_gated(x, w, w[:, :, :3], d)
    with pytest.raises(ValueError, match="^w is torch.float64, must be torch.float32"):
        gathered_mm(x, w.double(), d)
