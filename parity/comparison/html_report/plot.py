"""The plots of the page: SVG elements in the colours and the font of the page, and PNG files."""

import io
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.image import imsave

from parity.checkpoints.layout import Array
from parity.comparison.report import Report, TensorComparison
from parity.comparison.tolerances import FLOAT64_TOLERANCE, ErrorNorms

# Intermediates on the main path through the model; all others lie between two of these.
MAIN_PATH = re.compile(r"embed|blocks\.\d+|norm|pool|fc_norm|logits")

# Okabe and Ito's colours (2008), which colour-blind people can tell apart; markers and dashes also tell the lines apart.
LIGHT = {"ink": "#1c1c1a", "soft": "#6b6a66", "rule": "#e3e1da", "paper": "#ffffff", "bad": "#b3261e"} | {
    "jax": "#0072b2",
    "torch": "#d55e00",
    "exact": "#00805c",
}
# In SVG each colour is a placeholder for a CSS variable of the page, so that one drawing serves light and dark mode.
_VARIABLES = {name: f"#0000{i:02x}" for i, name in enumerate(LIGHT, start=1)}
_STYLE = {"svg.fonttype": "none", "svg.hashsalt": "parity"}  # text stays text, and ids are reproducible

_DASHES: dict[str, Any] = {"exact": "-", "jax": "-", "torch": (0, (4, 2))}
_MARKERS = {"jax": "o", "torch": "s", "exact": "D"}


@dataclass(frozen=True)
class Size:
    """Size of a figure.

    width, height: in inches.
    text: the font size in points.
    top: the upper edge of the axes, as a fraction of the height.
    """

    width: float
    height: float
    text: float
    top: float = 0.92


WIDE, LOW, NARROW = Size(9.2, 4.5, 9), Size(9.2, 3, 9), Size(5, 5.2, 10.5)
PRINT = Size(9.2, 5, 9.5, top=0.87)  # a title is above the axes


@dataclass(frozen=True)
class PlotLine:
    """One line of a plot.

    role: selects colour, marker and dashes: "jax", "torch" or "exact".
    label: text at the end of the line.
    x, y: coordinates of its points.
    """

    role: str
    label: str
    x: Sequence[float]
    y: Sequence[float]


# Plots of the page ---------------------------------------------------------------------------------------------------


def error_svg(report: Report, size: Size) -> str:
    """Return a plot of the error by depth as an SVG element of the page."""
    with _default_style():
        return _svg(_plot_error_by_depth(report, size, _VARIABLES), f"depth{size.width:.0f}")


def error_png(report: Report, title: str, software: str) -> bytes:
    """Return the plot of the error by depth as a PNG file in light colours, with `title` and `software` in its metadata."""
    with _default_style():
        figure = _plot_error_by_depth(report, PRINT, LIGHT)
        figure.suptitle(title, x=0.066, y=0.985, ha="left", fontsize=PRINT.text + 2, weight="bold", color=LIGHT["ink"])
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=170, metadata={"Software": software, "Title": title})
    return buffer.getvalue()


def loss_svg(lines: Sequence[PlotLine], size: Size) -> str:
    """Return a plot of the difference of the losses by step as an SVG element of the page."""
    with _default_style():
        figure, axes = _new_figure(size, _VARIABLES, "difference of the losses", bottom=0.16)
        _set_limits(axes, [y for line in lines for y in line.y])
        for line in lines:
            _draw_line(axes, line, _VARIABLES, size.text / 3)
        _label_lines(axes, lines, _VARIABLES, size)
        axes.set_xlabel("optimizer step", color=_VARIABLES["soft"])
        return _svg(figure, f"loss{size.width:.0f}")


def image_png(pixels: Array, *, limits: tuple[float, float] | None = None, colours: str = "viridis") -> bytes:
    """Return a PNG file of an image (H, W, 3) in [0, 1], or of an array (H, W) in a colour map.

    Args:
        pixels: the image or the array.
        limits: lowest and highest value of the colour map; by default 0 and 1.
        colours: name of the colour map in matplotlib.
    """
    low, high = limits or (0.0, 1.0)
    buffer = io.BytesIO()
    metadata: Any = {"Software": None}  # without matplotlib's version, so that every version writes the same bytes
    imsave(buffer, pixels, vmin=low, vmax=high, cmap=colours, format="png", metadata=metadata)
    return buffer.getvalue()


# Error by depth ------------------------------------------------------------------------------------------------------


