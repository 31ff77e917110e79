"""What mlp_impl="auto" means: which way of computing the experts a device and a shape take.

Legend: R rows (pairs), E local experts, I expert width here.

"sparse" pads every expert's rows to whole blocks and fuses bias and activation into its products; "grouped" pads
nothing, gathers while it multiplies and runs on any width. All sizes that the rule reads are known on the host, so it
never waits for a GPU; under expert parallelism R changes every step and the choice may too.
"""

from __future__ import annotations

import os

import torch

from megablocks.ops.sparse import hopper

BLOCK = 128
"""Rows and columns of a block where the block-sparse kernels are fastest."""

SPARSE_FROM_ROWS: dict[str, int | None] = {"plain": 512, "gated": None}
"""Mean rows an expert from which "sparse" is taken on Hopper, None for never; by kind of activation.

Padding adds half a block an expert on average, 64 rows: 6 % at 1024 rows, 12 % at 512, 50 % at 128. For ungated experts
the products of both paths are within 10 % of each other (benchmarks/NOTES.md) and "sparse" has its activation for free;
for gated ones the activation is a pass of its own in both, and "grouped" does not write the gathered rows.
"""


def hopper_kernels_run(device: torch.device) -> bool:
    """Whether Hopper's block-sparse kernels are in use on `device`."""
    if device.type != "cuda" or os.environ.get("MEGABLOCKS_HOPPER", "1") == "0":
        return False
    return hopper.is_available(torch.cuda.current_device() if device.index is None else device.index)


def choose_mlp_impl(
    *, on_hopper: bool, dtype: torch.dtype, gated: bool, rows: int, num_experts: int, ffn_hidden_size: int
) -> str:
    """ "grouped" or "sparse"; needs no GPU.

    Args:
        on_hopper: whether the Hopper kernels run where the layer does, see `hopper_kernels_run`. Elsewhere nothing was
            measured and "grouped" has torch's kernels to fall back on.
        dtype: in which the experts compute.
        gated: whether the activation is.
        rows, num_experts, ffn_hidden_size: R, E, I.
    """
    fewest = SPARSE_FROM_ROWS["gated" if gated else "plain"]
    if not on_hopper or dtype not in (torch.bfloat16, torch.float16) or fewest is None:
        return "grouped"
    return "sparse" if ffn_hidden_size % BLOCK == 0 and rows >= fewest * num_experts else "grouped"


def block_size_of(ffn_hidden_size: int) -> int | None:
    """The largest block that divides the width, of those with kernels that suit it; None for none."""
    return next((size for size in (BLOCK, 64) if ffn_hidden_size % size == 0), None)
