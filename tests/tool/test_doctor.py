"""`doctor`: right kernels pass, a wrong or failing one is named."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from gpu.test_families import in_another_process, tensors_pass_for_cuda
from torch import Tensor

from megablocks.monitor.flops import of_device
from megablocks.tool import doctor
from megablocks.tool.cases import CASES, Case, errors
from megablocks.tool.commands import main
from megablocks.tool.env import HOPPER, TRITON, WITH_HOPPER, kernels, paths

CPU = torch.device("cpu")


def test_each_family_has_a_case() -> None:
    assert set(CASES) == set(paths())


def test_all_families_pass_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json", "--no-speed"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] and set(CASES) <= set(found["families"])
    assert all(one["error"] <= one["limit"] for one in found["families"].values())
    on_gpu = torch.cuda.is_available()
    assert bool(found["needs_a_gpu"]) != on_gpu
    text = doctor.text_of(found)
    assert all(f"ok      {name} " in text for name in CASES)
    assert on_gpu or text.endswith("not checked without a GPU: every Triton and Gluon kernel, bfloat16, speed")


def _break(name: str, wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CASES, name, CASES[name]._replace(run=wrong))
    for other in set(CASES) - {name, "adam"}:
        monkeypatch.delitem(CASES, other)


def test_a_family_with_one_wrong_row_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = CASES["norm"].run

    def wrong(*inputs: Tensor) -> list[Tensor]:
        y, *rest = right(*inputs)
        return [torch.where(torch.arange(len(y), device=y.device)[:, None] == 7, 0, y), *rest]

    _break("norm", wrong, monkeypatch)
    assert main(["doctor", "--no-speed"]) == 1
    out = capsys.readouterr()
    assert "FAILED  norm" in out.out and "ok      adam" in out.out
    assert out.err.startswith("megablocks doctor: norm: ") and out.err.count("\n") == 1


def test_a_family_that_raises_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(*inputs: Tensor) -> list[Tensor]:
        raise RuntimeError("out of shared memory\nlong trace")

    _break("loss", raises, monkeypatch)
    assert main(["doctor", "--no-speed"]) == 1
    out = capsys.readouterr()
    assert out.err == "megablocks doctor: loss: RuntimeError: out of shared memory\n"


def test_wrong_gradients_shapes_and_nan_are_seen() -> None:
    one = {"x": (5, 3)}
    detached = Case(one, lambda x: [x + (x * x).detach() - (x * x)], lambda x: [x])
    found = errors(detached, CPU, torch.float32)
    assert found["output 0"] < 1e-6 and found["gradient of x"] > 0.1
    cut = Case(one, lambda x: [x[:4]], lambda x: [x], differentiable=False)
    assert errors(cut, CPU, torch.float32) == {"output 0": float("inf")}
    nan = Case(one, lambda x: [x * float("nan")], lambda x: [x], differentiable=False)
    assert errors(nan, CPU, torch.float32) == {"output 0": float("inf")}


def test_a_slow_product_fails(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    slow = {"up": {"ok": False, "tflops": 100.0, "share_of_chip": 0.1, "expected_tflops": 626.0, "problem": "slow"}}
    found = {"device": "NVIDIA H200", "families": {}, "speeds": slow, "needs_a_gpu": [], "ok": False}
    monkeypatch.setattr(doctor, "report", lambda speed: found)
    assert main(["doctor"]) == 1
    out = capsys.readouterr()
    assert "SLOW    up" in out.out and "10% of the chip, expected 626" in out.out
    assert out.err == "megablocks doctor: up: slow\n"


def test_products_that_cannot_be_timed_are_a_finding(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as on a GPU whose memory another program holds; the families that passed are still told."""

    def full(device: torch.device) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 604 MiB.\nSee the documentation")

    monkeypatch.setattr(doctor, "speeds", full)
    monkeypatch.setattr(doctor, "families", lambda device: {})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    assert main(["doctor"]) == 1
    out, why = capsys.readouterr(), "OutOfMemoryError: CUDA out of memory. Tried to allocate 604 MiB."
    assert f"FAILED  products                {why}\n" in out.out
    assert out.err == f"megablocks doctor: products: {why}\n"


