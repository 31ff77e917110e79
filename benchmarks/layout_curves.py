"""200 training steps of dMoE-XS on two GPUs, by layout, beside one GPU: loss curves, tokens/s and peak memory.

    python benchmarks/layout_curves.py --data FOLDER [--layouts NAME,…] [--steps N] [--out FILE]

A layout sees the sequences of one GPU in the same order, 128 a step, with dropout; the other seed has another order and
another initialization. A layout adds the same numbers in another
order and draws other dropout masks, so its curve is not the same. It must be closer to the curve of one GPU than the
curve of a second seed is: that is the gate. "distance" is the mean absolute difference of the logged losses from step
20 on; one logged loss is the mean of ten steps. Tokens/s is the median of the second half, peak memory the first
rank's. Each run starts as a user starts it. Draws FILE.png beside FILE. FOLDER is made by scripts/prepare_data.py.
DRY_RUN=1 prints the commands.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from children import chosen
from measure import Gate, dry_run, gpu_name, need_gpu, result_path, write_result
from training_step import ROOT, Arm, command_of, run

INTERVAL, FIRST = 10, 20
_FLAGS = f"--micro-batch-size 64 --log-interval {INTERVAL}"
_TENSOR = (
    "--no-moe-expert-model-parallelism --tensor-model-parallel-size 2 --sequence-parallel "
    "--expert-tensor-parallel-size 1 --expert-model-parallel-size 2"
)


def _layout(gpus: int, flags: str = "") -> Arm:
    return Arm("dMoE-XS", "dmoe/dmoe_46m_8gpu.sh", f"{_FLAGS} {flags}".strip(), gpus)


ONE, SEED = "one GPU", "one GPU, another seed"
# The published script spreads the experts over the data-parallel ranks.
LAYOUTS = {
    ONE: _layout(1),
    SEED: _layout(1, "--seed 4321"),
    "DP2": _layout(2, "--no-moe-expert-model-parallelism"),
    "EP2": _layout(2),
    "TP2·SP·EP2": _layout(2, _TENSOR),
    "PP2": _layout(2, "--pipeline-model-parallel-size 2"),
}


class Curve(NamedTuple):
    """steps, losses: as logged, every ten steps. tokens_per_second: median of the second half. peak_gib: of rank 0."""

    steps: list[int]
    losses: list[float]
    tokens_per_second: float
    peak_gib: float


def read_log(text: str, steps: int) -> Curve:
    """Raises ValueError if the log does not end with the last step."""
    from megablocks.monitor.history import parse_log_line

    lines = [parse_log_line(line) for line in text.splitlines() if "elapsed time per iteration" in line]
    if not lines or lines[-1].get("iteration") != steps:
        raise ValueError("the run ended early")
    rates = [float(rate) for rate in re.findall(r"tokens/s: (\d+)", text)]
    peaks = [float(mib) for mib in re.findall(r"max allocated: ([\d.]+)", text)]
    return Curve(
        steps=[int(line["iteration"]) for line in lines],
        losses=[line["lm loss"] for line in lines],
        tokens_per_second=median(rates[len(rates) // 2 :]),
        peak_gib=max(peaks) / 1024,
    )


def distance(curve: Curve, other: Curve) -> float:
    """The mean absolute difference of the losses from step `FIRST` on."""
    pairs = zip(curve.steps, curve.losses, other.losses, strict=True)
    return fmean(abs(a - b) for step, a, b in pairs if step >= FIRST)


def compare(curves: dict[str, Curve], gate: Gate) -> list[dict[str, Any]]:
    """One row a layout, and the gate's verdict: its distance from one GPU, beside that of another seed."""
    bound, rows = distance(curves[SEED], curves[ONE]), []
    for layout, curve in curves.items():
        off = distance(curve, curves[ONE])
        if layout not in (ONE, SEED):
            why = f"its losses are {off:.4f} from one GPU's, those of another seed {bound:.4f}"
            gate.take({"good": layout, "error": off} if off < bound else {"bad": layout, "why": why})
        rows.append({"layout": layout, "distance": off, "tokens_per_second": curve.tokens_per_second,
                     "peak_gib": curve.peak_gib, "loss": curve.losses[-1]})  # fmt: skip
    return rows


def draw(curves: dict[str, Curve], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    for layout, curve in curves.items():
        style = {"color": "0.5", "linestyle": "--"} if layout == SEED else {}
        left.plot(curve.steps, curve.losses, label=layout, **style)
        off = [a - b for a, b in zip(curve.losses, curves[ONE].losses, strict=True)]
        right.plot(curve.steps, off, label=layout, **style)
    left.set(xlabel="step", ylabel="training loss")
    right.set(xlabel="step", ylabel="training loss less that of one GPU")
    left.legend()
    figure.savefig(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=ROOT / "data/stdlib")
    parser.add_argument(
        "--layouts", default="", help=f"beside the two of one GPU; default: all of {', '.join(LAYOUTS)}"
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    layouts = list(dict.fromkeys([ONE, SEED, *chosen(parser, "--layouts", options.layouts, LAYOUTS)]))
    if dry_run():
        for layout in layouts:
            arm = LAYOUTS[layout]
            command, variables = command_of(arm, ROOT, options.data, Path("FOLDER"), options.steps)
            print(f"{layout}: NGPU={variables['NGPU']} FLAGS='{variables['FLAGS']}' {' '.join(command)}")
        return 0
    need_gpu()
    curves = {}
    for layout in layouts:
        text = run(LAYOUTS[layout], ROOT, options.data, options.steps)
        curves[layout] = one = read_log(text, options.steps)
        print(f"{layout}: loss {one.losses[-1]:.4f}, {one.tokens_per_second:,.0f} tokens/s, {one.peak_gib:.1f} GiB, "
              f"{distance(one, curves[ONE]):.4f} from one GPU", flush=True)  # fmt: skip
    gate = Gate(ours=lambda _: True)
    rows = compare(curves, gate)
    out = options.out or result_path("layout_curves", gpu_name())
    records = [{"layout": name, **curve._asdict()} for name, curve in curves.items()]
    write_result(out, "layout_curves", gate=gate, summary={"layouts": rows}, records=records)
    draw(curves, out.with_suffix(".png"))
    gate.report()
    print(out)
    return 0 if gate.green else 1


if __name__ == "__main__":
    sys.exit(main())
