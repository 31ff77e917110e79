"""A dMoE layer with its experts over the GPUs of one host: forward and backward, by dispatcher, and the exchange alone.

    torchrun --nproc-per-node 2 benchmarks/expert_parallel.py [--rounds N] [--cases NAME,…] [--out FILE.json]

Arms: "symmetric", captured in a CUDA graph and eager; "all_to_all" over NCCL, eager, because it reads sizes on the
host; "one GPU" with all experts and the same number of tokens, eager, while the other GPUs do the same. The arms run in
turn. An arm's time is the slowest rank's; a round begins with a barrier. TFLOP/s is for each GPU and counts the
experts' products only; the times include the router. Backward is the whole step less the forward pass.

The gate: y, dx and the gradients of w1 and the router by "symmetric" against "all_to_all". DRY_RUN=1 prints the cases.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from children import chosen as pick
from measure import TOLERANCE, Gate, dry_run, environment, interleave, need_gpu, relative_error, result_path
from measure import write_result as write


class Case(NamedTuple):
    """T tokens of a rank, H, I, E in all, K. alone: only the exchange, without experts."""

    tokens: int
    hidden: int
    width: int
    experts: int
    top_k: int
    alone: bool = False


CASES = {
    "Qwen3-30B": Case(8192, 2048, 768, 128, 8),
    "Mixtral": Case(8192, 4096, 14336, 8, 2),
    "exchange-top1": Case(4096, 4096, 64, 8, 1, alone=True),
    "exchange-top2": Case(4096, 4096, 64, 8, 2, alone=True),
    "exchange-top8": Case(4096, 4096, 64, 128, 8, alone=True),
}
CALLS = 10


def step_of(layer: Any, x: Any, dy: Any, backward: bool) -> Any:
    for p in (x, *layer.parameters()):
        p.grad = None
    y = layer(x)
    if backward:
        y.backward(dy)
    return y


def timer(fn: Callable[[], object]) -> Callable[[], float]:
    """Milliseconds of a call, of the slowest rank."""
    import torch
    import torch.distributed as dist

    def measure() -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        dist.barrier()
        begin.record()
        for _ in range(CALLS):
            fn()
        end.record()
        end.synchronize()
        slowest = torch.tensor(begin.elapsed_time(end) / CALLS, device="cuda")
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return slowest.item()

    return measure


def graph(fn: Callable[[], object]) -> Callable[[], object]:
    import torch

    for _ in range(2):
        fn()
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured, stream=torch.cuda.current_stream()):
        fn()
    return captured.replay


def layer_case(case: Case, rounds: int, key: str, gate: Gate) -> dict[str, dict[str, float]]:
    """Arm → phase → the median of its rounds in ms."""
    import torch
    import torch.distributed as dist

    from megablocks import MoEConfig, dMoE

    rank, device = dist.get_rank(), torch.device("cuda", torch.cuda.current_device())
    config = MoEConfig(
        hidden_size=case.hidden, ffn_hidden_size=case.width, num_experts=case.experts, top_k=case.top_k,
        activation="swiglu", max_tokens=case.tokens, load_balancing_loss_weight=0.0,
    )  # fmt: skip
    draw = torch.Generator(device).manual_seed(rank)
    x = torch.randn(case.tokens, case.hidden, device=device, dtype=torch.bfloat16, generator=draw).requires_grad_()
    dy = torch.randn(x.shape, device=device, dtype=torch.bfloat16, generator=draw)

    def layer(kind: str, group: Any) -> Any:
        torch.manual_seed(0)  # of the router
        return dMoE(
            config.replace(dispatcher=kind), expert_parallel_group=group, seed=1, device=device, dtype=torch.bfloat16
        )

    layers = {kind: layer(kind, dist.group.WORLD) for kind in ("symmetric", "all_to_all")}
    got = {}
    for kind, module in layers.items():
        y = step_of(module, x, dy, True)
        got[kind] = [
            t.detach().clone()
            for t in (y, x.grad, module.experts.w1.grad, *(p.grad for p in module.router.parameters()))
        ]
    error = max(relative_error(a, b) for a, b in zip(got["symmetric"], got["all_to_all"], strict=True))
    worst = torch.tensor(error, device=device)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    good = worst.item() <= TOLERANCE
    name = f"{key}/symmetric"
    gate.take({"good": name, "error": worst.item()} if good else {"bad": name, "why": f"error {worst.item():.2g}"})
    del got
    layers["one GPU"] = layer("auto", None)
    timers = {}
    for phase, backward in (("forward", False), ("step", True)):
        for kind, module in layers.items():
            timers[f"{kind}, eager/{phase}"] = timer(partial(step_of, module, x, dy, backward))
        timers[f"symmetric, captured/{phase}"] = timer(graph(partial(step_of, layers["symmetric"], x, dy, backward)))
    times = interleave(timers, rounds)
    arms: dict[str, dict[str, float]] = {}
    for timed, values in times.items():
        arm, phase = timed.split("/")
        arms.setdefault(arm, {})[phase] = median(values)
    for phases in arms.values():
        phases["backward"] = phases["step"] - phases["forward"]
    return arms


def exchange_case(case: Case, rounds: int, key: str, gate: Gate) -> dict[str, dict[str, float]]:
    """The two exchanges of a layer whose experts cost nothing."""
    import torch
    import torch.distributed as dist

    from megablocks.moe.symmetric import SymmetricDispatcher
    from megablocks.ops.exchange import to_experts, to_home
    from megablocks.ops.routing.dispatch import make_routing

    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", torch.cuda.current_device())
    draw = torch.Generator(device).manual_seed(rank)
    x = torch.randn(case.tokens, case.hidden, device=device, dtype=torch.bfloat16, generator=draw)
    ids = torch.rand(case.tokens, case.experts, device=device, generator=draw).topk(case.top_k, 1).indices.int()
    routing = make_routing(ids, torch.ones(ids.shape, device=device), case.experts)
    dispatcher = SymmetricDispatcher(dist.group.WORLD, case.experts, max_tokens=case.tokens, strict=True)
    exchange = dispatcher._exchange(x, routing)
    assert exchange is not None
    owners = ids // (case.experts // world)
    sent = sum(int((owners == r).any(1).sum()) for r in range(world) if r != rank) * case.hidden * 2

    def there() -> Any:
        return to_experts(exchange, x, routing.weight.view(ids.shape), ids)

    rows, local_ids, _ = there()

    def back() -> Any:
        return to_home(exchange, rows, local_ids, ids)

    expected = x.float() * sum((owners == r).any(1, keepdim=True).float() for r in range(world))
    error = relative_error(back(), expected)
    gate.take({"good": key, "error": error} if error <= TOLERANCE else {"bad": key, "why": f"error {error:.2g}"})
    # Captured: the launches of a layer's exchanges hide behind its products. One graph of a pair of exchanges.
    names = {"dispatch": there, "combine": back}
    times = interleave({name: timer(graph(fn)) for name, fn in names.items()}, rounds)
    got = {name: median(values) for name, values in times.items()}
    return {"exchange": {**got, "sent_mb": sent / 1e6, **{f"{n}_gb_s": sent / ms / 1e6 for n, ms in got.items()}}}


def tflops(case: Case, phase: str, ms: float) -> float:
    products = {"forward": 3, "backward": 6, "step": 9}[phase]
    return 2 * products * case.tokens * case.top_k * case.hidden * case.width / ms / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    chosen = pick(parser, "--cases", options.cases, CASES)
    if dry_run():
        for name in chosen:
            print(name, CASES[name])
        return
    need_gpu()
    if "LOCAL_RANK" not in os.environ:
        raise SystemExit("expert_parallel.py: start it by torchrun --nproc-per-node 2 benchmarks/expert_parallel.py")
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    torch.cuda.set_stream(torch.cuda.Stream())  # gradients are accumulated on it too, so that a graph can capture them
    gate, records = Gate(ours=lambda key: True), []
    for name in chosen:
        case = CASES[name]
        arms = (exchange_case if case.alone else layer_case)(case, options.rounds, name, gate)
        torch.cuda.empty_cache()
        for arm, figures in arms.items():
            record = {"case": name, **case._asdict(), "arm": arm, "world": dist.get_world_size(), **figures}
            if not case.alone:
                record |= {f"{phase}_tflops": tflops(case, phase, figures[phase]) for phase in ("forward", "backward")}
            records.append(record)
            if dist.get_rank() == 0:
                print(name, arm, {k: round(v, 4) for k, v in record.items() if isinstance(v, float)}, flush=True)
    if dist.get_rank() == 0:
        gate.report()
        path = options.out or result_path("expert_parallel", torch.cuda.get_device_name())
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, "expert_parallel", gate=gate, summary={"rounds": options.rounds}, records=records,
              taken_on=environment())  # fmt: skip
    dist.barrier()
    dist.destroy_process_group()
    sys.exit(0 if gate.green else 1)


if __name__ == "__main__":
    main()