def test_a_nan_is_a_finding_that_json_can_hold(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _break("norm", lambda *inputs: [t * float("nan") for t in CASES["norm"].truth(*inputs)], monkeypatch)
    assert main(["doctor", "--no-speed", "--json"]) == 1
    out = capsys.readouterr()
    found = json.loads(out.out, parse_constant=pytest.fail)["families"]["norm"]
    assert not found["ok"] and found["error"] is None and "relative error inf" in out.err


def test_the_time_of_a_product_has_no_launch_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    def milliseconds(run: Any, calls: int = 1, *, head_start_ms: float = 0.0) -> float:
        waits.append(head_start_ms)
        return run()

    monkeypatch.setattr(doctor, "milliseconds", milliseconds)
    assert doctor.gpu_milliseconds(lambda: 0.25) == 0.25 and waits == [doctor.HEAD_START_MS] and waits[0] > 0


@pytest.mark.gpu
def test_products_are_timed() -> None:
    found = doctor.speeds(torch.device("cuda", 0))
    assert set(found) == set(doctor.EXPECTED_TFLOPS) and all(one["tflops"] > 1 for one in found.values())


def test_on_hopper_the_cases_launch_the_kernels_of_their_families() -> None:
    """No GPU is needed: launches are recorded, and no kernel runs."""
    seen = in_another_process(__file__)
    for family, needed in {
        "fused": {"fused.up_hopper.up_kernel", "fused.gradient_hopper.down_gradient_kernel"},
        "grouped": {"grouped.grouped_mm_hopper.ragged_m_kernel", "grouped.grouped_mm_hopper_dw.ragged_k_kernel"},
        "sparse": {"sparse.products_hopper.sdd_kernel", "sparse.products_hopper.spmm_kernel"},
        "scatter": {"grouped.grouped_mm_triton._rows_kernel", "grouped.grouped_mm_triton._weights_kernel"},
        "router": {"routing.topk_triton._route_kernel", "routing.topk_triton._route_backward_kernel"},
        "permute": {"permute.permute_triton._expand_kernel", "permute.permute_triton._combine_backward_kernel"},
        "quant": {"quant.quant_triton._quantize_kernel", "quant.quant_triton._dequantize_kernel"},
        "loss": {"loss_triton._sums_kernel", "loss_triton._gradient_kernel"},
        "norm": {"norm_triton._norm_kernel", "norm_triton._norm_backward_kernel"},
        "rope": {"rope_triton._rope_kernel"},
        "adam": {"adam_triton._adam_kernel"},
    }.items():
        assert {f"megablocks.ops.{name}" for name in needed} <= set(seen["launched"][family]), family
    hopper = set(WITH_HOPPER)
    assert seen["paths"] == {name: HOPPER if name in hopper else TRITON for name in CASES}


def _seen_on_hopper() -> dict[str, Any]:
    """What the cases launch and what `env` says, with CPU tensors that pass for an H200's."""
    from unittest import mock

    from gpu.family import launches
    from triton.runtime.jit import JITFunction

    from megablocks.testing.compile_only import compiling_for

    launched = {}
    with compiling_for(90), mock.patch.object(JITFunction, "run", lambda self, *args, **options: None):
        for name, case in CASES.items():
            with tensors_pass_for_cuda(), launches() as recorded:
                inputs = [torch.ones(shape, dtype=torch.float32 if exact in case.exact else torch.bfloat16)
                          for exact, shape in case.inputs.items()]  # fmt: skip
                outputs = case.run(*(t.requires_grad_(case.differentiable) for t in inputs))
                if case.differentiable:
                    torch.autograd.grad([out.float().sum() for out in outputs], inputs)
            launched[name] = sorted(recorded)
        with tensors_pass_for_cuda():
            of_env = kernels(torch.zeros(64, 64, dtype=torch.bfloat16))
    return {"launched": launched, "paths": of_env}


if __name__ == "__main__":
    print(json.dumps(_seen_on_hopper()))


@pytest.mark.parametrize(
    "name, known", [("NVIDIA H200", True), ("NVIDIA H200 NVL", False), ("NVIDIA H100 PCIe", False)]
)
def test_the_rate_of_a_faster_card_is_not_expected(name: str, known: bool) -> None:
    for rates in doctor.EXPECTED_TFLOPS.values():
        assert (of_device(rates, name) is not None) == known
