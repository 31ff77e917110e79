"""`bench`: every candidate of a shape is checked, timed and drawn; a wrong one is named."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megablocks.tool import bench
from megablocks.tool.bench import text_of
from megablocks.tool.commands import main
from megablocks.tool.peers import peers
from megablocks.tool.problem import OURS, Problem, Shape, Step, random_ids

SHAPE = "--tokens 24 --hidden-size 16 --ffn-hidden-size 64 --num-experts 4 --top-k 2 --rounds 2".split()


def test_a_cpu_compares_and_times_every_implementation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *SHAPE, "--json", "--out", str(tmp_path)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == json.loads((tmp_path / "bench.json").read_text())
    assert set(OURS) <= set(found["candidates"]) and not found["failed"]
    flops = 6 * 24 * 2 * 16 * 64
    for row in found["candidates"].values():
        assert row["error"] < (1e-5 if found["device"] == "cpu" else 1e-2) and 0 < row["forward_ms"]
        assert row["tflops"] == pytest.approx(3 * flops / row["step_ms"] / 1e9)
    assert found["candidates"]["auto"]["speed"] == 1.0
    text = (tmp_path / "bench.txt").read_text()
    assert text == text_of(found) + "\n" and "T,H; I/E/K = 24,16; 64/4/2" in text
    order = [line.split()[0] for line in text.splitlines()[4 : 4 + len(found["candidates"])]]
    times = [found["candidates"][name]["step_ms"] for name in order]
    assert times == sorted(times)
    from matplotlib.image import imread

    picture = imread(tmp_path / "bench.png")
    assert picture.shape[0] > 200 and picture.std() > 0.05


@pytest.mark.parametrize("on_gpu", [False, True])
def test_the_columns_of_slow_candidates_stay_apart(on_gpu: bool) -> None:
    row = {"forward_ms": 123456.7, "step_ms": 234567.8, "tflops": 4.05e-07, "speed": 0.01, "error": 1e-3}
    row |= {"python_ms": 345678.9, "held": 2.0**39} if on_gpu else {}
    shape = vars(Shape(24, 16, 64, 4, 2, "swiglu", "after_topk"))
    found = {"device": "cpu", "torch": "2", "dtype": "float32", "shape": shape, "auto": "grouped", "failed": {}}
    found |= {"left_out": {}, "not_installed": [], "candidates": {"sonicmoe compiled": row, "auto": row}}
    titles, *rows = text_of(found).splitlines()[3:6]
    for line in rows:
        assert len(line) == len(titles) and line.split()[-1] == "1e-03" and line.startswith(("auto ", "sonicmoe"))
        assert len(line.split()) == line.startswith("sonic") + (12 if on_gpu else 9)


def test_the_peer_computes_the_same_function() -> None:
    """torch's own grouped product, which a CPU has too: values and gradients against the float32 loop."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = Shape(24, 16, 32, 4, 2, "swiglu", "after_topk")
    problem = Problem(shape, random_ids(shape, device), device=device)
    assert problem.error(peers(problem)["torch"](), weights=False) < 1e-2


def test_what_does_not_take_the_shape_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    shape = [word if word != "64" else "40" for word in SHAPE]
    assert main(["bench", *shape, "--activation", "relu", "--only", "auto,sparse,torch"]) == 0
    out = capsys.readouterr().out
    assert "\nleft out: sparse: ConfigError: ffn_hidden_size=40: must be a multiple of 64" in out
    assert "\nleft out: torch: ValueError: activation='relu': must be one of swiglu, gelu for a peer" in out


def test_a_wrong_implementation_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    ours = Problem.ours

    def one_wrong(self: Problem) -> dict[str, Any]:
        def wrong() -> Step:
            step = ours(self)["grouped"]()
            return Step(lambda: 1.1 * step.forward(), step.leaves, step.dy)

        return ours(self) | {"grouped": wrong}

    monkeypatch.setattr(Problem, "ours", one_wrong)
    assert main(["bench", *SHAPE, "--only", "auto,grouped"]) == 1
    told = capsys.readouterr()
    assert "FAILED grouped: ArithmeticError: y: relative error 1.0e-01" in told.out
    assert told.err.startswith("megablocks bench: grouped: ArithmeticError: y: ") and told.err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--top-k", "5"], "top_k=5: must be at most num_experts=4"),
        (["--tokens", "0"], "tokens=0: must be an integer >= 1"),
        (["--rounds", "0"], "rounds=0: must be an integer >= 1"),
        (["--tokens", "1000000000000000"], "tokens=1000000000000000, hidden_size="),
        (["--tokens", "100000000000000000000"], "tokens=100000000000000000000, hidden_size="),
        (["--only", ""], "only='': must be of auto, "),
        (["--only", "fusd"], "only='fusd': must be of auto, sparse, grouped, scatter, fused, torch, scattermoe"),
        (["--activation", "tanh"], "argument --activation: invalid choice: 'tanh'"),
    ],
)
def test_bad_arguments_are_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *SHAPE, *words]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"megablocks bench: {message}") and told.count("\n") == 1


def test_what_torch_says_of_the_inputs_is_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("CUDA error: no kernel image is available\nCUDA kernel errors might be reported later")

    monkeypatch.setattr(bench, "Problem", broken)
    assert main(["bench", *SHAPE]) == 2
    told = capsys.readouterr().err
    assert told.endswith("cannot be allocated (CUDA error: no kernel image is available); use fewer\n")


def test_a_folder_that_cannot_be_made_is_refused_before_the_timing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    for out, why in (
        (tmp_path / "file", "made (File exists)"),
        (tmp_path / "file/x", "made (Not a directory)"),
        (Path("/proc"), "written to (No such file or directory)"),
    ):
        assert main(["bench", *SHAPE, "--only", "auto", "--out", str(out)]) == 2
        told = capsys.readouterr()
        assert told.err == f"megablocks bench: out={str(out)!r}: cannot be {why}; choose another folder\n"
        assert not told.out


def test_a_picture_that_cannot_be_drawn_is_told_before_the_timing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["bench", *SHAPE, "--only", "auto", "--out", str(tmp_path)]) == 2
    told = capsys.readouterr()
    assert told.err == "megablocks bench: matplotlib is not installed: pip install matplotlib\n" and not told.out


@pytest.mark.parametrize(
    ("width", "only", "why"),
    [
        ("40", "sparse", "sparse: ConfigError: ffn_hidden_size=40: must be a multiple of 64"),
        ("64", "sonicmoe", "sonicmoe is not installed"),
    ],
)
def test_nothing_to_time_is_one_line(
    width: str,
    only: str,
    why: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("megablocks.tool.peers.peers", lambda problem: {})
    assert main(["bench", *SHAPE, "--ffn-hidden-size", width, "--only", only, "--out", str(tmp_path)]) == 2
    told = capsys.readouterr()
    assert told.err.startswith(f"megablocks bench: only='{only}': leaves nothing to time; {why}") and not told.out
    assert told.err.count("\n") == 1 and not list(tmp_path.iterdir())
