"""Training steps of whole experiments on one or two GPUs: tokens/s, MFU and peak memory of each arm.

    python benchmarks/training_step.py --data FOLDER [--arms NAME,…] [--rounds N] [--steps N] [--before CHECKOUT]
                                       [--out FILE] [--patience SECONDS]

An arm is a script of exp/ with flags and a micro-batch size; a step has 131,072 tokens, of the fine-grained model
262,144. Arms on two GPUs run only where --arms names them; they have as many tokens a GPU as their arm on one. "larger"
arms are the largest published scripts that fit, and run only where --arms names them. Each round starts every arm once,
as a user does, for --steps steps (30), of which the first half does not count. An arm's time is the median of its
rounds. "plain" arms leave out what the driver does by default on a GPU: fused loss, optimizer, norms, rotary embedding
and bias, and gradients that are accumulated in the products. "graph" arms replay a CUDA graph of the step from the
fourth step on. "balanced" arms route at random, so that every expert has about as many tokens. --before also starts the
published scripts of another checkout, with their own defaults.

"te" arms have Transformer Engine's attention, norms and linear layers; all others have none, installed or not. They
stop where cuDNN refuses the attention, which Transformer Engine would else compute unfused. They run only where --arms
names them, for example with what they are compared with:

    --arms dense-small,dense-small-te,dmoe-small-16,dmoe-small-te,dmoe-small-te-peer

A "te-peer" arm has Megatron's own layer with Transformer Engine's grouped linear layers, fused permutation and router;
"te-adam" Transformer Engine's optimizer; "te-stock" all of that and Megatron's fused cross entropy, nothing of ours.

The gate: the arms of one model have seen the same data, so their losses at the last step differ by at most 2 %. For
this the learning rate is 1e-4: at the published ones other dropout masks move the loss of early steps by 6 %. An arm
that fails, or that takes longer than --patience, is named, and the others go on. The file is written after each run.
FOLDER is made by scripts/prepare_data.py. DRY_RUN=1 prints the arms.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from children import add_names, end_session
from measure import Gate, dry_run, gpu_name, need_gpu, option_parser, result_path, write_result

from megablocks.monitor.history import parse_log_line

ROOT = Path(__file__).parents[1]
STEPS, INTERVAL = 30, 5
TOLERANCE = 0.02
LEARNING_RATE = 1e-4
PLAIN = (
    "--no-megablocks-fused-loss --no-megablocks-fused-optimizer --megablocks-norm torch --megablocks-qkv-bias megatron "
    "--megablocks-rope megatron"
)
NO_SUMS = "--no-megablocks-gradient-accumulation-fusion"  # of the experts; refused for a dense model


class Arm(NamedTuple):
    """model: arms of one model are compared. script: below exp/. flags: of the driver. gpus: of the run.

    arguments: of the script, behind EXP_DIR and STEPS. engine: whether the block is Transformer Engine's.
    """

    model: str
    script: str
    flags: str
    gpus: int = 1
    arguments: tuple[str, ...] = ()
    engine: bool = False


ARMS = {
    "dmoe-small": Arm("dMoE-Small", "dmoe/dmoe_125m_8gpu.sh", "--micro-batch-size 128"),
    "dmoe-small-64": Arm("dMoE-Small", "dmoe/dmoe_125m_8gpu.sh", "--micro-batch-size 64"),
    "dmoe-small-32": Arm("dMoE-Small", "dmoe/dmoe_125m_8gpu.sh", "--micro-batch-size 32"),
    "dmoe-small-plain": Arm("dMoE-Small", "dmoe/dmoe_125m_8gpu.sh", f"--micro-batch-size 32 {PLAIN} {NO_SUMS}"),
    "dmoe-small-16": Arm("dMoE-Small", "dmoe/dmoe_125m_8gpu.sh", "--micro-batch-size 16"),
    "dmoe-small-megatron": Arm(
        "dMoE-Small", "dmoe/dmoe_125m_8gpu.sh", "--micro-batch-size 16 --megablocks-layer megatron"
    ),
    "dense-small": Arm("dense Small", "gpt2/gpt2_125m_8gpu.sh", "--micro-batch-size 64"),
    "dense-small-128": Arm("dense Small", "gpt2/gpt2_125m_8gpu.sh", "--micro-batch-size 128"),
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
LARGER = {
    "larger-dense-760m": Arm("dense 760M", "gpt2/gpt2_760m_8gpu.sh", ""),
    "larger-dense-1315m": Arm("dense 1315M", "gpt2/gpt2_1315m_8gpu.sh", ""),
    "larger-dmoe-medium": Arm("dMoE-Medium", "dmoe/dmoe_356m_8gpu.sh", "--micro-batch-size 8", 2),
    "larger-dmoe-medium-graph": Arm(
        "dMoE-Medium", "dmoe/dmoe_356m_8gpu.sh",
        "--micro-batch-size 8 --megablocks-dispatcher symmetric --cuda-graph-impl full_iteration", 2,
    ),
}  # fmt: skip
ARMS |= LARGER
# 32 sequences of dMoE-Small just fit into 80 GB, where a step then takes nearly twice as long as on an H200.
_PEER = "--megablocks-layer megatron --moe-grouped-gemm --moe-permute-fusion --moe-router-fusion"
_ADAM = "--no-megablocks-fused-optimizer"
_FUSED = "--attention-backend fused"
_STOCK = f"{_ADAM} --no-megablocks-fused-loss --cross-entropy-loss-fusion"
ARMS |= {
    f"{model}-te{suffix}": ARMS[like]._replace(flags=f"{ARMS[like].flags} {_FUSED} {flags}".strip(), engine=True)
    for model, like, suffix, flags in (
        ("dmoe-small", "dmoe-small-16", "", ""),
        ("dmoe-small", "dmoe-small-16", "-adam", _ADAM),
        ("dmoe-small", "dmoe-small-16", "-peer", _PEER),
        ("dmoe-small", "dmoe-small-16", "-stock", f"{_PEER} {_STOCK}"),
        ("dense-small", "dense-small", "", ""),
        ("dense-small", "dense-small", "-adam", _ADAM),
        ("dense-small", "dense-small", "-stock", _STOCK),
    )
}
_GRAPH = " --cuda-graph-impl full_iteration"
ARMS |= {f"{name}-graph": ARMS[name]._replace(flags=ARMS[name].flags + _GRAPH)
         for name in ("eight-1", "dmoe-xs", "dmoe-small-16", "dense-small", "dense-small-128")}  # fmt: skip
for _name in ("fine-1", "fine-ep2"):
    _arm = ARMS[_name]
    _flags = f"{_arm.flags} --moe-router-force-load-balancing"
    ARMS[f"{_name}-balanced"] = _arm._replace(model=f"{_arm.model}, balanced", flags=_flags)
BEFORE = {
    f"{name}-before": ARMS[name]._replace(flags="--micro-batch-size 32") for name in ("dmoe-small", "dense-small")
}


class Measured(NamedTuple):
    """One run of an arm. ms: a step. peak_gib: largest memory that torch had allocated, of rank 0. first_s: the first
    step.
    """

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
    block = "transformer_engine" if arm.engine else "local"
    ours = f"--global-batch-size 128 --log-interval {INTERVAL} --eval-iters 0 --save= --transformer-impl {block}"
    ours += f" --lr {LEARNING_RATE} --min-lr {LEARNING_RATE / 10}"
    ours += f" --log-memory-interval {INTERVAL}"  # else Megatron reads the peak after the first interval alone
    command = ["bash", str(checkout / "exp" / arm.script), str(folder), str(steps), *arm.arguments]
    return command, {
        "NGPU": str(arm.gpus),
        "PYTHON": sys.executable,
        "DATA_PREFIX": str(data),
        "FLAGS": f"{ours} {arm.flags}",
    }


def read_log(text: str, steps: int = STEPS) -> Measured:
    """The second half of a run's steps. Raises ValueError if the log does not end with the last step."""
    lines = [parse_log_line(line) for line in text.splitlines() if "elapsed time per iteration" in line]
    if not lines or lines[-1].get("iteration") != steps:
        raise ValueError("the run ended early")
    counted = [line for line in lines if line["iteration"] - INTERVAL >= steps / 2]
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


