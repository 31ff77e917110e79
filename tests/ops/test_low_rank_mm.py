"""Products with a matrix plus a low-rank one against float64 and their sum, and what they compute and keep."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megablocks.ops.grouped import gathered_mm, grouped_mm, grouped_mm_hopper, low_rank_mm
from megablocks.ops.grouped.low_rank_mm import low_rank_mm_op
from megablocks.ops.routing.dispatch import Dispatch, build_dispatch, make_routing
from megablocks.testing.oracle import relative_error
from megablocks.testing.poison import poisoned_empty

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAMES = ("x", "w", "a", "b")
TOKENS, EXPERTS, TOP_K = 23, 5, 2


def draw(
    inner: int, outer: int, rank: int, gathered: bool, transposed: bool, dtype: torch.dtype, *, unused: int = 1
) -> tuple[dict[str, Tensor], Dispatch, Tensor]:
    """x, w, a and b, a dispatch with `unused` ids of no expert, and each row's expert, -1 for an unused one."""
    g = torch.Generator().manual_seed(inner + outer)
    ids = torch.stack([torch.randperm(EXPERTS + unused, generator=g)[:TOP_K] for _ in range(TOKENS)])
    d = build_dispatch(make_routing(ids, torch.rand(TOKENS, TOP_K, generator=g), EXPERTS))
    counts = d.expert_offsets.diff().long()
    experts = torch.full((d.num_rows,), -1)
    experts[: int(counts.sum())] = torch.repeat_interleave(torch.arange(EXPERTS), counts)
    rows = TOKENS if gathered else d.num_rows
    matrices = {"w": (inner, outer), "a": (inner, rank), "b": (rank, outer)}
    shapes = {"x": (rows, inner), **{name: (EXPERTS, *shape) for name, shape in matrices.items()}}
    values = {name: (torch.randn(s, generator=g) / s[-2] ** 0.5).to(DEVICE, dtype) for name, s in shapes.items()}
    if transposed:
        values |= {name: values[name].mT.contiguous().mT for name in "wab"}
    return values, Dispatch(*(t.to(DEVICE) for t in d[:5])), experts.to(DEVICE)


def truth(values: dict[str, Tensor], d: Dispatch, experts: Tensor, gathered: bool, dy: Tensor) -> dict[str, Tensor]:
    leaves = {name: t.detach().double().requires_grad_() for name, t in values.items()}
    used = experts >= 0
    rows = leaves["x"][d.gather.long()] if gathered else leaves["x"]
    matrix = leaves["w"] + leaves["a"] @ leaves["b"]
    y = torch.einsum("pk,pkn->pn", rows[used], matrix[experts[used]])
    y.backward(dy.double()[used])
    return {"y": y.detach(), **{name: t.grad for name, t in leaves.items()}}


def run(
    values: dict[str, Tensor], d: Dispatch, experts: Tensor, gathered: bool, dy: Tensor, trained: str = "xwab"
) -> dict[str, Tensor | None]:
    leaves = {name: t.detach().clone(memory_format=torch.preserve_format) for name, t in values.items()}
    for name in trained:
        leaves[name].requires_grad_()
    with poisoned_empty():
        y = low_rank_mm.low_rank_mm(**leaves, dispatch=d, gathered=gathered)
        y.backward(dy)
    used = experts >= 0
    grads = {name: leaves[name].grad for name in trained}
    if not gathered and grads.get("x") is not None:
        grads["x"] = torch.where(used.unsqueeze(1), grads["x"], 0)
    return {"y": y.detach()[used], **grads}


@pytest.mark.any_device
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize(("inner", "outer", "rank"), [(13, 21, 3), (24, 8, 16)])
def test_H3_values_and_gradients_equal_those_of_the_sum(
    inner: int, outer: int, rank: int, gathered: bool, transposed: bool
) -> None:
    values, d, experts = draw(inner, outer, rank, gathered, transposed, torch.float32)
    dy = torch.randn(d.num_rows, outer, device=DEVICE)
    expected = truth(values, d, experts, gathered, dy)
    for trained in ("xwab", "xab", "ab", "x", "b"):
        actual = run(values, d, experts, gathered, dy, trained)
        for name, value in actual.items():
            assert value is not None and relative_error(value, expected[name]) < 2e-6, name


