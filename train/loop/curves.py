"""The learning curves of a run as a picture: loss, primary metric and learning rate over epochs."""

from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from train.loop.metrics import BATCH_METRIC, PRIMARY_METRIC
from train.loop.metrics_file import Record
from train.loop.pictures import encode_png
from train.loop.write_files import atomic_write
from train.recipes import Task

INK, GRID, TRAIN, HELD_OUT, RAW, RATE = "#2b2f36", "#e6e8ec", "#8fb4e3", "#1b4f9c", "#5aa9a1", "#b5651d"
MAX_PLOTTED = 1e100  # magnitude of a value; the range of an axis must not overflow
TITLES = {"accuracy": "accuracy", "auroc": "area under the ROC curve", "mae": "mean absolute error"}


def draw_curves(path: Path, records: list[Record], task: Task, title: str) -> None:
    """Write a PNG of 1650 x 600 pixels with the curves of a run's records; a run without records has empty axes."""
    figure = Figure(figsize=(11, 4), facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)  # needs no display and no global state of pyplot
    figure.suptitle(title, x=0.012, ha="left", fontsize=13, fontweight="bold", color=INK)
    loss, score, rate = figure.subplots(1, 3, width_ratios=(4, 4, 2.6))

    metric = PRIMARY_METRIC[task]
    _plot_metric(loss, records, "train", "loss", "training", TRAIN)
    _plot_metric(loss, records, "held_out", "loss", "held out", HELD_OUT)
    if _points(records, "held_out_raw", "loss"):
        _plot_metric(loss, records, "held_out_raw", "loss", "held out, raw weights", RAW)
        _plot_metric(score, records, "held_out_raw", metric, "held out, raw weights", RAW)
    if BATCH_METRIC[task] == metric:
        _plot_metric(score, records, "train", metric, "training", TRAIN)
    _plot_metric(score, records, "held_out", metric, "held out", HELD_OUT)
    _plot_metric(rate, records, "train", "lr", "learning rate", RATE)

    _style_axes(loss, "loss")
    _style_axes(score, TITLES[metric])
    _style_axes(rate, "learning rate")
    loss.set_ylim(bottom=0)
    loss.legend(frameon=False, labelcolor=INK)
    if metric == "accuracy":
        score.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        score.set_ylim(top=1.005)
    if evaluations := _points(records, "held_out", metric):
        final = f"{evaluations[-1][1]:.2%}" if metric == "accuracy" else f"{evaluations[-1][1]:.4f}"
        score.set_title(f"{final} held out", loc="right", fontsize=11, fontweight="bold", color=HELD_OUT)
    rate.yaxis.set_major_locator(MaxNLocator(5))
    rate.yaxis.set_major_formatter(lambda value, _: _format_rate(value))
    rate.set_ylim(bottom=0)
    atomic_write(path, encode_png(figure, dpi=150))


def _format_rate(value: float) -> str:
    """Return a learning rate with as few digits as it needs: one of 1e30 with all its zeros has no place in the figure."""
    if value and not 1e-6 <= abs(value) < 1e6:
        return f"{value:g}"
    return np.format_float_positional(value, precision=7, trim="-")


def _plot_metric(axes: Axes, records: list[Record], set_name: str, metric: str, label: str, colour: str) -> None:
    """Plot a metric of one set over epochs; evaluations are few, so each of them gets a dot."""
    points = _points(records, set_name, metric)
    x, y = zip(*points, strict=True) if points else ((), ())
    marker = "o" if set_name != "train" else None
    axes.plot(x, y, color=colour, linewidth=1.8, marker=marker, markersize=4, label=label, clip_on=False, zorder=3)


def _points(records: list[Record], set_name: str, metric: str) -> list[tuple[float, float]]:
    """Return (epoch, value) of each record of a set that has a value of the metric.

    Skipped steps and undefined metrics have none.  Records read from a file may have anything, so all is checked.
    """
    points = [(record.get("epoch"), record.get(metric)) for record in records if record.get("set") == set_name]
    return [(epoch, value) for epoch, value in points if _is_plottable(epoch) and _is_plottable(value)]


def _is_plottable(value: Any) -> TypeGuard[float]:
    return type(value) in (int, float) and abs(value) < MAX_PLOTTED  # False for NaN


def _style_axes(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=11, color=INK)
    axes.set_xlabel("epoch", color=INK)
    axes.set_xlim(left=0)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.grid(axis="y", color=GRID)
    axes.set_axisbelow(True)
    axes.tick_params(colors=INK, length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(GRID)
