"""topology: the block diagonal of a dropless layer, from the reference and from the kernel."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megablocks.ops.sparse import from_coordinates, max_block_rows, topology
from megablocks.ops.sparse.kernels import topology_launch
from megablocks.ops.sparse.matrix import topology_ref
from megablocks.testing.syncs import no_sync

COUNTS = {
    "even": [128, 128, 128],
    "ragged": [1, 200, 63, 64, 65],
    "empty experts": [0, 0, 300, 0, 5, 0],
    "one takes all": [0, 0, 333],
    "one expert": [77],
    "no rows": [0, 0],
}
EVERY_COUNT = pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS.keys())


def offsets_of(counts: list[int], device: str = "cpu") -> Tensor:
    return torch.tensor([0, *counts], dtype=torch.int32, device=device).cumsum(0).int()


@EVERY_COUNT
@pytest.mark.parametrize("room", [0, 3])
def test_pattern_is_the_block_diagonal(counts: list[int], room: int) -> None:
    f, size = 3, 64
    rows, columns = [], []
    for expert, count in enumerate(counts):
        for _ in range(-(-count // size)):
            rows += [rows[-1] + 1 if rows else 0] * f
            columns += range(expert * f, expert * f + f)
    block_rows = len(rows) // f + room
    t = topology(offsets_of(counts), f * size, max_rows=sum(counts), block_size=size, block_rows=block_rows)
    want = from_coordinates(
        (block_rows * size, len(counts) * f * size), torch.tensor(rows, dtype=torch.int64),
        torch.tensor(columns, dtype=torch.int64), block_size=size, num_blocks=block_rows * f,
    )  # fmt: skip
    assert t.pattern.shape == want.shape
    names = ("row_indices", "column_indices", "offsets", "column_indices_t", "offsets_t", "block_offsets_t")
    for name in names:
        assert torch.equal(getattr(t.pattern.blocks, name), getattr(want.blocks, name)), name
    t.pattern.validate()
    padded = [-(-count // size) * size for count in counts]
    assert t.padded_offsets.tolist() == torch.tensor([0, *padded]).cumsum(0).tolist()


@EVERY_COUNT
@pytest.mark.parametrize("f", [1, 2, 3])
@pytest.mark.parametrize("room", [0, 2, -1])
@pytest.mark.parametrize("size", [64, 256])
def test_kernel_equals_reference(counts: list[int], f: int, room: int, size: int, poison: None) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    block_rows = max(sum(-(-count // size) for count in counts) + room, 0)
    expert_offsets = offsets_of(counts, device)
    parts = topology_launch(expert_offsets, f, block_rows, size)
    for got, want in zip(parts, topology_ref(expert_offsets, f, block_rows, size), strict=True):
        assert torch.equal(got, want)


@EVERY_COUNT
def test_bound_on_block_rows_is_enough(counts: list[int]) -> None:
    size = 64
    need = sum(-(-count // size) for count in counts)
    assert need <= max_block_rows(sum(counts), len(counts), size)


def test_bound_on_block_rows_is_met_by_the_worst_routing() -> None:
    # every expert one row over a whole block
    assert max_block_rows(4 * 65, 4, 64) == 8 and max_block_rows(4 * 65 - 1, 4, 64) == 7
    assert max_block_rows(3, 100, 64) == 3 and max_block_rows(0, 8) == 0


def test_runs_follow_the_width() -> None:
    offsets = offsets_of([64, 64])
    assert topology(offsets, 128, max_rows=128, block_size=64).pattern.blocks.run == 2
    assert topology(offsets, 192, max_rows=128, block_size=64).pattern.blocks.run == 1


@pytest.mark.parametrize(
    "offsets,ffn,more,match",
    [
        (torch.zeros(3), 128, {}, r"expert_offsets is \(3,\) torch.float32, must be \(E\+1,\) torch.int32"),
        (torch.zeros(1, dtype=torch.int32), 128, {}, r"expert_offsets is \(1,\)"),
        (torch.zeros(2, 2, dtype=torch.int32), 128, {}, r"expert_offsets is \(2, 2\)"),
        (offsets_of([1]), 128, {"block_size": 100}, "block_size=100: must be one of 64, 128, 256"),
        (offsets_of([1]), 100, {}, "ffn_size=100: .* multiple of block_size=128; choose .* mlp_impl='grouped'"),
        (offsets_of([1]), 0, {}, "ffn_size=0"),
        (offsets_of([1]), 128, {"max_rows": -1}, "max_rows=-1, block_rows=None: must not be negative"),
        (offsets_of([1]), 128, {"block_rows": -2}, "block_rows=-2: must not be negative"),
    ],
)
def test_refusals_name_the_argument(offsets: Tensor, ffn: int, more: dict[str, int], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        topology(offsets, ffn, **{"max_rows": 4, **more})


@pytest.mark.gpu
@EVERY_COUNT
@pytest.mark.parametrize("size", [64, 128, 256])
def test_on_a_gpu_without_host_synchronization(counts: list[int], size: int) -> None:
    expert_offsets = offsets_of(counts, "cuda")
    topology(expert_offsets, 256, max_rows=sum(counts), block_size=size)
    torch.cuda.synchronize()
    with no_sync():
        got = topology(expert_offsets, 256, max_rows=sum(counts), block_size=size)
    want = topology(expert_offsets.cpu(), 256, max_rows=sum(counts), block_size=size)
    assert torch.equal(got.padded_offsets.cpu(), want.padded_offsets)
    for a, b in zip(got.pattern.blocks[:-2], want.pattern.blocks[:-2], strict=True):
        assert torch.equal(a.cpu(), b)
