"""The scattered expert MLP over a Dispatch, against a loop over experts in float64 and against the grouped path."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megablocks.config import MoEConfig
from megablocks.moe.experts import Experts
from megablocks.moe.impls import ExpertCall, sorted_dispatch
from megablocks.moe.impls import scatter as scatter_impl
from megablocks.moe.router import route
from megablocks.ops import library
from megablocks.ops.activation_table import ACTIVATIONS, Activation
from megablocks.ops.launch import interpreted
from megablocks.ops.routing.dispatch import Routing, build_dispatch
from megablocks.ops.scattered.dispatched import gathered_linear, linear_combine
from megablocks.testing.oracle import experts_oracle, relative_error
from megablocks.testing.poison import poisoned_empty
from megablocks.testing.routings import ROUTINGS, ragged, zipf

pytestmark = pytest.mark.any_device
DEVICE = "cuda" if torch.cuda.is_available() and not interpreted() else "cpu"
T, E, K, H, WIDTH = 13, 4, 2, 12, 20


def scatter(experts, x, dispatch, weight):
    call = ExpertCall(experts._parameters_in(x.dtype), x, dispatch, weight, experts.config)
    return scatter_impl(call)


@pytest.fixture(params=["kernel", "reference"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The Triton kernels (interpreted without a GPU), or plain torch."""
    kernel = request.param == "kernel"
    if kernel and DEVICE == "cpu" and not interpreted():
        pytest.skip("needs TRITON_INTERPRET=1 or a GPU")
    monkeypatch.setattr(library, "runs_triton", lambda t: kernel and t.dtype != torch.float64)
    return request.param


def experts_of(dtype: torch.dtype = torch.float32, **changes) -> Experts:
    values = dict(hidden_size=H, ffn_hidden_size=WIDTH, num_experts=E, top_k=K, activation="swiglu", mlp_bias=True)
    experts = Experts(MoEConfig(**{**values, "init_std": 0.3, **changes}), seed=5, device=DEVICE, dtype=dtype)
    with torch.no_grad():
        for bias in (experts.b1, experts.c1, experts.b2):
            if bias is not None:
                bias.copy_(torch.randn(bias.shape, generator=torch.Generator().manual_seed(bias.shape[1])))
    return experts


def to_device(routing: Routing) -> Routing:
    ids = (routing.token.to(DEVICE), routing.expert.to(DEVICE))
    return Routing(*ids, routing.weight.to(DEVICE), routing.num_tokens, routing.num_experts, routing.top_k)


def results(experts: Experts, x: Tensor, routing: Routing, weight: Tensor | None, dy: Tensor, grouped=False):
    """y, dx, d_weight and the gradients of the parameters, by name."""
    dispatch = build_dispatch(routing)
    x = x.detach().requires_grad_()
    leaf = None if weight is None else weight.detach().requires_grad_()
    with poisoned_empty():
        if grouped:
            y = experts(x, dispatch, leaf)
        else:
            y = scatter(experts, x, dispatch, leaf)
        named = {"x": x, "weight": leaf, **dict(experts.named_parameters())}
        named = {name: t for name, t in named.items() if t is not None}
        grads = torch.autograd.grad(y, list(named.values()), dy.to(y.dtype))
    return {"y": y.detach(), **dict(zip(named, grads, strict=True))}


def truth_of(experts: Experts, x: Tensor, routing: Routing, weight: Tensor | None, dy: Tensor):
    wide = {n: p.detach().double().requires_grad_() for n, p in experts.named_parameters()}
    x = x.detach().double().requires_grad_()
    leaf = torch.ones(routing.num_pairs, device=DEVICE) if weight is None else weight
    leaf = leaf.detach().double().requires_grad_()
    config = experts.config
    y = experts_oracle(
        x, routing.token, routing.expert, leaf, wide, config.num_experts, config.activation, config.gelu_approximate
    )
    named = {"x": x, "weight": leaf, **wide}
    grads = torch.autograd.grad(y, list(named.values()), dy.double(), allow_unused=True)
    zeros = [torch.zeros_like(t) if g is None else g for t, g in zip(named.values(), grads, strict=True)]
    return {"y": y.detach(), **dict(zip(named, zeros, strict=True))}


def check(experts: Experts, routing: Routing, tolerance: float = 1e-5, weighted: bool = True):
    draw = torch.Generator().manual_seed(2)
    dtype = experts.w1.dtype
    x, dy = (torch.randn(routing.num_tokens, H, generator=draw).to(DEVICE, dtype) for _ in range(2))
    weight = routing.weight.float() if weighted else None
    got, truth = results(experts, x, routing, weight, dy), truth_of(experts, x, routing, weight, dy)
    for name, value in got.items():
        assert relative_error(value, truth[name]) < tolerance, name
    return got, x, weight, dy


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("recompute", [False, True])
def test_N10_every_activation_through_scatter(backend, activation, recompute):
    check(experts_of(activation=activation, recompute_activation=recompute), to_device(ragged(T, E, K)))


