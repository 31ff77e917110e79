"""Whole layers with each mlp_impl, which is how the choice of mlp_impl="auto" is decided.

    python benchmarks/mlp_impls.py [--only XS,Medium] [--impls grouped,sparse] [--out FILE.json]

dMoE forward and backward with its load-balancing loss, bf16, random tokens and a freshly initialized router. All impls
compute the same step in one process, in interleaved rounds, called from Python (eager) and as a CUDA graph. The output
and the gradients of each, computed in memory that held NaN, are first compared with the loop over experts in float32.
`kept` is the memory held between forward and backward. Needs a GPU. DRY_RUN=1 prints the cases.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from children import add_names, option_parser
from measure import Gate, dry_run, graph_of, interleave, milliseconds, need_gpu, write_result

from megablocks import MoEConfig, dMoE
from megablocks.testing.poison import poisoned_empty
from megablocks.tool.problem import error_of


class Case(NamedTuple):
    """The sizes T, H, I, E, K of megablocks.config, and options of the layer."""

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


def main() -> int:
    parser = option_parser(__doc__)
    add_names(parser, "--only", [case.name for case in CASES], help="names of cases, comma-separated")
    add_names(parser, "--impls", IMPLS)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    cases = [case for case in CASES if case.name in options.only]
    if dry_run():
        print(*cases, sep="\n")
        return 0
    need_gpu()
    torch.backends.cuda.matmul.allow_tf32 = False  # float32 is the reference
    print(f"ms as a graph (eager) and MiB kept, of {', '.join(options.impls)}; the choice of auto")
    gate, records = Gate(lambda key: True), []
    for case in cases:
        record = measure(case, options.impls, gate)
        records += [record] if record else []
        if options.out:  # after each case, so that an interrupted run leaves its results
            missing = [c.name for c in cases if c.name not in {r["case"] for r in records}]
            write_result(options.out, "mlp_impls", gate=gate, summary={"missing": missing}, records=records)
    return 0 if gate.report() else 1


def layer_of(case: Case, impl: str, device: str = "cuda") -> Any:
    """A layer in bf16. The experts of the "reference" have the same weights in float32."""
    torch.manual_seed(0)
    config = MoEConfig(
        hidden_size=case.hidden, ffn_hidden_size=case.width, num_experts=case.experts, top_k=case.top_k,
        activation=case.activation, recompute_activation=case.recompute, mlp_bias=case.bias, mlp_impl=impl,
        load_balancing_loss_weight=0.01,
    )  # fmt: skip
    layer = dMoE(config, device=device, dtype=torch.bfloat16, seed=1)
    if impl == "reference":
        layer.experts.float()
    return layer


def step_of(layer: Any, x: Any, dy: Any) -> Callable[[], dict[str, Any]]:
    """A step of forward and backward of y and the loss. It returns y, dx and the parameters' gradients by name."""
    names, parameters = zip(*layer.named_parameters(), strict=True)

    def step() -> dict[str, Any]:
        y, aux = layer.forward_with_aux(x)
        losses = list(aux.losses.values())
        ones = [torch.ones_like(loss) for loss in losses]
        grads = torch.autograd.grad([y, *losses], [x, *parameters], [dy, *ones])
        return {"y": y.detach(), **dict(zip(("dx", *names), grads, strict=True))}

    return step


def truth_of(case: Case, x: Any, dy: Any) -> dict[str, Any]:
    """The result of `step_of` for the loop over experts in float32. Its router stays in bf16."""
    exact = x.detach().float().requires_grad_()
    return step_of(layer_of(case, "reference", x.device.type), exact, dy.float())()


def measure(case: Case, impls: list[str], gate: Gate) -> dict[str, Any] | None:
    """Milliseconds and memory by impl. None if an impl is wrong or raises; then the gate has its failure."""
    x, dy = (torch.randn(case.tokens, case.hidden, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    x.requires_grad_()
    truth = truth_of(case, x, dy)
    timers: dict[str, Callable[[], float]] = {}
    kept = {}
    for impl in impls:
        key = f"{case.name}/{impl}"
        try:
            layer = layer_of(case, impl)
            step = step_of(layer, x, dy)
            with poisoned_empty():
                gate.take({"good": key, "error": error_of(step(), truth)})
        except Exception as e:  # the other impls and cases still run
            gate.take({"bad": key, "why": f"{type(e).__name__}: {str(e)[-300:]}"})
            continue
        before = torch.cuda.memory_allocated()
        held = layer.forward_with_aux(x)
        kept[impl] = (torch.cuda.memory_allocated() - before) >> 20
        del held
        timers[f"eager/{impl}"] = functools.partial(milliseconds, step, REPEATS)  # keeps the operands of the graph
        timers[f"graph/{impl}"] = functools.partial(milliseconds, graph_of(step), REPEATS)
    del truth
    if len(kept) < len(impls):
        return None

    times = interleave(timers, ROUNDS)
    auto = layer_of(case, "auto").experts.mlp_impl_for()
    graph, eager = ({impl: median(times[f"{how}/{impl}"]) for impl in impls} for how in ("graph", "eager"))
    shown = [f"{graph[i]:7.3f} ({eager[i]:7.3f}) {kept[i]:5}" for i in impls]
    print(f"{case.name:14}{'   '.join(shown)}   {auto}", flush=True)
    return {"case": case.name, "auto": auto, "graph_ms": graph, "eager_ms": eager, "kept_mib": kept, "times": times}


if __name__ == "__main__":
    sys.exit(main())
