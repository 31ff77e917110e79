"""What programs for megablocks 0.10 override and call beside forward: the steps of a layer, helpers, the drawing."""

import dataclasses
import importlib.machinery
import sys
import types

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from megablocks.layers import dMoE, mlp, mpu, router
from megablocks.layers.dmoe import ParallelDroplessMLP
from megablocks.layers.glu import GroupedGLU, SharedGLU, SparseGLU
from megablocks.layers.mlp import MLP, GroupedMLP, SparseMLP
from megablocks.layers.moe import MoE, ParallelMLP
from megablocks.layers.router import LearnedRouter
from megablocks.ops.sparse import Matrix, topology
from megablocks.testing.launcher import run_distributed_test
from megablocks.testing.oracle import relative_error
from upstream.fake_stk import FakeStk
from upstream.harness import F_, E, H, K, args_of, hidden_of

KINDS = [ParallelMLP, ParallelDroplessMLP]


def _inputs(tokens=10, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x, weights = torch.randn(tokens, 1, H, generator=generator), torch.rand(tokens, K, generator=generator)
    return x, torch.rand(tokens, E), weights, torch.randint(0, E, (tokens, K), generator=generator)


def _pairs(experts, x, weights, ids, places=None):
    """Σ over a token's pairs, those beyond `places` of an expert left out."""
    w1, w2 = experts.mlp.w1, experts.mlp.w2
    w1, w2 = (w1.transpose(1, 2), w2) if w1.dim() == 3 else (w1.view(E, F_, H), w2.view(E, F_, H))
    y, taken = torch.zeros(x.shape[0], H), [0] * E
    for t in range(x.shape[0]):
        for k in range(K):
            e = int(ids[t, k])
            taken[e] += 1
            if places is None or taken[e] <= places:
                y[t] += weights[t, k] * (hidden_of(x[t], w1[e], None) @ w2[e])
    return y


@pytest.mark.parametrize("kind", KINDS)
def test_indices_and_bins(kind):
    _, _, _, ids = _inputs()
    experts = kind(args_of(moe_capacity_factor=0))
    indices, bin_ids, bins, tokens_per_expert = experts.indices_and_bins(ids.flatten())
    order = ids.flatten().sort(stable=True)
    assert torch.equal(indices, order.indices.int()) and torch.equal(bin_ids, order.values.int())
    assert torch.equal(tokens_per_expert, ids.flatten().bincount(minlength=E).int())
    assert torch.equal(bins, tokens_per_expert.cumsum(0).int())
    for narrow in (torch.int16, torch.uint8):
        found = experts.indices_and_bins(ids.flatten().to(narrow))
        assert all(map(torch.equal, found, (indices, bin_ids, bins, tokens_per_expert)))
    nobody = torch.tensor([0, -1, 2, 7, 0, E])
    found = [t.tolist() for t in experts.indices_and_bins(nobody)]
    assert found == [[0, 4, 2, 1, 3, 5], [0, 0, 2, E, E, E], [2, 2, 3], [2, 0, 1]]


@pytest.mark.parametrize(
    "kind, impl", [(ParallelMLP, "grouped"), (ParallelDroplessMLP, "grouped"), (ParallelDroplessMLP, "sparse")]
)
def test_permute_and_compute(kind, impl):
    """A capacity layer takes the first pairs in the order of the indices; a dropless one takes all."""
    experts = kind(args_of(mlp_impl=impl, moe_capacity_factor=0))
    x, _, weights, ids = _inputs()
    indices, bin_ids, bins, counts = experts.indices_and_bins(ids.flatten())
    y = experts.permute_and_compute(x, counts, indices, bin_ids, weights.flatten(), bins, 3, K)
    places = 3 if kind is ParallelMLP else None
    assert torch.allclose(y, _pairs(experts, x.view(-1, H), weights, ids, places), atol=1e-5)
    y, found = experts.forward_once(x, weights, ids)
    assert torch.allclose(y, _pairs(experts, x.view(-1, H), weights, ids), atol=1e-5) and torch.equal(found, counts)


def test_a_capacity_layer_keeps_the_first_pairs_in_the_order_of_its_indices():
    class LastFirst(ParallelMLP):
        def indices_and_bins(self, top_expert):
            indices, bin_ids, bins, counts = super().indices_and_bins(top_expert)
            parts = indices.split(counts.tolist())
            return torch.cat([part.flip(0) for part in parts]), bin_ids, bins, counts

    experts = LastFirst(args_of(moe_capacity_factor=0.5, return_bias=False))
    x, scores, weights, ids = _inputs()
    places = experts.expert_capacity(10)
    expected = _pairs(experts, x.view(-1, H).flip(0), weights.flip(0).flip(1), ids.flip(0).flip(1), places).flip(0)
    assert torch.allclose(experts(x, scores, weights, ids).view(-1, H), expected, atol=1e-5)


STEPS = "indices_and_bins permute_and_compute forward_once".split()
GROUPED = ["grouped_forward_once", "grouped_permute_and_compute"]
SPARSE = ["sparse_forward_once", "sparse_permute_and_compute"]


@pytest.mark.parametrize(
    "layer, kind, impl, steps",
    [
        (MoE, ParallelMLP, "grouped", STEPS),
        (dMoE, ParallelDroplessMLP, "grouped", [*STEPS, *GROUPED]),
        (dMoE, ParallelDroplessMLP, "sparse", [*STEPS, *SPARSE]),
    ],
)
def test_overridden_steps_are_called(layer, kind, impl, steps):
    called = []

    def overriding(name):
        def method(self, *inputs, **named):
            called.append(name)
            return getattr(kind, name)(self, *inputs, **named)

        return method

    every = {name: overriding(name) for name in {*STEPS, *(GROUPED + SPARSE if layer is dMoE else [])}}
    mine = type("Mine", (kind,), every)
    args = args_of(mlp_impl=impl)
    made = type("Layer", (layer,), {"_init_experts_mlp": lambda self, args: mine(args)})(args)
    plain = layer(args)
    plain.load_state_dict(made.state_dict())
    x = torch.randn(4, 2, H)
    assert torch.allclose(made(x)[0], plain(x)[0], atol=1e-6)
    assert sorted(called) == sorted(steps)


@pytest.mark.parametrize("mlp_type, kind", [("mlp", GroupedMLP), ("glu", GroupedGLU)])
def test_experts_with_a_forward_of_their_own_are_called_as_in_0_10(mlp_type, kind):
    """With the rows of all pairs, sorted by expert, and how many each expert has; they return as many rows."""

    class Own(kind):
        def forward(self, x, tokens_per_expert):
            seen.append((x.shape[0], tokens_per_expert.tolist()))
            return super().forward(x, tokens_per_expert)

    seen, args, (x, scores, weights, ids) = [], args_of(bias=False, mlp_type=mlp_type), _inputs()
    theirs, plain = ParallelDroplessMLP(args), ParallelDroplessMLP(args)
    theirs.mlp = Own(args)
    theirs.load_state_dict(plain.state_dict())
    x.requires_grad_(), weights.requires_grad_()
    found = torch.autograd.grad(theirs(x, scores, weights, ids).sum(), [x, weights, *theirs.parameters()])
    wanted = torch.autograd.grad(plain(x, scores, weights, ids).sum(), [x, weights, *plain.parameters()])
    assert seen == [(ids.numel(), torch.bincount(ids.flatten(), minlength=E).tolist())]
    assert all(relative_error(a, b) < 1e-5 for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("with_stk", [False, True])
@pytest.mark.parametrize("mlp_type, kind, block", [("mlp", SparseMLP, 128), ("glu", SparseGLU, 64)])
def test_sparse_experts_with_a_forward_of_their_own_are_called_as_in_0_10(mlp_type, kind, block, with_stk, monkeypatch):
    """With padded rows and the pattern of their blocks, stanford-stk's where it is installed."""

    class Own(kind):
        def forward(self, x, topo):
            seen.append((x.shape, type(topo)))
            return super().forward(x, topo)

    if with_stk:
        stk = types.ModuleType("stk")
        stk.Matrix, stk.__spec__ = FakeStk, importlib.machinery.ModuleSpec("stk", None)
        monkeypatch.setitem(sys.modules, "stk", stk)
    seen, (x, scores, weights, ids) = [], _inputs()
    args = args_of(bias=False, mlp_type=mlp_type, mlp_impl="sparse", ffn_hidden_size=block)
    theirs, plain = ParallelDroplessMLP(args), ParallelDroplessMLP(args)
    theirs.mlp = Own(args)
    theirs.load_state_dict(plain.state_dict())
    x.requires_grad_(), weights.requires_grad_()
    found = torch.autograd.grad(theirs(x, scores, weights, ids).sum(), [x, weights, *theirs.parameters()])
    wanted = torch.autograd.grad(plain(x, scores, weights, ids).sum(), [x, weights, *plain.parameters()])
    assert seen == [((E * block, H), FakeStk if with_stk else Matrix)]
    assert all(relative_error(a, b) < 1e-5 for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("layer, kind", [(MoE, ParallelMLP), (dMoE, ParallelDroplessMLP)])
def test_autocast_casts_x_before_the_steps_of_a_layer(layer, kind):
    """As in 0.10, so that rows are moved in half the bytes, and overridden steps see autocast's dtype."""
    seen = []

    class Own(kind):
        def forward(self, x, *rest):
            seen.append(x.dtype)
            return super().forward(x, *rest)

    class Layer(layer):
        def _init_experts_mlp(self, args):
            return Own(args)

    with torch.autocast("cpu", torch.bfloat16):
        Layer(args_of())(torch.randn(5, 1, H))
    assert seen == [torch.bfloat16]


def _doubled_across_ranks(layer, kind, experts):
    class Doubled(kind):
        def permute_and_compute(self, *inputs, **named):
            return 2 * super().permute_and_compute(*inputs, **named)

    args = args_of(moe_num_experts=experts, moe_capacity_factor=4, return_bias=False)
    torch.manual_seed(0)
    whole = layer(args)
    spread = dataclasses.replace(args, moe_expert_model_parallelism=True, expert_parallel_group=dist.group.WORLD)
    torch.manual_seed(0)
    made = type("Layer", (layer,), {"_init_experts_mlp": lambda self, args: Doubled(args)})(spread)
    x = torch.randn(6, H, generator=torch.Generator().manual_seed(dist.get_rank()))
    return relative_error(made(x), 2 * whole(x)), made.experts.forward_fn.__name__, whole.experts.forward_fn.__name__


@pytest.mark.parametrize("ranks, experts", [(2, 4), (4, 2)])
@pytest.mark.parametrize("layer, kind", [(MoE, ParallelMLP), (dMoE, ParallelDroplessMLP)])
def test_overridden_steps_are_called_over_ranks(layer, kind, ranks, experts):
    """Drawn alike on every rank, the layer also computes what one process computes."""
    for error, over_ranks, on_one in run_distributed_test(_doubled_across_ranks, ranks, layer, kind, experts):
        assert error < 1e-5 and over_ranks == "parallel_forward_once" and on_one == "forward_once"


def test_jitter_is_a_method_that_training_calls():
    class Doubling(LearnedRouter):
        def jitter(self, x):
            return torch.full_like(x, 2.0)

    torch.manual_seed(0)
    router, x = LearnedRouter(args_of(moe_jitter_eps=0.25)), torch.randn(50, H)
    factors = router.jitter(x)
    assert factors.shape == x.shape and factors.dtype == x.dtype
    assert 0.75 <= factors.min() < 0.8 and 1.2 < factors.max() <= 1.25
    mine = Doubling(args_of(moe_jitter_eps=0.25))
    expected = [(s * x @ mine.layer.weight.t()).softmax(1) for s in (1, 2)]
    assert torch.allclose(mine(x)[0], expected[1]) and torch.allclose(mine.eval()(x)[0], expected[0])


@pytest.mark.parametrize("layer", [MoE, dMoE])
def test_a_program_may_replace_the_router_in_its_module(layer, monkeypatch):
    class Mine(LearnedRouter):
        pass

    monkeypatch.setattr(router, "LearnedRouter", Mine)
    assert type(layer(args_of()).router) is Mine


def test_scale_gradient():
    for function in (mlp.scale_gradient, mlp.ScaleGradient.apply):
        w = torch.randn(3, requires_grad=True)
        y = function(w, 0.25)
        assert torch.equal(y, w)
        y.backward(torch.ones(3))
        assert torch.equal(w.grad, torch.full((3,), 0.25))


@pytest.mark.parametrize("kind", [MLP, GroupedMLP])
def test_scale_grad_is_called_on_every_matrix(kind):
    class Scaled(kind):
        def scale_grad(self, w):
            return mlp.scale_gradient(super().scale_grad(w), 0.5)

    torch.manual_seed(0)
    plain = kind(args_of())
    torch.manual_seed(0)
    scaled = Scaled(args_of())
    assert plain.gradient_scale is None and plain.scale_grad(plain.w1) is plain.w1
    inputs = (torch.randn(E, 4, H),) if kind is MLP else (torch.randn(12, H), torch.tensor([4, 4, 4]))
    for module in (plain, scaled):
        module(*inputs).square().sum().backward()
    for a, b in zip(plain.parameters(), scaled.parameters(), strict=True):
        assert torch.allclose(b.grad, 0.5 * a.grad, atol=1e-6)


@pytest.mark.parametrize("kind", [MLP, GroupedMLP])
def test_gradients_are_scaled_by_the_ranks_that_share_the_experts(kind, monkeypatch):
    monkeypatch.setattr(mpu, "get_expert_parallel_world_size", lambda args: 3)
    monkeypatch.setattr(mpu, "get_expert_parallel_rank", lambda args: 1)
    module = kind(args_of(moe_expert_model_parallelism=True))
    w = torch.randn(2, requires_grad=True)
    module.scale_grad(w).sum().backward()
    assert module.gradient_scale == 1 / 3 and torch.allclose(w.grad, torch.full((2,), 1 / 3))


# ---- how parameters are drawn


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", [MoE, dMoE])
def test_a_layer_draws_as_0_10_does(kind, dtype):
    """From torch's generator: the router, then all experts' w1, then w2, in the layer's dtype.

    0.10's dropless layer makes the experts of its base class first, and replaces them.
    """
    seen = []

    def init(t):
        seen.append((tuple(t.shape), t.dtype))
        torch.nn.init.xavier_normal_(t)

    half = {"fp16": dtype == torch.float16, "bf16": dtype == torch.bfloat16}
    args = args_of(**half, init_method=init, output_layer_init_method=torch.nn.init.normal_)
    torch.manual_seed(5)
    layer = kind(args)
    torch.manual_seed(5)
    router = torch.nn.Linear(H, E, bias=False, dtype=dtype).weight.detach()
    torch.nn.init.xavier_normal_(router)
    w1, w2 = (torch.empty(E, F_, H, dtype=dtype) for _ in range(2))
    for _ in range(1 if kind is MoE else 2):
        torch.nn.init.xavier_normal_(w1)  # of fans F·H and E·H
        torch.nn.init.normal_(w2)
    found = layer.experts.mlp.w1, layer.experts.mlp.w2
    w1 = w1.transpose(1, 2) if kind is MoE else w1.view(-1, H)
    assert torch.equal(layer.router.layer.weight, router)
    assert torch.equal(found[0], w1) and torch.equal(found[1].view(-1, H), w2.view(-1, H))
    assert seen == [((E, H), dtype)] + [((E, F_, H), dtype)] * (1 if kind is MoE else 2)


def test_gated_experts_draw_v1_and_the_gate_last():
    """They hold them last, too: an optimizer's state, as 0.10's programs saved it, counts parameters by their order."""
    args = args_of(mlp_type="glu")
    torch.manual_seed(5)
    glu, shared = GroupedGLU(args), SharedGLU(args)
    torch.manual_seed(5)
    assert [name for name, _ in glu.named_parameters()] == ["w1", "w2", "v1"]
    for weight in glu.parameters():
        full = torch.empty(E, F_, H)
        args.init_method(full)
        assert torch.equal(weight, full.view(-1, H))
    assert [name for name, _ in shared.named_children()] == ["up_proj", "down_proj", "gate_proj"]
    for layer in shared.children():
        expected = torch.nn.Linear(layer.in_features, layer.out_features)
        assert torch.equal(layer.weight, expected.weight) and torch.equal(layer.bias, expected.bias)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_every_rank_cuts_its_part_of_one_drawing(ranks, monkeypatch):
    """Rank r holds block r % blocks of the experts, and slice r // blocks of their width."""
    experts, blocks = 4, min(ranks, 4)
    args = args_of(moe_num_experts=experts, moe_expert_model_parallelism=ranks > 1)
    whole = torch.empty(experts, F_, H)
    torch.manual_seed(5)
    args.init_method(whole)
    monkeypatch.setattr(mpu, "get_expert_parallel_world_size", lambda args: ranks)
    for rank in range(ranks):
        monkeypatch.setattr(mpu, "get_expert_parallel_rank", lambda args, rank=rank: rank)
        block, piece, width = rank % blocks, rank // blocks, F_ * blocks // ranks
        expected = whole.view(blocks, -1, F_, H)[block][:, piece * width : (piece + 1) * width]
        sizes = (experts, F_, H, args.init_method)
        torch.manual_seed(5)
        assert torch.equal(mlp.create_moe_expert_weights(args, *sizes), expected)
        torch.manual_seed(5)
        assert torch.equal(mlp.create_dmoe_expert_weights(args, *sizes), expected.reshape(-1, H))
        torch.manual_seed(5)
        assert torch.equal(GroupedMLP(args).w1, expected.reshape(-1, H))


@pytest.mark.parametrize("kind", [MLP, GroupedMLP])
def test_experts_made_on_meta_are_drawn_later(kind):
    torch.manual_seed(5)
    plain = kind(args_of())
    later = kind(args_of(device="meta")).to_empty(device="cpu")
    torch.manual_seed(5)
    later.reset_parameters()
    assert torch.equal(later.w1, plain.w1) and torch.equal(later.w2, plain.w2)


# ---- DTensors


@pytest.fixture
def mesh(tmp_path):
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1, 1), mesh_dim_names=("weight_parallel", "expert_parallel"))
    dist.destroy_process_group()


def test_resolve_dtensor(mesh):
    from torch.distributed.tensor import Shard, distribute_tensor

    w = torch.randn(4, 3)
    assert mlp.resolve_dtensor(w) is w
    local = mlp.resolve_dtensor(distribute_tensor(w, mesh, [Shard(0), Shard(0)]))
    assert type(local) is torch.Tensor and torch.equal(local, w)


@pytest.mark.parametrize("kind", [MLP, SparseMLP, GroupedMLP, GroupedGLU])
def test_experts_may_be_dtensors(kind, mesh):
    """As llm-foundry makes them: distributed over a mesh once the layer is built."""
    from torch.distributed.tensor import Shard, distribute_tensor

    module, x = kind(args_of(mlp_type="glu" if kind is GroupedGLU else "mlp")), torch.randn(3 * 128, H)
    plain = {name: p.detach().clone().requires_grad_() for name, p in module.named_parameters()}
    counts = torch.tensor([128] * E)
    where = () if kind is MLP else (counts,)
    if kind is SparseMLP:
        where = (topology(F.pad(counts.cumsum(0), (1, 0)).int(), F_, max_rows=x.shape[0], block_rows=3).pattern,)
    inputs = x.view(E, 128, H) if kind is MLP else x
    expected = torch.func.functional_call(module, plain, (inputs, *where))
    expected.square().sum().backward()
    for name, p in list(module.named_parameters()):
        setattr(module, name, torch.nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(0), Shard(0)])))
    y = module(inputs, *where)
    y.square().sum().backward()
    assert torch.allclose(y, expected, atol=1e-6)
    for name, p in module.named_parameters():
        assert torch.allclose(p.grad.to_local(), plain[name].grad, atol=1e-5), name
