"""Products of a few pairs of token and expert, without sorting them, such as those of a token that is being generated.

    y[p] = scale[p] · (x[p // K] · w[ids[p]] + bias[ids[p]])        0 if ids[p] is outside [0, E)

and the experts' whole MLP, `pair_mlp_op`:

    h[t, k]   = x[t] · up[e] + up_bias[e]              e = ids[t, k]; both halves of a gated MLP
    act[t, k] = f(h) or f(first half of h) ⊙ second half, of the rounded h
    y[t]      = Σ over k of weight[t, k] · (act[t, k] · down[e] + down_bias[e])        without pairs outside [0, E)

Legend: T rows of x, K pairs per row, R = T·K pairs, E experts, I inner size, N outer size. In the MLP I is the experts'
width, H the hidden size, and N = 2·I if gated, otherwise I. Without a gradient.

Each expert's weights are read once, in place; the MLP takes two launches. A row's result has the same bits for any
other rows: a token's pairs are summed in float32 in their order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megablocks.ops.activation import activation_ref
from megablocks.ops.activation_table import Activation
from megablocks.ops.library import custom_op, runs_triton

MOST_PAIRS = 512
"""Most pairs for the kernels: each program reads the ids of all pairs. References copy the weights of each pair."""


def out_dtype(x: Tensor, scale: Tensor | None) -> torch.dtype:
    """The dtype of the result."""
    return x.dtype if scale is None else torch.promote_types(x.dtype, torch.float32)


def pair_mm_ref(x: Tensor, w: Tensor, ids: Tensor, bias: Tensor | None, scale: Tensor | None) -> Tensor:
    """x (T, I), w (E, I, N), ids (R,), bias (E, N), scale (R,) → (R, N), with a copy of the weights of each pair."""
    rows = x.repeat_interleave(ids.shape[0] // max(x.shape[0], 1), dim=0)
    known = ids.long().clamp(0, w.shape[0] - 1)  # index_select accepts no narrower ids than int32
    if w.stride(1) == 1 and w.stride(2) != 1:  # copied in its storage order
        picked = w.transpose(1, 2).index_select(0, known).transpose(1, 2)
    else:
        picked = w.index_select(0, known)
    y = torch.bmm(rows.unsqueeze(1), picked).squeeze(1)
    if bias is not None:
        y = y + bias.index_select(0, known).to(y.dtype)
    if scale is not None:
        y = y * scale.to(out_dtype(x, scale)).unsqueeze(1)
    return y.masked_fill((ids != known).unsqueeze(1), 0)


pair_mm_op = custom_op(
    "megablocks::pair_mm",
    fake=lambda a: a.x.new_empty((a.ids.shape[0], a.w.shape[2]), dtype=out_dtype(a.x, a.scale)),
    kernel="megablocks.ops.grouped.pair_mm_triton:pair_mm_launch",
    takes=lambda x, w, ids, *_: runs_triton(x) and ids.shape[0] <= MOST_PAIRS,
)(pair_mm_ref)


def pair_mm(x: Tensor, w: Tensor, ids: Tensor, bias: Tensor | None = None, scale: Tensor | None = None) -> Tensor:
    """Multiply each pair's row by its expert's weights. Not differentiable.

    Args:
        x: (T, I) floating. Row t belongs to the pairs t·K to t·K + K - 1.
        w: (E, I, N) of x's dtype, in any order of strides; fastest if I or N is contiguous.
        ids: (R,) integer, R a multiple of T. Pairs with an id outside [0, E) get 0. A GPU computes up to `MOST_PAIRS`
            pairs without copies of the weights.
        bias: (E, N) floating or None.
        scale: (R,) floating or None.

    Returns:
        (R, N) of x's dtype; with a scale in at least float32.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    if x.dim() != 2 or w.dim() != 3 or x.shape[1] != w.shape[1] or x.dtype != w.dtype:
        raise ValueError(
            f"w is {tuple(w.shape)} {w.dtype}: must be (experts, {x.shape[-1]}, outer size) of x's {x.dtype}, "
            f"for x {tuple(x.shape)}"
        )
    if ids.dim() != 1 or ids.is_floating_point() or (ids.shape[0] % x.shape[0] if x.shape[0] else ids.shape[0]):
        raise ValueError(
            f"ids is {tuple(ids.shape)} {ids.dtype}: must be (R,) integer, R a multiple of the {x.shape[0]} rows of x"
        )
    if bias is not None and bias.shape != (w.shape[0], w.shape[2]):
        raise ValueError(f"bias is {tuple(bias.shape)}: must be ({w.shape[0]}, {w.shape[2]})")
    if scale is not None and scale.shape != ids.shape:
        raise ValueError(f"scale is {tuple(scale.shape)}: must be ({ids.shape[0]},), one for each pair")
    return pair_mm_op(x, w, ids, bias, scale)


def pair_mlp_ref(
    x: Tensor, ids: Tensor, weight: Tensor, up: Tensor, down: Tensor, up_bias: Tensor | None, down_bias: Tensor | None,
    activation: Activation,
) -> Tensor:  # fmt: skip
    """The MLP of each token's experts, summed by weight, in x's dtype, rounded once from float32.

    Args:
        x: (T, H) floating. ids: (T, K) integer. weight: (T, K) floating.
        up: (E, H, N) of x's dtype, in any order of strides; fastest if H or N is contiguous. In a gated MLP the first
            half of the columns computes the argument of the activation, the second half the gate.
        down: (E, I, H) of x's dtype, likewise.
        up_bias, down_bias: (E, N) and (E, H) floating, or None.
    """
    pairs = ids.flatten()
    h = pair_mm_ref(x, up, pairs, up_bias, None)
    pre, gate = h.chunk(2, dim=1) if activation.gated else (h, None)
    act = activation_ref(pre, gate, activation)
    rows = pair_mm_ref(act, down, pairs, down_bias, weight.flatten())
    return rows.view(*ids.shape, rows.shape[1]).sum(1).to(x.dtype)


pair_mlp_op = custom_op(
    "megablocks::pair_mlp",
    fake=lambda a: a.x.new_empty(a.x.shape),
    kernel="megablocks.ops.grouped.pair_mm_triton:pair_mlp_launch",
    takes=lambda x, ids, *_: runs_triton(x) and ids.numel() <= MOST_PAIRS,
)(pair_mlp_ref)
