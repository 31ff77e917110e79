"""ScatterMoE's kernels by the names of its package, against loops over pairs."""

import pytest
import torch

import megablocks.layers.scattermoe as scattermoe

E, T, K, IN, OUT = 4, 5, 2, 6, 3
EXPERTS = torch.tensor([[3, 0], [0, 1], [3, 1], [0, 3], [3, 0]])  # the third expert has no token
ORDER, PAIRS, OFFSETS = scattermoe.flatten_sort_count(EXPERTS, E)
FLAT = EXPERTS.flatten()


@pytest.mark.parametrize("into", [False, True])
@pytest.mark.parametrize("y_grouped", [False, True])
@pytest.mark.parametrize("x_grouped", [False, True])
def test_scatter2scatter(x_grouped, y_grouped, into):
    x, w, b = torch.randn(T * K if x_grouped else T, IN), torch.randn(E, IN, OUT), torch.randn(E, OUT)
    expected = torch.empty(T * K, OUT)
    for row, pair in enumerate(PAIRS.tolist()):
        source = x[row] if x_grouped else x[pair // K]
        expected[row if y_grouped else pair] = source @ w[FLAT[pair]] + b[FLAT[pair]]
    out = torch.full((T * K, OUT), torch.nan) if into else None
    y = scattermoe.kernels.ops.scatter2scatter(
        x, w, ORDER, PAIRS, 1 if x_grouped else K, b=b, x_grouped=x_grouped, y_grouped=y_grouped, out=out
    )
    assert torch.allclose(y, expected, atol=1e-6) and (y is out) is into


@pytest.mark.parametrize("into", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("fan_out", [1, K])
def test_group(fan_out, weighted, into):
    a, coeff = torch.randn(T * K // fan_out, IN).bfloat16(), torch.randn(T * K) if weighted else None
    out = torch.full((T * K, IN), torch.nan, dtype=a.dtype) if into else None
    y = scattermoe.kernels.ops.group(a, PAIRS, coeff=coeff, fan_out=fan_out, out=out)
    factors = torch.ones(T * K) if coeff is None else coeff
    expected = torch.stack([a[pair // fan_out].float() * factors[pair] for pair in PAIRS.tolist()])
    assert torch.equal(y, expected.bfloat16()) and (y is out) is into


@pytest.mark.parametrize("has_bias", [False, True])
def test_group_bwd_W(has_bias):  # noqa: N802
    dy, x = torch.randn(T * K, OUT), torch.randn(T * K, IN)
    dw, db = scattermoe.kernels.ops.group_bwd_W(DY=dy, X=x, expert_offsets=OFFSETS, E=E, has_bias=has_bias)
    counts = FLAT.bincount(minlength=E).tolist()
    parts = list(zip(dy.split(counts), x.split(counts), strict=True))
    assert torch.allclose(dw, torch.stack([b.t() @ a for a, b in parts]), atol=1e-6)
    assert (dw[2] == 0).all() and (db is not None) is has_bias
    if db is not None:
        assert torch.allclose(db, torch.stack([a.sum(0) for a, _ in parts]), atol=1e-6)
    with pytest.raises(ValueError, match=r"expert_offsets is \(4,\): must be \(5,\)"):
        scattermoe.kernels.ops.group_bwd_W(dy, x, OFFSETS, E + 1)


def test_names_are_where_its_package_has_them():
    assert scattermoe.parallel_experts.ParallelLinear.apply is scattermoe.parallel_linear
    assert scattermoe.mlp.GLUMLP is scattermoe.GLUMLP and scattermoe.mlp.MLP is scattermoe.MLP
    assert scattermoe.parallel_experts.ParallelExperts is scattermoe.ParallelExperts
