"""The report of a comparison of the twins: a table and a verdict to print, and the same values for JSON."""

import math
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table

from parity.comparison.localisation import GRADIENT_OF, Bisection, Origin, Part
from parity.comparison.tolerances import (
    AMPLIFIED_ERROR_FACTOR,
    FLOAT64_TOLERANCE,
    MAX_TOLERANCE,
    PERTURBATION_ROUNDOFFS,
    ErrorBudget,
    ErrorNorms,
)
from parity.terminal import Terminal
from vit_spec import ViTConfig
from vit_spec.finite_json import replace_non_finite

if TYPE_CHECKING:
    from parity.comparison.framework_settings import Setting
    from parity.comparison.training import TrainingComparison


TWIN_NAMES = {"jax": "JAX", "torch": "PyTorch"}


@dataclass(frozen=True)
class TensorComparison:
    """Errors of one named tensor in both twins, and their tolerances.

    The reference is the PyTorch twin in float64 with explicit attention.  "The lower precision" is the second type of the
    comparison, such as float32.

    name: name of the intermediate, or of the gradient.
    function: error in float64, of the JAX twin or of the PyTorch twin with its default attention, whichever is larger.
    jax, torch: error of each twin in the lower precision; None if it was not computed.
    budget: tolerance of the lower precision.
    scale: lower bound on the root-mean-square of the reference: errors are divided by the larger of both; see
        `ErrorNorms.relative_rms`.
    entries: number of independent entries; None means all entries.
    rounding: rounding errors in float64, if they were measured; see `parity.comparison.amplification`.
    unreliable_in: types in which a tensor that this one is computed from has rounding errors above `MAX_LINEAR_ERROR`.
    parts_passed: whether every part in isolation is equally precise in both twins, in the lower precision.
    """

    name: str
    function: ErrorNorms
    jax: ErrorNorms | None = None
    torch: ErrorNorms | None = None
    budget: ErrorBudget = field(default_factory=ErrorBudget)
    scale: float = 0.0
    entries: int | None = None
    rounding: ErrorNorms | None = None
    unreliable_in: tuple[str, ...] = ()
    parts_passed: bool = False

    @property
    def difference(self) -> float:
        """relRMS between the twins in float64."""
        return self.function.relative_rms(self.scale)

    @property
    def tolerance(self) -> float:
        """Tolerance of check G0: 1e-12, or 12 times the measured rounding errors if that is more."""
        return max(
            FLOAT64_TOLERANCE, AMPLIFIED_ERROR_FACTOR * self.rounding.relative_rms(self.scale) if self.rounding else 0.0
        )

    @property
    def same_function(self) -> bool:
        """Whether the tensor passes check G0; a tensor that cannot be judged in float64 passes."""
        return self.is_within_tolerance or "float64" in self.unreliable_in

    @property
    def is_within_tolerance(self) -> bool:
        """Whether the difference in float64 is within the tolerance."""
        return self.difference <= FLOAT64_TOLERANCE or self.function.is_explained_by(self.rounding, AMPLIFIED_ERROR_FACTOR)

    @property
    def same_precision(self) -> bool:
        """Whether the tensor passes check G1 or G2; gradients of single parameters and unreliable tensors always pass."""
        return self.is_equally_precise or self.budget.dtype in self.unreliable_in

    @property
    def is_equally_precise(self) -> bool:
        """Whether both errors are within the tolerance of the lower precision, and neither is much larger than the other.

        If every part is equally precise in isolation, the ratio of the errors of the whole model is not tested: it is a
        matter of chance, because amplified rounding errors point in few directions.
        """
        if self.jax is None or self.torch is None or self.name.startswith(GRADIENT_OF):
            return True
        accepts = self.budget.are_within_tolerance if self.parts_passed else self.budget.accepts
        far = max(self.jax, self.torch, key=lambda error: error.norm)
        return accepts(self.jax, self.torch, scale=self.scale, entries=self.entries) or (
            self.parts_passed and far.is_explained_by(self.budget.rounding, AMPLIFIED_ERROR_FACTOR)
        )

    @property
    def is_lost_to_rounding(self) -> bool:
        """Whether rounding errors of the lower precision are too large to judge the tensor in a whole model.

        A tensor that fails is judged.
        """
        rounding = self.budget.rounding
        if self.jax is None or self.name.startswith(GRADIENT_OF) or rounding is None or not self.same_precision:
            return False
        return not rounding.relative_rms(self.scale) <= MAX_TOLERANCE[self.budget.dtype] or not self.is_equally_precise

    @property
    def passed(self) -> bool:
        """Whether the tensor passes both checks."""
        return self.same_function and self.same_precision

    def facts(self) -> dict[str, Any]:
        """Return all values, for JSON."""
        errors = {"float64": self.function, "jax": self.jax, "torch": self.torch}
        return {
            "name": self.name,
            "entries": self.function.entries,
            "passed": self.passed,
            "same_function": self.same_function,
            "same_precision": self.same_precision,
            "difference": self.difference,
            "tolerance": self.tolerance,
            "jax": self.jax and self.jax.relative_rms(self.scale),
            "torch": self.torch and self.torch.relative_rms(self.scale),
            "figures": {side: error and _error_figures(error, self.scale) for side, error in errors.items()},
        }


