"""Host time of a dMoE layer in eager mode: the time that Python takes for forward and backward, by mlp_impl.

    python benchmarks/host_time.py [--rounds N] [--tokens T]

The tensors are small: the GPU is faster than the host. 64 experts, top-1, bf16, 512 tokens by default. "step" runs
backward in autograd's own thread, which is torch's default. "one thread" runs it in the caller's thread, as the
training driver does (`torch.autograd.set_multithreading_enabled(False)`). The difference is the cost of the change of
threads. Prints µs per step of the fastest and the median round of 100 steps. DRY_RUN=1 prints the cases.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

from measure import dry_run, host_milliseconds, interleave, milliseconds, need_gpu

HIDDEN, WIDTH, EXPERTS, STEPS = 256, 512, 64, 100
LAYERS = [(impl, activation) for activation in ("gelu", "swiglu") for impl in ("grouped", "sparse", "fused")]


def make(impl: str, activation: str, tokens: int) -> tuple[Any, Any, Any]:
    """(layer, x, dy)."""
    import torch

    from megablocks import MoEConfig, dMoE

    config = MoEConfig(
        hidden_size=HIDDEN, ffn_hidden_size=WIDTH, num_experts=EXPERTS, top_k=1, activation=activation, mlp_impl=impl,
        load_balancing_loss_weight=0.0,
    )  # fmt: skip
    x = torch.randn(tokens, HIDDEN, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    return dMoE(config, dtype=torch.bfloat16, device="cuda"), x, torch.randn_like(x)


def step(layer: Any, x: Any, dy: Any) -> None:
    y, _ = layer.forward_with_aux(x)
    y.backward(dy)
    x.grad = None
    for parameter in layer.parameters():
        parameter.grad = None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=512)
    options = parser.parse_args()
    if dry_run():
        for impl, activation in LAYERS:
            print(f"{impl:8} {activation:7} T, H, I, E = {options.tokens}, {HIDDEN}, {WIDTH}, {EXPERTS}")
        return
    need_gpu()
    import torch

    def one_thread(fn: Callable[[], object]) -> float:
        with torch.autograd.set_multithreading_enabled(False):
            return host_milliseconds(fn, STEPS)

    timers: dict[str, Callable[[], float]] = {}
    for names in LAYERS:
        layer, x, _ = made = make(*names, options.tokens)
        name, whole, forward = " ".join(names), partial(step, *made), partial(layer.forward_with_aux, x)
        milliseconds(whole, 3)
        timers[f"{name} step"] = partial(host_milliseconds, whole, STEPS)
        timers[f"{name} one thread"] = partial(one_thread, whole)
        timers[f"{name} forward"] = partial(host_milliseconds, forward, STEPS)
    for name, measured in interleave(timers, options.rounds, warm_up=0).items():
        print(f"{name:28} {1e3 * min(measured):7.0f} {1e3 * median(measured):7.0f}")


if __name__ == "__main__":
    main()
