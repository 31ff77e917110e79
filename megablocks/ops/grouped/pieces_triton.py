"""Triton kernels before and after a ragged-K product whose programs compute every P-th tile.

list    the experts in falling order of their rows, long ones in pieces, so that programs end at about the same time
add     o[e] = Σ of the sums of its pieces, in their order; or this is added to o[e]
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megablocks.ops.launch import next_power_of_2, quick

_BLOCK = 4096


@quick
@triton.jit(do_not_specialize=["experts", "longest", "room"])
def list_pieces_kernel(offsets_ptr, list_ptr, experts, longest, room, LANES: tl.constexpr):
    lane = tl.arange(0, LANES)
    rows = tl.load(offsets_ptr + lane + 1, mask=lane < experts, other=-1)
    rows -= tl.load(offsets_ptr + lane, mask=lane < experts, other=0)
    keys = tl.where(rows > 2 * longest, longest, rows).to(tl.int64) * LANES + (LANES - 1 - lane)
    keys = tl.sort(keys, descending=True)  # of equal rows the first expert first, and lanes of no expert last
    e = LANES - 1 - (keys % LANES).to(tl.int32)
    e = tl.where(keys < 0, experts, e)
    first = tl.load(offsets_ptr + e, mask=e < experts, other=0)
    end = tl.load(offsets_ptr + e + 1, mask=e < experts, other=0)
    pieces = tl.where(end - first > 2 * longest, (end - first + longest - 1) // longest, 0)
    slot = tl.cumsum(pieces, 0) - pieces
    items = tl.where(e < experts, tl.maximum(pieces, 1), 0)
    item = tl.cumsum(items, 0) - items
    for piece in range(tl.max(items, 0)):
        mine = piece < items
        row = list_ptr + (1 + item + piece) * 4
        start = first + piece * longest
        tl.store(row, e, mask=mine)
        tl.store(row + 1, start, mask=mine)
        tl.store(row + 2, tl.where(pieces > 0, tl.minimum(start + longest, end), end), mask=mine)
        tl.store(row + 3, tl.where(pieces > 0, slot + piece, -1), mask=mine)
    is_cut = (pieces > 0).to(tl.int32)
    row = list_ptr + (room + tl.cumsum(is_cut, 0)) * 4
    tl.store(row, e, mask=pieces > 0)
    tl.store(row + 1, slot, mask=pieces > 0)
    tl.store(row + 2, pieces, mask=pieces > 0)
    tl.store(list_ptr, tl.sum(items, 0))
    tl.store(list_ptr + 1, tl.sum(is_cut, 0))


def list_launch(offsets: Tensor, longest: int, slots: int) -> Tensor:
    """Split experts with more than twice `longest` rows into pieces of `longest` rows, at most `slots` pieces in all.

    Returns:
        (1 + room + E, 4) int32, room = E + slots. Row 0: the number of items, and of experts that are split. Rows 1 to
        room: an item's expert, first row, end row, and the slot of its sums or -1. Rows after that: a split expert, its
        first slot, its number of pieces.
    """
    experts = offsets.numel() - 1
    items = torch.empty(1 + 2 * experts + slots, 4, dtype=torch.int32, device=offsets.device)
    lanes = next_power_of_2(experts)
    list_pieces_kernel[(1,)](offsets, items, experts, longest, experts + slots, LANES=lanes, num_warps=4)
    return items


@quick
@triton.jit(do_not_specialize=["room"])
def add_pieces_kernel(
    sums_ptr, list_ptr, o_ptr, o_block, o_row, room,
    M: tl.constexpr, N: tl.constexpr, ADD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(M * N, BLOCK)
    for job in range(tl.program_id(0), tl.load(list_ptr + 1) * blocks, tl.num_programs(0)):
        row = list_ptr + (1 + room + job // blocks) * 4
        e = tl.load(row).to(tl.int64)
        slot = tl.load(row + 1).to(tl.int64)
        i = job % blocks * BLOCK + tl.arange(0, BLOCK)
        inside = i < M * N
        at = o_ptr + e * o_block + (i // N).to(tl.int64) * o_row + i % N
        total = tl.load(at, mask=inside, other=0) if ADD else tl.zeros((BLOCK,), tl.float32)
        for piece in range(tl.load(row + 2)):
            total += tl.load(sums_ptr + (slot + piece) * (M * N) + i, mask=inside, other=0)
        tl.store(at, total.to(o_ptr.dtype.element_ty), mask=inside)


def add_launch(sums: Tensor, items: Tensor, room: int, o: Tensor, add: bool, programs: int) -> None:
    """Write o (E, M, N) of the split experts in `items`, from sums (slots, M, N) float32. add: to a float32 o."""
    _, M, N = o.shape
    add_pieces_kernel[(programs,)](
        sums, items, o, o.stride(0), o.stride(1), room, M=M, N=N, ADD=add, BLOCK=_BLOCK, num_warps=4
    )
