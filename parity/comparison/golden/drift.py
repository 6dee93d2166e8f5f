"""Changes since a golden file was recorded: which framework, the first tensor, and the versions and settings that differ.

In float64 the tolerance is 1e-12, as in G0; the errors of unchanged frameworks are 1e-15 to 1e-14 on any machine.  In
float32, another processor, or another version that adds in another order, makes other rounding errors of the same size.  So
the error now and the recorded error are compared as G1 compares the errors of the twins.  The larger may be at most twice
the smaller, times a factor for chance that depends on the number of entries, plus a tenth of 5e-6.  All gradients are
tested as one vector.  A tensor that had NaN or infinities in float32 when it was recorded is not tested in float32.

Amplified rounding errors differ more between machines, because they point in few directions.  If the golden file has
measured rounding errors, 12 times those of float64 are the tolerance in float64, where that is more than 1e-12.  Those of
float32 take the place of the tenth of 5e-6 where they are more, as in G1.
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

from parity.checkpoints.layout import Array
from parity.checkpoints.reading import StrPath
from parity.comparison.golden.file import FRAMEWORKS, Golden, Record
from parity.comparison.tolerances import (
    ERROR_RATIO_SLACK,
    FLOAT32_TOLERANCE,
    FLOAT64_TOLERANCE,
    RMS_ERROR_RATIO,
    five_sigma_factor,
)
from parity.terminal import Terminal
from vit_spec.finite_json import replace_non_finite

ALL_GRADIENTS = "gradient"  # with respect to all parameters and the images, as one vector

# Entries of an environment that only one framework depends on, and entries that both depend on.
_PACKAGES = {"jax": ("jax", "jaxlib", "flax"), "torch": ("torch",)}
_SHARED = ("numpy", "twin-vision-transformers", "python", "backend", "cpu")


@dataclass(frozen=True)
class ChangedTensor:
    """A tensor whose error is outside of its tolerance.

    framework: "jax" or "torch".
    dtype: "float64" for errors from the reference, "float32" for errors from the framework's own float64 result.
    recorded, found: relRMS in the first record, and now; `found` is infinite for a tensor that is missing, has another
        shape, or is not finite.
    tolerance: the largest relRMS that is accepted; in float32, one that is much smaller than the recorded one is not
        accepted either.
    """

    framework: str
    tensor: str
    dtype: str
    recorded: float
    found: float
    tolerance: float

    def __str__(self) -> str:
        if math.isinf(self.found):
            return f"{self.tensor} is missing, has another shape, or is not finite in {self.dtype}"
        if self.dtype == "float64":
            tolerance = f"tolerance {self.tolerance:.0e}"
            return f"{self.tensor} differs by {self.found:.1e} from the recorded float64 reference ({tolerance})"
        return f"the float32 error of {self.tensor} is {self.found:.1e}, and {self.recorded:.1e} was recorded"


@dataclass(frozen=True, eq=False)
class Verification:
    """Result of `verify`; `str` gives a table.

    path: path of the golden file.
    now: the results of this verification.
    changed_tensors: float64 before float32, each in the order of computation.
    absent: frameworks that cannot run -> the package that is missing.
    """

    path: str
    golden: Golden
    now: Record
    changed_tensors: tuple[ChangedTensor, ...]
    absent: dict[str, str] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether no tensor has changed."""
        return not self.changed_tensors

    @property
    def first(self) -> dict[str, ChangedTensor]:
        """Framework -> its first changed tensor, for frameworks that have one."""
        return {each.framework: each for each in reversed(self.changed_tensors)}

    @property
    def verdict(self) -> str:
        """One line with PASS, or with FAIL, the changed frameworks, their first tensor, and versions and settings."""
        if self.passed:
            worst = ", ".join(f"{name} {np.nanmax(errors):.1e}" for name, errors in self.now.float64_errors.items())
            tolerance = max(tensor.float64_tolerance for tensor in self.golden.tensors)
            amplified = f" (tolerance up to {tolerance:.0e}, since the weights amplify rounding errors)"
            text = f"PASS: {self.path}: within {worst} of the recorded float64 reference"
            text += f"{amplified if tolerance > FLOAT64_TOLERANCE else ''}; float32 errors are as recorded"
            return "; ".join((text, *map(str, self.golden.unjudged)))
        first = self.first
        if self._changed_alike:
            what = f"jax and torch changed by the same amount, so the cause is something that they share: {first['jax']}"
        else:
            what = "; ".join(f"{name} changed: {first[name]}" for name in FRAMEWORKS if name in first)
        then, now = (describe_versions(each, first) for each in (self._recorded_environment, self.now.environment))
        versions = f"Recorded with {then}, as now" if then == now else f"Recorded with {then}; now {now}"
        return "; ".join((f"FAIL: {self.path}: {what}. {versions}", *self._changed_settings))

    @property
    def _changed_settings(self) -> tuple[str, ...]:
        """Settings on which a changed framework depends, and which differ, such as its threads or its instruction set."""
        others = tuple(f", {name}" for name in FRAMEWORKS if name not in self.first)
        lines = (
            f"{name.removeprefix('settings, ')}: was {then}, is {now}"
            for name, (then, now) in self.changed_environment.items()
            if name.startswith(("settings, ", "threads, ", "cpu features")) and not name.endswith(others)
        )
        return tuple(dict.fromkeys(lines))  # the settings have the threads too

    @property
    def _recorded_environment(self) -> dict[str, Any]:
        return self.golden.records[0].environment

    @property
    def _changed_alike(self) -> bool:
        """Whether both frameworks changed by the same amount in float64."""
        one, other = (self.first.get(name) for name in FRAMEWORKS)
        if one is None or other is None or one.dtype == "float32":
            return False
        same = (one.tensor, one.dtype) == (other.tensor, other.dtype)
        return same and math.isclose(one.found, other.found, rel_tol=1e-2)

    def facts(self) -> dict[str, Any]:
        """Return all results for JSON; infinite numbers and NaN become null."""
        found = {
            "passed": self.passed,
            "verdict": self.verdict,
            "file": self.path,
            "changed_tensors": [asdict(each) for each in self.changed_tensors],
            "unjudged": [each.facts() for each in self.golden.unjudged],
            "not_verified": self.absent,
            "changed_environment": self.changed_environment,
            "recorded": _record_facts(self.golden, self.golden.records[0]),
            "now": _record_facts(self.golden, self.now),
        }
        return dict(replace_non_finite(found))

    @property
    def changed_environment(self) -> dict[str, list[Any]]:
        """Entries of the environment that differ: name -> [then, now]."""
        then, now = (_flatten(each) for each in (self._recorded_environment, self.now.environment))
        return {name: [then.get(name), now.get(name)] for name in {**then, **now} if then.get(name) != now.get(name)}

    def __str__(self) -> str:
        """Return the table, the changes of the environment, and in the last line the verdict."""
        table = _render_table([(self.path, self.golden, each) for each in (self.golden.records[0], self.now)])
        lines = [f"{name}: was {then}, is {now}" for name, (then, now) in self.changed_environment.items()]
        lines += [f"{name} was not verified: {package} is not installed" for name, package in self.absent.items()]
        lines += map(str, self.golden.unjudged)
        if len(self.changed_tensors) > 1:
            others = ", ".join(f"{each.tensor} ({each.framework} {each.dtype})" for each in self.changed_tensors[1:9])
            more = f" and {len(self.changed_tensors) - 9} more" if len(self.changed_tensors) > 9 else ""
            lines.append(f"also changed: {others}{more}")
        return "\n".join((table, *lines, self.verdict))


