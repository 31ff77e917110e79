"""What a dMoE layer costs on the CPU path: forward + backward must grow linearly in tokens and hardly with experts.

    python benchmarks/layer_cost.py [--out DIR] [--repeats N] [--check]

Two sweeps at fixed top-k: tokens at 8 experts, and 8 to 64 experts at a number of tokens that leaves 64 rows or more an
expert. The time is CPU time of one thread, the best of the repeats, so that other work on the machine adds little. The
optimizer's step, whose cost is the number of parameters, is reported apart. Writes layer_cost.json and layer_cost.png.

--check ends with 1 unless  time(T) ∝ T^s with s <= 1.15  and  time(64 experts) <= 1.5 · time(8 experts).
DRY_RUN=1 prints the cases alone.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from measure import dry_run

TOP_K, HIDDEN, WIDTH = 2, 256, 512
TOKENS = (512, 1024, 2048, 4096)
EXPERTS = (8, 16, 32, 64)
MAX_SLOPE, MAX_RATIO = 1.15, 1.5


@dataclass
class Row:
    """One case; times in milliseconds."""

    sweep: str
    tokens: int
    experts: int
    forward_backward: float = math.nan
    optimizer: float = math.nan

    @property
    def rows_per_expert(self) -> int:
        return self.tokens * TOP_K // self.experts


def cases() -> list[Row]:
    fixed = 64 * max(EXPERTS) // TOP_K
    return [Row("tokens", t, EXPERTS[0]) for t in TOKENS] + [Row("experts", fixed, e) for e in EXPERTS]


def best(run: Callable[[], object], repeats: int) -> float:
    """Least CPU time of one run, in milliseconds, after one to warm up."""
    run()
    times = []
    for _ in range(repeats):
        start = time.process_time()
        run()
        times.append(time.process_time() - start)
    return min(times) * 1e3


def measure(row: Row, repeats: int) -> None:
    import torch

    from megablocks import MoEConfig, dMoE

    torch.manual_seed(0)
    config = MoEConfig(
        hidden_size=HIDDEN, ffn_hidden_size=WIDTH, num_experts=row.experts, top_k=TOP_K, load_balancing_loss_weight=0.01
    )
    layer = dMoE(config, seed=0)
    x = torch.randn(row.tokens, HIDDEN, requires_grad=True)
    dy = torch.randn(row.tokens, HIDDEN)

    # Red gate, no numbers: the float32 loop over experts must give the same output.
    reference = dMoE(config.replace(mlp_impl="reference"), seed=0)
    reference.load_state_dict(layer.state_dict())
    with torch.no_grad():
        expected, actual = reference.forward_with_aux(x)[0], layer.forward_with_aux(x)[0]
    error = float((actual - expected).norm() / expected.norm())
    if not error < 1e-5:
        raise SystemExit(f"layer_cost: wrong output at {row.tokens} tokens, {row.experts} experts: error {error:.1e}")

    def step() -> None:
        layer.zero_grad(set_to_none=True)
        x.grad = None
        y, aux = layer.forward_with_aux(x)
        torch.autograd.backward([y, *aux.losses.values()], [dy, *(torch.ones(()) for _ in aux.losses)])

    row.forward_backward = best(step, repeats)
    optimizer = torch.optim.AdamW(layer.parameters())
    row.optimizer = best(optimizer.step, repeats)


def slope(points: list[tuple[int, float]]) -> float:
    """Exponent s of the least-squares fit time = c · n^s."""
    logs = [(math.log(n), math.log(t)) for n, t in points]
    mean_x, mean_y = (sum(column) / len(logs) for column in zip(*logs, strict=True))
    return sum((x - mean_x) * (y - mean_y) for x, y in logs) / sum((x - mean_x) ** 2 for x, _ in logs)


def plot(rows: list[Row], path: Path) -> bool:
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.5))
    for axis, sweep in zip(axes, ("tokens", "experts"), strict=True):
        swept = [row for row in rows if row.sweep == sweep]
        sizes = [getattr(row, sweep) for row in swept]
        axis.plot(sizes, [row.forward_backward for row in swept], "o-", label="forward + backward")
        axis.plot(sizes, [row.optimizer for row in swept], "s--", label="optimizer step")
        axis.set_xlabel(f"{sweep} ({f'{EXPERTS[0]} experts' if sweep == 'tokens' else f'{swept[0].tokens} tokens'})")
        axis.set_xticks(sizes, [str(size) for size in sizes])
        axis.set_ylim(bottom=0)
        axis.set_ylabel("CPU time (ms)")
        axis.legend()
    figure.suptitle(f"dMoE layer, CPU, hidden {HIDDEN}, expert width {WIDTH}, top-{TOP_K}, float32")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/layer_cost"), help="folder for the results")
    parser.add_argument("--repeats", type=int, default=5, help="timed runs a case, of which the best counts")
    parser.add_argument("--check", action="store_true", help="exit 1 if a bound is violated")
    options = parser.parse_args()
    if options.repeats < 1:
        parser.error(f"--repeats={options.repeats}: must be >= 1")
    rows = cases()
    if dry_run():
        for row in rows:
            print(f"{row.sweep:8} tokens={row.tokens} experts={row.experts} rows_per_expert={row.rows_per_expert}")
        return 0

    import torch

    torch.set_num_threads(1)
    print("sweep     tokens  experts  rows/expert  fwd+bwd ms  us/token  optimizer ms")
    for row in rows:
        measure(row, options.repeats)
        per_token = row.forward_backward * 1e3 / row.tokens
        print(
            f"{row.sweep:8} {row.tokens:7d} {row.experts:8d} {row.rows_per_expert:12d} {row.forward_backward:11.1f} "
            f"{per_token:9.1f} {row.optimizer:13.1f}",
            flush=True,
        )
    exponent = slope([(row.tokens, row.forward_backward) for row in rows if row.sweep == "tokens"])
    by_experts = {row.experts: row.forward_backward for row in rows if row.sweep == "experts"}
    ratio = by_experts[EXPERTS[-1]] / by_experts[EXPERTS[0]]
    holds = exponent <= MAX_SLOPE and ratio <= MAX_RATIO
    print(f"time grows as tokens^{exponent:.2f} (at most {MAX_SLOPE})")
    print(f"time at {EXPERTS[-1]} experts / at {EXPERTS[0]}: {ratio:.2f} (at most {MAX_RATIO})")

    options.out.mkdir(parents=True, exist_ok=True)
    result = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": platform.processor() or platform.machine(),
        "hidden": HIDDEN,
        "width": WIDTH,
        "top_k": TOP_K,
        "token_exponent": exponent,
        "expert_ratio": ratio,
        "holds": holds,
        "rows": [asdict(row) for row in rows],
    }
    path = options.out / "layer_cost.json"
    path.write_text(json.dumps(result, indent=2) + "\n")
    drawn = plot(rows, options.out / "layer_cost.png")
    print(f"wrote {path}" + (" and layer_cost.png" if drawn else "; no picture: matplotlib is not installed"))
    return 0 if holds or not options.check else 1


if __name__ == "__main__":
    sys.exit(main())
