"""Which implementation an op takes for a tensor: a Triton kernel where one can run, else the torch reference."""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

_HAS_TRITON = importlib.util.find_spec("triton") is not None  # not asked later: torch.compile cannot trace the question


def runs_triton(t: Tensor) -> bool:
    """Whether Triton kernels run on `t`: on a GPU, with the package installed, in no float64 (the reference's)."""
    return t.is_cuda and t.dtype != torch.float64 and _HAS_TRITON
