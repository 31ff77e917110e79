"""The experts' bias kernels, interpreted without a GPU, against their references."""

import pytest
import torch

from megablocks.ops.grouped.bias import add_expert_bias_ref, expert_sum_ref, output_bias_dot_ref
from megablocks.ops.grouped.bias_triton import add_expert_bias_launch, expert_sum_launch, output_bias_dot_launch
from megablocks.ops.routing.dispatch import build_dispatch
from megablocks.testing.poison import poisoned_empty
from megablocks.testing.routings import ROUTINGS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("offsets", [[0, 5, 5, 40, 61], [0, 0, 0, 0, 70], [0, 1, 2, 3, 3], [0, 9, 9, 75]])
@pytest.mark.parametrize("width", [1, 40])
def test_R1_bias_kernels_equal_their_references(offsets, width):
    g = torch.Generator().manual_seed(0)
    used = offsets[-1]
    rows = torch.randn(75, width + 3, generator=g)[:, :width].to(DEVICE)
    rows[used:] = float("nan")
    bias = torch.randn(len(offsets) - 1, width, generator=g).to(DEVICE)
    ends = torch.tensor(offsets, dtype=torch.int32, device=DEVICE)
    with poisoned_empty():
        y, total = add_expert_bias_launch(rows, bias, ends), expert_sum_launch(rows, ends)
    torch.testing.assert_close(y[:used], add_expert_bias_ref(rows, bias, ends)[:used], rtol=0, atol=0)
    torch.testing.assert_close(total, expert_sum_ref(rows, ends), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("width", [1, 300])
def test_R1_output_bias_kernels_equal_a_loop(name, width):
    """Of pairs in any order, some without an expert: the sums an expert, and a dot product for each pair."""
    routing = ROUTINGS[name](41, 5, 3)
    d, weight = build_dispatch(routing), torch.randn(routing.num_pairs).to(DEVICE)
    dy, bias = torch.randn(41, width + 3).to(DEVICE)[:, :width], torch.randn(5, width).to(DEVICE)
    d = d._replace(**{field: getattr(d, field).to(DEVICE) for field in d._fields[:5]})
    sums, dots = torch.zeros(5, width, dtype=torch.float64), torch.zeros(routing.num_pairs, dtype=torch.float64)
    for pair, (token, expert) in enumerate(zip(routing.token.tolist(), routing.expert.tolist(), strict=True)):
        if 0 <= expert < 5:
            sums[expert] += weight[pair].double().cpu() * dy[token].double().cpu()
            dots[pair] = dy[token].double().cpu() @ bias[expert].double().cpu()
    given = dy, d.expert_offsets, weight, d.gather, d.pair
    with poisoned_empty():
        results = (expert_sum_launch(*given), output_bias_dot_launch(dy, bias, d))
    for got, ref, want in zip(
        results, (expert_sum_ref(*given), output_bias_dot_ref(dy, bias, d)), (sums, dots), strict=True
    ):
        torch.testing.assert_close(got.double().cpu(), want, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(ref.double().cpu(), want, rtol=1e-5, atol=1e-5)


def test_R1_the_weights_may_be_every_second_value():
    routing = ROUTINGS["zipf"](9, 3, 1)
    d = build_dispatch(routing)
    d = d._replace(**{field: getattr(d, field).to(DEVICE) for field in d._fields[:5]})
    weight, dy = torch.rand(9, 2, device=DEVICE)[:, 0], torch.randn(9, 5, device=DEVICE)
    given = dy, d.expert_offsets, weight, d.gather, d.pair
    torch.testing.assert_close(expert_sum_launch(*given), expert_sum_ref(*given), rtol=1e-5, atol=1e-5)


def test_bias_kernels_take_no_rows():
    ends = torch.zeros(4, dtype=torch.int32, device=DEVICE)
    rows, bias = torch.empty(0, 5, device=DEVICE), torch.ones(3, 5, device=DEVICE)
    assert add_expert_bias_launch(rows, bias, ends).shape == (0, 5)
    assert torch.equal(expert_sum_launch(rows, ends), torch.zeros(3, 5, device=DEVICE))
