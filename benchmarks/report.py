"""Writes RESULTS.md from the records of exp/paper/compare.sh, and from nothing else.

    python benchmarks/report.py OUT… [--out RESULTS.md]

OUT is a folder of a comparison, or its record.json; several are one report, a section each. The pictures are those
beside each record. Without --out the report lies beside the first record. A record that is incomplete, or whose runs
differ in GPU, versions, commit, steps or batch, is refused in one line.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from paper_arms import ARMS, BASE, LARGER, MODELS, Settings, count, time_unit
from paper_plots import PICTURES
from paper_results import EQUAL_LOSS, Span, Summary, capacity_front, dense_time, read_record, shared, summarize

from megablocks.config import ConfigError
from megablocks.files import write_durably
from megablocks.tool.commands import named_path, print_in_any_locale

DAY_S = 86400


class Published(NamedTuple):
    """Figures of arXiv 2211.15841, None where it has none: 8 A100-80GB, 10B tokens of the Pile.

    tutel_dynamic: step time of Tutel padded to the fullest expert over dMoE's. tutel_best, dense: the training time of
    Tutel's models of any size and factor, and of dense ones of any size, with dMoE's loss over dMoE's.
    gain: loss below the dense model's by arm. curve: (days, loss) at the end of training, by arm, read off figure 7,
    whose points are models of several sizes. The line through its dense models gives 2.1 for XS and 2.4 for Small.
    """

    tutel_dynamic: float
    tutel_best: float
    dense: tuple[float, float]
    gain: Mapping[str, float]
    curve: Mapping[str, tuple[float, float]]


PUBLISHED = {
    "xs": Published(
        1.38, 1.38, (1.8, 2.4), {},
        {"dense": (0.07, 2.89), "dense-larger": (0.16, 2.56), "tutel-1": (0.09, 2.63), "tutel-1.5": (0.09, 2.57),
         "tutel-2": (0.10, 2.56), "dmoe": (0.08, 2.55)},
    ),
    "small": Published(
        2.0, 1.37, (1.8, 2.4), {"tutel-1": 0.15, "capacity-1": 0.15, "dmoe": 0.26},
        {"dense": (0.16, 2.56), "dense-larger": (0.37, 2.35), "tutel-1": (0.19, 2.39), "tutel-1.5": (0.21, 2.32),
         "tutel-2": (0.24, 2.31), "dmoe": (0.19, 2.30)},
    ),
}  # fmt: skip
"""By model. The toy has none."""
SOONER, TUTEL_STEP = 1.5, 1.0
"""Goals: how much sooner than dense dMoE reaches the dense loss; a step of Tutel at capacity 1 over dMoE's."""


def span(value: Span | None, form: str, scale: float = 1.0) -> str:
    """The mean, and the smallest and largest value if they differ."""
    if value is None:
        return "not reached"
    if math.isnan(value.mean):
        return "–"
    mean, low, high = (f"{one / scale:{form}}" for one in value)
    return mean if low == high else f"{mean} ({low} to {high})"


def _sooner(one: Summary) -> str:
    if one.sooner is None and one.seeds > 1:
        return f"{one.missed} of {one.seeds} seeds miss it{', some stopped before it' if one.beyond else ''}"
    if one.beyond:
        return f"less than {one.beyond[1]:.2f}"
    return span(one.sooner, ".2f")


def _to_base(one: Summary, scale: float) -> str:
    if one.beyond and one.seeds == 1:
        return f"more than {one.beyond[0] / scale:.2f}"
    return span(one.to_base_s, ".2f", scale)


def _at_once(record: dict[str, Any]) -> int:
    return max(run.get("at_once", 1) for run in record["runs"])


def _tutel(record: dict[str, Any]) -> str:
    """Its version. Runs of other arms may have begun before it was installed."""
    found = {run["environment"]["tutel"] for run in record["runs"]} - {"not installed"}
    return " and ".join(sorted(found)) or "not installed"


def _is_fixed(record: dict[str, Any]) -> bool:
    return all("--megablocks-fixed-validation" in run["launch"] for run in record["runs"])


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _or_dash(value: float | None, form: str, none: str = "–") -> str:
    return none if value is None else f"{value:{form}}"


# ---- one section each: (record, summaries) → text


def _seeds(summaries: dict[str, Summary]) -> str:
    counts = {one.seeds for one in summaries.values()}
    most = "one seed" if max(counts) == 1 else f"{max(counts)} seeds"
    return most if len(counts) == 1 else f"up to {most} an arm"


