"""The layers against the written-out float64 layer: routing edges, numerics, every activation, autograd's corners."""

import contextlib
import copy
import logging

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from megablocks.config import ConfigError
from megablocks.kinds import MLP_IMPLS
from megablocks.moe import Experts, dMoE
from megablocks.moe.dispatchers import LocalDispatcher
from megablocks.moe.groups import ExpertShard
from megablocks.moe.router import TopKRouter
from megablocks.moe.shared_expert import SharedExpert
from megablocks.ops.activation_table import ACTIVATIONS
from megablocks.ops.routing.capacity import apply_capacity
from megablocks.ops.routing.dispatch import Routing, make_routing
from megablocks.testing.oracle import experts_oracle, relative_error
from megablocks.testing.poison import poisoned_empty
from megablocks.testing.routings import ragged, zipf
from megablocks.testing.tolerances import assert_as_exact_as

from .harness import KINDS, TOLERANCE, assert_equals_oracle, batch, build, config_of, oracle, parameters_of

every_kind = pytest.mark.parametrize("kind", KINDS)


def _steer(layer, x, pull):
    """Make feature 0 a constant 1 that adds pull[e] to expert e's logit."""
    with torch.no_grad():
        layer.router.layer.weight.mul_(0.1)
        layer.router.layer.weight[:, 0] = torch.tensor(pull)
        x[:, 0] = 1.0


@every_kind
def test_R1_an_empty_expert(kind):
    config = config_of(kind)
    layer, (x, dy) = build(kind, config), batch(config, 9)
    _steer(layer, x, [0.0, -6.0, 0.0, 0.0])
    aux, _ = assert_equals_oracle(layer, x, dy)
    assert aux.metrics["tokens_per_expert"][1] == 0
    width = config.ffn_hidden_size
    for name in ("w1", "v1", "w2"):
        assert (getattr(layer.experts, name).grad[width : 2 * width] == 0).all(), name
    for name in ("b1", "c1", "b2"):
        assert (getattr(layer.experts, name).grad[1] == 0).all(), name


@every_kind
def test_R2_all_tokens_to_one_expert(kind):
    config = config_of(kind, top_k=1)
    layer, (x, dy) = build(kind, config), batch(config, 9)
    _steer(layer, x, [0.0, 0.0, 4.0, 0.0])
    aux, _ = assert_equals_oracle(layer, x, dy)
    assert aux.metrics["tokens_per_expert"].tolist() == [0, 0, 9, 0]


@every_kind
def test_R3_zero_tokens(kind):
    config = config_of(kind)
    layer, (x, dy) = build(kind, config), batch(config, 0)
    assert_equals_oracle(layer, x, dy)
    assert all((p.grad == 0).all() for p in layer.parameters())


@every_kind
@pytest.mark.parametrize(
    "tokens, changes",
    [
        (1, {}),
        (5, dict(num_experts=1, top_k=1)),
        (6, dict(top_k=4)),
        (1, dict(num_experts=1, top_k=1)),
        (7, dict(num_experts=3)),
        (13, dict(num_experts=6, top_k=3, normalize_top_k=1.0)),
    ],
    ids=["T=1", "E=1", "K=E", "T=1,E=1", "E=3", "E=6"],
)
def test_R5_smallest_and_odd_counts(kind, tokens, changes):
    config = config_of(kind, **changes)
    assert_equals_oracle(build(kind, config), *batch(config, tokens))


@every_kind
@pytest.mark.parametrize("tokens", [129, 600])
def test_R6_sizes_that_are_no_multiples_of_128(kind, tokens):
    width = 192 if kind == "sparse" else 100
    config = config_of(kind, hidden_size=60, ffn_hidden_size=width, num_experts=5, init_std=0.1)
    assert_equals_oracle(build(kind, config), *batch(config, tokens))


