"""Experts' parameters: drawn alike for every spread over ranks, allocated once at their local size."""

import gc

import pytest
import torch

from megablocks.moe import Experts, impls
from megablocks.moe.groups import ExpertShard
from megablocks.moe.impls import _BatchedLinear, choose_impl, runs_on_hopper
from megablocks.ops.routing.dispatch import build_dispatch, make_routing
from megablocks.testing.oracle import experts_oracle, relative_error
from megablocks.testing.poison import poisoned_empty

from .harness import config_of


def _whole(config, **kwargs):
    experts = Experts(config, seed=9, **kwargs)
    shape = config.num_experts, -1, config.hidden_size
    return {name: getattr(experts, name).detach().view(shape) for name in ("w1", "v1", "w2")}


def test_every_spread_draws_the_same_weights():
    config = config_of(ffn_hidden_size=20, output_init_std=0.05)
    whole = _whole(config)
    assert len({round(float(t.sum()), 6) for w in whole.values() for t in w}) == 3 * config.num_experts
    for blocks, shards in ((1, 1), (2, 1), (4, 1), (2, 2), (1, 4)):
        local = config.num_experts // blocks
        for block in range(blocks):
            for shard in range(shards):
                part = Experts(config, shard=ExpertShard(block * local, local, shard, shards), seed=9)
                for name, full in whole.items():
                    cut = full[block * local : (block + 1) * local].chunk(shards, dim=1)[shard]
                    assert torch.equal(getattr(part, name).view(cut.shape), cut), (blocks, shards, name)


def test_standard_deviations_and_own_initializers():
    config = config_of(hidden_size=64, ffn_hidden_size=64, init_std=0.02, output_init_std=0.005)
    whole = _whole(config)
    assert whole["w1"].std().item() == pytest.approx(0.02, rel=0.05)
    assert whole["v1"].std().item() == pytest.approx(0.02, rel=0.05)
    assert whole["w2"].std().item() == pytest.approx(0.005, rel=0.05)
    assert not torch.equal(whole["w1"], whole["v1"])
    own = _whole(config, init_method=torch.nn.init.ones_, output_init_method=torch.nn.init.zeros_)
    assert (own["w1"] == 1).all() and (own["w2"] == 0).all()


