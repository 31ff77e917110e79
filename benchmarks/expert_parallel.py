"""A dMoE layer with its experts over the GPUs of one host: forward and backward, by dispatcher, and the exchange alone.

    torchrun --nproc-per-node 2 benchmarks/expert_parallel.py [--rounds N] [--cases NAME,…] [--out FILE.json]
    torchrun --nproc-per-node 2 benchmarks/expert_parallel.py --peer NAME [--rows-factor F] [the same]

Arms: "symmetric", captured in a CUDA graph and eager; "all_to_all" over NCCL, eager, because it reads sizes on the
host; "one GPU" with all experts and the same number of tokens, eager, while the other GPUs do the same. The arms run in
turn. An arm's time is the slowest rank's; a round begins with a barrier. TFLOP/s is for each GPU and counts the
experts' products only; the times include the router. Backward is the whole step less the forward pass.

The gate: y, dx and the gradients of w1 and the router by "symmetric" against "all_to_all". DRY_RUN=1 prints the cases.

--peer vdev_2d: only "all_to_all" and torch's own exchange over NVSHMEM (vdev_2d.py), which needs a launch of its own.
--peer liger_cute: only "symmetric" and LigerCute (liger_cute.py). The gate compares y and all gradients. A peer that
fails is left out, and the program still ends with 0.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from children import add_names, option_parser
from measure import TOLERANCE, Gate, dry_run, environment, interleave, need_gpu, relative_error, result_path
from measure import write_result as write

from megablocks import MoEConfig, dMoE
from megablocks.moe.symmetric import SymmetricDispatcher
from megablocks.ops.exchange import to_experts, to_home
from megablocks.ops.permute.rows import combine
from megablocks.ops.routing.dispatch import make_routing


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
DEFAULT = ",".join(CASES)
CASES |= {
    "exchange-fine": Case(65536, 768, 256, 128, 8, alone=True),
    "exchange-Qwen3-30B": Case(8192, 2048, 768, 128, 8, alone=True),
    "exchange-Mixtral": Case(8192, 4096, 14336, 8, 2, alone=True),
    "exchange-Small": Case(65536, 768, 3072, 64, 1, alone=True),
}
CALLS = 10
PEERS = ("vdev_2d", "liger_cute")
PHASES = {"forward": False, "step": True}
"""Whether the phase runs the backward pass."""

Arms = dict[str, dict[str, float]]
"""Arm → phase → the median of its rounds in ms."""


def step_of(layer: Any, x: Any, dy: Any, backward: bool) -> Any:
    for p in (x, *layer.parameters()):
        p.grad = None
    y = layer(x)
    if backward:
        y.backward(dy)
    return y


def timer(fn: Callable[[], object]) -> Callable[[], float]:
    """Milliseconds of a call, of the slowest rank."""

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
    for _ in range(2):
        fn()
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured, stream=torch.cuda.current_stream()):
        fn()
    return captured.replay


def layer_inputs(case: Case) -> tuple[Any, Any]:
    """x and dy (T, H) of this rank."""
    device = torch.device("cuda", torch.cuda.current_device())
    draw = torch.Generator(device).manual_seed(dist.get_rank())
    x = torch.randn(case.tokens, case.hidden, device=device, dtype=torch.bfloat16, generator=draw).requires_grad_()
    return x, torch.randn(x.shape, device=device, dtype=torch.bfloat16, generator=draw)


def layer_of(case: Case, kind: str, group: Any) -> Any:
    """The layer with dispatcher `kind`; all kinds have the same weights."""
    config = MoEConfig(
        hidden_size=case.hidden, ffn_hidden_size=case.width, num_experts=case.experts, top_k=case.top_k,
        activation="swiglu", max_tokens=case.tokens, load_balancing_loss_weight=0.0, dispatcher=kind,
    )  # fmt: skip
    torch.manual_seed(0)  # of the router
    device = torch.device("cuda", torch.cuda.current_device())
    return dMoE(config, expert_parallel_group=group, seed=1, device=device, dtype=torch.bfloat16)


def judge(gate: Gate, key: str, got: list[Any], want: list[Any]) -> bool:
    """Whether all of `got` are right on every rank."""
    worst = torch.tensor(max(relative_error(a, b) for a, b in zip(got, want, strict=True)), device="cuda")
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return gate.judge(key, worst.item(), TOLERANCE)


def fullest_rank(layer: Any, x: Any, case: Case) -> float:
    """Pairs of the fullest rank over the mean of the ranks."""
    world = dist.get_world_size()
    with torch.no_grad():
        rank = layer.router(x).expert.long() // (case.experts // world)
    loads = rank.bincount(minlength=world)
    dist.all_reduce(loads)
    return (loads.max() / loads.float().mean()).item()


def times_of(timers: dict[str, Callable[[], float]], rounds: int) -> Arms:
    """Of timers with keys ARM/PHASE."""
    arms: Arms = {}
    for timed, values in interleave(timers, rounds).items():
        arm, phase = timed.split("/")
        arms.setdefault(arm, {})[phase] = median(values)
    for phases in arms.values():
        if "step" in phases:
            phases["backward"] = phases["step"] - phases["forward"]
    return arms


def layer_case(case: Case, rounds: int, key: str, gate: Gate) -> Iterator[Arms]:
    x, dy = layer_inputs(case)
    layers = {kind: layer_of(case, kind, dist.group.WORLD) for kind in ("symmetric", "all_to_all")}
    got = {}
    for kind, module in layers.items():
        y = step_of(module, x, dy, True)
        got[kind] = [
            t.detach().clone()
            for t in (y, x.grad, module.experts.w1.grad, *(p.grad for p in module.router.parameters()))
        ]
    judge(gate, f"{key}/symmetric", got["symmetric"], got["all_to_all"])
    del got
    load = fullest_rank(layers["symmetric"], x, case)
    layers["one GPU"] = layer_of(case, "auto", None)
    timers = {}
    for phase, backward in PHASES.items():
        for kind, module in layers.items():
            timers[f"{kind}, eager/{phase}"] = timer(partial(step_of, module, x, dy, backward))
        timers[f"symmetric, captured/{phase}"] = timer(graph(partial(step_of, layers["symmetric"], x, dy, backward)))
    yield {arm: {**figures, "fullest_rank": load} for arm, figures in times_of(timers, rounds).items()}


def exchange_inputs(case: Case) -> tuple[Any, Any]:
    """x (T, H) of this rank and random experts (T, K) int32."""
    device = torch.device("cuda", torch.cuda.current_device())
    draw = torch.Generator(device).manual_seed(dist.get_rank())
    x = torch.randn(case.tokens, case.hidden, device=device, dtype=torch.bfloat16, generator=draw)
    ids = torch.rand(case.tokens, case.experts, device=device, generator=draw).topk(case.top_k, 1).indices.int()
    return x, ids


def with_rates(figures: dict[str, float], sent: float) -> dict[str, float]:
    """The figures (ms), with the bytes that cross the link and their rates."""
    return {**figures, "sent_mb": sent / 1e6, **{f"{n}_gb_s": sent / ms / 1e6 for n, ms in figures.items()}}


def exchange_case(case: Case, rounds: int, key: str, gate: Gate) -> Iterator[Arms]:
    """The two exchanges of a layer whose experts cost nothing; "sums" is the second one with the sums of their rows."""
    rank, world = dist.get_rank(), dist.get_world_size()
    x, ids = exchange_inputs(case)
    routing = make_routing(ids, torch.ones(ids.shape, device=x.device), case.experts)
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

    judge(gate, key, [back()], [x.float() * sum((owners == r).any(1, keepdim=True).float() for r in range(world))])
    dispatch = exchange.dispatch(local_ids)
    of_experts = torch.randn(dispatch.num_rows, case.hidden, device=x.device, dtype=x.dtype)

    def sums() -> Any:
        return exchange.to_home(of_experts, local_ids, ids, None, dispatch)[0]

    judge(gate, f"{key} sums", [sums()], [to_home(exchange, combine(of_experts, None, dispatch), local_ids, ids)])
    # Captured: the launches of a layer's exchanges hide behind its products. One graph of a pair of exchanges.
    names = {"dispatch": there, "combine": back, "sums": sums}
    arms = times_of({f"exchange/{name}": timer(graph(fn)) for name, fn in names.items()}, rounds)
    yield {"exchange": with_rates(arms["exchange"], sent)}


def tflops(case: Case, phase: str, ms: float) -> float:
    products = {"forward": 3, "backward": 6, "step": 9}[phase]
    return 2 * products * case.tokens * case.top_k * case.hidden * case.width / ms / 1e9


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    add_names(parser, "--cases", CASES, DEFAULT)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--peer", choices=PEERS)
    parser.add_argument("--rows-factor", type=float, default=1.25, help="of the peer's buffers, see vdev_2d.py")
    options = parser.parse_args()
    peers = importlib.import_module(options.peer) if options.peer else None
    if dry_run():
        for name in options.cases:
            print(name, CASES[name])
        if peers:
            print(*peers.ARMS, sep="\n")
        return
    need_gpu()
    if "LOCAL_RANK" not in os.environ:
        raise SystemExit("expert_parallel.py: start it by torchrun --nproc-per-node 2 benchmarks/expert_parallel.py")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    torch.cuda.set_stream(torch.cuda.Stream())  # gradients are accumulated on it too, so that a graph can capture them
    of_layer, of_exchange = layer_case, exchange_case
    if peers:
        peer = peers.Peer([CASES[name] for name in options.cases], options.rows_factor)
        of_layer, of_exchange = peer.layer_case, peer.exchange_case
    gate, records, taken_on = Gate(ours=lambda key: not options.peer), [], environment()
    path = options.out or result_path(f"expert_parallel_{options.peer}" if options.peer else "expert_parallel",
                                      torch.cuda.get_device_name())  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)

    def save() -> None:
        if dist.get_rank() == 0:
            write(path, "expert_parallel", gate=gate, summary={"rounds": options.rounds}, records=records,
                  taken_on=taken_on)  # fmt: skip

    for name in options.cases:
        case = CASES[name]
        for arms in (of_exchange if case.alone else of_layer)(case, options.rounds, name, gate):
            for arm, figures in arms.items():
                record = {"case": name, **case._asdict(), "arm": arm, "world": dist.get_world_size(), **figures}
                if not case.alone:
                    record |= {f"{p}_tflops": tflops(case, p, figures[p]) for p in ("forward", "backward")}
                records.append(record)
                if dist.get_rank() == 0:
                    print(name, arm, {k: round(v, 4) for k, v in record.items() if isinstance(v, float)}, flush=True)
            save()  # a later arm that hangs does not lose it
        torch.cuda.empty_cache()
    save()
    if dist.get_rank() == 0:
        gate.report()
    dist.barrier()
    dist.destroy_process_group()
    if options.peer:  # the peer frees its memory by collectives, which ranks that exit one by one would wait for
        sys.stdout.flush()
        os._exit(0)
    sys.exit(0 if gate.green else 1)


if __name__ == "__main__":
    main()
