"""y[p] = x[token of p] · w[e], by a gather and a grouped product."""

from torch import Tensor

from megablocks.ops.grouped.grouped_mm import grouped_mm
from megablocks.ops.permute.gather import gather
from megablocks.ops.routing.dispatch import Dispatch


def gathered_mm(x: Tensor, w: Tensor, dispatch: Dispatch) -> Tensor:
    """x (T, H), w (E, H, N) → (R, N)."""
    return grouped_mm(gather(x, dispatch), w, dispatch.expert_offsets)
