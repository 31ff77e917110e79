"""Step time of two large models on 8 to 4,096 GPUs, on paper: what takes over, and how far the model is from steps.

    python benchmarks/scaling.py [--out FOLDER] [--inputs FILE] [--commands]

FILE, scaling_inputs.json, holds all that is measured or assumed outside of results/h200: links, batch, models, and the
steps that check the prediction; enter their milliseconds under "measured". --commands prints the driver's flags of
these steps. From results/h200 come the rates of the experts' kernels (peers_paper.json) and the load of a trained
router (dmoe_46m/expert_load.csv); the rest of a step is that of `python -m megablocks plan`. FOLDER gets scaling.png.

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
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from megablocks.config import ConfigError
from megablocks.monitor.flops import MEMORY_GIB, figure
from megablocks.monitor.plots import new_figure, save_figure
from megablocks.tool.memory import GIB, memory
from megablocks.tool.model import Model
from megablocks.tool.step_time import Conditions, StepTime, step_time

HERE = Path(__file__).parent
RESULTS = HERE / "results/h200"
GPUS = tuple(2**n for n in range(3, 13))
STAGES, RANKS, MICRO_BATCHES = (1, 2, 4, 6, 8, 12), (1, 2, 4, 8, 16, 32, 64), (1, 2, 4, 8)
RECOMPUTED: tuple[dict[str, Any], ...] = ({}, {"recompute_activation": True}, {"recompute_granularity": "full"})
NOTHING = {"recompute_activation": False, "recompute_granularity": None}
GROUPS = {
    "experts": ("experts",),
    "attention and dense": ("attention", "dense products", "norms", "elementwise", "routing", "embedding and loss"),
    "optimizer": ("optimizer", "gradients"),
    "idle": ("idle and copies",),
    "recomputing, for memory": (),
    "all-to-all": ("communication: all-to-all of the experts",),
    "imbalance": ("waiting for the fullest rank",),
    "pipeline": ("communication: pipeline bubble", "waiting for the last stage"),
    "gradients over ranks": ("communication: gradients over data-parallel ranks",),
}
"""Parts of a step in tables and pictures, and those of `step_time` that each holds."""
LOSSES = ("all-to-all", "imbalance", "pipeline", "gradients over ranks", "memory")
"""What one GPU with enough memory would not pay. memory: the step over that of the best layout if all layouts fit."""
ALLOWED = 0.15
"""How far a measured step may be from its prediction."""
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
def experts_rate(hidden_size: int, expert_width: int) -> tuple[float, str]:
    """TFLOP/s forward and backward of the measured layer whose hidden size and expert width are nearest; its shape."""
    shapes = json.loads((RESULTS / "peers_paper.json").read_text())["summary"]["shapes"]

    def distance(shape: str) -> float:
        sizes, experts = shape.split("; ")
        hidden, width = int(sizes.split(",")[1]), int(experts.split("/")[0])
        return abs(math.log(hidden / hidden_size)) + abs(math.log(width / expert_width))

    name = min(shapes, key=distance)
    return shapes[name]["fused"]["total"], name


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


def conditions(inputs: dict[str, Any], m: Model, *, even: bool = False, row_a_rank: bool | None = None) -> Conditions:
    """even: equal loads. row_a_rank: another dispatch than that of the inputs."""
    links = {name: value for name, value in inputs["links"].items() if name != "source"}
    ranks = m.expert_model_parallel_size
    return Conditions(
        **links,
        experts_tflops=experts_rate(m.hidden_size, m.moe_ffn_hidden_size or 1)[0],
        skew=1.0 if even or ranks == 1 else rank_skew(ranks),
        row_a_rank=inputs["row_a_rank"]["value"] if row_a_rank is None else row_a_rank,
    )


def fits(m: Model, skew: float) -> bool:
    """With the error bar, and with the rows of the fullest rank."""
    found = memory(m)
    by_rows = ("activations: experts", "communication: rows sent and received", "temporary tensors")
    more = (skew - 1) * sum(found.parts.get(name, 0.0) for name in by_rows)
    capacity = figure(MEMORY_GIB, m.gpu)
    assert capacity is not None
    return found.needed + found.error_bar * found.peak + more <= capacity * GIB


def layouts(inputs: dict[str, Any], name: str, gpus: int, ranks: Sequence[int]) -> Iterator[Model]:
    fixed = {**inputs["shapes"], **inputs["models"][name], "gpu": inputs["gpu"], "gpus": gpus}
    fixed |= {"seq_length": inputs["batch"]["seq_length"], "global_batch_size": inputs["batch"]["sequences"]}
    for pp, ep, size, recomputed in itertools.product(STAGES, ranks, MICRO_BATCHES, RECOMPUTED):
        values = {"pipeline_model_parallel_size": pp, "expert_model_parallel_size": ep, "micro_batch_size": size}
        try:
            yield Model(**{**fixed, **values, **recomputed})
        except ConfigError:  # it does not divide
            continue


def best(inputs: dict[str, Any], name: str, gpus: int, ranks: Sequence[int] = RANKS, **other: Any) -> Point | None:
    """The fastest layout that fits; None if none does. ranks: expert-parallel sizes. other: of `conditions`."""
    times = []
    for m in layouts(inputs, name, gpus, ranks):
        on = conditions(inputs, m, **other)
        time = step_time(m, on)
        assert time is not None
        times.append((time.milliseconds, len(times), m, on, time))
    times.sort()
    found = next((one for one in times if fits(one[2], one[3].skew)), None)
    if found is None:
        return None
    ms, _, m, on, time = found
    plain = step_time(dataclasses.replace(m, **NOTHING), on)
    assert plain is not None
    parts = {group: sum(plain.parts.get(part, 0.0) for part in those) for group, those in GROUPS.items()}
    parts["recomputing, for memory"] = ms - plain.milliseconds
    lost = {**parts, "memory": ms - times[0][0]}
    return Point(m, time, parts, {one: lost[one] for one in LOSSES})


def by_ranks(inputs: dict[str, Any], name: str) -> list[Point]:
    """The best layout of each expert-parallel size on SPREAD GPUs."""
    return [one for size in RANKS if (one := best(inputs, name, SPREAD, (size,))) is not None]


def checked(inputs: dict[str, Any]) -> list[tuple[Model, StepTime, float | None]]:
    """The steps that check the prediction: model, prediction, and measured milliseconds or None."""
    rows = []
    for entry in inputs["measured"]:
        values = {key: value for key, value in entry.items() if key not in ("model", "ms", "source")}
        fixed = {**inputs["shapes"], **inputs["models"][entry["model"]], "gpu": inputs["gpu"]}
        m = Model(**{**fixed, "seq_length": inputs["batch"]["seq_length"], **values})
        time = step_time(m, conditions(inputs, m, even=True))  # a fresh router, so nearly even
        assert time is not None
        rows.append((m, time, entry["ms"]))
    return rows


def driver_flags(m: Model) -> str:
    """The command line of `megablocks.megatron.pretrain_gpt` for this model, without data and run folder."""
    ours = {"mlp_impl", "recompute_activation", "quantize_rematerialize_num_bits", "fused_loss", "fused_loss_kept_gib"}
    skipped = {"gpus", "gpu", "num_moe_layers", "ffn_hidden_size", "quantize_rematerialize_num_bits"}
    words = ["--bf16 --group-query-attention --disable-bias-linear --attention-dropout 0",
             f"--max-position-embeddings {m.seq_length}"]  # fmt: skip
    for one in dataclasses.fields(Model):
        value = getattr(m, one.name)
        if one.name in skipped or value is None or value is False or one.name in ("bf16", "fused_loss"):
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
    rows = []
    for (m, time, ms), entry in zip(checked(inputs), inputs["measured"], strict=True):
        said = "not measured yet" if ms is None else f"{ms:.0f}"
        off = "–" if ms is None else f"{time.milliseconds / ms - 1:+.0%}"
        layers = f"{m.num_layers} layer{'s' if m.num_layers > 1 else ''}"
        rows.append(f"| {entry['model']}, {layers} | {m.gpus} | {m.expert_model_parallel_size} | "
                    f"{time.milliseconds:.0f} | {said} | {off} |")  # fmt: skip
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
        others = {"even load": {"even": True}, "one row a rank": {"row_a_rank": True}}
        for label, other in {"trained load": {}, **others}.items():
            line = [one for gpus in GPUS if (one := best(inputs, name, gpus, **other)) is not None]
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
        for m, *_ in checked(inputs):
            print(f"{m.gpus} GPUs: {driver_flags(m)}")
        return 0
    found = {}
    for name in inputs["models"]:
        found[name] = [one for gpus in GPUS if (one := best(inputs, name, gpus)) is not None]
        one = found[name][0].model
        rate, shape = experts_rate(one.hidden_size, one.moe_ffn_hidden_size or 1)
        print(f"{name}: experts at {rate:.0f} TFLOP/s, as {shape}\n" + "\n".join(table(found[name])))
        print(f"{name} on {SPREAD} GPUs, by expert-parallel size\n" + "\n".join(table(by_ranks(inputs, name))))
    print("\n".join(check_rows(inputs)))
    if args.out:
        draw(inputs, found, args.out / "scaling.png")
    missed = [row for _, time, ms in checked(inputs) if ms and abs(row := time.milliseconds / ms - 1) > ALLOWED]
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