@pytest.mark.parametrize("name", ROUTINGS)
def test_N6_scatter_equals_grouped(backend, name):
    """R1, R2, R3 and R7 among them: an empty expert, all pairs in one, none anywhere, repeated and missing ids."""
    experts, routing = experts_of(), to_device(ROUTINGS[name](T, E, K))
    got, x, weight, dy = check(experts, routing)
    for key, value in results(experts, x, routing, weight, dy, grouped=True).items():
        assert relative_error(got[key], value) < 1e-5, key
    if name == "one_hot":
        assert (got["w1"].view(E, -1)[:-1] == 0).all() and (got["b2"][:-1] == 0).all()
    if name == "nobody":
        assert all((value == 0).all() for value in got.values())


@pytest.mark.parametrize(
    "bias,weighted,activation", [(False, True, "gelu"), (True, False, "swiglu"), (False, False, "relu")]
)
def test_without_biases_or_weights(backend, bias, weighted, activation):
    check(experts_of(mlp_bias=bias, activation=activation), to_device(zipf(T, E, K)), weighted=weighted)


@pytest.mark.parametrize("tokens,experts,top_k", [(0, 4, 2), (1, 1, 1), (5, 3, 3), (9, 7, 1)])
def test_R5_scatter_mlp_sizes_at_the_edge(backend, tokens, experts, top_k):
    got, *_ = check(experts_of(num_experts=experts, top_k=top_k), to_device(zipf(tokens, experts, top_k)))
    assert tokens or all((value == 0).all() for value in got.values())


