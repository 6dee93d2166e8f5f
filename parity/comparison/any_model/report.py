"""The report of a comparison of two models: the verdict, the origin of a difference, the tensors and the parameters."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from parity.checkpoints.layout import Array
from parity.comparison.any_model.correspondence import Correspondence
from parity.comparison.any_model.trace.fixed_parts import FixedPart
from parity.comparison.any_model.trace.origin import Origin
from parity.comparison.any_model.trace.tables import Table
from parity.comparison.tolerances import FLOAT64_TOLERANCE, ErrorBudget
from vit_spec.finite_json import replace_non_finite
from vit_spec.printable import printable

Tensors = dict[str, Array]  # outputs, "loss" and gradients by name

GRADIENT_OF = "gradient of "
GRADIENT_OF_INPUT = f"{GRADIENT_OF}input "
STATISTICS = "statistics "
MAX_SHOWN_GRADIENTS = 5


class UnequalWeightsError(AssertionError):
    """The weights of two models differ, which weights="equal" excludes."""


@dataclass(frozen=True)
class TensorRow:
    """Comparison of one tensor.

    Attributes:
        name: "output", "output.logits", "loss", "gradient of KEY", "gradient of input 0", or "gradient" for the gradients
            of all parameters as one vector; in training also "statistics KEY", and "rate of dropout 0" or "entries
            of dropout 0" for a dropout that differs.
        difference: relRMS between Flax and PyTorch in float64; of rates, the difference.
        same_precision: whether it passes G1; always true for the gradient of a single parameter or input, which G1 does
            not test.
        budget: the tolerance of G1.
        flax, torch: float32 error of each model: relRMS from PyTorch's float64 result, of gradients from the model's own
            with the same choices if rounding changes some; None if only float64 was run, and for dropouts.
        rounded: the same errors if each operation is computed in float64 and its results are rounded to float32, of a
            tensor that passes G1 by these alone.
        float64_tolerance: the tolerance of G0.
    """

    name: str
    difference: float
    same_precision: bool
    budget: ErrorBudget
    flax: float | None = None
    torch: float | None = None
    rounded: tuple[float, ...] = ()
    float64_tolerance: float = FLOAT64_TOLERANCE

    @property
    def same_function(self) -> bool:
        """Whether the tensor passes G0."""
        return self.difference <= self.float64_tolerance

    @property
    def label(self) -> str:
        """The name without line breaks and control characters, which the name of a parameter may have."""
        return printable(self.name)


@dataclass(frozen=True)
class PairReport:
    """Result of `compare_models`; `str` gives the verdict, the tensors and the mapping of parameters.

    Attributes:
        level: "function" for G0 only, "precision" for G0 and G1.
        rows: the comparison of each tensor.
        correspondence: the mapping of the parameters; `str` gives its lines.
        runs: outputs, loss and gradients by run: "torch float64", "flax float32", ...  Outputs and gradients of inputs
            have the order of axes in Flax, gradients of parameters the order in PyTorch.
        environment: versions of the libraries, and the machine type.
        digest: SHA-256 of the weights and inputs.
        origin: where the models part, if they do not compute the same function; None if it was not found.
        fixed_parts: the parts that a model computes in a fixed lower precision; the comparison in float64 computes them in
            float64.
        tables: the constants that a model has rounded to float32; the comparison in float64 uses PyTorch's in both models.
        hints: sentences about what may explain a failure.
        notes: sentences about what these inputs and weights cannot show, whether the models pass or not.
        skipped_outputs: names of the parts of the return values that are not compared, and why.
        fingerprints: the shape and a short digest of each of the "weights", by its key in Flax, and of the "inputs".
    """

    level: Literal["function", "precision"]
    rows: tuple[TensorRow, ...]
    correspondence: Correspondence
    runs: Mapping[str, Tensors]
    environment: Mapping[str, str]
    digest: str
    origin: Origin | None = None
    fixed_parts: tuple[FixedPart, ...] = ()
    tables: tuple[Table, ...] = ()
    hints: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    skipped_outputs: Mapping[str, str] = field(default_factory=dict)
    fingerprints: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether every tensor passes the checks of the level."""
        return self.first is None

    @property
    def first(self) -> TensorRow | None:
        """The first tensor that fails G0, or else G1; None if all pass.

        Outputs come first, and then gradients, from the last parameter to the first.
        """
        wrong = [row for row in self.rows if not row.same_function] or [row for row in self.rows if not row.same_precision]
        return wrong[0] if wrong else None

    @property
    def verdict(self) -> str:
        """One line with PASS, or with FAIL, the check that failed, the first tensor that fails it, and its errors."""
        row = self.first
        if row is None:
            worst = max(self.rows, key=lambda row: row.difference)
            return f"PASS: {len(self.rows)} tensors agree to {worst.difference:.1e} in float64 ({worst.label})"
        if row.same_function:
            errors = f"relRMS {row.flax:.1e} in flax and {row.torch:.1e} in torch"
            return f"FAIL G1, the same precision: the errors of {row.label} in float32 are {errors}"
        return (
            f"FAIL G0, the same function: {row.label} differs by {row.difference:.1e} in float64 "
            f"(tolerance {row.float64_tolerance:.0e})"
        )

    def facts(self) -> dict[str, Any]:
        """Return the verdict for JSON; infinite numbers and NaN become null."""
        first = self.first
        found = {
            "passed": self.passed,
            "verdict": self.verdict,
            "level": self.level,
            "failed_check": None if first is None else "G1" if first.same_function else "G0",
            "tensors": [
                {
                    "name": row.name,
                    "difference": row.difference,
                    "flax": row.flax,
                    "torch": row.torch,
                    "same_function": row.same_function,
                    "same_precision": row.same_precision,
                }
                for row in self.rows
            ],
            "parameters": [
                *(str(pair) + (f"    ({pair.note})" if pair.note else "") for pair in self.correspondence.pairs),
                *map(str, self.correspondence.zeros),
            ],
            "skipped": dict(self.correspondence.skipped),
            "origin": self.origin.facts() if self.origin else None,
            "fixed_parts": [
                {name: getattr(part, name) for name in ("framework", "module", "dtype", "operation")}
                for part in self.fixed_parts
            ],
            "tables": [
                {"shape": list(table.flax.shape), "module": table.module, "rounded": table.rounded} for table in self.tables
            ],
            "hints": list(self.hints),
            "notes": list(self.notes),
            "skipped_outputs": dict(self.skipped_outputs),
            "versions": dict(self.environment),
            "digest": self.digest,
        }
        return dict(replace_non_finite(found))

    def __str__(self) -> str:
        lines = [
            self.verdict,
            *self._failure_lines(),
            *(f"note: {note}" for note in self.notes),
            *self._fixed_part_lines(),
            *self._table_lines(),
            *(f"  {name}: {why}" for name, why in self.skipped_outputs.items()),
            "parameters (flax <-> torch):",
        ]
        versions = f"versions: {', '.join(f'{name} {version}' for name, version in self.environment.items())}"
        return "\n".join([*map(printable, lines), str(self.correspondence), versions])

    def _failure_lines(self) -> Iterator[str]:
        """Yield lines that explain a failure."""
        row = self.first
        if row is not None and row.same_function:
            yield f"tolerance: {row.budget}"
        if row is not None:
            yield from (f"hint: {hint}" for hint in self.hints)
        if self.origin is not None:
            yield f"origin: {self.origin}"

    def _fixed_part_lines(self) -> Iterator[str]:
        """Yield a line for each group of parts with a fixed dtype, and for each rounded table."""
        groups: dict[str, int] = {}
        for part in self.fixed_parts:
            text = re.sub(r"\d+", "{n}", part.module or "the model itself")
            text = f"{text} of {part.framework} in {part.dtype}"
            groups[text] = groups.get(text, 0) + 1
        for text, n in groups.items():
            yield f"in float64 for the first check: {text} ({n} operation{'s'[: n > 1]})"
        for table in self.tables:
            yield f"the same for the first check: {table}"

    def _table_lines(self) -> Iterator[str]:
        """Yield a line for each output, and for the gradients with the largest differences."""
        single = [row for row in self.rows if row.name.startswith(GRADIENT_OF)]
        worst = sorted(single, key=lambda row: -row.difference)[:MAX_SHOWN_GRADIENTS]
        shown = [row for row in self.rows if row not in single or row in worst]
        width = max(len(row.label) for row in shown)
        has_float32 = self.level == "precision"
        yield f"relRMS between flax and torch in float64{', and of each in float32 from float64' if has_float32 else ''}:"
        yield f"  {'tensor':{width}}   float64{'  flax f32 torch f32' if has_float32 else ''}"
        for row in shown:
            errors = (f"  {error:8.1e}" for error in (row.flax, row.torch) if error is not None)
            yield f"  {row.label:{width}}  {row.difference:8.1e}{''.join(errors)}"
        if hidden := len(single) - len(worst):
            yield f"  not shown: {hidden} gradients with smaller differences in float64"
