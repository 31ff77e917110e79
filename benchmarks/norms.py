"""LayerNorm and RMSNorm, forward and backward: ours, torch's and, if liger-kernel is installed, Liger's.

    python benchmarks/norms.py [--rounds N]

bf16, T tokens of hidden size H, all gradients. The candidates run in turn. Prints µs a call of the median round beside
the bound: the bytes of x, y, dY, x again and dX at 4.8 TB/s. A result that is off float64 by more than twice torch's
error is marked WRONG. DRY_RUN=1 prints the cases.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from statistics import median
from typing import Any

from measure import dry_run, milliseconds, need_gpu

CASES = [(32 * 1024, 768), (128 * 1024, 768), (32 * 1024, 2048), (32 * 1024, 4096)]
EPS, CALLS, BYTES_A_SECOND = 1e-5, 20, 4.8e12


def candidates(biased: bool) -> dict[str, Callable[..., Any]]:
    """Name → function of x, weight and bias."""
    import torch.nn.functional as F

    from megablocks.ops.norm import norm

    def ours(x: Any, weight: Any, bias: Any) -> Any:
        return norm(x, weight, bias, eps=EPS)

    def torchs(x: Any, weight: Any, bias: Any) -> Any:
        if biased:
            return F.layer_norm(x, x.shape[-1:], weight, bias, EPS)
        return F.rms_norm(x, x.shape[-1:], weight, EPS)

    found = {"torch": torchs, "ours": ours}
    try:
        from liger_kernel.ops.layer_norm import LigerLayerNormFunction
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction
    except ImportError:
        return found

    def ligers(x: Any, weight: Any, bias: Any) -> Any:
        if biased:
            return LigerLayerNormFunction.apply(x, weight, bias, EPS)
        return LigerRMSNormFunction.apply(x, weight, EPS, 0.0, "gemma", False)

    return found | {"liger": ligers}


def step(fn: Callable[..., Any], inputs: list[Any], dy: Any) -> tuple[Any, ...]:
    """y and the gradients of x, weight and bias."""
    import torch

    y = fn(*inputs, *[None] * (3 - len(inputs)))
    return y, *torch.autograd.grad(y, inputs, dy)


def errors(fn: Callable[..., Any], torchs: Callable[..., Any], inputs: list[Any], dy: Any) -> list[float]:
    """Of each result, relative to float64."""
    truth = step(torchs, [t.detach().double().requires_grad_() for t in inputs], dy.double())
    return [float((a - b).norm() / b.norm()) for a, b in zip(step(fn, inputs, dy), truth, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    if dry_run():
        for tokens, hidden in CASES:
            print(f"T, H = {tokens}, {hidden}: LayerNorm and RMSNorm")
        return
    need_gpu()
    import torch

    for (tokens, hidden), biased in ((case, biased) for case in CASES for biased in (True, False)):
        x, dy = (torch.randn(tokens, hidden, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        inputs = [x, *(torch.randn(hidden, dtype=torch.bfloat16, device="cuda") for _ in range(1 + biased))]
        for t in inputs:
            t.requires_grad_()
        fns = candidates(biased)
        allowed = [2 * error for error in errors(fns["torch"], fns["torch"], inputs, dy)]
        wrong = {
            name: any(e > most for e, most in zip(errors(fn, fns["torch"], inputs, dy), allowed, strict=True))
            for name, fn in fns.items()
        }
        times: dict[str, list[float]] = {name: [] for name in fns}
        for _ in range(options.rounds):
            for name, fn in fns.items():

                def one(fn: Callable[..., Any] = fn, inputs: list[Any] = inputs, dy: Any = dy) -> None:
                    step(fn, inputs, dy)

                times[name].append(milliseconds(one, CALLS, head_start_ms=5.0) * 1e3)
        bound = 5 * tokens * hidden * 2 / BYTES_A_SECOND * 1e6
        print(f"{'LayerNorm' if biased else 'RMSNorm':9} T, H = {tokens}, {hidden}: bound {bound:.0f} µs", end="")
        for name, measured in times.items():
            print(f", {name} {median(measured):.0f}{' WRONG' if wrong[name] else ''}", end="")
        print(flush=True)


if __name__ == "__main__":
    main()
