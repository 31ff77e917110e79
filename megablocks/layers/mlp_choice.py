"""What mlp_impl="auto" means: which way of computing the experts a device and a shape take.

Legend: E local experts, H hidden, I expert width here.

"fused" does the activation and its gradient within the products, but adds biases' gradients by passes of their own;
"grouped" gathers while it multiplies and runs on any width. The rule reads no number of rows: it never waits for a GPU,
and a new token count compiles nothing. "sparse", whose products have ungated experts' bias b1 for free, is at most
1.4 % ahead of grouped with biases and behind it elsewhere (whole layers on an H200, benchmarks/results/h200).
"""

from __future__ import annotations

import torch

from megablocks.ops.hopper import switched_on
from megablocks.ops.sparse import hopper

BLOCK = 128
"""Rows and columns of a block where the block-sparse kernels are fastest."""

MAX_EXPERTS = 512
"""Of the kernels that "fused" is faster by."""


def hopper_kernels_run(device: torch.device) -> bool:
    """Whether Hopper's block-sparse kernels are in use on `device`."""
    if device.type != "cuda" or not switched_on():
        return False
    return hopper.is_available(torch.cuda.current_device() if device.index is None else device.index)


def choose_mlp_impl(
    *, on_hopper: bool, dtype: torch.dtype, biased: bool, keeps_less: bool, num_experts: int, hidden_size: int,
    ffn_hidden_size: int,
) -> str:  # fmt: skip
    """ "grouped" or "fused"; needs no GPU.

    Args:
        on_hopper: whether the Hopper kernels run where the layer does, see `hopper_kernels_run`. Elsewhere nothing was
            measured and "grouped" has torch's kernels to fall back on.
        dtype: in which the experts compute.
        biased: whether the experts have biases, with which "fused" is 3 to 4 % slower on an H200.
        keeps_less: whether anything is recomputed for backward, with which it is 6 % slower, or quantised, with which
            it was not measured beside "grouped".
        num_experts, hidden_size, ffn_hidden_size: E, H, I.
    """
    if not on_hopper or dtype not in (torch.bfloat16, torch.float16):
        return "grouped"
    fits = kernels_take(num_experts=num_experts, hidden_size=hidden_size, ffn_hidden_size=ffn_hidden_size)
    return "fused" if fits and not biased and not keeps_less else "grouped"


def kernels_take(*, num_experts: int, hidden_size: int, ffn_hidden_size: int) -> bool:
    """Whether Hopper's kernels take experts of these sizes: TMA reads rows of 16 bytes."""
    return hidden_size % 8 == ffn_hidden_size % 8 == 0 and num_experts <= MAX_EXPERTS


def router_pays(*, on_hopper: bool, top_k: int, columns: int) -> bool:
    """Whether the router's part of x's gradient costs less in the experts' product than as a product of its own.

    There it is a term for each of a token's rows, which a product over few columns does not hide: with 512 and K = 16
    it takes 243 µs of an H200, its slopes included, at 32768 tokens of 4096, the router's own product 219; with 512 and
    K = 8 26 and 65 at 24576 of 1536; with 1024 and K = 8 64 and 208 (benchmarks/NOTES.md). Without Hopper's kernels it
    were another pass.

    Args:
        on_hopper: whether Hopper's kernels run the experts' products, see `kernels_take` too.
        columns: of d_z and d_u together, which are multiplied with the weights: I, 2·I where gated.
    """
    return on_hopper and (top_k <= 8 or columns >= 1024)


def block_size_of(ffn_hidden_size: int) -> int | None:
    """The largest block that divides the width, of those with kernels that suit it; None for none."""
    for size in (BLOCK, 64):
        if ffn_hidden_size % size == 0:
            return size
    return None
