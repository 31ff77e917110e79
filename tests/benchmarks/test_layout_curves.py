"""layout_curves.py reads a run's losses, and its gate is red where a layout trains less alike than a second seed."""

import importlib

import pytest

from .conftest import BENCHMARKS  # noqa: F401  puts the benchmarks on the path

measure = importlib.import_module("measure")
curves = importlib.import_module("layout_curves")


def log(shift: float, steps: int = 40) -> str:
    lines = ["[Rank 0] (after 10 iterations) memory (MB) | allocated: 1.0 | max allocated: 2048.0 | reserved: 4096.0"]
    for step in range(10, steps + 1, 10):
        loss = 6.0 - step / 100 + (shift if step >= 20 else 5.0)
        lines.append(
            f" [2026-01-01] iteration {step:8d}/ 40 | elapsed time per iteration (ms): 100.0 | lm loss: {loss:.6E} | "
            f"loss scale: 1.0 | tokens/s: {1000 + step} | MFU: 30.0% |"
        )
    return "\n".join(lines)


def test_a_curve_is_read_from_a_log() -> None:
    curve = curves.read_log(log(0.0), 40)
    assert curve.steps == [10, 20, 30, 40] and curve.losses[1:] == [5.8, 5.7, 5.6]
    assert (curve.tokens_per_second, curve.peak_gib) == (1035.0, 2.0)
    with pytest.raises(ValueError, match="ended early"):
        curves.read_log(log(0.0), 50)


@pytest.mark.parametrize(("shift", "green"), [(0.01, True), (-0.03, False)])
def test_the_gate_compares_a_layout_with_a_second_seed(shift: float, green: bool) -> None:
    runs = {curves.ONE: 0.0, curves.SEED: 0.02, "EP2": shift}
    gate = measure.Gate(ours=lambda _: True)
    rows = curves.compare({name: curves.read_log(log(off), 40) for name, off in runs.items()}, gate)
    assert gate.green == green
    assert [round(row["distance"], 6) for row in rows] == [0.0, 0.02, abs(shift)]
