"""What moved since a golden was recorded: which framework, where first, and what else is another than it was.

In float64 the bar is that of G0, 1e-12: 1e-15 to 1e-14 are found, whatever the machine.  In float32 another processor, or
another version that adds in another order, makes other errors of the same size.  So the distance now and the distance
then are held to each other as gate G1 holds the twins, in both directions: one may be twice the other, widened by luck
and by a tenth of 5e-6, below which nothing is told.  As there, gradients are judged as a whole.
"""

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.table import Table

from parity.checkpoints.reading import Source
from parity.comparison.golden.file import FRAMEWORKS, Array, Golden, Record
from parity.comparison.tolerances import FUNCTION, PRECISION, RATIO, SLACK, luck
from parity.terminal import Terminal

WHOLE = "gradient"  # of all parameters and the images

_OF = {"jax": ("jax", "jaxlib", "flax"), "torch": ("torch",)}  # what of a card is whose
_COMMON = ("numpy", "twin-vision-transformers", "python", "backend", "cpu")


@dataclass(frozen=True)
class Moved:
    """A tensor whose distance is not what it was.

    framework: "jax" or "torch".
    dtype: "float64", from the reference; or "float32", from the framework's own float64.
    recorded, found: relRMS.
    """

    framework: str
    tensor: str
    dtype: str
    recorded: float
    found: float

    def __str__(self) -> str:
        if math.isinf(self.found):
            return f"{self.tensor} is missing, of another shape, or not finite in {self.dtype}"
        if self.dtype == "float64":
            return f"{self.tensor} is {self.found:.1e} from the recorded float64 reference (bar {FUNCTION:.0e})"
        return f"{self.tensor} is {self.found:.1e} from float64 in float32, where {self.recorded:.1e} was recorded"


@dataclass(frozen=True, eq=False)
class Verification:
    """What `verify` found; print it for a table.

    path: of the golden file.
    now: what was computed now.
    moved: in float64 before float32, and in the order of computation.
    absent: frameworks that could not be run, each with the package that it lacks.
    """

    path: str
    golden: Golden
    now: Record
    moved: tuple[Moved, ...]
    absent: dict[str, str] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether nothing moved."""
        return not self.moved

    @property
    def first(self) -> dict[str, Moved]:
        """The first tensor that moved, of each framework that did."""
        return {each.framework: each for each in reversed(self.moved)}

    @property
    def verdict(self) -> str:
        """One line: PASS, or which framework moved, where first, and the versions then and now."""
        if self.passed:
            worst = ", ".join(f"{name} {np.nanmax(found):.1e}" for name, found in self.now.function.items())
            return f"PASS: {self.path}: within {worst} of the recorded float64 reference, and float32 is as it was"
        first = self.first
        if self._alike:
            told = f"jax and torch moved alike, so what both take from elsewhere did: {first['jax']}"
        else:
            told = "; ".join(f"{name} moved: {first[name]}" for name in FRAMEWORKS if name in first)
        then, now = (versions(card, first) for card in (self.golden.records[0].environment, self.now.environment))
        return f"FAIL: {self.path}: {told}. Recorded with {then}; now {now}"

    @property
    def _alike(self) -> bool:
        """Whether both compute the same, and not what was recorded."""
        one, other = (self.first.get(name) for name in FRAMEWORKS)
        if one is None or other is None or one.dtype == "float32":
            return False
        same = (one.tensor, one.dtype) == (other.tensor, other.dtype)
        return same and math.isclose(one.found, other.found, rel_tol=1e-2)

    def facts(self) -> dict[str, Any]:
        """Everything, for JSON: numbers that are infinite or nothing are null."""
        return {
            "passed": self.passed,
            "verdict": self.verdict,
            "path": self.path,
            "moved": [
                {**asdict(each), "found": _number(each.found), "recorded": _number(each.recorded)} for each in self.moved
            ],
            "absent": self.absent,
            "changed": self.changed,
            "recorded": _facts(self.golden, self.golden.records[0]),
            "now": _facts(self.golden, self.now),
        }

    @property
    def changed(self) -> dict[str, list[Any]]:
        """What of the environment is another than it was: then and now."""
        then, now = (_flat(card) for card in (self.golden.records[0].environment, self.now.environment))
        return {name: [then.get(name), now.get(name)] for name in {**then, **now} if then.get(name) != now.get(name)}

    def __str__(self) -> str:
        """The table, what changed around it, and the verdict in the last line."""
        table = _table([(self.path, self.golden, each) for each in (self.golden.records[0], self.now)])
        lines = [f"{name}: was {then}, is {now}" for name, (then, now) in self.changed.items()]
        lines += [f"{name} was not verified: {package} is not installed" for name, package in self.absent.items()]
        if len(self.moved) > 1:
            others = ", ".join(f"{each.tensor} ({each.framework} {each.dtype})" for each in self.moved[1:9])
            lines.append(f"moved besides: {others}" + (f" and {len(self.moved) - 9} more" if len(self.moved) > 9 else ""))
        return "\n".join((table, *lines, self.verdict))


@dataclass(frozen=True, eq=False)
class History:
    """The records of golden files; print it for a table.

    goldens: path -> golden.
    """

    goldens: dict[str, Golden]

    def facts(self) -> dict[str, Any]:
        """Every record of every file, for JSON."""
        return {path: [_facts(golden, each) for each in golden.records] for path, golden in self.goldens.items()}

    def __str__(self) -> str:
        return _table([(path, golden, each) for path, golden in self.goldens.items() for each in golden.records])


def table(paths: Sequence[Source]) -> History:
    """Return the records of golden files.

    Raises:
        InputError: what is no golden file.
    """
    return History({str(path): Golden.read(path) for path in paths})


# What moved ----------------------------------------------------------------------------------------------------------


def moved(golden: Golden, now: Record) -> tuple[Moved, ...]:
    """Return what a record has moved from the first one."""
    return (*_function(golden, now), *_precision(golden, now))


def _function(golden: Golden, now: Record) -> Iterator[Moved]:
    for i, tensor in enumerate(golden.tensors):
        for name, found in now.function.items():
            then, distance = float(golden.records[0].function[name][i]), float(found[i])
            if math.isnan(distance) and math.isnan(then):
                continue  # the framework does not show it
            if not distance <= FUNCTION:
                yield Moved(name, tensor.name, "float64", then, math.inf if math.isnan(distance) else distance)


def _precision(golden: Golden, now: Record) -> Iterator[Moved]:
    for name, found in now.precision.items():
        before = _judged(golden, golden.records[0].precision[name])
        for (tensor, entries, then), (_, _, distance) in zip(before, _judged(golden, found), strict=True):
            if math.isnan(distance) or math.isnan(then):
                continue  # what is missing is missing in float64 too
            near, far = sorted((then, distance))
            if not far <= RATIO * luck(entries) * near + SLACK * PRECISION:
                yield Moved(name, tensor, "float32", then, distance)


def _judged(golden: Golden, distances: Array) -> list[tuple[str, int, float]]:
    """Return what is judged in float32: each intermediate, and the whole gradient, which has the logits' luck."""
    pairs = list(zip(golden.tensors, distances.tolist(), strict=True))
    found = [(tensor.name, tensor.entries, distance) for tensor, distance in pairs if not tensor.is_gradient]
    back = [(tensor.size * math.sqrt(tensor.entries), distance) for tensor, distance in pairs if tensor.is_gradient]
    whole = math.hypot(*(size * distance for size, distance in back)) / math.hypot(*(size for size, _ in back))
    logits = next(tensor for tensor in golden.tensors if tensor.name == "logits")
    return [*found, (WHOLE, logits.entries, whole)]


