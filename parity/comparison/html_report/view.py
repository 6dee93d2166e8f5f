"""What the page shows, in the shape in which the template needs it."""

import math
import re
from base64 import b64encode
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from markupsafe import Markup, escape

import vit_spec
from parity.comparison.html_report import plot
from parity.comparison.html_report.attention import Maps
from parity.comparison.localisation import GRADIENT
from parity.comparison.report import Measure, Report
from parity.comparison.tolerances import Array, Error
from vit_spec import ViTConfig

WORST = 20  # gradients that are shown at once


@dataclass(frozen=True)
class Row:
    """A tensor in a table.

    float64, jax, torch: relRMS.
    largest, bias, angle, tolerance: of the twin that is farther, in the coarser type where that was asked for; `angle` is
        1 less the cosine.
    """

    name: str
    passed: bool
    float64: float
    jax: float | None
    torch: float | None
    largest: float
    bias: float
    angle: float
    tolerance: float

    @classmethod
    def of(cls, m: Measure) -> "Row":
        """Read a measure."""
        jax, torch = (error.relative_rms(m.scale) if error else None for error in (m.jax, m.torch))
        far = max((e for e in (m.jax, m.torch) if e), key=Error.relative_rms, default=m.function)
        figures = (far.relative_max(m.scale), far.bias(m.scale), 1 - far.cosine, far.tolerance)
        return cls(m.name, m.passed, m.difference, jax, torch, *figures)


@dataclass(frozen=True)
class Panel:
    """A picture, and the scale of its colours: name, lowest and highest."""

    title: str
    source: str
    scale: tuple[str, float, float] | None = None


def rows(report: Report) -> list[Row]:
    """Every tensor, in the order of computation."""
    return [Row.of(m) for m in report.measures]


def worst(report: Report) -> list[Row]:
    """The gradients of single parameters, by their names, that part the most, the worst first."""
    found = [Row.of(replace(m, name=m.name.removeprefix(GRADIENT))) for m in report.measures if m.name.startswith(GRADIENT)]
    return sorted(found, key=lambda row: -row.float64)[:WORST]


def stated(report: Report) -> str:
    """The verdict as a sentence, without its first word."""
    text = report.verdict.partition(": ")[2].replace("; PASS: ", "; ")
    return f"{text[:1].upper()}{text[1:]}."


def model(config: ViTConfig) -> str:
    """The name of a model, where it has one, and its sizes."""
    name = next((name for name in vit_spec.names() if vit_spec.get(name) == config), "a ViT")
    return f"{name}: {vit_spec.count(config):,} parameters"


def sizes(config: ViTConfig) -> str:
    """What the parameters are made of."""
    image, patch = (_times(size) for size in (config.image_size, config.patch_size))
    return (
        f"{config.depth} blocks of width {config.width}, {config.num_heads} heads, MLP {config.mlp_dim}; "
        f"images {image} in patches of {patch}; {config.num_classes or 'no'} classes"
    )


def _times(size: tuple[int, int]) -> str:
    return f"{size[0]} × {size[1]}"


def panels(maps: Maps) -> list[Panel]:
    """The image, and the mean over the heads of both maps and of their difference."""
    return [Panel("Sample image", _data(plot.picture(maps.image))), *_three(maps, None)]


def heads(maps: Maps) -> list[list[Panel]]:
    """The three maps of each head."""
    return [_three(maps, head) for head in range(len(maps.jax))]


def _three(maps: Maps, head: int | None) -> list[Panel]:
    """Both maps in one scale, and their difference in one of its own."""
    jax, torch, apart = (x.mean(0) if head is None else x[head] for x in (maps.jax, maps.torch, maps.difference))
    share = ("viridis", 0.0, float(max(jax.max(), torch.max())))
    size = largest(apart)
    return [
        _panel("JAX", jax, share),
        _panel("PyTorch", torch, share),
        _panel("Difference", apart, ("RdBu_r", -size, size)),
    ]


def _panel(title: str, values: Array, scale: tuple[str, float, float]) -> Panel:
    colours, low, high = scale
    limits = (low, high) if high > low else (-1.0, 1.0)
    return Panel(title, _data(plot.picture(values, limits=limits, colours=colours)), scale)


def _data(png: bytes) -> str:
    return f"data:image/png;base64,{b64encode(png).decode()}"


def largest(values: Array) -> float:
    """The largest size of an entry."""
    return float(abs(values).max())


def loss_lines(training: Mapping[str, Any]) -> list[plot.Line]:
    """How far the twins' losses part at each step, relative to PyTorch's, in each type that both trained in."""
    lines, losses = [], training.get("losses", {})
    for role, dtype in (("jax", "float32"), ("exact", "float64")):
        sides = [losses.get(f"{side} {dtype}") for side in ("jax", "torch")]
        if all(sides):
            pairs = list(zip(*sides, strict=True))
            apart = [abs(a - b) / abs(b) if b else math.inf for a, b in pairs]
            lines.append(plot.Line(role, dtype, range(1, len(apart) + 1), apart))
    return lines


def facts(card: Mapping[str, Any], ahead: str = "") -> Iterator[tuple[str, str]]:
    """A card as names and texts, without the settings, which have a table of their own."""
    for name, value in card.items():
        if isinstance(value, Mapping):
            if name != "settings":
                yield from facts(value, f"{ahead}{name}, ")
        else:
            text = ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else value
            yield f"{ahead}{name}", "–" if text is None else str(text)


def figure(number: float | None) -> str:
    """Two digits; a dash for what was not measured."""
    if number is None:
        return "–"
    return str(number).replace("inf", "∞") if math.isinf(number) else f"{number:.1e}" if number else "0"


def unbroken(text: str) -> Markup:
    """Keep a line from ending within a number such as 1e-12."""
    return Markup(re.sub(r"\d[\d.]*e[-+]\d+", r"<span class=nowrap>\g<0></span>", str(escape(text))))


def dotted(name: str) -> Markup:
    """Let a line end after the dots of a name."""
    return Markup(str(escape(name)).replace(".", ".<wbr>"))


def exact(number: float | None) -> str:
    """All digits, as JavaScript reads them; nothing for what was not measured."""
    if number is None:
        return ""
    return repr(number) if math.isfinite(number) else str(number).replace("inf", "Infinity")
