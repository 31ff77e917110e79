"""Arguments and results of the routers' ops, which topk.py, rounding.py and their kernels share."""

from typing import NamedTuple

from torch import Tensor


class RouterOptions(NamedTuple):
    """What a router computes.

    top_k: K.
    sigmoid: scores are the sigmoids of the logits, otherwise their softmax.
    after: weights are the softmax of only the chosen logits. Not with sigmoid.
    norm_p: a token's weights are divided by their p-norm; 0 for no norm.
    scaling: factor on the weights, applied last.
    balance_weight, z_weight: factors on the losses. If both are 0, only the weights are differentiable.
    num_groups, group_top_k: experts form `num_groups` groups of neighbors, and a token chooses among the experts of
        its best `group_top_k` groups; 0 for no groups.
    """

    top_k: int
    sigmoid: bool = False
    after: bool = False
    norm_p: float = 0.0
    scaling: float = 1.0
    balance_weight: float = 0.0
    z_weight: float = 0.0
    num_groups: int = 0
    group_top_k: int = 0


class RouterOutput(NamedTuple):
    """What a router returns for T tokens.

    weight (T·K,), balance (), z (), sums (E,): float32 (float64 for float64 logits), differentiable.
    expert, token: (T·K,) int32.    load: (E,) int64.
    stats: (3,) int64: tokens with NaN or infinite logits, tokens that are not padding, and ids out of range, always 0.
    """

    weight: Tensor
    balance: Tensor
    z: Tensor
    sums: Tensor
    expert: Tensor
    token: Tensor
    load: Tensor
    stats: Tensor


class RouterLosses(NamedTuple):
    """The fields of these names of a `RouterOutput`."""

    balance: Tensor
    z: Tensor
    sums: Tensor
    stats: Tensor


class RouterSaved(NamedTuple):
    """What backward reads besides the logits: results of forward; with token rounding flags and ends, not expert."""

    expert: Tensor | None
    load: Tensor
    stats: Tensor
    flags: Tensor | None = None
    ends: Tensor | None = None


class RouterGradients(NamedTuple):
    """The gradients of a router's results; None for 0."""

    d_weight: Tensor | None
    d_balance: Tensor | None = None
    d_z: Tensor | None = None
    d_sums: Tensor | None = None


class Rounding(NamedTuple):
    """rule: one of `ROUNDINGS`.    tile: rows.    num_pairs: R."""

    rule: str
    tile: int
    num_pairs: int


class RoundedOutput(NamedTuple):
    """What a router with token rounding returns for T tokens: the fields of `RouterOutput` for R pairs, and

    expert: (R,), -1 after the last pair.     load: (E,) before rounding.
    rounded: (E,) int64 loads after rounding. dropped: () int64 choices that rounding down left out.
    flags: (E, T) int8, 1 for a pair that is computed + 2 for one that the top-k chose.
    ends: (T,) int32 number of pairs up to and including each token's.
    """

    weight: Tensor
    balance: Tensor
    z: Tensor
    sums: Tensor
    expert: Tensor
    token: Tensor
    load: Tensor
    stats: Tensor
    rounded: Tensor
    dropped: Tensor
    flags: Tensor
    ends: Tensor
