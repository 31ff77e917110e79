"""The router's kernels against its reference and its autograd, on the interpreter and on a GPU."""

from __future__ import annotations

import itertools

import pytest
import torch

from megablocks.ops.routing import topk
from megablocks.ops.routing.rounding import route_rounded
from megablocks.ops.routing.topk import (
    RouterGradients,
    RouterOptions,
    RouterSaved,
    kernels_take,
    lowest_first_topk,
    route_topk,
    router_backward_ref,
    router_ref,
    router_weight_backward_ref,
)
from megablocks.ops.routing.topk_triton import route_backward_launch, route_launch, weight_backward_launch
from megablocks.testing.tolerances import assert_as_exact_as

pytestmark = pytest.mark.any_device
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAN, INF = float("nan"), float("inf")
KINDS = [(False, False), (True, False), (False, True)]  # sigmoid, after


def _case(num_tokens: int, num_experts: int, biased: bool, masked: bool, dtype: torch.dtype = torch.float32):
    generator = torch.Generator().manual_seed(num_tokens * 1000 + num_experts)
    # multiples of 1/8 with ties: scores of different logits are far apart, so no rounding reorders them
    logits = (torch.randn(num_tokens, num_experts, generator=generator) * 8).round() / 8
    bias = (torch.randn(num_experts, generator=generator) * 4).round() if biased else None
    mask = torch.rand(num_tokens, generator=generator) < 0.3 if masked else None
    if mask is not None:
        logits[mask] = NAN
    return [None if t is None else t.to(DEVICE) for t in (logits.to(dtype), bias, mask)]


def _compare(case, options, exact_ids=True):
    logits, bias, mask = case
    got = route_launch(logits, bias, mask, options)
    expected = router_ref(logits, bias, mask, options)
    if exact_ids:
        assert torch.equal(got.expert, expected.expert)
        assert torch.equal(got.load, expected.load)
        torch.testing.assert_close(got.weight, expected.weight, rtol=2e-5, atol=1e-7, equal_nan=True)
        torch.testing.assert_close(got.balance, expected.balance, rtol=2e-5, atol=1e-7)
    assert torch.equal(got.token, expected.token)
    assert torch.equal(got.stats, expected.stats)
    torch.testing.assert_close(got.sums, expected.sums, rtol=2e-5, atol=1e-5)
    torch.testing.assert_close(got.z, expected.z, rtol=2e-5, atol=1e-6)
    return got


def _by_autograd(logits, bias, mask, grads, options):
    leaf = logits.double().requires_grad_()
    outputs = router_ref(leaf, bias, mask, options)[:4]
    pairs = [(out, grad.double()) for out, grad in zip(outputs, grads, strict=True) if grad is not None]
    return torch.autograd.grad([out for out, _ in pairs], leaf, [grad for _, grad in pairs])[0]


def _gradients(case, options, got, grads):
    logits, bias, mask = case
    saved, grads = RouterSaved(got.expert, got.load, got.stats), RouterGradients(*grads)
    found = route_backward_launch(logits, mask, saved, grads, options)
    expected = _by_autograd(logits, bias, mask, grads, options)
    plain = router_backward_ref(logits.double(), mask, saved, grads, options)
    torch.testing.assert_close(plain, expected, rtol=1e-9, atol=1e-12)
    assert found.dtype == logits.dtype
    tolerance = {"rtol": 1e-4, "atol": 2e-6} if logits.dtype == torch.float32 else {"rtol": 2**-7, "atol": 1e-5}
    torch.testing.assert_close(found.double(), expected, **tolerance)
    return found