def test_R6_a_width_that_blocks_do_not_divide():
    """Refused in one line where sparse is asked for, another way where it is not; half a width counts."""
    with pytest.raises(ConfigError) as error:
        config_of(mlp_impl="sparse", ffn_hidden_size=100)
    assert str(error.value) == (
        "ffn_hidden_size=100: must be a multiple of 64 with mlp_impl='sparse', or use mlp_impl='auto'"
    )
    whole = config_of("sparse", mlp_impl="sparse")
    with pytest.raises(ConfigError, match="ffn_hidden_size=64: must be a multiple of 64 on each of 2 shards with"):
        Experts(whole, shard=ExpertShard(0, 4, 0, 2))
    assert Experts(whole.replace(mlp_impl="auto"), shard=ExpertShard(0, 4, 0, 2)).mlp_impl_for() == "grouped"


@pytest.mark.parametrize("impl", KINDS[:-1])
def test_R7_an_expert_twice_and_no_expert(impl):
    config = config_of(impl, mlp_impl=impl)
    routing = ragged(30, config.num_experts, config.top_k, seed=3)
    assert (routing.expert < 0).any() and (routing.expert >= config.num_experts).any()
    pairs = list(zip(routing.token.tolist(), routing.expert.tolist(), strict=True))
    assert len(set(pairs)) < len(pairs), "no token has an expert twice"
    experts, (x, dy) = Experts(config, seed=1), batch(config, 30)
    x.requires_grad_()
    weight = routing.weight.float().requires_grad_()
    with poisoned_empty():
        y = LocalDispatcher(None, 4).run(x, Routing(routing.token, routing.expert, weight, 30, 4), experts)
        y.backward(dy)
    parameters = {n: p.detach().double().requires_grad_() for n, p in experts.named_parameters()}
    wide, wide_weight = x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    expected = experts_oracle(wide, routing.token, routing.expert, wide_weight, parameters, 4, config.activation)
    expected.backward(dy.double())
    for actual, wanted in [(y, expected), (x.grad, wide.grad), (weight.grad, wide_weight.grad)]:
        assert relative_error(actual.detach(), wanted.detach()) < TOLERANCE
    for name, p in experts.named_parameters():
        assert relative_error(p.grad, parameters[name].grad) < TOLERANCE, name


@pytest.mark.parametrize("impl", KINDS[:-1])
@pytest.mark.parametrize("capacity", [0, 1, 4])
def test_R9_what_a_capacity_drops_reaches_no_expert(impl, capacity):
    """An expert takes the earliest pairs; a dropped one, as padding, adds to no output and gives no gradient."""
    config = config_of(impl)
    routing = zipf(11, config.num_experts, config.top_k)
    padding = torch.arange(11) % 4 == 1
    ids = routing.expert.view(11, -1).masked_fill(padding.unsqueeze(1), -1)
    taken, kept = [0] * config.num_experts, ids.flatten().tolist()
    for i, e in enumerate(kept):
        if e >= 0:
            taken[e] += 1
            kept[i] = e if taken[e] <= capacity else -1
    weight = torch.rand(11, config.top_k, requires_grad=True)
    dropped = apply_capacity(make_routing(routing.expert.view(11, -1), weight, 4, padding_mask=padding), capacity)
    assert dropped.metrics["dropped"] == sum(max(0, t - capacity) for t in taken)
    experts = build(impl, config).experts
    x, dy = batch(config, 11)
    y = LocalDispatcher(None, 4).run(x.requires_grad_(), dropped, experts)
    y.backward(dy)
    wide = {n: p.detach().double().requires_grad_() for n, p in experts.named_parameters()}
    wide_x, wide_weight = (t.detach().double().requires_grad_() for t in (x, weight))
    token = torch.arange(11).repeat_interleave(config.top_k)
    truth = experts_oracle(wide_x, token, torch.tensor(kept), wide_weight.flatten(), wide, 4, config.activation)
    truth = truth + 0 * sum(t.sum() for t in (wide_x, wide_weight, *wide.values()))
    truth.backward(dy.double())
    assert relative_error(y.detach(), truth.detach()) < TOLERANCE
    for got, want in ((x, wide_x), (weight, wide_weight), *((p, wide[n]) for n, p in experts.named_parameters())):
        assert relative_error(got.grad, want.grad) < TOLERANCE
    assert not weight.grad.flatten()[torch.tensor(kept) < 0].any()


