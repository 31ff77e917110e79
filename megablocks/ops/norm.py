"""LayerNorm and RMSNorm over the last dimension, and their gradients.

    LayerNorm  y = (x − mean(x)) · r · g + bias     r = 1 / √(mean((x − mean(x))²) + eps)
    RMSNorm    y = x · r · g                        r = 1 / √(mean(x²) + eps)
    with x̂ = (x − mean) · r, or x · r, and d = dY · g:
    dX = r · (d − x̂ · mean(d · x̂) − mean(d)), the last term only for LayerNorm;  dg = Σ dY · x̂,  dbias = Σ dY

Legend: R rows, H hidden; g = weight, or 1 + weight if zero-centered. Everything is float32 inside (float64 for
float64) and rounded once. The sums over the rows have a fixed order, so reruns are bit-identical. The op is
add_norm.py's, without a residual.
Sources: LayerNorm (arXiv 1607.06450), RMSNorm (arXiv 1910.07467).
"""

from __future__ import annotations

from torch import Tensor

from megablocks.ops.add_norm import AddNormOptions, add_norm_op, check_norm


def norm(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float, zero_centered: bool = False) -> Tensor:
    """LayerNorm, or RMSNorm without a bias, of x (…, H) over H.

    Args:
        x: floating.
        weight, bias: (H,) floating, of any dtype; bias None for RMSNorm.
        eps: at least 0, added to the variance, or to the mean of squares.
        zero_centered: the factor is 1 + weight.

    Returns:
        (…, H) in x's dtype.

    Raises:
        ValueError: a weight or bias of another length, or a negative eps.
    """
    check_norm(x, eps, weight=weight, bias=bias)
    rows = x.reshape(-1, x.shape[-1])
    options = AddNormOptions(0, eps, float(zero_centered))
    return add_norm_op(rows, None, None, None, weight, bias, options)[1].view(x.shape)
