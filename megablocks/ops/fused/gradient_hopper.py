"""Gradient through the activation on Hopper (Gluon, sm_90): the product with w2 and all that mlp.py computes from it.

    d_act[r] = dY[token(r)] · w2[e]ᵀ      → d_pre, d_gate, s · act and d_weight, in one kernel that never writes d_act

The structure and the producer come from grouped_mm_hopper.py. The two consumers own alternate tiles: one reads pre
and gate, computes and stores while the other multiplies. A fourth role, of one warp, loads pre and gate by TMA into a
ring of their own, ahead of the consumer that needs them.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from megablocks.ops import hopper_gluon as hg
from megablocks.ops.activation_table import Activation
from megablocks.ops.grouped import grouped_mm_hopper as grouped
from megablocks.ops.hopper import Tile, aligned, descriptor, multiprocessors, with_tail
from megablocks.ops.hopper_gluon import ROW_BOUND
from megablocks.ops.launch import quick
from megablocks.ops.routing.dispatch import Dispatch


@dataclass(frozen=True)
class _Plan(grouped.Plan):
    """A grouped product's plan, with what the epilogue computes."""

    gated: bool = False
    unary: str = "silu"
    exact: bool = False
    ring: ClassVar[int] = 3  # column parts of pre and gate in shared memory
    producer_regs: ClassVar[int] = 56

    @property
    def producer_warps(self) -> int:
        return 2  # and one warp that loads pre and gate: four more warps would leave too few registers for a wgmma


# Each consumer has a tile of its own, so that one reads, computes and stores while the other multiplies.
_TILE = Tile(64, 256, 4, pingpong=True, out_parts=4, group_m=8)


def pays(hidden: int) -> bool:
    """Whether the kernel is faster than a product and a pass over its rows (benchmarks/notes/fused.md).

    At 4096 both take the same time. Between 1536 and 4096 there are no measurements.
    """
    return hidden <= 2048


@functools.lru_cache(1024)  # a look-up takes less time than a new plan
def _plan(experts: int, inner: int, hidden: int, gated: bool, activation: Activation) -> _Plan:
    return _Plan(
        **vars(_TILE), lanes=grouped.lanes_of(experts), N=inner, K=hidden, gather=True,
        b_k_major=True, gated=gated, unary=activation.unary, exact=activation.exact,
    )  # fmt: skip


def supports(dy: Tensor, w2: Tensor, pre: Tensor, gate: Tensor | None, weight: Tensor, offsets: Tensor) -> bool:
    """Whether the kernel supports these: as `grouped.supports_m`, w2 (E, I, H) contiguous and weight in float32."""
    return (
        grouped.supports_m(dy, w2.transpose(1, 2), offsets, pre.shape[0])
        and w2.is_contiguous()
        and weight.dtype == torch.float32
        and pre.numel() > 0
        and all(aligned(t) and t.dtype == dy.dtype for t in (pre, gate) if t is not None)
    )


