"""The small modules of megablocks 0.10: mpu, common, activation_fn, gelu, and the question for grouped_gemm."""

import pytest
import torch
import torch.nn.functional as F

from megablocks import grouped_gemm_util
from megablocks.layers import Arguments, activation_fn, common, gelu, mpu
from megablocks.ops.sparse import from_coordinates
from upstream.fake_stk import FakeStk


def _args(**changes):
    values = dict(hidden_size=12, ffn_hidden_size=20, moe_num_experts=4, fp16=False, device="cpu")
    return Arguments(**{**values, **changes})


def test_one_rank_holds_everything():
    args = _args()
    assert (mpu.get_expert_parallel_world_size(args), mpu.get_expert_parallel_rank(args)) == (1, 0)
    assert (mpu.expert_sharding_degree(args), mpu.hidden_sharding_degree(args)) == (1, 1)
    assert (mpu.experts_per_rank(args), mpu.features_per_rank(args)) == (4, 20)


@pytest.mark.parametrize(
    "size, experts, width, shape",
    [(2, 4, 20, (2, 1, 2, 20)), (4, 4, 20, (4, 1, 1, 20)), (8, 4, 20, (4, 2, 1, 10))],
)
def test_shards(monkeypatch, size, experts, width, shape):
    monkeypatch.setattr(mpu, "get_expert_parallel_world_size", lambda args: size)
    args = _args(moe_num_experts=experts, ffn_hidden_size=width)
    found = mpu.expert_sharding_degree(args), mpu.hidden_sharding_degree(args)
    assert (*found, mpu.experts_per_rank(args), mpu.features_per_rank(args)) == shape


@pytest.mark.parametrize(
    "size, message",
    [
        (3, "moe_num_experts=4: must be divisible by the 3 ranks that share"),
        (6, "moe_num_experts=4: must divide or be divisible by the 6 ranks"),
        (12, "ffn_hidden_size=20: must be divisible by 3"),
    ],
)
def test_shards_that_do_not_fit(monkeypatch, size, message):
    monkeypatch.setattr(mpu, "get_expert_parallel_world_size", lambda args: size)
    with pytest.raises(ValueError, match=message):
        mpu.features_per_rank(_args())


def test_marks_of_expert_parameters():
    a, b, c = (torch.nn.Parameter(torch.zeros(2)) for _ in range(3))
    mpu.set_expert_model_parallel_attributes(a, True)
    mpu.set_expert_model_parallel_attributes(b, False)
    assert mpu.is_moe_param(a) and mpu.is_moe_param(b) and not mpu.is_moe_param(c)
    assert [mpu.param_is_expert_model_parallel(p) for p in (a, b, c)] == [True, False, False]
    mpu.copy_expert_model_parallel_attributes(c, a)
    assert mpu.param_is_expert_model_parallel(c)
    mpu.copy_expert_model_parallel_attributes(d := torch.zeros(2), torch.zeros(2))
    assert not mpu.is_moe_param(d)
    with pytest.raises(ValueError, match="tensor: is marked already, with expert_model_parallel=True"):
        mpu.set_expert_model_parallel_attributes(a, True)


def test_dtypes():
    assert common.dtype(_args(fp16=True)) == torch.float16
    assert common.dtype(_args(bf16=True)) == torch.bfloat16 and common.dtype(_args()) is None
    x = torch.zeros(2)
    assert common.cast_if_autocast_enabled(x) is x
    with torch.autocast("cpu", torch.bfloat16):
        assert common.cast_if_autocast_enabled(x).dtype == torch.bfloat16
        assert common.cast_if_autocast_enabled(x.double()).dtype == torch.float64


def _matrix(as_stk, seed=0):
    rows, columns = torch.tensor([[0, 1, 1], [1, 0, 1]])
    values = torch.randn(3, 64, 64, generator=torch.Generator().manual_seed(seed))
    matrix = from_coordinates((128, 128), rows, columns, block_size=64).with_data(values)
    return FakeStk.of(matrix) if as_stk else matrix


