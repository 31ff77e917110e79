"""Scattered products and token rounding on one GPU, beside the grouped path and plain top-k, interleaved.

    python benchmarks/scattered.py [--shapes S1,S2] [--parts mlp,rounding,router] [--rounds 7] [--out FILE.json]

    mlp       forward + backward of the experts over one zipf-like routing: `scatter_mlp`, the same with the activation
              recomputed, gather + grouped + combine, and ScatterMoE's GLUMLP where its package is installed
    rounding  forward + backward of a dMoE, router included, in training: plain top-k and each rule of token rounding
    router    `route` alone, forward + backward: what rounding costs

A contender is timed only after its output and gradients have been compared with the first one's. Times are medians over
rounds in which every contender runs in turn, because the chip is power-limited and drifts. Beside them the most memory
beyond what stood before. DRY_RUN=1 prints the cases alone.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

SHAPES = {  # T, H, I, E, K
    "S1": (24576, 1536, 256, 128, 8),
    "S3": (24576, 1536, 1024, 32, 2),
    "S2": (32768, 4096, 512, 128, 8),
    "R1": (16384, 1536, 1024, 128, 2),
    "R2": (16384, 4096, 1024, 256, 4),
    "small": (512, 256, 64, 16, 4),
}
PARTS = ("mlp", "rounding", "router")
Contender = Callable[[], list[Any]]  # one forward + backward: the output and the gradients


def config_of(shape: str, **changes: Any) -> Any:
    from megablocks import MoEConfig

    _, hidden, width, experts, top_k = SHAPES[shape]
    values = dict(hidden_size=hidden, ffn_hidden_size=width, num_experts=experts, top_k=top_k, activation="swiglu")
    return MoEConfig(**{**values, "softmax_order": "after_topk", **changes})


def mlp_contenders(shape: str) -> dict[str, Contender]:
    import torch

    from megablocks.layers.experts import Experts
    from megablocks.layers.scatter_mlp import scatter_mlp
    from megablocks.ops.routing.dispatch import build_dispatch
    from megablocks.routers.functional import route

    tokens, hidden, width, experts, top_k = SHAPES[shape]
    config = config_of(shape)
    module = Experts(config, seed=0, device="cuda", dtype=torch.bfloat16)
    x, dy = (0.2 * torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    x.requires_grad_()
    routing = route(torch.randn(tokens, experts, device="cuda"), config, training=False)
    weight = routing.weight.detach().requires_grad_()
    dispatch = build_dispatch(routing)
    leaves = [x, weight, module.w1, module.v1, module.w2]

    def run(forward: Callable[[], Any], inputs: list[Any] = leaves) -> list[Any]:
        y = forward()
        return [y, *torch.autograd.grad(y, inputs, dy)]

    lean = config.replace(recompute_activation=True)
    found: dict[str, Contender] = {
        "grouped": lambda: run(lambda: module(x, dispatch, weight)),
        "scatter": lambda: run(lambda: scatter_mlp(module._weights(x.dtype), x, dispatch, weight, config)),
        "scatter, recomputed": lambda: run(lambda: scatter_mlp(module._weights(x.dtype), x, dispatch, weight, lean)),
    }
    if importlib.util.find_spec("scattermoe"):
        from scattermoe.mlp import GLUMLP

        peer = GLUMLP(hidden, width, experts, top_k, activation=torch.nn.SiLU()).cuda().to(torch.bfloat16)
        with torch.no_grad():
            v1, w1, w2 = (module._per_expert(w) for w in (module.v1, module.w1, module.w2))
            peer.experts.weight.copy_(torch.cat((v1, w1), 1))
            peer.output_experts.weight.copy_(w2.transpose(1, 2))
        gates, ids = weight.view(tokens, top_k).to(x.dtype), routing.expert.view(tokens, top_k).long()
        theirs = [x, weight, peer.experts.weight, peer.output_experts.weight]

        def scattermoe() -> list[Any]:
            y, dx, d_weight, d_up, d_down = run(lambda: peer(x, gates, ids), theirs)
            dv, dw = d_up.view(experts, 2, width, hidden).unbind(1)
            down = d_down.transpose(1, 2).reshape(module.w2.shape)
            return [y, dx, d_weight, dw.reshape(module.w1.shape), dv.reshape(module.w1.shape), down]

        found["ScatterMoE"] = scattermoe
    return found


def layer_contenders(shape: str, rules: tuple[str | None, ...]) -> dict[str, Contender]:
    import torch

    from megablocks import dMoE

    tokens, hidden, *_ = SHAPES[shape]
    x, dy = (0.2 * torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    x.requires_grad_()
    found: dict[str, Contender] = {}
    for rule in rules:
        torch.manual_seed(0)
        layer = dMoE(config_of(shape, token_rounding=rule), seed=0, device="cuda", dtype=torch.bfloat16)
        leaves = [x, *layer.parameters()]

        def run(layer: Any = layer, leaves: list[Any] = leaves) -> list[Any]:
            y = layer(x)
            return [y, *torch.autograd.grad(y, leaves, dy)]

        found[rule or "top-k"] = run
    return found


def router_contenders(shape: str, rules: tuple[str | None, ...]) -> dict[str, Contender]:
    import torch

    from megablocks.routers.functional import route

    tokens, _, _, experts, _ = SHAPES[shape]
    logits = torch.randn(tokens, experts, device="cuda", requires_grad=True)
    found: dict[str, Contender] = {}
    for rule in rules:
        config = config_of(shape, token_rounding=rule)

        def run(config: Any = config) -> list[Any]:
            weight = route(logits, config, training=True).weight
            return [weight, *torch.autograd.grad(weight, [logits], torch.ones_like(weight))]

        found[rule or "top-k"] = run
    return found


def gate(part: str, contenders: dict[str, Contender]) -> dict[str, float]:
    """Largest relative error of an output or gradient against the first contender's; rounding routes otherwise."""
    import torch

    from megablocks.testing.oracle import relative_error

    first, errors = None, {}
    for name, run in contenders.items():
        got = run()
        if not all(bool(t.isfinite().all()) for t in got):
            raise SystemExit(f"{part} {name}: a result is not finite")
        if part != "mlp":
            continue
        first = first or got
        errors[name] = max(relative_error(a, b) for a, b in zip(got, first, strict=True))
        if errors[name] > 2e-2:
            raise SystemExit(f"{part} {name}: off by {errors[name]:.1e} from the first contender")
    torch.cuda.synchronize()
    return errors


