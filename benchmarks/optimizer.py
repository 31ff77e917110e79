"""An optimizer step of a dMoE's parameters: one fused pass beside torch's AdamW with its passes around it.

    python benchmarks/optimizer.py [--layers N] [--rounds N]

The parameters of N layers of dMoE-Small: two matrices of 64 experts (64, 768, 3072) a layer, attention, router, norms,
and the embedding of 51,200 tokens. float32 gradients, moments and master weights, bf16 weights of the model.

  fused        ours, as the training driver runs it: the gradient norm on the GPU, then one pass
  norm, step   its two parts
  foreach      as Megatron runs torch's AdamW without Transformer Engine and apex: the norm, which the host reads,
               scaled gradients, AdamW(foreach=True), a copy into each weight of the model
  torch fused  the same with AdamW(fused=True)

Prints the median milliseconds of each, its speed beside foreach, and the share of the bound: 34 bytes a parameter at
4.3 TB/s, of which the norm has 4. First each is compared with float64 on small parameters. DRY_RUN=1 prints the sizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
from measure import Gate, dry_run, interleave, milliseconds, need_gpu, option_parser, relative_error, speed

from megablocks.ops.adam import FusedAdam, Tables, square_sum

HIDDEN, WIDTH, EXPERTS, VOCABULARY = 768, 3072, 64, 51200
BYTES = {"norm": 4, "step": 30}
BYTES_PER_MS = 4.3e9
TOLERANCE = 1e-6
OPTIONS = {"lr": 6e-4, "betas": (0.9, 0.95), "weight_decay": 0.01}
ARMS = ("fused", "foreach", "torch fused")
LIMIT = 1.0


def shapes(layers: int) -> list[tuple[int, ...]]:
    layer: list[tuple[int, ...]] = [(HIDDEN,)] * 4
    layer += [(3 * HIDDEN, HIDDEN), (3 * HIDDEN,), (HIDDEN, HIDDEN), (HIDDEN,), (EXPERTS, HIDDEN)]
    layer += [(EXPERTS, WIDTH, HIDDEN)] * 2
    return [(VOCABULARY, HIDDEN), *layer * layers]


def make(arm: str, masters: list[Any], models: list[Any]) -> dict[str, Callable[[], Any]]:
    """The steps of a candidate by name. The candidates share parameters and gradients, and have their own moments."""
    device = masters[0].device
    if arm == "fused":
        ours, tables = FusedAdam(masters, decoupled_weight_decay=True, **OPTIONS), Tables()
        ours.copies = dict(zip(masters, models, strict=True))

        def norm() -> Any:
            return square_sum([p.grad for p in masters], device, tables).sqrt()

        def fused() -> None:
            factor = LIMIT / (norm() + 1e-6)
            ours.grad_scale = torch.where(factor < 1, factor, 1.0).float()
            ours.step()

        return {"fused": fused, "norm": norm, "step": ours.step}

    torchs = torch.optim.AdamW(masters, foreach=arm == "foreach", fused=arm == "torch fused", **OPTIONS)

    @torch.no_grad()
    def step() -> None:
        grads = [p.grad for p in masters]
        factor = LIMIT / (float(torch.nn.utils.get_total_norm(grads, foreach=True)) + 1e-6)
        torch._foreach_mul_(grads, min(1.0, factor))  # Megatron leaves it out where the norm is below the limit
        torchs.step()
        for p, model in zip(masters, models, strict=True):
            model.copy_(p)

    return {arm: step}


def check(gate: Gate) -> None:
    """Compare three steps of each candidate with AdamW in float64."""
    for arm in ARMS:
        generator = torch.Generator("cuda").manual_seed(0)
        masters = [torch.randn(n, device="cuda", generator=generator) for n in (1, 13, 4096, 1_000_003)]
        models = [torch.empty_like(p, dtype=torch.bfloat16) for p in masters]
        wanted = [p.double() for p in masters]
        exact = torch.optim.AdamW(wanted, **OPTIONS)
        run = make(arm, masters, models)[arm]
        for _ in range(3):
            for p, want in zip(masters, wanted, strict=True):
                p.grad = torch.randn(p.shape, device="cuda", generator=generator)
                want.grad = p.grad.double()
            norm = math.sqrt(sum(float(want.grad.square().sum()) for want in wanted))
            for want in wanted:
                want.grad *= min(1.0, LIMIT / (norm + 1e-6))
            run()
            exact.step()
        error = max(relative_error(p.double(), want) for p, want in zip(masters, wanted, strict=True))
        copied = all(torch.equal(model, p.bfloat16()) for p, model in zip(masters, models, strict=True))
        gate.judge(arm, error if copied else math.inf, TOLERANCE, f"{error:.1e}, copied: {copied}")


def main() -> int:
    parser = option_parser(__doc__)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    sizes = shapes(options.layers)
    count = sum(math.prod(shape) for shape in sizes)
    bound = {name: count * size / BYTES_PER_MS for name, size in BYTES.items()}
    print(f"{len(sizes)} tensors, {count / 1e9:.2f} G parameters; bound {sum(bound.values()):.2f} ms at 4.3 TB/s")
    if dry_run():
        return 0
    need_gpu()
    gate = Gate(ours=lambda key: key == "fused")
    check(gate)
    if not gate.report():
        return 1
    masters = [torch.randn(shape, device="cuda") * 0.02 for shape in sizes]
    models = [p.bfloat16() for p in masters]
    for p in masters:
        p.grad = torch.randn_like(p) * 1e-3
    runs: dict[str, Callable[[], Any]] = {}
    for arm in ARMS:
        runs |= make(arm, masters, models)
    times = interleave({name: partial(milliseconds, run, 3) for name, run in runs.items()}, options.rounds, warm_up=3)
    for name, measured in times.items():
        least = bound.get(name, sum(bound.values()))
        beside = f"  {speed(times, name, 'foreach'):5.2f} x foreach" if name in ARMS else ""
        print(f"{name:12} {median(measured):8.2f} ms  {least / median(measured):6.1%} of the bound{beside}")
    print(f"peak memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