def _warmup(record: dict[str, Any]) -> str:
    """In steps. Before it was in the command it was 1 % of them."""
    run = record["runs"][0]
    given = re.search(r"--lr-warmup-fraction (\S+)", run["launch"])
    return f"{round((float(given[1]) if given else 0.01) * run['steps'])} steps"


def _tokens(record: dict[str, Any]) -> str:
    return f"{count(record['runs'][0]['curve']['tokens'][-1])} tokens"


def setup(record: dict[str, Any], summaries: dict[str, Summary]) -> str:
    settings, run = record["settings"], record["runs"][0]
    model, where = MODELS[settings["model"]], run["environment"]
    rates = {"published": "as in the published scripts", "tuned": "tuned for each arm alike over three values"}
    rate = rates.get(settings["rates"], f"{settings['rates']} for every arm")
    many = _seeds(summaries)
    beside = _at_once(record)
    runs = f" for each run, {beside} runs at the same time on one host" if beside > 1 else ""
    same = "Every evaluation of every run reads the same samples of its validation part. " if _is_fixed(record) else ""
    text = [
        f"{settings['ngpu']} × {where['gpu']}{runs}, torch {where['torch']} (CUDA {where['torch CUDA']}), Triton "
        f"{where['triton']}, megatron-core {where['megatron-core']}, Transformer Engine {where['transformer-engine']}, "
        f"apex {where['apex']}, Tutel {_tutel(record)}, commit {where['commit']}.",
        f"Each run trains on {_tokens(record)} in {run['steps']:,} steps of {run['batch']} sequences of "
        f"{model.sequence} tokens; all arms train in bf16 with Adam, and for each seed they share the order "
        f"of the data and the initialization ({many}). Learning rate: {rate}, a warm-up over "
        f"{_warmup(record)}, cosine decay to a tenth. Text: the data set with fingerprint "
        f"`{settings['data'][:16]}`. {same}"
        "Times count training only, without compilation, evaluation and saves. The routers learn the load of the "
        "experts, unless an arm's name says uniform or skewed.",
        "Each number is computed from [record.json]({folder}record.json). It has one line for each run: command, "
        "environment, losses, speeds, drops and loads. This is the command of the comparison, for the code of that "
        "commit; DATA is the folder of this data set:",
    ]
    if stopped := [f"{ARMS[one.arm].label}, {one.stopped}" for one in summaries.values() if one.stopped]:
        text[1] += (
            f"\n\nThese runs are not finished: {'; '.join(stopped)}. They have no final loss, so comparisons of final "
            "losses leave them out. Their other figures are computed from the steps that they did."
        )
    if tuning := record["tuning"]:
        losses = {arm: ", ".join(f"{rate} → {_or_dash(one['loss'], '.4f', 'diverged')}" for rate, one in tried.items())
                  for arm, tried in tuning.items()}  # fmt: skip
        tokens = {count(one["tokens"]) for tried in tuning.values() for one in tried.values() if one["loss"]}
        tried = "; ".join(f"{ARMS[arm].label}: {of_arm}" for arm, of_arm in losses.items())
        text.insert(-1, f"Validation losses of the tuning, each after {' or '.join(sorted(tokens))} tokens: {tried}.")
    names = ("budget", "seeds", "rates", "batch", "micro_batch", "save_every", "ngpu", "flags")
    given = {name.upper(): str(settings[name]) for name in names if settings[name] not in (0, "")}
    given |= {"AT_ONCE": str(beside)} if beside > 1 else {}
    given |= {"ARMS": ",".join(settings["arms"]), "DATA_PREFIX": "DATA"}
    values = " ".join(f"{name}={shlex.quote(value)}" for name, value in given.items())
    return "\n\n".join([*text, f"    {values} bash exp/paper/compare.sh OUT {settings['model']}"])


