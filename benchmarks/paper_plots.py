"""Pictures of a comparison, from its record: loss, time to the dense loss, Pareto front, step time, drops and load."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from paper_arms import ARMS, BASE, LARGER, MODELS, count, time_unit
from paper_results import EQUAL_LOSS, Summary, capacity_front, dense_time, drop_shares, shared, summarize

from megablocks.monitor.plots import new_figure, save_figure

_FAMILIES = (("tutel-", "^", ":"), ("capacity-", "s", "--"), ("", "o", "-"))
"""Beginning of an arm's name: its marker and its line."""


def _style(arm: str) -> tuple[str, str, str]:
    """Color, marker and line of an arm, the same in every picture: the color is its place in the table of arms."""
    if arm == BASE:
        return "black", "o", "-"
    if arm == LARGER:
        return "dimgray", "o", "--"
    if arm == "dmoe":
        return "tab:blue", "o", "-"
    from matplotlib import colormaps

    marker, line = next((marker, line) for start, marker, line in _FAMILIES if arm.startswith(start))
    # tab20 begins with two blues, which stay dMoE's. The arms of the paper and Tutel's are first in the table and get
    # light colors too. All others get dark ones first, which a thin line on white needs.
    bright, dark = colormaps["tab20"].colors, colormaps["tab20b"].colors  # type: ignore[attr-defined]
    colors = [*bright[2:12], *bright[12::2], *(one for shade in range(3) for one in dark[shade::4])]
    return colors[list(ARMS).index(arm)], marker, line


def title_of(record: dict[str, Any]) -> str:
    run = record["runs"][0]
    model, environment = MODELS[record["settings"]["model"]], run["environment"]
    return (
        f"{model.title}, {count(run['curve']['tokens'][-1])} tokens, "
        f"{record['settings']['ngpu']} × {environment['gpu']}, "
        f"torch {environment['torch']}, commit {environment['commit'][:7]}"
    )


