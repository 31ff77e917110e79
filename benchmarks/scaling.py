"""Step time of two large models on 8 to 4,096 GPUs, on paper: what takes over, and how far `plan` is from steps.

    python benchmarks/scaling.py [--out FOLDER] [--inputs FILE] [--commands]

FILE, scaling_inputs.json, holds the models, the batch, and the steps that check the prediction, which is that of
`python -m megablocks plan`. "sets" says what of the plan a step was used to fit; such a step checks nothing. Times and
memory are read from a file of results/h200, training_step.json if a step names none, by the names of its arms; of
several runs the median counts. The load of a trained router is that of dmoe_46m/expert_load.csv. --commands prints the
driver's flags of the steps. FOLDER gets scaling.png.

For each number of GPUs the fastest layout is taken that fits into memory with its error bar: pipeline and
expert-parallel size, micro-batch, and what is recomputed. Tensor and context parallelism are 1.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import functools
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

from megablocks.config import ConfigError
from megablocks.monitor.flops import memory_gib
from megablocks.monitor.plots import new_figure, save_figure
from megablocks.tool.memory import GIB, memory
from megablocks.tool.model import Model
from megablocks.tool.step_time import StepTime, step_time

HERE = Path(__file__).parent
RESULTS = HERE / "results/h200"
GPUS = tuple(2**n for n in range(3, 13))
STAGES, RANKS, MICRO_BATCHES = (1, 2, 4, 6, 8, 12), (1, 2, 4, 8, 16, 32, 64), (1, 2, 4, 8)
RECOMPUTED: tuple[dict[str, Any], ...] = ({}, {"recompute_activation": True}, {"recompute_granularity": "full"})
NOTHING = {"recompute_activation": False, "recompute_granularity": None}
GROUPS = {
    "experts": ("experts",),
    "attention and dense": ("attention", "dense products", "norms", "elementwise", "routing", "embedding and loss",
                            "copies"),
    "optimizer": ("optimizer", "gradients"),
    "idle": ("idle", "waiting for other ranks"),
    "recomputing, for memory": (),
    "all-to-all": ("communication: all-to-all of the experts",),
    "imbalance": ("waiting for the fullest rank",),
    "pipeline": ("communication: pipeline bubble", "waiting for the last stage"),
    "gradients over ranks": ("communication: gradients over data-parallel ranks",),
}  # fmt: skip
"""Parts of a step in tables and pictures, and those of `step_time` that each holds."""
LOSSES = ("all-to-all", "imbalance", "pipeline", "gradients over ranks", "memory")
"""What one GPU with enough memory would not pay. memory: the step over that of the best layout if all layouts fit."""
ALLOWED = 0.15
"""How far a measured step that set nothing may be from its prediction."""
SPREAD = 256
"""GPUs at which expert-parallel sizes are compared."""


class Point(NamedTuple):
    """A model in its fastest layout. parts: milliseconds by the names of GROUPS. lost: by those of LOSSES."""

    model: Model
    time: StepTime
    parts: dict[str, float]
    lost: dict[str, float]

    @property
    def limit(self) -> str:
        """The largest loss; "–" if all are below a hundredth of the step."""
        name = max(LOSSES, key=lambda one: self.lost[one])
        return name if self.lost[name] >= 0.01 * self.time.milliseconds else "–"


def read_inputs(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


@functools.cache
def rank_skew(ranks: int) -> float:
    """Rows of the fullest of `ranks` expert-parallel ranks over the mean, for the load of a trained dMoE-XS.

    It has 64 experts; a rank holds neighbors. Mean over its layers.
    """
    loads: dict[str, list[int]] = {}
    with open(RESULTS / "dmoe_46m/expert_load.csv", newline="") as file:
        for row in csv.DictReader(file):
            loads.setdefault(row["layer"], []).append(int(row["tokens"]))
    skews = []
    for load in loads.values():
        size = max(1, len(load) // ranks)
        parts = [sum(load[at : at + size]) for at in range(0, len(load), size)]
        skews.append(max(parts) / mean(parts))
    return mean(skews)


def fits(m: Model, skew: float) -> bool:
    """With the error bar, and with the rows of the fullest rank, `skew` times the mean."""
    found = memory(m)
    by_rows = ("activations: experts", "communication: rows sent and received", "temporary tensors")
    more = (skew - 1) * sum(found.parts.get(name, 0.0) for name in by_rows)
    capacity = memory_gib(m.gpu)
    assert capacity is not None
    return found.needed + found.error_bar * found.peak + more <= capacity * GIB


def layouts(inputs: dict[str, Any], name: str, gpus: int, ranks: Sequence[int]) -> Iterator[Model]:
    fixed = {**inputs["models"][name], "gpus": gpus, "global_batch_size": inputs["scaled"]["sequences"]}
    for pp, ep, size, recomputed in itertools.product(STAGES, ranks, MICRO_BATCHES, RECOMPUTED):
        values = {"pipeline_model_parallel_size": pp, "expert_model_parallel_size": ep, "micro_batch_size": size}
        try:
            yield Model(**{**fixed, **values, **recomputed})
        except ConfigError:  # it does not divide
            continue


def best(
    inputs: dict[str, Any], name: str, gpus: int, ranks: Sequence[int] = RANKS, *, even: bool = False
) -> Point | None:
    """The fastest layout that fits; None if none does. ranks: expert-parallel sizes. even: equal loads."""
    times = []
    for m in layouts(inputs, name, gpus, ranks):
        skew = 1.0 if even else rank_skew(m.expert_model_parallel_size)
        time = step_time(m, skew)
        assert time is not None
        times.append((time.milliseconds, len(times), m, skew, time))
    times.sort()
    found = next((one for one in times if fits(one[2], one[3])), None)
    if found is None:
        return None
    ms, _, m, skew, time = found
    plain = step_time(dataclasses.replace(m, **NOTHING), skew)
    assert plain is not None
    parts = {group: sum(plain.parts.get(part, 0.0) for part in those) for group, those in GROUPS.items()}
    parts["recomputing, for memory"] = ms - plain.milliseconds
    lost = {**parts, "memory": ms - times[0][0]}
    return Point(m, time, parts, {one: lost[one] for one in LOSSES})


def by_ranks(inputs: dict[str, Any], name: str) -> list[Point]:
    """The best layout of each expert-parallel size on SPREAD GPUs."""
    return [one for size in RANKS if (one := best(inputs, name, SPREAD, (size,))) is not None]


class Step(NamedTuple):
    """A step that was measured, or is to be. sets: what it was used to fit. ms, gib: None if not measured."""

    name: str
    model: Model
    time: StepTime
    sets: str
    ms: float | None
    gib: float | None

    @property
    def off(self) -> float | None:
        """Measured over planned time, less 1. The router is fresh, so its load is taken as even."""
        return None if self.ms is None else self.ms / self.time.milliseconds - 1


def runs_of(entry: dict[str, Any]) -> list[dict[str, Any]]:
    """The records of a step's arm."""
    kept = json.loads((RESULTS / f"{entry.get('file', 'training_step')}.json").read_text())["records"]
    return [one for one in kept if one["arm"] == entry["arm"]]


