"""The cost benchmark's plan and its fit; its timings are for whoever runs it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_every_case_leaves_64_rows_an_expert():
    command = [sys.executable, ROOT / "benchmarks/layer_cost.py", "--check"]
    out = subprocess.run(command, env={**os.environ, "DRY_RUN": "1"}, capture_output=True, text=True, check=True).stdout
    rows = [int(line.rsplit("=", 1)[1]) for line in out.splitlines()]
    assert len(rows) == 8 and min(rows) == 64
    assert "experts=64" in out and "experts=8" in out


def test_the_fitted_exponent(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from layer_cost import slope

    assert slope([(n, 3.0 * n**1.5) for n in (2, 4, 8, 16)]) == pytest.approx(1.5)
