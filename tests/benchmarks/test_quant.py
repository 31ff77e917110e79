"""quant.py times a layer and the same without quantizers in turn, so that a clock that drifts moves both."""

import importlib
import sys
from pathlib import Path

import pytest
import torch

from .conftest import BENCHMARKS  # noqa: F401  puts the benchmarks on the path

measure = importlib.import_module("measure")
quant = importlib.import_module("quant")


def test_both_layers_are_timed_in_turn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    clock, calls = [0.0], [0]

    def fake(impl: str, activation: str, bits: int, *_: object) -> tuple[dict[str, torch.Tensor], int, object]:
        def step() -> None:
            calls[0] += 1
            clock[0] += (1e-3 if bits == -1 else 2e-3) * 1.01 ** calls[0]

        return {"w1": torch.ones(2)}, 100 if bits == -1 else 60, step

    monkeypatch.setattr(quant, "measure", fake)
    monkeypatch.setattr(measure, "on_gpu", lambda: False)
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    monkeypatch.setattr(sys, "argv", ["quant.py", "--out", str(tmp_path), "--repeats", "3", "--tokens", "8"])
    assert quant.main() == 0
    records = measure.read_result(tmp_path / "quant.json")["records"]
    assert len(records) == len(quant.cases()) == 32
    assert all(row["ms"] / row["ms_plain"] == pytest.approx(2, rel=0.05) for row in records)
    assert all((row["kept"], row["saved"]) == (60, 40) for row in records)