@every_kind
def test_R8_non_contiguous_x_and_stride_0_gradient(kind):
    config = config_of(kind)
    layer = build(kind, config)
    x = torch.randn(config.hidden_size, 7, generator=torch.Generator().manual_seed(2)).t()
    assert not x.is_contiguous()
    parameters = parameters_of(layer)
    assert_equals_oracle(layer, x.view(7, 1, -1).expand(7, 2, -1), torch.ones(7, 2, config.hidden_size))
    layer.zero_grad()
    leaf = x.clone(memory_format=torch.preserve_format).requires_grad_()
    with poisoned_empty():
        y, _ = layer.forward_with_aux(leaf)
        y.sum().backward()  # its gradient is one value with strides 0
    wide = x.double().requires_grad_()
    oracle(layer.config, parameters, wide)[0].sum().backward()
    assert relative_error(leaf.grad, wide.grad) < TOLERANCE
    assert relative_error(layer.experts.w1.grad, parameters["experts.w1"].grad) < TOLERANCE


@every_kind
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_N1_error_within_twice_that_of_torch(kind, dtype):
    """Against torch's own matmul and gelu in the same dtype, expert by expert."""
    width = 64 if kind == "sparse" else 48
    config = config_of(activation="gelu", hidden_size=32, ffn_hidden_size=width, mlp_bias=False, top_k=1, init_std=0.1)
    layer = build(kind, config).experts.to(dtype)
    draw = torch.Generator().manual_seed(4)
    x = torch.randn(40, 32, generator=draw).to(dtype)
    counts = [12, 0, 20, 8]
    offsets = torch.tensor([0, 12, 12, 32, 40], dtype=torch.int32)

    def loop(x, w1, w2):
        rows = zip(x.split(counts), w1.chunk(4), w2.chunk(4), strict=True)
        return torch.cat([torch.nn.functional.gelu(part @ a.t(), approximate="tanh") @ b for part, a, b in rows])

    truth = loop(x.double(), layer.w1.double(), layer.w2.double())
    if kind == "batched":
        bins = torch.zeros(4, 20, 32, dtype=dtype)
        for e, part in enumerate(x.split(counts)):
            bins[e, : counts[e]] = part
        out = layer.forward_padded(bins)
        result = torch.cat([out[e, : counts[e]] for e in range(4)])
    else:
        result = layer.forward_sorted(x, offsets)
    assert_as_exact_as(result, loop(x, layer.w1, layer.w2), truth)


@every_kind
def test_N3_a_nan_stays_in_its_token(kind):
    config = config_of(kind, load_balancing_loss_weight=0.0, z_loss_weight=0.0)
    layer, (x, dy) = build(kind, config), batch(config, 9)
    clean, _ = layer.forward_with_aux(x)
    x[3, 5] = float("nan")
    x.requires_grad_()
    with poisoned_empty():
        y, aux = layer.forward_with_aux(x)
        y.backward(dy)
    others = [t for t in range(9) if t != 3]
    assert torch.allclose(y[others], clean[others], rtol=1e-6, atol=1e-6)
    assert y[3].isnan().any()
    assert x.grad[others].isfinite().all()
    assert aux.metrics["tokens_per_expert"].sum() == 9 * config.top_k, "an id left [0, E)"


@every_kind
def test_N5_backward_twice_through_one_graph(kind):
    config = config_of(kind, recompute_activation=True)
    layer, (x, dy) = build(kind, config), batch(config, 9)
    x.requires_grad_()
    y, aux = layer.forward_with_aux(x)
    total = (y * dy).sum() + sum(aux.losses.values())
    total.backward(retain_graph=True)
    first = [t.grad.clone() for t in (x, *layer.parameters())]
    total.backward()
    for once, twice in zip(first, (x, *layer.parameters()), strict=True):
        assert torch.equal(twice.grad, 2 * once)


