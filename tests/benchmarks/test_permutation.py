"""permutation.py compares an op with a copy of as many bytes round by round, and with the best copy of the run."""

import importlib

import pytest

from .conftest import BENCHMARKS  # noqa: F401  puts the benchmarks on the path

permutation = importlib.import_module("permutation")


def test_shares_are_medians_of_the_rounds_ratios() -> None:
    drift, small, large = (1.0, 3.0, 2.0), 2**30, 2**31
    times = {f"copy {small}": [300.0 * d for d in drift], f"neg {small}": [250.0 * d for d in drift]}
    times |= {f"copy {large}": [800.0 * d for d in drift], f"neg {large}": [400.0 * d for d in drift]}
    times["gather"] = [500.0 * d * slower for d, slower in zip(drift, (1.0, 1.0, 4.0), strict=True)]
    [row] = permutation.rows_of((8, 4, 1), {"gather": small}, times)
    assert row["of_copy"] == pytest.approx(0.5)  # the ratio of the medians is 0.33
    assert row["of_peak"] == pytest.approx(0.4)  # half of the bytes, 0.8 of the time
    assert row["us"] == 1500 and row["gb_per_s"] == pytest.approx(small / 1500e-6 / 1e9)
    assert row["peak_gb_per_s"] == pytest.approx(large / 800e-6 / 1e9)
