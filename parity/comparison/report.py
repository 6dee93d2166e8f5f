"""What a comparison of the twins found: for a person, a table and a verdict; for a machine, JSON."""

import math
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table

from parity.comparison.localisation import GRADIENT, Bisection, Origin, Part
from parity.comparison.tolerances import FEW, FUNCTION, JUDGED, ROUNDINGS, Budget, Error
from parity.terminal import Terminal
from vit_spec import ViTConfig

if TYPE_CHECKING:
    from parity.comparison.framework_settings import Setting
    from parity.comparison.training import Trajectories


@dataclass(frozen=True)
class Measure:
    """How far the twins part at one named tensor.

    function: in float64, of whichever is farther from the PyTorch twin with its attention written out: the JAX twin, or
        the PyTorch twin as it runs.
    jax, torch: of each twin from that in the coarser type; None where it was not asked for.
    budget: what the coarser type allows.
    scale: the least root-mean-square that counts; see `Error.relative_rms`.
    entries: how many of the entries are independent, where that is not all of them.
    rounding: what rounding makes of it in float64, where that was measured; see `parity.comparison.amplification`.
    swamped: the types whose rounding changes something that it is computed from by more than `SWAMPED`.
    alone: whether every part, fed the same in the coarser type, is as near to float64 in one twin as in the other.
    """

    name: str
    function: Error
    jax: Error | None = None
    torch: Error | None = None
    budget: Budget = field(default_factory=Budget)
    scale: float = 0.0
    entries: int | None = None
    rounding: Error | None = None
    swamped: tuple[str, ...] = ()
    alone: bool = False

    @property
    def difference(self) -> float:
        """relRMS between the twins in float64."""
        return self.function.relative_rms(self.scale)

    @property
    def tolerance(self) -> float:
        """What gate G0 allows: 1e-12, or what rounding makes of it where that is more."""
        return max(FUNCTION, FEW * self.rounding.relative_rms(self.scale) if self.rounding else 0.0)

    @property
    def same_function(self) -> bool:
        """Gate G0; what is computed from what float64's rounding swamps is not judged."""
        return self.within or "float64" in self.swamped

    @property
    def within(self) -> bool:
        """Whether the twins are within the tolerance in float64."""
        return self.difference <= FUNCTION or self.function.explained(self.rounding, FEW)

    @property
    def same_precision(self) -> bool:
        """Gate G1, or G2; one parameter's gradient is not judged, nor what is computed from what rounding swamps."""
        return self.equally_precise or self.budget.dtype in self.swamped

    @property
    def equally_precise(self) -> bool:
        """Whether both twins are as near to float64 as the coarser type allows, and as each other.

        Where no part is coarser in one twin than in the other, one side of the whole is nearer by luck: rounding that is
        amplified points in few directions.
        """
        if self.jax is None or self.torch is None or self.name.startswith(GRADIENT):
            return True
        test = self.budget.near_enough if self.alone else self.budget.holds
        far = max(self.jax, self.torch, key=lambda error: error.norm)
        return test(self.jax, self.torch, scale=self.scale, entries=self.entries) or (
            self.alone and far.explained(self.budget.rounding, FEW)
        )

    @property
    def lost(self) -> bool:
        """Whether rounding to the coarser type leaves too little of it to judge, in a whole model."""
        rounding = self.budget.rounding
        if self.jax is None or self.name.startswith(GRADIENT) or rounding is None:
            return False
        return not rounding.relative_rms(self.scale) <= JUDGED[self.budget.dtype] or not self.equally_precise

    @property
    def passed(self) -> bool:
        """Both gates."""
        return self.same_function and self.same_precision

    def facts(self) -> dict[str, Any]:
        """Every figure, for JSON."""
        errors = {"float64": self.function, "jax": self.jax, "torch": self.torch}
        figures = {side: _figures(error, self.scale) for side, error in errors.items() if error is not None}
        found = {"name": self.name, "entries": self.function.entries, "passed": self.passed, **figures}
        return found | ({"tolerance": self.tolerance} if self.rounding else {})


