"""Up-projection with its activation on Hopper (sm_90): plan, descriptors and launch of the Gluon kernel.

No host synchronisation, nothing compiled for a token count; can be captured in a CUDA graph.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from torch import Tensor

from megablocks.ops.activation import GATED
from megablocks.ops.grouped import grouped_mm_hopper as grouped
from megablocks.ops.grouped.grouped_mm_hopper import Tile, ragged_rows
from megablocks.ops.hopper import descriptor, multiprocessors


@dataclass(frozen=True)
class _Plan(grouped.Plan):
    """A grouped product's plan, with what the epilogue is to compute."""

    gated: bool = False
    act: str = "silu"
    exact: bool = False
    has_bias: bool = False

    @property
    def columns(self) -> int:
        """Columns of a result that a tile covers: a gated tile holds as many of W1 as of V1."""
        return self.BN // 2 if self.gated else self.BN

    @property
    def n_tiles(self) -> int:
        return -(-self.N // self.columns)

    @property
    def late(self) -> bool:
        """Whether a tile waits, rounded, for the next one's products: its two parts go with two of three steps."""
        return self.gated and not self.pingpong and not self.has_bias and self.steps > 2


# Both consumers on one tile: 487 µs with SwiGLU at 24576, 1536; 256/128/8 on an H200, where turns take 535.
_SHARED = Tile(64, 256, 4, group_m=8, out_parts=4, out_buffers=2)
# Each a tile of its own, of half the rows: less is computed for nothing where experts have few. 202 µs with gelu at
# 8192, 1024; 4096/64/1, against 231 on one tile.
_WIDE = Tile(64, 256, 4, pingpong=True, group_m=8, out_parts=4, out_buffers=2)


@functools.lru_cache(1024)
def _plan(
    tile: Tile | None, experts: int, inner: int, K: int, gated: bool, name: str, exact: bool, has_bias: bool
) -> _Plan:
    """Kept, since making and comparing one takes longer than finding it; of numbers alone, so never out of date."""
    return _Plan(
        **vars(tile or (_SHARED if gated else _WIDE)), lanes=grouped.lanes_of(experts), N=inner, K=K, gather=True,
        b_k_major=True, gated=gated, act=GATED.get(name, name), exact=exact, has_bias=has_bias,
    )  # fmt: skip


def supports(x: Tensor, w: Tensor, offsets: Tensor, rows: int) -> bool:
    """Whether the kernel takes these: as grouped_mm_hopper's, with w (E, I, H) contiguous."""
    return grouped.supports_m(x, w.transpose(1, 2), offsets, rows) and w.is_contiguous()


def up(
    x: Tensor, w1: Tensor, v1: Tensor | None, b1: Tensor | None, c1: Tensor | None, gather: Tensor, offsets: Tensor,
    name: str, approximate: str, *, tile: Tile | None = None,
) -> tuple[Tensor, Tensor | None, Tensor]:  # fmt: skip
    """z, u (None unless gated) and a, (R, I) each; see up.py. Rows from offsets[E] on are left as allocated."""
    from megablocks.ops.fused.up_hopper_kernel import up_kernel

    experts, inner, hidden = w1.shape
    rows = gather.shape[0]
    z, a = x.new_empty(rows, inner), x.new_empty(rows, inner)
    u = None if v1 is None else x.new_empty(rows, inner)
    if rows == 0:
        return z, u, a
    assert tile is None or tile.out_buffers <= 2, "parts alternate between two buffers"
    c = _plan(tile, experts, inner, hidden, v1 is not None, name, approximate == "none", b1 is not None)
    box = [c.rows, c.out_cols]
    weight_box = [c.columns, c.BK]
    up_kernel[(multiprocessors(x.device.index),)](
        descriptor(w1.view(-1, hidden), weight_box),
        None if v1 is None else descriptor(v1.view(-1, hidden), weight_box),
        descriptor(z, box),
        ragged_rows(z, box),
        None if u is None else descriptor(u, box),
        None if u is None else ragged_rows(u, box),
        descriptor(a, box),
        ragged_rows(a, box),
        b1,
        c1,
        x,
        x.stride(0) // 8,
        gather,
        offsets,
        experts,
        c=c,
        num_warps=4,
    )
    return z, u, a
