"""Layers on a GPU, each way of computing experts: values, identical reruns, kernels launched, no wait for the host."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megablocks.config import MoEConfig
from megablocks.moe import Experts
from megablocks.moe.dispatchers import LocalDispatcher
from megablocks.ops.routing.dispatch import Routing, build_dispatch, make_routing
from megablocks.testing.oracle import experts_oracle, relative_error
from megablocks.testing.poison import poisoned_empty
from megablocks.testing.routings import ROUTINGS
from megablocks.testing.syncs import no_sync

from .harness import build

pytestmark = pytest.mark.gpu

IMPLS = ("grouped", "sparse", "scatter", "fused")
every_impl = pytest.mark.parametrize("impl", IMPLS)
every_shape = pytest.mark.parametrize("activation, recompute", [("gelu", False), ("gelu", True), ("swiglu", True)])


def _experts(routing, impl, activation, dtype, width, recompute=False):
    """(actual, expected) of y, dx, dweight and each parameter's gradient, the latter by the loop in float64."""
    tokens, experts = routing.num_tokens, routing.num_experts
    config = MoEConfig(
        hidden_size=64, ffn_hidden_size=width, num_experts=experts, activation=activation, mlp_bias=True,
        mlp_impl=impl, recompute_activation=recompute, init_std=0.1,
    )  # fmt: skip
    module = Experts(config, seed=1, dtype=dtype)
    draw = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for bias in (module.b1, module.c1, module.b2):
            if bias is not None:
                bias.copy_(torch.randn(bias.shape, generator=draw))
    x, dy = (torch.randn(tokens, 64, generator=draw).to(dtype) for _ in range(2))
    weight = routing.weight.float()

    wide = {n: p.detach().double().requires_grad_() for n, p in module.named_parameters()}
    wide_x, wide_weight = x.double().requires_grad_(), weight.double().requires_grad_()
    truth = experts_oracle(wide_x, routing.token, routing.expert, wide_weight, wide, experts, activation)
    truth.backward(dy.double())

    module.cuda()
    x, weight = x.cuda().requires_grad_(), weight.cuda().requires_grad_()
    moved = Routing(routing.token.cuda(), routing.expert.cuda(), weight, tokens, experts, routing.top_k)
    with poisoned_empty():
        y = LocalDispatcher(None, experts).run(x, moved, module)
        y.backward(dy.cuda())
    actual = {"y": y, "dx": x.grad, "dweight": weight.grad} | {n: p.grad for n, p in module.named_parameters()}
    expected = {"y": truth, "dx": wide_x.grad, "dweight": wide_weight.grad} | {n: p.grad for n, p in wide.items()}
    return {n: t.detach().cpu() for n, t in actual.items()}, {n: t.detach() for n, t in expected.items()}


@every_impl
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize("name", ROUTINGS)
def test_N6_bf16_experts_equal_float64(impl, activation, name):
    routing = ROUTINGS[name](300, 5, 2)
    actual, expected = _experts(routing, impl, activation, torch.bfloat16, 256)
    for key, value in actual.items():
        assert relative_error(value, expected[key]) < 0.02, key
        empty = expected[key].view(5, -1).abs().sum(1) == 0 if key not in ("y", "dx", "dweight") else None
        if empty is not None:  # R1: an empty expert's gradients are exactly 0
            assert (value.view(5, -1)[empty] == 0).all(), key


@pytest.mark.parametrize(
    "impl, dtype, width",
    [
        ("sparse", torch.bfloat16, 192), ("sparse", torch.float16, 128), ("grouped", torch.float16, 128),
        ("scatter", torch.float16, 100), ("fused", torch.float16, 128), ("fused", torch.bfloat16, 100),
    ],
)  # fmt: skip
def test_N6_other_blocks_and_types_equal_float64(impl, dtype, width):
    actual, expected = _experts(ROUTINGS["zipf"](129, 5, 2), impl, "swiglu", dtype, width, recompute=True)
    for key, value in actual.items():
        assert relative_error(value, expected[key]) < 0.02, key


