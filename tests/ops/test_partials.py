"""The kernel that adds the programs' partial sums, interpreted without a GPU, against float64."""

from __future__ import annotations

import pytest
import torch

from megablocks.ops.partials_triton import add_partials_launch
from megablocks.testing.oracle import relative_error
from megablocks.testing.poison import poisoned_empty

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize(("programs", "count", "width"), [(0, 1, 5), (1, 3, 40), (131, 2, 13), (396, 3, 768)])
def test_partials_are_added_in_float32(programs: int, count: int, width: int) -> None:
    partial = torch.randn(programs, count, width, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    with poisoned_empty():
        sums = add_partials_launch(partial)
    assert len(sums) == count and len({one.untyped_storage().data_ptr() for one in sums}) == count
    for got, expected in zip(sums, partial.double().sum(0), strict=True):
        assert got.dtype == torch.float32
        assert relative_error(got, expected) < 1e-6 if programs else not got.any()
    assert all(torch.equal(a, b) for a, b in zip(sums, add_partials_launch(partial), strict=True))
