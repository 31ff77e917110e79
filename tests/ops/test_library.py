"""Every custom op: torch's own check of its registrations, and a whole graph under torch.compile."""

import importlib
import pkgutil

import pytest
import torch

import megablocks.ops
from megablocks.ops.activation import activate, activation_backward_op, activation_op
from megablocks.ops.fused.down import activate_and_project, activate_and_project_op
from megablocks.ops.grouped.bias import add_expert_bias, add_expert_bias_op, expert_sum_op
from megablocks.ops.grouped.grouped_mm import grouped_mm, grouped_mm_dw_op, grouped_mm_op
from megablocks.ops.permute.binned import binned_gather, binned_scatter, bins_to_rows_op, rows_to_bins_op
from megablocks.ops.permute.combine import combine, combine_backward_op, combine_op
from megablocks.ops.permute.gather import gather, gather_op
from megablocks.ops.routing.capacity import apply_capacity
from megablocks.ops.routing.dispatch import build_dispatch, build_dispatch_op, make_routing
from megablocks.ops.routing.rounding import select_tokens_op
from megablocks.ops.scattered.dispatched import gathered_linear_op, linear_combine_op
from megablocks.ops.scattered.parallel_linear import flatten_sort_count, parallel_linear_op
from megablocks.ops.scattered.products import scattered_rows_op, scattered_weights_op
from megablocks.ops.sparse import dds, dsd, sdd, topology
from megablocks.ops.sparse.mlp import sdd_activate_op, sdd_slope_op, sparse_mlp_op
from megablocks.ops.sparse.products import sdd_op, spmm_op
from megablocks.ops.sparse.topology import topology_op
from megablocks.testing.routings import zipf

T, H, F, E, K = 6, 4, 5, 3, 2
R = T * K


def _samples():
    torch.manual_seed(0)
    routing = zipf(T, E, K)
    d = build_dispatch(routing)

    def t(*shape):
        return torch.randn(*shape, requires_grad=True)

    def const(*shape):
        return torch.randn(*shape)

    weight = routing.weight.float()
    moves = (d.pair, d.gather, d.scatter, d.token_offsets)
    offsets = d.expert_offsets
    ends, order = offsets[1:], (offsets, d.token_offsets, d.gather, d.scatter, d.pair)
    _, pairs, pair_ends = flatten_sort_count(routing.expert, E)
    s = topology(offsets, 128, max_rows=R, block_size=64, block_rows=5).pattern
    up, pattern = ((s.shape[0], H), (H, s.shape[1])), (list(s.indices), 64, 2, "gelu", "tanh")
    return {
        "build_dispatch": (build_dispatch_op, (routing.token, routing.expert, T, E)),
        "activation": (activation_op, (t(R, F), t(R, F), "swiglu", "tanh")),
        "activation_ungated": (activation_op, (t(R, F), None, "gelu", "none")),
        "activation_backward": (activation_backward_op, (const(R, F), const(R, F), const(R, F), "geglu", "tanh")),
        "activation_backward_ungated": (activation_backward_op, (const(R, F), const(R, F), None, "relu2", "tanh")),
        "gather": (gather_op, (t(T, H), *moves)),
        "combine": (combine_op, (t(R, H), weight.clone().requires_grad_(), *moves)),
        "combine_unweighted": (combine_op, (t(R, H), None, *moves)),
        "combine_backward": (
            combine_backward_op,
            (const(T, H), const(R, H), weight, *moves),
        ),
        "combine_backward_frozen": (
            combine_backward_op,
            (const(T, H), None, weight, *moves),
        ),
        "rows_to_bins": (rows_to_bins_op, (t(R, H), offsets, 3)),
        "bins_to_rows": (bins_to_rows_op, (t(E, 3, H), offsets, R)),
        "grouped_mm": (grouped_mm_op, (t(R, H), t(E, H, F), offsets)),
        "grouped_mm_transposed": (grouped_mm_op, (t(R, H), t(E, F, H).transpose(1, 2), offsets)),
        "grouped_mm_dw": (grouped_mm_dw_op, (const(R, H), const(R, F), offsets)),
        "add_expert_bias": (add_expert_bias_op, (t(R, F), t(E, F), offsets)),
        "expert_sum": (expert_sum_op, (const(R, F), offsets)),
        "select_tokens": (
            select_tokens_op,
            (torch.rand(T, E), routing.expert.view(T, K).long(), torch.tensor([4, 0, 2]), None, 8),
        ),
        "scattered_rows": (scattered_rows_op, (const(T, H), const(E, H, F), ends, R, d.gather)),
        "scattered_rows_backward": (
            scattered_rows_op,
            (const(T, F), const(E, H, F).transpose(1, 2), pair_ends, R, pairs, K, pairs, const(E, H), const(R), pairs)
            + (const(T, H), pairs, K, const(E, F), True),
        ),
        "scattered_weights": (scattered_weights_op, (const(T, H), const(R, F), ends, d.gather)),
        "scattered_weights_gated": (
            scattered_weights_op,
            (const(R, H), const(T, F), ends, None, 1, d.gather, 1, weight, d.pair, True, True),
        ),
        "parallel_linear": (
            parallel_linear_op,
            (t(T, H), t(E, H, F), pairs, pair_ends, t(E, F), t(T, K), K, False, False),
        ),
        "parallel_linear_grouped": (
            parallel_linear_op,
            (t(R, H), t(E, F, H).transpose(1, 2), pairs, pair_ends, None, None, 1, True, True),
        ),
        "gathered_linear": (gathered_linear_op, (t(T, H), t(E, H, F), t(E, F), *order)),
        "linear_combine": (
            linear_combine_op,
            (t(R, F), t(R, F), t(E, F, H), t(E, H), weight.clone().requires_grad_(), *order, "swiglu", "tanh"),
        ),
        "linear_combine_plain": (linear_combine_op, (t(R, F), None, t(E, F, H), None, None, *order, "", "tanh")),
        "sparse_topology": (topology_op, (offsets, 2, 5, 64)),
        "sparse_sdd": (sdd_op, (t(s.shape[0], H), t(H, s.shape[1]), list(s.indices), 64, 2)),
        "sparse_dsd": (spmm_op, (t(s.num_blocks, 64, 64), t(s.shape[1], H), list(s.indices), True, False, 2)),
        "sparse_dds": (spmm_op, (t(s.num_blocks, 64, 64), t(H, s.shape[0]), list(s.indices), False, True, 2)),
        "sparse_sdd_activate": (sdd_activate_op, (const(*up[0]), const(*up[1]), const(s.shape[1]), *pattern)),
        "sparse_sdd_slope": (sdd_slope_op, (const(*up[0]), const(*up[1]), const(s.num_blocks, 64, 64), *pattern)),
        "sparse_mlp": (sparse_mlp_op, (t(*up[0]), t(*up[1]), t(s.shape[1]), t(s.shape[1], H), *pattern)),
        "sparse_mlp_without_bias": (sparse_mlp_op, (t(*up[0]), t(*up[1]), None, t(s.shape[1], H), *pattern)),
        "activate_and_project": (activate_and_project_op, (t(R, F), t(R, F), t(E, F, H), offsets, "swiglu", "tanh")),
    }


