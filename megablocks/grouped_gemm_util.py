"""megablocks 0.10's way to ask for the grouped_gemm package, whose product is built into this package.

`ops.gmm` and `backend.gmm` have that package's arguments and results, for programs that reach them through here.
"""

from __future__ import annotations

import types

from torch import Tensor

from megablocks.layers.mlp import offsets_of
from megablocks.ops.grouped.grouped_mm import grouped_mm, grouped_mm_dw_op
from megablocks.ops.upstream import as_kernel


def grouped_gemm_is_available() -> bool:
    """True."""
    return True


def assert_grouped_gemm_is_available() -> None:
    """Nothing."""


def _gmm(a: Tensor, b: Tensor, batch_sizes: Tensor, trans_b: bool = False) -> Tensor:
    """Each expert's batch_sizes[e] rows of a (R, K) times b (E, K, N), or (E, N, K) with trans_b: (R, N)."""
    return grouped_mm(a, b.transpose(1, 2) if trans_b else b, offsets_of(batch_sizes, a.device))


@as_kernel
def _raw_gmm(
    a: Tensor, b: Tensor, batch_sizes: Tensor, trans_a: bool = False, trans_b: bool = False, c: Tensor | None = None
) -> Tensor:
    """Like `ops.gmm`, without gradients; with trans_a each expert's aᵀ·b of a (R, M) and b (R, N): (E, M, N).

    Args:
        c: of the result's shape; the result is written into it where it is given. It may be a or b.

    Raises:
        ValueError: trans_a and trans_b together, or shapes that do not fit.
    """
    if trans_a and (trans_b or a.shape[0] != b.shape[0]):
        shapes = f"a {tuple(a.shape)}, b {tuple(b.shape)}"
        raise ValueError(f"trans_a=True with trans_b={trans_b}, {shapes}: needs trans_b=False and equally many rows")
    if trans_a:
        out = grouped_mm_dw_op(a, b, offsets_of(batch_sizes, a.device))
    else:
        out = _gmm(a, b, batch_sizes, trans_b)
    return out if c is None else c.copy_(out)


ops = types.SimpleNamespace(gmm=_gmm)
backend = types.SimpleNamespace(gmm=_raw_gmm)