def test_drawing_leaves_the_generator_alone_when_seeded():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    Experts(config_of(), seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(3)
    first = Experts(config_of())
    torch.manual_seed(3)
    again, other = Experts(config_of()), Experts(config_of())
    assert torch.equal(first.w1, again.w1) and not torch.equal(first.w1, other.w1)


def test_memory_is_local_from_the_start():
    """Built for 1 of 64 experts, no tensor is ever larger than one expert."""
    config = config_of(hidden_size=16, ffn_hidden_size=32, num_experts=64)
    largest = []

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.is_floating_point():
                largest.append(out.numel())
            return out

    with Watch():
        Experts(config, shard=ExpertShard(63, 1), seed=0)
    assert max(largest) == 16 * 32
    gc.collect()


def test_meta_device_allocates_nothing():
    assert Experts(config_of(), device="meta").w1.is_meta


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("impl", ["grouped", "sparse"])
def test_what_is_kept_for_backward(impl, recompute, activation):
    """Floats that autograd keeps, to the byte: weights and their pairs' factors, tokens, pre-activations, outputs."""
    tokens, hidden, width = 40, 12, 64
    config = config_of("sparse", activation=activation, recompute_activation=recompute, mlp_impl=impl, mlp_bias=False)
    experts = Experts(config, seed=0)
    routing = make_routing(torch.arange(80).remainder(4).view(tokens, 2), torch.rand(tokens, 2), 4)
    x, weight = torch.randn(tokens, hidden, requires_grad=True), routing.weight.requires_grad_()
    storages = {}

    def pack(tensor):
        if tensor.is_floating_point():
            storages[tensor.untyped_storage().data_ptr()] = (tensor.untyped_storage().nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = experts(x, build_dispatch(routing), weight)
    kept = sum(size for size, _ in storages.values())
    y.sum().backward()
    # padded, 20 rows an expert take a block of 64; the bound on all experts' blocks is one more
    rows = 80 if impl == "grouped" else (80 + 4 * 63) // 64 * 64
    of_inputs = tokens * hidden if impl == "grouped" else rows * hidden
    of_width = (2 if config.is_gated else 1) + (0 if recompute else 1)
    weights = sum(p.numel() for p in experts.parameters()) + 80
    assert kept == 4 * (weights + of_inputs + of_width * rows * width + rows * hidden)


PAPER = dict(on_hopper=True, dtype=torch.float16, saves_less=False, num_experts=64)
PAPER |= dict(hidden_size=512, ffn_hidden_size=2048)


@pytest.mark.parametrize(
    "changes",
    [
        dict(on_hopper=False),
        dict(dtype=torch.float32),
        dict(saves_less=True),
        dict(hidden_size=516),
        dict(ffn_hidden_size=2044),
        dict(num_experts=513),
    ],
    ids=str,
)
def test_auto_fuses_what_its_kernels_take(changes):
    assert choose_impl(**PAPER) == "fused"
    assert choose_impl(**PAPER | changes) == "grouped"


def test_auto_takes_hoppers_kernels_for_off_when_they_are(monkeypatch):
    monkeypatch.setattr(impls, "is_available", lambda index: index == 1)
    monkeypatch.delenv("MEGABLOCKS_HOPPER", raising=False)
    assert runs_on_hopper(torch.device("cuda", 1))
    assert not runs_on_hopper(torch.device("cuda", 0)) and not runs_on_hopper(torch.device("cpu"))
    monkeypatch.setenv("MEGABLOCKS_HOPPER", "0")
    assert not runs_on_hopper(torch.device("cuda", 1))


def test_auto_on_this_device_and_in_words(monkeypatch):
    config = config_of(ffn_hidden_size=128, activation="gelu", mlp_impl="auto")
    experts = Experts(config, dtype=torch.bfloat16)
    assert experts.mlp_impl_for() == "grouped" and "mlp_impl=auto (grouped)" in repr(experts)
    sparse = Experts(config.replace(mlp_impl="sparse"))
    assert sparse.mlp_impl_for() == "sparse" and "mlp_impl=sparse" in repr(sparse)
    monkeypatch.setattr(impls, "runs_on_hopper", lambda device: True)
    assert experts.mlp_impl_for() == "grouped"  # rows of 12 values are not aligned
    config = config.replace(hidden_size=16)
    for mlp_bias in (False, True):
        experts = Experts(config.replace(mlp_bias=mlp_bias), dtype=torch.bfloat16)
        assert experts.mlp_impl_for() == "fused" and "mlp_impl=auto (fused)" in repr(experts)
    assert experts.mlp_impl_for(dtype=torch.float32) == "grouped"
    for kept in ("quantize_inputs_num_bits", "quantize_rematerialize_num_bits", "quantize_scatter_num_bits"):
        assert Experts(config.replace(**{kept: 8}), dtype=torch.bfloat16).mlp_impl_for() == "grouped", kept
    assert Experts(config.replace(recompute_activation=True), dtype=torch.bfloat16).mlp_impl_for() == "grouped"


@pytest.mark.parametrize(
    "shard, message",
    [
        (ExpertShard(2, 3), r"expert_offset=2, num_local_experts=3: must lie within num_experts=4"),
        (ExpertShard(0, 4, 2, 2), r"ffn_rank=2, ffn_size=2: must be 0 <= ffn_rank < ffn_size"),
        (ExpertShard(0, 4, 0, 3), r"ffn_size must divide ffn_hidden_size=20"),
    ],
)
def test_impossible_shards_are_refused(shard, message):
    with pytest.raises(ValueError, match=message):
        Experts(config_of(), shard=shard)


@pytest.mark.parametrize("impl", ["reference", "grouped", "sparse", "scatter", "fused"])
@pytest.mark.parametrize(
    "scale, tokens, dtype, of_output",
    [
        (0.25, 9, torch.float32, True),
        (0.25, 9, torch.bfloat16, True),
        (1 / 3, 9, torch.float32, False),  # not a power of two
        (0.25, 9, torch.float16, False),  # too small a range
        (0.25, 300, torch.float32, False),  # more rows than the matrices have
    ],
)
def test_only_gradients_of_parameters_are_scaled(impl, scale, tokens, dtype, of_output):
    config = config_of("sparse", mlp_impl=impl)
    whole, scaled = (Experts(config, seed=0, grad_scale=s, dtype=dtype) for s in (1.0, scale))
    draw = torch.Generator().manual_seed(0)
    ids = torch.rand(tokens, config.num_experts, generator=draw).topk(2, 1).indices
    values, weights = (torch.randn(tokens, n, generator=draw) for n in (config.hidden_size, 2))
    values, results = values.to(dtype), []
    for experts in (whole, scaled):
        x, weight = (t.clone().requires_grad_() for t in (values, weights))
        routing = make_routing(ids, weight, config.num_experts)
        y = experts(x, build_dispatch(routing), routing.weight)
        y.backward(values.flip(0))
        results.append([y.detach(), x.grad, weight.grad])
        assert experts._grad_scales(x) == ((1.0, experts.grad_scale) if experts is whole or of_output else (scale, 1.0))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
    for (name, p), q in zip(whole.named_parameters(), scaled.parameters(), strict=True):
        assert torch.equal(p, q)
        if of_output:
            assert torch.equal(q.grad, p.grad * scale), name
        else:
            assert relative_error(q.grad.double(), p.grad.double() * scale) < 1e-3, name


@pytest.mark.parametrize("impl", ["reference", "grouped", "sparse"])
def test_R5_sorted_rows_with_unused_ones_behind(impl):
    """Megatron's entry: rows stand sorted already; what lies behind the last expert's, NaN here, reaches nothing."""
    config = config_of("sparse", mlp_impl=impl)
    experts, draw = Experts(config, seed=2), torch.Generator().manual_seed(5)
    rows = torch.randn(12, config.hidden_size, generator=draw)
    offsets = torch.tensor([0, 4, 4, 5, 9], dtype=torch.int32)
    parameters = {n: p.detach().double().requires_grad_() for n, p in experts.named_parameters()}
    token, expert = torch.arange(9), torch.tensor([0] * 4 + [2] + [3] * 4)
    wide = rows[:9].double().requires_grad_()
    truth = experts_oracle(wide, token, expert, torch.ones(9).double(), parameters, 4, config.activation)
    truth.square().sum().backward()
    rows[9:] = float("nan")
    rows.requires_grad_()
    with poisoned_empty():
        y = experts.forward_sorted(rows, offsets)[:9]
        y.square().sum().backward()
    assert relative_error(y.detach(), truth.detach()) < 1e-5
    assert relative_error(rows.grad[:9], wide.grad) < 1e-5
    for name, p in experts.named_parameters():
        assert relative_error(p.grad, parameters[name].grad) < 1e-5, name


def test_the_padded_projections_gradient_lies_as_its_weight_does():
    draw = torch.Generator().manual_seed(3)
    x, w, dy = (torch.randn(*size, generator=draw).double() for size in ((3, 5, 4), (3, 6, 4), (3, 5, 6)))
    a, b = (t.clone().requires_grad_() for t in (x, w))
    expected = torch.autograd.grad(torch.bmm(a, b.mT), [a, b], dy)
    for leaves in ("xw", "x", "w"):  # frozen experts, or nothing below that needs a gradient
        x.requires_grad_("x" in leaves)
        w.requires_grad_("w" in leaves)
        wanted = [t for t in (x, w) if t.requires_grad]
        got = torch.autograd.grad(_BatchedLinear.apply(x, w), wanted, dy)
        for grad, truth in zip(got, [g for g, name in zip(expected, "xw", strict=True) if name in leaves], strict=True):
            torch.testing.assert_close(grad, truth)
            assert grad.is_contiguous()
