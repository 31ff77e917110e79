"""Device functions of the kernels for Hopper."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from megablocks.ops import hopper_gluon
from megablocks.ops.activation_table import UNARY
from megablocks.ops.hopper_gluon import unary
from megablocks.ops.launch import interpreted

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
RELATIVE, SLOPE = 4e-5, 1e-5
"""Limits of the errors; rounding to float16 has a relative error of 5e-4, to bfloat16 of 4e-3."""


@gluon.jit
def _unary_kernel(z_ptr, value_ptr, slope_ptr, n, NAME: gl.constexpr, EXACT: gl.constexpr):
    i = gl.program_id(0) * 128 + gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))
    value, slope = unary(gl.load(z_ptr + i, mask=i < n, other=0).to(gl.float32), NAME, EXACT)
    gl.store(value_ptr + i, value, mask=i < n)
    gl.store(slope_ptr + i, slope, mask=i < n)


def run(z: Tensor, name: str, approximate: str) -> tuple[Tensor, Tensor]:
    value, slope = (torch.empty(z.shape, device=z.device) for _ in range(2))
    _unary_kernel[(math.ceil(len(z) / 128),)](z, value, slope, len(z), NAME=name, EXACT=approximate == "none")
    return value, slope


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER or interpreted(), reason="needs a Hopper GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name, approximate", [("gelu", "none"), ("gelu", "tanh"), ("silu", "none")])
def test_N1_the_activation_of_each_number_of_16_bits(name: str, approximate: str, dtype: torch.dtype) -> None:
    z = torch.arange(2**16, dtype=torch.int32, device="cuda").to(torch.int16).view(dtype)
    z = z[z.abs() < 1e4]  # the derivative of the form with tanh is no number far outside
    value, slope = run(z, name, approximate)
    z = z.double()
    share = torch.sigmoid(z)
    if name == "gelu":  # neither loses the digits of small results, as torch's forms do
        share = torch.sigmoid(2 * math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))
        if approximate == "none":
            share = 0.5 * torch.special.erfc(-z / math.sqrt(2))
    torch.testing.assert_close(value.double(), z * share, rtol=RELATIVE, atol=1e-35)
    want = UNARY[name].backward(torch.ones_like(z), z, approximate)
    torch.testing.assert_close(slope.double(), want, rtol=0, atol=SLOPE)
    nan = torch.full((1,), math.nan, dtype=dtype, device="cuda")
    assert all(bool(t.isnan().all()) for t in run(nan, name, approximate))


def test_kernels_name_shared_constants_alone() -> None:
    """Triton's key of a compiled kernel has the value of NAME, not of module.NAME: a changed one would not compile."""
    folder = Path(hopper_gluon.__file__).parent
    files = [path for path in folder.rglob("*_hopper*.py") if "gluon.jit" in path.read_text()]
    assert len(files) == 5
    assert not [(path.name, found) for path in files if (found := re.findall(r"\bhg\.[A-Z]\w+", path.read_text()))]