@pytest.mark.any_device
def test_gradients_have_the_layout_of_their_matrices() -> None:
    values, d, experts = draw(13, 21, 3, False, True, torch.float32)
    actual = run(values, d, experts, False, torch.randn(d.num_rows, 21, device=DEVICE))
    for name in "wab":
        assert actual[name].stride() == values[name].stride()


@pytest.mark.parametrize("gathered", [False, True])
def test_N5_a_frozen_matrix_costs_no_gradient(gathered: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[tuple[int, ...]] = []
    for module in (gathered_mm, grouped_mm):
        op = module.grouped_mm_dw_op
        monkeypatch.setattr(module, "grouped_mm_dw_op", lambda *a, op=op: shapes.append(tuple(op(*a).shape)) or op(*a))
    values, d, experts = draw(13, 21, 3, gathered, False, torch.float32)
    run(values, d, experts, gathered, torch.randn(d.num_rows, 21), "xab")
    assert len(shapes) == 2 and all(3 in shape for shape in shapes)


def test_keeps_what_its_gradients_need() -> None:
    values, d, _ = draw(13, 21, 3, True, False, torch.float32)
    kept: list[Tensor] = []
    for trained, wanted in (("x", "wab"), ("b", ""), ("a", "xb"), ("w", "x")):
        leaves = {name: t.requires_grad_(name in trained) for name, t in values.items()}
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            low_rank_mm.low_rank_mm(**leaves, dispatch=d, gathered=True)
        matrices = {t.data_ptr() for t in kept if t.is_floating_point() and t.shape[-1] != 3 or t.dim() == 3}
        assert matrices == {values[name].data_ptr() for name in wanted}, trained


@pytest.mark.parametrize("gathered", [False, True])
def test_N9_low_rank_mm_opcheck(gathered: bool) -> None:
    values, d, _ = draw(8, 16, 3, gathered, False, torch.float32, unused=0)  # of unused rows nothing is said
    arguments = *(t.requires_grad_() for t in values.values()), d, gathered
    torch.library.opcheck(low_rank_mm_op.definition, low_rank_mm_op.flat(*arguments))


def test_bad_input_is_named() -> None:
    values, d, _ = draw(8, 16, 3, True, False, torch.float32)
    for changed, message in (
        ({"x": values["x"][1:]}, r"x is \(22, 8\): must be \(23, K\), as in the dispatch"),
        ({"a": values["a"][:, 1:]}, r"x \(23, 8\) and w \(5, 7, 3\): must be"),
        ({"b": values["b"][:, :2]}, r"b is \(5, 2, 16\) torch.float32: must be \(5, 3, 16\)"),
        ({"w": values["w"].double()}, "w is torch.float64, must be torch.float32"),
    ):
        with pytest.raises(ValueError, match=message):
            low_rank_mm.low_rank_mm(**(values | changed), dispatch=d, gathered=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("inner", "outer", "rank"), [(256, 136, 16), (520, 328, 8), (72, 264, 72)])
def test_N1_half_types_on_a_gpu(
    inner: int, outer: int, rank: int, transposed: bool, gathered: bool, dtype: torch.dtype
) -> None:
    values, d, experts = draw(inner, outer, rank, gathered, transposed, dtype)
    if not gathered and torch.cuda.get_device_capability() == (9, 0):
        t = torch.zeros(d.num_rows, rank, dtype=dtype, device=DEVICE)
        assert grouped_mm_hopper.supports_sum(values["x"], values["w"], t, values["b"], d.expert_offsets)
    dy = torch.randn(d.num_rows, outer, device=DEVICE, dtype=dtype)
    expected = truth(values, d, experts, gathered, dy)
    bound = 2e-2 if dtype == torch.bfloat16 else 3e-3
    for name, value in run(values, d, experts, gathered, dy).items():
        assert value is not None and relative_error(value, expected[name]) < bound, name
