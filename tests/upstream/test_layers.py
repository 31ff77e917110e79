"""Layers, routers and the module between of megablocks 0.10: built from `Arguments` and called as there."""

import pytest
import torch

from megablocks.layers import MoE, dMoE, losses
from megablocks.layers import router as layer_router
from megablocks.layers.dmoe import ParallelDroplessMLP
from megablocks.layers.moe import ParallelMLP
from megablocks.layers.router import LearnedRouter
from upstream.harness import F_, E, H, K, args_of, compare, hidden_of


@pytest.fixture(autouse=True)
def _nothing_recorded():
    losses.clear_load_balancing_loss()
    losses.clear_router_zloss()
    yield
    losses.clear_load_balancing_loss()
    losses.clear_router_zloss()


@pytest.mark.parametrize("normalize", [None, 1, 2.0])
def test_router_returns_scores_weights_and_ids(normalize):
    router = LearnedRouter(args_of(moe_normalize_expert_weights=normalize, moe_zloss_weight=0.1))
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
    router = LearnedRouter(args_of(moe_jitter_eps=0.5, uniform_expert_assignment=True))
    x = torch.randn(6, H)
    assert not torch.equal(router(x)[0], router(x)[0])
    router.eval()
    assert torch.equal(router(x)[0], router(x)[0])
    assert router(x)[2].flatten().tolist() == [i % E for i in range(6 * K)]


@pytest.mark.parametrize("top_k", [1, K])
def test_a_program_may_put_its_own_forward_in_a_router_s_place(monkeypatch, top_k):
    """As fms-acceleration does it, which resolves a replicated weight there."""

    def forward(self, x):
        scores = torch.nn.functional.linear(x.view(-1, H), self.layer.weight, self.layer.bias).softmax(dim=-1)
        weights, ids = self._top_k(scores)
        if self.args.uniform_expert_assignment:
            ids = layer_router._uniform_expert_assignment(ids, self.args.moe_num_experts)
        return scores, weights, ids

    x = torch.randn(5, 2, H)
    for uniform in (False, True):
        router = LearnedRouter(args_of(moe_top_k=top_k, uniform_expert_assignment=uniform))
        scores, weights, ids = router(x)
        with monkeypatch.context() as patch:
            patch.setattr(LearnedRouter, "forward", forward)
            own_scores, own_weights, own_ids = router(x)
        assert torch.equal(own_ids, ids) and torch.allclose(own_scores, scores)
        assert uniform or torch.allclose(own_weights, weights)


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
                out = hidden_of(wide[t][None], w1[e], None) @ w2[e] * weights[t, k]
                y = y.index_add(0, torch.tensor([t]), out)
    return y.view(x.shape)


@pytest.mark.parametrize("impl", ["grouped", "sparse"])
@pytest.mark.parametrize("kind, factor", [(dMoE, 1), (MoE, 0), (MoE, 1), (MoE, 0.5)])
def test_layers_follow_the_formula(kind, factor, impl):
    args = args_of(mlp_impl=impl, moe_capacity_factor=factor, memory_optimized_mlp=True)
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

    compare(layer, call, formula, x)
    (counts, scores), = losses.get_load_balancing_loss()  # fmt: skip
    assert counts.sum() == 14 * K and scores.shape == (14, E)


@pytest.mark.parametrize("kind", [ParallelMLP, ParallelDroplessMLP])
def test_the_module_behind_the_router(kind):
    """Called alone as in 0.10, with the caller's own weights and ids, one of which is nobody's."""
    args = args_of(moe_capacity_factor=0)
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
                expected[t] += weights[t, k] * (hidden_of(x.view(10, H)[t], w1[e], None) @ w2[e])
    assert torch.allclose(y.view(10, H), expected, atol=1e-5)
    ((counts, recorded),) = losses.get_load_balancing_loss()
    assert recorded is scores and counts.tolist() == [int((ids == e).sum()) for e in range(E)]
    experts.eval()
    args.return_bias = False
    assert torch.allclose(experts(x, scores, weights, ids), y + bias)
    assert len(losses.get_load_balancing_loss()) == 1
    assert kind(args_of(bias=False, moe_capacity_factor=0)).bias is None


@pytest.mark.parametrize("return_bias", [False, True])
def test_autocast_leaves_the_bias_its_dtype(return_bias):
    """As in 0.10, a bias in float32 that a layer adds makes its output float32."""
    layer = dMoE(args_of(return_bias=return_bias))
    torch.nn.init.constant_(layer.experts.bias, 1 + 2**-12)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(torch.zeros(3, H))
    y, bias = y if return_bias else (y, y)
    assert (y.dtype, bias.dtype) == (torch.bfloat16 if return_bias else torch.float32, torch.float32)
    assert torch.equal(bias[..., 0], torch.full_like(bias[..., 0], 1 + 2**-12))


def test_each_module_is_called_once_as_a_module():
    """So that wrappers and hooks on any of them see the pass, as FSDP's do."""
    seen = []
    layer = dMoE(args_of(shared_expert=True))
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

    layer, plain, x = Layer(args_of()), dMoE(args_of()), torch.randn(3, H)
    plain.load_state_dict(layer.state_dict())
    assert torch.allclose(layer(x)[0], 2 * plain(x)[0])


def test_a_subclass_may_take_other_arguments():
    class Named(dMoE):
        def __init__(self, name, args, scale=1.0):
            super().__init__(args)
            self.name, self.scale = name, scale

    layer = Named("first", args_of(), scale=2.0)
    assert (type(layer), layer.name, layer.scale) == (Named, "first", 2.0)
    assert layer(torch.randn(3, H))[0].shape == (3, H)


def test_a_subclass_finds_what_its_program_added_to_the_arguments():
    class Named(ParallelDroplessMLP):
        def __init__(self, args):
            super().__init__(args)
            self.name = args.name

    class Layer(dMoE):
        def _init_experts_mlp(self, args):
            return Named(args)

    args = args_of()
    args.name = "first"
    layer = Layer(args)
    args.moe_top_k = E + 1  # a layer reads its own copy
    assert (layer.experts.name, layer.args.name) == ("first", "first") and layer(torch.randn(3, H))[0].shape == (3, H)
    with pytest.raises(ValueError, match="^moe_top_k=4: must be at most"):
        Layer(args)


def test_a_subclass_finds_the_device_of_its_layer_in_the_arguments(monkeypatch):
    class Own(ParallelDroplessMLP):
        def __init__(self, args):
            super().__init__(args)
            self.own = torch.nn.Parameter(torch.empty(H, device=args.device))

    class Layer(dMoE):
        def _init_experts_mlp(self, args):
            return Own(args)

    args = args_of(device=None)
    monkeypatch.setattr(type(args), "resolve_device", lambda self: torch.device("meta"))
    assert {p.device.type for p in Layer(args).parameters()} == {"meta"} and args.device is None


def test_a_layer_with_a_capacity_refuses_none():
    with pytest.raises(ValueError, match="^moe_capacity_factor=None: must be a number in a capacity layer"):
        MoE(args_of(moe_capacity_factor=None))
    assert dMoE(args_of(moe_capacity_factor=None))(torch.randn(3, H))[0].shape == (3, H)


def test_F5_out_of_memory_names_sizes_and_changes(monkeypatch):
    def exhausted(self, *inputs):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    layer = dMoE(args_of())
    monkeypatch.setattr(type(layer.experts.mlp), "forward", exhausted)
    with pytest.raises(torch.OutOfMemoryError, match="6 tokens, hidden_size=12, .* the experts' 12 rows take"):
        layer(torch.zeros(3, 2, H))
