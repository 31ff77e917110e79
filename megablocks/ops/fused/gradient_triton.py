"""Triton kernel of `mlp_gradient_ref`: a program computes ROWS whole rows, and so their whole dot products.

Every byte moves once. A row that does not fit a block is processed block by block.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megablocks.ops.activation_table import Activation
from megablocks.ops.activation_triton import unary
from megablocks.ops.launch import cdiv, next_power_of_2, quick
from megablocks.ops.routing.dispatch import Dispatch


@quick
@triton.jit
def _mlp_gradient_kernel(
    d_act_ptr, pre_ptr, gate_ptr, weight_ptr, pair_ptr, offsets_ptr, d_pre_ptr, d_gate_ptr, scaled_ptr, d_weight_ptr,
    experts, width, NAME: tl.constexpr, EXACT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < tl.load(offsets_ptr + experts)
    pair = tl.load(pair_ptr + row, mask=live, other=0)
    scale = tl.load(weight_ptr + pair, mask=live, other=0).to(tl.float32)[:, None]
    dot = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(0, width, BLOCK):
        i = start + tl.arange(0, BLOCK)
        mask = live[:, None] & (i < width)[None, :]
        at = row[:, None] * width + i[None, :]
        d_act = tl.load(d_act_ptr + at, mask=mask, other=0).to(tl.float32)
        act, slope = unary(tl.load(pre_ptr + at, mask=mask, other=0).to(tl.float32), NAME, EXACT)
        d_scaled = d_act * scale
        if gate_ptr is not None:
            tl.store(d_gate_ptr + at, (d_scaled * act).to(d_gate_ptr.dtype.element_ty), mask=mask)
            gate = tl.load(gate_ptr + at, mask=mask, other=0).to(tl.float32)
            act *= gate
            slope *= gate
        dot += d_act * act
        tl.store(d_pre_ptr + at, (d_scaled * slope).to(d_pre_ptr.dtype.element_ty), mask=mask)
        tl.store(scaled_ptr + at, (act * scale).to(scaled_ptr.dtype.element_ty), mask=mask)
    tl.store(d_weight_ptr + pair, tl.sum(dot, 1), mask=live)


def mlp_gradient_launch(
    d_act: Tensor, pre: Tensor, gate: Tensor | None, weight: Tensor, dispatch: Dispatch, activation: Activation
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """d_pre, d_gate (None without a gate), s · act (R, I) and d_weight (R,); one launch and one fill."""
    d_act, pre, weight = d_act.contiguous(), pre.contiguous(), weight.contiguous()
    gate = None if gate is None else gate.contiguous()
    rows, inner = pre.shape
    d_pre, scaled = torch.empty_like(pre), torch.empty_like(pre)
    d_gate = None if gate is None else torch.empty_like(pre)
    d_weight = torch.zeros_like(weight)  # unused pairs keep the zero
    if pre.numel():
        block = min(next_power_of_2(inner), 1024)
        per_program = max(1, 1024 // block)
        _mlp_gradient_kernel[(cdiv(rows, per_program),)](
            d_act, pre, gate, weight, dispatch.pair, dispatch.expert_offsets, d_pre, d_gate, scaled, d_weight,
            dispatch.num_experts, inner,
            NAME=activation.unary, EXACT=activation.exact, ROWS=per_program, BLOCK=block, num_warps=4,
        )  # fmt: skip
    return d_pre, d_gate, scaled, d_weight
