"""What mlp_impl="auto" means: which way of computing the experts a device and a shape take.

Legend: R rows (pairs), E local experts, I expert width here.

"sparse" pads every expert's rows to whole blocks and fuses bias and activation into its products; "grouped" pads
nothing, gathers while it multiplies and runs on any width; "fused" also does the activation and its gradient within the
products, but adds biases' gradients by passes of their own. All sizes that the rule reads are known on the host, so it
never waits for a GPU; under expert parallelism R changes every step and the choice may too.
"""

from __future__ import annotations

import torch

from megablocks.ops.hopper import switched_on
from megablocks.ops.sparse import hopper

BLOCK = 128
"""Rows and columns of a block where the block-sparse kernels are fastest."""

MAX_EXPERTS = 512
"""Of the kernels that "fused" is faster by."""

SPARSE_FROM_ROWS: dict[str, int | None] = {"plain": None, "plain, biased": 512, "gated": None}
"""Mean rows an expert from which "sparse" is taken on Hopper, None for never; by kind of expert.

Padding adds half a block an expert on average, 64 rows: 6 % at 1024 rows, 12 % at 512, 50 % at 128. Whole layers,
forward and backward on an H200 (benchmarks/NOTES.md), time of grouped over that of sparse: 1.00 at 1024 rows an expert,
0.97 at 512, 0.89 at 128, 0.76 to 0.99 where gated; and grouped keeps less for backward. What "sparse" has for free is
the bias b1 of ungated experts, in its epilogue: "grouped" passes over (R, I) once more forward and sums it backward.
"""


def hopper_kernels_run(device: torch.device) -> bool:
    """Whether Hopper's block-sparse kernels are in use on `device`."""
    if device.type != "cuda" or not switched_on():
        return False
    return hopper.is_available(torch.cuda.current_device() if device.index is None else device.index)


def choose_mlp_impl(
    *, on_hopper: bool, dtype: torch.dtype, gated: bool, biased: bool, keeps_less: bool, rows: int, num_experts: int,
    hidden_size: int, ffn_hidden_size: int,
) -> str:  # fmt: skip
    """ "grouped", "sparse" or "fused"; needs no GPU.

    Args:
        on_hopper: whether the Hopper kernels run where the layer does, see `hopper_kernels_run`. Elsewhere nothing was
            measured and "grouped" has torch's kernels to fall back on.
        dtype: in which the experts compute.
        gated, biased: whether the activation is, and whether the experts have biases.
        keeps_less: whether anything is recomputed or quantised for backward, for which "fused" was not measured.
        rows, num_experts, hidden_size, ffn_hidden_size: R, E, H, I.
    """
    if not on_hopper or dtype not in (torch.bfloat16, torch.float16):
        return "grouped"
    fewest = fewest_rows(gated, biased)
    if fewest is not None and ffn_hidden_size % BLOCK == 0 and rows >= fewest * num_experts:
        return "sparse"
    fits = hidden_size % 8 == ffn_hidden_size % 8 == 0 and num_experts <= MAX_EXPERTS
    return "fused" if fits and not biased and not keeps_less else "grouped"


def fewest_rows(gated: bool, biased: bool) -> int | None:
    """The entry of `SPARSE_FROM_ROWS`."""
    return SPARSE_FROM_ROWS["gated" if gated else "plain, biased" if biased else "plain"]


def block_size_of(ffn_hidden_size: int) -> int | None:
    """The largest block that divides the width, of those with kernels that suit it; None for none."""
    for size in (BLOCK, 64):
        if ffn_hidden_size % size == 0:
            return size
    return None
