"""count_valid, on the reference and on the kernel, and replicate, against loops."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import gradcheck

from megablocks.ops.routing import dispatch_triton
from megablocks.ops.routing.dispatch import count_valid, count_valid_ref
from megablocks.ops.upstream.bookkeeping import replicate

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LOADS = [[3, 0, 4], [0, 0, 5], [7], [0, 0], [1, 2, 3, 4, 5, 0, 6]]


def ends_of(loads):
    return torch.tensor(loads).cumsum(0).int()


@pytest.mark.parametrize("loads", LOADS)
@pytest.mark.parametrize("spare", [0, 2])
def test_R1_replicate_equals_the_loop(loads, spare, poison):
    ends, places = ends_of(loads), sum(loads) + spare
    x = torch.randn(2, len(loads), dtype=torch.float64)
    expected = [[v for e, n in enumerate(loads) for v in [row[e]] * n] + [0.0] * spare for row in x.tolist()]
    assert replicate(x, ends, places).tolist() == expected
    assert gradcheck(lambda x: replicate(x, ends, places).sin(), (x.requires_grad_(),))


@pytest.mark.any_device
@pytest.mark.parametrize(("count", "num_bins"), [(1, 1), (40, 5), (100, 16), (33, 70)])
def test_R7_counts_are_of_the_ids_inside(count, num_bins, monkeypatch, poison):
    monkeypatch.setattr(dispatch_triton, "_CHUNK", 16)
    ids = torch.randint(-2, num_bins + 2, (count,), device=DEVICE)
    expected = [sum(i == e for i in ids.tolist()) for e in range(num_bins)]
    assert count_valid(ids, num_bins).tolist() == expected
    assert count_valid_ref(ids, num_bins).tolist() == expected
    assert dispatch_triton.count_launch(ids, num_bins).tolist() == expected


def test_counts_of_nothing():
    assert count_valid(torch.empty(0, dtype=torch.int32), 3).tolist() == [0, 0, 0]