@gluon.jit
def _finish(d_act, at, kept, scaled_buf, outs, scale, row, end, col, held, c: gl.constexpr):
    """Write the gradients of one column part of a tile; returns its share of the rows' ⟨d_act, act⟩."""
    pre_bufs, gate_bufs, loaded, free = kept
    d_pre_desc, d_pre_tail, d_gate_desc, d_gate_tail, scaled_desc, scaled_tail = outs
    NAME: gl.constexpr = c.unary
    EXACT: gl.constexpr = c.exact
    layout: gl.constexpr = d_act.type.layout
    s = at % c.ring
    pre_buf = pre_bufs.index(s)
    gate_buf = gate_bufs.index(s)
    mbarrier.wait(loaded.index(s), (at // c.ring) & 1)
    pre = pre_buf.load(layout).to(gl.float32)
    if c.gated:
        gate = gate_buf.load(layout).to(gl.float32)
    act, slope = hg.unary(pre, NAME, EXACT)
    d_scaled = d_act * scale[:, None]
    # All three are rounded before the first is stored, so that the compiler works through them value by value. A store
    # between them would keep whole parts of intermediate values in registers, and spill them.
    if c.gated:
        d_gate = (d_scaled * act).to(pre_bufs.dtype)
        act *= gate
        slope *= gate
    d_pre = (d_scaled * slope).to(pre_bufs.dtype)
    scaled = (act * scale[:, None]).to(pre_bufs.dtype)
    dots = gl.sum(d_act * act, 1)
    tma.store_wait(0)  # of the part before: its buffers may be filled again
    mbarrier.arrive(free.index((at + c.ring - 1) % c.ring), count=1, pred=held)
    pre_buf.store(d_pre)
    if c.gated:
        gate_buf.store(d_gate)
    scaled_buf.store(scaled)
    fence_async_shared()
    if row + c.rows <= end:
        hg.tma_store(d_pre_desc, [row, col], pre_buf)
        if c.gated:
            hg.tma_store(d_gate_desc, [row, col], gate_buf)
        hg.tma_store(scaled_desc, [row, col], scaled_buf)
    else:  # rows [row, end) belong to this expert, the next ones to another
        box: gl.constexpr = [1, 1, c.rows, c.out_cols]
        at_tail = [ROW_BOUND, end, ROW_BOUND - end + row, col]
        hg.tma_store(d_pre_tail, at_tail, pre_buf.reshape(box))
        if c.gated:
            hg.tma_store(d_gate_tail, at_tail, gate_buf.reshape(box))
        hg.tma_store(scaled_tail, at_tail, scaled_buf.reshape(box))
    return dots


@gluon.jit
def _consumer(common, WG: gl.constexpr, c: gl.constexpr):
    dy_bufs, w_bufs, kept, o_bufs, full, empty, turn, epilogue_turn, outs, pointers, experts = common
    weight_ptr, pair_ptr, dots_ptr, offsets_ptr = pointers
    rows: gl.constexpr = [c.rows]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, c.BN, 16])
    free = kept[3]
    ends, tiles, start, step, it = hg.consumer_walk(offsets_ptr, experts, WG, c)
    at = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    at += WG * c.out_parts
    e, m0, end, n0 = hg.find_tile(gl.minimum(start, tiles - 1), ends, offsets_ptr, c)
    for tile in range(start, tiles, step):
        row, last, col = m0, end, n0
        e, m0, end, n0 = hg.find_tile(gl.minimum(tile + step, tiles - 1), ends, offsets_ptr, c)
        r = row + gl.arange(0, c.rows, gl.SliceLayout(1, layout))
        pair = gl.load(pair_ptr + r, mask=r < last, other=0)
        scale = gl.load(weight_ptr + pair, mask=r < last, other=0)
        acc, it = hg.multiply(it, c.steps, dy_bufs, w_bufs, full, empty, turn, phase, WG, c)
        it += c.steps
        # As in multiply, on the ring of pre and gate.
        mbarrier.wait(epilogue_turn.index(WG), phase ^ (1 - WG))
        p0, p1, p2, p3 = hg.parts_of(acc, c)
        part_rows: gl.constexpr = gl.SliceLayout(1, p0.type.layout)
        part_scale = gl.convert_layout(scale, part_rows)
        dots = gl.zeros(rows, gl.float32, part_rows)
        # A loop, though it moves the parts through registers: written out for both consumers, the code does not fit the
        # instruction cache, and every part takes four times as long.
        for i in range(c.out_parts):
            dots += _finish(p0, at, kept, o_bufs.index(WG), outs, part_scale, row, last, col + i * c.out_cols, i > 0, c)
            at += 1
            p0, p1, p2 = p1, p2, p3
        tma.store_wait(0)
        mbarrier.arrive(free.index((at + c.ring - 1) % c.ring), count=1)
        mbarrier.arrive(epilogue_turn.index(1 - WG), count=1)
        phase ^= 1
        at += c.out_parts
        dots = gl.convert_layout(dots, gl.SliceLayout(1, layout))
        to = dots_ptr + pair.to(gl.int64) * c.n_tiles + col // c.BN
        gl.store(to, dots, mask=r < last)


