"""The block pattern of a dropless MoE's hidden activations, built on the device in one launch.

Expert e has t_e rows, padded to n_e = ⌈t_e / B⌉ block rows; in its block rows the I / B blocks of its own columns are
nonzero. The pattern is (block rows × B, E × I), the block diagonal of MegaBlocks (arXiv 2211.15841, section 5.2).
How many block rows there are is known on the device only, so they get a static bound: ⌊(R + E·(B−1)) / B⌋ for R rows.

    block row r of expert e, first block row s_e = Σ_{e' < e} n_e', f = I / B:
    blocks r·f … r·f + f − 1 at columns e·f …;   in column order, column e·f + j holds blocks (s_e + i)·f + j, i < n_e
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megablocks.ops.library import custom_op

from .matrix import BLOCK_SIZES, Matrix, from_indices


class Topology(NamedTuple):
    """pattern: Matrix without data. padded_offsets: (E+1,) int32, expert e's padded rows begin at padded_offsets[e]."""

    pattern: Matrix
    padded_offsets: Tensor


def max_block_rows(rows: int, num_experts: int, block_size: int = 128) -> int:
    """The most block rows that `rows` rows of `num_experts` experts can need, each expert padded to whole blocks."""
    return min(rows, (rows + num_experts * (block_size - 1)) // block_size)


def topology_ref(expert_offsets: Tensor, blocks_per_row: int, block_rows: int, block_size: int) -> tuple[Tensor, ...]:
    """(padded_offsets, the eight indices of Matrix), in plain torch."""
    device, f = expert_offsets.device, blocks_per_row
    experts = expert_offsets.shape[0] - 1
    ends = ((expert_offsets.long().diff() + block_size - 1) // block_size).cumsum(0).clamp(max=block_rows)
    starts = torch.cat([ends.new_zeros(1), ends])
    heights, used = starts.diff(), starts[-1]
    row = torch.arange(block_rows, device=device)
    expert = torch.searchsorted(ends, row, right=True)
    offsets = torch.arange(block_rows + 1, device=device).clamp(max=used) * f

    block = torch.arange(block_rows * f, device=device)
    block_row, j = block // f, block % f
    in_use = block_row < used
    row_indices = torch.where(in_use, block_row, -1)
    column_indices = torch.where(in_use, expert[block_row] * f + j, -1)

    column = torch.arange(experts * f, device=device)
    offsets_t = torch.cat([starts[:-1][column // f] * f + column % f * heights[column // f], (used * f)[None]])
    entry_column = torch.searchsorted(offsets_t[1:], block, right=True)
    safe = entry_column.clamp(max=max(experts * f - 1, 0))
    entry_row = starts[:-1][safe // f] + block - offsets_t[safe]
    column_indices_t = torch.where(in_use, entry_row, -1)
    block_offsets_t = torch.where(in_use, entry_row * f + safe % f, -1)

    by_height = torch.sort(heights, descending=True, stable=True).indices
    longest = (by_height[:, None] * f + torch.arange(f, device=device)).reshape(-1)
    row_work = torch.stack([row, offsets[:-1], offsets[1:], torch.zeros_like(row)], 1)
    column_work = torch.stack([longest, offsets_t[longest], offsets_t[longest + 1], torch.zeros_like(longest)], 1)
    out = (
        starts * block_size, row_indices, column_indices, offsets, column_indices_t, offsets_t, block_offsets_t,
        row_work, column_work,
    )  # fmt: skip
    return tuple(t.int() for t in out)


def _sizes(experts: int, blocks_per_row: int, block_rows: int) -> list[int]:
    """Elements of padded_offsets and the eight indices."""
    n, columns = block_rows * blocks_per_row, experts * blocks_per_row
    return [experts + 1, n, n, block_rows + 1, n, columns + 1, n, 4 * block_rows, 4 * columns]


def _unpack(packed: Tensor, sizes: list[int]) -> list[Tensor]:
    """Views of one allocation, each part starting on 16 bytes."""
    # one split with the gaps as parts of their own: slicing each part would cost the host as much as a launch
    out = packed.split([n for size in sizes for n in (size, _round_up(size) - size)])[::2]
    return [*out[:7], out[7].view(-1, 4), out[8].view(-1, 4)]


def _round_up(size: int) -> int:
    return -(-size // 4) * 4


def topology_launch(expert_offsets: Tensor, blocks_per_row: int, block_rows: int, block_size: int) -> Tensor:
    """topology_ref's results in one allocation, by one kernel."""
    from .kernels import fill_topology

    sizes = _sizes(expert_offsets.shape[0] - 1, blocks_per_row, block_rows)
    packed = torch.empty(sum(map(_round_up, sizes)), dtype=torch.int32, device=expert_offsets.device)
    fill_topology(expert_offsets, _unpack(packed, sizes), blocks_per_row, block_rows, block_size)
    return packed


@custom_op("megablocks::sparse_topology", mutates_args=())
def topology_op(expert_offsets: Tensor, blocks_per_row: int, block_rows: int, block_size: int) -> Tensor:
    if expert_offsets.is_cuda:
        return topology_launch(expert_offsets, blocks_per_row, block_rows, block_size)
    parts = topology_ref(expert_offsets, blocks_per_row, block_rows, block_size)
    return torch.cat([F.pad(part.reshape(-1), (0, -part.numel() % 4)) for part in parts])


@topology_op.register_fake
def _(expert_offsets: Tensor, blocks_per_row: int, block_rows: int, block_size: int) -> Tensor:
    sizes = _sizes(expert_offsets.shape[0] - 1, blocks_per_row, block_rows)
    return expert_offsets.new_empty(sum(map(_round_up, sizes)))


def topology(
    expert_offsets: Tensor, ffn_size: int, *, max_rows: int, block_size: int = 128, block_rows: int | None = None
) -> Topology:
    """The pattern of the hidden activations of experts whose rows are sorted by expert, without host synchronisation.

    Args:
        expert_offsets: (E+1,) int32, non-decreasing: unpadded rows [expert_offsets[e], expert_offsets[e+1]) are expert
            e's (`Dispatch.expert_offsets`).
        ffn_size: I, the width of one expert; a multiple of block_size.
        max_rows: R ≥ expert_offsets[E], which the host need not know: the number of (token, expert) pairs.
        block_rows: block rows of the pattern, default `max_block_rows`. A smaller number than the rows need leaves the
            last rows out; pass one only where it is known, as under uniform routing.

    Returns:
        Topology: pattern (block_rows·B, E·I), padded_offsets (E+1,).

    Raises:
        ValueError: a width that is no multiple of the block size, or a bad block size, shape or dtype.
    """
    if expert_offsets.dim() != 1 or expert_offsets.shape[0] < 2 or expert_offsets.dtype != torch.int32:
        raise ValueError(
            f"expert_offsets is {tuple(expert_offsets.shape)} {expert_offsets.dtype}, must be (E+1,) torch.int32"
        )
    if block_size not in BLOCK_SIZES:
        raise ValueError(f"block_size={block_size}: must be one of {', '.join(map(str, BLOCK_SIZES))}")
    if ffn_size <= 0 or ffn_size % block_size:
        raise ValueError(
            f"ffn_size={ffn_size}: block-sparse products need a multiple of block_size={block_size}; "
            "choose such a width, a smaller block_size or mlp_impl='grouped'"
        )
    if max_rows < 0 or (block_rows is not None and block_rows < 0):
        raise ValueError(f"max_rows={max_rows}, block_rows={block_rows}: must not be negative")
    experts = expert_offsets.shape[0] - 1
    if block_rows is None:
        block_rows = max_block_rows(max_rows, experts, block_size)
    blocks_per_row = ffn_size // block_size
    packed = topology_op(expert_offsets.contiguous(), blocks_per_row, block_rows, block_size)
    padded_offsets, *indices = _unpack(packed, _sizes(experts, blocks_per_row, block_rows))
    run = 2 if blocks_per_row % 2 == 0 else 1
    shape = (block_rows * block_size, experts * ffn_size)
    pattern = from_indices(shape, indices, block_size=block_size, run=run)
    return Topology(pattern, padded_offsets)
