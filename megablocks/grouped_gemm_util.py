"""megablocks 0.10's question whether the grouped_gemm package is there: its product is built in, so the answer is yes.

`ops.gmm` is that package's function on our grouped GEMM, for programs that reached it through here.
"""

from __future__ import annotations

import types
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def grouped_gemm_is_available() -> bool:
    """True."""
    return True


def assert_grouped_gemm_is_available() -> None:
    """Nothing."""


def _gmm(a: Tensor, b: Tensor, batch_sizes: Tensor, trans_b: bool = False) -> Tensor:
    """Rows of a (R, K), batch_sizes[e] of them an expert, times b (E, K, N), or (E, N, K) with trans_b: (R, N)."""
    import torch.nn.functional as F

    from megablocks.ops.grouped.grouped_mm import grouped_mm

    offsets = F.pad(batch_sizes.to(a.device).cumsum(0), (1, 0)).int()
    return grouped_mm(a, b.transpose(1, 2) if trans_b else b, offsets)


ops = types.SimpleNamespace(gmm=_gmm)
