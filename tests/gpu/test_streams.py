"""N11: every family of kernels on a stream and on a device other than the default."""

from __future__ import annotations

import pytest
import torch

from .sanitize import FAMILIES

pytestmark = pytest.mark.gpu
BUSY_CYCLES = 4_000_000_000
"""Two seconds of a GPU at 2 GHz, longer than any step takes after its kernels are compiled."""


@pytest.mark.parametrize("name", FAMILIES)
def test_N11_on_a_side_stream_while_the_default_stream_is_busy(name: str) -> None:
    step = FAMILIES[name](torch.device("cuda"))
    want = [t.cpu() for t in step()]
    side, busy = torch.cuda.Stream(), torch.cuda.Event()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()  # fills the side stream's memory pool, because an allocation may synchronize the device
    torch.cuda.synchronize()
    torch.cuda._sleep(BUSY_CYCLES)
    busy.record()
    with torch.cuda.stream(side):
        got = [t.to("cpu", non_blocking=True) for t in step()]
    side.synchronize()
    still_busy = not busy.query()
    torch.cuda.synchronize()
    assert still_busy, "the step waited for the default stream"
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert torch.equal(a, b), f"result {i} differs"


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("name", FAMILIES)
def test_N11_on_the_second_device_while_the_first_is_current(name: str) -> None:
    want = [t.cpu() for t in FAMILIES[name](torch.device("cuda", 0))()]
    got = FAMILIES[name](torch.device("cuda", 1))()
    assert torch.cuda.current_device() == 0
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert a.device == torch.device("cuda", 1)
        assert torch.equal(a.cpu(), b), f"result {i} differs"
