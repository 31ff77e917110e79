"""Run folders of a small comparison with known figures, as `exp/paper/compare.sh` leaves them."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import paper_results
from measure import one_a_line
from paper_arms import ARMS, MODELS, Schedule, Settings, launch_of

from megablocks.files import write_durably
from megablocks.monitor.history import History

STEPS, BATCH, EVERY = 20, 8, 5
FINAL = {"dense": 4.0, "dmoe": 3.5, "capacity-1": 3.8}
"""Loss of the last step, of the first seed; each seed is 0.02 above the one before it."""
ENVIRONMENT = (
    "torch: 2.13.0\ntorch CUDA: 13.0\ntriton: 3.7.1\nmegatron-core: 0.19.2\ntransformer-engine: not installed\n"
    "apex: not installed\ntutel: not installed\npython: 3.12.1\ncommit: abc\n"
)


def write_run(folder: Path, arm: str, seed: int, settings: Settings, final: float) -> None:
    """A finished run at 1000 tokens/s, whose first step compiled; every tenth pair of an arm with a capacity drops."""
    model, history = MODELS[settings.model], History(folder)
    tokens_a_step = BATCH * model.sequence
    for i in (1, *range(EVERY, STEPS + 1, EVERY)):
        row = {"tokens": i * tokens_a_step, "train_loss": final, "tokens_per_second": 1000.0 if i > 1 else 1.0}
        if top_k := ARMS[arm].top_k:
            share = 0.1 if arm.startswith("capacity") else 0.0
            dropped = share * i * tokens_a_step * top_k * model.layers
            row |= {"expert_load_max_over_mean": 2.0, "empty_experts": 0, "tokens_dropped": dropped}
        if i > 1:
            row["validation_loss"] = final + (STEPS - i) * 0.1
        history.add(i, row)
    history.save()
    schedule = Schedule(STEPS, BATCH, EVERY, EVERY, 1, 0)
    facts = {
        "launch": launch_of(settings, arm, schedule, folder, seed=seed, micro_batch=8).portable(folder),
        "arm": arm, "seed": seed, "steps": STEPS, "batch": BATCH, "micro_batch": 8,
        "learning_rate": 6e-4, "wall_s": 1.0,
    }  # fmt: skip
    log = "[before the start of training step] datetime: now\n iteration        1/      20 | elapsed time per iteration"
    write_durably(folder / "train.log", log + "\n")
    write_durably(folder / "env.txt", ENVIRONMENT)
    write_durably(folder / "done.json", json.dumps(facts))


def stop_run(folder: Path, at: int) -> None:
    """Make of a finished run one that stopped at the logged step `at`."""
    done = folder / "done.json"
    flags = next(word for word in shlex.split(json.loads(done.read_text())["launch"]) if word.startswith("FLAGS="))
    (folder / "command.txt").write_text(shlex.join(["-m", "driver", *flags.removeprefix("FLAGS=").split()]))
    done.unlink()
    history = History.of_run(folder)
    history.rows = {i: row for i, row in history.rows.items() if i <= at}
    history.save()


def write_runs(out: Path, *, model: str = "toy", seeds: int = 2) -> dict[str, Any]:
    """Runs of dense, dMoE and capacity 1 in `out`, and their record, which is returned."""
    variables = {"BUDGET": "10k", "ARMS": ",".join(FINAL), "SEEDS": str(seeds), "BATCH": "8", "MICRO_BATCH": "8"}
    settings = Settings.from_environment(model, variables, data="0" * 64, commit="abc")
    for arm, final in FINAL.items():
        for n, seed in enumerate(settings.seeds_of(arm)):
            write_run(out / "runs" / arm / str(seed), arm, seed, settings, final + 0.02 * n)
    record = paper_results.record_of(out, settings, {}, {})
    write_durably(out / "record.json", one_a_line(record, "runs"))
    write_durably(out / "settings.json", json.dumps(settings.to_dict()))
    return record