def quality(record: dict[str, Any], summaries: dict[str, Summary]) -> str:
    gains = PUBLISHED["small"].gain if record["settings"]["model"] in PUBLISHED else {}
    base, dmoe = summaries[BASE], summaries.get("dmoe")
    rows = [
        [one.label, "; ".join(filter(None, [span(one.loss, ".4f") if one.losses else "", one.stopped])),
         "–" if one is base else span(one.below(base), "+.4f"),
         "–" if dmoe is None or one is dmoe else span(dmoe.below(one), "+.4f"),
         f"{gains[one.arm]:+.2f}" if one.arm in gains else "–", str(one.seeds),
         span(one.tokens_per_second, ",.0f"), _or_dash(one.dropped, ".2%"), _or_dash(one.load, ".2f"),
         f"{one.learning_rate:g}"]
        for one in summaries.values() if ARMS[one.arm].has_quality
    ]  # fmt: skip
    head = ["arm", "validation loss", "below dense", "above dMoE", "below dense in the paper, Small", "seeds",
            "tokens/s", "pairs dropped", "load, fullest/mean", "learning rate"]  # fmt: skip
    text = "Runs of one seed read the same data in the same order."
    if max(one.seeds for one in summaries.values()) > 1:
        text = (
            "The table shows the mean of the seeds (for tokens/s the median), and the smallest and the largest in "
            "brackets. Differences are computed for each seed: runs of one seed read the same data in the same order."
        )
    picture = _picture("loss_tokens", "Loss against tokens")
    return "\n\n".join(filter(None, [text, table(head, rows), "\n".join(orders(summaries)), picture]))


def orders(summaries: dict[str, Summary]) -> list[str]:
    """Does the paper's order hold: in how many seeds, and for each neighboring pair by how much and why not."""
    names = ("dmoe", "capacity-2", "capacity-1.5", "capacity-1", BASE)
    order = [summaries[arm] for arm in names if arm in summaries and summaries[arm].losses]
    seeds = [seed for seed in summaries[BASE].losses if all(seed in one.losses for one in order)]
    hold = sum(all(a.losses[seed] < b.losses[seed] for a, b in pairwise(order)) for seed in seeds)
    named = " below ".join(one.label for one in order)
    lines = []
    if seeds and len(order) > 1:
        holds = f"holds in {hold} of {len(seeds)} seeds"
        if len(seeds) == 1:
            holds = f"{'holds' if hold else 'does not hold'}, with one seed"
        lines.append(f"- The paper's order of losses, {named}, {holds}.")
    for a, b in (shared(*pair) for pair in pairwise(order)):
        apart, n = a.below(b), len(a.losses.keys() & b.losses.keys())
        around = f"({apart.low:+.4f} to {apart.high:+.4f})"
        if n == 0:
            continue  # no seed of both is finished
        if apart.mean <= 0:
            verdict = "so the paper's order does not hold here."
        elif n == 1:
            verdict = "which may be chance with one seed."
        elif apart.low <= 0:
            verdict = f"but not in each of {n} seeds {around}."
        else:
            overlap = "overlap" if a.loss.high >= b.loss.low else "do not overlap"
            verdict = f"in each of {n} seeds {around}; the losses of the two {overlap}."
        why = ""
        if apart.low <= 0:
            drops = [f"{one.label} drops {one.dropped:.2%} of the pairs" for one in (a, b) if one.dropped is not None]
            half = a.below(b, "half_losses").mean
            why = f" {'; '.join(drops)}. At half of the tokens {a.label} was {abs(half):.4f} "
            why += f"{'below' if half > 0 else 'above'}."
        side = "below" if apart.mean > 0 else "above"
        lines.append(f"- {a.label} is {abs(apart.mean):.4f} {side} {b.label}, {verdict}{why}")
    return lines


def time(record: dict[str, Any], summaries: dict[str, Summary]) -> str:
    base = summaries[BASE]
    scale, unit = time_unit(max(one.time_s.high for one in summaries.values() if one.losses))
    rows = [
        [one.label, _to_base(one, scale), _sooner(one), span(one.time_s, ".2f", scale),
         f"{one.tokens_per_second.mean:,.0f}"]
        for one in summaries.values() if ARMS[one.arm].has_quality
    ]  # fmt: skip
    head = ["arm", f"{unit} to the dense loss", "times sooner", f"{unit} in all", "tokens/s"]
    text = (
        f"The target of a seed is the final loss of its dense run: {span(base.loss, '.4f')}, after "
        f"{span(base.time_s, '.2f', scale)} {unit}. Between evaluations the time is interpolated linearly."
    )
    pictures = (
        _picture("loss_time", "Loss against time") + "\n\n" + _picture("time_to_dense_loss", "Time to the dense loss")
    )
    return "\n\n".join([text, table(head, rows), *_equal_loss(summaries, scale, unit), pictures])


