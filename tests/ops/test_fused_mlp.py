"""The fused expert MLP against a loop over experts in float64, and what it keeps."""

import pytest
import torch

from megablocks.ops.activation import activation_ref
from megablocks.ops.activation_table import GATED, UNARY, Activation
from megablocks.ops.fused import gradient_hopper, mlp, up_hopper
from megablocks.ops.fused.down import activate_and_project
from megablocks.ops.fused.mlp import (
    ExpertParameters,
    MainGrads,
    Options,
    down_gradient_op,
    fused_mlp,
    fused_mlp_op,
    fused_up_op,
    mlp_gradient_ref,
)
from megablocks.ops.grouped import grouped_mm, grouped_mm_hopper, grouped_mm_hopper_dw
from megablocks.ops.grouped.gathered_mm import gathered_mm_gated
from megablocks.ops.grouped.grouped_mm_hopper import supports_m
from megablocks.ops.permute.rows import combine
from megablocks.ops.routing.dispatch import Dispatch, build_dispatch, make_routing
from megablocks.testing.oracle import relative_error
from megablocks.testing.poison import poisoned_empty
from megablocks.testing.tolerances import assert_as_exact_as

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAMES = ("x", "weight", "w1", "v1", "w2", "b1", "c1", "b2")


def _case(tokens, hidden, inner, experts, k, gated, bias, seed=0, dtype=torch.float64, ids=None):
    g = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return (torch.randn(*shape, generator=g, dtype=torch.float64) * 0.5).to(dtype)

    ids = torch.stack([torch.randperm(experts, generator=g)[:k] for _ in range(tokens)]) if ids is None else ids
    values = dict(
        x=draw(tokens, hidden), weight=torch.rand(tokens * k, generator=g, dtype=torch.float64),
        w1=draw(experts, inner, hidden), v1=draw(experts, inner, hidden) if gated else None,
        w2=draw(experts, inner, hidden), b1=draw(experts, inner) if bias else None,
        c1=draw(experts, inner) if bias and gated else None, b2=draw(experts, hidden) if bias else None,
    )  # fmt: skip
    if dtype != torch.float64:
        values["weight"] = values["weight"].float()
    routing = make_routing(ids, values["weight"].view(tokens, k), experts)
    return values, build_dispatch(routing), ids, draw(tokens, hidden)


def _loop(v, ids, activation):
    """Expert by expert; every parameter takes part, so that its gradient is zeros rather than None."""
    y = torch.zeros_like(v["x"]) + sum(0 * t.sum() for t in v.values() if t is not None)
    weight = v["weight"].view(ids.shape)
    for e in range(v["w1"].shape[0]):
        for j in range(ids.shape[1]):
            chosen = torch.nonzero(ids[:, j] == e)[:, 0]
            rows = v["x"][chosen]
            pre = rows @ v["w1"][e].t() + (0 if v["b1"] is None else v["b1"][e])
            gate = None if v["v1"] is None else rows @ v["v1"][e].t() + (0 if v["c1"] is None else v["c1"][e])
            act = activation_ref(pre, gate, Activation(activation))
            out = act @ v["w2"][e] + (0 if v["b2"] is None else v["b2"][e])
            y = y.index_add(0, chosen, out * weight[chosen, j].unsqueeze(1))
    return y


def _with_gradients(fn, values, dy):
    leaves = {k: None if t is None else t.detach().clone().requires_grad_() for k, t in values.items()}
    y = fn(leaves)
    y.backward(dy)
    return y.detach(), {k: t.grad for k, t in leaves.items() if t is not None}


def _parameters(v):
    return ExpertParameters(*(v[name] for name in ExpertParameters._fields))


def _fused(dispatch, activation, **options):
    return lambda v: fused_mlp(v["x"], v["weight"], dispatch, _parameters(v), Activation(activation), **options)


