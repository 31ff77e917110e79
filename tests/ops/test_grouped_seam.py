"""Which kernels the grouped products take, and that each gives the same result and gradients through the op."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
import triton
from torch import Tensor

from megablocks.ops import hopper
from megablocks.ops.grouped import grouped_mm as seam
from megablocks.ops.grouped import grouped_mm_hopper, grouped_mm_hopper_dw, grouped_mm_triton
from megablocks.ops.launch import interpreted
from megablocks.testing.oracle import relative_error

COUNTS = [13, 0, 1, 67]
GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU and not interpreted() else "cpu"


def operands(dtype: torch.dtype, k: int, n: int, transposed: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x with two unused rows, w, offsets and a gradient of y."""
    generator = torch.Generator().manual_seed(0)
    offsets = torch.tensor([0, *torch.tensor(COUNTS).cumsum(0).tolist()], dtype=torch.int32)
    used = int(offsets[-1])
    x, grad = (torch.randn(used + 2, width, generator=generator).to(dtype) for width in (k, n))
    x[used:], grad[used:] = float("nan"), float("nan")
    shape = (len(COUNTS), n, k) if transposed else (len(COUNTS), k, n)
    w = torch.randn(shape, generator=generator).to(dtype)
    return tuple(t.to(DEVICE) for t in (x, w.transpose(1, 2) if transposed else w, offsets, grad))


def check(dtype: torch.dtype, k: int, n: int, transposed: bool) -> None:
    x, w, offsets, grad = operands(dtype, k, n, transposed)
    x.requires_grad_()
    w = w.detach().requires_grad_()
    y = seam.grouped_mm(x, w, offsets)
    dx, dw = torch.autograd.grad(y, (x, w), grad)
    used = sum(COUNTS)
    wide = [t.detach().double() for t in (x, w, grad)]
    bounds = offsets.tolist()
    rows = list(zip(bounds, bounds[1:], strict=False))
    truth = (
        torch.cat([wide[0][a:b] @ wide[1][e] for e, (a, b) in enumerate(rows)]),
        torch.cat([wide[2][a:b] @ wide[1][e].T for e, (a, b) in enumerate(rows)]),
        torch.stack([wide[0][a:b].T @ wide[2][a:b] for a, b in rows]),
    )
    assert y.dtype == dx.dtype == dw.dtype == dtype
    assert dw.stride() == w.stride()
    assert bool((dw[1] == 0).all())
    for got, expected in zip((y[:used], dx[:used], dw), truth, strict=True):
        assert relative_error(got, expected) < 2 * torch.finfo(dtype).eps


