"""Capacity rules by hand-worked numbers, and the order of dropping against a plain loop."""

import itertools
import math
import re
from types import SimpleNamespace

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


def _places(rule, factor, top_k, tokens, experts, ranks):
    """The two rules in floats, as megablocks 0.10 and Tutel compute them."""
    if rule == "megablocks":
        return int(factor * (top_k * tokens * ranks / experts))
    return top_k * int(factor * math.ceil(tokens / experts))


FACTORS = (0.01, 0.1 + 0.2, 1 / 3, 0.57, 0.7, 1, 1.0, 1.1, 1.25, 1.3, 2.0, 3.7, 64.0)
"""0.57 of 100 is 56 in floats and 57 in decimals; 0.7 of 10 is 7, but 0.7 of 90 is 62."""


@pytest.mark.parametrize("rule", ["megablocks", "tutel"])
def test_R9_places_for_many_sizes(rule):
    for factor, experts, top_k, ranks in itertools.product(FACTORS, (1, 3, 4, 7, 64, 128), (1, 2, 8), (1, 3)):
        for tokens in (*range(0, 400, 3), 1000, 4097, 65536, 10**6 + 3, 2**31 + 7):
            got = capacity_of(rule, factor, top_k, tokens, experts, _load(0), num_ranks=ranks)
            sizes = (factor, top_k, tokens, experts, ranks)
            assert type(got) is int and got == _places(rule, *sizes), sizes


@pytest.mark.parametrize("rule", ["megablocks", "tutel"])
@pytest.mark.parametrize("kind", [np.int64, np.int32, np.float32, np.float64])
def test_capacity_of_a_factor_of_numpy(rule, kind):
    assert capacity_of(rule, kind(2), 2, 10, 4, _load(0)) == _places(rule, 2, 2, 10, 4, 1)
    assert capacity_of(rule, kind(0), 2, 10, 4, _load(1, 9)).item() == 9


@settings(max_examples=2000, deadline=None)
@given(
    rule=st.sampled_from(["megablocks", "tutel"]),
    factor=st.floats(0, 1e6, exclude_min=True),
    top_k=st.integers(1, 64),
    tokens=st.integers(0, 2**40),
    experts=st.integers(1, 4096),
    ranks=st.integers(1, 1024),
)
def test_R9_places_for_any_size(rule, factor, top_k, tokens, experts, ranks):
    got = capacity_of(rule, factor, top_k, tokens, experts, _load(0), num_ranks=ranks)
    assert got == _places(rule, factor, top_k, tokens, experts, ranks)


@pytest.mark.parametrize("rule", ["megablocks", "tutel"])
@pytest.mark.parametrize(
    ("factor", "experts", "top_k"),
    [(0.57, 1, 1), (0.7, 1, 1), (0.1 + 0.2, 7, 2), (1.1, 3, 1), (1.25, 64, 8), (2, 4, 2)],
)
def test_N9_places_for_symbolic_token_counts(rule, factor, experts, top_k):
    """One graph gives the numbers of eager mode for every number of tokens, also where the factor is no constant."""
    options = SimpleNamespace(factor=factor)

    def places(x, options):
        return x.new_ones(capacity_of(rule, options.factor, top_k, x.shape[0], experts, x)).sum()

    torch._dynamo.reset()
    compiled = torch.compile(places, fullgraph=True, dynamic=True, backend="aot_eager")
    compiled(torch.zeros(200, dtype=torch.int64), options)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for tokens in (*range(100, 200, 9), 1000, 4097, 65536):
            got = compiled(torch.zeros(tokens, dtype=torch.int64), options)
            assert got == _places(rule, factor, top_k, tokens, experts, 1), tokens


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
    for rule, factor in (("megablocks", 1e308), ("tutel", 1e300), ("tutel", -(2.0**32))):  # 1e308 · 5 is infinite
        with pytest.raises(ValueError, match=re.escape(f"factor={factor}: must be within ±2**31")):
            capacity_of(rule, factor, 2, 10, 4, _load(1, 3))
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