@every_kind
@pytest.mark.parametrize("frozen", ["experts", "router", "experts.w1", "experts.w2", "x"])
@pytest.mark.parametrize("recompute", [False, True])
def test_N5_frozen_parts(kind, frozen, recompute):
    """What is frozen gets no gradient; everything else gets the one it gets without."""
    config = config_of(kind, recompute_activation=recompute)
    whole, layer = build(kind, config), build(kind, config)
    x, dy = batch(config, 9)
    assert_equals_oracle(whole, x, dy)
    for name, p in layer.named_parameters():
        p.requires_grad_(not name.startswith(frozen))
    x.requires_grad_(frozen != "x")
    y, aux = layer.forward_with_aux(x)
    ((y * dy).sum() + sum(aux.losses.values())).backward()
    for (name, p), full in zip(layer.named_parameters(), whole.parameters(), strict=True):
        if name.startswith(frozen):
            assert p.grad is None, name
        else:
            assert torch.allclose(p.grad, full.grad, rtol=1e-6, atol=1e-7), name


@every_kind
def test_N5_autocast_bf16(kind):
    config = config_of(kind)
    layer, (x, dy) = build(kind, config), batch(config, 9)
    assert_equals_oracle(layer, x, dy)
    expected = [p.grad.clone() for p in layer.parameters()]
    layer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, aux = layer.forward_with_aux(x)
    assert y.dtype == torch.bfloat16
    assert all(loss.dtype == torch.float32 for loss in aux.losses.values())
    ((y.float() * dy).sum() + sum(aux.losses.values())).backward()
    for p, wanted in zip(layer.parameters(), expected, strict=True):
        assert p.grad.dtype == torch.float32
        assert relative_error(p.grad, wanted) < 0.05


@every_kind
@pytest.mark.parametrize("reentrant", [False, True])
def test_N5_activation_checkpointing_counts_the_loss_once(kind, reentrant):
    config = config_of(kind)
    plain, layer = build(kind, config), build(kind, config)
    x, dy = batch(config, 9)
    y, aux = plain.forward_with_aux(x)
    ((y * dy).sum() + sum(aux.losses.values())).backward()

    def run(inputs):
        y, aux = layer.forward_with_aux(inputs)
        return y, sum(aux.losses.values())

    y2, losses = checkpoint(run, x.clone().requires_grad_(), use_reentrant=reentrant)
    assert torch.equal(losses.detach(), sum(aux.losses.values()).detach())
    ((y2 * dy).sum() + losses).backward()
    for (name, p), q in zip(plain.named_parameters(), layer.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad), name


def test_N6_every_path_computes_the_same():
    config = config_of("sparse", shared_expert_hidden_size=16, shared_expert_gate=True, output_bias=True)
    x, dy = batch(config, 33)
    results = {}
    shared = None
    for kind in KINDS:
        layer = build(kind, config)
        shared = layer.shared_expert.state_dict() if shared is None else shared
        layer.shared_expert.load_state_dict(shared)
        y, aux = layer.forward_with_aux(x)
        ((y * dy).sum() + sum(aux.losses.values())).backward()
        results[kind] = [y.detach(), *(p.grad for p in layer.parameters())]
    for kind in set(KINDS) - {"reference"}:
        for actual, wanted in zip(results[kind], results["reference"], strict=True):
            assert relative_error(actual, wanted) < 1e-6, kind


@every_kind
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("recompute, bias, approximate", [(False, True, "none"), (True, False, "tanh")])
def test_N10_every_activation(kind, activation, recompute, bias, approximate):
    config = config_of(
        kind, activation=activation, recompute_activation=recompute, mlp_bias=bias, gelu_approximate=approximate
    )
    assert_equals_oracle(build(kind, config), *batch(config, 11))


