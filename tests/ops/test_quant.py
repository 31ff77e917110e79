"""Quantize and back: errors, bytes, what is exact, and the kernels against the reference."""

from __future__ import annotations

import pytest
import torch

from megablocks.ops.grouped.gathered_mm import gathered_mm, gathered_mm_gated
from megablocks.ops.permute.rows import combine
from megablocks.ops.quant.quant import (
    CURVE,
    GROUP,
    TINY,
    dequantize,
    dequantize_ref,
    pack,
    packed_bytes,
    quantize,
    quantize_ref,
    unpack,
)
from megablocks.ops.quant.quant_triton import dequantize_launch, quantize_launch
from megablocks.ops.routing.dispatch import build_dispatch, make_routing
from megablocks.testing.oracle import relative_error
from megablocks.testing.syncs import no_sync

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BITS = (8, 4)
SHAPES = [(1, 1), (3, 13), (5, 64), (7, 200), (2, 1100), (0, 8), (4, 0)]


def _there_and_back(x, num_bits):
    return dequantize(*quantize(x, num_bits), num_bits, x.shape[1], x.dtype)


def _draw(name):
    torch.manual_seed(0)
    if name == "laplace":
        return torch.distributions.Laplace(0.0, 1.0).sample((512, 256))
    return torch.rand(512, 256) - 0.5 if name == "uniform" else torch.randn(512, 256)


@pytest.mark.parametrize("scale", [1.0, 1e-20, 1e20])
@pytest.mark.parametrize(
    ("name", "at_8", "at_4"), [("normal", 0.0054, 0.0655), ("laplace", 0.0064, 0.0705), ("uniform", 0.0042, 0.058)]
)
def test_N1_quantized_draws_are_near(name, at_8, at_4, scale):
    x = _draw(name) * scale
    assert relative_error(_there_and_back(x, 8), x) < at_8
    assert relative_error(_there_and_back(x, 4), x) < at_4


@pytest.mark.parametrize("num_bits", BITS)
def test_N1_quantized_values_stay_in_their_interval(num_bits):
    """No value moves by more than half the widest gap of its scale or, at 4 bits, the sixth by which it is cut."""
    x = _draw("laplace")
    groups = x.view(512, -1, GROUP[num_bits])
    moved = (_there_and_back(x, num_bits) - x).abs().view(groups.shape)
    levels = 1 << (num_bits - 1)
    half_gap = (1 + CURVE) / (levels - 0.5) / 2
    if num_bits == 8:
        # a scale is its maximum rounded up to 3 bits of mantissa, the smaller one to a fifteenth of the larger
        scale = torch.maximum(groups.amax(2), -groups.amin(2)) * (1 + 1 / 8)
        assert (moved <= scale[..., None] * half_gap).all()
    else:
        scale = torch.maximum(groups.amax(2), -groups.amin(2))
        assert (moved <= scale[..., None] / 6).all()


@pytest.mark.parametrize("num_bits", BITS)
def test_N1_quantizing_keeps_signs_and_zeros(num_bits):
    """relu's slope depends on the sign of the smallest value."""
    x = torch.randn(64, 256) * torch.logspace(-6, 0, 256)
    y = _there_and_back(x, num_bits)
    assert torch.equal(y > 0, x > 0) and torch.equal(y < 0, x < 0)
    x = x.relu()
    x[3] = 0
    x[:, 16:32] = TINY / 2
    y = _there_and_back(x, num_bits)
    assert (y[x == 0] == 0).all() and (y[:, 16:32] < 1e-6).all() and torch.equal(y[3, 32:], x[3, 32:])
    assert (_there_and_back(torch.full((2, 64), TINY / 2), num_bits) == 0).all()


