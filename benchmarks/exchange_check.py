"""What the exchange between two GPUs costs in tests, layers and training steps, beside its variants.

    python benchmarks/exchange_check.py OUT --data FOLDER [--stages tests,train,…] [--before CHECKOUT] [--limit S]

Stages, in this order: "tests" (two GPUs, and simulated ranks on one), "train" (steps of dMoE-Small and of the
fine-grained model on one and on two GPUs), "profile" (the fine-grained model on both ranks), "layer" (Qwen3-30B's),
"mutants" (E2, E4). Each writes its output into OUT as it comes; a stage that fails, or runs out of time, does not stop
the next one.

A variant is a copy of this checkout with a few words changed (VARIANTS), or --before, another checkout. DRY_RUN=1
prints the commands.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import training_step
from measure import dry_run

ROOT = Path(__file__).parents[1]
FOLDERS = ("megablocks", "exp", "scripts", "benchmarks")
VARIANTS: dict[str, dict[str, tuple[str, str]]] = {
    "new": {},
    # combine and an exchange of its sums; all pushes before what reads
    "around": {
        "megablocks/moe/symmetric.py": ("experts.takes_remote(x)", "False"),
        "megablocks/ops/exchange_triton.py": ("LAG = 512", "LAG = 1 << 30"),
    },
    # dX goes home beside dW1 and dV1
    "beside": {"megablocks/ops/fused/remote.py": ("BESIDE_DW = 0", "BESIDE_DW = 22")},
}
"""Variant → file → the words there and what takes their place."""
STAGES = ("tests", "train", "profile", "layer", "mutants")
STEPS, LEFT_OUT = 10, 5
MODELS = {"small": (32, 16), "fine": (16, 8)}
"""Model of training_step.ARMS → micro-batches, the first that fits."""
PROFILE = "--profile --use-pytorch-profiler --profile-step-start 6 --profile-step-end 9 --profile-ranks 0 1"


class Check:
    """Runs commands with a common end of time, and keeps what they print."""

    def __init__(self, out: Path, data: Path, scratch: Path, before: Path | None, limit_s: float) -> None:
        self.out, self.data, self.end = out, data.resolve(), time.monotonic() + limit_s
        self.table: dict[str, Any] = {}
        self.micro = {model: sizes[0] for model, sizes in MODELS.items()}
        self.trees = {"new": ROOT} | ({} if before is None else {"before": before.resolve()})
        for name, changes in VARIANTS.items():
            if changes:
                self.trees[name] = scratch / name
                if not dry_run():
                    _copy(self.trees[name], changes)

    def start(self, name: str, command: Sequence[str], tree: Path, **variables: str) -> subprocess.Popen[bytes] | None:
        path = os.pathsep.join(filter(None, (str(tree), os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": path, **variables}
        if dry_run():
            print(name, *(f"{k}={shlex.quote(v)}" for k, v in variables.items()), shlex.join(command))
            return None
        with open(self.out / f"{name}.log", "wb") as log:
            return subprocess.Popen(
                command, cwd=tree, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    def finish(self, name: str, process: subprocess.Popen[bytes] | None, most_s: float) -> str:
        """What the process printed. It is killed with its children after `most_s`, or at the end of all time."""
        if process is None:
            return ""
        begin, status = time.monotonic(), "killed"
        try:
            status = str(process.wait(max(1.0, min(most_s, self.end - begin))))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGTERM)  # torchrun ends its ranks, which are in groups of their own
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        print(f"{name}: status {status}, waited {time.monotonic() - begin:.0f} s", flush=True)
        return (self.out / f"{name}.log").read_text(errors="replace")

    def call(self, name: str, command: Sequence[str], tree: Path, most_s: float, **variables: str) -> str:
        return self.finish(name, self.start(name, command, tree, **variables), most_s)

    def save(self, key: str, value: Any) -> None:
        self.table[key] = value
        print(f"  {key}: {value}", flush=True)
        if not dry_run():
            (self.out / "table.json").write_text(json.dumps(self.table, indent=1) + "\n")


def _copy(tree: Path, changes: dict[str, tuple[str, str]]) -> None:
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, tree / folder, ignore=shutil.ignore_patterns("__pycache__", "results"))
    shutil.copy(ROOT / "pyproject.toml", tree)
    for name, (old, new) in changes.items():
        text = (tree / name).read_text()
        if old not in text:
            raise SystemExit(f"exchange_check.py: {name} does not contain {old!r}: correct VARIANTS")
        (tree / name).write_text(text.replace(old, new))


def tests(check: Check) -> None:
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--durations=5"]
    chosen = "E2 or E3 or E4 or E6 or captures or fused or half"
    for name in ("tests/moe/test_symmetric.py", "tests/ops/test_exchange.py"):
        text = check.call(f"tests_{Path(name).stem}", [*pytest, name, "-k", chosen], ROOT, 180)
        check.save(name, text.strip().splitlines()[-1] if text.strip() else "nothing")


def _arm(check: Check, model: str, where: str, micro: int, variant: str, gpu: str = "") -> tuple[str, Any]:
    """Start an arm; returns its name and process."""
    arm = training_step.ARMS[f"{model}-{where}"]
    flags = f"{arm.flags} --micro-batch-size {micro} --log-interval 1"
    name = f"train_{model}-{where}_{variant}_{micro}"
    tree = check.trees[variant]
    folder = _folder(check, name)
    command, variables = training_step.command_of(arm._replace(flags=flags), tree, check.data, folder, STEPS)
    if gpu:
        variables["CUDA_VISIBLE_DEVICES"] = gpu
    variables["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    return name, check.start(name, command, tree, **variables)


def _folder(check: Check, name: str) -> Path:
    return check.out / "runs" / f"{name}-{os.getpid()}"


def fuller_half(load: Path) -> float | None:
    """Rows of the rank with more of them over the mean, of two ranks, mean over the layers; from expert_load.csv."""
    if not load.exists():
        return None
    layers: dict[str, list[float]] = {}
    with open(load, newline="") as file:
        for row in csv.DictReader(file):
            layers.setdefault(row["layer"], []).append(float(row["tokens"]))
    halves = [(sum(rows[: len(rows) // 2]), sum(rows)) for rows in layers.values()]
    return mean(2 * max(first, whole - first) / whole for first, whole in halves)


def _take(check: Check, name: str, process: Any) -> float | None:
    """Tokens/s of a started arm, None if it failed."""
    text = check.finish(name, process, 110)
    try:
        one = training_step.read_log(text, STEPS, LEFT_OUT)
    except ValueError as error:
        why = "out of memory" if "out of memory" in text.lower() else str(error)
        check.save(name, None if dry_run() else why)
        return None
    figures = {"ms": one.ms, "tokens_per_second": one.tokens_per_second, "peak_gib": one.peak_gib, "loss": one.loss}
    check.save(name, {**figures, "fuller_half": fuller_half(_folder(check, name) / "expert_load.csv")})
    return one.tokens_per_second


def train(check: Check) -> None:
    base: dict[str, float | None] = {}
    todo = list(MODELS)
    while todo:  # on one GPU each, side by side; an arm that does not fit again with a smaller micro-batch
        started = {m: _arm(check, m, "1", check.micro[m], "new", str(i)) for i, m in enumerate(todo)}
        base |= {m: _take(check, *one) for m, one in started.items()}
        todo = [m for m in todo if base[m] is None and _smaller(check, m)]
    for variant in ("new", "before" if "before" in check.trees else "around", "beside"):
        for model in reversed(MODELS):
            rate = _take(check, *_arm(check, model, "ep2", check.micro[model], variant))
            if rate is None and variant == "new" and _smaller(check, model):  # both sides again
                base[model] = _take(check, *_arm(check, model, "1", check.micro[model], "new", "0"))
                rate = _take(check, *_arm(check, model, "ep2", check.micro[model], variant))
            one = base[model]
            if rate and one:
                key = f"{model}, {variant}, micro-batch {check.micro[model]}: over one GPU"
                check.save(key, round(rate / one, 3))


def _smaller(check: Check, model: str) -> bool:
    """Take the model's smallest micro-batch from now on. Returns whether that is another one."""
    if dry_run() or check.micro[model] == MODELS[model][-1]:
        return False
    check.micro[model] = MODELS[model][-1]
    return True


