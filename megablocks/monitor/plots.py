"""Plots of training runs, drawn without a display: loss.png, expert_load.png, and runs.png of several runs."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from megablocks.files import write_durably
from megablocks.monitor.history import History


def new_figure(width: float, height: float) -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=110, layout="constrained")


def save_figure(figure: Any, path: Path) -> None:
    data = io.BytesIO()
    figure.savefig(data, format="png")
    write_durably(path, data.getvalue())


def plot_loss(history: History, path: Path, *, unigram_entropy: float | None = None) -> None:
    """Train and validation loss (nats per token) over iterations, and the unigram entropy as a baseline."""
    figure = new_figure(7, 4.5)
    axes = figure.add_subplot()
    axes.plot(*history.series("train_loss"), color="tab:blue", linewidth=1.2, label="train")
    iterations, losses = history.series("validation_loss")
    if iterations:
        axes.plot(
            iterations, losses, "o-", color="tab:orange", markersize=4, label=f"validation (last {losses[-1]:.3f})"
        )
    if unigram_entropy is not None:
        axes.axhline(unigram_entropy, color="0.4", linestyle="--", label=f"unigram entropy {unigram_entropy:.3f}")
    axes.set(xlabel="iteration", ylabel="loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    save_figure(figure, path)


def plot_runs(runs: dict[str, History], path: Path, *, title: str) -> None:
    """Train losses (nats per token) of several runs over iterations; below them the differences to the first run."""
    figure = new_figure(7, 6.5)
    losses, apart = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    (first, base), *_ = runs.items()
    reference = dict(zip(*base.series("train_loss"), strict=True))
    for name, history in runs.items():
        (line,) = losses.plot(*history.series("train_loss"), linewidth=1.2, label=name)
        points = [(i, v - reference[i]) for i, v in zip(*history.series("train_loss"), strict=True) if i in reference]
        if name != first and points:
            apart.plot(*zip(*points, strict=True), color=line.get_color(), linewidth=1.0, label=f"{name} − {first}")
    apart.axhline(0, color="0.4", linewidth=0.8)
    losses.set_title(title, parse_math=False)  # the title can contain a folder with a $
    losses.set(ylabel="train loss (nats per token)")
    apart.set(xlabel="iteration", ylabel="difference")
    for axes in (losses, apart):
        axes.grid(alpha=0.3)
        axes.legend()
    save_figure(figure, path)


def plot_expert_load(tokens: list[list[int]], path: Path, *, title: str, layers: list[int]) -> None:
    """Heat map of layers × experts: the tokens of each expert over the mean of its layer (1 is balance).

    tokens: L rows of E token counts. layers: the numbers of these L layers.
    """
    from matplotlib.colors import TwoSlopeNorm

    experts = len(tokens[0])
    shares = [[count * experts / max(sum(row), 1.0) for count in row] for row in tokens]
    figure = new_figure(max(5.0, min(14.0, 0.35 * experts + 2.5)), max(2.5, min(12.0, 0.35 * len(layers) + 1.8)))
    axes = figure.add_subplot()
    highest = max(2.0, min(4.0, max(max(row) for row in shares)))
    norm = TwoSlopeNorm(vcenter=1.0, vmin=0.0, vmax=highest)
    image = axes.imshow(shares, cmap="RdBu_r", norm=norm, aspect="auto", interpolation="nearest")
    axes.set_title(title, parse_math=False)
    axes.set(xlabel="expert", ylabel="layer")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_yticks(range(len(layers)), [str(number) for number in layers])
    figure.colorbar(image, ax=axes, label="tokens over the layer's mean")
    save_figure(figure, path)


def plot_parts(rows: list[tuple[str, float, float, float]], path: Path, *, title: str) -> None:
    """Horizontal bars of a step: the measured time of each part, and below it the bounds by arithmetic and by bytes.

    rows: (part, measured, arithmetic, bytes), in ms; the bounds are 0 where there are none.
    """
    figure = new_figure(8, 1.2 + 0.42 * len(rows))
    axes = figure.add_subplot()
    parts, measured, arithmetic, moved = zip(*rows, strict=True)
    places = range(len(rows))
    axes.barh([at - 0.2 for at in places], measured, 0.4, color="tab:blue", label="measured")
    axes.barh([at + 0.1 for at in places], arithmetic, 0.2, color="tab:orange", label="bound by arithmetic")
    axes.barh([at + 0.3 for at in places], moved, 0.2, color="tab:green", label="bound by bytes")
    for at, value in zip(places, measured, strict=True):
        axes.text(value, at - 0.2, f" {value:.1f}", va="center", fontsize=8)
    axes.set_yticks(places, parts)
    axes.invert_yaxis()
    axes.margins(x=0.08)
    axes.set_title(title, parse_math=False)
    axes.set(xlabel="ms a step")
    axes.grid(alpha=0.3, axis="x")
    axes.legend()
    save_figure(figure, path)
