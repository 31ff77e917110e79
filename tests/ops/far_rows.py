"""Rows so far apart that their offsets overflow int32, without the memory of all that lies between them."""

import torch
from torch import Tensor


def far_rows(values: Tensor) -> Tensor:
    """values (3, N) float16 → the same rows, 2³⁰ elements apart.

    Row 2 begins at 2³¹. Where that offset, wrapped to int32, leads stands NaN, so that a kernel which wraps reads a
    wrong value rather than crashes. 8 GiB of addresses; on a CPU only the pages that are touched take memory (all of
    them under `poisoned_empty`: not to be used there).
    """
    stride, columns = 2**30, values.shape[1]
    storage = torch.empty(2**32 + columns, dtype=torch.float16, device=values.device)
    storage[:columns] = float("nan")
    rows = storage.as_strided((3, columns), (stride, 1), 2**31)
    return rows.copy_(values)
