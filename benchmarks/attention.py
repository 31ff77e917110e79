"""Causal attention by torch's backends, forward and backward, with and without dropout.

    python benchmarks/attention.py [--calls N]

bf16, in the layout of Megatron's heads: (S, B, N, D), seen as (B, N, S, D). Prints the mean ms of N calls, and TFLOP/s
of the products, half of them under the causal mask. DRY_RUN=1 prints the cases.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from measure import dry_run, milliseconds, need_gpu, option_parser
from torch.nn.attention import SDPBackend, sdpa_kernel

SHAPES = [(128, 12, 1024, 64), (128, 8, 1024, 64), (32, 12, 4096, 64), (32, 12, 4096, 128)]
"""B, N, S, D; the first two are Small's and XS's."""
BACKENDS = ("CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION")


def measure(shape: tuple[int, int, int, int], dropout: float, backend: str, calls: int) -> str:
    """A line with the times of one case."""
    batch, heads, seq, width = shape
    made = [torch.randn(seq, batch, heads, width, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    *qkv, d_out = (t.permute(1, 2, 0, 3) for t in made)
    for t in qkv:
        t.requires_grad_()

    def forward() -> Any:
        return F.scaled_dot_product_attention(*qkv, None, dropout, is_causal=True)

    with sdpa_kernel(getattr(SDPBackend, backend)):
        out = forward()
        times = []
        for run in (forward, lambda: torch.autograd.grad(out, qkv, d_out, retain_graph=True)):
            milliseconds(run, 3)  # cuDNN plans in its first call
            times.append(milliseconds(run, calls))
    flops = 2 * batch * heads * seq * seq * width  # two products, half of the scores
    rates = [flops * factor / ms / 1e9 for factor, ms in zip((1, 2.5), times, strict=True)]
    return f"forward {times[0]:.3f} ms ({rates[0]:.0f}), backward {times[1]:.3f} ms ({rates[1]:.0f})"


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--calls", type=int, default=10)
    options = parser.parse_args()
    cases = list(itertools.product(SHAPES, (0.1, 0.0), BACKENDS))
    if not dry_run():
        need_gpu()
    for shape, dropout, backend in cases:
        found = "" if dry_run() else f": {measure(shape, dropout, backend, options.calls)}"
        print(f"{shape}, dropout {dropout}, {backend}{found}", flush=True)


if __name__ == "__main__":
    main()