@pytest.mark.parametrize("num_bits", BITS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_N3_a_bad_value_stays_in_its_group(num_bits, bad):
    group = GROUP[num_bits]
    x = torch.randn(3, 5 * group + 3)
    clean = _there_and_back(x, num_bits)
    x[1, 2 * group + 1] = bad
    y = _there_and_back(x, num_bits)
    inside = torch.zeros_like(x, dtype=torch.bool)
    inside[1, 2 * group : 3 * group] = True
    assert y[inside].isnan().all() and torch.equal(y[~inside], clean[~inside])


@pytest.mark.any_device
@pytest.mark.parametrize("num_bits", BITS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_every_dtype_up_to_its_largest_value(num_bits, dtype):
    largest = min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)
    x = (torch.rand(4, 128, device=DEVICE) * 2 - 1).to(dtype)
    x[0, 0], x[1] = 1, x[1] * largest
    y = _there_and_back(x, num_bits)
    assert y.dtype == dtype and y.isfinite().all()
    assert relative_error(y[0], x[0]) < 0.08 and relative_error(y[1] / largest, x[1] / largest) < 0.08


@pytest.mark.parametrize("num_bits", BITS)
@pytest.mark.parametrize(("rows", "width"), SHAPES)
def test_bytes_are_as_predicted(num_bits, rows, width):
    codes, scales = quantize(torch.randn(rows, width), num_bits)
    assert codes.nbytes + scales.nbytes == packed_bytes(num_bits, rows, width)
    groups = -(-width // GROUP[num_bits])
    assert packed_bytes(num_bits, rows, width) == rows * (-(-width * num_bits // 8) + 2 * groups)


@pytest.mark.any_device
@pytest.mark.parametrize("num_bits", BITS)
@pytest.mark.parametrize(("rows", "width"), SHAPES)
@pytest.mark.parametrize("strided", [False, True])
def test_N1_quantizing_kernels_equal_the_reference(num_bits, rows, width, strided, poison):
    torch.manual_seed(rows)
    x = torch.randn(rows, 2 * width, device=DEVICE)[:, :width] if strided else torch.randn(rows, width, device=DEVICE)
    if rows > 2:
        x[0] = 0
        x[1, : width // 2] = -x[1, : width // 2].abs()
        x[2, :3] = float("nan")
    if rows > 4:
        x[3] *= 1e38
        x[4] *= 1e-33
    expected = quantize_ref(x.cpu(), num_bits)
    wanted = dequantize_ref(*expected, num_bits, width, torch.float32)
    got = dequantize_launch(*(t.to(DEVICE) for t in expected), num_bits, width, torch.float32)
    torch.testing.assert_close(got.cpu(), wanted, rtol=1e-6 if x.is_cuda else 0, atol=0, equal_nan=True)

    codes, scales = (t.cpu() for t in quantize_launch(x, num_bits))
    assert codes.shape == expected[0].shape and scales.shape == expected[1].shape
    got = dequantize_ref(codes, scales, num_bits, width, torch.float32)
    # a GPU's square root is within an ulp, so a value at the border of two levels may go to either
    different = (got.nan_to_num() - wanted.nan_to_num()).abs() > 1e-6 * wanted.nan_to_num().abs()
    assert different.sum() <= (x.numel() // 500 if x.is_cuda else 0)
    assert torch.equal(got.isnan(), wanted.isnan())


@pytest.mark.any_device
@pytest.mark.parametrize("num_bits", BITS)
def test_N2_ten_quantizations_are_bit_identical(num_bits):
    x = torch.randn(9, 130, device=DEVICE)
    first = quantize_launch(x, num_bits)
    for _ in range(9):
        assert all(torch.equal(a, b) for a, b in zip(quantize_launch(x, num_bits), first, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("num_bits", BITS)
def test_N4_rows_beyond_int32_are_quantized(num_bits):
    width = 8192
    x = torch.zeros(2**31 // width + 3, width, device="cuda", dtype=torch.bfloat16)
    x[-4:] = torch.randn(4, width, device="cuda")
    y = _there_and_back(x, num_bits)
    assert torch.equal(y[-4:], _there_and_back(x[-4:], num_bits)) and (y[:-4] == 0).all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("num_bits", "bound"), [(8, 0.0065), (4, 0.069)])
def test_half_types_on_a_gpu(dtype, num_bits, bound, poison):
    x = torch.randn(300, 1000, device="cuda", dtype=dtype)
    with no_sync():
        y = _there_and_back(x, num_bits)
    assert relative_error(y, x) < bound
    reference = _there_and_back(x.cpu(), num_bits)
    # half types make many ties, between levels and between the two scales tried at 4 bits
    assert relative_error(y.cpu(), reference) < 0.01


def test_packed_tensors_come_back_in_shape_and_dtype():
    t = torch.randn(3, 4, 32, dtype=torch.bfloat16)
    how, *saved = pack(t, 8)
    assert [s.dtype for s in saved] == [torch.uint8, torch.int16]
    back = unpack(how, *saved)
    assert back.shape == t.shape and back.dtype == t.dtype and relative_error(back, t) < 0.0065
    for unchanged in (t, None, torch.empty(0, 4)):
        how, *saved = pack(unchanged, -1 if unchanged is t else 8)
        assert unpack(how, *saved) is unchanged


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: quantize(x, 2), "num_bits=2: must be 4 or 8"),
        (lambda x: quantize(x[0], 8), r"x is \(20,\) torch.float32: must be \(R, H\) of a floating dtype"),
        (lambda x: quantize(x.int(), 8), "torch.int32: must be"),
        (lambda x: dequantize(*quantize(x, 4), 4, 64), r"must be \(3, 32\), \(3, 4\) for width=64 at 4 bits"),
    ],
)
def test_bad_arguments_end_with_one_line(call, message):
    with pytest.raises(ValueError, match=message):
        call(torch.randn(3, 20))


@pytest.mark.parametrize("num_bits", [3, 0, 16])
def test_ops_that_save_quantized_refuse_other_bits(num_bits):
    x, w, weight = torch.randn(3, 8), torch.randn(4, 8, 5), torch.rand(3, 2)
    routing = make_routing(torch.tensor([[0, 1], [2, 3], [1, 1]]), weight, 4)
    dispatch = build_dispatch(routing)
    message = f"^num_bits={num_bits}: must be 4, 8, or -1 for off"
    with pytest.raises(ValueError, match=message):
        gathered_mm(x, w, dispatch, num_bits=num_bits)
    with pytest.raises(ValueError, match=message):
        gathered_mm_gated(x, w, w, dispatch, num_bits=num_bits)
    with pytest.raises(ValueError, match=message):
        combine(torch.randn(6, 8), routing.weight, dispatch, num_bits=num_bits)
