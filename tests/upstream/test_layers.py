"""Layer classes of megablocks 0.10: built from `Arguments`, called as there, against the plain formula in float64."""

import pytest
import torch
import torch.nn.functional as F

from megablocks.config import ConfigError
from megablocks.layers import Arguments, MoE, dmlp_registry, dMoE, losses, sharedexpert_registry
from megablocks.layers.dmoe import ParallelDroplessMLP
from megablocks.layers.experts import Experts
from megablocks.layers.glu import GroupedGLU, MemoryOptimizedGroupedGLU, SharedGLU, SparseGLU
from megablocks.layers.mlp import (
    MLP,
    GroupedMLP,
    MemoryOptimizedGroupedMLP,
    MemoryOptimizedMLP,
    SharedMLP,
    SparseMLP,
)
from megablocks.layers.moe import ParallelMLP
from megablocks.layers.router import LearnedRouter
from megablocks.ops.sparse import from_coordinates, topology
from megablocks.testing.oracle import relative_error
from megablocks.testing.poison import poisoned_empty
from upstream.fake_stk import FakeStk

H, F_, E, K = 12, 128, 3, 2
TOLERANCE = 1e-5


@pytest.fixture(autouse=True)
def _nothing_recorded():
    losses.clear_load_balancing_loss()
    losses.clear_router_zloss()
    yield
    losses.clear_load_balancing_loss()
    losses.clear_router_zloss()


def _args(**changes):
    values = dict(hidden_size=H, ffn_hidden_size=F_, moe_num_experts=E, moe_top_k=K, fp16=False, device="cpu")
    values |= dict(init_method=_normal, output_layer_init_method=_normal)
    return Arguments(**{**values, **changes})


def _normal(t):
    return torch.nn.init.normal_(t, std=0.3)


def _wide(module):
    return {name: p.detach().double().requires_grad_() for name, p in module.named_parameters()}


def _hidden(x, w1, v1):
    """act(x·w1ᵀ), or act(x·w1ᵀ) ⊙ (x·v1ᵀ); w1, v1 (…, H)."""
    hidden = F.gelu(x @ w1.t(), approximate="tanh")
    return hidden if v1 is None else hidden * (x @ v1.t())


def _compare(module, call, formula, x):
    """call(x) against formula(x, parameters): values, dx and the gradient of every parameter."""
    wide, wide_x = _wide(module), x.detach().double().requires_grad_()
    x = x.detach().requires_grad_()
    with poisoned_empty():
        y = call(x)
        grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
        y.backward(grad)
    expected = formula(wide_x, wide)
    expected.backward(grad.double())
    assert y.dtype == x.dtype and relative_error(y, expected.detach()) < TOLERANCE
    assert relative_error(x.grad, wide_x.grad) < TOLERANCE
    for name, p in module.named_parameters():
        assert relative_error(p.grad, wide[name].grad) < TOLERANCE, name


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("mlp_type", ["mlp", "glu"])
def test_mlp_computes_equal_bins(mlp_type, recompute):
    mlp = MLP(_args(mlp_type=mlp_type, memory_optimized_mlp=recompute))
    shapes = {"w1": (E, H, F_), "w2": (E, F_, H)} | ({"v1": (E, H, F_)} if mlp_type == "glu" else {})
    assert {name: tuple(p.shape) for name, p in mlp.named_parameters()} == shapes
    assert all(0.28 < p.std() < 0.32 for p in mlp.parameters())

    def formula(x, p):
        v1 = p.get("v1")
        return torch.stack(
            [_hidden(x[e], p["w1"][e].t(), v1 if v1 is None else v1[e].t()) @ p["w2"][e] for e in range(E)]
        )

    _compare(mlp, mlp, formula, torch.randn(E, 5, H))


def test_mlp_draws_what_the_dropless_experts_draw():
    """As in 0.10, whose tests copy weights from one to the other: w1 transposed, w2 as it is."""
    torch.manual_seed(3)
    mlp = MLP(_args())
    torch.manual_seed(3)
    grouped = GroupedMLP(_args())
    assert torch.equal(mlp.w1, grouped.w1.view(E, F_, H).transpose(1, 2)) and torch.equal(
        mlp.w2.view(-1, H), grouped.w2
    )


