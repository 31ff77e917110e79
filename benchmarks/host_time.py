"""Host time of a dMoE layer in eager mode: the time that Python takes for forward and backward, by mlp_impl.

    python benchmarks/host_time.py [--rounds N] [--tokens T] [--shape H,I,E,K]

The tensors are small: the GPU is faster than the host. Hidden 256, 64 experts of width 512, top-1, bf16, 512 tokens by
default. "step" runs backward in autograd's own thread, which is torch's default. "one thread" runs it in the caller's
thread, as the training driver does (`torch.autograd.set_multithreading_enabled(False)`). The difference is the cost of
the change of threads. "torch" is the same layer in twelve lines around `torch._grouped_mm`. Prints µs per step of the
fastest and the median round of 100 steps. DRY_RUN=1 prints the cases.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from measure import dry_run, host_milliseconds, interleave, milliseconds, need_gpu, option_parser
from torch import nn

from megablocks import MoEConfig, dMoE

STEPS = 100
LAYERS = [(impl, activation) for activation in ("gelu", "swiglu") for impl in ("grouped", "sparse", "fused", "torch")]


class Shape(NamedTuple):
    hidden: int
    width: int
    experts: int
    top_k: int


def shape(text: str) -> Shape:
    return Shape(*map(int, text.split(",")))


def torch_layer(config: Any, layer: Any) -> Any:
    """The layer in torch's operations, with its weights as (E, I, H). forward_with_aux: x -> (y, None)."""

    def of(weight: Any) -> nn.Parameter:
        return nn.Parameter(weight.detach().view(config.num_experts, -1, config.hidden_size))

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router, self.w1, self.w2 = layer.router.layer.weight, of(layer.experts.w1), of(layer.experts.w2)
            self.v1 = of(layer.experts.v1) if config.is_gated else None

        def forward_with_aux(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
            weights, ids = F.linear(x, self.router).softmax(-1, dtype=torch.float32).topk(config.top_k)
            order = ids.flatten().argsort(stable=True)
            ends = torch.bincount(ids.flatten(), minlength=config.num_experts).cumsum(0).int()
            token = order // config.top_k
            rows = x[token]
            up = torch._grouped_mm(rows, self.w1.mT, offs=ends)
            if self.v1 is None:
                act = F.gelu(up, approximate="tanh")
            else:
                act = F.silu(up) * torch._grouped_mm(rows, self.v1.mT, offs=ends)
            down = torch._grouped_mm(act, self.w2, offs=ends) * weights.flatten()[order, None].to(x.dtype)
            return torch.zeros_like(x).index_add(0, token, down), None

    return Layer()


def make(impl: str, activation: str, tokens: int, sizes: Shape, device: str = "cuda") -> tuple[Any, Any, Any]:
    """(layer, x, dy)."""
    config = MoEConfig(
        hidden_size=sizes.hidden, ffn_hidden_size=sizes.width, num_experts=sizes.experts, top_k=sizes.top_k,
        activation=activation, mlp_impl="auto" if impl == "torch" else impl, load_balancing_loss_weight=0.0,
    )  # fmt: skip
    layer: Any = dMoE(config, dtype=torch.bfloat16, device=device)
    if impl == "torch":
        layer = torch_layer(config, layer)
    x = torch.randn(tokens, sizes.hidden, dtype=torch.bfloat16, device=device, requires_grad=True)
    return layer, x, torch.randn_like(x)


def step(layer: Any, x: Any, dy: Any) -> None:
    y, _ = layer.forward_with_aux(x)
    y.backward(dy)
    x.grad = None
    for parameter in layer.parameters():
        parameter.grad = None


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--shape", type=shape, default=Shape(256, 512, 64, 1), metavar="H,I,E,K")
    options = parser.parse_args()
    if dry_run():
        for impl, activation in LAYERS:
            print(f"{impl:8} {activation:7} {options.tokens} tokens, {options.shape}")
        return
    need_gpu()

    def of_a_step(fn: Callable[[], object]) -> float:
        return host_milliseconds(fn, STEPS) / STEPS

    def one_thread(fn: Callable[[], object]) -> float:
        with torch.autograd.set_multithreading_enabled(False):
            return of_a_step(fn)

    timers: dict[str, Callable[[], float]] = {}
    for names in LAYERS:
        layer, x, _ = made = make(*names, options.tokens, options.shape)
        name, whole, forward = " ".join(names), partial(step, *made), partial(layer.forward_with_aux, x)
        milliseconds(whole, 3)
        timers[f"{name} step"] = partial(of_a_step, whole)
        timers[f"{name} one thread"] = partial(one_thread, whole)
        timers[f"{name} forward"] = partial(of_a_step, forward)
    for name, measured in interleave(timers, options.rounds, warm_up=0).items():
        print(f"{name:28} {1e3 * min(measured):7.0f} {1e3 * median(measured):7.0f}")


if __name__ == "__main__":
    main()
