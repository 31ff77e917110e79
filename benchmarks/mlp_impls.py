"""The ways of computing experts in whole layers: what decides mlp_impl="auto".

    python benchmarks/mlp_impls.py [--only XS,Medium] [--impls grouped,sparse] [--out FILE.json]

Needs a GPU; DRY_RUN=1 prints the cases. dMoE forward and backward with its load-balancing loss, bf16, random tokens, a
freshly drawn router. All ways compute the same step in one process, in interleaved rounds, called from Python (eager)
and replayed from a CUDA graph. They must agree with the first before a time is printed. `kept` is the memory held
between forward and backward.
"""

from __future__ import annotations

import argparse
import functools
import os
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from measure import Gate, graph_of, interleave, milliseconds, relative_error, write_result


class Case(NamedTuple):
    """T, H, I, E, K as in megablocks.config."""

    name: str
    tokens: int
    hidden: int
    width: int
    experts: int
    top_k: int
    activation: str = "gelu"
    recompute: bool = False
    bias: bool = False


CASES = (
    Case("XS", 65536, 512, 2048, 64, 1),
    Case("XS-recompute", 65536, 512, 2048, 64, 1, recompute=True),
    Case("XS-bias", 65536, 512, 2048, 64, 1, bias=True),
    Case("Small", 32768, 768, 3072, 64, 1),
    Case("Small-bias", 32768, 768, 3072, 64, 1, bias=True),
    Case("Small-glu", 32768, 768, 3072, 64, 1, "swiglu"),
    Case("Medium", 8192, 1024, 4096, 64, 1),
    Case("Medium-bias", 8192, 1024, 4096, 64, 1, bias=True),
    Case("Medium-glu", 8192, 1024, 4096, 64, 1, "swiglu"),
    Case("Medium-4096", 4096, 1024, 4096, 64, 1),
    Case("Medium-2048", 2048, 1024, 4096, 64, 1),
    Case("wide-32", 24576, 1536, 1024, 32, 2, "swiglu"),
    Case("fine-128", 24576, 1536, 256, 128, 8, "swiglu"),
    Case("fine-128-few", 3072, 1536, 256, 128, 8, "swiglu"),
)
IMPLS = ("grouped", "sparse", "scatter", "fused")
ROUNDS, REPEATS = 9, 4
AGREE = 0.01  # relative Frobenius norm of the difference; bf16's rounding leaves 4e-3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="names of cases, comma-separated")
    parser.add_argument("--impls", default=",".join(IMPLS))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    names, impls = options.only, options.impls.split(",")
    cases = [case for case in CASES if not names or case.name in names.split(",")]
    if os.environ.get("DRY_RUN", "0") == "1":
        print(*cases, sep="\n")
        return
    print(f"ms as a graph (eager), kept MB, of {', '.join(impls)}; what auto takes")
    gate, records = Gate(lambda key: True), []
    for case in cases:
        record = measure(case, impls, gate)
        records += [record] if record else []
        if options.out:  # after each, so that a run cut short leaves what it has
            missing = [c.name for c in cases if c.name not in {r["case"] for r in records}]
            write_result(options.out, "mlp_impls", gate=gate, summary={"missing": missing}, records=records)
    gate.report()


def build(case: Case, impl: str) -> Any:
    import torch

    from megablocks import MoEConfig, dMoE

    torch.manual_seed(0)
    config = MoEConfig(
        hidden_size=case.hidden, ffn_hidden_size=case.width, num_experts=case.experts, top_k=case.top_k,
        activation=case.activation, recompute_activation=case.recompute, mlp_bias=case.bias, mlp_impl=impl,
        load_balancing_loss_weight=0.01,
    )  # fmt: skip
    return dMoE(config, device="cuda", dtype=torch.bfloat16, seed=1)


def measure(case: Case, impls: list[str], gate: Gate) -> dict[str, Any] | None:
    """Milliseconds and memory by impl; None where two impls differ."""
    import torch

    x, dy = (torch.randn(case.tokens, case.hidden, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    x.requires_grad_()

    def step_of(layer: Any) -> Callable[[], list[Any]]:
        def step() -> list[Any]:
            y, aux = layer.forward_with_aux(x)
            losses = list(aux.losses.values())
            ones = [torch.ones_like(loss) for loss in losses]
            return [y.detach(), *torch.autograd.grad([y, *losses], [x, *layer.parameters()], [dy, *ones])]

        return step

    timers: dict[str, Callable[[], float]] = {}
    kept, results = {}, {}
    for impl in impls:
        layer = build(case, impl)
        step = step_of(layer)
        results[impl] = step()
        before = torch.cuda.memory_allocated()
        held = layer.forward_with_aux(x)
        kept[impl] = (torch.cuda.memory_allocated() - before) >> 20
        del held
        timers[f"eager/{impl}"] = functools.partial(milliseconds, step, REPEATS)  # keeps what the graph reads
        timers[f"graph/{impl}"] = functools.partial(milliseconds, graph_of(step), REPEATS)
    right = True
    for impl in impls[1:]:
        error = max(relative_error(a, b) for a, b in zip(results[impl], results[impls[0]], strict=True))
        right &= error < AGREE
        key = f"{case.name}/{impl}"
        why = {"bad": key, "why": f"differs from {impls[0]} by {error:.1e}"}
        gate.take({"good": key, "error": error} if error < AGREE else why)
    results.clear()
    if not right:
        return None

    times = interleave(timers, ROUNDS)
    auto = build(case, "auto").experts.mlp_impl_for(case.tokens * case.top_k)
    graph, eager = ({impl: median(times[f"{how}/{impl}"]) for impl in impls} for how in ("graph", "eager"))
    shown = [f"{graph[i]:7.3f} ({eager[i]:7.3f}) {kept[i]:5}" for i in impls]
    print(f"{case.name:14}{'   '.join(shown)}   {auto}", flush=True)
    return {"case": case.name, "auto": auto, "graph_ms": graph, "eager_ms": eager, "kept_mib": kept, "times": times}


if __name__ == "__main__":
    main()