def model_of(inputs: dict[str, Any], entry: dict[str, Any]) -> Model:
    values = {key: value for key, value in entry.items() if key not in ("arm", "file", "model", "sets")}
    return Model(**{**inputs["models"][entry["model"]], **values})


def steps(inputs: dict[str, Any]) -> list[Step]:
    found = []
    for entry in inputs["steps"]:
        m, runs = model_of(inputs, entry), runs_of(entry)
        time = step_time(m)
        assert time is not None
        ms, gib = (median(one[name] for one in runs) if runs else None for name in ("ms", "peak_gib"))
        found.append(Step(entry["model"], m, time, entry.get("sets", ""), ms, gib))
    return found


def driver_flags(m: Model) -> str:
    """The command line of `megablocks.megatron.pretrain_gpt` for this model, without data and run folder."""
    skipped = {"gpus", "gpu", "num_moe_layers", "ffn_hidden_size", "quantize_rematerialize_num_bits", "fused_loss"}
    ours = {"mlp_impl", "recompute_activation", "fused_loss_kept_gib", "dispatcher", "dispatch_rows_factor"}
    words = ["--group-query-attention --disable-bias-linear", f"--max-position-embeddings {m.seq_length}"]
    for one in dataclasses.fields(Model):
        value = getattr(m, one.name)
        if one.name in skipped or value is None or value is False:
            continue
        flag = f"--{'megablocks-' if one.name in ours else ''}{one.name.replace('_', '-')}"
        words.append(flag if value is True else f"{flag} {value}")
    return " ".join(words)


def layout_of(m: Model) -> str:
    kept = "all" if m.recompute_granularity else "activation" if m.recompute_activation else "nothing"
    return f"{m.pipeline_model_parallel_size}, {m.expert_model_parallel_size}, {m.micro_batch_size}, {kept}"