@dataclass(frozen=True, eq=False)
class History:
    """The records of golden files; `str` gives a table.

    goldens: path -> golden file.
    """

    goldens: dict[str, Golden]

    def facts(self) -> dict[str, Any]:
        """Return every record of every file, for JSON; infinite numbers and NaN become null."""
        found = [
            {"file": path, "records": [_record_facts(golden, each) for each in golden.records]}
            for path, golden in self.goldens.items()
        ]
        return {"files": replace_non_finite(found)}

    def __str__(self) -> str:
        return _render_table([(path, golden, each) for path, golden in self.goldens.items() for each in golden.records])


def table(paths: Sequence[StrPath]) -> History:
    """Return the records of golden files.

    Raises:
        InputError: a file is not a golden file.
    """
    return History({str(path): Golden.read(path) for path in paths})


# Comparison with the recording ---------------------------------------------------------------------------------------


def changed_tensors(golden: Golden, now: Record) -> tuple[ChangedTensor, ...]:
    """Return the tensors of a record whose errors are outside of their tolerance."""
    return (*_changed_in_float64(golden, now), *_changed_in_float32(golden, now))


def _changed_in_float64(golden: Golden, now: Record) -> Iterator[ChangedTensor]:
    """Yield the tensors whose float64 error from the reference exceeds the tolerance."""
    for i, tensor in enumerate(golden.tensors):
        for name, errors in now.float64_errors.items():
            then, error = float(golden.records[0].float64_errors[name][i]), float(errors[i])
            if math.isnan(error) and math.isnan(then):
                continue  # the framework does not return this tensor
            if not error <= tensor.float64_tolerance:
                found = math.inf if math.isnan(error) else error
                yield ChangedTensor(name, tensor.name, "float64", then, found, tensor.float64_tolerance)


def _changed_in_float32(golden: Golden, now: Record) -> Iterator[ChangedTensor]:
    """Yield the tensors whose float32 error is much larger or much smaller than the recorded one."""
    unjudged = _unjudged_names(golden)
    rounding = tested_float32_errors(golden, np.array([tensor.float32_rounding for tensor in golden.tensors]))
    for name, errors in now.float32_errors.items():
        before = tested_float32_errors(golden, golden.records[0].float32_errors[name])
        sides = zip(before, tested_float32_errors(golden, errors), rounding, strict=True)
        for (tensor, entries, then), (_, _, error), (_, _, rounded) in sides:
            if tensor in unjudged or math.isnan(error) or math.isnan(then):
                continue  # a missing tensor is missing in float64 too
            factor = RMS_ERROR_RATIO * five_sigma_factor(entries)
            slack = max(ERROR_RATIO_SLACK * FLOAT32_TOLERANCE, rounded)
            near, far = sorted((then, error))
            if not far <= factor * near + slack:
                yield ChangedTensor(name, tensor, "float32", then, error, factor * then + slack)


