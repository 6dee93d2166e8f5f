"""A run's metrics as a picture: loss, score and learning rate over epochs."""

import io
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from train.loop.metrics import BATCH_SCORE, LEADING
from train.loop.run_folder import Record, put
from train.recipes import Task

INK, GRID, TRAIN, HELD_OUT, RAW, RATE = "#2b2f36", "#e6e8ec", "#8fb4e3", "#1b4f9c", "#5aa9a1", "#b5651d"
LARGEST = 1e100  # of a number on an axis, whose length is still a number
TITLES = {"accuracy": "accuracy", "auroc": "area under the ROC curve", "mae": "mean absolute error"}


def draw(path: Path, records: list[Record], task: Task, title: str) -> None:
    """Write a PNG, 1650 x 600 pixels on white, of the records of a run."""
    figure = Figure(figsize=(11, 4), facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)  # no display, and none of pyplot's global state
    figure.suptitle(title, x=0.012, ha="left", fontsize=13, fontweight="bold", color=INK)
    loss, score, rate = figure.subplots(1, 3, width_ratios=(4, 4, 2.6))

    leading = LEADING[task]
    _line(loss, records, "train", "loss", "training", TRAIN)
    _line(loss, records, "held_out", "loss", "held out", HELD_OUT)
    if _points(records, "held_out_raw", "loss"):
        _line(loss, records, "held_out_raw", "loss", "held out, raw weights", RAW)
        _line(score, records, "held_out_raw", leading, "held out, raw weights", RAW)
    if BATCH_SCORE[task] == leading:
        _line(score, records, "train", leading, "training", TRAIN)
    _line(score, records, "held_out", leading, "held out", HELD_OUT)
    _line(rate, records, "train", "lr", "learning rate", RATE)

    _dress(loss, "loss")
    _dress(score, TITLES[leading])
    _dress(rate, "learning rate")
    loss.set_ylim(bottom=0)
    loss.legend(frameon=False, labelcolor=INK)
    if leading == "accuracy":
        score.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        score.set_ylim(top=1.005)
    if looks := _points(records, "held_out", leading):
        final = f"{looks[-1][1]:.2%}" if leading == "accuracy" else f"{looks[-1][1]:.4f}"
        score.set_title(f"{final} held out", loc="right", fontsize=11, fontweight="bold", color=HELD_OUT)
    rate.yaxis.set_major_locator(MaxNLocator(5))
    rate.yaxis.set_major_formatter(lambda value, _: np.format_float_positional(value, precision=7, trim="-"))
    rate.set_ylim(bottom=0)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=150)
    put(path, picture.getvalue())


def _line(axes: Axes, records: list[Record], set_name: str, metric: str, label: str, colour: str) -> None:
    """One metric over epochs; looks at the held-out images are few, so each gets a dot."""
    points = _points(records, set_name, metric)
    x, y = zip(*points, strict=True) if points else ((), ())
    marker = "o" if set_name != "train" else None
    axes.plot(x, y, color=colour, linewidth=1.8, marker=marker, markersize=4, label=label, clip_on=False, zorder=3)


def _points(records: list[Record], set_name: str, metric: str) -> list[tuple[float, float]]:
    """Epochs with a metric's values, where it has one: steps that were left out have none, nor has what is undefined.

    Of records that were read again from a file, those that a run does not write are left out too.
    """
    mine = [(record.get("epoch"), record.get(metric)) for record in records if record.get("set") == set_name]
    return [(epoch, value) for epoch, value in mine if _drawable(epoch) and _drawable(value)]


def _drawable(value: Any) -> TypeGuard[float]:
    return type(value) in (int, float) and abs(value) < LARGEST  # which NaN is not


def _dress(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=11, color=INK)
    axes.set_xlabel("epoch", color=INK)
    axes.set_xlim(left=0)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.grid(axis="y", color=GRID)
    axes.set_axisbelow(True)
    axes.tick_params(colors=INK, length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(GRID)
