"""What the gradient of the down-projection's input becomes: three tensors and the weights' gradient, in one pass.

    a = act(z) ⊙ u, or act(z)          s = weight[pair[p]], what row p's output is multiplied by
    d_pre[p] = s · dA[p] ⊙ ∂a/∂z       d_gate[p] = s · dA[p] ⊙ act(z)
    scaled[p] = s · a                  d_weight[pair[p]] = ⟨dA[p], a⟩, 0 for an unused pair

Here dA[p] = dY[token(p)] · w2[e]ᵀ without s, so neither the experts' outputs nor a are kept: d_weight needs a alone,
and dW2 = scaledᵀ · dY. Legend: R rows and pairs, V <= R valid rows, I expert width. Rows p >= V of the results are
unspecified, and never read here. Bytes: 6·R·I values where gated, else 4·R·I.
Source: SonicMoE (arXiv 2512.14080), section 3.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megablocks.ops.activation import activation_backward_ref, activation_ref
from megablocks.ops.backend import runs_triton
from megablocks.ops.dtypes import accumulation_dtype
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


@custom_op("megablocks::mlp_gradient", mutates_args=())
def mlp_gradient_op(
    d_act: Tensor, pre: Tensor, gate: Tensor | None, weight: Tensor, pair: Tensor, offsets: Tensor, name: str,
    approximate: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """As mlp_gradient_ref, d_gate empty without a gate."""
    if runs_triton(d_act):
        from megablocks.ops.fused.gradient_triton import mlp_gradient_launch

        d_pre, d_gate, scaled, d_weight = mlp_gradient_launch(
            d_act, pre, gate, weight, pair, offsets, name, approximate
        )
    else:
        d_pre, d_gate, scaled, d_weight = mlp_gradient_ref(d_act, pre, gate, weight, pair, offsets, name, approximate)
    return d_pre, pre.new_empty(0) if d_gate is None else d_gate, scaled, d_weight


@mlp_gradient_op.register_fake
def _(
    d_act: Tensor, pre: Tensor, gate: Tensor | None, weight: Tensor, pair: Tensor, offsets: Tensor, name: str,
    approximate: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    d_gate = pre.new_empty(0) if gate is None else torch.empty_like(pre)
    return torch.empty_like(pre), d_gate, torch.empty_like(pre), torch.empty_like(weight)
