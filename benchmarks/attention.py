"""Causal attention by torch's backends, forward and backward, in Megatron's layout.

    python benchmarks/attention.py [--rounds N]

bf16. Query, key and value are views of one projection (S, B, N, 3·D), and the output becomes a contiguous (S, B, N·D),
so that a backend's copies count. "default" is torch's own choice. The candidates run in turn. Prints ms a call of the
median round, TFLOP/s of the products (half of them under the causal mask) and the first call's time, which holds
cuDNN's plans. A result that is off float32 by more than twice the default's error is marked WRONG. DRY_RUN=1 prints the
cases.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any

from measure import dry_run, milliseconds, need_gpu

CASES = [  # B, N, S, D, dropout
    (batch, 12, 1024, 64, dropout) for batch in (32, 128) for dropout in (0.0, 0.1)
] + [(8, 16, 4096, 128, dropout) for dropout in (0.0, 0.1)]  # fmt: skip


def backends() -> dict[str, list[Any] | None]:
    """Name → backends in the order of preference, None for torch's choice."""
    from torch.nn.attention import SDPBackend

    alone = {
        "flash": SDPBackend.FLASH_ATTENTION,
        "cudnn": SDPBackend.CUDNN_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
    }
    return {"default": None} | {name: [one] for name, one in alone.items()}


def attend(qkv: Any, dropout: float, chosen: list[Any] | None) -> Any:
    """(S, B, N, 3·D) → (S, B, N·D), contiguous."""
    import contextlib

    import torch.nn.functional as F
    from torch.nn.attention import sdpa_kernel

    query, key, value = (t.permute(1, 2, 0, 3) for t in qkv.chunk(3, dim=-1))
    with contextlib.nullcontext() if chosen is None else sdpa_kernel(chosen, set_priority=True):
        out = F.scaled_dot_product_attention(query, key, value, None, dropout, is_causal=True)
    return out.permute(2, 0, 1, 3).reshape(*qkv.shape[:2], -1).contiguous()


def step(qkv: Any, dy: Any, dropout: float, chosen: list[Any] | None) -> list[Any]:
    """The output and the gradient of qkv."""
    import torch

    out = attend(qkv, dropout, chosen)
    return [out, *torch.autograd.grad(out, qkv, dy)]


def errors(qkv: Any, dy: Any, chosen: list[Any] | None) -> list[float]:
    """Of both results for the first sequence, without dropout, relative to float32."""
    from torch.nn.attention import SDPBackend

    qkv, dy = qkv[:, :1].detach().requires_grad_(), dy[:, :1]
    truth = step(qkv.detach().float().requires_grad_(), dy.float(), 0.0, [SDPBackend.MATH])
    found = step(qkv, dy, 0.0, chosen)
    return [float((a - b).norm() / b.norm()) for a, b in zip(found, truth, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    if dry_run():
        for case in CASES:
            print("B, N, S, D, dropout = {}, {}, {}, {}, {}".format(*case))
        return
    need_gpu()
    import torch

    for batch, heads, seq, dim, dropout in CASES:
        qkv = torch.randn(seq, batch, heads, 3 * dim, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        dy = torch.randn(seq, batch, heads * dim, dtype=torch.bfloat16, device="cuda")
        steps: dict[str, Callable[[], Any]] = {}
        first: dict[str, float] = {}
        times: dict[str, list[float]] = {}
        print(f"B, N, S, D, dropout = {batch}, {heads}, {seq}, {dim}, {dropout}")
        for name, chosen in backends().items():

            def one(chosen: Any = chosen, qkv: Any = qkv, dy: Any = dy, dropout: float = dropout) -> None:
                step(qkv, dy, dropout, chosen)

            start = time.perf_counter()
            try:
                one()
                torch.cuda.synchronize()
            except RuntimeError as error:
                print(f"  {name:9} does not take it: {str(error).splitlines()[0]}")
                continue
            first[name], steps[name], times[name] = time.perf_counter() - start, one, []
        for _ in range(options.rounds):
            for name, one in steps.items():
                times[name].append(milliseconds(one, 5, head_start_ms=2.0))
        flop = 7 * 2 * batch * heads * seq * seq * dim / 2
        allowed = errors(qkv, dy, None)
        for name, measured in times.items():
            found = errors(qkv, dy, backends()[name])
            wrong = "" if all(e <= 2 * most for e, most in zip(found, allowed, strict=True)) else " WRONG"
            ms = median(measured)
            print(f"  {name:9} {ms:7.3f} ms {flop / ms / 1e9:5.0f} TFLOP/s, first call {first[name]:.2f} s{wrong}")


if __name__ == "__main__":
    main()