def table(points: Sequence[Point]) -> list[str]:
    """Rows in Markdown."""
    rows = []
    for one in points:
        m, time = one.model, one.time
        of = [f"{one.lost[name] / time.milliseconds:.0%}" for name in LOSSES]
        rows.append(
            f"| {m.gpus:,} | {layout_of(m)} | {time.milliseconds / 1e3:.3g} | {time.tokens_per_second / m.gpus:,.0f} | "
            f"{time.mfu or 0:.0%} | {' | '.join(of)} | {one.limit} |"
        )
    return rows


def check_rows(inputs: dict[str, Any]) -> list[str]:
    """Rows in Markdown: GiB and ms as planned / measured, measured over planned time, and what the step sets."""
    rows = []
    for one in steps(inputs):
        m, gib = one.model, memory(one.model).peak / GIB
        if one.ms is not None:
            said = f" / {one.gib:.1f}" if one.gib else ""
            of = [f"{gib:.1f}{said}", f"{one.time.milliseconds:.0f} / {one.ms:.0f}", f"{one.off + 1:.2f}", one.sets]
        else:
            of = [f"{gib:.1f}", f"{one.time.milliseconds:.0f} / not measured yet", "", ""]
        whole = m.num_layers == inputs["models"][one.name]["num_layers"]
        layers = ("" if whole else f", {m.num_layers} of its layers") + (", CUDA graph" if m.captured else "")
        rows.append(f"| {one.name}{layers} | {m.gpus} | {m.expert_model_parallel_size} | {m.micro_batch_size} | "
                    f"{m.micro_batches} | {' | '.join(of)} |")  # fmt: skip
    return rows


def draw(inputs: dict[str, Any], found: dict[str, list[Point]], path: Path) -> None:
    figure_ = new_figure(5.6 * len(found), 8.4)
    grid = figure_.subplots(2, len(found), squeeze=False)
    for column, (name, points) in enumerate(found.items()):
        top, bottom = grid[0][column], grid[1][column]
        places, base = range(len(points)), [0.0] * len(points)
        colors = ("tab:blue", "lightsteelblue", "tab:gray", "gainsboro", "tab:brown", "tab:orange", "tab:red",
                  "tab:purple", "tab:green")  # fmt: skip
        for (group, _), color in zip(GROUPS.items(), colors, strict=True):
            shares = [one.parts[group] / one.time.milliseconds for one in points]
            top.bar(places, shares, bottom=base, color=color, label=group, width=0.85)
            base = [low + share for low, share in zip(base, shares, strict=True)]
        top.set_xticks(places, [f"{one.model.gpus:,}" for one in points], rotation=45)
        top.set(title=f"{name}: parts of a step", ylim=(0, 1), ylabel="share of the step" if column == 0 else "")
        for label, even in (("trained load", False), ("even load", True)):
            line = [one for gpus in GPUS if (one := best(inputs, name, gpus, even=even)) is not None]
            gpus, rates = zip(*((p.model.gpus, p.time.tokens_per_second / p.model.gpus) for p in line), strict=True)
            bottom.plot(gpus, rates, "o-", markersize=3, label=label)
        bottom.set_xscale("log", base=2)
        bottom.set_xticks(GPUS, [f"{gpus:,}" for gpus in GPUS], rotation=45)
        bottom.set(xlabel="GPUs", ylabel="tokens/s a GPU, predicted" if column == 0 else "", ylim=(0, None))
        bottom.grid(alpha=0.3)
    grid[0][-1].legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    grid[1][-1].legend(fontsize=7)
    save_figure(figure_, path)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=Path, default=HERE / "scaling_inputs.json")
    parser.add_argument("--out", type=Path, help="folder for scaling.png")
    parser.add_argument("--commands", action="store_true", help="print the flags of the steps that check it, and end")
    args = parser.parse_args(argv)
    inputs = read_inputs(args.inputs)
    if args.commands:
        for one in steps(inputs):
            print(f"{one.name}, {one.model.gpus} GPUs: {driver_flags(one.model)}")
        return 0
    found = {}
    for name in inputs["scaled"]["models"]:
        found[name] = [one for gpus in GPUS if (one := best(inputs, name, gpus)) is not None]
        print(f"{name}\n" + "\n".join(table(found[name])))
        print(f"{name} on {SPREAD} GPUs, by expert-parallel size\n" + "\n".join(table(by_ranks(inputs, name))))
    print("\n".join(check_rows(inputs)))
    if args.out:
        draw(inputs, found, args.out / "scaling.png")
    missed = [one for one in steps(inputs) if one.off is not None and not one.sets and abs(one.off) > ALLOWED]
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
