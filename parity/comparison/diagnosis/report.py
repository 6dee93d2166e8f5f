"""What a diagnosis came to, in words and for machines."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

SHOWN = 5  # causes that the outputs do not tell apart, with what to do about each


@dataclass(frozen=True)
class Cause:
    """What makes the outputs match, or what comes near.

    names, families: of the one cause, or of the two.
    error: relRMS of the outputs from the expected ones, with the cause taken into account.
    remedy: a command, or what to correct.
    """

    names: tuple[str, ...]
    families: tuple[str, ...]
    error: float
    remedy: str

    def __str__(self) -> str:
        return ", and ".join(self.names)


@dataclass(frozen=True)
class Diagnosis:
    """What `diagnose` found; print it.

    matched: the causes that make the outputs match; several where these images cannot tell them apart.
    before: relRMS of the outputs as they are.
    bar: relRMS within which they match.
    dtype: the narrowest type that holds the expected outputs, of which the bar follows.
    outputs: how many numbers were compared.
    tried, pairs: how many models were run, and how many pairs of causes there are.
    runners_up: the nearest that do not match.
    apart: what would tell several matches apart.
    suspect: the first layer that differs, or that is suspected.
    evidence: how single parameters differ from those of the other model.
    precision: how precise the expected outputs are, and what explains the difference that is left.
    remarks: how the expected outputs were read, and hints.
    discarded: causes that could not be run, each with the reason.
    """

    matched: tuple[Cause, ...]
    before: float
    bar: float
    dtype: str
    outputs: int
    tried: int
    pairs: int
    runners_up: tuple[Cause, ...]
    apart: str = ""
    suspect: str = ""
    evidence: tuple[str, ...] = ()
    precision: str = ""
    remarks: tuple[str, ...] = ()
    discarded: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether the outputs match as they are."""
        return self.before <= self.bar

    @property
    def after(self) -> float:
        """relRMS with the first match taken into account."""
        return self.matched[0].error if self.matched else self.before

    @property
    def remedy(self) -> str:
        """What to do about the first match."""
        return self.matched[0].remedy if self.matched else ""

    @property
    def verdict(self) -> str:
        """One line: the cause, or that there is none, or that none was found."""
        bar = f"tolerance {self.bar:.0e}, expected outputs are {self.dtype}"
        if self.passed and not self.matched:
            return f"MATCH: nothing is wrong, {self.outputs} outputs agree to {self.before:.1e} ({bar})"
        if self.passed:
            return f"MATCH: the outputs agree to {self.before:.1e} ({bar}), and part since {self.matched[0]}"
        if not self.matched:
            near = f"; the nearest is that {self.runners_up[0]}, {self.runners_up[0].error:.1e}" if self.runners_up else ""
            return f"UNKNOWN: no cause makes the outputs match, they differ by {self.before:.1e} ({bar}){near}"
        others = f", or one of {len(self.matched) - 1} that these images do not tell from it" if self.matched[1:] else ""
        return f"FOUND: {self.matched[0]}{others}; relRMS {self.before:.1e} before, {self.after:.1e} after ({bar})"

    def facts(self) -> dict[str, Any]:
        """Everything, as JSON holds it."""
        return {**asdict(self), "passed": self.passed, "after": self.after, "verdict": self.verdict}

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield from (f"note: {remark}" for remark in self.remarks)
        yield from (f"evidence: {line}" for line in self.evidence)
        for each in self.matched[:SHOWN]:
            yield f"cause: {each} (relRMS {each.error:.1e})"
            yield f"  fix: {each.remedy}"
        if more := self.matched[SHOWN:]:
            yield f"or: {'; or '.join(map(str, more))}"
        if self.apart:
            yield f"note: {self.apart}"
        if self.suspect and not self.passed:
            yield f"suspect: {self.suspect}"
        if not self.passed:
            yield from (f"runner-up: {each} (relRMS {each.error:.1e})" for each in self.runners_up[:3])
            pairs = f"; of causes there are {self.pairs:,} pairs" if self.pairs else ""
            if self.discarded:
                yield f"note: {len(self.discarded)} causes could not be run, the first: {self.discarded[0]}"
            yield f"{self.tried:,} models run, {self.outputs:,} outputs compared{pairs}"
        if self.precision:
            yield f"precision: {self.precision}"
        yield self.verdict