def profile(check: Check) -> None:
    arm, folder = training_step.ARMS["fine-ep2"], check.out / "runs" / f"profile-{os.getpid()}"
    flags = f"{arm.flags} --micro-batch-size {check.micro['fine']} --log-interval 1 {PROFILE}"
    command, variables = training_step.command_of(arm._replace(flags=flags), ROOT, check.data, folder, STEPS)
    variables["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    check.call("profile_run", command, ROOT, 150, **variables)
    traces, out = folder / "torch_profile", check.out
    waits = [sys.executable, "benchmarks/exchange_waits.py", str(traces), "--out", str(out / "waits.json")]
    check.save("profile", check.call("profile_waits", waits, ROOT, 120)[-3000:])
    table = [sys.executable, "scripts/profile_step.py", str(out / "profile_rank0"), "--trace"]
    check.call("profile_table", [*table, str(traces / "rank-0.json.gz")], ROOT, 120)


def layer(check: Check) -> None:
    for variant, tree in check.trees.items():
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command += ["benchmarks/expert_parallel.py", "--cases", "Qwen3-30B", "--rounds", "5"]
        command += ["--out", str(check.out / f"layer_{variant}.json")]
        text = check.call(f"layer_{variant}", command, tree, 90)
        check.save(f"layer, {variant}", [line for line in text.splitlines() if line.startswith("Qwen3")])


def mutants(check: Check) -> None:
    text = check.call("mutants", ["bash", "scripts/mutants.sh", "E2", "E4"], ROOT, 200)
    check.save("mutants", text.strip().splitlines()[-3:])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?", default=Path("exchange_check"))
    parser.add_argument("--data", type=Path, default=ROOT / "data/stdlib")
    parser.add_argument("--stages", default=",".join(STAGES))
    parser.add_argument("--before", type=Path)
    parser.add_argument("--limit", type=float, default=560.0, help="seconds for everything")
    options = parser.parse_args()
    options.out = options.out.resolve()
    sys.path.insert(0, str(ROOT))
    if not dry_run():
        options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        check = Check(options.out, options.data, Path(scratch), options.before, options.limit)
        for name in options.stages.split(","):
            begin = time.monotonic()
            if begin > check.end:
                print(f"{name}: no time left")
                continue
            try:
                {"tests": tests, "train": train, "profile": profile, "layer": layer, "mutants": mutants}[name](check)
            except Exception as error:  # the next stage is worth running all the same
                check.save(f"{name} failed", repr(error))
            print(f"stage {name}: {time.monotonic() - begin:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