@pytest.mark.parametrize("name", _samples())
def test_N9_opcheck(name):
    op, args = _samples()[name]
    torch.library.opcheck(op, args)


def test_every_op_has_a_sample():
    defined = set()
    for module in pkgutil.walk_packages(megablocks.ops.__path__, "megablocks.ops."):
        values = vars(importlib.import_module(module.name)).values()
        defined |= {value for value in values if isinstance(value, torch.library.CustomOpDef)}
    assert defined == {op for op, _ in _samples().values()}


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_N9_compile_whole_layer(fused, backend):
    """Routing to output and back in one graph, equal to eager."""
    torch.manual_seed(0)
    x = torch.randn(T, H, requires_grad=True)
    w1, v1, w2 = (torch.randn(E * F, H, requires_grad=True) for _ in range(3))
    b1 = torch.randn(E, F, requires_grad=True)
    weight = torch.rand(T, K, requires_grad=True)
    ids = torch.tensor([[0, 1], [2, 0], [1, 1], [-1, 2], [0, 2], [1, 0]])

    def layer(x, w1, v1, w2, b1, weight, ids):
        routing = apply_capacity(make_routing(ids, weight, E), 4)
        d = build_dispatch(routing)
        rows, offsets = gather(x, d), d.expert_offsets
        pre = add_expert_bias(grouped_mm(rows, w1.view(E, F, H).transpose(1, 2), offsets), b1, offsets)
        gate = grouped_mm(rows, v1.view(E, F, H).transpose(1, 2), offsets)
        if fused:
            y = activate_and_project(pre, gate, w2.view(E, F, H), offsets, "swiglu")
        else:
            y = grouped_mm(activate(pre, gate, "swiglu"), w2.view(E, F, H), offsets)
        bins = binned_gather(x, d, 2)
        return combine(y, routing.weight, d) + binned_scatter(bins, routing.weight, d)

    inputs = (x, w1, v1, w2, b1, weight)
    eager = layer(*inputs, ids)
    compiled = torch.compile(layer, fullgraph=True, backend=backend)(*inputs, ids)
    assert torch.allclose(compiled, eager, atol=1e-6)
    expected = torch.autograd.grad(eager.sin().sum(), inputs)
    got = torch.autograd.grad(compiled.sin().sum(), inputs)
    for a, b in zip(got, expected, strict=True):
        assert torch.allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_N9_compile_block_sparse_mlp(backend):
    """Pattern, products and their gradients in one graph, equal to eager."""
    torch.manual_seed(0)
    inputs = [torch.randn(*shape, requires_grad=True) for shape in ((256, H), (H, 256), (256, H))]
    offsets = torch.tensor([0, 70, 100], dtype=torch.int32)

    def mlp(x, w1, w2, offsets):
        pattern = topology(offsets, 128, max_rows=200, block_size=64, block_rows=4).pattern
        hidden = sdd(x, w1, pattern)
        y = dsd(hidden.with_data(hidden.data.relu()), w2)
        return y + dds(y.t(), hidden).t().sum(0, keepdim=True).sum() + dsd(hidden.t(), x).sum()

    eager = mlp(*inputs, offsets)
    compiled = torch.compile(mlp, fullgraph=True, backend=backend)(*inputs, offsets)
    assert torch.allclose(compiled, eager, rtol=1e-4)
    expected = torch.autograd.grad(eager.sin().sum(), inputs)
    for got, want in zip(torch.autograd.grad(compiled.sin().sum(), inputs), expected, strict=True):
        assert torch.allclose(got, want, rtol=1e-3, atol=1e-2)
