"""Capacity rules by hand-worked numbers, and the order of dropping against a plain loop."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megablocks.ops.routing.capacity import apply_capacity, capacity_of
from megablocks.ops.routing.dispatch import Routing, build_dispatch, count_valid, make_routing


def _load(*counts):
    return torch.tensor(counts)


def test_R9_megablocks_rule():
    # int(factor · K·T·n / E): 1.25 · 2·10/4 = 6.25
    assert capacity_of("megablocks", 1.25, 2, 10, 4, _load(0)) == 6
    assert capacity_of("megablocks", 1.0, 1, 10, 4, _load(0), num_ranks=2) == 5
    assert capacity_of("megablocks", 1.0, 1, 0, 4, _load(0)) == 0


def test_R9_tutel_rule():
    # K · int(factor · ceil(T/E)): 2 · int(1.25 · 3)
    assert capacity_of("tutel", 1.25, 2, 10, 4, _load(0)) == 6
    assert capacity_of("tutel", 1.0, 2, 9, 4, _load(0)) == 6
    assert capacity_of("tutel", 1.0, 2, 9, 4, _load(0), num_ranks=8) == 6  # each rank for itself
    assert capacity_of("tutel", -1.0, 2, 9, 4, _load(1, 9, 2, 6)).item() == 6
    assert capacity_of("tutel", -1.0, 2, 9, 4, _load(1, 4, 2, 3)).item() == 4


@pytest.mark.parametrize("rule", ["megablocks", "tutel"])
def test_R9_zero_factor_is_the_fullest_expert(rule):
    capacity = capacity_of(rule, 0.0, 2, 9, 4, _load(1, 9, 2, 6))
    assert isinstance(capacity, torch.Tensor)  # no host synchronization
    assert capacity.item() == 9
    routing = make_routing(torch.tensor([[0, 1], [1, 2], [1, -1]]), torch.ones(3, 2), 3)
    kept = apply_capacity(routing, capacity_of(rule, 0.0, 2, 3, 3, routing.metrics["tokens_per_expert"]))
    assert kept.expert.tolist() == routing.expert.tolist()
    assert kept.metrics["dropped"].item() == 0


def test_capacity_refuses_what_it_does_not_know():
    with pytest.raises(ValueError, match="^rule='gshard': must be 'megablocks' or 'tutel'"):
        capacity_of("gshard", 1.0, 1, 1, 1, _load(0))
    for factor in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"^factor={factor}: must be finite"):
            capacity_of("tutel", factor, 1, 4, 2, torch.tensor([1, 3]))
    with pytest.raises(ValueError, match="^factor=-1.0: must be >= 0, or use rule='tutel'"):
        capacity_of("megablocks", -1.0, 1, 1, 1, _load(0))


@pytest.mark.parametrize(
    ("capacity", "before", "message"),
    [
        (-1, None, "capacity=-1: must be an integer >= 0"),
        (1.5, None, "capacity=1.5: must be an integer >= 0"),
        (True, None, "capacity=True: must be an integer >= 0"),
        (torch.tensor(1.5), None, r"capacity is torch.float32 \(\): must be a tensor of integers"),
        (torch.tensor([1, 1]), None, r"capacity is torch.int64 \(2,\): .* of shape \(\) or \(3,\)"),
        (1, torch.tensor(0), r"before is torch.int64 \(\): .* of shape \(3,\)"),
        (1, torch.zeros(3), r"before is torch.float32 \(3,\): must be a tensor of integers"),
        (1, [0, 0, 0], r"before is \[0, 0, 0\]: must be a tensor of integers"),
    ],
)
def test_places_are_integers(capacity, before, message):
    routing = make_routing(torch.tensor([[0], [1], [2]]), torch.ones(3, 1), 3)
    with pytest.raises(ValueError, match=f"^{message}"):
        apply_capacity(routing, capacity, before=before)


@pytest.mark.parametrize(
    "capacity", [np.int64(1), torch.tensor(1, dtype=torch.int16), torch.ones(3, dtype=torch.uint8)], ids=repr
)
def test_places_may_be_of_any_kind_of_integers(capacity):
    routing = make_routing(torch.tensor([[0], [1], [0]]), torch.ones(3, 1), 3)
    assert apply_capacity(routing, capacity).expert.tolist() == [0, 1, -1]


def test_R9_earliest_tokens_keep_their_place():
    expert = torch.tensor([[0, 1], [0, 0], [1, 0], [0, 1]])
    routing = make_routing(expert, torch.arange(8.0).view(4, 2), 2)
    kept = apply_capacity(routing, 2)
    # expert 0 takes tokens 0 and 1 (first choice), expert 1 takes tokens 0 and 2
    assert kept.expert.tolist() == [0, 1, 0, -1, 1, -1, -1, -1]
    assert kept.metrics["dropped"].item() == 4
    assert kept.metrics["tokens_per_expert"].tolist() == [5, 3]  # before the drop
    assert torch.equal(kept.weight, routing.weight)
    assert kept.top_k == 2
    assert routing.expert.tolist() == [0, 1, 0, 0, 1, 0, 0, 1]  # untouched
    assert build_dispatch(kept).expert_offsets.tolist() == [0, 2, 4]


def test_R9_padding_takes_no_place():
    padding = torch.tensor([True, True, False, False])
    routing = make_routing(torch.zeros(4, 1, dtype=torch.int64), torch.ones(4, 1), 2, padding_mask=padding)
    kept = apply_capacity(routing, 2)
    assert kept.expert.tolist() == [-1, -1, 0, 0]
    assert kept.metrics["dropped"].item() == 0
    assert kept.metrics["tokens_per_expert"].tolist() == [2, 0]


@st.composite
def cases(draw):
    num_experts = draw(st.integers(1, 5))
    expert = draw(st.lists(st.integers(-2, num_experts + 1), max_size=25))
    before = draw(st.lists(st.integers(0, 4), min_size=num_experts, max_size=num_experts))
    return num_experts, expert, before, draw(st.integers(0, 6))


@settings(max_examples=150, deadline=None)
@given(cases(), st.booleans(), st.booleans())
def test_R9_drops_equal_the_loop(case, as_tensor, with_before):
    num_experts, expert, before, capacity = case
    taken = list(before) if with_before else [0] * num_experts
    expected, dropped = [], 0
    for e in expert:
        if 0 <= e < num_experts:
            taken[e] += 1
            if taken[e] > capacity:
                e, dropped = -1, dropped + 1
        expected.append(e)
    ids = torch.tensor(expert, dtype=torch.int32)
    routing = Routing(
        token=torch.arange(len(expert), dtype=torch.int32),
        expert=ids,
        weight=torch.ones(len(expert)),
        num_tokens=len(expert),
        num_experts=num_experts,
        metrics={"tokens_per_expert": count_valid(ids, num_experts)},
    )
    kept = apply_capacity(
        routing, torch.tensor(capacity) if as_tensor else capacity, before=torch.tensor(before) if with_before else None
    )
    assert kept.expert.tolist() == expected
    assert kept.metrics["dropped"].item() == dropped


def test_capacity_of_each_expert():
    routing = make_routing(torch.tensor([[0], [1], [0], [1]]), torch.ones(4, 1), 2)
    assert apply_capacity(routing, torch.tensor([1, 2])).expert.tolist() == [0, 1, -1, 1]
