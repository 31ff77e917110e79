"""The scattered products and ScatterMoE's operators on them: kernels and reference against loops in float64."""

from __future__ import annotations

from functools import partial
from itertools import product

import pytest
import torch
from torch import Tensor

from megablocks.ops import library
from megablocks.ops.launch import interpreted
from megablocks.ops.scattered.dispatched import Rows, scattered_mm_dw_op, scattered_mm_ref
from megablocks.ops.scattered.parallel_linear import flatten_sort_count, parallel_linear
from megablocks.testing.oracle import relative_error
from megablocks.testing.poison import poisoned_empty
from megablocks.testing.tolerances import assert_as_exact_as
from ops.far_rows import far_rows

HAS_GPU = torch.cuda.is_available()
pytestmark = pytest.mark.any_device
DEVICE = "cuda" if HAS_GPU and not interpreted() else "cpu"
E, K, IN, OUT = 5, 3, 20, 18
NAN = float("nan")


@pytest.fixture(params=["kernel", "reference"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The Triton kernels (interpreted without a GPU), or plain torch."""
    kernel = request.param == "kernel"
    if kernel and DEVICE == "cpu" and not interpreted():
        pytest.skip("needs TRITON_INTERPRET=1 or a GPU")
    monkeypatch.setattr(library, "runs_triton", lambda t: kernel and t.dtype != torch.float64)
    return request.param


def choices(kind: str, tokens: int = 13, k: int = K, experts: int = E) -> Tensor:
    """(T, k) ids: different ones a token, all in one expert, an empty expert, repeated and "no expert", or none."""
    draw = torch.Generator().manual_seed(3)
    ids = torch.rand(tokens, experts, generator=draw).argsort(1)[:, :k]
    if kind == "one":
        ids = torch.full_like(ids, experts - 1)
    if kind == "hole":
        ids = torch.where(ids == 1, experts - 1, ids)
    if kind == "ragged":
        ids = torch.randint(-2, experts + 2, ids.shape, generator=draw)
    if kind == "nobody":
        ids = torch.full_like(ids, -1)
    return ids


def draw(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(DEVICE, dtype)


def plain(x, w, ids, bias, gates, k, grouped_in, grouped_out):
    """The formula, a pair at a time, with torch's own gradients."""
    order = sorted(range(ids.numel()), key=lambda p: (e if 0 <= (e := int(ids.flatten()[p])) < len(w) else len(w), p))
    row_of = {p: i for i, p in enumerate(order)}
    rows = []
    for p, e in enumerate(ids.flatten().tolist()):
        if not 0 <= e < len(w):
            rows.append(x.new_zeros(w.shape[2]))
            continue
        y = x[row_of[p] if grouped_in else p // k] @ w[e]
        rows.append(y if bias is None else y + bias[e])
    if grouped_out:
        return torch.stack([rows[p] for p in order])
    y = torch.stack(rows)
    if gates is None:
        return y
    inside = (ids.flatten() >= 0) & (ids.flatten() < len(w))
    gate = torch.where(inside, gates.flatten(), 0)
    return (y * gate.unsqueeze(1)).view(*gates.shape, -1).sum(1)


def case(kind: str, grouped_in: bool, with_bias: bool, with_gates: bool, dtype: torch.dtype, tokens: int = 13):
    """ids and leaf tensors (x, w, bias, gates); w is a view of (E, out, in), as ParallelExperts makes it."""
    ids = choices(kind, tokens).to(DEVICE)
    x = draw(tokens * K if grouped_in else tokens, IN, seed=1, dtype=dtype)
    w = draw(E, OUT, IN, seed=2, dtype=dtype).transpose(1, 2)
    bias = draw(E, OUT, seed=4, dtype=dtype) if with_bias else None
    gates = draw(tokens, K, seed=5, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    leaves = [x, w, bias, gates if with_gates else None]
    return ids, [None if t is None else t.detach().requires_grad_() for t in leaves]


def run(ids, leaves, grouped_in, grouped_out, dy):
    x, w, bias, gates = leaves
    with poisoned_empty():
        y = parallel_linear(
            x, w, 1 if grouped_in else K, *flatten_sort_count(ids, E), bias, gates, grouped_in, grouped_out
        )
        inputs = [t for t in leaves if t is not None]
        return [y.detach(), *torch.autograd.grad(y, inputs, dy.to(y.dtype))]


def truth_of(ids, leaves, grouped_in, grouped_out, dy):
    wide = [None if t is None else t.detach().double().requires_grad_() for t in leaves]
    y = plain(wide[0], wide[1], ids, wide[2], wide[3], K, grouped_in, grouped_out)
    inputs = [t for t in wide if t is not None]
    if not y.requires_grad:  # nobody has an expert
        return [y, *(torch.zeros_like(t) for t in inputs)]
    grads = torch.autograd.grad(y, inputs, dy, allow_unused=True)
    return [y.detach(), *(torch.zeros_like(t) if g is None else g for t, g in zip(inputs, grads, strict=True))]


def dy_of(grouped_in: bool, with_gates: bool, tokens: int = 13) -> Tensor:
    return draw(tokens if with_gates else tokens * K, OUT, seed=6)


def compare(ids, leaves, grouped_in, grouped_out, dy, tolerance=1e-5):
    got = run(ids, leaves, grouped_in, grouped_out, dy)
    truth = truth_of(ids, leaves, grouped_in, grouped_out, dy)
    names = ["y", *(n for n, t in zip(("dx", "dw", "d_bias", "d_gates"), leaves, strict=True) if t is not None)]
    for name, a, b in zip(names, got, truth, strict=True):
        assert relative_error(a, b) < tolerance, name
    return dict(zip(names, got, strict=True))


LAYOUTS = [c for c in product((False, True), (False, True), (False, True), (False, True)) if not (c[1] and c[3])]


@pytest.mark.parametrize("grouped_in,grouped_out,with_bias,with_gates", LAYOUTS)
def test_every_layout(backend, grouped_in, grouped_out, with_bias, with_gates):
    ids, leaves = case("ragged", grouped_in, with_bias, with_gates, torch.float32)
    compare(ids, leaves, grouped_in, grouped_out, dy_of(grouped_in, with_gates))


def all_four(kind: str, tokens: int = 13):
    """Scattered to grouped, and grouped to scattered with biases and gates: the two products of an MLP."""
    up = case(kind, False, True, False, torch.float32, tokens)
    down = case(kind, True, True, True, torch.float32, tokens)
    a = compare(*up, False, True, dy_of(False, False, tokens))
    b = compare(*down, True, False, dy_of(True, True, tokens))
    return a, b


def test_R1_scattered_empty_expert_gets_zero_gradients(backend):
    for got in all_four("hole"):
        assert (got["dw"][1] == 0).all() and (got["d_bias"][1] == 0).all()
        assert (got["dw"][0] != 0).any()


def test_R2_scattered_all_pairs_in_one_expert(backend):
    for got in all_four("one"):
        assert (got["dw"][:-1] == 0).all()


def test_R3_scattered_no_pair_has_an_expert(backend):
    """Zeros, and without tokens nothing, and zero gradients of the weights."""
    for got in all_four("nobody"):
        assert all((t == 0).all() for t in got.values())
    for grouped_in in (False, True):
        ids, leaves = case("usual", grouped_in, True, grouped_in, torch.float32, 0)
        y, _, dw, d_bias, *_ = run(ids, leaves, grouped_in, not grouped_in, dy_of(grouped_in, grouped_in, 0))
        assert y.shape == (0, OUT) and (dw == 0).all() and (d_bias == 0).all()


@pytest.mark.parametrize("tokens,k,experts", [(1, 1, 1), (1, 3, 3), (7, 4, 4), (19, 1, 7)])
def test_R5_scattered_sizes_at_the_edge(backend, tokens, k, experts):
    ids = choices("usual", tokens, k, experts).to(DEVICE)
    x, w = draw(tokens, IN, seed=1, dtype=torch.float32), draw(experts, IN, OUT, seed=2, dtype=torch.float32)
    gates = draw(tokens, k, seed=5, dtype=torch.float32)
    y = parallel_linear(x, w, k, *flatten_sort_count(ids, experts), gates=gates)
    assert relative_error(y, plain(x.double(), w.double(), ids, None, gates.double(), k, False, False)) < 1e-5


@pytest.mark.parametrize("size_in,size_out", [(60, 100), (17, 129), (1, 3)])
def test_R6_scattered_sizes_that_no_tile_divides(backend, size_in, size_out):
    ids = choices("usual", 9).to(DEVICE)
    leaves = [
        draw(9, size_in, seed=1),
        draw(E, size_in, size_out, seed=2),
        draw(E, size_out, seed=3),
        draw(9, K, seed=4),
    ]
    leaves = [t.float().requires_grad_() for t in leaves]
    compare(ids, leaves, False, False, draw(9, size_out, seed=6))


def test_R7_scattered_repeated_and_missing_experts(backend):
    ids = torch.tensor([[2, 2, 2], [-1, 0, E], [-7, -1, 99], [1, -1, 1]], device=DEVICE)
    leaves = [draw(4, IN, seed=1), draw(E, IN, OUT, seed=2), draw(E, OUT, seed=3), draw(4, K, seed=4)]
    leaves = [t.float().requires_grad_() for t in leaves]
    got = compare(ids, leaves, False, False, draw(4, OUT, seed=6))
    assert (got["y"][2] == 0).all() and (got["dx"][2] == 0).all() and (got["d_gates"][2] == 0).all()
    assert (got["d_gates"][1][[0, 2]] == 0).all()


def test_R8_scattered_strided_input_and_stride_0_gradient(backend):
    ids, leaves = case("usual", False, True, True, torch.float32)
    wide = draw(IN, 13, seed=1, dtype=torch.float32)
    leaves[0] = wide.t().detach().requires_grad_()
    assert not leaves[0].is_contiguous()
    compare(ids, leaves, False, False, torch.ones((), device=DEVICE, dtype=torch.float64).expand(13, OUT))
    ids, leaves = case("usual", True, False, False, torch.float32)
    compare(ids, leaves, True, True, torch.full((1, 1), 0.5, device=DEVICE, dtype=torch.float64).expand(13 * K, OUT))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("with_gates", [False, True])
def test_N1_scattered_as_exact_as_torch(backend, dtype, with_gates):
    """Against float64, at most twice the error of torch's products in the same dtype, gates and sums in float32."""
    ids, leaves = case("usual", True, True, with_gates, dtype, tokens=40)
    dy = dy_of(True, with_gates, 40).to(dtype).double()
    got, truth = run(ids, leaves, True, False, dy), truth_of(ids, leaves, True, False, dy)
    own = [None if t is None else t.detach().clone().requires_grad_() for t in leaves]
    order = flatten_sort_count(ids, E)[1]
    slots = own[0].new_empty(0).new_zeros(own[0].shape).index_copy(0, order, own[0])
    y = torch.stack([slots[p] @ own[1][e] + own[2][e] for p, e in enumerate(ids.flatten().tolist())])
    if with_gates:
        y = (y.view(40, K, -1).float() * own[3].unsqueeze(2)).sum(1).to(dtype)
    torch_own = [y.detach(), *torch.autograd.grad(y, [t for t in own if t is not None], dy.to(dtype))]
    for a, b, c in zip(got, torch_own, truth, strict=True):
        assert_as_exact_as(a, b, c)


def test_N2_scattered_reruns_are_bit_identical(backend):
    ids, leaves = case("ragged", False, True, True, torch.float32)
    first = run(ids, leaves, False, False, dy_of(False, True))
    for _ in range(2 if DEVICE == "cpu" else 9):
        assert all(
            torch.equal(a, b) for a, b in zip(first, run(ids, leaves, False, False, dy_of(False, True)), strict=True)
        )


def test_N3_scattered_nan_stays_in_its_token(backend):
    ids, leaves = case("ragged", False, True, True, torch.float32)
    clean = run(ids, leaves, False, False, dy_of(False, True))
    with torch.no_grad():
        leaves[0][4] = NAN
        leaves[3][4] = NAN
    y, dx, _, _, d_gates = run(ids, leaves, False, False, dy_of(False, True))
    others = [t for t in range(13) if t != 4]
    assert torch.equal(y[others], clean[0][others])
    assert torch.equal(dx[others], clean[1][others]) and torch.equal(d_gates[others], clean[4][others])


def test_N4_scattered_rows_past_two_to_the_31_elements(backend):
    """Row · stride overflows int32 at row 2, under indices of either width and without any."""
    if backend == "reference":
        pytest.skip("the reference indexes by torch, whose offsets are 64 bits wide")
    x = far_rows(draw(3, 16, seed=1).half())
    w = draw(2, 16, 16, seed=2, dtype=torch.float16)
    ids = torch.tensor([[1], [0], [1]], device=DEVICE)
    y = parallel_linear(x, w, 1, *flatten_sort_count(ids, 2))
    expected = torch.stack([x[t].double() @ w[e].double() for t, e in enumerate(ids.flatten().tolist())])
    assert relative_error(y, expected) < 1e-3
    ends = torch.tensor([1, 3], device=DEVICE)
    for index, rows in ((torch.int64, [0, 2]), (torch.int32, [0, 2]), (None, [1, 2])):
        pair = None if index is None else torch.tensor([1, 0, 2], device=DEVICE, dtype=index)
        o, _ = scattered_mm_dw_op(x, x, None, Rows(ends, pair, pair), False, False)
        assert relative_error(o[1], x[rows].double().T @ x[rows].double()) < 1e-3, index
    columns = x.t()  # the same of columns, as an operand that came from a transpose has them
    o, sums = scattered_mm_dw_op(columns, columns, None, Rows(torch.tensor([16], device=DEVICE)), False, True)
    assert relative_error(o[0], columns.double().T @ columns.double()) < 1e-3
    assert relative_error(sums[0], columns.double().sum(0)) < 1e-3


def test_N5_scattered_frozen_inputs_and_two_backwards(backend):
    """Each input alone asks for its gradient and gets the same; nothing saved is written to."""
    ids, leaves = case("ragged", False, True, True, torch.float32)
    dy = dy_of(False, True)
    everything = run(ids, leaves, False, False, dy)[1:]
    order = flatten_sort_count(ids, E)
    for i, expected in enumerate(everything):
        alone = [t.detach().requires_grad_(i == j) for j, t in enumerate(leaves)]
        before = [t.clone() for t in alone]
        y = parallel_linear(alone[0], alone[1], K, *order, alone[2], alone[3])
        for _ in range(2):
            (grad,) = torch.autograd.grad(y, [alone[i]], dy.float(), retain_graph=True)
            assert torch.equal(grad, expected)
        assert all(torch.equal(a, b) for a, b in zip(alone, before, strict=True))


def test_N5_scattered_under_autocast():
    ids, leaves = case("usual", False, True, True, torch.float32)
    order = flatten_sort_count(ids, E)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        y = parallel_linear(leaves[0], leaves[1], K, *order, leaves[2], leaves[3])
    assert y.dtype == torch.bfloat16
    grads = torch.autograd.grad(y.float().sum(), leaves)
    wide = plain(*(t.double() for t in leaves[:2]), ids, leaves[2].double(), leaves[3].double(), K, False, False)
    assert relative_error(y, wide) < 2e-2
    assert [g.dtype for g in grads] == [torch.float32] * 4
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        y = parallel_linear(leaves[0], leaves[1], K, *order, leaves[2], leaves[3])
        inside = torch.autograd.grad(y.float().sum(), leaves)  # as under a `with` around a whole step
    assert all(torch.equal(a, b) for a, b in zip(inside, grads, strict=True))
    narrow = [t.detach().bfloat16() for t in leaves[:2]]
    assert torch.equal(y, parallel_linear(narrow[0], narrow[1], K, *order, leaves[2], leaves[3]))


def test_nothing_of_the_size_of_all_outputs_is_kept():
    """With gates T·K·out values pass through; kept are the inputs alone."""
    ids, leaves = case("usual", True, True, True, torch.float32)
    kept: list[Tensor] = []

    def pack(t: Tensor) -> Tensor:
        kept.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        parallel_linear(leaves[0], leaves[1], 1, *flatten_sort_count(ids, E), leaves[2], leaves[3], True, False)
    known = {t.untyped_storage().data_ptr() for t in leaves}
    new = [t for t in kept if t.is_floating_point() and t.untyped_storage().data_ptr() not in known]
    assert kept and not new


def test_flatten_sort_count_is_stable_and_counts_what_has_an_expert():
    ids = torch.tensor([[2, -1], [0, 2], [5, 0], [2, 1]])
    experts, pairs, ends = flatten_sort_count(ids, 4)
    assert experts.tolist() == [0, 0, 1, 2, 2, 2, 4, 4]
    assert pairs.tolist() == [2, 5, 7, 0, 3, 6, 1, 4]
    assert ends.tolist() == [2, 3, 6, 6]


def test_L2_parallel_linear_refuses():
    ids = choices("usual")
    order = flatten_sort_count(ids, E)
    x, w = torch.zeros(13, IN), torch.zeros(E, IN, OUT)
    call = partial(parallel_linear)
    gates = torch.ones(13, K)
    for args, options, message in (
        ((x, w.half(), K, *order), {}, r"^expert_weights is torch.float16, must be torch.float32 as inputs is$"),
        ((x, torch.zeros(E, 3, OUT), K, *order), {}, r"must be \(rows, in\) and \(E, in, out\)$"),
        ((x, w, 2, *order), {}, r"^inputs has 13 rows, k=2: rows·k must be the 39 pairs$"),
        ((x, w, K, *order), {"grouped_in": True}, "k must be 1 with grouped_in"),
        ((x, w, K, *order), {"gates": torch.ones(13, 2)}, r"^gates is \(13, 2\)"),
        ((x, w, K, *order), {"gates": gates, "grouped_out": True}, "^grouped_out=True: must be False with gates"),
        ((x, w, K, *order), {"expert_biases": torch.ones(E, 1)}, r"^expert_biases is \(5, 1\)"),
        ((x, w, K, *order[:2], torch.ones(3)), {}, "^sorted_expert_idxs"),
    ):
        with pytest.raises(ValueError, match=message):
            call(*args, **options)


def test_N9_parallel_linear_compiles_in_one_graph():
    ids, leaves = case("usual", False, True, True, torch.float32)

    def step(ids, *leaves):
        return parallel_linear(leaves[0], leaves[1], K, *flatten_sort_count(ids, E), leaves[2], leaves[3])

    eager = step(ids, *leaves)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")(ids, *leaves)
    assert torch.allclose(eager, compiled, atol=1e-6)
    for a, b in zip(
        torch.autograd.grad(eager.sin().sum(), leaves), torch.autograd.grad(compiled.sin().sum(), leaves), strict=True
    ):
        assert torch.allclose(a, b, atol=1e-5)


def test_reference_is_the_op_without_registration():
    ids, leaves = case("usual", False, True, True, torch.float64)
    _, pairs, ends = order = flatten_sort_count(ids, E)
    x, w, bias, gates = (t.detach() for t in leaves)
    rows, _ = scattered_mm_ref(x, w, bias, gates.flatten(), None, None, Rows(ends, pairs, pairs, pairs, in_fan=K))
    assert torch.equal(parallel_linear(x, w, K, *order, bias, gates), rows.view(-1, K, OUT).sum(1))
