"""Gradient through the activation on Hopper (sm_90): plan, descriptors and launch of the Gluon kernel.

No host synchronisation, nothing compiled for a token count; can be captured in a CUDA graph.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from megablocks.ops.activation import GATED
from megablocks.ops.grouped import grouped_mm_hopper as grouped
from megablocks.ops.grouped.grouped_mm_hopper import Tile, ragged_rows
from megablocks.ops.hopper import aligned, descriptor, multiprocessors


@dataclass(frozen=True)
class _Plan(grouped.Plan):
    """A grouped product's plan, with what the epilogue is to compute."""

    gated: bool = False
    act: str = "silu"
    exact: bool = False

    @property
    def ring(self) -> int:
        """Column parts of z and u in shared memory at a time; a multiple of the consumers that take parts in turn."""
        return 3 if self.pingpong else 4

    @property
    def kept_bytes(self) -> int:
        return (1 + self.gated) * self.rows * self.out_cols * 2

    @property
    def producer_warps(self) -> int:
        return 2  # and one that loads z and u: a fourth group of warps would leave too few registers for a wgmma

    @property
    def producer_regs(self) -> int:
        return 88 if self.BM > 64 else 56


# Each consumer a tile of its own, so that one reads, computes and stores while the other multiplies.
_WIDE = Tile(64, 256, 4, pingpong=True, out_parts=4, group_m=8)
# Both on one tile reads less per product, which tells more the longer the products are.
_SHARED = Tile(64, 256, 3, out_parts=4, group_m=8)


def _choose(hidden: int) -> Tile:
    """benchmarks/NOTES.md has the measurements behind it and `pays`; between 1536 and 4096 there are none."""
    return _WIDE if hidden <= 2048 else _SHARED


def pays(inner: int, hidden: int) -> bool:
    """Whether the kernel takes less time than a product and a pass over its rows do.

    A long row of dY that serves one column tile only takes up the bandwidth which the epilogue needs.
    """
    return hidden <= 2048 or inner > 256


@functools.lru_cache(1024)
def _plan(tile: Tile | None, experts: int, inner: int, hidden: int, gated: bool, name: str, exact: bool) -> _Plan:
    """Kept, since making and comparing one takes longer than finding it; of numbers alone, so never out of date."""
    return _Plan(
        **vars(tile or _choose(hidden)), lanes=grouped.lanes_of(experts), N=inner, K=hidden, gather=True,
        b_k_major=True, gated=gated, act=GATED.get(name, name), exact=exact,
    )  # fmt: skip


def supports(dy: Tensor, w2: Tensor, z: Tensor, u: Tensor | None, weight: Tensor, offsets: Tensor) -> bool:
    """Whether the kernel takes these: as grouped_mm_hopper's, with w2 (E, I, H) contiguous and weight in float32."""
    return (
        grouped.supports_m(dy, w2.transpose(1, 2), offsets, z.shape[0])
        and w2.is_contiguous()
        and weight.dtype == torch.float32
        and z.numel() > 0
        and all(aligned(t) and t.dtype == dy.dtype for t in (z, u) if t is not None)
    )


def down_gradient(
    dy: Tensor, w2: Tensor, z: Tensor, u: Tensor | None, weight: Tensor, pair: Tensor, gather: Tensor, offsets: Tensor,
    name: str, approximate: str, *, tile: Tile | None = None,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:  # fmt: skip
    """d_z, d_u (None without u), scaled (R, I) and d_weight (R,); see gradient.py. Rows from offsets[E] on are left."""
    from megablocks.ops.fused.gradient_hopper_kernel import down_gradient_kernel

    experts, inner, hidden = w2.shape
    weight = weight.contiguous()
    d_z, scaled = torch.empty_like(z), torch.empty_like(z)
    d_u = None if u is None else torch.empty_like(z)
    c = _plan(tile, experts, inner, hidden, u is not None, name, approximate == "none")
    dots = weight.new_zeros(weight.shape[0], c.n_tiles)  # unused pairs keep the zero
    box = [c.rows, c.out_cols]
    down_gradient_kernel[(multiprocessors(dy.device.index),)](
        descriptor(w2, [1, c.BN, c.BK]),
        descriptor(z, box),
        None if u is None else descriptor(u, box),
        descriptor(d_z, box),
        ragged_rows(d_z, box),
        None if d_u is None else descriptor(d_u, box),
        None if d_u is None else ragged_rows(d_u, box),
        descriptor(scaled, box),
        ragged_rows(scaled, box),
        dy,
        dy.stride(0) // 8,
        gather,
        weight,
        pair,
        dots,
        offsets,
        experts,
        c=c,
        num_warps=4,
    )
    return d_z, d_u, scaled, dots.view(-1) if c.n_tiles == 1 else dots.sum(1)