class Recorder:
    """Kernels that compute as the reference does and note what was asked of them; `takes` is their verdict."""

    def __init__(self, takes: bool = True) -> None:
        self.asked: list[str] = []
        self.takes = takes

    def supports_m(self, x: Tensor, w: Tensor, offsets: Tensor, rows: int) -> bool:
        return self.takes

    def supports_k(self, a: Tensor, b: Tensor, offsets: Tensor) -> bool:
        return self.takes

    def ragged_m(self, x: Tensor, w: Tensor, offsets: Tensor, bias: Tensor | None = None) -> Tensor:
        self.asked.append("m")
        assert bias is None
        return seam.grouped_mm_ref(x, w, offsets)

    def ragged_k(self, a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
        self.asked.append("k")
        return seam.grouped_mm_dw_ref(a, b, offsets)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("takes", [False, True])
def test_hopper_kernels_come_first_and_the_twin_takes_the_rest(
    takes: bool, transposed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, last = Recorder(takes), Recorder()
    for name in ("hopper_ragged_m", "hopper_ragged_k"):
        monkeypatch.setattr(seam, name, lambda x: first)
    monkeypatch.setattr(seam, "has_torch_kernel", lambda x: False)
    monkeypatch.setattr(seam, "twin_kernels", lambda x: last)
    check(torch.float32, 24, 40, transposed)
    assert first.asked == (["m", "m", "k"] if takes else [])
    assert last.asked == ([] if takes else ["m", "m", "k"])


@pytest.mark.parametrize("takes", [False, True])
def test_torchs_kernel_comes_before_the_twin(takes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    first, twin, asked = Recorder(takes), Recorder(), []
    for name in ("hopper_ragged_m", "hopper_ragged_k"):
        monkeypatch.setattr(seam, name, lambda x: first)
    monkeypatch.setattr(seam, "twin_kernels", lambda x: twin)
    monkeypatch.setattr(seam, "has_torch_kernel", lambda x: True)
    monkeypatch.setattr(seam, "_grouped_mm_torch", lambda *args: asked.append("m") or seam.grouped_mm_ref(*args))
    monkeypatch.setattr(seam, "_grouped_mm_dw_torch", lambda *args: asked.append("k") or seam.grouped_mm_dw_ref(*args))
    check(torch.float32, 24, 40, False)
    assert first.asked == (["m", "m", "k"] if takes else [])
    assert asked == ([] if takes else ["m", "m", "k"])
    assert twin.asked == []


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_twin_through_the_op(dtype: torch.dtype, transposed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cpu" and not interpreted():
        pytest.skip("needs TRITON_INTERPRET=1 or a GPU")
    for name in ("hopper_ragged_m", "hopper_ragged_k"):
        monkeypatch.setattr(seam, name, lambda x: None)
    monkeypatch.setattr(seam, "has_torch_kernel", lambda x: False)
    monkeypatch.setattr(seam, "twin_kernels", lambda x: grouped_mm_triton)
    check(dtype, 19, 21, transposed)


@pytest.mark.parametrize("kernels", [None, grouped_mm_triton], ids=["reference", "twin"])
def test_N1_a_bias_is_rounded_with_its_product(kernels: ModuleType | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if kernels is not None and DEVICE == "cpu" and not interpreted():
        pytest.skip("needs TRITON_INTERPRET=1 or a GPU")
    for name in ("hopper_ragged_m", "twin_kernels"):
        monkeypatch.setattr(seam, name, lambda x, name=name: kernels if name == "twin_kernels" else None)
    x, ones = torch.tensor([[2048.0, 1.0]]), torch.ones(1, 2, 1)
    offsets = torch.tensor([0, 1], dtype=torch.int32)
    operands = [t.to(DEVICE) for t in (x.half(), ones.half(), offsets, torch.ones(1, 1).half())]
    assert seam.grouped_mm(*operands).item() == 2050  # float16 has no 2049


@pytest.mark.gpu
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("k,n", [(64, 136), (19, 21)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("switch", ["0", "1"])
def test_whatever_this_gpu_takes(
    switch: str, dtype: torch.dtype, k: int, n: int, transposed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGABLOCKS_HOPPER", switch)
    check(dtype, k, n, transposed)


def test_one_variable_turns_the_hopper_kernels_off(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("is_hopper", "has_gluon"):
        monkeypatch.setattr(hopper, name, lambda *_: True)
    monkeypatch.setattr(Tensor, "is_cuda", True)
    x = torch.zeros(1, dtype=torch.bfloat16)
    monkeypatch.delenv("MEGABLOCKS_HOPPER", raising=False)
    assert seam.hopper_ragged_m(x) is grouped_mm_hopper and seam.hopper_ragged_k(x) is grouped_mm_hopper_dw
    assert seam.hopper_ragged_m(x.float()) is None
    monkeypatch.setenv("MEGABLOCKS_HOPPER", "0")
    assert seam.hopper_ragged_m(x) is None and seam.hopper_ragged_k(x) is None


@pytest.mark.parametrize("value, on", [("0", False), ("1", True), ("", True), (None, True)])
def test_a_switch_is_on_unless_it_is_0(value: str | None, on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MEGABLOCKS_HOPPER", raising=False)
    if value is not None:
        monkeypatch.setenv("MEGABLOCKS_HOPPER", value)
    assert hopper.switched_on() is on


@pytest.mark.parametrize("value", ["off", "2", "true"])
def test_a_switch_refuses_other_words(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGABLOCKS_HOPPER", value)
    with pytest.raises(ValueError, match=f"^MEGABLOCKS_HOPPER={value}: must be 0 or 1$"):
        hopper.switched_on()


@pytest.mark.parametrize("version", ["3.5.1", "3.10.0", "4.0.0+git1"])
def test_hopper_kernels_refuse_other_releases_of_triton(
    version: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(hopper, "is_hopper", lambda _: True)
    monkeypatch.delenv("MEGABLOCKS_HOPPER", raising=False)
    monkeypatch.setattr(triton, "__version__", version)
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    hopper.has_gluon.cache_clear()
    try:
        assert not hopper.has_gluon() and hopper.why_off(0) == "this release of Triton"
        assert [r.getMessage() for r in caplog.records] == [
            f"triton={version}: the kernels for Hopper are off, slower ones run; install triton >=3.6,<3.10"
        ]
        for supported in ("3.6.0", "3.9.0"):
            monkeypatch.setattr(triton, "__version__", supported)
            hopper.has_gluon.cache_clear()
            assert hopper.has_gluon() and hopper.why_off(0) is None
        monkeypatch.setenv("MEGABLOCKS_HOPPER", "0")
        assert hopper.why_off(0) == "MEGABLOCKS_HOPPER=0"
    finally:
        hopper.has_gluon.cache_clear()


def test_nothing_runs_on_a_cpu_or_in_float64() -> None:
    on_gpu = torch.zeros(2, 8, dtype=torch.float64, device="cuda" if GPU else "cpu")
    for t in (torch.zeros(2, 8), torch.zeros(2, 8, dtype=torch.bfloat16), on_gpu):
        assert seam.hopper_ragged_m(t) is None and seam.hopper_ragged_k(t) is None
        assert seam.twin_kernels(t) is None