def test_shared_expert_is_added_and_gated():
    config = config_of(shared_expert_hidden_size=16, shared_expert_gate=True, output_bias=True)
    layer, (x, _) = build("grouped", config), batch(config, 5)
    shared = layer.shared_expert
    with torch.no_grad():
        shared.gate.copy_(torch.randn(12, generator=torch.Generator().manual_seed(1)))
    dense = shared.down_proj(torch.nn.functional.silu(shared.gate_proj(x)) * shared.up_proj(x))
    with_it, _ = layer.forward_with_aux(x)
    layer.shared_expert = None
    without, _ = layer.forward_with_aux(x)
    assert torch.allclose(with_it - without, dense * torch.sigmoid(x @ shared.gate)[:, None], atol=1e-5)


def test_a_shared_expert_that_is_drawn_again_has_biases_of_0():
    expert = SharedExpert(config_of(shared_expert_hidden_size=16, shared_expert_gate=True, init_std=0.5), bias=True)
    with torch.no_grad():
        for parameter in expert.parameters():
            parameter.fill_(7.0)
    expert.reset_parameters()
    for name, parameter in expert.named_parameters():
        if name == "gate" or name.endswith(".bias"):
            assert not parameter.any()
        else:
            assert 0 < parameter.abs().max() < 3


def test_forward_leaves_losses_out_and_says_so():
    config = config_of()
    layer, (x, _) = build("grouped", config), batch(config, 5)
    with pytest.warns(UserWarning, match="forward_with_aux"):
        y = layer(x)
    assert torch.equal(y, layer.forward_with_aux(x)[0])
    torch._dynamo.reset()
    with pytest.warns(UserWarning, match="forward_with_aux"):
        assert torch.equal(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), y)
    layer.eval()
    assert layer.forward_with_aux(x)[1].losses == {}


@pytest.mark.parametrize("impl", ["grouped", "fused", "scatter", "batched"])
def test_weights_on_meta_refuse_rows_with_values(impl):
    """Without an error the output would be unset memory."""
    config = config_of()
    layer, (x, _) = build(impl, config).to("meta"), batch(config, 5)
    with pytest.raises(ValueError, match='^x: is on cpu, the experts are on "meta": call to_empty and'):
        layer.forward_with_aux(x)


def test_expert_choice_trains_the_router():
    config = config_of(router_type="expert_choice", top_k=1)
    layer, (x, dy) = build("grouped", config), batch(config, 8)
    y, aux = layer.forward_with_aux(x)
    (y * dy).sum().backward()
    assert aux.metrics["tokens_per_expert"].tolist() == [2, 2, 2, 2]
    assert layer.router.layer.weight.grad.abs().sum() > 0


def test_what_the_layer_refuses():
    with pytest.raises(ConfigError, match=r"capacity_factor=1.5: must be None for dMoE"):
        dMoE(config_of(capacity_factor=1.5))
    with pytest.raises(ConfigError, match=r"^config is a dict: must be a MoEConfig; MoEConfig.from_dict converts"):
        dMoE({"hidden_size": 12})
    with pytest.raises(ValueError, match=r"x: has shape \(3, 7\), its last dimension must be hidden_size=12"):
        build("grouped", config_of())(torch.zeros(3, 7))
    with pytest.raises(ValueError, match=r"x: has shape \(\), its last dimension must be hidden_size=12"):
        build("grouped", config_of())(torch.tensor(1.0))
    with pytest.raises(ValueError, match=r"x: has dtype torch.float64, must be the experts' torch.float32"):
        build("grouped", config_of()).experts.forward_padded(torch.zeros(4, 1, 12, dtype=torch.float64))


META = [(kind, {}) for kind in KINDS if kind not in ("reference", "batched")] + [
    ("grouped", {"quantize_scatter_num_bits": 8}),
    ("grouped", {"router_type": "expert_choice"}),
    ("fused", {"recompute_activation": True, "shared_expert_hidden_size": 8, "output_bias": True}),
    ("batched", {"capacity_factor": 1.25}),
]