def _on_gpu_too(dispatch):
    return Dispatch(*(t.cuda() for t in dispatch[:5]))


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", [*UNARY, *GATED])
def test_N10_fused_mlp_equals_a_loop(activation, bias, recompute):
    values, dispatch, ids, dy = _case(13, 12, 10, 5, 2, activation in GATED, bias)
    want = _with_gradients(lambda v: _loop(v, ids, activation), values, dy)
    with poisoned_empty():
        got = _with_gradients(_fused(dispatch, activation, recompute=recompute), values, dy)
    torch.testing.assert_close(got[0], want[0], rtol=1e-9, atol=1e-9)
    assert got[1].keys() == want[1].keys()
    for name, grad in want[1].items():
        torch.testing.assert_close(got[1][name], grad, rtol=1e-9, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize("tokens,hidden,inner", [(40, 64, 48), (129, 60, 100)])
def test_N1_fused_mlp_on_a_cpu_is_as_exact_as_torch(tokens, hidden, inner, activation, bias):
    values, dispatch, ids, dy = _case(tokens, hidden, inner, 9, 3, activation in GATED, bias, dtype=torch.bfloat16)
    wide = {n: None if t is None else t.double() for n, t in values.items()}
    want = _with_gradients(lambda v: _loop(v, ids, activation), wide, dy.double())
    in_dtype = values | {"weight": values["weight"].bfloat16()}
    plain = _with_gradients(lambda v: _loop(v, ids, activation), in_dtype, dy)
    with poisoned_empty():
        got = _with_gradients(_fused(dispatch, activation), values, dy)
    assert_as_exact_as(got[0], plain[0], want[0])
    for name, grad in want[1].items():
        assert_as_exact_as(got[1][name], plain[1][name], grad)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", GATED)
def test_N10_both_up_projections_in_one_equal_those_apart(activation, bias, recompute):
    values, dispatch, _, dy = _case(13, 12, 10, 5, 2, True, bias)
    want = _with_gradients(_fused(dispatch, activation, recompute=recompute), values, dy)
    joined = {n: None if t is None else t for n, t in values.items() if n not in ("v1", "c1")}
    joined["w1"] = torch.cat([values["w1"], values["v1"]], dim=1)
    joined["b1"] = torch.cat([values["b1"], values["c1"]], dim=1) if bias else None
    with poisoned_empty():
        got = _with_gradients(
            lambda v: _fused(dispatch, activation, recompute=recompute)(v | {"v1": None, "c1": None}), joined, dy
        )
    want[1]["w1"] = torch.cat([want[1]["w1"], want[1].pop("v1")], dim=1)
    if bias:
        want[1]["b1"] = torch.cat([want[1]["b1"], want[1].pop("c1")], dim=1)
    assert torch.equal(got[0], want[0]) and got[1].keys() == want[1].keys()
    for name, grad in want[1].items():
        assert torch.equal(got[1][name], grad), name


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_a_down_projection_that_lies_transposed_gets_its_gradient_so(activation):
    values, dispatch, ids, dy = _case(13, 12, 10, 5, 2, activation in GATED, True)
    want = _with_gradients(lambda v: _loop(v, ids, activation), values, dy)
    w2 = values["w2"].mT.contiguous().requires_grad_()
    given = []
    w2.register_hook(lambda grad: given.append(grad.data_ptr()))
    with poisoned_empty():
        y = _fused(dispatch, activation)(values | {"w2": w2.mT})
        y.backward(dy)
    torch.testing.assert_close(y.detach(), want[0], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(w2.grad, want[1]["w2"].mT, rtol=1e-9, atol=1e-9)
    assert w2.grad.is_contiguous() and given == [w2.grad.data_ptr()]  # no copy of it was made


def test_both_up_projections_in_one_without_a_gradient_or_beside_other_frozen_parameters():
    values, dispatch, _, dy = _case(13, 12, 10, 5, 2, True, False)
    w1, w2 = torch.cat([values["w1"], values["v1"]], dim=1), values["w2"]
    expected = _with_gradients(_fused(dispatch, "swiglu"), values, dy)[1]
    for trained in ("w1", "w2"):
        leaf = (w1 if trained == "w1" else w2).clone().requires_grad_()
        parameters = ExpertParameters(leaf if trained == "w1" else w1, None, leaf if trained == "w2" else w2)
        fused_mlp(values["x"], values["weight"], dispatch, parameters, Activation("swiglu")).backward(dy)
        want = torch.cat([expected["w1"], expected["v1"]], dim=1) if trained == "w1" else expected["w2"]
        assert torch.equal(leaf.grad, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_N6_fused_mlp_on_a_cpu_rounds_where_its_parts_round(dtype):
    v, d, _, _ = _case(40, 64, 48, 9, 3, True, False, dtype=dtype)
    pre, gate = gathered_mm_gated(v["x"], v["w1"].mT, v["v1"].mT, d)
    rows = activate_and_project(pre, gate, v["w2"], d.expert_offsets, Activation("swiglu"))
    assert torch.equal(_fused(d, "swiglu")(v), combine(rows, v["weight"], d))


def _equals_the_loop(ids, empty, **options):
    """Of seven tokens and four experts, whose `empty` ones must get gradients of exactly zero."""
    values, dispatch, ids, dy = _case(7, 12, 6, 4, ids.shape[1], True, True, ids=ids)
    want = _with_gradients(lambda v: _loop(v, ids, "swiglu"), values, dy)
    with poisoned_empty():
        got = _with_gradients(_fused(dispatch, "swiglu", **options), values, dy)
    torch.testing.assert_close(got[0], want[0], rtol=1e-9, atol=1e-9)
    for name, grad in want[1].items():
        torch.testing.assert_close(got[1][name], grad, rtol=1e-9, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")
        if name not in ("x", "weight"):
            assert (got[1][name][empty] == 0).all(), name


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("expert", [0, 2, 3])
def test_R1_all_to_one_expert_of_the_fused_mlp(expert, recompute):
    empty = [e for e in range(4) if e != expert]
    _equals_the_loop(torch.full((7, 1), expert), empty, recompute=recompute)


def test_R7_no_expert_and_one_twice_in_the_fused_mlp():
    _equals_the_loop(torch.tensor([[0, 0], [1, -1], [-1, -1], [2, 2], [1, 0], [0, 1], [-1, 2]]), [3])


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("activation", ["relu2", "swiglu"])
def test_N6_main_grads_of_the_fused_mlp_take_every_micro_batch(activation, recompute):
    """Two batches forward, then both backward, as a pipeline runs them; what stood in the buffers stays in the sum."""
    gated = activation in GATED
    cases = [_case(13, 12, 10, 5, 2, gated, True, seed) for seed in (0, 1)]
    weights = {n: cases[0][0][n] for n in ("w1", "v1", "w2")}
    main = {n: None if t is None else torch.randn_like(t) for n, t in weights.items()}
    want = {n: None if t is None else t.clone() for n, t in main.items()}
    outs = []
    for values, dispatch, ids, dy in cases:
        values |= weights
        grads = _with_gradients(lambda v, ids=ids: _loop(v, ids, activation), values, dy)[1]
        for n in weights:
            want[n] = None if want[n] is None else want[n] + grads.pop(n)
        leaves = {k: None if t is None else t.detach().clone().requires_grad_() for k, t in values.items()}
        run = _fused(dispatch, activation, recompute=recompute, main_grads=MainGrads(**main))
        with poisoned_empty():
            outs.append((run(leaves), dy, leaves, grads))
    for y, dy, leaves, grads in outs:
        with poisoned_empty():
            y.backward(dy)
        for name, grad in grads.items():
            torch.testing.assert_close(leaves[name].grad, grad, rtol=1e-9, atol=1e-9)
        assert all(leaves[n] is None or leaves[n].grad is None for n in weights)
    for n, total in main.items():
        torch.testing.assert_close(total, want[n], rtol=1e-9, atol=1e-9) if total is not None else None


@pytest.mark.parametrize("recompute, pre_bits", [(False, -1), (True, -1), (False, 8), (False, 4)])
def test_fused_mlp_keeps_what_it_says(recompute, pre_bits):
    """2·T·H + 4·R·I bytes at 2 bytes a value, beside weights and indices; with recompute 2·T·H; quantized, 1.031 or
    0.625 bytes in place of 2 of every pre-activation."""
    tokens, hidden, inner, k = 24, 16, 128, 2
    values, dispatch, _, _ = _case(tokens, hidden, inner, 4, k, True, False, dtype=torch.bfloat16)
    leaves = {name: None if t is None else t.requires_grad_() for name, t in values.items()}
    kept = {}

    def pack(t):
        values = t.dtype in (torch.bfloat16, torch.uint8, torch.int16)  # as they are, or codes and scales
        kept[t.data_ptr()] = t.numel() * t.element_size() if values else 0
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        _fused(dispatch, "swiglu", recompute=recompute, pre_bits=pre_bits)(leaves)
    for name in ("w1", "v1", "w2"):
        kept.pop(leaves[name].data_ptr())
    bytes_a_value = {-1: 2, 8: 1 + 2 / 64, 4: 1 / 2 + 2 / 16}[pre_bits]
    factors = 0 if recompute else 2 * tokens * k * inner * bytes_a_value
    assert sum(kept.values()) == 2 * tokens * hidden + factors


def test_N9_fused_mlp_opcheck():
    values, dispatch, _, _ = _case(6, 8, 4, 3, 2, True, True, dtype=torch.float32)
    leaves = [None if values[n] is None else values[n].requires_grad_() for n in NAMES]
    leaves[0] = leaves[0].detach().t().contiguous().t().requires_grad_()  # y is contiguous all the same
    for recompute in (False, True):
        rest = ExpertParameters(*leaves[2:]), dispatch, Activation("swiglu"), Options(recompute)
        torch.library.opcheck(fused_mlp_op.definition, fused_mlp_op.flat(*leaves[:2], *rest))
    joined = ExpertParameters(
        torch.cat(leaves[2:4], dim=1).detach().requires_grad_(), None, leaves[4],
        torch.cat(leaves[5:7], dim=1).detach().requires_grad_(), None, leaves[7],
    )  # fmt: skip
    rest = joined, dispatch, Activation("swiglu"), Options()
    torch.library.opcheck(fused_mlp_op.definition, fused_mlp_op.flat(*leaves[:2], *rest))


def _gradient_equals_its_reference(ends, inner, activation, approximate):
    """The kernel on 21 rows with the experts' `ends`; behind the last one's all is NaN. Pairs in any order."""
    from megablocks.ops.fused.gradient_triton import mlp_gradient_launch

    g = torch.Generator().manual_seed(1)
    rows, used = 21, ends[-1]
    d_act, pre, gate = (torch.randn(rows, inner, generator=g).to(DEVICE) for _ in range(3))
    d_act[used:] = pre[used:] = gate[used:] = float("nan")
    pair = torch.randperm(rows, generator=g).int().to(DEVICE)
    weight, offsets = torch.rand(rows, generator=g).to(DEVICE), torch.tensor(ends, dtype=torch.int32, device=DEVICE)
    d = Dispatch(offsets, offsets, pair, pair, pair)
    args = (d_act, pre, gate if activation in GATED else None, weight, d, Activation(activation, approximate))
    want = mlp_gradient_ref(*args)
    with poisoned_empty():
        got = mlp_gradient_launch(*args)
    assert (got[1] is None) == (want[1] is None) == (activation not in GATED)
    for a, b in zip(got[:3], want[:3], strict=True):
        if a is not None:
            torch.testing.assert_close(a[:used], b[:used], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got[3], want[3], rtol=1e-5, atol=1e-5)
    strided = torch.stack([args[3], -args[3]], 1)[:, 0]
    again = mlp_gradient_launch(*args[:3], strided, *args[4:])
    assert torch.equal(again[0][:used], got[0][:used]) and torch.equal(again[2][:used], got[2][:used])
    assert (got[3][pair[used:].long()] == 0).all()


@pytest.mark.any_device
@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("activation", [*UNARY, *GATED])
def test_N10_mlp_gradient_kernel_equals_its_reference(activation, approximate):
    for inner in (8, 33):
        _gradient_equals_its_reference([0, 4, 9, 17], inner, activation, approximate)


@pytest.mark.parametrize("gated", [False, True])
def test_N9_down_gradient_opcheck(gated):
    values, d, _, dy = _case(6, 8, 4, 3, 2, gated, False, dtype=torch.float32)
    pre, activation = torch.randn(12, 4), Activation("swiglu" if gated else "gelu", "none")
    args = dy, values["w2"], pre, pre + 1 if gated else None, values["weight"], d, activation
    torch.library.opcheck(down_gradient_op.definition, down_gradient_op.flat(*args))


@pytest.mark.any_device
@pytest.mark.parametrize("ends", [[0, 0, 21], [0, 4, 4, 17], [0, 0, 5, 5], [0, 0, 0]])
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_R7_mlp_gradient_kernel_leaves_unused_rows_and_pairs(activation, ends):
    _gradient_equals_its_reference(ends, 33, activation, "none")


def test_fused_mlp_names_what_does_not_fit():
    values, dispatch, _, _ = _case(6, 8, 4, 3, 2, True, False, dtype=torch.float32)
    plain, shape, must = values | {"v1": None}, (3, 4, 8), r"must be \(3, 4, 8\) torch.float32, contiguous"

    def refused(message, activation, v, **options):
        with pytest.raises(ValueError, match=message):
            _fused(dispatch, activation, **options)(v)

    refused("v1 is missing for activation='swiglu'", "swiglu", plain)
    refused(r"w2 is \(3, 4, 7\): must be \(3, 4, 8\)", "swiglu", values | {"w2": values["w2"][..., :7]})
    refused("c1 is given: activation='silu' has no gate", "silu", plain | {"c1": torch.zeros(3, 4)})
    refused(r"x is \(5, 8\)", "swiglu", values | {"x": values["x"][:5]})
    refused("input_bits=5: must be 4, 8, or -1 for off", "swiglu", values, input_bits=5)
    refused("pre_bits=0: must be 4, 8, or -1 for off", "swiglu", values, pre_bits=0)
    both = plain | {"w1": torch.cat([values["w1"], values["v1"]], dim=1)}
    refused("v1 is missing for activation='swiglu'", "swiglu", both | {"c1": torch.zeros(3, 4)})
    refused(r"w1 or v1, but w1 \(3, 8, 8\) holds both", "swiglu", both, main_grads=MainGrads(w1=torch.zeros(shape)))
    for mains, message in (
        (MainGrads(w1=torch.zeros(3, 8, 4)), r"main_grads of w1 is \(3, 8, 4\) torch.float32, contiguous: " + must),
        (MainGrads(w2=torch.zeros(shape).half()), r"main_grads of w2 is .* torch.float16, contiguous: " + must),
        (MainGrads(w1=torch.zeros(3, 8, 4).mT), r"main_grads of w1 is .*, of strides \(32, 1, 4\): " + must),
        (MainGrads(v1=torch.zeros(shape)), "main_grads has a tensor for v1, but v1 is None"),
    ):
        refused(message, "silu", plain, main_grads=mains)


def test_the_up_kernel_is_given_what_it_takes_only(monkeypatch):
    """It reads v1 as it reads w1, and adds both biases or none."""
    monkeypatch.setattr(mlp, "runs_hopper", lambda t: True)
    x, w = torch.zeros(4, 16, dtype=torch.bfloat16), torch.zeros(2, 8, 16, dtype=torch.bfloat16)
    bias, offsets = torch.zeros(2, 8, dtype=torch.bfloat16), torch.tensor([0, 2, 4], dtype=torch.int32)
    strided, index = torch.zeros(2, 16, 8, dtype=torch.bfloat16).transpose(1, 2), torch.zeros(4, dtype=torch.int32)
    d = Dispatch(offsets, torch.zeros(5, dtype=torch.int32), index, index, index)
    for v1, b1, c1, taken in (
        (None, None, None, True), (None, bias, None, True), (w, None, None, True), (w, bias, bias, True),
        (w, bias, None, False), (w, None, bias, False), (strided, None, None, False),
    ):  # fmt: skip
        assert (mlp.up_kernels(x, w, v1, b1, c1, d) is not None) == taken
    assert mlp.up_kernels(x, strided, None, None, None, d) is None


def test_R8_the_down_gradient_kernel_is_given_what_it_takes_only():
    half = dict(dtype=torch.bfloat16)
    dy, w, z = torch.zeros(4, 16, **half), torch.zeros(2, 8, 16, **half), torch.zeros(4, 8, **half)
    weight = torch.ones(4)
    offsets = torch.tensor([0, 2, 4], dtype=torch.int32)
    strided, apart = torch.zeros(2, 16, 8, **half).transpose(1, 2), torch.zeros(4, 12, **half)[:, :8]
    for args, taken in (
        ((dy, w, z, None, weight), True), ((dy, w, z, z, weight), True), ((dy, strided, z, None, weight), False),
        ((dy, w, z, None, weight.double()), False), ((dy, w, z, apart, weight), False),
        ((dy, w, apart, None, weight), False), ((dy.half(), w, z, None, weight), False),
        ((dy[:, :12].contiguous(), w[..., :12].contiguous(), z, None, weight), False),
        ((dy, w.expand(2, 8, 16), z.float(), None, weight), False), ((dy.float(), w.float(), z, None, weight), False),
    ):  # fmt: skip
        assert gradient_hopper.supports(*args, offsets) == taken
    # H200: 365 µs against 412 at the first, 2138 against 2138 at the second
    assert [gradient_hopper.pays(hidden) for hidden in (1536, 4096)] == [True, False]


def test_N4_the_hopper_kernels_are_given_rows_that_tma_can_count_only():
    dy, w = torch.zeros(4, 16, dtype=torch.bfloat16), torch.zeros(2, 8, 16, dtype=torch.bfloat16)
    weight, offsets = torch.ones(4), torch.tensor([0, 2, 4], dtype=torch.int32)
    for rows, taken in ((2**30 - 1, True), (2**30, False)):
        assert up_hopper.supports(dy, w, offsets, rows) == taken
        assert grouped_mm_hopper.supports_m(dy, w.transpose(1, 2), offsets, rows) == taken
        z = torch.empty(rows, 8, dtype=torch.bfloat16, device="meta")
        assert gradient_hopper.supports(dy, w, z, None, weight, offsets) == taken
        assert gradient_hopper.supports(dy, w, z, z, weight, offsets) == taken


def test_N4_the_hopper_kernels_are_asked_for_the_gathered_rows(monkeypatch):
    """Which are more than the tokens with top_k above 1."""
    asked = []

    def refuse(x, w, offsets, rows):
        asked.append(rows)
        return False

    values, dispatch, _, _ = _case(5, 8, 4, 3, 2, True, False)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)  # a CPU tensor's
    monkeypatch.setattr(mlp, "runs_hopper", lambda x: True)
    monkeypatch.setattr(grouped_mm, "hopper_ragged_m", lambda x: grouped_mm_hopper)
    monkeypatch.setattr(up_hopper, "supports", refuse)
    monkeypatch.setattr(grouped_mm_hopper, "supports_m", refuse)
    fused_up_op(values["x"], values["w1"], values["v1"], None, None, dispatch, Activation("swiglu", "none"))
    # by the kernel with the activation and by the gathering product, which stop at a first no; then by each product
    assert asked == [10, 10, 10, 10]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_N6_fused_mlp_of_rows_in_order_equals_that_of_a_dispatch(activation, recompute):
    values, _, _, dy = _case(11, 8, 4, 3, 1, activation in GATED, True)
    values["weight"], row = None, torch.arange(11, dtype=torch.int32)
    offsets = torch.tensor([0, 4, 4, 9], dtype=torch.int32)  # two rows are no expert's
    slots = torch.arange(12, dtype=torch.int32).clamp(max=9)
    sorted_rows = Dispatch(offsets, slots, row, row, row)
    with poisoned_empty():
        want, got = (
            _with_gradients(_fused(sorted_rows, activation, in_order=in_order, recompute=recompute), values, dy)
            for in_order in (False, True)
        )
    assert torch.equal(got[0][:9], want[0][:9]) and torch.equal(got[1]["x"][:9], want[1]["x"][:9])
    for name in set(want[1]) - {"x"}:
        assert torch.equal(got[1][name], want[1][name]), name
    with pytest.raises(ValueError, match="in_order=True: needs weight=None"):
        _fused(sorted_rows, activation, in_order=True)(values | {"weight": torch.ones(11)})


def test_N5_fused_mlp_backward_under_autocast():
    """A `with` around a whole step narrows nothing that the op computes in float32."""
    values, dispatch, _, dy = _case(13, 16, 8, 3, 2, True, True, dtype=torch.bfloat16)
    run = _fused(dispatch, "swiglu")
    _, outside = _with_gradients(run, values, dy)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, inside = _with_gradients(run, values, dy)
    assert all(torch.equal(inside[name], grad) for name, grad in outside.items())


@pytest.mark.gpu
@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.mem_get_info()[0] < 2**35, reason="needs 32 GiB of free GPU memory"
)
@pytest.mark.parametrize("activation", ["relu", "swiglu"])
def test_N4_gradient_through_the_activation_takes_rows_past_two_to_the_31_elements(activation):
    """Rows on either side of 2³¹/I have the gradients that they have alone, bit for bit."""
    from megablocks.ops.fused.gradient_triton import mlp_gradient_launch

    few, rows, inner = 5, 2**31 // 1032 + 3, 1032
    near = [torch.randn(few, inner, dtype=torch.bfloat16, device=DEVICE) for _ in range(3)]
    far = [torch.zeros(rows, inner, dtype=torch.bfloat16, device=DEVICE) for _ in range(3)]
    for many, values in zip(far, near, strict=True):
        many[-few:] = values
    results = []
    for d_act, pre, gate in (near, far):
        pair = torch.arange(len(pre), dtype=torch.int32, device=DEVICE)
        weight = torch.ones(len(pre), device=DEVICE)
        weight[-few:] = torch.linspace(0.1, 0.9, few)
        gate = gate if activation in GATED else None
        d = Dispatch(pair.new_tensor([0, len(pre)]), pair, pair, pair, pair)
        results.append(mlp_gradient_launch(d_act, pre, gate, weight, d, Activation(activation, "none")))
    for alone, last in zip(*results, strict=True):
        assert alone is None or alone.any() and torch.equal(last[-few:], alone)


def _on_gpu(tokens, hidden, inner, activation, dtype, *, bias=True, experts=5, k=2, ids=None, **options):
    """(the op's, the loop's in the same dtype, the loop's in float64): y, and each gradient by name."""
    values, dispatch, ids, dy = _case(tokens, hidden, inner, experts, k, activation in GATED, bias, 0, dtype, ids)
    moved = {name: None if t is None else t.cuda() for name, t in values.items()}
    wide = {name: None if t is None else t.double() for name, t in moved.items()}
    ids, dy = ids.cuda(), dy.cuda()
    dispatch = _on_gpu_too(dispatch)
    with poisoned_empty():
        got = _with_gradients(_fused(dispatch, activation, **options), moved, dy)

    def in_dtype(v):
        return _loop(v | {"weight": v["weight"].to(dtype)}, ids, activation)

    plain = _with_gradients(in_dtype, moved, dy)
    return got, plain, _with_gradients(lambda v: _loop(v, ids, activation), wide, dy.double())


def _near(got, want, tolerance):
    assert got[0].isfinite().all() and got[1].keys() == want[1].keys()
    assert relative_error(got[0].cpu(), want[0].cpu()) < tolerance, "y"
    for name, grad in want[1].items():
        assert relative_error(got[1][name].cpu(), grad.cpu()) < tolerance, name


@pytest.mark.gpu
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("activation", [*UNARY, *GATED])
def test_N10_fused_mlp_in_bf16_equals_float64(activation, recompute):
    got, _, want = _on_gpu(300, 72, 136, activation, torch.bfloat16, recompute=recompute)
    # relu's slope jumps: where z rounds to the other side of 0, a whole term comes or goes
    _near(got, want, 0.05 if activation in ("relu", "reglu") else 0.02)


@pytest.mark.gpu
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize("tokens", [1, 7, 129, 1000])
@pytest.mark.parametrize("hidden,inner", [(64, 128), (60, 100), (100, 200), (200, 60), (13, 67), (600, 264)])
def test_R6_fused_mlp_of_any_size(hidden, inner, tokens, activation, bias):
    """Sizes that the Hopper kernels read, and others that go to the plain ones, with few and many rows an expert."""
    got, _, want = _on_gpu(tokens, hidden, inner, activation, torch.bfloat16, bias=bias)
    _near(got, want, 0.02 if tokens > 1 else 0.05)  # of one token the weights' gradient is two sums that may cancel


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize("tokens", [129, 1000])
def test_R6_fused_mlp_by_few_programs(tokens, activation, monkeypatch):
    """One program a multiprocessor leaves sizes like these with a tile a program: no second one, no turns to take."""
    for module in (up_hopper, gradient_hopper, grouped_mm_hopper, grouped_mm_hopper_dw):
        monkeypatch.setattr(module, "multiprocessors", lambda device: 3)
    got, _, want = _on_gpu(tokens, 600, 264, activation, torch.bfloat16)
    _near(got, want, 0.02)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype,tolerance", [(torch.float16, 0.004), (torch.float32, 1e-5)], ids=["fp16", "fp32"])
@pytest.mark.parametrize("hidden,inner", [(72, 136), (60, 67)])
def test_N1_fused_mlp_in_other_dtypes(hidden, inner, dtype, tolerance):
    for activation in ("silu", "geglu"):
        got, _, want = _on_gpu(300, hidden, inner, activation, dtype)
        _near(got, want, tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("switch", ["1", "0"])
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_N1_fused_mlp_is_as_exact_as_torch(activation, switch, monkeypatch):
    monkeypatch.setenv("MEGABLOCKS_HOPPER", switch)
    got, plain, want = _on_gpu(500, 136, 264, activation, torch.bfloat16)
    assert_as_exact_as(got[0], plain[0], want[0])
    for name, grad in want[1].items():
        assert_as_exact_as(got[1][name], plain[1][name], grad)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [40, 700])
@pytest.mark.parametrize("chosen", ["one", "none", "some", "twice"])
def test_R1_R2_R7_fused_mlp_in_bf16(chosen, tokens):
    """All to one expert, no pair at all, experts and pairs without the other, the same expert twice for a token."""
    t = torch.arange(tokens)
    ids = {
        "one": torch.full((tokens, 2), 3), "none": torch.full((tokens, 2), -1),
        "some": torch.stack([t % 3 - 1, torch.where(t % 5 == 0, 4, -1)], 1), "twice": torch.stack([t % 2, t % 2], 1),
    }[chosen]  # fmt: skip
    got, _, want = _on_gpu(tokens, 72, 136, "swiglu", torch.bfloat16, ids=ids)
    _near(got, want, 0.02)
    used = {int(e) for e in ids.unique() if e >= 0}
    for name in ("w1", "v1", "w2", "b1", "c1", "b2"):
        for e in set(range(5)) - used:
            assert not got[1][name][e].any(), name


@pytest.mark.gpu
@pytest.mark.parametrize("switch", ["1", "0"])
@pytest.mark.parametrize("hidden,inner", [(136, 264), (60, 67)])
def test_N6_main_grads_are_more_exact_than_a_sum_of_rounded_gradients(hidden, inner, switch, monkeypatch):
    monkeypatch.setenv("MEGABLOCKS_HOPPER", switch)
    mains, sums, truth = [], [], []
    for seed in range(4):
        values, dispatch, ids, dy = _case(500, hidden, inner, 5, 2, True, False, seed, torch.bfloat16)
        if not mains:
            weights = {n: values[n].cuda() for n in ("w1", "v1", "w2")}
            mains, sums = ([torch.zeros_like(w, dtype=torch.float32) for w in weights.values()] for _ in range(2))
            truth = [torch.zeros_like(w, dtype=torch.float64) for w in weights.values()]
        moved = {n: None if t is None else t.cuda() for n, t in values.items()} | weights
        on_gpu, dy, ids = _on_gpu_too(dispatch), dy.cuda(), ids.cuda()
        with poisoned_empty():
            got = _with_gradients(_fused(on_gpu, "swiglu", main_grads=MainGrads(*mains)), moved, dy)[1]
        assert all(got[n] is None for n in weights)
        wide = {n: None if t is None else t.double() for n, t in moved.items()}
        plain = _with_gradients(_fused(on_gpu, "swiglu"), moved, dy)[1]
        loop = _with_gradients(lambda v, ids=ids: _loop(v, ids, "swiglu"), wide, dy.double())[1]
        for total, exact, n in zip(sums, truth, weights, strict=True):
            total += plain[n]
            exact += loop[n]
    for main, total, exact in zip(mains, sums, truth, strict=True):
        assert main.isfinite().all()
        assert relative_error(main.cpu(), exact.cpu()) < relative_error(total.cpu(), exact.cpu())


@pytest.mark.gpu
def test_N5_fused_mlp_frozen_inputs_and_two_backwards():
    values, dispatch, _, dy = _case(200, 72, 136, 5, 2, True, True, 0, torch.bfloat16)
    values, dy = {name: t.cuda() for name, t in values.items()}, dy.cuda()
    run = _fused(_on_gpu_too(dispatch), "swiglu")
    leaves = {name: t.clone().requires_grad_() for name, t in values.items()}
    y = run(leaves)
    grads = torch.autograd.grad(y, list(leaves.values()), dy, retain_graph=True)
    again = torch.autograd.grad(y, list(leaves.values()), dy)
    for name, first, second in zip(leaves, grads, again, strict=True):
        alone = values | {name: values[name].clone().requires_grad_()}
        assert torch.equal(first, second), name
        assert torch.equal(torch.autograd.grad(run(alone), alone[name], dy)[0], first), name


@pytest.mark.gpu
@pytest.mark.parametrize("activation", [*UNARY, *GATED])
@pytest.mark.parametrize("programs", [132, 3])
@pytest.mark.parametrize("tokens,hidden,inner", [(7, 64, 128), (300, 72, 136), (1000, 200, 600)])
def test_R6_down_gradient_kernel_equals_float64(tokens, hidden, inner, programs, activation, monkeypatch):
    """An expert without rows, pairs without an expert, and NaN behind the last row; twice the same."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU: the kernel is for no other")
    monkeypatch.setattr(gradient_hopper, "multiprocessors", lambda device: programs)  # 3: many tiles for each
    t = torch.arange(tokens)
    ids = torch.stack([t % 5 % 3, torch.where(t % 5 == 0, 4, -1)], 1)  # none to expert 3
    values, d, _, dy = _case(tokens, hidden, inner, 5, 2, activation in GATED, False, 0, torch.bfloat16, ids)
    w2, weight, dy, d = values["w2"].cuda(), values["weight"].cuda(), dy.cuda(), _on_gpu_too(d)
    bounds = d.expert_offsets.tolist()
    g = torch.Generator().manual_seed(1)
    pre, gate = (torch.randn(2 * tokens, inner, generator=g).bfloat16().cuda() for _ in range(2))
    pre[bounds[-1] :] = gate[bounds[-1] :] = float("nan")
    gate = gate if activation in GATED else None
    d_act = torch.zeros(2 * tokens, inner, dtype=torch.float64, device="cuda")
    for e in range(5):
        rows = slice(bounds[e], bounds[e + 1])
        d_act[rows] = dy[d.gather[rows].long()].double() @ w2[e].double().t()
    rest = weight, d, Activation(activation, "none")
    want = mlp_gradient_ref(d_act, pre.double(), None if gate is None else gate.double(), *rest)
    assert gradient_hopper.supports(dy, w2, pre, gate, weight, d.expert_offsets)
    with poisoned_empty():
        got, again = (gradient_hopper.down_gradient(dy, w2, pre, gate, *rest) for _ in range(2))
    assert (got[1] is None) == (gate is None)
    for a, b, c in zip(got[:3], want[:3], again[:3], strict=True):
        if a is not None:
            used = slice(0, bounds[-1])
            assert relative_error(a[used].cpu(), b[used].cpu()) < 0.003 and torch.equal(a[used], c[used])
    assert relative_error(got[3].cpu(), want[3].cpu()) < 1e-5 and torch.equal(got[3], again[3])


@pytest.mark.gpu
def test_sizes_of_the_tests_above_are_on_both_sides_of_tma():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU, whose kernels these sizes are about")
    offsets = torch.zeros(6, dtype=torch.int32, device="cuda")
    for hidden, inner, taken in ((64, 128, True), (200, 60, False), (60, 100, False), (600, 264, True)):
        x, w = (torch.zeros(*s, hidden, device="cuda", dtype=torch.bfloat16) for s in ((8,), (5, inner)))
        assert supports_m(x, w.transpose(1, 2), offsets, 8) == taken