@pytest.mark.parametrize("counts", [[5, 0, 9], [0, 0, 4], [1, 1, 1], [0, 0, 0]])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("kind", [GroupedMLP, GroupedGLU])
def test_grouped_experts_compute_sorted_rows(kind, recompute, counts):
    mlp = kind(_args(memory_optimized_mlp=recompute))
    assert {tuple(p.shape) for p in mlp.parameters()} == {(E * F_, H)}
    assert {n for n, _ in mlp.named_parameters()} == ({"w1", "w2"} if kind is GroupedMLP else {"w1", "v1", "w2"})

    def formula(x, p):
        weights = [p[name].view(E, F_, H) if name in p else [None] * E for name in ("w1", "v1", "w2")]
        parts = x.split(counts)
        return torch.cat([_hidden(part, w1, v1) @ w2 for part, w1, v1, w2 in zip(parts, *weights, strict=True)])

    for dtype in (torch.int32, torch.int64):
        mlp.zero_grad()
        _compare(mlp, lambda x: mlp(x, torch.tensor(counts, dtype=dtype)), formula, torch.randn(sum(counts), H))  # noqa: B023


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
    mlp, pattern = kind(_args(memory_optimized_mlp=recompute)), pattern()
    mask = pattern.with_data(torch.ones(pattern.num_blocks, 64, 64)).to_dense().double()
    topo = FakeStk.of(pattern) if as_stk else pattern

    def formula(x, p):
        return (_hidden(x, p["w1"], p.get("v1")) * mask) @ p["w2"]

    _compare(mlp, lambda x: mlp(x, topo), formula, torch.randn(3 * 64, H))


def test_memory_optimized_functions():
    """0.10's autograd functions by their `apply`, against the classes."""
    pattern, counts = _moe_pattern(), torch.tensor([5, 0, 9])
    act = _args().activation_fn
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
        mlp = kind(_args(activation_fn=F.silu if kind is GroupedGLU else act))
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
    """In bfloat16: the activation, then its product with the gate."""
    mlp = kind(_args(bf16=True, moe_num_experts=1, moe_top_k=1))
    x = torch.randn(64, H).bfloat16()
    topo = from_coordinates((64, F_), torch.tensor([0, 0]), torch.tensor([0, 1]), block_size=64)
    act = F.gelu((x.float() @ mlp.w1.float().t()).bfloat16(), approximate="tanh")
    hidden = act * (x.float() @ mlp.v1.float().t()).bfloat16()
    expected = (hidden.float() @ mlp.w2.float()).bfloat16()
    assert torch.equal(mlp(x, topo if kind is SparseGLU else torch.tensor([64])), expected)


@pytest.mark.parametrize("kind", [SparseMLP, SparseGLU, GroupedGLU, MLP])
def test_saved_activations_may_be_quantised(kind):
    """As 0.5.1's: the same output, and gradients of the weights that differ by little."""
    grads = []
    x = torch.randn(E, 64, H) if kind is MLP else torch.randn(3 * 64, H)
    where = () if kind is MLP else (torch.tensor([64] * E),) if kind is GroupedGLU else (_random_pattern(),)
    for bits in (-1, 8):
        torch.manual_seed(0)
        mlp = kind(_args(quantize_inputs_num_bits=bits, quantize_rematerialize_num_bits=bits))
        y = mlp(x, *where)
        y.square().sum().backward()
        grads.append((y.detach(), *(p.grad for p in mlp.parameters())))
    (y, *exact), (quantised_y, *quantised) = grads
    assert relative_error(quantised_y, y) < TOLERANCE
    for a, b in zip(quantised, exact, strict=True):
        assert 0 < relative_error(a, b) < 2e-2


def test_classes_are_related_as_in_0_10():
    assert issubclass(GroupedMLP, SparseMLP) and issubclass(SparseGLU, SparseMLP) and issubclass(GroupedGLU, SparseGLU)
    assert issubclass(SharedGLU, SharedMLP) and issubclass(ParallelDroplessMLP, ParallelMLP)
    assert all(issubclass(kind, Experts) for kind in (MLP, SparseMLP))


def test_registries():
    kinds = {
        ("mlp", "grouped"): GroupedMLP, ("mlp", "sparse"): SparseMLP, ("glu", "grouped"): GroupedGLU,
        ("glu", "sparse"): SparseGLU, ("mlp", "auto"): GroupedMLP, ("glu", "reference"): GroupedGLU,
    }  # fmt: skip
    for (mlp_type, mlp_impl), kind in kinds.items():
        made = dmlp_registry.get(_args(mlp_type=mlp_type, mlp_impl=mlp_impl))
        assert type(made) is kind and made.config.mlp_impl == mlp_impl
    assert type(sharedexpert_registry.get(_args())) is SharedMLP
    assert type(sharedexpert_registry.get(_args(mlp_type="glu"))) is SharedGLU
    for field, value in (("mlp_type", "moe"), ("mlp_impl", "dense")):
        args = _args()
        setattr(args, field, value)
        with pytest.raises(ConfigError, match=f"{field}='{value}': must be one of"):
            dmlp_registry.get(args)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kind", [SharedMLP, SharedGLU])