@pytest.mark.parametrize(("sigmoid", "after"), KINDS)
@pytest.mark.parametrize("norm_p", [0, 1, 2])
@pytest.mark.parametrize(("biased", "masked"), [(False, False), (True, True)])
def test_kernels_equal_reference(sigmoid, after, norm_p, biased, masked, poison):
    options = RouterOptions(3, sigmoid, after, norm_p, 1.5, 0.3, 0.2)
    case = _case(21, 13, biased, masked)
    _compare(case, options._replace(balance_weight=0.0, z_weight=0.0))
    got = _compare(case, options)
    generator = torch.Generator().manual_seed(1)
    d_weight, d_sums = torch.randn(63, generator=generator).to(DEVICE), torch.randn(13, generator=generator).to(DEVICE)
    one = torch.ones((), device=DEVICE)
    for grads in ((d_weight, 2 * one, -one, d_sums), (d_weight, None, None, None), (None, one, None, None)):
        found = _gradients(case, options, got, grads)
        if masked:
            assert (found[case[2]] == 0).all()


@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k"),
    [(0, 4, 2), (1, 1, 1), (1, 5, 5), (70, 2, 1), (9, 64, 8), (5, 200, 32), (3, 512, 6), (2, 1000, 3)],
)
def test_R5_sizes(num_tokens, num_experts, top_k, poison):
    case, options = _case(num_tokens, num_experts, False, False), RouterOptions(top_k, False, False, 1, 1.0, 0.1, 0.1)
    got = _compare(case, options)
    grads = (torch.randn(num_tokens * top_k, device=DEVICE), got.balance * 0 + 1, None, None)
    _gradients(case, options, got, grads)


