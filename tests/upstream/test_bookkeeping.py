"""The bookkeeping functions of megablocks 0.10 against plain Python and numpy."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from megablocks import ops

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
INTEGERS = [torch.int16, torch.int32, torch.int64]


def _draw(shape, low, high, dtype, device, seed=0):
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("n", [0, 1, 13, 200])
def test_sort_is_stable(n, dtype, device):
    x = _draw((n,), -5, 6, dtype, device)
    values, indices = ops.sort(x)
    order = sorted(range(n), key=lambda i: (int(x[i]), i))
    assert values.dtype == indices.dtype == dtype and values.shape == indices.shape == (n,)
    assert indices.tolist() == order and values.tolist() == [int(x[i]) for i in order]


@pytest.mark.parametrize("dtype", INTEGERS)
def test_sort_compares_low_bits_only(dtype):
    x = torch.tensor([9, 1, 8, 17, 0], dtype=dtype)
    values, indices = ops.sort(x, 3)
    assert indices.tolist() == [2, 4, 0, 1, 3] and values.tolist() == [8, 0, 9, 1, 17]
    assert ops.sort(x, 4)[0].tolist() == [0, 1, 17, 8, 9]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("shape", [(0,), (1,), (67,), (3, 40), (1, 7), (2, 0), (0, 5)])
def test_histogram_counts_what_is_in_range(shape, dtype, device):
    x = _draw(shape, -2, 9, dtype, device)
    out = ops.histogram(x, 6)
    assert out.dtype == torch.int32 and out.shape == (*shape[:-1], 6)
    rows = x.cpu().numpy().reshape(-1, shape[-1]) if shape[-1] else np.zeros((shape[0] if len(shape) > 1 else 1, 0))
    expected = [[int((row == value).sum()) for value in range(6)] for row in rows]
    assert out.reshape(-1, 6).tolist() == expected


def test_histogram_has_more_bins_than_the_type_of_x():
    x = torch.tensor([0, 3, 3, -1], dtype=torch.int16)
    assert ops.histogram(x, 2**15)[:5].tolist() == [1, 0, 0, 2, 0]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize(
    "shape, dim", [((7,), 0), ((7,), 1), ((1,), 0), ((3, 5), 1), ((3, 5), -1), ((3, 5), 0), ((0,), 0)]
)
def test_cumulative_sums(shape, dim, dtype, device):
    x = _draw(shape, 0, 100, dtype, device)
    expected = np.cumsum(x.cpu().numpy(), axis=0 if len(shape) == 1 else dim)
    inclusive, exclusive = ops.inclusive_cumsum(x, dim), ops.exclusive_cumsum(x, dim)
    assert inclusive.dtype == exclusive.dtype == dtype and inclusive.shape == exclusive.shape == shape
    assert np.array_equal(inclusive.cpu().numpy(), expected)
    assert np.array_equal(exclusive.cpu().numpy(), expected - x.cpu().numpy())


def test_round_up_repeat_and_sum():
    x = torch.tensor([0, 1, 127, 128, 129], dtype=torch.int32)
    assert ops.round_up(x, 128).tolist() == [0, 128, 128, 128, 256] and ops.round_up(x, 128).dtype == torch.int32
    rows = torch.arange(6.0).view(2, 3)
    assert ops.repeat(rows, (1, 1)) is rows
    assert ops.repeat(rows, (2, 1)).tolist() == [*rows.tolist(), *rows.tolist()]
    assert ops.sum(rows).tolist() == [3.0, 5.0, 7.0] and ops.sum(rows, dim=1).tolist() == [3.0, 12.0]
    assert ops.sum(rows[:1]).tolist() == [0.0, 1.0, 2.0] and ops.sum(rows[:1], 0).data_ptr() == rows.data_ptr()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int16, torch.int32]
)
@pytest.mark.parametrize("counts", [[3, 0, 4, 1], [0, 0, 5], [6], [0, 2]])
def test_replicate(counts, dtype, device):
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(3, len(counts), generator=generator) * 9).to(dtype).to(device)
    bins = torch.tensor(counts, dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32)
    out = ops.replicate(x, bins, sum(counts))
    assert out.dtype == dtype and out.is_contiguous()
    assert torch.equal(out, torch.repeat_interleave(x, torch.tensor(counts, device=device), dim=1))
    assert torch.equal(ops.replicate(x, bins, sum(counts) + 2), F.pad(out, (0, 2)))


@pytest.mark.parametrize("device", DEVICES)
def test_replicate_gradient_is_the_sum_over_each_bin(device):
    counts = [3, 0, 4]
    x = torch.randn(2, 3, device=device, requires_grad=True)
    bins = torch.tensor(counts, dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32)
    grad = torch.randn(2, 7, device=device)
    ops.replicate(x, bins, 7).backward(grad)
    expected = torch.stack([part.sum(1) for part in grad.split(counts, dim=1)], 1)
    assert torch.allclose(x.grad, expected, atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("counts, columns", [([2, 0, 3], 4), ([1], 1), ([0, 0, 2, 1], 3)])
def test_topology_lists_each_row_its_experts_columns(counts, columns, device):
    padded_bins = (torch.tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32) * 128).to(device)
    out = ops.topology(padded_bins, 128, sum(counts), columns)
    expected = [e * columns + j for e, count in enumerate(counts) for _ in range(count) for j in range(columns)]
    assert out.dtype == torch.int16 and out.tolist() == expected
    longer = ops.topology(padded_bins, 128, sum(counts) + 1, columns)
    assert longer.tolist() == expected + [-1] * columns
    assert ops.topology(padded_bins, 128, 1, columns).tolist() == expected[:columns]


def test_topology_widens_before_it_overflows():
    bins = torch.tensor([128, 256], dtype=torch.int32)
    assert ops.topology(bins, 128, 2, 2**14).dtype == torch.int16
    wide = ops.topology(bins, 128, 2, 2**14 + 1)
    assert wide.dtype == torch.int32 and wide.max() == 2**15 + 1


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: ops.sort(torch.zeros(3)), r"x is \(3,\) torch.float32: must be 1-D and torch.int16"),
        (lambda: ops.sort(torch.zeros(2, 2, dtype=torch.int32)), r"x is \(2, 2\) torch.int32: must be 1-D"),
        (lambda: ops.sort(torch.zeros(3, dtype=torch.int16), 17), r"end_bit=17: must be in \[0, 16\]"),
        (lambda: ops.sort(torch.zeros(2**15, dtype=torch.int16)), "x has 32768 values, whose indices do not fit"),
        (lambda: ops.histogram(torch.zeros(3), 4), r"x is \(3,\) torch.float32: must be 1-D or 2-D"),
        (lambda: ops.histogram(torch.zeros(3, dtype=torch.int32), 0), "max_val=0: must be >= 1"),
        (lambda: ops.inclusive_cumsum(torch.zeros(2, 2), 2), "dim=2: must be a dimension of x"),
        (lambda: ops.round_up(torch.zeros(3), 4), "x is torch.float32: must be torch.int32"),
        (lambda: ops.round_up(torch.zeros(3, dtype=torch.int32), 0), "value=0: must be an integer >= 1"),
        (
            lambda: ops.replicate(torch.zeros(1, 3), torch.zeros(2, dtype=torch.int32), 1),
            r"must be \(B, E\) and \(E,\)",
        ),
        (lambda: ops.replicate(torch.zeros(1, 3), torch.zeros(3), 1), "bins is torch.float32: must be torch.int32"),
        (lambda: ops.replicate(torch.zeros(1, 3), torch.zeros(3).int(), -1), "num_outputs=-1: must be >= 0"),
        (lambda: ops.topology(torch.zeros(3), 128, 1, 1), "padded_bins is .* torch.float32: must be"),
        (lambda: ops.topology(torch.zeros(3).int(), 0, 1, 1), "block_size=0: must be >= 1"),
    ],
)
def test_bad_input_is_one_line(call, message):
    with pytest.raises(ValueError, match=message) as error:
        call()
    assert "\n" not in str(error.value)
