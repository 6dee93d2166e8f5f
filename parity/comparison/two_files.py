"""Are two files the same function?  Both, whatever their formats, through both twins in float64 on the same images."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any

from rich import box
from rich.table import Table

from parity.checkpoints.weights import Checkpoint
from parity.comparison.amplification import amplified
from parity.comparison.forward_backward import JaxTwin, Run, Subject, TorchTwin, noise
from parity.comparison.localisation import Origin, Part, alone
from parity.comparison.report import finite
from parity.comparison.tolerances import FEW, FUNCTION, JUDGED, Error
from parity.terminal import Terminal
from vit_spec import InputError
from vit_spec.config import FIELDS


@dataclass(frozen=True)
class Report:
    """What `compare_files` found.

    differences: name of an intermediate -> relRMS of the second file from the first, in the PyTorch and the JAX twin.
    origins: parts of the second file that differ though they are fed what the first file's parts are fed.
    config: fields in which the two configs differ.
    tolerance: how far the outputs may differ: 1e-12, or what rounding makes of either file's where that is more.
    """

    differences: dict[str, tuple[float, float]]
    origins: tuple[Origin, ...]
    config: tuple[str, ...]
    tolerance: float = FUNCTION

    @property
    def passed(self) -> bool:
        """Whether the outputs agree to what float64 rounding explains.

        Where that is so much that another function would not show in them, no part may differ on its own either.
        """
        return max(self.differences["logits"]) <= self.tolerance and not (
            self.origins and self.tolerance > JUDGED["float64"]
        )

    @property
    def part(self) -> Part | None:
        """The first part that differs: in itself, where that could be told."""
        if self.passed:
            return None
        if self.origins:
            return self.origins[0].part
        return Part.of(next(n for n, each in self.differences.items() if not max(each) <= FUNCTION), self.differences)

    @property
    def verdict(self) -> str:
        """One line: PASS, or the first part that differs."""
        worst = max(self.differences["logits"])
        if self.passed:
            amplified = f", where rounding explains {self.tolerance:.0e}" if worst > FUNCTION else ""
            return f"PASS: the same function, outputs agree to {worst:.1e} in float64{amplified}"
        others = len({origin.part for origin in self.origins} - {self.part})
        alone = (
            f"by {self.origins[0].error:.1e} though both are fed the same"
            if self.origins
            else "which no part on its own explains"
        )
        more = f", and {others} more do" if others else ""
        return (
            f"FAIL: another function, outputs differ by {worst:.1e} in float64 (bar {self.tolerance:.0e}); "
            f"the first part that differs is {self.part}, {alone}{more}"
        )

    def facts(self) -> dict[str, Any]:
        """Everything, for JSON: numbers that are infinite or nothing are null."""
        first = {"name": str(self.part), **asdict(self.part)} if self.part else None
        found = {
            "passed": self.passed,
            "verdict": self.verdict,
            "tolerance": self.tolerance,
            "first": first,
            "origins": [{**asdict(origin), "place": str(origin.part)} for origin in self.origins],
            "tensors": {name: {"torch": torch, "jax": jax} for name, (torch, jax) in self.differences.items()},
            "configs_differ": list(self.config),
        }
        return dict(finite(found))

    def __str__(self) -> str:
        table = Table(box=box.SIMPLE_HEAD)
        table.add_column("tensor", overflow="fold")
        for twin in ("torch", "jax"):
            table.add_column(twin, justify="right")
        for name, values in self.differences.items():
            table.add_row(name, *(f"{value:.1e}" for value in values))
        console = Terminal(width=100, force_terminal=False)
        with console.capture() as capture:
            console.print(table)
        fields = [f"config: {line}\n" for line in self.config]
        return f"{capture.get()}relRMS of the second file from the first, in float64\n{''.join(fields)}{self.verdict}"


def compare_files(
    first: Checkpoint, second: Checkpoint, *, seed: int = 0, progress: Callable[[str], None] = lambda what: None
) -> Report:
    """Run both files through both twins in float64, and measure where they part.

    Args:
        seed: of the two images, normal noise of the first file's size.
        progress: called with what is being done.

    Raises:
        InputError: models that take other images, or give other outputs.
    """
    a, b = first.config, second.config
    if a.in_channels != b.in_channels:
        raise InputError(f"one takes images of {a.in_channels} channels, the other of {b.in_channels}: nothing to compare")
    images = noise(a, seed)
    subjects = [Subject(checkpoint, images, seed) for checkpoint in (first, second)]
    runs: list[list[Run]] = []
    for turn, subject in zip(("first", "second"), subjects, strict=True):
        progress(f"the {turn} file through both twins")
        runs.append([twin.run(backward=False) for twin in (TorchTwin(subject, "explicit"), JaxTwin(subject))])
    shapes = [run[0].values["logits"].shape for run in runs]
    if shapes[0] != shapes[1]:
        raise InputError(f"one gives outputs of shape {shapes[0]}, the other {shapes[1]}: nothing to compare")
    differences = {
        name: (_relrms(runs[1][0], runs[0][0], name), _relrms(runs[1][1], runs[0][1], name))
        for name, value in runs[0][0].values.items()
        if name != "loss" and name in runs[1][0].values and runs[1][0].values[name].shape == value.shape
    }
    fields = _fields(first, second)
    if max(differences["logits"]) <= FUNCTION:
        return Report(differences, (), fields)
    progress("every part of the second file on its own")
    shared = Run({name: value for name, value in runs[0][0].values.items() if name in differences})
    second_alone = TorchTwin(subjects[1], "explicit").run(backward=False, fed=shared)
    within = Run({name: value for name, value in second_alone.values.items() if name in differences})
    twins = [TorchTwin(subject, "explicit") for subject in subjects]
    rounding = [amplified(twin, "float64", backward=False)["logits"].relative_rms() for twin in twins]
    tolerance = max(FUNCTION, FEW * max(rounding)) if all(map(isfinite, rounding)) else FUNCTION
    parts = alone(shared, within, "torch", amplified(twins[0], "float64", shared, backward=False))
    return Report(differences, parts.origins, fields, tolerance)


def _fields(first: Checkpoint, second: Checkpoint) -> tuple[str, ...]:
    a, b = first.config, second.config
    return tuple(f"{name} is {a.at(name)!r} and {b.at(name)!r}" for name in FIELDS if a.at(name) != b.at(name))


def _relrms(found: Run, expected: Run, name: str) -> float:
    return Error.of(found.values[name], expected.values[name]).relative_rms()
