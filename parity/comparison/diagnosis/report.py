"""The result of a diagnosis, as text and as JSON."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from vit_spec.finite_json import replace_non_finite

MAX_CAUSES = 5  # causes that are printed with their fix, if the outputs cannot distinguish them


@dataclass(frozen=True)
class Cause:
    """One or two causes that make the outputs match, or nearly match.

    names, families: the name and the family of each cause.
    error: relRMS of the outputs from the expected ones once the causes are applied.
    remedy: the command that fixes the checkpoint, or an instruction.
    """

    names: tuple[str, ...]
    families: tuple[str, ...]
    error: float
    remedy: str

    def __str__(self) -> str:
        return ", and ".join(self.names)

    def facts(self) -> dict[str, Any]:
        """Return all values, for JSON."""
        return {
            "names": list(self.names),
            "families": list(self.families),
            "difference": self.error,
            "remedy": self.remedy,
        }


@dataclass(frozen=True)
class Diagnosis:
    """The result of `diagnose`; `str` gives the report.

    matched: the causes that make the outputs match; several if these images cannot distinguish them.
    before: relRMS of the outputs of the unchanged model.
    tolerance: the largest relRMS at which outputs match.
    dtype: the narrowest dtype that represents the expected outputs exactly; the tolerance follows from it.
    outputs: how many values were compared.
    tried: how many models were run.
    pairs: how many pairs of causes there are.
    runners_up: the causes with the smallest errors that do not match but explain at least half of the squared error.
    apart: if several causes match, a sentence that says whether other images would distinguish them.
    suspect: a sentence that names the first layer that differs, or the likeliest.
    disagreement: a sentence that names the first intermediate that still differs once the first match is applied; if there
        is no match, the first of `runners_up`, whose outputs match but not its intermediates.
    caveat: why these images may mislead, or "".
    evidence: a line for each field and parameter that differs from the other checkpoint.
    precision: the precision of the expected outputs, and the rounding that explains the remaining difference.
    remarks: notes on how the expected outputs were read, and hints.
    discarded: causes that could not be run, each with the exception.
    possible_rounding: the rounding that may cause the remaining difference, or "" if the difference is negligible.
    decided_by: what would tell this rounding from a fault.
    """

    matched: tuple[Cause, ...]
    before: float
    tolerance: float
    dtype: str
    outputs: int
    tried: int
    pairs: int
    runners_up: tuple[Cause, ...]
    apart: str = ""
    suspect: str = ""
    disagreement: str = ""
    caveat: str = ""
    evidence: tuple[str, ...] = ()
    precision: str = ""
    remarks: tuple[str, ...] = ()
    discarded: tuple[str, ...] = ()
    possible_rounding: str = ""
    decided_by: str = "float64 outputs and intermediates such as patch_embed and blocks.0"

    @property
    def passed(self) -> bool:
        """Whether the outputs of the unchanged model match, and the expected intermediates too."""
        return self.before <= self.tolerance and not self.suspect

    @property
    def after(self) -> float:
        """relRMS of the outputs once the first match is applied."""
        return self.matched[0].error if self.matched else self.before

    @property
    def remedy(self) -> str:
        """The fix for the first match."""
        return self.matched[0].remedy if self.matched else ""

    @property
    def verdict(self) -> str:
        """The answer in one line: MATCH, FOUND with the cause, or UNKNOWN, with the nearest cause if one comes near."""
        return f"{self._answer()}; but {self.caveat}" if self.caveat and (self.passed or self.matched) else self._answer()

    def _answer(self) -> str:
        tolerance = f"tolerance {self.tolerance:.0e}, expected outputs are {self.dtype}"
        agreement = f"{self.outputs} outputs agree to {self.before:.1e}"
        if self.before <= self.tolerance and self.suspect:
            return f"UNKNOWN: {agreement} ({tolerance}), but intermediates differ: {self.suspect}"
        if self.passed and not self.matched and self.possible_rounding:
            return (
                f"MATCH: {agreement}, which is within what {self.possible_rounding} could cause ({tolerance}); a fault of "
                f"this size could too: {self.decided_by} would decide"
            )
        if self.passed and not self.matched:
            return f"MATCH: {'' if self.caveat else 'nothing is wrong, '}{agreement} ({tolerance})"
        if self.passed:
            return (
                f"MATCH: the outputs agree to {self.before:.1e} ({tolerance}); the remaining difference: {self.matched[0]}"
            )
        if not self.matched and self.disagreement:
            nearest = self.runners_up[0]
            return (
                f"UNKNOWN: {nearest} would explain the outputs, relRMS {self.before:.1e} before and "
                f"{nearest.error:.1e} after ({tolerance}), but not the intermediates: with it, {self.disagreement}"
            )
        if not self.matched:
            hint = (
                f"; nearest cause: {self.runners_up[0]} (relRMS {self.runners_up[0].error:.1e})" if self.runners_up else ""
            )
            return f"UNKNOWN: no known cause makes the outputs match; relRMS {self.before:.1e} ({tolerance}){hint}"
        n = len(self.matched) - 1
        others = (
            f", or {f'one of {n} others' if n > 1 else 'another'} that these images cannot tell apart from it" if n else ""
        )
        errors = f"relRMS {self.before:.1e} before, {self.after:.1e} after ({tolerance})"
        left = f"; but intermediates still differ, by another fault: {self.disagreement}" if self.disagreement else ""
        return f"FOUND: {self.matched[0]}{others}; {errors}{left}"

    def facts(self) -> dict[str, Any]:
        """Return everything for JSON; infinite numbers and NaN become null."""
        found = {
            "passed": self.passed,
            "verdict": self.verdict,
            "difference_before": self.before,
            "difference_after": self.after,
            "tolerance": self.tolerance,
            "dtype": self.dtype,
            "causes": [cause.facts() for cause in self.matched],
            "runners_up": [cause.facts() for cause in self.runners_up],
            "ambiguity": self.apart,
            "suspect": self.suspect,
            "disagreement": self.disagreement,
            "caveat": self.caveat,
            "evidence": self.evidence,
            "precision": self.precision,
            "possible_rounding": self.possible_rounding,
            "notes": self.remarks,
            "discarded": self.discarded,
            "outputs_compared": self.outputs,
            "models_run": self.tried,
            "pairs_of_causes": self.pairs,
        }
        return dict(replace_non_finite(found))

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield from (f"note: {remark}" for remark in self.remarks)
        yield from (f"evidence: {line}" for line in self.evidence)
        for cause in self.matched[:MAX_CAUSES]:
            yield f"cause: {cause} (relRMS {cause.error:.1e})"
            for line in cause.remedy.splitlines():
                yield f"  fix: {line}"
        if others := self.matched[MAX_CAUSES:]:
            yield f"or: {'; or '.join(map(str, others))}"
        if self.apart:
            yield f"note: {self.apart}"
        if self.suspect and not self.passed:
            yield f"suspect: {self.suspect}"
        if not self.passed:
            yield from (f"runner-up: {cause} (relRMS {cause.error:.1e})" for cause in self.runners_up[:3])
            pairs = f"; there are {self.pairs:,} pairs of causes" if self.pairs else ""
            if self.discarded:
                yield f"note: {len(self.discarded)} causes could not be run, the first: {self.discarded[0]}"
            yield f"{self.tried:,} models run, {self.outputs:,} outputs compared{pairs}"
        if self.precision:
            yield f"precision: {self.precision}"
        yield self.verdict