def _equal_loss(summaries: dict[str, Summary], scale: float, unit: str) -> list[str]:
    """The paper's comparison: dMoE beside the dense model of another size that ends with the same loss."""
    found = dense_time(summaries)
    if found is None:
        return []
    larger, (word, seconds, ratio) = summaries[LARGER], found
    takes, times = (f"{word} {value:.2f}".strip() for value in (seconds / scale, ratio))
    those = [summaries[arm] for arm in EQUAL_LOSS]
    seeds = {len(one.losses) for one in (*those, *shared(*those))}
    over = f", over the {min(seeds)} seed{'s' * (min(seeds) > 1)} that the three arms share," if len(seeds) > 1 else ","
    return [
        "The paper compares models that train on equally many tokens and end with the same loss. The "
        f"{larger.label} model ends with {span(larger.loss, '.4f')} after {span(larger.time_s, '.2f', scale)} {unit}. "
        f"On the straight line through both dense models{over} a dense model with dMoE's final loss trains for "
        f"{takes} {unit}, {times} times as long as dMoE.",
        _picture("equal_loss", "Final loss against training time"),
    ]


def speed(record: dict[str, Any], summaries: dict[str, Summary]) -> str:
    rows = [
        [one.label, f"{one.step_ms:.1f}", _or_dash(one.over_dmoe, ".2f"),
         f"{one.tokens_per_second.mean:,.0f}", _or_dash(one.peak_gib, ".1f"), str(one.micro_batch or "–"),
         _or_dash(one.load, ".2f"), ARMS[one.arm].note or "–"]
        for one in summaries.values()
    ]  # fmt: skip
    head = ["arm", "ms a step", "over dMoE's", "tokens/s", "peak GiB", "micro-batch", "load, fullest/mean", "note"]
    points, front = capacity_front(summaries)
    settings = Settings.from_dict(record["settings"])
    given = [(run["micro_batch"], settings.micro_batch_of(run["arm"])) for run in record["runs"]]
    text = "The micro-batch is the largest that fits, found by trials of three steps."
    if any(size for _, size in given):
        batch = record["runs"][0]["batch"]
        whole = all(size is not None and size * settings.ngpu == batch for _, size in given)
        some = "" if all(size for _, size in given) else " for some arms; otherwise it is the largest that fits"
        text = f"The micro-batch was given{': it is the whole batch of a GPU' if whole else some}."
        if any(size not in (None, used) for used, size in given):
            text += (
                " An arm that failed with it, out of memory or in another package's kernel, got the next smaller one."
            )
    parts = [text, table(head, rows), _picture("step", "Step time and memory")]
    if len(points) > 1:
        best = "; ".join(ARMS[arm].label for arm in front)
        tail = f"dMoE and the arms with a capacity have this Pareto front of training time and final loss: {best}."
        if len(front) < len(points):
            with_loss = " with a final loss" if any(one.stopped for one in summaries.values()) else ""
            tail += f" Every other arm{with_loss} takes at least as long as one of these, and its loss is not lower"
            uneven = len({len(summaries[arm].losses) for arm in points}) > 1
            tail += ", over the seeds that both have." if uneven else "."
        parts += [tail, _picture("pareto", "Loss and time by capacity factor")]
    return "\n\n".join([*parts, _picture("drops_and_load", "Dropped pairs and load over tokens")])


def beside_paper(record: dict[str, Any], summaries: dict[str, Summary]) -> str:
    published = PUBLISHED.get(record["settings"]["model"])
    if published is None:
        return "The paper has no model of this size; these figures only show that the comparison works."
    dmoe, base = summaries.get("dmoe"), summaries[BASE]
    rows = []
    if dmoe is not None:
        low, high = published.dense
        rows.append(["dense over dMoE, time to the dense loss", _sooner(dmoe), f"{SOONER}", "–"])
        if (found := dense_time(summaries)) is not None:
            times = f"{found[0]} {found[2]:.2f}".strip()
            rows.append(["dense of another size with dMoE's loss over dMoE, training time", times, "–",
                         f"{low} to {high}"])  # fmt: skip
        if (one := summaries.get("tutel-1")) is not None:
            rows.append([f"{one.label} over dMoE, step time", _or_dash(one.over_dmoe, ".2f"), f"{TUTEL_STEP}", "–"])
        padded = published.tutel_dynamic
        rows += [
            [f"{one.label} over dMoE, step time", _or_dash(one.over_dmoe, ".2f"), f"{padded}", f"{padded}"]
            for arm, one in summaries.items() if arm in ("tutel-0", "tutel-0-short")
        ]  # fmt: skip
        best = best_tutel(summaries)
        if best is not None and best.sooner is not None and dmoe.sooner is not None:
            ratio = Span.of(dmoe.faster[seed] / best.faster[seed] for seed in best.faster if seed in dmoe.faster).mean
            paper = f"{published.tutel_best} (its best factor, at dMoE's loss)"
            rows.append([f"{best.label} over dMoE, time to the dense loss", f"{ratio:.2f}", "–", paper])
    rows += [
        [f"{one.label}: loss below dense", span(one.below(base), "+.3f"), "–", f"{gain:+.2f} (Small)"]
        for one in summaries.values() if one.losses and (gain := PUBLISHED["small"].gain.get(one.arm)) is not None
    ]  # fmt: skip
    rows += [
        [f"{summaries[arm].label}: final loss, minutes",
         f"{summaries[arm].loss.mean:.2f}, {summaries[arm].time_s.mean / 60:.1f}", "–",
         f"{loss}, {days * DAY_S / 60:.0f}"]
        for arm, (days, loss) in published.curve.items() if arm in summaries and summaries[arm].losses
    ]  # fmt: skip
    return (
        table(["figure", "here", "goal", "paper"], rows)
        + "\n\n"
        + "\n".join(f"- {line}" for line in differences(record, summaries))
    )