def _error_figures(error: ErrorNorms, scale: float) -> dict[str, Any]:
    return {
        "max": error.relative_max(scale),
        "bias": error.bias(scale),
        "cosine": error.cosine,
        "allclose_tolerance": error.allclose_tolerance,
    }


@dataclass(frozen=True)
class OutputAgreement:
    """Agreement of a classifier's outputs with those of the float64 reference.

    top1: fraction of images whose largest output is the same class.
    kl: mean Kullback-Leibler divergence of the softmax, in nats.
    """

    top1: float
    kl: float


@dataclass(frozen=True)
class Unjudged:
    """Tensors that cannot be judged in a type; they count as neither right nor wrong.

    dtype: name of the type.
    names: names of the tensors, in the order of computation.
    why: the reason, as the second half of a sentence.
    """

    dtype: str
    names: tuple[str, ...]
    why: str

    @classmethod
    def out_of_range(cls, dtype: str, names: tuple[str, ...], at: str, largest: float, power: int) -> "Unjudged":
        """Return the tensors that depend on a number that the type cannot represent, or whose power it cannot represent.

        Args:
            dtype: name of the type.
            names: names of the tensors.
            at: name of the first tensor with such a number.
            largest: the largest number in that tensor.
            power: the power that is computed of it: 1, 2 or 3.
        """
        power_text = {1: "", 2: " squared", 3: " cubed"}[power]
        place = "there" if at == names[0] else f"at {at}"
        return cls(
            dtype, names, f"since numbers{power_text} are outside of the range of {dtype}: they reach {largest:.0e} {place}"
        )

    @classmethod
    def lost_to_rounding(cls, dtype: str, errors: Mapping[str, float], *, whole: bool = False) -> "Unjudged":
        """Return the tensors whose rounding errors are too large.

        Args:
            dtype: name of the type.
            errors: name of a tensor -> its relative rounding error.
            whole: whether these are errors of the whole model, or of parts in isolation.
        """
        where = "in the whole model; its parts are judged in isolation" if whole else "in a part in isolation"
        largest = max(errors.values())
        change = f"by {largest:.0e} times its size" if math.isfinite(largest) else "by all of its digits"
        why = f"since {PERTURBATION_ROUNDOFFS} unit roundoffs at each operation change it {change} {where}"
        return cls(dtype, tuple(errors), why)

    def facts(self) -> dict[str, Any]:
        """Return the fields and the text for JSON."""
        return {**asdict(self), "text": str(self)}

    def __str__(self) -> str:
        more = f" and {len(self.names) - 1} more" if len(self.names) > 1 else ""
        return f"not judged in {self.dtype}: {self.names[0]}{more}, {self.why}"


