"""The experts' MLP, once for each way of laying out rows; all compute the same function.

    grouped    rows sorted by expert, ragged counts: one grouped GEMM a projection, which may gather the rows itself
    fused      gather, MLP and weighted sum in one op that keeps x and the pre-activations (SonicMoE, arXiv 2512.14080)
    sparse     rows padded to whole blocks an expert: block-sparse products (MegaBlocks, arXiv 2211.15841)
    reference  grouped's rows, a plain loop over experts in float32: the oracle, and what autograd alone makes of it
    batched    (E, C, H), the same number of rows an expert: one torch.bmm a projection

Legend: T tokens, R rows, E experts, C rows an expert, I expert width, H hidden.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megablocks.config import MoEConfig
from megablocks.ops.activation import activate, activation_ref
from megablocks.ops.dtypes import accumulation_dtype
from megablocks.ops.fused.down import activate_and_project
from megablocks.ops.fused.mlp import fused_mlp
from megablocks.ops.grouped.bias import add_expert_bias
from megablocks.ops.grouped.gathered_mm import gathered_mm, gathered_mm_pair
from megablocks.ops.grouped.grouped_mm import grouped_mm
from megablocks.ops.permute.padded import pad_dispatch, padded_gather, padded_scatter
from megablocks.ops.quant.saved import OFF
from megablocks.ops.routing.dispatch import Dispatch
from megablocks.ops.sparse.mlp import sparse_mlp
from megablocks.ops.sparse.topology import topology


class ExpertWeights(NamedTuple):
    """w1, v1, w2 (E, I, H); b1, c1 (E, I); b2 (E, H). v1 and c1 only when gated, biases only with mlp_bias."""

    w1: Tensor
    v1: Tensor | None
    w2: Tensor
    b1: Tensor | None
    c1: Tensor | None
    b2: Tensor | None


def grouped_mlp(
    weights: ExpertWeights, rows: Tensor, offsets: Tensor, config: MoEConfig, dispatch: Dispatch | None = None
) -> Tensor:
    """rows (R, H) sorted by expert, offsets (E+1,) int32 → (R, H); rows from offsets[E] on are unspecified.

    With `dispatch`, whose offsets these are, `rows` are the tokens (T, H) that the up-projections gather themselves;
    quantize_inputs_num_bits needs it.
    """
    w1, v1 = (None if w is None else w.transpose(1, 2) for w in (weights.w1, weights.v1))
    assert w1 is not None
    gate = None
    if dispatch is not None and v1 is not None:
        pre, gate = gathered_mm_pair(rows, w1, v1, dispatch, num_bits=config.quantize_inputs_num_bits)
    elif dispatch is not None:
        pre = gathered_mm(rows, w1, dispatch, num_bits=config.quantize_inputs_num_bits)
    else:
        pre = grouped_mm(rows, w1, offsets)
        gate = None if v1 is None else grouped_mm(rows, v1, offsets)
    if weights.b1 is not None:
        pre = add_expert_bias(pre, weights.b1, offsets)
    if gate is not None and weights.c1 is not None:
        gate = add_expert_bias(gate, weights.c1, offsets)
    pre_bits = config.quantize_rematerialize_num_bits
    if config.recompute_activation or pre_bits != OFF:
        out = activate_and_project(
            pre, gate, weights.w2, offsets, config.activation, config.gelu_approximate, num_bits=pre_bits
        )
    else:
        out = grouped_mm(activate(pre, gate, config.activation, config.gelu_approximate), weights.w2, offsets)
    return out if weights.b2 is None else add_expert_bias(out, weights.b2, offsets)


def sparse_experts(
    weights: ExpertWeights, x: Tensor, dispatch: Dispatch, weight: Tensor | None, config: MoEConfig, block_size: int
) -> Tensor:
    """Tokens x (T, H), weight (R,) or None → (T, H): gathered into padded rows, computed, weighted and summed.

    Padding is zeros on the way in and in the gradient of what comes out, so it adds nothing to any gradient.
    """
    pattern, padded_offsets = topology(
        dispatch.expert_offsets, weights.w1.shape[1], max_rows=dispatch.pair.shape[0], block_size=block_size
    )
    padded = pad_dispatch(dispatch, padded_offsets, pattern.shape[0])
    w1, v1, w2 = (None if w is None else w.flatten(0, 1) for w in (weights.w1, weights.v1, weights.w2))
    assert w1 is not None and w2 is not None
    rows = sparse_mlp(
        padded_gather(x, padded),
        w1.t(),
        w2,
        pattern,
        v1=None if v1 is None else v1.t(),
        bias=None if weights.b1 is None else weights.b1.flatten(),
        gate_bias=None if weights.c1 is None else weights.c1.flatten(),
        activation=config.activation,
        approximate=config.gelu_approximate,
        recompute=config.recompute_activation,
        input_bits=config.quantize_inputs_num_bits,
        pre_bits=config.quantize_rematerialize_num_bits,
    )
    if weights.b2 is not None:
        rows = add_expert_bias(rows, weights.b2, padded_offsets)
    return padded_scatter(rows, weight, padded, num_bits=config.quantize_scatter_num_bits)


def fused_experts(
    weights: ExpertWeights, x: Tensor, dispatch: Dispatch, weight: Tensor | None, config: MoEConfig,
    main_grads: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None), *, in_order: bool = False,
    router: tuple[Tensor, float] | None = None,
) -> Tensor:  # fmt: skip
    """x (T, H), dispatch over the experts of `weights`, weight (R,) or None for ones → (T, H), 0 without an expert.

    main_grads: of w1, v1 and w2, as `fused_mlp` takes them.
    router: its router_weight and router_scaling.
    in_order: the dispatch is one of `sorted_dispatch`; rows that no expert owns are then unspecified.
    """
    w1, v1, w2, b1, c1, b2 = weights
    router_weight, router_scaling = router or (None, 1.0)
    return fused_mlp(
        x, weight, dispatch, w1, w2, v1=v1, b1=b1, c1=c1, b2=b2, activation=config.activation,
        approximate=config.gelu_approximate, recompute=config.recompute_activation, in_order=in_order,
        input_bits=config.quantize_inputs_num_bits, pre_bits=config.quantize_rematerialize_num_bits,
        main_grads=main_grads, router_weight=router_weight, router_scaling=router_scaling,
    )  # fmt: skip


def sorted_dispatch(offsets: Tensor, num_rows: int) -> Dispatch:
    """The Dispatch of rows that stand sorted by expert already, each its own token: offsets (E+1,) int32."""
    row = torch.arange(num_rows, dtype=torch.int32, device=offsets.device)
    first_slots = torch.arange(num_rows + 1, dtype=torch.int32, device=offsets.device)
    return Dispatch(offsets, torch.minimum(first_slots, offsets[-1]), row, row, row)


def reference_mlp(weights: ExpertWeights, rows: Tensor, offsets: Tensor, config: MoEConfig) -> Tensor:
    """As `grouped_mlp`, in float32 (float64 for float64) throughout. Reads the offsets on the host."""
    acc = accumulation_dtype(rows.dtype)

    def down(pre: Tensor, gate: Tensor | None, w2: Tensor) -> Tensor:
        return activation_ref(pre, gate, config.activation, config.gelu_approximate) @ w2

    outs = []
    bounds = offsets.tolist()
    for expert, (start, end) in enumerate(pairwise(bounds)):
        # An expert without rows is multiplied too: its gradients must be zeros, not None.
        w1, v1, w2, b1, c1, b2 = (None if w is None else w[expert].to(acc) for w in weights)
        assert w1 is not None and w2 is not None
        x = rows[start:end].to(acc)
        pre = x @ w1.t() if b1 is None else x @ w1.t() + b1
        gate = None if v1 is None else x @ v1.t() if c1 is None else x @ v1.t() + c1
        if config.recompute_activation:
            out = checkpoint(down, pre, gate, w2, use_reentrant=False)
        else:
            out = down(pre, gate, w2)
        outs.append((out if b2 is None else out + b2).to(rows.dtype))
    outs.append(rows.new_zeros(rows.shape[0] - bounds[-1], rows.shape[1]))
    return torch.cat(outs)


class _ActivateAndBmm(torch.autograd.Function):
    """bmm(act(pre, gate), w2) that keeps only pre, gate and w2 for backward."""

    @staticmethod
    def forward(ctx: Any, pre: Tensor, gate: Tensor | None, w2: Tensor, activation: str, approximate: str) -> Tensor:
        ctx.save_for_backward(pre, gate, w2)
        ctx.names = activation, approximate
        return torch.bmm(activate(pre, gate, activation, approximate), w2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        pre, gate, w2 = ctx.saved_tensors
        with torch.enable_grad():
            inputs = [t.detach().requires_grad_() for t in (pre, gate) if t is not None]
            hidden = activate(inputs[0], None if gate is None else inputs[1], *ctx.names)
        needs_pre, needs_gate, needs_w2 = ctx.needs_input_grad[:3]
        d_pre = d_gate = None
        if needs_pre or needs_gate:
            d_inputs = torch.autograd.grad(hidden, inputs, torch.bmm(grads[0], w2.transpose(1, 2)))
            d_pre, d_gate = d_inputs[0], None if gate is None else d_inputs[1]
        d_w2 = torch.bmm(hidden.detach().transpose(1, 2), grads[0]) if needs_w2 else None
        return d_pre, d_gate, d_w2, None, None


class _BatchedLinear(torch.autograd.Function):
    """bmm(x, wᵀ) for x (E, C, H) and w (E, I, H), with w's gradient in w's own layout.

    torch.bmm of the view wᵀ leaves the gradient as (E, H, I), and the copy into the parameter's layout, whose reads are
    strided, took 1.8 ms of a step's 3.1 at E, I, H = 64, 4096, 1024 on an H200.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return torch.bmm(x, w.transpose(1, 2))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (x, w), dy = ctx.saved_tensors, grads[0]
        dx = torch.bmm(dy, w) if ctx.needs_input_grad[0] else None
        return dx, torch.bmm(dy.transpose(1, 2), x) if ctx.needs_input_grad[1] else None


def batched_mlp(weights: ExpertWeights, bins: Tensor, config: MoEConfig) -> Tensor:
    """bins (E, C, H) → (E, C, H); every place is computed, filled or not."""

    def project(w: Tensor, b: Tensor | None) -> Tensor:
        out = _BatchedLinear.apply(bins, w)
        return out if b is None else out + b.unsqueeze(1)

    pre = project(weights.w1, weights.b1)
    gate = None if weights.v1 is None else project(weights.v1, weights.c1)
    if config.recompute_activation:
        out = _ActivateAndBmm.apply(pre, gate, weights.w2, config.activation, config.gelu_approximate)
    else:
        out = torch.bmm(activate(pre, gate, config.activation, config.gelu_approximate), weights.w2)
    return out if weights.b2 is None else out + weights.b2.unsqueeze(1)