def _figures(error: Error, scale: float) -> dict[str, Any]:
    return {
        "relrms": error.relative_rms(scale),
        "max": error.relative_max(scale),
        "bias": error.bias(scale),
        "cosine": error.cosine,
        "tolerance": error.tolerance,
    }


@dataclass(frozen=True)
class Outputs:
    """What a difference of the logits means for a classifier; a share, and nats, from float64.

    top1: for how many of the images the largest output is the same.
    kl: the mean Kullback-Leibler divergence of the softmax.
    """

    top1: float
    kl: float


@dataclass(frozen=True)
class Unjudged:
    """Tensors of which a type cannot tell whether they are right, and why; they count as neither right nor wrong.

    names: the first of them first.
    """

    dtype: str
    names: tuple[str, ...]
    why: str

    @classmethod
    def range(cls, dtype: str, names: tuple[str, ...], at: str, largest: float, power: int) -> "Unjudged":
        """What comes of numbers, the first at an intermediate or a gradient, of which a type cannot hold this power."""
        what = {1: "", 2: " squared", 3: " cubed"}[power]
        place = "there" if at == names[0] else f"at {at}"
        return cls(dtype, names, f"since numbers{what} are more than {dtype} holds: they reach {largest:.0e} {place}")

    @classmethod
    def rounding(cls, dtype: str, found: Mapping[str, float], *, whole: bool = False) -> "Unjudged":
        """What rounding leaves too little of, in the whole model or in a part on its own."""
        what = "in the whole model; its parts are judged on their own" if whole else "in a part on its own"
        largest = max(found.values())
        much = f"{largest:.0e} times its size" if math.isfinite(largest) else "all that is in it"
        why = f"where {ROUNDINGS} roundings at each operation make a difference of {much}, {what}"
        return cls(dtype, tuple(found), why)

    def __str__(self) -> str:
        more = f" and {len(self.names) - 1} more" if len(self.names) > 1 else ""
        return f"not judged in {self.dtype}: {self.names[0]}{more}, {self.why}"