@pytest.mark.parametrize("as_stk", [False, True])
def test_act_fn_keeps_the_pattern_and_the_kind(as_stk):
    x = _matrix(as_stk)
    y = activation_fn.act_fn(x, F.leaky_relu, negative_slope=0.5)
    kept = [m.column_indices if as_stk else m.blocks for m in (x, y)]
    assert type(y) is type(x) and kept[0] is kept[1]
    assert torch.equal(y.data, F.leaky_relu(x.data, 0.5))
    with torch.no_grad():
        y, backward = activation_fn.act_fn(x, torch.tanh, return_grad_fn=True)
        grad = torch.randn(3, 64, 64)
        backward(grad)
    assert torch.allclose(x.data.grad, grad * (1 - y.data**2), atol=1e-6)
    with pytest.raises(ValueError, match="x is a Tensor: must be a block-sparse Matrix"):
        activation_fn.act_fn(x.data, torch.tanh)


@pytest.mark.parametrize("as_stk", [False, True])
def test_gelu_and_its_gradient_in_place(as_stk):
    x = _matrix(as_stk)
    assert torch.equal(gelu.gelu(x).data, F.gelu(x.data, approximate="tanh"))
    grad = _matrix(as_stk, seed=1)
    leaf = x.data.detach().requires_grad_()
    F.gelu(leaf, approximate="tanh").backward(grad.data.clone())
    tensor = grad.data.clone()
    out = gelu.gelu_backward_(grad, x)
    assert torch.allclose(out.data, leaf.grad, atol=1e-6) and out.data.data_ptr() == grad.data.data_ptr()
    assert gelu.gelu_backward_(tensor, x.data) is tensor and torch.equal(tensor, out.data)
    with pytest.raises(ValueError, match="x is a Tensor: must be a block-sparse Matrix"):
        gelu.gelu(x.data)


@pytest.mark.parametrize("trans_b", [False, True])
def test_gmm(trans_b):
    a, b, counts = torch.randn(9, 4), torch.randn(3, 5, 4) if trans_b else torch.randn(3, 4, 5), torch.tensor([4, 0, 5])
    parts = [part @ (w.t() if trans_b else w) for part, w in zip(a.split(counts.tolist()), b, strict=True)]
    assert torch.allclose(grouped_gemm_util.ops.gmm(a, b, counts, trans_b=trans_b), torch.cat(parts), atol=1e-6)
    grouped_gemm_util.assert_grouped_gemm_is_available()


@pytest.mark.parametrize("into", [False, True])
@pytest.mark.parametrize("trans_a, trans_b", [(False, False), (False, True), (True, False)])
def test_raw_gmm(trans_a, trans_b, into):
    counts = [4, 0, 5]
    a = torch.randn(9, 4, requires_grad=True)
    b = torch.randn(9, 5) if trans_a else torch.randn(3, 5, 4) if trans_b else torch.randn(3, 4, 5)
    if trans_a:
        expected = torch.stack([x.t() @ y for x, y in zip(a.split(counts), b.split(counts), strict=True)])
    else:
        expected = torch.cat([x @ (w.t() if trans_b else w) for x, w in zip(a.split(counts), b, strict=True)])
    c = torch.full_like(expected, torch.nan).detach() if into else None
    out = grouped_gemm_util.backend.gmm(a, b, torch.tensor(counts), trans_a=trans_a, trans_b=trans_b, c=c)
    assert torch.allclose(out, expected, atol=1e-6) and (out is c) is into and not out.requires_grad


def test_raw_gmm_refuses_what_does_not_fit():
    a, b, counts = torch.zeros(9, 4), torch.zeros(8, 5), torch.tensor([4, 0, 5])
    with pytest.raises(ValueError, match=r"trans_a=True with trans_b=False, a \(9, 4\), b \(8, 5\): needs"):
        grouped_gemm_util.backend.gmm(a, b, counts, trans_a=True)
    with pytest.raises(ValueError, match="trans_a=True with trans_b=True"):
        grouped_gemm_util.backend.gmm(a, a, counts, trans_a=True, trans_b=True)