@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k", "masked"),
    [(0, 4, 2, False), (1, 5, 5, False), (70, 2, 1, True), (21, 13, 3, True), (5, 200, 32, False), (3, 1000, 6, True)],
)
def test_R5_gradient_from_the_weights_alone(num_tokens, num_experts, top_k, masked, poison):
    logits, _, mask = _case(num_tokens, num_experts, False, masked)
    options = RouterOptions(top_k, False, True, 0, 1.5, 0.0, 0.0)
    got = route_launch(logits, None, mask, options)
    d_weight = torch.randn(num_tokens * top_k, 2, generator=torch.Generator().manual_seed(2)).to(DEVICE)[:, 0]
    expected = _by_autograd(logits, None, mask, (d_weight, None, None, None), options)
    wide = router_ref(logits.double(), None, mask, options)
    plain = router_weight_backward_ref(wide.weight, wide.expert, d_weight, num_experts, torch.float64, options)
    torch.testing.assert_close(plain, expected, rtol=1e-9, atol=1e-12)
    for dtype, rtol, atol in ((torch.float32, 1e-4, 2e-6), (torch.bfloat16, 2**-7, 1e-5)):
        found = weight_backward_launch(got.weight, got.expert, d_weight, num_experts, dtype, options)
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize("losses", [{}, {"balance_weight": 0.1}, {"z_weight": 0.1}])
@pytest.mark.parametrize("changes", [{}, {"scaling": 2.5}, {"norm_p": 1.0}, {"scaling": 0.0}])
def test_logits_are_kept_only_for_losses_and_norms(changes, losses):
    """A softmax over the chosen logits has a gradient that its weights say; it is the same either way."""
    logits = _case(24, 16, False, False)[0].requires_grad_()
    d_weight, kept = torch.linspace(-1, 1, 72, device=DEVICE), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        out = route_topk(logits, RouterOptions(3, after=True, **changes, **losses))
    without = not losses and "norm_p" not in changes and changes.get("scaling") != 0
    assert (logits.shape not in kept) == without
    assert all(t.requires_grad == bool(losses) for t in (out.balance, out.z, out.sums))
    (grad,) = torch.autograd.grad(out.weight, logits, d_weight)
    leaf = logits.detach().requires_grad_()
    expected = route_topk(leaf, RouterOptions(3, after=True, z_weight=1.0, **changes))
    for name in ("weight", "expert", "load", "stats", *(["sums"] if losses else [])):
        assert torch.equal(getattr(out, name), getattr(expected, name))
    torch.testing.assert_close(grad, torch.autograd.grad(expected.weight, leaf, d_weight)[0], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("sigmoid", "after"), KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("top_k", [1, 4])
def test_N3_ids_stay_in_range_and_nan_in_its_token(sigmoid, after, dtype, top_k, poison):
    spoilt = [[NAN] * 4, [0.0, NAN, 1.0, NAN], [-INF] * 4, [INF, -INF, NAN, 0.0], [-INF, 1.0, -INF, -INF], [INF] * 4]
    clean = torch.tensor([[0.5, -0.0, 0.0, 0.25]]).repeat(6, 1)
    logits = torch.cat([torch.tensor(spoilt), clean]).to(DEVICE, dtype)
    options = RouterOptions(top_k, sigmoid, after, 1, 1.0, 0.1, 0.1)
    got = route_launch(logits, None, None, options)
    expected = router_ref(logits, None, None, options)
    alone = route_launch(logits, None, None, options._replace(balance_weight=0.0, z_weight=0.0))
    assert torch.equal(alone.expert, got.expert) and torch.equal(alone.stats, got.stats)
    assert torch.equal(alone.weight.nan_to_num(-1), got.weight.nan_to_num(-1))
    assert all(t.eq(0).all() for t in (alone.balance, alone.z, alone.sums))
    assert torch.equal(got.expert, expected.expert)  # ties and NaN included
    if top_k == 4:
        assert (got.expert.view(-1, 4).sort(dim=1).values == torch.arange(4, device=DEVICE)).all()
    assert torch.equal(got.weight.isnan(), expected.weight.isnan())
    assert got.stats.tolist() == [6, 12, 0]
    assert got.z.isnan()
    grads = RouterGradients(torch.ones_like(got.weight), torch.ones_like(got.z), torch.ones_like(got.z))
    saved = RouterSaved(got.expert, got.load, got.stats)
    found = route_backward_launch(logits, None, saved, grads, options)
    assert found[6:].isfinite().all()
    assert found[0].isnan().all()
    if after:
        weights = (got.weight, got.expert, torch.ones_like(got.weight))
        found = weight_backward_launch(*weights, 4, dtype, options)
        assert found[6:].isfinite().all()
        assert torch.equal(found[0].isnan(), (torch.arange(4, device=DEVICE)[:, None] == got.expert[:top_k]).any(1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_logit_is_in_its_place(dtype):
    """One key holds such a logit and its id."""
    order = torch.randperm(2**16, generator=torch.Generator().manual_seed(0))
    logits = (order - 2**15).to(torch.int16).view(dtype).view(256, 256).to(DEVICE)
    _compare((logits, None, None), RouterOptions(9, after=True))


@pytest.mark.parametrize("sigmoid", [False, True])
def test_ties_go_to_the_lowest_id(sigmoid):
    logits = torch.randint(0, 3, (40, 31), generator=torch.Generator().manual_seed(0)).float().to(DEVICE)
    options = RouterOptions(7, sigmoid, False, 0, 1.0, 0.0, 0.0)
    got = route_launch(logits, None, None, options)
    assert torch.equal(got.expert.view(40, 7).long(), lowest_first_topk(logits, 7))


@pytest.mark.parametrize(("sigmoid", "after"), KINDS)
def test_N1_weights_are_as_exact_as_torch(sigmoid, after):
    logits = torch.randn(50, 24, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    case, options = (logits, None, None), RouterOptions(4, sigmoid, after, 1, 1.0, 0.1, 0.1)
    got = route_launch(*case, options)
    plain = router_ref(*case, options)
    truth = router_ref(case[0].double(), None, None, options)
    for name in ("weight", "sums", "balance", "z"):
        # 4: exp and division in a kernel are within 2 ulp each, torch's within 1
        assert_as_exact_as(getattr(got, name), getattr(plain, name), getattr(truth, name), factor=4.0)


def test_R8_strides():
    logits, *_ = _case(12, 10, False, False)
    options = RouterOptions(3, False, False, 1, 1.0, 0.1, 0.1)
    wide = torch.stack([logits, logits], dim=2)[:, :, 0]
    got, expected = ((route_launch(t, None, None, options)) for t in (wide, logits))
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    spread = torch.ones(1, device=DEVICE).expand(36)
    results = [
        route_backward_launch(t, None, RouterSaved(got.expert, got.load, got.stats), RouterGradients(grad), options)
        for t, grad in itertools.product((wide, logits), (spread, spread.contiguous()))
    ]
    assert all(torch.equal(result, results[0]) for result in results)


def test_R8_strided_bias_and_mask():
    logits, bias, mask = _case(12, 10, True, True)
    options = RouterOptions(3, False, False, 1, 1.0, 0.1, 0.1)
    wide_bias, wide_mask = (torch.stack([t, ~t if t.dtype == torch.bool else -t], 1)[:, 0] for t in (bias, mask))
    got, expected = ((route_launch(logits, *t, options)) for t in ((wide_bias, wide_mask), (bias, mask)))
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    grads, saved = RouterGradients(torch.ones(36, device=DEVICE)), RouterSaved(got.expert, got.load, got.stats)
    results = [route_backward_launch(logits, m, saved, grads, options) for m in (wide_mask, mask)]
    assert torch.equal(*results)


@pytest.mark.gpu
@pytest.mark.parametrize(("route", "rounding"), [(route_topk, ()), (route_rounded, ("nearest", 128))])
def test_N2_ten_reruns_are_bit_identical(route, rounding):
    logits = torch.randn(20_001, 96, device="cuda", requires_grad=True)
    runs = []
    options = RouterOptions(6, norm_p=1.0, balance_weight=0.1, z_weight=0.1)
    for _ in range(10):
        out = route(logits, options, *rounding)
        (grad,) = torch.autograd.grad(out.weight.square().sum() + out.balance + out.z, logits)
        runs.append((*out, grad))
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(run, runs[0], strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(("num_experts", "top_k"), [(128, 8), (64, 1), (100, 5), (512, 10)])
def test_bf16_logits_on_a_gpu(num_experts, top_k, after):
    case = _case(3001, num_experts, False, False, torch.bfloat16)
    options = RouterOptions(top_k, False, after, 1, 1.0, 0.1, 0.1)
    got = _compare(case, options)
    _gradients(case, options, got, (torch.randn(3001 * top_k, device="cuda"), got.balance * 0 + 1, None, None))


def test_bad_options_are_named():
    logits = torch.zeros(3, 4)
    with pytest.raises(ValueError, match="^norm_p=-1.0: must be a finite number above 0, or 0 for no norm"):
        route_topk(logits, RouterOptions(2, norm_p=-1.0))
    with pytest.raises(ValueError, match="^top_k=5: must be from 1 to the number of experts, 4"):
        route_topk(logits, RouterOptions(5))
    for groups, best, top_k in ((3, 1, 1), (2, 0, 1), (2, 3, 1), (2, 1, 3)):
        with pytest.raises(ValueError, match=f"^num_groups={groups}, group_top_k={best}: groups must divide 4 experts"):
            route_topk(logits, RouterOptions(top_k, num_groups=groups, group_top_k=best))
    with pytest.raises(ValueError, match=r"^bias is \(3,\): must be \(4,\) for logits \(3, 4\)"):
        route_topk(logits, RouterOptions(2), bias=torch.zeros(3))
    with pytest.raises(ValueError, match=r"^padding_mask is \(3, 1\): must be \(3,\), one a token"):
        route_topk(logits, RouterOptions(2), padding_mask=torch.zeros(3, 1, dtype=torch.bool))


def test_kernels_run_where_they_take_the_options(monkeypatch):
    monkeypatch.setattr(topk, "runs_triton", lambda t: t.dtype != torch.float64)
    taken = lambda dtype=torch.float32, experts=8, **options: kernels_take(  # noqa: E731
        torch.zeros(1, dtype=dtype), experts, RouterOptions(**{"top_k": 2, **options})
    )
    assert all(taken(norm_p=p) for p in (0, 1.0, 2.0)) and taken(sigmoid=True) and taken(after=True)
    assert taken(experts=1024) and taken(experts=64, top_k=32)
    assert not any(taken(norm_p=p) for p in (0.5, 1.5, 3.0)) and not taken(num_groups=2, group_top_k=1)
    assert not taken(experts=1025) and not taken(experts=64, top_k=33) and not taken(torch.float64)
