"""Plots of results. Draws FILE.json into FILE.png beside it, without a display.

    python benchmarks/plot.py benchmarks/results/h200/layers.json […]

layers: speed and memory relative to the padded layer, over load skew, with one column per size and marks at the skews
of a fresh and of a trained router. peers: TFLOP/s of a step, by shape. growth: time per token over the number of
tokens, and the time of a step over the number of experts with its model. Red and void runs are not drawn.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from layer_candidates import GOAL, GOAL_FROM, GRAPHED, LEAST_AT_ONE, OURS, kind
from measure import option_parser, read_result

from megablocks.monitor.plots import new_figure, save_figure

COLORS = {
    "auto": "tab:blue", "sparse": "tab:green", "grouped": "tab:orange", "padded": "0.3", "padded known": "0.3",
    "torch": "tab:red", "scattermoe": "tab:purple", "sonicmoe": "tab:brown", "bmm": "0.7",
    "scatter": "tab:pink", "fused": "tab:cyan", "fused recompute": "cadetblue", "fused 8 bits": "teal",
    "sonicmoe compiled": "peru",
}  # fmt: skip


def _weight(name: str) -> dict[str, float]:
    """The line style. The line of auto is broad and pale, because it lies under the line of the impl that it chose."""
    return {"linewidth": 4.0, "alpha": 0.4} if name == "auto" else {"linewidth": 1.3}


def _draw_line(
    axes: Any, xs: list[Any], values: list[float | None], style: str, name: str, label: str, **weight: float
) -> None:
    """The line of a candidate, with a gap for each None; nothing if all are None."""
    if any(v is not None for v in values):
        points = [float("nan") if v is None else v for v in values]
        axes.plot(xs, points, style, color=COLORS.get(name), label=label, markersize=4, **weight)


def _mark_routers(axes: Any, fresh: float, trained: list[float]) -> None:
    axes.axvline(fresh, color="tab:gray", linestyle=":", label=f"fresh router ({fresh:.2f})")
    if trained:
        axes.axvspan(min(trained), max(trained), color="gold", alpha=0.25, linewidth=0)
        middle = median(trained)
        axes.axvline(middle, color="goldenrod", linestyle=":", label=f"trained router ({middle:.2f}, layers shaded)")


def plot_layers(result: dict[str, Any]) -> Any:
    sizes, trained = result["summary"]["sizes"], result["summary"]["trained_skews"]
    figure = new_figure(4.6 * len(sizes), 8.0)
    grid = figure.subplots(2, len(sizes), squeeze=False)
    for column, (size, entry) in enumerate(sizes.items()):
        skews = [case["skew"] for case in entry["skews"]]
        names = [n for n in entry["skews"][0]["candidates"] if n not in ("padded", "padded known")]

        def series(name: str, key: str, entry: dict[str, Any] = entry) -> list[float | None]:
            return [case["candidates"].get(name, {}).get(key) for case in entry["skews"]]

        speed, memory = grid[0][column], grid[1][column]
        for name in names:
            for key, style in (("graph_speed", "o-"), ("speed", "x--")):
                how = "CUDA graph" if key == "graph_speed" else "from Python" if name == GRAPHED else "eager"
                _draw_line(speed, skews, series(name, key), style, name, f"{name} ({how})", **_weight(name))
            for key, style in (("held", "o-"), ("peak", "x--")):
                pairs = zip(series(name, key), series("padded", key), strict=True)
                ratios = [a / b if a and b else None for a, b in pairs]
                _draw_line(memory, skews, ratios, style, name, f"{name}, {key}", **_weight(name))
        speed.plot([GOAL_FROM, max(skews)], [GOAL, GOAL], color="k", linewidth=0.8)
        speed.plot([1.0], [LEAST_AT_ONE], "k_", markersize=12, label=f"goal: {LEAST_AT_ONE} at 1, {GOAL} from 2")
        speed.axhline(1.0, color="0.6", linewidth=0.8)
        speed.set(title=f"dMoE-{size}", ylabel="speed over the padded layer" if column == 0 else "")
        memory.axhline(1.0, color="0.6", linewidth=0.8)
        memory.set(xlabel="load skew (max / mean)", ylabel="bytes over the padded layer's" if column == 0 else "")
        for axes in (speed, memory):
            _mark_routers(axes, entry["fresh_skew"], trained)
            axes.set_xscale("log", base=2)
            axes.set_xticks(skews, [f"{skew:g}" for skew in skews])
            axes.set_ylim(bottom=0)
            axes.grid(alpha=0.3)
        if column == 0:
            speed.legend(fontsize=7)
            memory.legend(fontsize=7)
    figure.suptitle(f"Forward + backward, top-1, bf16, {_where(result)}")
    return figure


def plot_peers(result: dict[str, Any]) -> Any:
    shapes = result["summary"]["shapes"]
    names = list(dict.fromkeys(name for rows in shapes.values() for name in rows))
    names.sort(key=lambda name: (name == "bmm", kind(name) not in OURS))
    figure = new_figure(max(6.0, 2.0 * len(shapes)), 4.5)
    axes, width = figure.add_subplot(), 0.8 / len(names)
    for i, name in enumerate(names):
        there = [(at, rows[name]["total"]) for at, rows in enumerate(shapes.values()) if name in rows]
        offset = (i - (len(names) - 1) / 2) * width
        axes.bar([at + offset for at, _ in there], [t for _, t in there], width, label=name, color=COLORS.get(name))
    axes.set_xticks(range(len(shapes)), [label.replace("; ", "\n") for label in shapes])
    axes.set(ylabel="TFLOP/s, forward + backward", xlabel="T,H and I/E/K, SwiGLU")
    axes.margins(y=0.25)  # room for the legend
    axes.legend(fontsize=8, ncols=2)
    axes.grid(alpha=0.3, axis="y")
    figure.suptitle(f"Whole layers, bf16, {_where(result)}")
    return figure


def plot_growth(result: dict[str, Any]) -> Any:
    curves = result["summary"]["curves"]
    figure = new_figure(5.5 * len(curves), 4.2)
    places = figure.subplots(1, len(curves), squeeze=False)[0]
    for axes, (series, by_impl) in zip(places, curves.items(), strict=True):
        for impl, rows in by_impl.items():
            counts = [row[series] for row in rows]
            for key, style in (("graph_us", "o-"), ("eager_us", "x--")):
                per = [row["tokens"] if series == "tokens" else 1.0 for row in rows]
                values = [None if row[key] is None else row[key] / n for row, n in zip(rows, per, strict=True)]
                label = impl + (" (CUDA graph)" if key == "graph_us" else " (eager)")
                _draw_line(axes, counts, values, style, impl, label)
            predicted = [row.get("predicted_us") for row in rows]
            if None not in predicted:
                axes.plot(counts, predicted, "k:", label=f"{impl}, model")
        axes.set_xscale("log", base=2)
        axes.set_xticks(counts, [str(n) for n in counts], rotation=45)
        axes.set(xlabel=series, ylabel="µs a token" if series == "tokens" else "µs a step")
        if series == "tokens":
            axes.set_yscale("log")
        else:
            axes.set_ylim(bottom=0)
        axes.legend(fontsize=8)
        axes.grid(alpha=0.3)
    figure.suptitle(f"Forward + backward, SwiGLU, bf16, {_where(result)}")
    return figure


def _where(result: dict[str, Any]) -> str:
    environment = result["environment"]
    return f"{environment['gpu'] or 'CPU'}, torch {environment['torch']}, commit {environment['commit'][:7]}"


PLOTS: dict[str, Callable[[dict[str, Any]], Any]] = {"layers": plot_layers, "peers": plot_peers, "growth": plot_growth}


def draw(path: Path) -> Path:
    """Draw the result in the file `path`. Returns the path of the plot.

    Raises:
        ValueError: the file is no complete result, its benchmark has no plot, its gate is red, or the run is void.
    """
    result = read_result(path)
    name = result["benchmark"]
    if name not in PLOTS:
        raise ValueError(f"{path}: {name!r} has no plot; plots exist for {', '.join(PLOTS)}")
    if not result["gate"]["green"] or result["void"]:
        why = "; ".join(result["void"]) or "its gate is red"
        raise ValueError(f"{path}: the run does not count ({why})")
    out = path.with_suffix(".png")
    save_figure(PLOTS[name](result), out)
    return out


if __name__ == "__main__":
    parser = option_parser(__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE.json")
    for file in parser.parse_args().files:
        try:
            print(f"wrote {draw(file)}")
        except (OSError, ValueError) as error:
            sys.exit(f"plot: {error}")