@dataclass(frozen=True)
class Report:
    """Result of `compare`; `print` shows it as a table with a verdict.

    Attributes:
        config: the model's config.
        level: "function", "precision" or "train".
        dtype: the type of lower precision.
        measures: all tensors in the order of computation: those of the forward pass, and then gradients from the head back
            to the embedding.
        outputs: agreement of the outputs of each run with the reference, by name: "jax float64", "torch float32", ...
        origins: parts that are wrong in isolation, in order; empty if there are none, or if none could be found.
        bisection: result of the swap bisection, if the outputs differ in float64.
        training: result of the optimizer steps of level "train".
        audit: settings of both frameworks when the check began.
        warnings: settings in which they differed.
        environment: versions and hardware.
        unjudged: tensors that count as neither right nor wrong.
        largest_part_error: largest relRMS of a part in isolation in float64, if rounding errors are amplified; else None.
    """

    config: ViTConfig
    level: str
    dtype: str
    measures: tuple[TensorComparison, ...]
    outputs: dict[str, OutputAgreement]
    origins: tuple[Origin, ...]
    bisection: Bisection | None
    training: "TrainingComparison | None"
    audit: tuple["Setting", ...]
    warnings: tuple[str, ...]
    environment: dict[str, Any]
    unjudged: tuple[Unjudged, ...] = ()
    largest_part_error: float | None = None

    @property
    def passed(self) -> bool:
        """Whether every tensor passes the checks of the level, and no part is wrong in isolation."""
        right = all(measure.passed for measure in self.measures) and not self.origins
        return right and (self.training is None or self.training.passed)

    @property
    def first(self) -> TensorComparison | None:
        """The first tensor that exceeds its tolerance; differences in function come before those in precision."""
        wrong = [m for m in self.measures if not m.same_function] or [m for m in self.measures if not m.passed]
        return wrong[0] if wrong else None

    @property
    def part(self) -> Part | None:
        """The first part that differs: in isolation if such a part was found, otherwise in the whole model."""
        if self.origins:
            return self.origins[0].part
        if self.first is not None:
            return Part.of(self.first.name, [m.name for m in self.measures])
        if self.training is not None and self.training.causes:
            module, _, operation = self.training.causes[0].piece.partition(": ")
            return Part(module, operation, "training")
        return None

    @property
    def verdict(self) -> str:
        """The verdict in one line: PASS, or FAIL and the first part that differs."""
        if self.first is not None or self.origins:
            return f"FAIL: {self._failure_text(self.first)}"
        if self.training is not None and not self.training.passed:
            return self.training.verdict
        return f"PASS: {self._success_text()}"

    def _success_text(self) -> str:
        worst = max(self.measures, key=lambda m: m.difference)
        text = f"{len(self.measures)} tensors agree to {worst.difference:.1e} in float64 ({worst.name})"
        if self.largest_part_error is not None:
            text += f", within measured rounding errors, and each part in isolation to {self.largest_part_error:.1e}"
        if judged := [m for m in self._compared_in_dtype() if not m.is_lost_to_rounding]:
            largest = max(
                max(m.jax.relative_rms(m.scale), m.torch.relative_rms(m.scale))  # type: ignore[union-attr]
                for m in judged
            )
            kinds = dict.fromkeys("the whole gradient" if m.name == "gradient" else "the forward pass" for m in judged)
            text += f", and both twins are within {largest:.1e} of it in {self.dtype} ({' and '.join(kinds)})"
        text += f"; {self.training.verdict.removeprefix('PASS: ')}" if self.training else ""
        return text + "".join(f"; {each}" for each in self.unjudged)

    def _compared_in_dtype(self) -> list[TensorComparison]:
        """Return the tensors of both twins in the lower precision, without gradients of single parameters."""
        return [m for m in self.measures if m.jax and m.torch and not m.name.startswith(GRADIENT_OF)]

    def _failure_text(self, first: TensorComparison | None) -> str:
        if not self.origins:
            assert first is not None
            buildup = f"; no part differs on the same inputs, so the difference builds up before {self.part}"
            return f"the first part that differs is {self.part}, {_exceeded_tolerance(first)}{buildup}"
        origin = self.origins[0]
        failed = sum(not m.passed for m in self.measures)
        count = f"{failed} of {len(self.measures)} tensors exceed their tolerance"
        if not failed:
            count = "in the whole model rounding errors would explain it"
        return f"the first part that differs is {origin.part}, {self.describe_origin(origin)}; {count}"

    def describe_origin(self, origin: Origin) -> str:
        """Return how the result of a part differs, as a text."""
        if origin.reason == "missing":
            return "only one twin computes it"
        if origin.reason == "not finite":
            return f"{TWIN_NAMES[origin.twin]} gives NaN or infinities in {origin.dtype} on the same inputs"
        return f"by {origin.error:.1e} {self._conditions(origin)}"

    def _conditions(self, origin: Origin) -> str:
        """Return the type, the inputs and the tolerance of the difference at an origin."""
        if origin.dtype == "float64":
            kernel = (
                " in PyTorch's fused attention, but not in explicit attention," if self.is_fused_attention_fault else ""
            )
            return f"in float64{kernel} on the same inputs (tolerance {FLOAT64_TOLERANCE:.0e})"
        return f"in {origin.dtype} on the same inputs, where {origin.twin} is less precise"

    @property
    def is_fused_attention_fault(self) -> bool:
        """Whether the first origin is in PyTorch's fused attention only."""
        return bool(self.origins) and self.origins[0].twin == "torch" and self.origins[0].part.operation == "heads"

    # JSON --------------------------------------------------------------------------------------------------------

    def facts(self) -> dict[str, Any]:
        """Return everything for JSON; infinite numbers and NaN become null."""
        found = replace_non_finite(
            {
                "passed": self.passed,
                "verdict": self.verdict,
                "level": self.level,
                "dtype": self.dtype,
                "first_part": self.part.facts() if self.part else None,
                "origins": [origin.facts() for origin in self.origins],
                "bisection": asdict(self.bisection) if self.bisection else None,
                "tolerances": self.describe_tolerances(),
                "largest_part_difference": self.largest_part_error,
                "unjudged": [each.facts() for each in self.unjudged],
                "outputs": {name: asdict(each) for name, each in self.outputs.items()},
                "tensors": [measure.facts() for measure in self.measures],
                "training": self.training.facts() if self.training else None,
                "settings": [asdict(setting) for setting in self.audit],
                "warnings": list(self.warnings),
                "environment": self.environment,
            }
        )
        return dict(found)

    def describe_tolerances(self) -> dict[str, str]:
        """Return for each check its tolerance and the reason for it, as text."""
        found = {"float64": f"relRMS {FLOAT64_TOLERANCE:.0e} between the twins; rounding errors are a few 1e-15"}
        for kind, measures in (("forward", self._forward()), ("gradient", self.measures[len(self._forward()) :])):
            if measures and measures[0].budget.dtype == self.dtype and any(m.jax for m in measures):
                found[f"{self.dtype}, {kind}"] = str(measures[0].budget)
        widest = max(self.measures, key=lambda m: m.tolerance)
        if widest.rounding:
            limit = f"up to {widest.tolerance:.0e} ({widest.name})" if widest.tolerance > FLOAT64_TOLERANCE else "not wider"
            found["float64, amplified"] = f"{limit}: {_MEASURED}; each part must be within its own change in isolation"
        wide = [m for m in self._compared_in_dtype() if m.budget.is_amplified(m.scale)]
        if wide:
            widest = max(wide, key=lambda m: m.budget.tolerance)
            limit = f"up to {widest.budget.tolerance:.0e} ({widest.name})"
            found[f"{self.dtype}, amplified"] = (
                f"{limit}: {_MEASURED}; each part must be within the tolerance above in isolation"
            )
        return found

    def _forward(self) -> tuple[TensorComparison, ...]:
        """Return the tensors of the forward pass."""
        return tuple(m for m in self.measures if not m.name.startswith("gradient"))

    # Text --------------------------------------------------------------------------------------------------------

    def __str__(self) -> str:
        """Return the table, the tolerances and other findings, and the verdict in the last line."""
        console = Terminal(width=None if sys.stdout.isatty() else 100, force_terminal=False)
        with console.capture() as capture:
            console.print(self._table())
        return "\n".join((capture.get().rstrip("\n"), *self._findings(), self.verdict))

    def _table(self) -> Table:
        """Return a table with a row for each named tensor; the tensors of all blocks share one, with the largest errors."""
        words = ("python", "jax", "torch", "numpy", "backend")
        where = ", ".join(f"{name} {self.environment[name]}" for name in words if name in self.environment)
        caption = f"relRMS: between the twins in float64, and of each in {self.dtype} from float64\n{where}"
        table = Table(caption=caption, caption_justify="left", box=box.SIMPLE_HEAD)
        table.add_column("tensor", overflow="fold")
        low_precision = (f"jax {self.dtype}", f"torch {self.dtype}") if self._compared_in_dtype() else ()
        for column in ("float64", *low_precision, ""):
            table.add_column(column, justify="right")
        rows: dict[str, list[TensorComparison]] = {}
        for measure in self.measures:
            rows.setdefault(re.sub(r"blocks\.\d+", "blocks.*", measure.name), []).append(measure)
        for name, measures in rows.items():
            sides = ("function", "jax", "torch") if low_precision else ("function",)
            figures = [[e.relative_rms(m.scale) for m in measures if (e := getattr(m, side))] for side in sides]
            worst = (f"{max(column):.1e}" if column else "" for column in figures)
            table.add_row(name, *worst, "ok" if all(m.passed for m in measures) else "FAIL")
        return table

    def _findings(self) -> Iterator[str]:
        """Yield the lines between the table and the verdict."""
        for check, text in self.describe_tolerances().items():
            yield f"tolerance, {check}: {text}"
        for name, each in self.outputs.items():
            yield f"outputs of {name}: top-1 agreement {each.top1:.1%}, KL {each.kl:.1e}"
        yield from map(str, self.unjudged)
        for line in self.warnings:
            yield f"warning: {line}"
        if self.training is not None:
            yield str(self.training)
        if len(self.origins) > 1:
            others = ", ".join(dict.fromkeys(str(origin.part) for origin in self.origins[1:9]))
            more = f" and {len(self.origins) - 9} more" if len(self.origins) > 9 else ""
            yield f"also wrong in isolation: {others}{more}"
        if self.bisection is not None:
            yield str(self.bisection)


_MEASURED = (
    f"{AMPLIFIED_ERROR_FACTOR:.0f} times the change by {PERTURBATION_ROUNDOFFS} unit roundoffs at each operation, "
    "measured in float64"
)


def _exceeded_tolerance(m: TensorComparison) -> str:
    """Return a text that says which tolerance a tensor exceeds, and by how much."""
    if not m.same_function:
        return f"by {m.difference:.1e} in float64 (tolerance {m.tolerance:.0e})"
    assert m.jax is not None and m.torch is not None
    sides = (
        f"{name} is {error.relative_rms(m.scale):.1e} (largest {error.relative_max(m.scale):.1e})"
        for name, error in (("jax", m.jax), ("torch", m.torch))
    )
    return f"in {m.budget.dtype} {' and '.join(sides)} from float64; the tolerance is {m.budget}"
