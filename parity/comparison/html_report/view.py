"""The data of the page, in the form that the template needs."""

import math
import re
from base64 import b64encode
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from markupsafe import Markup, escape

import vit_spec
from parity.checkpoints.layout import Array
from parity.comparison.html_report import plot
from parity.comparison.html_report.attention import AttentionMaps
from parity.comparison.localisation import GRADIENT_OF
from parity.comparison.report import Report, TensorComparison
from parity.comparison.tolerances import ErrorNorms
from vit_spec import ViTConfig
from vit_spec.printable import printable

MAX_GRADIENTS = 20  # rows of the table of gradients


@dataclass(frozen=True)
class TableRow:
    """A row of a table: one tensor.

    passed: whether it passes the checks.
    name: name of the tensor.
    float64: relRMS between the twins in float64.
    jax, torch: relRMS of each twin in the lower precision from float64; None if it was not computed.
    largest, bias, one_minus_cosine, allclose_tolerance: measures of the twin with the larger error, in the lower precision
        if it was compared, else in float64; see `ErrorNorms`.
    """

    name: str
    passed: bool
    float64: float
    jax: float | None
    torch: float | None
    largest: float
    bias: float
    one_minus_cosine: float
    allclose_tolerance: float

    @classmethod
    def of(cls, m: TensorComparison) -> "TableRow":
        """Return the row of a tensor."""
        jax, torch = (error.relative_rms(m.scale) if error else None for error in (m.jax, m.torch))
        far = max((e for e in (m.jax, m.torch) if e), key=ErrorNorms.relative_rms, default=m.function)
        figures = (far.relative_max(m.scale), far.bias(m.scale), 1 - far.cosine, far.allclose_tolerance)
        return cls(m.name, m.passed, m.difference, jax, torch, *figures)


@dataclass(frozen=True)
class Panel:
    """An image with a title.

    title: the title.
    source: the image as a data URL.
    scale: name of the colour map, and the lowest and the highest value; None for an image in its own colours.
    """

    title: str
    source: str
    scale: tuple[str, float, float] | None = None


def rows(report: Report) -> list[TableRow]:
    """Return the rows of all tensors, in the order of computation."""
    return [TableRow.of(m) for m in report.measures]


def worst_gradients(report: Report) -> list[TableRow]:
    """Return the rows of the gradients of single parameters with the largest errors, largest first."""
    gradients = [m for m in report.measures if m.name.startswith(GRADIENT_OF)]
    found = [TableRow.of(replace(m, name=m.name.removeprefix(GRADIENT_OF))) for m in gradients]
    return sorted(found, key=lambda row: -row.float64)[:MAX_GRADIENTS]


def verdict_sentence(report: Report) -> str:
    """Return the verdict as a sentence, without the word PASS or FAIL at its beginning."""
    text = report.verdict.partition(": ")[2].replace("; PASS: ", "; ")
    return f"{text[:1].upper()}{text[1:]}."


def describe_model(config: ViTConfig) -> str:
    """Return the name of a model, if it is a named one, and its number of parameters."""
    name = next((name for name in vit_spec.names() if vit_spec.get(name) == config), "a ViT")
    return f"{name}: {vit_spec.count(config):,} parameters"


def describe_sizes(config: ViTConfig) -> str:
    """Return depth, width and other sizes of a model as text."""
    image, patch = (_height_times_width(size) for size in (config.image_size, config.patch_size))
    return (
        f"{config.depth} blocks of width {config.width}, {config.num_heads} heads, MLP {config.mlp_dim}; "
        f"images {image} in patches of {patch}; {config.num_classes or 'no'} classes"
    )


def _height_times_width(size: tuple[int, int]) -> str:
    return f"{size[0]} × {size[1]}"


def mean_panels(maps: AttentionMaps) -> list[Panel]:
    """Return four panels: the image, and the means over heads of both maps and of their difference."""
    return [Panel("Sample image", _data_url(plot.image_png(maps.image))), *_map_panels(maps, None)]


def head_panels(maps: AttentionMaps) -> list[list[Panel]]:
    """Return the three panels of each head."""
    return [_map_panels(maps, head) for head in range(len(maps.jax))]


def _map_panels(maps: AttentionMaps, head: int | None) -> list[Panel]:
    """Return the panels of both maps, with the same scale, and of their difference."""
    jax, torch, difference = (x.mean(0) if head is None else x[head] for x in (maps.jax, maps.torch, maps.difference))
    scale = ("viridis", 0.0, float(max(jax.max(), torch.max())))
    size = max_abs(difference)
    return [
        _panel("JAX", jax, scale),
        _panel("PyTorch", torch, scale),
        _panel("Difference", difference, ("RdBu_r", -size, size)),
    ]


def _panel(title: str, values: Array, scale: tuple[str, float, float]) -> Panel:
    colours, low, high = scale
    limits = (low, high) if high > low else (-1.0, 1.0)
    return Panel(title, _data_url(plot.image_png(values, limits=limits, colours=colours)), scale)


def _data_url(png: bytes) -> str:
    return f"data:image/png;base64,{b64encode(png).decode()}"


def max_abs(values: Array) -> float:
    """Return the largest magnitude of an entry."""
    return float(abs(values).max())


def loss_lines(training: Mapping[str, Any]) -> list[plot.PlotLine]:
    """Return the relative difference of the twins' losses by step, in each type that both trained in."""
    lines, losses = [], training.get("losses", {})
    for role, dtype in (("jax", "float32"), ("exact", "float64")):
        sides = [losses.get(f"{side} {dtype}") for side in ("jax", "torch")]
        if all(sides):
            pairs = list(zip(*sides, strict=True))
            differences = [abs(a - b) / abs(b) if b else math.inf for a, b in pairs]
            lines.append(plot.PlotLine(role, dtype, range(1, len(differences) + 1), differences))
    return lines


def environment_rows(environment: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield name and text of every entry of an environment except for the settings, which have their own table."""
    for name, value in environment.items():
        if isinstance(value, Mapping):
            if name != "settings":
                yield from environment_rows(value, f"{prefix}{name}, ")
        else:
            text = ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else value
            yield f"{prefix}{name}", "–" if text is None else str(text)


def infinite_errors(report: Report) -> list[str]:
    """Return the reasons for infinite errors of parts in isolation, each once."""
    return list(dict.fromkeys(report.describe_origin(origin) for origin in report.origins if origin.reason))


def short_number(number: float | None) -> str:
    """Return a number with two digits; a dash for None."""
    if number is None:
        return "–"
    return str(number).replace("inf", "∞") if math.isinf(number) else f"{number:.1e}" if number else "0"


def unbroken_numbers(text: str) -> Markup:
    """Return a text as HTML in which no line breaks within a number such as 1e-12."""
    return Markup(re.sub(r"\d[\d.]*e[-+]\d+", r"<span class=nowrap>\g<0></span>", str(escape(text))))


def printable_text(value: Any) -> Any:
    """Return a value of the template, made printable if it is plain text: names of files may be outside UTF-8."""
    return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def breakable_name(name: str) -> Markup:
    """Return a name as HTML in which a line may break after each dot."""
    return Markup(str(escape(name)).replace(".", ".<wbr>"))


def full_number(number: float | None) -> str:
    """Return a number with all digits as JavaScript reads it; an empty text for None."""
    if number is None:
        return ""
    return repr(number) if math.isfinite(number) else str(number).replace("inf", "Infinity")