def test_shared_experts(kind, weighted):
    shared = kind(_args(shared_expert_hidden_size=20, shared_expert_weighted_sum=weighted))
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

    _compare(shared, shared, formula, torch.randn(5, H))
    a, b = torch.randn(2, 5, H)
    expected = a / (K + 1) + b * (K / (K + 1)) if weighted else a + b
    assert torch.allclose(shared.add_experts_sharedexpert(a, b), expected)


@pytest.mark.parametrize("normalize", [None, 1, 2.0])
def test_router_returns_scores_weights_and_ids(normalize):
    router = LearnedRouter(_args(moe_normalize_expert_weights=normalize, moe_zloss_weight=0.1))
    x = torch.randn(4, 3, H)
    scores, weights, ids = router(x)
    logits = x.view(-1, H) @ router.layer.weight.t()
    expected_weights, expected_ids = logits.softmax(1).topk(K)
    if normalize is not None:
        expected_weights = expected_weights / expected_weights.norm(p=normalize, dim=1, keepdim=True)
    assert torch.allclose(scores, logits.softmax(1)) and torch.allclose(weights, expected_weights)
    assert torch.equal(ids, expected_ids) and ids.dtype == torch.int64
    expected = 0.1 * torch.logsumexp(logits, 1).square().mean()
    assert torch.allclose(losses.batched_router_zloss(router.args), expected[None])
    (gradient,) = torch.autograd.grad(weights[:, 0].sum(), router.layer.weight, retain_graph=True)
    (wanted,) = torch.autograd.grad(expected_weights[:, 0].sum(), router.layer.weight)
    assert torch.allclose(gradient, wanted, atol=1e-6)


def test_router_jitters_in_training_and_assigns_uniformly():
    router = LearnedRouter(_args(moe_jitter_eps=0.5, uniform_expert_assignment=True))
    x = torch.randn(6, H)
    assert not torch.equal(router(x)[0], router(x)[0])
    router.eval()
    assert torch.equal(router(x)[0], router(x)[0])
    assert router(x)[2].flatten().tolist() == [i % E for i in range(6 * K)]


def _formula_of_layer(args, x, scores_of, p, places=None):
    """0.10's layer without its bias, one pair at a time."""
    wide = x.reshape(-1, H)
    weights, ids = scores_of(wide).topk(K)
    y, taken = torch.zeros_like(wide), [0] * E
    dropless = p["experts.mlp.w1"].dim() == 2
    w1, w2 = (p[f"experts.mlp.{n}"] for n in ("w1", "w2"))
    w1, w2 = (w1.view(E, F_, H), w2.view(E, F_, H)) if dropless else (w1.transpose(1, 2), w2)
    for t in range(wide.shape[0]):
        for k in range(K):
            e = int(ids[t, k])
            taken[e] += 1
            if places is None or taken[e] <= places:
                out = _hidden(wide[t][None], w1[e], None) @ w2[e] * weights[t, k]
                y = y.index_add(0, torch.tensor([t]), out)
    return y.view(x.shape)


@pytest.mark.parametrize("impl", ["grouped", "sparse"])
@pytest.mark.parametrize("kind, factor", [(dMoE, 1), (MoE, 0), (MoE, 1), (MoE, 0.5)])
def test_layers_follow_the_formula(kind, factor, impl):
    args = _args(mlp_impl=impl, moe_capacity_factor=factor, memory_optimized_mlp=True)
    layer, x = kind(args), torch.randn(7, 2, H)
    assert [n for n, _ in layer.named_parameters()] == [
        "router.layer.weight", "experts.bias", "experts.mlp.w1", "experts.mlp.w2",
    ]  # fmt: skip
    places = int(factor * K * 14 / E) if kind is MoE and factor else None
    assert kind is dMoE or layer.experts.expert_capacity(14) == (places or 0)

    def formula(x, p):
        def scores_of(tokens):
            return (tokens @ p["router.layer.weight"].t()).softmax(1)

        return _formula_of_layer(args, x, scores_of, p, places) + p["experts.bias"]

    def call(x):
        y, bias = layer(x)
        return y + bias

    _compare(layer, call, formula, x)
    (counts, scores), = losses.get_load_balancing_loss()  # fmt: skip
    assert counts.sum() == 14 * K and scores.shape == (14, E)