# What is told --------------------------------------------------------------------------------------------------------


def versions(card: dict[str, Any], frameworks: Iterable[str]) -> str:
    """Return what of an environment may have moved these frameworks, in a line."""
    names = [name for framework in FRAMEWORKS if framework in frameworks for name in _OF[framework]] + [*_COMMON]
    return ", ".join(f"{name} {card[name]}" for name in names if name in card) or "an unknown environment"


def _facts(golden: Golden, record: Record) -> dict[str, Any]:
    figures = {
        name: {
            "float64": {t.name: _number(x) for t, x in zip(golden.tensors, record.function[name].tolist(), strict=True)},
            "float32": {tensor: _number(x) for tensor, _, x in _judged(golden, record.precision[name])},
        }
        for name in record.function
    }
    drift = [f"{each.framework} {each.dtype} {each.tensor}" for each in moved(golden, record)]
    return {"environment": record.environment, "moved": drift, "relrms": figures}


def _number(x: float) -> float | None:
    return x if math.isfinite(x) else None


def _flat(card: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """A card without nesting; lists as text."""
    found: dict[str, Any] = {}
    for name, value in card.items():
        inner = _flat(value, f"{prefix}{name}, ") if isinstance(value, dict) else {f"{prefix}{name}": value}
        found |= {key: " ".join(map(str, each)) if isinstance(each, list) else each for key, each in inner.items()}
    return found


def _table(rows: Sequence[tuple[str, Golden, Record]]) -> str:
    """A row for each record; of float32 the logits, and the worst that is judged."""
    caption = "relRMS: worst in float64 from the recorded reference; in float32 from float64, logits and worst"
    found = Table(caption=caption, caption_justify="left", box=box.SIMPLE_HEAD)
    for column in ("golden", "jax", "torch", "numpy", "on"):
        found.add_column(column, overflow="fold")
    for framework in FRAMEWORKS:
        found.add_column(f"{framework}\nfloat64", justify="right")
        found.add_column(f"{framework}\nfloat32", justify="right")
    found.add_column("moved", overflow="fold")
    last = None
    for path, golden, record in rows:
        card, first = record.environment, Verification(path, golden, record, moved(golden, record)).first
        where = f"{card.get('cpu', '')} {card.get('backend', '')}".strip()
        told = ", ".join(f"{each.framework}: {each.tensor}" for each in first.values())
        figures = (text for framework in FRAMEWORKS for text in _figures(golden, record, framework))
        names = (str(card.get(name, "-")) for name in ("jax", "torch", "numpy"))
        found.add_row("" if path == last else Path(path).name, *names, where, *figures, told)
        last = path
    console = Terminal(width=None if sys.stdout.isatty() else 1000, force_terminal=False)  # elsewhere a row stays a line
    with console.capture() as capture:
        console.print(found)
    return capture.get().rstrip("\n")


def _figures(golden: Golden, record: Record, framework: str) -> tuple[str, str]:
    if framework not in record.function:
        return "-", "-"
    judged = {tensor: x for tensor, _, x in _judged(golden, record.precision[framework])}
    worst = max(x for x in judged.values() if not math.isnan(x))
    return f"{np.nanmax(record.function[framework]):.1e}", f"{judged['logits']:.1e}, {worst:.1e}"
