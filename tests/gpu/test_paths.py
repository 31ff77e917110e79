"""Which kernels the block-sparse products launch: blocks of 128 in half precision Hopper's, all others Triton's."""

from __future__ import annotations

import pytest
import torch

from megablocks.ops.sparse import dsd, hopper, sdd, topology

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
    fast = switch == "1" and block == 128 and dtype != torch.float32 and hopper.is_available()
    names = (
        ("hopper_kernels.sdd_kernel", "hopper_kernels.spmm_kernel")
        if fast
        else ("kernels._sdd_kernel", "kernels._spmm_kernel")
    )
    assert launched == {f"megablocks.ops.sparse.{name}" for name in names}
