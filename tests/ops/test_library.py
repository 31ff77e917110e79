"""Every custom op: torch's own check of its registrations, and a whole graph under torch.compile."""

import contextlib
import importlib
import inspect
import pkgutil
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

import megablocks.ops
from megablocks.ops import library
from megablocks.ops.activation import activate, activation_backward_op, activation_op
from megablocks.ops.activation_table import Activation
from megablocks.ops.add_norm import AddNormOptions, add_norm_backward_op, add_norm_op
from megablocks.ops.clamp import Clamp, clamped_gate_backward_op, clamped_gate_op
from megablocks.ops.fused.down import activate_and_project, activate_and_project_op
from megablocks.ops.fused.mlp import ExpertParameters, Options, down_gradient_op, fused_mlp, fused_mlp_op, fused_up_op
from megablocks.ops.grouped.bias import add_expert_bias, add_expert_bias_op, expert_sum_op, output_bias_dot_op
from megablocks.ops.grouped.gathered_mm import (
    gathered_mm,
    gathered_mm_dw_add_op,
    gathered_mm_dw_halves_op,
    gathered_mm_dw_op,
    gathered_mm_gated,
    gathered_mm_op,
    grouped_mm_sum_op,
)
from megablocks.ops.grouped.grouped_mm import grouped_mm, grouped_mm_dw_op, grouped_mm_op
from megablocks.ops.grouped.low_rank_mm import low_rank_mm_op
from megablocks.ops.grouped.pair_mm import pair_mlp_op, pair_mm_op
from megablocks.ops.grouped.rows_linear import rows_linear_op
from megablocks.ops.library import Op, _device_of
from megablocks.ops.loss import cross_entropy_gradient_op, cross_entropy_sums_op
from megablocks.ops.permute.rows import combine, combine_backward_op, combine_op, gather, gather_op
from megablocks.ops.quant.quant import dequantize_op, quantize, quantize_op
from megablocks.ops.rope import rope_op
from megablocks.ops.routing.capacity import apply_capacity
from megablocks.ops.routing.dispatch import (
    bin_dispatch,
    build_dispatch,
    build_dispatch_op,
    count_valid,
    make_routing,
    pad_dispatch,
    pad_indices_op,
)
from megablocks.ops.routing.rounding import Rounding, rounded_router_op, rounded_router_ref
from megablocks.ops.routing.topk import (
    RouterGradients,
    RouterOptions,
    RouterSaved,
    route_topk,
    router_backward_op,
    router_op,
    router_ref,
    router_weight_backward_op,
)
from megablocks.ops.scattered.dispatched import (
    Rows,
    gathered_linear_op,
    linear_combine_op,
    scattered_mm_dw_op,
    scattered_mm_op,
)
from megablocks.ops.scattered.parallel_linear import flatten_sort_count, parallel_linear_op
from megablocks.ops.sparse import dds, dsd, sdd, sparse_mlp, topology
from megablocks.ops.sparse.matrix import topology_op
from megablocks.ops.sparse.mlp import sdd_slope_op, sparse_mlp_op
from megablocks.ops.sparse.products import sdd_op, spmm_op
from megablocks.ops.upstream.bookkeeping import replicate
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
    offsets = d.expert_offsets
    ends = offsets[1:]
    _, pairs, pair_ends = flatten_sort_count(routing.expert, E)
    grouped, scattered = Rows(pair_ends, pair=pairs), Rows(pair_ends, pairs, pairs, pairs, K, K)
    wide = torch.arange(E + 1, dtype=torch.int32) * 6
    p = pad_dispatch(d, wide, 20)
    s = topology(offsets, 128, max_rows=R, block_size=64, block_rows=5).pattern
    up, pattern, gated = ((s.shape[0], H), (H, s.shape[1])), (s.blocks, Activation("gelu")), Activation("swiglu")
    swiglu, geglu, gelu = Activation("swiglu"), Activation("geglu", "none"), Activation("gelu")
    logits, mask, d_weight = const(T, E), torch.arange(T) == 2, const(R)
    options, one = RouterOptions(K, False, True, 1, 2.0, 0.1, 0.2), torch.ones(())
    chosen = router_ref(logits, None, None, options)
    saved = RouterSaved(chosen.expert, chosen.load, chosen.stats)
    nearest = Rounding("nearest", 2, R + 3)
    rounded = rounded_router_ref(logits, None, None, None, nearest, options)
    return {
        "count_valid": (count_valid, (routing.expert, E)),
        "router": (router_op, (t(T, E), const(E), mask, RouterOptions(K, True, False, 2, 1.5, 0.1, 0.2))),
        "router_plain": (router_op, (t(T, E), None, None, options)),
        "router_grouped": (
            router_op,
            (t(T, E), const(E), mask, RouterOptions(K, norm_p=3.0, num_groups=1, group_top_k=1)),
        ),
        "router_without_losses": (router_op, (t(T, E), None, mask, RouterOptions(K, after=True, scaling=2.0))),
        "router_backward": (router_backward_op, (logits, None, saved, RouterGradients(d_weight, one), options)),
        "router_backward_rounded": (
            router_backward_op,
            (logits, None, saved._replace(expert=None, flags=rounded.flags, ends=rounded.ends))
            + (RouterGradients(const(R + 3), one), options),
        ),
        "router_weight_backward": (
            router_weight_backward_op,
            (chosen.weight, chosen.expert, d_weight, E, torch.bfloat16, options),
        ),
        "rounded_router": (
            rounded_router_op,
            (t(T, E), const(E), mask, const(E), nearest._replace(rule="stochastic_score"), options),
        ),
        "rounded_router_plain": (rounded_router_op, (t(T, E), None, None, None, nearest, options)),
        "build_dispatch": (build_dispatch_op, (routing.token, routing.expert, T, E)),
        "activation": (activation_op, (t(R, F), t(R, F), swiglu)),
        "activation_ungated": (activation_op, (t(R, F), None, Activation("gelu", "none"))),
        "activation_backward": (activation_backward_op, (const(R, F), const(R, F), const(R, F), geglu)),
        "activation_backward_ungated": (activation_backward_op, (const(R, F), const(R, F), None, Activation("relu2"))),
        "gather": (gather_op, (t(T, H), d)),
        "combine": (combine_op, (t(R, H), weight.clone().requires_grad_(), d)),
        "combine_unweighted": (combine_op, (t(R, H), None, d)),
        "combine_backward": (combine_backward_op, (const(T, H), const(R, H), weight, d)),
        "combine_backward_frozen": (combine_backward_op, (const(T, H), None, weight, d)),
        "padded_gather": (gather_op, (t(T, H), p)),
        "padded_combine": (combine_op, (t(20, H), weight.clone().requires_grad_(), p)),
        "padded_combine_backward": (combine_backward_op, (const(T, H), const(20, H), weight, p)),
        "pad_indices": (pad_indices_op, (d, wide[1:], 0, 20)),
        "pad_indices_bins": (pad_indices_op, (d, None, 3, 3 * E)),
        "grouped_mm": (grouped_mm_op, (t(R, H), t(E, H, F), offsets)),
        "grouped_mm_biased": (grouped_mm_op, (t(R, H), t(E, H, F), offsets, t(E, F))),
        "grouped_mm_transposed": (grouped_mm_op, (t(R, H), t(E, F, H).transpose(1, 2), offsets)),
        "rows_linear": (rows_linear_op, (t(R, H), t(F, H))),
        "grouped_mm_dw": (grouped_mm_dw_op, (const(R, H), const(R, F), offsets)),
        "grouped_mm_sum": (
            grouped_mm_sum_op,
            (const(R, H), const(E, H, F), const(R, H), const(E, H, F), offsets),
        ),
        "gathered_mm": (gathered_mm_op, (t(T, H), t(E, F, H).transpose(1, 2), None, None, None, d)),
        "gathered_mm_gated": (gathered_mm_op, (t(T, H), t(E, H, F), t(E, H, F), None, None, d)),
        "gathered_mm_biased": (gathered_mm_op, (t(T, H), t(E, H, F), t(E, H, F), t(E, F), t(E, F), d)),
        "low_rank_mm": (low_rank_mm_op, (t(T, H), t(E, H, F), t(E, H, 2), t(E, 2, F), d, True)),
        "gathered_mm_dw": (gathered_mm_dw_op, (const(R, F), const(T, H), d)),
        "gathered_mm_dw_halves": (gathered_mm_dw_halves_op, (const(R, F), const(R, F), const(T, H), d)),
        "gathered_mm_dw_add": (gathered_mm_dw_add_op, (const(E, F, H), const(R, F), const(T, H), d)),
        "add_expert_bias": (add_expert_bias_op, (t(R, F), t(E, F), offsets)),
        "expert_sum": (expert_sum_op, (const(R, F), offsets)),
        "output_bias_sum": (expert_sum_op, (const(T, H), d.expert_offsets, weight, d.gather, d.pair)),
        "output_bias_dot": (output_bias_dot_op, (const(T, H), const(E, H), d)),
        "scattered_mm": (
            scattered_mm_op,
            (const(T, H), const(E, H, F), None, None, None, None, Rows(ends, d.gather), False),
        ),
        "scattered_mm_backward": (
            scattered_mm_op,
            (const(T, F), const(E, H, F).transpose(1, 2), const(E, H), const(R), const(T, H), const(E, F))
            + (scattered, True),
        ),
        "scattered_mm_dw": (
            scattered_mm_dw_op,
            (const(T, H), const(R, F), None, Rows(ends, d.gather), False, False),
        ),
        "scattered_mm_dw_weighted": (
            scattered_mm_dw_op,
            (const(R, H), const(T, F), weight, Rows(ends, None, d.gather, d.pair), True, True),
        ),
        "parallel_linear": (parallel_linear_op, (t(T, H), t(E, H, F), t(E, F), t(R), scattered)),
        "parallel_linear_grouped": (
            parallel_linear_op,
            (t(R, H), t(E, F, H).transpose(1, 2), None, None, grouped),
        ),
        "gathered_linear": (gathered_linear_op, (t(T, H), t(E, H, F), t(E, F), d)),
        "linear_combine": (
            linear_combine_op,
            (t(R, F), t(R, F), t(E, F, H), t(E, H), weight.clone().requires_grad_(), d, Activation("swiglu")),
        ),
        "linear_combine_plain": (
            linear_combine_op,
            (t(R, F), None, t(E, F, H), None, None, d, Activation("")),
        ),
        "sparse_topology": (topology_op, (offsets, 2, 5, 64)),
        "sparse_sdd": (sdd_op, (t(s.shape[0], H), t(H, s.shape[1]), s.blocks)),
        "sparse_dsd": (spmm_op, (t(s.num_blocks, 64, 64), t(s.shape[1], H), s.blocks, True, False)),
        "sparse_dds": (spmm_op, (t(s.num_blocks, 64, 64), t(H, s.shape[0]), s.blocks, False, True)),
        "sparse_sdd_slope": (sdd_slope_op, (const(*up[0]), const(*up[1]), const(s.num_blocks, 64, 64), *pattern)),
        "sparse_mlp": (
            sparse_mlp_op,
            (t(*up[0]), t(*up[1]), None, t(s.shape[1], H), t(s.shape[1]), None, *pattern, False, -1, -1),
        ),
        "sparse_mlp_recompute": (
            sparse_mlp_op,
            (t(*up[0]), t(s.shape[1], H).t(), None, t(s.shape[1], H), None, None, *pattern, True, 8, 4),
        ),
        "sparse_mlp_gated": (
            sparse_mlp_op,
            (t(*up[0]), t(*up[1]), t(*up[1]), t(s.shape[1], H), t(s.shape[1]), t(s.shape[1]))
            + (s.blocks, gated, False, -1, -1),
        ),
        "sparse_mlp_gated_quantized": (
            sparse_mlp_op,
            (t(*up[0]), t(*up[1]), t(*up[1]), t(s.shape[1], H), None, None, s.blocks, gated, True, 4, 8),
        ),
        "fused_mlp": (
            fused_mlp_op,
            (t(T, H), weight.clone().requires_grad_())
            + (ExpertParameters(*(t(E, F, H) for _ in range(3)), t(E, F), t(E, F), t(E, H)), d, swiglu)
            + (Options(pre_bits=8),),
        ),
        "fused_mlp_plain": (
            fused_mlp_op,
            (t(T, H), weight.clone().requires_grad_(), ExpertParameters(t(E, F, H), None, t(E, F, H)), d, gelu)
            + (Options(recompute=True),),
        ),
        "fused_up": (
            fused_up_op,
            (const(T, H), const(E, F, H), const(E, F, H), None, const(E, F), d, geglu),
        ),
        "down_gradient": (
            down_gradient_op,
            (const(T, H), const(E, F, H), const(R, F), const(R, F), weight, d, swiglu),
        ),
        "cross_entropy_sums": (cross_entropy_sums_op, (const(T, H), torch.arange(T))),
        "cross_entropy_gradient_": (
            cross_entropy_gradient_op,
            (const(T, H), torch.arange(T), const(T), torch.rand(T) + 1, const(T)),
        ),
        "norm": (add_norm_op, (t(T, H), None, None, None, t(H), t(H), AddNormOptions(0, 1e-5, 0.0))),
        "norm_backward": (
            add_norm_backward_op,
            (
                *(None, const(T, H), const(T, H), None, const(H), const(T), torch.rand(T) + 1, False),
                AddNormOptions(0, 1e-5, 0.0),
            ),
        ),
        "add_norm": (
            add_norm_op,
            (t(T, H), t(H), t(T, H), torch.tensor(3), t(H), t(H), AddNormOptions(6554, 1e-5, 0.0)),
        ),
        "add_norm_backward": (
            add_norm_backward_op,
            (
                *(const(T, H), const(T, H), const(T, H), torch.full((T, (H + 7) // 8), 5, dtype=torch.uint8)),
                *(const(H), const(T), torch.rand(T) + 1, True, AddNormOptions(6554, 1e-5, 0.0)),
            ),
        ),
        "add_rms_norm": (add_norm_op, (t(T, H), None, t(T, H), None, t(H), None, AddNormOptions(0, 1e-5, 0.0))),
        "add_rms_norm_backward": (
            add_norm_backward_op,
            (
                *(const(T, H), const(T, H), const(T, H), None, const(H), None, torch.rand(T) + 1, False),
                AddNormOptions(0, 1e-5, 0.0),
            ),
        ),
        "rms_norm_backward": (
            add_norm_backward_op,
            (
                *(None, const(T, H), const(T, H), None, const(H), None, torch.rand(T) + 1, False),
                AddNormOptions(0, 1e-5, 0.0),
            ),
        ),
        "rope": (rope_op, (t(T, 2, 3, H), const(T, 2), False, 1.5, False)),
        "pair_mm": (
            pair_mm_op,
            (const(T, H), const(E, H, F), torch.arange(2 * T) % (E + 1), const(E, F), const(2 * T)),
        ),
        "pair_mlp": (
            pair_mlp_op,
            (
                *(const(T, H), (torch.arange(2 * T) % (E + 1)).view(T, 2), const(T, 2)),
                *(const(E, H, 2 * F), const(E, F, H), const(E, 2 * F), const(E, H), swiglu),
            ),
        ),
        "halves_activation": (activation_op, (t(R, 2 * F), None, swiglu)),
        "halves_activation_backward": (activation_backward_op, (const(R, F), const(R, 2 * F), None, swiglu)),
        "clamped_gate": (clamped_gate_op, (t(R, 2 * F), Clamp(0.5, 1.702, 1.0, True))),
        "clamped_gate_backward": (clamped_gate_backward_op, (const(R, F), const(R, 2 * F), Clamp(0.5))),
        "quantize": (quantize_op, (const(R, 20), 8)),
        "dequantize": (dequantize_op, (*quantize(const(R, 21), 4), 4, 21, torch.float32)),
        "combine_quantized": (combine_op, (t(R, H), weight.clone().requires_grad_(), d, 4)),
        "gathered_mm_quantized": (gathered_mm_op, (t(T, H), t(E, H, F), t(E, H, F), None, None, d, 8)),
        "activate_and_project_quantized": (
            activate_and_project_op,
            (t(R, F), t(R, F), t(E, F, H), None, offsets, swiglu, 8),
        ),
        "activate_and_project": (activate_and_project_op, (t(R, F), t(R, F), t(E, F, H), None, offsets, swiglu)),
        "activate_and_project_biased": (
            activate_and_project_op,
            (t(R, F), t(R, F), t(E, F, H), t(E, H), offsets, swiglu),
        ),
    }


def _kernel(op):
    """"module:launcher" of an op, None if it names none."""
    return inspect.getclosurevars(op.implementation).nonlocals.get("kernel")


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # where kernels run, interpreted without a GPU
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", _samples())
def test_N9_opcheck(name, device):
    op, args = _samples()[name]
    # a GPU leaves what is unspecified (room of a pattern, gaps between its indices) as it was, so values may differ
    tests = (
        UNSPECIFIED if device == "cuda" and name.startswith("sparse") else (*UNSPECIFIED, "test_aot_dispatch_dynamic")
    )
    args = tree_map_only(torch.Tensor, lambda t: moved(t, device), args)
    torch.library.opcheck(op.definition, op.flat(*args), test_utils=tests)


CONTIGUOUS = (
    *("add_norm", "add_norm_backward", "clamped_gate", "clamped_gate_backward", "norm", "norm_backward"),
    "router_backward",
)


@pytest.mark.parametrize("name", CONTIGUOUS)
def test_N9_results_lie_as_promised_where_inputs_are_stored_by_column(name):
    op, args = _samples()[name]
    args = tree_map_only(torch.Tensor, lambda t: t.detach().mT.contiguous().mT if t.dim() == 2 else t.detach(), args)
    torch.library.opcheck(op.definition, op.flat(*args), test_utils="test_faketensor")


UNSPECIFIED = ("test_schema", "test_autograd_registration", "test_faketensor")


def moved(t, device):
    """A leaf on the device, with the strides of t."""
    out = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device)
    return out.copy_(t.detach()).requires_grad_(t.requires_grad)


@pytest.mark.parametrize("name", _samples())
def test_N9_eager_calls_equal_the_custom_op(name):
    """Called past the dispatcher and through it: the same values, and the same gradients or none."""
    op, args = _samples()[name]
    inputs = [a for a in op.flat(*args) if isinstance(a, torch.Tensor) and a.requires_grad]
    for kept in (inputs, inputs[-1:]):  # the last one's gradient alone, too
        leaves = {id(t): t.detach().requires_grad_(any(t is k for k in kept)) for t in inputs}
        given = tree_map_only(torch.Tensor, lambda a: leaves.get(id(a), a), list(args))  # noqa: B023
        _compare_eager_with_custom(op, given, [leaves[id(t)] for t in kept])


def _compare_eager_with_custom(op, args, inputs):
    results, before = [], args[0].clone() if isinstance(args[0], torch.Tensor) else None
    for call in (op, lambda *args: op.definition(*op.flat(*args))):
        out = call(*args)
        if out is None:  # it writes to its first argument
            out, args = args[0].clone(), [args[0].copy_(before), *args[1:]]
        outs = [out] if isinstance(out, torch.Tensor) else list(out)
        total = sum(o.sin().sum() for o in outs if o.requires_grad)
        assert isinstance(total, torch.Tensor) == bool(inputs)
        grads = torch.autograd.grad(total, inputs) if inputs else []
        results.append([*(o.detach() for o in outs), *grads])
    for eager, custom in zip(*results, strict=True):
        assert torch.equal(eager.nan_to_num(), custom.nan_to_num())


WITH_KERNELS = [name for name, (op, _) in _samples().items() if _kernel(op) and name != "router_grouped"]  # too general
assert WITH_KERNELS, "no op names a kernel, or `_kernel` does not find it"


@pytest.mark.parametrize("name", WITH_KERNELS)
def test_the_kernel_that_an_op_names_gives_what_its_reference_gives(name):
    op, args = _samples()[name]
    args = tree_map_only(torch.Tensor, lambda t: moved(t, DEVICE).detach(), args)
    inputs, results = tree_map_only(torch.Tensor, torch.clone, args), []
    for compute, given in ((library._load(_kernel(op)), args), (inspect.unwrap(op.implementation), inputs)):
        out = compute(*given)
        out = given[0] if out is None else out
        results.append([out] if isinstance(out, torch.Tensor) else out)
    for kernel, reference in zip(*results, strict=True):
        torch.testing.assert_close(kernel, reference, rtol=1e-2, atol=1e-3, equal_nan=True)


def test_N5_a_second_derivative_is_refused_where_it_would_be_lost():
    """A kernel's gradient knows nothing of its inputs: added to a loss it would count as a constant."""
    pre = torch.randn(4, 3, requires_grad=True)
    (slope,) = torch.autograd.grad(activate(pre, None, Activation("gelu")).sum(), pre, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula was registered"):
        slope.square().sum().backward()


NO_SECOND = "no second derivative is known|no autograd formula was registered"


class PlainMode(TorchDispatchMode):
    """Changes nothing; under a mode an op is called as a custom op."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("custom", [False, True], ids=["eager", "custom op"])
@pytest.mark.parametrize("kept", ["fused", "sparse", "quantized"])
def test_N5_a_second_derivative_through_what_is_no_node_is_refused(kept, custom):
    """With frozen weights and a sum's gradient of ones nothing in backward has a graph, and x comes from elsewhere."""
    scale = torch.ones((), requires_grad=True)
    routing = make_routing(torch.randint(E, (T, K)), torch.rand(T, K), E)
    d = build_dispatch(routing)
    with PlainMode() if custom else contextlib.nullcontext():
        if kept == "fused":
            x, w = torch.randn(T, H) * scale, torch.randn(E, F, H)
            y = fused_mlp(x, routing.weight, d, ExpertParameters(w, None, w), Activation("gelu"))
        elif kept == "sparse":
            pattern = topology(d.expert_offsets, 64, max_rows=R, block_size=64)[0]
            x, w = torch.randn(pattern.shape[0], 8) * scale, torch.randn(pattern.shape[1], 8)
            y = sparse_mlp(x, w.t(), w, pattern, activation=Activation("gelu"))
        else:
            x, w = torch.randn(R, F) * scale, torch.randn(E, F, H)
            y = activate_and_project(x, None, w, d.expert_offsets, Activation("gelu"), num_bits=8)
        (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match=NO_SECOND):
            (y.sum() + first.square().sum()).backward(retain_graph=True)
        assert not torch.autograd.grad(y.sum(), x)[0].requires_grad


@pytest.mark.parametrize("custom", [False, True], ids=["eager", "custom op"])
@pytest.mark.parametrize("gated", [False, True])
def test_N5_a_weights_gradient_of_quantized_rows_is_not_taken_for_a_constant(gated, custom):
    """It is a function of x, of which codes were kept; the incoming gradient, of ones, has no graph either."""
    scale = torch.ones((), requires_grad=True)
    d = build_dispatch(make_routing(torch.randint(E, (T, K)), torch.rand(T, K), E))
    x, w = torch.randn(T, H) * scale, torch.randn(E, H, F, requires_grad=True)
    with PlainMode() if custom else contextlib.nullcontext():
        if gated:
            z, u = gathered_mm_gated(x, w, w.detach().clone().requires_grad_(), d, num_bits=8)
            y = z + u
        else:
            y = gathered_mm(x, w, d, num_bits=8)
        (first,) = torch.autograd.grad(y.sum(), w, create_graph=True)
        with pytest.raises(RuntimeError, match=NO_SECOND):
            (y.sum() + first.square().sum()).backward(retain_graph=True)
        assert not torch.autograd.grad(y.sum(), w)[0].requires_grad


def test_N5_autograd_refuses_a_saved_tensor_that_an_eager_call_has_written_to():
    definition, total = gathered_mm_dw_add_op.definition, torch.zeros(3)
    op = Op(definition, lambda total: total.numpy().fill(1))  # as a kernel writes: past torch
    scale = torch.ones((), requires_grad=True)
    loss = (scale * total).sum()
    op(total)
    assert total.eq(1).all()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("trained", [False, True])
def test_N5_forward_mode_is_refused_where_tangents_would_be_lost(trained, device):
    """torch's own custom op drops them where no input wants a gradient."""
    x = torch.randn(4, 3, device=device, requires_grad=trained)
    want = "megablocks::activation: an input has a tangent"
    with forward_ad.dual_level():
        with pytest.raises(RuntimeError, match=want):
            activate(forward_ad.make_dual(x, torch.ones_like(x)), None, Activation("gelu"))
        assert torch.equal(
            activate(x, None, Activation("gelu")), activate(x.detach(), None, Activation("gelu"))
        )  # no tangent, no complaint
    with pytest.raises(RuntimeError, match=want):
        torch.func.jvp(lambda t: activate(t, None, Activation("gelu")), (x,), (torch.ones_like(x),))


def test_who_looks_at_the_dispatcher_sees_an_op():
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func.name())
            return func(*args, **(kwargs or {}))

    op, args = _samples()["activation"]
    with Watch():
        op(*args)
    assert "megablocks::activation" in seen
    with FakeTensorMode() as mode:
        fake = op(*(mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in args))
    assert isinstance(fake, FakeTensor)


@pytest.mark.filterwarnings("ignore")  # torch.jit.trace is deprecated
def test_a_traced_call_computes_other_offsets():
    x, w = torch.randn(6, 3), torch.randn(2, 3, 4)
    first, other = (torch.tensor([0, end, 6], dtype=torch.int32) for end in (1, 4))
    traced = torch.jit.trace(grouped_mm, (x, w, first))
    torch.testing.assert_close(traced(x, w, other), grouped_mm(x, w, other))


def test_each_option_of_a_router_is_an_argument_of_its_ops():
    """By position and by name, though the implementations take them as one."""
    named = "SymInt top_k, bool sigmoid, bool after, float norm_p, float scaling, float balance_weight, float z_weight"
    named += ", SymInt num_groups, SymInt group_top_k"
    for op in (router_op, router_backward_op, router_weight_backward_op, rounded_router_op):
        assert f", {named}) -> " in str(op.definition._opoverload._schema)
    logits, options = torch.randn(T, E), RouterOptions(K, True, False, 1, 2.0, 0.1, 0.2)
    by_name = torch.ops.megablocks.router(logits=logits, bias=None, padding_mask=None, **options._asdict())
    for results in (by_name, router_op(logits, None, None, options)):
        for got, expected in zip(results, router_ref(logits, None, None, options), strict=True):
            assert torch.equal(got, expected)


def test_every_op_has_a_sample():
    defined = set()
    for module in pkgutil.walk_packages(megablocks.ops.__path__, "megablocks.ops."):
        values = vars(importlib.import_module(module.name)).values()
        defined |= {value for value in values if isinstance(value, Op)}
    assert defined == {op for op, _ in _samples().values()}


def test_every_op_runs_on_the_device_of_its_tensors():
    """Registered by megablocks.ops.library and not by torch's function itself, whose ops take the current device."""
    files = Path(megablocks.ops.__path__[0]).rglob("*.py")
    assert [f.name for f in files if "torch.library.custom_op(" in f.read_text()] == ["library.py"]


@pytest.mark.parametrize("current", [0, 1])
def test_N11_an_op_runs_with_the_device_of_its_tensors_current(current, monkeypatch):
    """tests/gpu has the ops on two real GPUs."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    with FakeTensorMode(allow_non_fake_inputs=True):
        on_first = torch.empty(2, device="cuda:0")
    chosen = _device_of((1, on_first, torch.empty(2)))
    if current == 0:
        assert isinstance(chosen, contextlib.nullcontext)
    else:
        assert isinstance(chosen, torch.cuda.device) and chosen.idx == 0
    for args in ((torch.empty(2), on_first), (1, "a")):
        assert isinstance(_device_of(args), contextlib.nullcontext)


@pytest.mark.parametrize("current", [0, 1])
def test_N11_an_eager_call_makes_the_device_of_its_tensors_current(current, monkeypatch):
    entered = []

    @contextlib.contextmanager
    def enter(device):
        entered.append(device)
        yield

    monkeypatch.setattr(library, "_PLAIN", (FakeTensor,))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.setattr(torch.cuda, "device", enter)
    with FakeTensorMode(allow_non_fake_inputs=True):
        on_first = torch.empty(2, device="cuda:0")
    op = Op(activation_op.definition, lambda n, t: list(entered))
    assert op(1, on_first) == [torch.device("cuda:0")] * current


@pytest.fixture(params=DEVICES)
def device(request):
    with torch.device(request.param):
        yield request.param


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_N9_compile_whole_layer(fused, backend, device):
    """Routing to output and back in one graph, equal to eager."""
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
            y = activate_and_project(pre, gate, w2.view(E, F, H), offsets, Activation("swiglu"))
        else:
            y = grouped_mm(activate(pre, gate, Activation("swiglu")), w2.view(E, F, H), offsets)
        z = combine(y, routing.weight, d)
        offsets = torch.arange(E + 1, dtype=torch.int32, device=x.device) * 8
        for p in (pad_dispatch(d, offsets, 8 * E), bin_dispatch(d, 2)):
            z = z + combine(gather(x, p).sin(), routing.weight, p)
        return z

    inputs = (x, w1, v1, w2, b1, weight)
    eager = layer(*inputs, ids)
    compiled = torch.compile(layer, fullgraph=True, backend=backend)(*inputs, ids)
    assert torch.allclose(compiled, eager, atol=1e-6)
    expected = torch.autograd.grad(eager.sin().sum(), inputs)
    got = torch.autograd.grad(compiled.sin().sum(), inputs)
    for a, b in zip(got, expected, strict=True):
        assert torch.allclose(a, b, atol=1e-5)


def test_N9_compile_router_and_replicate():
    inputs = torch.randn(T, E, requires_grad=True), torch.randn(2, E, requires_grad=True)

    def step(logits, x):
        out = route_topk(logits, RouterOptions(K, norm_p=1.0, balance_weight=0.1, z_weight=0.2))
        routing = make_routing(out.expert.view(T, K), out.weight.view(T, K), E)
        ends = routing.metrics["tokens_per_expert"].cumsum(0).int()
        return routing.weight.sin().sum() + out.balance + out.z + replicate(x, ends, R).sin().sum()

    expected, got = (
        torch.autograd.grad(f(*inputs), inputs)
        for f in (step, torch.compile(step, fullgraph=True, backend="aot_eager"))
    )
    for a, b in zip(got, expected, strict=True):
        assert torch.allclose(a, b, atol=1e-6) and b.abs().sum() > 0


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_N9_compile_block_sparse_mlp(backend, device):
    """Pattern, products and their gradients in one graph, equal to eager."""
    # sums of 256 products stay near 1, where sin() has a slope; a compiler may add them in another order
    inputs = [(torch.randn(*shape) / 8).requires_grad_() for shape in ((256, H), (H, 256), (256, H))]
    offsets = torch.tensor([0, 70, 100], dtype=torch.int32)

    def mlp(x, w1, w2, offsets):
        pattern = topology(offsets, 128, max_rows=200, block_size=64, block_rows=4).pattern
        hidden = sdd(x, w1, pattern)
        y = dsd(hidden.with_data(hidden.data.relu()), w2)
        return y + dds(y.t(), hidden).sum() / 256 + dsd(hidden.t(), x).sum() / 256

    def check(got, want):
        assert want.norm() > 1e-3 and (got - want).norm() < 1e-5 * want.norm()

    eager = mlp(*inputs, offsets)
    compiled = torch.compile(mlp, fullgraph=True, backend=backend)(*inputs, offsets)
    check(compiled, eager)
    expected = torch.autograd.grad(eager.sin().sum(), inputs)
    for got, want in zip(torch.autograd.grad(compiled.sin().sum(), inputs), expected, strict=True):
        check(got, want)


def test_N9_the_router_of_one_token_returns_what_its_fake_says():
    """Inductor checks strides; the K pairs of one token must not be K times the same place of memory."""
    options = RouterOptions(K, num_groups=1, group_top_k=1)
    args = (torch.randn(1, E, requires_grad=True), None, None, options)
    torch.library.opcheck(router_op.definition, router_op.flat(*args), test_utils="test_faketensor")
    for token in (router_op(*args).token, make_routing(torch.zeros(1, K).int(), torch.ones(1, K), E).token):
        assert token.tolist() == [0] * K and token.stride() == (1,)
