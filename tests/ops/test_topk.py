"""Top-k selection and weights, against numbers worked by hand and plain loops."""

import pytest
import torch
from torch.autograd import gradcheck

from megablocks.ops.routing.topk import RouterOptions, lowest_first_topk, mask_to_best_groups, route_topk

NAN, INF = float("nan"), float("inf")
KINDS = [{}, {"after": True}, {"sigmoid": True}]


def topk_weights(logits, k, bias=None, **options):
    """ids (T, K) and weights (T, K)."""
    out = route_topk(logits, RouterOptions(k, **options), bias=bias)
    return out.expert.view(-1, k).long(), out.weight.view(-1, k)


@pytest.mark.parametrize("k", [1, 3, 7])
def test_ids_equal_a_stable_sort(k):
    values = torch.randint(0, 4, (200, 7), generator=torch.Generator().manual_seed(0)).double()
    expected = [sorted(range(7), key=lambda e, row=row: -row[e])[:k] for row in values.tolist()]
    assert lowest_first_topk(values, k).tolist() == expected


def test_ties_go_to_the_lowest_id():
    assert lowest_first_topk(torch.zeros(2, 5), 3).tolist() == [[0, 1, 2]] * 2
    assert lowest_first_topk(torch.tensor([[1.0, 3.0, 3.0, 2.0]]), 3).tolist() == [[1, 2, 3]]


@pytest.mark.parametrize(
    "row",
    [
        [NAN, NAN, NAN, NAN],
        [0.0, NAN, 1.0, NAN],
        [-INF, -INF, -INF, -INF],
        [INF, -INF, NAN, 0.0],
        [-INF, 1.0, -INF, -INF],
    ],
)
@pytest.mark.parametrize("after", [False, True])
def test_N3_ids_stay_in_range_and_distinct(row, after):
    for dtype in (torch.float32, torch.float64):
        logits = torch.tensor([row, [1.0, 2.0, 3.0, 4.0]], dtype=dtype)
        ids, _ = topk_weights(logits, 4, after=after)
        assert sorted(ids[0].tolist()) == [0, 1, 2, 3]
        assert ids[1].tolist() == [3, 2, 1, 0]


def test_softmax_before_and_after():
    logits = torch.tensor([[0.0, 2.0, 1.0]], dtype=torch.float64)
    ids, before = topk_weights(logits, 2)
    assert ids.tolist() == [[1, 2]]
    assert torch.allclose(before, logits.softmax(1)[:, [1, 2]])
    _, after = topk_weights(logits, 2, after=True)
    assert torch.allclose(after, torch.tensor([[2.0, 1.0]]).double().softmax(1))
    _, normalized = topk_weights(logits, 2, norm_p=1.0)
    assert torch.allclose(normalized, after)  # the two are one formula
    for p in (2.0, 3.0, 0.5):
        _, scaled = topk_weights(logits, 2, norm_p=p, scaling=2.5)
        assert torch.allclose(scaled, 2.5 * before / before.pow(p).sum(1, keepdim=True) ** (1 / p))


def test_after_topk_ignores_scores_of_the_rest():
    a = topk_weights(torch.tensor([[5.0, 4.0, -9.0]]), 2, after=True)[1]
    b = topk_weights(torch.tensor([[5.0, 4.0, 3.9]]), 2, after=True)[1]
    assert torch.equal(a, b)


@pytest.mark.parametrize("kind", KINDS)
def test_bias_changes_the_choice_and_not_the_weights(kind):
    logits = torch.tensor([[3.0, 1.0, 0.0]], dtype=torch.float64)
    ids, weights = topk_weights(logits, 2, torch.tensor([-10.0, 0.0, 10.0]), **kind)
    assert ids.tolist() == [[2, 1]]
    expected = (logits.sigmoid() if kind.get("sigmoid") else logits.softmax(1))[:, [2, 1]]
    if kind.get("after"):
        expected = logits[:, [2, 1]].softmax(1)
    assert torch.allclose(weights, expected)