def tested_float32_errors(golden: Golden, errors: Array) -> list[tuple[str, int, float]]:
    """Return name, number of entries and error of each intermediate, and of all judged gradients as one vector, or NaN.

    The error of all gradients varies by chance as much as the error of the logits does, so it counts as having as many
    independent entries as the logits have.
    """
    pairs = list(zip(golden.tensors, errors.tolist(), strict=True))
    forward = [(tensor.name, tensor.entries, error) for tensor, error in pairs if not tensor.is_gradient]
    unjudged = _unjudged_names(golden)
    gradients = [(tensor, error) for tensor, error in pairs if tensor.is_gradient and tensor.name not in unjudged]
    norms = [(tensor.scale * math.sqrt(tensor.entries), error) for tensor, error in gradients]
    size = math.hypot(*(norm for norm, _ in norms))
    total = math.hypot(*(norm * error for norm, error in norms)) / size if size else math.nan
    logits = next(tensor for tensor in golden.tensors if tensor.name == "logits")
    return [*forward, (ALL_GRADIENTS, logits.entries, total)]


def _unjudged_names(golden: Golden) -> set[str]:
    return {name for each in golden.unjudged for name in each.names}


# Reports -------------------------------------------------------------------------------------------------------------


def describe_versions(environment: dict[str, Any], frameworks: Iterable[str]) -> str:
    """Return one line with the versions and the hardware that the results of these frameworks depend on."""
    names = [name for framework in FRAMEWORKS if framework in frameworks for name in _PACKAGES[framework]] + [*_SHARED]
    return ", ".join(f"{name} {environment[name]}" for name in names if name in environment) or "an unknown environment"


def _record_facts(golden: Golden, record: Record) -> dict[str, Any]:
    """Return a record for JSON: its environment, its changed tensors, and the errors of all tensors."""
    names = [tensor.name for tensor in golden.tensors]
    errors = {
        name: {
            "float64": dict(zip(names, float64_errors.tolist(), strict=True)),
            "float32": {tensor: x for tensor, _, x in tested_float32_errors(golden, record.float32_errors[name])},
        }
        for name, float64_errors in record.float64_errors.items()
    }
    changes = [asdict(each) for each in changed_tensors(golden, record)]
    return {"environment": record.environment, "changed_tensors": changes, "relrms": errors}


def _flatten(environment: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return an environment without nesting; lists become text."""
    flat: dict[str, Any] = {}
    for name, value in environment.items():
        inner = _flatten(value, f"{prefix}{name}, ") if isinstance(value, dict) else {f"{prefix}{name}": value}
        flat |= {key: " ".join(map(str, each)) if isinstance(each, list) else each for key, each in inner.items()}
    return flat


def _render_table(rows: Sequence[tuple[str, Golden, Record]]) -> str:
    """Return a table with a row for each record.

    The float64 columns have the largest error, and the float32 columns the error of the logits and the largest error.
    """
    caption = "relRMS; float64: largest, from the recorded reference; float32: logits and largest, from float64"
    grid = Table(caption=caption, caption_justify="left", box=box.SIMPLE_HEAD)
    for column in ("golden", "jax", "torch", "numpy", "on"):
        grid.add_column(column, overflow="fold")
    for framework in FRAMEWORKS:
        grid.add_column(f"{framework}\nfloat64", justify="right")
        grid.add_column(f"{framework}\nfloat32", justify="right")
    grid.add_column("changed", overflow="fold")
    last = None
    for path, golden, record in rows:
        environment = record.environment
        first = Verification(path, golden, record, changed_tensors(golden, record)).first
        hardware = f"{environment.get('cpu', '')} {environment.get('backend', '')}".strip()
        changes = ", ".join(f"{each.framework}: {each.tensor}" for each in first.values())
        errors = (text for framework in FRAMEWORKS for text in _error_cells(golden, record, framework))
        versions = (str(environment.get(name, "-")) for name in ("jax", "torch", "numpy"))
        grid.add_row("" if path == last else Path(path).name, *versions, hardware, *errors, changes)
        last = path
    width = None if sys.stdout.isatty() else 1000  # in a file or a pipe each row stays on one line
    console = Terminal(width=width, force_terminal=False)
    with console.capture() as capture:
        console.print(grid)
    return capture.get().rstrip("\n")


def _error_cells(golden: Golden, record: Record, framework: str) -> tuple[str, str]:
    """Return the texts of the float64 and float32 columns of a framework."""
    if framework not in record.float64_errors:
        return "-", "-"
    tested = {tensor: x for tensor, _, x in tested_float32_errors(golden, record.float32_errors[framework])}
    worst = max(x for x in tested.values() if not math.isnan(x))
    return f"{np.nanmax(record.float64_errors[framework]):.1e}", f"{tested['logits']:.1e}, {worst:.1e}"
