"""training_step.py reads a run's log, and its gate is red where arms of one model train differently."""

import importlib
from pathlib import Path

import pytest

from .conftest import BENCHMARKS  # noqa: F401  puts the benchmarks on the path

measure = importlib.import_module("measure")
step = importlib.import_module("training_step")


def log(ms: float, loss: float, last: int = 30) -> str:
    lines = ["[Rank 0] (after 5 iterations) memory (MB) | allocated: 1.0 | max allocated: 2048.0 | reserved: 4096.0"]
    for iteration in (1, *range(5, last + 1, 5)):
        slow = 1000.0 if iteration <= 15 else 0.0
        lines.append(
            f" [2026-01-01] iteration {iteration:8d}/ 30 | elapsed time per iteration (ms): {ms + slow} | "
            f"lm loss: {loss:.6E} | loss scale: 1.0 | tokens/s: {int(131072e3 / (ms + slow))} | MFU: 30.0% |"
        )
    return "\n".join(lines)


def test_a_log_is_read_without_its_first_steps() -> None:
    one = step.read_log(log(250.0, 6.5))
    assert (one.ms, one.mfu, one.peak_gib, one.first_s, one.loss) == (250.0, 0.3, 2.0, 1.25, 6.5)
    assert one.tokens_per_second == 524288


@pytest.mark.parametrize("text", ["", log(250.0, 6.5, last=25)])
def test_a_run_that_ended_early_is_no_figure(text: str) -> None:
    with pytest.raises(ValueError, match="ended early"):
        step.read_log(text)


def test_the_gate_compares_the_losses_of_one_model() -> None:
    arms = {"a": step.Arm("M", "x.sh", ""), "b": step.Arm("M", "x.sh", ""), "c": step.Arm("N", "y.sh", "")}
    for other, green in ((6.6, True), (6.7, False)):
        runs = {name: [step.read_log(log(250.0, loss))] for name, loss in (("a", 6.5), ("b", other), ("c", 9.0))}
        gate = measure.Gate(ours=lambda _: True)
        rows = step.summarize(runs, arms, gate)
        assert gate.green == green and [row["arm"] for row in rows] == ["a", "b", "c"]


def test_every_arm_names_a_script() -> None:
    root = Path(step.ROOT)
    assert all((root / "exp" / arm.script).is_file() for arm in (*step.ARMS.values(), *step.BEFORE.values()))
    assert step.command_of(step.ARMS["dmoe-xs"], root, Path("/d"), Path("/r"))[1]["DATA_PREFIX"] == "/d"