def measure(contenders: dict[str, Contender], rounds: int) -> dict[str, dict[str, float]]:
    """Medians in milliseconds, and the most memory beyond what stands before, in MiB."""
    import torch

    times: dict[str, list[float]] = {name: [] for name in contenders}
    peaks: dict[str, float] = {}
    for _ in range(rounds):
        for name, run in contenders.items():
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            run()
            start.record()
            for _ in range(5):
                run()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end) / 5)
            peaks[name] = (torch.cuda.max_memory_allocated() - before) / 2**20
    return {name: {"ms": statistics.median(ms), "peak_mib": peaks[name]} for name, ms in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="S1,S3,R1", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--parts", default=",".join(PARTS), help="what to time")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    shapes, parts = args.shapes.split(","), args.parts.split(",")
    for given, known, flag in ((shapes, SHAPES, "--shapes"), (parts, PARTS, "--parts")):
        for name in given:
            if name not in known:
                parser.error(f"{flag} {name}: must be of {', '.join(known)}")
    if os.environ.get("DRY_RUN") == "1":
        print("\n".join(f"{shape} {part} {SHAPES[shape]}" for shape in shapes for part in parts))
        return
    from megablocks.config import TOKEN_ROUNDINGS

    rules = (None, *TOKEN_ROUNDINGS)
    rows = []
    for shape in shapes:
        for part in parts:
            few = (None, "nearest", "down")
            make = {
                "mlp": lambda shape=shape: mlp_contenders(shape),
                "rounding": lambda shape=shape, few=few: layer_contenders(shape, few),
                "router": lambda shape=shape: router_contenders(shape, rules),
            }[part]
            contenders = make()
            errors = gate(part, contenders)
            for name, numbers in measure(contenders, args.rounds).items():
                rows.append({"shape": shape, "part": part, "name": name, **numbers, "error": errors.get(name)})
                print(
                    f"{shape:6} {part:9} {name:22} {numbers['ms']:9.3f} ms {numbers['peak_mib']:9.0f} MiB", flush=True
                )
    if args.out:
        args.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
