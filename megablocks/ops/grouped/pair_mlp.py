"""The experts' MLP for a few tokens, without sorting their pairs, such as a token that is being generated.

    h[t, k]   = x[t] · up[e] + up_bias[e]              e = ids[t, k]; both halves of a gated MLP
    act[t, k] = f(h) or f(first half of h) ⊙ second half, of the rounded h
    y[t]      = Σ over k of weight[t, k] · (act[t, k] · down[e] + down_bias[e])        without pairs outside [0, E)

Legend: T tokens, H hidden, K top-k, E experts, I expert width, N = 2·I if gated, otherwise I. Without a gradient.

On a GPU it takes two launches, which read each expert's weights once, in place. A token's result has the same bits for
any other tokens: its pairs are summed in float32 in their order.
"""

from __future__ import annotations

from torch import Tensor

from megablocks.ops.activation import activation_ref
from megablocks.ops.activation_table import ACTIVATIONS, Activation
from megablocks.ops.grouped.pair_mm import MOST_PAIRS, pair_mm_ref
from megablocks.ops.library import custom_op, runs_triton


def pair_mlp_ref(
    x: Tensor, ids: Tensor, weight: Tensor, up: Tensor, down: Tensor, up_bias: Tensor | None, down_bias: Tensor | None,
    activation: Activation,
) -> Tensor:  # fmt: skip
    """x (T, H), ids and weight (T, K), up (E, H, N), down (E, I, H) → (T, H), with a copy of each pair's weights."""
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


def pair_mlp(
    x: Tensor, ids: Tensor, weight: Tensor, up: Tensor, down: Tensor, activation: Activation, *,
    up_bias: Tensor | None = None, down_bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Apply its experts to each token, and sum their outputs by weight. Not differentiable.

    Args:
        x: (T, H) floating.
        ids: (T, K) integer. Pairs with an id outside [0, E) add nothing. A GPU computes up to `MOST_PAIRS` pairs
            without copies of the weights.
        weight: (T, K) floating.
        up: (E, H, N) of x's dtype, in any order of strides; fastest if H or N is contiguous. In a gated MLP the first
            half of the columns computes the argument of the activation, the second half the gate.
        down: (E, I, H) of x's dtype, likewise.
        activation: as in `activate`.
        up_bias, down_bias: (E, N) and (E, H) floating, or None.

    Returns:
        (T, H) in x's dtype, rounded once from float32; 0 for a token without a valid pair.

    Raises:
        ValueError: shapes, dtypes or an activation that do not fit.
    """
    _check(x, ids, weight, up, down, activation)
    for name, bias, w in (("up_bias", up_bias, up), ("down_bias", down_bias, down)):
        if bias is not None and bias.shape != (w.shape[0], w.shape[2]):
            raise ValueError(f"{name} is {tuple(bias.shape)}: must be ({w.shape[0]}, {w.shape[2]})")
    return pair_mlp_op(x, ids, weight, up, down, up_bias, down_bias, activation)


def _check(x: Tensor, ids: Tensor, weight: Tensor, up: Tensor, down: Tensor, activation: Activation) -> None:
    if activation.name not in ACTIVATIONS:
        raise ValueError(f"activation={activation.name!r}: must be one of {', '.join(ACTIVATIONS)}")
    if ids.dim() != 2 or ids.is_floating_point() or x.dim() != 2 or ids.shape[0] != x.shape[0]:
        raise ValueError(f"ids is {tuple(ids.shape)} {ids.dtype}: must be (T, K) integer, for x {tuple(x.shape)}")
    if weight.shape != ids.shape:
        raise ValueError(f"weight is {tuple(weight.shape)}: must be {tuple(ids.shape)} as ids is")
    hidden, halves = x.shape[1], 1 + activation.gated
    if down.dim() != 3 or down.shape[2] != hidden or down.dtype != x.dtype:
        raise ValueError(f"down is {tuple(down.shape)} {down.dtype}: must be (E, I, {hidden}) of x's {x.dtype}")
    wanted = down.shape[0], hidden, halves * down.shape[1]
    if up.shape != wanted or up.dtype != x.dtype:
        raise ValueError(f"up is {tuple(up.shape)} {up.dtype}: must be {wanted} of x's {x.dtype}")
