"""The figures of the page: as SVG that takes the page's colours and font, and as PNG."""

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

from parity.comparison.report import Measure, Report
from parity.comparison.tolerances import FUNCTION, Array, Error

# The path that an image takes through every model; all else that is named lies between two of these.
STREAM = re.compile(r"embed|blocks\.\d+|norm|pool|fc_norm|logits")

# Okabe and Ito's colours (2008), which colour-blind people tell apart; shapes and dashes say the same again.
LIGHT = {"ink": "#1c1c1a", "soft": "#6b6a66", "rule": "#e3e1da", "paper": "#ffffff", "bad": "#b3261e"} | {
    "jax": "#0072b2",
    "torch": "#d55e00",
    "exact": "#00805c",
}
# In SVG each colour stands for a variable of the page's style, so that one drawing serves light and dark.
_VARIABLES = {name: f"#0000{i:02x}" for i, name in enumerate(LIGHT, start=1)}
_STYLE = {"svg.fonttype": "none", "svg.hashsalt": "parity"}  # text stays text; ids are the same each time

_DASHES: dict[str, Any] = {"exact": "-", "jax": "-", "torch": (0, (4, 2))}
_MARKERS = {"jax": "o", "torch": "s", "exact": "D"}


@dataclass(frozen=True)
class Size:
    """How large a figure is drawn: width and height in inches, and the size of its text in points."""

    width: float
    height: float
    text: float


WIDE, LOW, NARROW, PRINT = Size(9.2, 4.5, 9), Size(9.2, 3, 9), Size(5, 5.2, 10.5), Size(9.2, 5, 9.5)


@dataclass(frozen=True)
class Line:
    """One line of a figure: where, how far apart, and what it is called; `role` is the name of a colour."""

    role: str
    label: str
    x: Sequence[float]
    y: Sequence[float]


# What the page asks for ----------------------------------------------------------------------------------------------


def svg(report: Report, size: Size) -> str:
    """Draw the error by depth, to be put in the page."""
    with _plain():
        return _svg(_depth(report, size, _VARIABLES), f"depth{size.width:.0f}")


def png(report: Report, title: str) -> bytes:
    """Draw it in light colours, for a place that has no page."""
    with _plain():
        figure = _depth(report, PRINT, LIGHT)
        figure.suptitle(title, x=0.066, y=0.985, ha="left", fontsize=PRINT.text + 2, weight="bold", color=LIGHT["ink"])
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=170, metadata={"Software": None})
    return buffer.getvalue()


def losses(lines: Sequence[Line], size: Size) -> str:
    """Draw how far losses part, step by step, to be put in the page."""
    with _plain():
        figure, axes = _figure(size, _VARIABLES, "difference of the losses", bottom=0.16)
        _limits(axes, [y for line in lines for y in line.y])
        for line in lines:
            _draw(axes, line, _VARIABLES, size.text / 3)
        _label(axes, lines, _VARIABLES, size)
        axes.set_xlabel("optimizer step", color=_VARIABLES["soft"])
        return _svg(figure, f"loss{size.width:.0f}")


def picture(pixels: Array, *, limits: tuple[float, float] | None = None, colours: str = "viridis") -> bytes:
    """Return a PNG of an image (H, W, 3) in [0, 1], or of a map (H, W) in a scale of colours."""
    low, high = limits or (0.0, 1.0)
    buffer = io.BytesIO()
    unsigned: Any = {"Software": None}  # no version of matplotlib, so that the bytes are the same with all
    imsave(buffer, pixels, vmin=low, vmax=high, cmap=colours, format="png", metadata=unsigned)
    return buffer.getvalue()


# Error by depth ------------------------------------------------------------------------------------------------------


def _depth(report: Report, size: Size, colours: Mapping[str, str]) -> Figure:
    """Lines along the stream, dots for what lies between, and the bars."""
    figure, axes = _figure(size, colours)
    places = _places([m.name for m in report.measures])
    forward = [m for m in report.measures if m.name in places]
    sides = {"jax": f"JAX {report.dtype}", "torch": f"PyTorch {report.dtype}", "exact": "float64"}
    found = {role: [(m.name, y) for m in forward if (y := _error(m, role)) is not None] for role in sides}
    bars = {"the function, in float64": FUNCTION}
    if found["jax"]:
        bars[f"the precision of {report.dtype}"] = forward[0].budget.ceiling
    _limits(axes, [y for points in found.values() for _, y in points] + list(bars.values()))
    lines = []
    for role, points in found.items():
        between = [(places[name], y) for name, y in points if not STREAM.fullmatch(name)]
        stream = [(places[name], y) for name, y in points if STREAM.fullmatch(name)]
        faint, x = to_rgba(colours[role], 0.35), [x for x, _ in between]
        axes.scatter(x, _clipped(axes, between), s=7, color=faint, lw=0, zorder=2, clip_on=False)
        if stream:
            lines.append(Line(role, sides[role], [x for x, _ in stream], [y for _, y in stream]))
            _draw(axes, lines[-1], colours, size.text / 2.1)
    for text, bar in bars.items():
        axes.axhline(bar, color=colours["soft"], lw=1, dashes=(1.5, 2), zorder=1)
        axes.annotate(
            f"bar for {text}: {bar:.0e}",
            (1, bar),
            (0, 3),
            xycoords=axes.get_yaxis_transform(),
            textcoords="offset points",
            ha="right",
            fontsize=size.text - 1,
            color=colours["soft"],
        )
    _mark(axes, report, places, colours, size)
    _label(axes, lines, colours, size)
    _ticks(axes, places, size)
    return figure


