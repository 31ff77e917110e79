"""Training steps of whole experiments on one or two GPUs: tokens/s, MFU and peak memory of each arm.

    python benchmarks/training_step.py --data FOLDER [--arms NAME,…] [--rounds N] [--before CHECKOUT] [--out FILE]

An arm is a script of exp/ with flags and a micro-batch size; a step has 131,072 tokens, of the fine-grained model
262,144. Arms on two GPUs run only where --arms names them; they have as many tokens a GPU as their arm on one. Each
round starts every arm once, as a user does, for 30 steps of which the first 15 do not count. An arm's time is the
median of its rounds. "plain" arms leave out what the driver does by default on a GPU: fused loss, optimizer, norms,
rotary embedding and bias, and gradients that are accumulated in the products. --before also starts the published
scripts of another checkout, with their own defaults.

The gate: the arms of one model have seen the same data, so their losses at the last step differ by at most 2 %.
FOLDER is made by scripts/prepare_data.py. DRY_RUN=1 prints the arms.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from children import chosen
from measure import Gate, dry_run, gpu_name, need_gpu, result_path, write_result

ROOT = Path(__file__).parents[1]
STEPS, INTERVAL, LEFT_OUT = 30, 5, 15
TOLERANCE = 0.02
PLAIN = (
    "--no-megablocks-fused-loss --no-megablocks-fused-optimizer --megablocks-norm torch --megablocks-qkv-bias megatron "
    "--megablocks-rope megatron --no-megablocks-gradient-accumulation-fusion"
)


class Arm(NamedTuple):
    """model: arms of one model are compared. script: below exp/. flags: of the driver. gpus: of the run.

    arguments: of the script, behind EXP_DIR and STEPS.
    """

    model: str
    script: str
    flags: str
    gpus: int = 1
    arguments: tuple[str, ...] = ()


ARMS = {
    "dmoe-small": Arm("dMoE-Small", "dmoe/dmoe_125m_8gpu.sh", "--micro-batch-size 128"),
    "dmoe-small-64": Arm("dMoE-Small", "dmoe/dmoe_125m_8gpu.sh", "--micro-batch-size 64"),
    "dmoe-small-32": Arm("dMoE-Small", "dmoe/dmoe_125m_8gpu.sh", "--micro-batch-size 32"),
    "dmoe-small-plain": Arm("dMoE-Small", "dmoe/dmoe_125m_8gpu.sh", f"--micro-batch-size 32 {PLAIN}"),
    "dmoe-small-megatron": Arm(
        "dMoE-Small", "dmoe/dmoe_125m_8gpu.sh", "--micro-batch-size 32 --megablocks-layer megatron"
    ),
    "dense-small": Arm("dense Small", "gpt2/gpt2_125m_8gpu.sh", "--micro-batch-size 64"),
    "dense-small-plain": Arm("dense Small", "gpt2/gpt2_125m_8gpu.sh", f"--micro-batch-size 32 {PLAIN}"),
    "dmoe-xs": Arm("dMoE-XS", "dmoe/dmoe_46m_8gpu.sh", "--micro-batch-size 128"),
    "dense-xs": Arm("dense XS", "gpt2/gpt2_46m_8gpu.sh", "--micro-batch-size 128"),
    "dmoe-fine": Arm("fine-grained dMoE", "dmoe/dmoe_fine_1gpu.sh", "--global-batch-size 64 --micro-batch-size 8"),
    "dmoe-fine-megatron-rope": Arm(
        "fine-grained dMoE", "dmoe/dmoe_fine_1gpu.sh",
        "--global-batch-size 64 --micro-batch-size 8 --megablocks-rope megatron",
    ),
}  # fmt: skip
# A GPU has 64 sequences of dMoE-Small and of the fine-grained model, 32 of the model of 8 layers. Losses differ,
# because two GPUs see more data.
_SMALL = "--micro-batch-size 64 --global-batch-size {}"
_EIGHT = "--num-layers 8 --micro-batch-size 32 --global-batch-size {}"
_FINE = "--micro-batch-size 16 --global-batch-size {}"
_SIXTEEN_EXPERTS = ("16", "2")
ARMS |= {
    "small-1": Arm("dMoE-Small, 1 GPU", "dmoe/dmoe_125m_8gpu.sh", _SMALL.format(64)),
    "small-ep2": Arm("dMoE-Small, 2 GPUs", "dmoe/dmoe_125m_8gpu.sh", _SMALL.format(128), 2),
    "small-ep2-all-to-all": Arm(
        "dMoE-Small, 2 GPUs", "dmoe/dmoe_125m_8gpu.sh", _SMALL.format(128) + " --megablocks-dispatcher all_to_all", 2
    ),
    "fine-1": Arm("fine-grained dMoE, 1 GPU", "dmoe/dmoe_fine_1gpu.sh", _FINE.format(64)),
    "fine-ep2": Arm("fine-grained dMoE, 2 GPUs", "dmoe/dmoe_fine_1gpu.sh", _FINE.format(128), 2),
    "eight-1": Arm("8 layers, 1 GPU", "dmoe/dmoe_46m_8gpu.sh", _EIGHT.format(32), 1, _SIXTEEN_EXPERTS),
    "eight-ep2": Arm("8 layers, 2 GPUs", "dmoe/dmoe_46m_8gpu.sh", _EIGHT.format(64), 2, _SIXTEEN_EXPERTS),
    "eight-dp2": Arm(
        "8 layers, 2 GPUs", "dmoe/dmoe_46m_8gpu.sh", _EIGHT.format(64) + " --no-moe-expert-model-parallelism", 2,
        _SIXTEEN_EXPERTS,
    ),
}  # fmt: skip
BEFORE = {
    f"{name}-before": ARMS[name]._replace(flags="--micro-batch-size 32") for name in ("dmoe-small", "dense-small")
}


class Measured(NamedTuple):
    """One run of an arm. ms: a step. peak_gib: largest memory that torch had allocated. first_s: the first step."""

    ms: float
    tokens_per_second: float
    mfu: float | None
    peak_gib: float
    first_s: float
    loss: float


def command_of(
    arm: Arm, checkout: Path, data: Path, folder: Path, steps: int = STEPS
) -> tuple[list[str], dict[str, str]]:
    """The command of a run and what it adds to the environment."""
    flags = f"--global-batch-size 128 --log-interval {INTERVAL} --eval-iters 0 --save= {arm.flags}"
    command = ["bash", str(checkout / "exp" / arm.script), str(folder), str(steps), *arm.arguments]
    return command, {"NGPU": str(arm.gpus), "PYTHON": sys.executable, "DATA_PREFIX": str(data), "FLAGS": flags}


def read_log(text: str) -> Measured:
    """Raises ValueError if the log does not end with the last step."""
    from megablocks.monitor.history import parse_log_line

    lines = [parse_log_line(line) for line in text.splitlines() if "elapsed time per iteration" in line]
    if not lines or lines[-1].get("iteration") != STEPS:
        raise ValueError("the run ended early")
    counted = [line for line in lines if line["iteration"] > LEFT_OUT]
    rates = [float(rate) for rate in re.findall(r"tokens/s: (\d+)", text)][-len(counted) :]
    shares = [float(share) / 100 for share in re.findall(r"MFU: ([\d.]+)%", text)][-len(counted) :]
    peaks = [float(mib) for mib in re.findall(r"max allocated: ([\d.]+)", text)]
    name = "elapsed time per iteration (ms)"
    return Measured(
        ms=median(line[name] for line in counted),
        tokens_per_second=median(rates),
        mfu=median(shares) if shares else None,
        peak_gib=max(peaks) / 1024,
        first_s=lines[0][name] / 1000,
        loss=lines[-1]["lm loss"],
    )


def run(arm: Arm, checkout: Path, data: Path, steps: int = STEPS) -> str:
    """What a run prints. Ends the program with the run's last line if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        command, variables = command_of(arm, checkout, data, Path(folder) / "run", steps)
        done = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{Path(sys.argv[0]).name}: {arm.script} failed: {done.stderr.strip().splitlines()[-1]}")
    return done.stdout


