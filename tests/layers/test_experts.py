"""Experts' parameters: drawn alike for every spread over ranks, allocated once at their local size."""

import gc

import pytest
import torch

from layers.harness import config_of
from megablocks.layers import Experts
from megablocks.ops.routing.dispatch import build_dispatch, make_routing


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
                part = Experts(
                    config, num_local_experts=local, expert_offset=block * local, ffn_shard=(shard, shards), seed=9
                )
                for name, full in whole.items():
                    cut = full[block * local : (block + 1) * local].chunk(shards, dim=1)[shard]
                    assert torch.equal(getattr(part, name).view(cut.shape), cut), (blocks, shards, name)


def test_standard_deviations_and_own_initialisers():
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
        Experts(config, num_local_experts=1, expert_offset=63, seed=0)
    assert max(largest) == 16 * 32
    gc.collect()


def test_meta_device_allocates_nothing():
    assert Experts(config_of(), device="meta").w1.is_meta


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_recompute_keeps_less_for_backward(activation):
    """What autograd keeps in the grouped path shrinks by the activation (R, I) and by nothing else."""
    kept = {}
    routing = make_routing(torch.arange(80).remainder(4).view(40, 2), torch.ones(40, 2), 4)
    dispatch = build_dispatch(routing)
    x = torch.randn(40, 12)
    for recompute in (False, True):
        config = config_of(activation=activation, recompute_activation=recompute, mlp_impl="grouped", mlp_bias=False)
        experts = Experts(config, seed=0)
        storages = {}

        def pack(tensor, storages=storages):
            storages[tensor.untyped_storage().data_ptr()] = (tensor.untyped_storage().nbytes(), tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            y = experts(x.clone().requires_grad_(), dispatch, routing.weight)
        kept[recompute] = sum(size for size, _ in storages.values())
        y.sum().backward()
    assert kept[False] - kept[True] == 80 * 20 * 4


@pytest.mark.parametrize(
    "kwargs, message",
    [
        (dict(num_local_experts=3, expert_offset=2), r"expert_offset=2, num_local_experts=3: must lie within"),
        (dict(ffn_shard=(2, 2)), r"ffn_shard=\(2, 2\): must be \(rank, size\)"),
        (dict(ffn_shard=(0, 3)), r"size must divide ffn_hidden_size=20"),
    ],
)
def test_impossible_shards_are_refused(kwargs, message):
    with pytest.raises(ValueError, match=message):
        Experts(config_of(), **kwargs)


def test_gradients_are_scaled_and_values_are_not():
    config = config_of()
    whole, scaled = Experts(config, seed=0), Experts(config, seed=0, grad_scale=0.25)
    routing = make_routing(torch.tensor([[0, 1], [2, 3], [3, 0]]), torch.ones(3, 2), 4)
    x = torch.randn(3, 12)
    for experts in (whole, scaled):
        experts(x, build_dispatch(routing), routing.weight).sum().backward()
    for (name, p), q in zip(whole.named_parameters(), scaled.parameters(), strict=True):
        assert torch.equal(p, q)
        assert torch.allclose(q.grad, p.grad / 4), name