@pytest.mark.parametrize(("kind", "changes"), META)
def test_meta_gives_the_shapes_of_a_step(kind, changes):
    """Output, losses, metrics and gradients on "meta" are as on a CPU, without values."""
    steps = []
    for device in ("cpu", "meta"):
        layer = build(kind, config_of(kind, **changes)).to(device)
        x = torch.zeros(2, 7, 12, device=device, requires_grad=True)
        y, aux = layer.forward_with_aux(x)
        (y.sum() + sum(aux.losses.values())).backward()
        metrics = [value for name, value in aux.metrics.items() if name != "capacity"]
        found = [y, *aux.losses.values(), *metrics, x.grad, *(p.grad for p in layer.parameters())]
        assert all(t.device.type == device for t in found)
        steps.append([(t.shape, t.dtype, t.stride()) for t in found])
    assert steps[0] == steps[1]


@pytest.mark.parametrize(("kind", "changes"), META)
def test_fake_tensors_give_the_shapes_of_a_step(kind, changes):
    """Under FakeTensorMode a layer is built, with and without a seed, and its step has a CPU's shapes and dtypes."""
    config = config_of(kind, **changes)
    real = build(kind, config)
    steps = []
    for mode in (contextlib.nullcontext, FakeTensorMode):
        for seed in ({}, {"seed": 3}):
            with mode():
                layer = type(real)(real.config, device="cpu", dtype=torch.float32, **seed)
                x = torch.zeros(2, 7, 12, requires_grad=True)
                y, aux = layer.forward_with_aux(x)
                (y.sum() + sum(aux.losses.values())).backward()
            gradients = [x.grad, *(p.grad for p in layer.parameters())]
            found = [y, *aux.losses.values(), *aux.metrics.values(), *layer.parameters(), *gradients]
            assert all(t.device.type == "cpu" for t in found)
            steps.append([(t.shape, t.dtype, t.stride()) for t in found])
    assert steps[0] == steps[1] == steps[2] == steps[3]
    layer.load_state_dict(real.state_dict(), assign=True)
    assert torch.isfinite(layer.forward_with_aux(torch.zeros(2, 7, 12))[0]).all()


@pytest.mark.usefixtures("poison")
def test_a_layer_from_meta_is_drawn_whole_and_counts_from_0():
    """`to_empty` leaves what was in memory, also in buffers that no checkpoint holds."""
    options = dict(expert_score_bias=True, output_bias=True, shared_expert_hidden_size=8, shared_expert_gate=True)
    late = dMoE(config_of(**options), device="meta").to_empty(device="cpu")
    assert late.router.tokens_since_update.tolist() == late.router.expert_score_bias.tolist() == [0] * 4
    late.reset_parameters(seed=5)
    for name, expected in dMoE(config_of(**options), seed=5).state_dict().items():
        drawn = late.state_dict()[name]
        if "shared_expert" in name or "router.layer" in name:  # from torch's generator
            assert drawn.isfinite().all() and drawn.any() == expected.any(), name
        else:
            assert torch.equal(drawn, expected), name


def test_a_layer_from_meta_counts_and_is_marked_after_a_state_is_assigned():
    """A state contains neither the counts, without which the bias stays as it is, nor the mark for trainers."""
    config = config_of(expert_score_bias=True, expert_score_bias_rate=0.5)
    saved = dMoE(config)
    late = dMoE(config, device="meta")
    assert all(p.expert_model_parallel is False for p in saved.experts.parameters()), "one rank has all experts"
    for layer in (saved, late):
        layer.experts.mark(True)
    late.load_state_dict(copy.deepcopy(saved.state_dict()), assign=True)
    assert all(p.expert_model_parallel is True for p in late.experts.parameters())
    x = torch.randn(5, 12)
    for layer in (saved, late):
        layer.forward_with_aux(x)
        layer.router.update_expert_score_bias()
    assert late.router.expert_score_bias.any()
    assert torch.equal(late.router.expert_score_bias, saved.router.expert_score_bias)


