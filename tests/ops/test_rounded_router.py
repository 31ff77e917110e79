"""The router with token rounding: kernels (interpreted without a GPU) and op against the float64 reference."""

from __future__ import annotations

import pytest
import torch

from megablocks.config import TOKEN_ROUNDINGS
from megablocks.ops.routing import rounding_triton
from megablocks.ops.routing.rounding import (
    ROUNDINGS,
    Rounding,
    max_pairs,
    odds_by_score,
    rank_order,
    rounded_router_ref,
    route_rounded,
)
from megablocks.ops.routing.rounding_triton import rounded_route_launch
from megablocks.ops.routing.topk import RouterGradients, RouterOptions, RouterSaved, router_backward_ref
from megablocks.ops.routing.topk_triton import route_backward_launch

pytestmark = pytest.mark.any_device
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAN = float("nan")
LARGE = pytest.mark.slow  # interpreted; a GPU takes them with the others
KINDS = [(False, False, 0), (False, True, 2), (True, False, 1)]  # sigmoid, after, norm_p
DRAWN = "stochastic_score"  # the rule whose kernels the interpreter is slowest at: by default with the first kind


@pytest.fixture(autouse=True)
def several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounding_triton, "_BLOCK", 32)


def _case(num_tokens, num_experts, biased=False, masked=False):
    draw = torch.Generator().manual_seed(num_tokens * 1000 + num_experts)
    # uneven loads; the scores of two tokens are further apart than float32 rounds
    logits = torch.randn(num_tokens, num_experts, generator=draw) + torch.arange(num_experts) * 2 / num_experts
    bias = torch.randn(num_experts, generator=draw) if biased else None
    mask = torch.arange(num_tokens) % 4 == 1 if masked else None
    if mask is not None:
        logits[mask] = NAN
    return [None if t is None else t.to(DEVICE) for t in (logits, bias, mask)]


def _both(case, rule, tile, options):
    logits, bias, mask = case
    (tokens, experts), draws = logits.shape, rule.startswith("stochastic")
    draw = torch.rand(experts, generator=torch.Generator().manual_seed(7)).to(DEVICE) if draws else None
    rounding = Rounding(rule, tile, max_pairs(rule, tokens, experts, options.top_k, tile))
    fixed = (bias, mask, draw, rounding, options)
    leaf = logits.double().requires_grad_()
    return rounded_route_launch(logits, *fixed), rounded_router_ref(leaf, *fixed), leaf


def _compare(got, expected):
    for name in ("expert", "token", "load", "stats", "rounded", "dropped", "flags", "ends"):
        assert torch.equal(getattr(got, name), getattr(expected, name)), name
    for name in ("weight", "balance", "z", "sums"):
        wanted = getattr(expected, name).detach()
        torch.testing.assert_close(getattr(got, name).double(), wanted, rtol=2e-5, atol=1e-6, equal_nan=True)


