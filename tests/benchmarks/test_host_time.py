"""host_time.py prints µs of one step, and the layer in torch's operations computes what ours does."""

import importlib
import sys

import pytest
import torch

from .conftest import BENCHMARKS  # noqa: F401  puts the benchmarks on the path

host_time = importlib.import_module("host_time")
measure = importlib.import_module("measure")

SHAPE = host_time.Shape(hidden=32, width=64, experts=4, top_k=2)


def test_times_are_of_one_step(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    clock = [0.0]

    def step(*_: object) -> None:
        clock[0] += 250e-6

    class Layer:
        forward_with_aux = staticmethod(step)

    monkeypatch.setattr(host_time, "need_gpu", lambda: None)
    monkeypatch.setattr(host_time, "make", lambda *_: (Layer(), None, None))
    monkeypatch.setattr(host_time, "step", step)
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    monkeypatch.setattr(sys, "argv", ["host_time.py", "--rounds", "2"])
    host_time.main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 * len(host_time.LAYERS)
    assert {tuple(line.split()[-2:]) for line in lines} == {("250", "250")}


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_the_layer_in_torchs_operations_is_ours(activation: str) -> None:
    found = []
    for impl in ("grouped", "torch"):
        torch.manual_seed(0)
        layer, x, dy = host_time.make(impl, activation, 24, SHAPE, "cpu")
        y, _ = layer.forward_with_aux(x)
        y.backward(dy)
        found.append([y.detach(), x.grad, *(p.grad.flatten() for _, p in sorted(named(layer).items()))])
    assert len(found[0]) == len(found[1]) == (5 if activation == "gelu" else 6)
    for ours, theirs in zip(*found, strict=True):
        assert measure.relative_error(theirs, ours) < 2e-2


def named(layer: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    return {name.removeprefix("experts.").split(".")[0]: p for name, p in layer.named_parameters()}
