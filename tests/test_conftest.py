"""What tests/conftest.py promises to each test."""

from __future__ import annotations

import pytest
import torch


@pytest.mark.parametrize("turn", range(2))
def test_each_test_begins_with_the_same_seed(turn: int) -> None:
    assert torch.equal(torch.randn(5), torch.randn(5, generator=torch.Generator().manual_seed(0))), turn