def _gradients(case, got, expected, leaf, grads, options, rows=slice(None)):
    logits, _, mask = case
    saved = RouterSaved(None, got.load, got.stats, got.flags, got.ends)
    found = route_backward_launch(logits, mask, saved, RouterGradients(*grads), options)
    pairs = [(out, grad.double()) for out, grad in zip(expected[:4], grads, strict=True) if grad is not None]
    (wanted,) = torch.autograd.grad([o for o, _ in pairs], leaf, [g for _, g in pairs], retain_graph=True)
    wide = RouterGradients(*(None if grad is None else grad.double() for grad in grads))
    plain = router_backward_ref(leaf.detach(), mask, saved, wide, options)
    torch.testing.assert_close(plain[rows], wanted[rows], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(found.double()[rows], wanted[rows], rtol=1e-4, atol=2e-6)
    return found


@pytest.mark.parametrize(("rule", "sigmoid", "after", "norm_p"), [
    pytest.param(rule, *kind, marks=() if kind == KINDS[0 if rule == DRAWN else n % len(KINDS)] else LARGE)
    for n, rule in enumerate(ROUNDINGS) for kind in KINDS
])  # fmt: skip
def test_N1_kernels_equal_the_float64_reference(rule, sigmoid, after, norm_p, poison):
    """Forward and every gradient, with a bias and padding that holds NaN where the weights have a norm."""
    options, padded = RouterOptions(3, sigmoid, after, norm_p, 1.5, 0.3, 0.2), norm_p > 0
    case = _case(37, 5, biased=padded, masked=padded)
    got, expected, leaf = _both(case, rule, 8, options)
    _compare(got, expected)
    draw = torch.Generator().manual_seed(1)
    d_weight, d_sums = (torch.randn(n, generator=draw).to(DEVICE) for n in (len(got.weight), 5))
    one = torch.ones((), device=DEVICE)
    for grads in ((d_weight, 2 * one, -one, d_sums), (d_weight, None, None, None), (None, one, None, None)):
        found = _gradients(case, got, expected, leaf, grads, options)
        if padded:
            assert (found[case[2]] == 0).all()


@pytest.mark.parametrize(("num_tokens", "num_experts", "top_k", "tile", "rule"), [
    (1, 1, 1, 128, "up"), (1, 5, 5, 3, "nearest"), (70, 2, 1, 1, "balanced"), (3, 9, 8, 4, "up"),
    (35, 3, 2, 34, DRAWN), (33, 5, 2, 64, "down"),
    pytest.param(3, 9, 8, 2, DRAWN, marks=LARGE), pytest.param(5, 37, 32, 2, DRAWN, marks=LARGE),
    pytest.param(129, 3, 2, 128, DRAWN, marks=LARGE), pytest.param(2, 130, 3, 128, "up", marks=LARGE),
    pytest.param(9, 16, 8, 4, "up", marks=LARGE),
])  # fmt: skip
def test_R5_sizes_of_the_rounded_router(num_tokens, num_experts, top_k, tile, rule, poison):
    """Few tokens, all of them taken, no pair left, and experts that are no power of two."""
    case, options = _case(num_tokens, num_experts), RouterOptions(top_k, False, False, 1, 1.0, 0.1, 0.1)
    got, expected, leaf = _both(case, rule, tile, options)
    _compare(got, expected)
    grads = (torch.randn(len(got.weight), device=DEVICE), torch.ones((), device=DEVICE), None, None)
    _gradients(case, got, expected, leaf, grads, options)


@pytest.mark.parametrize(("rule", "sigmoid", "after"), [
    pytest.param(rule, *kind, marks=LARGE if rule == DRAWN and any(kind) else ())
    for rule in ("nearest", DRAWN) for kind in ((False, False), (True, False), (False, True))
])  # fmt: skip
def test_N3_a_nan_ranks_last_of_the_chosen_and_stays_in_its_token(rule, sigmoid, after, poison):
    case, options = _case(21, 5), RouterOptions(2, sigmoid, after, 1, 1.0, 0.1, 0.1)
    case[0][4], case[0][9, 2] = NAN, NAN
    got, expected, leaf = _both(case, rule, 4, options)
    _compare(got, expected)
    grads = (torch.ones_like(got.weight), None, None, None)
    others = [t for t in range(21) if t not in (4, 9)]
    assert _gradients(case, got, expected, leaf, grads, options, others)[others].isfinite().all()
    assert got.weight[(got.token != 4) & (got.token != 9)].isfinite().all()


def test_R7_equal_weights_go_to_the_lowest_token(poison):
    """All logits equal: every expert takes its choices' first tokens, then the first of the others."""
    case, options = [torch.zeros(12, 4, device=DEVICE), None, None], RouterOptions(1, False, False, 0, 1.0, 0.0, 0.0)
    case[0][8:, 1] = 5.0  # four tokens choose expert 1, eight expert 0
    got, expected, _ = _both(case, "up", 3, options)
    _compare(got, expected)
    pairs = list(zip(got.expert.tolist(), got.token.tolist(), strict=True))
    assert sorted(p for p in pairs if p[0] >= 0) == [(0, t) for t in range(9)] + [(1, t) for t in (0, 1, 8, 9, 10, 11)]


@pytest.mark.parametrize("tile", [1, 7, 16, 64])
def test_R9_odds_are_the_weights_of_the_last_tile(tile, poison):
    """Equal weights at its ends, NaN as 0, and nothing of padding where a tile is longer than the tokens."""
    draw = torch.Generator().manual_seed(0)
    values = torch.rand(61, 4, generator=draw).mul(8).round().div(8)
    values[7] = NAN
    padding, chosen = torch.arange(61) % 3 == 1, torch.rand(61, 4, generator=draw) < torch.tensor([0.0, 0.2, 0.6, 1.0])
    counts = (chosen & ~padding.unsqueeze(1)).sum(0)
    bits = values.nan_to_num(0.0).view(torch.int32)
    keys = torch.where(chosen, bits, bits + (1 - 2**31)).masked_fill(padding.unsqueeze(1), -(2**31)).t().contiguous()
    a, b = (torch.empty(4, device=DEVICE) for _ in range(2))
    rounding_triton._odds_kernel[(4,)](keys.to(DEVICE), counts.to(DEVICE), a, b, 61, tile, BLOCK=32, num_warps=1)
    order = rank_order(values, chosen, padding)
    for got, want in zip((a, b), odds_by_score(values, order, padding, counts, tile), strict=True):
        torch.testing.assert_close(got.cpu(), want)
    if tile == 64:  # more than there are tokens: all that are no padding
        torch.testing.assert_close(b.cpu(), values[~padding].nansum(0))


def test_R8_strides_of_the_rounded_router():
    logits, bias, mask = _case(12, 10, True, True)
    options = RouterOptions(3, False, False, 1, 1.0, 0.1, 0.1)
    spread = [torch.stack([t, ~t if t.dtype == torch.bool else -t], -1)[..., 0] for t in (logits, bias, mask)]
    (got, *_), (expected, *_) = (_both(case, "up", 4, options) for case in (spread, (logits, bias, mask)))
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    one = torch.ones(1, device=DEVICE).expand(len(got.weight))
    saved = RouterSaved(None, got.load, got.stats, got.flags, got.ends)
    results = [
        route_backward_launch(x, m, saved, RouterGradients(grad), options)
        for x, m, grad in ((spread[0], spread[2], one), (logits, mask, one.contiguous()))
    ]
    assert torch.equal(*results)


@pytest.mark.parametrize("losses", [{}, {"balance_weight": 0.1}, {"z_weight": 0.1}])
def test_the_rounded_routers_losses_have_gradients_only_with_a_weight(losses):
    out = route_rounded(_case(6, 4)[0].requires_grad_(), RouterOptions(2, **losses), "nearest", 4)
    assert all(t.requires_grad == bool(losses) for t in (out.balance, out.z, out.sums))


def test_rules_are_the_configs():
    assert ROUNDINGS == TOKEN_ROUNDINGS


def test_L2_route_rounded_refuses():
    logits = torch.zeros(3, 4)
    for top_k, rule, tile, message in (
        (5, "up", 8, "^top_k=5: must be from 1 to"),
        (2, "middle", 8, "^rule='middle': must be one of nearest, "),
        (2, "up", 0, "^tile=0: must be at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            route_rounded(logits, RouterOptions(top_k), rule, tile)