def _losses(record: dict[str, Any], path: Path, column: str, label: str, scale: float) -> None:
    figure = new_figure(8, 5.5)
    axes = figure.add_subplot()
    named: set[str] = set()
    summaries = summarize(record)
    runs = [run for run in record["runs"] if ARMS[run["arm"]].has_quality]
    for run in runs:
        arm, validation = run["arm"], run["validation"]
        color, marker, line = _style(arm)
        text = None if arm in named else summaries[arm].label
        named.add(arm)
        points = [value / scale for value in validation[column]]
        axes.plot(points, validation["loss"], color=color, marker=marker, linestyle=line, markersize=3, linewidth=1.2,
                  alpha=0.9 if text else 0.4, label=text)  # fmt: skip
    target = summaries[BASE].loss.mean
    axes.axhline(target, color="0.5", linewidth=0.8, linestyle=":")
    curves = [run["validation"]["loss"] for run in runs]
    # The first evaluations are far above all others and would flatten the rest.
    axes.set_ylim(min(map(min, curves)) - 0.05, max(losses[len(losses) // 5] for losses in curves) + 0.05)
    axes.set(xlabel=label, ylabel="validation loss (nats per token)", title=title_of(record))
    axes.title.set_fontsize(9)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    save_figure(figure, path)


def _unit(record: dict[str, Any]) -> tuple[float, str]:
    return time_unit(max(run["curve"]["seconds"][-1] for run in record["runs"]))


def plot_loss_against_time(record: dict[str, Any], path: Path) -> None:
    scale, unit = _unit(record)
    _losses(record, path, "seconds", f"{unit} of training, without compilation and evaluation", scale)


def plot_loss_against_tokens(record: dict[str, Any], path: Path) -> None:
    _losses(record, path, "tokens", "million tokens", 1e6)


def _bars(axes: Any, rows: list[tuple[Summary, float | None, str]], xlabel: str) -> None:
    """Horizontal bars with a text each; None draws the text alone."""
    for at, (one, value, text) in enumerate(rows):
        axes.barh(at, value or 0, color=_style(one.arm)[0], height=0.65)
        axes.text(value or 0, at, f" {text}", va="center", fontsize=8)
    axes.set_yticks(range(len(rows)), [one.label for one, _, _ in rows], fontsize=8)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.margins(x=0.25)
    axes.set_xlim(left=0)
    axes.set_xlabel(xlabel)
    axes.grid(alpha=0.3, axis="x")


def plot_time_to_dense_loss(record: dict[str, Any], path: Path) -> None:
    summaries = [one for one in summarize(record).values() if ARMS[one.arm].has_quality]
    scale, unit = _unit(record)
    rows: list[tuple[Summary, float | None, str]] = []
    for one in summaries:
        if one.beyond:
            rows.append((one, one.beyond[0] / scale, "not reached when it stopped"))
        elif one.to_base_s is None or one.sooner is None:
            rows.append((one, None, "not reached"))
        else:
            rows.append((one, one.to_base_s.mean / scale, f"{one.sooner.mean:.2f}×"))
    figure = new_figure(8, 1.2 + 0.36 * len(rows))
    axes = figure.add_subplot()
    _bars(axes, rows, f"{unit} of training to the dense run's final loss (× sooner than dense)")
    axes.set_title(title_of(record), fontsize=9)
    save_figure(figure, path)


def _final_losses(record: dict[str, Any], arms: Iterable[Summary], line: Sequence[str], label: str, path: Path) -> None:
    """Final loss against training time of `arms`, and a line through those of `line`."""
    summaries, (scale, unit) = {one.arm: one for one in arms}, _unit(record)
    figure = new_figure(7, 5)
    axes = figure.add_subplot()
    for arm, one in summaries.items():
        color, marker, _ = _style(arm)
        time, loss = one.time_s.mean / scale, one.loss
        axes.errorbar(time, loss.mean, [[loss.mean - loss.low], [loss.high - loss.mean]], color=color, marker=marker,
                      capsize=3)  # fmt: skip
        axes.annotate(one.label, (time, loss.mean), xytext=(7, 4), textcoords="offset points", fontsize=8)
    axes.plot([summaries[arm].time_s.mean / scale for arm in line], [summaries[arm].loss.mean for arm in line],
              color="0.6", zorder=0, label=label)  # fmt: skip
    axes.set(xlabel=f"{unit} of training", ylabel="final validation loss (nats per token)")
    axes.set_title(title_of(record), fontsize=9)
    axes.margins(0.35, 0.25)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    save_figure(figure, path)


def plot_pareto(record: dict[str, Any], path: Path) -> None:
    summaries = summarize(record)
    points, front = capacity_front(summaries)
    _final_losses(
        record, [summaries[arm] for arm in points], front, "front: no arm is both sooner done and better", path
    )


def plot_equal_loss(record: dict[str, Any], path: Path) -> None:
    summaries = summarize(record)
    summaries |= {one.arm: one for one in shared(*(summaries[arm] for arm in EQUAL_LOSS))}  # as the report's line is
    arms = [one for one in summaries.values() if ARMS[one.arm].has_quality and one.losses]
    _final_losses(record, arms, (BASE, LARGER), "dense models of two sizes", path)


def plot_step(record: dict[str, Any], path: Path) -> None:
    summaries = list(summarize(record).values())
    figure = new_figure(11, 1.2 + 0.36 * len(summaries))
    left, right = figure.subplots(1, 2, sharey=True)
    _bars(left, [(one, one.step_ms, f"{one.step_ms:.1f}") for one in summaries], "ms a step")
    memory = [(one, one.peak_gib, "unknown" if one.peak_gib is None else f"{one.peak_gib:.1f}") for one in summaries]
    _bars(right, memory, "peak memory, GiB")
    figure.suptitle(title_of(record), fontsize=9)
    save_figure(figure, path)


def plot_drops_and_load(record: dict[str, Any], path: Path) -> None:
    """The fullest expert's load over tokens, the mean of the seeds, below the share of dropped pairs if any."""
    is_dropping = any(any(drop_shares(run)[1]) for run in record["runs"])
    figure = new_figure(8, 7 if is_dropping else 4)
    summaries = summarize(record)
    *above, loads = figure.subplots(2 if is_dropping else 1, 1, sharex=True, squeeze=False)[:, 0]
    for arm in dict.fromkeys(run["arm"] for run in record["runs"]):
        runs = [run for run in record["runs"] if run["arm"] == arm]
        color, _, line = _style(arm)
        how = {"color": color, "linestyle": line, "linewidth": 1.2, "label": summaries[arm].label}
        # Of a seed that stopped there is less, and the means end with it.
        shares = [drop_shares(run) for run in runs]
        if any(any(values) for _, values in shares):
            means = [100 * statistics.fmean(those) for those in zip(*(values for _, values in shares), strict=False)]
            above[0].plot([tokens / 1e6 for tokens in shares[0][0][: len(means)]], means, **how)
        curve = runs[0]["curve"]
        if any(value is not None for value in curve["expert_load_max_over_mean"]):
            seeds = zip(*(run["curve"]["expert_load_max_over_mean"] for run in runs), strict=False)
            means = [statistics.fmean(those) for those in seeds]
            loads.plot([tokens / 1e6 for tokens in curve["tokens"][: len(means)]], means, **how)
    for axes in above:
        axes.set(ylabel="dropped pairs, %")
    loads.set(xlabel="million tokens", ylabel="fullest expert's load over the mean")
    for axes in (*above, loads):
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(fontsize=8)
    figure.suptitle(title_of(record), fontsize=9)
    save_figure(figure, path)


PICTURES: dict[str, Callable[[dict[str, Any], Path], None]] = {
    "loss_time": plot_loss_against_time,
    "loss_tokens": plot_loss_against_tokens,
    "time_to_dense_loss": plot_time_to_dense_loss,
    "equal_loss": plot_equal_loss,
    "pareto": plot_pareto,
    "step": plot_step,
    "drops_and_load": plot_drops_and_load,
}
"""File name without .png: the function that draws it."""


def draw(record: dict[str, Any], folder: Path) -> list[Path]:
    """Draw every picture into `folder` for which there are enough arms. Returns the files."""
    summaries = summarize(record)
    left_out = {"pareto"} if len(capacity_front(summaries)[0]) < 2 else set()
    left_out |= {"equal_loss"} if dense_time(summaries) is None else set()
    names = [name for name in PICTURES if name not in left_out]
    for name in names:
        PICTURES[name](record, folder / f"{name}.png")
    return [folder / f"{name}.png" for name in names]