def best_tutel(summaries: dict[str, Summary]) -> Summary | None:
    """The arm of Tutel's own layer that drops and reaches the dense loss first."""
    those = [one for arm, one in summaries.items()
             if ARMS[arm].group == "tutel" and arm != "tutel-0" and one.sooner]  # fmt: skip
    return max(those, key=lambda one: one.sooner.mean if one.sooner else 0.0, default=None)


def differences(record: dict[str, Any], summaries: dict[str, Summary]) -> list[str]:
    """What in the data differs from the paper's set-up, and what moves a ratio. Nothing that was not recorded."""
    run, base, dmoe = record["runs"][0], summaries[BASE], summaries.get("dmoe")
    tokens = run["curve"]["tokens"][-1]
    lines = [
        f"The paper trains on 10B tokens of the Pile, this run on {count(tokens)} of another text, "
        f"{10e9 / tokens:,.0f} times fewer. Its losses cannot be compared with the paper's. Only the order of the arms "
        "can.",
        f"The paper uses eight A100-80GB, this run {record['settings']['ngpu']} × {run['environment']['gpu']}.",
    ]
    if dmoe is not None:
        lines.append(
            f"A step of dMoE takes {dmoe.step_ms / base.step_ms:.2f} times as long as a dense step here. The time to a "
            "loss, dense over dMoE, is the ratio of the tokens that both need to reach it, divided by this number."
        )
        if {"tutel-0", "tutel-0-short"} & summaries.keys() and dmoe.load is not None:
            lines.append(
                f"Tutel's padding depends on the load: in dMoE the fullest expert has {dmoe.load:.2f} times the mean."
            )
    for arm in ("capacity-1", "tutel-1"):
        if (one := summaries.get(arm)) is not None and one.dropped is not None:
            lines.append(f"{one.label} drops {one.dropped:.1%} of the pairs here; the paper states no rate.")
    return lines


def limits(record: dict[str, Any], summaries: dict[str, Summary]) -> str:
    run = record["runs"][0]
    lines = [
        f"There is one kind of machine ({run['environment']['gpu']}), one text and one budget. The learning-rate "
        "schedule ends with the budget, so a loss in the middle of a run is not the loss of a run that ends there.",
    ]
    if _at_once(record) > 1:
        lines.append(f"{_at_once(record)} runs at the same time share one host, which can slow them.")
    if not _is_fixed(record):
        lines.append(
            "Each evaluation of a run reads other samples of the validation text; all arms of a seed read the same. "
            "Easy samples lower the loss of one evaluation, and this changes a time to the dense loss."
        )
    lines += [f"{one.label}: {ARMS[one.arm].note}." for one in summaries.values() if one.arm == "expert-choice"]
    if single := [one.label for one in summaries.values() if len(one.losses) < 2]:
        named = "every arm" if len(single) == len(summaries) else ", ".join(single)
        lines.append(f"One seed, so no spread: {named}.")
    if record["settings"]["rates"] != "tuned":
        lines.append("The learning rates are not tuned for each arm.")
    lines += [f"{ARMS[arm].label}: not run: {why}." for arm, why in record["not_run"].items()]
    lines.append("`benchmarks/layers.py`, not this report, measures skewed loads that no router produces.")
    return "\n".join(f"- {line}" for line in lines)


