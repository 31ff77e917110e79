"""The plan of the benchmark that settles mlp_impl="auto"; its timings are for whoever runs it."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_cases_are_ones_that_both_ways_take():
    command = [sys.executable, ROOT / "benchmarks/mlp_impls.py"]
    env = {**os.environ, "DRY_RUN": "1", "PYTHONPATH": str(ROOT)}
    out = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout
    widths = [int(line.split("width=")[1].split(",")[0]) for line in out.splitlines()]
    assert len(widths) == 14 and all(width % 128 == 0 for width in widths)
