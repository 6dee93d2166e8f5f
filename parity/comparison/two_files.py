"""Compare the functions of two checkpoints in any formats: both run in both twins in float64 on the same images."""

import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf, isfinite
from typing import Any, Literal

import numpy as np
from rich import box
from rich.table import Table

from parity.checkpoints.layout import Array
from parity.checkpoints.surgery import drop_head
from parity.checkpoints.weights import Checkpoint
from parity.comparison.amplification import measure_rounding_errors
from parity.comparison.forward_backward import JaxTwin, PassInputs, PassResult, TorchTwin, check_finite, noise_images
from parity.comparison.localisation import Origin, Part, check_in_isolation, merge_names, swap_bisection
from parity.comparison.progress import StepProgress
from parity.comparison.tolerances import AMPLIFIED_ERROR_FACTOR, FLOAT64_TOLERANCE, MAX_TOLERANCE, ErrorNorms
from parity.terminal import Terminal
from vit_spec import InputError, ViTConfig
from vit_spec.config import FIELDS
from vit_spec.finite_json import replace_non_finite
from vit_spec.missing_packages import require_packages

Shape = tuple[int, ...]

_CONSTANT_OUTPUTS = "the classifier gives the same outputs for all images, so the features before it were compared"


@dataclass(frozen=True)
class FileReport:
    """Result of `compare_files`; `print` shows it as a table with a verdict.

    differences: name of an intermediate -> relRMS of the second file, with the first as reference, in the PyTorch and in
        the JAX twin.
    origins: parts of the second file that differ although they take the inputs of the first file's parts, and the first of
        `uncompared`.
    harmless: the first `harmless` origins do not change the outputs, such as hidden units in another order.
    uncompared: name of an intermediate that has another shape in the second file, or that only one file has -> its shape in
        the first and in the second file, None where it is missing; in the order of computation.
    config: fields in which the two configs differ.
    limits: differences of the configs that the compared images cannot show, one clause for each.
    image_size: (height, width) of the compared images.
    before_classifier: whether the models were run without their classifiers, which give the same outputs for all images, as
        new ones of zeros do.  The outputs are then the features.
    tolerance: largest allowed relRMS of the outputs: 1e-12, or 12 times the measured rounding errors of either file.
    """

    differences: dict[str, tuple[float, float]]
    origins: tuple[Origin, ...]
    config: tuple[str, ...]
    tolerance: float = FLOAT64_TOLERANCE
    harmless: int = 0
    uncompared: Mapping[str, tuple[Shape | None, Shape | None]] = field(default_factory=dict)
    limits: tuple[str, ...] = ()
    image_size: tuple[int, int] = (0, 0)
    before_classifier: bool = False

    @property
    def passed(self) -> bool:
        """Whether the outputs agree within the tolerance.

        If the tolerance is so wide that it could hide another function, no part may differ in isolation either.
        """
        return max(self.differences["logits"]) <= self.tolerance and not (
            self.origins and self.tolerance > MAX_TOLERANCE["float64"]
        )

    @property
    def part(self) -> Part | None:
        """The first part that differs: in isolation if such a part was found, otherwise in the whole model.

        Parts that do not change the outputs are left out.  None if the files pass.
        """
        if self.passed:
            return None
        if self.origins:
            return self.origins[self.harmless].part
        return Part.of(
            next(n for n, each in self.differences.items() if not max(each) <= FLOAT64_TOLERANCE), self.differences
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """What the comparison cannot show, one clause for each."""
        return (*self.limits, *([_CONSTANT_OUTPUTS] if self.before_classifier else []))

    @property
    def verdict(self) -> str:
        """The verdict in one line: PASS, or FAIL and the first part that differs."""
        worst, where, what = max(self.differences["logits"]), "", "outputs"
        if self.before_classifier:
            where, what = " before the classifier", "features"
        if self.passed:
            rounding = f", within the measured rounding errors of {self.tolerance:.0e}" if worst > FLOAT64_TOLERANCE else ""
            height, width = self.image_size
            images = f" of normalized images of {height}x{width}" if self.limits else ""
            notes = "".join(f"; {note}" for note in self.notes)
            return f"PASS: the same function{images}, {what} agree to {worst:.1e} in float64{rounding}{notes}"
        earlier = len({origin.part for origin in self.origins[: self.harmless]})
        later = {origin.part for origin in self.origins[self.harmless :]} - {self.part}
        others, block = len(later), _block(self.part)
        difference = (
            self._describe(self.origins[self.harmless]) if self.origins else "although no part differs on the same inputs"
        )
        more = f"; {others} further part{'s differ' if others > 1 else ' differs'}" if others else ""
        if block and any(_block(part) == block for part in later):
            more += f", and within {block} some may not change the outputs"
        if earlier:
            more += f"; {earlier} earlier part{'s differ' if earlier > 1 else ' differs'} without changing the {what}"
        if self.before_classifier:
            more += f"; {_CONSTANT_OUTPUTS}"
        return (
            f"FAIL: another function{where}, {what} differ by {worst:.1e} in float64 (tolerance {self.tolerance:.0e}); "
            f"the first part that differs is {self.part}, {difference}{more}"
        )

    def _describe(self, origin: Origin) -> str:
        """Return how an origin differs, as the relative clause or the amount that follows its name."""
        if origin.name not in self.uncompared:
            return f"by {origin.error:.1e} on the same inputs"
        first, second = self.uncompared[origin.name]
        if first and second:
            return f"which has another shape: {first} and {second}"
        return f"which only the {'first' if first else 'second'} file has"

    def facts(self) -> dict[str, Any]:
        """Return everything for JSON; infinite numbers and NaN become null."""
        found = {
            "passed": self.passed,
            "verdict": self.verdict,
            "tolerance": self.tolerance,
            "first_part": self.part.facts() if self.part else None,
            "origins": [origin.facts() for origin in self.origins],
            "harmless_origins": self.harmless,
            "tensors": [{"name": name, "jax": jax, "torch": torch} for name, (torch, jax) in self.differences.items()],
            "uncompared": {name: {"first": first, "second": second} for name, (first, second) in self.uncompared.items()},
            "config_differences": list(self.config),
            "notes": list(self.notes),
        }
        return dict(replace_non_finite(found))

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
        lines = [f"config: {line}\n" for line in self.config]
        if count := len(self.uncompared):
            what = "1 tensor was" if count == 1 else f"{count} tensors were"
            lines.insert(0, f"{what} not compared: of another shape, or in one file only\n")
        return f"{capture.get()}relRMS of the second file from the first, in float64\n{''.join(lines)}{self.verdict}"


def _block(part: Part | None) -> str:
    """Return the block of a part, such as "blocks.3", or "" for a part outside the blocks."""
    return ".".join(part.module.split(".")[:2]) if part and part.module.startswith("blocks.") else ""


def compare_files(
    first: Checkpoint,
    second: Checkpoint,
    *,
    sources: tuple[str, str] = ("SRC", "OTHER"),
    seed: int = 0,
    progress: StepProgress = lambda what: None,
) -> FileReport:
    """Run two checkpoints in both twins in float64, and find the parts where they differ.

    If the outputs agree and are the same for all images, the models are compared without their classifiers.

    Args:
        first, second: the checkpoints, in any formats.
        sources: the names of their files, for messages.
        seed: seed of the two images of normal noise, which have the image size of the first config.
        progress: called with a description of each step when it begins.

    Raises:
        InputError: a framework is not installed, the models have different input channels or shapes of outputs, or one
            computes NaN or infinities.
    """
    a, b = first.config, second.config
    if a.in_channels != b.in_channels:
        raise InputError(
            f"one model takes images of {a.in_channels} channels, the other of {b.in_channels}: "
            "give two that take the same images"
        )
    require_packages("the comparison runs both twins", "jax", "flax", "torch")
    images = noise_images(a, seed)
    inputs = [PassInputs(checkpoint, images, seed) for checkpoint in (first, second)]
    runs: list[list[PassResult]] = []
    for ordinal, source, each in zip(("first", "second"), sources, inputs, strict=True):
        progress(f"the {ordinal} file in both twins")
        runs.append(_run_both_twins(each, source))
    shapes = [run[0].values["logits"].shape for run in runs]
    if shapes[0] != shapes[1]:
        raise InputError(
            f"one model gives outputs of shape {shapes[0]}, the other of {shapes[1]}: give two with outputs of one shape"
        )
    differences, uncompared = _differences(*runs)
    report = FileReport(
        differences,
        (),
        _differing_fields(first, second),
        uncompared=uncompared,
        limits=tuple(_limits(a, b)),
        image_size=a.image_size,
    )
    if max(differences["logits"]) <= FLOAT64_TOLERANCE:
        if a.num_classes and b.num_classes and _is_constant(runs[0][0].values["logits"]):
            (first, _), (second, _) = drop_head(first), drop_head(second)
            features = compare_files(first, second, sources=sources, seed=seed, progress=progress)
            return replace(features, before_classifier=True)
        return report
    progress("every part of the second file in isolation")
    twins = [TorchTwin(each, "explicit") for each in inputs]
    of_torch = [run[0] for run in runs]
    tolerance = _amplified_tolerance(twins)
    origins = _find_origins(twins, of_torch, differences, uncompared, progress)
    harmless = 0
    if max(differences["logits"]) > tolerance and origins:
        progress("the first stage that changes the outputs")
        names = merge_names(*(run.values for run in of_torch))
        harmless = _count_harmless(origins, of_torch[0], of_torch[1], twins[0], names, set(differences), tolerance)
    return replace(report, origins=tuple(origins), tolerance=tolerance, harmless=harmless)


def _run_both_twins(inputs: PassInputs, source: str) -> list[PassResult]:
    """Return the passes of the PyTorch and of the JAX twin; raise InputError if one computes NaN or infinities."""
    runs = []
    for twin in (TorchTwin(inputs, "explicit"), JaxTwin(inputs)):
        runs.append(twin.run(backward=False))
        check_finite(runs[-1], f"the model of {source}", shlex.quote(source))
    return runs


def _is_constant(outputs: Array) -> bool:
    """Return whether all images have the same outputs."""
    expected = np.broadcast_to(outputs[:1], outputs.shape)
    return ErrorNorms.of(outputs, expected).relative_rms() <= FLOAT64_TOLERANCE


def _differences(
    first: Sequence[PassResult], second: Sequence[PassResult]
) -> tuple[dict[str, tuple[float, float]], dict[str, tuple[Shape | None, Shape | None]]]:
    """Return the `differences` and the `uncompared` of a `FileReport`.

    first, second: the passes of each file in the PyTorch and in the JAX twin.
    """
    (torch, jax), (other_torch, other_jax) = first, second
    differences = {
        name: (_relrms(other_torch, torch, name), _relrms(other_jax, jax, name))
        for name, value in torch.values.items()
        if name != "loss" and name in other_torch.values and other_torch.values[name].shape == value.shape
    }
    uncompared = {
        name: (_shape(torch, name), _shape(other_torch, name))
        for name in merge_names(torch.values, other_torch.values)
        if name not in differences and name != "loss"
    }
    return differences, uncompared


def _amplified_tolerance(twins: Sequence[TorchTwin]) -> float:
    """Return the tolerance of the outputs: `FLOAT64_TOLERANCE`, or more where a file amplifies rounding errors."""
    rounding = [measure_rounding_errors(twin, "float64", backward=False)["logits"].relative_rms() for twin in twins]
    amplified = AMPLIFIED_ERROR_FACTOR * max(rounding) if all(map(isfinite, rounding)) else 0.0
    return max(FLOAT64_TOLERANCE, amplified)


def _find_origins(
    twins: Sequence[TorchTwin],
    runs: Sequence[PassResult],
    compared: Collection[str],
    uncompared: Mapping[str, tuple[Shape | None, Shape | None]],
    progress: StepProgress,
) -> list[Origin]:
    """Return the parts of the second file that differ on the inputs of the first file's parts; see `FileReport.origins`.

    Args:
        twins: the PyTorch twins of both files.
        runs: their passes.
        compared: names of the intermediates that both files have, in one shape.
        uncompared: all others, with their shapes.
        progress: see `compare_files`.
    """
    shared = PassResult({name: value for name, value in runs[0].values.items() if name in compared})
    isolated = twins[1].run(backward=False, inputs_from=shared)
    local = PassResult({name: value for name, value in isolated.values.items() if name in compared})
    parts = check_in_isolation(shared, local, "torch", measure_rounding_errors(twins[0], "float64", shared, backward=False))
    if not uncompared:
        return list(parts.origins)
    progress("the parts that have other inputs in the two files")
    passes = zip(twins, (runs[0], isolated), strict=True)
    unequal = {name for twin, run in passes for name in _readers_of_uncompared(twin, run, shared)}
    order = merge_names(*(run.values for run in runs))
    name = next(iter(uncompared))
    reason: Literal["missing", "shape"] = "missing" if None in uncompared[name] else "shape"
    origins = [origin for origin in parts.origins if origin.name not in unequal]
    origins.append(Origin(name, Part.of(name, order), inf, "torch", reason))
    return sorted(origins, key=lambda origin: order.index(origin.name))


def _readers_of_uncompared(twin: TorchTwin, run: PassResult, shared: PassResult) -> set[str]:
    """Return the names of the parts that read an intermediate that `shared` lacks.

    The twins record no inputs of parts, so noise replaces these intermediates: the parts whose results change read them.

    Args:
        twin: the twin of one file.
        run: its pass, with the inputs of `shared`.
        shared: the intermediates of both files.
    """
    rng = np.random.default_rng(0)
    noise = {
        name: value + rng.standard_normal(value.shape) * (1 + np.abs(value).max(initial=0.0))
        for name, value in run.values.items()
        if name not in shared.values
    }
    changed = twin.run(backward=False, inputs_from=PassResult({**shared.values, **noise}))
    return {name for name in shared.values if not _relrms(changed, run, name) <= FLOAT64_TOLERANCE}


def _count_harmless(
    origins: Sequence[Origin],
    first: PassResult,
    second: PassResult,
    twin: TorchTwin,
    names: list[str],
    compared: set[str],
    tolerance: float,
) -> int:
    """Return the number of origins before the first stage whose result in the second file changes the outputs.

    A part may differ without changing the outputs: hidden units or heads in another order, which later weights undo.

    Args:
        origins: the parts that differ, in the order of computation.
        first, second: the passes of both files.
        twin: the twin of the first file.
        names: names of the intermediates of either file, in the order of computation.
        compared: those that both files have, in one shape.
        tolerance: largest allowed relRMS of the outputs.

    Returns:
        The number; 0 if the stages of the files do not correspond, or no origin is in that stage or later.
    """
    depth = twin.inputs.config.depth
    stages = ["embed", *(f"blocks.{i}" for i in range(depth)), "outputs"]
    if not set(stages[:-1]) <= compared or f"blocks.{depth}" in second.values:
        return 0
    wrong = stages.index(swap_bisection(first, second, twin, depth, tolerance).stage)
    earlier = names[: names.index(stages[wrong - 1]) + 1] if wrong else []
    count = sum(origin.name in earlier for origin in origins)
    if count in (0, len(origins)):
        return 0
    # All blocks use a table of rotary positions, so the end of a stage alone does not show its effect.
    swapped = PassResult({name: second.values[name] for name in earlier if name in compared})
    return count if _relrms(twin.run(backward=False, inputs_from=swapped), first, "logits") <= tolerance else 0


def _differing_fields(first: Checkpoint, second: Checkpoint) -> tuple[str, ...]:
    a, b = first.config, second.config
    return tuple(f"{name} is {a.at(name)!r} and {b.at(name)!r}" for name in FIELDS if a.at(name) != b.at(name))


def _limits(a: ViTConfig, b: ViTConfig) -> Iterator[str]:
    """Yield a clause for the differences that show only on pictures, and one for those on images of another size."""
    pictures = [  # a single mean or std is for all channels
        name
        for name in ("pixels.mean", "pixels.std")
        if not np.array_equal(np.broadcast_to(a.at(name), a.in_channels), np.broadcast_to(b.at(name), b.in_channels))
    ]
    if a.image_size != b.image_size:
        pictures.append("image_size")
    if pictures:
        yield f"{_enumerate(pictures)}, so the same picture gives other outputs"
    sizes = [name for name in _fields_of_other_sizes(a, b) if a.at(name) != b.at(name)]
    if sizes:
        yield f"{_enumerate(sizes)}, so images of another size may give other outputs"


def _fields_of_other_sizes(a: ViTConfig, b: ViTConfig) -> Iterator[str]:
    """Yield the fields in which models may differ that agree on images of one size, but not on those of another size.

    Position embeddings may agree on one grid of patches, such as a learned table with the values of the fixed one.  Initial
    values of parameters and options that neither model uses are left out.
    """
    positions = (a.positions, b.positions)
    unused: set[str] = set()
    if not all(each.kind == "fixed" for each in positions):
        unused.add("positions.table")
    if all(each.rotary in ("none", "mixed") for each in positions):  # "mixed" has only its initial values from the base
        unused.add("positions.rotary_base")
    for name in FIELDS:
        group, _, option = name.partition(".")
        if group == "tokens" and option in ("pad", "crop"):
            yield name
        elif group == "positions" and option != "covers" and name not in unused:
            yield name
        elif group == "resampling" and any(each.kind == "learned" for each in positions):
            yield name


def _enumerate(names: list[str]) -> str:
    return f"{' and '.join(names)} {'differ' if len(names) > 1 else 'differs'}"


def _shape(run: PassResult, name: str) -> Shape | None:
    return run.values[name].shape if name in run.values else None


def _relrms(found: PassResult, expected: PassResult, name: str) -> float:
    return ErrorNorms.of(found.values[name], expected.values[name]).relative_rms()