def test_groups_are_ranked_by_the_sum_of_their_best():
    # 3 groups of 2, K = 2 of 1 group: group sums of the best 2: 1.0, 1.1, 0.9
    scores = torch.tensor([[0.9, 0.1, 0.6, 0.5, 0.2, 0.7]])
    assert mask_to_best_groups(scores, 2, 3, 1).tolist() == [[-INF, -INF, *scores[0, 2:4].tolist(), -INF, -INF]]
    # K = 2 of 2 groups: each by its best one
    masked = mask_to_best_groups(scores, 2, 3, 2)
    assert masked[0].isinf().tolist() == [False, False, True, True, False, False]
    # fewer choices than groups: still by the best one, not by nothing
    assert mask_to_best_groups(scores, 1, 3, 2)[0].isinf().tolist() == [False, False, True, True, False, False]


def test_group_limited_ids_equal_the_loop():
    logits = torch.randn(100, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    bias = torch.randn(12, generator=torch.Generator().manual_seed(2))
    ids, _ = topk_weights(logits, 4, bias, sigmoid=True, num_groups=4, group_top_k=2)
    for row, got in zip((logits.sigmoid() + bias).tolist(), ids.tolist(), strict=True):
        groups = [row[i : i + 3] for i in range(0, 12, 3)]
        best = sorted(range(4), key=lambda g, groups=groups: -sum(sorted(groups[g])[-2:]))[:2]
        allowed = [e for e in range(12) if e // 3 in best]
        assert got == sorted(allowed, key=lambda e, row=row: -row[e])[:4]


def test_half_types_are_computed_in_float32():
    logits = torch.randn(50, 9, generator=torch.Generator().manual_seed(0)).bfloat16()
    ids, weights = topk_weights(logits, 2)
    assert weights.dtype == torch.float32
    truth = logits.double().softmax(1).gather(1, ids)
    assert (weights - truth).abs().max() < 1e-6


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("norm_p", [0.0, 0.5, 1.0, 2.0, 3.0])
@pytest.mark.parametrize("groups", [{}, {"num_groups": 3, "group_top_k": 2}])
@pytest.mark.parametrize("losses", [{}, {"balance_weight": 0.1, "z_weight": 0.2}])
def test_gradients(kind, norm_p, groups, losses):
    """Written by hand; a router without losses saves its weights in place of the logits where it can."""
    logits = torch.randn(5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    options = RouterOptions(3, norm_p=norm_p, scaling=1.5, **kind, **groups, **losses)

    def results(logits):
        out = route_topk(logits, options)
        return (out.weight, out.balance, out.z, out.sums) if losses else out.weight

    assert gradcheck(results, (logits,))


@pytest.mark.parametrize("norm_p", [1.0, 2.0, 3.0])
def test_normalizing_scores_that_underflowed_gives_no_nan(norm_p):
    logits = torch.full((1, 4), -200.0, requires_grad=True)
    _, weights = topk_weights(logits, 2, sigmoid=True, norm_p=norm_p)
    assert weights.isfinite().all()
    weights.sum().backward()
    assert logits.grad.isfinite().all()


@pytest.mark.parametrize("norm_p", [0.5, 1.0, 2.0, 3.0, 8.0])
def test_normalizing_scores_whose_powers_underflow(norm_p):
    results = []
    for dtype in (torch.float32, torch.float64):
        logits = torch.tensor([[-36.0, -35.0, -37.0], [-6.0, -5.5, -7.0]], dtype=dtype, requires_grad=True)
        _, weights = topk_weights(logits, 2, sigmoid=True, norm_p=norm_p)
        weights[:, 0].sum().backward()
        results.append((weights.detach().double(), logits.grad.double()))
    scores = logits.detach().sigmoid()[:, [1, 0]]
    expected = scores / scores.pow(norm_p).sum(1, keepdim=True) ** (1 / norm_p)
    assert torch.allclose(results[1][0], expected, rtol=1e-4)  # the 1e-20 that avoids 0/0 counts here
    for narrow, wide in zip(*results, strict=True):
        assert torch.allclose(narrow, wide, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("k", [1, 2])
def test_no_tokens(k):
    logits = torch.empty(0, 4, requires_grad=True)
    ids, weights = topk_weights(logits, k, num_groups=2, group_top_k=1)
    assert ids.shape == weights.shape == (0, k)
    weights.sum().backward()
    assert logits.grad.shape == (0, 4)


def test_logits_of_another_rank_are_refused():
    for shape in ((4,), (2, 3, 4)):
        with pytest.raises(ValueError, match=r"^logits is \(.*\): must be \(T, E\)$"):
            route_topk(torch.randn(shape), RouterOptions(top_k=2))