def test_meta_has_no_values_to_read():
    x = torch.empty(3, 12, device="meta")
    with pytest.raises(ConfigError, match="mlp_impl='reference': reads values; on device \"meta\" use another one"):
        build("reference", config_of()).to("meta")(x)
    with pytest.raises(ConfigError, match='capacity_factor=0: reads the loads; on device "meta" must be > 0'):
        build("batched", config_of()).to("meta")(x)


@pytest.mark.parametrize("impl", [*(impl for impl in MLP_IMPLS if impl != "reference"), "batched"])
def test_N9_compile_a_whole_layer(impl):
    """Router, experts and losses in one graph, equal to eager."""
    config = config_of("sparse", **({"capacity_factor": 1.25} if impl == "batched" else {"mlp_impl": impl}))
    plain, layer = build(impl, config), build(impl, config)
    x, dy = batch(config, 9)
    y, aux = plain.forward_with_aux(x)
    ((y * dy).sum() + sum(aux.losses.values())).backward()

    def run(x):
        y, aux = layer.forward_with_aux(x)
        return y, sum(aux.losses.values())

    compiled, losses = torch.compile(run, fullgraph=True, backend="aot_eager")(x)
    ((compiled * dy).sum() + losses).backward()
    assert torch.equal(compiled, y)
    for (name, p), q in zip(plain.named_parameters(), layer.parameters(), strict=True):
        assert torch.allclose(p.grad, q.grad, rtol=1e-6, atol=1e-7), name


def test_auto_says_once_what_it_picked(caplog):
    from megablocks.moe import experts

    experts._log_once.cache_clear()
    config = config_of(mlp_impl="auto")
    layer, (x, _) = dMoE(config), batch(config, 3)
    with caplog.at_level(logging.INFO, logger="megablocks.moe.experts"):
        layer.forward_with_aux(x)
        layer.forward_with_aux(x)
    assert [r.getMessage() for r in caplog.records] == ["mlp_impl='auto' on cpu in torch.float32: using 'grouped'"]


@pytest.mark.parametrize("frozen", [False, True])
def test_N5_no_second_derivative_of_a_fused_layer_is_silently_wrong(frozen):
    """x comes from a layer before, whose gradient would lack what passes through the first derivative."""
    layer = build("fused", config_of("fused", load_balancing_loss_weight=0.0, z_loss_weight=0.0)).double()
    layer.requires_grad_(not frozen)
    before = torch.nn.Linear(12, 12, dtype=torch.float64)
    x = before(torch.randn(9, 12, dtype=torch.float64))
    y = layer.forward_with_aux(x)[0]
    with pytest.raises(RuntimeError, match="no second derivative is known|no autograd formula"):
        (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        (y.sum() + first.square().sum()).backward()


@pytest.mark.parametrize(
    "owner, name",
    [
        (torch.nn.Linear, "forward"), (TopKRouter, "route"), (LocalDispatcher, "run"), (dMoE, "_dispatch"),
        (Experts, "forward"),
    ],
    ids=str,
)  # fmt: skip
def test_N10_a_method_replaced_on_its_class_is_called_and_its_gradients_are_whole(owner, name, monkeypatch):
    """Each doubles its first argument, the logits or x; the fused implementation then equals the reference."""
    original, results = getattr(owner, name), []
    for kind in ("fused", "reference"):
        layer = build(kind, config_of(kind)).double()
        x = batch(layer.config, 9)[0].double().requires_grad_()
        monkeypatch.setattr(owner, name, lambda self, x, *args, **options: original(self, 2 * x, *args, **options))
        y = layer.forward_with_aux(x)[0]
        results.append([y.detach(), *torch.autograd.grad((y * y.detach().sin()).sum(), [x, *layer.parameters()])])
        monkeypatch.undo()
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-9)
