"""The result of `parity.invariance`: how much each condition changes the outputs of an image, and whether that is rounding.

In float64 a change is rounding if relRMS is at most `FLOAT64_TOLERANCE`, as in check G0: a mean over the batch, even one
with a small weight, changes more.  In the lower precision it is rounding if relRMS is at most twice the tolerance of G1
or G2, because each of the two results may differ from the exact one by that tolerance.  Like there, the tolerance is
wider for functions that amplify rounding errors, which the largest change in float64 shows, and for few entries.

Where a change is more than that, the rounding errors of these weights and inputs are measured as in `check`: every operand
of every operation is perturbed by up to `PERTURBATION_ROUNDOFFS` unit roundoffs, and the tolerance is the largest change of
an output in float64, times `AMPLIFIED_ERROR_FACTOR`.  In a Flax model the weights and the inputs are perturbed, and not the
operands in between.  Nothing is measured if a second run differs.  `invariance` raises an error if rounding explains a
change in float64, but the tolerance is more than `MAX_TOLERANCE`; in the lower precision such an output is not judged.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from operator import attrgetter
from typing import Any

from parity.comparison.tolerances import FLOAT32_TOLERANCE, UNIT_ROUNDOFF
from vit_spec.finite_json import replace_non_finite

TWICE = "run twice"


@dataclass(frozen=True)
class Change:
    """The change of one output between two conditions.

    Attributes:
        condition: what changes, such as "run twice" or "alone and in a batch of 8".
        dtype: the type of weights and inputs.
        output: "output", "output.logits", ...
        bit_equal: whether all entries are equal, bit for bit.
        difference: relRMS of the image that changes most; the root-mean-square of an image counts as at least that of
            all images.  Integers are equal or not, and entries that a mask has made huge count as 1, as in `assert_parity`.
        largest: the largest absolute difference of an entry.
        ulps: the largest number of steps between neighbouring numbers of the type that separate two entries; it is large
            where an entry is near zero, and None if an entry is not finite or an integer.
        tolerance: the largest `difference` that counts as rounding.  None for integers, such as an argmax, in the lower
            precision, because rounding errors may change them: they are judged in float64, and if that was not tested, the
            tolerance is 0.  None too for outputs that are mostly rounding error in the lower precision.
    """

    condition: str
    dtype: str
    output: str
    bit_equal: bool
    difference: float
    largest: float
    ulps: int | None
    tolerance: float | None

    @property
    def passed(self) -> bool:
        """Whether the change is at most rounding."""
        return self.tolerance is None or self.difference <= self.tolerance

    @property
    def excess(self) -> float:
        """The difference relative to its tolerance; 0 if it is not judged."""
        if self.tolerance is None or not self.difference:
            return 0.0
        return self.difference / self.tolerance if self.tolerance else math.inf


@dataclass(frozen=True)
class InvarianceReport:
    """Result of `parity.invariance`; `str` gives the verdict and a table.

    Attributes:
        framework: "jax" or "torch".
        dtype: the type that the model was tested in, in addition to float64.
        changes: for each condition and type, the change of each output.
        not_tested: conditions that were not tested, and why.
        device: the device of all runs in `dtype` but those on other devices.
        versions: versions of the framework and NumPy, and the machine type.
    """

    framework: str
    dtype: str
    changes: tuple[Change, ...]
    not_tested: Mapping[str, str]
    device: str
    versions: Mapping[str, str]

    @property
    def passed(self) -> bool:
        """Whether every change is at most rounding."""
        return all(change.passed for change in self.changes)

    @property
    def bit_equal(self) -> bool:
        """Whether no condition changes a bit of an output in `dtype`."""
        return all(change.bit_equal for change in self.changes if change.dtype == self.dtype)

    @property
    def worst(self) -> Change:
        """The change that is largest relative to its tolerance; a failure of "run twice" comes first."""
        failed = [change for change in self.changes if not change.passed]
        candidates = [change for change in failed if change.condition == TWICE] or failed or list(self.changes)
        return max(candidates, key=attrgetter("excess"))

    @property
    def verdict(self) -> str:
        """One line: PASS with the largest change in `dtype`, or FAIL with the condition that changes more than rounding."""
        worst = self.worst
        found = f"{worst.condition}: {worst.output} differs by {worst.difference:.1e} in {worst.dtype}"
        if not worst.passed:
            what = "not deterministic" if worst.condition == TWICE else "not invariant"
            return f"FAIL, {what}: {found} (tolerance {worst.tolerance:.0e})"
        if self.bit_equal:
            conditions = {change.condition for change in self.changes if change.dtype == self.dtype}
            return f"PASS: bit-equal in {self.dtype} under all {len(conditions)} conditions"
        return f"PASS: {'; '.join(self._success_texts())}"

    def _success_texts(self) -> Iterator[str]:
        """Yield what changes in `dtype`: outputs that are judged there, and outputs that only float64 judges."""
        changed = [change for change in self.changes if change.dtype == self.dtype and not change.bit_equal]
        judged = [change for change in changed if change.tolerance is not None]
        if judged:
            largest = max(judged, key=attrgetter("difference"))
            size = f"by up to {largest.difference:.1e} in {self.dtype} ({largest.condition})"
            yield f"the outputs change by rounding alone, {size}"
        for name, condition in {c.output: c.condition for c in reversed(changed) if c.tolerance is None}.items():
            yield f"{name} changes in {self.dtype} ({condition}), but is judged in float64 alone"

    def facts(self) -> dict[str, Any]:
        """Return everything for JSON; infinite numbers and NaN become null."""
        found = {
            "framework": self.framework,
            "device": self.device,
            "dtype": self.dtype,
            "passed": self.passed,
            "bit_equal": self.bit_equal,
            "verdict": self.verdict,
            "changes": [{**asdict(change), "passed": change.passed} for change in self.changes],
            "not_tested": dict(self.not_tested),
            "versions": dict(self.versions),
        }
        return dict(replace_non_finite(found))

    def __str__(self) -> str:
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        return "\n".join(
            [
                self.verdict,
                *self._hint_lines(),
                f"{self.framework} on {self.device}; change of the image that changes most:",
                *self._table_lines(),
                *(f"not tested: {what}: {why}" for what, why in self.not_tested.items()),
                f"versions: {versions}",
            ]
        )

    def _hint_lines(self) -> Iterator[str]:
        worst = self.worst
        if not worst.passed and worst.dtype == "float64":
            if UNIT_ROUNDOFF["float32"] / 10 < worst.difference < FLOAT32_TOLERANCE:
                yield "hint: the change is as large as float32 rounding; does a part of the model cast to float32?"
        if not worst.passed and not worst.tolerance:
            yield (
                "hint: rounding too may change integers, and float64, which would tell, was not tested; return what "
                f"{worst.output} is computed from"
            )

    def _table_lines(self) -> Iterator[str]:
        """Yield a line for each condition and type, with the output that changes most."""
        rows: dict[tuple[str, str], Change] = {}
        for change in self.changes:
            key = (change.condition, change.dtype)
            if key not in rows or (change.passed, -change.difference) < (rows[key].passed, -rows[key].difference):
                rows[key] = change
        width = max(len(condition) for condition, _ in rows)
        outputs = max(len(change.output) for change in rows.values())
        yield f"  {'condition':{width}}  {'dtype':8}  {'output':{outputs}}   relRMS   largest        ulps"
        for change in rows.values():
            start = f"  {change.condition:{width}}  {change.dtype:8}  {change.output:{outputs}}"
            ulps = "-" if change.ulps is None else f"{change.ulps:,}"
            sizes = f"{change.difference:8.1e}  {change.largest:8.1e}  {ulps:>10}"
            yield f"{start}  {'bit-equal' if change.bit_equal else sizes}{'' if change.passed else '  FAIL'}"
