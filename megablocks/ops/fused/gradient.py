"""Gradient of the down-projection's input, and what becomes of it: three tensors and the weights' gradient.

    dA[p] = dY[token(p)] · w2[e]ᵀ
    a = act(z) ⊙ u, or act(z)          s = weight[pair[p]], what row p's output is multiplied by
    d_pre[p] = s · dA[p] ⊙ ∂a/∂z       d_gate[p] = s · dA[p] ⊙ act(z)
    scaled[p] = s · a                  d_weight[pair[p]] = ⟨dA[p], a⟩, 0 for an unused pair

dA is without s, so neither the experts' outputs nor a are kept: d_weight needs a alone, and dW2 = scaledᵀ · dY. Legend:
T tokens, H hidden, E experts, R rows and pairs, V <= R valid rows, I expert width. Rows p >= V of the results are
unspecified, and never read here.

One kernel where Hopper's runs and pays (gradient_hopper.py), which never writes dA; elsewhere a product and a pass over
its rows (gradient_triton.py), which moves 6·R·I values where gated, else 4·R·I.
Source: SonicMoE (arXiv 2512.14080), section 3.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megablocks.ops.activation import activation_backward_ref, activation_ref
from megablocks.ops.backend import runs_triton
from megablocks.ops.dtypes import accumulation_dtype
from megablocks.ops.grouped.gathered_mm import gathered_mm_op
from megablocks.ops.grouped.grouped_mm import hopper_kernels
from megablocks.ops.library import custom_op


def mlp_gradient_ref(
    d_act: Tensor, pre: Tensor, gate: Tensor | None, weight: Tensor, pair: Tensor, offsets: Tensor, name: str,
    approximate: str,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:  # fmt: skip
    """d_act, pre, gate (R, I), weight (R,), pair (R,), offsets (E+1,) → d_pre, d_gate, scaled (R, I), d_weight (R,)."""
    acc, dtype = accumulation_dtype(d_act.dtype), d_act.dtype
    d_act, pre, gate = d_act.to(acc), pre.to(acc), None if gate is None else gate.to(acc)
    scale = weight.to(acc).index_select(0, pair).unsqueeze(1)
    act = activation_ref(pre, gate, name, approximate)
    d_pre, d_gate = activation_backward_ref(d_act * scale, pre, gate, name, approximate)
    unused = torch.arange(pair.shape[0], device=pair.device) >= offsets[-1]
    target = torch.where(unused, pair.shape[0], pair).long()  # unused rows write to a spare place
    dots = (d_act * act).sum(1).to(weight.dtype)
    d_weight = weight.new_zeros(pair.shape[0] + 1).scatter_(0, target, dots)[:-1]
    d_gate = None if d_gate is None else d_gate.to(dtype)
    return d_pre.to(dtype), d_gate, (act * scale).to(dtype), d_weight.contiguous()


def mlp_gradient(
    d_act: Tensor, pre: Tensor, gate: Tensor | None, weight: Tensor, pair: Tensor, offsets: Tensor, name: str,
    approximate: str,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:  # fmt: skip
    """As mlp_gradient_ref, by one kernel where Triton runs."""
    if runs_triton(d_act):
        from megablocks.ops.fused.gradient_triton import mlp_gradient_launch

        return mlp_gradient_launch(d_act, pre, gate, weight, pair, offsets, name, approximate)
    return mlp_gradient_ref(d_act, pre, gate, weight, pair, offsets, name, approximate)


@custom_op("megablocks::down_gradient", mutates_args=())
def down_gradient_op(
    dy: Tensor, w2: Tensor, pre: Tensor, gate: Tensor | None, weight: Tensor, pair: Tensor, gather: Tensor,
    scatter: Tensor, token_offsets: Tensor, offsets: Tensor, name: str, approximate: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """dy (T, H), w2 (E, I, H), pre, gate (R, I), weight (R,) → d_pre, d_gate (empty without gate), scaled, d_weight."""
    if hopper_kernels(dy) is not None:
        from megablocks.ops.fused import gradient_hopper

        if gradient_hopper.pays(*w2.shape[1:]) and gradient_hopper.supports(dy, w2, pre, gate, weight, offsets):
            d_pre, d_gate, scaled, d_weight = gradient_hopper.down_gradient(
                dy, w2, pre, gate, weight, pair, gather, offsets, name, approximate
            )
            return d_pre, pre.new_empty(0) if d_gate is None else d_gate, scaled, d_weight
    d_act, _ = gathered_mm_op(dy, w2.transpose(1, 2), None, pair, gather, scatter, token_offsets, offsets)
    d_pre, d_gate, scaled, d_weight = mlp_gradient(d_act, pre, gate, weight, pair, offsets, name, approximate)
    return d_pre, pre.new_empty(0) if d_gate is None else d_gate, scaled, d_weight


@down_gradient_op.register_fake
def _(
    dy: Tensor, w2: Tensor, pre: Tensor, gate: Tensor | None, weight: Tensor, pair: Tensor, gather: Tensor,
    scatter: Tensor, token_offsets: Tensor, offsets: Tensor, name: str, approximate: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    d_gate = pre.new_empty(0) if gate is None else torch.empty_like(pre)
    return torch.empty_like(pre), d_gate, torch.empty_like(pre), torch.empty_like(weight)
