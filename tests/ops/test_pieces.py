"""The items that a ragged-K product's programs take in turn, and the sums of those that are pieces."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megablocks.ops.grouped.pieces_triton import add_launch, list_launch
from megablocks.ops.launch import interpreted
from megablocks.testing.poison import poisoned_empty

pytestmark = [
    pytest.mark.any_device,
    pytest.mark.skipif(not torch.cuda.is_available() and not interpreted(), reason="needs TRITON_INTERPRET=1 or a GPU"),
]
DEVICE = "cuda" if torch.cuda.is_available() and not interpreted() else "cpu"
LOADS = {
    "one": [1000], "nobody": [0, 0, 0], "even": [64] * 33, "odd": [0, 129, 1, 500, 128, 0, 64, 200, 129, 300],
    "many": [3, 0, 700, 5] * 60,
}  # fmt: skip


def listed(loads: list[int], longest: int) -> tuple[Tensor, list[list[int]], int]:
    offsets = torch.tensor([0, *loads]).cumsum(0).to(DEVICE, torch.int32)
    slots = sum(-(-rows // longest) for rows in loads) + 1
    with poisoned_empty():
        items = list_launch(offsets, longest, slots)
    return items, items[1 : 1 + int(items[0, 0])].tolist(), len(loads) + slots


@pytest.mark.parametrize("loads", LOADS.values(), ids=LOADS)
def test_items_hold_each_row_once_and_come_in_falling_order(loads: list[int]) -> None:
    items, rows, _ = listed(loads, 64)
    ends = torch.tensor(loads).cumsum(0).tolist()
    keys = [64 if loads[e] > 128 else loads[e] for e, *_ in rows]
    assert keys == sorted(keys, reverse=True)
    slots = []
    for expert, load in enumerate(loads):
        mine = [item[1:] for item in rows if item[0] == expert]
        assert mine[0][0] == ends[expert] - load and mine[-1][1] == ends[expert]
        assert all(left[1] == right[0] for left, right in zip(mine, mine[1:], strict=False))
        if load > 128:
            assert len(mine) == -(-load // 64) and all(end - first <= 64 for first, end, _ in mine)
            slots += [slot for *_, slot in mine]
        else:
            assert len(mine) == 1 and mine[0][2] == -1
    assert sorted(slots) == list(range(len(slots))) and int(items[0, 1]) == sum(load > 128 for load in loads)


@pytest.mark.parametrize("add", [False, True])
def test_pieces_are_added_in_their_order(add: bool) -> None:
    """Values whose sum depends on the order. An expert that is not cut keeps what it has; rows of o may lie apart."""
    loads = LOADS["odd"]
    items, rows, room = listed(loads, 64)
    sums = torch.tensor([1.0, 2.0**24, -(2.0**24)], device=DEVICE).repeat(10)[:, None, None].expand(30, 24, 72)
    whole = torch.full((len(loads), 48, 72), 7.0, device=DEVICE)
    o = whole[:, 24:]
    add_launch(sums.contiguous(), items, room, o, add, programs=3)
    assert bool((whole[:, :24] == 7).all())
    for expert, load in enumerate(loads):
        want = torch.tensor(7.0 if add or load <= 128 else 0.0)
        for e, *_, slot in rows:
            if e == expert and slot >= 0:
                want = want + sums[slot, 0, 0].cpu()
        assert bool((o[expert].cpu() == want).all()), (expert, load)
