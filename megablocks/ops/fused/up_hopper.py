"""Up-projection with its activation on Hopper (Gluon, sm_90): plan, kernel and launch; mlp.py has the formula.

Structure and producer come from grouped_mm_hopper.py. A gated tile holds BN/2 columns of W1 and the same columns of V1,
so one wgmma computes both, and their elementwise product needs no other thread's registers.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from megablocks.ops import hopper_gluon as hg
from megablocks.ops.activation_table import Activation
from megablocks.ops.grouped import grouped_mm_hopper as grouped
from megablocks.ops.hopper import Tile, descriptor, multiprocessors, with_tail
from megablocks.ops.launch import quick
from megablocks.ops.routing.dispatch import Dispatch


@dataclass(frozen=True)
class _Plan(grouped.Plan):
    """A grouped product's plan, with what the epilogue computes."""

    flat: ClassVar[bool] = True
    gated: bool = False
    unary: str = "silu"
    exact: bool = False

    @property
    def columns(self) -> int:
        """Columns of a result that a tile covers: a gated tile holds equally many of W1 and of V1."""
        return self.BN // 2 if self.gated else self.BN

    @property
    def n_tiles(self) -> int:
        return -(-self.N // self.columns)


# Both consumers on one tile: 487 µs with SwiGLU at 24576, 1536; 256/128/8 on an H200, where turns take 535.
_SHARED = Tile(64, 256, 4, group_m=8, out_parts=4, out_buffers=2)
# Each consumer has a tile of half the rows, so that less is wasted if experts have few rows.
_WIDE = Tile(64, 256, 4, pingpong=True, group_m=8, out_parts=4, out_buffers=2)


@functools.lru_cache(1024)  # a look-up takes less time than a new plan
def _plan(experts: int, inner: int, K: int, gated: bool, activation: Activation) -> _Plan:
    return _Plan(
        **vars(_SHARED if gated else _WIDE), lanes=grouped.lanes_of(experts), N=inner, K=K, gather=True,
        b_k_major=True, gated=gated, unary=activation.unary, exact=activation.exact,
    )  # fmt: skip


def supports(x: Tensor, w: Tensor, offsets: Tensor, rows: int) -> bool:
    """Whether the kernel supports these: as `grouped.supports_m`, with w (E, I, H) contiguous."""
    return grouped.supports_m(x, w.transpose(1, 2), offsets, rows) and w.is_contiguous()


@gluon.jit
def _finish(pre, gate, slot: gl.constexpr, bufs, outs, e, row, end, col, WG: gl.constexpr, c: gl.constexpr):
    """Activate and write one column part (rows, out_cols) from col on: pre, gate where gated, and act, from slot on."""
    pre_desc, pre_tail, gate_desc, gate_tail, act_desc, act_tail, b1_ptr, c1_ptr = outs
    NAME: gl.constexpr = c.unary
    EXACT: gl.constexpr = c.exact
    j = gl.arange(0, c.out_cols, gl.SliceLayout(0, pre.type.layout))
    if b1_ptr is not None:
        pre += gl.load(b1_ptr + e * c.N + col + j, mask=col + j < c.N, other=0).to(gl.float32)[None, :]
    pre = pre.to(bufs.dtype)
    hg.store_rows(pre, slot, bufs, pre_desc, pre_tail, row, end, col, WG, c)
    act, _ = hg.unary(pre.to(gl.float32), NAME, EXACT)  # of the rounded value, as backward sees it
    if c.gated:
        if b1_ptr is not None:
            gate += gl.load(c1_ptr + e * c.N + col + j, mask=col + j < c.N, other=0).to(gl.float32)[None, :]
        gate = gate.to(bufs.dtype)
        hg.store_rows(gate, slot + 1, bufs, gate_desc, gate_tail, row, end, col, WG, c)
        act *= gate.to(gl.float32)
    hg.store_rows(act.to(bufs.dtype), slot + (2 if c.gated else 1), bufs, act_desc, act_tail, row, end, col, WG, c)


@gluon.jit
def _consumer(common, WG: gl.constexpr, c: gl.constexpr):
    x_bufs, w_bufs, o_bufs, full, empty, turn, outs, offsets_ptr, experts = common
    ends, tiles, start, step, it = hg.consumer_walk(offsets_ptr, experts, WG, c)
    phase = gl.to_tensor(0)
    e, m0, end, n0 = hg.find_tile(gl.minimum(start, tiles - 1), ends, offsets_ptr, c)
    for tile in range(start, tiles, step):
        expert, row, last, col = e, m0, end, n0 // 2 if c.gated else n0
        e, m0, end, n0 = hg.find_tile(gl.minimum(tile + step, tiles - 1), ends, offsets_ptr, c)
        acc, it = hg.multiply(it, c.steps, x_bufs, w_bufs, full, empty, turn, phase, WG, c)
        if c.pingpong:
            phase ^= 1
            it += c.steps
        else:
            row += WG * c.rows
        p0, p1, p2, p3 = hg.parts_of(acc, c)
        if c.gated:  # the lower half is pre, the upper one gate
            _finish(p0, p2, 0, o_bufs, outs, expert, row, last, col, WG, c)
            _finish(p1, p3, 3, o_bufs, outs, expert, row, last, col + c.out_cols, WG, c)
        else:
            # A loop, though it moves the parts through registers: written out for both consumers, the code does not
            # fit the instruction cache.
            for i in range(c.out_parts):
                _finish(p0, p0, 0, o_bufs, outs, expert, row, last, col + i * c.out_cols, WG, c)
                p0, p1, p2 = p1, p2, p3
    tma.store_wait(0)


@quick
@gluon.jit(do_not_specialize=["experts"])
def up_kernel(
    w_desc, v_desc, pre_desc, pre_tail, gate_desc, gate_tail, act_desc, act_tail, b1_ptr, c1_ptr, x_ptr, x_row,
    gather_ptr, offsets_ptr, experts, c: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """w_desc, v_desc (E·I, K); pre, gate and act (R, I), each with its ragged twin; v and gate None unless gated."""
    x_bufs, w_bufs = hg.operand_buffers(w_desc.dtype, c)
    o_bufs = gl.allocate_shared_memory(w_desc.dtype, [2 * c.out_buffers, c.rows, c.out_cols], pre_desc.layout)
    full, empty, turn = hg.barriers(c)
    outs = (pre_desc, pre_tail, gate_desc, gate_tail, act_desc, act_tail, b1_ptr, c1_ptr)
    common = (x_bufs, w_bufs, o_bufs, full, empty, turn, outs, offsets_ptr, experts)
    given = (
        x_bufs, w_bufs, full, empty, None, w_desc, None, v_desc, x_ptr, x_row, gather_ptr, offsets_ptr, experts,
    )  # fmt: skip
    gl.warp_specialize(
        [(_consumer, (common, 0, c)), (_consumer, (common, 1, c)), (grouped.m_producer, (given, c))],
        [4, c.producer_warps],
        [c.consumer_regs, c.producer_regs],
    )


def up(
    x: Tensor, w1: Tensor, v1: Tensor | None, b1: Tensor | None, c1: Tensor | None, dispatch: Dispatch,
    activation: Activation,
) -> tuple[Tensor, Tensor | None, Tensor]:  # fmt: skip
    """pre, gate (None unless gated) and act, (R, I) each. Rows from offsets[E] on are not written."""
    experts, inner, hidden = w1.shape
    rows = dispatch.num_rows
    pre, act = x.new_empty(rows, inner), x.new_empty(rows, inner)
    gate = None if v1 is None else x.new_empty(rows, inner)
    c = _plan(experts, inner, hidden, v1 is not None, activation)
    box = [c.rows, c.out_cols]
    weight_box = [c.columns, c.BK]
    up_kernel[(multiprocessors(x.device.index),)](
        descriptor(w1.view(-1, hidden), weight_box),
        None if v1 is None else descriptor(v1.view(-1, hidden), weight_box),
        *with_tail(pre, box), *with_tail(gate, box), *with_tail(act, box), b1, c1,
        x, x.stride(0) // 8, dispatch.gather, dispatch.expert_offsets, experts, c=c, num_warps=4,
    )  # fmt: skip
    return pre, gate, act
