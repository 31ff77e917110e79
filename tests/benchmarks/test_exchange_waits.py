"""The causes of waits, from kernels whose times are known."""

from __future__ import annotations

import exchange_waits
import pytest

from megablocks.monitor.trace import Kernel


def kernels(*spans: tuple[str, float, float]) -> list[Kernel]:
    return [Kernel(name, start * 1e3, end * 1e3, (), "") for name, start, end in spans]


def test_a_wait_counts_for_the_rank_that_came_last_and_for_its_cause() -> None:
    home = "to_home_kernel"
    early = kernels((home, 0, 1), ("product", 1, 3), (home, 3, 7), ("product", 7, 8), (home, 8, 12))
    # first two ms more of products, then three ms idle; a copy beside a product counts once
    late = kernels((home, 0, 1), ("product", 1, 5), ("copy", 2, 4), (home, 5, 7), ("product", 7, 8), (home, 11, 12))
    ranks = [exchange_waits.segments(one) for one in (early, late)]
    assert [tuple(map(round, one[1:])) for one in ranks[1]] == [(1, 0, 0), (2, 4, 0), (1, 1, 3)]
    found = exchange_waits.waits(ranks, steps=1)
    assert found["waits for rank 1"] == found[f"{home}: wait"] == pytest.approx(5)
    assert found[f"{home}: itself"] == pytest.approx(4)
    assert found["late rank's kernels since the exchange before, beyond the other's"] == pytest.approx(2)
    assert found["late rank's idle time since the exchange before, beyond the other's"] == pytest.approx(3)