def _plot_error_by_depth(report: Report, size: Size, colours: Mapping[str, str]) -> Figure:
    """Draw a line along the main path for each run, dots for all other intermediates, and the tolerances."""
    figure, axes = _new_figure(size, colours)
    positions = _x_positions([m.name for m in report.measures])
    forward = [m for m in report.measures if m.name in positions]
    sides = {"jax": f"JAX {report.dtype}", "torch": f"PyTorch {report.dtype}", "exact": "float64"}
    found = {role: [(m.name, y) for m in forward if (y := _error(m, role)) is not None] for role in sides}
    tolerances = {"the function, in float64": FLOAT64_TOLERANCE}
    if found["jax"]:
        tolerances[f"the precision of {report.dtype}"] = forward[0].budget.tolerance
    _set_limits(axes, [y for points in found.values() for _, y in points] + list(tolerances.values()))
    lines = []
    for role, points in found.items():
        between = [(positions[name], y) for name, y in points if not MAIN_PATH.fullmatch(name)]
        main_path = [(positions[name], y) for name, y in points if MAIN_PATH.fullmatch(name)]
        faint, x = to_rgba(colours[role], 0.35), [x for x, _ in between]
        axes.scatter(x, _clipped(axes, between), s=7, color=faint, lw=0, zorder=2, clip_on=False)
        if main_path:
            lines.append(PlotLine(role, sides[role], [x for x, _ in main_path], [y for _, y in main_path]))
            _draw_line(axes, lines[-1], colours, size.text / 2.1)
    for text, tolerance in tolerances.items():
        axes.axhline(tolerance, color=colours["soft"], lw=1, dashes=(1.5, 2), zorder=1)
        axes.annotate(
            f"tolerance for {text}: {tolerance:.0e}",
            (1, tolerance),
            (0, 3),
            xycoords=axes.get_yaxis_transform(),
            textcoords="offset points",
            ha="right",
            fontsize=size.text - 1,
            color=colours["soft"],
        )
    _mark_first_difference(axes, report, positions, colours, size)
    _label_lines(axes, lines, colours, size)
    _label_stages(axes, positions, size)
    return figure


def _x_positions(names: Sequence[str]) -> dict[str, float]:
    """Return the x position of each intermediate up to the logits: integers on the main path, fractions between them."""
    positions: dict[str, float] = {}
    pending: list[str] = []
    stage = 0
    for name in names:
        if not MAIN_PATH.fullmatch(name):
            pending.append(name)
            continue
        positions |= {each: stage - 1 + (i + 1) / (len(pending) + 1) for i, each in enumerate(pending)}
        positions[name] = stage
        pending, stage = [], stage + 1
    return positions


def _error(measure: TensorComparison, role: str) -> float | None:
    error: ErrorNorms | None = measure.function if role == "exact" else getattr(measure, role)
    return None if error is None else error.relative_rms(measure.scale)


def _mark_first_difference(
    axes: Axes, report: Report, positions: Mapping[str, float], colours: Mapping[str, str], size: Size
) -> None:
    """Mark the first tensor that differs, if it is in the forward pass."""
    name = report.origins[0].name if report.origins else report.first.name if report.first else ""
    if name not in positions:
        return
    is_left = positions[name] < sum(axes.get_xlim()) / 2
    axes.axvline(positions[name], color=colours["bad"], lw=1.2, zorder=1)
    axes.annotate(
        f"first: {name}",
        (positions[name], 0),
        (4 if is_left else -4, 5),
        xycoords=axes.get_xaxis_transform(),
        textcoords="offset points",
        ha="left" if is_left else "right",
        fontsize=size.text,
        color=colours["bad"],
    )


def _label_stages(axes: Axes, positions: Mapping[str, float], size: Size) -> None:
    """Label the stages on the x axis: blocks by number, as many as fit."""
    stages = {name: int(x) for name, x in positions.items() if MAIN_PATH.fullmatch(name)}
    blocks = [name for name in stages if name.startswith("blocks.")]
    spacing = size.width * 72 * 0.68 / len(stages)  # points between two stages
    labels = {name: name.removeprefix("blocks.") for name in blocks[:: math.ceil(2 * size.text / spacing)]}
    words = [name for name in stages if name not in blocks]
    labels |= {name: name for name in (words if spacing > 1.2 * size.text else words[-1:])}
    axes.set_xticks([stages[name] for name in labels], list(labels.values()))
    for label in axes.get_xticklabels():
        if not label.get_text().isdigit():
            label.set(rotation=60, ha="right", rotation_mode="anchor")
    axes.set_xlabel("blocks by number, in the order of computation", color=axes.yaxis.label.get_color())
    axes.set_xlim(-0.7 - (min(positions.values(), default=0) < 0) * 0.3, max(stages.values(), default=0) + 0.4)


# Shared by all plots -------------------------------------------------------------------------------------------------


