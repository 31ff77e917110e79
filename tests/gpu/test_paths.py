"""Which kernels the block-sparse products launch: Hopper's for blocks of 128 in half precision, otherwise Triton's."""

from __future__ import annotations

import pytest
import torch

from megablocks.ops.hopper import is_available
from megablocks.ops.sparse import dsd, sdd, topology

from .sanitize import launches, offsets_of


@pytest.mark.gpu
@pytest.mark.parametrize("switch", ["1", "0"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("block", [64, 128, 256])
def test_the_kernels_of_a_block_size_and_dtype(
    block: int, dtype: torch.dtype, switch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGABLOCKS_HOPPER", switch)
    pattern = topology(offsets_of([130, 3], torch.device("cuda")), block, max_rows=133, block_size=block).pattern
    x, w = (torch.randn(*shape, device="cuda", dtype=dtype) for shape in ((pattern.shape[0], 64), (64, 2 * block)))
    with launches() as launched:
        dsd(sdd(x, w, pattern), w.t())
    fast = switch == "1" and block == 128 and dtype != torch.float32 and is_available()
    names = (
        ("products_hopper.sdd_kernel", "products_hopper.spmm_kernel")
        if fast
        else ("kernels._sdd_kernel", "kernels._spmm_kernel")
    )
    assert launched == {f"megablocks.ops.sparse.{name}" for name in names}