def summarize(runs: dict[str, list[Measured]], arms: dict[str, Arm], gate: Gate) -> list[dict[str, Any]]:
    """One row an arm, and the gate's verdict on the losses."""
    rows, first_of = [], {}
    for name, measured in runs.items():
        values = {field: median(getattr(one, field) for one in measured) for field in ("ms", "tokens_per_second")}
        peak, loss = max(one.peak_gib for one in measured), measured[-1].loss
        shares = [one.mfu for one in measured if one.mfu is not None]
        reference = first_of.setdefault(arms[name].model, loss)
        error = abs(loss - reference) / reference
        good = error <= TOLERANCE
        gate.take({"good": name, "error": error} if good else {"bad": name, "why": f"loss {loss} beside {reference}"})
        rows.append({"arm": name, **values, "mfu": median(shares) if shares else None, "peak_gib": peak, "loss": loss})
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=ROOT / "data/stdlib")
    parser.add_argument("--arms", default=",".join(name for name, arm in ARMS.items() if arm.gpus == 1))
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--before", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    arms = {name: ARMS[name] for name in chosen(parser, "--arms", options.arms, ARMS)}
    checkouts = dict.fromkeys(arms, ROOT)
    if options.before is not None:
        arms |= BEFORE
        checkouts |= dict.fromkeys(BEFORE, options.before.resolve())
    if dry_run():
        for name, arm in arms.items():
            command, variables = command_of(arm, checkouts[name], options.data, Path("FOLDER"))
            print(f"{name}: FLAGS='{variables['FLAGS']}' {' '.join(command)}")
        return 0
    need_gpu()
    runs: dict[str, list[Measured]] = {name: [] for name in arms}
    for number in range(options.rounds):
        for name, arm in arms.items():
            runs[name].append(one := read_log(run(arm, checkouts[name], options.data)))
            share = "" if one.mfu is None else f", MFU {one.mfu:.1%}"
            print(f"round {number + 1}: {name}: {one.ms:.1f} ms, {one.tokens_per_second:,.0f} tokens/s{share}, "
                  f"{one.peak_gib:.1f} GiB, first step {one.first_s:.1f} s", flush=True)  # fmt: skip
    gate = Gate(ours=lambda _: True)
    rows = summarize(runs, arms, gate)
    records = [{"arm": name, **one._asdict()} for name, measured in runs.items() for one in measured]
    out = options.out or result_path("training_step", gpu_name())
    write_result(out, "training_step", gate=gate, summary={"arms": rows}, records=records)
    gate.report()
    print(out)
    return 0 if gate.green else 1


if __name__ == "__main__":
    sys.exit(main())