@gluon.jit
def _loader(kept, pre_desc, gate_desc, offsets_ptr, experts, c: gl.constexpr):
    """Load pre and gate of every part in the order in which the consumers reach them."""
    pre_bufs, gate_bufs, loaded, free = kept
    PARTS: gl.constexpr = c.out_parts
    ends = hg.tile_ends(offsets_ptr, experts, c, 1)
    tiles = gl.max(ends, 0)
    at = gl.to_tensor(0)
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        e, m0, end, n0 = hg.find_tile(tile, ends, offsets_ptr, c)
        for i in gl.static_range(PARTS):
            s = at % c.ring
            bar = loaded.index(s)
            mbarrier.wait(free.index(s), ((at // c.ring) & 1) ^ 1)
            mbarrier.expect(bar, (1 + c.gated) * c.rows * c.out_cols * 2)
            where = [m0, n0 + i * c.out_cols]
            hg.tma_load(pre_desc, where, bar, pre_bufs.index(s))
            if c.gated:
                hg.tma_load(gate_desc, where, bar, gate_bufs.index(s))
            at += 1


@quick
@gluon.jit(do_not_specialize=["experts"])
def down_gradient_kernel(
    w_desc, pre_desc, gate_desc, d_pre_desc, d_pre_tail, d_gate_desc, d_gate_tail, scaled_desc, scaled_tail, dy_ptr,
    dy_row, gather_ptr, weight_ptr, pair_ptr, dots_ptr, offsets_ptr, experts, c: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """w_desc (E, I, H); pre, gate (R, I); d_pre, d_gate, scaled (R, I) and their ragged twins; dots (R, column tiles).

    gate and d_gate are None unless gated.
    """
    dtype: gl.constexpr = w_desc.dtype
    RING: gl.constexpr = c.ring
    dy_bufs, w_bufs = hg.operand_buffers(dtype, c)
    pre_bufs = gl.allocate_shared_memory(dtype, [c.ring, c.rows, c.out_cols], pre_desc.layout)
    gate_bufs = gl.allocate_shared_memory(dtype, [c.ring, c.rows, c.out_cols], pre_desc.layout) if c.gated else pre_bufs
    o_bufs = gl.allocate_shared_memory(dtype, [2, c.rows, c.out_cols], pre_desc.layout)
    loaded = gl.allocate_shared_memory(gl.int64, [c.ring, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [c.ring, 1], mbarrier.MBarrierLayout())
    epilogue_turn = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(RING):
        mbarrier.init(loaded.index(i), count=1)
        mbarrier.init(free.index(i), count=1)
    for i in gl.static_range(2):
        mbarrier.init(epilogue_turn.index(i), count=1)
    full, empty, turn = hg.barriers(c)
    kept = (pre_bufs, gate_bufs, loaded, free)
    outs = (d_pre_desc, d_pre_tail, d_gate_desc, d_gate_tail, scaled_desc, scaled_tail)
    pointers = (weight_ptr, pair_ptr, dots_ptr, offsets_ptr)
    common = (dy_bufs, w_bufs, kept, o_bufs, full, empty, turn, epilogue_turn, outs, pointers, experts)
    given = (
        dy_bufs, w_bufs, full, empty, None, w_desc, None, None, dy_ptr, dy_row, gather_ptr, offsets_ptr, experts,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_consumer, (common, 0, c)),
            (_consumer, (common, 1, c)),
            (grouped.m_producer, (given, c)),
            (_loader, (kept, pre_desc, gate_desc, offsets_ptr, experts, c)),
        ],
        [4, c.producer_warps, 1],
        [c.consumer_regs, c.producer_regs, c.producer_regs],
    )


def down_gradient(
    dy: Tensor, w2: Tensor, pre: Tensor, gate: Tensor | None, weight: Tensor, dispatch: Dispatch,
    activation: Activation,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:  # fmt: skip
    """d_pre, d_gate (None without gate), s · act (R, I) and d_weight (R,). Rows from offsets[E] on are not written."""
    experts, inner, hidden = w2.shape
    weight = weight.contiguous()
    d_pre, scaled = torch.empty_like(pre), torch.empty_like(pre)
    d_gate = None if gate is None else torch.empty_like(pre)
    c = _plan(experts, inner, hidden, gate is not None, activation)
    dots = weight.new_zeros(weight.shape[0], c.n_tiles)  # unused pairs keep the zero
    box = [c.rows, c.out_cols]
    down_gradient_kernel[(multiprocessors(dy.device.index),)](
        descriptor(w2, [1, c.BN, c.BK]), descriptor(pre, box), None if gate is None else descriptor(gate, box),
        *with_tail(d_pre, box), *with_tail(d_gate, box), *with_tail(scaled, box),
        dy, dy.stride(0) // 8, dispatch.gather, weight, dispatch.pair, dots, dispatch.expert_offsets, experts,
        c=c, num_warps=4,
    )  # fmt: skip
    return d_pre, d_gate, scaled, dots.view(-1) if c.n_tiles == 1 else dots.sum(1)