@every_impl
def test_N1_float32_experts_equal_float64(impl):
    actual, expected = _experts(ROUTINGS["ragged"](129, 5, 2), impl, "geglu", torch.float32, 128)
    for key, value in actual.items():
        assert relative_error(value, expected[key]) < 1e-5, key


def _layer(impl, activation="gelu", recompute=False):
    config = MoEConfig(
        hidden_size=256, ffn_hidden_size=512, num_experts=8, top_k=2, activation=activation, mlp_impl=impl,
        recompute_activation=recompute, load_balancing_loss_weight=0.1, z_loss_weight=0.01,
    )  # fmt: skip
    return build(impl, config, device="cuda", dtype=torch.bfloat16)


def _batch(tokens, seed=0):
    draw = torch.Generator("cuda").manual_seed(seed)
    x, dy = (torch.randn(tokens, 256, generator=draw, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return x.requires_grad_(), dy


def _step(layer, x, dy):
    """[y, every loss, dx, every parameter's gradient]"""
    y, aux = layer.forward_with_aux(x)
    total = (y * dy).sum() + sum(aux.losses.values())
    return [y.detach(), *aux.losses.values(), *torch.autograd.grad(total, [x, *layer.parameters()])]


@every_impl
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("loads", ["spread", "one empty", "one full"])
@pytest.mark.parametrize("hidden, width, tokens", [(60, 128, 129), (129, 192, 600), (13, 64, 1), (600, 64, 100)])
def test_R1_R2_R6_float32_layer_equals_float64(impl, hidden, width, tokens, loads, recompute):
    """Output, losses, dx and each parameter's gradient, the router's too, of layers that no tile divides."""
    config = MoEConfig(
        hidden_size=hidden, ffn_hidden_size=width, num_experts=5, top_k=1 if loads == "one full" else 2,
        activation="swiglu", mlp_bias=True, recompute_activation=recompute, load_balancing_loss_weight=0.1,
        z_loss_weight=0.01, init_std=0.1,
    )  # fmt: skip
    layer, truth = build(impl, config, device="cuda"), build("reference", config).double()
    truth.load_state_dict(layer.state_dict())  # a GPU's generator draws other experts
    draw = torch.Generator().manual_seed(3)
    x, dy = (torch.randn(tokens, hidden, generator=draw) for _ in range(2))
    x[:, 0] = 1  # feature 0 carries a constant to the logits of experts 1 and 2
    pull = {"spread": (0.0, 0.0), "one empty": (-60.0, 0.0), "one full": (0.0, 60.0)}[loads]
    with torch.no_grad():
        for module in (layer, truth):
            module.router.layer.weight.mul_(0.1)
            module.router.layer.weight[1:3, 0] = torch.tensor(pull)
    results = []
    for module, like in ((layer, x.cuda()), (truth, x.double())):
        leaf = like.detach().requires_grad_()
        with poisoned_empty():
            y, aux = module.forward_with_aux(leaf)
            ((y * dy.to(like)).sum() + sum(aux.losses.values())).backward()
        named = {"y": y.detach(), "dx": leaf.grad} | {n: loss.detach() for n, loss in aux.losses.items()}
        results.append((named | {n: p.grad for n, p in module.named_parameters()}, aux))
    (got, aux), (want, _) = results
    load = aux.metrics["tokens_per_expert"].tolist()
    assert loads != "one empty" or load[1] == 0
    assert loads != "one full" or load == [0, 0, tokens, 0, 0]
    for name, value in want.items():
        assert relative_error(got[name].cpu(), value) < 1e-5, name
        if name.startswith("experts."):
            empty = torch.tensor(load) == 0
            assert not got[name].view(5, -1)[empty.cuda()].any(), name


@every_impl
@pytest.mark.parametrize("reentrant", [False, True])
def test_N5_activation_checkpointing_on_a_gpu(impl, reentrant):
    plain, layer, (x, dy) = _layer(impl, "swiglu"), _layer(impl, "swiglu"), _batch(1000)

    def run(inputs):
        y, aux = layer.forward_with_aux(inputs)
        return y, sum(aux.losses.values())

    wanted = _step(plain, x, dy)
    y, losses = checkpoint(run, x, use_reentrant=reentrant)
    assert torch.equal(losses, sum(wanted[1 : -1 - len(list(plain.parameters()))]))
    x.grad = None
    ((y * dy).sum() + losses).backward()
    for got, want in zip((x, *layer.parameters()), wanted[-1 - len(list(plain.parameters())) :], strict=True):
        assert torch.equal(got.grad, want)


@every_impl
def test_N5_two_backwards_and_frozen_parts_on_a_gpu(impl):
    layer, (x, dy) = _layer(impl, "swiglu"), _batch(1000)
    y, aux = layer.forward_with_aux(x)
    total, named = (y * dy).sum() + sum(aux.losses.values()), dict(layer.named_parameters())
    first = torch.autograd.grad(total, [x, *named.values()], retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(first, torch.autograd.grad(total, [x, *named.values()]), strict=True))
    for frozen in ("experts", "router", "experts.w1", "experts.w2", "x"):
        for name, p in named.items():
            p.requires_grad_(not name.startswith(frozen))
        leaf = x.detach().requires_grad_(frozen != "x")
        leaves = {n: t for n, t in (("x", leaf), *named.items()) if t.requires_grad}
        y, aux = layer.forward_with_aux(leaf)
        grads = torch.autograd.grad((y * dy).sum() + sum(aux.losses.values()), list(leaves.values()))
        for name, grad in zip(leaves, grads, strict=True):
            assert torch.equal(grad, dict(zip(("x", *named), first, strict=True))[name]), (frozen, name)


@every_impl
def test_N5_autocast_on_a_gpu(impl):
    config = _layer(impl, "swiglu").config
    layer = build(impl, config, device="cuda", dtype=torch.float32)
    x, dy = (t.detach().float() for t in _batch(1000))
    wanted = _step(layer, x.requires_grad_(), dy)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        y, aux = layer.forward_with_aux(x)
    assert y.dtype == torch.bfloat16 and all(loss.dtype == torch.float32 for loss in aux.losses.values())
    total = (y.float() * dy).sum() + sum(aux.losses.values())
    grads = torch.autograd.grad(total, [x, *layer.parameters()])
    for grad, want in zip(grads, wanted[-len(grads) :], strict=True):
        assert grad.dtype == torch.float32 and relative_error(grad.cpu(), want.cpu()) < 0.05


@every_impl
def test_N9_a_layer_compiles_in_one_graph_on_a_gpu(impl):
    plain, layer, (x, dy) = _layer(impl, "swiglu"), _layer(impl, "swiglu"), _batch(1000)
    wanted = _step(plain, x, dy)

    def run(x):
        y, aux = layer.forward_with_aux(x)
        return y, sum(aux.losses.values())

    y, losses = torch.compile(run, fullgraph=True, backend="aot_eager")(x)
    grads = torch.autograd.grad((y * dy).sum() + losses, [x, *layer.parameters()])
    assert relative_error(y.detach().cpu(), wanted[0].cpu()) < 1e-3
    for grad, want in zip(grads, wanted[-len(grads) :], strict=True):
        assert relative_error(grad.cpu(), want.cpu()) < 0.01


@every_impl
@every_shape
def test_no_host_synchronization(impl, activation, recompute):
    layer, (x, dy) = _layer(impl, activation, recompute), _batch(1000)
    _step(layer, x, dy)
    with no_sync():
        outcome = _step(layer, x, dy)
    assert all(t.isfinite().all() for t in outcome)


@every_impl
def test_N2_ten_reruns_are_bit_identical(impl):
    layer, (x, dy) = _layer(impl, "swiglu"), _batch(2000)
    first = _step(layer, x, dy)
    for _ in range(9):
        assert all(torch.equal(a, b) for a, b in zip(_step(layer, x, dy), first, strict=True))


@every_impl
@every_shape
def test_a_cuda_graph_replays_forward_and_backward(impl, activation, recompute):
    """Captured with one batch, replayed on others: another routing, the same kernels, the bits of eager."""
    layer, (x, dy) = _layer(impl, activation, recompute), _batch(1000)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            _step(layer, x, dy)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = _step(layer, x, dy)
    for seed in (1, 2):
        other_x, other_dy = _batch(1000, seed)
        with torch.no_grad():
            x.copy_(other_x)
            dy.copy_(other_dy)
        graph.replay()
        for replayed, eager in zip(captured, _step(layer, x, dy), strict=True):
            assert torch.equal(replayed, eager)


@every_impl
def test_graphed_callables_give_the_bits_of_eager(impl):
    """torch.cuda.make_graphed_callables takes a dMoE whole, as it never asks the host for a load."""
    config = MoEConfig(
        hidden_size=256, ffn_hidden_size=512, num_experts=8, top_k=2, activation="swiglu", mlp_impl=impl,
        load_balancing_loss_weight=0.0,
    )  # fmt: skip
    # two layers: a graph of autograd's that lives on would tie the parameters to the stream it was made on
    plain, graphed = (build(impl, config, device="cuda", dtype=torch.bfloat16) for _ in range(2))

    def step(called, layer, x, dy):
        y = called(x)
        return [y.detach(), *torch.autograd.grad(y, (x, *layer.parameters()), dy)]

    sample = torch.zeros_like(_batch(1000)[0], requires_grad=True)
    called = torch.cuda.make_graphed_callables(graphed, (sample,))
    for seed in (1, 2):
        replayed = [t.clone() for t in step(called, graphed, *_batch(1000, seed))]
        for again, expected in zip(replayed, step(plain, plain, *_batch(1000, seed)), strict=True):
            assert torch.equal(again, expected)


def _kernels(layer, tokens=1000):
    x, dy = _batch(tokens)
    _step(layer, x, dy)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        _step(layer, x, dy)
        torch.cuda.synchronize()
    return {event.name for event in profile.events()}


OWN = {
    "grouped": ("ragged_m_kernel",),
    "sparse": ("sdd_kernel", "spmm_kernel", "topology_kernel"),
    "scatter": ("_rows_kernel", "_weights_kernel"),
    "fused": ("ragged_",),
}
HOPPER = {"fused": ("up_kernel", "down_gradient_kernel")}
ELSEWHERE = {"fused": ("_mlp_gradient_kernel",)}
GROUPED = ("ragged_", "GroupProblemShape", "grouped")
ONLY_FUSED = ("up_kernel", "down_gradient_kernel", "_mlp_gradient_kernel")
FOREIGN = {
    "grouped": (*OWN["sparse"], *OWN["scatter"], *ONLY_FUSED),
    "sparse": (*GROUPED, *OWN["scatter"], *ONLY_FUSED),
    "scatter": (*OWN["sparse"], *GROUPED, *ONLY_FUSED),
    "fused": (*OWN["sparse"], *OWN["scatter"]),
    "batched": (*OWN["sparse"], *GROUPED, *OWN["scatter"], *ONLY_FUSED),
}


@pytest.mark.parametrize("impl", FOREIGN)
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_each_mlp_impl_launches_its_own_kernels(impl, activation):
    """By kernel name: what each path must show, and nothing of the others'."""
    config = _layer("sparse", activation).config
    launched = _kernels(build(impl, config, device="cuda", dtype=torch.bfloat16))
    on_hopper = torch.cuda.get_device_capability() == (9, 0)
    own = OWN.get(impl, ()) + (HOPPER if on_hopper else ELSEWHERE).get(impl, ())
    for kernel in own:
        assert any(kernel in name for name in launched), f"{impl} did not launch {kernel}: {sorted(launched)}"
    for kernel in FOREIGN[impl]:
        assert not [name for name in launched if kernel in name], f"{impl} launched {kernel}"


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("tokens", [64 * 512, 100])
def test_auto_launches_what_it_says_it_picked(tokens, biased):
    config = MoEConfig(hidden_size=256, ffn_hidden_size=256, num_experts=64, mlp_bias=biased, mlp_impl="auto")
    layer = build("auto", config, device="cuda", dtype=torch.bfloat16)
    picked = layer.experts.mlp_impl_for()
    launched = _kernels(layer, tokens)
    if torch.cuda.get_device_capability() != (9, 0):
        assert picked == "grouped" and not [name for name in launched if "up_kernel" in name]
        return
    assert picked == "fused" and any("up_kernel" in name for name in launched)


FAR = dict(tokens=262144, hidden=2048, width=1032, experts=16, top_k=8)
"""R·H = 2·2³¹ and R·I slightly more than 2³¹ values, where int32 ends, at a hidden size that gradient_hopper takes."""


@pytest.mark.parametrize("impl", ["grouped", "scatter", "fused"])
@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.mem_get_info()[0] < 100 * 2**30, reason="needs 100 GiB of free GPU memory"
)
def test_N4_rows_past_two_to_the_31_elements(impl):
    """Tokens whose rows are at the ends and on either side of 2³¹/H and 2³¹/I, alone with a gradient, by float64."""
    tokens, hidden, width, experts, top_k = FAR.values()
    draw = torch.Generator("cuda").manual_seed(0)

    def normal(*shape, std):
        values = torch.empty(shape, device="cuda", dtype=torch.bfloat16).normal_(0, std, generator=draw)
        return values.requires_grad_()

    x, weight = normal(tokens, hidden, std=1), torch.rand(tokens, top_k, device="cuda", generator=draw)
    ids = torch.rand(tokens, experts, device="cuda", generator=draw).topk(top_k, dim=1).indices
    weight.requires_grad_()
    d = build_dispatch(make_routing(ids, weight, experts))
    config = MoEConfig(
        hidden_size=hidden, ffn_hidden_size=width, num_experts=experts, top_k=top_k, activation="swiglu", mlp_impl=impl
    )
    module = Experts(config, seed=1, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        for name, p in module.named_parameters():
            p.normal_(0, width**-0.5 if name == "w2" else hidden**-0.5, generator=draw)
    edges = [0, tokens * top_k - 1] + [2**31 // n + i for n in (hidden, width) for i in (-1, 0, 1)]
    picked = d.gather[edges].long().unique()
    dy = torch.zeros(tokens, hidden, device="cuda", dtype=torch.bfloat16)
    dy[picked] = torch.randn(len(picked), hidden, device="cuda", generator=draw).bfloat16()
    y = module(x, d, weight.flatten())
    y.backward(dy)

    wide = {name: p.detach().double().requires_grad_() for name, p in module.named_parameters()}
    wide_x, wide_weight = (t.detach()[picked].double().requires_grad_() for t in (x, weight))
    token = torch.arange(len(picked), device="cuda").repeat_interleave(top_k)
    truth = experts_oracle(wide_x, token, ids[picked].flatten(), wide_weight.flatten(), wide, experts, "swiglu")
    truth.backward(dy[picked].double())
    for key, got, want in (
        ("y", y.detach()[picked], truth.detach()), ("dx", x.grad[picked], wide_x.grad),
        ("dweight", weight.grad[picked], wide_weight.grad),
        *((name, p.grad, wide[name].grad) for name, p in module.named_parameters()),
    ):  # fmt: skip
        assert relative_error(got, want) < 0.02, key
    others = torch.ones(tokens, dtype=torch.bool, device="cuda")
    others[picked] = False
    assert y.isfinite().all()
    assert not weight.grad[others].any() and not x.grad.masked_fill_(~others[:, None], 0).any()