def run(arm: Arm, checkout: Path, data: Path, steps: int = STEPS, patience: float | None = None) -> str:
    """What a run prints. Raises SystemExit with the run's last line if it fails or takes longer than the patience."""
    with tempfile.TemporaryDirectory() as folder:
        command, variables = command_of(arm, checkout, data, Path(folder) / "run", steps)
        pipe = subprocess.PIPE
        child = subprocess.Popen(
            command, env={**os.environ, **variables}, stdout=pipe, stderr=pipe, text=True, start_new_session=True
        )
        why = ""
        try:
            said, errors = child.communicate(timeout=patience)
        except BaseException as error:  # Ctrl-C too, which does not reach another session
            end_session(child, signal.SIGTERM, 30)  # at which torchrun ends its ranks, which have sessions of their own
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            why = f"took longer than {patience:.0f} s"
        if child.returncode and not why:
            why = f"failed: {last_line(errors)}"
    if why:
        raise SystemExit(f"{Path(sys.argv[0]).name}: {arm.script} {why}")
    return said


def last_line(errors: str) -> str:
    """The driver's line that says why it stopped, else the last one."""
    lines = errors.strip().splitlines() or ["it said nothing"]
    return next((line for line in reversed(lines) if line.startswith("pretrain_gpt: ")), lines[-1])


