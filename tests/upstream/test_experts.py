"""Expert classes of megablocks 0.10: built from `Arguments`, called as there, against the plain formula in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch.nn.utils import parametrize

from megablocks import grouped_gemm_util
from megablocks.config import ConfigError
from megablocks.layers import dmlp_registry, mpu, sharedexpert_registry
from megablocks.layers.dmoe import ParallelDroplessMLP
from megablocks.layers.glu import GroupedGLU, MemoryOptimizedGroupedGLU, SharedGLU, SparseGLU
from megablocks.layers.mlp import (
    MLP,
    GroupedMLP,
    MemoryOptimizedGroupedMLP,
    MemoryOptimizedMLP,
    SharedMLP,
    SparseMLP,
    create_dmoe_expert_weights,
    resolve_dtensor,
)
from megablocks.layers.moe import ParallelMLP
from megablocks.moe import experts
from megablocks.moe.experts import Experts
from megablocks.ops.routing.dispatch import build_dispatch, make_routing
from megablocks.ops.sparse import from_coordinates, topology
from megablocks.testing.oracle import relative_error
from upstream.fake_stk import FakeStk
from upstream.harness import F_, TOLERANCE, E, H, K, args_of, compare, hidden_of


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("mlp_type", ["mlp", "glu"])
def test_mlp_computes_equal_bins(mlp_type, recompute):
    mlp = MLP(args_of(mlp_type=mlp_type, memory_optimized_mlp=recompute))
    shapes = {"w1": (E, H, F_), "w2": (E, F_, H)} | ({"v1": (E, H, F_)} if mlp_type == "glu" else {})
    assert {name: tuple(p.shape) for name, p in mlp.named_parameters()} == shapes
    assert all(0.28 < p.std() < 0.32 for p in mlp.parameters())

    def formula(x, p):
        v1 = p.get("v1")
        return torch.stack(
            [hidden_of(x[e], p["w1"][e].t(), v1 if v1 is None else v1[e].t()) @ p["w2"][e] for e in range(E)]
        )

    compare(mlp, mlp, formula, torch.randn(E, 5, H))


class _Doubled(torch.nn.Module):
    def forward(self, weight):
        return 2 * weight

    def right_inverse(self, weight):
        return weight / 2


@pytest.mark.parametrize("kind", [MLP, SparseMLP, GroupedGLU])
def test_parametrized_weights_compute_the_same(kind):
    """Each read of one returns a new tensor. With equal sizes no shape tells w1 (E, H, I) from w2 (E, I, H)."""
    module = kind(args_of(ffn_hidden_size=64, hidden_size=64, mlp_type="glu" if kind is GroupedGLU else "mlp"))
    x, where = torch.randn(E, 5, 64), []
    if kind is not MLP:
        ids = torch.arange(5 * E).unsqueeze(1) // 5
        x, where = x.flatten(0, 1), [build_dispatch(make_routing(ids, torch.ones_like(ids).float(), E))]
    expected = module(x, *where)
    for name in [name for name, _ in module.named_parameters()]:
        parametrize.register_parametrization(module, name, _Doubled())
    assert relative_error(module(x, *where), expected) < 1e-6


def test_mlp_draws_what_the_dropless_experts_draw():
    """As in 0.10, whose tests copy weights from one to the other: w1 transposed, w2 as it is."""
    torch.manual_seed(3)
    mlp = MLP(args_of())
    torch.manual_seed(3)
    grouped = GroupedMLP(args_of())
    assert torch.equal(mlp.w1, grouped.w1.view(E, F_, H).transpose(1, 2)) and torch.equal(
        mlp.w2.view(-1, H), grouped.w2
    )


@pytest.mark.parametrize("impl", ["fused", "scatter"])
@pytest.mark.parametrize("kind", [GroupedMLP, GroupedGLU])
def test_N6_grouped_experts_compute_as_mlp_impl_names(kind, impl, monkeypatch):
    called, compute = [], experts.COMPUTE[impl]
    monkeypatch.setitem(experts.COMPUTE, impl, lambda call: called.append(impl) or compute(call))
    x, counts = torch.randn(9, H), torch.tensor([5, 0, 4])
    torch.manual_seed(0)
    got = kind(args_of(mlp_impl=impl))(x, counts)
    torch.manual_seed(0)
    assert relative_error(got, kind(args_of())(x, counts)) < TOLERANCE and called == [impl]


@pytest.mark.parametrize("counts", [[5, 0, 9], [0, 0, 4], [1, 1, 1], [0, 0, 0]])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("kind", [GroupedMLP, GroupedGLU])
def test_grouped_experts_compute_sorted_rows(kind, recompute, counts):
    mlp = kind(args_of(memory_optimized_mlp=recompute))
    assert {tuple(p.shape) for p in mlp.parameters()} == {(E * F_, H)}
    assert {n for n, _ in mlp.named_parameters()} == ({"w1", "w2"} if kind is GroupedMLP else {"w1", "v1", "w2"})

    def formula(x, p):
        weights = [p[name].view(E, F_, H) if name in p else [None] * E for name in ("w1", "v1", "w2")]
        parts = x.split(counts)
        return torch.cat([hidden_of(part, w1, v1) @ w2 for part, w1, v1, w2 in zip(parts, *weights, strict=True)])

    for dtype in (torch.int32, torch.int64):
        mlp.zero_grad()
        compare(mlp, lambda x: mlp(x, torch.tensor(counts, dtype=dtype)), formula, torch.randn(sum(counts), H))  # noqa: B023


def _moe_pattern():
    offsets = torch.tensor([0, 70, 70, 130], dtype=torch.int32)
    return topology(offsets, F_, max_rows=130, block_size=64, block_rows=3).pattern


def _random_pattern():
    """No MoE's: rows with several experts' columns, an empty row."""
    at = torch.tensor([[0, 1], [0, 4], [2, 0], [2, 1], [2, 5]])
    return from_coordinates((3 * 64, E * F_), at[:, 0], at[:, 1], block_size=64)


@pytest.mark.parametrize("as_stk", [False, True])
@pytest.mark.parametrize("pattern", [_moe_pattern, _random_pattern])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("kind", [SparseMLP, SparseGLU])
def test_sparse_experts_compute_the_blocks_of_the_topology(kind, recompute, pattern, as_stk):
    mlp, pattern = kind(args_of(memory_optimized_mlp=recompute)), pattern()
    mask = pattern.with_data(torch.ones(pattern.num_blocks, 64, 64)).to_dense().double()
    topo = FakeStk.of(pattern) if as_stk else pattern

    def formula(x, p):
        return (hidden_of(x, p["w1"], p.get("v1")) * mask) @ p["w2"]

    compare(mlp, lambda x: mlp(x, topo), formula, torch.randn(3 * 64, H))


def test_memory_optimized_functions():
    """0.10's autograd functions by their `apply`, against the classes."""
    pattern, counts = _moe_pattern(), torch.tensor([5, 0, 9])
    act = args_of().activation_fn
    cases = [
        (SparseMLP, lambda x, m: MemoryOptimizedMLP.apply(x, m.w1, m.w2, pattern, act), pattern, 3 * 64),
        (
            GroupedMLP,
            lambda x, m: MemoryOptimizedGroupedMLP.apply(x, m.w1.view(E, F_, H), m.w2.view(E, F_, H), counts, act),
            counts,
            14,
        ),
        (
            GroupedGLU,
            lambda x, m: MemoryOptimizedGroupedGLU.apply(
                x, *(w.view(E, F_, H) for w in (m.w1, m.v1, m.w2)), counts, F.silu
            ),
            counts,
            14,
        ),
    ]
    for kind, function, where, rows in cases:
        mlp = kind(args_of(activation_fn=F.silu if kind is GroupedGLU else act))
        x = torch.randn(rows, H, requires_grad=True)
        inputs, grad = (x, *mlp.parameters()), torch.randn(rows, H)
        expected = mlp(x, where)
        got = function(x, mlp)
        assert torch.allclose(got, expected, atol=1e-6)
        for a, b in zip(
            torch.autograd.grad(got, inputs, grad), torch.autograd.grad(expected, inputs, grad), strict=True
        ):
            assert torch.allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("kind", [SparseGLU, GroupedGLU])
