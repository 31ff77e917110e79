"""Products of a few pairs of token and expert, without sorting them, such as those of a token that is being generated.

    y[p] = scale[p] · (x[p // K] · w[ids[p]] + bias[ids[p]])        0 if ids[p] is outside [0, E)

Legend: T rows of x, K pairs per row, R = T·K pairs, E experts, I inner size, N outer size. Without a gradient.

Each expert's weights are read once, in place. A row's result has the same bits for any other rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megablocks.ops.library import custom_op, runs_triton

MOST_PAIRS = 512
"""Most pairs for the kernel: each program reads the ids of all pairs."""


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