@dataclass(frozen=True)
class Report:
    """What `compare` found; print it for a table.

    level: "function", "precision" or "train".
    dtype: the coarser type.
    measures: in the order of computation, forward, and then gradients from the head backwards.
    outputs: of each run beside the reference, by name: "jax float64", "torch float32", ...
    origins: the parts that are wrong in themselves, the first first; empty where nothing is, or nothing could be told.
    bisection: what swapping the twins after a block says, where the outputs differ in float64.
    training: the optimizer steps of level "train".
    audit: what both frameworks were set to when the check began; `warnings` says where they differed.
    environment: versions and hardware.
    unjudged: tensors that count as neither right nor wrong.
    parts: where rounding is amplified, the largest relRMS of a part on its own in float64; None where none is.
    """

    config: ViTConfig
    level: str
    dtype: str
    measures: tuple[Measure, ...]
    outputs: dict[str, Outputs]
    origins: tuple[Origin, ...]
    bisection: Bisection | None
    training: "Trajectories | None"
    audit: tuple["Setting", ...]
    warnings: tuple[str, ...]
    environment: dict[str, Any]
    unjudged: tuple[Unjudged, ...] = ()
    parts: float | None = None

    @property
    def passed(self) -> bool:
        """Whether every measure is through the gates of the level, and no part is wrong on its own."""
        right = all(measure.passed for measure in self.measures) and not self.origins
        return right and (self.training is None or self.training.passed)

    @property
    def first(self) -> Measure | None:
        """The first measure that misses a bar; a difference in function counts before one in precision."""
        wrong = [m for m in self.measures if not m.same_function] or [m for m in self.measures if not m.passed]
        return wrong[0] if wrong else None

    @property
    def part(self) -> Part | None:
        """The first part that differs: in itself, where that could be told."""
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
        """One line: PASS, or FAIL and the first part that differs."""
        if self.first is not None or self.origins:
            return f"FAIL: {self._failure(self.first)}"
        if self.training is not None and not self.training.passed:
            return self.training.verdict
        return f"PASS: {self._success()}"

    def _success(self) -> str:
        worst = max(self.measures, key=lambda m: m.difference)
        text = f"{len(self.measures)} tensors agree to {worst.difference:.1e} in float64 ({worst.name})"
        if self.parts is not None:
            text += f", which rounding explains, and each part on its own to {self.parts:.1e}"
        coarse = [max(m.jax.relative_rms(m.scale), m.torch.relative_rms(m.scale)) for m in self._judged() if not m.lost]  # type: ignore[union-attr]
        text += f", and both twins are within {max(coarse):.1e} of it in {self.dtype}" if coarse else ""
        text += f"; {self.training.verdict.removeprefix('PASS: ')}" if self.training else ""
        return text + "".join(f"; {each}" for each in self.unjudged)

    def _judged(self) -> list[Measure]:
        return [m for m in self.measures if m.jax and m.torch and not m.name.startswith(GRADIENT)]

    def _failure(self, first: Measure | None) -> str:
        if not self.origins:
            assert first is not None
            carried = f"; no part differs when both are fed the same, so it builds up before {self.part}"
            return f"the first part that differs is {self.part}, {_missed(first)}{carried}"
        origin = self.origins[0]
        missed = sum(not m.passed for m in self.measures)
        how = "one twin alone computes it" if math.isinf(origin.error) else f"by {origin.error:.1e} {self._where(origin)}"
        many = f"{missed} of {len(self.measures)} tensors miss their bar"
        if not missed:
            many = "in the whole model rounding would explain it"
        return f"the first part that differs is {origin.part}, {how}; {many}"

    def _where(self, origin: Origin) -> str:
        if not self._coarser:
            side = ", in the way torch runs it but not written out," if self.kernel else ""
            return f"in float64{side} though both are fed the same (bar {FUNCTION:.0e})"
        return f"in {self.dtype}, where {origin.twin} is the coarser though both are fed the same"

    @property
    def _coarser(self) -> bool:
        """Whether the origins are of the coarser type: those of float64 come first, and end the search."""
        return any(m.alone is False and m.budget.rounding is not None for m in self.measures)

    @property
    def kernel(self) -> bool:
        """Whether the first origin is in PyTorch's fused attention alone."""
        return bool(self.origins) and self.origins[0].twin == "torch" and self.origins[0].part.operation == "heads"

    # For machines ------------------------------------------------------------------------------------------------

    def facts(self) -> dict[str, Any]:
        """Everything, for JSON: numbers that are infinite or nothing are null."""
        part = self.part
        first = {"name": str(part), **asdict(part)} if part else None
        found = finite(
            {
                "passed": self.passed,
                "verdict": self.verdict,
                "level": self.level,
                "dtype": self.dtype,
                "first": first,
                "origins": [{**asdict(origin), "name": origin.name, "place": str(origin.part)} for origin in self.origins],
                "bisection": asdict(self.bisection) if self.bisection else None,
                "budgets": self.budgets(),
                "parts": self.parts,
                "unjudged": [{**asdict(each), "told": str(each)} for each in self.unjudged],
                "outputs": {name: asdict(each) for name, each in self.outputs.items()},
                "tensors": [measure.facts() for measure in self.measures],
                "training": self.training.facts() if self.training else None,
                "settings": [asdict(setting) for setting in self.audit],
                "warnings": list(self.warnings),
                "environment": self.environment,
            }
        )
        return dict(found)

    def budgets(self) -> dict[str, str]:
        """What each gate allows, and why."""
        found = {"float64": f"relRMS {FUNCTION:.0e} between the twins: rounding explains a few 1e-15"}
        for kind, measures in (("forward", self._forward()), ("gradient", self.measures[len(self._forward()) :])):
            if measures and measures[0].budget.dtype == self.dtype and any(m.jax for m in measures):
                found[f"{self.dtype}, {kind}"] = str(measures[0].budget)
        widest = max(self.measures, key=lambda m: m.tolerance)
        if widest.rounding:
            told = f"up to {widest.tolerance:.0e} ({widest.name})" if widest.tolerance > FUNCTION else "no more"
            found["float64, amplified"] = f"{told}: {_MEASURED}, and each part is held to what they make of it on its own"
        wide = [m for m in self._judged() if m.budget.amplifies(m.scale)]
        if wide:
            widest = max(wide, key=lambda m: m.budget.ceiling)
            told = f"up to {widest.budget.ceiling:.0e} ({widest.name})"
            found[f"{self.dtype}, amplified"] = f"{told}: {_MEASURED}, and each part is held to the above on its own"
        return found

    def _forward(self) -> tuple[Measure, ...]:
        return tuple(m for m in self.measures if not m.name.startswith("gradient"))

    # For people --------------------------------------------------------------------------------------------------

    def __str__(self) -> str:
        """The table, what explains it, and the verdict in the last line."""
        console = Terminal(width=None if sys.stdout.isatty() else 100, force_terminal=False)
        with console.capture() as capture:
            console.print(self._table())
        return "\n".join((capture.get().rstrip("\n"), *self._explained(), self.verdict))

    def _table(self) -> Table:
        """A row a named tensor; those of the blocks share one, which shows the worst of them."""
        words = ("python", "jax", "torch", "numpy", "backend")
        where = ", ".join(f"{name} {self.environment[name]}" for name in words if name in self.environment)
        caption = f"relRMS: between the twins in float64, and of each in {self.dtype} from float64\n{where}"
        table = Table(caption=caption, caption_justify="left", box=box.SIMPLE_HEAD)
        table.add_column("tensor", overflow="fold")
        coarse = (f"jax {self.dtype}", f"torch {self.dtype}") if self._judged() else ()
        for column in ("float64", *coarse, ""):
            table.add_column(column, justify="right")
        rows: dict[str, list[Measure]] = {}
        for measure in self.measures:
            rows.setdefault(re.sub(r"blocks\.\d+", "blocks.*", measure.name), []).append(measure)
        for name, measures in rows.items():
            sides = ("function", "jax", "torch") if coarse else ("function",)
            figures = [[e.relative_rms(m.scale) for m in measures if (e := getattr(m, side))] for side in sides]
            worst = (f"{max(column):.1e}" if column else "" for column in figures)
            table.add_row(name, *worst, "ok" if all(m.passed for m in measures) else "FAIL")
        return table

    def _explained(self) -> Iterator[str]:
        for gate, text in self.budgets().items():
            yield f"bar, {gate}: {text}"
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
            yield f"wrong in itself besides: {others}{more}"
        if self.bisection is not None:
            yield str(self.bisection)


_MEASURED = f"{FEW:.0f} times what {ROUNDINGS} roundings at each operation make of it, measured in float64"


def _missed(m: Measure) -> str:
    """Which bar a measure misses, and by how much."""
    if not m.same_function:
        return f"by {m.difference:.1e} in float64 (bar {m.tolerance:.0e})"
    assert m.jax is not None and m.torch is not None
    sides = (
        f"{name} is {error.relative_rms(m.scale):.1e} (largest {error.relative_max(m.scale):.1e})"
        for name, error in (("jax", m.jax), ("torch", m.torch))
    )
    return f"in {m.budget.dtype} {' and '.join(sides)} from float64; allowed is {m.budget}"


def finite(value: Any) -> Any:
    """The same with None for what JSON has no number for."""
    if isinstance(value, dict):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
