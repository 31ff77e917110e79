"""The entry points of megablocks 0.10's kernels against plain torch over the index arrays, row by row."""

import pytest
import torch

from megablocks.backend import kernels
from megablocks.testing.poison import poisoned_empty

T, K, H, E = 7, 2, 5, 4
EXPERTS = torch.tensor([3, 0, 0, 1, 3, 3, 1, 0, 0, 3, 3, 0, 1, 3], dtype=torch.int32)  # the third expert has no token
INDICES = EXPERTS.sort(stable=True).indices.int()
BIN_IDS = EXPERTS[INDICES.long()]
COUNTS = EXPERTS.bincount(minlength=E)
BINS = COUNTS.cumsum(0).int()
PADDED_BINS = (-(-COUNTS // 4) * 4).cumsum(0).int()
FIRST, PADDED_FIRST = BINS - COUNTS, torch.cat([torch.zeros(1), PADDED_BINS[:-1]])
PLACE = torch.arange(T * K) - FIRST[BIN_IDS.long()]
PACKED, PADDED = torch.arange(T * K), (PADDED_FIRST[BIN_IDS.long()] + PLACE).long()


def _binned(capacity):
    """The row of each sorted place, -1 for one beyond its bin."""
    return torch.where(PLACE < capacity, BIN_IDS * capacity + PLACE, -1)


def _gathered(x, weights, row_of_place, num_rows):
    out = torch.zeros(num_rows, H)
    for p, row in enumerate(row_of_place.tolist()):
        pair = int(INDICES[p])
        if row >= 0:
            out[row] = x[pair // K] * (1 if weights is None else weights[pair])
    return out


def _scattered(rows, weights, row_of_place):
    out = torch.zeros(T, H)
    for p, row in enumerate(row_of_place.tolist()):
        pair = int(INDICES[p])
        if row >= 0:
            out[pair // K] += rows[row] * (1 if weights is None else weights[pair])
    return out


def _weight_gradient(rows, grad, row_of_place):
    out = torch.zeros(T * K)
    for p, row in enumerate(row_of_place.tolist()):
        pair = int(INDICES[p])
        if row >= 0:
            out[pair] = torch.dot(rows[row], grad[pair // K])
    return out


WEIGHTS = [None, torch.linspace(-1, 2, T * K)]


@pytest.mark.parametrize("weights", WEIGHTS)
def test_gathers_weigh_rows(weights):
    x, padded_rows = torch.randn(T, H), int(PADDED_BINS[-1])
    with poisoned_empty():
        packed = kernels.gather(x, INDICES, BIN_IDS, weights, BINS, K)
        padded = kernels.padded_gather(x, INDICES, BIN_IDS, weights, BINS, PADDED_BINS, K)
        binned = kernels.binned_gather(x, INDICES, weights, BINS, 3, K)
    assert torch.allclose(packed, _gathered(x, weights, PACKED, T * K), atol=1e-6)
    assert torch.allclose(padded, _gathered(x, weights, PADDED, padded_rows), atol=1e-6)
    assert torch.allclose(binned, _gathered(x, weights, _binned(3), E * 3).view(E, 3, H), atol=1e-6)


@pytest.mark.parametrize("weights", WEIGHTS)
def test_scatters_and_the_gradients_of_their_weights(weights):
    packed, padded, binned = torch.randn(T * K, H), torch.randn(int(PADDED_BINS[-1]), H), torch.randn(E, 3, H)
    grad, flat = torch.randn(T, H), binned.view(E * 3, H)
    with poisoned_empty():
        sums = (
            kernels.scatter(packed, INDICES, BIN_IDS, weights, BINS, K),
            kernels.padded_scatter(padded, INDICES, BIN_IDS, weights, BINS, PADDED_BINS, K),
            kernels.binned_scatter(binned, INDICES, weights, BINS, K),
        )
        gradients = (
            kernels.scatter_wgrad(packed, grad, INDICES, BIN_IDS, BINS, K),
            kernels.padded_scatter_wgrad(padded, grad, INDICES, BIN_IDS, BINS, PADDED_BINS, K),
            kernels.binned_scatter_wgrad(binned, grad, INDICES, BINS, K),
        )
    for rows, places, summed, gradient in zip(
        (packed, padded, flat), (PACKED, PADDED, _binned(3)), sums, gradients, strict=True
    ):
        assert torch.allclose(summed, _scattered(rows, weights, places), atol=1e-5)
        assert torch.allclose(gradient, _weight_gradient(rows, grad, places), atol=1e-5)


def test_a_weighted_row_is_rounded_once():
    x, weights = torch.randn(T, H).bfloat16(), torch.rand(T * K)
    rows = kernels.padded_gather(x, INDICES, BIN_IDS, weights, BINS, PADDED_BINS, K)
    expected = _gathered(x.float(), weights, PADDED, rows.shape[0])
    assert torch.equal(rows, expected.bfloat16())
    assert kernels.scatter_wgrad(torch.randn(T * K, H).bfloat16(), x, INDICES, BIN_IDS, BINS, K).dtype == torch.bfloat16


def test_a_kernel_builds_no_graph_and_ignores_autocast():
    x = torch.randn(T, H, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        rows = kernels.gather(x, INDICES, BIN_IDS, WEIGHTS[1], BINS, K)
        sums = kernels.scatter(rows, INDICES, BIN_IDS, None, BINS, K)
    assert rows.dtype == sums.dtype == torch.float32 and not rows.requires_grad
    assert torch.allclose(rows, _gathered(x.detach(), WEIGHTS[1], PACKED, T * K), atol=1e-6)


def test_bad_input_is_one_line():
    with pytest.raises(ValueError, match=r"grad is \(1, 5\): must be \(7, 5\)"):
        kernels.scatter_wgrad(torch.zeros(T * K, H), torch.zeros(1, H), INDICES, BIN_IDS, BINS, K)