def _places(names: Sequence[str]) -> dict[str, float]:
    """Where each intermediate up to the logits lies: whole numbers along the stream, and fractions between."""
    places: dict[str, float] = {}
    waiting: list[str] = []
    stage = 0
    for name in names:
        if not STREAM.fullmatch(name):
            waiting.append(name)
            continue
        places |= {each: stage - 1 + (i + 1) / (len(waiting) + 1) for i, each in enumerate(waiting)}
        places[name] = stage
        waiting, stage = [], stage + 1
    return places


def _error(measure: Measure, role: str) -> float | None:
    error: Error | None = measure.function if role == "exact" else getattr(measure, role)
    return None if error is None else error.relative_rms(measure.scale)


def _mark(axes: Axes, report: Report, places: Mapping[str, float], colours: Mapping[str, str], size: Size) -> None:
    """Show where the first part that differs lies, if it is one of the forward pass."""
    name = report.origins[0].name if report.origins else report.first.name if report.first else ""
    if name not in places:
        return
    left = places[name] < sum(axes.get_xlim()) / 2
    axes.axvline(places[name], color=colours["bad"], lw=1.2, zorder=1)
    axes.annotate(
        f"first: {name}",
        (places[name], 0),
        (4 if left else -4, 5),
        xycoords=axes.get_xaxis_transform(),
        textcoords="offset points",
        ha="left" if left else "right",
        fontsize=size.text,
        color=colours["bad"],
    )


def _ticks(axes: Axes, places: Mapping[str, float], size: Size) -> None:
    """Name the stages: blocks by number, as many as there is room for."""
    stages = {name: int(x) for name, x in places.items() if STREAM.fullmatch(name)}
    blocks = [name for name in stages if name.startswith("blocks.")]
    room = size.width * 72 * 0.68 / len(stages)  # points
    shown = {name: name.removeprefix("blocks.") for name in blocks[:: math.ceil(2 * size.text / room)]}
    words = [name for name in stages if name not in blocks]
    shown |= {name: name for name in (words if room > 1.2 * size.text else words[-1:])}
    axes.set_xticks([stages[name] for name in shown], list(shown.values()))
    for label in axes.get_xticklabels():
        if not label.get_text().isdigit():
            label.set(rotation=60, ha="right", rotation_mode="anchor")
    axes.set_xlabel("blocks by number, in the order of computation", color=axes.yaxis.label.get_color())
    axes.set_xlim(-0.7 - (min(places.values(), default=0) < 0) * 0.3, max(stages.values(), default=0) + 0.4)


# What figures share --------------------------------------------------------------------------------------------------


@contextmanager
def _plain() -> Iterator[None]:
    """Matplotlib as it comes, whatever the user has set it to."""
    with style.context(["default", _STYLE]):
        yield


def _figure(size: Size, colours: Mapping[str, str], measure: str = "relRMS", bottom: float = 0.19) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(size.width, size.height), facecolor="none" if colours is _VARIABLES else colours["paper"])
    margin = 6.5 * size.text / (size.width * 72)
    axes = figure.add_axes((0.6 * margin + 0.01, bottom, 0.99 - 2.2 * margin, 0.92 - bottom), facecolor="none")
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


def _limits(axes: Axes, values: Sequence[float]) -> None:
    """Whole decades around everything that is a number above zero; a tick for every third."""
    sizes = [math.log10(value) for value in values if 0 < value < math.inf] or [0.0]
    low, high = math.floor(min(sizes) - 0.3), math.ceil(max(sizes) + 0.5)
    axes.set_ylim(10.0**low, 10.0**high)
    step = max(1, math.ceil((high - low) / 7))
    ticks = range(high - (high - low) // step * step, high + 1, step)
    axes.set_yticks([10.0**tick for tick in ticks], [f"1e{tick:03d}" if tick < 0 else f"1e+{tick:02d}" for tick in ticks])


def _clipped(axes: Axes, points: Sequence[tuple[float, float]]) -> list[float]:
    """What is zero lies on the lower edge, what is infinite on the upper."""
    low, high = axes.get_ylim()
    return [min(max(y, low), high) for _, y in points]


def _draw(axes: Axes, line: Line, colours: Mapping[str, str], dot: float) -> None:
    """Draw a line with dots of so many points; those off the scale are hollow, and break it."""
    x, y = np.asarray(line.x), np.asarray(_clipped(axes, list(zip(line.x, line.y, strict=True))))
    low, high = axes.get_ylim()
    inside = (y > low) & (y < high)
    colour = colours[line.role]
    order = 3 + 0.1 * list(_DASHES).index(line.role)  # dashes show what they cover
    axes.plot(x, np.where(inside, y, np.nan), color=colour, lw=1.8, ls=_DASHES[line.role], zorder=order)
    shape = _MARKERS[line.role]
    axes.plot(x[inside], y[inside], shape, color=colour, ms=dot, mec=colours["paper"], mew=0.6, zorder=order + 1)
    axes.plot(x[~inside], y[~inside], "o", color=colours["paper"], mec=colour, ms=4, zorder=order + 1, clip_on=False)


def _label(axes: Axes, lines: Sequence[Line], colours: Mapping[str, str], size: Size) -> None:
    """Name each line at its end, one text above the other."""
    if not lines:
        return
    (low, high), room = axes.get_ylim(), axes.get_window_extent().height * 72 / axes.figure.dpi
    ends = [(math.log(_clipped(axes, [(0, line.y[-1])])[0] / low) / math.log(high / low) * room, line) for line in lines]
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
    """Return a figure as an element of a page: no header, ids of its own, the page's colours and font."""
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