def summarize(runs: dict[str, list[Measured]], arms: dict[str, Arm], gate: Gate) -> list[dict[str, Any]]:
    """One row an arm, and the gate's verdict on the losses."""
    rows, first_of = [], {}
    for name, measured in runs.items():
        values = {field: median(getattr(one, field) for one in measured) for field in ("ms", "tokens_per_second")}
        peak, loss = max(one.peak_gib for one in measured), measured[-1].loss
        shares = [one.mfu for one in measured if one.mfu is not None]
        reference = first_of.setdefault(arms[name].model, loss)
        gate.judge(name, abs(loss - reference) / reference, TOLERANCE, f"loss {loss} beside {reference}")
        rows.append({"arm": name, **values, "mfu": median(shares) if shares else None, "peak_gib": peak, "loss": loss})
    return rows


def main() -> int:
    parser = option_parser(__doc__)
    parser.add_argument("--data", type=Path, default=ROOT / "data/stdlib")
    usual = [name for name, arm in ARMS.items() if arm.gpus == 1 and not arm.engine and name not in LARGER]
    add_names(parser, "--arms", ARMS, ",".join(usual))
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=STEPS, help=f"of a run, a multiple of {INTERVAL}")
    parser.add_argument("--before", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--patience", type=float, help="seconds that a run may take")
    options = parser.parse_args()
    if options.steps < 2 * INTERVAL or options.steps % INTERVAL:
        parser.error(f"--steps is {options.steps}, but must be a multiple of {INTERVAL} and at least {2 * INTERVAL}")
    arms = {name: ARMS[name] for name in options.arms}
    checkouts = dict.fromkeys(arms, ROOT)
    if options.before is not None:
        arms |= BEFORE
        checkouts |= dict.fromkeys(BEFORE, options.before.resolve())
    if dry_run():
        for name, arm in arms.items():
            command, variables = command_of(arm, checkouts[name], options.data, Path("FOLDER"), options.steps)
            print(f"{name}: FLAGS='{variables['FLAGS']}' {' '.join(command)}")
        return 0
    need_gpu()
    out = options.out or result_path("training_step", gpu_name())
    runs: dict[str, list[Measured]] = {}
    failed: dict[str, str] = {}
    gate = Gate(ours=lambda _: True)
    for number in range(options.rounds):
        for name, arm in arms.items():
            if name in failed:
                continue
            try:
                one = read_log(run(arm, checkouts[name], options.data, options.steps, options.patience), options.steps)
            except (SystemExit, ValueError) as error:
                failed[name] = str(error)
                print(f"round {number + 1}: {name}: {error}", flush=True)
            else:
                runs.setdefault(name, []).append(one)
                share = "" if one.mfu is None else f", MFU {one.mfu:.1%}"
                print(
                    f"round {number + 1}: {name}: {one.ms:.1f} ms, {one.tokens_per_second:,.0f} tokens/s{share}, "
                    f"{one.peak_gib:.1f} GiB, first step {one.first_s:.1f} s, loss {one.loss:.4f}",
                    flush=True,
                )
            gate = Gate(ours=lambda _: True)
            rows = summarize(runs, arms, gate)
            for bad, why in failed.items():
                gate.take({"bad": bad, "why": why})
            records = [{"arm": arm_name, **each._asdict()} for arm_name, measured in runs.items() for each in measured]
            write_result(out, "training_step", gate=gate, summary={"arms": rows}, records=records)
    gate.report()
    print(out)
    return 0 if gate.green else 1


if __name__ == "__main__":
    sys.exit(main())