def test_gated_classes_round_where_0_10_does(kind):
    """In bfloat16: the activation, then its product with the gate. float32 sums may round either way at a tie."""
    torch.manual_seed(0)
    mlp = kind(args_of(bf16=True, moe_num_experts=1, moe_top_k=1))
    x = torch.randn(64, H).bfloat16()
    topo = from_coordinates((64, F_), torch.tensor([0, 0]), torch.tensor([0, 1]), block_size=64)
    act = F.gelu((x.float() @ mlp.w1.float().t()).bfloat16(), approximate="tanh")
    gate = (x.float() @ mlp.v1.float().t()).bfloat16()
    y = mlp(x, topo if kind is SparseGLU else torch.tensor([64]))

    def equal(hidden):
        return (y == (hidden.float() @ mlp.w2.float()).bfloat16()).float().mean()

    unrounded = act.float() * gate.float()
    assert equal(act * gate) > 0.99 and equal(unrounded) < 0.9


@pytest.mark.parametrize("kind", [SparseMLP, SparseGLU, GroupedGLU, MLP])
def test_saved_activations_may_be_quantized(kind):
    """As 0.5.1's: the same output, and gradients of the weights that differ by little."""
    grads = []
    x = torch.randn(E, 64, H) if kind is MLP else torch.randn(3 * 64, H)
    where = () if kind is MLP else (torch.tensor([64] * E),) if kind is GroupedGLU else (_random_pattern(),)
    for bits in (-1, 8):
        torch.manual_seed(0)
        mlp = kind(args_of(quantize_inputs_num_bits=bits, quantize_rematerialize_num_bits=bits))
        y = mlp(x, *where)
        y.square().sum().backward()
        grads.append((y.detach(), *(p.grad for p in mlp.parameters())))
    (y, *exact), (quantized_y, *quantized) = grads
    assert relative_error(quantized_y, y) < TOLERANCE
    for a, b in zip(quantized, exact, strict=True):
        assert 0 < relative_error(a, b) < 2e-2