def commands(record: dict[str, Any], summaries: dict[str, Summary]) -> str:
    """The first seed's command of each arm; the record has all. It has no folder of a machine, so the data is added."""
    first = {arm: next(run for run in record["runs"] if run["arm"] == arm) for arm in summaries}
    return "\n\n".join(f"{summaries[arm].label}:\n\n    DATA_PREFIX=DATA {run['launch']}" for arm, run in first.items())


def _picture(name: str, title: str) -> str:
    assert name in PICTURES
    return f"![{title}]({{folder}}{name}.png)"


SECTIONS: dict[str, Callable[[dict[str, Any], dict[str, Summary]], str]] = {
    "Set-up": setup,
    "Quality at equal tokens": quality,
    "Time to the dense model's loss": time,
    "Step time and memory": speed,
    "Compared with the paper": beside_paper,
    "Limits": limits,
    "Commands": commands,
}


def overview(titled: Sequence[tuple[str, dict[str, Any], dict[str, Summary]]]) -> str:
    """A row for each comparison. An arm that it did not run, or that never got so far, is a dash."""
    rows = []
    for title, record, summaries in titled:
        base, dmoe = summaries[BASE], summaries.get("dmoe")
        others = [one for arm, one in summaries.items()
                  if ARMS[arm].has_quality and arm.startswith(("capacity-", "tutel-")) and one.sooner]  # fmt: skip
        best = max(others, key=lambda one: one.sooner.mean if one.sooner else 0.0, default=None)
        padded = summaries.get("tutel-0-short", summaries.get("tutel-0"))
        steps = [one and one.over_dmoe for one in (base, summaries.get("tutel-1"), padded)]
        rows.append([
            title, record["runs"][0]["environment"]["gpu"].removeprefix("NVIDIA "),
            span(dmoe.below(base), "+.4f") if dmoe else "–", _sooner(dmoe) if dmoe else "–",
            f"{_sooner(best)} ({best.label})" if best else "–", *(_or_dash(step, ".2f") for step in steps),
        ])  # fmt: skip
    head = ["comparison", "GPU", "dMoE's loss below dense", "dMoE, times sooner at the dense loss",
            "the best arm that drops or pads", "step time over dMoE's: dense", "Tutel, capacity 1",
            "Tutel, padded"]  # fmt: skip
    text = "With several seeds: the mean, and the smallest and the largest value in brackets. Details are below."
    return f"{text}\n\n{table(head, rows)}"


def _title(record: dict[str, Any], summaries: dict[str, Summary]) -> str:
    """What tells a comparison from others of its model."""
    tuned = ", tuned learning rates" if record["settings"]["rates"] == "tuned" else ""
    model = MODELS[record["settings"]["model"]].title
    return f"{model}, {_tokens(record)}, warm-up {_warmup(record)}, {_seeds(summaries)}{tuned}"


def report(records: Sequence[tuple[dict[str, Any], str]]) -> str:
    """RESULTS.md of (record, folder of its pictures relative to the report)."""
    parts = ["# Dropless against dropping, padding and dense models", "Written by `benchmarks/report.py`; do not edit."]
    models = [record["settings"]["model"] for record, _ in records]
    titled: list[tuple[str, dict[str, Any], dict[str, Summary]]] = []
    for record, folder in records:
        summaries, model = summarize(record), record["settings"]["model"]
        title = _title(record, summaries) if models.count(model) > 1 else MODELS[model].title
        if any(title == other for other, *_ in titled):
            title += f", again at {record['runs'][0]['environment']['commit'][:7]}"
        titled.append((title, record, summaries))
        parts.append(f"## {title}")
        for name, section in SECTIONS.items():
            parts += [f"### {name}", section(record, summaries).replace("{folder}", folder)]
    if len(titled) > 1:
        parts.insert(2, f"## All comparisons\n\n{overview(titled)}")
    return "\n\n".join(parts) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    print_in_any_locale()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", nargs="+", type=named_path, metavar="OUT")
    parser.add_argument("--out", type=named_path, help="file to write (default: RESULTS.md in the first OUT)")
    options = parser.parse_args(argv)
    try:
        folders = [path if path.is_dir() else path.parent for path in options.records]
        out = options.out or folders[0] / "RESULTS.md"
        there = [os.path.relpath(folder.resolve(), out.resolve().parent) for folder in folders]
        records = [
            (read_record(path), "" if at == "." else f"{at}/") for path, at in zip(options.records, there, strict=True)
        ]
        write_durably(out, report(records))
    except (ConfigError, OSError) as error:
        print(f"report: {error}", file=sys.stderr)
        return 2
    print(f"report: wrote {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
