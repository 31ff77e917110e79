"""Limits for the distance of a result from the float64 truth."""

from __future__ import annotations

import torch
from torch import Tensor


def max_error(result: Tensor, truth: Tensor) -> float:
    """max |result − truth| in float64; inf if the difference contains a NaN."""
    assert result.shape == truth.shape, f"{tuple(result.shape)} against {tuple(truth.shape)}"
    difference = (result.detach().double().cpu() - truth.detach().double().cpu()).abs()
    return float(torch.nan_to_num(difference, nan=float("inf")).max()) if difference.numel() else 0.0


def assert_as_exact_as(result: Tensor, plain: Tensor, truth: Tensor, factor: float = 2.0) -> None:
    """Fail if the largest error of `result` exceeds `factor` times that of `plain`, torch's result in the same dtype.

    If torch is exact, one rounding of the largest value counts as its error.
    """
    floor = float(truth.detach().abs().max()) * torch.finfo(result.dtype).eps / 2 if truth.numel() else 0.0
    error, allowed = max_error(result, truth), factor * max(max_error(plain, truth), floor)
    assert error <= allowed, f"max error {error:.3e}, allowed {allowed:.3e}"
