"""N2: ten runs of every family of kernels give the same bits, whatever fresh memory holds."""

from __future__ import annotations

import pytest
import torch

from megablocks.testing.poison import poisoned_empty

from .sanitize import FAMILIES


@pytest.mark.gpu
@pytest.mark.parametrize("name", FAMILIES)
def test_N2_ten_reruns_are_bit_identical(name: str) -> None:
    step = FAMILIES[name](torch.device("cuda"))
    first = step()
    for _ in range(9):
        with poisoned_empty():
            again = step()
        for i, (a, b) in enumerate(zip(first, again, strict=True)):
            assert torch.equal(a, b), f"result {i} differs"
