"""Token movement: tokens to expert-sorted rows and back."""

from typing import NamedTuple

from torch import Tensor


class Unpadded(NamedTuple):
    """Rows sorted by expert, without padding.

    ends: (E,) int32, where each expert's rows end.
    pair: (R,) int32, the pair of each row.
    gather, scatter: (R,) int32 of the Dispatch, or None where every pair is valid.
    top_k: without gather and scatter: pairs of each token.
    """

    ends: Tensor
    pair: Tensor
    gather: Tensor | None
    scatter: Tensor | None
    top_k: int = 1
