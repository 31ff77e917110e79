"""The last step of a sum over rows: one launch adds what each program of a kernel has summed, in a fixed order."""

# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megablocks.ops.launch import cdiv, quick

_ROWS, _BLOCK = 128, 16


@quick
@triton.jit(do_not_specialize=["programs"])
def _add_partials_kernel(
    partial_ptr, first_ptr, second_ptr, third_ptr, programs, N, COUNT: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    which = tl.program_id(1)
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(0, programs, ROWS):
        program = start + tl.arange(0, ROWS)
        mask = (program < programs)[:, None] & (n < N)[None, :]
        at = partial_ptr + (program * COUNT + which)[:, None].to(tl.int64) * N + n[None, :]
        total += tl.load(at, mask=mask, other=0)
    out_ptr = first_ptr if which == 0 else (second_ptr if which == 1 else third_ptr)
    tl.store(out_ptr + n, tl.sum(total, 0), mask=n < N)


def add_partials_launch(partial: Tensor) -> list[Tensor]:
    """partial (programs, count, N) float32, contiguous, count at most 3 → its sums over the programs, count × (N,)."""
    programs, count, width = partial.shape
    sums = [torch.empty(width, dtype=torch.float32, device=partial.device) for _ in range(count)]
    if width:
        places = (sums * 3)[:3]
        _add_partials_kernel[(cdiv(width, _BLOCK), count)](
            partial, *places, programs, width, COUNT=count, ROWS=_ROWS, BLOCK=_BLOCK
        )
    return sums