def test_classes_are_related_as_in_0_10():
    assert issubclass(GroupedMLP, SparseMLP) and issubclass(SparseGLU, SparseMLP) and issubclass(GroupedGLU, SparseGLU)
    assert issubclass(SharedGLU, SharedMLP) and issubclass(ParallelDroplessMLP, ParallelMLP)
    assert all(issubclass(kind, Experts) for kind in (MLP, SparseMLP))


@pytest.mark.parametrize("kind", [MLP, SparseMLP, GroupedMLP, SparseGLU, GroupedGLU])
def test_only_gated_experts_have_v1(kind):
    """By hasattr programs such as llm-foundry decide whether to count, draw or convert it."""
    gated = kind in (SparseGLU, GroupedGLU)
    made = kind(args_of())
    assert hasattr(made, "v1") == gated and hasattr(MLP(args_of(mlp_type="glu")), "v1")
    assert [n for n, _ in made.named_parameters()] == ["w1", "w2", "v1"][: 2 + gated]


def test_registries():
    kinds = {
        ("mlp", "grouped"): GroupedMLP, ("mlp", "sparse"): SparseMLP, ("glu", "grouped"): GroupedGLU,
        ("glu", "sparse"): SparseGLU, ("mlp", "auto"): GroupedMLP, ("glu", "reference"): GroupedGLU,
    }  # fmt: skip
    for (mlp_type, mlp_impl), kind in kinds.items():
        made = dmlp_registry.get(args_of(mlp_type=mlp_type, mlp_impl=mlp_impl))
        assert type(made) is kind and made.config.mlp_impl == mlp_impl
    assert type(sharedexpert_registry.get(args_of())) is SharedMLP
    assert type(sharedexpert_registry.get(args_of(mlp_type="glu"))) is SharedGLU
    for field, value in (("mlp_type", "moe"), ("mlp_impl", "dense")):
        args = args_of()
        setattr(args, field, value)
        with pytest.raises(ConfigError, match=f"{field}='{value}': must be one of"):
            dmlp_registry.get(args)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kind", [SharedMLP, SharedGLU])