@pytest.mark.parametrize("kind", [ParallelMLP, ParallelDroplessMLP])
def test_the_module_behind_the_router(kind):
    """Called alone as in 0.10, with the caller's own weights and ids, one of which is nobody's."""
    args = _args(moe_capacity_factor=0)
    experts, x = kind(args), torch.randn(5, 2, H)
    scores, weights = torch.rand(10, E), torch.rand(10, K)
    ids = torch.randint(0, E, (10, K), generator=torch.Generator().manual_seed(0))
    ids[3, 1] = -1
    with torch.no_grad():
        experts.bias.normal_()
    y, bias = experts(x, scores, weights, ids)
    assert bias is experts.bias and y.shape == x.shape
    w1, w2 = experts.mlp.w1, experts.mlp.w2
    w1, w2 = (w1.transpose(1, 2), w2) if kind is ParallelMLP else (w1.view(E, F_, H), w2.view(E, F_, H))
    expected = torch.zeros(10, H)
    for t in range(10):
        for k in range(K):
            if ids[t, k] >= 0:
                e = ids[t, k]
                expected[t] += weights[t, k] * (_hidden(x.view(10, H)[t], w1[e], None) @ w2[e])
    assert torch.allclose(y.view(10, H), expected, atol=1e-5)
    ((counts, recorded),) = losses.get_load_balancing_loss()
    assert recorded is scores and counts.tolist() == [int((ids == e).sum()) for e in range(E)]
    experts.eval()
    args.return_bias = False
    assert torch.allclose(experts(x, scores, weights, ids), y + bias)
    assert len(losses.get_load_balancing_loss()) == 1
    assert kind(_args(bias=False, moe_capacity_factor=0)).bias is None


def test_each_module_is_called_once_as_a_module():
    """So that wrappers and hooks on any of them see the pass, as FSDP's do."""
    seen = []
    layer = dMoE(_args(shared_expert=True))
    for name in ("router", "experts", "experts.mlp", "shared_expert"):
        layer.get_submodule(name).register_forward_hook(lambda *_, name=name: seen.append(name))
    layer(torch.randn(3, H))
    assert seen == ["router", "experts.mlp", "experts", "shared_expert"]


def test_a_subclass_may_bring_its_own_experts():
    class Doubled(ParallelDroplessMLP):
        def forward(self, *inputs):
            y, bias = super().forward(*inputs)
            return 2 * y, bias

    class Layer(dMoE):
        def _init_experts_mlp(self, args):
            return Doubled(args)

    layer, plain, x = Layer(_args()), dMoE(_args()), torch.randn(3, H)
    plain.load_state_dict(layer.state_dict())
    assert torch.allclose(layer(x)[0], 2 * plain(x)[0])


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: GroupedMLP(_args())(torch.zeros(3, H), torch.tensor([1, 2])), r"tokens_per_expert is \(2,\): must be"),
        (lambda: GroupedMLP(_args())(torch.zeros(3, H).half(), torch.tensor([1, 1, 1])), "x: has dtype torch.float16"),
        (lambda: SparseMLP(_args())(torch.zeros(64, H), _moe_pattern()), r"x is \(64, 12\), must be \(192, any\)"),
        (lambda: SparseMLP(_args(ffn_hidden_size=100)), "ffn_hidden_size=100: must be a multiple of 64"),
        (
            lambda: MemoryOptimizedMLP.apply(None, None, None, None, abs),
            "activation_fn=<built-in function abs>: must be",
        ),
    ],
)
def test_bad_input_is_one_line(call, message):
    with pytest.raises(ValueError, match=message) as error:
        call()
    assert "\n" not in str(error.value)


def test_F5_out_of_memory_names_sizes_and_changes(monkeypatch):
    def exhausted(self, x, routing):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(ParallelDroplessMLP, "compute", exhausted)
    layer = dMoE(_args())
    for call in (layer, layer.forward_with_aux):
        with pytest.raises(torch.OutOfMemoryError, match="6 tokens, hidden_size=12, .* the experts' 12 rows take"):
            call(torch.zeros(3, 2, H))
