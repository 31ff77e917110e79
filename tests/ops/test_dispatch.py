"""Token to expert bookkeeping, against a plain Python loop."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megablocks.ops.routing.dispatch import (
    Dispatch,
    Routing,
    build_dispatch,
    build_dispatch_ref,
    check_routing,
    count_valid,
    make_routing,
)
from megablocks.testing.routings import ROUTINGS


def dispatch_loop(token, expert, num_tokens, num_experts):
    """The five lists as their docstring says, written out."""
    pairs = [(e, r) for r, e in enumerate(expert) if 0 <= e < num_experts]
    by_expert = sorted(pairs, key=lambda p: p[0])  # sorted() is stable
    pair = [r for _, r in by_expert]
    row_of = {r: p for p, r in enumerate(pair)}
    scatter = [row_of[r] for _, r in pairs]
    expert_offsets = [sum(e < bound for e, _ in pairs) for bound in range(num_experts + 1)]
    token_offsets = [sum(token[r] < bound for _, r in pairs) for bound in range(num_tokens + 1)]
    rest = [0] * (len(expert) - len(pairs))
    return expert_offsets, token_offsets, [token[r] for r in pair] + rest, scatter + rest, pair + rest


@st.composite
def pairs(draw):
    num_tokens, num_experts = draw(st.integers(0, 9)), draw(st.integers(1, 7))
    token = sorted(draw(st.lists(st.integers(0, num_tokens - 1), max_size=30))) if num_tokens else []
    ids = st.integers(-3, num_experts + 2)
    expert = draw(st.lists(ids, min_size=len(token), max_size=len(token)))
    return token, expert, num_tokens, num_experts


@settings(max_examples=200, deadline=None)
@given(pairs())
def test_dispatch_equals_the_loop(case):
    token, expert, num_tokens, num_experts = case
    got = build_dispatch_ref(torch.tensor(token).int(), torch.tensor(expert).int(), num_tokens, num_experts)
    for name, value, expected in zip(Dispatch._fields, got, dispatch_loop(*case), strict=False):
        assert value.dtype == torch.int32
        assert value.tolist() == expected, name


def test_dispatch_takes_any_integer_dtype():
    token, expert = torch.tensor([0, 0, 1]), torch.tensor([2, -1, 0])
    for dtype in (torch.int16, torch.int32, torch.int64):
        got = build_dispatch_ref(token.to(dtype), expert.to(dtype), 2, 3)
        assert [t.tolist() for t in got] == list(dispatch_loop([0, 0, 1], [2, -1, 0], 2, 3))


@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("num_tokens", [0, 1, 13])
def test_public_op_is_the_reference(name, num_tokens, poison):
    routing = ROUTINGS[name](num_tokens, 3, 2)
    check_routing(routing) if name != "ragged" else None
    got = build_dispatch(routing)
    expected = dispatch_loop(routing.token.tolist(), routing.expert.tolist(), num_tokens, 3)
    assert not got.padded and tuple(t.tolist() for t in got[:5]) == expected


def test_R7_repeated_expert_and_no_expert():
    routing = make_routing(torch.tensor([[1, 1], [-1, 1], [-1, 2**20]]), torch.ones(3, 2), 2)
    assert routing.metrics["tokens_per_expert"].tolist() == [0, 3]
    assert routing.metrics["invalid"].item() == 3
    d = build_dispatch(routing)
    assert d.expert_offsets.tolist() == [0, 0, 3]
    assert d.token_offsets.tolist() == [0, 2, 3, 3]
    assert d.gather.tolist() == [0, 0, 1, 0, 0, 0]
    assert d.pair.tolist() == [0, 1, 3, 0, 0, 0]


def test_padding_gets_no_expert_and_is_no_load():
    routing = make_routing(
        torch.tensor([[0, 1], [0, 1], [1, 7]]), torch.ones(3, 2), 2, padding_mask=torch.tensor([False, True, False])
    )
    assert routing.expert.tolist() == [0, 1, -1, -1, 1, 7]
    assert routing.metrics["tokens_per_expert"].tolist() == [1, 2]
    assert routing.metrics["invalid"].item() == 1  # the 7, not the padding


def test_count_valid_skips_ids_outside():
    assert count_valid(torch.tensor([0, -1, 2, 3, 2, 99]), 3).tolist() == [1, 0, 2]
    assert count_valid(torch.empty(0, dtype=torch.int32), 2).tolist() == [0, 0]


def _routing(token, expert):
    return Routing(torch.tensor(token).int(), torch.tensor(expert).int(), torch.ones(len(token)), 2, 3)


def test_check_routing_names_the_fault():
    check_routing(_routing([0, 0, 1], [0, -1, 2]))
    with pytest.raises(ValueError, match=r"^expert=3: must be in \[-1, 3\)$"):
        check_routing(_routing([0, 1], [3, 0]))
    with pytest.raises(ValueError, match=r"^token=2: must be in \[0, 2\)$"):
        check_routing(_routing([0, 2], [1, 0]))
    with pytest.raises(ValueError, match="token is not sorted"):
        check_routing(_routing([1, 0], [1, 0]))
    with pytest.raises(ValueError, match=r"^weight is \(1,\): must be \(2,\)"):
        check_routing(Routing(torch.zeros(2).int(), torch.zeros(2).int(), torch.ones(1), 2, 3))
    with pytest.raises(ValueError, match="^token is torch.int64: must be torch.int32$"):
        check_routing(Routing(torch.zeros(2).long(), torch.zeros(2).int(), torch.ones(2), 2, 3))


def test_bad_shapes_are_named():
    with pytest.raises(ValueError, match=r"^expert \(3,\) and weight \(3,\): both must be \(T, K\)"):
        make_routing(torch.zeros(3), torch.ones(3), 2)
    with pytest.raises(ValueError, match=r"^padding_mask is \(2,\): must be \(3,\)"):
        make_routing(torch.zeros(3, 1), torch.ones(3, 1), 2, padding_mask=torch.zeros(2).bool())
    with pytest.raises(ValueError, match=r"^token \(3,\) and expert \(2,\)"):
        build_dispatch(Routing(torch.zeros(3).int(), torch.zeros(2).int(), torch.ones(2), 2, 3))


def test_narrow_ids_may_name_every_expert():
    """uint8 holds 255, the last of 256 experts, and no number for "no expert"."""
    expert, padding = torch.tensor([[0, 255], [1, 2]], dtype=torch.uint8), torch.tensor([False, True])
    routing = make_routing(expert, torch.ones(2, 2), 256, padding_mask=padding)
    assert routing.expert.tolist() == [0, 255, -1, -1] and int(routing.metrics["invalid"]) == 0
    assert routing.metrics["tokens_per_expert"].nonzero().flatten().tolist() == [0, 255]


def test_wide_ids_beyond_int32_get_no_expert():
    expert, weight = torch.tensor([[0, 1], [2**32, 3], [2**32 + 1, -(2**32)]]), torch.ones(3, 2)
    routing = make_routing(expert, weight, 4)
    build_dispatch(routing)
    assert routing.metrics["invalid"] == 3
    assert routing.metrics["tokens_per_expert"].tolist() == [1, 1, 0, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.complex64])
def test_ids_that_are_no_integers_are_refused(dtype):
    with pytest.raises(ValueError, match=rf"^expert is {dtype}: must be an integer dtype"):
        make_routing(torch.ones(3, 2).to(dtype), torch.ones(3, 2), 4)