def test_rounded_routing_goes_through(backend):
    """Pairs that vary per token, with a tail of pairs without an expert."""
    config = experts_of().config.replace(token_rounding="up", token_rounding_tile=4)
    logits = torch.randn(T, E, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    routing = route(logits, config, training=True)
    assert (routing.expert[-1] == -1).all()
    check(experts_of(), routing)


def test_rows_that_are_sorted_already(backend):
    """What expert parallelism hands over: rows by expert, and behind them rows of nobody."""
    experts = experts_of()
    offsets = torch.tensor([0, 5, 5, 9, 11], dtype=torch.int32, device=DEVICE)
    rows = torch.randn(14, H, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    rows[11:] = float("nan")
    with poisoned_empty():
        dispatch = sorted_dispatch(offsets, 14)
        y = scatter(experts, rows, dispatch, None)
    assert relative_error(y[:11], experts.forward_sorted(rows, offsets)[:11]) < 1e-6


def test_R8_scatter_mlp_strided_input_and_stride_0_gradient(backend):
    experts, routing = experts_of(), to_device(ragged(T, E, K))
    x = torch.randn(H, T, generator=torch.Generator().manual_seed(2)).to(DEVICE).t()
    dy = torch.ones((), device=DEVICE).expand(T, H)
    strided = torch.stack((routing.weight.float(), torch.zeros(routing.num_pairs, device=DEVICE)), 1)[:, 0]
    for weight in (strided, torch.full((1,), 0.5, device=DEVICE).expand(routing.num_pairs)):
        got = results(experts, x, routing, weight, dy)
        for name, value in truth_of(experts, x, routing, weight, dy).items():
            assert relative_error(got[name], value) < 1e-5, name


def test_N1_scatter_mlp_half_types(backend):
    """At most twice the error of the grouped path in the same dtype; both against float64."""
    truncates = backend == "kernel" and interpreted()  # the interpreter cuts bfloat16 off instead of rounding
    for dtype in (torch.float16,) if truncates else (torch.float16, torch.bfloat16):
        experts, routing = experts_of(dtype), to_device(zipf(40, E, K))
        draw = torch.Generator().manual_seed(2)
        x, dy = (torch.randn(40, H, generator=draw).to(DEVICE, dtype) for _ in range(2))
        weight = routing.weight.float()
        got = results(experts, x, routing, weight, dy)
        peer, truth = results(experts, x, routing, weight, dy, grouped=True), truth_of(experts, x, routing, weight, dy)
        for name, value in truth.items():
            assert relative_error(got[name], value) <= 2 * relative_error(peer[name], value), (dtype, name)


def test_N3_scatter_mlp_nan_stays_in_its_token(backend):
    experts, routing = experts_of(), to_device(ragged(T, E, K))
    x, dy = (torch.randn(T, H, generator=torch.Generator().manual_seed(s)).to(DEVICE) for s in (1, 2))
    weight = routing.weight.float()
    clean = results(experts, x, routing, weight, dy)
    x[4] = float("nan")
    weight = torch.where(routing.token == 4, float("nan"), weight)
    dirty = results(experts, x, routing, weight, dy)
    others = [t for t in range(T) if t != 4]
    for name in ("y", "x"):
        assert torch.equal(dirty[name][others], clean[name][others])
    assert torch.equal(dirty["weight"][routing.token != 4], clean["weight"][routing.token != 4])


def test_N5_scatter_mlp_frozen_parts_and_two_backwards(backend):
    """Frozen experts or a frozen router change no other gradient; a second backward gives the same."""
    experts, routing = experts_of(recompute_activation=True), to_device(ragged(T, E, K))
    x, dy = (torch.randn(T, H, generator=torch.Generator().manual_seed(s)).to(DEVICE) for s in (1, 2))
    weight, dispatch = routing.weight.float(), build_dispatch(routing)
    everything = results(experts, x, routing, weight, dy)
    for wanted in ("x", "weight", "w2", "b1"):
        leaves = {"x": x.clone(), "weight": weight.clone(), **dict(experts.named_parameters())}
        for name, leaf in leaves.items():
            leaf.requires_grad_(name == wanted)
        y = scatter(experts, leaves["x"], dispatch, leaves["weight"])
        for _ in range(2):
            (grad,) = torch.autograd.grad(y, [leaves[wanted]], dy, retain_graph=True)
            assert torch.equal(grad, everything[wanted]), wanted


@pytest.mark.parametrize("recompute", [False, True])
def test_kept_for_backward_is_no_copy_of_the_tokens(recompute):
    """R·H values are never kept; with recompute one R·I less."""
    experts, routing = experts_of(recompute_activation=recompute), to_device(zipf(T, E, K))
    x = torch.randn(T, H, device=DEVICE, requires_grad=True)
    kept: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        if t.is_floating_point():
            kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes() // 4
        return t

    weight = routing.weight.float().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        scatter(experts, x, build_dispatch(routing), weight)
    rows = T * K
    parameters = sum(p.numel() for p in experts.parameters())
    assert sum(kept.values()) <= parameters + T * H + rows * WIDTH * (2 if recompute else 3) + rows
    assert rows * H not in kept.values()


def test_N9_scatter_mlp_compiles_in_one_graph():
    experts, routing = experts_of(), to_device(zipf(T, E, K))
    x, weight = torch.randn(T, H, device=DEVICE, requires_grad=True), routing.weight.float().requires_grad_()

    def step(x, weight, token, expert):
        dispatch = build_dispatch(Routing(token, expert, weight, T, E, K))
        return scatter(experts, x, dispatch, weight)

    inputs = (x, weight, routing.token, routing.expert)
    eager, compiled = step(*inputs), torch.compile(step, fullgraph=True, backend="aot_eager")(*inputs)
    assert torch.allclose(eager, compiled, atol=1e-6)
    leaves = [x, weight, *experts.parameters()]
    for a, b in zip(
        torch.autograd.grad(eager.sin().sum(), leaves), torch.autograd.grad(compiled.sin().sum(), leaves), strict=True
    ):
        assert torch.allclose(a, b, atol=1e-5)


def test_L2_scattered_products_refuse():
    dispatch = build_dispatch(zipf(T, E, K))
    x, w, rows, down = torch.zeros(T, H), torch.zeros(E, H, WIDTH), torch.zeros(T * K, WIDTH), torch.zeros(E, WIDTH, H)
    for call, message in (
        (lambda: gathered_linear(x[1:], w, None, dispatch), r"^x is \(12, 12\): must have 13 rows"),
        (lambda: gathered_linear(x, down, None, dispatch), r"^w is \(4, 20, 12\): must be \(4, 12, N\)"),
        (lambda: gathered_linear(x, w.half(), None, dispatch), "^w is torch.float16, must be torch.float32 as x is"),
        (lambda: gathered_linear(x, w, torch.zeros(E, H), dispatch), r"^bias is \(4, 12\): must be \(4, 20\)"),
        (
            lambda: linear_combine(rows, None, down, None, torch.ones(3), dispatch),
            r"^weight is \(3,\): must be \(26,\)",
        ),
        (lambda: linear_combine(rows, None, down, None, None, dispatch, Activation("swiglu")), "^gate is missing"),
        (lambda: linear_combine(rows, None, down, None, None, dispatch, Activation("tanh")), "^activation='tanh'"),
        (lambda: linear_combine(rows, rows, down, None, None, dispatch), "^gate is given: must be None without an act"),
        (lambda: gathered_linear(x, w, None, dispatch._replace(padded=True)), "^dispatch has padded rows"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