def test_shared_experts(kind, weighted):
    shared = kind(args_of(shared_expert_hidden_size=20, shared_expert_weighted_sum=weighted))
    names = ["up_proj", "down_proj"] + (["gate_proj"] if kind is SharedGLU else [])
    assert {n for n, _ in shared.named_parameters()} == {f"{n}.{w}" for n in names for w in ("weight", "bias")}
    assert shared.down_proj._is_residual

    def linear(name, x, p):
        return F.linear(x, p[f"{name}.weight"], p[f"{name}.bias"])

    def formula(x, p):
        up = linear("up_proj", x, p)
        if kind is SharedGLU:
            hidden = F.gelu(linear("gate_proj", x, p), approximate="tanh") * up
        else:
            hidden = F.gelu(up, approximate="tanh")
        return linear("down_proj", hidden, p)

    compare(shared, shared, formula, torch.randn(5, H))
    a, b = torch.randn(2, 5, H)
    expected = a / (K + 1) + b * (K / (K + 1)) if weighted else a + b
    assert torch.allclose(shared.add_experts_sharedexpert(a, b), expected)


def test_a_subclass_of_the_experts_adds_matrices_of_its_own():
    class Own(GroupedMLP):
        def __init__(self, args):
            super().__init__(args)
            self.v1 = torch.nn.Parameter(torch.empty(self._num_rows_per_rank, args.hidden_size, device=args.device))
            drawn = create_dmoe_expert_weights(args, E, args.ffn_hidden_size, args.hidden_size, args.init_method)
            with torch.no_grad():
                self.v1.copy_(drawn)
            mpu.set_expert_model_parallel_attributes(self.v1, self._should_set_parallelism_attribute)

        def forward(self, x, tokens_per_expert):
            w1, v1, w2 = (resolve_dtensor(self.scale_grad(w)).view(E, -1, H) for w in (self.w1, self.v1, self.w2))
            pre, gate = (grouped_gemm_util.ops.gmm(x, w, tokens_per_expert, trans_b=True) for w in (w1, v1))
            return grouped_gemm_util.ops.gmm(F.gelu(pre, approximate="tanh") * gate, w2, tokens_per_expert)

    own, ours, counts = Own(args_of()), GroupedGLU(args_of()), torch.tensor([3, 0, 4])
    ours.load_state_dict(own.state_dict())
    x = torch.randn(7, H)
    found, wanted = (torch.autograd.grad(m(x, counts).sum(), [*m.parameters()]) for m in (own, ours))
    assert not mpu.param_is_expert_model_parallel(own.v1) and mpu.is_moe_param(own.v1)
    assert relative_error(own(x, counts), ours(x, counts).double()) < TOLERANCE
    assert all(relative_error(a, b.double()) < TOLERANCE for a, b in zip(found, wanted, strict=True))


def test_a_subclass_of_the_shared_expert_adds_layers_of_its_own():
    class Own(SharedMLP):
        def __init__(self, args):
            super().__init__(args)
            self.gate_proj = args.fc_cls(args.hidden_size, args.shared_expert_hidden_size, **self.fc_kwargs)

        def forward(self, x):
            return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))

    args = args_of(shared_expert_hidden_size=20, bias=False, bf16=True)
    own, ours = Own(args), SharedGLU(args)
    assert {p.dtype for p in own.parameters()} == {torch.bfloat16}
    ours.load_state_dict(own.state_dict())
    x = torch.randn(5, H).bfloat16()
    assert relative_error(own(x), ours(x).double()) < 0.01


@pytest.mark.parametrize(
    "call, message",
    [
        (
            lambda: GroupedMLP(args_of())(torch.zeros(3, H), torch.tensor([1, 2])),
            r"tokens_per_expert is \(2,\): must be",
        ),
        (
            lambda: GroupedMLP(args_of())(torch.zeros(3, H).half(), torch.tensor([1, 1, 1])),
            "x: has dtype torch.float16",
        ),
        (lambda: SparseMLP(args_of())(torch.zeros(64, H), _moe_pattern()), r"x is \(64, 12\), must be \(192, any\)"),
        (lambda: SparseMLP(args_of(ffn_hidden_size=100)), "ffn_hidden_size=100: must be a multiple of 64"),
        (
            lambda: MemoryOptimizedMLP.apply(torch.zeros(192, H), *torch.zeros(2, E * F_, H), _moe_pattern(), abs),
            "activation_fn=<built-in function abs>: must be",
        ),
    ],
)
def test_bad_input_is_one_line(call, message):
    with pytest.raises(ValueError, match=message) as error:
        call()
    assert "\n" not in str(error.value)
