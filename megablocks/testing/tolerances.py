"""How far a result may be from the truth in float64."""

from __future__ import annotations

import torch
from torch import Tensor


def max_error(result: Tensor, truth: Tensor) -> float:
    """max |result − truth| in float64; inf where one is NaN and the other is not."""
    assert result.shape == truth.shape, f"{tuple(result.shape)} against {tuple(truth.shape)}"
    difference = (result.detach().double().cpu() - truth.detach().double().cpu()).abs()
    return float(torch.nan_to_num(difference, nan=float("inf")).max()) if difference.numel() else 0.0


def assert_as_exact_as(result: Tensor, plain: Tensor, truth: Tensor, factor: float = 2.0) -> None:
    """The result's largest error is at most `factor` times that of `plain`, torch's own in the same dtype.

    Where torch is exact the floor is one rounding of the largest value.
    """
    floor = float(truth.detach().abs().max()) * torch.finfo(result.dtype).eps / 2 if truth.numel() else 0.0
    error, allowed = max_error(result, truth), factor * max(max_error(plain, truth), floor)
    assert error <= allowed, f"max error {error:.3e}, allowed {allowed:.3e}"