@contextmanager
def _default_style() -> Iterator[None]:
    """Use matplotlib's default style, whatever style the user has set."""
    with style.context(["default", _STYLE]):
        yield


def _new_figure(
    size: Size, colours: Mapping[str, str], measure: str = "relRMS", bottom: float = 0.19
) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(size.width, size.height), facecolor="none" if colours is _VARIABLES else colours["paper"])
    margin = 6.5 * size.text / (size.width * 72)
    axes = figure.add_axes((0.6 * margin + 0.01, bottom, 0.99 - 2.2 * margin, size.top - bottom), facecolor="none")
    axes.set_yscale("log")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(colours["rule"])
    axes.tick_params(colors=colours["soft"], labelsize=size.text, length=0, pad=5)
    axes.tick_params(which="minor", left=False)
    axes.grid(axis="y", color=colours["rule"], lw=0.7)
    axes.set_axisbelow(True)
    axes.set_title(measure, loc="left", fontsize=size.text, color=colours["soft"], pad=8)
    axes.yaxis.label.set_color(colours["soft"])
    axes.xaxis.label.set_fontsize(size.text)
    return figure, axes


def _set_limits(axes: Axes, values: Sequence[float]) -> None:
    """Set the y limits to whole decades around all positive finite values, with at most eight ticks."""
    sizes = [math.log10(value) for value in values if 0 < value < math.inf] or [0.0]
    low, high = math.floor(min(sizes) - 0.3), math.ceil(max(sizes) + 0.5)
    axes.set_ylim(10.0**low, 10.0**high)
    step = max(1, math.ceil((high - low) / 7))
    ticks = range(high - (high - low) // step * step, high + 1, step)
    axes.set_yticks([10.0**tick for tick in ticks], [f"1e{tick:03d}" if tick < 0 else f"1e+{tick:02d}" for tick in ticks])


def _clipped(axes: Axes, points: Sequence[tuple[float, float]]) -> list[float]:
    """Return y values with zero moved to the lower edge of the plot, and infinity to the upper."""
    low, high = axes.get_ylim()
    return [min(max(y, low), high) for _, y in points]


def _draw_line(axes: Axes, line: PlotLine, colours: Mapping[str, str], dot: float) -> None:
    """Draw a line with markers of size `dot`; values outside of the y limits have hollow markers and interrupt the line."""
    x, y = np.asarray(line.x), np.asarray(_clipped(axes, list(zip(line.x, line.y, strict=True))))
    low, high = axes.get_ylim()
    inside = (y > low) & (y < high)
    colour = colours[line.role]
    order = 3 + 0.1 * list(_DASHES).index(line.role)  # dashed lines above solid ones, which show through
    axes.plot(x, np.where(inside, y, np.nan), color=colour, lw=1.8, ls=_DASHES[line.role], zorder=order)
    shape = _MARKERS[line.role]
    axes.plot(x[inside], y[inside], shape, color=colour, ms=dot, mec=colours["paper"], mew=0.6, zorder=order + 1)
    axes.plot(x[~inside], y[~inside], "o", color=colours["paper"], mec=colour, ms=4, zorder=order + 1, clip_on=False)


def _label_lines(axes: Axes, lines: Sequence[PlotLine], colours: Mapping[str, str], size: Size) -> None:
    """Label each line at its end, without overlaps."""
    if not lines:
        return
    (low, high), axes_height = axes.get_ylim(), axes.get_window_extent().height * 72 / axes.figure.dpi
    ends = [
        (math.log(_clipped(axes, [(0, line.y[-1])])[0] / low) / math.log(high / low) * axes_height, line) for line in lines
    ]
    last = -math.inf
    for height, line in sorted(ends, key=lambda end: end[0]):
        last = max(height, last + 1.25 * size.text)
        axes.annotate(
            line.label,
            (1, 0),
            (7, last),
            xycoords="axes fraction",
            textcoords="offset points",
            va="center",
            fontsize=size.text,
            weight="bold",
            color=colours[line.role],
        )


def _svg(figure: Figure, prefix: str) -> str:
    """Return a figure as an SVG element: no header, ids that start with `prefix`, the page's colours and font."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = buffer.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r"<style.*?</style>", "", text, flags=re.DOTALL)
    text = re.sub(r'<svg [^>]*?(viewBox="[^"]*")[^>]*>', r'<svg aria-hidden="true" \1>', text)
    text = re.sub(r"font-family: [^;\"]*;? ?|<defs>\s*</defs>", "", text).replace("xlink:href", "href")
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{prefix}-", text)
    for name, colour in _VARIABLES.items():
        text = text.replace(colour, f"var(--{name})")
    return re.sub(r"\n\s*", "\n", text)
